"""The plot of a comparison: how the loss falls with the rounds, and where each system ends."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
