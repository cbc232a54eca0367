"""Exact accounting, for any budget: more noise costs less, and a budget's worth is never more than the budget."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl.privacy.budget import Budget
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.privacy.certificate import _up
from dpfl.privacy.gaussian_dp import epsilon_of, log_delta, mu_of

unhurried = settings(deadline=None)  # a busy machine is no failure
epsilons = st.floats(-3, 3).map(lambda power: 10**power)
deltas = st.floats(-12, -1).map(lambda power: 10**power)
mus = st.floats(-2, 1.5).map(lambda power: 10**power)
more = st.floats(1.01, 100)


@unhurried
@given(epsilon=epsilons, delta=deltas)
def test_a_budget_comes_back_from_its_worth_and_never_larger(epsilon, delta):
    back = float(epsilon_of(mu_of(epsilon, delta), delta))
    assert epsilon * (1 - 1e-3) <= back <= epsilon * (1 + 1e-9)


@unhurried
@given(mu=mus, delta=deltas)
def test_the_epsilon_found_meets_delta_and_a_smaller_one_does_not(mu, delta):
    found = float(epsilon_of(mu, delta))
    assert float(log_delta(found, mu)) <= math.log(delta) + 1e-9
    if found > 0:
        assert float(log_delta(found * (1 - 1e-6), mu)) > math.log(delta)


@unhurried
@given(mu=mus, delta=deltas, factor=more)
def test_epsilon_rises_with_mu_and_so_falls_with_noise(mu, delta, factor):
    assert epsilon_of(mu * factor, delta) >= epsilon_of(mu, delta)
    if epsilon_of(mu, delta) > 0:
        assert epsilon_of(mu * factor, delta) > epsilon_of(mu, delta)


@unhurried
@given(mu=mus, delta=st.floats(-12, -3).map(lambda power: 10**power), factor=st.floats(1.01, 100))
def test_epsilon_falls_as_delta_grows(mu, delta, factor):
    assert epsilon_of(mu, delta * factor) <= epsilon_of(mu, delta)


@unhurried
@given(epsilon=epsilons, delta=deltas, factor=more)
def test_a_larger_budget_is_worth_more(epsilon, delta, factor):
    assert mu_of(epsilon * factor, delta) > mu_of(epsilon, delta)
    assert mu_of(epsilon, min(0.9, delta * factor)) > mu_of(epsilon, delta)


@unhurried
@given(
    bound=st.floats(1e-6, 1e6), releases=st.integers(1, 10_000), epsilon=epsilons, delta=deltas
)  # fmt: skip
def test_calibrated_noise_spends_the_budget_and_no_more(bound, releases, epsilon, delta):
    (std,) = gaussian_noise_stds([bound], [releases], [Budget(epsilon, delta)])
    spent, worth = releases * (bound / std) ** 2, float(mu_of(epsilon, delta)) ** 2
    assert worth * (1 - 1e-6) <= spent <= worth


@unhurried
@given(epsilon=st.floats(1e-300, 1e300))
def test_a_printed_bound_still_is_one(epsilon):
    assert epsilon <= float(_up(epsilon)) <= epsilon * 1.0011
