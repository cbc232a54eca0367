"""Cells are trained once, kept as they are done, and found again."""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfl.config import Config, Settings
from dpfl.errors import BadInput
from dpfl.experiments import cells
from dpfl.experiments import sweep as sweeping
from dpfl.experiments.cells import Cell, perform, restored
from dpfl.experiments.cost import flops, seconds
from dpfl.experiments.experiment import Experiment
from dpfl.experiments.reading import load
from dpfl.experiments.results import Results
from dpfl.experiments.run import reproduce
from dpfl.experiments.store import Store
from dpfl.experiments.sweep import Job, jobs_of, missing, sweep
from dpfl.systems.ali_dpfl import ALIDPFL
from dpfl.systems.dpsgd_fedavg import DPSGDFedAvg
from dpfl.systems.fedavg import FedAvg
from grids import each

TEXT = """
title = "digits"
measure = "accuracy"
repetitions = 2
down = "ε"
across = "R"
rows = [
  { label = "much", epsilon = 30.0 },
  { label = "crd", epsilon = 30.0, discount = 0.5 },
  { label = "best", epsilon = 30.0, search = { rounds = [1, 3] } },
  { label = "none", system = "fedavg" },
]
columns = [{ rounds = 1 }, { rounds = 3 }]

[base]
system = "udp"
calibration = "paper"
delta = 1e-3
clients = 4
lr = 1.0

[printed]
cells = [[nan, 50.0], [nan, nan], [nan, nan], [nan, nan]]

[[claims]]
says = "more rounds are better"
less = { column = 1 }
than = { column = 3 }
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    path = tmp_path / "tiny.toml"
    path.write_text(TEXT, encoding="utf-8")
    return load(path, "paper")


def test_every_cell_is_kept_as_soon_as_it_is_done_and_never_trained_again(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    todo = missing([experiment], Store(out), 1)
    performed: list[str] = []

    def until_the_fourth(these: Sequence[Cell], device: str) -> list[dict[str, object]]:
        if len(performed) == 3:
            raise KeyboardInterrupt
        performed.extend(cell.key for cell in these)
        return perform(these, device)

    monkeypatch.setattr(sweeping, "perform", until_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        sweep(todo, Store(out), processes=1)
    assert set(Store(out).records) == set(performed)

    rest = missing([experiment], Store(out), 1)
    assert {job.cell.key for job in rest} == {job.cell.key for job in todo} - set(performed)
    seen = []
    monkeypatch.setattr(sweeping, "perform", perform)
    sweep(rest, Store(out), processes=1, on_done=lambda job, record, done, total: seen.append((done, total)))
    assert seen == [(at + 1, len(rest)) for at in range(len(rest))]
    assert missing([experiment], Store(out), 1) == []


def test_a_line_that_was_torn_is_trained_again_and_spoils_no_other(experiment: Experiment, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("tiny", {"key": "a", "loss": [1.0]})
    store.add("tiny", {"key": "b", "loss": [2.0]})
    path = tmp_path / "cells" / "tiny.jsonl"
    path.write_text(path.read_text()[:-8])
    again = Store(tmp_path)
    assert set(again.records) == {"a"}
    again.add("tiny", {"key": "c", "loss": [3.0]})
    assert set(Store(tmp_path).records) == {"a", "c"}


def test_experiments_share_what_they_have_in_common(experiment: Experiment, tmp_path: Path) -> None:
    other = replace(experiment, name="other", measure="loss")
    alone = missing([experiment], Store(tmp_path), 1)
    assert len(missing([experiment, other], Store(tmp_path), 1)) == len(alone)


def test_a_cell_that_cannot_be_carried_out_is_named_after_the_others_are_done(
    experiment: Experiment, tmp_path: Path
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(TEXT.replace("columns = [{ rounds = 1 }", "columns = [{ rounds = 1, clients = 10_000 }"))
    bad, store = load(path, "paper"), Store(tmp_path / "out")
    todo = missing([bad], store, 1)
    with pytest.raises(BadInput, match=r"bad, .*clients must"):
        sweep(todo, store, processes=1)
    assert 0 < len(store.records) < len(todo)


def test_results_stand_beside_the_paper_s(experiment: Experiment, tmp_path: Path) -> None:
    (found,) = reproduce([experiment], tmp_path, processes=1)
    plain = found.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    rows = {(one["row"], one["column"]): one for one in plain["rows"]}
    assert len(rows) == 8
    printed = rows["much", "3"]
    assert printed["paper"] == 50.0
    assert 0 < printed["ours"] <= 100
    assert printed["claimed_epsilon"] == 30
    assert printed["true_epsilon"] > 40  # UDP's formula is unsafe there, and the table says so
    assert printed["its_true_epsilon"] == pytest.approx(30, rel=1e-6)
    assert rows["none", "1"]["true_epsilon"] is None
    assert rows["none", "1"]["ours"] == rows["none", "1"]["at_true_epsilon"]
    assert rows["best", "1"]["ours"] >= rows["much", "1"]["ours"] - 1e-9
    assert rows["best", "1"]["chosen"] == {"rounds": 3}
    assert [one["says"] for one in plain["claims"]] == ["more rounds are better"]
    text = (tmp_path / "tiny.md").read_text()
    assert "true ε" in text
    assert "paper" in text
    assert f"`{found.command}`, seed 1, 20" in text
    assert (tmp_path / "tiny.png").stat().st_size > 5000


@each(
    ("printed", "error", "verdict", "shown"),
    [(1.0, None, "held", "1"), (1.0, 500.0, "open", "1 ± 500"), (99.0, 0.25, "failed", "99.00 ± 0.25")],
)
def test_what_a_paper_prints_counts_with_its_standard_error(
    printed: float, error: float | None, verdict: str, shown: str, tmp_path: Path
) -> None:
    text = TEXT[: TEXT.index("[printed]")].replace('"paper"', '"tight"') + f"[printed]\ncells = [[nan, {printed}]]\n"
    text = re.sub("rows = .*?\n]", 'rows = [{ label = "much", epsilon = 30.0 }]', text, flags=re.DOTALL)
    text = text.replace("repetitions = 2", "repetitions = 5")  # of two too little is known to be sure of anything
    text += "" if error is None else f"errors = [[nan, {error}]]\n"
    text += '[[claims]]\nsays = "ahead"\nless = "paper"\nthan = { column = 3 }\n'
    path = tmp_path / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    (found,) = reproduce([load(path, "paper")], tmp_path / "out", processes=1)
    assert [one.verdict for one in found.judgements(at_true=True)] == [verdict]
    assert f"|  | paper |  | {shown} |" in (tmp_path / "out" / "tiny.md").read_text()
    place = found.to_dict()["rows"][1]
    assert (place["paper"], place["paper_standard_error"]) == (printed, error or 0.0)


def test_two_processes_find_what_one_finds(experiment: Experiment, tmp_path: Path) -> None:
    few = replace(experiment, rows=experiment.rows[:1])
    reproduce([few], tmp_path / "one", processes=1)
    reproduce([few], tmp_path / "two", processes=2)
    one, two = (
        {key: record["accuracy"] for key, record in Store(tmp_path / name).records.items()} for name in ("one", "two")
    )
    assert one == two
    assert len(one) == 4


COURSE = """
title = "digits"
measure = "accuracy"
repetitions = 2
fresh_data = true
rows = [{ label = "1", local_steps = 1 }, { label = "3", local_steps = 3 }]
columns = [
  { label = "1, 12", epsilon = 1.0, rounds = 12 },
  { label = "2, 12", epsilon = 2.0, rounds = 12 },
  { label = "2, 5", epsilon = 2.0, rounds = 5 },
  { label = "0.8, 12", epsilon = 0.8, rounds = 12 },
]

