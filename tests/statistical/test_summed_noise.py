"""Where a cohort's noise is drawn once, is it the noise of all? And does a cohort's sampler take whom it declares?

The clients' records are such that an upload is its noise, or tells which records a batch took. Then the weighted sum
that is formed at once must have the law of the sum of the reference client's uploads: for clients that all differ in
noise, weight, divisor and rates. Seeds are fixed. A test rejects a right implementation with probability at most 1e-3;
each has twins that are wrong (5 % off, added up without squares, a divisor or the last noise forgotten), which the same
test must reject.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor, nn

from conformance.asking import sum_of, uploads_of
from dpfl.clients import stacked
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.federation import Records
from dpfl.gradients.capabilities import Capabilities, capabilities_of
from dpfl.models import Model
from dpfl.orders import ClientClip, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams
from grids import each

FALSE_ALARM = 1e-3
DIM, ROUNDS = 20_000, 5
SIZES = (3, 7, 4, 5)
PAID = (4, 7, 3, 6)  # the ledger's numbers of records, which divide
STDS = (0.5, 1.7, 0.9, 0.2)
WEIGHTS = {0: 0.9, 1: 0.2, 2: 0.6, 3: 1.4}
RATES = ((0.3, 0.2, 0.5), (0.1, 0.4, 0.2), (0.6, 0.3, 0.1), (0.2, 0.2, 0.9))
SAMPLING = (0.5, 0.3, 0.8, 1.0)


@cache
def flat(dim: int) -> tuple[Model, Capabilities]:
    """Make a model whose gradient is the record, wherever it stands, of a layer that clients can share."""
    model = Model(nn.Linear(dim, 1, bias=False), lambda outputs, _: outputs.squeeze(-1))
    nn.init.zeros_(model.module.weight)
    public = torch.randn(8, dim, generator=torch.Generator().manual_seed(1))
    found = capabilities_of(model, Records(public, torch.zeros(8)))
    assert found.layers is not None
    return model, found


@cache
def silent() -> tuple[Records, ...]:
    """Return records of zeros: an upload is its noise."""
    return tuple(Records(torch.zeros(size, DIM), torch.zeros(size)) for size in SIZES)


OrderOf = Callable[[int], Order]


def upload_of_one_step(client: int) -> Order:
    return Order(steps=1, learning_rate=RATES[client][0], clip=RecordClip(1.0), noise=Gaussian(STDS[client]))


def upload_of_three_steps(client: int) -> Order:
    return Order(steps=3, learning_rate=RATES[client], clip=ClientClip(1.0 + client), noise=Gaussian(STDS[client]))


def upload_of_a_clipped_model(client: int) -> Order:
    noise = Gaussian(STDS[client])
    return Order(steps=2, learning_rate=RATES[client][:2], clip=ModelClip(1.0), noise=noise, proximal=0.3)


def one_noised_step(client: int) -> Order:
    return Order(
        steps=1, learning_rate=RATES[client][0], clip=RecordClip(1.0 + client), noise=Gaussian(STDS[client]),
        noise_on="step", batch=Poisson(SAMPLING[client]),
    )  # fmt: skip


def one_noised_step_of_a_client(client: int) -> Order:
    return Order(
        steps=1, learning_rate=RATES[client][0], clip=ClientClip(1.0), noise=Gaussian(STDS[client]), noise_on="step"
    )  # fmt: skip


def three_noised_steps(client: int) -> Order:
    return Order(
        steps=3, learning_rate=RATES[client], clip=RecordClip(1.0), noise=Gaussian(STDS[client]), noise_on="step"
    )  # fmt: skip


def three_noised_and_pulled_steps(client: int) -> Order:
    return Order(
        steps=3, learning_rate=RATES[client], clip=ClientClip(1.0), noise=Gaussian(STDS[client]), noise_on="step",
        proximal=0.4 + client,
    )  # fmt: skip


def two_kinds(client: int) -> Order:
    return (one_noised_step if client % 2 else upload_of_three_steps)(client)


ORDERS: list[OrderOf] = [
    upload_of_one_step, upload_of_three_steps, upload_of_a_clipped_model, one_noised_step,
    one_noised_step_of_a_client, three_noised_steps, three_noised_and_pulled_steps, two_kinds,
]  # fmt: skip


def sizes_in_upload(order: Order, records: int) -> list[float]:
    """Return by hand what a client's noises are in its upload, the last one last."""
    size = order.noise.std if isinstance(order.noise, Gaussian) else order.noise.scale
    if order.noise_on == "upload":
        return [size]
    if isinstance(order.clip, RecordClip):
        size /= records * (order.batch.sampling_rate if isinstance(order.batch, Poisson) else 1)
    rates, pull = order.learning_rates, order.proximal
    return [size * rate * math.prod(1 - later * pull for later in rates[k + 1 :]) for k, rate in enumerate(rates)]


