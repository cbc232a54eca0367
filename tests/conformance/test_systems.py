"""Every system keeps one contract: it is private, charged before it is performed, fair to clients that differ, exact.

Each system of `SYSTEMS` is trained for a few rounds through `dpfl.train`, on clients whose sizes and budgets all
differ, by clients that look over the ledger's shoulder. What they were really asked to do is priced here anew, apart
from the books. A system that joins `SYSTEMS` is tested with its defaults at once; `VARIANTS` adds what is special.
"""

import copy
import sqlite3
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfl
from dpfl import round as round_module
from dpfl.clients.backends import MakeClients
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Request, Separate, Summed, Uploads
from dpfl.errors import BadInput, BudgetRefused, Caution
from dpfl.federation import Everyone, Federation, Records
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Model
from dpfl.orders import UNPAID, ClientClip, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip, sensitivity
from dpfl.privacy import accounting, paper_formulas
from dpfl.privacy.accounting import Mechanism
from dpfl.privacy.books import BookedRun, Books, Grant, Release
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.gaussian_dp import epsilon_of
from dpfl.streams import Streams
from dpfl.systems import SYSTEMS, UDP, NbAFL, PrivateSystem, System, dpsgd
from grids import each

SIZES = (24, 33, 47)
EPSILON, DELTA = (2.0, 4.0, 7.0), (1e-3, 1e-4, 1e-2)
ROUNDS = 4
NOBODY = BookedRun(0, "", "", {})  # a run that is not in any books, so that all charges are those of others
PROMISED = 1 + 1e-9
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a power cut is not what is tested here


# What is tested: each system as it comes, in every calibration that it has, and with the options that change its path.

