"""From budgets to noise, exactly: the least noise for which the promise is true against the observer it names.

Against the server every release of a client counts, and `releases` is what the client will really answer. Against an
eavesdropper on at most L uploads pass min(L, replies). Against readers of the released models the others' noise helps:
`shared_noise` says how much less each client needs, and `downlink_noise_std` what the server has to add.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from dpfl.errors import BadInput
from dpfl.orders import GRID_SHARE
from dpfl.privacy import renyi
from dpfl.privacy.accounting import Accountant, Mechanism, NoiseLaw, least_noise, tight
from dpfl.privacy.budget import Budget
from dpfl.privacy.filters import RenyiFilter
from dpfl.privacy.gaussian_dp import mu_of

# The ledger counts what rounding to a grid adds to a sensitivity, and adds up one charge a round in floating point:
# with this much extra noise the sum stays below the budget.
_ROUNDING = GRID_SHARE + 1e-9


def noise_multipliers(
    noise: NoiseLaw,
    releases: Sequence[int],
    budgets: Sequence[Budget],
    *,
    sampling_rate: float = 1.0,
    accountant: Accountant = tight,
) -> list[float]:
    """Return for each client the noise, in units of its sensitivity, at which its releases cost its whole budget.

    Closed forms for noise on all records (Laplace noise at δ = 0); a search with the accountant (privacy-loss
    distributions) otherwise, about a second for each distinct budget.
    """
    if noise == "gaussian":
        for budget in budgets:
            if budget.delta == 0:
                raise BadInput("delta must be above 0 with Gaussian noise, was 0; choose 1e-5, say, or Laplace noise")
        if sampling_rate == 1 and accountant is tight:
            return [float(z) for z in np.sqrt(np.asarray(releases, float)) / _worth(tuple(budgets)) * (1 + _ROUNDING)]
    elif sampling_rate == 1 and all(budget.delta == 0 for budget in budgets):
        pairs = zip(releases, budgets, strict=True)
        return [count / budget.epsilon * (1 + _ROUNDING) for count, budget in pairs]
    mechanism = Mechanism(noise, 1.0, sampling_rate)
    return [_searched(accountant, mechanism, count, budget) for count, budget in zip(releases, budgets, strict=True)]


@lru_cache(maxsize=64)  # a controller or a planner asks for the same budgets over and over
def _worth(budgets: tuple[Budget, ...]) -> NDArray[np.float64]:
    """Return the Gaussian-DP parameters μ of budgets."""
    return mu_of([budget.epsilon for budget in budgets], [budget.delta for budget in budgets])


@lru_cache(maxsize=4096)
def _searched(accountant: Accountant, mechanism: Mechanism, releases: int, budget: Budget) -> float:
    # The ledger rounds a multiplier down at the tenth digit before it prices it.
    found = least_noise(accountant, mechanism, releases, budget)
    return found if mechanism.plain else found * (1 + 2 * _ROUNDING)


def adaptive_noise_multipliers(
    releases: Sequence[int], budgets: Sequence[Budget], *, sampling_rate: float
) -> list[float]:
    """Return the Gaussian noise at which a plan fits that may still change its noise along the way: a Rényi filter's.

    Noise on all records has a filter that costs nothing extra, and needs no more than `noise_multipliers` says.
    """
    if sampling_rate == 1:
        return noise_multipliers("gaussian", releases, budgets)
    return [_filtered(sampling_rate, count, budget) for count, budget in zip(releases, budgets, strict=True)]


@lru_cache(maxsize=4096)
def _filtered(sampling_rate: float, releases: int, budget: Budget) -> float:
    mechanism = Mechanism("gaussian", 1.0, sampling_rate)
    found = _searched(renyi.epsilon, mechanism, releases, budget)  # the filter, which shares δ out, wants some more
    while not _fits(replace(mechanism, multiplier=found), releases, budget):
        found *= 1.01
    return found * (1 + 2 * _ROUNDING)


def _fits(mechanism: Mechanism, releases: int, budget: Budget) -> bool:
    return RenyiFilter(budget, mechanism).affords(mechanism, releases)


def gaussian_noise_stds(
    sensitivities: Sequence[float],
    releases: Sequence[int],
    budgets: Sequence[Budget],
    spent: Sequence[float] | None = None,
) -> list[float]:
    """Return for each client the standard deviation at which its releases cost its whole budget and no more.

    Inverts μ² = Σ (Δ/σ_τ)² + releases·(Δ/σ)², where μ is the Gaussian-DP parameter of (ε, δ) and `spent` the sum over
    earlier releases, which must leave something.

    >>> [round(std, 2) for std in gaussian_noise_stds([1.0], [1], [Budget(1.0, 1e-5)])]
    [3.73]
    """
    multipliers = noise_multipliers("gaussian", releases, budgets)
    if spent is not None:
        left = np.maximum(
            1 - np.asarray(spent) * (1 + _ROUNDING) ** 2 / _worth(tuple(budgets)) ** 2, 1e-12
        )  # of each budget; rounding must not make it negative
        multipliers = [float(z) for z in np.asarray(multipliers) / np.sqrt(left)]
    return [bound * multiplier for bound, multiplier in zip(sensitivities, multipliers, strict=True)]


def shared_noise(noise_stds: Sequence[float], weights: Sequence[float]) -> float:
    """Return the share of each client's noise that suffices against readers of the released models alone.

    With σ_i enough against the server, all clients in every round and p_i their weights, s·σ_i is enough where
    p_i²Δ_i²/Σ_j p_j²s²σ_j² ≤ Δ_i²/σ_i² for every i: s = max_i p_iσ_i/√Σ_j p_j²σ_j².

    >>> round(shared_noise([2.0] * 25, [1 / 25] * 25), 3)
    0.2
    """
    shares = [weight * std for weight, std in zip(weights, noise_stds, strict=True)]
    return max(shares) / math.hypot(*shares) * (1 + _ROUNDING)


def downlink_noise_std(
    *,
    sensitivities: Sequence[float],
    weights: Sequence[float],
    noise_stds: Sequence[float],
    releases: Sequence[int],
    budgets: Sequence[Budget],
) -> float:
    """Return the least noise that the server must add to each broadcast model for readers of the models alone.

    Client i moves a model by p_iΔ_i, under the variance Σ_j p_j²σ_j² + σ_D² of all clients' noise and the server's;
    over its releases that must not cost more than its budget. 0 where the clients' own noise suffices.
    """
    needed = gaussian_noise_stds(
        [p * bound for p, bound in zip(weights, sensitivities, strict=True)], releases, budgets
    )
    own = math.hypot(*(p * std for p, std in zip(weights, noise_stds, strict=True)))
    return math.sqrt(max(0.0, (max(needed) * (1 + _BOOKS_ROUNDING)) ** 2 - own**2))


_BOOKS_ROUNDING = 2e-6  # the books round the noise of a model down at the sixth digit


def cohort_downlink_noise_std(
    *,
    sensitivities: Sequence[float],
    noise_stds: Sequence[float],
    cohorts: Sequence[Sequence[int]],
    budgets: Sequence[Budget],
) -> float:
    """Return the same where a few clients take part in a round, weighed alike, and it is known who and when.

    The least σ_D with Σ_t (Δ_i/K_t)²/(Σ_j σ_j²/K_t² + σ_D²) ≤ μ_i², over the rounds t of each client i.
    """
    bounds, stds = np.asarray(sensitivities, float), np.asarray(noise_stds, float)
    sizes = np.array([len(cohort) for cohort in cohorts])
    clients = np.concatenate([np.asarray(cohort, int) for cohort in cohorts])
    own = np.array([np.sum(stds[list(cohort)] ** 2) / len(cohort) ** 2 if cohort else 0.0 for cohort in cohorts])
    moved, own = (bounds[clients] / np.repeat(sizes, sizes)) ** 2, np.repeat(own, sizes)
    worth = mu_of([budget.epsilon for budget in budgets], [budget.delta for budget in budgets]) ** 2

    def excess(log_variance: float) -> float:
        """Compare the dearest client's cost with its budget on a log scale; negative is within."""
        cost = np.bincount(clients, moved / (own + math.exp(log_variance)), len(bounds)) * (1 + _BOOKS_ROUNDING) ** 2
        return float(np.log(np.max(cost / worth)))

    if excess(-math.inf) <= 0:
        return 0.0
    high = math.log(float(np.max(own)))
    while excess(high) > 0:
        high += 2
    low = high - 2
    while excess(low) <= 0:
        low -= 2
    return math.exp(brentq(excess, low, high, xtol=1e-9) / 2) * (1 + _ROUNDING)
