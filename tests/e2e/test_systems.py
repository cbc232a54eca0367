"""Every system as a user meets it: on the command line, from a config file and from Python, with the same result."""

import json
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import dpfl as library
from dpfl.config import Settings
from dpfl.orders import UNPAID
from dpfl.systems import SYSTEMS, PrivateSystem
from e2e.command_line import Done, dpfl
from grids import each

# Small enough that the whole of this file takes seconds; ALI's noise is so small that few steps are afforded.
QUICK = ["--data", "digits", "--clients", "3", "--rounds", "3", "--seed", "1"]
FEWER = {"ali-dpfl": ["--set", "noise_multiplier=2.5"]}
KEPT = ("config.toml", "metrics.jsonl", "model.safetensors", "certificate.json")


def calibrations(name: str) -> tuple[str, ...]:
    kind = SYSTEMS[name]
    return get_args(get_type_hints(kind)["calibration"]) if issubclass(kind, PrivateSystem) else ()


ALL = [(name, one) for name in SYSTEMS for one in calibrations(name) or (None,)]


def options(name: str, calibration: str | None) -> list[str]:
    chosen = [] if calibration is None else ["--calibration", calibration]
    return [name, *QUICK, *FEWER.get(name, []), *chosen]


def result(done: Done) -> dict[str, Any]:
    """Read one document; a line more, even an empty one, is an error."""
    assert done.returncode == 0, done.stderr
    (document,) = done.stdout.splitlines()
    return json.loads(document)


@each(("name", "calibration"), ALL)
def test_a_run_of_every_system(name: str, calibration: str | None, tmp_path: Path) -> None:
    shown = result(dpfl("run", *options(name, calibration), "--out", "r", "--json", cwd=tmp_path))
    assert shown.keys() == {
        "system", "rounds", "steps_per_round", "accuracy", "loss", "seconds", "history", "certificate", "engine", "out",
    }  # fmt: skip
    assert (shown["system"], shown["out"]) == (name, "r")
    # A system that goes on until the budget is gone may be stopped before the last round.
    assert shown["rounds"] == 3 or (SYSTEMS[name].until_spent and 0 < shown["rounds"] < 3)
    assert len(shown["history"]) == len(shown["steps_per_round"]) == shown["rounds"]
    assert 0 <= shown["accuracy"] <= 1
    for round, line in enumerate(shown["history"], start=1):
        assert {"round", "loss", "accuracy", "noise_std", "local_steps"} <= line.keys()
        assert line["round"] == round
        assert (line["noise_std"] is None) == (calibration is None)
    assert_certificate(shown["certificate"], name, calibration)

    # The config that the run kept repeats it, and its ledger tells the same story.
    dpfl("run", "r/config.toml", "--out", "again", "--json", cwd=tmp_path)
    for kept in KEPT:
        assert (tmp_path / "r" / kept).read_bytes() == (tmp_path / "again" / kept).read_bytes()
    assert result(dpfl("certificate", "r", "--json", cwd=tmp_path)) == shown["certificate"]
    words = dpfl("certificate", "r", cwd=tmp_path).stdout
    assert "computed anew from the ledger, and as the run wrote it; its chain of hashes is whole.\n" in words
    if calibration == "tight":
        assert "within the promise" in words
        assert "MORE" not in words


def assert_certificate(certificate: dict[str, Any], name: str, calibration: str | None) -> None:
    assert (certificate["system"], certificate["calibration"]) == (name, calibration)
    if calibration is None:
        assert certificate["claimed"] is None
        assert certificate["observers"]["server"]["epsilon"] is None
        return
    assert certificate["unit"] in ("record", "client")
    assert certificate["neighbours"] in ("replace", "add-remove")
    assert certificate["claimed"] == {"epsilon": 8.0, "delta": 1e-3}
    assert {"server", "released"} <= certificate["observers"].keys()
    for observer in certificate["observers"].values():
        assert {"epsilon", "delta", "basis"} <= observer.keys()
        assert observer["basis"] == "proved"
    asked = {"ali-dpfl": [UNPAID["curvature from the sum"]]} if calibration == "paper" else {}
    assert certificate["uncounted"] == asked.get(name, [])
    if calibration == "tight":
        for observer in certificate["against"]:
            assert 0 < certificate["observers"][observer]["epsilon"] <= 8.0 * (1 + 1e-9)


