"""One record of a site's file, made hostile: what all the others become must not change by a bit, nor their number."""

import csv
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpfl.errors import BadInput
from dpfl.federation.csv_rows import LONGEST
from dpfl.federation.records import Records
from dpfl.federation.schema import Schema, schema_of
from dpfl.federation.site_files import encode, read_site
from grids import each

SCHEMA = schema_of(
    {
        "target": "sick",
        "columns": {
            "age": {"kind": "number", "low": 20, "high": 90, "missing": 50},
            "dose": {"kind": "number", "low": -0.3, "high": 1.7},
            "pain": {"kind": "category", "values": ["1", "2", "3"], "missing": "all zeros", "other": "2"},
            "note": {"kind": "ignored"},
            "sick": {"kind": "class", "values": ["0", ["1", "2"]]},
        },
    }
)
HEADER = "age,dose,pain,note,sick"
ROWS = 40
NOTES = ["plain", '"said ""no"", twice"', '"two\nlines"', "", '""', "5\u2033 nail"]

Read = Callable[[bytes, Path], Records]


def lines() -> list[bytes]:
    """Return rows of whom the older are the sick."""
    rng = np.random.default_rng(0)
    texts = []
    for row in range(ROWS):
        sick = rng.integers(0, 3)
        age = rng.integers(15, 55) + 40 * (sick > 0)
        texts.append(f"{age},{rng.normal():.6f},{rng.integers(1, 4)},{NOTES[row % len(NOTES)]},{sick}")
    return [text.encode() for text in texts]


HOSTILE: dict[str, bytes] = {
    "another record": b"33,0.25,2,x,1",
    "text for a number": b"old,0.25,2,x,1",
    "a huge number": b"1e308,0.25,2,x,1",
    "a large number": b"1000000,0.25,2,x,1",
    "more than a float holds": b"1e999,-1e999,2,x,1",
    "NaN": b"nan,nan,nan,nan,nan",
    "infinity": b"33,-inf,2,x,1",
    "nothing": b",,,,",
    "an unknown category": b"33,0.25,nine,x,1",
    "a category before all others": b"33,0.25,0,x,1",
    "an unknown class": b"33,0.25,2,x,7",
    "no class": b"33,0.25,2,x,",
    "a date": b"2020-01-01,0.25,2,x,1",
    "more fields": b"33,0.25,2,x,1,1,1",
    "fewer fields": b"33",
    "an empty line": b"",
    "another separator": b"33;0.25;2;x;1",
    "the header again": HEADER.encode(),
    "an open quote": b'"33,0.25,2,x,1',
    "an open quote at the end": b'33,0.25,2,x,"',
    "a quote and more": b'"33"x,0.25,2,x,1',
    "quotes everywhere": b'"""","""",","," "," ',
    "a line break in quotes": b'33,0.25,2,"one\n33,0.25,2,x,1\nthree",1',
    "line breaks and too many fields": b'"a\nb",1,2,3,4,5,6',
    "other line ends": b"33,0.25,2,a\rb\x0b\x0c\x1c\x85\xe2\x80\xa8c,1",
    "no UTF-8": b"33,0.25,\xff\xfe\xe9,\xff,1",
    "zero bytes": b"33,0.25,\0\0,\0,1",
    "a byte order mark": b"\xef\xbb\xbf33,0.25,2,x,1",
    "a very long line": b"33,0.25,2," + b"x" * (3 * LONGEST) + b",1",
    "a very long number": b"9" * 100_000 + b",0.25,2,x,1",
    "an underscore": b"3_3,0.25,2,x,1",
}


def written(records: list[bytes]) -> bytes:
    return b"\n".join([HEADER.encode(), *records, b""])


def by_schema(content: bytes, folder: Path) -> Records:
    (folder / "site.csv").write_bytes(content)
    return read_site(folder / "site.csv", SCHEMA).records


def require_untouched(read: Read, folder: Path, row: int, hostile: bytes) -> None:
    """Fail where a hostile record changes another, or how many there are."""
    before = read(written(lines()), folder)
    after = read(written([*lines()[:row], hostile, *lines()[row + 1 :]]), folder)
    assert len(after) == len(before) == ROWS
    others = torch.arange(ROWS) != row
    for one, other in ((before.x, after.x), (before.y, after.y)):
        assert one[others].numpy().tobytes() == other[others].numpy().tobytes()


@each("row", [0, 17, ROWS - 1])
def test_a_hostile_record_changes_no_other_by_a_bit(row: int, tmp_path: Path) -> None:
    for name, hostile in HOSTILE.items():
        try:
            require_untouched(by_schema, tmp_path, row, hostile)
        except Exception as failure:
            failure.add_note(name)
            raise


def test_what_was_wrong_leaves_no_trace(tmp_path: Path) -> None:
    seen = set()
    for name in ("text for a number", "infinity", "no class", "more fields", "an open quote", "a very long line"):
        records = by_schema(written([HOSTILE[name], *lines()[1:]]), tmp_path)
        assert records.x[0].isnan().all()
        seen.add((records.x[0].numpy().tobytes(), int(records.y[0])))
    assert len(seen) == 1


# Wrong twins: what others do with such files, and what the same attack says of it.


def rows_of(content: bytes) -> list[list[str]]:
    return list(csv.reader(content.decode("utf-8", "replace").replace("\0", "").splitlines(keepends=True)))[1:]


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def standardised(content: bytes, folder: Path) -> Records:
    """Scale by the site's own mean and deviation."""
    rows = [[*row, *["0"] * 5][:5] for row in rows_of(content)]
    x = torch.tensor([[number(row[0]), number(row[1])] for row in rows], dtype=torch.float64).nan_to_num()
    return Records(((x - x.mean(dim=0)) / x.std(dim=0)).float(), torch.tensor([int(row[4] != "0") for row in rows]))


