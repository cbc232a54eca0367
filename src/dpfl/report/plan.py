"""The plot of a plan: its bound, and the losses of a pilot and of a check, along each number that was chosen."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NAMES = {"rounds": "rounds", "local_steps": "local steps a round", "cohort": "clients a round"}
_CROWDED = 1.3  # ticks nearer to each other than this factor would overlap

Line = tuple[str, list[tuple[int, float]]]  # a label, and points


def draw(plan: Mapping[str, Any], path: Path) -> None:
    """Plot the JSON of `dpfl plan`: a column for each number, the bound above and measured losses below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in (_bounds, _losses) if any(row(plan, name) for name in _NAMES)]
    names = [name for name in _NAMES if any(row(plan, name) for row in rows)]
    if not names:
        rows, names = [_bounds], ["rounds"]
    figure = Figure(figsize=(4.6 * len(names), 0.6 + 2.8 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), len(names), squeeze=False)
    for row, line in zip(rows, panels, strict=True):
        for name, panel in zip(names, line, strict=True):
            _panel(panel, row(plan, name), plan[name])
            panel.set_xlabel(_NAMES[name])
        line[0].set_ylabel(_unit(plan) if row is _bounds else "loss")
    how = "a pilot on public records" if plan["method"] == "pilot" else f"its bound, {plan['form']} form"
    figure.suptitle(f"{plan['system']}: planned by {how}", fontsize=10)
    figure.savefig(path, dpi=140)


def _panel(panel: Any, lines: Sequence[Line], planned: int) -> None:
    for label, points in lines:
        panel.plot([x for x, _ in points], [y for _, y in points], "o-", markersize=4, label=label)
    panel.axvline(planned, color="0.5", linestyle=":", label=f"planned: {planned}")
    panel.set_xscale("log")
    values = [y for _, points in lines for _, y in points]
    if values and min(values) > 0 and max(values) > 10 * min(values):
        panel.set_yscale("log")
    shown: list[int] = []
    for tick in sorted({x for _, points in lines for x, _ in points} | {planned}):
        if not shown or tick > _CROWDED * shown[-1]:
            shown.append(tick)
    panel.set_xticks(shown, [str(tick) for tick in shown])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=8)


def _unit(plan: Mapping[str, Any]) -> str:
    return "bound on the loss gap" if plan["bound_of"] == "loss" else "bound on the squared distance"


def _bounds(plan: Mapping[str, Any], name: str) -> list[Line]:
    centre = plan["bounds_answer"] or plan
    return _present([("bound", _along(plan["curve"], name, centre, "bound"))])


def _losses(plan: Mapping[str, Any], name: str) -> list[Line]:
    checked = plan.get("check", {"grid": []})["grid"]
    centre = {key: plan[key] for key in _NAMES} | {key: value for key, value in plan["options"].items() if value}
    return _present(
        [
            ("pilot, public records", _along(plan["tried"], name, centre, "loss")),
            ("check, test split", _along(checked, name, centre, "loss")),
        ]
    )


def _present(lines: Sequence[Line]) -> list[Line]:
    return [(label, points) for label, points in lines if len(points) > 1]


def _along(
    points: Sequence[Mapping[str, Any]], name: str, centre: Mapping[str, Any], value: str
) -> list[tuple[int, float]]:
    """Return the points that differ from the centre in this number alone."""
    keys = {key for point in points for key in point} - {name, "bound", "loss", "standard_error", "trials"}
    alike = [point for point in points if all(point.get(key) == centre.get(key) for key in keys)]
    return sorted((point[name], point[value]) for point in alike if name in point and point[value] is not None)
