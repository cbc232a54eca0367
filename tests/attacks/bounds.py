"""What scores of canaries prove: lower bounds on ε, each with what it takes for granted."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom, norm

from dpfl.privacy.gaussian_dp import epsilon_of

Scores = NDArray[np.float64]
Bits = NDArray[np.bool_]  # which are up


def gaussian_bound(scores: Scores, up: Bits, delta: float, alpha: float) -> float:
    """Bound ε from below for two normal laws of one variance, by the distance of their means."""
    one, other = scores[up], scores[~up]
    spread = math.sqrt((one.var(ddof=1) * len(one) + other.var(ddof=1) * len(other)) / len(scores))
    distance = (one.mean() - other.mean()) / spread
    error = math.sqrt(1 / len(one) + 1 / len(other) + distance**2 / (2 * len(scores)))
    least = max(distance - norm.isf(alpha) * error, 0.0)
    return float(epsilon_of(least, delta))


def counted_bound(scores: Scores, up: Bits, delta: float, alpha: float) -> float:
    """Bound ε from below whatever the laws: Clopper–Pearson, at a threshold chosen on the other half."""
    half = np.arange(len(scores)) % 2 == 0
    thresholds = np.quantile(scores[half], np.linspace(0.01, 0.99, 99))
    chosen = max(thresholds, key=lambda at: _counted(scores[half], up[half], at, delta, alpha))
    return _counted(scores[~half], up[~half], chosen, delta, alpha)


def _counted(scores: Scores, up: Bits, at: float, delta: float, alpha: float) -> float:
    above, hits, alarms = scores > at, int(up.sum()), int((~up).sum())

    def least(count: int, of: int) -> float:
        return float(beta.ppf(alpha / 4, count, of - count + 1)) if count else 0.0

    def most(count: int, of: int) -> float:
        return float(beta.isf(alpha / 4, count + 1, of - count)) if count < of else 1.0

    pairs: Sequence[tuple[float, float]] = (
        (least(int((above & up).sum()), hits), most(int((above & ~up).sum()), alarms)),
        (least(int((~above & ~up).sum()), alarms), most(int((~above & up).sum()), hits)),
    )
    return max(math.log(max(right - delta, 1e-300) / wrong) for right, wrong in pairs)


def tail_bound(
    scores: Scores, up: Bits, as_if: Callable[[float, int], tuple[Scores, Bits]], delta: float, alpha: float
) -> float:
    """Bound ε from below where the law is known but for the size of its noise (Xiang et al., 2025).

    scores: log-likelihood ratios; `as_if` draws so many for noise of another size. The quarter that is most certain
    is guessed by sign. Of n scores those lie above a quantile that is distributed as Beta(n − r, r + 1), and each guess
    is wrong with the mean probability 1/(1 + e^|score|) above it. The bound is the ε of the most noise with which so
    few wrong guesses are not yet less likely than alpha.
    """
    guesses = len(scores) // 4
    chosen = np.argsort(-np.abs(scores))[:guesses]
    wrong = int(((scores[chosen] > 0) != up[chosen]).sum())
    quantiles = beta.ppf((np.arange(200) + 0.5) / 200, len(scores) - guesses, guesses + 1)

    def likely(noise: float) -> bool:
        certain = np.sort(np.abs(as_if(noise, 20_000)[0]))[::-1]
        error = np.cumsum(1 / (1 + np.exp(certain))) / np.arange(1, len(certain) + 1)  # of those above each
        above = np.maximum(((1 - quantiles) * len(certain)).astype(int), 1) - 1
        return float(binom.cdf(wrong, guesses, error[above]).mean()) > alpha

    low, high = 1 / 8, 8.0
    if likely(high):
        return 0.0
    for _ in range(14):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if likely(middle) else (low, middle)
    return _epsilon_of_ratios(*as_if(high, 200_000), delta)


def _epsilon_of_ratios(scores: Scores, up: Bits, delta: float) -> float:
    """Return the ε at which drawn log-likelihood ratios have this δ = E[(1 − e^(ε − L))⁺], either way round."""

    def found(losses: Scores) -> float:
        grid = np.linspace(0.0, float(losses.max()), 500)
        return float(next(one for one in grid if np.maximum(-np.expm1(one - losses), 0.0).mean() <= delta))

    return max(found(scores[up]), found(-scores[~up]))
