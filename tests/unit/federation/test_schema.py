import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dpfl.errors import BadInput
from dpfl.federation.schema import Schema, read_schema, schema_of
from grids import each

TABLE: dict[str, Any] = {
    "target": "sick",
    "columns": {
        "age": {"kind": "number", "low": 20, "high": 90, "missing": 50},
        "sex": {"kind": "flag", "values": ["f", "m"], "missing": "all zeros"},
        "pain": {"kind": "category", "values": ["1", ["2", "3"]], "missing": "1", "other": "all zeros"},
        "id": {"kind": "ignored"},
        "sick": {"kind": "class", "values": ["0", ["1", "2"]]},
    },
}
PER_SITE = "changes all of its records with any one of them"


def changed(*path: str, to: Any) -> dict[str, Any]:
    """Return the table with one entry changed, or taken out (None)."""
    table = copy.deepcopy(TABLE)
    inside = table
    for key in path[:-1]:
        inside = inside[key]
    if to is None:
        del inside[path[-1]]
    else:
        inside[path[-1]] = to
    return table


def refusal(table: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as refused:
        schema_of(table, " in 'schema.toml'")
    sentence = str(refused.value)
    assert "schema.toml" in sentence
    assert "; " in sentence
    assert "\n" not in sentence
    return sentence


def test_a_schema_says_what_records_become() -> None:
    schema = schema_of(TABLE)
    assert schema.features == ("age", "sex", "pain=1", "pain=2")
    assert schema.shape == (4,)
    assert schema.classes == 2
    assert schema.bad_rows == "zero"
    assert schema.missing == ("", "?", "NA")


def test_an_array_is_the_shape_of_its_records() -> None:
    image = {"kind": "array", "shape": [2, 3], "low": 0, "high": 255}
    schema = schema_of({"target": "y", "columns": {"x": image, "y": {"kind": "number", "low": 0, "high": 1}}})
    assert schema.shape == (2, 3)
    assert schema.features == ("x[0,0]", "x[0,1]", "x[0,2]", "x[1,0]", "x[1,1]", "x[1,2]")
    assert schema.classes is None


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    odd = changed("columns", 'a "name", with\ttab', to={"kind": "number", "low": -1e-7, "high": 2.5e20})
    odd["missing"] = ["-", "\x7f"]
    odd["bad_rows"] = "refuse"
    schema = schema_of(odd)
    (tmp_path / "schema.toml").write_text(schema.to_toml(), encoding="utf-8")
    again = read_schema(tmp_path / "schema.toml")
    assert again == schema
    assert list(again.columns) == list(schema.columns)


def test_values_may_be_written_as_numbers() -> None:
    assert schema_of(changed("columns", "pain", "values", to=[1, 2.5])).columns["pain"].values == (("1",), ("2.5",))


@each(
    ("path", "value", "expected"),
    [
        (["target"], None, "target in 'schema.toml' must name one of the columns, was None"),
        (["target"], "sik", "did you mean 'sick'?"),
        (["targets"], "sick", "did you mean 'target'?"),
        (["bad_rows"], "drop", 'must be "zero" or "refuse", was \'drop\'; no row can be dropped'),
        (["missing"], "NA", "must be a list of texts"),
        (["columns"], None, "must be tables such as [columns.age]"),
        (["columns", "age"], "number", "must be tables such as [columns.age]"),
        (["columns", "age", "kind"], "nubmer", "columns.age.kind in 'schema.toml' must be one of"),
        (["columns", "age", "kind"], None, "flag, class, array, ignored, was None; write one of them"),
        (["columns", "age", "kind"], ["number"], "was ['number']"),
        (["columns", "age", "kind"], "class", 'which only the target is; write kind = "category"'),
        (["columns", "age", "low"], None, "columns.age.low in 'schema.toml' must be a number that is public, was None"),
        (["columns", "age", "low"], 90, "must be below high, was 90 with high 90"),
        (["columns", "age", "high"], float("inf"), "must be a number that is public"),
        (["columns", "age", "missing"], 500, "must lie between low and high, was 500"),
        (["columns", "age", "hihg"], 5, "did you mean 'high'?"),
        (["columns", "age", "values"], ["a"], "must be one of the keys kind, low, high, missing"),
        (["columns", "sex", "values"], ["f"], "must be a list of exactly 2 values"),
        (["columns", "sex", "values"], ["f", "m", "x"], "must be a list of exactly 2 values"),
        (["columns", "sex", "missing"], "x", "must be one of the column's values or \"all zeros\", was 'x'"),
        (["columns", "pain", "values"], [], "at least 1 values"),
        (["columns", "pain", "values"], [[]], "must hold texts"),
        (["columns", "pain", "values"], [{}], "must hold texts"),
        (["columns", "pain", "values"], ["1", "01"], "must name each value once, but has '01' twice"),
        (["columns", "sick", "values"], ["1"], "must be a list of at least 2 classes"),
        (["columns", "sick", "kind"], "flag", 'must be "class" or "number" for the target'),
        (["columns", "sick", "missing"], "0", "must be one of the keys kind, values, was not"),
        (["columns", "image"], {"kind": "array", "shape": [2], "low": 0, "high": 1}, "must be the only feature"),
        (["columns", "image"], {"kind": "array", "shape": [], "low": 0, "high": 1}, "must be the shape of one record"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_key(path: list[str], value: Any, expected: str) -> None:
    assert expected in refusal(changed(*path, to=value))


@each(
    ("path", "value"),
    [
        (["columns", "age", "scale"], "site"),
        (["columns", "age", "low"], "min"),
        (["columns", "age", "high"], "99th percentile"),
        (["columns", "age", "missing"], "median"),
        (["columns", "age", "mean"], 3),
        (["columns", "age", "standardise"], True),
        (["columns", "pain", "missing"], "most frequent, by imputation: mean"),
        (["normalize"], True),
        (["impute"], "mean"),
    ],
)
def test_what_a_sites_own_records_would_decide_is_refused_with_the_reason(path: list[str], value: Any) -> None:
    sentence = refusal(changed(*path, to=value))
    assert PER_SITE in sentence
    assert "give a public range or value instead" in sentence


def test_a_draft_with_blanks_is_refused_and_all_of_them_are_named() -> None:
    table = changed("columns", "age", "low", to="?")
    table["target"] = table["columns"]["pain"]["values"] = table["columns"]["id"]["kind"] = "?"
    sentence = refusal(table)
    assert "target, columns.age.low, columns.pain.values, columns.id.kind are still" in sentence


def test_a_schema_needs_a_feature() -> None:
    assert "must hold a feature" in refusal(TABLE | {"columns": {"sick": TABLE["columns"]["sick"]}})


@each("text", ["target = ", "target = '\udcff'"])
def test_what_is_no_toml_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput, match="schema must be TOML"):
        read_schema(tmp_path / "schema.toml")


def test_a_schema_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="schema must be a readable file"):
        read_schema(tmp_path / "schema.toml")


def test_the_schema_in_the_docs_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs/sites.md").read_text(encoding="utf-8")
    schema = schema_of(tomllib.loads(page.partition("```toml")[2].partition("```")[0]))
    assert {column.kind for column in schema.columns.values()} == {"number", "category", "flag", "ignored", "class"}
    assert schema.features == ("age", "pain=1", "pain=2", "pain=3", "sex")


def test_a_schema_is_plain_toml() -> None:
    table = tomllib.loads(schema_of(TABLE).to_toml())
    assert table["columns"]["pain"] == TABLE["columns"]["pain"]
    assert isinstance(schema_of(table), Schema)
