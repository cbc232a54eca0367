import datetime
import gzip
import importlib.util
import math
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpfl.errors import BadInput
from dpfl.federation.schema import Schema, schema_of
from dpfl.federation.site_files import SiteFile, encode, read_site, site_files
from grids import each

COLUMNS: dict[str, Any] = {
    "age": {"kind": "number", "low": 20, "high": 90, "missing": 55},
    "sex": {"kind": "flag", "values": ["f", "m"], "missing": "all zeros"},
    "pain": {"kind": "category", "values": ["1", ["2", "3"]], "other": "all zeros"},
    "id": {"kind": "ignored"},
    "sick": {"kind": "class", "values": ["0", ["1", "2"]]},
}
SCHEMA = schema_of({"target": "sick", "columns": COLUMNS})
CSV = "age,sex,pain,id,sick\n90,m,1,a,0\n20,f,3,b,2\n55,m,2,c,1\n"
SOUND = torch.tensor([[1.0, 1.0, 1.0, 0.0], [-1.0, -1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]])
PRIVATE = "4711"  # stands for what no sentence may quote

needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
needs_data = pytest.mark.skipif(not os.environ.get("DPFL_DATA"), reason="DPFL_DATA is not set: no hospitals here")


def csv_file(folder: Path, content: str | bytes, name: str = "clinic.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(folder: Path, content: str | bytes, schema: Schema = SCHEMA) -> SiteFile:
    return read_site(csv_file(folder, content), schema)


def refusal(folder: Path, content: str | bytes, schema: Schema = SCHEMA) -> str:
    with pytest.raises(BadInput) as refused:
        read(folder, content, schema)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    return one_sentence(str(refused.value))


def one_sentence(sentence: str) -> str:
    assert "; " in sentence
    assert "\n" not in sentence
    assert PRIVATE not in sentence
    return sentence


def test_values_are_scaled_by_the_public_range_and_vocabulary(tmp_path: Path) -> None:
    site = read(tmp_path, CSV)
    assert site.name == "clinic"
    assert torch.equal(site.records.x, SOUND)
    assert site.records.x.dtype == torch.float32
    assert site.records.y.tolist() == [0, 1, 1]
    assert site.records.y.dtype == torch.int64
    assert not site.bad


@each(
    "content",
    [
        "\ufeff" + CSV,
        CSV.replace("\n", "\r\n"),
        CSV.rstrip("\n"),
        CSV.replace(",", ";"),
        CSV.replace(",", "\t"),
        CSV.replace(",", " , "),
        CSV.replace("age,", '"age",').replace("90", '"90"').replace(",a,", ',"a, ""x""\nb",'),
        CSV.replace("90", "90.0").replace(",1,a", ",01.0,a").replace("55", "").replace(",2\n", ",2.0\n"),
        CSV.replace("90", "1e300").replace("20", "-5").replace("55", "?"),
        CSV.replace(",id", "").replace(",a", "").replace(",b", "").replace(",c", ""),
        "sick,id,pain,sex,age\n0,a,1,m,90\n2,b,3,f,20\n1,c,2,m,55\n",
    ],
)
def test_the_ways_to_write_a_file_make_no_difference(content: str, tmp_path: Path) -> None:
    site = read(tmp_path, content)
    assert torch.equal(site.records.x, SOUND)
    assert site.records.y.tolist() == [0, 1, 1]


def test_a_packed_file_is_read_and_named_as_if_it_were_not(tmp_path: Path) -> None:
    site = read_site(csv_file(tmp_path, gzip.compress(CSV.encode()), "clinic.csv.gz"), SCHEMA)
    assert (site.name, len(site.records)) == ("clinic", 3)


def test_gaps_and_unknown_values_become_what_the_schema_says(tmp_path: Path) -> None:
    site = read(tmp_path, "age,sex,pain,id,sick\nNA,?,9,,1\nnan,m,1,,1\n")
    assert site.records.x.tolist() == [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]]
    assert not site.bad


def test_what_the_vocabulary_names_is_no_gap(tmp_path: Path) -> None:
    columns = COLUMNS | {"pain": {"kind": "category", "values": ["NA", "DE"]}}
    schema = schema_of({"target": "sick", "columns": columns})
    assert read(tmp_path, "age,sex,pain,id,sick\n20,f,NA,,1\n", schema).records.x.tolist() == [[-1.0, -1.0, 1.0, 0.0]]


