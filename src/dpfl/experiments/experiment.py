"""An experiment: one table or figure of a paper, as a TOML file says it.

A file holds a run's config (`[base]`), what changes down the rows and across the columns, what the paper printed there
and what it claims. Every place of the table is a training with all its repetitions; `[twin]` says what changes when the
same ε is to be true: the calibration, and whatever the paper's own settings were tuned to.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from dpfl import config as configs
from dpfl.config import Config, Settings
from dpfl.errors import BadInput, choose, require_count
from dpfl.experiments.cells import PLANNED, Ask, Cell
from dpfl.experiments.claims import Claim, read_claim
from dpfl.options import fit, read_toml
from dpfl.systems import SYSTEMS, PrivateSystem

Scale = Literal["smoke", "paper"]
MEASURES = {
    "loss": "mean loss on the test split",
    "accuracy": "accuracy on the test split in %",
    "rounds": "rounds that were used",
    "local_steps": "local steps in the round",
    "planned_rounds": "rounds that the bound chooses",
    "planned_cohort": "clients a round that the bound chooses",
    "bound": "the bound",
}
_KEYS = {
    "title", "shows", "measure", "repetitions", "down", "across", "differs", "fresh_data", "rows", "columns", "base",
    "twin", "smoke", "printed", "claims", "plan", "log", "order",
}  # fmt: skip
_OF_A_LINE = {"label", "measure", "search", "twin", "at_round", "by_column"}


@dataclass(frozen=True)
class Line:
    """A row or a column: its label, and what it changes in the config."""

    label: str
    x: float | None  # where a column stands on an axis, if it is a number
    changes: Mapping[str, Any]
    measure: str | None = None  # where it is not the experiment's
    search: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # the best of these, by the public split
    twin: Mapping[str, Any] = field(default_factory=dict)
    at_round: int | None = None  # of a column: read off the training's history here
    by_column: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # of a row: what it changes in each column


@dataclass(frozen=True)
class Printed:
    """What the paper prints; NaN where it prints nothing."""

    cells: tuple[tuple[float, ...], ...] = ()  # by row and column
    best_at: tuple[float, ...] = ()  # by row: the column with the best value,
    best: tuple[float, ...] = ()  # that value,
    worst: tuple[float, ...] = ()  # and the worst one


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure, at one scale."""

    name: str
    paper: str  # the folder it stands in
    scale: Scale
    title: str
    shows: str  # "Table III and Fig. 5"
    measure: str
    repetitions: int
    own_repetitions: bool = True  # False where others were asked for
    down: str  # what the rows are
    across: str  # what the columns are
    differs: tuple[str, ...]  # from the paper
    fresh_data: bool  # whether each repetition shares the data out anew
    log: bool  # whether a plot of it wants a logarithmic axis
    order: int  # among the paper's, on its page
    base: Mapping[str, Any]
    last: Mapping[str, Any]  # what the smoke scale sets, whatever rows and columns say
    twin: Mapping[str, Any]
    plan: Mapping[str, Any]  # for measures that are planned: form, constants, max_rounds
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    printed: Printed
    claims: tuple[Claim, ...]

    def measure_of(self, row: Line) -> str:
        """Return what is measured in a row."""
        return row.measure or self.measure

    def cells(self, row: Line, column: Line, *, twin: bool, seed: int) -> list[tuple[dict[str, Any], Cell]]:
        """Return what has to be trained for one place: one cell, or one for each candidate of a search."""
        searched = row.search or column.search
        candidates: list[dict[str, Any]] = [{}]
        for key, values in searched.items():
            candidates = [choice | {key: value} for choice in candidates for value in values]
        place = self.columns.index(column)
        both = {key: values[place] for key, values in row.by_column.items()}
        table = dict(self.base) | dict(row.changes) | dict(column.changes) | both | dict(self.last)
        return [(choice, self._cell(table | choice, row, column, twin=twin, seed=seed)) for choice in candidates]

    def _cell(self, table: dict[str, Any], row: Line, column: Line, *, twin: bool, seed: int) -> Cell:
        config = _config(table)
        if twin and isinstance(config.system, PrivateSystem) and config.system.calibration == "paper":
            changes = {"calibration": "tight"} | dict(self.twin) | dict(row.twin) | dict(column.twin)
            config = _config(table | changes | dict(self.last))
        measure = self.measure_of(row)
        ask = None
        if measure in PLANNED:
            form = "general" if twin else str(self.plan.get("form", "paper"))
            constants = tuple(sorted((dict(self.plan.get("constants", {})) | _constants(row, column)).items()))
            ask = Ask(PLANNED[measure], form, constants, int(self.plan.get("max_rounds", 1000)))
        every = math.gcd(*(at for at in (line.at_round for line in self.columns) if at is not None)) or None
        return Cell(
            config=config, repetitions=1 if ask else self.repetitions, seed=seed, fresh_data=self.fresh_data,
            evaluate_every=every, ask=ask,
        )  # fmt: skip


