"""The ledger: every client's budget, charged before the client computes anything, and refusing what it cannot pay.

It is a privacy filter in the currency of Gaussian DP: a client goes on while Σ (Δ/σ)² ≤ μ², however the noise was
chosen along the way. The price is derived from the order itself; a mechanism it cannot price is refused, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dpfl.errors import BadInput, BudgetRefused
from dpfl.orders import Full, Gaussian, Order, Poisson, sensitivity
from dpfl.privacy.budget import Promise
from dpfl.privacy.gaussian_dp import epsilon_of, mu_of


@dataclass(frozen=True)
class Charged:
    """An order that has been paid for. Only the ledger makes one, and clients perform nothing else."""

    order: Order
    records: int  # the public number of records that the price was derived from, and that divides sums


class Ledger:
    """What each client has spent so far, against what it granted."""

    def __init__(self, promise: Promise | None, sizes: tuple[int, ...]) -> None:
        """Open the books; `promise=None` is a training without privacy, where nothing is charged."""
        self.promise = promise
        self.sizes = sizes
        self.spent = np.zeros(len(sizes))  # μ² of each client
        self.replies = np.zeros(len(sizes), dtype=int)
        if promise is None or promise.calibration == "paper":
            # The client agreed to a paper's formula (or to nothing at all): its true price is recorded, not limited.
            self._limit = np.full(len(sizes), np.inf)
        else:
            granted = mu_of([b.epsilon for b in promise.budgets], [b.delta for b in promise.budgets])
            self._limit = granted**2

    def charge(self, orders: Mapping[int, Order]) -> dict[int, Charged]:
        """Charge each client for its order and return the orders that are paid; a client that cannot pay is left out.

        Raises BudgetRefused when not one client of the cohort can pay.
        """
        prices = {client: self._price(order, client) for client, order in orders.items()}
        paid = {}
        for client, order in orders.items():
            if self.spent[client] + prices[client] <= self._limit[client]:
                self.spent[client] += prices[client]
                self.replies[client] += 1
                paid[client] = Charged(order, self.sizes[client])
        if orders and not paid:
            raise BudgetRefused(
                f"the budget of all {len(orders)} clients of this round is spent, so that none may upload again;"
                " lower rounds or raise epsilon, and the noise will be planned for it"
            )
        return paid

    def _price(self, order: Order, client: int) -> float:
        return 0.0 if self.promise is None else price_of(order, self.sizes[client], self.promise)

    def epsilon(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Return the ε each client has really spent so far, at its own δ; infinite where nothing was promised."""
        if self.promise is None:
            return np.full(len(self.sizes), np.inf)
        return epsilon_of(np.sqrt(self.spent), [budget.delta for budget in self.promise.budgets])


def price_of(order: Order, records: int, promise: Promise) -> float:
    """Return the order's cost in μ²: its releases times (Δ/σ)²."""
    if order.noise is None:
        raise BadInput("noise must be set where privacy is promised, was None; order Gaussian noise")
    if not isinstance(order.noise, Gaussian) or not isinstance(order.batch, Full):
        what = "Poisson-sampled batches" if isinstance(order.batch, Poisson) else type(order.noise).__name__
        raise BadInput(
            f"the order's mechanism must be Gaussian noise on full batches, was {what}: this ledger cannot price it,"
            " and what is not priced is not released; order what it can price"
        )
    bound = sensitivity(order, records=records, unit=promise.unit, neighbours=promise.neighbours, norm=2)
    ratio = bound / order.noise.std
    return order.releases * (ratio * ratio)  # a product overflows to infinity, which no budget can pay; ** would raise
