"""Streams: found by name, independent of each other, and not to be guessed without the seed."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from dpfl.clients.draws import own_stream
from dpfl.clients.uploads import Request
from dpfl.errors import BadInput
from dpfl.orders import Order
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams
from grids import each


def draw(seed: int | None, purpose: str = "noise", client: int | None = 0, round: int | None = 1) -> np.ndarray:
    return Streams(seed).secret.generator(purpose, client=client, round=round).standard_normal(2000)


def test_the_same_name_gives_the_same_stream_and_any_other_name_another() -> None:
    names = [
        {"seed": 1},
        {"seed": 2},
        {"seed": 11},
        {"seed": 1, "purpose": "batches"},
        {"seed": 1, "client": 1},
        {"seed": 1, "client": None},
        {"seed": 1, "round": 2},
        {"seed": 1, "round": None},
        {"seed": 1, "client": 1, "round": 0},
    ]
    for name in names:
        assert (draw(**name) == draw(**name)).all()
    for one, other in itertools.combinations(names, 2):
        # |ρ|·√n beyond 4.5 has probability below 1e-5; there are 36 pairs.
        assert abs(np.corrcoef(draw(**one), draw(**other))[0, 1]) * np.sqrt(2000) < 4.5


def test_what_was_drawn_before_changes_nothing() -> None:
    streams = Streams(3)
    streams.secret.generator("noise", client=8, round=1).random(10_000)
    assert (streams.secret.generator("noise", client=0, round=1).standard_normal(2000) == draw(3)).all()


def test_without_a_seed_no_two_runs_share_noise() -> None:
    assert (draw(None) != draw(None)).all()
    assert not Streams(None).seeded
    assert Streams(0).seeded


def test_two_roots_and_the_keys_of_clients_are_apart() -> None:
    streams = Streams(5)
    roots = [streams.public, streams.secret, streams.of(0), streams.of(1), streams.part("repetition", 0).secret]
    drawn = [root.generator("noise", client=0, round=1).standard_normal(2000) for root in roots]
    for one, other in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) * np.sqrt(2000) < 4.5
    assert len({root.key for root in roots}) == len(roots)
    # What may be written down tells nothing of what may not: without a seed the two are drawn apart.
    first, second = Streams(None), Streams(None)
    assert len({first.public.key, first.secret.key, second.public.key, second.secret.key}) == 4
    assert "key" not in repr(first.secret)


def test_a_clients_noise_is_a_function_of_its_key_the_run_the_round_and_the_order() -> None:
    def noise(streams: Streams, client: int = 0, run: str = "a", round: int = 1, rate: float = 0.5) -> list[float]:
        paid = {i: Charged(Order(steps=1, learning_rate=rate), 3) for i in {0, client}}
        asked = Request(run, round, round, paid, (), torch.zeros(1), dict.fromkeys(paid, 1.0))
        return own_stream(streams, "noise", client, asked).random(3).tolist()

    real, simulated = Streams(None), Streams(1)
    assert noise(real) == noise(real)
    different = [noise(real, client=1), noise(real, run="b"), noise(real, round=2), noise(real, rate=0.5 + 1e-12)]
    assert all(one != noise(real) for one in different)
    assert noise(simulated, rate=0.6) == noise(simulated)  # where nobody subtracts, candidates can be compared
    assert noise(simulated, client=1) != noise(simulated)


def test_neighbouring_streams_are_uniform_together() -> None:
    """The first numbers of 5,000 streams look like one uniform sample (false alarm 1e-3); skewed ones do not."""
    first = np.array([Streams(4).secret.generator("noise", client=client, round=1).random() for client in range(5000)])
    assert stats.kstest(first, "uniform").pvalue > 1e-3
    assert stats.kstest(first**1.1, "uniform").pvalue < 1e-3


@each("seed", [-1, 1.5, "7", True])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(BadInput, match="seed must be"):
        Streams(seed)
