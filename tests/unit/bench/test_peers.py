"""Other libraries' rounds are the plain loop's: to a rounding without noise, and with noise of the size ordered."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dpfl.bench import loop
from dpfl.bench.workloads import WORKLOADS, DrawnWorkload, draw
from dpfl.orders import Gaussian, Poisson, RecordClip
from grids import each


@pytest.fixture
def pfl() -> ModuleType:
    pytest.importorskip("pfl")
    from dpfl.bench.peers import pfl

    return pfl


@pytest.fixture
def flower() -> ModuleType:
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    from dpfl.bench.peers import flower

    return flower


@pytest.fixture
def opacus() -> ModuleType:
    pytest.importorskip("opacus")
    from dpfl.bench.peers import opacus

    return opacus


def tiny(name: str, **order: Any) -> DrawnWorkload:
    """Draw three of four clients with five records each; where nothing else is ordered, they neither clip nor noise."""
    workload = WORKLOADS[name]
    assert workload.order.clip is not None
    off = {"clip": dataclasses.replace(workload.order.clip, clip_norm=1e3), "noise": Gaussian(1e-12)}
    ordered = dataclasses.replace(workload.order, **{"learning_rate": 0.01} | off | order)
    return draw(dataclasses.replace(workload, clients=4, cohort=3, records=5, order=ordered))


def clipped() -> DrawnWorkload:
    """Draw clients whose every update is longer than 1, where the loop clips it."""
    return tiny("W4", clip=WORKLOADS["W4"].order.clip, learning_rate=10.0)


def assert_plays_as_the_loop(play: Callable[[], Tensor], problem: DrawnWorkload) -> None:
    broadcast = problem.broadcast.clone()
    expected = loop.prepare(problem)()
    assert (expected - broadcast).abs().max() > 1e-4  # there is something to agree on
    for _ in range(2):  # no round goes on where another ended
        torch.testing.assert_close(play(), expected, rtol=0, atol=1e-6)
    assert torch.equal(problem.broadcast, broadcast)


@each(("name", "steps"), [("W1", 2), ("W2", 2), ("W4", 1)])
def test_pfl_plays_as_the_loop(pfl: ModuleType, name: str, steps: int) -> None:
    problem = tiny(name, steps=steps)
    assert_plays_as_the_loop(pfl.prepare(problem), problem)


def test_pfl_clips_as_the_loop(pfl: ModuleType) -> None:
    problem = clipped()
    assert_plays_as_the_loop(pfl.prepare(problem), problem)


def test_pfl_adds_the_mean_of_the_clients_noise(pfl: ModuleType) -> None:
    noise = pfl.prepare(tiny("W1", noise=Gaussian(0.3)))() - pfl.prepare(tiny("W1"))()
    assert noise.std().item() == pytest.approx(0.3 / 3**0.5, rel=0.008)  # 5 standard errors over 203,530 coordinates


@contextmanager
def simulated(flower: ModuleType, problem: DrawnWorkload) -> Iterator[Callable[[], Tensor]]:
    play = flower.prepare(problem)
    try:
        yield play
    finally:
        play.close()


# Ray leaves files open and processes unwaited for, which Python tells when it collects them.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_flower_plays_and_clips_as_the_loop_and_adds_noise(flower: ModuleType) -> None:  # in one, for a start is slow
    problem = tiny("W1", steps=2)
    with simulated(flower, problem) as play:
        assert_plays_as_the_loop(play, problem)
        quiet = play()
    with simulated(flower, tiny("W1", steps=2, noise=Gaussian(0.3))) as play:
        assert (play() - quiet).std().item() == pytest.approx(0.3 / 3**0.5, rel=0.008)
    problem = clipped()
    with simulated(flower, problem) as play:
        assert_plays_as_the_loop(play, problem)


each_mode = pytest.mark.parametrize("mode", ["hooks", "ghost", "functorch"])
EVERY_RECORD = Poisson(1.0)  # so that there is nothing to draw


@each_mode
def test_opacus_plays_as_the_loop(opacus: ModuleType, mode: str) -> None:
    problem = tiny("W3", steps=2, batch=EVERY_RECORD)
    assert mode in opacus.MODES
    assert_plays_as_the_loop(opacus.prepare(problem, mode), problem)


@each_mode
def test_opacus_clips_records(opacus: ModuleType, mode: str) -> None:
    problem = tiny("W3", steps=1, batch=EVERY_RECORD, learning_rate=1.0, clip=RecordClip(0.01))
    expected = problem.broadcast.clone()
    for client in problem.cohort:
        for x, y in zip(problem.records[client].x, problem.records[client].y, strict=True):
            gradient = problem.model.gradient(problem.broadcast, x[None], y[None])
            assert gradient.norm() > 0.01
            expected -= 0.01 * gradient / gradient.norm() / 15  # three clients of five records
    torch.testing.assert_close(opacus.prepare(problem, mode)(), expected, rtol=0, atol=1e-6)


@each_mode
def test_opacus_adds_noise_to_the_sum(opacus: ModuleType, mode: str) -> None:
    quiet = tiny("W3", steps=1, batch=EVERY_RECORD)
    noisy = tiny("W3", steps=1, batch=EVERY_RECORD, noise=Gaussian(30.0))
    noise = opacus.prepare(noisy, mode)() - opacus.prepare(quiet, mode)()
    # A rate of 0.01 times 30 over five records, and the mean of three; 5 standard errors over 26,010 coordinates.
    assert noise.std().item() == pytest.approx(0.06 / 3**0.5, rel=0.022)


@each_mode
def test_opacus_draws_batches(opacus: ModuleType, mode: str) -> None:
    problem = tiny("W3", batch=Poisson(0.5), steps=1)
    play = opacus.prepare(problem, mode)
    first, second = play(), play()
    assert torch.isfinite(first).all()
    assert not torch.allclose(first, second, rtol=0, atol=1e-6)
