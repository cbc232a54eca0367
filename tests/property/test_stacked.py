"""For any problem: clients that train together upload what the reference client uploads, one after the other.

Models, sizes of clients, cohorts, orders and the memory that there is are drawn at random; records are continuous, so
that no max-pool has to choose between equals. In double precision nothing but a mistake can part the two by 1e-5; in
single precision rounding may, and a clip can turn the smallest difference between two models into a larger one.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import dpfl
from conformance.asking import request, sum_of, uploads_of
from dpfl.clients import stacked
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Summed
from dpfl.errors import Caution
from dpfl.federation import Federation, Records
from dpfl.gradients.capabilities import Capabilities, capabilities_of
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy, hinge, squared_error
from dpfl.orders import ClientClip, Full, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip, Shuffled
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams
from dpfl.systems import SYSTEMS, PrivateSystem, System
from grids import each

derandomised = bool(os.environ.get("CI"))


def unhurried(examples: int) -> settings:  # a busy machine is no failure
    return settings(deadline=None, max_examples=examples, derandomize=derandomised, database=None)


# The models. Each maps records of its own shape to a loss; all parameters are drawn, so that no layer is zero.


@dataclass(frozen=True)
class Kind:
    """How to build a model, and what its records look like."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    classes: int | None = 3
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    ridge: float = 0.0
    words: int = 0  # how many there are, where records are made of words


class Conversation(nn.Module):
    """Words, some of them twice, a normalisation and a linear layer over each of them; the first word is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 3, padding_idx=0), nn.LayerNorm(3)
        self.each, self.out = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.each(self.norm(self.table(x)))).mean(dim=1))


class Residual(nn.Module):
    """Two paths that meet, without biases, over normalised groups."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding="same")
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.one(x)
        return self.out((first + functional.gelu(self.two(torch.tanh(self.norm(first))))).mean(dim=(2, 3)))


KINDS = {
    "linear": Kind(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), (2, 2), None, squared_error),
    "svm": Kind(lambda: nn.Linear(4, 1, bias=False), classes=2, loss=hinge, ridge=0.3),
    "softmax": Kind(lambda: nn.Linear(4, 3)),
    "a mean of losses": Kind(lambda: nn.Linear(4, 3), loss=nn.CrossEntropyLoss()),
    "mlp": Kind(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Tanh(),
                                      nn.Linear(4, 3)), ridge=0.1),
    "cnn": Kind(
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                              nn.Conv2d(3, 2, 2, stride=(1, 2), dilation=1), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)),
        (1, 6, 6),
    ),
    "signals": Kind(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), nn.Tanh(), nn.MaxPool1d(2),
                              nn.Flatten(), nn.Linear(3, 3)),
        (2, 7),
    ),
    "groups": Kind(Residual, (1, 4, 4)),
    "words": Kind(Conversation, (4,), words=5),
}  # fmt: skip


@cache
def known_model(name: str, dtype: torch.dtype) -> tuple[Model, Capabilities]:
    """Build a model and ask once, with public records, how it can be trained."""
    kind = KINDS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = kind.build().to(dtype)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.6)
    model = Model(module, kind.loss, ridge=kind.ridge)
    found = capabilities_of(model, records_of(kind, 8, np.random.default_rng(0), dtype))
    assert found.layers is not None, f"{name} trains by the loop"
    assert found.least_squares == (name == "linear")
    return model, found


def records_of(kind: Kind, count: int, rng: np.random.Generator, dtype: torch.dtype) -> Records:
    if kind.words:
        x = torch.from_numpy(rng.integers(0, kind.words, (count, *kind.shape)))
    else:
        x = torch.from_numpy(rng.normal(scale=1.5, size=(count, *kind.shape))).to(dtype)
    if kind.classes is None:
        return Records(x, torch.from_numpy(rng.normal(scale=3, size=count)).to(dtype))
    return Records(x, torch.from_numpy(rng.integers(0, kind.classes, count)))


# The orders. What decides the kind of order is drawn once for some clients, what are numbers for each of them.

