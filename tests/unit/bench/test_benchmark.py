"""`dpfl bench` from the inside: what is counted, what is timed and how it is shown."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dpfl.bench import benchmark, growth, loop, output, repeated, rounds, suite, tricks
from dpfl.bench.timing import medians
from dpfl.bench.workloads import WORKLOADS, Workload, draw
from dpfl.errors import BadInput
from dpfl.orders import Poisson
from grids import each

CPU = torch.device("cpu")


def small(name: str) -> Workload:
    """Return a workload with few clients and records; the model stays."""
    whole = WORKLOADS[name]
    order = replace(whole.order, batch=Poisson(0.5)) if isinstance(whole.order.batch, Poisson) else whole.order
    return replace(whole, clients=4, cohort=3, records=6, order=order)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(WORKLOADS):
        monkeypatch.setitem(WORKLOADS, name, small(name))
    monkeypatch.setattr(benchmark, "_gemm_size", lambda device: 64)


@each("name", WORKLOADS)
def test_the_floor_counts_the_operations_of_plain_training(name: str) -> None:
    workload = small(name)
    problem = draw(workload)
    batch = problem.records[0]
    with FlopCounterMode(display=False) as counter:
        problem.model.gradient(problem.broadcast, batch.x, batch.y)
    # Biases are not multiplied, and W4's 11th parameter is one.
    per_record = 2 * 2 * 10 if name == "W4" else workload.flops
    assert counter.get_total_flops() == pytest.approx(per_record * len(batch))


def test_the_models_have_the_sizes_that_were_asked_for() -> None:
    dims = {name: draw(small(name)).model.dim for name in WORKLOADS}
    assert dims == {"W1": 203_530, "W2": 214_590, "W3": 26_010, "W4": 11}


def test_contenders_alternate_until_each_had_its_time() -> None:
    calls: list[str] = []
    taken = medians({name: partial(calls.append, name) for name in "ab"}, seconds=0.001, device=CPU)
    assert set(taken) == {"a", "b"}
    assert all(0 < value < 10 for value in taken.values())
    assert calls.index("b") < len(calls) - 1 - calls[::-1].index("a")


def test_the_loop_without_noise_is_federated_averaging() -> None:
    workload = replace(small("W4"), order=replace(small("W4").order, noise=None, clip=None))
    problem = draw(workload)
    by_loop = loop.prepare(problem)()
    ours = rounds.without_privacy(draw(workload))()
    assert torch.allclose(by_loop, ours, rtol=1e-4, atol=1e-6)
    assert torch.equal(problem.broadcast, draw(workload).broadcast)  # what was sent out stays as it was


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", ["W3", "W4"])
def test_a_benchmark_has_the_keys_that_were_promised(name: str) -> None:
    times = benchmark.bench(name, peers=[], seconds=0.001)
    assert set(times) == {"dpfl_ms", "exact_ms", "floor_ms", "loop_ms", "reference_ms"} | (
        {"plain_ms"} if name == "W3" else set()
    )
    assert all(value > 0 for value in times.values())


@pytest.mark.usefixtures("tiny")
def test_results_are_printed_and_kept(tmp_path: Path) -> None:
    results = suite.run(
        ["W4"], peers=[], device="cpu", seconds=0.001, reference=False, precision="float32", on_start=lambda _: None
    )
    folder = output.save(results, tmp_path / "bench", device="cpu")
    assert json.loads((folder / "bench.json").read_text())["results"] == results
    assert (folder / "bench.png").stat().st_size > 1000
    assert "| plain loop |" in output.summary(results)


def test_ratios_are_to_dpfl() -> None:
    shown = output.table({"W1": {"dpfl_ms": 2.0, "floor_ms": 1.0, "loop_ms": 300.0}})
    assert "| dpfl | 2 |" in shown
    assert "| plain loop | 300 (150×) |" in shown
    assert "| floor (arithmetic) | 1 (0.5×) |" in shown


def test_other_results_are_summed_up_in_words(tmp_path: Path) -> None:
    results = {
        "repetitions": {"one_ms": 10.0, "all_ms": 15.0, "repetitions": 20, "rounds": 10},
        "tricks": {"a trick": {"with_ms": 1.0, "without_ms": 7.0}},
        "growth": {"clients": {"ms": {100: 1.0, 1000: 1.1}, "slope": 0.04}},
    }
    shown = output.summary(results)
    assert "1.50 times one" in shown
    assert "| a trick | 1 | 7 | 7× |" in shown
    assert "slope 0.04" in shown
    assert (output.save(results, tmp_path, device="cpu") / "growth.png").stat().st_size > 1000


def test_slopes_are_those_of_the_larger_half() -> None:
    assert growth.slope({1: 5.0, 10: 5.0, 100: 10.0, 1000: 100.0}) == pytest.approx(1.0)
    assert growth.slope({10: 3.0, 100: 3.0, 1000: 3.0}) == pytest.approx(0.0)


def test_growth_times_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "CLIENTS", (100, 200))
    monkeypatch.setattr(growth, "COHORTS", (1, 10))
    monkeypatch.setattr(growth, "PARAMETERS", (10, 1000))
    found = growth.growth(seconds=0.001)
    assert {name: list(one["ms"]) for name, one in found.items()} == {
        "clients": [100, 200], "cohort": [1, 10], "parameters": [10, 1000],
    }  # fmt: skip


@pytest.mark.usefixtures("tiny")
def test_repetitions_and_tricks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "REPETITIONS", 3)
    monkeypatch.setattr(repeated, "ROUNDS", 2)
    found = repeated.repetitions(seconds=0.001)
    assert found["repetitions"] == 3
    assert found["one_ms"] > 0
    monkeypatch.setattr(tricks, "_TRICKS", {"moments": tricks._moments, "stacked": tricks._small_clients_stacked})
    monkeypatch.setattr(tricks, "_few", lambda problem: problem.records[0])
    assert {"with_ms", "without_ms"} == set(tricks.tricks(seconds=0.001)["moments"])


@each(
    ("names", "options", "words"),
    [
        (["W9"], {}, ["what to bench", "W9", "W1"]),
        (["W4"], {"precision": "bf16"}, ["precision", "bf16", "tf32"]),
        (["W4"], {"peers": ["fedml"]}, ["peers", "fedml", "flower"]),
    ],
)
def test_bad_input_is_one_sentence(names: list[str], options: dict[str, object], words: list[str]) -> None:
    usual = {"peers": [], "device": "cpu", "seconds": 0.001, "reference": False, "precision": "float32"}
    with pytest.raises(BadInput) as problem:
        suite.run(names, **(usual | options), on_start=lambda _: None)
    assert all(word in str(problem.value) for word in words)


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_module", lambda name: None)
    assert benchmark.peers_of(None) == ()
    with pytest.raises(BadInput, match="dpfl\\[bench\\]"):
        benchmark.peers_of(["pfl"])
