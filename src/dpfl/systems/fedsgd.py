"""FedSGD without privacy: one full-batch step a round, so that the average is one step of the whole federation."""

from dataclasses import dataclass
from typing import ClassVar

from dpfl.orders import Order
from dpfl.systems.system import State, System


@dataclass(frozen=True, kw_only=True)
class FedSGD(System[State]):
    """One gradient step at every client of the cohort, averaged by the number of records."""

    name: ClassVar[str] = "fedsgd"
    rounds: int = 100
    lr: float = 0.5

    def orders(self, state: State) -> dict[int, Order]:
        """Order one plain step from everyone."""
        return dict.fromkeys(state.cohort, Order(steps=1, learning_rate=self.rate(state.round)))