[base]
system = "dpsgd-fedavg"
calibration = "paper"
delta = 1e-3
clients = 4
partition = "dirichlet:0.5"
sampling_rate = 0.1
noise_multiplier = 2.0
"""


def test_cells_that_only_end_at_other_rounds_are_one_training_and_find_what_each_finds_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "course.toml"
    path.write_text(COURSE, encoding="utf-8")
    todo = missing([load(path, "paper")], Store(tmp_path), 1)
    trained: list[int] = []
    real = cells.train  # type: ignore[attr-defined]

    def counted(system: Any, *arguments: Any, **options: Any) -> Any:
        trained.append(system.local_steps)
        return real(system, *arguments, **options)

    monkeypatch.setattr(cells, "train", counted)
    store = Store(tmp_path)
    sweep(todo, store, processes=1)
    assert sorted(trained) == [1, 1, 3, 3]  # each course once, in two repetitions
    assert len({tuple(record["rounds"]) for record in store.records.values()}) > 3
    for job in todo:
        (alone,) = perform([job.cell], "cpu")
        assert {key: store.records[job.cell.key][key] for key in alone if key != "seconds"} == {
            key: value for key, value in alone.items() if key != "seconds"
        }


LOOKS = """
title = "digits"
measure = "accuracy"
repetitions = 2
fresh_data = true
rows = [
  { label = "last" },
  { label = "best", measure = "best_accuracy" },
  { label = "steps", system = "ali-dpfl", rounds = 6 },
  { label = "steps again", system = "ali-dpfl", rounds = 6, measure = "local_steps" },
]
columns = [COLUMNS]