@each("name", SYSTEMS)
def test_python_does_what_the_command_line_does(name: str, tmp_path: Path) -> None:
    calibration = next(iter(calibrations(name)), None)
    shown = result(dpfl("run", *options(name, calibration), "--out", "r", "--json", cwd=tmp_path))
    digits = library.federate("digits", clients=3, seed=1)
    extra = {"noise_multiplier": 2.5} if name in FEWER else {}
    run = library.train(SYSTEMS[name](rounds=3, **extra), digits, seed=1)
    assert run.history == shown["history"]
    assert json.loads(json.dumps(run.certificate.to_dict())) == shown["certificate"]


OWN: dict[str, dict[str, Any]] = {
    "udp": {"discount": 0.5, "least_gain": 5.0, "epsilon": [2.0, 4.0, 8.0], "delta": [1e-3, 1e-4, 1e-5]},
    "nbafl": {"cohort": 2, "exposures": 2, "epsilon": [2.0, 4.0, 8.0], "clipping": "model"},
    "dp-fedavg": {
        "mechanism": "laplace",
        "cohort": 2,
        "local_steps": 2,
        "lr_schedule": "inverse:5.0",
        "epsilon": [2, 4, 8],
    },
    "fedsgd-dpc": {"mechanism": "gaussian", "sampling_rate": 0.5, "cohort": 1, "norm": 1},
    "dpsgd-fedavg": {"noise_multiplier": 3.0, "local_steps": 2, "cohort": 2, "scheduling": "round-robin"},
    "ali-dpfl": {"noise_multiplier": 2.5, "heterogeneity": 0, "local_steps": 2, "clip": 2},
    "pe-dpfl": {"proximal": 0, "cohort": 2, "scheduling": "poisson", "delta": [1e-3, 1e-4, 1e-5]},
    "lei": {"noise_fall": 0, "clip": 0.5},
}


