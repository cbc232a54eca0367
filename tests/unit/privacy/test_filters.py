"""Each filter by hand: what it pays for, where it stops, and what it will not hear of."""

import math

import numpy as np
import pytest

from dpfl.errors import BadInput
from dpfl.privacy import renyi
from dpfl.privacy.accounting import Mechanism, most_steps, tight
from dpfl.privacy.budget import Budget
from dpfl.privacy.filters import CountFilter, Filter, OverheardFilter, PlainFilter, RenyiFilter, Unlimited
from dpfl.privacy.gaussian_dp import mu_of
from grids import each

SAMPLED = Mechanism("gaussian", 1.1, 0.015)


def gaussian(multiplier: float) -> Mechanism:
    return Mechanism("gaussian", multiplier)


def laplace(multiplier: float) -> Mechanism:
    return Mechanism("laplace", multiplier)


def plain(epsilon: float, delta: float) -> PlainFilter:
    budget = Budget(epsilon, delta)
    return PlainFilter(budget, float(mu_of(epsilon, delta)) ** 2)


def pays(purse: Filter, mechanism: Mechanism, count: int = 1) -> bool:
    """Pay if it can be paid, as a ledger does."""
    if not purse.affords(mechanism, count):
        return False
    purse.pay(mechanism, count)
    return True


# Noise on all records.


def test_gaussian_releases_add_up_in_mu_squared() -> None:
    purse = PlainFilter(Budget(1.0, 1e-5), mu_squared=1.0)
    assert pays(purse, gaussian(2.0))  # 1/4
    assert pays(purse, gaussian(4.0), 8)  # 8/16
    assert not pays(purse, gaussian(1.9))  # 0.277 is more than the quarter that is left
    assert pays(purse, gaussian(2.0))  # exactly that quarter
    assert not pays(purse, gaussian(1e6))


def test_asking_costs_nothing() -> None:
    purse = PlainFilter(Budget(1.0, 1e-5), mu_squared=1.0)
    for _ in range(10):
        assert purse.affords(gaussian(1.0), 1)
    assert pays(purse, gaussian(1.0))
    assert not pays(purse, gaussian(1.0))


def test_pure_releases_add_up_in_epsilon() -> None:
    purse = plain(1.0, 0.0)
    assert pays(purse, laplace(2.0))
    assert pays(purse, laplace(4.0), 2)
    assert not pays(purse, laplace(1e6))
    assert not pays(plain(1.0, 0.0), gaussian(1e6))  # no δ buys no Gaussian noise


def test_laplace_and_gaussian_noise_share_one_budget() -> None:
    # In pure ε the Laplace releases alone would fit: 3·0.3 < 1. Beside a Gaussian release only μ² counts for both.
    purse = plain(1.0, 1e-5)
    assert pays(purse, laplace(10 / 3), 3)
    assert not pays(purse, gaussian(100.0))
    purse = plain(1.0, 1e-5)
    assert pays(purse, gaussian(5.0))
    few = laplace(100.0)
    rounds = 0
    while pays(purse, few):
        rounds += 1
    # What μ = 1/5 leaves of the budget's μ², in units of a release of ε = 1/100: μ ≤ 0.01·√(π/2), so μ² = 1.57e-4.
    left = float(mu_of(1.0, 1e-5)) ** 2 - 1 / 25
    assert rounds == math.floor(left / (1e-4 * math.pi / 2))
    assert tight({gaussian(5.0): 1, few: rounds}, 1e-5) <= 1.0


def test_a_purely_private_past_is_not_held_to_gaussian_dp() -> None:
    # ε = 0.9 in one release is far beyond the μ² of the budget, and within its ε.
    purse = plain(1.0, 1e-5)
    assert laplace(1 / 0.9).mu_squared > purse.mu_squared
    assert pays(purse, laplace(1 / 0.9))
    assert pays(purse, laplace(10.0001))
    assert not pays(purse, laplace(1e4))


def test_sampled_gaussian_noise_has_no_place_in_gaussian_dp() -> None:
    with pytest.raises(BadInput, match=r"must be on all records, was gaussian of multiplier 1\.1 at rate 0\.015"):
        plain(1.0, 1e-5).affords(SAMPLED, 1)


def test_sampled_laplace_noise_is_paid_at_its_amplified_epsilon() -> None:
    # ln(1 + ½·(e^(ln 3) − 1)) = ln 2: two releases are within 2·ln 2 = 1.386, and three are not.
    half = Mechanism("laplace", 1 / math.log(3), 0.5)
    purse = plain(1.39, 0.0)
    assert pays(purse, half, 2)
    assert not pays(purse, half)