[base]
system = "dpsgd-fedavg"
calibration = "paper"
rounds = 5
epsilon = 2.0
delta = 1e-3
clients = 4
sampling_rate = 0.1
noise_multiplier = 2.0
"""


def test_cells_that_only_look_at_other_rounds_are_one_training_and_find_what_each_finds_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "looks.toml"
    jobs: dict[str, Job] = {}
    for columns in ('{ label = "end" }', "{ at_round = 2 }, { at_round = 4 }"):
        path.write_text(LOOKS.replace("COLUMNS", columns), encoding="utf-8")
        jobs |= {job.cell.key: job for job in missing([load(path, "paper")], Store(tmp_path), 1)}
    todo = [job for job in jobs.values() if job.cell.config.system.calibration == "paper"]  # type: ignore[attr-defined]
    assert {job.cell.evaluate_every for job in todo} == {None, 1, 2}
    trained: list[str] = []
    real = cells.train  # type: ignore[attr-defined]

    def counted(system: Any, *arguments: Any, **options: Any) -> Any:
        trained.append(system.name)
        return real(system, *arguments, **options)

    monkeypatch.setattr(cells, "train", counted)
    store = Store(tmp_path)
    sweep(todo, store, processes=1)
    assert sorted(trained) == ["ali-dpfl"] * 2 + ["dpsgd-fedavg"] * 2  # each once, in two repetitions
    for job in todo:
        (alone,) = perform([job.cell], "cpu")
        assert {key: store.records[job.cell.key][key] for key in alone if key != "seconds"} == {
            key: value for key, value in alone.items() if key != "seconds"
        }
        if job.cell.evaluate_every is not None:
            assert all(len(seen["round"]) == len(seen["loss"]) for seen in alone["history"])


def test_what_a_budget_changes_in_a_round_stands_alone() -> None:
    """Noise that is chosen for the rounds, a mean over the last of them, budgets of each client's own."""
    given = DPSGDFedAvg(noise_multiplier=2.0, sampling_rate=0.1, delta=1e-5, epsilon=2.0)
    course = given.course
    assert course is not None
    assert course[0] == replace(given, rounds=99, epsilon=3.0, calibration="paper").course[0]
    assert course[0] != replace(given, lr=0.1).course[0]
    changes: list[dict[str, Any]] = [
        {"noise_multiplier": None}, {"averaged": 0.5}, {"cohort": 2},
        {"epsilon": (1.0, 2.0, 3.0, 4.0)}, {"local_steps": 10_000},
    ]  # fmt: skip
    for change in changes:
        assert replace(given, **change).course is None


FULL: dict[str, type[Exception]] = {"memory": torch.OutOfMemoryError, "a library's": RuntimeError}


def cramped(these: Sequence[Cell], device: str) -> list[dict[str, object]]:
    """Stand in for a training that fills a GPU's memory, so that no other finds room beside it."""
    room = Path(os.environ["ROOM"])
    try:
        room.mkdir()
    except FileExistsError:
        raise FULL[os.environ["SAID"]] from None
    time.sleep(0.3)
    room.rmdir()
    return [{"key": cell.key} for cell in these]


def begin_without_a_gpu(threads: int, share: float | None) -> None:
    """Stand in for the beginning of a process, and write down what share of the memory it may have."""
    with Path(os.environ["ROOM"] + " shares").open("a", encoding="utf-8") as file:
        file.write(f"{share}\n")


