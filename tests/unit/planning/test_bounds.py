"""The five bounds: the noise they take, the papers' forms beside the general ones, what they bound, and when not.

Simulations draw Gaussian noise with fixed seeds; a mean over them may exceed its bound by four standard errors.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dpfl.errors import BadInput
from dpfl.orders import ClientClip, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip
from dpfl.planning import ali_dpfl, dp_fedavg, fedsgd_dpc, nbafl, udp
from dpfl.planning.bounds import Facts, Void, at_unit_rate, contract, in_turn, round_noise
from dpfl.planning.constants import Constants
from dpfl.privacy.budget import Budget
from dpfl.streams import Streams
from dpfl.systems import ALIDPFL, UDP, DPFedAvg, FedSGDDPC, NbAFL
from grids import each

N, SIZE, DIM = 6, 40, 7
EQUAL = Facts((SIZE,) * N, DIM, Streams(3))
UNEQUAL = Facts((30, 50, 80, 40, 100, 60), DIM, Streams(3))
CONSTANTS = Constants(
    strong_convexity=0.5, smoothness=2.0, polyak_lojasiewicz=0.4, gradient_bound=1.3, lipschitz=1.7, record_spread=0.8,
    divergence=0.6, dissimilarity=1.2, heterogeneity=0.3, initial_distance=5.0, initial_gap=3.0,
)  # fmt: skip
THEORY = {"strong_convexity": 0.5, "smoothness": 2.0}
PLANNED = {
    "dp-fedavg": (DPFedAvg(lr=0.1), dp_fedavg),
    "udp": (UDP(lr=0.5), udp),
    "nbafl": (NbAFL(proximal=20.0), nbafl),
    "ali-dpfl": (ALIDPFL(calibration="paper"), ali_dpfl),
    "fedsgd-dpc": (FedSGDDPC(lr=0.1), fedsgd_dpc),
}


def without(**none: float | None) -> Constants:
    return replace(CONSTANTS, **none)


# (a) The variance of an order.

UPLOADS = [
    (Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(0.3)), 0.09),
    (Order(steps=4, learning_rate=(0.5, 0.4, 0.3, 0.2), clip=ClientClip(1.0), noise=Gaussian(0.3)), 0.09),
    (Order(steps=3, learning_rate=0.5, clip=ModelClip(1.0), noise=Gaussian(0.3), proximal=2.0), 0.09),
    (Order(steps=2, learning_rate=0.5, clip=ClientClip(1.0, 1), noise=Laplace(0.3)), 0.18),
    (Order(steps=2, learning_rate=0.5, clip=ClientClip(1.0, 1)), 0.0),
    (Order(steps=2, learning_rate=0.5, clip=ClientClip(1.0, 1), noise_on="step"), 0.0),
]


@each(("order", "variance"), UPLOADS)
def test_noise_on_the_upload_is_not_scaled(order: Order, variance: float) -> None:
    for records in (1, 10, 999):
        assert order.noise_variance(records) == pytest.approx(variance, rel=1e-12)


STEPS = [
    # A sum over n records is divided by n, or by q·n; a client's gradient is not.
    ({"steps": 1, "learning_rate": 0.5, "clip": RecordClip(1.0)}, (0.5 / 20) ** 2),
    ({"steps": 1, "learning_rate": 0.5, "clip": RecordClip(1.0), "batch": Poisson(0.25)}, (0.5 / 5) ** 2),
    ({"steps": 3, "learning_rate": 0.5, "clip": RecordClip(1.0)}, 3 * (0.5 / 20) ** 2),
    ({"steps": 3, "learning_rate": (0.5, 0.3, 0.1), "clip": RecordClip(1.0)}, (0.25 + 0.09 + 0.01) / 400),
    ({"steps": 1, "learning_rate": 0.5, "clip": ClientClip(1.0)}, 0.25),
    ({"steps": 2, "learning_rate": (0.5, 0.1), "clip": ClientClip(1.0), "batch": Poisson(0.25)}, 0.26),
]


@each(("options", "share"), STEPS)
@each(("noise", "variance"), [(Gaussian(3.0), 9.0), (Laplace(3.0), 18.0)])
def test_noise_in_steps_is_scaled_as_the_gradient_is_and_adds_up(
    options: dict, share: float, noise: Gaussian | Laplace, variance: float
) -> None:
    order = Order(**options, noise=noise, noise_on="step")
    assert order.noise_variance(20) == pytest.approx(variance * share, rel=1e-12)
    if order.steps == 1:
        assert order.noise_variance(20) == pytest.approx(variance * order.noise_in_upload(20) ** 2, rel=1e-12)


# (b) The variance of a round, against the lines of the papers.


@each("cohort", [1, 2, 4, 6])
@each("rounds", [1, 3, 60])
@each("steps", [1, 5])
def test_noise_of_a_dp_fedavg_round(cohort: int, rounds: int, steps: int) -> None:
    options = {"rounds": rounds, "cohort": cohort, "local_steps": steps, "lr": 0.3, "clip": 1.5, "epsilon": 2.0}
    reach = 0.3 * steps * 1.5  # Ξ = η·E·C
    laplace = round_noise(DPFedAvg(mechanism="laplace", calibration="paper", **options), EQUAL)
    assert laplace == pytest.approx(2 * DIM * cohort * (reach * rounds) ** 2 / (N**2 * 2.0**2))
    gaussian = round_noise(DPFedAvg(delta=1e-4, calibration="paper", **options), EQUAL)
    assert gaussian == pytest.approx(DIM * 2 * N * math.log(1e4) * reach**2 * rounds / (N**2 * 2.0**2))


@each("cohort", [1, 2, 4, 6])
@each("rounds", [1, 3, 60])
@each("facts", [EQUAL, UNEQUAL])
def test_noise_of_a_fedsgd_dpc_round(cohort: int, rounds: int, facts: Facts) -> None:
    options = {"rounds": rounds, "cohort": cohort, "lr": 0.3, "clip": 1.5, "epsilon": 2.0, "calibration": "paper"}
    share = (0.3 * 1.5 / sum(facts.sizes)) ** 2 * DIM
    laplace = round_noise(FedSGDDPC(mechanism="laplace", **options), facts)
    assert laplace == pytest.approx(8 * share * cohort * rounds**2 / N * (N / 2.0**2))
    for rate in (None, 0.2):
        gaussian = round_noise(FedSGDDPC(delta=1e-4, sampling_rate=rate, **options), facts)
        assert gaussian == pytest.approx(2 * share * rounds * N * math.log(1e4) / 2.0**2)


@each("kind", [DPFedAvg, FedSGDDPC])
def test_the_open_constant_moves_the_noise_of_a_round_and_the_printed_bound(
    kind: type[DPFedAvg] | type[FedSGDDPC],
) -> None:
    system = kind(calibration="paper", rounds=9, cohort=2, epsilon=2.0, delta=1e-4, **THEORY)
    module = dp_fedavg if kind is DPFedAvg else fedsgd_dpc
    least = round_noise(at_unit_rate(system), EQUAL)
    for c2, square in ((5.0, 25.0), ("accountant", system_constant(system) ** 2)):
        other = replace(system, paper_constant=c2)
        assert round_noise(at_unit_rate(other), EQUAL) == pytest.approx(square / 2 * least)
        nothing = without(gradient_bound=0.0, heterogeneity=0.0, initial_distance=0.0, record_spread=0.0)
        for form in ("general", "paper"):
            before, after = (module.predicted(one, EQUAL, nothing, form) for one in (system, other))
            assert after == pytest.approx(square / 2 * before)


def system_constant(system: DPFedAvg | FedSGDDPC) -> float:
    return replace(system, paper_constant="accountant").open_constant(Budget(2.0, 1e-4), 9 * 2 / N)


def test_noise_of_a_fedsgd_dpc_round_with_a_budget_for_each() -> None:
    epsilon, delta = (1.0, 2.0, 0.5, 4.0, 1.0, 3.0), (1e-4, 1e-3, 1e-5, 1e-2, 1e-4, 1e-6)
    options = {"rounds": 9, "lr": 0.3, "clip": 1.5, "epsilon": epsilon, "calibration": "paper"}
    share = (0.3 * 1.5 / sum(UNEQUAL.sizes)) ** 2 * DIM
    laplace = round_noise(FedSGDDPC(mechanism="laplace", **options), UNEQUAL)
    assert laplace == pytest.approx(8 * share * 9**2 * sum(1 / e**2 for e in epsilon))
    gaussian = round_noise(FedSGDDPC(delta=delta, **options), UNEQUAL)
    paid = sum(math.log(1 / d) / e**2 for e, d in zip(epsilon, delta, strict=True))
    assert gaussian == pytest.approx(2 * share * 9 * paid)


@each("cohort", [1, 4, 6])
def test_noise_of_a_udp_round(cohort: int) -> None:
    system = UDP(rounds=20, cohort=cohort, lr=0.3, clip=1.5, epsilon=2.0, delta=1e-4, calibration="paper")
    std = 2 * 0.3 * 1.5 / SIZE * math.sqrt(2 * cohort / N * 20 * math.log(1e4)) / 2.0
    assert round_noise(system, EQUAL) == pytest.approx(DIM * cohort * (std / cohort) ** 2)


def test_noise_of_a_udp_round_with_unequal_clients() -> None:
    epsilon = (1.0, 2.0, 0.5, 4.0, 1.0, 3.0)
    system = UDP(rounds=20, lr=0.3, clip=1.5, epsilon=epsilon, delta=1e-4, calibration="paper")
    expected = 0.0
    for size, budget in zip(UNEQUAL.sizes, epsilon, strict=True):
        std = 2 * 0.3 * 1.5 / size * math.sqrt(2 * 20 * math.log(1e4)) / budget
        expected += DIM * (size / sum(UNEQUAL.sizes) * std) ** 2
    assert round_noise(system, UNEQUAL) == pytest.approx(expected)


@each("facts", [EQUAL, UNEQUAL])
@each(("rounds", "exposures"), [(30, 2), (4, 3)])
def test_noise_of_an_nbafl_round_of_all_clients(facts: Facts, rounds: int, exposures: int) -> None:
    options = {"clip": 1.5, "epsilon": 2.0, "delta": 0.01, "calibration": "paper"}
    c, fewest = math.sqrt(2 * math.log(125)), min(facts.sizes)
    uplink = c * exposures * 2 * 1.5 / (fewest * 2.0)
    enough = rounds <= exposures * math.sqrt(N)  # 4 ≤ 3·√6, and 30 > 2·√6
    downlink = 0.0 if enough else 2 * c * 1.5 * math.sqrt(rounds**2 - exposures**2 * N) / (fewest * N * 2.0)
    found = round_noise(NbAFL(rounds=rounds, exposures=exposures, **options), facts)
    assert found == pytest.approx(DIM * (downlink**2 + uplink**2 / N))
    assert (downlink == 0) == (rounds == 4)


def test_noise_of_an_nbafl_round_of_some_clients() -> None:
    rounds, cohort, epsilon = 30, 4, 2.0
    system = NbAFL(rounds=rounds, cohort=cohort, clip=1.5, epsilon=epsilon, delta=0.01, calibration="paper")
    c = math.sqrt(2 * math.log(125))
    b = -rounds / epsilon * math.log(1 - N / cohort + N / cohort * math.exp(-epsilon / rounds))
    downlink = 2 * c * 1.5 * math.sqrt(rounds**2 / b**2 - cohort) / (SIZE * cohort * epsilon)
    uplink = c * 2 * 1.5 / (SIZE * epsilon)
    assert round_noise(system, EQUAL) == pytest.approx(DIM * (downlink**2 + uplink**2 / cohort))


def test_exact_noise_moves_the_variance() -> None:
    # With all clients and Laplace noise FedSGD-DPC's formula is exact; DP-FedAvg's Ξ is half of what its clip proves.
    for kind, factor in ((FedSGDDPC, 1.0), (DPFedAvg, 4.0)):
        system = kind(mechanism="laplace", rounds=9, lr=0.3, epsilon=2.0)
        papers = round_noise(replace(system, calibration="paper"), EQUAL)
        assert round_noise(system, EQUAL) == pytest.approx(factor * papers)
    # By Gaussian DP, √(2R·ln(1/δ))/ε is worth less than (ε, δ) where ε is small.
    system = UDP(rounds=9, epsilon=1.0)  # type: ignore[assignment]
    assert round_noise(system, EQUAL) < 0.9 * round_noise(replace(system, calibration="paper"), EQUAL)


def test_exact_noise_is_counted_for_the_rounds_that_clients_answer() -> None:
    # Four rounds of two in turn: the first two clients answer twice and the others once. So few are all looked at.
    system = FedSGDDPC(mechanism="laplace", rounds=4, cohort=2, lr=1.0, clip=1.5, epsilon=2.0)
    replies = [(2, 2), (1, 1), (1, 1), (2, 2)]
    one = DIM * (N / 2 / sum(EQUAL.sizes)) ** 2 * 2 * (2 * 1.5 / 2.0) ** 2
    assert round_noise(system, EQUAL) == pytest.approx(sum(one * r**2 for turn in replies for r in turn) / 4)


# (c) The general form, with the papers' noise, against the papers' own.


def both(module: Any, system: Any, facts: Facts, constants: Constants) -> tuple[float, float]:
    return tuple(module.predicted(system, facts, constants, form) for form in ("general", "paper"))


@each("cohort", [1, 3, None])
@each("rounds", [1, 7, 200])
@each("facts", [EQUAL, UNEQUAL])
@each(("mechanism", "rate"), [("laplace", None), ("gaussian", None), ("gaussian", 0.2)])
def test_fedsgd_dpcs_theorems_are_the_general_bound(
    cohort: int | None, rounds: int, facts: Facts, mechanism: str, rate: float | None
) -> None:
    system = FedSGDDPC(
        mechanism=mechanism, sampling_rate=rate, calibration="paper", rounds=rounds, cohort=cohort, epsilon=0.7,
        clip=30.0, **THEORY,
    )  # fmt: skip
    general, papers = both(fedsgd_dpc, system, facts, CONSTANTS)
    if rate is not None:  # the paper's samples are of a fixed size, at all clients: Λ² for (N/K)(1−q)(Λ² + G²)
        clients, per_record = len(facts.sizes), 4 / 0.25 / (rate * sum(facts.sizes)) / (rounds + 8)
        general += (0.8**2 - clients / (cohort or clients) * (1 - rate) * (0.8**2 + 1.3**2)) * per_record
    assert general == pytest.approx(papers, rel=1e-12)
    quiet = replace(system, epsilon=1e9)
    assert both(fedsgd_dpc, quiet, facts, CONSTANTS)[0] < 0.9 * general  # the noise is no small part of it


def test_fedsgd_dpcs_theorems_by_hand() -> None:
    system = FedSGDDPC(mechanism="laplace", calibration="paper", rounds=9, cohort=2, epsilon=0.7, clip=30.0, **THEORY)
    spread = 2 * 1.3**2 * (6 - 2) / (5 * 2) + 2 * 2.0 * 0.3
    noise = 32 * DIM * 2 * 81 * 30.0**2 / (6 * 240**2) * 6 / 0.7**2
    expected = (4 * spread / 0.25 + 8 * 5.0 + noise / 0.25) / (9 + 8)
    assert both(fedsgd_dpc, system, EQUAL, CONSTANTS) == pytest.approx((expected, expected))
    system = replace(system, mechanism="gaussian", norm=2, delta=1e-4, sampling_rate=0.2)
    spread += 0.8**2 / (0.2 * 240)  # Σ n_iΛ²/(q·n²)
    noise = 4 * 2 * DIM * 9 * 30.0**2 / 240**2 * 6 * math.log(1e4) / 0.7**2
    expected = (4 * spread / 0.25 + 8 * 5.0 + noise / 0.25) / (9 + 8)
    samples = (6 / 2 * 0.8 * (0.8**2 + 1.3**2) - 0.8**2) / (0.2 * 240)  # of Poisson samples at 2 of 6 clients
    general = expected + 4 * samples / 0.25 / (9 + 8)
    assert both(fedsgd_dpc, system, EQUAL, CONSTANTS) == pytest.approx((general, expected))


def test_fedsgd_dpcs_constants_of_rounds_and_cohort_are_its_bound() -> None:
    epsilon = (1.0, 2.0, 0.5, 4.0, 1.0, 3.0)
    for cohort, rounds in ((1, 4), (3, 4), (6, 30)):
        system = FedSGDDPC(
            mechanism="laplace", calibration="paper", rounds=rounds, cohort=cohort, epsilon=epsilon, clip=30.0, **THEORY
        )
        gamma, c1, c2, c3 = fedsgd_dpc.laplace_constants(
            clients=N, dim=DIM, records=360, clip=30.0, budgets=system.budgets(N), gradient_bound=1.3,
            heterogeneity=0.3, initial_distance=5.0, **THEORY,
        )  # fmt: skip
        whole = fedsgd_dpc.laplace_bound(rounds=rounds, cohort=cohort, gamma=gamma, c1=c1, c2=c2, c3=c3)
        assert whole == pytest.approx(fedsgd_dpc.predicted(system, UNEQUAL, CONSTANTS, "paper"), rel=1e-12)
        assert (gamma, c1) == pytest.approx((8.0, 8 * 6 * 1.3**2 / (0.25 * 5)))


@each("cohort", [1, 3, None])
@each(("rounds", "steps"), [(1, 1), (7, 3), (30, 50)])
def test_dp_fedavgs_theorem_is_the_general_bound_for_laplace_noise(cohort: int | None, rounds: int, steps: int) -> None:
    system = DPFedAvg(
        mechanism="laplace", calibration="paper", rounds=rounds, local_steps=steps, cohort=cohort, epsilon=0.7,
        clip=3.0, **THEORY,
    )  # fmt: skip
    general, papers = both(dp_fedavg, system, EQUAL, CONSTANTS)
    assert general == pytest.approx(papers, rel=1e-12)
    quiet = replace(system, epsilon=1e9)
    assert both(dp_fedavg, quiet, EQUAL, CONSTANTS)[0] < 0.97 * general


@each("cohort", [1, 3, None])
@each(("rounds", "steps"), [(1, 1), (7, 3), (30, 50)])
def test_dp_fedavgs_theorem_has_a_stray_factor_of_two_for_gaussian_noise(
    cohort: int | None, rounds: int, steps: int
) -> None:
    system = DPFedAvg(
        calibration="paper", rounds=rounds, local_steps=steps, cohort=cohort, epsilon=0.7, clip=3.0, **THEORY
    )
    nothing = without(gradient_bound=0.0, heterogeneity=0.0, initial_distance=0.0)
    general, papers = both(dp_fedavg, system, EQUAL, nothing)
    assert papers == pytest.approx(2 * general, rel=1e-12)


def test_dp_fedavgs_theorem_by_hand() -> None:
    system = DPFedAvg(
        mechanism="laplace", calibration="paper", rounds=9, local_steps=3, cohort=2, epsilon=0.7, clip=3.0, **THEORY
    )
    spread = 6 * 2.0 * 0.3 + 8 * 4 * 1.3**2 + 4 * 9 * 1.3**2 * (6 - 2) / (5 * 2)
    omega1 = 8 * DIM * 2 * 3.0**2 / (36 * 0.7**2) * 9 * 81
    expected = (16 * spread + 32 * 5.0) / (27 + 32) + 16 * 9 / (27 + 31) ** 2 * omega1
    assert both(dp_fedavg, system, EQUAL, CONSTANTS) == pytest.approx((expected, expected))
    # From E = 8λ/μ = 32 on, γ is E.
    long = replace(system, local_steps=50)
    spread = 6 * 2.0 * 0.3 + 8 * 49**2 * 1.3**2 + 4 * 2500 * 1.3**2 * (6 - 2) / (5 * 2)
    omega1 = 8 * DIM * 2 * 3.0**2 / (36 * 0.7**2) * 2500 * 81
    expected = (16 * spread + 50 * 5.0) / (450 + 50) + 16 * 9 / (450 + 49) ** 2 * omega1
    assert both(dp_fedavg, long, EQUAL, CONSTANTS) == pytest.approx((expected, expected))


@each("cohort", [1, 3, 6])
@each("dim", [1, 7, 100])
def test_udps_theorem_puts_the_cohort_for_the_dimension(cohort: int, dim: int) -> None:
    system = UDP(calibration="paper", rounds=12, cohort=cohort, lr=1 / 2.0, epsilon=3.0)  # η = 1/L
    facts = replace(EQUAL, dim=dim)
    general, papers = both(udp, system, facts, without(initial_gap=0.0, divergence=0.0))
    assert general > 0
    assert papers == pytest.approx(general * cohort / dim, rel=1e-12)


@each("cohort", [1, 3, 5])
def test_udps_theorem_counts_divergence_once_too_often_for_every_client(cohort: int) -> None:
    system = UDP(calibration="paper", rounds=12, cohort=cohort, lr=1 / 2.0, epsilon=3.0)
    with_it, left_out = (both(udp, system, EQUAL, without(divergence=number)) for number in (0.6, 0.0))
    general, papers = (one - other for one, other in zip(with_it, left_out, strict=True))
    assert general > 0
    assert papers == pytest.approx(N * general, rel=1e-9)


def test_udps_forms_agree_on_what_is_left_of_the_first_gap() -> None:
    system = UDP(calibration="paper", rounds=5, lr=0.3, epsilon=1e8)
    expected = (1 - 2 * 0.4 * 0.3 + 0.4 * 0.09 * 2.0) ** 5 * 3.0
    assert both(udp, system, EQUAL, CONSTANTS) == pytest.approx((expected, expected), rel=1e-9)


def test_udps_bound_by_hand() -> None:
    system = UDP(calibration="paper", rounds=5, cohort=4, lr=0.3, epsilon=3.0)
    shrink = 1 - 2 * 0.4 * 0.3 + 0.4 * 0.09 * 2.0
    noise = round_noise(system, EQUAL) + 0.09 * 0.6 * (6 - 4) / (4 * 5)
    general = shrink**5 * 3.0 + (1 - shrink**5) / (0.4 * 0.3 * (2 - 0.3 * 2.0)) * noise  # L/2 = 1
    delta = 2 * 0.3 * 1.0 / SIZE
    kappas = 4 * delta**2 / 0.4, 0.09 * 4 * 0.6 / (2 * 0.4)
    paid = kappas[0] * 5 * 4 / 36 * 6 * math.log(1e3) / 9
    papers = shrink**5 * 3.0 + (1 - shrink**5) * (paid + kappas[1] * 6 * (6 - 4) / (4 * 5))
    assert both(udp, system, EQUAL, CONSTANTS) == pytest.approx((general, papers))


def split(system: NbAFL, facts: Facts) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return what the bound owes to E‖n‖ and to E‖n‖², each in the general and in the paper's form."""
    squares = both(nbafl, system, facts, without(initial_gap=0.0, lipschitz=0.0))
    whole = both(nbafl, system, facts, without(initial_gap=0.0))
    return tuple(one - other for one, other in zip(whole, squares, strict=True)), squares  # type: ignore[return-value]


