"""The report of a run: its folder as a page, with the training curve, the certificate and the config."""

import base64
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from dpfl import run_folder
from dpfl.errors import BadInput
from dpfl.report.certificate import text


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
    draw_curve(metrics, title, curve)
    pages = Environment(loader=PackageLoader("dpfl", "report"), autoescape=True)
    html = pages.get_template("run.html").render(
        title=title,
        last=metrics[-1],
        certificate=text(certificate),
        checked=checked,
        config=config,
        environment=environment,
        curve=base64.b64encode(curve.read_bytes()).decode(),
    )
    page.write_text(html, encoding="utf-8")
    return page, curve


def result(run: Mapping[str, Any]) -> str:
    """Say in a line how good the model of a run (its plain data) became."""
    loss = "not finite (the training diverged; lower lr)" if run["loss"] is None else f"{run['loss']:.4f}"
    accuracy = "" if run["accuracy"] is None else f"accuracy {100 * run['accuracy']:.1f} %, "
    after = f"after {run['rounds']} rounds ({run['seconds']:.1f} s)"
    return f"{run['system']}: {accuracy}loss {loss} on the test split {after}"


def draw_curve(metrics: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot loss and, for classifiers, accuracy against rounds, on the public validation and the test split."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [("loss", 1.0, "mean loss")]
    if any(line["accuracy"] is not None for line in metrics):
        panels.append(("accuracy", 100.0, "accuracy in %"))
    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for place, (key, scale, label) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place)
        for column, name, style in ((f"validation_{key}", "public validation", "-"), (key, "test", "--")):
            seen = [(line["round"], line[column]) for line in metrics if line[column] is not None]
            axes.plot([at for at, _ in seen], [value * scale for _, value in seen], style, label=name)
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.set_xlim(1, max(2, math.ceil(metrics[-1]["round"])))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=140)
