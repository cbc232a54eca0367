"""What `dpfl bench` prints and keeps: tables, JSON and plots."""

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dpfl import __version__
from dpfl.bench.workloads import WORKLOADS

_ORDER = ("floor", "dpfl", "exact", "plain", "loop", "pfl", "flower", "opacus", "reference")
_NAMES = {
    "exact": "dpfl, exact noise",
    "plain": "dpfl, no privacy",
    "loop": "plain loop",
    "floor": "floor (arithmetic)",
}

Results = Mapping[str, Mapping[str, Any]]


def summary(results: Results) -> str:
    """Return all results as Markdown."""
    parts = []
    rounds = {name: times for name, times in results.items() if name in WORKLOADS}
    if rounds:
        parts.append(table(rounds))
    if "repetitions" in results:
        one = results["repetitions"]
        parts.append(
            f"{one['repetitions']} trainings of W4 ({one['rounds']} rounds, ledger and certificate included) as one"
            f" program: {_short(one['all_ms'])} ms, {one['all_ms'] / one['one_ms']:.2f} times one"
            f" ({_short(one['one_ms'])} ms)"
        )
    if "tricks" in results:
        lines = [
            f"| {name} | {_short(one['with_ms'])} | {_short(one['without_ms'])} |"
            f" {_short(one['without_ms'] / one['with_ms'])}× |"
            for name, one in results["tricks"].items()
        ]
        parts.append("\n".join(["| trick | ms with | ms without | worth |", "|---|---|---|---|", *lines]))
    for what, one in results.get("growth", {}).items():
        times = ", ".join(f"{int(size):.0e}: {_short(ms)}" for size, ms in one["ms"].items())
        parts.append(f"ms a round by {what}: {times}; slope {one['slope']:.2f}")
    return "\n\n".join(parts)


def save(results: Results, folder: Path, *, device: str) -> Path:
    """Keep the results in a folder: bench.json, bench.md and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or 'cpu'}"
    made = {
        "results": results, "device": where, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "dpfl": __version__, "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    (folder / "bench.json").write_text(json.dumps(made, indent=2) + "\n")
    (folder / "bench.md").write_text(summary(results) + "\n")
    rounds = {name: times for name, times in results.items() if name in WORKLOADS}
    if rounds:
        plot(rounds, folder / "bench.png")
    if "growth" in results:
        plot_growth(results["growth"], folder / "growth.png")
    return folder


def table(results: Results) -> str:
    """Return milliseconds a round, and how many times dpfl's that is, as Markdown."""
    kinds = [kind for kind in _ORDER if any(f"{kind}_ms" in times for times in results.values())]
    lines = ["| ms a round | " + " | ".join(results) + " |", "|---|" + "---|" * len(results)]
    for kind in kinds:
        cells = [_cell(times, kind) for times in results.values()]
        lines.append(f"| {_NAMES.get(kind, kind)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(times: Mapping[str, float], kind: str) -> str:
    value = times.get(f"{kind}_ms")
    if value is None:
        return "–"
    ratio = value / times["dpfl_ms"]
    return _short(value) if kind == "dpfl" else f"{_short(value)} ({_short(ratio)}×)"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot(results: Results, path: Path) -> None:
    """Draw one panel a workload, times on a logarithmic scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(results) + 1, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (name, times) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        kinds = [kind for kind in _ORDER if f"{kind}_ms" in times and kind != "floor"]
        values = [times[f"{kind}_ms"] for kind in kinds]
        colours = ["tab:blue" if kind in ("dpfl", "exact", "plain") else "tab:gray" for kind in kinds]
        panel.barh([_NAMES.get(kind, kind) for kind in kinds], values, color=colours)
        for place, value in enumerate(values):
            panel.text(value, place, f" {_short(value)}", va="center", fontsize=8)
        if times["floor_ms"] > values[0] / 100:  # where arithmetic is not what takes the time it says nothing
            panel.axvline(times["floor_ms"], color="tab:red", linestyle="--", linewidth=1, label="floor")
            panel.legend(frameon=False, fontsize=8)
        panel.set_xscale("log")
        panel.set_xlim(right=4 * max(values))
        panel.invert_yaxis()
        panel.set_xlabel("ms a round")
        panel.set_title(f"{name}: {WORKLOADS[name].title}", fontsize=8, wrap=True)
    figure.savefig(path, dpi=150)


def plot_growth(series: Mapping[str, Any], path: Path) -> None:
    """Draw the time of a round against each size, both on logarithmic scales."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(series), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    labels = {"clients": "clients there are (100 a round)", "cohort": "clients a round", "parameters": "parameters"}
    for panel, (name, one) in zip(figure.subplots(1, len(series), squeeze=False)[0], series.items(), strict=True):
        sizes, times = [int(size) for size in one["ms"]], list(one["ms"].values())
        panel.loglog(sizes, times, marker="o")
        panel.set_ylim(min(times) / 3, max(max(times) * 3, min(times) * 30))
        panel.set_xlabel(labels[name])
        panel.set_ylabel("ms a round")
        panel.set_title(f"slope {one['slope']:.2f}", fontsize=9)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
