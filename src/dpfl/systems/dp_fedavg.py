"""DP-FedAvg: E local steps on the clipped client gradient, noised before upload; how many steps are right (dp-fedavg).

Clipping the client's gradient, not each record's, bounds what replacing all of a client's data can do: the promise is
for whole clients, with a sensitivity of 2·Σ_k η_k·C, where the paper takes half of that. The sum runs over the steps
that a client takes: with local epochs more where it has more records.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dpfl.errors import BadInput, require_count
from dpfl.orders import ClientClip, Gaussian, Laplace, Order
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.paper_formulas import dp_fedavg_laplace_scale, dp_fedavg_noise_std
from dpfl.systems.queried import QueriedSystem
from dpfl.systems.system import ADDED_0_3, local_training, require_local_training


@dataclass(frozen=True, kw_only=True)
class DPFedAvg(QueriedSystem):
    """θ ← θ − η_k·clip(∇f_i(θ), C), E times; noise on the upload."""

    name: ClassVar[str] = "dp-fedavg"
    rounds: int = 5
    local_steps: int = 5  # E
    local_epochs: int | None = field(
        default=None, metadata=ADDED_0_3
    )  # passes over a client's shuffled records in a round, instead of local_steps
    batch_size: int | None = field(default=None, metadata=ADDED_0_3)  # records a local step sees; None: all
    noise_for_steps: int | None = field(
        default=None, metadata=ADDED_0_3
    )  # in paper calibration: so many steps get noise, however many a client takes, which keeps no promise; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        require_local_training(self.local_steps, self.local_epochs, self.batch_size, usual_steps=type(self).local_steps)
        if self.noise_for_steps is None:
            return
        require_count("noise_for_steps", self.noise_for_steps, "leave it out for noise that counts every step")
        if self.calibration != "paper" or self.local_epochs is not None:
            raise BadInput(
                "noise_for_steps must be left out but in paper calibration with local_steps, where it shows what the"
                f" paper's noise would be if it did not grow with them, was {self.noise_for_steps}; leave it out"
            )

    @property
    def usual_lr(self) -> float:
        """Return a rate that suits gradients of length 1."""
        return 0.1

    def theory_gamma(self, strong_convexity: float, smoothness: float) -> float:
        """Return γ = max(8λ/μ, E)."""
        return max(8 * smoothness / strong_convexity, self.local_steps)

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a whole client replaced by another, against the server."""
        counted = self.local_steps if self.noise_for_steps is None else self.noise_for_steps
        return Promise(
            budgets=self.budgets(len(sizes)),
            unit="client",
            neighbours="replace",
            calibration=self.calibration,
            # The paper's Ξ = η̃EC is half of 2·Σ_k η_k·C where the rate does not decay, a little more where it does.
            claimed_sensitivity=0.5 * counted / self.local_steps if self.calibration == "paper" else 1.0,
            cautions=self.papers_cautions if counted == self.local_steps else (
                *self.papers_cautions,
                f"noise_for_steps should be the {self.local_steps} local steps of a round for any promise to hold, was"
                f" {counted}: clients' data tell in every step; leave it out, or calibrate tightly",
            ),
        )  # fmt: skip

    def order(self, done: int, noise: Gaussian | Laplace | None, records: int) -> Order:
        """Order E steps on the clipped gradient of all records, or of one shuffled batch after another."""
        training = local_training(self.local_steps, self.local_epochs, self.batch_size, records)
        steps = training["steps"]
        return Order(
            **training, learning_rate=self.rates(done * steps, steps), clip=ClientClip(self.clip, self.norm_order),
            noise=noise, noise_on="upload",
        )  # fmt: skip

    def papers_noise(self, order: Order, records: int, budget: Budget, replies: float) -> Gaussian | Laplace:
        """Return Theorem 1's scale or Theorem 2's standard deviation, with the largest rate of the round."""
        largest, steps = max(order.learning_rates), self.noise_for_steps or order.steps
        if self.mechanism == "laplace":
            scale = dp_fedavg_laplace_scale(
                replies=replies, largest_lr=largest, local_steps=steps, clip=self.clip, epsilon=budget.epsilon
            )
            return Laplace(scale)
        std = dp_fedavg_noise_std(
            replies=replies, largest_lr=largest, local_steps=steps, clip=self.clip, epsilon=budget.epsilon,
            delta=budget.delta, constant=self.open_constant(budget, replies),
        )  # fmt: skip
        return Gaussian(std)
