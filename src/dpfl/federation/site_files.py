"""A site's own file, read as the schema says: every row below the header is a record, and none ends the reading.

What the file as a whole says (its columns, its form, whether it holds rows) must be right. What a row says cannot be
wrong for another: a bad one stays where it is and counts as zero, and its owner alone is told of it, by counts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfl.errors import BadInput, suggestion
from dpfl.federation.csv_rows import MANY_FIELDS, OPEN_QUOTE
from dpfl.federation.encoding import WAYS_OUT, Encoder
from dpfl.federation.records import Records
from dpfl.federation.schema import Schema
from dpfl.federation.tables import ENDINGS, Chunk, Table, ending_of, frame_table, opened, stem_of

_MOST_VALUES = 2**20  # encoded at a time, whatever a file's size
_MOST_ROWS = 2**10  # fewer iterators at once than a processor's caches hold


@dataclass(frozen=True)
class SiteFile:
    """The records of a site, and what is wrong with some of them, for the site's owner alone."""

    name: str
    records: Records
    bad: Mapping[str, int] = field(repr=False)  # reason -> how many rows


def read_site(path: Path, schema: Schema) -> SiteFile:
    """Read a site's file (CSV, packed or not, Parquet or NPZ); the site's name is the file's without its ending."""
    path = Path(path)
    where = f"site {str(path)!r}"
    with opened(path, where) as table:
        return _read(stem_of(path), table, schema, where)


def encode(columns: Mapping[str, Any], schema: Schema, where: str) -> SiteFile:
    """Read a site's columns from memory: a data frame of pandas or polars, or arrays and lists by name.

    where: who is spoken of in sentences, such as "client 'cleveland'".
    """
    return _read(where, frame_table(columns, where), schema, where)


def site_files(places: Sequence[str | Path]) -> dict[str, Path]:
    """Return the sites' files by name: those of a folder, sorted, and those that are listed."""
    found: dict[str, Path] = {}
    for place in map(Path, [places] if isinstance(places, (str, Path)) else places):
        for path in _files_at(place):
            name = stem_of(path)
            if name in found:
                raise BadInput(
                    f"sites must have a name each, but {str(found[name])!r} and {str(path)!r} are both {name!r};"
                    " rename one"
                )
            found[name] = path
    if not found:
        raise BadInput("sites must be a folder or a list of files, was empty; name one file a site")
    return found


def _files_at(place: Path) -> list[Path]:
    if place.is_dir():
        inside = sorted(path for path in place.iterdir() if path.is_file() and not path.name.startswith("."))
        files = [path for path in inside if ending_of(path)]
        if not files:
            raise BadInput(
                f"sites must be a folder with a file ({', '.join(ENDINGS)}) a site, but {str(place)!r} has none;"
                " check the path"
            )
        return sorted(files, key=stem_of)
    if not place.is_file():
        raise BadInput(f"sites must be a folder or files, but there is no {str(place)!r}; check the path")
    if not ending_of(place):
        raise BadInput(f"sites must be files that end in {', '.join(ENDINGS)}, was {str(place)!r}; convert it")
    return [place]