def names() -> list[str]:
    """Return the experiments that come with dpfl."""
    return [_name(path) for path in _paths()]


def find(wanted: Sequence[str], scale: Scale, *, repetitions: int | None = None) -> list[Experiment]:
    """Load experiments by name, by paper, from TOML files of the user's own, or all of them.

    repetitions: instead of each file's own.
    """
    known = {_name(path): path for path in _paths()}
    papers = {path.parent.name for path in known.values()}
    found: list[Experiment] = []
    for name in wanted:
        if name.endswith(".toml"):
            found.append(load(Path(name), scale))
        elif name == "all" or name in papers:
            chosen = [load(path, scale) for path in known.values() if name in ("all", path.parent.name)]
            found += sorted(chosen, key=lambda one: (one.paper, one.order, one.name))
        else:
            found.append(load(choose("name", name, known | dict.fromkeys([*papers, "all"], Path())), scale))
    if repetitions is not None:
        require_count("repetitions", repetitions, "use at least 2 for a standard error")
        found = [replace(one, repetitions=repetitions, own_repetitions=one.repetitions == repetitions) for one in found]
    return list({one.name: one for one in found}.values())


def _paths() -> list[Path]:
    folder = Path(str(files("dpfl.experiments")))
    return sorted(path for path in folder.glob("*/*.toml") if path.name != "paper.toml")


