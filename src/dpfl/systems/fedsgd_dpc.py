"""FedSGD-DPC: one step a round with noise on the gradient; how many queries and replies are right (fedsgd-dpc).

Each record's gradient is clipped, in L1 for Laplace noise on all records, in L2 for Gaussian noise on a Poisson sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpfl.errors import BadInput
from dpfl.orders import Gaussian, Laplace, Order, Poisson, RecordClip
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.paper_formulas import fedsgd_dpc_laplace_scale, fedsgd_dpc_noise_std
from dpfl.systems.queried import QueriedSystem
from dpfl.systems.system import batch_of


@dataclass(frozen=True, kw_only=True)
class FedSGDDPC(QueriedSystem):
    """θ ← θ − η_t·(mean of clip(g, C) + noise), once a round."""

    name: ClassVar[str] = "fedsgd-dpc"
    rounds: int = 60
    sampling_rate: float | None = None  # q, with Gaussian noise only; None: all records

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling_rate is not None:
            Poisson(self.sampling_rate)
            if self.mechanism == "laplace":
                raise BadInput(
                    f"sampling_rate must be left out with Laplace noise, which FedSGD-DPC adds to the gradient of all"
                    f" records, was {self.sampling_rate}; leave it out, or use mechanism=gaussian"
                )

    @property
    def usual_lr(self) -> float:
        """Return a rate that suits gradients of length 1."""
        return 2.0

    def theory_gamma(self, strong_convexity: float, smoothness: float) -> float:
        """Return γ = 2λ/μ."""
        return 2 * smoothness / strong_convexity

    @property
    def amplification(self) -> float:
        """Return q: each noised step is of one Poisson sample."""
        return self.sampling_rate or 1.0

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record, against the server: replaced, or added and removed where samples count."""
        return Promise(
            budgets=self.budgets(len(sizes)),
            unit="record",
            neighbours="replace" if self.mechanism == "laplace" else "add-remove",
            calibration=self.calibration,
            cautions=self.papers_cautions,
        )

    def order(self, done: int, noise: Gaussian | Laplace | None, records: int) -> Order:
        """Order one step with noise on the sum of the clipped gradients."""
        return Order(
            steps=1, learning_rate=self.rates(done, 1), batch=batch_of(self.sampling_rate),
            clip=RecordClip(self.clip, self.norm_order), noise=noise, noise_on="step",
        )  # fmt: skip

    def papers_noise(self, order: Order, records: int, budget: Budget, replies: float) -> Gaussian | Laplace:
        """Return Theorem 1's scale or Theorem 2's standard deviation, which are of the mean gradient, for the sum."""
        divisor = order.divisor(records)
        if self.mechanism == "laplace":
            scale = fedsgd_dpc_laplace_scale(replies=replies, clip=self.clip, records=records, epsilon=budget.epsilon)
            return Laplace(divisor * scale)
        std = fedsgd_dpc_noise_std(
            replies=replies, clip=self.clip, records=records, epsilon=budget.epsilon, delta=budget.delta,
            constant=self.open_constant(budget, replies),
        )  # fmt: skip
        return Gaussian(divisor * std)
