"""UDP: clipped local training, noised before upload, in one full-batch step or several; with CRD (Wei et al., udp-crd).

Each client i has its own (ε_i, δ_i) and n_i, and so its own noise. The paper's name says user-level; its proof, and our
promise, is for one record replaced by another. Communication-rounds discounting (CRD) cuts the rounds that are left by
a factor when a round has brought too little, and shares what is left of each budget among fewer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

from torch import Tensor

from dpfl.errors import BadInput, require_not_negative
from dpfl.orders import Need, Order
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.privacy.paper_formulas import udp_cautions, udp_noise_std, udp_recomputed_noise_std
from dpfl.systems.clipped_training import ClippedState, ClippedTraining
from dpfl.systems.clipped_training import record_sensitivity as record_sensitivity
from dpfl.systems.system import Feedback, Problem, planned_replies


@dataclass(frozen=True, kw_only=True)
class UDPState(ClippedState):
    """The state, the noise that each client adds now, and what the controller remembers.

    Noise is in terms of the first C and learning rate: where these change, it changes with the sensitivity.
    """

    noise_stds: tuple[float, ...]
    precisions: tuple[float, ...]  # Σ 1/σ_i² over the rounds that count for client i
    loss: float = math.nan  # V(w), where CRD watches it


@dataclass(frozen=True, kw_only=True)
class UDP(ClippedTraining[UDPState]):
    """K random clients, w_i = w − (η/n_i)·Σ_m clip(g_{i,m}, C) + N(0, σ_i²I), weighed by n_i."""

    name: ClassVar[str] = "udp"
    rounds: int = 100
    discount: float | None = None  # CRD's β: the part of the rounds left that is kept; None: no discounting
    least_gain: float = 1e-3  # CRD's ζ: a round that lowers the loss by less is followed by a discount

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.discount is not None and not 0 < self.discount < 1:
            raise BadInput(f"discount must be above 0 and below 1, was {self.discount!r}; try 0.9")
        require_not_negative("least_gain", self.least_gain, "try 1e-3")

    @property
    def needs(self) -> frozenset[Need]:
        """Add the loss that CRD watches: on clients' data in the paper, on public data in tight calibration."""
        watched: frozenset[Need] = frozenset({"loss"} if self.calibration == "paper" else {"public loss"})
        return super().needs | (watched if self.discount is not None else frozenset())

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record, against the server."""
        granted = self.budgets(len(sizes))
        return Promise(
            budgets=granted,
            unit="record",
            neighbours="replace",
            calibration=self.calibration,
            noise="fixed" if self.discount is None else "adaptive",
            claimed_sensitivity=self.claimed_sensitivity(sizes),
            uncounted=self.uncounted,
            cautions=udp_cautions(granted) if self.calibration == "paper" else (),
        )

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> UDPState:
        """Choose each client's noise for the rounds that are planned."""
        nothing, clip = (0.0,) * len(problem.sizes), self.begin_clip(model)
        state = UDPState(
            problem=problem, model=model, rounds=self.rounds, clip=clip, first_clip=clip, noise_stds=nothing,
            precisions=nothing,
        )  # fmt: skip
        state = replace(state, noise_stds=self._noise_stds(state))
        return state if self.discount is None else replace(state, loss=self._watched(problem, feedback))

    def orders(self, state: UDPState) -> dict[int, Order]:
        """Order clipped training, with each client's own noise on the upload."""
        return self.noised_orders(state, {client: state.noise_stds[client] for client in state.cohort})

    def adapt(self, state: UDPState, feedback: Feedback) -> UDPState:
        """Follow the median; discount the rounds where the loss fell by less than ζ, and share each budget's rest."""
        if self.follows_the_median:
            state = replace(state, clip=self.next_clip(state, feedback))
        if self.discount is None:
            return state
        # The paper's sum runs over all rounds, its factor q stands for chance; a true one over those answered.
        counted = range(len(state.noise_stds)) if self.calibration == "paper" else feedback.answered
        precisions = tuple(
            sum_ + (1 / std**2 if client in counted else 0.0)
            for client, (sum_, std) in enumerate(zip(state.precisions, state.noise_stds, strict=True))
        )
        loss, t = self._watched(state.problem, feedback), state.round - 1  # w^t became w^(t+1)
        stalled = not state.loss - loss >= self.least_gain  # a loss that is no number is no gain
        state = replace(state, precisions=precisions, loss=loss)
        if not stalled:
            return state
        kept = Fraction(repr(self.discount)) * (state.rounds - t)  # the decimal number: 0.7·90 is 63, in binary 62.99…
        state = replace(state, rounds=max(math.floor(kept) + t, state.round))
        return state if state.round == state.rounds else replace(state, noise_stds=self._noise_stds(state))

    def _watched(self, problem: Problem, feedback: Feedback) -> float:
        """Return V(w): on clients' data in the paper, on public data where the promise is to be true."""
        if "loss" in feedback.answers:
            return math.fsum(problem.sizes[i] / problem.total * loss for i, loss in feedback.answers["loss"].items())
        if feedback.public_loss is None:
            raise BadInput(
                "validation_share must be above 0 for CRD in tight calibration, was 0: it watches the loss, and on"
                " clients' data that would be an uncounted release; hold some public data back, or leave discount out"
            )
        return feedback.public_loss

    def _noise_stds(self, state: UDPState) -> tuple[float, ...]:
        """Share what is left of each budget among the rounds that are left."""
        problem, granted = state.problem, self.budgets(len(state.problem.sizes))
        bounds = self.first_bounds(state.first_clip, problem.sizes)
        if self.calibration == "tight":
            spent = [bound**2 * sum_ for bound, sum_ in zip(bounds, state.precisions, strict=True)]
            replies = planned_replies(problem, state.round + 1, state.rounds)
            return tuple(gaussian_noise_stds(bounds, replies, granted, spent))
        if state.round == 0:
            return papers_noise_stds(self, bounds, granted)
        rate = self.cohort_rate(len(bounds))
        return tuple(
            udp_recomputed_noise_std(
                sensitivity=bound, cohort_rate=rate, rounds=state.rounds, done=state.round,
                earlier_stds=[sum_**-0.5], epsilon=grant.epsilon, delta=grant.delta,
            )
            for bound, grant, sum_ in zip(bounds, granted, state.precisions, strict=True)
        )  # fmt: skip


def papers_noise_stds(
    system: ClippedTraining[Any], bounds: Sequence[float], granted: Sequence[Budget]
) -> tuple[float, ...]:
    """Return each client's noise by equation (10), for all rounds that are planned."""
    rate = system.cohort_rate(len(bounds))
    return tuple(
        udp_noise_std(
            sensitivity=bound, cohort_rate=rate, rounds=system.rounds, epsilon=grant.epsilon, delta=grant.delta
        )
        for bound, grant in zip(bounds, granted, strict=True)
    )