def in_sum(order_of: OrderOf) -> list[list[float]]:
    """Return the same in the weighted sum, client by client."""
    return [[WEIGHTS[i] * one for one in sizes_in_upload(order_of(i), PAID[i])] for i in range(len(SIZES))]


def charged(order_of: OrderOf) -> dict[int, Charged]:
    return {client: Charged(order_of(client), PAID[client]) for client in (2, 0, 3, 1)}


def added(uploads: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
    return torch.stack([weights[client] * upload.double() for client, upload in uploads.items()]).sum(dim=0)


def by_reference(order_of: OrderOf, round: int, seed: int = 3) -> Tensor:
    clients = ReferenceClients(flat(DIM)[0], silent(), Streams(seed))
    return added(uploads_of(clients, charged(order_of), torch.zeros(DIM), round), WEIGHTS)


def by_sum(order_of: OrderOf, round: int, seed: int = 3, weights: Mapping[int, float] = WEIGHTS) -> Tensor:
    model, found = flat(DIM)
    clients = StackedClients(model, silent(), Streams(seed), capabilities=found)
    return sum_of(clients, charged(order_of), torch.zeros(DIM), round, weights)


def each_alone(order_of: OrderOf, round: int, seed: int = 3, weights: Mapping[int, float] = WEIGHTS) -> Tensor:
    """Form the sum where no two clients fit into one chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked, "_CPU_CHUNK", 1)
        return by_sum(order_of, round, seed, weights)


def sample(performs: Callable[..., Tensor], order_of: OrderOf, rounds: int = ROUNDS) -> np.ndarray:
    return torch.cat([performs(order_of, round) for round in range(1, rounds + 1)]).numpy()


def fits(drawn: np.ndarray, std: float) -> bool:
    return bool(stats.kstest(drawn / std, special.ndtr, method="asymp").pvalue > FALSE_ALARM)


each_way = pytest.mark.parametrize("performs", [by_reference, by_sum, each_alone])


@each_way
@each("order_of", ORDERS)
def test_the_sum_has_the_noise_of_all(order_of: OrderOf, performs: Callable[..., Tensor]) -> None:
    drawn, sizes = np.sort(sample(performs, order_of)), in_sum(order_of)
    std = math.hypot(*(one for client in sizes for one in client))
    assert fits(drawn, std)
    # The standard deviation itself is known to 1/√(2n) of it, 0.22 %: four of these are passed with probability 6e-5.
    assert abs(drawn.std() / std - 1) < 4 / math.sqrt(2 * len(drawn))
    wrong = {
        "5 % more": 1.05 * std,
        "5 % less": 0.95 * std,
        "added up without squares": sum(one for client in sizes for one in client),
        "of one client only": math.hypot(*sizes[0]),
        "of the first client for all": math.hypot(
            *(w * one / WEIGHTS[0] for w in WEIGHTS.values() for one in sizes[0])
        ),
        "without weights": math.hypot(*(one / WEIGHTS[i] for i, client in enumerate(sizes) for one in client)),
        "without the last": math.hypot(*(one for client in sizes for one in client[:-1])),
        "the last one twice": math.hypot(std, *(client[-1] for client in sizes)),
    }
    for name, other in wrong.items():
        assert not fits(drawn, other or 1e-9), name


def test_a_divisor_that_was_forgotten_shows() -> None:
    drawn = sample(by_sum, one_noised_step)
    undivided = [size * PAID[i] * SAMPLING[i] for i, (size,) in enumerate(in_sum(one_noised_step))]
    unsampled = [size * SAMPLING[i] for i, (size,) in enumerate(in_sum(one_noised_step))]
    held = [size * PAID[i] / SIZES[i] for i, (size,) in enumerate(in_sum(one_noised_step))]  # by what a client holds
    assert fits(drawn, math.hypot(*(size for (size,) in in_sum(one_noised_step))))
    assert not any(fits(drawn, math.hypot(*sizes)) for sizes in (undivided, unsampled, held))


@pytest.mark.parametrize("order_of", [upload_of_one_step, one_noised_step])
def test_noise_comes_on_top_of_what_was_learned(order_of: OrderOf) -> None:
    rng = torch.Generator().manual_seed(2)
    learned = tuple(Records(torch.randn(size, DIM, generator=rng), torch.zeros(size)) for size in SIZES)
    model, found = flat(DIM)
    clients = StackedClients(model, learned, Streams(8), capabilities=found)
    quiet = {i: Order(**vars(order_of(i)) | {"noise": None}) for i in range(len(SIZES))}

    def sums(orders: OrderOf) -> Tensor:
        paid = {i: Charged(orders(i), PAID[i]) for i in WEIGHTS}
        rounds = range(1, ROUNDS + 1)
        return torch.cat([sum_of(clients, paid, torch.zeros(DIM), round, WEIGHTS) for round in rounds])

    noised, plain = sums(order_of), sums(quiet.__getitem__)
    std = math.hypot(*(size for (size,) in in_sum(order_of)))
    assert plain.std() > 1e-4 * std
    drawn = (noised - plain).numpy()
    assert fits(drawn, std)
    assert not fits(drawn, 1.05 * std)
    assert not fits(drawn, 0.95 * std)


# Independence


def related(one: Tensor, other: Tensor) -> float:
    """Return |ρ|·√n; beyond 4.5 has probability below 1e-5."""
    return abs(float(np.corrcoef(one.numpy(), other.numpy())[0, 1])) * math.sqrt(len(one))


@each("performs", [by_sum, each_alone])
@each("order_of", ORDERS)
def test_rounds_and_seeds_never_share_noise(order_of: OrderOf, performs: Callable[..., Tensor]) -> None:
    first = performs(order_of, 1)
    for other in (performs(order_of, 2), performs(order_of, 1, seed=4)):
        assert related(first, other) < 4.5
    assert related(first, performs(order_of, 1)) > 100  # the twin: a round that is played again repeats its noise


def early_noise(client: int) -> Order:
    """Order two noised steps of which the last, whose noise is drawn for all, hardly counts."""
    return Order(
        steps=2, learning_rate=(0.5, 1e-9), clip=RecordClip(1.0), noise=Gaussian(STDS[client]), noise_on="step"
    )  # fmt: skip


def of(*clients: int) -> dict[int, float]:
    return {client: float(client in clients) for client in range(len(SIZES))}


@pytest.mark.parametrize("performs", [by_sum, each_alone])
def test_no_two_clients_share_noise_in_one_chunk_or_in_two(performs: Callable[..., Tensor]) -> None:
    alone = [performs(early_noise, 1, weights=of(client)) for client in range(len(SIZES))]
    for one in range(len(SIZES)):
        assert fits(alone[one].numpy(), 0.5 * STDS[one] / PAID[one])
        assert all(related(alone[one], alone[other]) < 4.5 for other in range(one))
    # The twin: what one client's noise is in a sum of two.
    assert related(alone[0], performs(early_noise, 1, weights=of(0, 1))) > 20


def test_clients_of_two_kinds_never_share_noise() -> None:
    one, other = (by_sum(two_kinds, 1, weights=of(*kind)) for kind in ((0, 2), (1, 3)))
    assert related(one, other) < 4.5
    assert related(one, by_sum(two_kinds, 1)) > 20


# Laplace: no sum of them is one of them, so that as many are drawn as there are clients.


def laplace_upload(client: int) -> Order:
    return Order(steps=2, learning_rate=RATES[client][:2], clip=ClientClip(1.0, 1), noise=Laplace(STDS[client]))


def laplace_step(client: int) -> Order:
    return Order(
        steps=1, learning_rate=RATES[client][0], clip=RecordClip(1.0, 1), noise=Laplace(STDS[client]), noise_on="step"
    )  # fmt: skip


def laplace_steps(client: int) -> Order:
    return Order(
        steps=3, learning_rate=RATES[client], clip=RecordClip(1.0, 1), noise=Laplace(STDS[client]), noise_on="step"
    )  # fmt: skip


@each_way
@pytest.mark.parametrize("order_of", [laplace_upload, laplace_step, laplace_steps])
def test_sums_of_laplace_noise(order_of: OrderOf, performs: Callable[..., Tensor]) -> None:
    drawn = sample(performs, order_of, rounds=10)
    scales = np.array([one for client in in_sum(order_of) for one in client])
    # Cumulants add up: 2b² of the second order and 12b⁴ of the fourth.
    variance, excess = 2 * (scales**2).sum(), 12 * (scales**4).sum() / (2 * (scales**2).sum()) ** 2
    # The variance of 200,000 draws is known to √((2 + excess)/n), at most 0.5 %, and the excess to about 0.08 at most:
    # both limits are four of these.
    assert 0.3 < excess < 3
    assert abs(drawn.var() / variance - 1) < 0.02
    assert abs(stats.kurtosis(drawn) - excess) < 0.1 * (1 + excess)
    for wrong in (1.05**2, 0.95**2, scales.sum() ** 2 / (scales**2).sum()):  # 5 % off, added up without squares
        assert abs(drawn.var() / (wrong * variance) - 1) > 0.02
    for law in (0.0, 3.0):  # one draw of the summed variance: Gaussian, or Laplace
        assert abs(law - excess) > 0.1 * (1 + excess)
    # The same law as that of the reference client's uploads, by way of its own draws.
    theirs = sample(lambda *args: by_reference(*args, seed=9), order_of, rounds=10)  # type: ignore[misc]
    assert stats.ks_2samp(drawn, theirs, method="asymp").pvalue > FALSE_ALARM
    assert stats.ks_2samp(1.05 * drawn, theirs, method="asymp").pvalue < FALSE_ALARM


# Poisson batches of a whole cohort


RECORDS, RATE = (120, 200, 70), (0.3, 0.15, 0.6)
ALL, TRIALS = sum(RECORDS), 300
OWNERS = np.repeat(range(len(RECORDS)), RECORDS)
EXPECTED = np.array(RATE)[OWNERS]


def taken(steps: int, room: int) -> np.ndarray:
    """Return how often each record was taken in each round, [rounds, records]: their gradients are unit vectors."""
    model, found = flat(ALL)
    records = tuple(
        Records(torch.eye(ALL)[torch.from_numpy(i == OWNERS)], torch.zeros(n)) for i, n in enumerate(RECORDS)
    )
    clients = StackedClients(model, records, Streams(6), capabilities=found)
    paid = {
        i: Charged(Order(steps=steps, learning_rate=1.0, batch=Poisson(rate), clip=RecordClip(2.0)), RECORDS[i])
        for i, rate in enumerate(RATE)
    }
    weights = {i: rate * RECORDS[i] for i, rate in enumerate(RATE)}  # undoes the division
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked, "_CPU_CHUNK", room)
        sums = [sum_of(clients, paid, torch.zeros(ALL), round, weights) for round in range(1, TRIALS + 1)]
    counts = -torch.stack(sums).numpy()
    assert np.abs(counts - counts.round()).max() < 1e-4  # whole records
    return counts.round()


def has_rates(counts: np.ndarray, expected: np.ndarray, steps: int) -> bool:
    """Test the mean of every record's count, and that of every client's batch."""
    draws = steps * TRIALS
    off, variance = counts.sum(axis=0) - draws * expected, draws * EXPECTED * (1 - EXPECTED)
    in_all = np.array([[off[client == OWNERS].sum(), variance[client == OWNERS].sum()] for client in range(3)]).T
    values = [stats.chi2.sf((z**2 / of).sum(), df=len(z)) for z, of in ((off, variance), in_all)]
    return bool(min(values) > FALSE_ALARM / 2)


def has_variances(counts: np.ndarray, steps: int) -> bool:
    """Test the variance of every client's batch: n·q·(1 − q) in each step; it is known to √(2/300) = 8 %."""
    batches = [counts[:, client == OWNERS].sum(axis=1) for client in range(len(RECORDS))]
    ratios = [
        batch.var() / (steps * n * q * (1 - q)) for batch, n, q in zip(batches, RECORDS, RATE, strict=True)
    ]  # fmt: skip
    return all(abs(ratio - 1) < 4 * math.sqrt(2 / TRIALS) for ratio in ratios)  # 6e-5 each


def is_independent(counts: np.ndarray) -> bool:
    """Test all pairs of records: n·ρ² is 1 on average, which 76,000 pairs tell to √(2/76,000) = 0.5 %; 2 % are four."""
    correlations = np.corrcoef(counts.T)[np.triu_indices(ALL, 1)]
    return bool(abs(TRIALS * np.square(correlations).mean() - 1) < 0.02)


@pytest.mark.parametrize(("steps", "room"), [(1, 2**21), (2, 2**21), (2, 1)])
def test_a_cohorts_batches_take_each_record_independently_with_its_rate(steps: int, room: int) -> None:
    counts = taken(steps, room)
    assert set(np.unique(counts)) == set(range(steps + 1))
    assert has_rates(counts, EXPECTED, steps)
    assert has_variances(counts, steps)
    assert is_independent(counts)
    after_each_other = [(counts - steps * EXPECTED)[rounds].ravel() for rounds in (slice(None, -1), slice(1, None))]
    assert related(*map(torch.from_numpy, after_each_other)) < 4.5
    assert not has_rates(counts, 1.05 * EXPECTED, steps)
    assert not has_rates(counts, 0.95 * EXPECTED, steps)
    assert not has_rates(counts, np.full(ALL, EXPECTED.mean()), steps)  # one rate for all


def test_samplers_that_are_not_poisson_are_caught() -> None:
    rng = np.random.default_rng(2)
    right = (rng.random((TRIALS, ALL)) < EXPECTED).astype(float)
    assert has_rates(right, EXPECTED, 1)
    assert has_variances(right, 1)
    assert is_independent(right)
    begun_anew = [place for count in RECORDS for place in range(count)]
    shared = (rng.random((TRIALS, max(RECORDS)))[:, begun_anew] < EXPECTED).astype(float)
    assert not is_independent(shared)  # one stream for all clients, begun anew for each
    whole = (rng.random((TRIALS, len(RECORDS)))[:, OWNERS] < EXPECTED).astype(float)
    assert not has_variances(whole, 1)  # all of a client's records or none
    fixed = rng.permuted(np.tile(np.arange(200) < 30, (TRIALS, 1)), axis=1)  # as many in every round
    assert not has_variances(np.hstack([right[:, :120], fixed, right[:, 320:]]), 1)
    assert not has_variances(2 * right, 2)  # two steps with one batch
