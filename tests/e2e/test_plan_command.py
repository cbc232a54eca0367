"""`dpfl plan` and `dpfl run --plan` as a user meets them: what they print, what they leave on disk, how they say no."""

import json
import struct
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpfl import planning, training
from dpfl.federation import Federation
from dpfl.planning import Constants, by_bound, pilot, trying
from dpfl.planning.pilot import Stage
from dpfl.planning.trying import Seen
from dpfl.server.evaluation import Score
from e2e.command_line import Done, dpfl
from grids import each

PROMISED = {"rounds", "local_steps", "cohort", "bound", "curve", "constants", "why"}
FEW = ("--clients", "4", "--set", "share=0.3", "--seed", "3")
SMALL = (*FEW, "--delta", "1e-4")
CONSTANTS = Constants(
    strong_convexity=0.5, smoothness=2.0, polyak_lojasiewicz=0.4, gradient_bound=1.3, lipschitz=1.7, record_spread=0.8,
    divergence=0.6, dissimilarity=1.2, heterogeneity=0.3, initial_distance=5.0, initial_gap=3.0,
)  # fmt: skip
FROM_FILE = ("--constants", "known.toml")
BOUND = ("--method", "bound")
KNOWN = (*FROM_FILE, *BOUND)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a file of constants, so that nothing has to be estimated."""
    (tmp_path / "known.toml").write_text(CONSTANTS.to_toml())
    return tmp_path


@pytest.fixture
def no_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Constants:
        raise AssertionError("constants were estimated")

    monkeypatch.setattr(by_bound, "estimate", refuse)


def plan(*args: str, cwd: Path) -> dict[str, Any]:
    return only_json(dpfl("plan", *args, "--json", cwd=cwd))


def only_json(done: Done) -> dict[str, Any]:
    """Read one document; a line more, even an empty one, is an error, and so is a number that JSON does not have."""
    assert done.returncode == 0, done.stderr
    (document,) = done.stdout.splitlines()

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is no JSON")

    return json.loads(document, parse_constant=refuse)


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def png_size(path: Path) -> tuple[int, int]:
    begin = path.read_bytes()[:24]
    assert begin.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", begin[16:24])


# (a) The plan.


def test_a_plan_keeps_every_promise_and_can_be_run(tmp_path: Path) -> None:
    done = dpfl("plan", "udp", *SMALL, *BOUND, "--max-rounds", "6", "--json", "--out", "p", cwd=tmp_path)
    found = only_json(done)
    assert done.stderr == ""
    assert set(found) >= PROMISED | {"out"}
    assert 1 <= found["rounds"] <= 6
    assert (found["local_steps"], found["cohort"], found["out"]) == (1, 4, "p")
    for point in found["curve"]:
        assert set(point) == {"rounds", "local_steps", "cohort", "bound"}
    assert {key: found[key] for key in ("rounds", "local_steps", "cohort", "bound")} in found["curve"]
    assert all(isinstance(sentence, str) for sentence in found["why"])
    assert "public records of digits" in found["constants"]["source"]
    assert {"value", "low", "high", "how"} == set(found["constants"]["smoothness"])
    out = tmp_path / "p"
    assert left(out) == {"plan.json", "plan.png", "constants.toml", "config.toml"}
    kept = json.loads((out / "plan.json").read_text())
    assert kept == {key: value for key, value in found.items() if key != "out"}
    width, height = png_size(out / "plan.png")
    assert 300 < width < 4000
    assert 200 < height < 2000
    # The config runs with the planned numbers, and its run is what was predicted.
    assert tomllib.loads((out / "config.toml").read_text())["rounds"] == found["rounds"]
    run = only_json(dpfl("run", "p/config.toml", "--json", "--out", "r", cwd=tmp_path))
    assert run["rounds"] == found["rounds"]
    for observer, spent in run["certificate"]["observers"].items():
        assert found["certificate"]["observers"][observer]["epsilon"] == pytest.approx(spent["epsilon"], rel=1e-6)
    assert run["history"][0]["noise_std"] == pytest.approx(found["noise"]["most_std"], rel=0.05)
    # Constants that were saved give the same plan, and the numbers survive to the last bit.
    again = plan("udp", *SMALL, *BOUND, "--max-rounds", "6", "--constants", "p/constants.toml", cwd=tmp_path)
    same = PROMISED | {"noise", "certificate", "papers", "options"}
    assert {key: again[key] for key in same} == {key: found[key] for key in same}
    assert (tmp_path / again["out"]).parent == tmp_path / "runs"


@pytest.mark.usefixtures("no_estimates")
def test_constants_that_are_given_are_not_estimated(folder: Path) -> None:
    first = plan("udp", *SMALL, *KNOWN, "--lr", "0.5", "--out", "a", cwd=folder)
    assert first["constants"]["smoothness"]["value"] == 2.0
    assert (folder / "a/constants.toml").read_text() == (folder / "known.toml").read_text()
    other = plan("udp", *SMALL, *KNOWN, "--lr", "0.5", "--constant", "initial_gap=30", "--constant", "L=1", cwd=folder)
    assert (other["constants"]["initial_gap"]["value"], other["constants"]["smoothness"]["value"]) == (30.0, 1.0)
    assert other["constants"]["strong_convexity"] == first["constants"]["strong_convexity"]
    assert other["rounds"] > first["rounds"]  # there is more to learn


@pytest.mark.usefixtures("no_estimates")
@pytest.mark.parametrize(
    "args",
    [
        ("dp-fedavg", "--lr", "0.1", "--epsilon", "100"),
        ("nbafl", "--set", "proximal=20"),
        ("ali-dpfl", "--rounds", "5"),
        ("fedsgd-dpc", "--lr", "0.1", "--set", "mechanism=laplace", "--delta", "0"),
        ("ali-dpfl", "--rounds", "400"),
    ],
)
def test_every_system_with_a_bound_is_planned(args: tuple[str, ...], folder: Path) -> None:
    command = (args[0], *SMALL, *args[1:], *KNOWN, "--max-rounds", "5")
    found = plan(*command, "--out", "p", cwd=folder)
    assert found["system"] == args[0]
    assert set(found) >= PROMISED
    assert found["bound"] > 0
    png_size(folder / "p/plan.png")
    text = dpfl("plan", *command, "--out", "q", cwd=folder)
    assert text.returncode == 0, text.stderr
    said = text.stdout.splitlines()
    assert said[0].startswith(f"{args[0]}: {found['rounds']} round")
    assert "predicted certificate, of the run that is planned here" in said
    assert any(line.startswith("all of this together: ε = 0, since of clients nothing was looked at") for line in said)
    assert found["together"] == 0.0
    assert said[-1] == "to run it    dpfl run q/config.toml"
    assert all(f"  - {sentence}" in said for sentence in found["why"])
    written = tomllib.loads((folder / "p/config.toml").read_text())
    assert written["system"] == args[0]
    for key, value in found["options"].items():
        assert written.get(key) == value


@pytest.mark.usefixtures("no_estimates")
def test_given_numbers_are_kept_and_forms_differ(folder: Path) -> None:
    fixed = plan("fedsgd-dpc", *SMALL, *KNOWN, "--lr", "0.1", "--rounds", "7", "--set", "cohort=3", cwd=folder)
    assert (fixed["rounds"], fixed["cohort"], fixed["options"]) == (7, 3, {})
    general = plan("udp", *SMALL, *KNOWN, "--lr", "0.5", "--epsilon", "1", cwd=folder)
    paper = plan("udp", *SMALL, *KNOWN, "--lr", "0.5", "--epsilon", "1", "--form", "paper", cwd=folder)
    assert (general["form"], paper["form"]) == ("general", "paper")
    assert paper["rounds"] == general["papers"]["rounds"] != general["rounds"]
    steps = plan("dp-fedavg", *SMALL, *KNOWN, "--lr", "0.1", "--total-steps", "12", cwd=folder)
    assert steps["rounds"] * steps["local_steps"] == pytest.approx(12, abs=3)


@pytest.mark.usefixtures("no_estimates")
def test_a_pilot_a_search_and_a_check(folder: Path) -> None:
    command = ("udp", *SMALL, *FROM_FILE, "--lr", "0.5", "--clip", "1", "--set", "averaged=0", "--max-rounds", "3",
               "--time-limit", "2")  # fmt: skip
    done = dpfl(
        "plan", *command, "--search", "lr=0.25,0.5", "--check", "--seeds", "2", "--out", "p", "--json", cwd=folder
    )
    found = only_json(done)
    assert "2 candidates with rounds = 1, seed 1" in done.stderr.splitlines()  # told on stderr
    assert found["method"] == "pilot"
    assert found["bound"] is None
    assert {one["lr"] for one in found["tried"]} == {0.25, 0.5}
    assert found["bounds_answer"]["bound"] > 0
    assert found["check"]["seeds"] == 2
    assert found["check"]["planned"]["rounds"] == found["rounds"]
    assert found["check"]["regret"] >= 0
    best = min(one["loss"] for one in found["check"]["grid"])
    assert found["check"]["regret"] == pytest.approx(found["check"]["planned"]["loss"] / best - 1)
    assert json.loads((folder / "p/plan.json").read_text())["check"] == found["check"]
    assert tomllib.loads((folder / "p/config.toml").read_text())["lr"] == found["options"]["lr"]
    assert found["together"] is found["check"]["together"] is None
    points = len(found["check"]["grid"])
    assert found["check"]["if_real"]["trainings"] == 2 * points
    text = dpfl("plan", *command, "--check", "--seeds", "1", cwd=folder)
    assert text.returncode == 0, text.stderr
    assert "regret" in text.stdout
    assert "nobody's records were protected here" in text.stdout
    assert f"the {points} trainings would cost each client's people ε ≤ " in text.stdout
    assert "ε = 0" not in text.stdout


@pytest.mark.usefixtures("no_estimates")
def test_a_pilot_is_the_default_and_chooses_rates_and_clips_too(folder: Path) -> None:
    command = ("udp", *SMALL, *FROM_FILE, "--max-rounds", "3", "--time-limit", "2", "--json")
    found = only_json(dpfl("plan", *command, "--out", "p", cwd=folder))
    assert found["method"] == "pilot"
    assert found["options"].keys() == {"rounds", "lr", "clip", "averaged"}
    written = tomllib.loads((folder / "p/config.toml").read_text())
    assert {key: written[key] for key in found["options"]} == found["options"]
    expected = found["expected"]
    assert expected.keys() == {"loss", "accuracy", "made_up"}
    for one in (expected["loss"], expected["accuracy"]):
        assert 0 <= one["low"] <= one["mean"] <= one["high"]
    assert not expected["made_up"]
    assert json.loads((folder / "p/plan.json").read_text())["expected"] == expected
    given = only_json(dpfl("plan", *command, "--lr", "0.5", "--set", "averaged=0.3", "--out", "q", cwd=folder))
    assert given["options"].keys() == {"rounds", "clip"}
    assert {one["clip"] for one in given["tried"]} > {given["options"]["clip"]}
    assert tomllib.loads((folder / "q/config.toml").read_text())["lr"] == 0.5


@pytest.mark.usefixtures("no_estimates")
def test_without_public_records_a_pilot_makes_some_up(folder: Path) -> None:
    command = ("udp", "--data", "heart", "--delta", "1e-3", "--seed", "1", *FROM_FILE, "--max-rounds", "3")
    done = dpfl("plan", *command, "--time-limit", "2", "--out", "p", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "made-up tasks of this shape (no records are public)" in done.stdout
    assert json.loads((folder / "p/plan.json").read_text())["expected"]["made_up"]
    assert dpfl("run", "p/config.toml", "--json", "--out", "r", cwd=folder).returncode == 0


@pytest.mark.usefixtures("no_estimates")
def test_a_pilot_may_search_words_and_show_them(folder: Path) -> None:
    command = ("fedsgd-dpc", *SMALL, "--delta", "0.0001", *FROM_FILE, "--lr", "0.1", "--rounds", "2",
               "--set", "cohort=4", "--clip", "1")  # fmt: skip
    done = dpfl("plan", *command, "--method", "pilot", "--time-limit", "2", "--search",
                "scheduling=round-robin,random", cwd=folder)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "round-robin" in done.stdout


@pytest.mark.usefixtures("no_estimates")
def test_a_baseline_is_planned_by_a_pilot(folder: Path) -> None:
    command = ("pe-dpfl", *SMALL, "--max-rounds", "2", "--method", "pilot", "--time-limit", "2")
    found = plan(*command, "--out", "p", cwd=folder)
    assert found["constants"] is None
    assert found["curve"] == []
    assert left(folder / "p") == {"plan.json", "plan.png", "config.toml"}
    assert dpfl("plan", *command, cwd=folder).returncode == 0


# (b) Recommendations.


def test_a_recommendation_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_bound, "estimate", lambda *_, **__: CONSTANTS)
    command = ("plan", "--recommend", *SMALL, "--epsilon", "3", "--rounds", "5", "--lr", "0.1", "--set", "proximal=20",
               "--method", "bound")  # fmt: skip
    found = only_json(dpfl(*command, "--json", cwd=tmp_path))
    assert set(found) >= PROMISED | {"recommended", "ranking", "epsilon", "against", "method", "neighbours", "together"}
    assert (found["epsilon"], found["against"], found["method"]) == (3.0, "server", "bound")
    ranked = [one["system"] for one in found["ranking"]]
    assert set(ranked) == {"dp-fedavg", "udp", "nbafl", "ali-dpfl", "fedsgd-dpc"}
    assert ranked[0] == found["recommended"]
    assert found["rounds"] == found["ranking"][0]["plan"]["rounds"]
    planned = {one["system"]: one["plan"] for one in found["ranking"] if one["plan"] is not None}
    assert len(planned) == 5, found["ranking"][-1]["why"]
    assert all(one["rounds"] <= 5 for one in planned.values())
    text = dpfl(*command, cwd=tmp_path)
    assert text.returncode == 0
    assert text.stdout.startswith("ranked by their bound on the loss, each at a true ε of 3 against the server")
    assert not (tmp_path / "runs").exists()


def test_one_system_is_recommended_by_a_tiny_pilot(tmp_path: Path) -> None:
    done = dpfl("plan", "pe-dpfl", "--recommend", *SMALL, "--max-rounds", "2", "--time-limit", "2", "--json",
                cwd=tmp_path)  # fmt: skip
    found = only_json(done)
    assert (found["recommended"], found["method"], found["bound"]) == ("pe-dpfl", "pilot", None)
    assert all(line.startswith("pe-dpfl: ") for line in done.stderr.splitlines())


# (c) Run as planned.


def test_run_with_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_bound, "estimate", lambda *_, **__: CONSTANTS)
    planned = ("udp", *SMALL, "--lr", "0.5", "--plan", *BOUND, "--json")
    done = dpfl("run", *planned, "--epsilon", "1", "--out", "r", cwd=tmp_path)
    found = only_json(done)
    assert set(found) >= {
        "system", "rounds", "steps_per_round", "accuracy", "loss", "seconds", "history", "certificate", "out",
    }  # fmt: skip
    assert found["rounds"] == found["plan"]["rounds"] == len(found["history"]) != 100
    assert f"planned: rounds = {found['rounds']}" in done.stderr.splitlines()
    assert f"  - {found['plan']['why'][0]}" in done.stderr.splitlines()
    out = tmp_path / "r"
    assert left(out) >= {"plan.json", "plan.png", "constants.toml", "config.toml", "certificate.json", "metrics.jsonl"}
    assert json.loads((out / "plan.json").read_text()) == found["plan"]
    written = tomllib.loads((out / "config.toml").read_text())
    assert (written["rounds"], written["model"]) == (found["rounds"], "softmax")  # the run's own, which is complete
    again = only_json(dpfl("run", "r/config.toml", "--json", "--out", "again", cwd=tmp_path))
    assert again["history"] == found["history"]
    # What is given stays; and a plan that is replaced by a run without one does not stay beside it.
    kept = only_json(dpfl("run", *planned, "--rounds", "2", cwd=tmp_path))
    assert (kept["rounds"], kept["plan"]["options"]) == (2, {})


def test_a_forced_run_without_a_plan_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_bound, "estimate", lambda *_, **__: CONSTANTS)
    few = (*SMALL, "--lr", "0.5", "--rounds", "2", "--out", "r", "--json")
    only_json(dpfl("run", "udp", *few, "--plan", *BOUND, cwd=tmp_path))
    only_json(dpfl("run", "udp", *few, "--force", cwd=tmp_path))
    assert not {"plan.json", "plan.png", "constants.toml"} & left(tmp_path / "r")


@each("method", ["bound", "pilot"])
def test_what_is_planned_on_is_public_in_the_run(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a seed data is shared out at random: the plan must not look at records that are then a client's.
    looked_at: list[torch.Tensor] = []
    trained: list[Federation] = []
    true = training.train

    def estimate(model: Any, clients: Sequence[Any], **_: Any) -> Constants:
        looked_at.extend(one.x.flatten(1) for one in clients)
        return CONSTANTS

    def trials(stage: Stage, systems: Sequence[Any], seed: int) -> list[Seen]:
        looked_at.extend(one.x.flatten(1) for task in stage.tasks for one in (*task.clients, task.held_out))
        return [(Score(1.0, 0.5),) for _ in systems]

    def train(system: Any, federation: Federation, *args: Any, **options: Any) -> Any:
        trained.append(federation)
        return true(system, federation, *args, **options)

    monkeypatch.setattr(by_bound, "estimate", estimate)
    monkeypatch.setattr(pilot, "trials", trials)
    monkeypatch.setattr(training, "train", train)
    few = ("--clients", "4", "--lr", "0.5", "--epsilon", "1")
    only_json(dpfl("run", "udp", *few, "--plan", "--method", method, "--json", cwd=tmp_path))
    (federation,) = trained
    private = {row.numpy().tobytes() for one in federation.clients for row in one.x.flatten(1)}
    public = {row.numpy().tobytes() for row in federation.validation.x.flatten(1)}
    seen = {row.numpy().tobytes() for part in looked_at for row in part}
    assert len(seen) > 100
    assert len(seen - public) == len(seen & private - public) == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs be planned within seconds, by a clock that is as fast on every machine.

    How long it takes is no option of theirs.
    """
    true, trials, now = planning.make, trying.trials, [0.0]

    def counted(stage: Stage, systems: Sequence[Any], seed: int) -> list[Seen]:
        clients = len(stage.task.federation.clients)
        now[0] += sum(0.02 + 3e-5 * one.rounds * (one.cohort or clients) for one in systems)
        return trials(stage, systems, seed)

    monkeypatch.setattr(planning, "make", lambda task, **options: true(task, **options | {"time_limit": 2.0}))
    monkeypatch.setattr(pilot, "trials", counted)
    monkeypatch.setattr(pilot, "time", SimpleNamespace(perf_counter=lambda: now[0]))


