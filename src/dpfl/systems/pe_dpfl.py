"""PE-DPFL, as ALI-DPFL's paper compares with it: a proximal term, and noise on the model before it is uploaded.

The paper says no more than that. Clients minimise F_i(w) + (μ/2)‖w − broadcast‖² with per-record clipping, and their
noise can be in two places:

- `noise_on = "upload"`, usual in tight calibration: E full-batch steps, and noise on what they upload, true against the
  server. One step is the default: from the second on, every record's clipped gradient may differ, and the noise grows
  with n_i.
- `noise_on = "step"`, usual in paper calibration: DP-SGD steps, counted as that paper counts those of all its systems.
  The model is noised by the time it is uploaded, and several steps (the paper takes three) cost no more than elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, cast

from torch import Tensor

from dpfl.errors import BadInput, require_count, require_not_negative
from dpfl.orders import Gaussian, Order, RecordClip
from dpfl.privacy.budget import Calibration, Promise
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.systems.dpsgd_fedavg import DPSGDFedAvg, DPSGDState
from dpfl.systems.system import ADDED_0_3, Feedback, PrivateSystem, Problem, State, planned_replies
from dpfl.systems.udp import record_sensitivity


@dataclass(frozen=True, kw_only=True)
class PEDPFLState(State):
    """The state, and the noise of each client."""

    noise_stds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PEDPFL(PrivateSystem[State]):
    """E proximal steps with per-record clipping, noise on the upload or on each step, weighed by n_i."""

    name: ClassVar[str] = "pe-dpfl"
    rounds: int = 100
    local_steps: int = 1
    lr: float = 2.0
    proximal: float = 0.1  # μ
    calibration: Calibration = "tight"
    noise_on: Literal["upload", "step"] | None = field(
        default=None, metadata=ADDED_0_3
    )  # None: the upload, or each step in paper calibration
    sampling_rate: float = field(default=1.0, metadata=ADDED_0_3)  # q, where steps are noised
    noise_multiplier: float | None = field(
        default=None, metadata=ADDED_0_3
    )  # σ of each noised step, in units of the clip; None: the least at which all rounds fit

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("local_steps", self.local_steps, "take at least one local step a round")
        require_not_negative("proximal", self.proximal, "use 0 for no pull")
        if self._noises_steps:
            self._stepwise()  # which checks the rest
            return
        for name, usual in (("calibration", "tight"), ("sampling_rate", 1.0), ("noise_multiplier", None)):
            if (given := getattr(self, name)) != usual:
                raise BadInput(
                    f"{name} must be left out where pe-dpfl noises the upload, was {given!r}: there it takes full"
                    " batches, and the noise for which ε is true; noise each step with noise_on = step"
                )

    @property
    def _noises_steps(self) -> bool:
        return (self.noise_on or ("upload" if self.calibration == "tight" else "step")) == "step"

    def _stepwise(self) -> DPSGDFedAvg:
        """Return the system that this one is where each step is noised."""
        return DPSGDFedAvg(
            rounds=self.rounds, lr=self.lr, cohort=self.cohort, scheduling=self.scheduling,
            lr_schedule=self.lr_schedule, averaged=self.averaged, clip=self.clip, epsilon=self.epsilon,
            delta=self.delta, calibration=self.calibration, local_steps=self.local_steps,
            sampling_rate=self.sampling_rate, noise_multiplier=self.noise_multiplier, proximal=self.proximal,
        )  # fmt: skip

    @property
    def course(self) -> "tuple[PEDPFL, int] | None":
        """Return the same with another budget, where noise is given: then all clients stop at once, sooner or later."""
        if not self._noises_steps or (found := self._stepwise().course) is None:
            return None
        one, rounds = found
        any_budget = replace(
            self, rounds=one.rounds, epsilon=one.epsilon, delta=one.delta, calibration=one.calibration, noise_on="step"
        )
        return any_budget, rounds

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record, against the server."""
        if self._noises_steps:
            return self._stepwise().promise(sizes)
        return Promise(
            budgets=self.budgets(len(sizes)), unit="record", neighbours="replace", calibration=self.calibration
        )

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> State:
        """Choose each client's noise for the whole training."""
        if self._noises_steps:
            return self._stepwise().begin(problem, model, feedback)
        bounds = [record_sensitivity(self._order(None), records) for records in problem.sizes]
        replies = planned_replies(problem, 1, self.rounds)
        stds = gaussian_noise_stds(bounds, replies, self.budgets(len(problem.sizes)))
        return PEDPFLState(problem=problem, model=model, rounds=self.rounds, noise_stds=tuple(stds))

    def orders(self, state: State) -> dict[int, Order]:
        """Order proximal steps, with each client's own noise."""
        if self._noises_steps:
            return self._stepwise().orders(cast(DPSGDState, state))
        stds = cast(PEDPFLState, state).noise_stds
        return {client: self._order(Gaussian(stds[client])) for client in state.cohort}

    def adapt(self, state: State, feedback: Feedback) -> State:
        """Take off what was spent, where noised steps are counted."""
        return self._stepwise().adapt(cast(DPSGDState, state), feedback) if self._noises_steps else state

    def _order(self, noise: Gaussian | None) -> Order:
        return Order(
            steps=self.local_steps, learning_rate=self.lr, clip=RecordClip(self.clip), noise=noise, noise_on="upload",
            proximal=self.proximal,
        )  # fmt: skip
