"""Rényi differential privacy: the curve of a mechanism over orders α, from `dp-accounting`.

Looser than privacy-loss distributions, but it adds up under any adaptive choice of noise and is defined for every
mechanism, so it serves as cross-check, as the bound for batches of fixed size (Wang, Balle and Kasiviswanathan, 2019)
and as the currency of a filter for sampled noise that changes along the way.
"""

import logging
import math
from functools import lru_cache

import numpy as np

from dpfl.privacy.accounting import Mechanism, Spent, dp_accounting
from dpfl.privacy.budget import Budget
from dpfl.privacy.gaussian_dp import Array

_SMALL = 1e-4  # a pure ε of which differences lose digits

# dp-accounting's own choice.
ORDERS: tuple[float, ...] = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)


def epsilon(spent: Spent, delta: float) -> float:
    """Return the ε that the sum of all curves gives at δ, by the best of the orders."""
    spent = {mechanism: count for mechanism, count in spent.items() if count > 0}
    if delta == 0:
        return math.fsum(count * mechanism.pure for mechanism, count in spent.items())
    total = sum((count * curve(mechanism, ORDERS) for mechanism, count in spent.items()), np.zeros(len(ORDERS)))
    return float(dp_accounting().rdp.compute_epsilon(ORDERS, total, delta)[0])


def allowances(budget: Budget, orders: tuple[float, ...], shares: Array | float = 1.0) -> Array:
    """Return for each order the Rényi divergence up to which (ε, δ)-DP holds, with its share of δ; −∞ for δ = 0.

    Turns ε = ε(α) + ln(1 − 1/α) − ln(δα)/(α − 1) around (Canonne, Kamath and Steinke, 2020, Proposition 12).
    """
    alpha = np.array(orders)
    with np.errstate(divide="ignore"):
        slack = np.log(budget.delta * shares * alpha) / (alpha - 1)
    return np.asarray(budget.epsilon - np.log1p(-1 / alpha) + slack)


@lru_cache(maxsize=4096)
def curve(mechanism: Mechanism, orders: tuple[float, ...]) -> Array:
    """Return the Rényi divergence of one release at each order; the array is shared, do not write to it."""
    alpha = np.array(orders)
    if mechanism.overwhelmed:
        found = np.full(len(orders), np.inf)
    elif mechanism.pure < _SMALL:
        found = alpha * mechanism.pure**2 / 2  # covers every ε-DP release (Bun and Steinke, 2016), and does not cancel
    elif mechanism.noise == "laplace":
        found = _pure_curve(mechanism.pure, alpha) if not mechanism.plain else _composed(mechanism, orders)
    elif mechanism.plain or mechanism.replaced:  # for sampled records that are replaced the package has no curve
        found = alpha * mechanism.unsampled.mu_squared / 2
    else:  # a logarithm close to 0, which double precision knows to 1e-15 or so, over α − 1
        found = np.maximum(_composed(mechanism, orders), 0.0) + 1e-13
    found.flags.writeable = False
    return found


def _composed(mechanism: Mechanism, orders: tuple[float, ...]) -> Array:
    """Ask dp-accounting's accountant for one release."""
    package = dp_accounting()
    neighbours = package.NeighboringRelation.ADD_OR_REMOVE_ONE
    if mechanism.noise == "laplace":
        event = package.LaplaceDpEvent(mechanism.multiplier)
    elif mechanism.sampling == "poisson":
        event = package.PoissonSampledDpEvent(mechanism.sampling_rate, package.GaussianDpEvent(mechanism.multiplier))
    else:
        neighbours, noise = package.NeighboringRelation.REPLACE_ONE, package.GaussianDpEvent(mechanism.multiplier)
        event = package.SampledWithoutReplacementDpEvent(1.0, mechanism.sampling_rate, noise)
    # It leaves out (as infinite) the orders whose series does not converge, which is safe, and warns of each.
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        return np.array(package.rdp.RdpAccountant(orders, neighbours).compose(event).rdp)
    finally:
        absl.setLevel(level)


def _pure_curve(pure: float, alpha: Array) -> Array:
    """Return the largest divergence of any ε-DP release: that of randomised response."""
    high = -np.logaddexp(0.0, -pure)
    low = high - pure
    return np.asarray(np.logaddexp(alpha * high + (1 - alpha) * low, alpha * low + (1 - alpha) * high) / (alpha - 1))
