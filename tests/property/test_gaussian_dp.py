"""Exact accounting, for any budget: more noise costs less, and a budget's worth is never more than the budget."""

import math
from typing import Any

import mpmath
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl.privacy.budget import Budget
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.privacy.gaussian_dp import epsilon_of, log_delta, mu_of, mu_of_pure
from dpfl.rounding import rounded_up

unhurried = settings(deadline=None)  # a busy machine is no failure
long = settings(deadline=None, max_examples=150)


def powers_of_ten(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda power: 10**power)


epsilons = powers_of_ten(-3, 3)
deltas = powers_of_ten(-12, -1)
mus = powers_of_ten(-2, 1.5)
more = st.floats(1.01, 100)

any_epsilon = powers_of_ten(-6, 5)
any_delta = powers_of_ten(-200, -12) | powers_of_ten(-12, -0.3)


def exact_delta(epsilon: float, mu: float, digits: int = 60) -> mpmath.mpf:
    """Return δ = Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) with many digits."""
    with mpmath.workdps(digits):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(-epsilon / mu + mu / 2) - mpmath.exp(epsilon) * mpmath.ncdf(-epsilon / mu - mu / 2)


@unhurried
@given(epsilon=epsilons, delta=deltas)
def test_a_budget_comes_back_from_its_worth_and_never_larger(epsilon: Any, delta: Any) -> None:
    back = float(epsilon_of(mu_of(epsilon, delta), delta))
    assert epsilon * (1 - 1e-3) <= back <= epsilon * (1 + 1e-9)


@unhurried
@given(mu=mus, delta=deltas)
def test_the_epsilon_found_meets_delta_and_a_smaller_one_does_not(mu: Any, delta: Any) -> None:
    found = float(epsilon_of(mu, delta))
    assert float(log_delta(found, mu)) <= math.log(delta) + 1e-9
    if found > 0:
        assert float(log_delta(found * (1 - 1e-6), mu)) > math.log(delta)


@long
@given(epsilon=any_epsilon, delta=any_delta)
def test_the_worth_of_any_budget_is_not_overrated_and_hardly_underrated(epsilon: Any, delta: Any) -> None:
    worth = float(mu_of(epsilon, delta))
    assert exact_delta(epsilon, worth) <= delta < exact_delta(epsilon, worth * (1 + 3e-8))


@long
@given(epsilon=any_epsilon, delta=any_delta)
def test_what_any_noise_costs_is_not_understated_and_hardly_overstated(epsilon: Any, delta: Any) -> None:
    mu = float(mu_of(epsilon, delta))  # so that the answer lies near ε, wherever that is
    cost = float(epsilon_of(mu, delta))
    assert exact_delta(cost, mu) <= delta < exact_delta(cost * (1 - 3e-8), mu)


@settings(deadline=None, max_examples=50)
@given(mu=st.floats(11, 30), share=st.floats(0, 1))
def test_a_delta_close_to_1_keeps_the_digits_that_it_is_short_of_1(mu: Any, share: Any) -> None:
    epsilon = share * mu * (mu / 2 - 5.1)  # so that Φ(μ/2 − ε/μ) lies beyond five standard deviations
    with mpmath.workdps(120):  # 1 − δ may be as small as e^(−μ²/8), about 1e-49
        short = -mpmath.log(exact_delta(epsilon, mu, digits=120))
    assert mpmath.almosteq(-float(log_delta(epsilon, mu)), short, rel_eps=1e-9)


@unhurried
@given(epsilon=any_epsilon)
def test_the_gaussian_that_covers_a_pure_release_is_the_narrowest_that_does(epsilon: Any) -> None:
    covering = mu_of_pure(epsilon)
    with mpmath.workdps(60):
        corner = 1 / (1 + mpmath.exp(mpmath.mpf(epsilon)))  # where the trade-off of ε-DP meets the diagonal
        # Below 1e-3 it is the first term of a series, π/48 − 1/12 = −0.018 ε² of it above the sum.
        assert mpmath.ncdf(-mpmath.mpf(covering) / 2) <= corner < mpmath.ncdf(-mpmath.mpf(covering) / 2 * (1 - 3e-8))


@unhurried
@given(epsilon=powers_of_ten(-3, 3), delta=deltas)
def test_covering_a_pure_release_never_makes_it_cheaper(epsilon: Any, delta: Any) -> None:
    # At any δ the covering Gaussian costs at least what randomised response costs: δ = (e^ε − e^ε′)/(1 + e^ε).
    randomised = epsilon + math.log1p(-delta * (1 + math.exp(-epsilon))) if delta * (1 + math.exp(-epsilon)) < 1 else 0
    assert float(epsilon_of(mu_of_pure(epsilon), delta)) >= randomised


@settings(deadline=None, max_examples=15)
@given(pairs=st.lists(st.tuples(any_epsilon, any_delta), min_size=1, max_size=5))
def test_many_at_once_are_each_of_them_alone(pairs: Any) -> None:
    column, other = (np.array(one) for one in zip(*pairs, strict=True))
    worth = mu_of(column, other)
    # Sums of a row may be taken in another order beside other rows: the last bits may differ, a margin may not.
    np.testing.assert_allclose(worth, [float(mu_of(*pair)) for pair in pairs], rtol=1e-9)
    alone = [float(epsilon_of(mu, delta)) for mu, (_, delta) in zip(worth, pairs, strict=True)]
    np.testing.assert_allclose(epsilon_of(worth, other), alone, rtol=1e-9)


@unhurried
@given(mu=mus, delta=deltas, factor=more)
def test_epsilon_rises_with_mu_and_so_falls_with_noise(mu: Any, delta: Any, factor: Any) -> None:
    assert epsilon_of(mu * factor, delta) >= epsilon_of(mu, delta)
    if epsilon_of(mu, delta) > 0:
        assert epsilon_of(mu * factor, delta) > epsilon_of(mu, delta)


@unhurried
@given(mu=mus, delta=st.floats(-12, -3).map(lambda power: 10**power), factor=st.floats(1.01, 100))
def test_epsilon_falls_as_delta_grows(mu: Any, delta: Any, factor: Any) -> None:
    assert epsilon_of(mu, delta * factor) <= epsilon_of(mu, delta)


@unhurried
@given(epsilon=epsilons, delta=deltas, factor=more)
def test_a_larger_budget_is_worth_more(epsilon: Any, delta: Any, factor: Any) -> None:
    assert mu_of(epsilon * factor, delta) > mu_of(epsilon, delta)
    assert mu_of(epsilon, min(0.9, delta * factor)) > mu_of(epsilon, delta)


@unhurried
@given(
    bound=st.floats(1e-6, 1e6), releases=st.integers(1, 10_000), epsilon=epsilons, delta=deltas
)  # fmt: skip
def test_calibrated_noise_spends_the_budget_and_no_more(bound: Any, releases: Any, epsilon: Any, delta: Any) -> None:
    (std,) = gaussian_noise_stds([bound], [releases], [Budget(epsilon, delta)])
    spent, worth = releases * (bound / std) ** 2, float(mu_of(epsilon, delta)) ** 2
    assert worth * (1 - 1e-6) <= spent <= worth


@unhurried
@given(epsilon=st.floats(1e-300, 1e300))
def test_a_printed_bound_still_is_one_but_for_the_noise_of_floating_point(epsilon: Any) -> None:
    assert epsilon * (1 - 1.001e-9) <= float(rounded_up(epsilon)) <= epsilon * 1.0011
