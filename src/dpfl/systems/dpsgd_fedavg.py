"""FedAvg with DP-SGD clients and a fixed number of local steps: what ALI-DPFL's adaptive number is compared with.

Noise is given (then a client stops when its budget is gone) or chosen so that all planned rounds fit. In `paper`
calibration both follow ALI-DPFL's Rényi formula over integer orders. What the server does with the noised models costs
nothing more: it may give its steps momentum, and end with the mean of the last models instead of the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from dpfl.errors import BadInput, require_count, require_not_negative, require_positive
from dpfl.orders import Order, Poisson
from dpfl.privacy.accounting import tight
from dpfl.privacy.budget import Promise
from dpfl.privacy.calibration import noise_multipliers
from dpfl.privacy.paper_formulas import ali_epsilon
from dpfl.systems.dpsgd import affordable_steps, dpsgd_order, require_divisor
from dpfl.systems.system import ADDED_0_3, Feedback, PrivateSystem, Problem, State, planned_replies


@dataclass(frozen=True, kw_only=True)
class DPSGDState(State):
    """The state, each client's noise, and the steps that it can still pay for."""

    noise_multipliers: tuple[float, ...]
    left: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DPSGDFedAvg(PrivateSystem[DPSGDState]):
    """τ steps of DP-SGD at every client of the cohort, averaged by the number of records."""

    name: ClassVar[str] = "dpsgd-fedavg"
    rounds: int = 60
    local_steps: int = 1  # τ
    lr: float = 2.0
    sampling_rate: float = 0.5  # q
    noise_multiplier: float | None = None  # σ, in units of the clip; None: the least at which all rounds fit
    proximal: float = field(default=0.0, metadata=ADDED_0_3)  # μ of a pull towards the broadcast model
    divisor: float | None = field(default=None, metadata=ADDED_0_3)  # of gradients' sums; None: expected batch size

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("local_steps", self.local_steps, "take at least one local step a round")
        Poisson(self.sampling_rate)
        if self.noise_multiplier is not None:
            require_positive("noise_multiplier", self.noise_multiplier, "leave it out for the least that fits")
        require_not_negative("proximal", self.proximal, "use 0 for no pull")
        require_divisor(self.divisor)

    @property
    def course(self) -> "tuple[DPSGDFedAvg, int] | None":
        """Return the same with another budget, where noise is given: then all clients stop at once, sooner or later."""
        apart = self.cohort is not None or isinstance(self.epsilon, tuple) or isinstance(self.delta, tuple)
        if self.noise_multiplier is None or self.averaged or apart:
            return None
        (paid,) = affordable_steps(self._order(0, self.noise_multiplier), self.budgets(1), self.calibration)
        if paid < self.local_steps:
            return None  # as `begin` will say
        any_budget = replace(self, rounds=1, epsilon=1.0, delta=1e-5, calibration="tight")
        return any_budget, min(self.rounds, paid // self.local_steps)

    def promise(self, sizes: Sequence[int]) -> Promise:
        """Promise (ε_i, δ_i) for a record added or removed, against the server."""
        return Promise(
            budgets=self.budgets(len(sizes)), unit="record", neighbours="add-remove", calibration=self.calibration
        )

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> DPSGDState:
        """Choose the noise for the rounds, or the rounds for the noise."""
        granted, clients = self.budgets(len(problem.sizes)), len(problem.sizes)
        needed = [self.local_steps * count for count in planned_replies(problem, 1, self.rounds)]
        state = DPSGDState(problem=problem, model=model, rounds=self.rounds, noise_multipliers=(), left=tuple(needed))
        if self.noise_multiplier is None:
            multipliers = noise_multipliers(
                "gaussian", needed, granted, sampling_rate=self.sampling_rate,
                accountant=tight if self.calibration == "tight" else ali_epsilon,
            )  # fmt: skip
            return replace(state, noise_multipliers=tuple(multipliers))
        left = affordable_steps(self._order(0, self.noise_multiplier), granted, self.calibration)
        if max(left) < self.local_steps:
            raise BadInput(
                f"local_steps must be at most the {max(left)} that a budget affords in all, was {self.local_steps};"
                " lower it, or raise noise_multiplier or epsilon"
            )
        return replace(
            state, noise_multipliers=(self.noise_multiplier,) * clients, left=left,
            rounds=self._last_round(problem, left),
        )  # fmt: skip

    def _last_round(self, problem: Problem, left: Sequence[int]) -> int:
        """Return the last planned round in which anybody can still pay."""
        rounds, last = [count // self.local_steps for count in left], 0
        for round in range(1, self.rounds + 1):
            able = [client for client in problem.schedule.cohort(round) if rounds[client] > 0]
            for client in able:
                rounds[client] -= 1
            last = round if able else last
        return max(last, 1)

    def orders(self, state: DPSGDState) -> dict[int, Order]:
        """Order τ steps from all clients of the cohort that can pay for them."""
        return {
            client: self._order(state.round, state.noise_multipliers[client])
            for client in state.cohort
            if state.left[client] >= self.local_steps
        }

    def adapt(self, state: DPSGDState, feedback: Feedback) -> DPSGDState:
        """Take off what was spent."""
        used = dict.fromkeys(feedback.answered, self.local_steps)
        return replace(state, left=tuple(left - used.get(client, 0) for client, left in enumerate(state.left)))

    def _order(self, done: int, noise_multiplier: float) -> Order:
        return dpsgd_order(
            steps=self.local_steps, lr=self.rate(done), sampling_rate=self.sampling_rate, clip=self.clip,
            noise_multiplier=noise_multiplier, proximal=self.proximal, divisor=self.divisor,
        )  # fmt: skip