def test_a_code_for_a_gap_is_one_as_text_and_as_number(tmp_path: Path) -> None:
    schema = schema_of({"target": "sick", "missing": ["-9"], "columns": COLUMNS})
    assert read(tmp_path, "age,sex,pain,id,sick\n-9.0,f,1,,1\n", schema).records.x[0, 0] == 0
    columns = {"age": np.array([-9.0, 20.0]), "sex": ["f", "f"], "pain": [1, 1], "sick": [0, 1]}
    assert encode(columns, schema, "client").records.x[:, 0].tolist() == [0.0, -1.0]


def test_a_number_to_be_predicted_is_clamped_and_scaled_as_features_are(tmp_path: Path) -> None:
    columns = {"age": COLUMNS["age"], "price": {"kind": "number", "low": 0, "high": 1000}}
    site = read(
        tmp_path, "age,price\n20,500\n20,750\n20,9999\n20,?\n", schema_of({"target": "price", "columns": columns})
    )
    assert site.records.y.tolist() == [0.0, 0.5, 1.0, 0.0]
    assert site.records.y.dtype == torch.float32
    assert site.records.x[3].isnan().all()


@each(
    ("row", "reason"),
    [
        (f"{PRIVATE}x,m,1,a,0", "age is no number"),
        ("1_0,m,1,a,0", "age is no number"),
        ("2020-01-31,m,1,a,0", "age is a date"),
        ("31.1.2020,m,1,a,0", "age is a date"),
        ("inf,m,1,a,0", "age is not finite"),
        ("1e999,m,1,a,0", "age is not finite"),
        (f"20,{PRIVATE},1,a,0", "sex is none of the schema's values"),
        ("20,m,,a,0", "pain is missing"),
        ("20,m,1,a,", "sick is missing"),
        (f"20,m,1,a,{PRIVATE}", "sick is none of the schema's values"),
        ("20,m,1,a", "row has another number of fields than the header"),
        ("20,m,1,a,0,5", "row has another number of fields than the header"),
        ("", "row has another number of fields than the header"),
        ('"20,m,1,a,0', "row has a quote that is not closed"),
        ('"2"0,m,1,a,0', "row has a quote that is not closed"),
        ("20,m,1," + "a" * 2**21 + ",0", "row is longer than 1,048,576 characters"),
    ],
)
def test_a_bad_row_stays_and_counts_as_zero(row: str, reason: str, tmp_path: Path) -> None:
    if reason == "pain is missing":  # other = "all zeros" is for values, and not for none
        assert SCHEMA.columns["pain"].missing is None
    site = read(tmp_path, CSV.replace("20,f,3,b,2", row))
    assert len(site.records) == 3
    assert site.records.x[1].isnan().all()
    assert site.records.y.tolist() == [0, 0, 1]
    assert torch.equal(site.records.x[[0, 2]], SOUND[[0, 2]])
    assert dict(site.bad) == {reason: 1}
    assert reason not in repr(site)


def test_reasons_are_counted_one_a_row(tmp_path: Path) -> None:
    site = read(tmp_path, CSV + "x,m,1,a,9\nx,x,x,x,x\n20,m,1,a,9\n")
    assert dict(site.bad) == {"age is no number": 2, "sick is none of the schema's values": 1}


def test_a_schema_can_ask_for_whole_files(tmp_path: Path) -> None:
    strict = schema_of({"target": "sick", "bad_rows": "refuse", "columns": COLUMNS})
    assert read(tmp_path, CSV, strict).records.x.isfinite().all()
    sentence = refusal(tmp_path, CSV + f'20,m,1,"two\nlines",0\n{PRIVATE}x,m,1,a,0\n20,m,1\nold,m,1,a,0\n', strict)
    assert "3 of 7 cannot be read" in sentence
    assert "column age is no number (2 rows, the first in line 7)" in sentence