LAPLACE: dict[str, Any] = {"mechanism": "laplace", "delta": 0.0}
CRD: dict[str, Any] = {"discount": 0.7, "least_gain": 10.0, "rounds": 7}  # no round gains so much: all are discounted
SAMPLED: dict[str, Any] = {"sampling_rate": 0.4}
EPOCHS: dict[str, Any] = {"local_epochs": 2, "batch_size": 10}  # 4, 6 and 8 steps of clients with 24, 33 and 47 records
WEIGHED: dict[str, Any] = {"weighing": "records"}
MEDIAN: dict[str, Any] = {"clip": "median"}
FALLING: dict[str, Any] = {"lr_schedule": "inverse-sqrt"}
FEW: dict[str, Any] = {"noise_multiplier": 1.7, "rounds": 12}  # so little noise that budgets end before the rounds do
BASE = {"ali-dpfl": {"noise_multiplier": 2.5}}  # how many steps a budget affords is found sooner where they are few

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{"cohort": 2}, {"cohort": 2, "scheduling": "poisson"}, SAMPLED, EPOCHS],
    "fedsgd": [{"cohort": 1, "scheduling": "round-robin"}],
    "fedprox": [{"proximal": 0.0}, EPOCHS],
    "dp-fedavg": [
        {"cohort": 2}, {"cohort": 2, "scheduling": "random"}, {"norm": 1}, {"lr_schedule": "inverse:3.0"},
        LAPLACE, LAPLACE | {"delta": 1e-3}, LAPLACE | {"cohort": 2, "calibration": "paper"},
        {"strong_convexity": 0.5, "smoothness": 2.0, "cohort": 1, "calibration": "paper"},
        {"cohort": 2, "calibration": "paper", "paper_constant": "accountant"},
        EPOCHS, EPOCHS | {"lr_schedule": "inverse:3.0", "cohort": 2}, EPOCHS | {"calibration": "paper"},
        {"noise_for_steps": 1, "calibration": "paper"},
    ],
    "udp": [
        {"cohort": 2}, {"cohort": 2, "scheduling": "round-robin"}, {"cohort": 2, "scheduling": "poisson"}, CRD,
        CRD | {"cohort": 2}, {"cohort": 2, "calibration": "paper"}, CRD | {"calibration": "paper"},
        CRD | {"cohort": 2, "calibration": "paper"}, {"local_steps": 3}, {"clipping": "model"} | EPOCHS, MEDIAN,
        MEDIAN | {"cohort": 2}, MEDIAN | FALLING | {"local_steps": 2}, CRD | MEDIAN | FALLING, FALLING,
        MEDIAN | {"calibration": "paper"}, MEDIAN | {"calibration": "paper", "clipping": "model"} | EPOCHS,
        CRD | MEDIAN | {"calibration": "paper"}, CRD | FALLING | {"calibration": "paper"},
    ],
    "nbafl": [
        {"cohort": 2}, {"exposures": 2}, {"clipping": "model"}, {"local_steps": 3}, {"rounds": 9},
        {"cohort": 2, "calibration": "paper"}, {"exposures": 2, "calibration": "paper"},
        WEIGHED, WEIGHED | {"cohort": 2, "exposures": 2}, WEIGHED | {"rounds": 9, "calibration": "paper"},
        EPOCHS | {"clipping": "model"}, EPOCHS | {"calibration": "paper"}, {"lr_schedule": "inverse-sqrt"},
        {"lr_schedule": "step:2:0.5", "local_steps": 3}, WEIGHED | {"lr_schedule": "inverse:2.0"},
    ],
    "ali-dpfl": [FEW, {"curvature_from": "broadcast", "calibration": "paper"}, {"divisor": 16.0}],
    "fedsgd-dpc": [
        {"cohort": 2}, SAMPLED, LAPLACE, LAPLACE | {"cohort": 2}, {"norm": 1, "lr_schedule": "inverse:3.0"},
        LAPLACE | {"calibration": "paper"}, SAMPLED | {"cohort": 2, "calibration": "paper"},
        SAMPLED | {"calibration": "paper", "paper_constant": "accountant"},
        {"calibration": "paper", "paper_constant": 3.0},
    ],
    "dpsgd-fedavg": [
        {"cohort": 2, "local_steps": 2}, FEW, FEW | {"calibration": "paper"},
        {"divisor": 16.0, "proximal": 0.5, "local_steps": 2},
    ],
    "pe-dpfl": [{"cohort": 2}, {"local_steps": 2}],
    "adap-dpfl": [
        {"rounds": 9, "patience": 1}, {"threshold_from": "cohort", "rounds": 9, "patience": 1}, {"lr_of": "threshold"},
    ],
    "lei": [
        {"rounds": 8}, {"rounds": 8, "cohort": 2}, MEDIAN, {"rounds": 9} | FALLING, {"clipping": "model"},
        MEDIAN | {"calibration": "paper", "clipping": "model", "cohort": 2, "rounds": 9} | EPOCHS,
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A system with options, in a form that can be a key."""

    name: str
    options: tuple[tuple[str, Any], ...]

    @property
    def system(self) -> System[Any]:
        kind, own = SYSTEMS[self.name], dict(self.options)
        budget = {"epsilon": EPSILON, "delta": DELTA} if issubclass(kind, PrivateSystem) else {}
        return kind(**{"rounds": ROUNDS} | BASE.get(self.name, {}) | budget | own)

    @property
    def promise(self) -> Promise:
        promise = self.system.promise(SIZES)
        assert promise is not None
        return promise

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.options)])


def calibrations(kind: type[System[Any]]) -> tuple[str, ...]:
    return get_args(get_type_hints(kind)["calibration"]) if issubclass(kind, PrivateSystem) else ()


def all_cases() -> Iterator[Case]:
    for name, kind in SYSTEMS.items():
        plain = [{"calibration": one} for one in calibrations(kind)] or [{}]
        for options in [*plain, FALLING, *VARIANTS.get(name, [])]:
            yield Case(name, tuple(sorted(options.items())))


CASES = list(all_cases())
PRIVATE = [case for case in CASES if isinstance(case.system, PrivateSystem)]
TIGHT = [case for case in PRIVATE if case.promise.calibration == "tight"]
PAPER = [case for case in PRIVATE if case.promise.calibration == "paper"]
COUNTED = [case for case in TIGHT if dict(case.options).get("clip") == "median" and not case.system.until_spent]
PLAIN = [case for case in CASES if dict(case.options).keys() <= {"calibration"}]  # each system as it comes
over = each


def test_the_variants_are_of_systems_that_exist() -> None:
    assert VARIANTS.keys() <= SYSTEMS.keys()
    assert {case.name for case in TIGHT} == {name for name, kind in SYSTEMS.items() if issubclass(kind, PrivateSystem)}
    assert {case.name for case in PAPER} == {name for name, kind in SYSTEMS.items() if "paper" in calibrations(kind)}


@pytest.fixture(scope="module", autouse=True)
def _prices_are_found_once() -> Iterator[None]:
    """Remember what loss distributions cost: many trainings here spend alike, and each price takes half a second."""
    known: dict[Any, float] = {}
    tight, most_steps = accounting.tight, cache(accounting.most_steps)

    def remembered(spent: Mapping[Mechanism, int], delta: float) -> float:
        key = (frozenset(spent.items()), delta)
        if key not in known:
            known[key] = tight(spent, delta)
        return known[key]

    with (
        mock.patch.object(accounting, "tight", remembered),
        mock.patch.object(dpsgd, "most_steps", most_steps),
        mock.patch.object(paper_formulas, "most_steps", most_steps),
    ):
        yield


# The clients that look on.


@dataclass
class Seen:
    """What really happened in one training, noted where it happened."""

    federation: Federation
    performed: list[dict[int, Order]] = field(default_factory=list)  # by round
    asked: set[str] = field(default_factory=set)
    weights: list[dict[int, float]] = field(default_factory=list)  # as the aggregation applied them
    downlink: list[float] = field(default_factory=list)
    charges: int = 0  # on disk so far
    last_round: int = 0
    booked: list[tuple[int, int, float]] = field(default_factory=list)  # round, client, weight, by the books
    sent: list[tuple[int, float]] = field(default_factory=list)  # round and the server's noise, by the books
    model: Tensor | None = None


def stacked(kind: type[StackedClients]) -> MakeClients:
    """Return what makes clients of this kind, whose layers are known."""

    def make(model: Model, records: tuple[Records, ...], streams: Streams) -> StackedClients:
        return kind(model, records, streams, capabilities=capabilities_of(model, federation().validation))

    return make


def spy(seen: Seen, path: Path, promise: Promise | None) -> type[StackedClients]:
    """Make clients that read the ledger's file before they compute anything."""

    class Spy(StackedClients):
        def perform(self, request: Request) -> Uploads:
            charged, round = request.charged, request.round
            with closing(Books(path, create=False)) as books:
                fresh = books.charges_of_others(NOBODY, seen.charges)
                seen.charges = books.last_charge()
            assert [client for _, client, _ in fresh] == list(charged)
            for (_, client, release), paid in zip(fresh, charged.values(), strict=True):
                assert paid.records == SIZES[client] == len(self.records[client])
                assert Order.from_json(paid.order.to_json()) == paid.order
                if promise is None:
                    assert release is None
                    assert paid.order.noise is None
                else:
                    assert_alike(release, lets_out(paid.order, SIZES[client], promise))
            assert round > seen.last_round  # or noise would be drawn from one stream twice
            seen.last_round = round
            seen.performed.append({client: paid.order for client, paid in charged.items()})
            seen.weights.append({})
            seen.downlink.append(0.0)
            return super().perform(request)

        def answer(self, questions: Any, before: Tensor, uploads: Any, after: Tensor) -> Any:
            seen.asked |= set(questions)
            return super().answer(questions, before, uploads, after)

    return Spy


def lets_out(order: Order, records: int, promise: Promise) -> Release:
    """Price an order by hand: noise over sensitivity, amplified only where Poisson batches earn it."""
    noise, batch = order.noise, order.batch
    assert noise is not None
    gaussian = isinstance(noise, Gaussian)
    bound = sensitivity(
        order, records=records, unit=promise.unit, neighbours=promise.neighbours, norm=2 if gaussian else 1
    )
    size = noise.std if isinstance(noise, Gaussian) else noise.scale
    multiplier = size / bound
    if order.count_noise is not None:  # one Gaussian of both
        moved = (1.0 if promise.neighbours == "replace" else 0.5) * (records if promise.unit == "client" else 1)
        multiplier = (multiplier**-2 + (moved / order.count_noise.std) ** 2) ** -0.5
    sampled = isinstance(batch, Poisson) and (promise.unit, promise.neighbours) == ("record", "add-remove")
    amplified = sampled and (order.noise_on == "step" or order.steps == 1)
    rate = batch.sampling_rate if amplified and isinstance(batch, Poisson) else 1.0
    count = order.steps if order.noise_on == "step" else 1
    return Release(Mechanism("gaussian" if gaussian else "laplace", multiplier, rate), count)


def assert_alike(booked: Release | None, expected: Release) -> None:
    assert booked is not None
    one, other = booked.mechanism, expected.mechanism
    assert (one.noise, one.sampling_rate, booked.count) == (other.noise, other.sampling_rate, expected.count)
    assert one.multiplier == pytest.approx(other.multiplier, rel=3e-9)
    assert one.multiplier <= other.multiplier * (1 + 1e-12)  # rounded to the dear side, if at all


@cache
def federation(validation_share: float = 0.1) -> Federation:
    """Three clouds of points that are easy to tell apart, shared out unequally."""
    rng = np.random.default_rng(0)
    labels = np.arange(160) % 3
    points = (rng.normal(size=(160, 4)) + 3 * np.eye(4)[labels]).astype(np.float32)
    return dpfl.federate((points, labels), clients=3, sizes=SIZES, validation_share=validation_share, seed=1)


def module() -> nn.Module:
    """Begin with the same parameters whatever the seed of the run, so that seeds differ in what they draw alone."""
    linear = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.zero_()
    return linear


def train(
    system: System[Any],
    *,
    seed: int = 1,
    grants: tuple[Grant, ...] = (),
    on_round: Callable[[dict[str, Any], Path], None] | None = None,
) -> tuple[dpfl.Run, Seen]:
    """Train with clients that look on; an assertion of theirs ends the training."""
    seen, promise = Seen(federation()), system.promise(SIZES)

    def aggregate(model: Tensor, uploads: Any, weights: Mapping[int, float]) -> Tensor:
        if seen.weights:  # before, a rehearsal found out what would be allowed
            seen.weights[-1] = dict(weights)
        return right_aggregate(model, uploads, weights)

    def add_noise(value: Tensor, law: Any, size: float, source: Any, *, relative_size: float) -> Tensor:
        if seen.downlink:
            seen.downlink[-1] = size
        return right_noise(value, law, size, source, relative_size=relative_size)

    with TemporaryDirectory(dir=MEMORY) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", Caution)  # papers' formulas at budgets where they do not hold are meant here
        path = Path(folder, "ledger.sqlite")
        with closing(Books(path)) as books:
            for grant in grants:
                books.grant(grant)
        with (
            mock.patch.object(round_module, "aggregate", aggregate),
            mock.patch.object(round_module, "add_noise", add_noise),
        ):
            run = dpfl.train(
                system, federation(), module(), loss=functional.cross_entropy, ledger=path,
                seed=None if grants else seed,  # what limits real people's losses takes no simulation
                clients=stacked(spy(seen, path, promise)),
                on_round=None if on_round is None else lambda metrics: on_round(metrics, path),
            )  # fmt: skip
        with closing(sqlite3.connect(path)) as file:
            query = "SELECT round, client, weight FROM aggregates JOIN charges ON id = charge ORDER BY round, client"
            seen.booked = file.execute(query).fetchall()
            seen.sent = file.execute("SELECT round, noise_std FROM broadcasts ORDER BY round").fetchall()
    seen.model = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
    return run, seen


right_aggregate, right_noise = round_module.aggregate, round_module.add_noise  # type: ignore[attr-defined]


@cache
def trained(case: Case, seed: int = 1) -> tuple[dpfl.Run, Seen]:
    return train(case.system, seed=seed)


@over("name", SYSTEMS)
def test_learning_rates_fall_as_the_schedule_says(name: str) -> None:
    _, seen = trained(Case(name, tuple(FALLING.items())))
    steps = [orders[min(orders)].learning_rates for orders in seen.performed]
    if name == "dp-fedavg":  # whose theory counts local steps
        steps = [(rate,) for rates in steps for rate in rates]
    first = steps[0][0]
    assert len(steps) > 1
    for t, rates in enumerate(steps, start=1):
        assert rates == pytest.approx((first / t**0.5,) * len(rates))


# 1. Private.


def price(case: Case, seen: Seen, observer: str) -> list[float]:
    """Price what clients really performed, for one observer, without asking the books."""
    promise = case.promise
    found = []
    for client, budget in enumerate(promise.budgets):
        if observer != "server":
            heard = (promise.exposures or 0) if observer == "uplink" else 0
            found.append(price_of_models(case, seen, client, heard))
            continue
        spent: Counter[Mechanism] = Counter()
        for orders in seen.performed:
            if client in orders:
                release = lets_out(orders[client], SIZES[client], promise)
                spent[release.mechanism] += release.count
        found.append(accounting.tight(spent, budget.delta))
    return found


def price_of_models(case: Case, seen: Seen, client: int, heard: int) -> float:
    """Price the broadcast models, p_i·Δ_i under the noise of the whole cohort and the server's; or a few uploads."""
    promise, told, more = case.promise, [], []
    for orders, weights, downlink in zip(seen.performed, seen.weights, seen.downlink, strict=True):
        if client in orders:
            assert all(order.noise_on == "upload" for order in orders.values())
            variance = sum((weights[one] * orders[one].noise.std) ** 2 for one in orders) + downlink**2  # type: ignore[misc]
            bound = sensitivity(
                orders[client], records=SIZES[client], unit=promise.unit, neighbours=promise.neighbours, norm=2
            )
            told.append((weights[client] * bound) ** 2 / variance)
            more.append((bound / orders[client].noise.std) ** 2 - told[-1])
    mu_squared = sum(told) + sum(sorted(more, reverse=True)[:heard])
    return float(epsilon_of(mu_squared**0.5, promise.budgets[client].delta))


@over("case", TIGHT, ids=str)
def test_a_tight_promise_is_true_for_every_client_and_observer(case: Case) -> None:
    run, seen = trained(case)
    certificate, promise = run.certificate, case.promise
    assert certificate.uncounted == ()
    assert seen.asked == set()
    assert certificate.against == promise.against
    assert len({(line.claimed_epsilon, line.delta) for line in certificate.spending}) == len(SIZES)
    for observer in promise.against:
        assert certificate.observers[observer].slack >= -1e-9 * max(EPSILON)
        really = price(case, seen, observer)
        for line, granted, true in zip(certificate.spending, promise.budgets, really, strict=True):
            assert (line.claimed_epsilon, line.delta) == (granted.epsilon, granted.delta)
            shown = getattr(line, f"{observer}_epsilon")
            assert shown <= granted.epsilon * PROMISED
            assert true <= shown * (1 + 2e-6)  # readers' noise is booked with six digits, to the dear side


@over("case", [case for case in TIGHT if case.promise.noise == "fixed"], ids=str)
def test_the_certificate_of_fixed_noise_shows_what_was_performed(case: Case) -> None:
    run, seen = trained(case)
    for observer in case.promise.against:
        shown = [getattr(line, f"{observer}_epsilon") for line in run.certificate.spending]
        really = price(case, seen, observer)
        if run.certificate.allowed_more:  # a controller, or the budget, decided when it was over
            assert case.name in ("ali-dpfl", "lei", "dpsgd-fedavg")
            assert all(true <= most * (1 + 1e-9) for true, most in zip(really, shown, strict=True))
        else:
            assert shown == pytest.approx(really, rel=1e-5)


# Noise that is chosen for the rounds should spend the budget: a promise kept by far too much noise is no feat.
PLANNED = [case for case in TIGHT if "noise_multiplier" not in dict(case.options)]


@over("case", [case for case in PLANNED if case.name not in ("ali-dpfl", "lei", "adap-dpfl")], ids=str)
def test_planned_noise_spends_each_budget_that_is_used(case: Case) -> None:
    run, seen = trained(case)
    observer = case.promise.against[0]
    for line, true in zip(run.certificate.spending, price(case, seen, observer), strict=True):
        if line.replies and dict(case.options).get("discount") is None:
            assert 0.999 * line.claimed_epsilon <= true
        elif line.replies:  # CRD may end before the last share is spent
            assert 0.2 * line.claimed_epsilon <= true


@over("case", PAPER, ids=str)
def test_a_papers_certificate_shows_the_claim_and_the_truth(case: Case) -> None:
    run, seen = trained(case)
    certificate, promise = run.certificate, case.promise
    assert certificate.calibration == "paper"
    worst = max(promise.budgets, key=lambda budget: budget.epsilon)
    assert certificate.claimed == {"epsilon": worst.epsilon, "delta": worst.delta}
    for observer in promise.against:
        shown = [getattr(line, f"{observer}_epsilon") for line in certificate.spending]
        really = price(case, seen, observer)
        if certificate.allowed_more:  # a controller ended it sooner
            assert dict(case.options).get("discount") or case.name == "ali-dpfl"
            assert all(true <= most * (1 + 1e-5) for true, most in zip(really, shown, strict=True))
        else:
            assert shown == pytest.approx(really, rel=1e-5)
        summary = certificate.observers[observer]
        assert (summary.epsilon, summary.basis) == (max(shown), "proved")
        assert (summary.claimed_basis is None) == (promise.claimed_sensitivity == 1)
        if summary.claimed_basis is not None:
            assert summary.claimed_epsilon < summary.epsilon  # the papers' sensitivities are too small, never too large


def test_nbafls_published_noise_is_far_from_its_claim_and_the_certificate_says_so() -> None:
    run, _ = trained(Case("nbafl", (("calibration", "paper"),)))
    assert all(line.uplink_epsilon > 10 * line.claimed_epsilon for line in run.certificate.spending)
    assert run.certificate.observers["uplink"].slack < 0


def test_dp_fedavgs_papers_laplace_noise_is_worth_twice_its_claim() -> None:
    run, _ = trained(Case("dp-fedavg", tuple(sorted((LAPLACE | {"cohort": 2, "calibration": "paper"}).items()))))
    mean_replies = 2 * ROUNDS / len(SIZES)  # by which the paper counts
    for line in run.certificate.spending:
        assert line.server_epsilon == pytest.approx(2 * line.claimed_epsilon * line.replies / mean_replies)
    server = run.certificate.observers["server"]
    assert server.claimed_epsilon == pytest.approx(server.epsilon / 2)


def left_out(case: Case) -> set[str]:
    """Return what a system asks of clients without noise, by its options; in paper calibration only."""
    options = dict(case.options)
    if case.promise.calibration != "paper":
        return set()
    if case.name == "ali-dpfl":
        return {"curvature" if options.get("curvature_from") == "broadcast" else "curvature from the sum"}
    by_option = {"udp": {"discount": "loss", "clip": "length"}, "lei": {"clip": "length"}}.get(case.name, {})
    return {question for option, question in by_option.items() if option in options}


@over("case", CASES, ids=str)
def test_what_is_asked_without_noise_is_named_and_nothing_else(case: Case) -> None:
    run, seen = trained(case)
    if not isinstance(case.system, PrivateSystem):
        assert seen.asked == set()
        return
    assert set(run.certificate.uncounted) == {UNPAID[question] for question in seen.asked}  # type: ignore[index]
    assert seen.asked == left_out(case)


# Deliberately wrong systems: what stands above must be able to fail, and the ledger must not believe a system.


def twin(system: System[Any], **methods: Any) -> System[Any]:
    """Return the same system with some methods replaced."""
    kind = type(system)
    wrong = copy.copy(system)
    object.__setattr__(wrong, "__class__", type(f"Wrong{kind.__name__}", (kind,), methods))
    return wrong


def ordering(system: System[Any], change: Callable[[Order], Order]) -> System[Any]:
    right = type(system).orders
    return twin(system, orders=lambda self, state: {client: change(one) for client, one in right(self, state).items()})


def half_the_noise(order: Order) -> Order:
    noise = order.noise
    assert noise is not None
    return replace(order, noise=Gaussian(noise.std / 2) if isinstance(noise, Gaussian) else Laplace(noise.scale / 2))


def half_the_count_noise(order: Order) -> Order:
    assert order.count_noise is not None
    return replace(order, count_noise=Gaussian(order.count_noise.std / 2))


def twice_the_clip(order: Order) -> Order:
    clip = order.clip
    assert clip is not None
    return replace(order, clip=type(clip)(2 * clip.clip_norm, clip.norm))


@over(
    ("case", "change"),
    [(case, half_the_noise) for case in TIGHT]
    + [(case, twice_the_clip) for case in TIGHT if case in PLAIN]
    + [(case, half_the_count_noise) for case in COUNTED],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_orders_with_too_little_noise_are_refused(case: Case, change: Callable[[Order], Order]) -> None:
    wrong = ordering(case.system, change)
    if not (wrong.until_spent or (case.name == "ali-dpfl" and dict(case.options) != FEW)):
        with pytest.raises((BudgetRefused, BadInput)):
            train(wrong)
        return
    # A system that goes on until the ledger says no is stopped earlier, or goes on with fewer; ALI's few steps here
    # leave room for more.
    right, _ = trained(case)
    try:
        run, _ = train(wrong)
    except BudgetRefused:
        return
    refused = any(metrics["refused"] for metrics in run.history)
    assert run.rounds < right.rounds or refused or not wrong.until_spent
    for line in run.certificate.spending:
        assert line.server_epsilon <= line.claimed_epsilon * PROMISED


@over("change", [lambda order: replace(order, noise=None), lambda order: replace(order, clip=None)])
@over("name", [name for name, kind in SYSTEMS.items() if issubclass(kind, PrivateSystem)])
def test_orders_without_noise_or_clip_are_refused_in_every_calibration(name: str, change: Any) -> None:
    for calibration in calibrations(SYSTEMS[name]):
        with pytest.raises(BadInput, match="privacy is promised"):
            train(ordering(Case(name, (("calibration", calibration),)).system, change))


@over("question", sorted(UNPAID))
@over("case", [case for case in PLAIN if case not in PAPER], ids=str)
def test_nobody_is_asked_anything_in_tight_calibration(case: Case, question: str) -> None:
    asking = twin(case.system, needs=property(lambda self: frozenset({question})))
    with pytest.raises(BadInput, match="uncounted"):
        train(asking)


def test_a_promise_that_does_not_name_its_question_is_refused() -> None:
    silent = twin(
        UDP(discount=0.7, calibration="paper", rounds=3, epsilon=EPSILON, delta=DELTA), uncounted=property(lambda _: ())
    )
    with pytest.raises(BadInput, match="did not name"):
        train(silent)


def test_a_model_that_would_tell_too_much_is_kept_back() -> None:
    # Who overhears one upload and reads the models is promised 2: with less noise the last models are not sent out.
    system = Case("nbafl", (("calibration", "tight"), ("rounds", 9))).system
    right, seen = train(system)
    assert max(seen.downlink) == 0
    assert -1e-9 <= right.certificate.observers["uplink"].slack < 1e-3
    with pytest.raises(BudgetRefused):
        train(ordering(system, lambda order: replace(order, noise=Gaussian(0.9 * order.noise.std))))


def test_a_papers_server_that_forgets_its_own_noise_is_found_out_by_the_certificate() -> None:
    # A paper's formula is recorded and not limited; the certificate must tell what readers see.
    system = Case("nbafl", (("calibration", "paper"), ("rounds", 9))).system
    right, seen = train(system)
    assert min(seen.downlink) > 0
    wrong, _ = train(twin(system, downlink=lambda self, state, answered: None))
    for observer in ("released", "uplink"):
        told, less = (run.certificate.observers[observer].epsilon for run in (wrong, right))
        assert told is not None
        assert less is not None
        assert told > 1.1 * less


@over("change", [{"rounds": 9}, {"rounds": 9, "cohort": 2}], ids=str)
def test_who_would_show_too_much_by_its_weight_is_refused(change: dict[str, Any]) -> None:
    # Noise that counts on equal weights, under weights by records: whoever weighs most spends its budget too soon.
    system = NbAFL(epsilon=EPSILON, delta=DELTA, **change)
    by_records = replace(system, weighing="records")
    wrong, _ = train(twin(system, _shares=lambda self, state: NbAFL._shares(by_records, state)))
    right, _ = train(by_records)
    assert not any(metrics["refused"] for metrics in right.history)
    assert any(metrics["refused"] for metrics in wrong.history)
    assert all(line.uplink_epsilon <= line.claimed_epsilon * PROMISED for line in wrong.certificate.spending)


def test_a_papers_certificate_counts_the_weights_that_were_applied() -> None:
    # Theorem 1's noise for equal weights, under weights by records: whoever weighs most shows more in the models.
    system = NbAFL(epsilon=EPSILON, delta=DELTA, rounds=9, calibration="paper")
    by_records = replace(system, weighing="records")
    wrong, _ = train(twin(system, _shares=lambda self, state: NbAFL._shares(by_records, state)))
    right, _ = train(by_records)
    told, enough = (run.certificate.observers["released"].epsilon for run in (wrong, right))
    assert told is not None
    assert enough is not None
    assert told > 1.1 * enough


# 2. Charged before, and charged for what is performed. The clients above have compared every round.


@over("case", CASES, ids=str)
def test_every_round_was_on_disk_before_it_was_performed(case: Case) -> None:
    run, seen = trained(case)
    assert len(seen.performed) == run.rounds == run.certificate.rounds == len(run.history)
    performed = Counter(client for orders in seen.performed for client in orders)
    assert seen.charges == performed.total()
    assert {line.client: line.replies for line in run.certificate.spending if line.replies} == (
        performed if isinstance(case.system, PrivateSystem) else {}
    )


@over("case", CASES, ids=str)
def test_weights_and_server_noise_are_booked_as_they_were_applied(case: Case) -> None:
    _, seen = trained(case)
    assert seen.booked == [
        (round, client, weights[client])
        for round, weights in enumerate(seen.weights, start=1)
        for client in sorted(weights)
    ]
    assert seen.sent == list(enumerate(seen.downlink, start=1))
    for orders, weights in zip(seen.performed, seen.weights, strict=True):
        assert weights.keys() == orders.keys()
        assert all(weight > 0 for weight in weights.values())


@over(
    ("name", "options", "expected"),
    [
        ("udp", {}, lambda client, answered: SIZES[client] / sum(SIZES[one] for one in answered)),
        ("nbafl", {}, lambda client, answered: 1 / len(answered)),
        ("nbafl", WEIGHED, lambda client, answered: SIZES[client] / sum(SIZES[one] for one in answered)),
        ("dp-fedavg", {}, lambda client, answered: 3 / len(answered) * SIZES[client] / sum(SIZES)),
        ("fedsgd-dpc", {}, lambda client, answered: 3 / len(answered) * SIZES[client] / sum(SIZES)),
    ],
)
def test_cohorts_are_weighed_as_each_paper_says(
    name: str, options: dict[str, Any], expected: Callable[..., float]
) -> None:
    _, seen = trained(Case(name, tuple(sorted((options | {"cohort": 2}).items()))))
    for weights in seen.weights:
        assert len(weights) == 2
        assert weights == pytest.approx({client: expected(client, weights) for client in weights})


def test_leis_noise_falls_linearly_by_half_over_the_planned_rounds() -> None:
    _, seen = trained(Case("lei", (("rounds", 8),)))
    assert len(seen.performed) > 3
    for round, orders in enumerate(seen.performed):
        for client, order in orders.items():
            assert order.noise.std == pytest.approx((1 - 0.5 * round / 8) * seen.performed[0][client].noise.std)


@over("case", CASES, ids=str)
def test_the_log_tells_what_was_performed(case: Case) -> None:
    run, seen = trained(case)
    for metrics, orders in zip(run.history, seen.performed, strict=True):
        assert metrics["cohort"] == len(orders)
        assert metrics["local_steps"] == max((order.steps for order in orders.values()), default=0)
        stds = [order.noise.std for order in orders.values() if isinstance(order.noise, Gaussian)]
        assert metrics["noise_std"] == (pytest.approx(sum(stds) / len(stds)) if stds else None)


# 4. Clients that differ.


@over("case", CASES, ids=str)
def test_clients_of_every_size_and_budget_take_part(case: Case) -> None:
    run, seen = trained(case)
    system, options = case.system, dict(case.options)
    assert seen.federation.sizes == SIZES
    rule = system.cohorts(len(SIZES))
    assert (rule == Everyone(3)) == ("cohort" not in options)
    performed = {client for orders in seen.performed for client in orders}
    assert performed == {0, 1, 2} or "discount" in options  # which may end before everybody was drawn
    if "cohort" in options and options.get("scheduling") != "poisson":
        assert {len(orders) for orders in seen.performed} == {options["cohort"]}
    if not (system.until_spent or "noise_multiplier" in options):
        assert [metrics["refused"] for metrics in run.history] == [[]] * run.rounds
        assert run.rounds == system.rounds or "discount" in options
    noises = {client: orders[client].noise for orders in seen.performed for client in orders}
    if isinstance(system, PrivateSystem) and "noise_multiplier" not in options and case.name != "ali-dpfl":
        assert len(set(noises.values())) == len(noises)  # each its own


def grant(promise: Promise, epsilon: float, client: int | None = None) -> Grant:
    sampled = promise.neighbours == "add-remove"
    delta = 0.0 if all(budget.delta == 0 for budget in promise.budgets) else 1e-2
    return Grant(client, Budget(epsilon, delta), promise.unit, promise.neighbours, "renyi" if sampled else "plain")


# One client's owner changes his mind after the second of several rounds.
LAST = 2
LIMITED = [
    case
    for case in TIGHT
    if case in PLAIN or dict(case.options) in (CRD, LAPLACE, SAMPLED, {"clipping": "model"}, {"rounds": 9})
]


def limited(system: System[Any], victim: int) -> tuple[dpfl.Run, Seen]:
    promise = system.promise(SIZES)
    assert promise is not None

    def withdraw(metrics: dict[str, Any], path: Path) -> None:
        if metrics["round"] == LAST:
            with closing(Books(path, create=False)) as books:
                books.grant(grant(promise, 1e-9, victim))

    return train(system, grants=(grant(promise, 1000.0),), on_round=withdraw)


@cache
def limited_case(case: Case) -> tuple[dpfl.Run, Seen]:
    return limited(replace(case.system, rounds=max(6, case.system.rounds)), victim=1)


@over("case", LIMITED, ids=str)
def test_a_client_whose_grant_is_gone_stops_and_the_others_go_on(case: Case) -> None:
    run, seen = limited_case(case)
    assert run.rounds > LAST
    assert [1 in metrics["refused"] for metrics in run.history] == [False] * LAST + [True] * (run.rounds - LAST)
    assert run.certificate.spending[1].replies == LAST
    for orders, weights in zip(seen.performed[LAST:], seen.weights[LAST:], strict=True):
        assert set(orders) == set(weights) <= {0, 2}
    if not (case.system.until_spent or case.name == "ali-dpfl"):  # whose noise is given, not chosen for the rounds
        assert run.rounds == max(6, case.system.rounds) or "discount" in dict(case.options)
        assert [line.replies for line in run.certificate.spending] == [run.rounds, LAST, run.rounds]


@over("case", LIMITED, ids=str)
def test_the_others_keep_their_promise_when_a_client_stops(case: Case) -> None:
    # Readers of the models see the others under less noise than was planned, and with more weight.
    run, _ = limited_case(case)
    for observer in case.promise.against:
        for line in run.certificate.spending:
            assert getattr(line, f"{observer}_epsilon") <= line.claimed_epsilon * PROMISED


@over(
    "system",
    [
        SYSTEMS["ali-dpfl"](**FEW, epsilon=(0.9, 2.5, 7.0), delta=1e-3),  # type: ignore[call-arg]
        SYSTEMS["dpsgd-fedavg"](**FEW, epsilon=(0.9, 2.5, 7.0), delta=1e-3),  # type: ignore[call-arg]
        SYSTEMS["dpsgd-fedavg"](**FEW, epsilon=(0.9, 2.5, 7.0), delta=1e-3, calibration="paper"),  # type: ignore[call-arg]
    ],
    ids=lambda system: f"{system.name}-{system.calibration}",
)
def test_a_client_that_cannot_pay_for_the_given_noise_is_not_asked(system: System[Any]) -> None:
    run, seen = train(system)
    replies = [line.replies for line in run.certificate.spending]
    assert replies[0] == 0  # not even one step fits
    assert 0 < replies[1] < replies[2] == run.rounds
    assert [set(orders) for orders in seen.performed] == [{1, 2}] * replies[1] + [{2}] * (replies[2] - replies[1])
    assert run.certificate.spending[0].server_epsilon <= run.certificate.spending[0].claimed_epsilon


# A round in which nobody can pay is no reason to end a training that others could go on with.


@over(
    "system",
    [
        UDP(rounds=6, cohort=1, scheduling="round-robin", epsilon=EPSILON, delta=DELTA),
        SYSTEMS["fedsgd-dpc"](rounds=6, cohort=1, epsilon=EPSILON, delta=DELTA),  # type: ignore[call-arg]
        SYSTEMS["dp-fedavg"](rounds=6, cohort=1, epsilon=EPSILON, delta=DELTA),  # type: ignore[call-arg]
    ],
    ids=lambda system: system.name,
)
def test_clients_in_turn_go_on_when_it_was_the_turn_of_one_that_cannot_pay(system: System[Any]) -> None:
    run, _ = limited(system, victim=1)
    assert [line.replies for line in run.certificate.spending] == [2, 1, 2]


@over("options", [{}, EPOCHS | {"clipping": "model"}, FALLING, {"calibration": "paper"}], ids=str)
@over("cohort", [1, 2, None])
def test_leis_training_ends_with_the_last_whole_cohort(cohort: int | None, options: dict[str, Any]) -> None:
    system = SYSTEMS["lei"](rounds=12, cohort=cohort, epsilon=EPSILON, delta=DELTA, **options)  # type: ignore[call-arg]
    longer = twin(system, _last_round=lambda self, problem, planned: self.rounds)  # as if nobody looked ahead
    (run, seen), (other, others) = train(system), train(longer)
    assert 1 < run.rounds < 12
    assert [metrics["refused"] for metrics in run.history] == [[]] * run.rounds
    assert seen.performed == others.performed[: run.rounds]
    if "calibration" in options:  # a formula that no ledger limits
        assert other.rounds == 12
    elif cohort is None:  # all run out at once
        assert other.rounds == run.rounds
    else:
        assert other.history[run.rounds]["refused"]


# 5. Reproducible.


@over("case", CASES, ids=str)
def test_a_seed_repeats_a_training_bit_for_bit_and_another_does_not(case: Case) -> None:
    (run, seen), (again, repeated) = trained(case), train(case.system)
    assert torch.equal(seen.model, repeated.model)
    assert run.history == again.history
    assert seen.performed == repeated.performed
    assert run.certificate.spending == again.certificate.spending
    if case not in PLAIN:
        return
    _, other = train(case.system, seed=2)
    # Without privacy nothing is drawn here: all clients take part with all of their records.
    assert torch.equal(seen.model, other.model) != isinstance(case.system, PrivateSystem)


@over("case", [case for case in TIGHT if case in PLAIN], ids=str)
def test_two_clients_and_two_rounds_never_share_noise(case: Case) -> None:
    """Equal clients in equal rounds differ in nothing but the batch and the noise: their uploads must differ."""
    uploads: list[Tensor] = []
    sums: list[Tensor] = []  # of each round, where noise is drawn for all at once

    class Looked(StackedClients):
        def perform(self, request: Request) -> Uploads:
            origin = replace(request, broadcast=torch.zeros_like(request.broadcast))
            told = super().perform(replace(origin, separate=True))
            assert isinstance(told, Separate)
            uploads.extend(told.by_client.values())
            summed = super().perform(replace(origin, separate=False, weights=dict.fromkeys(request.charged, 1.0)))
            assert isinstance(summed, Summed)
            sums.append(summed.total)
            return told

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Caution)
        dpfl.train(case.system, federation(), module(), loss=functional.cross_entropy, seed=1, clients=stacked(Looked))
    for found in (uploads, sums):
        together = torch.stack([one / torch.linalg.vector_norm(one) for one in found])
        alike = together @ together.T - torch.eye(len(together))
        assert alike.abs().max() < 0.9999


def test_every_kind_of_clip_is_covered() -> None:
    found = {type(order.clip) for case in PRIVATE for order in trained(case)[1].performed[0].values()}
    assert found == {RecordClip, ClientClip, ModelClip}