# Sampled noise that was fixed.


def test_a_count_stops_where_the_price_of_all_releases_exceeds_the_budget() -> None:
    purse = CountFilter(Budget(1.55, 1e-5), SAMPLED)
    assert pays(purse, SAMPLED, 400)
    assert not pays(purse, SAMPLED, 23)
    assert pays(purse, SAMPLED, 22)  # 422 in all
    assert not pays(purse, SAMPLED)
    assert tight({SAMPLED: 422}, 1e-5) <= 1.55 < tight({SAMPLED: 423}, 1e-5)


@each("at_once", [1, 7, 1000])
def test_a_count_does_not_depend_on_how_it_was_asked(at_once: int) -> None:
    budget, mechanism = Budget(1.0, 1e-5), laplace(30.0)
    purse, steps = CountFilter(budget, mechanism), 0
    while pays(purse, mechanism, at_once):
        steps += at_once
    most = most_steps(tight, mechanism, budget)
    assert steps == most - most % at_once


def test_a_count_is_zero_where_not_one_release_fits() -> None:
    assert not pays(CountFilter(Budget(0.01, 1e-9), SAMPLED), SAMPLED)
    assert not pays(CountFilter(Budget(5.0, 0.0), SAMPLED), SAMPLED)


@each("other", [Mechanism("gaussian", 1.0, 0.015), Mechanism("gaussian", 1.1, 0.01), gaussian(1e6)])
def test_a_count_refuses_less_noise_and_other_batches_than_were_agreed_on(other: Mechanism) -> None:
    purse = CountFilter(Budget(1.55, 1e-5), SAMPLED)
    assert pays(purse, SAMPLED)
    with pytest.raises(BadInput, match=r"must stay gaussian of multiplier 1\.1 at rate 0\.015"):
        purse.affords(other, 1)


def test_more_noise_than_was_agreed_on_counts_as_what_was_agreed_on() -> None:
    purse = CountFilter(Budget(1.55, 1e-5), SAMPLED)
    assert pays(purse, Mechanism("gaussian", 50.0, 0.015), 422)
    assert not pays(purse, Mechanism("gaussian", 50.0, 0.015))


# Noise that changes along the way.


def test_every_order_has_its_own_share_of_delta() -> None:
    """Turn each allowance around: ε = ρ + ln(1 − 1/α) − ln(δ·α)/(α − 1) must be the budget's at δ, summed over α."""
    purse = RenyiFilter(Budget(4.0, 1e-5))
    alpha = np.array(purse.ORDERS)
    logs = (alpha - 1) * (purse.allowances - 4.0 + np.log1p(-1 / alpha)) - np.log(alpha)
    shares = np.exp(logs)
    assert np.all(shares > 0)
    assert math.fsum(shares) <= 1e-5 * (1 + 1e-9)
    assert math.fsum(shares) == pytest.approx(1e-5)  # and nothing is given away


def test_the_curve_of_a_gaussian_release_by_hand() -> None:
    # α·μ²/2 with μ = 1/2: α/8. The filter stops when no order is left, and so with the last of them.
    purse = RenyiFilter(Budget(4.0, 1e-5))
    fits = max(
        math.floor(allowance / (alpha / 8)) for alpha, allowance in zip(purse.ORDERS, purse.allowances, strict=True)
    )
    assert fits > 1
    for _ in range(fits):
        assert pays(purse, gaussian(2.0))
    assert not pays(purse, gaussian(2.0))
    assert tight({gaussian(2.0): fits}, 1e-5) <= 4.0


def test_curves_of_different_releases_add_up_order_by_order() -> None:
    purse, once = RenyiFilter(Budget(4.0, 1e-5)), Mechanism("gaussian", 1.1, 0.015)
    pays(purse, once, 10)
    pays(purse, gaussian(8.0), 2)
    expected = 10 * renyi.curve(once, purse.ORDERS) + 2 * np.array(purse.ORDERS) / 128
    assert purse.spent == pytest.approx(expected)


def test_an_order_that_is_beyond_its_allowance_never_comes_back() -> None:
    # Noise that is fatal at high orders and cheap at low ones must be remembered as such by what follows it.
    first, then = Mechanism("gaussian", 0.7, 0.01), Mechanism("gaussian", 20.0)
    purse = RenyiFilter(Budget(6.0, 1e-5))
    assert pays(purse, first, 20)
    within = purse.spent <= purse.allowances
    assert within.any()
    assert not within.all()
    alone, after = RenyiFilter(Budget(6.0, 1e-5)), 0
    while pays(alone, then, 10):
        after += 10
    rest = 0
    while pays(purse, then, 10):
        rest += 10
    assert 0 < rest < after
    assert tight({first: 20, then: rest}, 1e-5) <= 6.0


