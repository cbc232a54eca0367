"""The plot of an experiment: what the paper's formula gives, and what the same ε gives where it is true."""

import base64
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_Panel = tuple[str, list[dict[str, Any]], str]  # a title, the places of a table, and what of them is shown


def _panels(plain: Mapping[str, Any]) -> list[_Panel]:
    """Return what stands beside each other: by the formula, under two readings where there are two, and at true ε."""
    second = plain["our_reading"]
    rows, true = plain["rows"], plain["rows"] if second is None else second["rows"]
    ways = ("the first way", "the second way") if plain["own"] else ("the paper's reading", "our reading")
    found = [("by the paper's formula" if second is None else f"{ways[0]}, its formula", rows, "ours")]
    if second is not None:
        found.append((f"{ways[1]}, its formula", true, "ours"))
    if all(one["ours"] == one["at_true_epsilon"] for one in true):
        return [("", rows, "ours")] if second is None else _trained(found)
    where = "" if second is None else ", the second way" if plain["own"] else ", in our settings"
    return _trained([*found, (f"at true ε{where}", true, "at_true_epsilon")])


def _trained(panels: list[_Panel]) -> list[_Panel]:
    return [panel for panel in panels if any(one[panel[2]] is not None for one in panel[1])] or panels[:1]


def draw(plain: Mapping[str, Any], path: Path) -> None:
    """Plot the results of `dpfl reproduce` (its JSON): a line a row with error bars, and what the paper prints.

    Columns that are no numbers have nothing between them: points stand alone there.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(plain)
    every = [one for _, places, _ in panels for one in places]
    rows = list(dict.fromkeys(one["row"] for one in every))
    columns = list(dict.fromkeys(one["column"] for one in every))
    numeric = all(one["x"] is not None for one in every)
    width = 5.2 if numeric else max(5.2, 0.6 * len(columns))
    figure = Figure(figsize=(width * len(panels) + 1.8, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    beside = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    scheme = next((name for name, most in (("tab10", 10), ("tab20", 20)) if len(rows) <= most), "viridis")
    colours = colormaps[scheme]
    for axes, (title, places, key) in zip(beside, panels, strict=True):
        for place, row in enumerate(rows):
            colour = colours(place / (len(rows) - 1) if scheme == "viridis" else place)
            found = [one for one in places if one["row"] == row]
            xs = [one["x"] if numeric else float(columns.index(one["column"])) for one in found]
            shift = 0.0 if numeric else 0.06 * (place - (len(rows) - 1) / 2)
            ys = [math.nan if one[key] is None else one[key] for one in found]
            errors = [one[f"{key}_standard_error"] or 0.0 for one in found]
            axes.errorbar(
                [x + shift for x in xs], ys, yerr=errors, color=colour, marker="o", markersize=4, capsize=3,
                linewidth=1.3, linestyle="-" if numeric else "none", label=row,
            )  # fmt: skip
            printed = [(x + shift, one["paper"]) for x, one in zip(xs, found, strict=True) if one["paper"] is not None]
            if printed:
                between = ":" if numeric else "none"
                axes.plot(
                    *zip(*printed, strict=True), linestyle=between, marker="x", markersize=6, linewidth=0.9,
                    color=colour,
                )  # fmt: skip
        if plain["log"]:
            axes.set_yscale("log")
        if plain["log_across"] and numeric:
            axes.set_xscale("log")
            axes.set_xticks(*zip(*dict.fromkeys((one["x"], one["column"]) for one in places), strict=True))
            axes.minorticks_off()
        if not numeric:
            axes.set_xticks(range(len(columns)), columns, rotation=20, ha="right", fontsize=8)
        axes.set_xlabel(plain["across"])
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    beside[0].set_ylabel(textwrap.fill(plain["measure"], 44))
    crosses = any(one["paper"] is not None for one in every)
    figure.legend(
        *beside[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8,
        title=plain["down"] + ("\n(× printed in the paper)" if crosses else ""), title_fontsize=8,
    )  # fmt: skip
    figure.savefig(path, dpi=120)


def draw_portraits(rows: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw what models take for each class: a line of grey images a row, under its label."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axes, (label, portraits) in zip(places, rows.items(), strict=True):
        grey = np.frombuffer(base64.b64decode(portraits["grey"]), dtype=np.uint8).reshape(portraits["shape"])
        axes.imshow(np.concatenate(list(grey), axis=1), cmap="gray", vmin=0, vmax=255)
        axes.set_title(label, fontsize=9)
        axes.set_axis_off()
    figure.savefig(path, dpi=120)