@each(
    ("content", "expected"),
    [
        ("", "must begin with a line of column names, but begins with none"),
        ("\n" + CSV, "must begin with a line of column names, but begins with none"),
        (CSV[: CSV.index("\n")], "must have at least one row of data, had none"),
        (CSV.replace("sick", "ill"), "lacks 'sick' and has 'ill', which the schema does not know"),
        (CSV.replace("sick", "Sick"), "did you mean 'Sick'?"),
        (CSV.replace("id,sick", "ids,sick"), "has 'ids' beside them; did you mean 'id'?"),
        (CSV.replace("id,sick", "sick,sick"), "must name each column once, but has 'sick' several times"),
        (f"{PRIVATE},m,1,a,0\n20,f,3,b,2\n", "must begin with the schema's column names, such as 'sick'"),
        (f"{PRIVATE},{PRIVATE},1,a,0\n", "must begin with the schema's column names"),
        (CSV.encode("utf-16"), "is UTF-16"),
        (CSV.encode("utf-16-le"), "is UTF-16"),
        (CSV.replace("id", "naïve").encode("latin-1"), "its first line is not (Latin-1, perhaps)"),
        (CSV.replace("\n", "\r"), "none can be read there"),
        ('"' + CSV, "none can be read there"),
        (b"PK\x03\x04\0\0" + CSV.encode(), "none can be read there"),
        (
            f"age,sex,pain,id,sick\n{PRIVATE}x,m,1,a,0\n,m,1,a,\nnone,m,1,a,0\n",
            "all 3 cannot be read, most often because",
        ),
        (f"age,sex,pain,id,sick\n{PRIVATE}x,m,1,a,0\n", "column age is no number (1 rows, the first in line 2)"),
        ("age,sex,pain,id,sick\n2020-01-01,m,1,a,0\n", "or the days since a public day"),
    ],
)
def test_what_is_wrong_with_a_whole_file_is_one_sentence(content: str | bytes, expected: str, tmp_path: Path) -> None:
    assert expected in refusal(tmp_path, content)
    assert [path.name for path in tmp_path.iterdir()] == ["clinic.csv"]


@each("content", [b"not packed", gzip.compress(CSV.encode())[:-12], b""])
def test_a_broken_packed_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="must be") as refused:
        read_site(csv_file(tmp_path, content, "a.csv.gz"), SCHEMA)
    one_sentence(str(refused.value))


def test_a_byte_that_is_no_text_spoils_the_value_that_it_stands_in_alone(tmp_path: Path) -> None:
    content = CSV.replace(",a,", ",\u00e9,").replace("20,f", "20,\u00e9").encode("latin-1")
    assert dict(read(tmp_path, content).bad) == {"sex is none of the schema's values": 1}


def generated(rows: int) -> str:
    lines = (f"{20 + row % 70}.{row:06},m,{row % 60},{'note ' * 40}{row},{row % 3}" for row in range(rows))
    return "\n".join(["age,sex,pain,id,sick", *lines, ""])


def test_memory_is_that_of_the_encoded_records_whatever_the_file_holds(tmp_path: Path) -> None:
    rows = 20_000
    pain = {"kind": "category", "values": [str(value) for value in range(60)]}
    schema = schema_of({"target": "sick", "columns": COLUMNS | {"pain": pain}})
    path = csv_file(tmp_path, generated(rows))
    encoded = rows * (4 * len(schema.features) + 8)

    def twice() -> list[Any]:
        site = read_site(path, schema)
        return [site, site.records.x.numpy().copy()]

    def peak(load: Callable[[], Any]) -> int:
        load()  # what is made once
        tracemalloc.start()
        load()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(lambda: read_site(path, schema)) < 1.5 * encoded
    assert peak(twice) > 1.5 * encoded
    assert peak(lambda: [line.split(",") for line in path.read_text().splitlines()]) > 1.5 * encoded


# Other forms


def frame() -> dict[str, Any]:
    return {
        "age": np.array([90, 20, 55]),
        "sex": np.array(["m", "f", "m"]),
        "pain": [1, 3.0, "2"],
        "sick": np.array([0.0, 2.0, 1.0], dtype=np.float32),
    }


class Frame(dict):
    """A data frame as pandas and polars have them: columns by name, each of which becomes an array."""

    @property
    def columns(self) -> list[str]:
        return list(self)


class Series:
    def __init__(self, values: Any) -> None:
        self._values = values

    def to_numpy(self) -> np.ndarray:
        return np.asarray(self._values, dtype=object if isinstance(self._values, list) else None)


def test_columns_in_memory_become_the_same_records() -> None:
    series = Frame({name: Series(values) for name, values in frame().items()})
    tensors = frame() | {"age": torch.tensor([90, 20, 55])}
    for columns in (frame(), series, tensors):
        site = encode(columns, SCHEMA, "client 'a'")
        assert torch.equal(site.records.x, SOUND)
        assert site.records.y.tolist() == [0, 1, 1]


