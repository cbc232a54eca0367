"""An experiment in words: a piece of Markdown with what was done, what came out and what became of the claims."""

import math
from typing import Any

from dpfl.experiments.claims import LOOKS, Estimate, Look
from dpfl.experiments.results import Results, heading
from dpfl.rounding import rounded_up

_NO_NOISE = 1e6  # an ε from which on noise is as good as none: how a table writes "without noise"


def markdown(results: Results, image: str | None = None) -> str:
    """Return what it is, the plot, a table for each reading, and the claims."""
    one = results.experiment
    title = f"{one.shows}: {one.title}" if one.shows else one.title
    parts = [f"## {title}\n"]
    if one.own:
        parts.append("A panel of ours: it is not in the paper, or not so, and its claims are in no tally.\n")
    if image:
        parts.append(f"![{title}]({image})\n")
        if results.drawn:
            parts.append(f"![{title}]({image.removesuffix('.png')}-digits.png)\n")
    headings = ("",) if results.our_reading is None else ("The paper's reading", "Our reading")
    if one.own and results.our_reading is not None:
        headings = ("The first way", "The second way")
    for words, reading in zip(headings, results.readings, strict=True):
        parts += _section(reading, words)
    if one.claims:
        parts += _claims(results)
    return "\n".join(parts)


def _section(results: Results, heading: str) -> list[str]:
    """Return one reading: how it was carried out, its tables, and what differs from the paper."""
    plain = results.to_dict()
    parts = [f"**{heading}**: {plain['reading']}.\n"] if heading else []
    if not results.dates:
        return [*parts, f"Not tried yet: `{results.command}`.\n"]
    parts.append(_caption(plain))
    if results.left:
        parts.append(
            f"{results.left} of {results.asked} places are not tried yet: what they could decide is not decided.\n"
        )
    if plain["summary"]:
        parts.append(table(_summary(plain)))
    parts.append(table(_places(results)))
    if plain["differs"]:
        parts.append("What differs from the paper: " + "; ".join(plain["differs"]) + ".\n")
    return parts


def _caption(plain: dict[str, Any]) -> str:
    dates = " to ".join(sorted({plain["dates"][0], plain["dates"][-1]}))
    measured = f"{plain['measure'][0].upper()}{plain['measure'][1:]}"
    repeated = f", mean of {plain['repetitions']} repetitions ± standard error" if plain["repetitions"] > 1 else ""
    where = f"{dates}, on {' and '.join(plain['devices'])} ({plain['seconds']:,.0f} s of trainings)"
    return f"{measured}{repeated}. `{plain['command']}`, seed {plain['seed']}, {where}.\n"


def _summary(plain: dict[str, Any]) -> list[list[str]]:
    """Return each row's best and worst: ours, the paper's, and at true ε where that was asked for."""
    lines = plain["summary"]
    sides = {side: words for side, words in (("ours", "ours"), ("paper", "paper"), ("at_true", "at true ε"))
             if any(line[side] for line in lines)}  # fmt: skip
    what = {"best_at": f"best {plain['across']}", "best": "best", "worst": "worst"}
    heading = [f"{words}: {side}" for words in what.values() for side in sides.values()]
    rows = [[_extreme(line[side], key, side) for key in what for side in sides] for line in lines]
    return [[plain["down"], *heading], *([line["row"], *row] for line, row in zip(lines, rows, strict=True))]


def _extreme(found: dict[str, Any] | None, key: str, side: str) -> str:
    if found is None:
        return "not all tried"
    value = found[key]
    if side == "paper":
        return "" if value is None else f"{value:g}"
    return str(value) if key == "best_at" else "diverged" if value is None else f"{value:.4g}"


