"""What a notebook shows of a result: words and tables of the screen as a small piece of HTML, every name escaped."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from dpfl.report.certificate import observer_rows, statements, subject
from dpfl.report.certificate import sites as of_sites
from dpfl.report.run import result
from dpfl.report.sites import summary, table

_WIDTH, _HEIGHT = 280, 110  # of a curve
_CURVES = (("", "test", "#c26a00", 0), ("validation_", "public validation", "#2f7fd6", -32))  # readable on any ground

Part = str | Sequence[Sequence[str]]  # a sentence (or `Markup`), or a table with its heading first


@cache
def _pieces() -> Any:
    pages = Environment(loader=PackageLoader("dpfl", "report"), autoescape=True)
    return pages.get_template("notebook.html").module


def page(title: str, *parts: Part) -> Markup:
    """Return sentences and tables under a title; what is not there is left out.

    >>> "&lt;b&gt;" in page("<b>") and "<b>" not in page("<b>")
    True
    """
    return Markup(_pieces().page(title, [part for part in parts if part]))


def sentences(lines: Sequence[str]) -> Markup:
    """Return sentences as a list."""
    return Markup(_pieces().sentences(lines))


def certificate(plain: dict[str, Any]) -> Markup:
    """Show a certificate (its plain data): what is said above the table of observers, the table, and the rest."""
    above, below = statements(plain)
    rows = [
        [name, " ".join(promised), ", ".join(part.strip() for part in spent), basis]
        for name, promised, spent, basis in observer_rows(plain)
    ]
    title, pieces = "; ".join(part for part in subject(plain) if part), _pieces()
    return page(
        f"Privacy certificate: {title}", pieces.statements(above), rows, of_sites(plain), pieces.statements(below)
    )


def run(plain: Mapping[str, Any]) -> Markup:
    """Show a run (its plain data): how good its model became and how it got there, and the certificate."""
    measures = (("loss", 1.0, "loss"), ("accuracy", 100.0, "accuracy in %"))
    panels = [_panel(plain["history"], *measure) for measure in measures]
    curves = _pieces().curves([panel for panel in panels if panel["curves"]], _WIDTH, _HEIGHT)
    sites = plain.get("sites", [])
    by_site = (table(sites), sentences(summary(sites))) if sites else ()
    return page(result(plain), curves, *by_site, certificate(plain["certificate"]))


def _panel(history: Sequence[Mapping[str, Any]], key: str, scale: float, label: str) -> dict[str, Any]:
    """Place the curves of a measure in a frame that they fill."""
    seen = {
        prefix: [(line["round"], scale * line[prefix + key]) for line in history if line[prefix + key] is not None]
        for prefix, *_ in _CURVES
    }
    values = [value for points in seen.values() for _, value in points] or [0.0]
    low, high, first, last = min(values), max(values), history[0]["round"], history[-1]["round"]

    def place(round: int, value: float) -> str:
        across = (round - first) / (last - first) if last > first else 0.5
        up = (value - low) / (high - low) if high > low else 0.5
        return f"{_WIDTH * across:.1f},{_HEIGHT * (1 - up):.1f}"

    curves = []
    for prefix, name, colour, shift in _CURVES:
        places = [place(*point) for point in seen[prefix]]
        if not places:
            continue
        dot = len(places) == 1  # a line from a point to itself
        points = " ".join(places * 2 if dot else places)
        curves.append({
            "points": points, "thickness": 6 if dot else 1.8, "name": name, "colour": colour, "shift": shift,
        })  # fmt: skip
    return {"label": label, "low": f"{low:.3g}", "high": f"{high:.3g}", "first": first, "last": last, "curves": curves}
