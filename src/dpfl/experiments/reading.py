"""Reading experiments from their TOML files, and finding those that come with dpfl.

A file that says something else than an experiment can is refused by name, with what the key must be.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from dpfl.errors import BadInput, choose, require_count
from dpfl.experiments.claims import read_claim
from dpfl.experiments.experiment import MEASURES, Experiment, Line, Printed, Scale
from dpfl.options import fit, read_toml

_KEYS = {
    "title", "shows", "measure", "repetitions", "down", "across", "differs", "fresh_data", "rows", "columns", "base",
    "at_true", "smoke", "printed", "claims", "plan", "log", "log_across", "order", "own", "reading", "ours",
}  # fmt: skip
_OF_OURS = {"reading", "differs", "repetitions", "rows", "columns", "base", "at_true", "smoke", "fresh_data"}
_OF_A_LINE = {"label", "measure", "search", "at_true", "at_round", "by_column"}


def names() -> list[str]:
    """Return the experiments that come with dpfl."""
    return [_name(path) for path in _paths()]


def find(wanted: Sequence[str], scale: Scale, *, repetitions: int | None = None) -> list[Experiment]:
    """Load experiments by name, by paper, from TOML files of the user's own, or all of them.

    repetitions: instead of each file's own.
    """
    known = {_name(path): path for path in _paths()}
    found: list[Experiment] = []
    for name in wanted:
        if name.endswith(".toml"):
            found.append(load(Path(name), scale))
        elif name == "all" or name in papers():
            chosen = [load(path, scale) for path in known.values() if name in ("all", path.parent.name)]
            found += sorted(chosen, key=lambda one: (one.paper, one.order, one.name))
        else:
            found.append(load(choose("name", name, known | dict.fromkeys([*papers(), "all"], Path())), scale))
    if repetitions is not None:
        require_count("repetitions", repetitions, "use at least 2 for a standard error")
        found = [_repeated(one, repetitions) for one in found]
    return list({one.name: one for one in found}.values())


def _repeated(one: Experiment, times: int) -> Experiment:
    ours = None if one.ours is None else _repeated(one.ours, times)
    return replace(one, repetitions=times, own_repetitions=one.repetitions == times, ours=ours)


def papers() -> list[str]:
    """Return the papers whose experiments come with dpfl."""
    return list(dict.fromkeys(path.parent.name for path in _paths()))


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
    second = table.pop("ours", None)
    if second is None:
        return _read(table, name, path, scale, refuse)
    if not isinstance(second, dict) or not second.keys() <= _OF_OURS or not second.keys() >= {"reading", "base"}:
        raise refuse("ours", f"a table of reading, base and perhaps others of {', '.join(sorted(_OF_OURS))}", second)
    if "reading" not in table:
        raise refuse("reading", "given where there is a second one in [ours]", None)
    shared = {key: value for key, value in table.items() if key not in {"differs", "at_true", "reading", "printed"}}
    ours = _read(shared | second, name, path, scale, refuse, other=table)
    return replace(_read(table, name, path, scale, refuse, other=second), ours=ours)


def _read(
    table: dict[str, Any], name: str, path: Path, scale: Scale, refuse: Any, *, other: dict[str, Any] | None = None
) -> Experiment:
    """Read one reading of an experiment; claims may speak of the rows and columns of the other one too."""
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
    other_rows, other_columns = (
        _lines((other or table).get(key, table[key]), key, refuse) for key in ("rows", "columns")
    )
    every_row, every_column = ([line.label for line in lines] for lines in (rows + other_rows, columns + other_columns))
    chosen_rows = _chosen(rows, smoke.pop("rows", None), every_row, "rows", refuse)
    chosen_columns = _chosen(columns, smoke.pop("columns", None), every_column, "columns", refuse)
    claims = tuple(read_claim(one, every_row, every_column, refuse) for one in table.get("claims", []))
    repetitions = smoke.pop("repetitions", table.get("repetitions", 1))
    require_count("repetitions", repetitions, f"mend {str(path)!r}")
    last = smoke.pop("set", {})
    if smoke:
        raise refuse("smoke", "a table of repetitions, rows, columns and set", sorted(smoke))
    return Experiment(
        name=name, paper=path.parent.name, scale=scale, title=fit("title", table["title"], str),
        shows=fit("shows", table.get("shows", ""), str), measure=table["measure"], repetitions=repetitions,
        down=str(table.get("down", "")), across=str(table.get("across", "")), own=bool(table.get("own", False)),
        reading=fit("reading", table.get("reading", ""), str),
        differs=fit("differs", table.get("differs", []), tuple[str, ...]),
        fresh_data=bool(table.get("fresh_data", False)), log=bool(table.get("log", False)),
        log_across=bool(table.get("log_across", False)), order=int(table.get("order", 0)), base=table["base"],
        last=last, at_true=table.get("at_true", {}), plan=table.get("plan", {}),
        rows=tuple(_cut(rows[at], chosen_columns) for at in chosen_rows),
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
                label, _number(label), changes, measure, entry.get("search", {}), entry.get("at_true", {}),
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


def _chosen(lines: Sequence[Line], wanted: Any, known: Sequence[str], key: str, refuse: Any) -> list[int]:
    """Return which rows or columns are shown: all, or those that the smoke scale names and this reading has."""
    labels = [line.label for line in lines]
    if wanted is None:
        return list(range(len(lines)))
    texts = [f"{one:g}" if isinstance(one, float) else str(one) for one in wanted]
    for text in texts:
        if text not in known:
            raise refuse(f"smoke.{key}", f"labels among {labels}", text)
    return [labels.index(text) for text in texts if text in labels]


def _cut(row: Line, columns: Sequence[int]) -> Line:
    return replace(row, by_column={key: [values[at] for at in columns] for key, values in row.by_column.items()})


def _printed(table: Any, rows: Sequence[Line], columns: Sequence[Line], refuse: Any) -> Printed:
    def by_place(key: str) -> tuple[tuple[float, ...], ...]:
        values = tuple(tuple(float(value) for value in row) for row in table.get(key, []))
        if values and (len(values) != len(rows) or {len(row) for row in values} != {len(columns)}):
            raise refuse(f"printed.{key}", f"{len(rows)} rows of {len(columns)} numbers", table[key])
        return values

    cells, errors = by_place("cells"), by_place("errors")
    if errors and not cells:
        raise refuse("printed.errors", "those of printed.cells, or left out", table["errors"])
    by_row = {key: tuple(map(float, table.get(key, []))) for key in ("best_at", "best", "worst")}
    for key, values in by_row.items():
        if values and len(values) != len(rows):
            raise refuse(f"printed.{key}", f"{len(rows)} numbers, one a row", list(values))
    return Printed(cells, errors, **by_row)


def _part(printed: Printed, rows: Sequence[int], columns: Sequence[int]) -> Printed:
    cells, errors = (
        tuple(tuple(whole[row][column] for column in columns) for row in rows) if whole else ()
        for whole in (printed.cells, printed.errors)
    )
    by_row = {
        one.name: tuple(getattr(printed, one.name)[row] for row in rows) if getattr(printed, one.name) else ()
        for one in fields(Printed)
        if one.name not in ("cells", "errors")
    }
    return Printed(cells, errors, **by_row)
