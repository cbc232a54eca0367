"""Lei's approach, as UDP's paper compares with it: UDP whose noise falls linearly until the budget is gone.

The paper says no more than that. Here client i begins with the noise at which all its R_i planned replies would spend
its budget, and its k-th reply has σ_i·(1 − f·(k−1)/R_i) for a total fall f: each costs more than the one before. The
noise and who takes part when are known in advance, and so is the last round whose whole cohort can pay: it is the last
of the training. With K < N clients run out at different times, and rounds of the few that are left would be mostly
noise. In paper calibration the budget is in UDP's own currency, Σ 1/σ² ≤ ε²/(2qΔ²·ln(1/δ)), whose sum is over all
rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from dpfl.errors import BadInput
from dpfl.orders import Order
from dpfl.privacy.budget import Promise
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.privacy.paper_formulas import udp_cautions
from dpfl.systems.clipped_training import ClippedState, ClippedTraining
from dpfl.systems.system import Feedback, Problem, planned_replies
from dpfl.systems.udp import papers_noise_stds

_ROUNDING = 1e-9  # as much as a budget may be passed by in rounding; calibrated noise leaves room for it


@dataclass(frozen=True, kw_only=True)
class LeiState(ClippedState):
    """The state, the noise that each client begins with, and its replies: planned, and given so far."""

    first_stds: tuple[float, ...]  # in terms of the first C and learning rate
    planned: tuple[int, ...]
    given: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Lei(ClippedTraining[LeiState]):
    """Clipped local training, as in UDP, under noise that falls linearly."""

    name: ClassVar[str] = "lei"
    until_spent: ClassVar[bool] = True
    rounds: int = 100
    noise_fall: float = 0.5  # f: how much of the first noise would be gone after all rounds

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.noise_fall < 1:
            raise BadInput(f"noise_fall must be at least 0 and below 1, was {self.noise_fall!r}; try 0.5")

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record, against the server."""
        granted = self.budgets(len(sizes))
        return Promise(
            budgets=granted, unit="record", neighbours="replace", calibration=self.calibration,
            claimed_sensitivity=self.claimed_sensitivity(sizes), uncounted=self.uncounted,
            cautions=udp_cautions(granted) if self.calibration == "paper" else (),
        )  # fmt: skip

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> LeiState:
        """Choose the noise that R equal rounds would need, and find out how many there can be as it falls."""
        clients, clip = len(problem.sizes), self.begin_clip(model)
        bounds = self.first_bounds(clip, problem.sizes)
        if self.calibration == "paper":
            planned, stds = [self.rounds] * clients, papers_noise_stds(self, bounds, self.budgets(clients))
        else:
            planned = planned_replies(problem, 1, self.rounds)
            stds = tuple(gaussian_noise_stds(bounds, planned, self.budgets(clients)))
        return LeiState(
            problem=problem, model=model, rounds=self._last_round(problem, planned), clip=clip, first_clip=clip,
            first_stds=stds, planned=tuple(planned), given=(0,) * clients,
        )  # fmt: skip

    def orders(self, state: LeiState) -> dict[int, Order]:
        """Order clipped training under the noise that each client has come down to."""
        parts = {i: 1 - self.noise_fall * state.given[i] / state.planned[i] for i in state.cohort}
        return self.noised_orders(state, {client: part * state.first_stds[client] for client, part in parts.items()})

    def adapt(self, state: LeiState, feedback: Feedback) -> LeiState:
        """Count the replies, and follow the median."""
        counted = range(len(state.given)) if self.calibration == "paper" else feedback.answered
        given = tuple(count + (client in counted) for client, count in enumerate(state.given))
        state = replace(state, given=given)
        return replace(state, clip=self.next_clip(state, feedback)) if self.follows_the_median else state

    def _last_round(self, problem: Problem, planned: Sequence[int]) -> int:
        """Return the last round up to which every whole cohort can pay."""
        replies, given, spent = np.array(planned), np.zeros(len(planned)), np.zeros(len(planned))
        everyone = np.arange(len(planned))
        for done in range(self.rounds):
            cohort = everyone if self.calibration == "paper" else np.array(problem.schedule.cohort(done + 1), int)
            spent[cohort] += 1 / (replies[cohort] * (1 - self.noise_fall * given[cohort] / replies[cohort]) ** 2)
            if np.any(spent[cohort] > 1 + _ROUNDING):
                return done
            given[cohort] += 1
        return self.rounds