@pytest.mark.parametrize("said", FULL)
def test_what_ends_a_training_on_a_full_gpu_is_tried_again_fewer_at_a_time(
    said: str, experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, shares = tmp_path / "room", tmp_path / "room shares"
    monkeypatch.setenv("ROOM", str(room))
    monkeypatch.setenv("SAID", said)
    monkeypatch.setattr(sweeping, "perform", cramped)
    monkeypatch.setattr(sweeping, "as_device", lambda device: None)
    monkeypatch.setattr(sweeping, "_begin_process", begin_without_a_gpu)
    todo, store, seen = missing([experiment], Store(tmp_path), 1)[:4], Store(tmp_path), []
    counts: list[int] = []
    outcomes = sweeping._outcomes

    def counting(trainings: Sequence[list[Job]], device: str, processes: int, threads: int) -> Any:
        counts.append(processes)
        return outcomes(trainings, device, processes, threads)

    monkeypatch.setattr(sweeping, "_outcomes", counting)
    sweep(todo, store, device="cuda", processes=2, on_done=lambda *told: seen.append(told[2:]))
    assert set(store.records) == {job.cell.key for job in todo}
    assert seen == [(at + 1, 4) for at in range(4)]
    assert counts == [2, 1]
    assert shares.read_text(encoding="utf-8").split() == ["0.4"] * 2  # which leaves a fifth to all that is beside

    room.mkdir()  # taken for good
    with pytest.raises(FULL[said]):
        sweep(todo[:1], store, device="cuda")


def test_what_ends_a_training_elsewhere_is_said_at_once(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "room").mkdir()
    monkeypatch.setenv("ROOM", str(tmp_path / "room"))
    monkeypatch.setenv("SAID", "a library's")
    monkeypatch.setattr(sweeping, "perform", cramped)
    monkeypatch.setattr(sweeping, "_begin_process", begin_without_a_gpu)
    todo, store = missing([experiment], Store(tmp_path), 1)[:4], Store(tmp_path)
    for processes in (1, 2):
        with pytest.raises(RuntimeError):
            sweep(todo, store, processes=processes)
    assert not store.records
    assert set((tmp_path / "room shares").read_text(encoding="utf-8").split()) == {"None"}


HISTORY = {"round": [2, 4, 6], "loss": [3.0, None, 1.0], "accuracy": [0.1, 0.2, 0.3], "local_steps": [1, 5, 2]}


def test_a_curve_is_read_off_at_a_round_and_stays_where_it_ended() -> None:
    record = {"history": [HISTORY]}
    assert restored(record, "accuracy", 4) == [20.0]
    assert restored(record, "accuracy", 5) == [20.0]
    assert restored(record, "accuracy", 100) == [30.0]
    assert restored(record, "local_steps", 4) == [5.0]
    assert restored(record, "loss", 4) == [float("inf")]  # it diverged


def test_the_best_round_is_that_of_each_repetition(tmp_path: Path) -> None:
    other = HISTORY | {"accuracy": [None, 0.4, 0.1]}
    assert restored({"history": [HISTORY, other]}, "best_accuracy", None) == [30.0, 40.0]
    path = tmp_path / "best.toml"
    path.write_text(
        """
title = "digits"
measure = "accuracy"
rows = [{ label = "last" }, { label = "best", measure = "best_accuracy" }]
columns = [{ rounds = 3 }]
base = { system = "fedavg", clients = 2 }
"""
    )
    one = load(path, "paper")
    last, best = (one.cells(row, one.columns[0], at_true=False, seed=1)[0][1] for row in one.rows)
    assert (last.evaluate_every, best.evaluate_every) == (None, 1)  # one training, looked at in every round
    assert last.config == best.config


def test_costs_grow_with_what_is_trained(experiment: Experiment) -> None:
    short, long = (
        experiment.cells(experiment.rows[0], column, at_true=False, seed=1)[0][1] for column in experiment.columns
    )
    assert flops(long) == pytest.approx(3 * flops(short))
    assert 0 < seconds([short]) < seconds([long, short])
    assert seconds([job.cell for job in jobs_of(experiment, 1)]) < 60


def test_costs_count_local_epochs_as_passes(experiment: Experiment) -> None:
    cell = experiment.cells(experiment.rows[0], experiment.columns[0], at_true=False, seed=1)[0][1]
    once, thrice = (
        replace(cell, config=replace(cell.config, system=FedAvg(local_epochs=epochs, batch_size=10)))
        for epochs in (1, 3)
    )
    assert flops(thrice) == pytest.approx(3 * flops(once))


def test_costs_count_what_a_paper_asks_of_clients() -> None:
    """ALI-DPFL's curvature, which takes two gradients of all records beside a batch of 1.5 % of them."""
    system = ALIDPFL(sampling_rate=0.015, noise_multiplier=1.1, epsilon=2.0, delta=1e-5, calibration="paper")
    asking, silent = (
        Cell(config=Config(one, Settings(data="mnist", model="softmax")), repetitions=1, seed=1)
        for one in (system, replace(system, calibration="tight"))
    )
    assert flops(asking) == pytest.approx(flops(silent) * (2 + 0.015) / 0.015)


def test_a_missing_cell_is_no_result(experiment: Experiment, tmp_path: Path) -> None:
    found = Results(experiment, Store(tmp_path), seed=1)
    assert found.is_empty
    assert found.left == found.asked
    assert all(entry.ours is None and entry.at_true is None for entry in found.places.values())
    assert {str(one) for verdicts in found.verdicts() for one in verdicts.by.values()} == {"not tried"}
