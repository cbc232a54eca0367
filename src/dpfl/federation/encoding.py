"""What a record's values become under a schema: numbers that follow from that record and from no other.

A value that the schema has no number for spoils its own row: all features of that row become NaN and its target 0, as
for every private record that cannot be computed, so that what was wrong leaves no trace in them.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfl.federation.schema import ZEROS, Column, Schema, as_number, lookup

Values = Sequence[Any] | NDArray[Any]
Read = Callable[[Any], float]  # one value; NaN where the schema has no number for it

MISSING = "is missing"
DATE = "is a date"
NO_NUMBER = "is no number"
NOT_FINITE = "is not finite"
UNKNOWN = "is none of the schema's values"
WAYS_OUT: Mapping[str, str] = {
    MISSING: "give the column `missing = …` in the schema, or fill it in",
    DATE: 'write a number, such as a year or the days since a public day, or call the column kind = "ignored"',
    NO_NUMBER: "write numbers as 12.5, or add how a missing one is written to `missing = […]` in the schema",
    NOT_FINITE: "write finite numbers, or leave what is not known empty",
    UNKNOWN: "add it to the schema if everybody may know it, or say there what `other = …` values become",
}
_DATE = re.compile(r"\d{4}[-/.]\d\d?[-/.]\d\d?([T ].*)?|\d\d?[-/.]\d\d?[-/.](\d\d|\d{4})([T ].*)?")
_FLOATS = (float, np.floating, Decimal)
NUMBERS = "biuf"  # kinds of arrays whose values are real numbers


class _Readings(dict[Any, float]):
    """What each text of a column means; texts alone are kept, since 1 and True, though equal, may differ."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, value: Any) -> float:
        number = self._read(value)
        if type(value) is str:
            self[value] = number
        return number


