"""Sensitivity by brute force: change one unit of data and measure what the real clients upload.

For every combination of clip, norm, batch, steps, schedule, proximal pull, noise place, unit and neighbours: the
measured change never exceeds the derived bound, on random data and on a constructed worst case, and the worst case
comes within 1 % of it. That holds for the reference client, for the client that trains in company and for the sum that
it forms with the others, in double precision (1e-9 is left for rounding) and in single (1e-5, and what rounds an upload
at last, which happens after noise has joined it).
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conformance.asking import request, sum_of, uploads_of
from conformance.coins import Coins, CoinsOf, TakesAll
from dpfl.clients import reference
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Separate
from dpfl.federation import Records
from dpfl.gradients.capabilities import Capabilities, capabilities_of
from dpfl.gradients.clipping import clip
from dpfl.gradients.layered import Layered
from dpfl.models import Model
from dpfl.orders import ClientClip, Full, ModelClip, Order, Poisson, RecordClip, sensitivity
from dpfl.privacy.ledger import Charged
from grids import each

RECORDS = 12
CLIP = 0.7
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
DTYPE = torch.float64


@pytest.fixture(params=[torch.float64, torch.float32], ids=["double", "single"], autouse=True)
def _precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DTYPE", request.param)


class Puppet(nn.Module):
    """A model whose records dictate their own gradients, the worst that any loss could do.

    A record is (push₀, push₁, turn). While w₀ = 0 its gradient is `push`; anywhere else it is turn·sign(w₀) on the
    first coordinate. So all records can turn on the smallest difference between two models. It is made of a linear
    layer, which sees `push` and (1, 0) of each record, so that clients may train it together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False, dtype=DTYPE)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tensor([1.0, 0.0], dtype=x.dtype).expand_as(x[:, :2])
        pushed, moved = self.layer(torch.stack([x[:, :2], first], dim=1)).squeeze(2).unbind(dim=1)
        return torch.where(moved == 0, pushed, x[:, 2] * moved.abs())


def known_puppet() -> tuple[Model, Capabilities]:
    return _known_puppet(DTYPE)


@cache
def _known_puppet(dtype: torch.dtype) -> tuple[Model, Capabilities]:
    """Ask once whether the clients may train together."""
    model = Model(Puppet(), lambda outputs, _: outputs)
    known = capabilities_of(model, records(np.random.default_rng(0).normal(size=(8, 3)).tolist()))
    assert known.layers is not None
    return model, known


def records(rows: list[list[float]]) -> Records:
    return Records(torch.tensor(rows, dtype=DTYPE).reshape(-1, 3), torch.zeros(len(rows)))


COMPANY = [[0.5, -0.3, 0.2], [1.5, 0.4, -2.0], [-0.1, 0.0, 0.3]]  # fewer than RECORDS: there are gaps to fill


def by_reference(order: Order, data: Records, broadcast: Tensor, coins: Callable[[], object]) -> Tensor:
    return reference.perform(
        Charged(order, RECORDS), known_puppet()[0], broadcast, data,
        batches=coins(), noise=np.random.default_rng(0),
    )  # fmt: skip


def in_company(data: Records, coins: Callable[[], object]) -> StackedClients:
    """Make the client that is measured the middle one of three, the others of which never change."""
    model, known = known_puppet()
    return StackedClients(model, (records(COMPANY), data, records(COMPANY)), CoinsOf(coins), capabilities=known)


def paid_by_all(order: Order) -> dict[int, Charged]:
    return {0: Charged(order, len(COMPANY)), 1: Charged(order, RECORDS), 2: Charged(order, 2)}


def by_stacked(order: Order, data: Records, broadcast: Tensor, coins: Callable[[], object]) -> Tensor:
    return uploads_of(in_company(data, coins), paid_by_all(order), broadcast, 1)[1]


def by_sum(order: Order, data: Records, broadcast: Tensor, coins: Callable[[], object]) -> Tensor:
    return sum_of(in_company(data, coins), paid_by_all(order), broadcast, 1, {0: 0.3, 1: 1.0, 2: 0.2})


def by_look(order: Order, data: Records, broadcast: Tensor, coins: Callable[[], object]) -> Tensor:
    """Look at one client of a cohort that draws from one stream."""
    looked_at = request(paid_by_all(order), broadcast, 1, {0: 0.3, 1: 1.0, 2: 0.2}, separate=True)
    uploads = in_company(data, coins).perform(looked_at)
    assert isinstance(uploads, Separate)
    return uploads.by_client[1]


