"""What everybody may know of the sites' columns: their kinds, ranges and vocabularies, and what stands for a gap.

A schema is public and says all that values are scaled, filled and encoded by. Nothing of it is found in a site's own
records: a mean, a largest value or a vocabulary that they decide changes what all of a site's records become when one
of them is replaced, and no clip of single records bounds that. So whoever asks for such a thing is refused.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from dpfl.errors import BadInput, suggestion
from dpfl.options import read_toml

Kind = Literal["number", "category", "flag", "class", "array", "ignored"]
BLANK = "?"  # what a draft leaves open
ZEROS = "all zeros"  # what a missing or an unknown value of a vocabulary can become
MISSING = ("", "?", "NA")  # how a missing value is written, unless the schema says otherwise
KEYS: Mapping[Kind, tuple[str, ...]] = {
    "number": ("low", "high", "missing"),
    "category": ("values", "missing", "other"),
    "flag": ("values", "missing", "other"),
    "class": ("values",),
    "array": ("shape", "low", "high"),
    "ignored": (),
}
_OPEN_KEYS = ("kind", "low", "high", "values", "shape")
_STATISTIC_WORDS = re.compile(r"(?i)\b(mean|median|mode|average|most.?frequent|most.?common|min|max|imputed?)\b")
_STATISTICS = re.compile(r"(?i)scal|norm|standard|mean|median|std|cent(er|re)|impute|fill|quantile|min|max|per.?site")


@dataclass(frozen=True)
class Column:
    """A column: what kind of values it holds, and what becomes of each."""

    name: str
    kind: Kind
    low: float | None = None  # values are clamped to this public range and scaled by it to [-1, 1]
    high: float | None = None
    values: tuple[tuple[str, ...], ...] = ()  # the public vocabulary; several written values can be one
    shape: tuple[int, ...] = ()  # of one record of an array
    missing: float | str | None = None  # what stands for a missing value; None: a row that lacks it is bad
    other: str | None = None  # what stands for a value outside the vocabulary; None: such a row is bad

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of what this column becomes."""
        if self.kind == "category":
            return tuple(f"{self.name}={written[0]}" for written in self.values)
        if self.kind == "array":
            places = product(*(range(size) for size in self.shape))
            return tuple(f"{self.name}[{','.join(map(str, place))}]" for place in places)
        return () if self.kind == "ignored" else (self.name,)

    def to_toml(self) -> str:
        """Write this column as a table of a schema."""
        entries: dict[str, Any] = {"kind": self.kind}
        for key in KEYS[self.kind]:
            entries[key] = getattr(self, key)
        entries["values"] = [written[0] if len(written) == 1 else [*written] for written in self.values] or None
        lines = [f"{key} = {toml(value)}" for key, value in entries.items() if value is not None]
        return "\n".join([f"[columns.{toml_key(self.name)}]", *lines, ""])


@dataclass(frozen=True)
class Schema:
    """The columns of all sites, the target's among them, and what a row that breaks them counts as."""

    target: str
    columns: Mapping[str, Column]
    bad_rows: Literal["zero", "refuse"] = "zero"  # count as zero in training, or be mended by the site's owner first
    missing: tuple[str, ...] = MISSING

    @property
    def classes(self) -> int | None:
        """Return how many classes the target has; None for regression."""
        return len(self.columns[self.target].values) or None

    @property
    def inputs(self) -> tuple[Column, ...]:
        """Return the columns that become features."""
        return tuple(
            column for name, column in self.columns.items() if name != self.target and column.kind != "ignored"
        )

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Return the names of the encoded features, in order."""
        return tuple(feature for column in self.inputs for feature in column.features)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one encoded record."""
        first = self.inputs[0]
        return first.shape if first.kind == "array" else (len(self.features),)

    def to_toml(self) -> str:
        """Write everything; reading the text gives this schema back."""
        head = {"target": self.target, "missing": list(self.missing), "bad_rows": self.bad_rows}
        lines = "".join(f"{key} = {toml(value)}\n" for key, value in head.items())
        return "\n".join([lines, *(column.to_toml() for column in self.columns.values())])


def read_schema(path: Path) -> Schema:
    """Read a schema.toml, or say in one sentence what in it cannot be used."""
    return schema_of(read_toml("schema", Path(path)), f" in {str(path)!r}")


