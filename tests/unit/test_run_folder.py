"""The run folder never overwrites what is not its own, and what it writes is on disk at once and whole."""

import json
import math
from pathlib import Path

import pytest

from dpfl import run_folder
from dpfl.errors import BadInput
from grids import each


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A folder with a run in it, and one file of somebody else's."""
    path = tmp_path / "run"
    run_folder.create(path, "system = 'udp'\n")
    run_folder.append_metrics(path, {"round": 1})
    run_folder.write_json(path, run_folder.CERTIFICATE, {"old": True})
    run_folder.write_json(path, run_folder.ENVIRONMENT, {"old": True})
    (path / run_folder.MODEL).write_bytes(b"parameters")
    (path / run_folder.LEDGER).write_bytes(b"charges")
    for name in run_folder.REPORT_FILES:
        (path / name).write_text("old report")
    (path / "notes.txt").write_text("mine")
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_new_or_empty_folder_is_free(tmp_path: Path) -> None:
    for force in (False, True):
        run_folder.claim(tmp_path / "new", force=force)
        run_folder.claim(tmp_path, force=force)
    assert list(tmp_path.iterdir()) == []  # claiming writes nothing


def test_an_old_run_is_refused_and_left_alone(finished: Path) -> None:
    before = contents(finished)
    with pytest.raises(BadInput, match="out must be a new folder") as refusal:
        run_folder.claim(finished, force=False)
    assert repr(str(finished)) in str(refusal.value)
    assert "--force" in str(refusal.value)
    assert contents(finished) == before


def test_force_replaces_a_run_but_not_what_it_was_charged(finished: Path) -> None:
    run_folder.claim(finished, force=True)
    run_folder.create(finished, "system = 'fedavg'\n")
    assert contents(finished) == {
        run_folder.CONFIG: b"system = 'fedavg'\n", run_folder.LEDGER: b"charges", "notes.txt": b"mine",
    }  # fmt: skip


def test_force_refuses_a_folder_that_holds_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / run_folder.METRICS).write_text("somebody else's")
    before = contents(tmp_path)
    with pytest.raises(BadInput, match=r"has no config\.toml") as refusal:
        run_folder.claim(tmp_path, force=True)
    assert repr(str(tmp_path)) in str(refusal.value)
    assert contents(tmp_path) == before


def test_force_replaces_a_run_that_was_killed_before_it_wrote_more_than_its_ledger(tmp_path: Path) -> None:
    (tmp_path / run_folder.LEDGER).write_bytes(b"")
    run_folder.claim(tmp_path, force=True)
    with pytest.raises(BadInput, match="out must be a new folder"):
        run_folder.claim(tmp_path, force=False)


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_no_folder(tmp_path: Path, force: bool) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(BadInput, match="is a file") as refusal:
        run_folder.claim(path, force=force)
    assert repr(str(path)) in str(refusal.value)
    assert path.read_text() == "mine"


def test_parents_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "run"
    run_folder.create(path, "x = 1\n")
    assert run_folder.read_config(path) == "x = 1\n"


