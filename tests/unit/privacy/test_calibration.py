"""From budgets to noise: the exact inverse of the ledger's price, and the papers' formulas to the letter."""

import math

import numpy as np
import pytest

from dpfl.errors import BadInput
from dpfl.privacy.budget import Budget, budgets
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.privacy.claims import udp_noise_std
from dpfl.privacy.gaussian_dp import mu_of


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-3])
@pytest.mark.parametrize("releases", [1, 17, 300])
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
    stds = np.array(gaussian_noise_stds(np.geomspace(1e-6, 10, count).tolist(), list(range(1, count + 1)), granted))
    assert stds.shape == (count,)
    assert np.isfinite(stds).all()
    assert (stds > 0).all()


def test_equation_10_of_udp_by_hand() -> None:
    # Δ = 0.5, q = 0.6, T = 50 and δ = e⁻²: 2·0.6·50·2 = 120 under the root; ε = 4.
    std = udp_noise_std(sensitivity=0.5, cohort_rate=0.6, rounds=50, epsilon=4.0, delta=math.exp(-2))
    assert std == pytest.approx(0.5 * math.sqrt(120) / 4)


def test_one_number_is_for_all_clients_and_a_list_for_each() -> None:
    assert budgets(8, 1e-3, 2) == (Budget(8.0, 1e-3), Budget(8.0, 1e-3))
    assert budgets((1, 2), [1e-3, 1e-4], 2) == (Budget(1.0, 1e-3), Budget(2.0, 1e-4))


@pytest.mark.parametrize(
    ("epsilon", "delta", "field"),
    [
        ((1.0, 2.0), 1e-3, "epsilon must be one number or one for each of the 3 clients, was 2"),
        (1.0, (1e-3,) * 4, "delta must be one number or one for each of the 3 clients, was 4"),
        ((1.0, -1.0, 1.0), 1e-3, "epsilon must be a finite number above 0"),
        (math.nan, 1e-3, "epsilon must be a finite number above 0"),
        (math.inf, 1e-3, "epsilon must be a finite number above 0"),
        (1.0, 0.0, "delta must lie strictly between 0 and 1"),
        (1.0, 1.0, "delta must lie strictly between 0 and 1"),
        (1.0, math.nan, "delta must lie strictly between 0 and 1"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(epsilon: float, delta: float, field: str) -> None:
    with pytest.raises(BadInput, match=field):
        budgets(epsilon, delta, 3)
