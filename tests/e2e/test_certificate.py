"""`dpfl certificate`: computed anew from the ledger, and whoever changed the stored one is found out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpfl import run_folder
from e2e.command_line import dpfl
from grids import each

KINDS = {
    "tight": ["udp", "--epsilon", "8", "--delta", "1e-3"],
    "paper": ["udp", "--epsilon", "20", "--delta", "1e-3", "--calibration", "paper"],
    "cohort": ["udp", "--cohort", "2", "--partition", "dirichlet:1.0", "--epsilon", "[1, 2, 4, 8]"],
    "without privacy": ["fedavg"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return a run of each kind: its folder, and the certificate that it printed when it ended."""
    home = tmp_path_factory.mktemp("runs")
    made = {}
    for kind, args in KINDS.items():
        done = dpfl("run", *args, "--clients", "4", "--rounds", "3", "--seed", "1", "--out", kind, "--json", cwd=home)
        assert done.returncode == 0, done.stderr
        made[kind] = home / kind, json.loads(done.stdout)["certificate"]
    return made


Copied = Callable[[str], Path]


@pytest.fixture
def copied(finished: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> Copied:
    """Copy a run to a place of this test's own; it is whole wherever it lies."""
    return lambda kind: Path(shutil.copytree(finished[kind][0], tmp_path / "elsewhere"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@each("kind", KINDS)
def test_the_ledger_tells_what_the_run_told(kind: str, finished: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    folder, certificate = finished[kind]
    before = contents(folder)
    done = dpfl("certificate", str(folder), "--json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == certificate  # one document and nothing else, or this fails
    assert json.loads((folder / run_folder.CERTIFICATE).read_text()) == certificate
    assert contents(folder) == before


@pytest.mark.parametrize("kind", KINDS)
def test_in_words_it_says_that_it_was_computed_anew(kind: str, copied: Copied) -> None:
    folder = copied(kind)
    done = dpfl("certificate", str(folder), cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Privacy certificate  ")
    assert "\n\ncomputed anew from the ledger, and as the run wrote it; its chain of hashes is whole.\n" in done.stdout


def test_in_brief_it_says_only_that(copied: Copied) -> None:
    folder = copied("tight")
    whole, brief = (dpfl("certificate", str(folder), *more, cwd=folder).stdout for more in ([], ["--brief"]))
    assert brief.startswith("certificate computed anew from the ledger, and as the run wrote it; its chain")
    assert " ".join(brief.split()) == "certificate " + " ".join(whole.rpartition("\n\n")[2].split())
    stored = folder / run_folder.CERTIFICATE
    stored.write_text(stored.read_text().replace('"epsilon": 8', '"epsilon": 7'))
    assert dpfl("certificate", str(folder), "--brief", cwd=folder).returncode == 2


def test_the_words_are_those_of_the_run(copied: Copied) -> None:
    folder = copied("paper")
    done = dpfl("certificate", "elsewhere", cwd=folder.parent)  # a path relative to where one stands
    assert "ε = 20, δ = 0.001   ε ≤ 30.32   52 % MORE than promised" in done.stdout
    assert "whoever knows the seed can subtract the noise" in done.stdout


def test_a_cohort_is_certified_for_the_rounds_that_each_client_answered(
    finished: dict[str, tuple[Path, dict[str, Any]]],
) -> None:
    _, certificate = finished["cohort"]
    assert sum(line["replies"] for line in certificate["spending"]) == 3 * 2
    for line, granted in zip(certificate["spending"], (1.0, 2.0, 4.0, 8.0), strict=True):
        spent = line["server_epsilon"]
        assert 0.999 * granted < spent <= granted if line["replies"] else spent == 0


def with_smaller_epsilon(certificate: dict[str, Any]) -> None:
    certificate["observers"]["server"]["epsilon"] *= 0.9


def with_a_client_less(certificate: dict[str, Any]) -> None:
    del certificate["spending"][1]


def with_something_uncounted(certificate: dict[str, Any]) -> None:
    certificate["uncounted"] = ["the test loss"]


def with_nothing_uncounted(certificate: dict[str, Any]) -> None:
    certificate["uncounted"] = []


def with_another_seed(certificate: dict[str, Any]) -> None:
    certificate["noise_source"] = "operating system"


def without_cautions(certificate: dict[str, Any]) -> None:
    certificate["cautions"] = []


def with_a_smaller_unit(certificate: dict[str, Any]) -> None:
    certificate["unit"] = "client"


def with_a_cheaper_client(certificate: dict[str, Any]) -> None:
    certificate["spending"][2]["released_epsilon"] /= 2


@pytest.mark.parametrize(
    ("kind", "tamper", "place"),
    [
        ("tight", with_smaller_epsilon, "observers.server.epsilon is 7.19999"),
        ("tight", with_a_client_less, "spending"),
        ("tight", with_something_uncounted, "uncounted"),
        ("without privacy", with_nothing_uncounted, "uncounted"),
        ("tight", with_another_seed, "noise_source is 'operating system' in the certificate and 'seed' by the ledger"),
        ("paper", without_cautions, "cautions"),
        ("paper", with_a_smaller_unit, "unit is 'client' in the certificate and 'record' by the ledger"),
        ("cohort", with_a_cheaper_client, "spending[2].released_epsilon"),
    ],
)
def test_a_changed_certificate_is_found_out_and_left_as_it_is(
    kind: str, tamper: Callable[[dict[str, Any]], None], place: str, copied: Copied
) -> None:
    folder = copied(kind)
    certificate = json.loads((folder / run_folder.CERTIFICATE).read_text())
    tamper(certificate)
    (folder / run_folder.CERTIFICATE).write_text(json.dumps(certificate))
    before = contents(folder)
    for as_json in ((), ("--json",)):
        done = dpfl("certificate", str(folder), *as_json, cwd=folder)
        assert (done.returncode, done.stdout) == (2, "")
        (sentence,) = done.stderr.splitlines()
        assert sentence.startswith(f"dpfl: certificate.json must agree with the ledger, but {place}")
        assert sentence.endswith("believe the ledger")
    assert contents(folder) == before


def test_several_changes_are_counted(copied: Copied) -> None:
    folder = copied("paper")
    certificate = json.loads((folder / run_folder.CERTIFICATE).read_text())
    without_cautions(certificate)
    with_another_seed(certificate)
    with_smaller_epsilon(certificate)
    (folder / run_folder.CERTIFICATE).write_text(json.dumps(certificate))
    assert " (and 2 more); believe the ledger" in dpfl("certificate", str(folder), cwd=folder).stderr


def test_a_run_that_never_ended_is_certified_for_what_it_was_charged(copied: Copied) -> None:
    folder = copied("tight")
    certificate = json.loads((folder / run_folder.CERTIFICATE).read_text())
    (folder / run_folder.CERTIFICATE).unlink()
    done = dpfl("certificate", str(folder), "--json", cwd=folder)
    assert (done.returncode, json.loads(done.stdout)) == (0, certificate)
    assert done.stderr == "dpfl: caution: the run ended before it wrote a certificate; this is what it was charged\n"
    assert dpfl("certificate", str(folder), cwd=folder).stdout.count("\ncomputed anew from the ledger; its") == 1
    assert not (folder / run_folder.CERTIFICATE).exists()


def without_ledger(folder: Path) -> None:
    (folder / run_folder.LEDGER).unlink()


def with_another_runs_ledger(folder: Path) -> None:
    done = dpfl("run", "fedavg", "--clients", "2", "--rounds", "1", "--out", "other", cwd=folder.parent)
    assert done.returncode == 0
    shutil.copy(folder.parent / "other" / run_folder.LEDGER, folder / run_folder.LEDGER)


def with_a_file_that_is_no_ledger(folder: Path) -> None:
    (folder / run_folder.LEDGER).write_text("once upon a time " * 100)


def with_half_a_ledger(folder: Path) -> None:
    whole = (folder / run_folder.LEDGER).read_bytes()
    (folder / run_folder.LEDGER).write_bytes(whole[: len(whole) // 2])


def without_environment(folder: Path) -> None:
    (folder / run_folder.ENVIRONMENT).unlink()


def of_an_older_version(folder: Path) -> None:
    environment = json.loads((folder / run_folder.ENVIRONMENT).read_text())
    del environment["ledger"], environment["run"]
    (folder / run_folder.ENVIRONMENT).write_text(json.dumps(environment))


def with_a_damaged_certificate(folder: Path) -> None:
    (folder / run_folder.CERTIFICATE).write_text('{"system": "ud')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_ledger, ["ledger must be a file that exists", run_folder.LEDGER]),
        (with_another_runs_ledger, ["ledger must hold the run", run_folder.LEDGER]),
        (with_a_file_that_is_no_ledger, ["ledger must be", run_folder.LEDGER]),
        (with_half_a_ledger, ["ledger must be", run_folder.LEDGER]),
        (without_environment, ["run must be the folder of a run", run_folder.ENVIRONMENT]),
        (of_an_older_version, ["run", "ledger"]),
        (with_a_damaged_certificate, ["is damaged", run_folder.CERTIFICATE]),
    ],
)
def test_what_cannot_be_read_is_named_and_left_as_it_is(
    spoil: Callable[[Path], None], words: list[str], copied: Copied
) -> None:
    folder = copied("tight")
    spoil(folder)
    before = contents(folder)
    done = dpfl("certificate", str(folder), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    for word in words:
        assert word in sentence
    assert contents(folder) == before


@each("name", ["nowhere", "thesis", "thesis/chapter.tex"])
def test_a_folder_that_is_no_run_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("years of work")
    done = dpfl("certificate", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert "run must be the folder of a run" in sentence
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_a_folder_that_moves_takes_its_ledger_along(tmp_path: Path) -> None:
    done = dpfl("run", "udp", "--clients", "2", "--rounds", "1", "--out", "here/r", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "here").rename(tmp_path / "there")
    again = dpfl("certificate", "there/r", "--json", cwd=tmp_path)
    assert (again.returncode, json.loads(again.stdout)) == (0, json.loads(done.stdout)["certificate"])
    assert not (tmp_path / "here").exists()


def test_runs_that_share_a_ledger_are_certified_each_for_itself(tmp_path: Path) -> None:
    assert dpfl("ledger", "shared.sqlite", "--new", cwd=tmp_path).returncode == 0
    common = ("--clients", "3", "--rounds", "2", "--ledger", "shared.sqlite", "--data-seed", "1", "--json")
    told = {}
    for name, epsilon in (("one", "8"), ("two", "3")):
        done = dpfl("run", "udp", "--epsilon", epsilon, *common, "--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        told[name] = json.loads(done.stdout)["certificate"]
        assert not (tmp_path / name / run_folder.LEDGER).exists()
    (tmp_path / "moved").mkdir()
    for name in told:  # the runs move, the ledger that others use stays where it is
        (tmp_path / name).rename(tmp_path / "moved" / name)
        done = dpfl("certificate", f"moved/{name}", "--json", cwd=tmp_path)
        computed, not_told = json.loads(done.stdout), {"together": None}
        assert (done.returncode, computed | not_told) == (0, told[name] | not_told)
        assert "give that with --ledger" in computed["together"]["why"]  # others may be in it
    assert told["one"]["claimed"]["epsilon"] == 8.0
    assert told["two"]["claimed"]["epsilon"] == 3.0
    # Each for itself, and in its last line for all that came before it.
    assert told["one"]["together"]["epsilon"] == pytest.approx(8.0, rel=1e-3)
    assert told["two"]["together"]["epsilon"] == pytest.approx(9.1003, abs=1e-3)
    assert told["two"]["together"]["runs"] == 2


def test_a_run_that_replaced_another_is_certified_without_it(tmp_path: Path) -> None:
    common = ("--clients", "3", "--rounds", "2", "--seed", "1", "--out", "r", "--json")
    for options in (("udp", "--epsilon", "8"), ("udp", "--epsilon", "3", "--force")):
        done = dpfl("run", *options, *common, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    again = json.loads(dpfl("certificate", "r", "--json", cwd=tmp_path).stdout)
    assert again == json.loads(done.stdout)["certificate"]
    assert again["observers"]["server"]["epsilon"] <= 3.0
    # But what was spent is spent: the ledger knows both.
    statement = json.loads(dpfl("ledger", "r", "--json", cwd=tmp_path).stdout)
    assert len(statement["runs"]) == 2
    assert all(line["spent"]["epsilon"] > 8.0 for line in statement["clients"])
