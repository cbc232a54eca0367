"""Rényi curves against closed forms worked out here and against dp-accounting's own accountant; the conversion to ε."""

import logging
import math
from itertools import pairwise

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from scipy.integrate import quad

from dpfl.privacy import renyi
from dpfl.privacy.accounting import Mechanism
from dpfl.privacy.budget import Budget
from grids import each

ORDERS = (1.1, 1.5, 2.0, 3.7, 8.0, 32.0, 64.0)

plain = Mechanism("gaussian", 2.0)
sampled = Mechanism("gaussian", 1.1, 0.1)
fixed = Mechanism("gaussian", 1.1, 0.1, "fixed")
laplace = Mechanism("laplace", 3.0)
sampled_laplace = Mechanism("laplace", 0.5, 0.1)


def test_the_curve_of_plain_gaussian_noise_is_a_line() -> None:
    # α/(2z²) with z = 2
    assert renyi.curve(plain, ORDERS).tolist() == pytest.approx([alpha / 8 for alpha in ORDERS], rel=1e-12)


def test_the_curve_of_plain_laplace_noise() -> None:
    # ln[α/(2α−1)·e^((α−1)/b) + (α−1)/(2α−1)·e^(−α/b)]/(α−1) (Mironov, 2017, Table II), here with b = 3
    expected = [
        math.log(a / (2 * a - 1) * math.exp((a - 1) / 3) + (a - 1) / (2 * a - 1) * math.exp(-a / 3)) / (a - 1)
        for a in ORDERS
    ]
    assert renyi.curve(laplace, ORDERS).tolist() == pytest.approx(expected, rel=1e-9)


def test_the_curve_of_sampled_gaussian_noise_at_order_2() -> None:
    # (1−q)² + 2q(1−q) + q²·e^(1/z²) = 1 + q²(e^(1/z²) − 1)
    found = renyi.curve(Mechanism("gaussian", 1.0, 0.1), (2.0,))
    assert found.tolist() == pytest.approx([math.log(1 + 0.01 * (math.e - 1))], rel=1e-12)


@pytest.mark.parametrize(("noise", "inner"), [(1.0, 2 * math.e), (2.0, 4 * (math.exp(0.25) - 1))])
def test_the_curve_of_batches_of_fixed_size_at_order_2(noise: float, inner: float) -> None:
    # ln(1 + q²·min(4(e^ε(2) − 1), 2e^ε(2))), ε(2) = 1/z² (Wang, Balle and Kasiviswanathan, 2019, Theorem 9)
    found = renyi.curve(Mechanism("gaussian", noise, 0.1, "fixed"), (2.0,))
    assert found.tolist() == pytest.approx([math.log(1 + 0.01 * inner)], rel=1e-12)


def test_sampled_laplace_noise_is_held_for_randomised_response() -> None:
    # One answer out of two, true with p = e^ε/(1 + e^ε), where ε = ln(1 + q(e^(1/b) − 1)) = ln(1 + 0.1(e² − 1)).
    odds = 1 + 0.1 * (math.exp(2) - 1)
    p = odds / (1 + odds)
    expected = [math.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1) for a in ORDERS]
    assert renyi.curve(sampled_laplace, ORDERS).tolist() == pytest.approx(expected, rel=1e-12)


def laplace_divergence(alpha: float, q: float, b: float, *, flipped: bool) -> float:
    """Integrate the Rényi divergence between (1−q)·Lap(0, b) + q·Lap(1, b) and Lap(0, b), or the other way round."""

    def density(x: float, at: float) -> float:
        return math.exp(-abs(x - at) / b) / (2 * b)

    def inside(x: float) -> float:
        with_record, without = (1 - q) * density(x, 0) + q * density(x, 1), density(x, 0)
        first, second = (without, with_record) if flipped else (with_record, without)
        return second * (first / second) ** alpha

    pieces = pairwise([-30.0, 0.0, 1.0, 30.0])  # the densities have kinks at 0 and 1
    return math.log(math.fsum(quad(inside, *piece)[0] for piece in pieces)) / (alpha - 1)


@each("alpha", [1.5, 4.0, 16.0])
@each("flipped", [False, True])
def test_no_sampled_laplace_noise_diverges_more_than_its_curve(alpha: float, flipped: bool) -> None:
    true = laplace_divergence(alpha, 0.1, 0.5, flipped=flipped)
    assert 0 < true <= renyi.curve(sampled_laplace, (alpha,))[0]


GAUSSIAN = dp_accounting.GaussianDpEvent(1.1)


@each(
    ("mechanism", "event", "neighbours"),
    [
        (plain, dp_accounting.GaussianDpEvent(2.0), "ADD_OR_REMOVE_ONE"),
        (laplace, dp_accounting.LaplaceDpEvent(3.0), "ADD_OR_REMOVE_ONE"),
        (sampled, dp_accounting.PoissonSampledDpEvent(0.1, GAUSSIAN), "ADD_OR_REMOVE_ONE"),
        (fixed, dp_accounting.SampledWithoutReplacementDpEvent(50, 5, GAUSSIAN), "REPLACE_ONE"),
    ],
)
def test_dp_accounting_agrees(mechanism: Mechanism, event: dp_accounting.DpEvent, neighbours: str) -> None:
    accountant = RdpAccountant(renyi.ORDERS, dp_accounting.NeighboringRelation[neighbours]).compose(event, 40)
    assert renyi.epsilon({mechanism: 40}, 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)


