"""Sensitivity by brute force through every private system: change one unit of data and measure what its order uploads.

The orders are a system's own, at its beginning and after two rounds, with the noise taken off. They are carried out by
the real client on data that is as bad as can be, in double precision:

- `Puppet`, whose records dictate their gradients and can all turn on the smallest difference between two models. Here
  the worst case comes within 1 % of the derived bound, so the bound is no larger than it has to be.
- `Linear`, made of a linear layer, whose clipped gradients the client also computes as outer products. Here the worst
  case comes within 1 % of the bound wherever a single step, or a clipped client gradient, decides.

No data set may exceed the bound by more than rounding, and clips that are twice as generous are caught in all cases.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpfl.clients import reference
from dpfl.clients.dense import is_dense
from dpfl.federation import Records, Schedule
from dpfl.models import Model
from dpfl.orders import ClientClip, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip, sensitivity
from dpfl.privacy.budget import Promise
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams
from dpfl.systems import SYSTEMS, Feedback, PrivateSystem, Problem
from dpfl.systems.udp import UDP

SIZES = (7, 12)
ROUNDING = 1 + 1e-9
NEAR = 0.99
DIM = 5

# What changes the clip, the steps, the batch or the neighbours. Budgets are alike: noise is taken off here.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dp-fedavg": [
        {"mechanism": "laplace"}, {"norm": 1}, {"lr_gamma": 2.0}, {"local_steps": 1},
        {"mechanism": "laplace", "calibration": "paper"}, {"strong_convexity": 0.5, "smoothness": 1.0},
    ],
    "udp": [{"clip": 0.3, "lr": 0.7}, {"discount": 0.5, "least_gain": 10.0}],
    "nbafl": [
        {"clipping": "model"}, {"local_steps": 3}, {"clipping": "model", "local_steps": 1, "proximal": 0.0},
        {"local_steps": 2, "proximal": 0.9, "lr": 1.5}, {"calibration": "paper", "clip": 0.4},
    ],
    "ali-dpfl": [{"sampling_rate": 0.2, "clip": 2.5}],
    "fedsgd-dpc": [{"mechanism": "laplace"}, {"sampling_rate": 0.3}, {"norm": 1}, {"lr_gamma": 2.0}],
    "dpsgd-fedavg": [{"local_steps": 3, "noise_multiplier": 3.0}],
    "pe-dpfl": [{"local_steps": 3}, {"proximal": 0.0, "clip": 0.2}],
    "adap-dpfl": [{"local_steps": 2, "clip_factor": 3.0}],
    "lei": [{"clip": 4.0}],
}  # fmt: skip


BASE = {"ali-dpfl": {"noise_multiplier": 2.0}}  # how many steps a budget affords is found sooner where they are few


@dataclass(frozen=True)
class Case:
    """One client's order, as a system gave it."""

    title: str
    order: Order
    records: int
    promise: Promise

    @property
    def norm(self) -> int:
        """Return the norm that the noise of the order needs."""
        return 1 if isinstance(self.order.noise, Laplace) else 2

    @property
    def bound(self) -> float:
        return sensitivity(
            self.order, records=self.records, unit=self.promise.unit, neighbours=self.promise.neighbours, norm=self.norm
        )

    def __str__(self) -> str:
        return self.title


def all_systems() -> Iterator[tuple[str, PrivateSystem[Any]]]:
    for name, kind in SYSTEMS.items():
        if not issubclass(kind, PrivateSystem):
            continue
        plain = [{"calibration": one} for one in get_args(get_type_hints(kind)["calibration"])]
        for options in plain + VARIANTS.get(name, []):
            title = "-".join([name, *(f"{key}={value}" for key, value in options.items())])
            yield title, kind(**{"rounds": 5} | BASE.get(name, {}) | options)


def orders(system: PrivateSystem[Any]) -> Iterator[tuple[int, dict[int, Order]]]:
    """Yield the orders of the first round and of the third, after real rounds with real noise."""
    problem = Problem(SIZES, DIM, Schedule(system.cohorts(len(SIZES)), Streams(5)))
    start = torch.zeros(DIM, dtype=torch.float64)
    answers = {question: dict.fromkeys(range(len(SIZES)), 0.5) for question in system.questions}
    state = system.begin(problem, start, Feedback(1.0, {}, answers))
    yield 1, system.orders(state)
    for round in (1, 2):
        uploads = {
            client: perform(one, random_records(SIZES[client], round), state.model, SIZES[client], dense=False)
            for client, one in system.orders(state).items()
        }
        state = replace(state, model=state.model + uploads[0], round=round)
        state = system.adapt(state, Feedback(1.0 - 0.1 * round, uploads, answers))
    if state.round < state.rounds:
        yield 3, system.orders(state)