class Encoder:
    """Turns columns of some records into features and targets."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._missing = frozenset(schema.missing)
        self._missing_numbers = frozenset(filter(math.isfinite, map(as_number, schema.missing)))
        self._reads = {column.name: self._reader(column) for column in self._used() if column.kind != "array"}

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the names of the columns that are looked at."""
        return tuple(column.name for column in self._used())

    def _used(self) -> tuple[Column, ...]:
        return (*self.schema.inputs, self.schema.columns[self.schema.target])

    def __call__(self, columns: Mapping[str, Values], faults: dict[int, str]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return x and y of all rows, and add what is wrong with a row to `faults`, which may know of some already."""
        numbers = {column.name: self._numbers(column, columns[column.name], faults) for column in self._used()}
        bad = sorted(faults)
        blocks = [features_of(column, numbers[column.name]) for column in self.schema.inputs]
        x = blocks[0] if self.schema.inputs[0].kind == "array" else np.concatenate(blocks, axis=1)
        x[bad] = math.nan
        target = self.schema.columns[self.schema.target]
        found = numbers[target.name]
        found[bad] = 0.0
        y = found.astype(np.int64) if target.kind == "class" else _scaled(target, found).astype(np.float32)
        y[bad] = 0
        return x, y

    def _numbers(self, column: Column, values: Values, faults: dict[int, str]) -> NDArray[np.float64]:
        """Return the number of each value, and say of rows that are well so far what is wrong with this one."""
        if column.kind == "array":
            numbers = np.asarray(values, dtype=np.float64)
            broken = np.flatnonzero(~np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1))
            for row in broken.tolist():
                faults.setdefault(row, f"{column.name} {NOT_FINITE}")
            return numbers
        numbers = self._read_all(column, values)
        for row in np.flatnonzero(np.isnan(numbers)).tolist():
            if row not in faults:
                faults[row] = f"{column.name} {self._fault(column, values[row])}"
        return numbers

    def _read_all(self, column: Column, values: Values) -> NDArray[np.float64]:
        read = self._reads[column.name]
        if isinstance(values, np.ndarray) and values.dtype.kind in NUMBERS:
            if column.kind == "number":
                return self._at_once(column, values)
            distinct, places = np.unique(values, return_inverse=True)
            return np.array([read(value) for value in distinct.tolist()], dtype=np.float64)[places]
        if isinstance(values, np.ndarray) and values.dtype.kind in "UO":
            values = values.tolist()
        known = _Readings(read)
        try:
            return np.fromiter(map(known.__getitem__, values), dtype=np.float64, count=len(values))
        except Exception:  # of any kind: a list, say, cannot be looked up; each by itself gives the same numbers
            each = (known[value] if type(value) is str else read(value) for value in values)
            return np.fromiter(each, dtype=np.float64, count=len(values))

    def _at_once(self, column: Column, values: NDArray[Any]) -> NDArray[np.float64]:
        """Read an array of numbers, as each of them would be read alone."""
        numbers = values.astype(np.float64)
        gaps = np.isnan(numbers) | np.isin(numbers, [*self._missing_numbers])
        numbers[gaps] = math.nan if column.missing is None else float(column.missing)
        numbers[np.isinf(numbers)] = math.nan
        return numbers

    def _reader(self, column: Column) -> Read:
        return self._number_reader(column) if column.kind == "number" else self._position_reader(column)

    def _number_reader(self, column: Column) -> Read:
        instead = math.nan if column.missing is None else float(column.missing)

        def read(value: Any) -> float:
            if self._is_gap(value):
                return instead
            number = as_number(value)
            return number if math.isfinite(number) else math.nan

        return read

    def _position_reader(self, column: Column) -> Read:
        """Return what finds the position in a vocabulary; −1 is outside it, as all zeros."""
        known = lookup(column)

        def position(stand_in: float | str | None) -> float:
            return math.nan if stand_in is None else -1.0 if stand_in == ZEROS else float(known[stand_in])

        missing, other = position(column.missing), position(column.other)

        def read(value: Any) -> float:
            for key in _spellings(value):  # first of all the vocabulary: what it names is a value, though it be "NA"
                if key in known:
                    return float(known[key])
            return missing if self._is_gap(value) else other

        return read

    def _is_gap(self, value: Any) -> bool:
        """Say whether a value is how a missing one is written, or is kept by a program."""
        value = _decoded(value)
        number = as_number(value)
        if number in self._missing_numbers:
            return True
        if isinstance(value, str):
            return value.strip() in self._missing or value.strip().lower() == "nan"
        name = type(value).__name__  # NAType and NaTType are of pandas
        return value is None or name in ("NAType", "NaTType") or (isinstance(value, _FLOATS) and math.isnan(number))

    def _fault(self, column: Column, value: Any) -> str:
        """Say what is wrong with a value that the schema has no number for."""
        if self._is_gap(value):
            return MISSING
        if column.kind != "number":
            return UNKNOWN
        if is_date(value):
            return DATE
        return NOT_FINITE if math.isinf(as_number(value)) else NO_NUMBER


def features_of(column: Column, numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the features [n, …] of a column's numbers: clamped to the public range and scaled by it, or one-hot."""
    if column.kind in ("number", "array"):
        made: NDArray[np.float32] = _scaled(column, numbers).astype(np.float32)
        return made[:, None] if column.kind == "number" else made
    if column.kind == "flag":  # the first value −1, the second 1, and all zeros between them
        return np.where(numbers < 0, 0.0, 2 * numbers - 1).astype(np.float32)[:, None]
    one_hot: NDArray[np.float32] = (numbers[:, None] == np.arange(len(column.values))).astype(np.float32)
    return one_hot


def _scaled(column: Column, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = column.low, column.high
    assert low is not None
    assert high is not None
    scaled: NDArray[np.float64] = (np.clip(numbers, low, high) - (low / 2 + high / 2)) / (high / 2 - low / 2)
    return np.clip(scaled, -1.0, 1.0)  # rounding aside


def is_date(value: Any) -> bool:
    """Say whether a value is a date, or a text that looks like one."""
    text = _decoded(value)
    return isinstance(value, (date, np.datetime64)) or (isinstance(text, str) and bool(_DATE.fullmatch(text.strip())))


def _spellings(value: Any) -> tuple[str | float, ...]:
    """Return what to look for in a vocabulary: the text of a value, and the number that it is."""
    value = _decoded(value)
    number = as_number(value)
    if isinstance(value, str):
        return value.strip(), number
    if isinstance(value, (bool, np.bool_)):
        return str(value), str(value).lower(), str(value).upper(), number
    return (number,)


def _decoded(value: Any) -> Any:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