def _places(results: Results) -> list[list[str]]:
    """Return the table: for each row what we found, what the paper prints, and the same at true ε."""
    experiment = results.experiment
    columns = [column.label for column in experiment.columns]
    across = (f"{experiment.across} = {label}" if at == 0 else label for at, label in enumerate(columns))
    lines = [[experiment.down or "", "", *across]]
    for row in experiment.rows:
        places = [results.places[row.label, column] for column in columns]
        lines.append([row.label, "ours", *(shown(place.ours) for place in places)])
        if any(place.chosen for place in places):
            words = (", ".join(f"{key} = {value}" for key, value in place.chosen.items()) for place in places)
            lines.append(["", "chosen", *words])
        if any(place.paper is not None for place in places):
            lines.append(["", "paper", *(_as_printed(place.paper) for place in places)])
        if any(place.privacy for place in places):
            lines.append(["", "true ε", *(_epsilon(place.privacy) for place in places)])
            if any(place.privacy and place.privacy["with_papers_sensitivity"] for place in places):
                believed = (_epsilon(place.privacy, "with_papers_sensitivity") for place in places)
                lines.append(["", "true ε, granting its sensitivity", *believed])
            if any(place.at_true and (place.privacy or {}).get("calibration") == "paper" for place in places):
                lines.append(["", "at true ε", *(shown(place.at_true) for place in places)])
                lines.append(["", "its true ε", *(_epsilon(place.at_true_privacy) for place in places)])
        elif any(place.at_true not in (None, place.ours) for place in places):
            lines.append(["", "with true noise", *(shown(place.at_true) for place in places)])
    return lines


def _as_printed(paper: Estimate | None) -> str:
    """Print what the paper prints, to its own digits."""
    if paper is None or paper.error == 0:
        return "" if paper is None else f"{paper.mean:g}"
    digits = max(len(f"{number:g}".partition(".")[2]) for number in (paper.mean, paper.error))
    return f"{paper.mean:.{digits}f} ± {paper.error:.{digits}f}"


def _epsilon(privacy: dict[str, Any] | None, key: str = "true") -> str:
    if privacy is None:
        return "–"
    return "∞" if privacy["claimed"] >= _NO_NOISE else rounded_up(privacy[key])


def shown(estimate: Estimate | None) -> str:
    """Print a mean with its standard error, to the digits that the error leaves.

    >>> shown(Estimate(27.4031, 0.123)), shown(Estimate(0.46631)), shown(Estimate(float("inf")))
    ('27.40 ± 0.12', '0.4663', 'diverged')
    """
    if estimate is None:
        return "–"
    if not math.isfinite(estimate.mean):
        return "diverged"
    if estimate.error == 0:
        return f"{estimate.mean:.4g}" if abs(estimate.mean) < 1e4 else f"{estimate.mean:.3g}"
    digits = min(4, max(0, 1 - math.floor(math.log10(estimate.error))))
    if abs(estimate.mean) >= 1e5:
        return f"{estimate.mean:.2e} ± {estimate.error:.1e}"
    return f"{estimate.mean:.{digits}f} ± {estimate.error:.{digits}f}"


def _claims(results: Results) -> list[str]:
    """Return the table of the claims, and for each that failed under which reading, and what would decide it."""
    found = results.verdicts()
    looks = [look for look in LOOKS if any(look in one.by for one in found)]
    lines = [["claim", *(heading(look, [results]) + _so_often(results, look) for look in looks)]]
    decisions = []
    for one in found:
        source = f" ({one.claim.where}: “{one.claim.quote}”)" if one.claim.quote else ""
        lines.append([one.claim.says + source, *(str(one.by.get(look, "–")) for look in looks)])
        if one.failed_under and one.claim.decides:
            under = " and ".join(heading(look, [results]) for look in one.failed_under)
            decisions.append(f"- “{one.claim.says}” failed {under}. What would decide it: {one.claim.decides}.\n")
    return [table(lines), *(["".join(decisions)] if decisions else [])]


def _so_often(results: Results, look: Look) -> str:
    times = results.repetitions_at(look)
    return f" ({times} repetitions)" if times > 1 else ""


def table(lines: list[list[str]]) -> str:
    """Return a table in Markdown, its heading first; a bar within a cell, as in |D_i|, is no end of it.

    >>> print(table([["size"], ["|D_i|"]]), end="")
    | size |
    | --- |
    | \\|D_i\\| |
    """
    heading, *rows = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(row)} |\n" for row in [heading, ["---"] * len(heading), *rows])