@each("name", OWN)
def test_a_config_file_means_what_python_means(name: str, tmp_path: Path) -> None:
    table = {"system": name, "data": "digits", "clients": 3, "sizes": [60, 90, 120], "rounds": 3, "seed": 4} | OWN[name]
    (tmp_path / "own.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()))
    shown = result(dpfl("run", "own.toml", "--out", "r", "--json", cwd=tmp_path))
    kept = tomllib.loads((tmp_path / "r/config.toml").read_text())
    assert kept.items() >= table.items()
    digits = library.federate("digits", clients=3, sizes=(60, 90, 120), seed=4)
    run = library.train(SYSTEMS[name](rounds=3, **OWN[name]), digits, seed=4)
    assert run.history == shown["history"]
    assert json.loads(json.dumps(run.certificate.to_dict()))["spending"] == shown["certificate"]["spending"]
    for line in shown["certificate"]["spending"]:
        for observer in shown["certificate"]["against"]:
            assert line[f"{observer}_epsilon"] <= line["claimed_epsilon"] * (1 + 1e-9)


def test_discounting_in_the_paper_names_the_loss_that_it_asks_for(tmp_path: Path) -> None:
    crd = ["udp", *QUICK, "--rounds", "5", "--set", "discount=0.5", "--set", "least_gain=10"]
    tight, paper = (
        result(dpfl("run", *crd, "--calibration", calibration, "--out", calibration, "--json", cwd=tmp_path))
        for calibration in ("tight", "paper")
    )
    assert tight["certificate"]["uncounted"] == []
    assert paper["certificate"]["uncounted"] == [UNPAID["loss"]]
    assert tight["rounds"] == paper["rounds"] < 5  # no round gains so much: rounds are cut


def test_a_newcomers_first_private_training_learns(tmp_path: Path) -> None:
    shown = result(dpfl("run", "ali-dpfl", "--data", "digits", "--epsilon", "3", "--seed", "1", "--json", cwd=tmp_path))
    assert shown["accuracy"] > 0.7
    assert shown["certificate"]["observers"]["server"]["epsilon"] <= 3.0
    assert shown["certificate"]["uncounted"] == []


@each("name", SYSTEMS)
def test_an_option_that_a_system_does_not_take_is_refused_with_those_it_does(name: str, tmp_path: Path) -> None:
    done = refused("run", *options(name, None), "--set", "budget_of_the_server=1", cwd=tmp_path)
    taken, _, settings = done.partition(f"{name} takes ")[2].partition(", every run takes ")
    assert taken.split(", ") == sorted(field.name for field in fields(SYSTEMS[name]))
    assert settings.split(", ") == sorted(field.name for field in fields(Settings))


def refused(*args: str, cwd: Path) -> str:
    """Expect exit code 2 and one sentence on stderr, and that nothing was written; return the sentence."""
    done = dpfl(*args, cwd=cwd)
    assert done.returncode == 2
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("dpfl: ")
    assert list(cwd.iterdir()) == []
    return sentence


BAD = {
    "local steps in fedsgd-dpc": (["fedsgd-dpc", "--local-steps", "2"], ["local_steps", "fedsgd-dpc takes"]),
    "a budget without privacy": (["fedprox", "--epsilon", "3"], ["epsilon", "fedprox takes"]),
    "Laplace noise on an L2 clip": (
        ["fedsgd-dpc", "--set", "mechanism=laplace", "--set", "norm=2"], ["norm must be 1 with Laplace", "was 2"],
    ),
    "the same in dp-fedavg": (["dp-fedavg", "--set", "mechanism=laplace", "--set", "norm=2"], ["norm must be 1"]),
    "Laplace noise on a sample": (
        ["fedsgd-dpc", "--set", "mechanism=laplace", "--set", "sampling_rate=0.5"], ["sampling_rate must be left out"],
    ),
    "K in turn in nbafl": (
        ["nbafl", "--cohort", "2", "--set", "scheduling=round-robin"], ["scheduling must be 'random'", "'round-robin'"],
    ),
    "K in turn in udp's paper": (
        ["udp", "--calibration", "paper", "--cohort", "2", "--set", "scheduling=round-robin"], ["scheduling"],
    ),
    "CRD without public data": (
        ["udp", "--set", "discount=0.9", "--set", "validation_share=0"], ["validation_share must be above 0", "was 0"],
    ),
    "Adap without public data": (["adap-dpfl", "--set", "validation_share=0"], ["validation_share must be above 0"]),
    "a cohort of ALI": (["ali-dpfl", "--cohort", "2"], ["cohort must be left out for ali-dpfl"]),
    "noise for no step": (
        ["ali-dpfl", "--set", "noise_multiplier=0.3", "--epsilon", "1"], ["noise_multiplier must be large enough"],
    ),
    "more steps than a budget has": (
        ["dpsgd-fedavg", "--set", "noise_multiplier=2", "--local-steps", "500"], ["local_steps must be at most"],
    ),
    "more exposures than rounds": (["nbafl", "--set", "exposures=4"], ["exposures must be at most the 3 rounds"]),
    "records clipped in nbafl's paper": (
        ["nbafl", "--calibration", "paper", "--set", "clipping=record"], ["clipping must be 'model'"],
    ),
    "a baseline's paper": (["adap-dpfl", "--calibration", "paper"], ["calibration must be one of tight"]),
    "half of a theory": (["dp-fedavg", "--set", "smoothness=2"], ["strong_convexity must be given"]),
    "a theory and a rate": (
        ["fedsgd-dpc", "--lr", "1", "--set", "smoothness=2", "--set", "strong_convexity=1"], ["lr and lr_schedule"],
    ),
    "a discount of one": (["udp", "--set", "discount=1"], ["discount must be above 0 and below 1"]),
    "noise that falls below zero": (["lei", "--set", "noise_fall=1"], ["noise_fall"]),
    "noise that grows": (["adap-dpfl", "--set", "noise_decay=1.1"], ["noise_decay"]),
    "a budget too few": (["nbafl", "--epsilon", "[1, 2]"], ["epsilon must be one number or one for each of the 3"]),
}  # fmt: skip


@each(("args", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_and_nothing_is_written(args: list[str], words: list[str], tmp_path: Path) -> None:
    sentence = refused("run", args[0], *QUICK, *args[1:], "--out", "r", "--json", cwd=tmp_path)
    for word in words:
        assert word in sentence


@each("name", [name for name in SYSTEMS if name != "adap-dpfl"])
def test_systems_that_watch_no_loss_need_no_public_data(name: str, tmp_path: Path) -> None:
    calibration = next(iter(calibrations(name)), None)
    args = [*options(name, calibration), "--set", "validation_share=0", "--out", "r", "--json"]
    shown = result(dpfl("run", *args, cwd=tmp_path))
    assert {line["validation_loss"] for line in shown["history"]} == {None}
    assert shown["accuracy"] is not None  # on the test split, which is there all the same


def test_the_papers_discounting_needs_no_public_data_because_it_looks_at_the_clients(tmp_path: Path) -> None:
    crd = ["--set", "discount=0.9", "--set", "validation_share=0", "--calibration", "paper"]
    shown = result(dpfl("run", "udp", *QUICK, *crd, "--out", "r", "--json", cwd=tmp_path))
    assert shown["certificate"]["uncounted"] == [UNPAID["loss"]]


def test_systems_are_found_where_python_users_look() -> None:
    """`import dpfl; dpfl.systems.NbAFL(...)` works in a fresh interpreter, before anything else was used."""
    program = "import dpfl; print(dpfl.systems.NbAFL(rounds=2).name)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "nbafl\n", done.stderr
