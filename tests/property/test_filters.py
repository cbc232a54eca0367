"""Whatever noise is ordered in whatever sequence: what a filter let through never costs more than the budget.

The cost is computed anew from everything that was let through, by the tight accountant and not by the filter's sums.
Filters that are wrong in a likely way stand beside the real ones, and the same property must find them out.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from dpfl.privacy.accounting import Mechanism, most_steps, tight
from dpfl.privacy.budget import Budget
from dpfl.privacy.filters import CountFilter, Filter, OverheardFilter, PlainFilter, RenyiFilter, worth_of
from grids import each

unhurried = settings(deadline=None)  # a busy machine is no failure
some = settings(deadline=None, max_examples=50)
few = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])  # distributions take time

Releases = Sequence[tuple[Mechanism, int]]  # what is asked for, one after the other

budgets = st.builds(Budget, st.sampled_from([0.3, 1.0, 4.0, 10.0]), st.sampled_from([1e-3, 1e-5, 1e-9]))
counts = st.integers(1, 5)
gaussians = st.builds(Mechanism, st.just("gaussian"), st.floats(-1, 3).map(lambda power: 10**power))
# Few different multipliers, because each needs a privacy-loss distribution of its own.
laplaces = st.builds(Mechanism, st.just("laplace"), st.sampled_from([0.3, 2.0, 5.0, 40.0]))
sampled = st.builds(
    Mechanism, st.just("gaussian"), st.sampled_from([0.7, 1.1, 2.0, 5.0]), st.sampled_from([0.01, 0.1, 1.0])
)


def sequences(mechanisms: st.SearchStrategy[Mechanism], counts: st.SearchStrategy[int] = counts) -> st.SearchStrategy:
    return st.lists(st.tuples(mechanisms, counts), min_size=1, max_size=25)


def plain(budget: Budget) -> PlainFilter:
    return PlainFilter(budget, worth_of([budget])[0])


def let_through(purse: Filter, releases: Releases) -> tuple[Counter[Mechanism], list[Counter[Mechanism]]]:
    """Ask for one release after the other; return what was paid, and what each refusal would have made of it."""
    paid: Counter[Mechanism] = Counter()
    refused = []
    for mechanism, count in releases:
        if purse.affords(mechanism, count):
            purse.pay(mechanism, count)
            paid[mechanism] += count
        else:
            refused.append(paid + Counter({mechanism: count}))
    return paid, refused


def overdraws(make: Callable[[Budget], Filter], budget: Budget, releases: Releases) -> bool:
    """Say whether a filter let through more than its budget: the property that all of them must not have."""
    paid, _ = let_through(make(budget), releases)
    return tight(paid, budget.delta) > budget.epsilon


@unhurried
@given(budget=budgets, releases=sequences(gaussians))
def test_gaussian_noise_of_any_size_keeps_within_the_budget(budget: Any, releases: Any) -> None:
    assert not overdraws(plain, budget, releases)


@some
@given(budget=budgets, releases=sequences(gaussians))
def test_gaussian_noise_is_refused_only_where_the_budget_cannot_pay(budget: Any, releases: Any) -> None:
    _, refused = let_through(plain(budget), releases)
    for would_be in refused[:1] + refused[-1:]:
        assert tight(would_be, budget.delta) > budget.epsilon * (1 - 1e-6)


@few
@given(budget=budgets, releases=sequences(st.one_of(gaussians, laplaces)))
def test_laplace_and_gaussian_noise_together_keep_within_the_budget(budget: Any, releases: Any) -> None:
    # The whole Gaussian part is one distribution, however many multipliers it has.
    assert not overdraws(plain, budget, releases)


@unhurried
@given(epsilon=st.floats(0.1, 10), releases=sequences(st.floats(0.1, 100).map(lambda b: Mechanism("laplace", b))))
def test_laplace_noise_keeps_within_a_pure_budget(epsilon: Any, releases: Any) -> None:
    assert not overdraws(plain, Budget(epsilon, 0.0), releases)


@few
@given(budget=budgets, releases=sequences(sampled, st.integers(1, 200)))
def test_sampled_noise_that_changes_keeps_within_the_budget(budget: Any, releases: Any) -> None:
    assert not overdraws(RenyiFilter, budget, releases)


@few
@given(budget=budgets, releases=sequences(st.one_of(sampled, laplaces), st.integers(1, 20)))
def test_everything_mixed_keeps_within_the_budget(budget: Any, releases: Any) -> None:
    assert not overdraws(RenyiFilter, budget, releases)


COUNTED, COUNTED_BUDGET = Mechanism("laplace", 30.0), Budget(1.0, 1e-5)


@pytest.fixture(scope="module")
def most() -> Any:
    return most_steps(tight, COUNTED, COUNTED_BUDGET)


@few
@given(asked=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_a_count_pays_for_as_many_steps_as_fit_and_no_more(most: Any, asked: Any) -> None:
    purse, paid = CountFilter(COUNTED_BUDGET, COUNTED), 0
    for count in asked:
        fits = purse.affords(COUNTED, count)
        assert fits == (paid + count <= most)
        if fits:
            purse.pay(COUNTED, count)
            paid += count


rounds_played = st.lists(  # the price of an upload, what of it the model tells, and whether one is sent out at all
    st.tuples(st.floats(-3, 1).map(lambda power: 10**power), st.floats(0, 1), st.booleans()), min_size=1, max_size=12
)


def overheard_at_most(rounds: Any, worth: float, exposures: int, make: Callable[..., OverheardFilter]) -> float:
    """Play what a filter lets through; return the cost of the dearest choice, as a share of the budget."""
    purse, paid = make(worth, exposures), []
    for price, share, sent in rounds:
        upload = Mechanism("gaussian", price**-0.5)
        if purse.affords(upload, 1):
            purse.pay(upload, 1)
            told = share * upload.mu_squared
            if sent and purse.affords_model(told):
                purse.pay_model(told)
            else:
                told = 0.0
            paid.append((upload.mu_squared, told))
    choices = combinations(range(len(paid)), min(exposures, len(paid)))
    return max(sum(one[place not in heard] for place, one in enumerate(paid)) for heard in choices) / worth


@some
@given(rounds=rounds_played, worth=st.floats(0.1, 10.0), exposures=st.integers(1, 4))
def test_whatever_is_overheard_and_read_keeps_within_the_budget(rounds: Any, worth: float, exposures: int) -> None:
    assert overheard_at_most(rounds, worth, exposures, OverheardFilter) <= 1 + 1e-12


@unhurried
@given(budget=budgets)
def test_the_orders_of_a_renyi_filter_share_one_delta(budget: Any) -> None:
    purse = RenyiFilter(budget)
    alpha = np.array(purse.ORDERS)
    # ε = ρ + ln(1 − 1/α) − ln(δ_α·α)/(α − 1), solved for ln δ_α.
    logs = (alpha - 1) * (purse.allowances - budget.epsilon + np.log1p(-1 / alpha)) - np.log(alpha)
    assert np.exp(logs).sum() <= budget.delta * (1 + 1e-6)


# Deliberately wrong twins.


class HearsOnly(OverheardFilter):
    """Forgets that models are read as well."""

    def affords_model(self, mu_squared: float) -> bool:
        return True

    def pay_model(self, mu_squared: float) -> None:
        super().pay_model(0.0)


def test_who_forgets_the_models_is_found_out() -> None:
    def overdrawn(case: Any) -> bool:
        rounds, worth, exposures = case
        return overheard_at_most(rounds, worth, exposures, HearsOnly) > 1 + 1e-12

    cases = st.tuples(rounds_played, st.floats(0.1, 10.0), st.integers(1, 4))
    # One case in some dozens is overdrawn: a hundred of them may hold none.
    found = settings(deadline=None, phases=[Phase.generate], database=None, max_examples=2000)
    find(cases, overdrawn, settings=found)


class LooksBeforeItAdds(PlainFilter):
    """Asks whether the budget is spent, and not whether it will be."""

    def affords(self, mechanism: Mechanism, count: int) -> bool:
        return self.spent_mu_squared <= self.mu_squared


class RepeatsItself(PlainFilter):
    """Goes on with the noise it used last when the budget is gone."""

    last: Mechanism | None = None

    def affords(self, mechanism: Mechanism, count: int) -> bool:
        return mechanism == self.last or super().affords(mechanism, count)

    def pay(self, mechanism: Mechanism, count: int) -> None:
        self.last = mechanism
        super().pay(mechanism, count)


class Forgets(PlainFilter):
    """Holds every release to the whole budget."""

    def pay(self, mechanism: Mechanism, count: int) -> None:
        pass


class CountsOnce(PlainFilter):
    """Takes several releases for one."""

    def pay(self, mechanism: Mechanism, count: int) -> None:
        super().pay(mechanism, 1)


class EitherOr(PlainFilter):
    """Pays pure releases from ε and Gaussian ones from μ², as though there were two budgets."""

    def pay(self, mechanism: Mechanism, count: int) -> None:
        if mechanism.noise == "laplace":
            self.spent_epsilon += count * mechanism.pure
        else:
            self.spent_mu_squared += count * mechanism.mu_squared


@each("twin", [LooksBeforeItAdds, RepeatsItself, Forgets, CountsOnce])
def test_a_wrong_filter_is_found_out(twin: Any) -> Any:
    def make(budget: Budget) -> PlainFilter:
        return twin(budget, worth_of([budget])[0])

    # Raises where nothing is found; what is found need not be small.
    patient = settings(deadline=None, max_examples=500, phases=[Phase.generate])
    find(st.tuples(budgets, sequences(gaussians)), lambda case: overdraws(make, *case), settings=patient)


def test_a_filter_with_two_budgets_is_found_out() -> Any:
    def make(budget: Budget) -> PlainFilter:
        return EitherOr(budget, worth_of([budget])[0])

    # ε = 1/2 of 1 in Laplace noise, and then all that μ² can buy beside it.
    budget = Budget(1.0, 1e-5)
    rest = Mechanism("gaussian", worth_of([budget])[0] ** -0.5 * 1.01)
    assert overdraws(make, budget, [(Mechanism("laplace", 2.0), 1), (rest, 1)])
    assert not overdraws(plain, budget, [(Mechanism("laplace", 2.0), 1), (rest, 1)])
