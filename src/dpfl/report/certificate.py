"""A certificate on one screen, in words: ours, and beside them those of the field (docs/glossary.md)."""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dpfl.report.tables import aligned
from dpfl.rounding import rounded_up

_WIDTH = 120
_PROTECTED = {
    ("record", "replace"): "one record of one client (replaced by any other: replace-one adjacency)",
    ("record", "add-remove"): "one record of one client (added or removed: add-or-remove adjacency)",
    ("client", "replace"): "all records of one client (replaced by any others: client level, replace-one adjacency)",
    ("client", "add-remove"): "all records of one client (added or removed: client level, add-or-remove adjacency)",
}
_BASES = {"server": "the clipping performed", "uplink": "the same, overheard", "released": "the same, no collusion"}
_SIMULATED = {
    "seed": "whoever knows the seed can subtract the noise",
    "a fast sampler": "last bits of noise that is drawn fast may tell what it hides",
}
_SHORT = {"server": "to the server", "uplink": "to an eavesdropper"}
_MOST_SITES = 20  # a screen can hold
_UNTRUSTED = {"uplink": "eavesdroppers", "released": "readers of the models (central DP)"}

Statement = tuple[str, str]  # a label, and what is said under it
ObserverRow = tuple[str, list[str], list[str], str]  # against whom, what is promised and spent (in parts), from what


def text(certificate: dict[str, Any]) -> str:
    """Print a certificate (its plain data) on one screen, in words."""
    training, config = subject(certificate)
    above, below = statements(certificate)
    above = [("Privacy certificate", f"{training:<70} {config}"), *above]
    tables = [*_table(certificate), *(aligned(rows).splitlines() if (rows := sites(certificate)) else [])]
    return "\n".join([*(_line(*said) for said in above), *tables, *(_line(*said) for said in below)])


def subject(certificate: dict[str, Any]) -> tuple[str, str]:
    """Say what training a certificate is about, and by which config where that is known."""
    calibration = f"{certificate['calibration']} calibration, " if certificate["calibration"] else ""
    training = f"{certificate['system']}, {calibration}{certificate['clients']} clients, {certificate['rounds']} rounds"
    return training, f"config {certificate['config']}" if certificate["config"] else ""


def statements(certificate: dict[str, Any]) -> tuple[list[Statement], list[Statement]]:
    """Return what is said above the table of observers, and what below it."""
    if certificate["claimed"] is None:
        above = [("protects", "nothing: uploads carry no noise, and no finite ε holds against the server")]
        below = [("left uncounted", "; ".join(certificate["uncounted"])), *_held_out(certificate)]
        return above, [*below, *_ledger(certificate)]
    above = [
        ("protects", _PROTECTED[certificate["unit"], certificate["neighbours"]]),
        ("trust model", _trust(certificate["against"])),
    ]
    below = [
        ("left uncounted", "; ".join(certificate["uncounted"]) or "nothing"),
        *_held_out(certificate),
        ("not promised", "anything about who took part, how many records a client holds, or people whose records"),
        ("", "sit at several clients; anything against whoever reads a client's own machine"),
    ]
    if certificate.get("allowed_more"):
        below.append(("counted", "all that was allowed; less happened, but when it ends can tell what was seen"))
    source = certificate["noise_source"]
    if source not in ("operating system", *_SIMULATED):
        below.append(("not vouched for", f"the noise, which was drawn by {source}"))
    below += _ledger(certificate)
    return above, below + [("caution", caution) for caution in certificate["cautions"]]


def _held_out(certificate: dict[str, Any]) -> list[Statement]:
    """Say whose records trained nothing and are reported on as they are."""
    held_out = certificate.get("held_out")
    return [] if held_out is None else [("not protected", f"{held_out}: what is reported about them has no noise")]


def sites(certificate: dict[str, Any]) -> list[list[str]]:
    """Return a table of what each client that has a name was promised and has spent; empty where none has."""
    spending = certificate["spending"]
    if not any(line.get("name") for line in spending):
        return []
    promised_to = [observer for observer in certificate["observers"] if observer in certificate["against"]]
    rows = [["site", "uploads", "promised", *(f"spent, {_SHORT[observer]}" for observer in promised_to)]]
    for line in spending[:_MOST_SITES]:
        spent = (f"ε ≤ {rounded_up(line[f'{observer}_epsilon'])}" for observer in promised_to)
        budget = f"ε = {line['claimed_epsilon']:g}, δ = {line['delta']:g}"
        rows.append([f"  {line['name']}", str(line["replies"]), budget, *spent])
    if len(spending) > _MOST_SITES:
        rows.append([f"  … and {len(spending) - _MOST_SITES} more", *[""] * (len(rows[0]) - 1)])
    return rows


def _ledger(certificate: dict[str, Any]) -> list[Statement]:
    """Say what all runs of the ledger cost together, or that nobody was protected; and how to know the ledger again."""
    lines, source = [], certificate["noise_source"]
    seeded = source is not None and certificate.get("together", source) is None  # whoever drew under the seed
    if source in _SIMULATED or seeded:
        why = _SIMULATED.get(source, _SIMULATED["seed"])
        lines.append(("a simulation", f"nobody's records were protected here: {why}"))
    if (whole := certificate.get("together")) is not None:
        lines.append(("all together", together(whole)))
    if head := certificate.get("head"):
        lines.append(("ledger head", f"{head[:32]}; whoever keeps it notices books that were changed since"))
    return lines


