"""UDP: one full-batch step with per-record clipping, noised before it leaves the client (Wei et al., udp-crd).

Each client i has its own (ε_i, δ_i) and n_i, and so its own noise. The paper's name says user-level; its proof, and our
promise, is for one record replaced by another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dpfl.errors import require_positive
from dpfl.orders import Gaussian, Order, RecordClip, sensitivity
from dpfl.privacy.budget import Calibration, Promise, budgets, require_budgets
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.privacy.claims import udp_cautions, udp_noise_std
from dpfl.systems.system import Problem, State, System


@dataclass(frozen=True, kw_only=True)
class UDPState(State):
    """The state, and the noise that each client was asked for."""

    noise_stds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class UDP(System[UDPState]):
    """K random clients, w_i = w − (η/n_i)·Σ_m clip(g_{i,m}, C) + N(0, σ_i²I), weighed by n_i."""

    name: ClassVar[str] = "udp"
    rounds: int = 100
    lr: float = 2.0
    clip: float = 1.0
    epsilon: float | tuple[float, ...] = 8.0  # one for all clients, or one each
    delta: float | tuple[float, ...] = 1e-3
    calibration: Calibration = "tight"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("clip", self.clip, "try 1.0")
        require_budgets(self.epsilon, self.delta, pure=False)

    def promise(self, clients: int) -> Promise:
        """Promise (ε_i, δ_i) for a record, against the server."""
        granted = budgets(self.epsilon, self.delta, clients)
        return Promise(
            budgets=granted,
            unit="record",
            neighbours="replace",
            calibration=self.calibration,
            cautions=udp_cautions(granted) if self.calibration == "paper" else (),
        )

    def begin(self, problem: Problem, model: Tensor) -> UDPState:
        """Choose each client's noise for the whole training."""
        return UDPState(problem=problem, model=model, rounds=self.rounds, noise_stds=tuple(self._noise_stds(problem)))

    def orders(self, state: UDPState) -> dict[int, Order]:
        """Order one clipped step, with each client's own noise on the upload."""
        return {client: self._order(Gaussian(state.noise_stds[client])) for client in state.cohort}

    def _order(self, noise: Gaussian | None) -> Order:
        return Order(steps=1, learning_rate=self.lr, clip=RecordClip(self.clip), noise=noise, noise_on="upload")

    def _noise_stds(self, problem: Problem) -> Sequence[float]:
        promise = self.promise(len(problem.sizes))
        bounds = [
            sensitivity(self._order(None), records=n, unit=promise.unit, neighbours=promise.neighbours, norm=2)
            for n in problem.sizes  # Δ_i = 2ηC/n_i
        ]
        if self.calibration == "paper":
            rate = (self.cohort or len(problem.sizes)) / len(problem.sizes)
            return [
                udp_noise_std(
                    sensitivity=bound,
                    cohort_rate=rate,
                    rounds=self.rounds,
                    epsilon=grant.epsilon,
                    delta=grant.delta,
                )
                for bound, grant in zip(bounds, promise.budgets, strict=True)
            ]
        # The server draws all cohorts itself, so each client's noise can be exact for the rounds it will answer.
        replies = problem.schedule.replies(1, self.rounds)
        return gaussian_noise_stds(bounds, [max(1, int(count)) for count in replies], promise.budgets)