def schema_of(table: Mapping[str, Any], where: str = "") -> Schema:
    """Make a schema of a table as schema.toml holds it.

    where: words that follow a key in sentences, such as " in 'schema.toml'".

    >>> age, sick = {"kind": "number", "low": 20, "high": 90}, {"kind": "class", "values": ["0", ["1", "2"]]}
    >>> schema_of({"target": "sick", "columns": {"age": age, "sick": sick}}).features
    ('age',)
    """
    _require_no_blanks(table, where)
    known = ("target", "missing", "bad_rows", "columns")
    for key in table:
        _require_known(key, key, known, where)
    columns = table.get("columns")
    if not isinstance(columns, Mapping) or not all(isinstance(entry, Mapping) for entry in columns.values()):
        raise BadInput(f"columns{where} must be tables such as [columns.age], was {columns!r}; write one a column")
    target = table.get("target")
    if not isinstance(target, str) or target not in columns:
        near = suggestion(target, columns) if isinstance(target, str) else ""
        raise BadInput(
            f"target{where} must name one of the columns, was {target!r}{near or '; add a table [columns.…] for it'}"
        )
    missing = table.get("missing", list(MISSING))
    if not isinstance(missing, list) or not all(isinstance(text, str) for text in missing):
        raise BadInput(f'missing{where} must be a list of texts such as ["", "NA"], was {missing!r}; correct it')
    bad_rows = table.get("bad_rows", "zero")
    if bad_rows not in ("zero", "refuse"):
        raise BadInput(
            f'bad_rows{where} must be "zero" or "refuse", was {bad_rows!r}; no row can be dropped, since how many'
            " records a site holds is public and one of them must not change it"
        )
    schema = Schema(
        target,
        {name: _column(name, entry, name == target, where) for name, entry in columns.items()},
        bad_rows,
        tuple(text.strip() for text in missing),
    )
    _require_features(schema, where)
    return schema


def as_number(value: object) -> float:
    """Return the number that a value is, or that its text writes; NaN where it is none.

    >>> as_number("01"), as_number(" 1.0 "), as_number("1_0")
    (1.0, 1.0, nan)
    """
    # float() would take 1_0 for ten, a date of NumPy for its nanoseconds, and a complex number for half of it.
    if (isinstance(value, str) and "_" in value) or (
        isinstance(value, np.generic) and value.dtype.kind not in "biufSU"
    ):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except Exception:  # of any kind: a value of somebody's record, and it ends nothing
        return math.nan


def lookup(column: Column) -> dict[str | float, int]:
    """Return the position in the vocabulary for each of its texts, and for the number that a text writes.

    Where a file writes `1`, `1.0` or `01`, each is the vocabulary's "1": which of them it is can hang on another record
    (a gap makes a program write all of a column as decimals), and must not show.
    """
    found: dict[str | float, int] = {}
    for position, written in enumerate(column.values):
        for text in written:
            for key in (text, as_number(text)):
                if isinstance(key, float) and not math.isfinite(key):
                    continue
                if found.setdefault(key, position) != position:
                    raise BadInput(f"must name each value once, but has {text!r} twice, as a text or as a number")
    return found


def _require_no_blanks(table: Mapping[str, Any], where: str) -> None:
    """Refuse a draft that is not filled in, and name all that is open."""
    blanks = ["target"] if table.get("target") == BLANK else []
    columns = table.get("columns")
    for name, entry in columns.items() if isinstance(columns, Mapping) else ():
        if isinstance(entry, Mapping):
            blanks += [f"columns.{name}.{key}" for key in _OPEN_KEYS if entry.get(key) == BLANK]
    if blanks:
        raise BadInput(
            f"schema{where} must be filled in, but {', '.join(blanks)} {'is' if len(blanks) == 1 else 'are'} still"
            f' "{BLANK}"; write what is public, or kind = "ignored" for a column that is not to be used'
        )


def _require_known(name: str, key: str, known: tuple[str, ...], where: str) -> None:
    if key not in known and _STATISTICS.search(key):
        raise _statistic(f"{name}{where} must be left out")
    if key not in known:
        raise BadInput(
            f"{name}{where} must be one of the keys {', '.join(known)}, was not"
            f"{suggestion(key, known) or '; leave it out'}"
        )


def _statistic(what: str) -> BadInput:
    """Return the refusal of anything that a site's own records would decide."""
    return BadInput(
        f"{what}: what a site's own records decide changes all of its records with any one of them, so that clipping"
        " each record no longer bounds what one person can change; give a public range or value instead (low, high,"
        " values, missing)"
    )


