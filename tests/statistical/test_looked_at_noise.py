"""Whoever looks at a cohort's uploads one by one sees noise of the promised law, and changes nothing of its sum.

Clients learn nothing here, so an upload is its noise. 20,000 coordinates tell a standard deviation to 0.5 % and a
correlation to 0.007: limits of 4.5 standard errors are beyond chance but for 7e-6 in each comparison, 3e-4 in all.
"""

import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn

from conformance.asking import request, sum_of
from dpfl.clients.draws import adding_up_to
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Separate
from dpfl.federation import Records
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Model
from dpfl.orders import ClientClip, Gaussian, Laplace, Order, Poisson, RecordClip
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams

DIM, SIZES = 20_000, (4, 5, 7, 3)
WEIGHTS = {0: 0.5, 1: 1.5, 2: 0.1, 3: 0.0}  # they need not sum to one, and one may not count at all
LIMIT = 4.5


def clients(seed: int = 1) -> StackedClients:
    model = Model(nn.Linear(DIM // 100, 100, bias=False).double(), lambda outputs, targets: outputs.square().sum(dim=1))
    model.load(torch.zeros(DIM, dtype=torch.float64))
    records = tuple(Records(torch.zeros(n, DIM // 100, dtype=torch.float64), torch.zeros(n)) for n in SIZES)
    public = Records(torch.randn(8, DIM // 100, dtype=torch.float64), torch.zeros(8))
    known = capabilities_of(model, public)
    assert known.layers is not None
    return StackedClients(model, records, Streams(seed), capabilities=known)


ORDERS: dict[str, tuple[Callable[[int], Order], Callable[[int], float]]] = {
    "upload": (
        lambda i: Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(1.0 + i)),
        lambda i: 1.0 + i,
    ),
    "step": (
        lambda i: Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(1.0 + i), noise_on="step"),
        lambda i: 0.5 * (1.0 + i) / SIZES[i],
    ),
    "two sampled steps": (
        lambda i: Order(
            steps=2, learning_rate=(0.5, 0.2), batch=Poisson(0.5), clip=RecordClip(1.0), noise=Gaussian(1.0 + i),
            noise_on="step",
        ),
        lambda i: math.hypot(0.5, 0.2) * (1.0 + i) / (0.5 * SIZES[i]),
    ),
    "two kinds": (
        lambda i: Order(steps=1 + i % 2, learning_rate=0.5, clip=ClientClip(1.0), noise=Gaussian(1.0 + i)),
        lambda i: 1.0 + i,
    ),
}  # fmt: skip


def looked_at(order_of: Callable[[int], Order], round: int = 1, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return the uploads [k, d], and the sum where nobody looks."""
    cohort, paid = clients(seed), {i: Charged(order_of(i), SIZES[i]) for i in range(len(SIZES))}
    here = torch.zeros(DIM, dtype=torch.float64)
    uploads = cohort.perform(request(paid, here, round, WEIGHTS, separate=True))
    assert isinstance(uploads, Separate)
    return torch.stack([uploads.by_client[i] for i in range(len(SIZES))]), sum_of(cohort, paid, here, round, WEIGHTS)


def assert_independent(rows: Tensor, limit: float = LIMIT) -> None:
    alike = torch.corrcoef(rows) - torch.eye(len(rows), dtype=rows.dtype)
    assert alike.abs().max() <= limit / math.sqrt(rows.shape[1])


@pytest.mark.parametrize("name", ORDERS)
def test_noises_are_independent_of_the_promised_size_and_add_up_to_the_sum(name: str) -> None:
    order_of, std_of = ORDERS[name]
    rows, total = looked_at(order_of)
    torch.testing.assert_close(torch.tensor(list(WEIGHTS.values()), dtype=rows.dtype) @ rows, total)
    for i, row in enumerate(rows):
        assert row.std().item() == pytest.approx(std_of(i), rel=LIMIT / math.sqrt(2 * DIM))
        assert kstest((row / std_of(i)).numpy(), "norm").pvalue > 1e-4
        assert row.std().item() != pytest.approx(1.05 * std_of(i), rel=LIMIT / math.sqrt(2 * DIM))  # 5 % off is noticed
    later, _ = looked_at(order_of, round=2)
    other, _ = looked_at(order_of, seed=2)
    assert_independent(torch.cat([rows, later, other]))


def test_laplace_noises_are_those_of_the_sum() -> None:
    rows, total = looked_at(
        lambda i: Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0, 1), noise=Laplace(1.0 + i))
    )
    torch.testing.assert_close(torch.tensor(list(WEIGHTS.values()), dtype=rows.dtype) @ rows, total)
    for i, row in enumerate(rows):
        assert kstest((row / (1.0 + i)).numpy(), "laplace").pvalue > 1e-4
    assert_independent(rows)


def test_a_cohort_of_one_uploads_the_sum() -> None:
    cohort, here = clients(), torch.zeros(DIM, dtype=torch.float64)
    paid = {2: Charged(ORDERS["upload"][0](2), SIZES[2])}
    uploads = cohort.perform(request(paid, here, 1, {2: 0.25}, separate=True))
    assert isinstance(uploads, Separate)
    torch.testing.assert_close(0.25 * uploads.by_client[2], sum_of(cohort, paid, here, 1, {2: 0.25}))


def test_wrong_shares_would_be_found_out() -> None:
    """Twins that add up just as well: what is missing shared out equally, or by variance and not by w·σ²."""
    source = torch.Generator().manual_seed(3)
    stds, weights = (
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.tensor([0.5, 1.5, 0.1], dtype=torch.float64),
    )
    own = stds[:, None] * torch.randn(3, DIM, generator=source, dtype=torch.float64)
    total = (weights * stds).norm() * torch.randn(DIM, generator=source, dtype=torch.float64)
    missing = total - weights @ own
    twins = {
        "equal": own + missing / weights.sum(),
        "by variance": own + (stds.square() / (weights * stds.square()).sum())[:, None] * missing,
    }
    right = adding_up_to(total, own, stds, weights)
    for rows in (right, *twins.values()):
        torch.testing.assert_close(weights @ rows, total)
    sizes = right.std(dim=1) / stds - 1
    assert sizes.abs().max() <= LIMIT / math.sqrt(2 * DIM)
    assert_independent(right)
    for rows in twins.values():
        alike = torch.corrcoef(rows) - torch.eye(3, dtype=rows.dtype)
        assert alike.abs().max() > 2 * LIMIT / math.sqrt(DIM)


def test_noise_that_counts_for_nothing_is_left_as_it_is() -> None:
    own = torch.ones(2, 3, dtype=torch.float64)
    none = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(adding_up_to(torch.ones(3, dtype=torch.float64), own, torch.ones_like(none), none), own)