@each(("clip", "dim"), [(1.0, 7), (5.0, 1), (0.5, 300)])
@each("facts", [EQUAL, UNEQUAL])
def test_nbafls_theorem_2_puts_the_clients_for_the_dimension(clip: float, dim: int, facts: Facts) -> None:
    system = NbAFL(calibration="paper", rounds=12, proximal=20.0, clip=clip, epsilon=3.0)  # R > L√N
    lengths, squares = split(system, replace(facts, dim=dim))
    ratio = N / (4 * clip**2 * dim)
    assert squares[1] / squares[0] == pytest.approx(ratio, rel=1e-9)
    assert lengths[1] / lengths[0] == pytest.approx(math.sqrt(2 / math.pi * ratio), rel=1e-9)


@each(("clip", "dim"), [(1.0, 7), (5.0, 1), (0.5, 300)])
@each("cohort", [3, 5])
def test_nbafls_theorem_3_drops_the_clip_and_the_dimension(clip: float, dim: int, cohort: int) -> None:
    system = NbAFL(calibration="paper", rounds=12, cohort=cohort, proximal=60.0, clip=clip, epsilon=3.0)
    lengths, squares = split(system, replace(EQUAL, dim=dim))
    ratio = 1 / (4 * clip**2 * dim)
    assert squares[1] / squares[0] == pytest.approx(ratio, rel=1e-9)
    assert lengths[1] / lengths[0] == pytest.approx(math.sqrt(2 / math.pi * ratio), rel=1e-9)