def test_dates_gaps_and_flags_in_memory() -> None:
    class NAType:  # as pandas writes a gap
        pass

    columns = frame() | {"age": [datetime.date(2020, 1, 1), NAType(), 90], "sex": [None, b"f", "m"]}
    site = encode(columns, SCHEMA, "client 'a'")
    assert dict(site.bad) == {"age is a date": 1}
    assert site.records.x[1:].tolist() == [[0.0, -1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]]
    flag = schema_of({"target": "y", "columns": {"a": {"kind": "flag", "values": [0, 1]}, "y": COLUMNS["sick"]}})
    truth = encode({"a": np.array([True, False]), "y": [0, 1]}, flag, "client").records.x
    assert truth.tolist() == [[1.0], [-1.0]]


@each(
    ("columns", "expected"),
    [
        (frame() | {"age": np.arange(4)}, "client 'a' must have columns of one length"),
        (frame() | {"sex": np.zeros((3, 2))}, "must hold 'sex' as one value a row, had an array of shape [n, 2]"),
        ({}, "must begin with the schema's column names"),
        ({name: values[:0] for name, values in frame().items()}, "must have at least one row of data"),
        (
            frame() | {"age": np.array(["2020-01-01"] * 3, dtype="datetime64[D]")},
            "column age is a date (3 rows, the first in row 1)",
        ),
    ],
)
def test_columns_that_cannot_be_used_are_refused(columns: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput) as refused:
        encode(columns, SCHEMA, "client 'a'")
    assert expected in one_sentence(str(refused.value))


IMAGES = schema_of(
    {
        "target": "y",
        "columns": {
            "x": {"kind": "array", "shape": [2, 2], "low": 0, "high": 200},
            "y": {"kind": "class", "values": [0, 1]},
        },
    }
)


def npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "clinic.npz", **arrays)
    return folder / "clinic.npz"


def test_arrays_are_clamped_and_scaled_too(tmp_path: Path) -> None:
    x = np.full((3, 2, 2), 100.0)
    x[0], x[1, 1, 1] = 300, math.nan
    site = read_site(npz(tmp_path, x=x, y=np.array([1, 1, 1])), IMAGES)
    assert (site.records.x[0] == 1).all()
    assert site.records.x[1].isnan().all()
    assert (site.records.x[2] == 0).all()
    assert site.records.y.tolist() == [1, 0, 1]
    assert dict(site.bad) == {"x is not finite": 1}
    whole = read_site(npz(tmp_path, x=np.full((2, 2, 2), 200, np.uint8), y=np.array([0, 1])), IMAGES)
    assert (whole.records.x == 1).all()


def test_columns_of_an_npz_file(tmp_path: Path) -> None:
    site = read_site(npz(tmp_path, **frame() | {"pain": np.array(["1", "3", "2"])}), SCHEMA)
    assert torch.equal(site.records.x, SOUND)


