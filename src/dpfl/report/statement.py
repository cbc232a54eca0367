"""A statement of account on a screen: the newest runs of a ledger, and the clients that spent most."""

import math
from collections.abc import Mapping
from typing import Any

from dpfl.rounding import rounded_up

_SHOWN = 20  # runs, and clients, that a screen can hold


def text(statement: Mapping[str, Any]) -> str:
    """Print what `state` adds up."""
    runs, clients, people = statement["runs"], statement["clients"], statement["people"]
    lines = [f"ledger {statement['ledger']}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}"]
    if len(runs) > _SHOWN:
        lines.append(f"  the newest {_SHOWN}:")
    for run in runs[-_SHOWN:]:
        how = "no privacy" if run["calibration"] is None else f"{run['calibration']} calibration"
        kind = ", a simulation" if run["simulation"] else ", on other people" if run["people"] < people else ""
        lines.append(f"  {run['opened']}  {run['run']}  {run['system']}, {how}, {run['rounds']} rounds{kind}")
    if statement["extract"]:
        lines.append("  the extract of one run: what others cost the same people is in the ledger it was taken from")
    if statement["head"]:
        lines.append(f"  head of its chain {statement['head'][:32]}: whole, as it was written")
    for grant in statement["grants"]:
        whom = "every client" if grant["client"] is None else grant["name"] or f"client {grant['client']}"
        lines.append(
            f"  granted to {whom}: ε = {grant['epsilon']:g}, δ = {grant['delta']:g} over all runs"
            f" ({grant['unit']}, {grant['neighbours']}; {grant['currency']})"
        )
    if statement["simulations"]:
        lines.append("  a simulation: nobody's records were protected where noise can be drawn again from its seed")
    if not clients:
        return "\n".join([*lines, f"nobody {'' if people == 1 else 'of now '}has been charged yet"])
    rows = sorted(clients, key=lambda line: (-_most(line), line["client"]))
    width = max(6, *(len(_called(line)) for line in rows[:_SHOWN]))
    lines += [
        "",
        f"{'client':>{width}}  {'runs':>5}  {'uploads':>7}  {'spent, ever':<26}  {'granted':<22}  one … is protected",
    ]
    lines += [_row(line, width) for line in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        lines.append(f"  … and {len(rows) - _SHOWN} that spent less; --json has all of them")
    return "\n".join(lines)


def _most(line: Mapping[str, Any]) -> float:
    """Return the printed ε, so that clients which print alike stay in their order."""
    spent = line["spent"]
    return math.inf if spent is None or spent["epsilon"] is None else float(rounded_up(spent["epsilon"]))


def _called(line: Mapping[str, Any]) -> str:
    return line["name"] or str(line["client"])


def _row(line: Mapping[str, Any], width: int) -> str:
    if line["spent"] is None:
        return f"{_called(line):>{width}}  {line['runs']:>5}  {line['uploads']:>7}  everything: {line['why']}"
    spent, granted = line["spent"], line["granted"]
    shown = f"ε ≤ {rounded_up(spent['epsilon'])}, δ = {spent['delta']:g}"
    limit = "–" if granted is None else f"ε = {granted['epsilon']:g}, δ = {granted['delta']:g}"
    how = {"replace": "replaced", "add-remove": "added or removed"}[line["neighbours"]]
    counts = f"{_called(line):>{width}}  {line['runs']:>5}  {line['uploads']:>7}"
    return f"{counts}  {shown:<26}  {limit:<22}  {line['unit']}, {how}"
