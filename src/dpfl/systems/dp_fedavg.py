"""DP-FedAvg: E local steps on the clipped client gradient, noised before upload; how many steps are right (dp-fedavg).

Clipping the client's gradient, not each record's, bounds what replacing all of a client's data can do: the promise is
for whole clients, with a sensitivity of 2·Σ_k η_k·C, where the paper takes half of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpfl.errors import require_count
from dpfl.orders import ClientClip, Gaussian, Laplace, Order
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.paper_formulas import dp_fedavg_laplace_scale, dp_fedavg_noise_std
from dpfl.systems.queried import QueriedSystem


@dataclass(frozen=True, kw_only=True)
class DPFedAvg(QueriedSystem):
    """θ ← θ − η_k·clip(∇f_i(θ), C), E times; noise on the upload."""

    name: ClassVar[str] = "dp-fedavg"
    rounds: int = 5
    local_steps: int = 5  # E

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("local_steps", self.local_steps, "take at least one local step a round")

    @property
    def usual_lr(self) -> float:
        """Return a rate that suits gradients of length 1."""
        return 0.1

    def theory_gamma(self, strong_convexity: float, smoothness: float) -> float:
        """Return γ = max(8λ/μ, E)."""
        return max(8 * smoothness / strong_convexity, self.local_steps)

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a whole client replaced by another, against the server."""
        return Promise(
            budgets=self.budgets(len(sizes)),
            unit="client",
            neighbours="replace",
            calibration=self.calibration,
            # The paper's Ξ = η̃EC is half of 2·Σ_k η_k·C where the rate does not decay, a little more where it does.
            claimed_sensitivity=0.5 if self.calibration == "paper" else 1.0,
            cautions=self.papers_cautions,
        )

    def order(self, done: int, noise: Gaussian | Laplace | None) -> Order:
        """Order E steps on the clipped gradient of all records."""
        return Order(
            steps=self.local_steps, learning_rate=self.rates(done * self.local_steps, self.local_steps),
            clip=ClientClip(self.clip, self.norm_order), noise=noise, noise_on="upload",
        )  # fmt: skip

    def papers_noise(self, order: Order, records: int, budget: Budget, replies: float) -> Gaussian | Laplace:
        """Return Theorem 1's scale or Theorem 2's standard deviation, with the largest rate of the round."""
        largest, steps = max(order.learning_rates), self.local_steps
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