@each(
    ("arrays", "expected"),
    [
        ({"x": np.zeros((2, 2, 3)), "y": [0, 1]}, "as an array of numbers of shape [n, 2, 2], had [n, 2, 3]"),
        ({"x": np.zeros(2), "y": [0, 1]}, "had single values"),
        ({"x": np.full((2, 2, 2), "a"), "y": [0, 1]}, "not numbers"),
        ({"x": np.zeros((2, 2, 2)), "y": [0]}, "must have columns of one length, but 'y' has 1 rows and 'x' 2"),
        ({"x": np.zeros((2, 2, 2))}, "lacks 'y'"),
        ({"x": np.zeros((2, 2, 2)), "y": 1}, "'y' has none"),
        ({"x": np.array([[None]], dtype=object), "y": [0]}, "must be an NPZ file of plain arrays"),
    ],
)
def test_arrays_of_another_form_are_refused(arrays: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        read_site(npz(tmp_path, **arrays), IMAGES)
    assert expected in one_sentence(str(refused.value))


@each("name", ["a.npz", "a.parquet", "a.txt"])
def test_what_is_not_what_its_name_says_is_refused(name: str, tmp_path: Path) -> None:
    if name == "a.parquet" and importlib.util.find_spec("pyarrow") is None:
        return
    with pytest.raises(BadInput, match=r"must (be|end)") as refused:
        read_site(csv_file(tmp_path, CSV, name), SCHEMA)
    one_sentence(str(refused.value))


@needs_pyarrow
def test_parquet_files_become_the_same_records(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = frame() | {"pain": ["1", "3", "2"], "id": [None, datetime.date(2020, 1, 1), None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "clinic.parquet")
    site = read_site(tmp_path / "clinic.parquet", SCHEMA)
    assert torch.equal(site.records.x, SOUND)
    assert site.name == "clinic"
    gaps = columns | {"age": pyarrow.array([None, 20, 90]), "sick": pyarrow.array([True, None, False])}
    parquet.write_table(pyarrow.table(gaps), tmp_path / "clinic.parquet", row_group_size=1)
    site = read_site(tmp_path / "clinic.parquet", SCHEMA)
    assert dict(site.bad) == {"sick is missing": 1}
    assert site.records.x[:, 0].nan_to_num(7).tolist() == [0.0, 7.0, 1.0]
    assert site.records.y.tolist() == [1, 0, 0]


@needs_pyarrow
def test_no_value_of_a_parquet_file_ends_its_reading(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    no_text = pyarrow.array([b"m", b"\xff", b"m"]).view(pyarrow.string())
    never = pyarrow.array([2**62, None, -(2**62)]).cast(pyarrow.timestamp("us"))  # years that Python does not know
    nested = pyarrow.array([[1], None, [2, 3]])
    columns = frame() | {"pain": pyarrow.array(["1", "3", "2"]).dictionary_encode(), "id": never}
    for name, values, bad in (
        ("sex", no_text, {"sex is none of the schema's values": 1}),
        ("age", pyarrow.array([90, None, 1]).cast(pyarrow.decimal128(20)), {}),
        ("pain", nested, {"pain is missing": 1}),
    ):
        parquet.write_table(pyarrow.table(columns | {name: values}), tmp_path / "clinic.parquet")
        site = read_site(tmp_path / "clinic.parquet", SCHEMA)
        assert (len(site.records), dict(site.bad)) == (3, bad)
    parquet.write_table(pyarrow.table(columns | {"age": never}), tmp_path / "clinic.parquet")
    columns_of_dates = schema_of(
        {"target": "sick", "columns": COLUMNS | {"age": {"kind": "number", "low": 0, "high": 1}}}
    )
    with pytest.raises(BadInput, match=r"column age is a date \(2 rows, the first in row 1\)"):
        read_site(tmp_path / "clinic.parquet", columns_of_dates)


def test_without_pyarrow_a_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r'pip install "dpfl\[parquet\]"') as refused:
        read_site(csv_file(tmp_path, b"PAR1", "a.parquet"), SCHEMA)
    one_sentence(str(refused.value))


# Which files are sites


def test_a_folder_is_all_its_tables_by_name(tmp_path: Path) -> None:
    for name in ("b.csv", "a.parquet", "c.csv.gz", "d.npz", ".hidden.csv", "schema.toml", "README.md", "B-2.CSV"):
        csv_file(tmp_path, "", name)
    assert [*site_files([tmp_path])] == ["B-2", "a", "b", "c", "d"]
    assert site_files([tmp_path / "b.csv", str(tmp_path / "a.parquet")]) == {
        "b": tmp_path / "b.csv",
        "a": tmp_path / "a.parquet",
    }


@each(
    ("places", "expected"),
    [
        ([], "must be a folder or a list of files, was empty"),
        (["nowhere"], "there is no"),
        (["empty"], "has none; check the path"),
        (["a.txt"], "must be files that end in .csv"),
        (["a.csv", "a.csv.gz"], "are both 'a'; rename one"),
    ],
)
def test_places_that_are_no_sites_are_refused(places: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("a.txt", "a.csv", "a.csv.gz"):
        csv_file(tmp_path, "", name)
    with pytest.raises(BadInput) as refused:
        site_files([tmp_path / place for place in places])
    assert expected in one_sentence(str(refused.value))


@needs_data
def test_four_real_hospitals() -> None:
    hospitals = site_files([Path(os.environ["DPFL_DATA"]) / "heart-disease"])
    number = {"kind": "number", "low": 0, "high": 400, "missing": 0}
    header = hospitals["va"].read_text().partition("\n")[0]
    columns = dict.fromkeys(header.split(","), number)
    target = {"kind": "class", "values": ["0", ["1", "2", "3", "4"]]}
    schema = schema_of({"target": "target", "columns": columns | {"target": target}})
    sites = [read_site(path, schema) for path in hospitals.values()]
    assert [(site.name, len(site.records)) for site in sites] == [
        ("cleveland", 303), ("hungarian", 294), ("switzerland", 123), ("va", 200)
    ]  # fmt: skip
    assert [int(site.records.y.sum()) for site in sites] == [139, 106, 115, 149]
    assert not any(site.bad for site in sites)
