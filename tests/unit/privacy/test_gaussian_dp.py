"""Closed-form Gaussian DP: against numbers of many digits, against another accountant, and at the extremes."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from dpfl.privacy.gaussian_dp import epsilon_of, log_delta, mu_of
from grids import each


@each(
    ("epsilon", "mu", "expected"),
    [
        # ln δ = ln(Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2)), worked out with 60 digits
        (1, 1, -2.06406644650039),
        (8, 2, -7.61014153074411),
        (0.1, 0.05, -7.71476150812507),
        (0.001, 0.00025, -20.1426112247619),
        (30, 5, -8.93782571202871),
        (1000, 20, -805.707747545284),
        (1000, 40, -15.1873906989167),
        (100000.0, 418, -461.459901251626),
        (0.5, 3, -0.186334626460031),
    ],
)
def test_the_trade_off_against_sixty_digits(epsilon: float, mu: float, expected: float) -> None:
    assert float(log_delta(epsilon, mu)) == pytest.approx(expected, rel=1e-9)


def test_without_any_epsilon_delta_is_the_total_variation_distance() -> None:
    # δ(0) = Φ(μ/2) − Φ(−μ/2) = erf(μ/(2√2))
    for mu in (1e-3, 0.5, 2.0, 6.0):
        assert math.exp(log_delta(0.0, mu)) == pytest.approx(math.erf(mu / (2 * math.sqrt(2))), rel=1e-9)


@each(("noise", "count"), [(0.5, 1), (1.0, 1), (4.0, 1), (8.0, 100), (3.0, 7)])
@each("delta", [1e-3, 1e-6])
def test_dp_accounting_agrees_within_a_thousandth(noise: float, count: int, delta: float) -> None:
    accountant = PLDAccountant()  # it discretises, and is a little on the safe side of us
    accountant.compose(dp_accounting.GaussianDpEvent(noise), count)
    ours = float(epsilon_of(math.sqrt(count) / noise, delta))
    assert ours == pytest.approx(accountant.get_epsilon(delta), rel=1e-3)


def test_no_release_costs_nothing() -> None:
    assert float(epsilon_of(0.0, 1e-5)) == 0.0


def test_a_release_that_delta_alone_covers_costs_nothing() -> None:
    # δ(0) = erf(μ/(2√2)) ≈ 0.3989·μ, so μ = 1e-6 stays below δ = 1e-6 without any ε, and μ = 1e-5 does not.
    assert float(epsilon_of(1e-6, 1e-6)) == 0.0
    assert float(epsilon_of(1e-5, 1e-6)) > 0.0


@each("epsilon", [1e-3, 1.0, 1e5])
@each("delta", [1e-200, 1e-12, 0.5, 0.999])
def test_extremes_stay_finite_and_come_back(epsilon: float, delta: float) -> None:
    worth = float(mu_of(epsilon, delta))
    assert math.isfinite(worth)
    assert worth > 0
    assert float(epsilon_of(worth, delta)) == pytest.approx(epsilon, rel=1e-3)


def test_a_large_release_costs_half_its_square() -> None:
    # For large μ and a moderate δ, ε is μ²/2 + μ·Φ⁻¹(1 − δ): with δ = 1/2 that is μ²/2.
    for mu in (1e2, 1e4):
        assert float(epsilon_of(mu, 0.5)) == pytest.approx(mu**2 / 2, rel=1e-3)


def test_a_whole_array_is_each_of_its_entries() -> None:
    mus, deltas = np.array([0.0, 1e-3, 0.7, 4.0, 30.0]), np.array([1e-5, 1e-8, 1e-3, 0.2, 1e-100])
    together = epsilon_of(mus, deltas)
    assert together.shape == (5,)
    assert together.tolist() == [float(epsilon_of(mu, delta)) for mu, delta in zip(mus, deltas, strict=True)]
    epsilons = np.array([1e-3, 0.5, 8.0, 20.0, 1e3])
    worth = mu_of(epsilons, deltas)
    assert worth.tolist() == [float(mu_of(e, delta)) for e, delta in zip(epsilons, deltas, strict=True)]
    assert mu_of(epsilons, 1e-5).tolist() == [float(mu_of(e, 1e-5)) for e in epsilons]


def exact_delta(epsilon: float, mu: float) -> mpmath.mpf:
    """Return δ = Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) with 60 digits."""
    with mpmath.workdps(60):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(-epsilon / mu + mu / 2) - mpmath.exp(epsilon) * mpmath.ncdf(-epsilon / mu - mu / 2)


@each("epsilon", [1e-3, 0.03, 1.0, 20.0, 1e3])
@each("delta", [1e-100, 1e-12, 1e-5, 1e-2, 0.5])
def test_both_directions_err_on_the_safe_side_against_sixty_digits(epsilon: float, delta: float) -> None:
    worth = float(mu_of(epsilon, delta))
    assert exact_delta(epsilon, worth) <= delta  # the budget's worth is not overrated
    assert exact_delta(epsilon, worth * (1 + 1e-6)) > delta  # nor given away
    spent = float(epsilon_of(worth, delta))
    assert exact_delta(spent, worth) <= delta  # what was spent is not understated


def test_budgets_that_many_share_are_worth_what_each_is_alone() -> None:
    epsilons, deltas = np.array([[1.0, 2.0, 1.0], [0.5, 1.0, 2.0]]), np.array([1e-5, 1e-3, 1e-5])
    alone = [[float(mu_of(e, d)) for e, d in zip(row, deltas, strict=True)] for row in epsilons]
    np.testing.assert_allclose(mu_of(epsilons, deltas), alone, rtol=1e-12)
    assert mu_of([], []).shape == (0,)