def test_nbafls_theorem_2_by_hand() -> None:
    system = NbAFL(calibration="paper", rounds=12, proximal=20.0, epsilon=3.0, delta=0.01)
    c, mu, rho, b, beta = math.sqrt(2 * math.log(125)), 20.0, 2.0, 1.2, 1.7
    p = 1 + 2 * 0.4 * (-1 / mu + rho * b / mu**2 + rho * b**2 / (2 * mu**2))
    variance = DIM * (2 * c * 1.0 * 12 / (SIZE * N * 3.0)) ** 2  # σ_A = 2cCR/(mNε) for all clients
    lambda1, lambda0 = (1 / mu + rho * b / mu) * beta, rho / 2
    general = p**12 * 3.0 + (1 - p**12) / (1 - p) * (lambda1 * math.sqrt(variance) + lambda0 * variance)
    kappa1 = lambda1 * c / (SIZE * (1 - p)) * math.sqrt(2 / (N * math.pi))
    kappa0 = lambda0 * c**2 / (SIZE**2 * (1 - p) * N)
    papers = p**12 * 3.0 + (kappa1 * 12 / 3.0 + kappa0 * (12 / 3.0) ** 2) * (1 - p**12)
    assert both(nbafl, system, EQUAL, CONSTANTS) == pytest.approx((general, papers))


