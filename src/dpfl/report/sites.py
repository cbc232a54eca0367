"""How good a model is at each site, as text: from plain lines, as `dpfl run --json` prints them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from dpfl.report.certificate import together
from dpfl.report.tables import aligned
from dpfl.rounding import rounded_up

_OPEN = "not private: each site's own test records, without noise"
_SHOWN = 20  # sites that a screen can hold


def text(sites: Sequence[Any]) -> str:
    """Print a line for each site, the worst one named; what is shown of test records has no noise on it."""
    lines = [plain(site) for site in sites]
    more = [f"  … and {len(lines) - _SHOWN} more; --json has all of them"] if len(lines) > _SHOWN else []
    return "\n".join([aligned(table(lines)), *more, *(f"  {line}" for line in summary(lines))])


def table(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each site, as many as a screen can hold, with the heading first."""
    rows = [["site", "trained with", "tested on", "accuracy", "loss", "calibration error"]]
    return rows + [
        [
            f"  {line['name']}", f"{line['records']:,}", f"{line['tested']:,}", _accuracy(line),
            "–" if line["loss"] is None else f"{line['loss']:.4f}", _percent(line["calibration_error"]),
        ]
        for line in lines[:_SHOWN]
    ]  # fmt: skip


def summary(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say the mean over sites and name the worst one, where they were tested."""
    scored = [line for line in lines if line["accuracy"] is not None]
    if scored:
        worst = min(scored, key=lambda line: float(line["accuracy"]))
        mean = statistics.fmean(line["accuracy"] for line in scored)
        return [
            f"mean over sites {_percent(mean)}, worst at {worst['name']} ({_percent(worst['accuracy'])});"
            f" {_how(scored)}"
        ]
    scored = [line for line in lines if line["loss"] is not None]
    if not scored:
        return ["not tested: the sites kept no records for that"]
    worst = max(scored, key=lambda line: float(line["loss"]))
    return [
        f"mean loss over sites {statistics.fmean(line['loss'] for line in scored):.4f}, worst at {worst['name']}"
        f" ({worst['loss']:.4f}); {_OPEN}"
    ]


def plain(site: Any) -> Mapping[str, Any]:
    """Return a site's line as plain data."""
    return asdict(site) if is_dataclass(site) and not isinstance(site, type) else site


def evaluation(certificate: Mapping[str, Any]) -> str:
    """Say what sites paid to be evaluated, and what that and all else on the ledger cost together."""
    spent = certificate["observers"]["server"]["epsilon"]
    delta = max(line["delta"] for line in certificate["spending"])
    lines = [f"Paid evaluation      noised counts of right answers: ε ≤ {rounded_up(spent)}, δ = {delta:g} besides"]
    if certificate["together"] is not None:
        lines.append(f"all together         {together(certificate['together'])}")
    return "\n".join(lines)


def _how(lines: Sequence[Mapping[str, Any]]) -> str:
    paid = all(line["accuracy_noise"] is not None for line in lines)
    return "counted by the sites with noise (±), which they paid for" if paid else _OPEN


def _accuracy(line: Mapping[str, Any]) -> str:
    noise = line["accuracy_noise"]
    return _percent(line["accuracy"]) + ("" if noise is None else f" ± {100 * noise:.1f}")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
