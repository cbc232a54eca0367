"""NbAFL: noise before aggregation on the uplink, and on the downlink in the paper (Wei et al., nbafl).

Clients pull their local training towards the broadcast model and clip what they end with; whoever overhears at most L
of a client's uploads and reads all broadcast models shall learn at most (ε, δ). The server itself is trusted.

The paper clips the parameters and claims a sensitivity of 2C/m; what that clip proves is 2C. With `clipping="record"`,
the default of tight calibration, each record's gradient is clipped in the local steps instead: for a single step a
bound of 2ηC/n_i is proved, which is what the paper had in mind.

An upload that is overheard was computed at a model that has moved by all the others. So its price is added to that of
the models (`Books.overheard`): L·Δ_i²/σ_i² + Σ p_i²Δ_i²/V_t ≤ μ_i², the sum over the rounds t that nobody overheard and
V_t = Σ_j p_j²σ_j² + σ_D² the noise in a model. Tight noise keeps that with the least V:

- The server adds none. Let it give its σ_D² up and each client of the round add σ_D²/(K p_j²) instead: V_t stays what
  it was, the models tell the same, and uploads tell less. So σ_D = 0 costs nothing at any V, whatever the cohorts.
- All clients in every round: σ_i² ≥ s_i(V) = LΔ_i²/(μ_i² − (R − L)p_i²Δ_i²/V), which falls with V. With σ_D = 0 the
  variances must make V = Σ p_j²σ_j² ≥ Σ p_j²s_j(V), which holds from one V* on, where it is an equation: the least V
  has σ_i² = s_i(V*), and every client spends its budget. For equal clients σ² = (Δ/μ)²·(L + (R − L)/N).
- K at random, known in advance: costs are convex in the variances and the mean of V_t is linear. Where every client
  spends its budget at the least, that is again one fixed point (`overheard_noise_stds`); it was never found to be more
  than 0.03 % above what a search for the least finds.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from dpfl.errors import BadInput, require_count, require_not_negative
from dpfl.orders import Gaussian, ModelClip, Order, RecordClip
from dpfl.privacy.budget import Promise
from dpfl.privacy.calibration import overheard_noise_stds
from dpfl.privacy.paper_formulas import nbafl_cautions, nbafl_downlink_noise_std, nbafl_uplink_noise_std
from dpfl.systems.system import (
    ADDED_0_3,
    Feedback,
    PrivateSystem,
    Problem,
    State,
    local_training,
    require_local_training,
)
from dpfl.systems.udp import record_sensitivity


@dataclass(frozen=True, kw_only=True)
class NbAFLState(State):
    """The state, and the noise on both ways."""

    uplink_stds: tuple[float, ...]
    downlink_std: float


@dataclass(frozen=True, kw_only=True)
class NbAFL(PrivateSystem[NbAFLState]):
    """All clients or K at random, w_i ≈ argmin F_i(w) + (μ/2)‖w − broadcast‖², clipped, noised and averaged."""

    name: ClassVar[str] = "nbafl"
    rounds: int = 50
    lr: float = 2.0
    clipping: Literal["model", "record"] | None = None  # None: as the calibration has it (paper: model)
    local_steps: int | None = None  # None: 1 where records are clipped, 5 otherwise
    proximal: float = 0.1  # μ
    exposures: int = 1  # L: uploads of a client that are overheard at most
    weighing: Literal["equal", "records"] = field(
        default="equal", metadata=ADDED_0_3
    )  # p_i: 1/K, which tells least about any one client, or in proportion to a client's records
    local_epochs: int | None = field(
        default=None, metadata=ADDED_0_3
    )  # passes over a client's shuffled records in a round, instead of local_steps
    batch_size: int | None = field(default=None, metadata=ADDED_0_3)  # records a local step sees; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clipping is None:
            object.__setattr__(self, "clipping", "record" if self.calibration == "tight" else "model")
        if self.local_steps is None and self.local_epochs is None:
            object.__setattr__(self, "local_steps", 1 if self.clipping == "record" else 5)
        require_local_training(
            1 if self.local_steps is None else self.local_steps, self.local_epochs, self.batch_size, usual_steps=1,
            clips_records=self.clipping == "record",
        )  # fmt: skip
        require_not_negative("proximal", self.proximal, "use 0 for no pull")
        require_count("exposures", self.exposures, "count at least one upload")
        if self.exposures > self.rounds:
            raise BadInput(
                f"exposures must be at most the {self.rounds} rounds, was {self.exposures}: nobody hears more uploads"
                " than there are; lower it"
            )
        if self.calibration == "paper" and self.clipping == "record":
            raise BadInput(
                "clipping must be 'model' in NbAFL's paper calibration, whose noise is for clipped parameters, was"
                " 'record'; calibrate tightly, or leave it out"
            )
        if self.cohort is not None and self.scheduling != "random":
            raise BadInput(
                f"scheduling must be 'random' for nbafl, whose downlink noise counts on K clients at random, was"
                f" {self.scheduling!r}; leave it out, or let all clients take part"
            )

        if self.weighing == "records" and self.calibration == "paper" and self.cohort is not None:
            raise BadInput(
                "weighing must be 'equal' with a cohort in NbAFL's paper calibration, whose Lemma 4 weighs K clients"
                " alike, was 'records'; leave it out, let all clients take part, or calibrate tightly"
            )

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record, against who overhears L uploads and who reads all models."""
        granted, paper = self.budgets(len(sizes)), self.calibration == "paper"
        return Promise(
            budgets=granted,
            unit="record",
            neighbours="replace",
            calibration=self.calibration,
            against=("uplink", "released"),
            exposures=self.exposures,
            claimed_sensitivity=1 / min(sizes) if paper else 1.0,  # 2C/m, where 2C is proved
            cautions=nbafl_cautions(granted) if paper else (),
        )

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> NbAFLState:
        """Choose the noise on both ways for the whole training."""
        paper = self.calibration == "paper"
        uplink, downlink = self._papers_noise(problem.sizes) if paper else (self._true_noise(problem), 0.0)
        return NbAFLState(
            problem=problem, model=model, rounds=self.rounds, uplink_stds=tuple(uplink), downlink_std=downlink
        )

    def orders(self, state: NbAFLState) -> dict[int, Order]:
        """Order proximal local training, with noise on the clipped result."""
        sizes, louder = state.problem.sizes, self._louder(state)
        return {
            client: self._order(state.round, sizes[client], Gaussian(state.uplink_stds[client] * louder))
            for client in state.cohort
        }

    def weights(self, state: NbAFLState, answered: Sequence[int]) -> dict[int, float]:
        """Weigh clients by their share of the round, even where the budget of others is gone."""
        shares = self._shares(state)
        return {client: shares[client] for client in answered}

    def downlink(self, state: NbAFLState, answered: Sequence[int]) -> Gaussian | None:
        """Add what the paper's formula says, and in tight calibration the noise of those who stayed away."""
        variance = state.downlink_std**2
        if self.calibration == "tight":  # what the others were promised counts on everybody's noise
            shares, louder = self._shares(state), self._louder(state)
            away = set(state.cohort) - set(answered)
            variance += math.fsum((state.uplink_stds[client] * louder * shares[client]) ** 2 for client in away)
        return Gaussian(math.sqrt(variance)) if variance > 0 else None

    def _shares(self, state: NbAFLState) -> dict[int, float]:
        """Return p_i of the round's clients: they add up to 1."""
        if self.weighing == "equal":
            return dict.fromkeys(state.cohort, 1 / len(state.cohort))
        sizes = state.problem.sizes
        total = sum(sizes[client] for client in state.cohort)
        return {client: sizes[client] / total for client in state.cohort}

    def _louder(self, state: NbAFLState) -> float:
        """Return what all noise of a round is multiplied with, so that it costs nobody more than the first round.

        Parameters that are clipped are as sensitive at every learning rate, clipped gradients in proportion to it.
        """
        if self.clipping == "model" or self.lr_schedule == "constant":
            return 1.0
        every = set(state.problem.sizes)
        return max(self._sensitivity(state.round, records) / self._sensitivity(0, records) for records in every)

    def _sensitivity(self, done: int, records: int) -> float:
        return record_sensitivity(self._order(done, records, None), records)

    def _order(self, done: int, records: int, noise: Gaussian | None) -> Order:
        clip = ModelClip(self.clip) if self.clipping == "model" else RecordClip(self.clip)
        return Order(
            **local_training(self.local_steps or 1, self.local_epochs, self.batch_size, records),
            learning_rate=self.rate(done), clip=clip, noise=noise, noise_on="upload", proximal=self.proximal,
        )  # fmt: skip

    def _papers_noise(self, sizes: Sequence[int]) -> tuple[list[float], float]:
        fewest, granted = min(sizes), self.budgets(len(sizes))
        uplink = [
            nbafl_uplink_noise_std(
                clip=self.clip, fewest_records=fewest, exposures=self.exposures, epsilon=one.epsilon, delta=one.delta
            )
            for one in granted
        ]
        downlink = max(  # one σ_D has to serve everybody
            nbafl_downlink_noise_std(
                clip=self.clip, fewest_records=fewest, clients=len(sizes), cohort=self.cohort or len(sizes),
                exposures=self.exposures, rounds=self.rounds, epsilon=one.epsilon, delta=one.delta,
                weights=None if self.weighing == "equal" else sizes,
            )
            for one in set(granted)
        )  # fmt: skip
        return uplink, downlink

    def _true_noise(self, problem: Problem) -> list[float]:
        everyone = tuple(range(len(problem.sizes)))
        if self.cohort is None or self.cohort == len(everyone):
            cohorts = Counter({everyone: self.rounds})
        else:  # the server draws all cohorts itself, so the noise can be exact for those that will be
            cohorts = Counter(problem.schedule.cohort(round) for round in range(1, self.rounds + 1))
        return overheard_noise_stds(
            sensitivities=[self._sensitivity(0, records) for records in problem.sizes], exposures=self.exposures,
            cohorts=cohorts, budgets=self.budgets(len(everyone)),
            weights=None if self.weighing == "equal" else problem.sizes,
        )  # fmt: skip
