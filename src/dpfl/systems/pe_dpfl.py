"""PE-DPFL, as ALI-DPFL's paper compares with it: a proximal term, and noise on the model before it is uploaded.

The paper says no more than that. Here clients take E full-batch steps with per-record clipping on
F_i(w) + (μ/2)‖w − broadcast‖² and noise what they upload, so that it is true against the server. One step is the
default: from the second on, every record's clipped gradient may differ, and the noise grows with n_i. Noise on
each of several DP-SGD steps costs less: that is `dpsgd-fedavg` with a `proximal` term, and how ALI-DPFL's tables have
it, with the three steps that its paper takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from dpfl.errors import require_count, require_not_negative
from dpfl.orders import Gaussian, Order, RecordClip
from dpfl.privacy.budget import Promise
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.systems.system import Feedback, PrivateSystem, Problem, State, planned_replies
from dpfl.systems.udp import record_sensitivity


@dataclass(frozen=True, kw_only=True)
class PEDPFLState(State):
    """The state, and the noise of each client."""

    noise_stds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PEDPFL(PrivateSystem[PEDPFLState]):
    """E proximal steps with per-record clipping, noise on the upload, weighed by n_i."""

    name: ClassVar[str] = "pe-dpfl"
    rounds: int = 100
    local_steps: int = 1
    lr: float = 2.0
    proximal: float = 0.1  # μ
    calibration: Literal["tight"] = "tight"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("local_steps", self.local_steps, "take at least one local step a round")
        require_not_negative("proximal", self.proximal, "use 0 for no pull")

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record, against the server."""
        return Promise(
            budgets=self.budgets(len(sizes)), unit="record", neighbours="replace", calibration=self.calibration
        )

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> PEDPFLState:
        """Choose each client's noise for the whole training."""
        bounds = [self._sensitivity(0, records) for records in problem.sizes]
        replies = planned_replies(problem, 1, self.rounds)
        stds = gaussian_noise_stds(bounds, replies, self.budgets(len(problem.sizes)))
        return PEDPFLState(problem=problem, model=model, rounds=self.rounds, noise_stds=tuple(stds))

    def orders(self, state: PEDPFLState) -> dict[int, Order]:
        """Order proximal steps, with each client's own noise on the upload."""
        return {client: self._order(state.round, Gaussian(self._noise(state, client))) for client in state.cohort}

    def _noise(self, state: PEDPFLState, client: int) -> float:
        """Return the noise of a round, which falls with the rate as what it is to hide does."""
        first, records = state.noise_stds[client], state.problem.sizes[client]
        if self.lr_schedule == "constant":
            return first
        return first * self._sensitivity(state.round, records) / self._sensitivity(0, records)

    def _sensitivity(self, done: int, records: int) -> float:
        return record_sensitivity(self._order(done, None), records)

    def _order(self, done: int, noise: Gaussian | None) -> Order:
        return Order(
            steps=self.local_steps, learning_rate=self.rate(done), clip=RecordClip(self.clip), noise=noise,
            noise_on="upload", proximal=self.proximal,
        )  # fmt: skip
