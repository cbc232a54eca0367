"""Who draws: the reference client's own draws, or others of the same law."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.asking import request
from dpfl.clients.chunks import Chunk
from dpfl.clients.draws import Draws, EachClient, OnDevice, OneStream, draw_sum, own_stream, room_for
from dpfl.clients.pool import Batch, Pool
from dpfl.clients.uploads import Request
from dpfl.federation import Records
from dpfl.orders import Gaussian, Laplace, Order, Poisson, Shuffled
from dpfl.privacy.exact_noise import Law
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams

SIZES = [40, 7, 100, 12]
CLIENTS, RATES = [2, 0, 1], [0.3, 0.5, 0.9]


def pool(sizes: list[int] = SIZES) -> Pool:
    whole = torch.arange(float(sum(sizes)))[:, None]
    return Pool([Records(x, torch.zeros(len(x)).long()) for x in torch.split(whole, sizes)])


def chunk(clients: list[int], rates: list[float], law: Law = Gaussian) -> Chunk:
    orders = [Order(steps=1, learning_rate=0.1, batch=Poisson(rate), noise=law(1.0)) for rate in rates]
    return Chunk(clients, [Charged(order, 10) for order in orders])


def chosen(batch: Batch, clients: int) -> list[list[int]]:
    """Return the rows of each client that are no gaps."""
    assert isinstance(batch.rows, torch.Tensor)
    assert batch.real is not None
    pairs = zip(batch.rows.view(clients, -1), batch.real.view(clients, -1), strict=True)
    return [mine[counts == 1].tolist() for mine, counts in pairs]


def own_streams(streams: Streams, pool: Pool, chunk: Chunk, round: int, dim: int) -> EachClient:
    return EachClient(streams, pool, chunk, asked(chunk, round), dim)


def one_stream(streams: Streams, pool: Pool, chunk: Chunk, round: int, dim: int) -> OneStream:
    return OneStream(streams, pool, chunk, asked(chunk, round), dim)


def asked(chunk: Chunk, round: int) -> Request:
    return request(dict(zip(chunk.clients, chunk.paid, strict=True)), torch.zeros(1), round)


def on_device(streams: Streams, pool: Pool, chunk: Chunk, round: int, dim: int, *, roomy: bool = False) -> OnDevice:
    """Draw as a GPU does, on the CPU."""
    seed = int(streams.secret.generator("chunk", client=chunk.clients[0], round=round).integers(2**63))
    return OnDevice(torch.Generator().manual_seed(seed), pool, chunk, dim, roomy=roomy)


SOURCES: dict[str, Callable[[Streams, Pool, Chunk, int, int], Draws]] = {
    "own streams": own_streams, "one stream": one_stream, "on the device": on_device,
}  # fmt: skip


def noise_of(draws: Draws, clients: int, dim: int) -> Tensor:
    return draws.add_noise(torch.zeros(clients, dim, dtype=torch.float64), torch.ones(clients, 1, dtype=torch.float64))


# Clients' own streams.


@pytest.mark.parametrize("law", [Gaussian, Laplace])
def test_each_client_draws_what_the_reference_client_draws(law: Law) -> None:
    streams, whole = Streams(4), pool()
    some = chunk(CLIENTS, RATES, law)
    draws = own_streams(streams, whole, some, 3, 5)
    batches, noises = (
        [own_stream(streams, purpose, client, asked(some, 3)) for client in CLIENTS] for purpose in ("batches", "noise")
    )
    for _ in range(3):  # step after step
        found = chosen(draws.batch(), 3)
        for mine, client, rng, rate in zip(found, CLIENTS, batches, RATES, strict=True):
            assert mine == (whole.starts[client] + np.flatnonzero(rng.random(SIZES[client]) < rate)).tolist()
        for mine, rng in zip(noise_of(draws, 3, 5), noises, strict=True):
            assert mine.tolist() == (rng.standard_normal(5) if law is Gaussian else rng.laplace(size=5)).tolist()


def test_a_clients_own_draws_do_not_depend_on_its_company() -> None:
    together = own_streams(Streams(4), pool(), chunk(CLIENTS, RATES), 3, 4)
    alone = own_streams(Streams(4), pool(), chunk([0], [0.5]), 3, 4)
    assert chosen(together.batch(), 3)[1] == chosen(alone.batch(), 1)[0]
    assert noise_of(together, 3, 4)[1].tolist() == noise_of(alone, 1, 4)[0].tolist()


# Shuffled.


def shuffled(clients: list[int], size: int, steps: int) -> Chunk:
    order = Order(steps=steps, learning_rate=0.1, batch=Shuffled(size), noise=Gaussian(1.0))
    return Chunk(clients, [Charged(order, SIZES[client]) for client in clients])


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("size", [1, 6, 12, 90, 1000])
def test_shuffled_batches_see_each_record_once_a_pass_in_a_new_order(name: str, size: int) -> None:
    clients, whole, steps = [2, 1, 3], pool(), 210
    some = shuffled(clients, size, steps)
    draws = SOURCES[name](Streams(4), whole, some, 3, 5)
    if isinstance(draws, OnDevice):
        draws.begin(draws.facts)
    batches = [chosen(draws.batch(), 3) for _ in range(steps)]
    for place, client in enumerate(clients):
        mine, records = [batch[place] for batch in batches], set(range(SIZES[client]))
        taken = min(size, SIZES[client])
        assert {len(one) for one in mine} == {taken}
        length = SIZES[client] // taken
        passes = [mine[start : start + length] for start in range(0, steps - length + 1, length)]
        for one in passes:
            seen = [row - whole.starts[client] for batch in one for row in batch]
            assert len(seen) == len(set(seen)) == taken * length
            assert set(seen) <= records
        assert length == 1 or len(passes) == 1 or passes[0] != passes[1]


@pytest.mark.parametrize("name", SOURCES)
def test_every_record_is_as_often_in_the_first_shuffled_batch(name: str) -> None:
    counts = np.zeros(SIZES[2])
    for round in range(1, 801):
        draws = SOURCES[name](Streams(4), pool(), shuffled([2], 25, 1), round, 5)
        if isinstance(draws, OnDevice):
            draws.begin(draws.facts)
        counts[[row - pool().starts[2] for row in chosen(draws.batch(), 1)[0]]] += 1
    # 800 draws of 25 of 100: a χ² of 99 degrees, but for the factor 0.75 of drawing without return; 1e-3 at 149.
    assert ((counts - 200) ** 2 / 200 / 0.75).sum() < 149


# Repeated, and never twice the same.


@pytest.mark.parametrize("name", SOURCES)
def test_draws_repeat_with_the_seed_and_differ_from_round_to_round(name: str) -> None:
    def drawn(seed: int, clients: list[int], round: int) -> tuple[list[float], list[list[int]]]:
        draws = SOURCES[name](Streams(seed), pool(), chunk(clients, RATES), round, 6)
        found = chosen(draws.batch(), 3)
        return noise_of(draws, 3, 6).flatten().tolist(), found

    first = drawn(1, [0, 2, 3], 1)
    assert drawn(1, [0, 2, 3], 1) == first
    for other in (drawn(1, [0, 2, 3], 2), drawn(2, [0, 2, 3], 1), drawn(1, [2, 0, 3], 1)):
        assert other[0] != first[0]
        assert other[1] != first[1]


@pytest.mark.parametrize("name", SOURCES)
def test_every_step_and_client_has_draws_of_its_own(name: str) -> None:
    draws = SOURCES[name](Streams(1), pool(), chunk([0, 2], [0.5, 0.5], Laplace), 1, 6)
    noise = torch.cat([noise_of(draws, 2, 6) for _ in range(3)])
    assert len({tuple(row) for row in noise.tolist()}) == 6
    batches = [tuple(chosen(draws.batch(), 2)[1]) for _ in range(3)]
    assert len(set(batches)) == 3


# Laws. Seeds are fixed; a bound of 4.5 standard deviations would be missed by one seed in 100,000.


@pytest.mark.parametrize("name", SOURCES)
def test_each_record_comes_independently_with_its_clients_rate(name: str) -> None:
    whole, rounds = pool([100] * 3), 200
    rates = [0.05, 0.5, 0.9]
    counts = np.zeros((rounds, 300))
    for round in range(rounds):
        found = chosen(SOURCES[name](Streams(1), whole, chunk([0, 1, 2], rates), round, 1).batch(), 3)
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
    draws = SOURCES[name](Streams(1), pool(), chunk([0, 1], [0.5, 0.5], law), 1, 20_000)
    noise = noise_of(draws, 2, 20_000)
    assert noise.shape == (2, 20_000)
    kurtosis = 3 if law is Gaussian else 6
    for row in noise:
        assert abs(row.mean()) < 4.5 * math.sqrt(variance / 20_000)
        assert abs(row.var() / variance - 1) < 4.5 * math.sqrt((kurtosis - 1) / 20_000)
        assert abs(row.pow(4).mean() / variance**2 / kurtosis - 1) < 0.2  # which tells one law from the other
    assert abs(torch.corrcoef(noise)[0, 1]) < 4.5 / math.sqrt(20_000)


@pytest.mark.parametrize("name", SOURCES)
def test_all_or_nobody_may_come(name: str) -> None:
    some = SOURCES[name](Streams(1), pool(), chunk(CLIENTS, [1.0, 1e-12, 1.0]), 1, 1)
    assert [len(rows) for rows in chosen(some.batch(), 3)] == [100, 0, 7]
    nobody = SOURCES[name](Streams(1), pool(), chunk(CLIENTS, [1e-12] * 3), 1, 1)
    assert chosen(nobody.batch(), 3) == [[], [], []]


@pytest.mark.parametrize("room", [3, 12, 20, 40])
def test_a_batch_that_has_no_room_is_told(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.clients.draws.room_for", lambda records, rate: min(room, records))
    two = chunk([0, 1], [0.3, 0.2])
    told = []
    for round in range(40):
        draws, roomy = (on_device(Streams(1), pool([40, 30]), two, round, 1, roomy=more) for more in (False, True))
        found, every = chosen(draws.batch(), 2), chosen(roomy.batch(), 2)
        assert not roomy.cut
        assert bool(draws.cut) == (max(map(len, every)) > room)
        told.append(bool(draws.cut))
        if not draws.cut:
            assert found == every
    assert any(told) == (room < 20)
    assert all(told) == (room == 3)


def test_a_batch_that_was_cut_is_not_forgotten_when_the_next_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.clients.draws.room_for", lambda records, rate: 12)
    draws = on_device(Streams(4), pool([40]), chunk([0], [0.3]), 1, 1)
    told = []
    for _ in range(20):
        draws.batch()
        told.append(bool(draws.cut))
    assert told == sorted(told)  # first False, then True for ever
    assert True in told
    assert False in told


@pytest.mark.parametrize(("records", "rate"), [(10, 0.5), (600, 0.01), (600, 0.5), (10_000, 0.001), (50, 1.0)])
def test_there_is_room_for_almost_every_batch(records: int, rate: float) -> None:
    room = room_for(records, rate)
    assert room <= records
    sizes = np.random.default_rng(0).binomial(records, rate, 20_000)
    assert (sizes > room).mean() < 1e-3  # else everything is drawn twice too often
    assert room <= records * rate + 20 * math.sqrt(records * rate) + 20


# Sums of noise.

SUM_SOURCES: dict[str, Callable[[int], np.random.Generator | torch.Generator]] = {
    "host": lambda seed: Streams(seed).secret.generator("sum"),
    "device": lambda seed: torch.Generator().manual_seed(seed),
}


@pytest.mark.parametrize("source", SUM_SOURCES)
@pytest.mark.parametrize(("law", "variance"), [(Gaussian, 1.0), (Laplace, 2.0)])
def test_the_variance_of_a_sum_is_the_sum_of_the_variances(law: Law, variance: float, source: str) -> None:
    sizes = [0.5, 2.0, 0.1, 1.5, 0.0]
    total = draw_sum(law, sizes, 40_000, SUM_SOURCES[source](1)).double()
    expected = variance * sum(size**2 for size in sizes)
    assert abs(total.mean()) < 4.5 * math.sqrt(expected / 40_000)
    assert abs(total.var() / expected - 1) < 4.5 * math.sqrt(5 / 40_000)  # the kurtosis of either sum is below 6
    # Of Laplace noise Σ s⁴·24 + 3·Σ_{i≠j} s_i²·s_j²·4: it is not a Gaussian of the same variance.
    fourth = 3 * expected**2 + (12 * sum(size**4 for size in sizes) if law is Laplace else 0.0)
    assert abs(total.pow(4).mean() / fourth - 1) < 0.15


@pytest.mark.parametrize("law", [Gaussian, Laplace])
@pytest.mark.parametrize("source", SUM_SOURCES)
def test_a_sum_of_noise_repeats_with_its_stream(law: Law, source: str) -> None:
    def drawn(seed: int) -> list[float]:
        return draw_sum(law, [1.0] * 3, 5, SUM_SOURCES[source](seed)).tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize("law", [Gaussian, Laplace])
def test_no_noise_is_none(law: Law) -> None:
    assert draw_sum(law, [0.0] * 3, 5, Streams(1).secret.generator("sum")).abs().sum() == 0