numbers = st.floats(0.05, 1.5).map(lambda number: round(number, 3))
rates = st.floats(0.01, 0.4).map(lambda number: round(number, 3))


@st.composite
def orders(draw: Any, clients: int, *, noise: bool, sampled: bool) -> list[Order]:
    clip = draw(st.sampled_from([None, RecordClip, RecordClip, ClientClip, ModelClip]))
    norm = draw(st.sampled_from([1, 2]))
    steps = draw(st.integers(1, 4))
    law = draw(st.sampled_from([None, Gaussian, Laplace])) if noise else None
    noise_on = draw(st.sampled_from(["step", "upload"]))
    batches = st.just(Full())
    if sampled and draw(st.booleans()):
        batches = st.builds(Poisson, st.floats(0.1, 1.0))
    elif sampled and clip is not RecordClip and draw(st.booleans()):
        batches = st.builds(Shuffled, st.integers(1, 4))
    pulled, shared = draw(st.booleans()), draw(st.booleans())
    found = []
    for _ in range(1 if shared else clients):
        schedule = tuple(draw(rates) for _ in range(steps))
        found.append(Order(
            steps=steps,
            learning_rate=draw(st.sampled_from([schedule, schedule[0]])),
            batch=draw(batches),
            clip=None if clip is None else clip(4 * draw(numbers), norm),
            noise=None if law is None else law(draw(numbers)),
            noise_on=noise_on,
            proximal=draw(numbers) if pulled else 0.0,
        ))  # fmt: skip
    return found * clients if shared else found


def in_the_other_norm(order: Order) -> Order:
    assert order.clip is not None
    return replace(order, clip=replace(order.clip, norm=3 - order.clip.norm))


@dataclass
class Cohort:
    """Some clients of a federation and what they are asked to do."""

    name: str
    sizes: list[int]
    charged: dict[int, Charged]
    seed: int
    room: tuple[int, int]  # for a chunk and for a block

    def performed(self, kind: type, dtype: torch.dtype, *, apart: bool = True) -> Mapping[int, Tensor]:
        """Let the reference client or the stacked clients do it, in the memory that there is."""
        model, found = known_model(self.name, dtype)
        rng = np.random.default_rng(self.seed)
        records = tuple(records_of(KINDS[self.name], size, rng, dtype) for size in self.sizes)
        broadcast, round = model.vector(), 2
        if kind is ReferenceClients:
            return uploads_of(ReferenceClients(model, records, Streams(self.seed)), self.charged, broadcast, round)
        clients = StackedClients(model, records, Streams(self.seed), capabilities=found)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stacked, "_CPU_CHUNK", self.room[0])
            patch.setattr(stacked, "_CPU_BLOCK", self.room[1])
            if apart:
                return uploads_of(clients, self.charged, broadcast, round)
            return {0: sum_of(clients, self.charged, broadcast, round, self.weights)}

    @property
    def weights(self) -> dict[int, float]:
        return {client: 0.2 + 0.3 * client for client in self.charged}


@st.composite
def cohorts(draw: Any, *, noise: bool = True, sampled: bool = True) -> Cohort:
    name = draw(st.sampled_from(sorted(KINDS)))
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    chosen = draw(st.permutations(range(len(sizes))))[: draw(st.integers(1, len(sizes)))]
    given = draw(orders(len(chosen), noise=noise, sampled=sampled))
    other = draw(st.sampled_from(["none", "another kind", "the other norm"]))
    if other == "another kind":
        given[::2] = draw(orders(len(given[::2]), noise=noise, sampled=sampled))
    elif other == "the other norm":
        given[::2] = [order if order.clip is None else in_the_other_norm(order) for order in given[::2]]
    paid = [draw(st.integers(1, 9)) for _ in chosen]  # the ledger's number divides, whatever a client holds
    charged = {client: Charged(order, n) for client, order, n in zip(chosen, given, paid, strict=True)}
    room = draw(st.sampled_from([(2**21, 2**26), (2**21, 1), (2000, 300), (300, 1)]))
    return Cohort(name, sizes, charged, draw(st.integers(0, 2**16)), room)