def test_nbafls_theorem_3_by_hand() -> None:
    system = NbAFL(calibration="paper", rounds=12, cohort=4, proximal=60.0, epsilon=3.0, delta=0.01)
    c, mu, rho, b, beta, k = math.sqrt(2 * math.log(125)), 60.0, 2.0, 1.2, 1.7, 4
    inside = rho * b**2 / 2 + rho * b + rho * b**2 / k + 2 * rho * b**2 / 2 + mu * b / 2 - mu
    q = 1 + 2 * 0.4 / mu**2 * inside
    alpha0, alpha1 = 2 * rho * k / N + rho, 1 + 2 * rho * b / mu + 2 * rho * b * 2 / (mu * N)
    size = c / (-SIZE * k * math.log(1 - N / k + N / k * math.exp(-3.0 / 12)))
    left, share = q**12 * 3.0, (1 - q**12) / (1 - q)
    papers = left + share * (alpha1 * beta * size * math.sqrt(2 / math.pi) + alpha0 * size**2)
    variance = DIM * 4 * size**2
    general = left + share * (alpha1 * beta * math.sqrt(variance) + alpha0 * variance)
    assert both(nbafl, system, EQUAL, CONSTANTS) == pytest.approx((general, papers))


@each(("rounds", "steps"), [(6, 1), (3, 2), (1, 6)])
def test_ali_dpfl_averages_the_noise_of_equal_clients(rounds: int, steps: int) -> None:
    # A client's own noise is the paper's, so that the drift is the same; that of the average is one N-th of it.
    system = ALIDPFL(calibration="paper", rounds=rounds, local_steps=steps, clip=1.5, epsilon=20.0)
    noise = (4.0 * 1.5 / (0.5 * SIZE)) ** 2 * DIM
    general, papers = both(ali_dpfl, system, EQUAL, CONSTANTS)
    assert papers - general == pytest.approx(2.0 / (2 * 6) * noise * (1 - 1 / N), rel=1e-9)


def test_ali_dpfls_bound_by_hand() -> None:
    system = ALIDPFL(calibration="paper", rounds=3, local_steps=2, clip=1.5, epsilon=20.0, heterogeneity=0.7)
    mu, noise = 0.5, (4.0 * 1.5 / (0.5 * SIZE)) ** 2 * DIM
    rest = 4 / mu**2 + 2 * 5.0 + 3 * 1.5**2 + 2 * 0.7 * mu * 6 + noise
    expected = 2.0 / (2 * 6) * (rest + (2 + 1 / 6) * (1.5**2 + noise))
    assert ali_dpfl.predicted(system, EQUAL, CONSTANTS, "paper") == pytest.approx(expected)


def test_ali_dpfls_noise_of_unequal_clients() -> None:
    # The paper takes the smallest client for all: 30 records. Weights are n_i/n, a client's noise is (σC/(q·n_i))²·d.
    system = ALIDPFL(calibration="paper", rounds=3, local_steps=2, clip=1.5, epsilon=20.0)
    shares = [n / 360 for n in UNEQUAL.sizes]
    noises = [(4.0 * 1.5 / (0.5 * n)) ** 2 * DIM for n in UNEQUAL.sizes]
    client = sum(p * noise for p, noise in zip(shares, noises, strict=True))
    average = sum(p**2 * noise for p, noise in zip(shares, noises, strict=True))
    general, papers = both(ali_dpfl, system, UNEQUAL, CONSTANTS)
    expected = (2 + 1 / 6) * (noises[0] - client) + noises[0] - average
    assert papers - general == pytest.approx(2.0 / 12 * expected, rel=1e-9)


def test_ali_dpfl_trains_no_longer_than_its_budget_lasts() -> None:
    options = {"calibration": "paper", "sampling_rate": 0.015, "noise_multiplier": 1.1, "epsilon": 2.0, "delta": 1e-5}
    system = ALIDPFL(rounds=10_000, **options)
    assert ali_dpfl.affordable(system, EQUAL) == 314  # R_c, which the paper has as 317
    longer, least = (ali_dpfl.predicted(replace(system, rounds=n), EQUAL, CONSTANTS, "paper") for n in (314, 313))
    assert ali_dpfl.predicted(system, EQUAL, CONSTANTS, "paper") == longer != least


# (d) The recursion that a bound is the end of.


@each("steps", [1, 2, 50])
def test_contracting_is_a_plain_loop(steps: int) -> None:
    rng = np.random.default_rng(steps)
    shrinks, added = rng.uniform(0, 1.1, steps), rng.uniform(0, 3, steps)
    y = 2.5
    for shrink, more in zip(shrinks, added, strict=True):
        y = shrink * y + more
    assert contract(2.5, shrinks.tolist(), added.tolist()) == pytest.approx(y, rel=1e-12)


def test_contracting_passes_over_a_factor_of_zero() -> None:
    assert contract(5.0, [0.5, 0.0, 0.5], [1.0, 2.0, 3.0]) == 4.0


def theorys_rates(gamma: float, mu: float) -> dict[str, float | str]:
    """Return 2/(μ(k + γ)) as lr·γ/(k + γ), a hair smaller so that rounding does not lift it above its limit."""
    return {"lr": 2 / (mu * gamma) * (1 - 1e-12), "lr_schedule": f"inverse:{gamma}"}


