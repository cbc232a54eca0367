"""What there is to choose from: systems, data, models and experiments, for `dpfl list` and for the docs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from dpfl.experiments.reading import find
from dpfl.federation import FEDERATIONS, LOADERS
from dpfl.federation.files import whereabouts
from dpfl.models import ARCHITECTURES, default_model
from dpfl.report.tables import aligned, markdown
from dpfl.settings import Settings
from dpfl.systems import SYSTEMS, PrivateSystem, System
from dpfl.systems.registry import package

Row = dict[str, Any]


def systems() -> list[Row]:
    """Return every system with its options and their defaults (null: left to the system), and who brings it."""
    return [
        {
            "name": name,
            "private": issubclass(kind, PrivateSystem),
            "package": package(SYSTEMS.others[name]) if name in SYSTEMS.others else "dpfl",
            "about": _about(kind),
            "options": _defaults(kind),
        }
        for name, kind in SYSTEMS.items()
    ]


def data() -> list[Row]:
    """Return every data set, the model that fits it and where its files are."""
    return [
        {
            "name": name,
            "model": default_model(name, None),
            "files": whereabouts(name),
            "about": _about(loader).removeprefix("Return "),
        }
        for name, loader in (*LOADERS.items(), *FEDERATIONS.items())
    ]


def models() -> list[Row]:
    """Return every model, what it is trained on and for which data it is the one that fits."""
    usual = {name: default_model(name, None) for name in LOADERS}
    return [
        {
            "name": name,
            "task": "regression" if architecture.classify is None else "classification",
            "loss": architecture.loss.__name__.replace("_", " "),
            "smallest_image": architecture.smallest or None,
            "default_for": [data for data, model in usual.items() if model == name],
        }
        for name, architecture in ARCHITECTURES.items()
    ]


def experiments() -> list[Row]:
    """Return every table and figure that `dpfl reproduce` knows."""
    return [
        {"name": experiment.name, "paper": experiment.paper, "shows": experiment.shows, "title": experiment.title}
        for experiment in find(["all"], "smoke")
    ]


LISTS: Mapping[str, Callable[[], list[Row]]] = {
    "systems": systems, "data": data, "models": models, "experiments": experiments,
}  # fmt: skip


def text(rows: Sequence[Row]) -> str:
    """Return a list as a table for people; options are for the docs and JSON."""
    shown = [{key: _words(value) for key, value in row.items() if key != "options"} for row in rows]
    return aligned([[key.replace("_", " ") for key in shown[0]], *([*row.values()] for row in shown)])


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "–"
    return {True: "yes", False: "no", None: "–"}.get(value, str(value))


def _about(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _defaults(kind: Any) -> dict[str, Any]:
    return {option.name: None if option.default is MISSING else option.default for option in fields(kind)}


def settings() -> str:
    """Return all settings as a table in Markdown."""
    rows = [
        [f"`{setting.name}`", "" if setting.default is None else f"`{setting.default}`", setting.metadata["help"]]
        for setting in fields(Settings)
    ]
    return markdown([["key", "default", ""], *rows])


def options() -> str:
    """Return the options of dpfl's own systems as a table in Markdown; of each only what is not so in all."""
    every, private = _defaults(System), _defaults(PrivateSystem)
    rows = [["every system", _keys(every, {})], ["every private system", _keys(private, every)]]
    for name, kind in SYSTEMS.items():
        if name not in SYSTEMS.others:
            rows.append([f"`{name}`", _keys(_defaults(kind), private if issubclass(kind, PrivateSystem) else every)])
    return markdown([["system", "options, with their defaults"], *rows])


def _keys(defaults: Mapping[str, Any], common: Mapping[str, Any]) -> str:
    special = {name: value for name, value in defaults.items() if name not in common or value != common[name]}
    return ", ".join(f"`{name}`" if value is None else f"`{name}` ({value})" for name, value in special.items())


def with_tables(page: str) -> str:
    """Return a page of the docs with its tables written anew, each between its two marks."""
    for name, table in {"settings": settings, "options": options}.items():
        before, begin, rest = page.partition(f"<!-- table of {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->\n")
        page = before + begin + table() + end + after if end else page
    return page


def write_tables(path: Path) -> None:
    """Write the tables of a page of the docs anew."""
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