Performs = Callable[[Order, Records, Tensor, Callable[[], object]], Tensor]
CLIENTS: list[Performs] = [by_reference, by_stacked, by_sum, by_look]
each_client = pytest.mark.parametrize("performs", CLIENTS, ids=lambda performs: performs.__name__[3:])


def released(order: Order, data: Records, broadcast: Tensor, coins: Callable[[], object], performs: Performs) -> Tensor:
    """Return what the client would noise: its upload, or the quantity inside a step."""
    update = performs(order, data, broadcast, coins)
    if order.noise_on == "upload":
        return update
    rate = order.batch.sampling_rate if isinstance(order.batch, Poisson) else 1.0
    divisor = (order.fixed_divisor or rate * RECORDS) if isinstance(order.clip, RecordClip) else 1.0
    return -update / order.learning_rates[0] * divisor  # undo the step to see the sum that noise would join


def distance(
    order: Order,
    pair: tuple[Records, Records],
    broadcast: Tensor,
    coins: Callable[[], object],
    performs: Performs = by_reference,
) -> float:
    one, other = (released(order, data, broadcast, coins, performs) for data in pair)  # neighbours share the coins
    return float(torch.linalg.vector_norm(one - other, ord=order.clip.norm))


def orders() -> Iterator[Order]:
    clips = [kind(CLIP, norm) for kind in (RecordClip, ClientClip) for norm in (1, 2)]
    schedules = [(1, 0.5), (3, 0.5), (3, (0.5, 0.2, 0.9))]
    for bound, (steps, rate), proximal, batch in itertools.product(
        clips, schedules, (0.0, 0.8), (Full(), Poisson(0.4))
    ):
        yield Order(steps=steps, learning_rate=rate, batch=batch, clip=bound, proximal=proximal)
    for bound, batch in itertools.product(clips, (Full(), Poisson(0.4))):
        # One step tells all: given what earlier steps released, both runs stand at the same model in each.
        yield Order(steps=1, learning_rate=0.5, batch=batch, clip=bound, noise_on="step")
    for norm, batch, (steps, noise_on) in itertools.product(
        (1, 2), (Full(), Poisson(0.4)), ((1, "step"), (1, "upload"), (3, "upload"))
    ):
        yield Order(
            steps=steps, learning_rate=0.5, batch=batch, clip=RecordClip(CLIP, norm), noise_on=noise_on,
            fixed_divisor=5.0,
        )  # fmt: skip
    for norm, (steps, rate) in itertools.product((1, 2), schedules):
        yield Order(steps=steps, learning_rate=rate, clip=ModelClip(CLIP, norm), proximal=0.8)


RELATIONS = list(itertools.product(("record", "client"), ("replace", "add-remove")))
CASES = [(order, *relation) for order in orders() for relation in RELATIONS]


def label(case: object) -> str:
    if not isinstance(case, Order):
        return str(case)
    rates = "decaying" if isinstance(case.learning_rate, tuple) else "constant"
    parts = (type(case.clip).__name__, f"L{case.clip.norm}", type(case.batch).__name__, f"{case.steps}-{rates}")
    divided = "" if case.fixed_divisor is None else f"-by{case.fixed_divisor:g}"
    return "-".join((*parts, case.noise_on, f"pull{case.proximal}{divided}"))


def within(bound: float, *, far: bool = False) -> float:
    """Leave room for rounding; an upload from a model that is far away is as long as the way."""
    return bound * (1 + ROUNDING[DTYPE]) + (1e3 * torch.finfo(DTYPE).eps if far else 0.0)


def derived(order: Order, unit: str, neighbours: str) -> float:
    return sensitivity(order, records=RECORDS, unit=unit, neighbours=neighbours, norm=order.clip.norm)