@each("rounds", [1, 5, 300])
@each("cohort", [2, None])
@each(("mu", "smoothness"), [(0.5, 2.0), (2.0, 2.0), (0.01, 1.0)])
@each("clip", [0.01, 30.0])
def test_fedsgd_dpcs_recursion_ends_below_its_theorem(
    rounds: int, cohort: int | None, mu: float, smoothness: float, clip: float
) -> None:
    options = {"rounds": rounds, "cohort": cohort, "mechanism": "laplace", "epsilon": 1.0, "clip": clip}
    known = without(strong_convexity=mu, smoothness=smoothness)
    theory = FedSGDDPC(strong_convexity=mu, smoothness=smoothness, **options)
    own = FedSGDDPC(**theorys_rates(2 * smoothness / mu, mu), **options)
    assert own.rates(0, rounds) == pytest.approx(theory.rates(0, rounds))
    closed, stepped = (fedsgd_dpc.predicted(system, EQUAL, known, "general") for system in (theory, own))
    assert 0 < stepped <= closed * (1 + 1e-9)


@each("rounds", [1, 5, 60])
@each("cohort", [2, None])
@each(("mu", "smoothness", "steps"), [(0.5, 2.0, 4), (2.0, 2.0, 20), (0.01, 1.0, 1)])
@each("clip", [0.01, 30.0])
def test_dp_fedavgs_recursion_ends_below_its_theorem(
    rounds: int, cohort: int | None, mu: float, smoothness: float, steps: int, clip: float
) -> None:
    options = {"rounds": rounds, "local_steps": steps, "cohort": cohort, "mechanism": "laplace", "clip": clip}
    known = without(strong_convexity=mu, smoothness=smoothness)
    theory = DPFedAvg(strong_convexity=mu, smoothness=smoothness, **options)
    own = DPFedAvg(**theorys_rates(max(8 * smoothness / mu, steps), mu), **options)
    assert own.rates(0, rounds * steps) == pytest.approx(theory.rates(0, rounds * steps))
    closed, stepped = (dp_fedavg.predicted(system, EQUAL, known, "general") for system in (theory, own))
    assert 0 < stepped <= closed * (1 + 1e-9)


def test_recursions_end_at_their_theorems_after_many_steps() -> None:
    # y ← (1 − 2/k)·y + (2/μ)²·ω/k² tends to 4ω/(μ²k); of DP-FedAvg's noise the theorem allows four times as much.
    known = without(strong_convexity=2.0, initial_distance=0.0)
    for kind, module, gamma, mechanism, share in (
        (FedSGDDPC, fedsgd_dpc, 2.0, "laplace", 1.0),
        (FedSGDDPC, fedsgd_dpc, 2.0, "gaussian", 1.0),
        (DPFedAvg, dp_fedavg, 8.0, "laplace", 1 / 4),
        (DPFedAvg, dp_fedavg, 8.0, "gaussian", 1 / 4),
    ):
        options = {"rounds": 5000, "mechanism": mechanism} | ({"local_steps": 1} if kind is DPFedAvg else {})
        for epsilon, expected in ((1e9, 1.0), (1e-6, share)):  # the clients' differences alone, or the noise alone
            theory = kind(strong_convexity=2.0, smoothness=2.0, epsilon=epsilon, calibration="paper", **options)
            own = kind(**theorys_rates(gamma, 2.0), epsilon=epsilon, calibration="paper", **options)
            closed, stepped = (module.predicted(system, EQUAL, known, "general") for system in (theory, own))
            assert stepped / closed == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("steps", [1, 3])
def test_recursions_at_a_constant_rate_by_hand(steps: int) -> None:
    known = without(gradient_bound=1.3)
    system = FedSGDDPC(rounds=4, cohort=2, lr=0.1, mechanism="laplace", calibration="paper", epsilon=1.0, clip=9.0)
    noise = 8 * DIM * 2 * 16 * 81.0 / (6 * 240**2) * 6
    more = 0.01 * (2 * 1.3**2 * 0.4 + 2 * 2.0 * 0.3 + noise)
    expected = 0.95**4 * 5.0 + more * (1 - 0.95**4) / 0.05
    assert fedsgd_dpc.predicted(system, EQUAL, known, "general") == pytest.approx(expected)
    system = DPFedAvg(  # type: ignore[assignment]
        rounds=4, local_steps=steps, cohort=2, lr=0.1, mechanism="laplace", calibration="paper", epsilon=1.0
    )
    noise = 2 * DIM * 2 * (steps * 4) ** 2 / 36
    spread = 6 * 2.0 * 0.3 + 8 * (steps - 1) ** 2 * 1.3**2 + 4 * steps**2 * 1.3**2 * 0.4
    y = 5.0
    for _ in range(4):
        for step in range(steps):
            y = 0.95 * y + 0.01 * spread + (0.01 * noise if step == steps - 1 else 0.0)
    assert dp_fedavg.predicted(system, EQUAL, known, "general") == pytest.approx(y)


def test_decaying_rates_noise_a_round_by_its_first_rate() -> None:
    system = DPFedAvg(
        rounds=3,
        local_steps=2,
        lr=0.1,
        lr_schedule="inverse:5.0",
        mechanism="laplace",
        calibration="paper",
        epsilon=1.0,
    )
    rates, noise = [0.1 * 5 / (k + 5) for k in range(6)], 2 * DIM * 6 * (2 * 3) ** 2 / 36
    nothing = without(gradient_bound=0.0, heterogeneity=0.0, initial_distance=0.0)
    y = 0.0
    for k, rate in enumerate(rates):
        y = (1 - 0.5 * rate) * y + (rates[k - 1] ** 2 * noise if k % 2 else 0.0)
    assert dp_fedavg.predicted(system, EQUAL, nothing, "general") == pytest.approx(y)


# (e) A quadratic whose constants are exact: F_i = ½(w − c_i)ᵀA(w − c_i).


@dataclass(frozen=True)
class Quadratic:
    """N clients with one curvature and centres of their own, noised in many trainings at once."""

    curvatures: np.ndarray  # the eigenvalues of A, which is diagonal
    centres: np.ndarray  # [N, d]
    start: np.ndarray  # [d]
    trainings: int = 800

    @property
    def best(self) -> np.ndarray:
        return self.centres.mean(0)

    def gap(self, w: np.ndarray) -> np.ndarray:
        return 0.5 * (self.curvatures * (w - self.best) ** 2).sum(-1)

    def distance(self, w: np.ndarray) -> np.ndarray:
        return ((w - self.best) ** 2).sum(-1)

    @property
    def known(self) -> Constants:
        """Return what holds everywhere, which leaves out how long gradients are."""
        return Constants(
            strong_convexity=float(self.curvatures.min()), polyak_lojasiewicz=float(self.curvatures.min()),
            smoothness=float(self.curvatures.max()), heterogeneity=float(self.gap(self.centres).mean()),
            divergence=float(((self.curvatures * (self.centres - self.best)) ** 2).sum(1).mean()),
            initial_distance=float(self.distance(self.start)), initial_gap=float(self.gap(self.start)),
        )  # fmt: skip

    def trained(self, rates: list[list[float]], cohort: int, variance: float, seed: int) -> tuple[np.ndarray, float]:
        """Return the last models and G; rates: of each round's steps; variance: of a round's noise at rate 1."""
        rng = np.random.default_rng(seed)
        clients, dim = self.centres.shape
        w, longest = np.tile(self.start, (self.trainings, 1)), 0.0
        for steps in rates:
            chosen = rng.permuted(np.tile(np.arange(clients), (self.trainings, 1)), axis=1)[:, :cohort]
            local = np.repeat(w[:, None, :], clients, axis=1)  # everybody trains, so that G is of all of them
            for rate in steps:
                gradient = self.curvatures * (local - self.centres)
                longest = max(longest, float(np.linalg.norm(gradient, axis=2).max()))
                local = local - rate * gradient
            noise = steps[0] * math.sqrt(variance / dim) * rng.normal(size=w.shape)
            w = np.take_along_axis(local, chosen[:, :, None], 1).mean(1) + noise
        return w, longest


