"""FedAvg without privacy: the baseline that noise is measured against (McMahan et al., 2017)."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from dpfl.orders import Order
from dpfl.systems.system import ADDED_0_3, State, System, by_size, local_training, require_local_training


@dataclass(frozen=True, kw_only=True)
class FedAvg(System[State]):
    """E local steps at every client of the cohort, averaged by the number of records."""

    name: ClassVar[str] = "fedavg"
    rounds: int = 30
    local_steps: int = 5
    lr: float = 0.5
    sampling_rate: float | None = None  # chance of each record to be in a step's batch; None for full batches
    local_epochs: int | None = field(
        default=None, metadata=ADDED_0_3
    )  # passes over a client's records, instead of local_steps
    batch_size: int | None = field(default=None, metadata=ADDED_0_3)  # records a step, shuffled

    def __post_init__(self) -> None:
        super().__post_init__()
        require_local_training(
            self.local_steps, self.local_epochs, self.batch_size, usual_steps=type(self).local_steps,
            sampling_rate=self.sampling_rate,
        )  # fmt: skip

    def orders(self, state: State) -> dict[int, Order]:
        """Order the same plain local training from everyone."""
        return by_size(state, partial(self._order, state.round))

    def _order(self, done: int, records: int) -> Order:
        local = local_training(
            self.local_steps, self.local_epochs, self.batch_size, records, sampling_rate=self.sampling_rate
        )
        return Order(**local, learning_rate=self.rate(done))
