"""What clients tell beside their uploads, by every engine: the same numbers, and counts that move as little as derived.

Records dictate their own gradients, so that neighbours can be as different as can be; whatever is drawn is the same for
both, and noise is zero. The worst case meets the bound to the bit: a count is made of halves.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conformance.asking import request
from conformance.coins import CoinsOf, TakesAll
from dpfl.clients import beside, local_steps, reference
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Separate
from dpfl.federation import Records
from dpfl.gradients.capabilities import Capabilities, capabilities_of
from dpfl.models import Model
from dpfl.orders import ClientClip, Full, Gaussian, ModelClip, Order, Poisson, RecordClip, Shuffled, count_sensitivity
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams
from grids import each

RECORDS, CLIP = 12, 0.7
COMPANY = [[0.5, 0.2], [1.5, -2.0], [0.1, 0.3]]  # fewer than RECORDS: there are gaps to fill
WEIGHTS = {0: 0.3, 1: 1.0, 2: 0.2}


class Quiet(TakesAll):
    """Coins of a sampler that takes every record, and noise of nothing."""

    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape)

    def integers(self, below: int) -> int:
        return 0


class Turning(nn.Module):
    """A model of one number w and records (push, turn): the gradient is `push` while w = 0, and turn·sign(w) elsewhere.

    It is made of a linear layer, so that clients may train it together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones(1, dtype=x.dtype).expand_as(x[:, :1])
        rows = torch.stack([x[:, :1], one], dim=1)
        pushed, moved = self.layer(rows).squeeze(2).unbind(dim=1)
        return torch.where(moved == 0, pushed, x[:, 1] * moved.abs())


@cache
def turning() -> tuple[Model, Capabilities]:
    model = Model(Turning(), lambda outputs, _: outputs)
    known = capabilities_of(model, records(np.random.default_rng(0).normal(size=(8, 2)).tolist()))
    assert known.layers is not None
    return model, known


def records(rows: list[list[float]]) -> Records:
    return Records(torch.tensor(rows, dtype=torch.float64).reshape(-1, 2), torch.zeros(len(rows)))


def charged(order: Order) -> dict[int, Charged]:
    relative = 0.5, None if order.count_noise is None else 1.0  # any, as long as exact noise knows of one
    return {client: Charged(order, paid, *relative) for client, paid in ((0, len(COMPANY)), (1, RECORDS), (2, 2))}


def cohort(data: Records, kind: type, streams: Streams, **how: Any) -> Any:
    model, known = turning()
    held = records(COMPANY), data, records(COMPANY)
    if kind is ReferenceClients:
        return ReferenceClients(model, held, streams)
    return StackedClients(model, held, streams, capabilities=known, **how)


ENGINES: dict[str, tuple[type, dict[str, Any], bool]] = {
    "reference": (ReferenceClients, {}, True),
    "stacked, each client draws": (StackedClients, {"drawn_by": "client"}, True),
    "stacked, looked at": (StackedClients, {}, True),
    "stacked, summed": (StackedClients, {}, False),
    "stacked, one by one": (StackedClients, {"room": 1}, False),
}
each_engine = pytest.mark.parametrize("engine", ENGINES)


def told(
    order: Order,
    data: Records,
    engine: str,
    streams: Streams,
    weights: dict[int, float] = WEIGHTS,
    at: float = 0.0,
) -> Any:
    """Return the uploads of three clients, the middle one of which holds the data."""
    kind, how, separate = ENGINES[engine]
    asked = request(charged(order), torch.tensor([at], dtype=torch.float64), 1, weights, separate=separate)
    return cohort(data, kind, streams, **how).perform(replace(asked, questions=("length",)))


def count_of(order: Order, data: Records, engine: str, at: float = 0.0) -> float:
    """Return the count of the middle client, or what it adds to the sum of all."""
    uploads = told(order, data, engine, CoinsOf(Quiet), {0: 0.0, 1: 1.0, 2: 0.0}, at)
    if isinstance(uploads, Separate):
        return uploads.counts[1]
    assert uploads.counts is not None
    return uploads.counts * order.expected_batch(RECORDS)


def orders() -> Iterator[Order]:
    for norm, batch, steps in itertools.product((1, 2), (Full(), Poisson(0.4)), (1, 3)):
        yield Order(
            steps=steps, learning_rate=0.5, batch=batch, clip=RecordClip(CLIP, norm), count_noise=Gaussian(1.0)
        )  # fmt: skip
    one_sampled_step = {"steps": 1, "learning_rate": 0.5, "batch": Poisson(0.4), "noise_on": "step"}
    yield Order(**one_sampled_step, clip=RecordClip(CLIP), count_noise=Gaussian(1.0), fixed_divisor=64.0)


def neighbours(unit: str, relation: str, others: list[float], mine: list[float], other: list[float]) -> Any:
    if unit == "client":
        return records([mine] * RECORDS), records([other] * RECORDS if relation == "replace" else [])
    if relation == "replace":
        return records([others] * (RECORDS - 1) + [mine]), records([others] * (RECORDS - 1) + [other])
    return records([others] * RECORDS + [mine]), records([others] * RECORDS)


RELATIONS = list(itertools.product(("record", "client"), ("replace", "add-remove")))
SHORT, LONG, BROKEN = [CLIP, 9.0], [-2 * CLIP, 9.0], [math.nan, 9.0]


def worst_case(unit: str, relation: str) -> Iterator[Any]:
    for mine, other in ((SHORT, LONG), (LONG, SHORT), (SHORT, BROKEN)):
        yield neighbours(unit, relation, [1e-7, 9.0], mine, other)