def dropped(content: bytes, folder: Path) -> Records:
    """Drop what cannot be read."""
    records = by_schema(content, folder)
    return records.take(records.x.isfinite().all(dim=1))


def own_vocabulary(content: bytes, folder: Path) -> Records:
    """Number categories as the site's own rows show them."""
    rows = rows_of(content)
    known = sorted({row[2] for row in rows if len(row) > 2})
    return Records(
        torch.tensor([[known.index(row[2]) if len(row) > 2 else math.nan] for row in rows]), torch.zeros(ROWS)
    )


def imputed(content: bytes, folder: Path) -> Records:
    """Fill gaps by the site's own mean."""
    ages = torch.tensor([number(row[0]) if row else math.nan for row in rows_of(content)])
    return Records(ages.nan_to_num(nan=float(ages.nanmean())) - ages.nanmean(), torch.zeros(len(ages)))


def read_on(content: bytes, folder: Path) -> Records:
    """Let a quote run on to wherever the next one is."""
    return Records(torch.zeros(len(rows_of(content)), 1), torch.zeros(1))


@each(
    ("twin", "hostile"),
    [
        (standardised, "another record"),
        (standardised, "a large number"),
        (dropped, "text for a number"),
        (own_vocabulary, "a category before all others"),
        (imputed, "another record"),
        (read_on, "an open quote"),
    ],
)
def test_the_attack_finds_what_lets_records_change_each_other(twin: Read, hostile: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        require_untouched(twin, tmp_path, 3, HOSTILE[hostile])


def clipped_sum(records: Records) -> torch.Tensor:
    """Return the sum of clipped gradients (C = 1) of the logistic loss at the zero model; NaN counts as zero."""
    x = torch.cat([records.x, torch.ones(len(records), 1)], dim=1)
    gradients = torch.where(records.y == 0, 0.5, -0.5)[:, None] * x
    norms = gradients.norm(dim=1, keepdim=True)
    return (gradients * (1 / norms).clamp(max=1)).nan_to_num().sum(dim=0)


def most_moved(read: Read, names: Iterable[str], folder: Path) -> float:
    """Return by how much the first record, replaced by these, moves the sum of clipped gradients."""
    first, *others = lines()
    before, *after = (
        clipped_sum(read(written([each, *others]), folder)) for each in [first, *map(HOSTILE.__getitem__, names)]
    )
    return max(float((total - before).norm()) for total in after)


def test_one_record_moves_a_sum_of_clipped_gradients_by_no_more_than_the_clip_allows(tmp_path: Path) -> None:
    allowed = 2 + 1e-5  # 2C, for a record that is replaced
    assert 0.5 < most_moved(by_schema, HOSTILE, tmp_path) < allowed
    assert most_moved(standardised, ["a large number"], tmp_path) > 4 * allowed


@each("bad_rows", ["zero", "refuse"])
def test_only_a_schema_that_says_so_lets_a_bad_row_end_the_reading(bad_rows: Any, tmp_path: Path) -> None:
    (tmp_path / "site.csv").write_bytes(written([HOSTILE["text for a number"], *lines()[1:]]))
    schema = Schema(SCHEMA.target, SCHEMA.columns, bad_rows)
    if bad_rows == "zero":
        assert dict(read_site(tmp_path / "site.csv", schema).bad) == {"age is no number": 1}
    else:
        with pytest.raises(BadInput, match="no bad rows"):
            read_site(tmp_path / "site.csv", schema)


# In memory one record can change the type of a whole column, as a program keeps it.

AGES = [31, 2**53 + 1, 45, 0, -7, 60]


def in_memory(ages: Any, pains: Any) -> Records:
    columns = {"age": ages, "dose": [0.5] * 6, "pain": pains, "sick": [0, 1, 2, 0, 1, 2]}
    return encode(columns, SCHEMA, "client 'a'").records


class Unhelpful:
    """A value that answers every question with an error."""

    def __hash__(self) -> int:
        raise RuntimeError("63")

    def __float__(self) -> float:
        raise RuntimeError("63")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("63")


@each("hostile", [None, math.nan, math.inf, "x", 1.5, True, 10**400, "1", [1], b"\xff", Unhelpful(), 1 + 2j])
def test_a_hostile_value_in_memory_changes_no_other(hostile: Any) -> None:
    before = in_memory(np.array(AGES), np.array([1, 2, 3, 1, 2, 3]))
    for row in (0, 3, 5):
        ages, pains = [*AGES], [1, 2, 3, 1, 2, 3]
        ages[row] = pains[row] = hostile
        forms: list[tuple[Any, Any]] = [(ages, pains)]
        if hostile is None or isinstance(hostile, (float, str)):  # as NumPy and pandas keep them
            forms.append((np.array(ages, dtype=None if hostile is not None else float), np.array(pains, dtype=object)))
        for form in forms:
            after = in_memory(*form)
            others = torch.arange(6) != row
            assert torch.equal(before.x[others], after.x[others])
            assert torch.equal(before.y, after.y) or bool(after.x[row].isnan().all())
            assert len(after) == 6


def test_true_and_one_are_each_what_they_are_whatever_stands_beside_them() -> None:
    columns = {
        "a": {"kind": "category", "values": ["True", "0"], "missing": "all zeros"},
        "y": {"kind": "class", "values": ["0", "1"]},
    }
    schema = schema_of({"target": "y", "columns": columns})
    for mixed in ([True, 1], [1, True]):
        bad = encode({"a": mixed, "y": [0, 1]}, schema, "client").records.x.isnan().all(dim=1)
        assert bad.tolist() == [value is not True for value in mixed]
