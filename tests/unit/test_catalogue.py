"""What there is to choose from is read from the code: for `dpfl list`, and for the tables of the docs."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dpfl import catalogue
from dpfl.experiments.reading import names
from dpfl.federation import FEDERATIONS, LOADERS
from dpfl.models import ARCHITECTURES
from dpfl.settings import Settings
from dpfl.systems import SYSTEMS

COMMANDS = Path(__file__).parents[2] / "docs/commands.md"


def test_the_docs_agree_with_the_code() -> None:
    page = COMMANDS.read_text(encoding="utf-8")
    assert page == catalogue.with_tables(page), "write the tables anew: make tables"
    assert catalogue.settings() in page
    assert catalogue.options() in page


def test_tables_are_written_between_their_marks_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table of settings -->\nwhat stood there\n<!-- end of settings -->\nafter\n")
    catalogue.write_tables(page)
    first, *table, last = page.read_text().split("\n<!--")
    assert first == "before"
    assert "what stood there" not in "".join(table)
    assert last.endswith("after\n")
    assert all(f"| `{setting.name}` |" in table[0] for setting in fields(Settings))


@pytest.mark.parametrize(
    ("what", "expected"),
    [("systems", SYSTEMS), ("data", [*LOADERS, *FEDERATIONS]), ("models", ARCHITECTURES), ("experiments", names())],
)
def test_a_list_is_complete_and_has_a_line_for_each(what: str, expected: Any) -> None:
    rows = catalogue.LISTS[what]()
    assert sorted(row["name"] for row in rows) == sorted(expected)
    heading, *lines = catalogue.text(rows).splitlines()
    assert heading.startswith("name ")
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows]


def test_a_system_is_listed_with_its_options_and_whether_it_is_private() -> None:
    rows = {row["name"]: row for row in catalogue.systems()}
    assert rows["udp"]["options"]["rounds"] == 100
    assert rows["udp"]["options"]["cohort"] is None
    assert {name for name, row in rows.items() if not row["private"]} == {"fedavg", "fedsgd", "fedprox"}
    assert all(row["about"] for row in rows.values())


def test_files_are_looked_for_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "adult").mkdir()
    for file in ("adult.data.gz", "adult.test"):
        (tmp_path / "adult" / file).touch()
    where = {row["name"]: row["files"] for row in catalogue.data()}
    assert where["digits"] == "embedded"
    assert where["adult"] == "here"
    assert where["mnist"] == "to be downloaded"
    assert where["lending-club"] == "missing"