def assert_alike(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.dtype == theirs.dtype
    assert torch.linalg.vector_norm(ours - theirs) <= tolerance * torch.linalg.vector_norm(theirs) + 1e-12


@unhurried(150)
@given(cohort=cohorts())
def test_uploads_are_those_of_the_reference_client(cohort: Cohort) -> None:
    theirs = cohort.performed(ReferenceClients, torch.float64)
    ours = cohort.performed(StackedClients, torch.float64)
    assert list(ours) == list(theirs) == list(cohort.charged)
    for client in theirs:
        assert_alike(ours[client], theirs[client], 1e-5)


@unhurried(40)
@given(cohort=cohorts())
def test_in_single_precision_they_differ_by_rounding_alone(cohort: Cohort) -> None:
    # Sums of at most 7 records, a few steps and layers: a hundred roundings of 6e-8, of gradients that may be a hundred
    # times longer than what is left of their sum. A client that is wrong in anything is off by a percent at least.
    theirs = cohort.performed(ReferenceClients, torch.float32)
    ours = cohort.performed(StackedClients, torch.float32)
    for client in theirs:
        assert ours[client].dtype == torch.float32
        assert_alike(ours[client], theirs[client], 1e-3)


@unhurried(120)
@given(cohort=cohorts(noise=False, sampled=False))
def test_a_sum_without_chance_is_that_of_the_reference_uploads(cohort: Cohort) -> None:
    theirs = cohort.performed(ReferenceClients, torch.float64)
    expected = sum(cohort.weights[client] * update for client, update in theirs.items())
    assert isinstance(expected, Tensor)
    (ours,) = cohort.performed(StackedClients, torch.float64, apart=False).values()
    longest = max(float(torch.linalg.vector_norm(update)) for update in theirs.values())  # much may cancel in the sum
    assert torch.linalg.vector_norm(ours - expected) <= 1e-5 * longest


@unhurried(40)
@given(cohort=cohorts(sampled=False))
def test_whoever_is_asked_for_a_sum_alone_knows_who_uploaded_and_nothing_else(cohort: Cohort) -> None:
    model, found = known_model(cohort.name, torch.float64)
    rng = np.random.default_rng(cohort.seed)
    records = tuple(records_of(KINDS[cohort.name], size, rng, torch.float64) for size in cohort.sizes)
    clients = StackedClients(model, records, Streams(1), capabilities=found)
    uploads = clients.perform(request(cohort.charged, model.vector(), 1, cohort.weights))
    assert isinstance(uploads, Summed)
    assert sorted(uploads.clients) == sorted(cohort.charged)


# Broken records: a gradient that cannot be measured counts as nothing, as by the reference client.


@each("apart", [True, False])
@each("dtype", [torch.float32, torch.float64])
@each("norm", [1, 2])
@each("size", [1e5, 1e9, 1e11, 1e15, 1e19, 1e30, 1e38, float("inf"), float("nan")])
def test_a_record_of_any_size_counts_as_much_as_the_clip_allows(
    size: float, norm: Any, dtype: torch.dtype, apart: bool
) -> None:
    model, found = known_model("softmax", dtype)
    records = [records_of(KINDS["softmax"], count, np.random.default_rng(count), dtype) for count in (3, 5)]
    records[0].x[1] = torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=dtype) * size
    order = Order(steps=1, learning_rate=1.0, clip=RecordClip(0.5, norm))
    charged = {0: Charged(order, 3), 1: Charged(order, 5)}
    clients, both = StackedClients(model, tuple(records), Streams(1), capabilities=found), {0: 1.0, 1: 1.0}
    here = model.vector()
    upload = uploads_of(clients, charged, here)[0] if apart else sum_of(clients, charged, here, 1, both)
    bound = 0.5 if apart else 1.0  # a mean of gradients that are 0.5 long at most, of each client
    assert float(torch.linalg.vector_norm(upload.double(), ord=norm)) <= bound * (1 + 1e-5)


