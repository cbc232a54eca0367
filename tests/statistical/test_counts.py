"""Is the noise on counts what was paid for, and do a count and its upload together tell no more than their price?

Clients hold one record each whose gradient is zero, so that a count is ½ and its noise, and an upload is its noise.
That every engine tells the same is for `conformance/test_counts`. Seeds are fixed. A test rejects a right
implementation with probability at most 1e-3; each has a twin that is wrong and that the same test must reject.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import special, stats
from torch import nn

from conformance.asking import request
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Separate, Summed
from dpfl.federation import Records
from dpfl.gradients.capabilities import Capabilities, capabilities_of
from dpfl.models import Model
from dpfl.orders import Gaussian, Order, RecordClip, Sampler
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.ledger import Charged, Ledger, release_of
from dpfl.streams import Streams
from grids import each

FALSE_ALARM = 1e-3
CLIENTS, ROUNDS, STDS = 2000, 8, (3.0, 0.4)  # every other client has the one, and the others the other


@cache
def flat() -> tuple[Model, Capabilities]:
    model = Model(nn.Linear(1, 1, bias=False), lambda outputs, _: outputs.squeeze(-1))
    nn.init.zeros_(model.module.weight)
    found = capabilities_of(model, Records(torch.ones(8, 1), torch.zeros(8)))
    assert found.layers is not None
    return model, found


def paid() -> dict[int, Charged]:
    receipts = [
        Charged(Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(0.7), count_noise=Gaussian(std)),
                1, 1.0, 1.0)
        for std in STDS
    ]  # fmt: skip
    return {client: receipts[client % 2] for client in range(CLIENTS)}


def perform(streams: Streams, round: int, separate: bool) -> Any:
    model, found = flat()
    held = (Records(torch.zeros(1, 1), torch.zeros(1)),) * CLIENTS
    asked = request(paid(), torch.zeros(1), round, dict.fromkeys(range(CLIENTS), 1.0), separate=separate)
    return StackedClients(model, held, streams, capabilities=found).perform(asked)


@cache
def drawn(sampler: Sampler, seed: int = 7) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the noise on the counts of all rounds, in units of what was paid for, and that on the uploads."""
    counts, noise = [], []
    for round in range(1, ROUNDS + 1):
        uploads = perform(Streams(seed, sampler=sampler), round, separate=True)
        assert isinstance(uploads, Separate)
        counts += [(uploads.counts[client] - 0.5) / STDS[client % 2] for client in range(CLIENTS)]
        noise += [uploads.by_client[client].item() / 0.7 for client in range(CLIENTS)]
    return np.array(counts), np.array(noise)


def is_normal(sample: NDArray[np.float64]) -> bool:
    """Compare the law, and then the standard deviation, which is known to 1/√(2n) of itself."""
    law = stats.kstest(sample, special.ndtr, method="asymp").pvalue > FALSE_ALARM / 2
    return bool(law and abs(sample.std() - 1) < 3.5 / math.sqrt(2 * len(sample)))  # passed with probability 5e-4


SAMPLERS: list[Sampler] = ["fast", "exact"]


@each("sampler", SAMPLERS)
def test_the_noise_on_counts_is_what_was_paid_for(sampler: Sampler) -> None:
    counts, _ = drawn(sampler)
    assert is_normal(counts)
    assert not is_normal(1.05 * counts)
    assert not is_normal(0.95 * counts)
    assert not is_normal(counts * np.resize([1.0, STDS[0] / STDS[1]], len(counts)))  # that of the first for all


@each("sampler", SAMPLERS)
def test_nobody_and_nothing_else_shares_it(sampler: Sampler) -> None:
    counts, noise = drawn(sampler)
    others = [noise, np.roll(counts, 1), np.roll(counts, CLIENTS), drawn(sampler, seed=8)[0]]
    limit = 4.5 / math.sqrt(len(counts))  # passed with probability 7e-6 in each comparison
    assert all(abs(np.corrcoef(counts, other)[0, 1]) < limit for other in others)
    assert np.corrcoef(counts, 1 - drawn(sampler)[0])[0, 1] < -0.99  # the twin: the very same


@each("sampler", SAMPLERS)
def test_a_sum_holds_the_noise_of_all(sampler: Sampler) -> None:
    uploads = perform(Streams(7, sampler=sampler), 1, separate=False)
    assert isinstance(uploads, Summed)
    expected = math.fsum(0.5 + drawn(sampler)[0][:CLIENTS] * np.resize(STDS, CLIENTS))
    assert uploads.counts == pytest.approx(expected, rel=1e-9)


# Both together. Whoever knows everything else sees a point of the plane that one record moves, in units of the noise,
# by the root of the sum of two prices: the best test between the two places tells them apart just so well.


def pair_of(order: Order, value: float, clients: int) -> NDArray[np.float64]:
    """Return what many clients of one record tell whose gradient is this, [clients, 2]: upload and count."""
    model, found = flat()
    held = (Records(torch.full((1, 1), value), torch.zeros(1)),) * clients
    ledger = Ledger(promise(clients), (1,) * clients)
    receipts = ledger.charge(dict.fromkeys(range(clients), order))
    asked = request(receipts, torch.zeros(1), 1, separate=True)
    uploads = StackedClients(model, held, Streams(int(10 + value)), capabilities=found).perform(asked)
    assert isinstance(uploads, Separate)
    return np.array([[uploads.by_client[i].item(), uploads.counts[i]] for i in range(clients)])


def promise(clients: int) -> Promise:
    return Promise(budgets=(Budget(50.0, 1e-3),) * clients, unit="record", neighbours="replace", calibration="tight")


def test_a_count_and_its_upload_tell_just_what_both_cost() -> None:
    # A gradient of −1 (clipped from −2, so that it counts −½) for one of 1 (not clipped): 2ηC apart, and 1 in counts.
    order = Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(2.0), count_noise=Gaussian(1.0))
    one, other = (pair_of(order, value, CLIENTS) for value in (1.0, -2.0))
    stds = np.array([2.0, 1.0])
    way = (one.mean(axis=0) - other.mean(axis=0)) / stds
    scores = [(both / stds) @ way / np.linalg.norm(way) for both in (one, other)]
    apart = (scores[0].mean() - scores[1].mean()) / math.sqrt((scores[0].var() + scores[1].var()) / 2)
    priced = release_of(order, 1, unit="record", neighbours="replace").mechanism
    both = math.sqrt((2 * 0.5 * 1.0 / 2.0) ** 2 + 1.0**2)
    assert 1 / priced.multiplier == pytest.approx(both, rel=1e-8)
    # A difference of two means of 4,000: known to √(2/4000) = 0.022, and 3.5 of these are passed with probability 5e-4.
    assert apart == pytest.approx(both, abs=3.5 * math.sqrt(2 / CLIENTS))
    for wrong in (0.5, 1.0):  # the upload's price alone, or the count's
        assert apart > wrong + 3.5 * math.sqrt(2 / CLIENTS)