def distance(order: Order, pair: Any, engine: str) -> float:
    one, other = (count_of(order, data, engine) for data in pair)
    return abs(one - other)


@each_engine
@each("order", orders)
@each(("unit", "relation"), RELATIONS)
def test_a_count_moves_just_as_far_as_derived(order: Order, unit: Any, relation: Any, engine: str) -> None:
    bound = count_sensitivity(order, records=RECORDS, unit=unit, neighbours=relation)
    assert [distance(order, pair, engine) for pair in worst_case(unit, relation)] == pytest.approx([bound] * 3)


@each_engine
@each("order", orders)
def test_random_records_never_move_it_further(order: Order, engine: str) -> None:
    for seed, (unit, relation) in itertools.product(range(3), RELATIONS):
        rows = (np.random.default_rng(seed).standard_t(2, (3, 2)) * CLIP).tolist()
        bound = count_sensitivity(order, records=RECORDS, unit=unit, neighbours=relation)
        assert distance(order, neighbours(unit, relation, *rows), engine) <= bound * (1 + 1e-9)


# Deliberately wrong: a count from zero on; and one of a later step, where the two runs stand at different models.


@each_engine
def test_a_count_that_is_not_centred_is_caught(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = beside.counts_and_lengths

    def uncentred(lengths: Tensor, clip_norms: Tensor, real: Tensor | None = None) -> Tensor:
        found = right(lengths, clip_norms, real)
        here = lengths.new_full((len(lengths),), lengths.shape[1]) if real is None else real.sum(dim=1)
        return found + torch.stack([here / 2, 0 * here], dim=1)

    for module in (reference, local_steps):
        monkeypatch.setattr(module, "counts_and_lengths", uncentred)
    assert distance(next(orders()), next(worst_case("record", "add-remove")), engine) == 1.0  # a half is derived


@each_engine
def test_a_count_of_a_later_step_could_move_by_all_records(engine: str) -> None:
    data = records([[0.0, 9.0]] * RECORDS)  # which turn on the smallest difference between two models
    assert [count_of(next(orders()), data, engine, at=model) for model in (0.0, 1e-9)] == [RECORDS / 2, -RECORDS / 2]


# Every engine tells the same, noise included.


def asked_orders() -> Iterator[Order]:
    clips = [*(RecordClip(CLIP, norm) for norm in (1, 2)), ClientClip(0.2), ModelClip(0.3)]
    for clip, steps, batch in itertools.product(clips, (1, 3), (Full(), Poisson(0.6), Shuffled(2))):
        counted = isinstance(clip, RecordClip)
        if not (counted and isinstance(batch, Shuffled)):
            yield Order(
                steps=steps, learning_rate=0.3, batch=batch, clip=clip, noise=Gaussian(0.1),
                count_noise=Gaussian(0.7) if counted else None,
            )  # fmt: skip


@each("seed", [1, None])
@each("order", asked_orders)
def test_all_engines_tell_the_same(order: Order, seed: int | None) -> None:
    streams, data = Streams(seed), records(np.random.default_rng(2).normal(size=(RECORDS, 2)).tolist())
    theirs = told(order, data, "reference", streams)
    assert set(theirs.lengths) == {0, 1, 2}
    assert set(theirs.counts) == ({0, 1, 2} if order.count_noise else set())
    for engine in ENGINES:
        if not (engine == "stacked, each client draws" or isinstance(order.batch, Full)):
            continue  # a cohort draws other batches
        ours = told(order, data, engine, streams)
        assert ours.lengths == pytest.approx(theirs.lengths, rel=1e-9, nan_ok=True)
        if isinstance(ours, Separate):
            assert ours.counts == pytest.approx(theirs.counts, rel=1e-12)
        elif theirs.counts:
            divisors = {client: paid.order.expected_batch(paid.records) for client, paid in charged(order).items()}
            shares = [WEIGHTS[client] * count / divisors[client] for client, count in theirs.counts.items()]
            assert ours.counts == pytest.approx(math.fsum(shares), rel=1e-12)
        else:
            assert ours.counts is None


def test_by_hand() -> None:
    lengths = torch.tensor([[0.5, 1.0, 2.0, math.nan], [3.0, 1.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    real = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    norms = torch.tensor([[1.0], [3.0], [3.0]], dtype=torch.float64)
    found = beside.counts_and_lengths(lengths, norms, real)
    assert found.tolist() == [[0.0, 1.0], [1.0, 1.0], [-0.5, 4.0]]  # of two in the middle the shorter
    nobody = beside.counts_and_lengths(torch.zeros(2, 0), norms[:2])
    assert nobody[:, 0].tolist() == [0.0, 0.0]
    assert nobody[:, 1].isnan().all()


def test_only_what_is_asked_for_is_told() -> None:
    order, data = Order(steps=1, learning_rate=0.5, clip=RecordClip(CLIP)), records(COMPANY)
    for engine, (kind, how, separate) in ENGINES.items():
        asked = request(charged(order), torch.zeros(1, dtype=torch.float64), 1, WEIGHTS, separate=separate)
        clients = cohort(data, kind, Streams(1), **how)
        uploads = clients.perform(asked)
        assert not uploads.counts, engine
        assert not uploads.lengths, engine
        measured = clients.perform(replace(asked, questions=("length",)))
        answers = clients.answer(("length",), asked.broadcast, measured, asked.broadcast)
        assert answers == {"length": measured.lengths}
        assert set(measured.lengths) == {0, 1, 2}