def _read(name: str, table: Table, schema: Schema, where: str) -> SiteFile:
    _require_columns(table.names, schema, where)
    _require_form(table, schema, where)
    size = max(1, min(_MOST_ROWS, _MOST_VALUES // len(schema.features)))
    encoder, tally, x, y = Encoder(schema), _Tally(), _Pile(), _Pile()
    for chunk in table.chunks(size, encoder.wanted):
        features, targets = encoder(chunk.columns, chunk.faults)
        x.add(features)
        y.add(targets)
        tally.add(chunk)
    if not x.height:
        raise BadInput(f"{where} must have at least one row of data, had none; leave the site out")
    _require_rows(tally, x.height, table.unit, schema, where)
    return SiteFile(name, Records(x.to_tensor(), y.to_tensor()), MappingProxyType(dict(tally.counts)))


class _Pile:
    """Rows below each other in one piece of memory, which grows where it lies: at no time are they there twice."""

    def __init__(self) -> None:
        self.rows = np.empty(0, np.float32)
        self.height = 0

    def add(self, part: NDArray[Any]) -> None:
        """Put some more rows below."""
        if not self.height:
            self.rows = np.empty((0, *part.shape[1:]), part.dtype)
        self.height += len(part)
        if self.height > len(self.rows):
            self._resize(self.height + self.height // 8)
        self.rows[self.height - len(part) : self.height] = part

    def to_tensor(self) -> Tensor:
        """Return the rows, and no room for more."""
        self._resize(self.height)
        return torch.from_numpy(self.rows)

    def _resize(self, height: int) -> None:
        self.rows.resize((height, *self.rows.shape[1:]), refcheck=False)  # nobody else has seen them yet


class _Tally:
    """How many rows are bad, why, and where the first of each kind is."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, int] = {}

    def add(self, chunk: Chunk) -> None:
        for row, reason in sorted(chunk.faults.items()):
            self.counts[reason] += 1
            self.first.setdefault(reason, chunk.numbers[row])


def _require_rows(tally: _Tally, rows: int, unit: str, schema: Schema, where: str) -> None:
    """Refuse a site of which nothing is left, or one with bad rows where its owner is to mend them first."""
    bad = tally.counts.total()
    if bad < rows and (not bad or schema.bad_rows == "zero"):
        return
    reason, count = tally.counts.most_common(1)[0]
    must = "have a row that the schema can read" if bad == rows else 'have no bad rows where the schema says "refuse"'
    raise BadInput(
        f"{where} must {must}, but {_all(bad, rows)} cannot be read, most often because the {_subject(reason)}"
        f" ({count:,} rows, the first in {unit} {tally.first[reason]:,}); {_way_out(reason)}"
    )


def _all(bad: int, rows: int) -> str:
    return f"all {rows:,}" if bad == rows else f"{bad:,} of {rows:,}"


def _subject(reason: str) -> str:
    return reason if reason.startswith("row ") else f"column {reason}"


def _way_out(reason: str) -> str:
    for fault, way_out in WAYS_OUT.items():
        if reason.endswith(fault):
            return way_out
    return {
        MANY_FIELDS: "write one value for each column, with quotes around a text that holds a separator",
        OPEN_QUOTE: 'close each quote, and write one inside a text twice ("")',
    }.get(reason, "mend those rows")


def _require_columns(names: Sequence[str], schema: Schema, where: str) -> None:
    """Refuse a file whose columns are not the schema's; nothing that might be a record is quoted as a name."""
    if not set(names) & set(schema.columns):
        raise BadInput(
            f"{where} must begin with the schema's column names, such as {schema.target!r}, but has none of them;"
            " put a line of names at its top, or give the schema that is meant for it"
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise BadInput(f"{where} must name each column once, but has {_listed(twice)} several times; rename one")
    lacking = [name for name, each in schema.columns.items() if each.kind != "ignored" and name not in names]
    more = [name for name in names if name not in schema.columns]
    if lacking:
        raise BadInput(
            f"{where} must have the schema's columns, but lacks {_listed(lacking)}"
            + (f" and has {_listed(more)}, which the schema does not know" if more else "")
            + (suggestion(lacking[0], more) or "; add what is lacking, or take it out of the schema")
        )
    if more:
        raise BadInput(
            f"{where} must have the schema's columns alone, but has {_listed(more)} beside them"
            + (suggestion(more[0], schema.columns) or '; leave it out, or give it kind = "ignored" in the schema')
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5:,} more"


def _require_form(table: Table, schema: Schema, where: str) -> None:
    """Refuse an array of another shape or type than the schema's, and one where a column of single values is meant."""
    for column in schema.columns.values():
        if column.kind == "ignored":
            continue
        shape, numbers = table.form_of(column.name)
        if column.kind == "array" and not (numbers and shape == column.shape):
            raise BadInput(
                f"{where} must hold {column.name!r} as an array of numbers of shape [n, {_sizes(column.shape)}], had"
                f" {'[n, ' + _sizes(shape) + ']' if shape else 'single values'}{'' if numbers else ', not numbers'};"
                " write it so to an .npz file"
            )
        if column.kind != "array" and shape:
            raise BadInput(
                f"{where} must hold {column.name!r} as one value a row, had an array of shape [n, {_sizes(shape)}];"
                ' give it kind = "array" in the schema'
            )


def _sizes(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))
