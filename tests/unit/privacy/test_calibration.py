"""From budgets to noise: the exact inverse of the ledger's price, and the papers' formulas to the letter."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from dpfl.errors import BadInput
from dpfl.privacy import calibration
from dpfl.privacy.accounting import Mechanism, tight, tight_each
from dpfl.privacy.budget import Budget, budgets
from dpfl.privacy.calibration import (
    adaptive_noise_multipliers,
    beside_a_count,
    decaying_noise_multipliers,
    gaussian_noise_stds,
    noise_multipliers,
    overheard_noise_stds,
    shared_noise,
)
from dpfl.privacy.filters import RenyiFilter
from dpfl.privacy.gaussian_dp import mu_of
from dpfl.privacy.paper_formulas import udp_noise_std
from grids import each


@each("epsilon", [0.01, 1.0, 8.0, 100.0])
@each("delta", [1e-9, 1e-3])
@each("releases", [1, 17, 300])
def test_all_releases_together_cost_the_budget_and_no_more(epsilon: float, delta: float, releases: int) -> None:
    (std,) = gaussian_noise_stds([0.3], [releases], [Budget(epsilon, delta)])
    worth = float(mu_of(epsilon, delta)) ** 2
    price = (0.3 / std) ** 2
    assert releases * price == pytest.approx(worth, rel=1e-6)
    # The ledger adds the price up one by one; rounding must not push the last release over the limit.
    assert sum([price] * releases) <= worth
    assert np.full(releases, price).sum() <= worth


def test_each_client_gets_its_own_noise() -> None:
    granted = [Budget(1.0, 1e-5), Budget(8.0, 1e-3), Budget(8.0, 1e-3)]
    together = gaussian_noise_stds([1.0, 0.5, 0.5], [1, 4, 16], granted)
    alone = [
        gaussian_noise_stds([s], [r], [b])[0] for s, r, b in zip([1.0, 0.5, 0.5], [1, 4, 16], granted, strict=True)
    ]
    assert together == alone
    assert together[2] == pytest.approx(2 * together[1])  # four times the releases, twice the noise


def test_ten_thousand_different_clients() -> None:
    count = 10_000
    granted = budgets(np.geomspace(1e-2, 1e2, count).tolist(), np.geomspace(1e-10, 1e-2, count).tolist(), count)
    bounds, releases = np.geomspace(1e-6, 10, count).tolist(), list(range(1, count + 1))
    stds = gaussian_noise_stds(bounds, releases, granted)
    assert len(stds) == count
    spent = [{Mechanism("gaussian", std / bound): n} for std, bound, n in zip(stds, bounds, releases, strict=True)]
    shares = np.array(tight_each(spent, [budget.delta for budget in granted])) / [b.epsilon for b in granted]
    assert (shares <= 1).all()  # safe, every one of them
    assert (shares >= 1 - 1e-4).all()  # and hardly any of what they granted is given away


# Noise in units of the sensitivity


HETEROGENEOUS = (Budget(0.5, 1e-8), Budget(2.0, 1e-5), Budget(2.0, 1e-6), Budget(10.0, 1e-3))


@each(("noise", "rate"), [("gaussian", 1.0), ("gaussian", 0.3), ("laplace", 1.0), ("laplace", 0.3)])
def test_each_budget_is_kept_and_would_not_be_with_a_thousandth_less_noise(noise: str, rate: float) -> None:
    releases = [7, 20, 20, 150]
    found = noise_multipliers(noise, releases, HETEROGENEOUS, sampling_rate=rate)
    for multiplier, count, budget in zip(found, releases, HETEROGENEOUS, strict=True):
        assert tight({Mechanism(noise, multiplier, rate): count}, budget.delta) <= budget.epsilon
        assert tight({Mechanism(noise, multiplier * 0.999, rate): count}, budget.delta) > budget.epsilon


def test_gaussian_noise_on_all_records_by_hand() -> None:
    # (ε, δ) = (1, 1e-5) is worth μ = 0.26805: 9 releases need 3/μ = 11.192.
    assert noise_multipliers("gaussian", [9], [Budget(1.0, 1e-5)]) == pytest.approx([11.192], abs=1e-3)


def test_pure_laplace_noise_is_shared_out_over_the_releases() -> None:
    releases, granted = [1, 3, 1000], budgets((0.1, 0.3, 7.0), 0.0, 3)
    found = noise_multipliers("laplace", releases, granted)
    assert found == pytest.approx([10.0, 10.0, 1000 / 7], rel=1e-8)
    for multiplier, count, budget in zip(found, releases, granted, strict=True):
        # One by one, as a ledger adds them up: rounding must not push the last one over the limit.
        assert sum([Mechanism("laplace", multiplier).pure] * count) <= budget.epsilon


def test_sampled_pure_laplace_noise_by_its_closed_form() -> None:
    # 5 releases of ln(1 + q(e^(1/b) − 1)) make ε = 1: b = 1/ln(1 + (e^0.2 − 1)/q).
    (found,) = noise_multipliers("laplace", [5], [Budget(1.0, 0.0)], sampling_rate=0.1)
    assert found == pytest.approx(1 / math.log1p(math.expm1(0.2) / 0.1), rel=1e-4)


def test_one_client_with_a_delta_does_not_change_the_noise_of_a_pure_one() -> None:
    pure, other = noise_multipliers("laplace", [200, 200], [Budget(1.0, 0.0), Budget(1.0, 1e-6)])
    assert pure == 200.0
    assert other < 0.6 * pure  # at a δ above 0 many releases cost far less than their sum


def test_the_larger_the_batches_the_more_noise_they_need() -> None:
    few, half, everything = (
        noise_multipliers("gaussian", [20], [Budget(2.0, 1e-5)], sampling_rate=rate)[0] for rate in (0.1, 0.5, 1.0)
    )
    assert few < half < everything


def test_the_noise_of_many_clients_with_one_budget_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def searching(*arguments: object) -> float:
        asked.append(arguments)
        return 3.0

    monkeypatch.setattr(calibration, "least_noise", searching)
    calibration._searched.cache_clear()
    try:
        granted = [Budget(1.25, 1e-5)] * 100 + [Budget(1.5, 1e-5)]
        assert noise_multipliers("gaussian", [4] * 101, granted, sampling_rate=0.1) == pytest.approx([3.0] * 101)
        assert len(asked) == 2
    finally:
        calibration._searched.cache_clear()


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_gaussian_noise_needs_a_delta(rate: float) -> None:
    with pytest.raises(BadInput) as refusal:
        noise_multipliers("gaussian", [1, 1], [Budget(1.0, 1e-5), Budget(1.0, 0.0)], sampling_rate=rate)
    assert str(refusal.value).startswith("delta must be above 0 with Gaussian noise, was 0; choose 1e-5")
    with pytest.raises(BadInput, match="delta must be above 0"):
        gaussian_noise_stds([1.0], [1], [Budget(1.0, 0.0)])


# Against readers of the released models, who see everybody's noise at once


SIZES, BOUNDS, ROUNDS = [400, 600, 800, 1000, 1200], [0.02, 0.05, 0.01, 0.03, 0.004], 30
WEIGHTS = [size / sum(SIZES) for size in SIZES]
GRANTED = (Budget(1.0, 1e-5), Budget(8.0, 1e-3), Budget(2.0, 1e-6), Budget(4.0, 1e-5), Budget(0.3, 1e-4))


def released_shares(stds: Sequence[float], downlink: float = 0.0) -> list[float]:
    """Price every client against the models alone: p_iΔ_i under √(Σp_j²σ_j² + σ_D²), as a share of what it granted."""
    noise = math.sqrt(sum((p * std) ** 2 for p, std in zip(WEIGHTS, stds, strict=True)) + downlink**2)
    return [
        tight({Mechanism("gaussian", noise / (p * bound)): ROUNDS}, budget.delta) / budget.epsilon
        for p, bound, budget in zip(WEIGHTS, BOUNDS, GRANTED, strict=True)
    ]


def test_shared_noise_keeps_every_promise_about_the_models_and_less_breaks_the_worst() -> None:
    alone = gaussian_noise_stds(BOUNDS, [ROUNDS] * 5, GRANTED)
    share = shared_noise(alone, WEIGHTS)
    assert share < 1
    enough = released_shares([share * std for std in alone])
    assert max(enough) <= 1
    assert max(enough) == pytest.approx(1, rel=1e-6)
    less = released_shares([0.999 * share * std for std in alone])
    assert less[enough.index(max(enough))] > 1


def test_equal_clients_share_the_noise_by_the_root_of_their_number() -> None:
    assert shared_noise([3.0] * 16, [1 / 16] * 16) == pytest.approx(0.25, rel=1e-8)


def test_a_client_that_is_alone_has_nobody_to_hide_behind() -> None:
    assert shared_noise([3.0], [1.0]) == pytest.approx(1.0, rel=1e-8)
    assert shared_noise([3.0, 3.0, 3.0], [1.0, 0.0, 0.0]) == pytest.approx(1.0, rel=1e-8)


def test_shared_noise_by_hand() -> None:
    # p·σ are 3 and 4: the second needs 4/5 of its noise, and so the first gets as much of its own.
    assert shared_noise([6.0, 8.0], [0.5, 0.5]) == pytest.approx(0.8, rel=1e-8)


# Against who overhears some uploads and reads the models


def overheard_shares(
    stds: Sequence[float], cohorts: Counter[tuple[int, ...]], exposures: int, bounds: Sequence[float] = BOUNDS,
    weights: Sequence[float] = (1.0,) * 5,
) -> list[float]:  # fmt: skip
    """Price every client by hand, trying every choice of what is heard, as a share of what it granted in μ²."""
    shares = []
    for client, (std, bound, worth) in enumerate(zip(stds, bounds, WORTHS, strict=True)):
        told = [
            (weights[client] * bound) ** 2 / sum((weights[other] * stds[other]) ** 2 for other in cohort)
            for cohort in cohorts.elements()
            if client in cohort
        ]
        choices = combinations(range(len(told)), min(exposures, len(told)))
        costs = [
            sum((bound / std) ** 2 if round in heard else one for round, one in enumerate(told)) for heard in choices
        ]
        shares.append(max(costs) / worth)
    return shares


WORTHS = [float(mu_of(budget.epsilon, budget.delta)) ** 2 for budget in GRANTED]
EVERYONE = tuple(range(5))
COHORTS = {
    "all": Counter({EVERYONE: 12}),
    "pairs": Counter({(0, 1): 3, (1, 2): 2, (2, 3): 1, (3, 4): 4, (0, 4): 2}),
    "mixed": Counter({(0, 1, 2): 3, (3, 4): 2, (4,): 1, EVERYONE: 2}),
}


@each("name", list(COHORTS))
@each("exposures", [1, 2, 4])
def test_what_is_overheard_and_read_costs_every_budget_and_no_more(name: str, exposures: int) -> None:
    cohorts = COHORTS[name]
    stds = overheard_noise_stds(sensitivities=BOUNDS, exposures=exposures, cohorts=cohorts, budgets=GRANTED)
    shares = overheard_shares(stds, cohorts, exposures)
    assert max(shares) <= 1
    assert max(shares) >= 1 - 1e-5
    if name == "all":
        assert min(shares) >= 1 - 1e-5  # none adds more than it has to


UNEQUAL = {"alike": (3.0,) * 5, "by size": (10.0, 20.0, 40.0, 80.0, 300.0), "one": (1.0, 1.0, 1.0, 1.0, 1e6)}


@each("weights", list(UNEQUAL))
@each("name", list(COHORTS))
@each("exposures", [1, 4])
def test_whoever_weighs_more_in_a_model_is_counted_so(name: str, exposures: int, weights: str) -> None:
    options = {"sensitivities": BOUNDS, "exposures": exposures, "cohorts": COHORTS[name], "budgets": GRANTED}
    plain, stds = overheard_noise_stds(**options), overheard_noise_stds(**options, weights=UNEQUAL[weights])
    shares = overheard_shares(stds, COHORTS[name], exposures, weights=UNEQUAL[weights])
    assert 1 - 1e-5 <= max(shares) <= 1
    if name == "all":
        assert min(shares) >= 1 - 1e-5
    if exposures == 1:  # deliberately wrong: noise for equal weights, where they are not
        twin = max(overheard_shares(plain, COHORTS[name], exposures, weights=UNEQUAL[weights]))
        assert (plain == stds) == (weights == "alike") == (twin <= 1)


def test_no_other_noise_is_less_in_the_models() -> None:
    """Search for less: a convex problem, of which the noise that costs everybody his budget is the least."""
    for name, weights, within in (
        ("all", (1.0,) * 5, 1e-5), ("pairs", (1.0,) * 5, 3e-3), ("mixed", (1.0,) * 5, 3e-3),
        ("all", (1.0, 2.0, 3.0, 2.0, 5.0), 1e-5),
    ):  # fmt: skip
        cohorts = COHORTS[name]

        def in_models(variances: Any, cohorts: Any = cohorts, weights: Any = weights) -> float:
            return sum(
                times * sum(weights[client] ** 2 * variances[client] for client in cohort)
                for cohort, times in cohorts.items()
            )

        def slack(logs: Any, cohorts: Any = cohorts, weights: Any = weights) -> Any:
            return -np.log(overheard_shares(np.exp(logs / 2), cohorts, 1, [1.0] * 5, weights))

        stds = overheard_noise_stds(
            sensitivities=[1.0] * 5, exposures=1, cohorts=cohorts, budgets=GRANTED, weights=weights
        )
        found = minimize(
            lambda logs: math.log(in_models(np.exp(logs))), 2 * np.log(stds) + 0.2, method="SLSQP",
            constraints={"type": "ineq", "fun": slack}, options={"maxiter": 300, "ftol": 1e-10},
        )  # fmt: skip
        assert found.success
        assert in_models(np.square(stds)) <= in_models(np.exp(found.x)) * (1 + within)


def test_overheard_noise_by_hand() -> None:
    # Two alike, one of three uploads heard: 1 + 2·½ = 2 of what (1, 1e-5) is worth, σ = 3.73063·√2. The third never
    # takes part, and would be heard once.
    found = overheard_noise_stds(
        sensitivities=[1.0] * 3, exposures=1, cohorts={(0, 1): 3}, budgets=budgets(1.0, 1e-5, 3)
    )
    assert found == pytest.approx([3.73063 * math.sqrt(2)] * 2 + [3.73063], rel=1e-5)


def test_where_everything_is_heard_nobody_helps() -> None:
    alone = gaussian_noise_stds(BOUNDS, [12] * 5, GRANTED)
    found = overheard_noise_stds(sensitivities=BOUNDS, exposures=12, cohorts=COHORTS["all"], budgets=GRANTED)
    assert found == pytest.approx(alone, rel=3e-6)


def test_overheard_noise_needs_a_delta() -> None:
    with pytest.raises(BadInput, match="delta must be above 0"):
        overheard_noise_stds(sensitivities=[1.0], exposures=1, cohorts={(0,): 1}, budgets=[Budget(1.0, 0.0)])


@each("records", [1, 24, 800, 6000, 10**9])
@each("multiplier", [1e-3, 0.5, 7.0, 300.0])
@each("cohort", [1, 50])
def test_a_count_costs_what_its_upload_saves_and_a_tenth_at_most(multiplier: float, records: int, cohort: int) -> None:
    upload, count = beside_a_count(multiplier, records, cohort)
    assert upload**-2 + count**-2 == pytest.approx(multiplier**-2, rel=1e-12)
    assert upload <= multiplier * math.sqrt(10 / 9) * (1 + 1e-12)
    if count > math.sqrt(10) * multiplier:  # where that is cheap, the mean of K shares is known to 5 %
        assert count / records / math.sqrt(cohort) == pytest.approx(0.05)


# The papers' formulas, and what a budget is


def test_equation_10_of_udp_by_hand() -> None:
    # Δ = 0.5, q = 0.6, T = 50 and δ = e⁻²: 2·0.6·50·2 = 120 under the root; ε = 4.
    std = udp_noise_std(sensitivity=0.5, cohort_rate=0.6, rounds=50, epsilon=4.0, delta=math.exp(-2))
    assert std == pytest.approx(0.5 * math.sqrt(120) / 4)


def test_one_number_is_for_all_clients_and_a_list_for_each() -> None:
    assert budgets(8, 1e-3, 2) == (Budget(8.0, 1e-3), Budget(8.0, 1e-3))
    assert budgets((1, 2), [1e-3, 1e-4], 2) == (Budget(1.0, 1e-3), Budget(2.0, 1e-4))


@each(
    ("epsilon", "delta", "field"),
    [
        ((1.0, 2.0), 1e-3, "epsilon must be one number or one for each of the 3 clients, was 2"),
        (1.0, (1e-3,) * 4, "delta must be one number or one for each of the 3 clients, was 4"),
        ((1.0, -1.0, 1.0), 1e-3, "epsilon must be a finite number above 0"),
        (math.nan, 1e-3, "epsilon must be a finite number above 0"),
        (math.inf, 1e-3, "epsilon must be a finite number above 0"),
        (1.0, -1e-5, r"delta must be at least 0 \(pure privacy, for Laplace noise\) and below 1, was -1e-05"),
        (1.0, 1.0, r"delta must be at least 0 \(pure privacy, for Laplace noise\) and below 1, was 1.0"),
        (1.0, math.nan, r"delta must be at least 0 \(pure privacy, for Laplace noise\) and below 1, was nan"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(epsilon: float, delta: float, field: str) -> None:
    with pytest.raises(BadInput, match=field):
        budgets(epsilon, delta, 3)


@each("sampling_rate", [0.2, 1.0])
def test_noise_that_falls_begins_no_higher_than_all_of_its_releases_need(sampling_rate: float) -> None:
    granted, fall = Budget(3.0, 1e-4), {1.0: 6, 0.8: 6, 0.64: 2}

    def fits(first: float) -> bool:
        if sampling_rate == 1:
            return sum(count / (first * part) ** 2 for part, count in fall.items()) <= float(mu_of(3.0, 1e-4)) ** 2
        purse = RenyiFilter(granted, Mechanism("gaussian", first, sampling_rate))
        for part, count in fall.items():  # one release at a time, as a ledger pays
            for _ in range(count):
                if not purse.affords(now := Mechanism("gaussian", first * part, sampling_rate), 1):
                    return False
                purse.pay(now, 1)
        return True

    (first,) = decaying_noise_multipliers([fall], [granted], sampling_rate=sampling_rate)
    assert fits(first)
    assert not fits(0.99 * first)
    (constant,) = adaptive_noise_multipliers([14], [granted], sampling_rate=sampling_rate)
    assert constant < first < constant / 0.64
    (same,) = decaying_noise_multipliers([{1.0: 14}], [granted], sampling_rate=sampling_rate)
    assert same == pytest.approx(constant, rel=1e-3)