def together(whole: dict[str, Any]) -> str:
    """Say what all runs of a ledger cost the same people."""
    runs = "the only run on these people" if whole["runs"] == 1 else f"all {whole['runs']} runs on these people so far"
    if whole["runs"] == 0:
        return f"not told here: {whole['why']}"
    if whole["why"] is not None:
        return f"nothing is certified for {runs}: {whole['why']}"
    kind = {"replace": "replaced", "add-remove": "added or removed"}[whole["neighbours"]]
    protected = {"record": "one record", "client": "all records of a client"}[whole["unit"]]
    return f"ε ≤ {rounded_up(whole['epsilon'])}, δ = {whole['delta']:g} ({protected}, {kind}) for {runs}"


def _trust(against: Sequence[str]) -> str:
    """Say who has to be believed for the promise to mean something."""
    if "server" in against:
        return "nobody but the client itself: it adds the noise to what it uploads (local DP)"
    return f"the server, with every upload; not {', nor '.join(_UNTRUSTED[observer] for observer in against)}"


def _table(certificate: dict[str, Any]) -> list[str]:
    """Print a row for each observer; one that would be too long goes on in the next line."""
    rows = observer_rows(certificate)
    if not rows:
        return []
    short = [(name, [" ".join(promised)], [" ".join(spent)], basis) for name, promised, spent, basis in rows]
    lines = _aligned(short)
    return lines if max(map(len, lines)) <= _WIDTH else _aligned(rows)


def observer_rows(certificate: dict[str, Any]) -> list[ObserverRow]:
    """Return the heading and a row for each observer; none where nothing is promised to any."""
    if certificate["claimed"] is None:
        return []
    spending, observers = certificate["spending"], certificate["observers"]
    budget = [f"ε = {_range(spending, 'claimed_epsilon', '{:g}'.format)},",
              f"δ = {_range(spending, 'delta', '{:g}'.format)}"]  # fmt: skip
    heard = certificate["exposures"]
    names = {
        "server": "the server (local DP)",
        "uplink": f"an eavesdropper, {heard} upload{'' if heard == 1 else 's'}",
        "released": "released models (central DP)",
    }
    rows: list[ObserverRow] = [("against", ["promised"], ["really spent"], "from")]
    for observer, seen in observers.items():
        spent = [f"ε ≤ {_range(spending, f'{observer}_epsilon', rounded_up)}"]
        is_promised = observer in certificate["against"]
        alike = observer != "server" and seen["epsilon"] == observers["server"]["epsilon"]
        basis = "no more than the server sees" if alike else _BASES[observer]
        verdict = [f"  {_verdict(spending, observer)}"] if is_promised else []
        rows.append((f"  {names[observer]}", budget if is_promised else ["–"], spent + verdict, basis))
        if seen["claimed_basis"] is not None:
            believed = f"ε ≤ {rounded_up(seen['claimed_epsilon'])}"
            rows.append(("", [""], [believed], "the paper's sensitivity, claimed"))
    return rows


def _aligned(rows: Sequence[ObserverRow]) -> list[str]:
    """Print rows in columns; what is spent goes on below, as long as it likes."""
    first = max(len(row[0]) for row in rows) + 2
    second = max(len(part) for row in rows for part in row[1]) + 3
    third = max(len(row[2][0]) for row in rows) + 3
    lines = []
    for name, promised, spent, basis in rows:
        lines.append(f"{name:<{first}}{promised[0]:<{second}}{spent[0]:<{third}}{basis}")
        if len(promised) > 1 or len(spent) > 1:
            lines.append(f"{'':<{first}}{' '.join(promised[1:]):<{second}}{' '.join(spent[1:])}".rstrip())
    return lines


def _verdict(spending: Sequence[dict[str, Any]], observer: str) -> str:
    """Say whether every client got what it was promised, and otherwise by how much the worst did not."""
    key = f"{observer}_epsilon"
    ratios = [math.inf if line[key] is None else line[key] / line["claimed_epsilon"] for line in spending]
    over = [ratio for ratio in ratios if ratio > 1 + 1e-9]
    if not over:
        return "within the promise"
    if math.isinf(max(over)):
        return "MORE than any promise"
    percent = 100 * (max(over) - 1)
    shown = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    whom = "" if len(over) == len(spending) else f", for {len(over)} of {len(spending)} clients"
    return f"{shown} % MORE than promised{whom}"


def _range(spending: Sequence[dict[str, Any]], key: str, show: Callable[[float | None], str]) -> str:
    """Print one number where all clients agree, and from the least to the most where each has its own."""
    low, high = (show(pick((line[key] for line in spending), key=_or_infinite)) for pick in (min, max))
    return high if low == high else f"{low} to {high}"


def _or_infinite(number: float | None) -> float:
    return math.inf if number is None else number


def _line(label: str, content: str) -> str:
    """Print a label and its content, folded under it where it is long."""
    wrapped: Iterable[str] = textwrap.wrap(content, 98) if len(content) > 98 and "   " not in content else [content]
    return "\n".join(f"{label if i == 0 else '':<20} {part}".rstrip() for i, part in enumerate(wrapped or [""]))