def quadratic(curvatures: list[float], *, apart: float, far: float, clients: int = 5) -> Quadratic:
    rng = np.random.default_rng(8)
    centres = apart * rng.normal(size=(clients, len(curvatures)))
    away = rng.normal(size=len(curvatures))
    return Quadratic(np.array(curvatures), centres, centres.mean(0) + far * away / np.linalg.norm(away))


def is_below(values: np.ndarray, bound: float) -> bool:
    """Say whether their mean is below the bound, with the benefit of four standard errors and of rounding."""
    return bool(values.mean() - 4 * values.std() / math.sqrt(len(values)) <= bound * (1 + 1e-9) + 1e-15)


PROBLEMS = {
    "far from the optimum": ([0.5, 1.0, 2.0], {"apart": 0.01, "far": 30.0}),
    "clients apart": ([0.5, 1.0, 2.0], {"apart": 3.0, "far": 0.1}),
    "curved one way": ([0.05, 1.0], {"apart": 0.3, "far": 3.0}),
    "round": ([1.0, 1.0, 1.0], {"apart": 0.5, "far": 2.0}),
}


@each("problem", PROBLEMS)
@each("cohort", [1, 3, 5])
@each("noise", [0.0, 0.1, 10.0])
@each(("rounds", "step"), [(1, 1.0), (8, 0.3), (40, 1.7)])
def test_losses_stay_below_udps_bound(problem: str, cohort: int, noise: float, rounds: int, step: float) -> None:
    curvatures, options = PROBLEMS[problem]
    task = quadratic(curvatures, **options)
    lr = step / max(curvatures)
    w, _ = task.trained([[lr]] * rounds, cohort, noise / lr**2, seed=rounds)
    known = task.known
    bound = udp.bound(
        rounds=rounds, lr=lr, curvature=known.polyak_lojasiewicz, smoothness=known.smoothness,
        initial_gap=known.initial_gap, divergence=known.divergence, clients=5, cohort=cohort, variance=noise,
    )  # fmt: skip
    gaps = task.gap(w)
    assert is_below(gaps, bound)
    if problem == "round":  # where all curvatures are one the bound is what really happens
        assert bound == pytest.approx(gaps.mean(), abs=5 * gaps.std() / math.sqrt(len(gaps)) + 1e-9)


@each("problem", PROBLEMS)
@each("cohort", [1, 3, 5])
@each("noise", [0.0, 0.1, 100.0])
@each("rounds", [1, 8, 60])
def test_models_stay_below_fedsgd_dpcs_bound(problem: str, cohort: int, noise: float, rounds: int) -> None:
    curvatures, options = PROBLEMS[problem]
    task = quadratic(curvatures, **options)
    known, mu, smoothness = task.known, min(curvatures), max(curvatures)
    rates = [2 / (mu * (t + 2 * smoothness / mu)) for t in range(rounds)]
    w, longest = task.trained([[rate] for rate in rates], cohort, noise, seed=rounds)
    spread = fedsgd_dpc.spread(
        clients=5, cohort=cohort, gradient_bound=longest, smoothness=smoothness, heterogeneity=known.heterogeneity
    )
    bound = fedsgd_dpc.bound(
        rounds=rounds, strong_convexity=mu, smoothness=smoothness, initial_distance=known.initial_distance,
        spread=spread, variance=noise,
    )  # fmt: skip
    distances = task.distance(w)
    assert is_below(distances, bound)
    if (problem, cohort, noise, rounds) == ("round", 5, 100.0, 60):
        assert bound < 4 * distances.mean()  # noise alone, in a round bowl: three times what happens


@each("problem", PROBLEMS)
@each("cohort", [1, 3, 5])
@each("noise", [0.0, 0.1, 100.0])
@each(("rounds", "steps"), [(1, 5), (10, 1), (10, 4), (5, 20)])
def test_models_stay_below_dp_fedavgs_bound(problem: str, cohort: int, noise: float, rounds: int, steps: int) -> None:
    curvatures, options = PROBLEMS[problem]
    task = quadratic(curvatures, **options)
    known, mu, smoothness = task.known, min(curvatures), max(curvatures)
    gamma = max(8 * smoothness / mu, steps)
    rates = [[2 / (mu * (t * steps + k + gamma)) for k in range(steps)] for t in range(rounds)]
    w, longest = task.trained(rates, cohort, noise, seed=rounds)
    spread = dp_fedavg.spread(
        clients=5, cohort=cohort, local_steps=steps, gradient_bound=longest, smoothness=smoothness,
        heterogeneity=known.heterogeneity,
    )  # fmt: skip
    bound = dp_fedavg.bound(
        rounds=rounds, local_steps=steps, strong_convexity=mu, smoothness=smoothness,
        initial_distance=known.initial_distance, spread=spread, variance=noise,
    )  # fmt: skip
    assert is_below(task.distance(w), bound)


def test_dp_fedavgs_bound_is_within_reach_of_what_noise_does() -> None:
    # From the optimum of a round bowl, one step a round: the bound allows each noise four times, and noise is forgotten
    # with (1 − μη)² a step where it counts 1 − μη, which makes 12 in the end.
    task = quadratic([1.0] * 4, apart=0.0, far=0.0)
    for rounds, least in ((1, 1 / 5), (200, 1 / 16)):
        w, _ = task.trained([[2 / (t + 8)] for t in range(rounds)], 5, 100.0, seed=1)
        bound = dp_fedavg.bound(
            rounds=rounds, local_steps=1, strong_convexity=1.0, smoothness=1.0, initial_distance=0.0, spread=0.0,
            variance=100.0,
        )  # fmt: skip
        assert is_below(task.distance(w), bound)
        assert task.distance(w).mean() > least * bound


@each("problem", PROBLEMS)
@each("cohort", [2, None])
@each("decay", ["constant", "inverse:10"])
@each("epsilon", [0.5, 50.0])
def test_models_stay_below_what_is_predicted_for_rates_of_ones_own(
    problem: str, cohort: int | None, decay: str, epsilon: float
) -> None:
    curvatures, options = PROBLEMS[problem]
    task = quadratic(curvatures, **options)
    facts = Facts((SIZE,) * 5, len(curvatures), Streams(3))
    dpc = FedSGDDPC(rounds=20, cohort=cohort, lr=0.8 / max(curvatures), lr_schedule=decay, epsilon=epsilon)
    fedavg = DPFedAvg(
        rounds=6,
        local_steps=4,
        cohort=cohort,
        lr=0.24 / max(curvatures),
        lr_schedule=decay,
        epsilon=epsilon,
        clip=0.1,
    )
    for system, steps, module in ((dpc, 1, fedsgd_dpc), (fedavg, 4, dp_fedavg)):
        noise = round_noise(replace(system, lr=1.0, lr_schedule="constant"), facts)
        rates = [list(system.rates(t * steps, steps)) for t in range(system.rounds)]
        w, longest = task.trained(rates, cohort or 5, noise, seed=2)
        bound = module.predicted(system, facts, replace(task.known, gradient_bound=longest), "general")
        assert is_below(task.distance(w), bound)


def test_a_rate_just_above_the_limit_can_break_the_bound() -> None:
    # The limit of UDP's rates is no caution: beyond 2/L the steepest direction grows, and A with it above 1.
    assert udp.contraction(lr=1.0 + 1e-6, curvature=1.0, smoothness=2.0) > 1
    assert udp.contraction(lr=1.0 - 1e-6, curvature=1.0, smoothness=2.0) < 1


