"""The plot of a plan: the bound, a pilot's losses and a check's, along each number that was chosen."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NAMES = {"rounds": "rounds", "local_steps": "local steps a round", "cohort": "clients a round"}


def draw(plan: Mapping[str, Any], path: Path) -> None:
    """Plot the JSON of `dpfl plan`: one panel for each number along which something is known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = {name: _lines(plan, name) for name in _NAMES}
    shown = [name for name in _NAMES if any(len(points) > 1 for _, points in lines[name])] or ["rounds"]
    figure = Figure(figsize=(4.4 * len(shown), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for label, points in lines[name]:
            if points:
                panel.plot([x for x, _ in points], [y for _, y in points], "o-", markersize=4, label=label)
        panel.axvline(plan[name], color="0.5", linestyle=":", label=f"planned: {plan[name]}")
        panel.set_xscale("log")
        panel.set_yscale("log")
        ticks = sorted({x for _, points in lines[name] for x, _ in points})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel(_NAMES[name])
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{plan['system']}, by {'a pilot' if plan['method'] == 'pilot' else 'its bound'}", fontsize=10)
    figure.savefig(path, dpi=140)


def _lines(plan: Mapping[str, Any], name: str) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return what is known along one number, the others as they were planned."""
    unit = "loss gap" if plan["bound_of"] == "loss" else "squared distance"
    centre = plan["bounds_answer"] or plan
    checked = plan.get("check", {"grid": []})["grid"]
    return [
        (f"bound ({unit})", _along(plan["curve"], name, centre, "bound")),
        ("pilot, loss", _along(plan["tried"], name, plan["options"], "loss")),
        ("check, loss", _along(checked, name, plan, "loss")),
    ]


def _along(
    points: Sequence[Mapping[str, Any]], name: str, centre: Mapping[str, Any], value: str
) -> list[tuple[int, float]]:
    alike = [
        point
        for point in points
        if name in point
        and point[value] is not None
        and all(point[key] == centre[key] for key in point if key in _NAMES and key != name and centre.get(key))
    ]
    return sorted((point[name], point[value]) for point in alike)
