"""DP-FedAvg: what its noise is really worth, for how many answers it is counted, its variance and its refusals."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dpfl.errors import BadInput, BudgetRefused
from dpfl.federation import Everyone, PoissonCohort, RandomK, RoundRobin, Schedule
from dpfl.orders import GRID_SHARE, ClientClip, Full, Gaussian, Laplace, Order, Shuffled
from dpfl.privacy.certificate import Certificate, certify
from dpfl.privacy.ledger import Ledger
from dpfl.streams import Streams
from dpfl.systems import DPFedAvg, Feedback, Problem
from dpfl.systems.queried import QueriedState
from grids import each

SIZES = (3, 5, 8, 4, 10, 6)
DIM = 7


def begin(system: DPFedAvg, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> QueriedState:
    schedule = Schedule(system.cohorts(len(sizes)), Streams(seed).public)
    return system.begin(Problem(sizes, DIM, schedule), torch.zeros(DIM), Feedback())


def rounds_of(system: DPFedAvg, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Iterator[tuple[QueriedState, dict]]:
    state = begin(system, sizes, seed)
    while state.round < state.rounds:
        yield state, system.orders(state)
        state = replace(state, round=state.round + 1)


def certified(system: DPFedAvg, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Certificate:
    """Charge a whole training, in which nobody may be refused."""
    ledger = Ledger(system.promise(sizes), sizes, system=system.name)
    for state, orders in rounds_of(system, sizes, seed):
        assert sorted(ledger.charge(orders)) == sorted(orders)
        ledger.broadcast(system.weights(state, sorted(orders)))
    return certify(ledger.books, ledger.run)


def size_of(order: Order) -> float:
    return order.noise.scale if isinstance(order.noise, Laplace) else order.noise.std


# What the published noise is worth.


@each("epsilon", [0.5, 3.0, 20.0])
def test_the_papers_laplace_noise_is_worth_exactly_twice_its_claim(epsilon: float) -> None:
    system = DPFedAvg(mechanism="laplace", calibration="paper", rounds=9, cohort=2, epsilon=epsilon)  # K·R/N = 3
    certificate = certified(system)
    server = certificate.observers["server"]
    assert (certificate.unit, certificate.neighbours) == ("client", "replace")
    assert certificate.claimed == {"epsilon": epsilon, "delta": 0.0}
    assert server.claimed_epsilon == pytest.approx(epsilon * (1 + GRID_SHARE), rel=1e-12)
    assert server.epsilon == pytest.approx(2 * epsilon * (1 + GRID_SHARE), rel=1e-12)
    assert server.slack == pytest.approx(-epsilon * (1 + 2 * GRID_SHARE), rel=1e-9)
    assert {line.replies for line in certificate.spending} == {3}


@each("epsilon", [0.5, 3.0, 20.0])
def test_an_accountants_noise_keeps_the_claim_for_the_sensitivity_that_the_paper_takes(epsilon: float) -> None:
    system = DPFedAvg(calibration="paper", paper_constant="accountant", rounds=9, cohort=2, epsilon=epsilon, delta=1e-5)
    certificate = certified(system)
    server = certificate.observers["server"]
    assert 0.6 * epsilon <= server.claimed_epsilon <= epsilon < server.epsilon  # it takes half of what is true
    assert certificate.cautions == ()
    doubled = certified(replace(system, paper_constant=None))
    assert "dpfl's own √2" in doubled.cautions[0]


def test_noise_is_in_proportion_to_the_open_constant() -> None:
    system = DPFedAvg(calibration="paper", rounds=9, cohort=2, epsilon=2.0, delta=1e-5)
    noise = [next(rounds_of(replace(system, paper_constant=c2)))[1][0].noise.std for c2 in (None, math.sqrt(2), 5.0)]
    assert noise[0] == noise[1]
    assert noise[2] == pytest.approx(5 / math.sqrt(2) * noise[0])


def test_the_papers_gaussian_noise_by_gaussian_dp() -> None:
    # σ = √2·√(T_l·ln(1/δ))/ε·Ξ under a true sensitivity of 2Ξ: μ² = T_l·4Ξ²/σ² = 2ε²/ln(1/δ), and ε²/(2·ln(1/δ)) by
    # the paper's. At ε = 2, δ = e^−8 that is μ = 1 and μ = 1/2.
    system = DPFedAvg(calibration="paper", rounds=9, cohort=2, epsilon=2.0, delta=math.exp(-8))

    def delta_of(epsilon: float, mu: float) -> float:
        def cdf(x: float) -> float:
            return math.erfc(-x / math.sqrt(2)) / 2

        return cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * cdf(-epsilon / mu - mu / 2)

    server = certified(system).observers["server"]
    assert delta_of(server.epsilon, 1.0) == pytest.approx(math.exp(-8), rel=1e-6)
    assert delta_of(server.claimed_epsilon, 0.5) == pytest.approx(math.exp(-8), rel=1e-6)


def test_the_papers_average_count_is_too_small_for_those_who_answer_more() -> None:
    # K·R/N = 2·5/6 = 1.67: four clients answer twice and two once, and true costs are 2ε·2/1.67 and 2ε·1/1.67.
    lines = certified(DPFedAvg(mechanism="laplace", calibration="paper", rounds=5, cohort=2, epsilon=1.0)).spending
    assert [line.replies for line in lines] == [2, 2, 2, 2, 1, 1]
    assert [line.server_epsilon for line in lines] == pytest.approx([2.4] * 4 + [1.2] * 2)


def test_rates_that_decay_cost_what_they_add_up_to() -> None:
    # Noise is for the largest rate of the round, E·max η; the clipping proves 2·Σ η.
    options = {"lr": 0.3, "lr_schedule": "inverse:2.0", "local_steps": 3, "rounds": 4}
    system = DPFedAvg(mechanism="laplace", calibration="paper", epsilon=1.0, clip=2.0, **options)
    spent = 0.0
    for t in range(4):
        rates = [0.3 * 2 / (k + 2) for k in range(3 * t, 3 * t + 3)]
        spent += 2 * sum(rates) * 2.0 / (4 * max(rates) * 3 * 2.0 / 1.0)
    assert certified(system).observers["server"].epsilon == pytest.approx(spent * (1 + GRID_SHARE), rel=1e-12)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_published_noise_promises_and_claims_half_the_sensitivity(mechanism: str) -> None:
    for calibration, share in (("paper", 0.5), ("tight", 1.0)):
        promise = DPFedAvg(mechanism=mechanism, calibration=calibration, epsilon=2.0).promise(SIZES)
        assert (promise.unit, promise.neighbours) == ("client", "replace")
        assert (promise.calibration, promise.claimed_sensitivity) == (calibration, share)
        assert (promise.noise, promise.against, promise.exposures) == ("fixed", ("server",), None)
        assert {budget.delta for budget in promise.budgets} == {0.0 if mechanism == "laplace" else 1e-3}


# What exact noise is worth.


@each(
    "schedule", [{"lr": 0.2}, {"lr": 0.2, "lr_schedule": "inverse:3.0"}, {"strong_convexity": 0.5, "smoothness": 2.0}]
)
@each("mechanism", ["laplace", "gaussian"])
@each("cohort", [None, 2, 4])
def test_exact_noise_spends_each_budget_and_no_more(mechanism: str, schedule: dict, cohort: int | None) -> None:
    epsilon = (0.1, 0.5, 1.0, 3.0, 8.0, 30.0)
    delta = None if mechanism == "laplace" else (1e-3, 1e-5, 1e-2, 1e-3, 1e-8, 1e-1)
    system = DPFedAvg(mechanism=mechanism, rounds=7, cohort=cohort, epsilon=epsilon, delta=delta, **schedule)
    certificate = certified(system)  # K·R/N is no whole number, and yet nobody is refused
    assert certificate.observers["server"].claimed_epsilon is None  # nothing is claimed that is not proved
    for line, granted in zip(certificate.spending, epsilon, strict=True):
        assert granted * (1 - 1e-6) <= line.server_epsilon <= granted * (1 + 1e-12)


def test_exact_laplace_noise_may_use_a_delta() -> None:
    # Many small pure releases compose better with a δ than in sum: less noise, and no more than the budget.
    rounds = 12
    pure, approximate = (
        DPFedAvg(mechanism="laplace", rounds=rounds, epsilon=1.0, delta=delta) for delta in (0.0, 1e-3)
    )
    noise = [size_of(next(rounds_of(system, (5, 5)))[1][0]) for system in (pure, approximate)]
    assert noise[1] < 0.7 * noise[0]
    spent = certified(approximate, (5, 5)).observers["server"].epsilon
    assert 0.999 <= spent <= 1.0


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_one_round_more_than_planned_is_refused(mechanism: str) -> None:
    system = DPFedAvg(mechanism=mechanism, rounds=3)
    ledger = Ledger(system.promise(SIZES), SIZES)
    for _, orders in rounds_of(system):
        ledger.charge(orders)
    with pytest.raises(BudgetRefused):
        ledger.charge(system.orders(begin(system)))


@each("scheduling", ["random", "poisson", "round-robin"])
def test_whatever_the_schedule_nobody_is_refused(scheduling: str) -> None:
    for seed in range(3):
        certificate = certified(DPFedAvg(rounds=8, cohort=2, scheduling=scheduling, epsilon=2.0), seed=seed)
        for line in certificate.spending:
            assert line.server_epsilon == pytest.approx(2.0 if line.replies else 0.0, rel=1e-6)


def test_a_client_that_is_never_asked_has_noise_all_the_same() -> None:
    state = begin(DPFedAvg(rounds=1, cohort=2))
    assert len(set(state.noise_multipliers)) == 1  # as for one reply


# The orders.


@pytest.mark.parametrize(("mechanism", "norm"), [("laplace", 1), ("gaussian", 2)])
def test_an_order_is_some_steps_on_the_clipped_client_gradient(mechanism: str, norm: int) -> None:
    for calibration in ("tight", "paper"):
        system = DPFedAvg(mechanism=mechanism, calibration=calibration, local_steps=4, lr=0.5, clip=3.0)
        for order in system.orders(begin(system)).values():
            assert (order.steps, order.batch, order.noise_on, order.proximal) == (4, Full(), "upload", 0.0)
            assert order.learning_rates == (0.5,) * 4
            assert order.clip == ClientClip(3.0, norm)
            assert isinstance(order.noise, Laplace if mechanism == "laplace" else Gaussian)


def test_local_steps_are_counted_through_the_whole_training() -> None:
    system = DPFedAvg(rounds=3, local_steps=2, strong_convexity=0.5, smoothness=1.0)  # γ = max(16, 2)
    for state, orders in rounds_of(system):
        expected = [2 / (0.5 * (k + 16)) for k in range(2 * state.round, 2 * state.round + 2)]
        assert orders[0].learning_rates == pytest.approx(expected, rel=1e-12)


def test_local_epochs_are_as_many_steps_as_a_client_has_batches() -> None:
    system = DPFedAvg(rounds=3, local_epochs=2, batch_size=4, lr=0.3, lr_schedule="inverse:5.0", clip=1.5)
    for state, orders in rounds_of(system):
        for client, order in orders.items():
            steps = 2 * max(1, SIZES[client] // 4)
            rates = [0.3 * 5 / (k + 5) for k in range(steps * state.round, steps * (state.round + 1))]
            assert (order.steps, order.batch) == (steps, Shuffled(4))
            assert order.learning_rates == pytest.approx(rates)
            noise = state.noise_multipliers[client] * 2 * sum(rates) * 1.5  # what that client's own steps add up to
            assert size_of(order) == pytest.approx(noise)
    for line in certified(system).spending:
        assert line.server_epsilon == pytest.approx(line.claimed_epsilon, rel=1e-6)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_noise_for_one_step_says_what_it_claims_and_what_it_is_worth(mechanism: str) -> None:
    # A twelfth of the noise that Theorems 1 and 2 print for E = 12: the claim is their own, the truth is of 12 steps.
    options = {"mechanism": mechanism, "calibration": "paper", "rounds": 6, "local_steps": 12, "epsilon": 3.0}
    usual, less = DPFedAvg(**options), DPFedAvg(**options, noise_for_steps=1)
    for (_, orders), (_, fewer) in zip(rounds_of(usual), rounds_of(less), strict=True):
        assert [size_of(one) for one in fewer.values()] == pytest.approx([size_of(one) / 12 for one in orders.values()])
    printed, told = (certified(system).observers["server"] for system in (usual, less))
    assert told.claimed_epsilon == pytest.approx(printed.claimed_epsilon, rel=1e-6)
    assert told.epsilon > 10 * printed.epsilon
    if mechanism == "laplace":
        assert told.epsilon == pytest.approx(12 * printed.epsilon, rel=1e-6)
    (caution,) = set(less.promise(SIZES).cautions) - set(usual.promise(SIZES).cautions)
    assert "for any promise to hold" in caution
    assert DPFedAvg(**options, noise_for_steps=12).promise(SIZES).cautions == usual.promise(SIZES).cautions


def test_many_steps_make_the_rates_of_theory_smaller() -> None:
    system = DPFedAvg(rounds=1, local_steps=20, strong_convexity=0.5, smoothness=1.0)  # γ = max(16, 20)
    assert system.rates(0, 1) == pytest.approx((2 / (0.5 * 20),))


def test_weights_do_not_add_up_to_one_where_the_cohort_is_not_average() -> None:
    system = DPFedAvg(cohort=2)
    state = begin(system)
    assert system.weights(state, [0, 4]) == pytest.approx({0: 3 * 3 / 36, 4: 3 * 10 / 36})
    everyone = system.weights(state, range(6))
    assert everyone == pytest.approx({client: n / 36 for client, n in enumerate(SIZES)})
    assert system.weights(state, []) == {}


def test_over_a_cycle_every_client_weighs_what_its_records_do() -> None:
    system = DPFedAvg(rounds=3, cohort=2)
    total = dict.fromkeys(range(6), 0.0)
    for state, orders in rounds_of(system):
        for client, weight in system.weights(state, sorted(orders)).items():
            total[client] += weight / 3
    assert total == pytest.approx({client: n / 36 for client, n in enumerate(SIZES)})


def test_clients_are_asked_in_turn_unless_it_is_said_otherwise() -> None:
    assert DPFedAvg().cohorts(6) == Everyone(6)
    assert DPFedAvg(cohort=2).cohorts(6) == RoundRobin(6, 2)
    assert DPFedAvg(cohort=2, scheduling="random").cohorts(6) == RandomK(6, 2)
    assert DPFedAvg(cohort=3, scheduling="poisson").cohorts(6) == PoissonCohort(6, 0.5)


# The variance of the averaged noise, from orders and weights.

N, ALL, MEAN_SQUARE = len(SIZES), sum(SIZES), sum(n * n for n in SIZES) / len(SIZES)


def averaged_variance(system: DPFedAvg, rounds: int | None = None) -> float:
    """Return the mean over rounds of d·Σ p_i²·(2b_i² or σ_i²)."""
    found = []
    for state, orders in rounds_of(system):
        weights = system.weights(state, sorted(orders))
        factor = 2 if system.mechanism == "laplace" else 1
        found.append(DIM * math.fsum(factor * (weights[i] * size_of(order)) ** 2 for i, order in orders.items()))
    return math.fsum(found[:rounds]) / len(found[:rounds])


@each("cohort", [1, 2, 3, 6])
@each("rounds", [6, 12])  # whole cycles of round robin
def test_variance_of_the_published_noise(rounds: int, cohort: int) -> None:
    options = {"calibration": "paper", "rounds": rounds, "cohort": cohort, "lr": 0.3, "local_steps": 4, "clip": 1.5}
    xi, epsilon, delta = 0.3 * 4 * 1.5, 2.0, 1e-4
    laplace = 2 * DIM * cohort * xi**2 * rounds**2 * MEAN_SQUARE / (ALL**2 * epsilon**2)
    gaussian = DIM * 2 * N * math.log(1 / delta) * xi**2 * rounds * MEAN_SQUARE / (ALL**2 * epsilon**2)  # c₂² = 2
    assert averaged_variance(DPFedAvg(mechanism="laplace", epsilon=epsilon, **options)) == pytest.approx(laplace)
    system = DPFedAvg(epsilon=epsilon, delta=delta, **options)
    assert averaged_variance(system) == pytest.approx(gaussian)


def test_variance_follows_the_largest_rate_of_each_round() -> None:
    rates = {"lr": 0.3, "lr_schedule": "inverse:5.0", "local_steps": 2}
    system = DPFedAvg(mechanism="laplace", calibration="paper", rounds=4, epsilon=2.0, **rates)
    expected = [
        2 * DIM * N * (0.3 * 5 / (2 * t + 5) * 2) ** 2 * 4**2 * MEAN_SQUARE / (ALL**2 * 2.0**2) for t in range(4)
    ]
    assert averaged_variance(system) == pytest.approx(sum(expected) / 4)


def test_exact_laplace_noise_is_twice_the_published_where_every_count_is_whole() -> None:
    options = {"mechanism": "laplace", "rounds": 9, "cohort": 2, "epsilon": 2.0}
    tight, paper = (averaged_variance(DPFedAvg(calibration=one, **options)) for one in ("tight", "paper"))
    assert tight == pytest.approx(4 * paper, rel=1e-6)


# Refusals.


@each(
    ("options", "field"),
    [
        ({"rounds": 0}, "rounds"),
        ({"rounds": 2.5}, "rounds"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": 1.5}, "local_steps"),
        ({"local_steps": 3, "local_epochs": 2}, "local_steps"),
        ({"local_epochs": 0}, "local_epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"noise_for_steps": 0, "calibration": "paper"}, "noise_for_steps"),
        ({"noise_for_steps": 1}, "noise_for_steps"),
        ({"noise_for_steps": 1, "calibration": "paper", "local_epochs": 2}, "noise_for_steps"),
        ({"cohort": 0}, "cohort"),
        ({"clip": 0.0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": (1.0, -1.0)}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"mechanism": "laplace", "delta": -0.1}, "delta"),
        ({"mechanism": "cauchy"}, "mechanism"),
        ({"mechanism": 1}, "mechanism"),
        ({"norm": 3}, "norm"),
        ({"norm": 0}, "norm"),
        ({"norm": 1.5}, "norm"),
        ({"mechanism": "laplace", "norm": 2}, "norm"),
        ({"scheduling": "alphabetical"}, "scheduling"),
        ({"calibration": "papper"}, "calibration"),
        ({"lr": 0.0}, "lr"),
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr_schedule": "inverse:0.0"}, "lr_schedule"),
        ({"lr_schedule": "inverse:-2"}, "lr_schedule"),
        ({"lr_schedule": "inverse:inf"}, "lr_schedule"),
        ({"strong_convexity": 0.0, "smoothness": 1.0}, "strong_convexity"),
        ({"strong_convexity": 1.0, "smoothness": -1.0}, "smoothness"),
        ({"strong_convexity": 1.0, "smoothness": math.nan}, "smoothness"),
        ({"strong_convexity": 1.0}, "smoothness"),
        ({"smoothness": 1.0}, "strong_convexity"),
        ({"paper_constant": 1.0}, "paper_constant"),
        ({"paper_constant": "accountant", "calibration": "paper", "mechanism": "laplace"}, "paper_constant"),
        ({"paper_constant": 0.0, "calibration": "paper"}, "paper_constant"),
        ({"paper_constant": "moments", "calibration": "paper"}, "paper_constant"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} must"):
        DPFedAvg(**options)


def test_a_clip_in_l2_is_refused_for_laplace_noise_with_the_reason() -> None:
    with pytest.raises(BadInput, match=r"an L2 clip bounds the L1 norm, .* only by a factor that grows with the model"):
        DPFedAvg(mechanism="laplace", norm=2)
    assert DPFedAvg(mechanism="laplace", norm=1).norm_order == 1
    assert DPFedAvg(mechanism="gaussian", norm=1).norm_order == 1


@each("given", [{"lr": 0.1}, {"lr_schedule": "inverse:2.0"}, {"lr": 0.1, "lr_schedule": "inverse:2.0"}])
def test_rates_of_theory_and_rates_of_ones_own_are_refused_with_the_reason(given: dict) -> None:
    with pytest.raises(
        BadInput, match=r"^lr and lr_schedule must be left out with the theory's rates, which follow from"
    ):
        DPFedAvg(strong_convexity=1.0, smoothness=2.0, **given)


def test_a_cohort_larger_than_the_federation_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^cohort must be at most the 6 clients there are, was 7"):
        DPFedAvg(cohort=7).cohorts(6)


def test_a_list_must_have_one_entry_for_each_client() -> None:
    with pytest.raises(BadInput, match=r"^epsilon must be one number or one for each of the 6 clients, was 2 numbers"):
        DPFedAvg(epsilon=(1.0, 2.0)).promise(SIZES)
