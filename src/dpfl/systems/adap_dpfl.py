"""Adap DP-FL, as ALI-DPFL's paper compares with it: DP-SGD clients whose clip and noise adapt (Fu et al., 2022).

The papers at hand say: per-client clipping from the mean gradient norm, and a noise multiplier that is decayed when the
loss fell over the last rounds, under the Rényi accountant. What they leave open is decided so:

- A client's next threshold is a multiple of the length of its mean gradient, estimated from its own noised upload:
  ‖upload/(ηE)‖² less the expected ‖noise‖², which is public. Nothing new is released.
- The loss is that of public data. When it fell in each of the last `patience` rounds, every multiplier shrinks.
- The first multiplier is what R rounds without decay need; each client takes part until its Rényi filter refuses.

So it breaks down where a client is small, whose upload is all noise: its threshold grows, and its steps with it. With
`lr_of = "threshold"` steps keep their length whatever the thresholds, `threshold_from = "cohort"` reads one threshold
off the sum, where the noise of all is smaller, and `room_for_decay` keeps the first decay from emptying the budget.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dpfl.errors import BadInput, require_count, require_positive
from dpfl.orders import Need, Order, Poisson
from dpfl.privacy.budget import Promise
from dpfl.privacy.calibration import adaptive_noise_multipliers, decaying_noise_multipliers
from dpfl.systems.dpsgd import dpsgd_order
from dpfl.systems.system import ADDED_0_3, Feedback, PrivateSystem, Problem, State, planned_replies


@dataclass(frozen=True, kw_only=True)
class AdapState(State):
    """The state, each client's noise and threshold, and the last losses."""

    noise_multipliers: tuple[float, ...]
    clips: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class AdapDPFL(PrivateSystem[AdapState]):
    """E steps of DP-SGD at every client of the cohort, averaged by the number of records."""

    name: ClassVar[str] = "adap-dpfl"
    until_spent: ClassVar[bool] = True
    rounds: int = 60
    local_steps: int = 1
    lr: float = 4.0
    clip: float = 1.0  # of the first round
    clip_factor: float = 1.0  # a threshold in lengths of the mean gradient
    sampling_rate: float = 0.5  # q
    noise_decay: float = 0.98
    patience: int = 4  # rounds in which the loss must have fallen
    calibration: Literal["tight"] = "tight"
    threshold_from: Literal["client", "cohort"] = field(
        default="client", metadata=ADDED_0_3
    )  # whose mean gradient a threshold follows: the client's own, or that of all who took part
    lr_of: Literal["gradient", "threshold"] = field(
        default="gradient", metadata=ADDED_0_3
    )  # what lr multiplies: the clipped gradient, or that in units of its threshold (times the first one)
    room_for_decay: Literal["no", "yes"] = field(
        default="no", metadata=ADDED_0_3
    )  # whether the first noise lets all rounds be paid for even if it decays as often as it can

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("local_steps", self.local_steps, "take at least one local step a round")
        require_count("patience", self.patience, "watch at least one round")
        require_positive("clip_factor", self.clip_factor, "try 1")
        Poisson(self.sampling_rate)
        if not 0 < self.noise_decay <= 1:
            raise BadInput(f"noise_decay must be above 0 and at most 1, was {self.noise_decay!r}; try 0.98")

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record added or removed, against the server, whatever the noise becomes."""
        return Promise(
            budgets=self.budgets(len(sizes)),
            unit="record",
            neighbours="add-remove",
            calibration=self.calibration,
            noise="adaptive",
        )

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> AdapState:
        """Begin with the noise that all rounds would need, as it is or as it may decay."""
        clients, replies = len(problem.sizes), planned_replies(problem, 1, self.rounds)
        if self.room_for_decay == "yes":
            multipliers = decaying_noise_multipliers(
                [self._fall(count) for count in replies], self.budgets(clients), sampling_rate=self.sampling_rate
            )
        else:
            steps = [self.local_steps * count for count in replies]
            multipliers = adaptive_noise_multipliers(steps, self.budgets(clients), sampling_rate=self.sampling_rate)
        return AdapState(
            problem=problem, model=model, rounds=self.rounds, noise_multipliers=tuple(multipliers),
            clips=(self.clip,) * clients, losses=(self._watched(feedback),),
        )  # fmt: skip

    def orders(self, state: AdapState) -> dict[int, Order]:
        """Order DP-SGD under each client's own threshold and noise."""
        return {
            client: dpsgd_order(
                steps=self.local_steps, lr=self._rate(state.round, state.clips[client]),
                sampling_rate=self.sampling_rate, clip=state.clips[client],
                noise_multiplier=state.noise_multipliers[client],
            )
            for client in state.cohort
        }  # fmt: skip

    @property
    def needs(self) -> frozenset[Need]:
        """Return each upload or their sum, which thresholds follow, and the loss on public data for the noise."""
        return frozenset({"uploads" if self.threshold_from == "client" else "model", "public loss"})

    def adapt(self, state: AdapState, feedback: Feedback) -> AdapState:
        """Choose the thresholds anew, and lower the noise where the loss has been falling."""
        losses = (*state.losses, self._watched(feedback))[-self.patience - 1 :]
        fell = len(losses) > self.patience and all(later < earlier for earlier, later in pairwise(losses))
        multipliers = state.noise_multipliers
        if fell:
            multipliers, losses = tuple(self.noise_decay * one for one in multipliers), losses[-1:]
        clips = list(state.clips)
        if self.threshold_from == "client":
            for client, upload in feedback.uploads.items():
                clips[client] = self._next_clip(state, {client: 1.0}, upload)
        elif feedback.answered and feedback.total is not None:
            clips = [self._next_clip(state, self.weights(state, tuple(feedback.answered)), feedback.total)] * len(clips)
        return replace(state, losses=losses, clips=tuple(clips), noise_multipliers=multipliers)

    def _fall(self, replies: int) -> Counter[float]:
        """Count the steps of a client at each part of the first noise, if it decays whenever it can.

        Who replies to some rounds only may reply to the last ones, when noise is lowest.
        """
        fall: Counter[float] = Counter()
        for done in range(self.rounds - replies, self.rounds):
            fall[self.noise_decay ** (done // self.patience)] += self.local_steps
        return fall

    def _rate(self, done: int, threshold: float) -> float:
        """Return η of a client with this threshold in the round after `done` rounds."""
        return self.rate(done) if self.lr_of == "gradient" else self.rate(done) * self.clip / threshold

    def _next_clip(self, state: AdapState, weights: Mapping[int, float], update: Tensor) -> float:
        """Return c·‖mean gradient‖, between a tenth and ten times the first threshold.

        update: what these clients uploaded, weighed so. All of one cohort have one rate, or it is of one client.
        """
        one = next(iter(weights))
        rate, noise = self._rate(state.round - 1, state.clips[one]), 0.0
        for client, weight in weights.items():
            batch = self.sampling_rate * state.problem.sizes[client]
            noise += (weight * state.noise_multipliers[client] * state.clips[client] / batch) ** 2
        noise *= len(update) / self.local_steps
        length = float(torch.linalg.vector_norm(update)) / (rate * self.local_steps)
        if math.isnan(length):
            return state.clips[one]
        wanted = self.clip_factor * math.sqrt(max(length**2 - noise, 0.0))
        return min(max(wanted, self.clip / 10), 10 * self.clip)

    def _watched(self, feedback: Feedback) -> float:
        if feedback.public_loss is None:
            raise BadInput(
                "validation_share must be above 0 for adap-dpfl, was 0: it watches the loss, and on clients' data that"
                " would be an uncounted release; hold some public data back"
            )
        return feedback.public_loss
