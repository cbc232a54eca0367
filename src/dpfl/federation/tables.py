"""Tables of every form that sites keep them in, as columns of a few thousand rows at a time."""

import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dpfl.errors import BadInput
from dpfl.federation.csv_rows import Row, csv_table
from dpfl.federation.encoding import NUMBERS, Values

ENDINGS = (".csv", ".csv.gz", ".parquet", ".npz")


@dataclass(frozen=True)
class Chunk:
    """Some rows of a table that follow each other."""

    columns: Mapping[str, Values]
    numbers: Sequence[int]  # of the rows, as their owner counts: lines of a text, or rows from 1
    faults: dict[int, str] = field(default_factory=dict)  # position -> what is wrong with the row

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class Table:
    """The names of a table's columns, and its rows, which are read as they are asked for."""

    names: Sequence[str]
    chunks: Callable[[int, Collection[str]], Iterator[Chunk]]  # of so many rows, and of these columns at least
    unit: str = "row"  # what numbers count
    forms: Mapping[str, tuple[tuple[int, ...], bool]] = field(default_factory=dict)

    def form_of(self, name: str) -> tuple[tuple[int, ...], bool]:
        """Return the shape of one value of a column, and whether its type is a number's."""
        return self.forms.get(name, ((), False))


def ending_of(path: Path) -> str | None:
    """Return which of the known endings a file has."""
    return next((ending for ending in ENDINGS if path.name.lower().endswith(ending)), None)


def stem_of(path: Path) -> str:
    """Return a file's name without its ending, which is its site's."""
    return path.name[: -len(ending_of(path) or "") or None]


@contextmanager
def opened(path: Path, where: str) -> Iterator[Table]:
    """Open a table by its ending."""
    ending = ending_of(path)
    if ending is None:
        raise BadInput(f"{where} must end in {', '.join(ENDINGS)}, but does not; convert it")
    if ending == ".parquet":
        with _parquet(path, where) as table:
            yield table
    elif ending == ".npz":
        yield _npz(path, where)
    else:
        with csv_table(path, where) as (names, rows):
            yield Table(names, lambda size, _: _csv_chunks(names, rows, size), unit="line")


def frame_table(columns: Any, where: str) -> Table:
    """Return columns in memory as a table: a data frame, or a mapping of names to arrays, series or lists."""
    if not isinstance(columns, Mapping) and not hasattr(columns, "columns"):
        raise BadInput(f"{where} must be a data frame or columns by name, was {type(columns).__name__!r}; convert it")
    names = list(columns.columns if hasattr(columns, "columns") else columns)
    found = {str(name): _values(columns[name]) for name in names}
    for name, values in found.items():
        if np.ndim(values) == 0 if isinstance(values, np.ndarray) else values is None:
            raise BadInput(f"{where} must have a value for each record in {name!r}, has a single one; give a list")
    return _in_memory(found, where, list(map(str, names)))


def _values(column: Any) -> Any:
    """Return a column as an array, or as a list where it holds values of several types; None where it is no column."""
    if hasattr(column, "to_numpy"):
        column = column.to_numpy()
    elif hasattr(column, "numpy"):
        column = column.detach().cpu().numpy()
    if isinstance(column, np.ndarray):
        return column
    return list(column) if isinstance(column, Iterable) and not isinstance(column, (str, bytes)) else None


def _in_memory(columns: Mapping[str, Values], where: str, names: Sequence[str]) -> Table:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        name, other = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
        raise BadInput(
            f"{where} must have columns of one length, but {name!r} has {lengths[name]:,} rows and {other!r}"
            f" {lengths[other]:,}; check how they were selected"
        )
    rows = max(lengths.values(), default=0)

    def chunks(size: int, _: Collection[str]) -> Iterator[Chunk]:
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            yield Chunk({name: values[part] for name, values in columns.items()}, range(start + 1, part.stop + 1))

    return Table(names, chunks, forms={name: _form(values) for name, values in columns.items()})


def _form(values: Values) -> tuple[tuple[int, ...], bool]:
    if not isinstance(values, np.ndarray):
        return (), False
    return tuple(values.shape[1:]), values.dtype.kind in NUMBERS


def _csv_chunks(names: Sequence[str], rows: Iterator[Row], size: int) -> Iterator[Chunk]:
    empty = [None] * len(names)
    while part := list(islice(rows, size)):
        faults = {row: wrong for row, (_, wrong) in enumerate(part) if isinstance(wrong, str)}
        columns = zip(*(empty if isinstance(fields, str) else fields for _, fields in part), strict=True)
        yield Chunk(dict(zip(names, columns, strict=True)), [line for line, _ in part], faults)


@contextmanager
def _parquet(path: Path, where: str) -> Iterator[Table]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadInput(
            f'{where} must be read by pyarrow, which is not installed; run pip install "dpfl[parquet]", or save it as'
            " CSV"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names

            def chunks(size: int, wanted: Collection[str]) -> Iterator[Chunk]:
                start = 1
                for batch in file.iter_batches(size, columns=[name for name in names if name in wanted]):
                    columns = {name: _arrow(batch.column(name)) for name in wanted}
                    yield Chunk(columns, range(start, start + len(batch)))
                    start += len(batch)

            yield Table(names, chunks)
    except (pyarrow.ArrowException, OSError):
        raise BadInput(f"{where} must be a Parquet file, but cannot be read as one; write it anew") from None


def _arrow(column: Any) -> Values:
    """Return a column of Parquet as values that any record may hold: none of them can end the reading."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind, types = column.type, pyarrow.types
    if types.is_integer(kind) or types.is_floating(kind):
        numbers: Values = column.to_numpy(zero_copy_only=False)  # a gap becomes NaN
        return numbers
    if types.is_boolean(kind) or types.is_decimal(kind):
        return list(column.to_pylist())
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        texts = column.cast(pyarrow.large_binary()).to_pylist()  # which may be no UTF-8
        return [None if text is None else text.decode("utf-8", "surrogateescape") for text in texts]
    instead = date.min if types.is_temporal(kind) else ()  # what has no number needs no reading
    return [None if gap else instead for gap in column.is_null().to_pylist()]


def _npz(path: Path, where: str) -> Table:
    try:
        with np.load(path, allow_pickle=False) as file:
            columns: dict[str, Values] = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, KeyError):
        raise BadInput(
            f"{where} must be an NPZ file of plain arrays (np.savez, no Python objects), but cannot be read as one;"
            " write it anew"
        ) from None
    alone = [name for name, values in columns.items() if np.ndim(values) == 0]
    if alone:
        raise BadInput(f"{where} must hold arrays with a row for each record, but {alone[0]!r} has none; leave it out")
    return _in_memory(columns, where, list(columns))
