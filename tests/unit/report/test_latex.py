"""A comparison in LaTeX: whole tables, numbers as formulas, and names that LaTeX prints as they are."""

import re
from typing import Any

import pytest

from dpfl.report.latex import escaped, table


def mean(value: float | None, error: float | None = 0.5) -> dict[str, Any]:
    return {"mean": value, "standard_error": error}


def system(label: str, **changes: Any) -> dict[str, Any]:
    promise = {"unit": "record", "neighbours": "add-remove", "epsilon": 1.4, "delta": 1e-3, "true_epsilon": 1.4}
    return {
        "label": label, "neighbours": "replace", "true_epsilon": 2.98765, "apart": None, "claimed": {}, "searched": {},
        "promise": promise, "rounds": mean(15.0), "accuracy": mean(0.671), "loss": mean(1.341),
    } | changes  # fmt: skip


def comparison(*systems: dict[str, Any], seeds: int = 3) -> dict[str, Any]:
    return {"neighbours": "replace", "seeds": seeds, "systems": list(systems)}


FREE = system("fedavg", neighbours=None, true_epsilon=None, promise=None)


def test_the_whole_table() -> None:
    assert table(comparison(system("ali_dpfl"), FREE)).splitlines() == [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\small",
        r"\caption{Mean $\pm$ standard error over 3 seeds; true $\varepsilon$ at $\delta$ = 0.001 against the server,"
        r" for one record, replaced by any other.}",
        r"\medskip",
        r"\setlength{\tabcolsep}{4pt}",
        r"\begin{tabular}{@{}llrrrrr@{}}",
        r"\toprule",
        r" & promises & claimed $\varepsilon$ & true $\varepsilon$ & rounds & accuracy in \% & loss \\",
        r"\midrule",
        r"ali\_dpfl & record, add-remove & 1.4 & 2.988 & $15.0 \pm 0.5$ & $67.1 \pm 50.0$ & $1.341 \pm 0.500$ \\",
        r"\midrule",
        r"\multicolumn{7}{@{}l@{}}{\emph{not comparable with these: no price in that currency;"
        r" true $\varepsilon$ as each promises it}} \\",
        r"fedavg & nothing & -- & $\infty$ & $15.0 \pm 0.5$ & $67.1 \pm 50.0$ & $1.341 \pm 0.500$ \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


@pytest.mark.parametrize(
    ("systems", "rules"),
    [([system("udp")], 1), ([FREE], 1), ([system("udp"), FREE], 2), ([system("udp"), system("nbafl")], 1)],
)
def test_no_rule_without_rows_below_it(systems: list[dict[str, Any]], rules: int) -> None:
    text = table(comparison(*systems))
    assert text.count(r"\midrule") == rules
    assert "\\midrule\n\\bottomrule" not in text
    assert ("against the server" in text) == any(one["neighbours"] for one in systems)  # of nothing there is no price


def test_one_seed_has_no_error_and_what_nobody_measured_is_a_dash() -> None:
    lone = system("udp", rounds=mean(15.0, None), accuracy=mean(None, None), loss=mean(1.0, None))
    text = table(comparison(lone, seeds=1))
    assert r"& 15.0 & -- & 1.000 \\" in text
    assert r"\caption{One training each; true" in text


HOSTILE = r"a\input{/etc/passwd} $x$ & b % c_d #1 ^~ <e> 1 ± 2"


def unescaped(text: str) -> list[str]:
    """Return what LaTeX would take for its own in a text: all that is special, but for what escapes it."""
    allowed = r"\\text(?:backslash|asciicircum|asciitilde|less|greater)\{\}|\\[{}$&#%_]|\$\\pm\$"
    return re.findall(r"[\\{}$&#%_^~<>]", re.sub(allowed, "", text))


def test_a_hostile_name_is_printed_as_it_is() -> None:
    (line,) = (line for line in table(comparison(system(HOSTILE))).splitlines() if "passwd" in line)
    name = line.split(" & record")[0]
    assert unescaped(name) == []
    assert line.replace(r"\&", "").count("&") == 6  # cells stay cells
    assert name == escaped(HOSTILE)


def test_a_name_that_is_left_as_it_is_would_be_noticed() -> None:
    assert unescaped("my_udp") == ["_"]
    assert unescaped(HOSTILE)[:2] == ["\\", "{"]
