"""The report of a run: its folder as a page, with the training curve, the certificate and the config."""

import base64
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from dpfl import run_folder
from dpfl.errors import BadInput
from dpfl.report.certificate import text
from dpfl.report.sites import evaluation
from dpfl.report.sites import text as by_site

_MOST_BARS = 20
_PANELS = (("loss", 1.0, "mean loss"), ("accuracy", 100.0, "accuracy in %"))


def write(run: Path, certificate: dict[str, Any], checked: str) -> tuple[Path, Path]:
    """Write `report.html` (self-contained) and `curve.png` into the run's folder and return their paths.

    checked: by what the certificate was computed, or that nobody has checked it.
    """
    environment = run_folder.read_json(run, run_folder.ENVIRONMENT)
    metrics = run_folder.read_metrics(run)
    if not metrics:
        raise BadInput(f"run must have finished a round, but {str(run)!r} has none; let it train first")
    config = run_folder.read_config(run)
    page, curve = (run / name for name in run_folder.REPORT_FILES)
    title = "{system} on {data}".format(**tomllib.loads(config))
    sites = run_folder.read_json(run, run_folder.SITES)["sites"] if (run / run_folder.SITES).exists() else []
    draw_curve(metrics, title, curve, sites)
    paid = run_folder.read_json(run, run_folder.EVALUATION) if (run / run_folder.EVALUATION).exists() else None
    pages = Environment(loader=PackageLoader("dpfl", "report"), autoescape=True)
    html = pages.get_template("run.html").render(
        title=title,
        last=metrics[-1],
        certificate=text(certificate),
        checked=checked,
        sites=by_site(sites) if sites else None,
        evaluation=evaluation(paid) if paid else None,
        config=config,
        environment=environment,
        curve=base64.b64encode(curve.read_bytes()).decode(),
    )
    page.write_text(html, encoding="utf-8")
    return page, curve


def result(run: Mapping[str, Any]) -> str:
    """Say in a line how good the model of a run (its plain data) became."""
    after = f"after {run['rounds']} rounds ({run['seconds']:.1f} s)"
    if run["loss"] is None and "sites" in run and ("evaluation" in run or not any(s["tested"] for s in run["sites"])):
        return f"{run['system']}: trained {after}"  # and nobody looked at test records as they are
    loss = "not finite (the training diverged; lower lr)" if run["loss"] is None else f"{run['loss']:.4f}"
    accuracy = "" if run["accuracy"] is None else f"accuracy {100 * run['accuracy']:.1f} %, "
    return f"{run['system']}: {accuracy}loss {loss} on the test split {after}"


def draw_curve(metrics: list[dict[str, Any]], title: str, path: Path, sites: Sequence[Mapping[str, Any]] = ()) -> None:
    """Plot loss and, for classifiers, accuracy against rounds, on the validation and the test split, and by site."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = {label: _seen(metrics, key, scale) for key, scale, label in _PANELS}
    panels = {label: lines for label, lines in curves.items() if lines}
    scored = [line for line in sites if line["accuracy"] is not None][:_MOST_BARS]
    width = max(1, len(panels) + bool(scored))
    figure = Figure(figsize=(4.6 * width, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title if panels or scored else f"{title}: nobody looked at how good the model was")
    for place, (label, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, width, place)
        for name, style, points in lines:
            axes.plot([at for at, _ in points], [value for _, value in points], style, label=name)
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.set_xlim(1, max(2, math.ceil(metrics[-1]["round"])))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    if scored:
        axes = figure.add_subplot(1, width, width)
        bars = axes.barh([line["name"] for line in scored], [100 * line["accuracy"] for line in scored], color="0.6")
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 110)
        axes.set_xlabel("accuracy in % on the site's own test records")
    figure.savefig(path, dpi=140)


def _seen(metrics: list[dict[str, Any]], key: str, scale: float) -> list[tuple[str, str, list[tuple[int, float]]]]:
    """Return what was looked at in some round: a name, a style and points for each curve."""
    curves = []
    for column, name, style in ((f"validation_{key}", "public validation", "-"), (key, "test", "--")):
        points = [(line["round"], line[column] * scale) for line in metrics if line[column] is not None]
        if points:
            curves.append((name, style, points))
    return curves
