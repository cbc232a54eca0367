"""Rows of plain values, for other tools: as CSV by the standard library alone, or as a pandas frame."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl.errors import BadInput, require_package

if TYPE_CHECKING:
    from pandas import DataFrame

Row = Mapping[str, Any]  # all rows of a table have the same keys


def rounds(history: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rounds of a run as rows; of the clients whose budgets could not pay, how many they were."""
    return [{**line, "refused": len(line["refused"])} for line in history]


def frame(rows: Sequence[Row]) -> "DataFrame":
    """Return rows as a frame; what is not there is NaN, so that a column of numbers stays one."""
    pandas = require_package("pandas", "a frame")
    table: DataFrame = pandas.DataFrame(
        [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]
    )
    return table


def write(rows: Sequence[Row], path: str | Path) -> None:
    """Write rows as CSV in UTF-8, the names of the columns first; what is not there is empty."""
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, fieldnames=list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    except OSError as problem:
        raise BadInput(
            f"path must be a file that can be written, was {str(path)!r} ({problem.strerror}); choose another"
        ) from None
