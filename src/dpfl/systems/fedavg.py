"""FedAvg without privacy: the baseline that noise is measured against (McMahan et al., 2017)."""

from dataclasses import dataclass
from typing import ClassVar

from dpfl.errors import require_count
from dpfl.orders import Order
from dpfl.systems.system import State, System, batch_of


@dataclass(frozen=True, kw_only=True)
class FedAvg(System[State]):
    """E local steps at every client of the cohort, averaged by the number of records."""

    name: ClassVar[str] = "fedavg"
    rounds: int = 30
    local_steps: int = 5
    lr: float = 0.5
    sampling_rate: float | None = None  # chance of each record to be in a step's batch; None for full batches

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("local_steps", self.local_steps, "take at least one local step a round")
        batch_of(self.sampling_rate)

    def orders(self, state: State) -> dict[int, Order]:
        """Order the same plain local training from everyone."""
        order = Order(steps=self.local_steps, learning_rate=self.rate(state.round), batch=batch_of(self.sampling_rate))
        return dict.fromkeys(state.cohort, order)