def test_a_purely_private_past_needs_no_order() -> None:
    purse = RenyiFilter(Budget(1.0, 0.0))
    assert pays(purse, laplace(2.0))
    assert not pays(purse, gaussian(1e6))  # no δ, no Gaussian noise
    assert pays(purse, laplace(2.0))
    assert not pays(purse, laplace(1e6))


def test_half_of_delta_goes_to_the_order_that_suits_the_first_release() -> None:
    budget = Budget(1.55, 1e-5)
    paid = {}
    for first in (None, SAMPLED):
        purse, paid[first] = RenyiFilter(budget, first), 0
        while pays(purse, SAMPLED):
            paid[first] += 1
    # Rényi DP with all of δ for the best order would pay for 281 (`dpfl account`).
    assert 80 < paid[None] < 0.6 * paid[SAMPLED] < 0.6 * 281
    alpha = np.array(RenyiFilter.ORDERS)
    purse = RenyiFilter(budget, SAMPLED)
    deltas = np.exp((alpha - 1) * (purse.allowances - budget.epsilon + np.log1p(-1 / alpha)) - np.log(alpha))
    assert deltas.sum() == pytest.approx(1e-5)
    assert deltas.max() == pytest.approx(0.5e-5)


# An eavesdropper.


def sends(purse: OverheardFilter, mu_squared: float) -> bool:
    """Send a model out if that can be paid, as a ledger does."""
    if not purse.affords_model(mu_squared):
        return False
    purse.pay_model(mu_squared)
    return True


def test_any_number_of_uploads_of_which_few_are_heard_and_none_read() -> None:
    purse = OverheardFilter(1.0, exposures=4)
    for _ in range(100):
        assert pays(purse, gaussian(2.0))  # a quarter of the budget
    assert not pays(purse, gaussian(1.99))
    assert pays(purse, gaussian(3.0))


def test_what_is_not_heard_is_read() -> None:
    # One upload costs 1/4, what models tell of it 1/16: of thirteen rounds one is heard and twelve are read.
    purse = OverheardFilter(1.0, exposures=1)
    for round in range(1, 14):
        assert pays(purse, gaussian(2.0))
        assert sends(purse, 1 / 16), round
    assert not pays(purse, gaussian(2.0))  # which could be heard instead of one before
    assert pays(purse, gaussian(4.0))  # no more than that one brought: it may leave, but no model may tell of it
    assert not sends(purse, 1e-3)
    assert sends(purse, 0.0)


def test_heard_is_what_brings_most_beyond_the_model() -> None:
    # Of 1/2 the model tells all. So 1/4 is heard beside it, and what 1/8 tells is read.
    purse = OverheardFilter(1.0, exposures=1)
    for price, told in ((1 / 2, 1 / 2), (1 / 4, 0.0), (1 / 8, 1 / 8)):
        assert pays(purse, gaussian(price**-0.5))
        assert sends(purse, told)
    assert not pays(purse, gaussian((3 / 8 + 1e-3) ** -0.5))
    assert pays(purse, gaussian((3 / 8) ** -0.5 * (1 + 1e-12)))


def test_a_model_tells_no_more_of_an_upload_than_the_upload() -> None:
    purse = OverheardFilter(1.0, exposures=1)
    assert pays(purse, gaussian(1.0))
    assert sends(purse, 1.0 + 1e-6)  # as the books round


def test_an_upload_that_was_lost_still_counts_as_heard() -> None:
    purse = OverheardFilter(1.0, exposures=1)
    assert pays(purse, gaussian(1.0))  # and no model followed
    assert pays(purse, gaussian(2.0))
    assert not sends(purse, 1 / 100)


@each(("other", "count"), [(laplace(100.0), 1), (gaussian(100.0), 2), (Mechanism("gaussian", 100.0, 0.5), 1)])
def test_what_models_do_not_hide_is_refused_where_few_uploads_are_heard(other: Mechanism, count: int) -> None:
    with pytest.raises(BadInput, match="must be plain sums with Gaussian noise on them"):
        OverheardFilter(1.0, exposures=2).affords(other, count)


# No budget.


def test_without_a_limit_everything_is_paid() -> None:
    for mechanism in (gaussian(1e-9), laplace(1e-9), SAMPLED):
        assert pays(Unlimited(), mechanism, 10**9)