@pytest.mark.usefixtures("quick")
def test_nbafl_runs_as_planned(tmp_path: Path) -> None:
    # Its bound says nothing at its usual numbers, which is no reason not to plan.
    found = only_json(dpfl("run", "nbafl", *SMALL, "--plan", "--json", cwd=tmp_path))
    assert found["plan"]["method"] == "pilot"
    assert found["rounds"] == found["plan"]["rounds"]
    assert any(line.startswith("The bound says nothing here: P must be") for line in found["plan"]["why"])


@pytest.mark.usefixtures("quick")
def test_a_planned_run_is_no_worse_than_the_defaults(tmp_path: Path) -> None:
    command = ("run", "udp", "--epsilon", "8", "--data", "digits", "--seed", "1", "--json")
    planned, usual = (only_json(dpfl(*command, *more, cwd=tmp_path)) for more in (("--plan",), ()))
    assert planned["accuracy"] >= usual["accuracy"] - 0.03
    assert usual["accuracy"] > 0.3


# (d) No.

REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("udp", *KNOWN, "--lr", "1.5"), "lr must be below 2/L = 1 for the bound of udp to hold, was 1.5"),
    (("nbafl", *KNOWN), "must be at least 0 and below 1 for NbAFL's bound to say anything"),
    (("fedsgd-dpc", *KNOWN, "--estimator", "own"), "estimator must be one of general, paper, was 'own'"),
    (("udp", *KNOWN, "--estimator", "paper"), "estimator must be 'general' for udp, was 'paper'"),
    (("udp", *KNOWN, "--form", "short"), "form must be one of general, paper, was 'short'"),
    (("udp", *KNOWN, "--method", "guess"), "method must be one of bound, pilot, was 'guess'"),
    (("--recommend", "--trusted", "me"), "trusted must be one of nobody, server, was 'me'"),
    (("udp", "--recommend", "--method", "guess"), "method must be one of bound, pilot, was 'guess'"),
    (("udp", *KNOWN, "--constant", "smothness=1"), "did you mean 'smoothness'?"),
    (("udp", *KNOWN, "--constant", "smoothness=big"), "smoothness (λ, L, ρ) must be a finite number, was 'big'"),
    (("udp", "--constants", "none.toml"), "constants must be a readable file, was 'none.toml'"),
    (("udp", *KNOWN, "--total-steps", "30"), "total_steps must be left out for udp, was 30"),
    (("dp-fedavg", *KNOWN, "--total-steps", "0"), "total_steps must be a whole number of at least 1, was 0"),
    (("dp-fedavg", *KNOWN, "--total-steps", "9", "--rounds", "3"), "rounds must be left out where total_steps is"),
    (("udp", *KNOWN, "--max-rounds", "0"), "max_rounds must be a whole number of at least 1, was 0"),
    (("udp", *KNOWN, "--search", "lr=0.5,1"), "search must come with a pilot, was ['lr'] with a bound"),
    (("udp", *FROM_FILE, "--method", "pilot", "--search", "lr"), "search must be KEY=V1,V2, was 'lr'"),
    (("udp", *FROM_FILE, "--method", "pilot", "--search", "rounds=1,2"), "search must name other keys than 'rounds'"),
    (
        ("udp", *FROM_FILE, "--method", "pilot", "--time-limit", "0"),
        "time_limit must be a finite number above 0, was 0",
    ),
    (("lei", "--method", "pilot"), "system must be one whose rounds can be planned, was 'lei'"),
    (("pe-dpfl", *BOUND), "system must be one whose paper gives a bound"),
    (("fedavg",), "system must be one that spends a privacy budget, was 'fedavg'"),
    (("upd",), "did you mean 'udp'?"),
    (("--epsilon", "3"), "a system must be named to plan for, none was; name one, or use --recommend"),
    (("udp", *KNOWN, "--rounds", "3", "--lr", "0.5", "--check"), "at least one of rounds must be left to the plan"),
    (("--recommend", "--set", "colour=red"), "colour must be a setting or an option of a system that is ranked"),
    (("--recommend", "--set", "epsilon=[1, 2, 3, 4]"), "epsilon must be one number for all systems and clients"),
]


