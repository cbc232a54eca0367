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

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from dpfl.errors import BadInput
from dpfl.privacy import renyi
from dpfl.privacy.accounting import Mechanism, tight
from dpfl.privacy.budget import Budget
from dpfl.privacy.gaussian_dp import mu_of

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


def worth_of(budgets: Sequence[Budget]) -> list[float]:
    """Return what each budget is worth in μ², all at once."""
    mu = mu_of([budget.epsilon for budget in budgets], [budget.delta for budget in budgets])
    return [float(one) for one in mu**2]


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
    """For an eavesdropper who hears at most L uploads and reads every model, in μ².

    An upload that is heard costs its own price, one that is not heard what the model tells of it, and the L for which
    that is most apart count as heard. What a model tells is known when it is about to be sent out, and not when uploads
    are charged. So both are asked for: an upload leaves where it could still be heard, a model where it could be read.
    The sum is that of the dearest choice at every time, so that it holds for who chooses as he listens.
    """

    def __init__(self, mu_squared: float, exposures: int) -> None:
        """Take what the budget is worth, and L."""
        self.mu_squared, self.exposures = mu_squared, exposures
        self._read = 0.0  # what all models told
        self._apart: list[float] = []  # the L largest differences of an upload's price from its model's
        self._last = 0.0  # the price of the last upload, of which no model has told

    def affords(self, mechanism: Mechanism, count: int) -> bool:
        """Ask for an upload that is heard; refuse one that is no plain sum, which no model hides among others."""
        if count != 1 or mechanism.noise != "gaussian" or not mechanism.plain:
            raise BadInput(
                "uploads that may be overheard must be plain sums with Gaussian noise on them, which models hide among"
                f" others, but {_described(mechanism)}, {count} a round, is not; promise against the server"
            )
        return self._fits(self._read, self._last, mechanism.mu_squared)

    def pay(self, mechanism: Mechanism, count: int) -> None:
        """Take the upload for one that is heard, until a model tells of it."""
        self._settle(0.0)
        self._last = mechanism.mu_squared

    def affords_model(self, mu_squared: float) -> bool:
        """Say whether a model may be sent out that tells so much of the last upload."""
        told = min(mu_squared, self._last)
        return self._fits(self._read + told, self._last - told)

    def pay_model(self, mu_squared: float) -> None:
        """Add what a model told."""
        self._settle(min(mu_squared, self._last))

    def _settle(self, told: float) -> None:
        self._read += told
        self._apart = heapq.nlargest(self.exposures, [*self._apart, self._last - told])
        self._last = 0.0

    def _fits(self, read: float, *apart: float) -> bool:
        return read + math.fsum(heapq.nlargest(self.exposures, [*self._apart, *apart])) <= self.mu_squared


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
