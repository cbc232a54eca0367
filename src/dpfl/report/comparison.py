"""A comparison for people, from its JSON: a table, and a plot of how the loss falls and where each system ends."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl import run_folder
from dpfl.report.tables import aligned, markdown
from dpfl.rounding import rounded_up

_NOTHING = "nothing"
_HEADING = ["", "protects", "claimed ε", "true ε", "rounds", "accuracy in %", "loss"]


def text(comparison: Mapping[str, Any]) -> str:
    """Return the table for a terminal, and a word where its rows protect different things."""
    shown = rows(comparison["systems"])
    kinds = {row[1] for row in shown[1:]} - {_NOTHING}
    mixed = "\n\nWhat rows protect differs: replacing a record is removing one and adding another; a client is more."
    return aligned(shown) + (mixed if len(kinds) > 1 else "")


def save(comparison: Mapping[str, Any], folder: Path) -> None:
    """Write the numbers, the table and the plot into the folder."""
    run_folder.write_json(folder, "comparison.json", dict(comparison))
    (folder / "comparison.md").write_text(markdown(rows(comparison["systems"])), encoding="utf-8")
    draw(comparison["systems"], folder / "comparison.png")


def rows(systems: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the table as text, the heading first."""
    return [_HEADING, *map(_row, systems)]


def _row(system: Mapping[str, Any]) -> list[str]:
    claimed, chosen = system["claimed"], ", ".join(f"{key} = {value}" for key, value in system["searched"].items())
    return [
        f"{system['label']} ({chosen})" if chosen else system["label"],
        f"{system['unit']}, {system['neighbours']}" if claimed else _NOTHING,
        f"{claimed['epsilon']:.4g}" if claimed else "–",
        rounded_up(system["true_epsilon"]),
        _with_error(system["rounds"], 1, 1),
        _with_error(system["accuracy"], 100, 1),
        _with_error(system["loss"], 1, 3),
    ]


def _with_error(value: Mapping[str, float | None], scale: float, digits: int) -> str:
    mean, error = value["mean"], value["standard_error"]
    if mean is None:
        return "–"
    shown = f"{scale * mean:.{digits}f}"
    return shown if error is None else f"{shown} ± {scale * error:.{digits}f}"


def draw(systems: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the results of `dpfl compare` (its JSON): mean validation loss by round, and the final score ± its error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    curves, ends = figure.subplots(1, 2)
    for one in systems:
        losses = [[line["validation_loss"] for line in run["history"]] for run in one["runs"]]
        length = min(map(len, losses))  # a mean is of all seeds
        columns = [[run[at] for run in losses] for at in range(length)]
        means = {at: statistics.fmean(column) for at, column in enumerate(columns, start=1) if None not in column}
        curves.plot(list(means), list(means.values()), label=one["label"])
    curves.set_xlabel("round")
    curves.set_ylabel("mean loss, public validation")
    curves.set_yscale("log")
    curves.grid(alpha=0.3)
    curves.legend(frameon=False, fontsize=8)

    scored = all(one["accuracy"]["mean"] is not None for one in systems)
    key, scale, label = ("accuracy", 100.0, "accuracy in %, test") if scored else ("loss", 1.0, "mean loss, test")
    for place, one in enumerate(systems):
        mean, error = one[key]["mean"], one[key]["standard_error"]
        if mean is not None:
            ends.errorbar(scale * mean, place, xerr=scale * (error or 0.0), fmt="o", capsize=4)
    ends.set_yticks(range(len(systems)), [_named(one) for one in systems])
    ends.invert_yaxis()
    ends.set_xlabel(f"{label} ± standard error")
    ends.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=140)


def _named(one: Mapping[str, Any]) -> str:
    return f"{one['label']}\nε = " + ("∞" if one["true_epsilon"] is None else f"{one['true_epsilon']:.3g}")
