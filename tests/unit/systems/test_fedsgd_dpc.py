"""FedSGD-DPC: what its noise is worth, for how many answers it is counted, its variance and its refusals."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dpfl.errors import BadInput, BudgetRefused
from dpfl.federation import Everyone, RandomK, RoundRobin, Schedule
from dpfl.orders import GRID_SHARE, Full, Gaussian, Laplace, Order, Poisson, RecordClip
from dpfl.privacy.certificate import Certificate, certify
from dpfl.privacy.ledger import Ledger
from dpfl.streams import Streams
from dpfl.systems import FedSGDDPC, Feedback, Problem
from dpfl.systems.queried import QueriedState
from grids import each

SIZES = (30, 50, 80, 40, 100, 60)
N, ALL, DIM = len(SIZES), sum(SIZES), 7


def begin(system: FedSGDDPC, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> QueriedState:
    schedule = Schedule(system.cohorts(len(sizes)), Streams(seed).public)
    return system.begin(Problem(sizes, DIM, schedule), torch.zeros(DIM), Feedback())


def rounds_of(system: FedSGDDPC, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Iterator[tuple[QueriedState, dict]]:
    state = begin(system, sizes, seed)
    while state.round < state.rounds:
        yield state, system.orders(state)
        state = replace(state, round=state.round + 1)


def certified(system: FedSGDDPC, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Certificate:
    """Charge a whole training, in which nobody may be refused."""
    ledger = Ledger(system.promise(sizes), sizes, system=system.name)
    for state, orders in rounds_of(system, sizes, seed):
        assert sorted(ledger.charge(orders)) == sorted(orders)
        ledger.broadcast(system.weights(state, sorted(orders)))
    return certify(ledger.books, ledger.run)


def size_of(order: Order) -> float:
    return order.noise.scale if isinstance(order.noise, Laplace) else order.noise.std


# What the published noise is worth.


def test_the_papers_laplace_noise_keeps_its_promise_where_every_count_is_whole() -> None:
    epsilon = (0.1, 0.5, 1.0, 3.0, 8.0, 30.0)
    system = FedSGDDPC(mechanism="laplace", calibration="paper", rounds=9, cohort=2, epsilon=epsilon)  # K·R/N = 3
    certificate = certified(system)
    assert (certificate.unit, certificate.neighbours) == ("record", "replace")
    assert certificate.observers["server"].claimed_epsilon is None  # the paper's sensitivity is the proved one
    on_a_grid = [one * (1 + GRID_SHARE) for one in epsilon]
    assert [line.server_epsilon for line in certificate.spending] == pytest.approx(on_a_grid, rel=1e-12)


def test_the_papers_average_count_is_too_small_for_those_who_answer_more() -> None:
    # K·R/N = 2·5/6 = 1.67: four clients answer twice and two once.
    lines = certified(FedSGDDPC(mechanism="laplace", calibration="paper", rounds=5, cohort=2, epsilon=1.0)).spending
    assert [line.replies for line in lines] == [2, 2, 2, 2, 1, 1]
    assert [line.server_epsilon for line in lines] == pytest.approx([1.2] * 4 + [0.6] * 2)


def test_the_papers_gaussian_noise_on_all_records_by_gaussian_dp() -> None:
    # σ = √2·C·√(R_i·ln(1/δ))/(n·ε) where one record more or less moves the mean by C/n: μ² = ε²/(2·ln(1/δ)), which is 1
    # at ε = 4 and δ = e^−8.
    system = FedSGDDPC(calibration="paper", rounds=9, cohort=2, epsilon=4.0, delta=math.exp(-8), clip=3.0)
    certificate = certified(system)
    spent = certificate.observers["server"].epsilon
    cdf = [math.erfc(-x / math.sqrt(2)) / 2 for x in (-spent + 0.5, -spent - 0.5)]
    assert cdf[0] - math.exp(spent) * cdf[1] == pytest.approx(math.exp(-8), rel=1e-6)
    assert (certificate.unit, certificate.neighbours) == ("record", "add-remove")


def test_samples_make_the_papers_gaussian_noise_worth_more() -> None:
    options = {"calibration": "paper", "rounds": 9, "cohort": 2, "epsilon": 1.0, "delta": 1e-5}
    noise = [next(rounds_of(FedSGDDPC(sampling_rate=q, **options)))[1][0].noise.std for q in (None, 0.1)]
    assert noise[1] == pytest.approx(0.1 * noise[0])  # of the sum over a tenth of the records
    spent = [certified(FedSGDDPC(sampling_rate=q, **options)).observers["server"].epsilon for q in (None, 0.1)]
    # σ = z·C of the sum with z = q·√(2·R_i·ln(1/δ))/ε: 8.31 for all records, 0.831 for a tenth of them.
    assert noise == pytest.approx([math.sqrt(2 * 3 * math.log(1e5)), 0.1 * math.sqrt(2 * 3 * math.log(1e5))])
    assert spent[0] < 1 < spent[1] < 5  # c₁q²T is below ε here, where the theorem says nothing


# The constant that the paper leaves open.

OPEN = {"calibration": "paper", "rounds": 9, "cohort": 2, "delta": 1e-5}  # K·R/N = 3


@each("rate", [None, 0.1])
def test_noise_is_in_proportion_to_the_open_constant(rate: float | None) -> None:
    noise = [
        next(rounds_of(FedSGDDPC(sampling_rate=rate, paper_constant=c2, epsilon=1.0, **OPEN)))[1][0].noise.std
        for c2 in (None, math.sqrt(2), 5.0)
    ]
    assert noise[0] == noise[1]
    assert noise[2] == pytest.approx(5 / math.sqrt(2) * noise[0])


@each("rate", [None, 0.01, 0.1])
@each("epsilon", [0.1, 1.0, 5.0])
def test_an_accountants_noise_keeps_the_promise_where_the_root_of_two_need_not(
    rate: float | None, epsilon: float
) -> None:
    system = FedSGDDPC(sampling_rate=rate, epsilon=epsilon, paper_constant="accountant", **OPEN)
    spent = certified(system).observers["server"].epsilon
    assert spent <= epsilon
    assert certified(replace(system, paper_constant=0.5)).observers["server"].epsilon > epsilon  # the wrong twin
    if rate == 0.01 and epsilon >= 1:
        assert certified(replace(system, paper_constant=None)).observers["server"].epsilon > 5 * epsilon


def test_an_accountant_counts_the_papers_replies_and_not_those_given() -> None:
    # K·R/N = 2·5/6 = 1.67, and four clients answer twice: the noise is the paper's, the price is the truth.
    system = FedSGDDPC(epsilon=1.0, paper_constant="accountant", **OPEN | {"rounds": 5})
    z = begin_noise(system) / system.clip
    order = min(range(2, 257), key=lambda a: a * 5 / 3 / (2 * z**2) + math.log(1e5) / (a - 1))
    assert order * 5 / 3 / (2 * z**2) + math.log(1e5) / (order - 1) == pytest.approx(1.0, rel=1e-4)


def begin_noise(system: FedSGDDPC) -> float:
    return next(rounds_of(system))[1][0].noise.std


def test_budgets_of_their_own_have_noise_of_their_own_from_an_accountant() -> None:
    epsilon = (0.1, 0.5, 1.0, 3.0, 8.0, 30.0)
    system = FedSGDDPC(epsilon=epsilon, sampling_rate=0.1, paper_constant="accountant", **OPEN)
    for line, granted in zip(certified(system).spending, epsilon, strict=True):
        assert 0.3 * granted <= line.server_epsilon <= granted


def test_the_certificate_says_whose_constant_it_was() -> None:
    for c2, said in ((None, "dpfl's own √2"), (3.0, "was 3: another choice")):
        (caution,) = certified(FedSGDDPC(epsilon=1.0, paper_constant=c2, **OPEN)).cautions
        assert caution.startswith("paper_constant should come from the paper")
        assert said in caution
    assert certified(FedSGDDPC(epsilon=1.0, paper_constant="accountant", **OPEN)).cautions == ()
    assert certified(FedSGDDPC(mechanism="laplace", calibration="paper", rounds=9, epsilon=1.0)).cautions == ()


# What exact noise is worth.


@each("mechanism", ["laplace", "gaussian"])
@each("cohort", [None, 2, 4])
def test_exact_noise_spends_each_budget_and_no_more(mechanism: str, cohort: int | None) -> None:
    epsilon = (0.1, 0.5, 1.0, 3.0, 8.0, 30.0)
    delta = None if mechanism == "laplace" else (1e-3, 1e-5, 1e-2, 1e-3, 1e-8, 1e-1)
    system = FedSGDDPC(
        mechanism=mechanism, rounds=7, cohort=cohort, epsilon=epsilon, delta=delta, lr_schedule="inverse:3.0"
    )
    for line, granted in zip(certified(system).spending, epsilon, strict=True):
        assert granted * (1 - 1e-6) <= line.server_epsilon <= granted * (1 + 1e-12)


def test_exact_noise_on_samples_spends_the_budget_and_no_more() -> None:
    # Round robin over 6 clients, 2 a round, 7 rounds: two answer three times and four twice, each with its own noise.
    system = FedSGDDPC(rounds=7, cohort=2, epsilon=1.0, delta=1e-4, sampling_rate=0.2)
    certificate = certified(system)
    assert [line.replies for line in certificate.spending] == [3, 3, 2, 2, 2, 2]
    for line in certificate.spending:
        assert 0.999 <= line.server_epsilon <= 1.0
    plain = begin(replace(system, sampling_rate=None)).noise_multipliers
    sampled = begin(system).noise_multipliers
    assert all(0.2 * z < amplified < 0.6 * z for z, amplified in zip(plain, sampled, strict=True))


def test_samples_of_all_records_are_all_records() -> None:
    noise = [begin(FedSGDDPC(rounds=7, sampling_rate=q)).noise_multipliers for q in (None, 1.0)]
    assert noise[0] == noise[1]


@each(("mechanism", "sampling_rate"), [("laplace", None), ("gaussian", None), ("gaussian", 0.2)])
def test_one_round_more_than_planned_is_refused(mechanism: str, sampling_rate: float | None) -> None:
    system = FedSGDDPC(mechanism=mechanism, sampling_rate=sampling_rate, rounds=3, epsilon=1.0)
    ledger = Ledger(system.promise(SIZES), SIZES)
    for _, orders in rounds_of(system):
        ledger.charge(orders)
    with pytest.raises(BudgetRefused):
        ledger.charge(system.orders(begin(system)))


@each("scheduling", ["random", "poisson", "round-robin"])
def test_whatever_the_schedule_nobody_is_refused(scheduling: str) -> None:
    for seed in range(3):
        certificate = certified(FedSGDDPC(rounds=8, cohort=2, scheduling=scheduling, epsilon=2.0), seed=seed)
        for line in certificate.spending:
            assert line.server_epsilon == pytest.approx(2.0 if line.replies else 0.0, rel=1e-6)


# The orders.


@each(("mechanism", "norm", "sampling_rate"), [("laplace", 1, None), ("gaussian", 2, None), ("gaussian", 2, 0.25)])
def test_an_order_is_one_step_on_clipped_record_gradients(
    mechanism: str, norm: int, sampling_rate: float | None
) -> None:
    system = FedSGDDPC(
        mechanism=mechanism, sampling_rate=sampling_rate, calibration="paper", lr=0.5, clip=3.0, epsilon=1.0
    )
    for order in system.orders(begin(system)).values():
        assert (order.steps, order.learning_rates, order.noise_on, order.proximal) == (1, (0.5,), "step", 0.0)
        assert order.batch == (Full() if sampling_rate is None else Poisson(0.25))
        assert order.clip == RecordClip(3.0, norm)
        assert isinstance(order.noise, Laplace if mechanism == "laplace" else Gaussian)


def test_rounds_are_the_steps_of_the_schedule() -> None:
    theory = FedSGDDPC(rounds=3, strong_convexity=0.5, smoothness=1.0, epsilon=1.0)  # γ = 2λ/μ = 4
    own = FedSGDDPC(rounds=3, lr=0.9, lr_schedule="inverse:4.0", epsilon=1.0)
    for system, first in ((theory, 2 / (0.5 * 4)), (own, 0.9)):
        rates = [orders[0].learning_rates for _, orders in rounds_of(system)]
        assert rates == [pytest.approx((first * 4 / (t + 4),)) for t in range(3)]


def test_weights_are_those_of_the_paper() -> None:
    system = FedSGDDPC(cohort=2)
    assert system.weights(begin(system), [0, 4]) == pytest.approx({0: 3 * 30 / 360, 4: 3 * 100 / 360})


def test_clients_are_asked_in_turn_unless_it_is_said_otherwise() -> None:
    assert FedSGDDPC().cohorts(6) == Everyone(6)
    assert FedSGDDPC(cohort=2).cohorts(6) == RoundRobin(6, 2)
    assert FedSGDDPC(cohort=2, scheduling="random").cohorts(6) == RandomK(6, 2)


def test_the_promise_is_for_one_record() -> None:
    for mechanism, neighbours in (("laplace", "replace"), ("gaussian", "add-remove")):
        promise = FedSGDDPC(mechanism=mechanism, epsilon=2.0).promise(SIZES)
        assert (promise.unit, promise.neighbours, promise.calibration) == ("record", neighbours, "tight")
        assert (promise.noise, promise.against, promise.claimed_sensitivity) == ("fixed", ("server",), 1.0)
        assert (promise.uncounted, promise.cautions) == ((), ())


# The variance of the averaged noise, from orders and weights.


@each("cohort", [1, 2, 3, 6])
@each("rounds", [6, 12])  # whole cycles of round robin
@each("sampling_rate", [None, 0.1])
def test_variance_of_the_published_noise(rounds: int, cohort: int, sampling_rate: float | None) -> None:
    epsilon, delta = (1.0, 2.0, 0.5, 4.0, 1.0, 3.0), (1e-4, 1e-3, 1e-5, 1e-2, 1e-4, 1e-6)
    rate, clip = 0.3, 1.5
    options = {"calibration": "paper", "rounds": rounds, "cohort": cohort, "lr": rate, "clip": clip, "epsilon": epsilon}
    share = 8 * rate**2 * DIM * cohort * rounds**2 * clip**2 / (N * ALL**2)
    laplace = share * math.fsum(1 / e**2 for e in epsilon)
    logs = math.fsum(math.log(1 / d) / e**2 for e, d in zip(epsilon, delta, strict=True))
    gaussian = 2 * rate**2 * DIM * rounds * clip**2 / ALL**2 * logs  # c₂² = 2
    cases = [(FedSGDDPC(delta=delta, sampling_rate=sampling_rate, **options), 1, gaussian)]
    if sampling_rate is None:
        cases.append((FedSGDDPC(mechanism="laplace", **options), 2, laplace))
    for system, factor, expected in cases:
        variance = 0.0
        for state, orders in rounds_of(system):
            weights = system.weights(state, sorted(orders))
            for client, order in orders.items():
                divisor = (sampling_rate or 1.0) * SIZES[client]  # noise is on the sum
                variance += DIM * factor * (weights[client] * rate * size_of(order) / divisor) ** 2 / rounds
        assert variance == pytest.approx(expected)


# Refusals.


@each(
    ("options", "field"),
    [
        ({"rounds": 0}, "rounds"),
        ({"rounds": 2.5}, "rounds"),
        ({"cohort": 0}, "cohort"),
        ({"clip": -1.0}, "clip"),
        ({"clip": math.inf}, "clip"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": (1.0, math.nan)}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.5}, "delta"),
        ({"mechanism": "laplace", "delta": -0.1}, "delta"),
        ({"mechanism": "cauchy"}, "mechanism"),
        ({"norm": 3}, "norm"),
        ({"mechanism": "laplace", "norm": 2}, "norm"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"sampling_rate": -0.1}, "sampling_rate"),
        ({"sampling_rate": 1.5}, "sampling_rate"),
        ({"sampling_rate": math.nan}, "sampling_rate"),
        ({"sampling_rate": "all"}, "sampling_rate"),
        ({"mechanism": "laplace", "sampling_rate": 0.5}, "sampling_rate"),
        ({"scheduling": "alphabetical"}, "scheduling"),
        ({"calibration": "papper"}, "calibration"),
        ({"lr": 0.0}, "lr"),
        ({"lr_schedule": "inverse:0.0"}, "lr_schedule"),
        ({"strong_convexity": -1.0, "smoothness": 1.0}, "strong_convexity"),
        ({"strong_convexity": 1.0, "smoothness": math.inf}, "smoothness"),
        ({"strong_convexity": 1.0}, "smoothness"),
        ({"smoothness": 1.0}, "strong_convexity"),
        ({"paper_constant": 1.0}, "paper_constant"),
        ({"paper_constant": "accountant", "calibration": "tight"}, "paper_constant"),
        ({"paper_constant": "accountant", "calibration": "paper", "mechanism": "laplace"}, "paper_constant"),
        ({"paper_constant": 0.0, "calibration": "paper"}, "paper_constant"),
        ({"paper_constant": -1.0, "calibration": "paper"}, "paper_constant"),
        ({"paper_constant": math.nan, "calibration": "paper"}, "paper_constant"),
        ({"paper_constant": "moments", "calibration": "paper"}, "paper_constant"),
        ({"paper_constant": True, "calibration": "paper"}, "paper_constant"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} must"):
        FedSGDDPC(**options)


def test_a_clip_in_l2_is_refused_for_laplace_noise_with_the_reason() -> None:
    with pytest.raises(BadInput, match=r"an L2 clip bounds the L1 norm, .* only by a factor that grows with the model"):
        FedSGDDPC(mechanism="laplace", norm=2)


def test_samples_are_refused_for_laplace_noise_with_the_reason() -> None:
    with pytest.raises(BadInput, match=r"Laplace noise, which FedSGD-DPC adds to the gradient of all records, was 0.5"):
        FedSGDDPC(mechanism="laplace", sampling_rate=0.5)


@each("given", [{"lr": 0.1}, {"lr_schedule": "inverse:2.0"}, {"lr": 0.1, "lr_schedule": "inverse:2.0"}])
def test_rates_of_theory_and_rates_of_ones_own_are_refused_with_the_reason(given: dict) -> None:
    with pytest.raises(
        BadInput, match=r"^lr and lr_schedule must be left out with the theory's rates, which follow from"
    ):
        FedSGDDPC(strong_convexity=1.0, smoothness=2.0, **given)


def test_a_list_must_have_one_entry_for_each_client() -> None:
    with pytest.raises(BadInput, match=r"^delta must be one number or one for each of the 6 clients, was 2 numbers"):
        FedSGDDPC(delta=(1e-3, 1e-4)).promise(SIZES)