def test_different_mechanisms_add_up_order_by_order() -> None:
    accountant = RdpAccountant(renyi.ORDERS)
    accountant.compose(dp_accounting.GaussianDpEvent(2.0), 3)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, GAUSSIAN), 20)
    accountant.compose(dp_accounting.LaplaceDpEvent(3.0), 2)
    together = renyi.epsilon({plain: 3, sampled: 20, laplace: 2}, 1e-6)
    assert together == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)


def test_epsilon_by_hand() -> None:
    # One release of z = 4 at order α costs α/32 + ln(1 − 1/α) − ln(δα)/(α − 1); take the least of the orders.
    by_order = [a / 32 + math.log(1 - 1 / a) - math.log(1e-6 * a) / (a - 1) for a in renyi.ORDERS]
    assert renyi.epsilon({Mechanism("gaussian", 4.0): 1}, 1e-6) == pytest.approx(min(by_order), rel=1e-12)


def test_the_orders_are_those_of_dp_accounting() -> None:
    assert list(renyi.ORDERS) == DEFAULT_RDP_ORDERS


def test_nothing_costs_nothing() -> None:
    assert renyi.epsilon({}, 1e-5) == 0.0
    assert renyi.epsilon({}, 0.0) == 0.0


def test_at_delta_0_only_laplace_noise_has_a_price() -> None:
    assert renyi.epsilon({laplace: 6}, 0.0) == pytest.approx(2.0, rel=1e-12)
    assert renyi.epsilon({sampled_laplace: 2}, 0.0) == pytest.approx(
        2 * math.log(1 + 0.1 * (math.exp(2) - 1)), rel=1e-12
    )
    assert renyi.epsilon({laplace: 6, sampled: 1}, 0.0) == math.inf


@each("mechanism", [plain, sampled, fixed, laplace, sampled_laplace])
def test_a_tiny_delta_has_a_finite_price(mechanism: Mechanism) -> None:
    prices = [renyi.epsilon({mechanism: 10}, delta) for delta in (1e-5, 1e-30, 1e-200)]
    assert 0 < prices[0] < prices[1] < prices[2] < math.inf


@each("mechanism", [plain, sampled, fixed, laplace, sampled_laplace])
def test_a_curve_rises_with_its_order_and_is_not_to_be_written_to(mechanism: Mechanism) -> None:
    found = renyi.curve(mechanism, ORDERS)
    assert (found > 0).all()
    rising = found[1:]  # at 1.1 the series for sampled Gaussian noise does not converge: infinite, left out
    assert (np.diff(rising) >= 0).all()
    assert rising[-1] > 2 * rising[0]
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0.0


def test_what_the_budget_allows_turns_the_conversion_around() -> None:
    budget = Budget(2.0, 1e-6)
    for alpha, allowed in zip(ORDERS, renyi.allowances(budget, ORDERS), strict=True):
        back = allowed + math.log(1 - 1 / alpha) - math.log(1e-6 * alpha) / (alpha - 1)
        assert back == pytest.approx(2.0, rel=1e-12)


def test_what_the_budget_allows_by_hand() -> None:
    # α = 2, ε = 10, δ = e⁻⁸: 10 − ln ½ + (−8 + ln 2)/1 = 2 + 2·ln 2
    assert renyi.allowances(Budget(10.0, math.exp(-8)), (2.0,)).tolist() == pytest.approx([2 + 2 * math.log(2)])


def test_orders_that_share_delta_are_allowed_what_their_share_allows() -> None:
    shares = np.array([0.5, 0.25])
    allowed = renyi.allowances(Budget(2.0, 1e-6), (2.0, 8.0), shares).tolist()
    alone = [renyi.allowances(Budget(2.0, 1e-6 * s), (a,))[0] for a, s in zip((2.0, 8.0), shares, strict=True)]
    assert allowed == pytest.approx(alone, rel=1e-12)


def test_without_a_delta_nothing_is_allowed() -> None:
    assert renyi.allowances(Budget(2.0, 0.0), ORDERS).tolist() == [-math.inf] * len(ORDERS)


@each("mechanism", [plain, sampled, fixed])
def test_a_curve_within_its_allowance_at_one_order_keeps_the_budget_and_beyond_all_does_not(
    mechanism: Mechanism,
) -> None:
    allowed, one = renyi.allowances(Budget(3.0, 1e-6), renyi.ORDERS), renyi.curve(mechanism, renyi.ORDERS)
    most = int(np.max(allowed / one))
    assert most > 0
    assert renyi.epsilon({mechanism: most}, 1e-6) <= 3.0 < renyi.epsilon({mechanism: most + 1}, 1e-6)


@pytest.mark.parametrize("mechanism", [Mechanism("gaussian", 1e-200), Mechanism("laplace", 1e-200, 0.5)])
def test_noise_of_which_squares_overflow_hides_nothing(mechanism: Mechanism) -> None:
    assert np.isinf(renyi.curve(mechanism, ORDERS)).all()


def test_the_logger_of_dp_accounting_is_left_as_it_was() -> None:
    absl = logging.getLogger("absl")
    before = absl.level
    try:
        absl.setLevel(logging.INFO)
        renyi.curve(Mechanism("gaussian", 1.234, 0.0567), ORDERS)
        assert absl.level == logging.INFO
    finally:
        absl.setLevel(before)


def test_orders_whose_series_does_not_converge_are_left_out_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    found = renyi.curve(Mechanism("gaussian", 1.15, 0.1), ORDERS)
    assert np.isinf(found).tolist() == [True, *[False] * 6]  # infinite is safe: some other order is the best one
    assert not caplog.records