def worst_case(order: Order, unit: str, neighbours: str) -> tuple[tuple[Records, Records], Tensor]:
    """Construct the neighbours, and the broadcast model, that the bound is made for."""
    origin = torch.zeros(2, dtype=DTYPE)
    right, left = [-1e6, 0.0, -1e6], [1e6, 0.0, -1e6]  # walk right (left) at once and ever after
    idle = [1e-7, 0.0, -1e6]  # barely move left at first, then run to the side on which the model stands
    heavy = [-1e12, 0.0, -1e6]  # outweigh everybody else, where records are not clipped one by one
    if unit == "client" and isinstance(order.clip, ModelClip) and neighbours == "add-remove":
        # The removed client stays where the broadcast model is, on the far side of the ball.
        far = torch.tensor([0.0, -1e3], dtype=DTYPE)
        return (records([[0.0, -1e12, 0.0]] * RECORDS), records([])), far
    if unit == "client":
        return (records([right] * RECORDS), records([left] * RECORDS if neighbours == "replace" else [])), origin
    others, mine = ([idle], right) if isinstance(order.clip, RecordClip) else ([left], heavy)
    if neighbours == "add-remove":
        return (records(others * RECORDS + [mine]), records(others * RECORDS)), origin
    return (records(others * (RECORDS - 1) + [mine]), records(others * (RECORDS - 1) + [left])), origin


@each_client
@each(("order", "unit", "neighbours"), CASES, ids=label)
def test_the_worst_case_comes_within_one_percent_and_not_beyond(
    order: Order, unit: str, neighbours: str, performs: Performs
) -> None:
    measured = distance(order, *worst_case(order, unit, neighbours), TakesAll, performs)
    bound = derived(order, unit, neighbours)
    assert 0.99 * bound <= measured <= within(bound, far=isinstance(order.clip, ModelClip))


@each_client
@each(("order", "unit", "neighbours"), CASES, ids=label)
def test_random_data_never_exceeds_the_bound(order: Order, unit: str, neighbours: str, performs: Performs) -> None:
    bound = derived(order, unit, neighbours)
    for seed in range(6 if performs is by_reference else 2):
        rng = np.random.default_rng(seed)

        def draw(count: int, rng: np.random.Generator = rng) -> list[list[float]]:
            return (rng.standard_t(2, (count, 3)) * 10 ** rng.uniform(-1, 1)).tolist()

        common = [] if unit == "client" else draw(RECORDS - 1)
        count = RECORDS - len(common)
        if neighbours == "replace":
            pair = records(common + draw(count)), records(common + draw(count))
        else:  # the last record (or all of them) is missing from the second
            pair = records(common + draw(count)), records(common)
        start = torch.from_numpy(rng.normal(size=2) * (seed % 2)).to(DTYPE)
        measured = distance(order, pair, start, lambda seed=seed: Coins(seed), performs)  # type: ignore[misc]
        assert measured <= within(bound)


@each_client
@each("poison", [float("nan"), float("inf"), -float("inf"), 1e308, 1e11, 1e160])
@each("kind", [RecordClip, ClientClip, ModelClip])
def test_a_broken_record_cannot_break_the_bound(kind: type, poison: float, performs: Performs) -> None:
    order = Order(steps=1, learning_rate=0.5, clip=kind(CLIP))
    healthy = [[0.3, -0.2, 0.1]] * (RECORDS - 1)
    pair = records([*healthy, [poison, poison, poison]]), records([*healthy, [1.0, 1.0, 1.0]])
    measured = distance(order, pair, torch.zeros(2, dtype=DTYPE), TakesAll, performs)
    assert measured <= within(derived(order, "record", "replace"))


# Deliberately wrong clients, each a mistake that shipped somewhere: the brute force must catch every one.


def clips_the_batch(
    bound: RecordClip, model: Model, parameters: Tensor, batch: Records, vectorised: bool, lengths: None
) -> Tensor:
    """Clip the batch's mean gradient instead of each record's."""
    return len(batch) * clip(model.gradient(parameters, batch.x, batch.y), bound.clip_norm, bound.norm)


def clips_each_coordinate(
    bound: RecordClip, model: Model, parameters: Tensor, batch: Records, vectorised: bool, lengths: None
) -> Tensor:
    (gradients,) = model.record_gradients(parameters, batch.x, batch.y, vectorised=vectorised)
    return gradients.clamp(-bound.clip_norm, bound.clip_norm).sum(0)


def divides_by_the_realised_size(
    bound: RecordClip, model: Model, parameters: Tensor, batch: Records, vectorised: bool, lengths: None
) -> Tensor:
    total = right_sum(bound, model, parameters, batch, vectorised)
    return total / len(batch) * RECORDS * 0.4


