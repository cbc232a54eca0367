"""A comparison for people, from its JSON: a table, and a plot of how the loss falls and where each system ends."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl import run_folder
from dpfl.report.tables import aligned, markdown
from dpfl.report.together import CURRENCIES, simulated
from dpfl.rounding import rounded_up

_HEADING = ["", "promises", "claimed ε", "true ε", "rounds", "accuracy in %", "loss"]


def text(comparison: Mapping[str, Any]) -> str:
    """Return the tables for a terminal: those that are priced alike, those that are not, and what all of it costs."""
    return "\n\n".join(aligned(part) if isinstance(part, list) else part for part in parts(comparison))


def save(comparison: Mapping[str, Any], folder: Path) -> None:
    """Write the numbers, the tables and the plot into the folder."""
    run_folder.write_json(folder, "comparison.json", dict(comparison))
    (folder / "comparison.md").write_text(in_markdown(comparison), encoding="utf-8")
    draw(comparison, folder / "comparison.png")


def in_markdown(comparison: Mapping[str, Any]) -> str:
    """Return the same in Markdown."""
    blocks = (markdown(part) if isinstance(part, list) else f"{part}\n" for part in parts(comparison))
    return "\n".join(blocks)


def parts(comparison: Mapping[str, Any]) -> list[str | list[list[str]]]:
    """Return sentences, and tables as rows of text with the heading first."""
    priced, apart = sorted_out(comparison)
    whole: list[str | list[list[str]]] = []
    if priced:
        whole += [currency(comparison), rows(priced)]
    if apart:
        whole += [
            standing_apart(comparison),
            rows(apart),
            *(f"{one['label']}: {one['apart']}" for one in apart if one["claimed"]),
        ]  # fmt: skip
    return [*whole, simulated(comparison["if_real"], comparison["neighbours"])]


def currency(comparison: Mapping[str, Any]) -> str:
    """Say what the true ε of the systems that have a price is for."""
    priced, _ = sorted_out(comparison)
    return f"true ε{_at(priced)} against the server, {CURRENCIES[comparison['neighbours']]}"


def standing_apart(comparison: Mapping[str, Any]) -> str:
    """Say why the systems that have no price stand by themselves."""
    priced, _ = sorted_out(comparison)
    why = " with these: no price in that currency" if priced else ": no price in one currency"
    return f"not comparable{why}; true ε as each promises it"


def _at(systems: Sequence[Mapping[str, Any]]) -> str:
    deltas = sorted({one["promise"]["delta"] for one in systems})
    return f" at δ = {deltas[0]:g}" if len(deltas) == 1 else f" (each at its own δ, {deltas[0]:g} to {deltas[-1]:g})"


def sorted_out(comparison: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the systems that have a price in the currency, and those that have none."""
    systems = comparison["systems"]
    return [one for one in systems if one["neighbours"]], [one for one in systems if not one["neighbours"]]


def rows(systems: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a table as text, the heading first."""
    return [_HEADING, *map(_row, systems)]


def _row(system: Mapping[str, Any]) -> list[str]:
    promise, chosen = system["promise"], ", ".join(f"{key} = {value}" for key, value in system["searched"].items())
    own = None if promise is None else promise["true_epsilon"]
    return [
        f"{system['label']} ({chosen})" if chosen else system["label"],
        f"{promise['unit']}, {promise['neighbours']}" if promise else "nothing",
        f"{promise['epsilon']:.4g}" if promise else "–",
        rounded_up(system["true_epsilon"] if system["neighbours"] else own),
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


def draw(comparison: Mapping[str, Any], path: Path) -> None:
    """Plot the results of `dpfl compare` (its JSON): mean validation loss by round, and the final score ± its error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    systems = comparison["systems"]
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
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
    figure.suptitle(f"a simulation; ε {CURRENCIES[comparison['neighbours']]}", fontsize=10)
    figure.savefig(path, dpi=140)


def _named(one: Mapping[str, Any]) -> str:
    if one["promise"] is None:
        return f"{one['label']}\nε = ∞"
    return f"{one['label']}\n" + (f"ε = {one['true_epsilon']:.3g}" if one["neighbours"] else "not comparable")
