"""Whatever the noise, the batches and the steps: more noise costs less, and every accountant tells the same story."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from dpfl.privacy import accounting, renyi
from dpfl.privacy.accounting import Mechanism, Spent, least_noise, most_steps, tight
from dpfl.privacy.budget import Budget
from dpfl.privacy.gaussian_dp import epsilon_of
from dpfl.privacy.paper_formulas import open_constant
from grids import each


def examples(count: int) -> settings:
    """Take few examples where each costs a privacy-loss distribution, and never mind a busy machine."""
    return settings(deadline=None, max_examples=count)


def powers_of_ten(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda power: 10**power)


multipliers = powers_of_ten(-0.1, 1.0)  # 0.8 to 10
rates = powers_of_ten(-1.5, -0.05)  # 0.03 to 0.9
deltas = powers_of_ten(-9, -3)
steps = st.integers(1, 300)
more = st.sampled_from((1.1, 1.5, 3.0))

plain_gaussian = st.builds(Mechanism, st.just("gaussian"), multipliers)
sampled_gaussian = st.builds(Mechanism, st.just("gaussian"), multipliers, rates)
# Each of these costs a quarter of a second, once: so there are few of them.
fixed_size = st.builds(
    Mechanism, st.just("gaussian"), st.sampled_from((1.0, 4.0)), st.sampled_from((0.05, 0.3)), st.just("fixed")
)
plain_laplace = st.builds(Mechanism, st.just("laplace"), multipliers)
sampled_laplace = st.builds(Mechanism, st.just("laplace"), multipliers, rates)
any_mechanism = plain_gaussian | sampled_gaussian | plain_laplace | sampled_laplace | fixed_size

accountants = pytest.mark.parametrize("accountant", [tight, renyi.epsilon])


def rises(less: float, more: float) -> bool:
    """Say whether a price rose; at 0, which δ alone pays for, it may stay."""
    return less < more or less == more == 0


@accountants
@examples(15)
@given(mechanism=any_mechanism, steps=steps, delta=deltas, factor=more)
def test_epsilon_falls_with_noise(accountant: Any, mechanism: Any, steps: Any, delta: Any, factor: Any) -> None:
    noisier = replace(mechanism, multiplier=mechanism.multiplier * factor)
    assert rises(accountant({noisier: steps}, delta), accountant({mechanism: steps}, delta))


@accountants
@examples(15)
@given(mechanism=any_mechanism, steps=steps, delta=deltas, factor=more)
def test_epsilon_rises_with_steps(accountant: Any, mechanism: Any, steps: Any, delta: Any, factor: Any) -> None:
    assert rises(accountant({mechanism: steps}, delta), accountant({mechanism: math.ceil(steps * factor)}, delta))


@accountants
@examples(15)
@given(mechanism=sampled_gaussian | sampled_laplace | fixed_size, steps=steps, delta=deltas, factor=more)
def test_epsilon_rises_with_the_sampling_rate(
    accountant: Any, mechanism: Any, steps: Any, delta: Any, factor: Any
) -> None:
    denser = replace(mechanism, sampling_rate=min(0.99, mechanism.sampling_rate * factor))
    assert rises(accountant({mechanism: steps}, delta), accountant({denser: steps}, delta))


@examples(15)
@given(mechanism=sampled_gaussian | sampled_laplace, steps=steps, delta=deltas)
def test_sampling_by_poisson_never_costs(mechanism: Any, steps: Any, delta: Any) -> None:
    everything = replace(mechanism, sampling_rate=1.0)
    assert tight({mechanism: steps}, delta) <= tight({everything: steps}, delta)


@examples(15)
@given(mechanism=fixed_size, steps=steps, delta=deltas)
def test_a_batch_of_fixed_size_never_costs_less_than_one_by_poisson(mechanism: Any, steps: Any, delta: Any) -> None:
    # A record that is replaced by one without any gradient is removed: that pair of data sets must be covered too.
    by_poisson = replace(mechanism, sampling="poisson")
    assert tight({mechanism: steps}, delta) >= tight({by_poisson: steps}, delta)


@examples(15)
@given(mechanism=fixed_size, delta=deltas)
def test_a_batch_of_fixed_size_covers_a_record_turned_around(mechanism: Any, delta: Any) -> Any:
    # Replacing +½ by −½ (in units of the sensitivity), everybody else at 0: δ = ∫ max(0, p − e^ε·q).
    def beyond(x: float) -> float:
        common = (1 - rate) * norm.pdf(x, scale=noise)
        first, second = (common + rate * norm.pdf(x, at, noise) for at in (0.5, -0.5))
        return max(0.0, first - math.exp(epsilon) * second)

    noise, rate, epsilon = mechanism.multiplier, mechanism.sampling_rate, tight({mechanism: 1}, delta)
    assert quad(beyond, -10 * noise, 10 * noise + 1, limit=200, epsabs=1e-12)[0] <= delta + 1e-11


# k times one is one times k


@accountants
@examples(15)
@given(mechanism=any_mechanism, steps=st.integers(2, 300), share=st.floats(0, 1), delta=deltas)
def test_steps_cost_the_same_however_they_are_split(
    accountant: Any, mechanism: Any, steps: Any, share: Any, delta: Any
) -> None:
    # Two mechanisms that differ in the last bit of their noise are the same to anybody but the books.
    alike = replace(mechanism, multiplier=math.nextafter(mechanism.multiplier, math.inf))
    first = min(steps - 1, max(1, round(share * steps)))
    split = accountant({mechanism: first, alike: steps - first}, delta)
    # Distributions are cut where 1e-15 of their mass is left, once for each part: that shows where δ is small.
    assert split == pytest.approx(accountant({mechanism: steps}, delta), rel=1e-4, abs=1e-9)


@accountants
@examples(40)
@given(mechanism=plain_gaussian, steps=st.integers(1, 10_000), delta=deltas)
def test_plain_gaussian_steps_are_one_with_less_noise(accountant: Any, mechanism: Any, steps: Any, delta: Any) -> None:
    once = replace(mechanism, multiplier=mechanism.multiplier / math.sqrt(steps))
    assert accountant({mechanism: steps}, delta) == pytest.approx(accountant({once: 1}, delta), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(noise=multipliers, steps=st.integers(1, 10_000), delta=deltas)
def test_pure_noise_adds_up(noise: Any, steps: Any, delta: Any) -> None:
    mechanism = Mechanism("laplace", noise)
    assert tight({mechanism: steps}, 0.0) == pytest.approx(steps / noise, rel=1e-12)


# There and back: noise for a budget, steps for a budget


budgets = st.builds(Budget, powers_of_ten(-1, 1.2), powers_of_ten(-8, -4))
by_distribution = [sampled_gaussian, plain_laplace, sampled_laplace]


def least_noise_gives_the_budget_back(accountant: Any, mechanism: Any, steps: Any, budget: Any) -> None:
    found = replace(mechanism, multiplier=least_noise(accountant, mechanism, steps, budget))
    spent = accountant({found: steps}, budget.delta)
    assert budget.epsilon * (1 - 1e-3) <= spent <= budget.epsilon * (1 + 4e-16)  # the last bit is rounding


@each("mechanisms", by_distribution)
@examples(4)
@given(data=st.data(), steps=steps, budget=budgets)
def test_calibrated_noise_gives_the_budget_back_from_below(mechanisms: Any, data: Any, steps: Any, budget: Any) -> None:
    least_noise_gives_the_budget_back(tight, data.draw(mechanisms), steps, budget)


@examples(15)
@given(mechanism=plain_gaussian, steps=st.integers(1, 10_000), budget=budgets)
def test_calibrated_plain_noise_gives_the_budget_back_from_below(mechanism: Any, steps: Any, budget: Any) -> None:
    least_noise_gives_the_budget_back(tight, mechanism, steps, budget)


@examples(4)
@given(mechanism=sampled_gaussian | plain_laplace, steps=steps, budget=budgets)
@example(mechanism=Mechanism("gaussian", 1.0, 0.1, "fixed"), steps=50, budget=Budget(2.0, 1e-5))
def test_calibrated_by_renyi_gives_the_budget_back_from_below(mechanism: Any, steps: Any, budget: Any) -> None:
    least_noise_gives_the_budget_back(renyi.epsilon, mechanism, steps, budget)


@examples(8)
@given(
    rate=powers_of_ten(-2, 0), replies=powers_of_ten(0, 2), epsilon=powers_of_ten(-1, 1), delta=powers_of_ten(-6, -3)
)
def test_noise_of_the_papers_accountant_keeps_the_budget(rate: Any, replies: Any, epsilon: Any, delta: Any) -> None:
    c2 = open_constant("accountant", replies=replies, budget=Budget(epsilon, delta), sampling_rate=rate)
    multiplier = c2 * rate * math.sqrt(replies * math.log(1 / delta)) / epsilon
    assert tight({Mechanism("gaussian", multiplier, rate): math.floor(replies)}, delta) <= epsilon


small_budgets = st.builds(Budget, powers_of_ten(-1, 0.5), powers_of_ten(-8, -4))


def most_steps_fit_and_one_more_does_not(accountant: Any, mechanism: Any, budget: Any) -> None:
    assume(mechanism.multiplier < 30 * mechanism.sampling_rate)  # otherwise they are too many to wait for
    most = most_steps(accountant, mechanism, budget)
    if most > 0:
        assert accountant({mechanism: most}, budget.delta) <= budget.epsilon
    assert accountant({mechanism: most + 1}, budget.delta) > budget.epsilon


@each("mechanisms", by_distribution)
@examples(4)
@given(data=st.data(), budget=small_budgets)
def test_the_most_steps_fit_and_one_more_does_not(mechanisms: Any, data: Any, budget: Any) -> None:
    most_steps_fit_and_one_more_does_not(tight, data.draw(mechanisms), budget)


@examples(30)
@given(mechanism=plain_gaussian, budget=budgets)
def test_the_most_plain_steps_fit_and_one_more_does_not(mechanism: Any, budget: Any) -> None:
    most_steps_fit_and_one_more_does_not(tight, mechanism, budget)


@examples(10)
@given(mechanism=any_mechanism, budget=small_budgets)
def test_the_most_steps_by_renyi_fit_and_one_more_does_not(mechanism: Any, budget: Any) -> None:
    most_steps_fit_and_one_more_does_not(renyi.epsilon, mechanism, budget)


# Other accountants


@examples(18)
@given(mechanism=plain_gaussian | sampled_gaussian | fixed_size, steps=steps, delta=deltas)
def test_renyi_is_never_tighter(mechanism: Any, steps: Any, delta: Any) -> None:
    assert tight({mechanism: steps}, delta) <= renyi.epsilon({mechanism: steps}, delta) * (1 + 1e-6)


@examples(18)
@given(mechanism=plain_laplace | sampled_laplace, steps=steps, delta=deltas)
def test_renyi_is_hardly_ever_tighter_for_laplace_noise(mechanism: Any, steps: Any, delta: Any) -> None:
    # Rényi DP is almost exact near the pure price, and the grid of the distributions costs up to a thousandth.
    assert tight({mechanism: steps}, delta) <= renyi.epsilon({mechanism: steps}, delta) * (1 + 2e-3)


Price = Callable[[Spent, float], float]


def agrees_with_dp_accounting(price: Price, mechanism: Mechanism, steps: int, delta: float) -> bool:
    noise = {"gaussian": dp_accounting.GaussianDpEvent, "laplace": dp_accounting.LaplaceDpEvent}[mechanism.noise]
    event = dp_accounting.PoissonSampledDpEvent(mechanism.sampling_rate, noise(mechanism.multiplier))
    theirs = PLDAccountant().compose(event, steps).get_epsilon(delta)
    return price({mechanism: steps}, delta) == pytest.approx(theirs, rel=0.01, abs=1e-3)


def linear(spent: Spent, delta: float) -> float:
    """Add up as if every step leaked to somebody else: a deliberately wrong twin."""
    return math.fsum(count * tight({mechanism: 1}, delta) for mechanism, count in spent.items())


def unsampled(spent: Spent, delta: float) -> float:
    """Forget that batches are sampled: a deliberately wrong twin."""
    return tight({replace(mechanism, sampling_rate=1.0): count for mechanism, count in spent.items()}, delta)


@examples(8)
@given(mechanism=sampled_gaussian | plain_laplace | sampled_laplace, steps=st.integers(2, 100), delta=deltas)
@example(mechanism=Mechanism("gaussian", 1.1, 0.015), steps=79, delta=1e-5)
def test_dp_accounting_agrees_within_a_hundredth(mechanism: Any, steps: Any, delta: Any) -> None:
    assert agrees_with_dp_accounting(tight, mechanism, steps, delta)


@each("twin", [linear, unsampled])
@each("noise", ["gaussian", "laplace"])
def test_dp_accounting_tells_a_wrong_accountant_apart(twin: Any, noise: Any) -> None:
    mechanism = Mechanism(noise, 2.0, 0.2)
    assert agrees_with_dp_accounting(tight, mechanism, 30, 1e-5)
    assert not agrees_with_dp_accounting(twin, mechanism, 30, 1e-5)


def agrees_with_opacus(price: Price, mechanism: Mechanism, steps: int, delta: float) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import, and where its own search for a first guess ends at its edge
        opacus = pytest.importorskip("opacus.accountants", reason="opacus is not installed; it is in the dev extra")
        accountant = opacus.PRVAccountant()
        accountant.history = [(mechanism.multiplier, mechanism.sampling_rate, steps)]
        ours = price({mechanism: steps}, delta)
        theirs = accountant.get_epsilon(delta, eps_error=0.003 * ours)
    return ours == pytest.approx(theirs, rel=0.01)


@examples(4)
@given(mechanism=sampled_gaussian, steps=st.integers(2, 100), delta=powers_of_ten(-7, -4))
@example(mechanism=Mechanism("gaussian", 1.1, 0.015), steps=79, delta=1e-5)
def test_opacus_agrees_within_a_hundredth(mechanism: Any, steps: Any, delta: Any) -> None:
    assume(tight({mechanism: steps}, delta) > 0.2)  # its grid is as fine as ε is small
    assert agrees_with_opacus(tight, mechanism, steps, delta)


@pytest.mark.parametrize("twin", [linear, unsampled])
def test_opacus_tells_a_wrong_accountant_apart(twin: Any) -> None:
    assert not agrees_with_opacus(twin, Mechanism("gaussian", 2.0, 0.2), 30, 1e-5)


# Exact answers


def exact_deltas(mechanism: Mechanism, epsilon: float) -> tuple[float, float]:
    """Return δ of one sampled Gaussian release exactly, for a record that is removed and for one that is added."""
    removed, added = (
        GaussianPrivacyLoss(
            mechanism.multiplier, sampling_prob=mechanism.sampling_rate, adjacency_type=direction
        ).get_delta_for_epsilon(epsilon)
        for direction in (AdjacencyType.REMOVE, AdjacencyType.ADD)
    )
    return removed, added


@examples(18)
@given(mechanism=sampled_gaussian, delta=deltas)
def test_one_release_is_covered_in_both_directions_and_hardly_more(mechanism: Any, delta: Any) -> None:
    epsilon = tight({mechanism: 1}, delta)
    assert max(exact_deltas(mechanism, epsilon)) <= delta * (1 + 1e-9)
    if epsilon > 0:
        assert max(exact_deltas(mechanism, epsilon * (1 - 1e-3))) > delta


@examples(18)
@given(
    mechanism=st.builds(Mechanism, st.just("gaussian"), st.floats(0.5, 2.0), st.floats(0.05, 0.5)),
    delta=powers_of_ten(-9, -4),
)
def test_an_accountant_that_forgets_removal_is_told_apart_by_the_same_check(mechanism: Any, delta: Any) -> None:
    _, added = exact_deltas(mechanism, tight({mechanism: 1}, delta) * (1 - 1e-3))
    assert added < delta  # it would have been content with a smaller ε


@examples(12)
@given(noise=st.floats(1.0, 20.0), steps=st.integers(1, 200), delta=deltas)
def test_the_closed_form_is_what_distributions_approach(noise: Any, steps: Any, delta: Any) -> None:
    exact = float(epsilon_of(math.sqrt(steps) / noise, delta))
    assume(exact > 0.1)
    # Our machinery, in one release and (a hair short of all records, so that it may not take the short cut) in many …
    in_one = accounting._composed({Mechanism("gaussian", noise): steps}).get_epsilon_for_delta(delta)
    in_many = tight({Mechanism("gaussian", noise, 1 - 1e-9): steps}, delta)
    # … and dp-accounting's own
    theirs = privacy_loss_distribution.from_gaussian_mechanism(noise, value_discretization_interval=1e-3)
    theirs = theirs.self_compose(steps).get_epsilon_for_delta(delta)
    for found in (in_one, in_many, theirs):
        assert exact * (1 - 1e-6) <= found <= exact * (1 + 1e-3)