right_sum = reference._sum_of_clipped


# The same of the layers that all clients share. Three clients come with as many rows each, the measured one second.


def layers_clip_the_batch(
    self: Layered, parameters: Tensor, x: Tensor, y: Tensor, counts: Tensor, bound: tuple, clients: int, **options: bool
) -> Tensor:
    rows = len(x) // 3
    shares = [slice(rows * i, rows * (i + 1)) for i in range(3)]
    sums = [right_sums(self, parameters, x[i], y[i], counts[i] / counts[i].amin(), None, 1, **options) for i in shares]
    kept = [clip(one[0] / rows, float(bound[0][0]), bound[1]) * rows for one in sums]
    each = torch.stack([counts[i].amin() for i in shares])  # of the records of each client; none are gaps here
    return (each.to(kept[0]) @ torch.stack(kept))[None] if clients == 1 else torch.stack(kept)


def layers_clip_each_coordinate(
    self: Layered, parameters: Tensor, x: Tensor, y: Tensor, counts: Tensor, bound: tuple, clients: int, **options: bool
) -> Tensor:
    gradients = torch.cat(
        [right_sums(self, parameters, x[i : i + 1], y[i : i + 1], None, None, 1, **options) for i in range(len(x))]
    )
    clamped = gradients.clamp(-bound[0][0], bound[0][0])
    counts = torch.ones(len(x), dtype=x.dtype) if counts is None else counts
    return (clamped * counts[:, None]).view(clients, -1, 2).sum(dim=1)


def layers_divide_by_the_realised_size(
    self: Layered, parameters: Tensor, x: Tensor, y: Tensor, counts: Tensor, bound: tuple, clients: int, **options: bool
) -> Tensor:
    shares = counts.view(3, -1)
    realised = (shares != 0).sum(dim=1, keepdim=True)
    factor = (shares / realised * torch.tensor([[3], [RECORDS], [2]]) * 0.4).flatten()
    return right_sums(self, parameters, x, y, factor, bound, clients, **options)


right_sums = Layered.sums


@each_client
@each(
    ("wrong", "wrong_layers", "batch", "rows"),
    [
        (
            clips_the_batch, layers_clip_the_batch, Full(),
            ([[9.0, 0, 0]] * 11 + [[-1e6, 0, 0]], [[9.0, 0, 0]] * 12),
        ),
        (
            clips_each_coordinate, layers_clip_each_coordinate, Full(),
            ([[0.0, 0, 0]] * 11 + [[9.0, 9, 0]], [[0.0, 0, 0]] * 11 + [[-9.0, -9, 0]]),
        ),
        (
            divides_by_the_realised_size, layers_divide_by_the_realised_size, Poisson(0.4),
            ([[-9.0, 0, 0], [9.0, 0, 0]], [[9.0, 0, 0]]),
        ),
    ],
)  # fmt: skip
def test_wrong_twins_are_caught(
    wrong: Callable[..., Tensor],
    wrong_layers: Callable[..., Tensor],
    batch: Full | Poisson,
    rows: tuple[list, list],
    performs: Performs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = Order(steps=1, learning_rate=0.5, batch=batch, clip=RecordClip(CLIP))
    neighbours = "replace" if len(rows[0]) == len(rows[1]) else "add-remove"
    pair, origin = tuple(records(side) for side in rows), torch.zeros(2, dtype=DTYPE)
    assert distance(order, pair, origin, TakesAll, performs) <= within(derived(order, "record", neighbours))
    monkeypatch.setattr(reference, "_sum_of_clipped", wrong)
    monkeypatch.setattr(Layered, "sums", wrong_layers)
    assert distance(order, pair, origin, TakesAll, performs) > 1.2 * derived(order, "record", neighbours)


@each_client
def test_a_client_that_divides_by_another_number_than_the_order_says_is_caught(performs: Performs) -> None:
    order = Order(steps=1, learning_rate=0.5, clip=RecordClip(CLIP), fixed_divisor=2.0 * RECORDS)
    pair, origin = worst_case(order, "record", "replace")
    bound = derived(order, "record", "replace")
    assert distance(order, pair, origin, TakesAll, performs) <= within(bound)
    assert distance(replace(order, fixed_divisor=None), pair, origin, TakesAll, performs) > 1.9 * bound
