"""ALI-DPFL: DP-SGD clients, and as many local steps each round as its bound likes best (ali-dpfl).

Two things are short: communication rounds (R_s, here `rounds`) and local steps, of which the budget allows R_c. Where
rounds are plenty (R_s ≥ R_c) one step a round is best; otherwise τ* (equation 9) is computed after every round. It
needs the curvature μ of the loss. The paper takes it from exact local gradients, an uncounted release: by how much
each client's changes from the new aggregate to its own model (`curvature_from = "broadcast"`, from the model it began
with, is what trainings before release 0.3 did). In tight calibration it comes from the noised uploads: the mean
gradient of a round is −their sum/(ητ), and μ is by how much it changed from the last round to this one, over the way
between the two models.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dpfl.errors import require_count, require_not_negative, require_positive
from dpfl.orders import Need, Order, Poisson, Question
from dpfl.privacy.budget import Promise
from dpfl.systems.dpsgd import affordable_steps, dpsgd_order, require_divisor
from dpfl.systems.system import ADDED_0_3, Feedback, PrivateSystem, Problem, State, require_all_clients

_QUESTIONS: dict[str | None, Question] = {"broadcast": "curvature", "aggregate": "curvature from the sum"}


def optimal_local_steps(
    *,
    curvature: float,
    clip: float,
    heterogeneity: float,
    total_steps: float,
    noise_multiplier: float,
    dim: int,
    batch: float,
) -> float:
    """Return τ* = √(1 + (4/μ² + 3C² + 2ΓTμ + σ²C²d/B̂²)/((2 + 1/T)(C² + σ²C²d/B̂²))) (ALI-DPFL, equation 9).

    total_steps: T, the local steps of the whole training. batch: B̂, the smallest client's expected batch.
    """
    noise = (noise_multiplier * clip / batch) ** 2 * dim
    above = 4 / curvature**2 + 3 * clip**2 + 2 * heterogeneity * total_steps * curvature + noise
    return math.sqrt(1 + above / ((2 + 1 / total_steps) * (clip**2 + noise)))


@dataclass(frozen=True, kw_only=True)
class ALIState(State):
    """The state, what is left of R_c at each client, and what τ* is computed from."""

    left: tuple[int, ...]
    total_steps: int  # R_c of the client that can pay for most
    steps: int  # τ of the next round
    before: Tensor  # the model that the last round began with
    gradient: Tensor | None = None  # the mean noised gradient of the last round
    moved: float = math.nan  # how far that round moved the model


@dataclass(frozen=True, kw_only=True)
class ALIDPFL(PrivateSystem[ALIState]):
    """τ* steps of DP-SGD at every client, averaged by the number of records, until R_s or R_c is reached."""

    name: ClassVar[str] = "ali-dpfl"
    rounds: int = 30  # R_s
    local_steps: int = 1  # τ of the first round, where R_s < R_c
    lr: float = 2.0
    sampling_rate: float = 0.5  # q
    noise_multiplier: float = 4.0  # σ, in units of the clip
    heterogeneity: float = 10.0  # Γ, how far apart the clients' best losses are; 0 for clients that are alike
    curvature_from: Literal["aggregate", "broadcast"] | None = field(
        default=None, metadata=ADDED_0_3 | {"before": "broadcast"}
    )  # what each client's model is compared with for μ in paper calibration: the new sum (None), or what it began with
    divisor: float | None = field(default=None, metadata=ADDED_0_3)  # of gradients' sums; None: expected batch size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curvature_from is None and self.calibration == "paper":
            object.__setattr__(self, "curvature_from", "aggregate")
        require_all_clients(self, "asks every client in every round")
        require_count("local_steps", self.local_steps, "take at least one local step a round")
        Poisson(self.sampling_rate)
        require_positive("noise_multiplier", self.noise_multiplier, "try 1.1")
        require_not_negative("heterogeneity", self.heterogeneity, "use 0 for clients that are alike")
        require_divisor(self.divisor)

    @property
    def needs(self) -> frozenset[Need]:
        """Return how the model moves, which τ follows, and the curvature on clients' data where the paper asks for it.

        It does so where τ depends on it: where rounds are short.
        """
        if self.calibration == "tight":
            return frozenset({"model"})
        apart = [len(value) for value in (self.epsilon, self.delta) if isinstance(value, tuple)]
        short = self.rounds < max(self._affordable(max(apart, default=1)))
        return frozenset({"model", _QUESTIONS[self.curvature_from]} if short else {"model"})

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record added or removed, against the server."""
        return Promise(
            budgets=self.budgets(len(sizes)),
            unit="record",
            neighbours="add-remove",
            calibration=self.calibration,
            uncounted=self.uncounted,
        )

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> ALIState:
        """Find out how many local steps each budget allows."""
        left = self._affordable(len(problem.sizes))
        state = ALIState(
            problem=problem, model=model, rounds=self.rounds, left=left, total_steps=max(left), steps=1, before=model
        )
        return self._ordering(state, self.local_steps)

    def orders(self, state: ALIState) -> dict[int, Order]:
        """Order τ steps of DP-SGD, or as many as the client can still pay for."""
        return {
            client: self._order(state.round, min(state.steps, left))
            for client, left in enumerate(state.left)
            if left > 0
        }

    def adapt(self, state: ALIState, feedback: Feedback) -> ALIState:
        """Choose τ for the next round; end where nobody can pay for another step."""
        used = {client: min(state.steps, left) for client, left in enumerate(state.left) if client in feedback.answered}
        left = tuple(count - used.get(client, 0) for client, count in enumerate(state.left))
        if max(left) == 0:
            return replace(state, left=left, rounds=state.round)
        if self.rounds >= state.total_steps:  # τ stays 1
            return replace(state, left=left)
        assert feedback.total is not None
        gradient = -feedback.total / (self.rate(state.round - 1) * state.steps)  # whatever the server makes of the sum
        curvature = self._curvature(state, gradient, feedback)
        moved = float(torch.linalg.vector_norm(state.model - state.before))
        state = replace(state, left=left, before=state.model, gradient=gradient, moved=moved)
        if not (math.isfinite(curvature) and curvature > 0):  # not known yet, or nothing moved
            return self._ordering(state, state.steps)
        best = optimal_local_steps(
            curvature=curvature, clip=self.clip, heterogeneity=self.heterogeneity,
            total_steps=min(self.rounds * state.steps, state.total_steps), noise_multiplier=self.noise_multiplier,
            dim=state.problem.dim, batch=self.sampling_rate * min(state.problem.sizes),
        )  # fmt: skip
        return self._ordering(state, round(min(best, state.total_steps)))

    def _ordering(self, state: ALIState, steps: int) -> ALIState:
        """Order this many steps next, one at least, and no more than the budget and (tight) the rounds left leave."""
        if self.rounds >= state.total_steps:
            return replace(state, steps=1)
        most = max(state.left)
        if self.calibration == "tight" and state.round < state.rounds:  # so that it lasts until the last round
            most = max(1, most // (state.rounds - state.round))
        return replace(state, steps=max(1, min(steps, most)))

    def _curvature(self, state: ALIState, gradient: Tensor, feedback: Feedback) -> float:
        if self.calibration == "paper":
            told = feedback.answers[_QUESTIONS[self.curvature_from]]
            total = sum(state.problem.sizes[client] for client in told)
            return math.fsum(state.problem.sizes[client] / total * one for client, one in told.items())
        if state.gradient is None or state.moved == 0:
            return math.nan
        return float(torch.linalg.vector_norm(gradient - state.gradient)) / state.moved

    def _affordable(self, clients: int) -> tuple[int, ...]:
        return affordable_steps(self._order(0, 1), self.budgets(clients), self.calibration)

    def _order(self, done: int, steps: int) -> Order:
        return dpsgd_order(
            steps=steps, lr=self.rate(done), sampling_rate=self.sampling_rate, clip=self.clip,
            noise_multiplier=self.noise_multiplier, divisor=self.divisor,
        )  # fmt: skip
