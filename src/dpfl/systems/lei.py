"""Lei's approach, as UDP's paper compares with it: UDP whose noise falls linearly until the budget is gone.

The paper says no more than that. Here client i begins with the noise at which all its R_i planned replies would spend
its budget, and its k-th reply has σ_i·(1 − f·(k−1)/R_i) for a total fall f: each costs more than the one before, and
the client stops when the ledger refuses, before the last. The noise is fixed in advance; the ledger only counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from dpfl.errors import BadInput
from dpfl.orders import Gaussian, Order
from dpfl.privacy.budget import Promise
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.systems.system import Feedback, PrivateSystem, Problem, State, planned_replies
from dpfl.systems.udp import clipped_step, record_sensitivity


@dataclass(frozen=True, kw_only=True)
class LeiState(State):
    """The state, the noise that each client begins with, and its replies: planned, and given so far."""

    first_stds: tuple[float, ...]
    planned: tuple[int, ...]
    given: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Lei(PrivateSystem[LeiState]):
    """One clipped step a round, as in UDP, under noise that falls linearly."""

    name: ClassVar[str] = "lei"
    until_spent: ClassVar[bool] = True
    rounds: int = 100
    lr: float = 2.0
    noise_fall: float = 0.5  # f: how much of the first noise would be gone after all rounds
    calibration: Literal["tight"] = "tight"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.noise_fall < 1:
            raise BadInput(f"noise_fall must be at least 0 and below 1, was {self.noise_fall!r}; try 0.5")

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record, against the server."""
        return Promise(
            budgets=self.budgets(len(sizes)), unit="record", neighbours="replace", calibration=self.calibration
        )

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> LeiState:
        """Choose the noise that R equal rounds would need."""
        bounds = [record_sensitivity(clipped_step(self.lr, self.clip, None), records) for records in problem.sizes]
        replies = planned_replies(problem, 1, self.rounds)
        stds = gaussian_noise_stds(bounds, replies, self.budgets(len(problem.sizes)))
        return LeiState(
            problem=problem, model=model, rounds=self.rounds, first_stds=tuple(stds), planned=tuple(replies),
            given=(0,) * len(stds),
        )  # fmt: skip

    def orders(self, state: LeiState) -> dict[int, Order]:
        """Order one clipped step under the noise that each client has come down to."""
        return {client: clipped_step(self.lr, self.clip, self._noise(state, client)) for client in state.cohort}

    def adapt(self, state: LeiState, feedback: Feedback) -> LeiState:
        """Count the replies."""
        given = tuple(count + (client in feedback.answered) for client, count in enumerate(state.given))
        return replace(state, given=given)

    def _noise(self, state: LeiState, client: int) -> Gaussian:
        part = 1 - self.noise_fall * state.given[client] / state.planned[client]
        return Gaussian(part * state.first_stds[client])
