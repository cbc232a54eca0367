"""The local steps of clients with orders of one kind, by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpfl.clients.chunks import Chunk, Columns
from dpfl.clients.local_steps import LocalSteps, is_one_batch
from dpfl.clients.pool import Batch, Pool
from dpfl.federation import Records
from dpfl.gradients.layered import Layered
from dpfl.models import Model
from dpfl.models.architectures import squared_error
from dpfl.orders import ClientClip, Gaussian, ModelClip, Order, Poisson, RecordClip
from dpfl.privacy.ledger import Charged
from grids import each

# Loss (w·x − y)² of a record (x, y): its gradient is 2·(w·x − y)·x. Client 0 has (1, 0) and (2, 1), client 1 (1, 3).
MODEL = Model(nn.Linear(1, 1, bias=False), squared_error)
POOL = Pool([
    Records(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 1.0])), Records(torch.tensor([[1.0]]), torch.tensor([3.0]))
])  # fmt: skip
ONE = torch.tensor([1.0])


def never(*_: object) -> Tensor:
    raise AssertionError("nobody asked for this")


def moved(
    order: Order,
    *,
    rows: int = 100,
    noise: Callable[[Tensor, Tensor], Tensor] = never,
    late_noise: bool = True,
    weights: dict[int, float] | None = None,
) -> list[float]:
    """Return the updates of both clients from w = 1, or their weighted sum."""
    chunk = Chunk([0, 1], [Charged(order, 2), Charged(order, 1)])
    steps = LocalSteps(Layered(MODEL, POOL.x), POOL, None, rows, careful=False)
    numbers, batch = Columns.of(chunk.table(weights)), POOL.whole([0, 1])
    if weights is None:
        return steps.updates(order, numbers, ONE, lambda: batch, noise, late_noise=late_noise).moved.flatten().tolist()
    return steps.weighted_sum(order, numbers, ONE, lambda: batch, noise).moved.tolist()


PLAIN = Order(steps=1, learning_rate=0.5)


def test_one_step() -> None:
    # Gradients 2 and 4, of mean 3; and 2·(1 − 3) = −4.
    assert moved(PLAIN) == [-1.5, 2.0]


def test_records_are_clipped_each_by_itself() -> None:
    # 2 and 3, of mean 2.5; and −3.
    assert moved(replace(PLAIN, clip=RecordClip(3.0))) == pytest.approx([-1.25, 1.5], rel=2**-16)  # room for rounding


def test_clients_are_clipped_by_their_mean() -> None:
    assert moved(replace(PLAIN, clip=ClientClip(2.0))) == pytest.approx([-1.0, 1.0])


def test_models_are_clipped_at_the_end() -> None:
    # The models end at 1 − 1.5 = −0.5 and 1 + 2 = 3, which is clipped to 2.
    assert moved(replace(PLAIN, clip=ModelClip(2.0))) == pytest.approx([-1.5, 1.0])


def test_a_second_step_starts_where_the_first_one_ended_and_is_pulled_back() -> None:
    # Client 0 is at −0.5: gradients 2·(−0.5) = −1 and 2·(−1 − 1)·2 = −8 of mean −4.5, pulled by 0.2·(−1.5) = −0.3, so
    # that it moves by 0.1·4.8. Client 1 is at 3, where its gradient is 0 and the pull 0.2·2: it moves by −0.1·0.4.
    order = Order(steps=2, learning_rate=(0.5, 0.1), proximal=0.2)
    assert moved(order) == pytest.approx([-1.5 + 0.48, 2.0 - 0.04])


def test_noise_joins_every_step_or_the_upload() -> None:
    drawn = torch.tensor([[1.0], [-2.0]])
    order = replace(PLAIN, clip=RecordClip(100.0), noise=Gaussian(0.2), noise_on="step")
    # 0.2 on the sum of two records is 0.1 on their mean, times the rate 0.5; −0.4 on that of one.
    assert moved(order, noise=lambda values, sizes: values + drawn * sizes) == pytest.approx([-1.5 - 0.05, 2.0 + 0.2])
    assert moved(order, late_noise=False) == pytest.approx([-1.5, 2.0])
    upload = replace(order, noise_on="upload")
    assert moved(upload, noise=lambda values, sizes: values + drawn * sizes) == pytest.approx([-1.5 + 0.2, 2.0 - 0.4])
    assert moved(upload, late_noise=False) == pytest.approx([-1.5, 2.0])


def test_late_noise_is_that_of_the_last_step_alone() -> None:
    order = Order(steps=3, learning_rate=0.1, clip=RecordClip(1.0), noise=Gaussian(1.0), noise_on="step")
    calls: list[int] = []

    def noise(values: Tensor, sizes: Tensor) -> Tensor:
        calls.append(1)
        return values

    moved(order, noise=noise, late_noise=False)
    assert len(calls) == 2
    moved(order, noise=noise, late_noise=True)
    assert len(calls) == 5


@each(
    "order",
    [
        PLAIN, replace(PLAIN, clip=RecordClip(3.0)), replace(PLAIN, clip=RecordClip(3.0, 1)),
        replace(PLAIN, clip=ClientClip(2.0)), replace(PLAIN, clip=ModelClip(2.0)), replace(PLAIN, steps=2),
        Order(steps=2, learning_rate=(0.5, 0.1), proximal=0.2, clip=RecordClip(3.0)),
    ],
    ids=str,
)  # fmt: skip
@each("rows", [1, 2, 3, 100])
def test_a_weighted_sum_is_that_of_the_updates_in_blocks_of_any_size(order: Order, rows: int) -> None:
    first, second = moved(order)
    assert moved(order, rows=rows) == pytest.approx([first, second])
    assert moved(order, rows=rows, weights={0: 0.25, 1: 3.0}) == pytest.approx([0.25 * first + 3 * second])


def test_every_step_sees_the_batch_that_is_drawn_for_it() -> None:
    # Client 0's record (1, 0) and then its record (2, 1): from 1 by −0.5·2/1 to 0, where −2·1·2 = −4 moves by 0.5·4/1.
    order = Order(steps=2, learning_rate=0.5, batch=Poisson(0.5), clip=RecordClip(100.0))
    chunk = Chunk([0], [Charged(order, 2)])
    batches = iter([Batch(torch.tensor([row]), torch.ones(1)) for row in (0, 1)])
    steps = LocalSteps(Layered(MODEL, POOL.x), POOL, None, 100, careful=False)
    numbers = Columns.of(chunk.table())
    assert steps.updates(order, numbers, ONE, lambda: next(batches), never, late_noise=True).moved.tolist() == [[1.0]]


def test_an_empty_batch_moves_nobody() -> None:
    order = replace(PLAIN, batch=Poisson(0.5), clip=RecordClip(1.0))
    chunk = Chunk([0, 1], [Charged(order, 2), Charged(order, 1)])
    steps = LocalSteps(Layered(MODEL, POOL.x), POOL, None, 100, careful=False)
    empty, numbers = Batch(torch.zeros(0, dtype=torch.long), torch.zeros(0)), Columns.of(chunk.table())
    assert steps.updates(order, numbers, ONE, lambda: empty, never, late_noise=True).moved.tolist() == [[0.0], [0.0]]
    assert steps.weighted_sum(order, numbers, ONE, lambda: empty, never).moved.tolist() == [0.0]


@each(
    ("order", "one"),
    [
        (PLAIN, True),
        (replace(PLAIN, clip=RecordClip(1.0)), True),
        (replace(PLAIN, steps=2), False),
        (replace(PLAIN, clip=ClientClip(1.0)), False),  # a client's mean is clipped, not its records
        (replace(PLAIN, clip=ModelClip(1.0)), False),
    ],
)
def test_a_single_step_of_clipped_records_is_one_batch(order: Order, one: bool) -> None:
    assert is_one_batch(order) is one