@each(("args", "sentence"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_bad_input_ends_in_one_sentence_and_leaves_nothing(args: tuple[str, ...], sentence: str, folder: Path) -> None:
    done = dpfl("plan", *args, *FEW, "--json", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("dpfl: ")
    assert sentence in line
    assert left(folder) == {"known.toml"}


def test_a_check_in_which_everything_diverges_leaves_nothing(folder: Path) -> None:
    # ALI-DPFL's bound does not look at the rate, so there is a plan; no run of the grid ends.
    done = dpfl("plan", "ali-dpfl", *SMALL, *KNOWN, "--lr", "1e37", "--rounds", "100", "--epsilon", "0.5",
                "--check", "--seeds", "1", "--json", "--out", "p", cwd=folder)  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "lr must be low enough for one run of the grid to end" in done.stderr
    assert left(folder) == {"known.toml"}


def test_an_existing_folder_is_refused(folder: Path) -> None:
    (folder / "p").mkdir()
    (folder / "p/mine.txt").write_text("mine")
    done = dpfl("plan", "udp", *SMALL, *KNOWN, "--lr", "0.5", "--out", "p", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "out must be a new folder, but 'p' exists" in done.stderr
    assert left(folder / "p") == {"mine.txt"}
    run = dpfl("run", "udp", *SMALL, "--rounds", "2", "--out", "p", cwd=folder)
    assert run.returncode == 2


@each(
    ("args", "sentence"),
    [
        (("udp", "--method", "pilot"), "method must come with --plan, was 'pilot' without it"),
        (("fedavg", "--plan"), "system must be one that spends a privacy budget, was 'fedavg'"),
        (("udp", "--plan", "--method", "guess"), "method must be one of bound, pilot, was 'guess'"),
    ],
)
def test_runs_that_cannot_be_planned_leave_nothing(args: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = dpfl("run", *args, *FEW, "--json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert sentence in line
    assert list(tmp_path.iterdir()) == []