def test_in_turn_is_the_variance_of_a_mean_of_some() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=8)
    for cohort in (1, 3, 7, 8):
        means = [rng.permutation(values)[:cohort].mean() for _ in range(20_000)]
        assert np.var(means) == pytest.approx(values.var() * in_turn(8, cohort), rel=0.05, abs=1e-12)
    assert in_turn(1, 1) == 0


# (f) Where a bound says nothing.


@each("form", ["general", "paper"])
@each("value", [0.0, -0.3, math.nan])
@each("name", ["dp-fedavg", "udp", "ali-dpfl", "fedsgd-dpc"])
def test_a_loss_without_curvature_is_refused(name: str, value: float, form: str) -> None:
    system, module = PLANNED[name]
    field = "polyak_lojasiewicz" if name == "udp" else "strong_convexity"
    with pytest.raises(Void, match=rf"^{field} \(.\) must be above 0 for the bound of {name}.*was {value:g};.*pilot$"):
        module.predicted(system, EQUAL, without(**{field: value}), form)


@each("value", [0.0, -0.3])
@each(("cohort", "letter"), [(None, "P"), (3, "Q")])
def test_a_loss_without_curvature_is_refused_by_nbafl(value: float, cohort: int | None, letter: str) -> None:
    system = NbAFL(proximal=20.0, cohort=cohort)
    with pytest.raises(Void, match=rf"^polyak_lojasiewicz \(l\) must be above 0 .*was {value:g}: {letter} = 1 \+ 2l"):
        nbafl.predicted(system, EQUAL, without(polyak_lojasiewicz=value), "general")


RATES = [  # the largest rate that is allowed where L = 2, and whether it is allowed itself
    (UDP(lr=1.0), udp, "2/L", "below", 1.0, False),
    (FedSGDDPC(lr=1.0), fedsgd_dpc, "1/λ", "at most", 0.5, True),
    (FedSGDDPC(lr=1.0, lr_schedule="inverse:8.0"), fedsgd_dpc, "1/λ", "at most", 0.5, True),
    (DPFedAvg(lr=1.0), dp_fedavg, "1/(4λ)", "at most", 0.125, True),
    (DPFedAvg(lr=1.0, lr_schedule="inverse:8.0"), dp_fedavg, "1/(4λ)", "at most", 0.125, True),
]


@each(("system", "module", "formula", "words", "limit", "allowed"), RATES)
def test_a_rate_that_is_too_large_is_refused_with_its_limit(
    system: Any, module: Any, formula: str, words: str, limit: float, allowed: bool
) -> None:
    message = rf"^lr must be {words} {re.escape(formula)} = {limit:.4g} for the bound of {system.name} to hold, was "
    for lr in (limit * 1.001, 2.0) if allowed else (limit, limit * 1.001, 2.0):
        with pytest.raises(Void, match=message + re.escape(f"{lr:g};")):
            module.predicted(replace(system, lr=lr), EQUAL, CONSTANTS, "general")
    for lr in (limit if allowed else limit * 0.999, limit / 10):
        assert module.predicted(replace(system, lr=lr), EQUAL, CONSTANTS, "general") > 0


def test_the_theorys_rates_are_never_too_large() -> None:
    for kind, module in ((FedSGDDPC, fedsgd_dpc), (DPFedAvg, dp_fedavg)):
        for mu, smoothness in ((0.1, 0.3), (0.7, 0.7), (0.3, 123.4)):
            known = without(strong_convexity=mu, smoothness=smoothness)
            system = kind(strong_convexity=mu, smoothness=smoothness)
            assert module.predicted(system, EQUAL, known, "general") > 0


@pytest.mark.parametrize("form", ["general", "paper"])
def test_nbafl_without_a_pull_is_refused(form: str) -> None:
    with pytest.raises(Void, match=r"^proximal \(μ\) must be above 0 .*was 0; set it, or use --method pilot$"):
        nbafl.predicted(NbAFL(proximal=0.0), EQUAL, CONSTANTS, form)


@each(("cohort", "letter"), [(None, "P"), (4, "Q")])
@each("form", ["general", "paper"])
def test_a_pull_that_is_too_weak_is_refused_with_one_that_is_not(cohort: int | None, letter: str, form: str) -> None:
    system = NbAFL(rounds=30, proximal=0.1, cohort=cohort, calibration="paper")
    with pytest.raises(Void, match=rf"^{letter} must be at least 0 and below 1 .*ρ = 2, B = 1.2, μ = 0.1\)") as refusal:
        nbafl.predicted(system, EQUAL, CONSTANTS, form)
    mend = float(re.search(r"set proximal to (\S+) or more", str(refusal.value))[1])
    assert nbafl.predicted(replace(system, proximal=mend), EQUAL, CONSTANTS, form) > 0
    assert nbafl.predicted(replace(system, proximal=100 * mend), EQUAL, CONSTANTS, form) > 0
    with pytest.raises(Void, match=f"^{letter} must"):  # and it is about the least
        nbafl.predicted(replace(system, proximal=0.9 * mend), EQUAL, CONSTANTS, form)


def test_where_no_pull_suffices_more_clients_are_asked_for() -> None:
    system = NbAFL(rounds=30, proximal=0.1, cohort=3, calibration="paper")
    known = without(dissimilarity=2.0)  # B ≥ √K: μB/√K − μ is not below 0
    with pytest.raises(Void, match=r"^Q must .*; let more clients take part: no pull makes it so with this few"):
        nbafl.predicted(system, EQUAL, known, "general")
    for mu in np.geomspace(1e-3, 1e9, 100):
        with pytest.raises(Void):
            nbafl.predicted(replace(system, proximal=float(mu)), EQUAL, known, "general")
    assert nbafl.predicted(replace(system, cohort=5, proximal=1000.0), EQUAL, known, "general") > 0


@each("epsilon", [1.0, 8.0, 30.0])
@each("cohort", [1, 3, 5])
def test_theorem_3_as_printed_needs_enough_rounds_and_says_how_many(epsilon: float, cohort: int) -> None:
    # The pull that Q asks for is beside the point: only the noise is asked for here.
    options = {"clients": N, "cohort": cohort, "fewest_records": SIZE, "epsilon": epsilon, "delta": 0.01}
    least = next(r for r in range(1, 1000) if 1 - N / cohort + N / cohort * math.exp(-epsilon / r) > 0)
    assert 0 < nbafl.papers_noise_size(rounds=least, **options) < math.inf
    for rounds in range(1, least):
        with pytest.raises(Void, match=rf"^rounds must be at least {least} for Theorem 3 .*was {rounds}: "):
            nbafl.papers_noise_size(rounds=rounds, **options)


def test_theorem_3_as_printed_is_refused_where_the_general_form_is_not() -> None:
    system = NbAFL(rounds=3, proximal=60.0, cohort=4, epsilon=8.0, calibration="paper")
    assert nbafl.predicted(system, EQUAL, CONSTANTS, "general") > 0
    with pytest.raises(Void, match=r"^rounds must be at least 8 .*plan more rounds, or use --form general$"):
        nbafl.predicted(system, EQUAL, CONSTANTS, "paper")
    assert nbafl.predicted(replace(system, rounds=8), EQUAL, CONSTANTS, "paper") > 0


NEEDED = {
    "dp-fedavg": ("strong_convexity", "smoothness", "initial_distance", "gradient_bound", "heterogeneity"),
    "udp": ("polyak_lojasiewicz", "smoothness", "initial_gap", "divergence"),
    "nbafl": ("initial_gap", "smoothness", "lipschitz", "polyak_lojasiewicz", "dissimilarity"),
    "ali-dpfl": ("strong_convexity", "smoothness", "initial_distance"),
    "fedsgd-dpc": ("strong_convexity", "smoothness", "initial_distance", "gradient_bound", "heterogeneity"),
}


