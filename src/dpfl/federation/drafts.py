"""Drafts of a schema: what is known of columns by their names, by what somebody says and by a file that is public.

No private minimum, maximum or vocabulary is written: what nobody said stays open. Whether most values of a column are
numbers is asked of private records, unless that is not wanted, and the draft says so to the owner who reads it.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dpfl.errors import BadInput, suggestion
from dpfl.federation.encoding import is_date
from dpfl.federation.schema import BLANK, MISSING, ZEROS, as_number, schema_of, toml, toml_key
from dpfl.federation.tables import Table, opened

USUAL_TARGETS = ("target", "label", "class", "outcome", "y")
FEW_NUMBERS, FEW_TEXTS = 10, 100  # distinct values of a public column that are taken for a vocabulary
SAMPLE = 1_000  # rows of each file, of which more than half decide

Said = Mapping[str, Any]  # keys of a column's table


@dataclass(frozen=True)
class Draft:
    """A schema that somebody has still to look at, and perhaps to fill in."""

    target: str
    columns: Mapping[str, Said]
    reasons: Mapping[str, str]  # where a column's table is from
    about: Sequence[str]  # sentences on the whole

    @property
    def blanks(self) -> list[str]:
        """Return the keys that are still open."""
        open_keys = [
            f"columns.{name}.{key}"
            for name, said in self.columns.items()
            for key, value in said.items()
            if value == BLANK
        ]
        return ["target"] * (self.target == BLANK) + open_keys

    def to_toml(self) -> str:
        """Write the draft, with a comment on where each table is from."""
        head = [f"# {sentence}" for sentence in self.about]
        head += [f"target = {toml(self.target)}", f"missing = {toml(MISSING)}", 'bad_rows = "zero"', ""]
        tables = []
        for name, said in self.columns.items():
            tables += [f"[columns.{toml_key(name)}]  # {self.reasons[name]}"]
            tables += [f"{key} = {toml(value)}" for key, value in said.items()]
            if name != self.target and (neutral := _neutral(said)):
                tables += [f"# missing = {neutral}  # what stands for a missing value; without it, such a row is bad"]
            tables += [""]
        return "\n".join([*head, *tables])


def draft(
    files: Iterable[Path],
    *,
    public: Path | None = None,
    target: str | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    values: Mapping[str, Sequence[str | list[str]]] | None = None,
    names_only: bool = False,
) -> Draft:
    """Draft a schema for files with the same columns.

    ranges, values: what everybody may know of columns, as somebody says.
    public: a file that is declared public: its least and largest values and its vocabularies may be written.
    names_only: read no record of the files, but their column names alone.
    """
    files = list(files)
    names, guesses = _looked_at(files, 0 if names_only else SAMPLE)
    ranges, values = ranges or {}, values or {}
    for field, named in (("range", ranges), ("values", values), ("target", [target] if target else [])):
        for name in named:
            if name not in names:
                near = suggestion(name, names) or f"; the columns are {', '.join(names)}"
                raise BadInput(f"{field} must be for one of the files' columns, was for {name!r}{near}")
    if both := sorted(set(ranges) & set(values)):
        raise BadInput(f"range and values must not both be given for a column, were for {both[0]!r}; leave one out")
    target = target or next((usual for usual in USUAL_TARGETS if usual in names), BLANK)
    known = {} if public is None else _public(public, names, target)
    columns: dict[str, Said] = {}
    reasons: dict[str, str] = {}
    for name in names:
        if name in ranges:
            low, high = ranges[name]
            columns[name], reasons[name] = {"kind": "number", "low": low, "high": high}, "as typed"
        elif name in values:
            kind = "class" if name == target else "category"
            columns[name], reasons[name] = {"kind": kind, "values": list(values[name])}, "as typed"
        elif name in known:
            columns[name], reasons[name] = known[name], f"from {public.name if public else ''}, which is public"
        else:
            columns[name], reasons[name] = _guessed(guesses[name], name == target)
    made = Draft(target, columns, reasons, _about(len(files), public, names_only))
    if not made.blanks:
        schema_of(tomllib.loads(made.to_toml()))
    return made


def _neutral(said: Said) -> str | None:
    """Return what a missing value could be, of what is public: the middle of the range, or none of the vocabulary."""
    if said["kind"] == "number":
        return "…" if BLANK in (said["low"], said["high"]) else toml(float(said["low"] / 2 + said["high"] / 2))
    return toml(ZEROS) if said["kind"] == "category" else None


def _about(files: int, public: Path | None, names_only: bool) -> list[str]:
    count = "one file" if files == 1 else f"{files} files"
    sentences = [
        f"A draft, from the column names of {count}. Write only what everybody may know: sites share this file.",
        f'Each "{BLANK}" is still to be filled in; kind = "ignored" leaves a column out.',
    ]
    if not names_only:
        sentences += [
            f"Kinds are a look at private records: whether most of the first {SAMPLE:,} rows hold numbers, which",
            "one record changes only where it tips the balance. No range is from them; --names-only does not look.",
        ]
    if public is not None:
        sentences.append(f"Ranges and vocabularies of {public.name} stand here because it was declared public.")
    return sentences


def _looked_at(files: Sequence[Path], rows: int) -> tuple[Sequence[str], Mapping[str, Said]]:
    """Return the columns of all files, and for each what forms it has and how many values are numbers, dates, texts."""
    names: Sequence[str] = []
    seen: dict[str, dict[str, Any]] = {}
    for path in files:
        where = f"file {str(path)!r}"
        with opened(path, where) as table:
            _require_names(table, where)
            if not names:
                names, first = table.names, where
                seen = {name: {"shape": table.form_of(name)[0], "counts": Counter()} for name in names}
            if different := sorted(set(names) ^ set(table.names)):
                has = different[0] in table.names
                raise BadInput(
                    f"{where} must have the columns of {first}, but {'has' if has else 'lacks'} {different[0]!r}"
                    f"{suggestion(different[0], names if has else table.names) or '; make them agree'}"
                )
            _require_shapes(table, seen, where)
            for chunk in islice(table.chunks(rows, names), 1) if rows else ():
                for name in names:
                    if not seen[name]["shape"]:
                        seen[name]["counts"].update(map(_type_of, chunk.columns[name]))
    return names, seen


def _require_names(table: Table, where: str) -> None:
    """Refuse a first line that is a record, without quoting it, and a name that stands there twice."""
    if any(_type_of(name) != "text" for name in table.names):
        raise BadInput(
            f"{where} must begin with a line of column names, but there are numbers, dates or gaps in it; add the names"
        )
    if twice := [name for name, count in Counter(table.names).items() if count > 1]:
        raise BadInput(f"{where} must name each column once, but has {twice[0]!r} several times; rename one")


def _require_shapes(table: Table, seen: Mapping[str, Said], where: str) -> None:
    for name, said in seen.items():
        if (shape := table.form_of(name)[0]) != said["shape"]:
            raise BadInput(
                f"{where} must hold {name!r} in the shape of the other files, {list(said['shape'])} a record, had"
                f" {list(shape)}; make them agree"
            )


def _type_of(value: Any) -> str:
    if value is None or (isinstance(value, str) and value.strip() in MISSING):
        return "gap"
    if is_date(value):
        return "date"
    return "text" if math.isnan(as_number(value)) else "number"


def _guessed(seen: Said, is_target: bool) -> tuple[Said, str]:
    """Return what can be said of a column that nobody said anything of."""
    if seen["shape"]:
        return {"kind": "array", "shape": list(seen["shape"]), "low": BLANK, "high": BLANK}, "an array in the file"
    if is_target:
        return {"kind": "class", "values": BLANK}, 'or kind = "number" with low and high, for regression'
    counts = seen["counts"]
    held = counts.total() - counts["gap"]
    most = next((each for each in ("number", "text", "date") if 2 * counts[each] > held), None)
    if most == "number":
        return {"kind": "number", "low": BLANK, "high": BLANK}, 'or "category" with values, where numbers are codes'
    if most == "text":
        return {"kind": "category", "values": BLANK}, "most values are texts"
    if most == "date":
        return {"kind": BLANK}, 'most values are dates: make numbers of them, or kind = "ignored"'
    return {"kind": BLANK}, "number, category, flag, array or ignored"


def _public(path: Path, names: Sequence[str], target: str) -> dict[str, Said]:
    """Return what a public file says of the columns that it has."""
    where = f"public file {str(path)!r}"
    seen: dict[str, _Public] = {}
    with opened(path, where) as table:
        _require_names(table, where)
        shared = [name for name in table.names if name in names and not table.form_of(name)[0]]
        for chunk in table.chunks(SAMPLE, shared):
            for name in shared:
                seen.setdefault(name, _Public()).add(chunk.columns[name])
    if not shared:
        raise BadInput(f"{where} must have columns of the other files, but has none of them; give another")
    said = {name: public.said(name == target) for name, public in seen.items()}
    return {name: table for name, table in said.items() if table is not None}


class _Public:
    """The range and the vocabulary of a public column, of which no more is kept than could stand in a schema."""

    def __init__(self) -> None:
        self.low, self.high, self.whole = math.inf, -math.inf, True
        self.numbers: set[float] = set()
        self.texts: set[str] = set()

    def add(self, values: Iterable[Any]) -> None:
        for value in values:
            kind, number = _type_of(value), as_number(value)
            if kind == "number" and math.isfinite(number):
                self.low, self.high = min(self.low, number), max(self.high, number)
                self.whole = self.whole and number.is_integer()
                if len(self.numbers) <= FEW_TEXTS:
                    self.numbers.add(number)
            elif kind in ("text", "date") and len(self.texts) <= FEW_TEXTS:
                self.texts.add(str(value).strip())

    def said(self, is_target: bool) -> Said | None:
        """Return what its values say of a column; None where that is too little or too much."""
        codes = self.whole and len(self.numbers) <= FEW_NUMBERS
        if self.low < self.high and not self.texts and not codes:
            return {"kind": "number", "low": self.low, "high": self.high}
        vocabulary = [f"{number:.0f}" if number.is_integer() else repr(number) for number in sorted(self.numbers)]
        vocabulary += sorted(self.texts)
        if not 2 <= len(vocabulary) <= FEW_TEXTS:
            return None
        return {"kind": "class" if is_target else "category", "values": vocabulary}
