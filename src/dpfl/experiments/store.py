"""Finished cells: one JSON line each, written as soon as a cell is done, so that nothing is lost or done twice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpfl.errors import BadInput, require_readable
from dpfl.experiments.cells import Cell
from dpfl.experiments.keys import VERSION

FOLDER = "cells"


class Store:
    """The finished cells of a folder; experiments share them. `cell in store` asks for one, `store[cell]` takes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self.records: dict[str, dict[str, Any]] = {}  # by their keys, of whichever version they are
        for path in sorted(self.folder.glob("*.jsonl")):
            for record in _read(path):
                self.records[record["key"]] = record

    def __contains__(self, cell: Cell) -> bool:
        return self._place(cell) in self.records

    def __getitem__(self, cell: Cell) -> dict[str, Any]:
        return self.records[self._place(cell)]

    def _place(self, cell: Cell) -> str:
        """Return the key under which a cell would be kept: its own, or the one that release 0.1 gave it."""
        old = cell.key_of_0_1
        return old if old is not None and old in self.records else cell.key

    def add(self, experiment: str, record: dict[str, Any]) -> None:
        """Keep a finished cell; closing the file puts it on disk."""
        path = self.folder / f"{experiment}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
            with path.open("a", encoding="utf-8") as file:
                file.write(("\n" if torn else "") + json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as problem:
            raise BadInput(
                f"out must be a folder that can be written, was {str(self.folder.parent)!r} ({problem.strerror});"
                " choose another"
            ) from None
        self.records[record["key"]] = record


def _read(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the writer was killed in the middle of it: the cell is trained again
        if isinstance(record, dict) and "key" in record:
            require_readable("cells", repr(str(path)), record.get("version", 1), VERSION)
            yield record