@cache
def cases() -> tuple[Case, ...]:
    found: dict[Any, Case] = {}
    for number, (title, system) in enumerate(all_systems()):
        promise, client = system.promise(SIZES), number % len(SIZES)
        for round, given in orders(system):
            order = given[client]
            # Noise aside, most rounds order the same; one of a kind is enough.
            key = (title, replace(order, noise=None), type(order.noise))
            found.setdefault(key, Case(f"{title}-round {round}", order, SIZES[client], promise))
    return tuple(found.values())


class Puppet(nn.Module):
    """A model whose records dictate their own gradients, the worst that any loss could do.

    A record is (push, turn, …). While w₀ = 0 its gradient is `push` along the first coordinate; anywhere else it is
    turn·sign(w₀). So all records can turn on the smallest difference between two models.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.w[0] == 0, x[:, 0] * self.w[0], x[:, 1] * self.w[0].abs())


def puppet() -> Model:
    return Model(Puppet(), lambda outputs, _: outputs)


def linear() -> Model:
    """Make a model whose gradient is −y·x at any weights, through a linear layer."""
    layer = nn.Linear(DIM, 1, bias=False, dtype=torch.float64)
    return Model(nn.Sequential(layer), lambda outputs, y: -outputs.squeeze(-1) * y)


class TakesAll:
    """Coins of a sampler that happens to take every record: the bound must allow for it."""

    def random(self, count: int) -> np.ndarray:
        return np.zeros(count)


def perform(
    order: Order,
    data: Records,
    broadcast: Tensor,
    records: int,
    *,
    dense: bool,
    model: Model | None = None,
    coins: Any = None,
    vectorised: bool = True,
) -> Tensor:
    return reference.perform(
        Charged(order, records), model or linear(), broadcast, data, batches=coins or np.random.default_rng(0),
        noise=np.random.default_rng(1), vectorised=vectorised, dense=dense,
    )  # fmt: skip


def released(case: Case, data: Records, broadcast: Tensor, **how: Any) -> Tensor:
    """Return what the client would noise: its upload, or what the clip bounds in a step."""
    order = replace(case.order, noise=None)
    if order.noise_on == "upload":
        return perform(order, data, broadcast, case.records, **how)
    # Given what earlier steps released, both runs stand at the same model in each: one step tells all.
    rate = order.learning_rates[0]
    update = perform(replace(order, steps=1, learning_rate=rate), data, broadcast, case.records, **how)
    sampled = order.batch.sampling_rate if isinstance(order.batch, Poisson) else 1.0
    return -update / rate * (sampled * case.records if isinstance(order.clip, RecordClip) else 1.0)


def moved(case: Case, pair: tuple[Records, Records], broadcast: Tensor, **how: Any) -> float:
    one, other = (released(case, data, broadcast, **how) for data in pair)
    return float(torch.linalg.vector_norm(one - other, ord=case.norm))


def rows(x: list[list[float]], y: list[float] | None = None) -> Records:
    features = torch.tensor(x, dtype=torch.float64).reshape(-1, DIM)
    return Records(features, torch.tensor(y or [1.0] * len(x), dtype=torch.float64))


def neighbours(case: Case, others: list[float], mine: list[float], other: list[float]) -> tuple[Records, Records]:
    """Put one record (or all of them) in the place of another, or add it, as the promise has it."""
    n, replaced = case.records, case.promise.neighbours == "replace"
    if case.promise.unit == "client":
        return rows([mine] * n), rows([other] * n if replaced else [])
    if replaced:
        return rows([others] * (n - 1) + [mine]), rows([others] * (n - 1) + [other])
    return rows([others] * n + [mine]), rows([others] * n)


def padded(*numbers: float) -> list[float]:
    return [*numbers, *[0.0] * (DIM - len(numbers))]


ORIGIN = torch.zeros(DIM, dtype=torch.float64)


def puppets_worst(case: Case) -> tuple[Records, Records]:
    right, left = padded(-1e6, -1e6), padded(1e6, -1e6)  # walk right (left) at once and ever after
    idle = padded(1e-7, -1e6)  # barely move left at first, then run to the side on which the model stands
    heavy = padded(-1e12, -1e6)  # outweigh everybody else, where records are not clipped one by one
    if isinstance(case.order.clip, RecordClip):
        return neighbours(case, idle, right, left)
    return neighbours(case, left, heavy if case.promise.unit == "record" else right, left)


def linears_worst(case: Case) -> Iterator[tuple[Records, Records]]:
    """Push along one axis and along all of them: the first is longest in L2, the second in L1 under a wrong clip."""
    for along in (np.eye(DIM)[0], np.ones(DIM)):
        push = (1e6 * along).tolist()
        weight = 1e12 if isinstance(case.order.clip, ModelClip | ClientClip) else 1e6
        heavy = (-weight * along).tolist()
        yield neighbours(case, [0.0] * DIM, push, (-1e6 * along).tolist())
        yield neighbours(case, push, heavy, push)


def random_records(count: int, seed: int) -> Records:
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, (count, DIM)) * 10 ** rng.uniform(-1, 1)
    return Records(torch.from_numpy(x), torch.from_numpy(rng.choice([-1.0, 1.0], count)))


def random_pair(case: Case, seed: int) -> tuple[Records, Records]:
    common = 0 if case.promise.unit == "client" else case.records - 1
    whole, other = random_records(case.records, seed), random_records(case.records, seed + 1000)
    if case.promise.neighbours == "add-remove":
        return whole, whole.take(torch.arange(common))
    mixed = [torch.cat([getattr(whole, part)[:common], getattr(other, part)[common:]]) for part in ("x", "y")]
    return whole, Records(mixed[0], mixed[1])


def test_the_linear_model_takes_the_path_of_outer_products() -> None:
    assert is_dense(linear(), *vars(random_records(8, 0)).values())
    assert not is_dense(puppet(), *vars(random_records(8, 0)).values())


def test_every_private_system_and_every_kind_of_order_is_here() -> None:
    titles = {case.title.split("-calibration")[0] for case in cases()}
    assert {name for name, kind in SYSTEMS.items() if issubclass(kind, PrivateSystem)} <= titles
    assert {type(case.order.clip) for case in cases()} == {RecordClip, ClientClip, ModelClip}
    assert {type(case.order.noise) for case in cases()} == {Gaussian, Laplace}
    assert {(case.promise.unit, case.promise.neighbours) for case in cases()} == {
        ("record", "replace"), ("record", "add-remove"), ("client", "replace"),
    }  # fmt: skip
    for changing in ("adap-dpfl-calibration", "ali-dpfl-calibration", "dp-fedavg-lr_gamma", "fedsgd-dpc-lr_gamma"):
        assert any(case.title.startswith(changing) and "round 3" in case.title for case in cases())


@pytest.mark.parametrize("vectorised", [True, False])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_worst_case_comes_within_one_percent_and_not_beyond(case: Case, vectorised: bool) -> None:
    how = {"model": puppet(), "dense": False, "coins": TakesAll(), "vectorised": vectorised}
    # A pull so strong that it throws clients over to the other side (ημ > 1) is bounded as if all else went that way.
    near = NEAR if max(case.order.learning_rates) * case.order.proximal < 1 else 0.9
    assert near * case.bound <= moved(case, puppets_worst(case), ORIGIN, **how) <= case.bound * ROUNDING


def one_step_decides(case: Case) -> bool:
    return not isinstance(case.order.clip, RecordClip) or case.order.steps == 1 or case.order.noise_on == "step"


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_linear_layer_never_moves_further_and_comes_near_where_it_can(case: Case, dense: bool) -> None:
    how = {"model": linear(), "dense": dense, "coins": TakesAll()}
    furthest = max(moved(case, pair, ORIGIN, **how) for pair in linears_worst(case))
    assert furthest <= case.bound * ROUNDING
    if one_step_decides(case):
        assert furthest >= NEAR * case.bound


@pytest.mark.parametrize("case", cases(), ids=str)
def test_random_data_never_exceeds_the_bound(case: Case) -> None:
    for seed, (make, dense) in itertools.product(range(3), [(linear, True), (linear, False), (puppet, False)]):
        start = torch.from_numpy(np.random.default_rng(seed).normal(size=DIM) * (seed % 2))
        one, other = (  # neighbours share the sampler's coins
            released(case, data, start, model=make(), dense=dense, coins=np.random.default_rng(seed))
            for data in random_pair(case, seed)
        )
        assert float(torch.linalg.vector_norm(one - other, ord=case.norm)) <= case.bound * ROUNDING


@pytest.mark.parametrize("case", [case for case in cases() if "calibration" in case.title], ids=str)
def test_single_precision_stays_within_a_hundred_thousandth(case: Case) -> None:
    def halved(data: Records) -> Records:
        return Records(data.x.float(), data.y.float())

    for pair, dense in itertools.product(linears_worst(case), (True, False)):
        model = Model(nn.Sequential(nn.Linear(DIM, 1, bias=False)), linear().loss)
        pair = (halved(pair[0]), halved(pair[1]))
        assert moved(case, pair, ORIGIN.float(), model=model, dense=dense, coins=TakesAll()) <= case.bound * (1 + 1e-5)


# Deliberately wrong: the brute force must catch each in every order that it touches.


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_client_that_clips_twice_as_generously_is_caught(
    case: Case, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right_sum, right_dense, right_clip = reference.sum_of_clipped, reference.sum_of_clipped_dense, reference.clip
    monkeypatch.setattr(reference, "sum_of_clipped", lambda blocks, bound, norm: right_sum(blocks, 2 * bound, norm))
    monkeypatch.setattr(reference, "clip", lambda vector, bound, norm: right_clip(vector, 2 * bound, norm))
    monkeypatch.setattr(
        reference,
        "sum_of_clipped_dense",
        lambda model, weights, x, y, clip: right_dense(model, weights, x, y, RecordClip(2 * clip.clip_norm, clip.norm)),
    )
    if one_step_decides(case):
        how = {"model": linear(), "dense": dense, "coins": TakesAll()}
        furthest = max(moved(case, pair, ORIGIN, **how) for pair in linears_worst(case))
    else:
        furthest = moved(case, puppets_worst(case), ORIGIN, model=puppet(), dense=False, coins=TakesAll())
    assert furthest > 1.8 * case.bound


@pytest.mark.parametrize("case", [case for case in cases() if case.norm == 1], ids=str)
def test_a_clip_in_the_wrong_norm_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    right_sum, right_clip = reference.sum_of_clipped, reference.clip
    monkeypatch.setattr(reference, "sum_of_clipped", lambda blocks, bound, _: right_sum(blocks, bound, 2))
    monkeypatch.setattr(reference, "clip", lambda vector, bound, _: right_clip(vector, bound, 2))
    how = {"model": linear(), "dense": False, "coins": TakesAll()}
    assert max(moved(case, pair, ORIGIN, **how) for pair in linears_worst(case)) > 2 * case.bound  # √5, nearly


@pytest.mark.parametrize("case", [case for case in cases() if isinstance(case.order.batch, Poisson)], ids=str)
def test_a_client_that_divides_by_the_realised_batch_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference._sum_of_clipped

    def realised(bound: Any, model: Model, weights: Tensor, batch: Records, vectorised: bool) -> Tensor:
        return right(bound, model, weights, batch, vectorised) / len(batch) * case.order.divisor(case.records)

    monkeypatch.setattr(reference, "_sum_of_clipped", realised)
    # Two records that pull apart, of which one is added to the other: alone it was all of the batch.
    pair = rows([[1e6] * DIM, [-1e6] * DIM]), rows([[1e6] * DIM])
    how = {"model": linear(), "dense": False, "coins": TakesAll()}
    assert moved(case, pair, ORIGIN, **how) > 1.2 * case.bound


def test_noise_is_in_proportion_to_the_measured_change() -> None:
    """UDP's exact noise for one round, by hand: μ of (8, 1e-3) is what one replaced record may show."""
    system = UDP(rounds=1, epsilon=8.0, delta=1e-3)
    promise = system.promise(SIZES)
    for client, order in next(orders(system))[1].items():
        case = Case("udp", order, SIZES[client], promise)
        measured = max(
            moved(case, pair, ORIGIN, model=linear(), dense=True, coins=TakesAll()) for pair in linears_worst(case)
        )
        assert isinstance(order.noise, Gaussian)
        assert measured / order.noise.std == pytest.approx(2.0833, rel=1e-3)