# Where clients differ in size, shorter ones have gaps. Nothing is in a gap, whatever a model makes of it.


class Unit(nn.Module):
    """A model that knows only directions: a record of zeros has none."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.one(x)
        return self.two(inner / inner.norm(dim=1, keepdim=True))


def relative_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs.squeeze(-1) - targets) / targets).square()


@each("batch", [Full(), Poisson(0.6)], ids=["full", "sampled"])
@each("steps", [1, 2])
@each("clip", [None, RecordClip(1.0), ClientClip(1.0), ModelClip(1.0)], ids=str)
@each("loss", [cross_entropy, relative_error])
def test_gaps_never_count(loss: Any, clip: Any, steps: int, batch: Full | Poisson) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = Unit() if loss is cross_entropy else nn.Linear(4, 1)
    model, classes = Model(module.double(), loss), 3 if loss is cross_entropy else None
    given = [records_of(Kind(Unit, classes=classes), n, np.random.default_rng(n), torch.float64) for n in (8, 3, 5)]
    found = capabilities_of(model, given[0])
    assert found.layers is not None
    order = Order(steps=steps, learning_rate=0.1, clip=clip, batch=batch)
    charged = {client: Charged(order, len(given[client])) for client in (1, 2)}
    theirs = uploads_of(ReferenceClients(model, tuple(given), Streams(3)), charged, model.vector(), 1)
    clients = StackedClients(model, tuple(given), Streams(3), capabilities=found)
    ours = uploads_of(clients, charged, model.vector(), 1)
    for client in charged:
        assert_alike(ours[client], theirs[client], 1e-5)
    total = sum_of(clients, charged, model.vector(), 1, {1: 1.0, 2: 1.0})
    assert torch.isfinite(total).all()
    if isinstance(batch, Full):
        assert_alike(total, theirs[1] + theirs[2], 1e-5)


# Whole trainings: every system by both clients.


@cache
def federation() -> Federation:
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    points = (rng.normal(size=(90, 4)) + 2 * np.eye(4)[labels]).astype(np.float32)
    made = dpfl.federate((points, labels), clients=4, sizes=(1, 13, 19, 22), validation_share=0.2, seed=1)
    validation, test, *clients = (Records(its.x.double(), its.y) for its in (made.validation, made.test, *made.clients))
    return replace(made, clients=tuple(clients), validation=validation, test=test)


def every_system() -> dict[str, System[Any]]:
    found = {}
    for name, kind in SYSTEMS.items():
        calibrations = get_args(get_type_hints(kind)["calibration"]) if issubclass(kind, PrivateSystem) else ()
        for options in [{"calibration": one} for one in calibrations] or [{}]:
            few = {"noise_multiplier": 2.5} if name == "ali-dpfl" else {}
            found["-".join([name, *options.values()])] = kind(**{"rounds": 2} | few | options)
    return found


@pytest.mark.filterwarnings(f"ignore::{Caution.__module__}.{Caution.__name__}")
@each("system", every_system().values(), ids=every_system().keys())
def test_a_training_ends_with_the_same_model_whoever_performs_it(system: System[Any]) -> None:
    models, starts = [], []
    seen: list[Any] = []
    for backend in ("reference", "stacked"):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            # In double precision: in single, clips leave room for rounding, and whatever adapts makes more of that.
            module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        starts.append(torch.cat([p.detach().flatten().clone() for p in module.parameters()]))
        run = dpfl.train(
            system, federation(), module, loss=functional.cross_entropy, seed=4, backend=backend, draws="client",
            on_uploads=lambda round, uploads, seen=seen: seen.append(torch.stack(list(uploads.values()))),  # type: ignore[misc]
        )  # fmt: skip
        models.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    assert torch.equal(starts[0], starts[1])
    moved = torch.linalg.vector_norm(models[0] - starts[0])
    assert moved > 0
    assert torch.linalg.vector_norm(models[1] - models[0]) <= 1e-5 * torch.linalg.vector_norm(models[0])
    half = len(seen) // 2
    assert half == run.rounds
    for theirs, ours in zip(seen[:half], seen[half:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
