"""`dpfl schema`: what a draft says, what it must not say, and what is done with it."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfl.errors import BadInput
from dpfl.federation.schema import read_schema
from dpfl.federation.site_files import read_site, site_files
from e2e.command_line import Done, dpfl
from grids import each

HEADER = "age,pain,seen,city,target"
ROWS = ["4711,1,2020-01-31,Ulm,0", "37.25,2,2021-02-03,Bonn,1", "55,,2022-05-06,,0"]
needs_data = pytest.mark.skipif(not os.environ.get("DPFL_DATA"), reason="DPFL_DATA is not set: no hospitals here")


def site(folder: Path, name: str = "a.csv", header: str = HEADER, rows: list[str] | None = None) -> Path:
    (folder / name).write_text("\n".join([header, *(ROWS if rows is None else rows), ""]), encoding="utf-8")
    return folder / name


def refused(*args: str, cwd: Path) -> str:
    """Return the sentence of a command that must refuse, and write nothing."""
    before = sorted(cwd.rglob("*"))
    done = dpfl("schema", *args, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, "")
    assert sorted(cwd.rglob("*")) == before
    assert "4711" not in done.stderr
    return one_line(done)


def one_line(done: Done) -> str:
    (line,) = done.stderr.splitlines()
    return line


def test_a_draft_leaves_open_what_nobody_said(tmp_path: Path) -> None:
    site(tmp_path)
    done = dpfl("schema", "a.csv", "--out", "schema.toml", cwd=tmp_path)
    assert done.returncode == 0
    table = tomllib.loads((tmp_path / "schema.toml").read_text())
    assert table["target"] == "target"
    assert table["columns"] == {
        "age": {"kind": "number", "low": "?", "high": "?"},
        "pain": {"kind": "number", "low": "?", "high": "?"},
        "seen": {"kind": "?"},
        "city": {"kind": "category", "values": "?"},
        "target": {"kind": "class", "values": "?"},
    }
    assert "Next:" in done.stdout.splitlines()
    assert done.stdout.rstrip().endswith("--schema schema.toml --epsilon 1")
    with pytest.raises(BadInput, match=r"columns\.age\.low, columns\.age\.high, .* are still"):
        read_schema(tmp_path / "schema.toml")


def test_no_value_of_a_record_stands_in_a_draft(tmp_path: Path) -> None:
    site(tmp_path)
    for options in ([], ["--names-only"], ["--json"]):
        shown = dpfl("schema", "a.csv", *options, cwd=tmp_path).stdout
        for value in ("4711", "37.25", "55", "2020", "Ulm", "Bonn"):
            assert value not in shown


def test_names_alone_are_read_where_nobody_is_to_look_at_records(tmp_path: Path) -> None:
    site(tmp_path)
    one = dpfl("schema", "a.csv", "--names-only", cwd=tmp_path).stdout
    site(tmp_path, rows=["x,x,x,x,x", '"', ""])
    assert dpfl("schema", "a.csv", "--names-only", cwd=tmp_path).stdout == one
    assert "private records" not in one
    assert dpfl("schema", "a.csv", cwd=tmp_path).stdout != one
    assert "a look at private records" in dpfl("schema", "a.csv", cwd=tmp_path).stdout


def test_one_record_changes_a_kind_only_where_it_tips_the_balance(tmp_path: Path) -> None:
    site(tmp_path, rows=[ROWS[0]] * 9)
    before = dpfl("schema", "a.csv", cwd=tmp_path).stdout
    for hostile in ("x,x,x,7,x", "", '"x,1', "1,1,1,1,1,1", "NA,,,,"):
        site(tmp_path, rows=[ROWS[0]] * 8 + [hostile])
        assert dpfl("schema", "a.csv", cwd=tmp_path).stdout == before
    site(tmp_path, rows=["x,1,2020-01-31,Ulm,0"] * 9)  # most of them do decide
    assert dpfl("schema", "a.csv", cwd=tmp_path).stdout != before


def test_what_is_typed_fills_the_blanks_and_the_draft_reads_the_site(tmp_path: Path) -> None:
    path = site(tmp_path)
    said = ["--range", "age=-20:9.5e1", "--values", "pain=1,2|3", "--values", "target=0,1"]
    done = dpfl("schema", "a.csv", *said, "--range", "seen=0:1", "--values", "city=Ulm,Bonn",
                "--target", "target", "--out", "s.toml", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0
    assert '"?"' not in done.stdout
    schema = read_schema(tmp_path / "s.toml")
    assert schema.features == ("age", "pain=1", "pain=2", "seen", "city=Ulm", "city=Bonn")
    assert (schema.columns["age"].low, schema.columns["age"].high) == (-20, 95)
    with pytest.raises(BadInput, match="column seen is a date"):
        read_site(path, schema)


def test_a_public_file_may_show_its_ranges_and_vocabularies(tmp_path: Path) -> None:
    site(tmp_path)
    numbers = [
        f"{20 + year}.5,{1 + year % 3},{2000 + year},{('Ulm', 'Bonn')[year % 2]},{year % 2}" for year in range(30)
    ]
    site(tmp_path, "published.csv", rows=[*numbers, ",?,,NA,1"])
    done = dpfl("schema", "a.csv", "--public", "published.csv", "--range", "age=0:120", "--json", cwd=tmp_path)
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["columns"] == {
        "age": {"kind": "number", "low": 0.0, "high": 120.0},
        "pain": {"kind": "category", "values": ["1", "2", "3"]},
        "seen": {"kind": "number", "low": 2000.0, "high": 2029.0},
        "city": {"kind": "category", "values": ["Bonn", "Ulm"]},
        "target": {"kind": "class", "values": ["0", "1"]},
    }
    assert said["blanks"] == []
    assert "published.csv stand here because it was declared public" in said["toml"]
    assert "missing = 60" in said["toml"]


def test_arrays_keep_their_shape(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((4, 2, 3), 4711), y=np.arange(4))
    said = json.loads(dpfl("schema", "a.npz", "--values", "y=0,1,2,3", "--json", cwd=tmp_path).stdout)
    assert said["columns"]["x"] == {"kind": "array", "shape": [2, 3], "low": "?", "high": "?"}
    assert said["blanks"] == ["columns.x.low", "columns.x.high"]


@each(
    ("args", "expected"),
    [
        (
            ["a.csv", "b.csv"],
            "file 'b.csv' must have the columns of file 'a.csv', but has 'Age'; did you mean 'age'?",
        ),
        (["a.csv", "more.csv"], "but has 'extra'"),
        (["no-names.csv"], "must begin with a line of column names, but there are numbers, dates or gaps in it"),
        (["twice.csv"], "has 'age' several times"),
        (
            ["a.csv", "--target", "tarot"],
            "target must be for one of the files' columns, was for 'tarot'; did you mean 'target'?",
        ),
        (["a.csv", "--range", "aeg=1:2"], "range must be for one of the files' columns, was for 'aeg'"),
        (["a.csv", "--range", "age=2:1"], "--range must be NAME=LOW:HIGH with LOW below HIGH, was 'age=2:1'"),
        (["a.csv", "--range", "age"], "--range must be NAME=LOW:HIGH"),
        (["a.csv", "--range", "age=0:inf"], "--range must be NAME=LOW:HIGH"),
        (["a.csv", "--values", "age"], "--values must be NAME=A,B,…, was 'age'"),
        (["a.csv", "--values", "age=1,2", "--range", "age=1:2"], "range and values must not both be given"),
        (["a.csv", "--out", "b.csv"], "out must not exist yet, but 'b.csv' does"),
        (["a.csv", "--out", "no/where.toml"], "out must be a file to write, was 'no/where.toml'"),
        (["a.csv", "--public", "other.csv"], "must have columns of the other files, but has none"),
        (["a.csv", "--public", "nowhere.csv"], "must be a readable file"),
        (["nowhere"], "there is no 'nowhere'"),
    ],
)
def test_what_cannot_be_drafted_is_one_sentence(args: list[str], expected: str, tmp_path: Path) -> None:
    site(tmp_path)
    site(tmp_path, "b.csv", HEADER.replace("age", "Age"))
    site(tmp_path, "more.csv", HEADER + ",extra")
    site(tmp_path, "no-names.csv", header=ROWS[0])
    site(tmp_path, "twice.csv", "age,age,seen,city,target")
    site(tmp_path, "other.csv", "one,two,three,four,five")
    assert expected in refused(*args, cwd=tmp_path)


@needs_data
def test_four_real_hospitals_by_the_public_one_of_them(tmp_path: Path) -> None:
    hospitals = Path(os.environ["DPFL_DATA"]) / "heart-disease"
    public = str(hospitals / "cleveland.csv")
    done = dpfl("schema", str(hospitals), "--public", public, "--values", "target=0,1|2|3|4", "--out", "s.toml",
                cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0
    # As the draft advises: what a gap becomes is public too, and stands there to be switched on.
    text = (tmp_path / "s.toml").read_text().replace("# missing", "missing")
    (tmp_path / "s.toml").write_text(text)
    schema = read_schema(tmp_path / "s.toml")
    assert schema.classes == 2
    for path in site_files([hospitals]).values():
        records = read_site(path, schema).records
        assert records.x.isfinite().float().mean() > 0.9
        assert float(records.x.nan_to_num().abs().max()) == 1