@each(("name", "constant"), [(name, one) for name, needed in NEEDED.items() for one in needed])
@each("form", ["general", "paper"])
def test_a_constant_that_is_missing_is_asked_for_by_name(name: str, constant: str, form: str) -> None:
    system, module = PLANNED[name]
    with pytest.raises(BadInput, match=rf"^{constant} \(.+\) must be known for this bound, was left out; add it"):
        module.predicted(system, EQUAL, without(**{constant: None}), form)


@each("name", PLANNED)
@each("form", ["general", "paper"])
def test_constants_that_a_bound_does_not_need_may_be_missing(name: str, form: str) -> None:
    system, module = PLANNED[name]
    only = Constants(**{one: getattr(CONSTANTS, one) for one in NEEDED[name]})
    assert 0 < module.predicted(system, EQUAL, only, form) < math.inf
    assert module.PLANNER.bound is module.predicted


def test_sampled_records_ask_for_their_spread() -> None:
    system = FedSGDDPC(lr=0.1, sampling_rate=0.2, calibration="paper")
    with pytest.raises(BadInput, match=r"^record_spread \(Λ\) must be known"):
        fedsgd_dpc.predicted(system, EQUAL, without(record_spread=None), "general")


def test_formulas_that_know_one_budget_take_the_smallest() -> None:
    system = NbAFL(epsilon=(3.0, 1.0, 2.0, 1.0, 9.0, 4.0), delta=(1e-5, 1e-2, 1e-5, 1e-3, 1e-5, 1e-5))
    strictest = EQUAL.strictest(system)
    assert (strictest.epsilon, strictest.delta) == (1.0, 1e-3)


# (g) Where a bound has to say what the training really does.


def test_the_noise_of_a_round_is_that_of_the_average_round() -> None:
    # Clients in turn come round again: looks at every third round see the same two of six clients, and a number of
    # rounds would be chosen for whom the looks fall on.
    for rounds in range(6, 31):
        system = DPFedAvg(rounds=rounds, cohort=2, lr=1.0, calibration="paper", mechanism="laplace", epsilon=1.0)
        replies = 2 * rounds / N
        total = 0.0
        for t in range(rounds):
            weights = [N / 2 * UNEQUAL.sizes[(2 * t + place) % N] / 360 for place in range(2)]
            total += sum(DIM * weight**2 * 2 * (replies * 5 * 1.0) ** 2 for weight in weights)
        assert round_noise(system, UNEQUAL) == pytest.approx(total / rounds, rel=0.2), rounds


@pytest.mark.parametrize(("kind", "module", "gamma"), [(FedSGDDPC, fedsgd_dpc, 2.0), (DPFedAvg, dp_fedavg, 8.0)])
def test_rates_for_another_curvature_than_is_known_are_bounded_as_they_are(
    kind: Any, module: Any, gamma: float
) -> None:
    # Rates 2/(k + γ) as for μ = λ = 1, where the loss has curvatures from 0.1 to 1. Along the flattest direction a step
    # leaves 1 − 0.1·η_k of the way: Y falls like R^(−0.4), and never below γY₀/(R + γ) with the γ of μ = 0.1.
    steps = {"local_steps": 1} if kind is DPFedAvg else {}
    system = kind(rounds=10_000, strong_convexity=1.0, smoothness=1.0, epsilon=1e12, calibration="paper", **steps)
    known = without(strong_convexity=0.1, smoothness=1.0, heterogeneity=0.0, gradient_bound=0.0, initial_distance=1.0)
    reached = float(np.prod((1 - 0.1 * 2 / (np.arange(10_000) + gamma)) ** 2))
    assert module.predicted(system, EQUAL, known, "general") >= reached


@pytest.mark.parametrize("rates", [{"lr": 0.5}, {"strong_convexity": 1.0, "smoothness": 1.0}])
def test_a_poisson_sample_varies_by_its_size_even_where_all_records_are_alike(rates: dict) -> None:
    # n = 4 records, all with ½w²: the sampled gradient is w·M/(q·n) with M binomial, of mean w and variance
    # w²(1 − q)/(q·n), although no record's gradient differs from another's (Λ = 0).
    system = FedSGDDPC(rounds=1, sampling_rate=0.05, epsilon=1e9, calibration="paper", **rates)
    known = Constants(
        strong_convexity=1.0, smoothness=1.0, initial_distance=9.0, gradient_bound=3.0, heterogeneity=0.0,
        record_spread=0.0,
    )  # fmt: skip
    (rate,) = system.rates(0, 1)
    reached = 9.0 * ((1 - rate) ** 2 + rate**2 * 0.95 / (0.05 * 4))
    assert fedsgd_dpc.predicted(system, Facts((2, 2), 1, Streams(0)), known, "general") >= reached


def test_samples_of_one_client_vary_more_than_those_of_all() -> None:
    # From the optimum, where half of every client's records pull either way with a gradient of 1 (G = 0, Λ = 1): one of
    # N clients moves the model by its own sampled gradient, whose variance (1 − q)/(q·n_i) is N(1 − q)/(q·n).
    system = FedSGDDPC(rounds=1, cohort=1, sampling_rate=0.1, lr=0.5, epsilon=1e9, calibration="paper")
    known = Constants(
        strong_convexity=1.0, smoothness=1.0, initial_distance=0.0, gradient_bound=0.0, heterogeneity=0.0,
        record_spread=1.0,
    )  # fmt: skip
    reached = 0.5**2 * 0.9 / (0.1 * SIZE)
    assert fedsgd_dpc.predicted(system, EQUAL, known, "general") >= reached


@pytest.mark.parametrize("kind", ["fedsgd-dpc", "dp-fedavg"])
def test_the_largest_rate_that_is_allowed_is_not_refused_for_rounding(kind: str) -> None:
    system, module = PLANNED[kind]
    for smoothness in np.geomspace(0.6, 60, 100):
        limit = 1 / smoothness if kind == "fedsgd-dpc" else 1 / (4 * smoothness)
        decaying = replace(system, lr=float(limit), lr_schedule="inverse:7.3")  # type: ignore[type-var]
        assert module.predicted(decaying, EQUAL, without(smoothness=float(smoothness)), "general") > 0


def test_whatever_the_constants_a_pull_that_is_named_suffices() -> None:
    rng, named = np.random.default_rng(0), 0
    for _ in range(300):
        rho, clients = 10 ** rng.uniform(-2, 2), int(rng.integers(2, 60))
        known = Constants(
            smoothness=rho, lipschitz=1.0, polyak_lojasiewicz=rho * 10 ** rng.uniform(-3, 0),
            dissimilarity=1 + 10 ** rng.uniform(-2, 1),
        )  # fmt: skip
        cohort = int(rng.integers(1, clients + 1))
        system = NbAFL(proximal=1e-3, cohort=cohort, calibration="paper")
        with pytest.raises(Void) as refusal:
            nbafl.terms_of(system, clients, cohort, known)
        found = re.search(r"set proximal to (\S+) or more", str(refusal.value))
        if found is None:
            assert known.dissimilarity >= math.sqrt(cohort)
            continue
        named += 1
        assert 0 <= nbafl.terms_of(replace(system, proximal=float(found[1])), clients, cohort, known).contraction < 1
    assert named > 100


def test_theorem_3_as_printed_never_asks_for_as_many_rounds_as_there_are() -> None:
    # ε = 3·ln(2) and K = N/2: at R = 3 the logarithm is of zero, so that four rounds are the least.
    options = {"clients": 6, "cohort": 3, "fewest_records": SIZE, "epsilon": 3 * math.log(2), "delta": 0.01}
    with pytest.raises(Void, match=r"^rounds must be at least 4 .*was 3:"):
        nbafl.papers_noise_size(rounds=3, **options)
    assert nbafl.papers_noise_size(rounds=4, **options) > 0
