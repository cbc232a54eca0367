"""Who draws: the reference client's own draws, or others of the same law."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfl.clients.draws import EachClient, Law, OnDevice, OneStream, draw_sum, room_for
from dpfl.clients.pool import Pool
from dpfl.federation import Records
from dpfl.orders import Gaussian, Laplace
from dpfl.streams import Streams

SIZES = [40, 7, 100, 12]
CLIENTS, RATES = [2, 0, 1], [0.3, 0.5, 0.9]


def pool(sizes: list[int] = SIZES) -> Pool:
    whole = torch.arange(float(sum(sizes)))[:, None]
    return Pool([Records(x, torch.zeros(len(x)).long()) for x in torch.split(whole, sizes)])


def chosen(rows: Tensor, real: Tensor, clients: int) -> list[list[int]]:
    """Return the rows of each client that are no gaps."""
    pairs = zip(rows.view(clients, -1), real.view(clients, -1), strict=True)
    return [mine[counts == 1].tolist() for mine, counts in pairs]


def on_device(streams: Streams, clients: list[int], round: int) -> OnDevice:
    return OnDevice(streams, clients, round, torch.device("cpu"), roomy=False)


SOURCES = {"own streams": EachClient, "one stream": OneStream, "on the device": on_device}


# Clients' own streams.


def test_each_client_draws_what_the_reference_client_draws() -> None:
    streams, whole = Streams(4), pool()
    draws = EachClient(streams, CLIENTS, 3)
    batches = [streams.generator("batches", client=client, round=3) for client in CLIENTS]
    noises = [streams.generator("noise", client=client, round=3) for client in CLIENTS]
    for _ in range(3):  # step after step
        found = chosen(*draws.batch(whole, RATES), 3)
        for mine, client, rng, rate in zip(found, CLIENTS, batches, RATES, strict=True):
            assert mine == (whole.starts[client] + np.flatnonzero(rng.random(SIZES[client]) < rate)).tolist()
        for law in (Gaussian, Laplace):
            drawn = draws.noise(law, 5)
            for mine, rng in zip(drawn, noises, strict=True):
                expected = rng.standard_normal(5) if law is Gaussian else rng.laplace(size=5)
                assert mine.tolist() == expected.tolist()


def test_a_clients_own_draws_do_not_depend_on_its_company() -> None:
    together = EachClient(Streams(4), CLIENTS, 3)
    alone = EachClient(Streams(4), [0], 3)
    assert chosen(*together.batch(pool(), RATES), 3)[1] == chosen(*alone.batch(pool(), [0.5]), 1)[0]
    assert together.noise(Gaussian, 4)[1].tolist() == alone.noise(Gaussian, 4)[0].tolist()


# Repeated, and never twice the same.


@pytest.mark.parametrize("name", SOURCES)
def test_draws_repeat_with_the_seed_and_differ_from_round_to_round(name: str) -> None:
    def drawn(seed: int, clients: list[int], round: int) -> tuple[list[float], list[list[int]]]:
        draws = SOURCES[name](Streams(seed), clients, round)
        rows = chosen(*draws.batch(pool(), RATES), 3)
        return draws.noise(Gaussian, 6).flatten().tolist(), [sorted(row) for row in rows]

    first = drawn(1, [0, 2, 3], 1)
    assert drawn(1, [0, 2, 3], 1) == first
    for other in (drawn(1, [0, 2, 3], 2), drawn(2, [0, 2, 3], 1), drawn(1, [2, 0, 3], 1)):
        assert other[0] != first[0]
        assert other[1] != first[1]


@pytest.mark.parametrize("name", SOURCES)
def test_every_step_and_client_has_draws_of_its_own(name: str) -> None:
    draws = SOURCES[name](Streams(1), [0, 2], 1)
    noise = torch.cat([draws.noise(Laplace, 6) for _ in range(3)])
    assert len({tuple(row) for row in noise.tolist()}) == 6
    batches = [sorted(chosen(*draws.batch(pool(), [0.5, 0.5]), 2)[1]) for _ in range(3)]
    assert batches[0] != batches[1] != batches[2]


# Laws. Seeds are fixed; a bound of 4.5 standard deviations would be missed by one seed in 100,000.


@pytest.mark.parametrize("name", SOURCES)
def test_each_record_comes_independently_with_its_clients_rate(name: str) -> None:
    whole, rounds = pool([100] * 3), 200
    rates = [0.05, 0.5, 0.9]
    counts = np.zeros((rounds, 300))
    for round in range(rounds):
        found = chosen(*SOURCES[name](Streams(1), [0, 1, 2], round).batch(whole, rates), 3)
        for client, rows in enumerate(found):
            assert len(set(rows)) == len(rows)
            assert all(100 * client <= row < 100 * (client + 1) for row in rows)  # nobody has another's records
            counts[round, rows] = 1
    for client, rate in enumerate(rates):
        mine = counts[:, 100 * client : 100 * (client + 1)]
        spread = math.sqrt(rate * (1 - rate) / mine.size)
        assert abs(mine.mean() - rate) < 4.5 * spread
        # Every record has the same chance, and the sizes of batches vary as those of independent records do.
        assert np.abs(mine.mean(axis=0) - rate).max() < 4.5 * math.sqrt(rate * (1 - rate) / rounds)
        variance = 100 * rate * (1 - rate)
        assert abs(mine.sum(axis=1).var() / variance - 1) < 4.5 * math.sqrt(2.2 / rounds)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("law", "variance"), [(Gaussian, 1.0), (Laplace, 2.0)])
def test_noise_has_size_one(name: str, law: Law, variance: float) -> None:
    noise = SOURCES[name](Streams(1), [0, 1], 1).noise(law, 20_000).double()
    assert noise.shape == (2, 20_000)
    kurtosis = 3 if law is Gaussian else 6
    for row in noise:
        assert abs(row.mean()) < 4.5 * math.sqrt(variance / 20_000)
        assert abs(row.var() / variance - 1) < 4.5 * math.sqrt((kurtosis - 1) / 20_000)
        assert abs(row.pow(4).mean() / variance**2 / kurtosis - 1) < 0.2  # which tells one law from the other
    assert abs(torch.corrcoef(noise)[0, 1]) < 4.5 / math.sqrt(20_000)


@pytest.mark.parametrize("name", SOURCES)
def test_all_or_nobody_may_come(name: str) -> None:
    rows, real = SOURCES[name](Streams(1), CLIENTS, 1).batch(pool(), [1.0, 1e-12, 1.0])
    found = chosen(rows, real, 3)
    assert [len(row) for row in found] == [100, 0, 7]
    rows, real = SOURCES[name](Streams(1), CLIENTS, 1).batch(pool(), [1e-12] * 3)
    assert real.sum() == 0


def test_a_batch_on_the_device_that_has_no_room_is_told() -> None:
    # One record in a hundred: there is room for a few, and with these seeds some batch is larger only if it is told.
    whole = pool([1000])
    for round in range(30):
        draws = on_device(Streams(1), [0], round)
        rows, real = draws.batch(whole, [0.01])
        roomy = OnDevice(Streams(1), [0], round, torch.device("cpu"), roomy=True)
        every = sorted(chosen(*roomy.batch(whole, [0.01]), 1)[0])
        assert not roomy.cut
        assert len(rows) == room_for(1000, 0.01)
        assert draws.cut == (len(every) > len(rows))
        if not draws.cut:
            assert sorted(chosen(rows, real, 1)[0]) == every


def test_a_batch_is_cut_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.clients.draws.room_for", lambda records, rate: 3)
    draws = on_device(Streams(1), [0, 1], 1)
    draws.batch(pool([40, 40]), [0.5, 1e-9])
    assert draws.cut
    draws = on_device(Streams(1), [0, 1], 1)
    draws.batch(pool([40, 40]), [1e-9, 1e-9])
    assert not draws.cut


@pytest.mark.parametrize(("records", "rate"), [(10, 0.5), (600, 0.01), (600, 0.5), (10_000, 0.001), (50, 1.0)])
def test_there_is_room_for_almost_every_batch(records: int, rate: float) -> None:
    room = room_for(records, rate)
    assert room <= records
    sizes = np.random.default_rng(0).binomial(records, rate, 20_000)
    assert sizes.max() <= room
    assert room <= max(records * rate + 20 * math.sqrt(records * rate) + 20, 1)


# Sums of noise.


@pytest.mark.parametrize(("law", "variance"), [(Gaussian, 1.0), (Laplace, 2.0)])
def test_the_variance_of_a_sum_is_the_sum_of_the_variances(law: Law, variance: float) -> None:
    sizes = torch.tensor([0.5, 2.0, 0.1, 1.5, 0.0])
    total = draw_sum(law, sizes, 40_000, Streams(1), 0, 1).double()
    expected = variance * float(sizes.square().sum())
    assert abs(total.mean()) < 4.5 * math.sqrt(expected / 40_000)
    assert abs(total.var() / expected - 1) < 4.5 * math.sqrt(5 / 40_000)  # the kurtosis of either sum is below 6
    # Of Laplace noise Σ s⁴·24 + 3·Σ_{i≠j} s_i²·s_j²·4: it is not a Gaussian of the same variance.
    fourth = 3 * expected**2 + (12 * float(sizes.pow(4).sum()) if law is Laplace else 0.0)
    assert abs(total.pow(4).mean() / fourth - 1) < 0.15


@pytest.mark.parametrize("law", [Gaussian, Laplace])
def test_a_sum_of_noise_repeats_with_the_seed_and_differs_from_round_to_round(law: Law) -> None:
    def drawn(seed: int, first: int, round: int) -> list[float]:
        return draw_sum(law, torch.ones(3), 5, Streams(seed), first, round).tolist()

    assert drawn(1, 0, 1) == drawn(1, 0, 1)
    assert len({tuple(drawn(seed, first, round)) for seed in (1, 2) for first in (0, 1) for round in (1, 2)}) == 8


@pytest.mark.parametrize("law", [Gaussian, Laplace])
def test_no_noise_is_none(law: Law) -> None:
    assert draw_sum(law, torch.zeros(3), 5, Streams(1), 0, 1).abs().sum() == 0
