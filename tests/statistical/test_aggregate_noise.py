"""Does the noise in the averaged model have the variance that the papers' analyses build on?

DP-FedAvg's Corollaries 1.1 and 2.1 and FedSGD-DPC's Propositions 1 and 2, with the corrections of their misprints:
simulated through the real client and the real aggregation, over the cohorts of whole round-robin cycles. Seeds are
fixed; the mean of the squares of 240,000 sums has a relative standard error below 0.4 %, so that a right
implementation misses the 2 % with probability below 1e-6, and a formula that is 5 % off passes with less than 1e-3.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from conformance.asking import uploads_of
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.uploads import Separate
from dpfl.federation import Records, RoundRobin, Schedule
from dpfl.models import Model
from dpfl.orders import ClientClip, Gaussian, Laplace, Order, RecordClip
from dpfl.privacy import paper_formulas
from dpfl.privacy.ledger import Charged
from dpfl.server.aggregation import aggregate
from dpfl.streams import Streams
from grids import each

SIZES = (3, 5, 8, 4, 10, 6)
CLIENTS, COHORT, ROUNDS, DIM = len(SIZES), 2, 60, 4_000
REPLIES = COHORT * ROUNDS / CLIENTS  # 20 each
RATE, STEPS, CLIP, DELTA = 0.3, 3, 1.5, 1e-4
EPSILONS = (1.0, 2.0, 0.5, 4.0, 1.0, 3.0)
ALL = sum(SIZES)
MEAN_SQUARE = sum(n * n for n in SIZES) / CLIENTS  # n̄²


class Flat(nn.Module):
    """Its gradient is the record, and all records here are zero: an upload is its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def simulated(order_of: Callable[[int], Order]) -> float:
    """Return the mean over rounds of ‖aggregated noise‖², with the weights N/K·n_i/n."""
    model = Model(Flat(), lambda outputs, _: outputs)
    records = tuple(Records(torch.zeros(n, DIM), torch.zeros(n)) for n in SIZES)
    streams = Streams(11)
    clients = ReferenceClients(model, records, streams)
    schedule = Schedule(RoundRobin(CLIENTS, COHORT), streams.public)
    squares = []
    for round in range(1, ROUNDS + 1):
        charged = {client: Charged(order_of(client), SIZES[client]) for client in schedule.cohort(round)}
        uploads = uploads_of(clients, charged, torch.zeros(DIM), round)
        weights = {client: CLIENTS / COHORT * SIZES[client] / ALL for client in uploads}
        squares.append(float(aggregate(torch.zeros(DIM), Separate(uploads), weights).double().square().sum()))
    return float(np.mean(squares))


def dp_fedavg_laplace(client: int) -> Order:
    noise = paper_formulas.dp_fedavg_laplace_scale(
        replies=REPLIES, largest_lr=RATE, local_steps=STEPS, clip=CLIP, epsilon=2.0
    )  # fmt: skip
    return Order(steps=STEPS, learning_rate=RATE, clip=ClientClip(CLIP, 1), noise=Laplace(noise))


def dp_fedavg_gaussian(client: int) -> Order:
    noise = paper_formulas.dp_fedavg_noise_std(
        replies=REPLIES, largest_lr=RATE, local_steps=STEPS, clip=CLIP, epsilon=2.0, delta=DELTA
    )  # fmt: skip
    return Order(steps=STEPS, learning_rate=RATE, clip=ClientClip(CLIP), noise=Gaussian(noise))


def fedsgd_dpc_laplace(client: int) -> Order:
    # The paper's noise is on the mean gradient, the client's on the sum that will be divided by n_i.
    noise = SIZES[client] * paper_formulas.fedsgd_dpc_laplace_scale(
        replies=REPLIES, clip=CLIP, records=SIZES[client], epsilon=EPSILONS[client]
    )  # fmt: skip
    return Order(steps=1, learning_rate=RATE, clip=RecordClip(CLIP, 1), noise=Laplace(noise), noise_on="step")


def fedsgd_dpc_gaussian(client: int) -> Order:
    noise = SIZES[client] * paper_formulas.fedsgd_dpc_noise_std(
        replies=REPLIES, clip=CLIP, records=SIZES[client], epsilon=EPSILONS[client], delta=DELTA
    )  # fmt: skip
    return Order(steps=1, learning_rate=RATE, clip=RecordClip(CLIP), noise=Gaussian(noise), noise_on="step")


XI = RATE * STEPS * CLIP  # Ξ = η·E·C
VARIANCES = {
    dp_fedavg_laplace: 2 * DIM * COHORT * XI**2 * ROUNDS**2 * MEAN_SQUARE / (ALL**2 * 2.0**2),
    dp_fedavg_gaussian: (
        DIM * paper_formulas.C2**2 * CLIENTS * math.log(1 / DELTA) * XI**2 * ROUNDS * MEAN_SQUARE / (ALL**2 * 2.0**2)
    ),
    fedsgd_dpc_laplace: (
        8 * RATE**2 * DIM * COHORT * ROUNDS**2 * CLIP**2 / (CLIENTS * ALL**2) * sum(1 / e**2 for e in EPSILONS)
    ),
    fedsgd_dpc_gaussian: (
        paper_formulas.C2**2
        * RATE**2
        * DIM
        * ROUNDS
        * CLIP**2
        / ALL**2
        * sum(math.log(1 / DELTA) / e**2 for e in EPSILONS)
    ),
}


@each(("order_of", "variance"), VARIANCES.items(), ids=[order.__name__ for order in VARIANCES])
def test_the_averaged_noise_has_its_variance(order_of: Callable[[int], Order], variance: float) -> None:
    ratio = simulated(order_of) / variance
    assert abs(ratio - 1) < 0.02
    # The twins: 5 % off either way, and the factor 2 that DP-FedAvg prints in its Gaussian line.
    for wrong in (1.05, 0.95, 2.0):
        assert abs(ratio / wrong - 1) > 0.02
