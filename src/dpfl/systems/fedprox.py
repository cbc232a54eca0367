"""FedProx without privacy: FedAvg whose clients are pulled towards the broadcast model (Li et al., 2020)."""

from dataclasses import dataclass
from typing import ClassVar

from dpfl.errors import require_count, require_not_negative
from dpfl.orders import Order
from dpfl.systems.system import State, System, batch_of


@dataclass(frozen=True, kw_only=True)
class FedProx(System[State]):
    """E local steps on F_i(w) + (μ/2)‖w − broadcast‖² at every client, averaged by the number of records."""

    name: ClassVar[str] = "fedprox"
    rounds: int = 30
    local_steps: int = 5
    lr: float = 0.5
    proximal: float = 0.1  # μ
    sampling_rate: float | None = None  # chance of each record to be in a step's batch; None for full batches

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("local_steps", self.local_steps, "take at least one local step a round")
        batch_of(self.sampling_rate)
        require_not_negative("proximal", self.proximal, "use 0 for no pull")

    def orders(self, state: State) -> dict[int, Order]:
        """Order the same proximal local training from everyone."""
        order = Order(
            steps=self.local_steps,
            learning_rate=self.rate(state.round),
            batch=batch_of(self.sampling_rate),
            proximal=self.proximal,
        )
        return dict.fromkeys(state.cohort, order)
