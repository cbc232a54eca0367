r"""Exact accounting for plain Gaussian noise, in closed form.

Releases with sensitivities Δ_k and noise σ_k compose, even when chosen adaptively, to one Gaussian release with
μ² = Σ_k (Δ_k/σ_k)² (Dong, Roth and Su, "Gaussian differential privacy", 2022, Corollary 3.3). It is (ε, δ)-DP exactly
for δ ≥ Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) (Balle and Wang, 2018, Theorem 8). Everything is computed with logarithms, so
that neither a tiny δ nor a large ε under- or overflows, and every answer is rounded to the safe side by a relative
1e-8, more than floating point is wrong for any ε from 1e-6 to 1e5 and δ from 1e-200 (the tests compare with 60 digits).
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfcx, log_ndtr, ndtri_exp

Array = NDArray[np.float64]

_MARGIN = 1e-8
_HOPELESS = 1e100  # a μ beyond which no ε is worth finding
_HALVINGS = 64  # of an interval in log space; more than double precision can tell apart
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def log_delta(epsilon: ArrayLike, mu: ArrayLike) -> Array:
    """Return ln δ of a Gaussian release with parameter `mu` at `epsilon` (the exact trade-off, not a bound).

    With a = ε/μ − μ/2 and b = ε/μ + μ/2 the two terms share a factor: δ = φ(a)·(M(a) − M(b)), M(x) = Φ(−x)/φ(x).
    """
    epsilon, mu = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(mu, float))
    with np.errstate(over="ignore"):
        low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
        return np.where(low > -5, _log_delta_by_mills(low, high), _log_delta_near_one(low, high))


def _log_delta_by_mills(low: Array, high: Array) -> Array:
    """For a > −5: the difference of two Mills ratios, as the integral of its slope where it would cancel."""
    low = np.maximum(low, -5.0)
    gap = np.maximum(high - low, 0.0)
    middle = low + gap / 2
    points = middle[..., None] + gap[..., None] / 2 * _NODES
    narrow = gap / 2 * (_mills_slope(points) @ _WEIGHTS)
    wide = _mills(low) - _mills(high)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.where(gap < 0.5, narrow, wide)) - low * low / 2 - math.log(2 * math.pi) / 2)


def _log_delta_near_one(low: Array, high: Array) -> Array:
    """For a ≤ −5, where the first term is almost 1: 1 minus both small ones."""
    low = np.minimum(low, -5.0)
    second = np.log(_mills(high)) - low * low / 2 - math.log(2 * math.pi) / 2
    return np.asarray(np.log1p(-np.exp(log_ndtr(low)) - np.exp(second)))


def _mills(x: Array) -> Array:
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2)))


def _mills_slope(x: Array) -> Array:
    """Return −M′(x) = 1 − x·M(x), by its asymptotic series where that difference would cancel."""
    far = np.maximum(x, 30.0)
    inverse = 1 / (far * far)
    series = inverse * (1 - 3 * inverse * (1 - 5 * inverse * (1 - 7 * inverse)))
    return np.where(x < 30, 1 - x * _mills(np.minimum(x, 30.0)), series)


def epsilon_of(mu: ArrayLike, delta: ArrayLike) -> Array:
    """Return the smallest ε, rounded up, for which a release with parameter `mu` is (ε, δ)-DP; 0 for μ = 0.

    Infinite for δ = 0 (no Gaussian release is purely private) and for a μ beyond 1e100.

    >>> round(float(epsilon_of(1.0, 1e-5)), 3)
    4.377
    """
    mu, delta = np.broadcast_arrays(np.asarray(mu, float), np.asarray(delta, float))
    with np.errstate(divide="ignore"):
        target = np.log(delta)
    sane = mu < _HOPELESS
    positive = np.where((mu > 0) & sane, mu, 1.0)
    # δ falls as ε grows. Where it is met without any ε (a tiny μ), the answer is 0.
    met_at_zero = (mu == 0) | (sane & (log_delta(0.0, positive) <= target))
    found = _bisect_log(lambda epsilon: log_delta(epsilon, positive) <= target, mu.shape, upper=True)
    return np.where(met_at_zero, 0.0, np.where((delta > 0) & sane, found * (1 + _MARGIN), np.inf))


def mu_of(epsilon: ArrayLike, delta: ArrayLike) -> Array:
    """Return the largest Gaussian-DP parameter, rounded down, that still is (ε, δ)-DP: what a budget is worth.

    Nothing for δ = 0: a purely private budget buys no Gaussian release.
    """
    given = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(delta, float))
    # A million clients often share one budget, and each takes some milliseconds.
    distinct, place = np.unique(np.stack([one.ravel() for one in given]), axis=1, return_inverse=True)
    epsilons, deltas = distinct
    with np.errstate(divide="ignore"):
        target = np.log(deltas)
    found = _bisect_log(lambda mu: log_delta(epsilons, mu) > target, epsilons.shape, upper=False)
    worth = np.where(deltas > 0, found * (1 - _MARGIN), 0.0)
    return np.asarray(worth[place.ravel()].reshape(given[0].shape))


def mu_of_pure(epsilon: float) -> float:
    """Return the Gaussian-DP parameter, rounded up, that covers every ε-DP release: Φ(−μ/2) = 1/(1 + e^ε).

    The trade-off of ε-DP is two straight lines that meet on the diagonal at 1/(1 + e^ε); a convex curve with the same
    end points that passes there lies below both.
    """
    if epsilon < 1e-3:  # the first term of the series, which lies above its sum
        return epsilon * math.sqrt(math.pi / 2) * (1 + _MARGIN)
    return float(-2 * ndtri_exp(-np.logaddexp(0.0, epsilon))) * (1 + _MARGIN)


def _bisect_log(beyond: Callable[[Array], Array], shape: tuple[int, ...], *, upper: bool) -> Array:
    """Find where a monotone condition turns true on the positive axis; return the end that is true, or the other."""
    low, high = np.full(shape, -800.0 * math.log(2)), np.full(shape, 800.0 * math.log(2))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        true_here = beyond(np.exp(middle))
        low, high = np.where(true_here, low, middle), np.where(true_here, middle, high)
    return np.asarray(np.exp(high if upper else low))