def _name(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def load(path: Path, scale: Scale) -> Experiment:
    """Read an experiment from its file."""
    table = read_toml("name", path)
    own = path.parent not in {other.parent for other in _paths()}
    name = path.stem if own else _name(path)

    def refuse(key: str, must: str, was: Any) -> BadInput:
        return BadInput(f"{key} of experiment {name!r} must be {must}, was {was!r}; mend {str(path)!r}")

    for key in table:
        if key not in _KEYS:
            raise refuse(key, f"left out: known are {', '.join(sorted(_KEYS))}", table[key])
    for key in ("title", "measure", "rows", "columns", "base"):
        if key not in table:
            raise refuse(key, "given", None)
    if table["measure"] not in MEASURES:
        raise refuse("measure", f"one of {', '.join(MEASURES)}", table["measure"])
    smoke = dict(table.get("smoke", {})) if scale == "smoke" else {}
    rows, columns = (_lines(table[key], key, refuse) for key in ("rows", "columns"))
    for row in rows:
        for key, values in row.by_column.items():
            if not isinstance(values, list) or len(values) != len(columns):
                raise refuse(f"by_column.{key}", f"a list of {len(columns)} values, one a column", values)
    printed = _printed(table.get("printed", {}), rows, columns, refuse)
    chosen_rows, chosen_columns = (
        _chosen(lines, smoke.pop(key, None), key, refuse) for lines, key in ((rows, "rows"), (columns, "columns"))
    )
    claims = tuple(read_claim(one, [row.label for row in rows], [column.label for column in columns], refuse)
                   for one in table.get("claims", []))  # fmt: skip
    repetitions = smoke.pop("repetitions", table.get("repetitions", 1))
    require_count("repetitions", repetitions, f"mend {str(path)!r}")
    last = smoke.pop("set", {})
    if smoke:
        raise refuse("smoke", "a table of repetitions, rows, columns and set", sorted(smoke))
    return Experiment(
        name=name, paper=path.parent.name, scale=scale, title=fit("title", table["title"], str),
        shows=fit("shows", table.get("shows", ""), str), measure=table["measure"], repetitions=repetitions,
        down=str(table.get("down", "")), across=str(table.get("across", "")),
        differs=fit("differs", table.get("differs", []), tuple[str, ...]),
        fresh_data=bool(table.get("fresh_data", False)), log=bool(table.get("log", False)),
        order=int(table.get("order", 0)), base=table["base"], last=last, twin=table.get("twin", {}),
        plan=table.get("plan", {}), rows=tuple(_cut(rows[at], chosen_columns) for at in chosen_rows),
        columns=tuple(columns[at] for at in chosen_columns),
        printed=_part(printed, chosen_rows, chosen_columns), claims=claims,
    )  # fmt: skip


def _lines(entries: Any, key: str, refuse: Any) -> tuple[Line, ...]:
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise refuse(key, "a list of tables, such as [{ epsilon = 1.0 }]", entries)
    lines = []
    for entry in entries:
        changes = {name: value for name, value in entry.items() if name not in _OF_A_LINE}
        first = next(iter(changes.values()), entry.get("at_round"))
        label = str(entry.get("label", f"{first:g}" if isinstance(first, float) else first))
        measure = entry.get("measure")
        if measure is not None and measure not in MEASURES:
            raise refuse("measure", f"one of {', '.join(MEASURES)}", measure)
        lines.append(
            Line(
                label, _number(label), changes, measure, entry.get("search", {}), entry.get("twin", {}),
                entry.get("at_round"), entry.get("by_column", {}),
            )
        )  # fmt: skip
    if len({line.label for line in lines}) < len(lines):
        raise refuse(key, "tables with labels of their own", [line.label for line in lines])
    return tuple(lines)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _chosen(lines: Sequence[Line], wanted: Any, key: str, refuse: Any) -> list[int]:
    """Return which rows or columns are shown: all, or those that the smoke scale names."""
    labels = [line.label for line in lines]
    if wanted is None:
        return list(range(len(lines)))
    texts = [f"{one:g}" if isinstance(one, float) else str(one) for one in wanted]
    for text in texts:
        if text not in labels:
            raise refuse(f"smoke.{key}", f"labels among {labels}", text)
    return [labels.index(text) for text in texts]


def _cut(row: Line, columns: Sequence[int]) -> Line:
    return replace(row, by_column={key: [values[at] for at in columns] for key, values in row.by_column.items()})


def _printed(table: Any, rows: Sequence[Line], columns: Sequence[Line], refuse: Any) -> Printed:
    cells = tuple(tuple(float(value) for value in row) for row in table.get("cells", []))
    if cells and (len(cells) != len(rows) or {len(row) for row in cells} != {len(columns)}):
        raise refuse("printed.cells", f"{len(rows)} rows of {len(columns)} numbers", table["cells"])
    by_row = {key: tuple(map(float, table.get(key, []))) for key in ("best_at", "best", "worst")}
    for key, values in by_row.items():
        if values and len(values) != len(rows):
            raise refuse(f"printed.{key}", f"{len(rows)} numbers, one a row", list(values))
    return Printed(cells, **by_row)


def _part(printed: Printed, rows: Sequence[int], columns: Sequence[int]) -> Printed:
    cells = tuple(tuple(printed.cells[row][column] for column in columns) for row in rows) if printed.cells else ()
    by_row = {
        one.name: tuple(getattr(printed, one.name)[row] for row in rows) if getattr(printed, one.name) else ()
        for one in fields(Printed)
        if one.name != "cells"
    }
    return Printed(cells, **by_row)


def _constants(row: Line, column: Line) -> dict[str, Any]:
    return dict(row.changes.get("constants", {})) | dict(column.changes.get("constants", {}))


_SETTINGS = {one.name for one in fields(Settings)}
_OPTIONS = {name: {one.name for one in fields(kind)} for name, kind in SYSTEMS.items()}
_ALL_OPTIONS = set().union(*_OPTIONS.values())


def _config(table: Mapping[str, Any]) -> Config:
    """Make the config of a cell. What only other systems know is left out: rows may be different systems."""
    own = _SETTINGS | _OPTIONS.get(str(table.get("system")), set()) | {"system"}
    foreign = (_ALL_OPTIONS - own) | {"constants"}
    parsed = configs.parse({key: value for key, value in table.items() if key not in foreign})
    return replace(parsed, settings=replace(parsed.settings, seed=None, data_seed=None))