def _column(name: str, entry: Mapping[str, Any], is_target: bool, where: str) -> Column:
    """Check one column's table."""

    def field(key: str) -> str:
        return f"columns.{name}.{key}{where}"

    kind = _kind(field("kind"), entry.get("kind"))
    if is_target and kind not in ("class", "number"):
        raise BadInput(f'{field("kind")} must be "class" or "number" for the target, was {kind!r}; write one of them')
    if kind == "class" and not is_target:
        raise BadInput(f'{field("kind")} must not be "class", which only the target is; write kind = "category"')
    known = tuple(key for key in KEYS[kind] if not (is_target and key == "missing"))
    for key in entry:
        _require_known(f"columns.{name}.{key}", key, ("kind", *known), where)
    made: dict[str, Any] = {}
    if "low" in known:
        made["low"], made["high"] = (_number(field(key), entry.get(key)) for key in ("low", "high"))
        if not made["high"] / 2 - made["low"] / 2 > 0:
            raise BadInput(
                f"{field('low')} must be below high, was {made['low']:g} with high {made['high']:g}; mend it"
            )
    if "shape" in known:
        made["shape"] = _shape(field("shape"), entry.get("shape"))
    if "values" in known:
        made["values"] = _values(field("values"), entry.get("values"), kind)
        _require_distinct(field("values"), Column(name, kind, values=made["values"]))
        for key in ("missing", "other"):
            if key in entry:
                made[key] = _stand_in(field(key), entry[key], made["values"])
    elif "missing" in entry:
        made["missing"] = _number(field("missing"), entry["missing"])
        if not made["low"] <= made["missing"] <= made["high"]:
            raise BadInput(f"{field('missing')} must lie between low and high, was {made['missing']:g}; choose another")
    return Column(name, kind, **made)


def _kind(field: str, value: Any) -> Kind:
    if not isinstance(value, str) or value not in KEYS:
        near = suggestion(str(value), KEYS) or "; write one of them"
        raise BadInput(f"{field} must be one of {', '.join(KEYS)}, was {value!r}{near}")
    return cast(Kind, value)


def _number(field: str, value: Any) -> float:
    if isinstance(value, str):
        raise _statistic(f"{field} must be a number that is public, was {value!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadInput(f"{field} must be a number that is public, was {value!r}; write one")
    return float(value)


def _shape(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(size) is int and size > 0 for size in value):
        raise BadInput(f"{field} must be the shape of one record, such as [28, 28], was {value!r}; write it")
    return tuple(value)


def _values(field: str, value: Any, kind: Kind) -> tuple[tuple[str, ...], ...]:
    """Return a vocabulary as groups of written values, each of which is one value."""
    least, what = {"class": (2, "classes"), "flag": (2, "values")}.get(kind, (1, "values"))
    if not isinstance(value, list) or len(value) < least or (kind == "flag" and len(value) > 2):
        count = "exactly 2" if kind == "flag" else f"at least {least}"
        was = f"{len(value)}" if isinstance(value, list) else repr(value)
        raise BadInput(f'{field} must be a list of {count} {what}, such as ["0", "1"], was {was}; write it')
    groups = tuple(tuple(map(_text, group)) for group in (g if isinstance(g, list) else [g] for g in value))
    if not all(groups) or any(text is None for group in groups for text in group):
        raise BadInput(f'{field} must hold texts, or lists of texts that are one value, as ["0", ["1", "2"]]; mend it')
    return cast(tuple[tuple[str, ...], ...], groups)


def _text(value: Any) -> str | None:
    """Return how a value of a vocabulary is written; None where it is no text and no number."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).strip() if isinstance(value, (str, int, float)) else None


def _require_distinct(field: str, column: Column) -> None:
    try:
        lookup(column)
    except BadInput as problem:
        raise BadInput(f"{field} {problem}; leave one out, or put both in one list") from None


def _stand_in(field: str, value: Any, values: tuple[tuple[str, ...], ...]) -> str:
    text = _text(value)
    if text == ZEROS or any(text in written for written in values):
        return cast(str, text)
    if isinstance(value, str) and _STATISTIC_WORDS.search(value):
        raise _statistic(f"{field} must be one of the column's values, was {value!r}")
    raise BadInput(f'{field} must be one of the column\'s values or "{ZEROS}", was {value!r}; choose one of them')


def _require_features(schema: Schema, where: str) -> None:
    arrays = [column.name for column in schema.inputs if column.kind == "array"]
    if not schema.inputs:
        raise BadInput(f"columns{where} must hold a feature beside the target, had none; add one")
    if arrays and len(schema.inputs) > 1:
        raise BadInput(
            f"columns.{arrays[0]}{where} must be the only feature, as an array, but there are {len(schema.inputs)};"
            ' call the others kind = "ignored"'
        )


def toml(value: Any) -> str:
    """Write a value as TOML."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(entry) for entry in value) + "]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def toml_key(name: str) -> str:
    """Write a column's name as a key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)