def test_making_a_folder_leaves_one_that_is_there_alone(finished: Path, tmp_path: Path) -> None:
    before = contents(finished)
    run_folder.make(finished)
    assert contents(finished) == before
    run_folder.make(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "run"
    for make in (run_folder.make, lambda path: run_folder.create(path, "x = 1\n")):
        with pytest.raises(BadInput, match="out must be a folder that can be written") as refusal:
            make(path)
        assert repr(str(path)) in str(refusal.value)


def test_a_round_can_be_read_as_soon_as_it_is_over(tmp_path: Path) -> None:
    run_folder.create(tmp_path, "")
    for round in (1, 2, 3):
        run_folder.append_metrics(tmp_path, {"round": round, "loss": 0.5 / round, "accuracy": None})
        text = (tmp_path / run_folder.METRICS).read_text()
        assert text.endswith("\n")
        assert [json.loads(line)["round"] for line in text.splitlines()] == list(range(1, round + 1))
    assert run_folder.read_metrics(tmp_path)[1] == {"round": 2, "loss": 0.25, "accuracy": None}


def test_a_number_that_json_does_not_have_is_not_written(tmp_path: Path) -> None:
    run_folder.create(tmp_path, "")
    run_folder.append_metrics(tmp_path, {"round": 1})
    with pytest.raises(ValueError, match="JSON"):
        run_folder.append_metrics(tmp_path, {"round": 2, "loss": math.nan})
    assert run_folder.read_metrics(tmp_path) == [{"round": 1}]
    with pytest.raises(ValueError, match="JSON"):
        run_folder.write_json(tmp_path, run_folder.CERTIFICATE, {"epsilon": math.inf})
    assert not (tmp_path / run_folder.CERTIFICATE).exists()


def test_json_is_written_whole_and_leaves_no_scratch_file(tmp_path: Path) -> None:
    content = {"ε": 8.0, "clients": [1, 2], "none": None}
    for name in (run_folder.CERTIFICATE, run_folder.CERTIFICATE):  # the second replaces the first
        run_folder.write_json(tmp_path, name, content)
    assert [file.name for file in tmp_path.iterdir()] == [run_folder.CERTIFICATE]
    assert run_folder.read_json(tmp_path, run_folder.CERTIFICATE) == content
    assert "ε" in (tmp_path / run_folder.CERTIFICATE).read_text(encoding="utf-8")


@each(
    ("read", "name"),
    [
        (lambda path: run_folder.read_json(path, run_folder.CERTIFICATE), run_folder.CERTIFICATE),
        (run_folder.read_metrics, run_folder.METRICS),
        (run_folder.read_config, run_folder.CONFIG),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, read: object, name: str) -> None:
    with pytest.raises(BadInput, match="run must be the folder of a run") as refusal:
        read(tmp_path)  # type: ignore[operator]
    assert repr(str(tmp_path / name)) in str(refusal.value)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda path: run_folder.read_json(path, run_folder.CERTIFICATE), run_folder.CERTIFICATE),
        (run_folder.read_metrics, run_folder.METRICS),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, read: object, name: str) -> None:
    for damaged in ('{"round": 1', "[1, 2]"):
        (tmp_path / name).write_text(damaged)
        with pytest.raises(BadInput, match="is damaged") as refusal:
            read(tmp_path)  # type: ignore[operator]
        assert repr(str(tmp_path / name)) in str(refusal.value)


def test_a_folder_names_its_version_in_its_environment_alone(tmp_path: Path) -> None:
    for name in (run_folder.ENVIRONMENT, run_folder.CERTIFICATE):
        run_folder.write_json(tmp_path, name, {"device": "cpu"})
    assert run_folder.read_json(tmp_path, run_folder.ENVIRONMENT) == {"folder_version": 1, "device": "cpu"}
    assert run_folder.read_json(tmp_path, run_folder.CERTIFICATE) == {"device": "cpu"}


@pytest.mark.parametrize(
    ("name", "key", "field"),
    [(run_folder.ENVIRONMENT, "folder_version", "run"), (run_folder.CERTIFICATE, "version", "certificate")],
)
def test_what_a_newer_release_wrote_is_refused(tmp_path: Path, name: str, key: str, field: str) -> None:
    (tmp_path / name).write_text(json.dumps({key: 3, "ledger": run_folder.LEDGER, "run": "0123"}))
    with pytest.raises(
        BadInput, match=rf"{field} must be of version \d or older, but .* is of version 3, .* update dpfl"
    ):
        run_folder.read_json(tmp_path, name)


def test_the_ledger_of_a_newer_run_is_not_looked_for(tmp_path: Path) -> None:
    newer = {"folder_version": 2, "ledger": run_folder.LEDGER, "run": "0123"}
    (tmp_path / run_folder.ENVIRONMENT).write_text(json.dumps(newer))
    with pytest.raises(BadInput, match="run must be of version 1 or older"):
        run_folder.ledger_of(tmp_path)


def test_the_ledger_of_a_run_lies_beside_it_or_where_others_share_it(tmp_path: Path) -> None:
    run_folder.write_json(tmp_path, run_folder.ENVIRONMENT, {"ledger": run_folder.LEDGER, "run": "0123"})
    assert run_folder.ledger_of(tmp_path) == (tmp_path / run_folder.LEDGER, "0123")
    run_folder.write_json(tmp_path, run_folder.ENVIRONMENT, {"ledger": "/somewhere/all.sqlite", "run": "0123"})
    assert run_folder.ledger_of(tmp_path) == (Path("/somewhere/all.sqlite"), "0123")


def test_a_folder_without_its_environment_has_no_ledger_to_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="run must be the folder of a run") as refusal:
        run_folder.ledger_of(tmp_path)
    assert repr(str(tmp_path / run_folder.ENVIRONMENT)) in str(refusal.value)


def test_a_run_from_before_there_were_ledgers_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run_folder.write_json(tmp_path, run_folder.ENVIRONMENT, {"versions": {"dpfl": "0.1.0"}})
    with pytest.raises(BadInput, match="ledger"):
        run_folder.ledger_of(tmp_path)
