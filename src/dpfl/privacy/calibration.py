"""From budgets to noise, exactly: the least noise for which the promise is true against the observer it names.

Against the server every release of a client counts, and `releases` is what the client will really answer. Against
readers of the released models the others' noise helps: `shared_noise` says how much less each client needs. Against an
eavesdropper, who reads the models and overhears a few uploads too, `overheard_noise_stds` has every client's noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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

Cohort = tuple[int, ...]


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


def decaying_noise_multipliers(
    falls: Sequence[Mapping[float, int]], budgets: Sequence[Budget], *, sampling_rate: float
) -> list[float]:
    """Return for each client the first Gaussian noise at which a plan fits whose noise falls along the way.

    falls: how many releases come at which part of the first noise, for each client. The ledger's filter counts them in
        the order in which they come; a sum is the same in any.
    """
    found = []
    for fall, budget in zip(falls, budgets, strict=True):
        path = tuple(sorted(fall.items(), reverse=True))
        if sampling_rate == 1:
            (worth,) = _worth((budget,))
            found.append(math.sqrt(math.fsum(count / part**2 for part, count in path)) / float(worth) * (1 + _ROUNDING))
        else:
            found.append(_first_of_a_path(sampling_rate, path, budget))
    return found


@lru_cache(maxsize=4096)
def _first_of_a_path(sampling_rate: float, path: tuple[tuple[float, int], ...], budget: Budget) -> float:
    """Search between the noise that all releases would need and that which the last of them leaves room for."""
    low = _filtered(sampling_rate, sum(count for _, count in path), budget)
    high = low / min(part for part, _ in path)
    while not _fits_falling(high, sampling_rate, path, budget):
        low, high = high, 1.1 * high
    if _fits_falling(low, sampling_rate, path, budget):
        return low
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits_falling(middle, sampling_rate, path, budget) else (middle, high)
    return high * (1 + 2 * _ROUNDING)


def _fits_falling(first: float, sampling_rate: float, path: tuple[tuple[float, int], ...], budget: Budget) -> bool:
    spent = RenyiFilter(budget, Mechanism("gaussian", first, sampling_rate))
    for part, count in path:
        now = Mechanism("gaussian", first * part, sampling_rate)
        if not spent.affords(now, count):
            return False
        spent.pay(now, count)
    return True


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


def beside_a_count(multiplier: float, records: int, cohort: int) -> tuple[float, float]:
    """Share a release out between an upload and a count of so many records: two multipliers that cost as much as one.

    In Gaussian DP 1/z² = 1/z_u² + 1/z_c². Counts are noised so that the share of all K clients together is known to a
    twentieth (as Andrew et al., 2021, have it), each client's to √K times that, but never so little that a count takes
    more than a tenth of the price. Returned are z_u, in sensitivities of the upload, and z_c, for a record that counts
    for 1 when it is replaced by another.

    >>> [round(one, 3) for one in beside_a_count(10.0, 6000, 1)]
    [10.006, 300.0]
    >>> [round(one, 3) for one in beside_a_count(10.0, 6000, 25)]
    [10.0, 1500.0]
    """
    of_count = max(records * math.sqrt(cohort) / 20, math.sqrt(10) * multiplier)
    return 1 / math.sqrt(multiplier**-2 - of_count**-2), of_count


def shared_noise(noise_stds: Sequence[float], weights: Sequence[float]) -> float:
    """Return the share of each client's noise that suffices against readers of the released models alone.

    With σ_i enough against the server, all clients in every round and p_i their weights, s·σ_i is enough where
    p_i²Δ_i²/Σ_j p_j²s²σ_j² ≤ Δ_i²/σ_i² for every i: s = max_i p_iσ_i/√Σ_j p_j²σ_j².

    >>> round(shared_noise([2.0] * 25, [1 / 25] * 25), 3)
    0.2
    """
    shares = [weight * std for weight, std in zip(weights, noise_stds, strict=True)]
    return max(shares) / math.hypot(*shares) * (1 + _ROUNDING)


_BOOKS_ROUNDING = 2e-6  # the books round the noise of a model down at the sixth digit


def overheard_noise_stds(
    *,
    sensitivities: Sequence[float],
    exposures: int,
    cohorts: Mapping[Cohort, int],
    budgets: Sequence[Budget],
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Return each client's least noise against who overhears L of its uploads and reads all models.

    cohorts: how often each set of clients takes part together. weights: what clients' p_i are in proportion to, in
    every cohort; all weigh alike if left out.

    A model that is sent out tells of client i's upload the part s_i = p_i²σ_i²/Σ_j p_j²σ_j² of what the upload itself
    tells, (Δ_i/σ_i)², where j runs over its cohort. So the whole costs (Δ_i/σ_i)²·(L + Σ s_i), the sum over the rounds
    but the L in which s_i is least: hearing those brings most. Set to μ_i² that is σ_i² = (Δ_i/μ_i)²·(L + Σ s_i), whose
    right side depends on ratios of variances alone. It is iterated, and at the end all variances are scaled alike, by
    what the dearest client still overspends.
    """
    alone = np.square(gaussian_noise_stds(sensitivities, [1] * len(budgets), budgets))  # (Δ_i/μ_i)²
    sizes = np.array([len(cohort) for cohort in cohorts])
    clients = np.concatenate([np.asarray(cohort, int) for cohort in cohorts])
    squares = np.ones(len(alone)) if weights is None else np.square(np.asarray(weights, float) / max(weights))
    kinds, times = np.repeat(np.arange(len(sizes)), sizes), np.repeat(np.array(list(cohorts.values())), sizes)

    def needed(variances: NDArray[np.float64]) -> NDArray[np.float64]:
        counted = (squares * variances)[clients]
        share = counted / np.bincount(kinds, counted)[kinds]
        order = np.lexsort((share, clients))
        client, told, count = clients[order], share[order], times[order]
        before = np.cumsum(count) - count
        before -= before[np.searchsorted(client, client)]  # of the same client
        heard = np.clip(exposures - before, 0, count)
        uploads = np.bincount(client, heard + (count - heard) * told, len(alone))
        return alone * np.maximum(uploads, 1.0)  # of those who never take part, as if they did once

    variances = alone
    for _ in range(_MOST_TURNS):
        wanted = needed(variances)
        if np.allclose(wanted, variances, rtol=1e-8, atol=0):
            break
        variances = wanted
    excess = np.max(needed(variances) / variances)
    return [float(std) * (1 + _BOOKS_ROUNDING) for std in np.sqrt(variances * excess)]


_MOST_TURNS = 2000  # it converges geometrically, and is scaled to the safe side wherever it stops
