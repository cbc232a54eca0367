r"""Exact accounting for plain Gaussian noise, in closed form.

Releases with sensitivities Δ_k and noise σ_k compose, even when chosen adaptively, to one Gaussian release with
μ² = Σ_k (Δ_k/σ_k)² (Dong, Roth and Su, "Gaussian differential privacy", 2022, Corollary 3.3). It is (ε, δ)-DP exactly
for δ ≥ Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) (Balle and Wang, 2018, Theorem 8). Everything is computed with logarithms, so
that neither a tiny δ nor a large ε under- or overflows, and every answer is rounded to the safe side by a relative
1e-8, more than floating point is wrong for any ε from 1e-3 up (the tests compare with 60 digits).
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

Array = NDArray[np.float64]

_MARGIN = 1e-8
_HALVINGS = 90  # of an interval in log space; more than double precision can tell apart


def log_delta(epsilon: ArrayLike, mu: ArrayLike) -> Array:
    """Return ln δ of a Gaussian release with parameter `mu` at `epsilon` (the exact trade-off, not a bound)."""
    epsilon, mu = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(mu, float))
    with np.errstate(divide="ignore"):
        first = log_ndtr(-epsilon / mu + mu / 2)
        second = epsilon + log_ndtr(-epsilon / mu - mu / 2)
        # The difference of two exponentials; rounding can make it zero or negative only where δ is below resolution.
        gap = np.minimum(second - first, 0.0)
        return np.asarray(first + np.log(-np.expm1(gap)))


def epsilon_of(mu: ArrayLike, delta: ArrayLike) -> Array:
    """Return the smallest ε, rounded up, for which a release with parameter `mu` is (ε, δ)-DP; 0 for μ = 0.

    >>> round(float(epsilon_of(1.0, 1e-5)), 3)
    4.377
    """
    mu, delta = np.broadcast_arrays(np.asarray(mu, float), np.asarray(delta, float))
    target = np.log(delta)
    positive = np.where(mu > 0, mu, 1.0)
    # δ falls as ε grows. Where it is met without any ε (a tiny μ), the answer is 0.
    met_at_zero = (mu == 0) | (log_delta(0.0, positive) <= target)
    found = _bisect_log(lambda epsilon: log_delta(epsilon, positive) <= target, mu.shape, upper=True)
    return np.where(met_at_zero, 0.0, found * (1 + _MARGIN))


def mu_of(epsilon: ArrayLike, delta: ArrayLike) -> Array:
    """Return the largest Gaussian-DP parameter, rounded down, that still is (ε, δ)-DP: what a budget is worth."""
    epsilon, delta = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(delta, float))
    target = np.log(delta)
    found = _bisect_log(lambda mu: log_delta(epsilon, mu) > target, epsilon.shape, upper=False)
    return found * (1 - _MARGIN)


def _bisect_log(beyond: Callable[[Array], Array], shape: tuple[int, ...], *, upper: bool) -> Array:
    """Find where a monotone condition turns true on the positive axis; return the end that is true, or the other."""
    low, high = np.full(shape, -800.0 * math.log(2)), np.full(shape, 800.0 * math.log(2))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        true_here = beyond(np.exp(middle))
        low, high = np.where(true_here, low, middle), np.where(true_here, middle, high)
    return np.asarray(np.exp(high if upper else low))
