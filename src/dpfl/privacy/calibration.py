"""From budgets to noise, exactly: the least noise for which the promise is true."""

from collections.abc import Sequence

import numpy as np

from dpfl.privacy.budget import Budget
from dpfl.privacy.gaussian_dp import mu_of

# The ledger adds up one charge a round in floating point; this much extra noise keeps the sum below the budget.
_ROUNDING = 1e-9


def gaussian_noise_stds(
    sensitivities: Sequence[float], releases: Sequence[int], budgets: Sequence[Budget]
) -> list[float]:
    """Return for each client the standard deviation at which its releases cost its whole budget and no more.

    Inverts μ² = releases·(Δ/σ)², where μ is the Gaussian-DP parameter of (ε, δ).

    >>> [round(std, 2) for std in gaussian_noise_stds([1.0], [1], [Budget(1.0, 1e-5)])]
    [3.73]
    """
    worth = mu_of([budget.epsilon for budget in budgets], [budget.delta for budget in budgets])
    stds = np.asarray(sensitivities) * np.sqrt(np.asarray(releases)) / worth
    return [float(std) for std in stds * (1 + _ROUNDING)]
