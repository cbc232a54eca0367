"""What release 0.1 left behind is read, certified, reported and charged again; what a newer one left is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpfl import run_folder
from e2e.command_line import dpfl

KEPT = Path(__file__).parents[1] / "data" / "formats" / "0.1"


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    return shutil.copytree(KEPT / "run", tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_old_run_is_certified_anew(old_run: Path) -> None:
    before = contents(old_run)
    done = dpfl("certificate", "run", cwd=old_run.parent)
    assert done.returncode == 0, done.stderr
    assert "computed anew from the ledger, and as the run wrote it; its chain" in done.stdout
    computed = json.loads(dpfl("certificate", "run", "--json", cwd=old_run.parent).stdout)
    assert computed["version"] == 2
    stored = json.loads((old_run / run_folder.CERTIFICATE).read_text())
    assert computed["observers"]["released"]["epsilon"] == pytest.approx(stored["observers"]["released"]["epsilon"])
    assert contents(old_run) == before


def test_an_old_run_is_reported(old_run: Path) -> None:
    done = dpfl("report", "run", cwd=old_run.parent)
    assert done.returncode == 0, done.stderr
    page = (old_run / "report.html").read_text(encoding="utf-8")
    assert "udp on digits" in page
    assert "After 3 rounds: accuracy 40.9 %, loss 2.0851" in page
    assert "ε ≤ 3.302" in page


def test_an_old_run_can_be_repeated_in_its_place_and_its_ledger_remembers_both(old_run: Path) -> None:
    done = dpfl("run", "run/config.toml", "--out", "run", "--force", cwd=old_run.parent)
    assert done.returncode == 0, done.stderr
    statement = json.loads(dpfl("ledger", "run", "--json", cwd=old_run.parent).stdout)
    assert [line["uploads"] for line in statement["clients"]] == [6] * 4
    assert json.loads((old_run / run_folder.ENVIRONMENT).read_text())["folder_version"] == run_folder.VERSION
    assert dpfl("certificate", "run", cwd=old_run.parent).returncode == 0


def test_an_old_ledger_states_what_was_spent_and_is_charged_again(tmp_path: Path) -> None:
    shutil.copy(KEPT / "ledger.sqlite", tmp_path / "all.sqlite")
    statement = json.loads(dpfl("ledger", "all.sqlite", "--json", cwd=tmp_path).stdout)
    assert [(run["run"], run["rounds"]) for run in statement["runs"]] == [
        ("b6321d227da34715", 2), ("0e5ec13753bf4cc5", 2),
    ]  # fmt: skip
    # It knew numbers of clients, and nothing of whose records they were.
    assert [line["spent"] for line in statement["clients"]] == [None] * 3
    assert all("not known whether it held the same people's records" in line["why"] for line in statement["clients"])
    assert [line["granted"]["epsilon"] for line in statement["clients"]] == [20.0, 20.0, 12.0]

    again = (
        "run",
        "udp",
        "--clients",
        "3",
        "--rounds",
        "1",
        "--delta",
        "1e-3",
        "--data-seed",
        "3",
        "--ledger",
        "all.sqlite",
    )
    refused = dpfl(*again, "--epsilon", "15", "--out", "too-much", cwd=tmp_path)
    assert (refused.returncode, "the grant of client 2" in refused.stderr) == (3, True)
    done = dpfl(*again, "--epsilon", "3", "--out", "third", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (_, _, third), clients = (json.loads(dpfl("ledger", "all.sqlite", "--json", cwd=tmp_path).stdout)[key]
                              for key in ("runs", "clients"))  # fmt: skip
    assert third["rounds"] == 1
    assert all(line["uploads"] == 5 and line["spent"] is None for line in clients)


def newer_folder(folder: Path) -> None:
    path = folder / run_folder.ENVIRONMENT
    path.write_text(json.dumps({"folder_version": 2} | json.loads(path.read_text())))


def newer_certificate(folder: Path) -> None:
    path = folder / run_folder.CERTIFICATE
    path.write_text(json.dumps({"version": 3} | json.loads(path.read_text())))


@pytest.mark.parametrize("command", ["certificate", "report"])
@pytest.mark.parametrize(("age", "field"), [(newer_folder, "run"), (newer_certificate, "certificate")])
def test_a_newer_run_is_refused_in_a_sentence_and_left_as_it_is(
    command: str, age: Callable[[Path], None], field: str, old_run: Path
) -> None:
    age(old_run)
    before = contents(old_run)
    done = dpfl(command, "run", cwd=old_run.parent)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    known = {"run": 1, "certificate": 2}[field]
    assert sentence.startswith(f"dpfl: {field} must be of version {known} or older, but 'run")
    assert sentence.endswith(f"is of version {(field == 'certificate' and 3) or 2}, from a newer dpfl; update dpfl")
    assert contents(old_run) == before
