"""Privacy filters: does one more release keep a client within its budget, however the noise was chosen so far?

A filter is fixed by the first release it sees, before anything private is known, in the currency that suits it:

- `PlainFilter`, for noise on all records: Σ ε ≤ ε for pure releases, or Σ μ² ≤ μ² in Gaussian DP (Koskela, Tobaben and
  Honkela, 2023), which covers pure releases too. Either suffices: a purely private path fails with probability 0, so
  that the δ of the other is spent once.
- `CountFilter`, for sampled noise whose multiplier and rate were fixed in advance: at most as many releases as their
  privacy-loss distribution allows. More noise counts the same (it is the agreed release with noise on top); less, or
  another rate, is refused.
- `RenyiFilter`, for everything else: releases go on while at least one order is within its allowance (Feldman and
  Zrnic, 2021). Which order is the last one may depend on what was released, so each order holds its own share of δ.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from dpfl.errors import BadInput
from dpfl.privacy import renyi
from dpfl.privacy.accounting import Mechanism, tight
from dpfl.privacy.budget import Budget

Currency = Literal["plain", "renyi"]  # of a grant over many runs

# How far a sum may pass its limit, and noise fall below what was agreed: a plan that is exactly the budget must not
# fail because the same number was computed another way.
_ROUNDING = 3e-9


class Filter(Protocol):
    """A budget and what was paid from it."""

    def affords(self, mechanism: Mechanism, count: int) -> bool:
        """Say whether `count` more releases would keep within the budget."""

    def pay(self, mechanism: Mechanism, count: int) -> None:
        """Add them to what was spent."""


class PlainFilter:
    """Pure ε and Gaussian-DP μ², side by side."""

    def __init__(self, budget: Budget, mu_squared: float) -> None:
        """Take the budget, and what it is worth in μ²."""
        self.epsilon, self.mu_squared = budget.epsilon, mu_squared
        self.spent_epsilon = self.spent_mu_squared = 0.0

    def affords(self, mechanism: Mechanism, count: int) -> bool:
        """Compare both sums; a release that costs infinitely much in one can still be paid in the other."""
        if mechanism.noise == "gaussian" and not mechanism.plain:
            raise BadInput(
                f"the noise of a budget counted in Gaussian DP must be on all records, was {_described(mechanism)};"
                " begin with sampled batches, or grant the ledger's budget with --currency renyi"
            )
        return (
            self.spent_mu_squared + count * mechanism.mu_squared <= self.mu_squared
            or self.spent_epsilon + count * mechanism.pure <= self.epsilon * (1 + _ROUNDING)
        )

    def pay(self, mechanism: Mechanism, count: int) -> None:
        """Add to both sums."""
        self.spent_mu_squared += count * mechanism.mu_squared
        self.spent_epsilon += count * mechanism.pure


class CountFilter:
    """How often one sampled mechanism may be used."""

    def __init__(self, budget: Budget, mechanism: Mechanism) -> None:
        """Fix the mechanism; how many releases fit is found out only as far as it is asked."""
        self.budget, self.mechanism = budget, mechanism
        self.count = 0
        self._within, self._beyond = 0, math.inf  # known to fit, known not to

    def affords(self, mechanism: Mechanism, count: int) -> bool:
        """Count; refuse what was not agreed on."""
        _require_agreed(self.mechanism, mechanism)
        wanted = self.count + count
        while self._within < wanted < self._beyond:  # look ahead, so that few rounds have to ask
            ahead = int(min(2 * wanted, (wanted + self._beyond) // 2))
            if _cost(self.mechanism, ahead, self.budget.delta) <= self.budget.epsilon * (1 + _ROUNDING):
                self._within = ahead
            else:
                self._beyond = ahead
        return wanted <= self._within

    def pay(self, mechanism: Mechanism, count: int) -> None:
        """Add to the count."""
        self.count += count


@lru_cache(maxsize=1024)
def _cost(mechanism: Mechanism, count: int, delta: float) -> float:
    """Price one mechanism once for all the clients that use it."""
    return tight({mechanism: count}, delta)


class RenyiFilter:
    """A Rényi curve."""

    ORDERS = (1.5, 2.0, 2.5, *map(float, range(3, 11)), 12.0, 14.0, 17.0, 20.0, 24.0, 32.0, 48.0, 64.0, 128.0)

    def __init__(self, budget: Budget, first: Mechanism | None = None) -> None:
        """Share δ among the orders: half for the one that suits the first release best, where that is known."""
        orders = len(self.ORDERS)
        shares = np.full(orders, 1 / orders)
        if first is not None and budget.delta > 0:
            lasts = renyi.allowances(budget, self.ORDERS, shares) / renyi.curve(first, self.ORDERS)
            shares = np.full(orders, 0.5 / (orders - 1))
            shares[np.argmax(lasts)] = 0.5
        self.allowances = renyi.allowances(budget, self.ORDERS, shares)
        self.epsilon = budget.epsilon
        self.spent = np.zeros(orders)
        self.spent_epsilon = 0.0

    def affords(self, mechanism: Mechanism, count: int) -> bool:
        """Look for an order that is still within; a purely private past needs none."""
        if self.spent_epsilon + count * mechanism.pure <= self.epsilon * (1 + _ROUNDING):
            return True
        return bool(np.any(self.spent + count * renyi.curve(mechanism, self.ORDERS) <= self.allowances))

    def pay(self, mechanism: Mechanism, count: int) -> None:
        """Add the curve."""
        self.spent = self.spent + count * renyi.curve(mechanism, self.ORDERS)
        self.spent_epsilon += count * mechanism.pure


class OverheardFilter:
    """For an eavesdropper on at most L uploads: any L stay within the budget where L like the least noised one do.

    That holds in one currency, so all uploads must be of one kind and differ in the size of their noise at most.
    """

    def __init__(self, whole: Filter, exposures: int) -> None:
        """Take a filter of the whole budget, which will not be paid from."""
        self.whole, self.exposures = whole, exposures
        self._kind: tuple[Mechanism, int] | None = None

    def affords(self, mechanism: Mechanism, count: int) -> bool:
        """Ask for L uploads like this one; refuse one of another kind."""
        kind = (replace(mechanism, multiplier=1.0), count)
        self._kind = self._kind or kind
        if kind != self._kind:
            raise BadInput(
                "uploads that may be overheard must be all of one kind (noise, sampling rate, number of releases), but"
                f" {_described(mechanism)}, {count} a round, is not that of the first; promise against the server"
            )
        return self.whole.affords(mechanism, self.exposures * count)

    def pay(self, mechanism: Mechanism, count: int) -> None:
        """Keep no count: which uploads will be overheard is not known."""


class Unlimited:
    """No budget: what a paper's formula spends is recorded, not limited."""

    def affords(self, mechanism: Mechanism, count: int) -> bool:
        """Afford everything."""
        return True

    def pay(self, mechanism: Mechanism, count: int) -> None:
        """Keep no count."""


def _require_agreed(agreed: Mechanism, mechanism: Mechanism) -> None:
    alike = replace(mechanism, multiplier=agreed.multiplier) == agreed
    if not alike or mechanism.multiplier < agreed.multiplier * (1 - _ROUNDING):
        raise BadInput(
            f"the noise must stay {_described(agreed)}, as in the first round, was {_described(mechanism)};"
            " promise noise='adaptive' to let it change, at a higher price"
        )


def _described(mechanism: Mechanism) -> str:
    rate = "" if mechanism.plain else f" at rate {mechanism.sampling_rate:g}"
    return f"{mechanism.noise} of multiplier {mechanism.multiplier:g}{rate}"
