"""dpfl as a user meets it: the commands, what they print, what they leave on disk, and how they say no."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dpfl.cli import main
from dpfl.federation import LOADERS
from dpfl.options import option_names
from dpfl.orders import sensitivity
from dpfl.settings import Settings
from dpfl.systems import SYSTEMS, clipped_training
from e2e.command_line import Done, dpfl, started
from grids import each

QUICK = ["--clients", "5", "--rounds", "3"]


def installed(*args: str, cwd: Path) -> Done:
    """Run the installed command in a process of its own, which takes seconds to start."""
    command = [str(Path(sys.executable).with_name("dpfl")), *args]
    variables = {key: value for key, value in os.environ.items() if key != "DPFL_DATA"}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=120, check=False)


def run_json(*args: str, cwd: Path, by: Callable[..., Done] = dpfl) -> dict:
    done = by("run", *args, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return only_json(done.stdout)


def only_json(printed: str) -> dict:
    """Read one document; a line more, even an empty one, is an error."""
    (document,) = printed.splitlines()
    return json.loads(document)


def test_a_private_run_keeps_every_promise_of_its_json(tmp_path: Path) -> None:
    result = run_json("udp", *QUICK, "--epsilon", "8", "--delta", "1e-3", "--out", "r", cwd=tmp_path, by=installed)
    assert set(result) == {
        "system", "rounds", "steps_per_round", "accuracy", "loss", "seconds", "history", "certificate", "engine", "out",
    }  # fmt: skip
    assert result["system"] == "udp"
    assert result["rounds"] == 3
    assert result["steps_per_round"] == [1, 1, 1]
    assert 0 <= result["accuracy"] <= 1
    assert [line["round"] for line in result["history"]] == [1, 2, 3]
    assert {"round", "loss", "accuracy", "noise_std", "local_steps"} <= set(result["history"][0])
    certificate = result["certificate"]
    assert (certificate["unit"], certificate["neighbours"]) == ("record", "replace")
    assert certificate["claimed"] == {"epsilon": 8.0, "delta": 1e-3}
    assert set(certificate["observers"]) == {"server", "released"}
    for observer in certificate["observers"].values():
        assert {"epsilon", "delta", "basis"} <= set(observer)
        assert (observer["delta"], observer["basis"]) == (1e-3, "proved")
    assert 7.99 < certificate["observers"]["server"]["epsilon"] <= 8.0
    assert 0 < certificate["observers"]["released"]["epsilon"] < 8.0
    assert 0 <= certificate["observers"]["server"]["slack"] < 0.01
    assert certificate["uncounted"] == []
    assert certificate["noise_source"] == "operating system"


def test_the_run_folder_is_complete(tmp_path: Path) -> None:
    result = run_json("udp", *QUICK, "--seed", "7", "--out", "r", cwd=tmp_path)
    folder = tmp_path / "r"
    assert {path.name for path in folder.iterdir()} == {
        "config.toml", "metrics.jsonl", "model.safetensors", "certificate.json", "environment.json", "ledger.sqlite",
    }  # fmt: skip
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == result["history"]
    assert json.loads((folder / "certificate.json").read_text()) == result["certificate"]
    assert sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values()) == 650
    assert {"python", "dpfl", "torch", "numpy", "scipy"} <= set(
        json.loads((folder / "environment.json").read_text())["versions"]
    )
    assert tomllib.loads((folder / "config.toml").read_text())["seed"] == 7


@each(
    "options",
    [
        ["udp", "--cohort", "3", "--partition", "dirichlet:1.0"],
        ["udp", "--calibration", "paper", "--partition", "classes:3", "--set", "sizes=[40, 20, 40, 30, 20]"],
        ["fedprox", "--set", "sampling_rate=0.3", "--set", "model=mlp", "--set", "share=0.5"],
    ],
)
def test_running_the_config_again_repeats_the_run_bit_for_bit(options: list[str], tmp_path: Path) -> None:
    run_json(*options, *QUICK, "--seed", "7", "--out", "first", cwd=tmp_path)
    run_json("first/config.toml", "--out", "again", cwd=tmp_path)
    run_json("first/config.toml", "--seed", "8", "--out", "other", cwd=tmp_path)
    for name in ("config.toml", "metrics.jsonl", "model.safetensors", "certificate.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert (tmp_path / "first/metrics.jsonl").read_bytes() != (tmp_path / "other/metrics.jsonl").read_bytes()


def test_another_process_repeats_the_run_and_its_caution(tmp_path: Path) -> None:
    run_json("udp", *QUICK, "--delta", "0.1", "--cohort", "3", "--seed", "7", "--out", "first", cwd=tmp_path)
    again = installed("run", "first/config.toml", "--out", "again", "--json", cwd=tmp_path)
    for name in ("config.toml", "metrics.jsonl", "model.safetensors", "certificate.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    (caution,) = only_json(again.stdout)["certificate"]["cautions"]
    (said,) = (line for line in again.stderr.splitlines() if "dpfl:" in line)
    assert said == f"dpfl: caution: {caution}"


def test_without_a_seed_noise_is_never_the_same(tmp_path: Path) -> None:
    for out in ("one", "two"):
        run_json("udp", *QUICK, "--set", "data_seed=1", "--out", out, cwd=tmp_path)
    assert (tmp_path / "one/config.toml").read_bytes() == (tmp_path / "two/config.toml").read_bytes()
    assert (tmp_path / "one/model.safetensors").read_bytes() != (tmp_path / "two/model.safetensors").read_bytes()


def test_words_for_people(tmp_path: Path) -> None:
    done = dpfl("run", "udp", *QUICK, "--calibration", "paper", "--epsilon", "20", "--seed", "1", cwd=tmp_path)
    assert done.returncode == 0
    assert "accuracy" in done.stdout
    assert "ε ≤ 30.32" in done.stdout  # what a promise of 20 is really worth in the paper's calibration
    assert "52 % MORE than promised" in done.stdout
    assert "whoever knows the seed can subtract the noise" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()  # no --out: a fresh folder, named at the end
    assert str(Path("runs", folder.name)) in done.stdout

    shown = dpfl("certificate", str(folder), cwd=tmp_path)
    certificate, _, remark = shown.stdout.rpartition("\n\n")
    assert certificate in done.stdout
    assert remark.startswith("computed anew from the ledger, and as the run wrote it; its chain of hashes is whole.\n")
    report = dpfl("report", str(folder), "--json", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    page = Path(tmp_path, json.loads(report.stdout)["report"]).read_text()
    assert "ε ≤ 30.32" in page
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_privacy_says_so(tmp_path: Path) -> None:
    certificate = run_json("fedavg", *QUICK, cwd=tmp_path)["certificate"]
    server = certificate["observers"]["server"]
    assert (server["epsilon"], server["delta"], server["basis"]) == (None, None, "none")
    assert {value for key, value in server.items() if key != "basis"} == {None}
    assert certificate["claimed"] is None
    assert certificate["uncounted"]


def test_cautions_go_to_stderr_and_leave_the_json_alone(tmp_path: Path) -> None:
    # UDP's formula does not hold at ε = 20, and δ = 0.1 is more than one in the records of a client.
    options = ["--calibration", "paper", "--epsilon", "20", "--delta", "0.1"]
    done = dpfl("run", "udp", *QUICK, *options, "--out", "r", "--json", cwd=tmp_path)
    assert done.returncode == 0
    certificate = only_json(done.stdout)["certificate"]
    said = [line for line in done.stderr.splitlines() if line.startswith("dpfl: ")]
    assert said == [f"dpfl: caution: {caution}" for caution in certificate["cautions"]]
    assert "equation (10)" in said[0]
    assert "delta should be well below one in a client's number of records, was 0.1" in said[1]


def test_a_sound_promise_is_not_cautioned(tmp_path: Path) -> None:
    done = dpfl("run", "udp", *QUICK, "--json", cwd=tmp_path)
    assert only_json(done.stdout)["certificate"]["cautions"] == []
    assert "dpfl:" not in done.stderr


@each("command", [["run"], ["certificate"], ["report"], ["account"], ["ledger"], []])
def test_help_is_worth_reading(command: list[str], tmp_path: Path) -> None:
    done = dpfl(*command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "dpfl run" in done.stdout or f"dpfl {command[0]}" in done.stdout  # an example to copy


@each(
    ("command", "options"),
    [
        ("account", ["--noise-multiplier", "--steps", "--epsilon", "--delta", "--sampling-rate", "--mechanism"]),
        ("account", ["--sampling", "--json", "gaussian|laplace", "poisson|fixed"]),
        ("ledger", ["RUN_OR_FILE", "--new", "--grant", "--delta", "--client", "--unit", "--currency", "--json"]),
        ("certificate", ["RUN_DIR", "--brief", "--json"]),
        ("run", ["--ledger", "--json"]),
    ],
)
def test_the_help_names_every_option(command: str, options: list[str], tmp_path: Path) -> None:
    shown = dpfl(command, "--help", cwd=tmp_path).stdout
    for option in options:
        assert option in shown


def test_the_installed_command_lists_its_commands(tmp_path: Path) -> None:
    shown = installed("--help", cwd=tmp_path).stdout
    for command in ("run", "account", "ledger", "certificate", "report"):
        assert f" {command} " in shown


def test_the_help_names_every_system_and_data_set(tmp_path: Path) -> None:
    words = dpfl("run", "--help", cwd=tmp_path).stdout.replace(",", " ").replace(".", " ").split()
    assert SYSTEMS.keys() <= set(words)
    assert LOADERS.keys() <= set(words)


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run the command line in this process, expect it to say no, and return its exit code and its one sentence."""

    def call(*args: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("DPFL_DATA", str(tmp_path / "no-such-place"))
        monkeypatch.setattr(sys, "argv", ["dpfl", *args])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert printed.out == ""
        (sentence,) = printed.err.splitlines()
        return end.value.code, sentence  # type: ignore[return-value]

    return call


BAD = {
    "epsilon": (["udp", "--epsilon", "0"], ["epsilon", "above 0", "0.0"]),
    "epsilon below zero": (["udp", "--epsilon", "-3"], ["epsilon", "-3"]),
    "epsilon a word": (["udp", "--epsilon", "much"], ["epsilon", "number", "'much'"]),
    "delta": (["udp", "--delta", "1"], ["delta", "at least 0", "below 1", "was 1.0"]),
    "delta below zero": (["udp", "--delta", "-0.1"], ["delta", "at least 0", "was -0.1"]),
    "delta zero": (["udp", "--delta", "0"], ["delta", "above 0 with Gaussian noise", "was 0"]),
    "one delta zero": (["udp", "--delta", "[1e-3, 0]"], ["delta", "above 0 with Gaussian noise", "was 0"]),
    "delta zero with the paper's noise": (["udp", "--calibration", "paper", "--delta", "0"], ["delta", "above 0"]),
    "ledger that is not there": (["udp", "--ledger", "no.sqlite"], ["ledger", "exists", "'no.sqlite'"]),
    "cohort": (["udp", "--clients", "5", "--cohort", "6"], ["cohort", "5", "6"]),
    "clients": (["udp", "--clients", "5000"], ["clients", "1,294 records", "5,000"]),
    "no clients": (["udp", "--clients", "0"], ["clients", "0"]),
    "rounds": (["udp", "--rounds", "0"], ["rounds", "0"]),
    "rounds half": (["udp", "--rounds", "1.5"], ["rounds", "whole number", "1.5"]),
    "system": (["upd"], ["system", "'upd'", "did you mean 'udp'?"]),
    "data": (["udp", "--data", "digit"], ["data", "'digit'", "did you mean 'digits'?"]),
    "model": (["udp", "--set", "model=softmaxx"], ["model", "did you mean 'softmax'?"]),
    "model that does not fit": (["udp", "--set", "model=ali-cnn"], ["model", "softmax or mlp"]),
    "partition": (["udp", "--partition", "dirichlett:1"], ["partition", "dirichlett"]),
    "calibration": (["udp", "--calibration", "papers"], ["calibration", "did you mean 'paper'?"]),
    "backend": (["udp", "--backend", "turbo"], ["backend", "turbo"]),
    "device": (["udp", "--device", "tpu"], ["device", "tpu"]),
    "seed": (["udp", "--seed", "-1"], ["seed", "-1"]),
    "unknown key": (["udp", "--set", "epsilonn=3"], ["epsilonn", "did you mean 'epsilon'?"]),
    "option of another system": (["fedavg", "--epsilon", "3"], ["epsilon", "fedavg takes"]),
    "not a pair": (["udp", "--set", "rounds"], ["--set", "KEY=VALUE", "'rounds'"]),
    "missing config": (["nowhere.toml"], ["config", "nowhere.toml"]),
    "unknown option": (["udp", "--epsilom", "3"], ["--epsilom"]),
    "no data directory": (["udp", "--data", "mnist"], ["DPFL_DATA", "no-such-place"]),
}  # fmt: skip


@pytest.mark.parametrize(("args", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_and_nothing_is_written(
    args: list[str], words: list[str], refused: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, sentence = refused("run", *args, "--json")
    assert code == 2
    for word in words:
        assert word in sentence
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_an_error_unless_forced(tmp_path: Path) -> None:
    run_json("udp", *QUICK, "--seed", "1", "--out", "r", cwd=tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    refused = dpfl("run", "udp", *QUICK, "--seed", "2", "--out", "r", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before
    run_json("udp", *QUICK, "--seed", "2", "--out", "r", "--force", cwd=tmp_path)
    assert tomllib.loads((tmp_path / "r/config.toml").read_text())["seed"] == 2


def test_an_interrupted_run_says_where_its_rounds_are(tmp_path: Path) -> None:
    with started("run", "udp", "--rounds", "100000", "--out", "r", cwd=tmp_path) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "r/metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip().endswith("the run was interrupted; its finished rounds are in r")
    assert {"certificate.json", "model.safetensors"} <= {path.name for path in (tmp_path / "r").iterdir()}


def test_a_refused_budget_is_exit_code_three(
    refused: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned noise never overdraws, so the plan is made wrong: noise for half of the sensitivity that is priced."""
    monkeypatch.setattr(clipped_training, "sensitivity", lambda *args, **kwargs: sensitivity(*args, **kwargs) / 2)
    code, sentence = refused("run", "udp", "--rounds", "8", "--clients", "3", "--out", "r", "--json")
    assert code == 3
    assert "budget" in sentence
    assert "the rounds before it are in r" in sentence
    spent = json.loads((tmp_path / "r/certificate.json").read_text())
    assert spent["rounds"] == 2  # each round costs four times its share of the eight
    assert spent["observers"]["server"]["epsilon"] <= 8.0


SET_BY_OPTION = {
    "data": "digits", "clients": 4, "partition": "sorted", "sizes": [10, 20], "share": 0.5, "min_records": 3,
    "validation_share": 0.2, "test_share": 0.3, "data_seed": 4, "model": "mlp", "evaluate_every": 2,
    "backend": "reference", "draws": "client", "device": "cpu", "precision": "tf32", "seed": 9, "sampler": "exact",
    "ledger": "2026",
}  # fmt: skip


ELSEWHERE = {"sites", "schema", "public", "paid_evaluation"}  # in test_sites.py


def test_every_setting_has_its_own_option(tmp_path: Path) -> None:
    assert SET_BY_OPTION.keys() == set(option_names(Settings)) - ELSEWHERE
    assert dpfl("ledger", "2026", "--new", cwd=tmp_path).returncode == 0  # a name that could be a number
    words = [word for key, value in SET_BY_OPTION.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    run_json("udp", "--rounds", "2", *words, "--out", "r", cwd=tmp_path)
    written = tomllib.loads((tmp_path / "r/config.toml").read_text())
    assert {key: written[key] for key in SET_BY_OPTION} == SET_BY_OPTION


@pytest.mark.parametrize(("command", "missing"), [("run", set()), ("plan", set()), ("compare", {"seed"})])
def test_the_help_of_what_takes_a_problem_lists_every_setting(command: str, missing: set[str], tmp_path: Path) -> None:
    words = set(dpfl(command, "--help", cwd=tmp_path).stdout.split())
    for name in option_names(Settings):
        assert (f"--{name.replace('_', '-')}" in words) == (name not in missing)
    assert "[default:" in words  # which is no markup


def test_set_has_the_last_word(tmp_path: Path) -> None:
    run_json("udp", *QUICK, "--set", "rounds=2", "--set", "share=0.5", "--share", "0.7", "--out", "r", cwd=tmp_path)
    written = tomllib.loads((tmp_path / "r/config.toml").read_text())
    assert (written["rounds"], written["share"]) == (2, 0.5)


@pytest.mark.parametrize("what", ["systems", "data", "models", "experiments"])
def test_what_there_is_can_be_listed(what: str, tmp_path: Path) -> None:
    rows = only_json(dpfl("list", what, "--json", cwd=tmp_path).stdout)[what]
    printed = dpfl("list", what, cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in printed] == ["name", *(row["name"] for row in rows)]


def test_a_list_of_something_else_is_refused(refused: Callable[..., tuple[int, str]]) -> None:
    code, sentence = refused("list", "system")
    assert code == 2
    assert sentence.endswith("must be one of data, experiments, models, systems, was 'system'; did you mean 'systems'?")
