"""What a system is: the server half of a federated algorithm, as plain data and a few pure functions.

A system never touches records. It sees the problem (public facts) and released values, and decides who takes part, what
they are ordered to do, how their updates are weighed and what changes for the next round. What most systems do stands
here; a system's own file holds what is special about it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

from torch import Tensor

from dpfl.errors import BadInput, require_count, require_fraction, require_positive
from dpfl.federation import CohortRule, Everyone, PoissonCohort, RandomK, RoundRobin, Schedule
from dpfl.options import fit_fields
from dpfl.orders import UNPAID, Full, Gaussian, Need, Order, Poisson, Question, Shuffled
from dpfl.privacy.accounting import NoiseLaw
from dpfl.privacy.budget import Budget, Calibration, Promise, budgets, require_budgets
from dpfl.server.optimiser import Kind, Memory, ServerOptimiser
from dpfl.systems import decay

# An option that came after the first results were kept: at its default it changes none of them.
ADDED = {"added": "0.2"}
ADDED_0_3 = {"added": "0.3"}


@dataclass(frozen=True)
class Problem:
    """The public facts that a system plans with."""

    sizes: tuple[int, ...]  # records of each client
    dim: int  # model parameters
    schedule: Schedule  # who takes part in which round

    @cached_property
    def total(self) -> int:
        """Return the records of all clients, added up once: a round should not look at those who sit it out."""
        return sum(self.sizes)


@dataclass(frozen=True, kw_only=True)
class State:
    """Where the training stands, as the server knows it. A system that remembers more extends it."""

    problem: Problem
    model: Tensor  # [d], as broadcast
    rounds: int  # how many rounds are planned now; a controller may change it
    round: int = 0  # how many are done
    server: Memory | None = None  # what the server's optimiser remembers
    spent: frozenset[int] = frozenset()  # clients whose budgets could not pay when they were last asked

    @property
    def cohort(self) -> tuple[int, ...]:
        """Return who takes part in the next round."""
        return self.problem.schedule.cohort(self.round + 1)


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Feedback:
    """What the server learned in a round (or before the first): nothing private but the answers."""

    answered: Collection[int] = ()  # who uploaded
    total: Tensor | None = None  # [d], the weighted sum of uploads with all noise on it; None before the first round
    public_loss: float | None = None  # None where there is no public data, or the system does not need it
    uploads: Mapping[int, Tensor] = field(default_factory=dict)  # one by one, for a system that needs them
    counts: float | None = None  # Σ_i weights[i]·count_i/(records in i's batch), with all noise on it; None: not needed
    answers: Mapping[Question, Mapping[int, float]] = field(default_factory=dict)  # to what the system asked


@dataclass(frozen=True, kw_only=True)
class System(ABC, Generic[S]):
    """A federated algorithm whose states are of type S.

    `name` is what the command line calls it; its dataclass fields are its options.
    """

    name: ClassVar[str]
    until_spent: ClassVar[bool] = False  # whether it trains until no budget is left, as its natural end
    rounds: int
    lr: float | None
    cohort: int | None = None  # clients a round; None for all of them
    scheduling: Literal["random", "round-robin", "poisson"] = "random"  # K at random, in turn, or K on average
    server_optimiser: Kind = field(
        default="sgd", metadata=ADDED
    )  # what the server makes of the sum of uploads: post-processing
    server_lr: float | None = field(default=None, metadata=ADDED)  # η of that; None: 1 for sgd, 0.01 for the others
    server_momentum: float = field(
        default=0.0, metadata=ADDED
    )  # β₁: how much of a round's step is taken again in the next
    server_second_momentum: float = field(default=0.99, metadata=ADDED)  # β₂ of adam and yogi
    server_adaptivity: float = field(default=1e-3, metadata=ADDED)  # τ of adam and yogi
    averaged: float = field(
        default=0.0, metadata=ADDED
    )  # the last part of the rounds whose models are averaged; 0: the last model alone
    lr_schedule: str = field(
        default="constant", metadata=ADDED_0_3
    )  # how lr falls: constant, inverse-sqrt, inverse:GAMMA or step:EVERY:FACTOR (`dpfl.systems.decay`)

    def __post_init__(self) -> None:
        """Check the options; a system that adds some checks them too."""
        fit_fields(self)
        require_count("rounds", self.rounds, "train for at least one round")
        if self.lr is not None:
            require_positive("lr", self.lr, "try 0.1")
        decay.factor(self.lr_schedule, 0)
        if self.cohort is not None:
            require_count("cohort", self.cohort, "leave it out for all clients")
        if self.server_lr is not None:
            require_positive("server_lr", self.server_lr, "leave it out for the usual one")
        require_positive("server_adaptivity", self.server_adaptivity, "try 1e-3")
        for name in ("server_momentum", "server_second_momentum", "averaged"):
            require_fraction(name, getattr(self, name), "use 0 for none")

    def rate(self, done: int) -> float:
        """Return the learning rate of the round after `done` rounds, as `lr_schedule` has it."""
        assert self.lr is not None
        return self.lr * decay.factor(self.lr_schedule, done)

    @abstractmethod
    def orders(self, state: S) -> dict[int, Order]:
        """Decide what each client of the next cohort does."""

    def promise(self, sizes: Sequence[int]) -> Promise | None:
        """Return what every client is promised: nothing, for a system without privacy."""
        return None

    @property
    def needs(self) -> frozenset[Need]:
        """Return what `begin` and `adapt` look at: nothing that depends on how the training goes, for most systems."""
        return frozenset()

    @property
    def optimiser(self) -> ServerOptimiser:
        """Return what the server makes of the sum of uploads."""
        return ServerOptimiser(
            kind=self.server_optimiser, lr=self.server_lr, momentum=self.server_momentum,
            second_momentum=self.server_second_momentum, adaptivity=self.server_adaptivity, averaged=self.averaged,
        )  # fmt: skip

    @property
    def course(self) -> "tuple[System[S], int] | None":
        """Return what decides how each round goes, and how many rounds of it are trained.

        Trainings on the same course are the same as far as the shorter one goes: they differ in their budgets, which
        decide how long each may go on. None where a round depends on how many there will be, as noise mostly does.
        """
        return None

    def cohorts(self, clients: int) -> CohortRule:
        """Return the rule by which clients are chosen: all of them, or K in the way that `scheduling` says."""
        if self.cohort is None or self.cohort == clients:
            return Everyone(clients)
        if self.scheduling == "poisson" and self.cohort < clients:
            return PoissonCohort(clients, self.cohort / clients)
        return RoundRobin(clients, self.cohort) if self.scheduling == "round-robin" else RandomK(clients, self.cohort)

    def begin(self, problem: Problem, model: Tensor, feedback: Feedback) -> S:
        """Stand at the first round; a system that extends the state begins by itself."""
        return cast(S, State(problem=problem, model=model, rounds=self.rounds))

    def weights(self, state: S, answered: Sequence[int]) -> dict[int, float]:
        """Decide how much each update counts: n_i/Σ n_j over the clients that answered."""
        total = sum(state.problem.sizes[client] for client in answered)
        return {client: state.problem.sizes[client] / total for client in answered}

    def downlink(self, state: S, answered: Sequence[int]) -> Gaussian | None:
        """Return the noise that the server adds to the model it sends out: none, for most systems."""
        return None

    def adapt(self, state: S, feedback: Feedback) -> S:
        """Change what is to change for the next round: nothing, for a system without a controller."""
        return state


@dataclass(frozen=True, kw_only=True)
class PrivateSystem(System[S]):
    """A system that keeps a promise, and the options that come with one."""

    clip: float = 1.0  # C
    epsilon: float | tuple[float, ...] = 8.0  # one for all clients, or one each
    delta: float | tuple[float, ...] | None = None  # likewise; None: 1e-3, or 0 with Laplace noise
    calibration: Calibration = "tight"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_clip()
        if self.delta is None:
            object.__setattr__(self, "delta", 0.0 if self.noise == "laplace" else 1e-3)
        assert self.delta is not None
        require_budgets(self.epsilon, self.delta, pure=self.noise == "laplace")

    def require_clip(self) -> None:
        """Check what is clipped to: a number, for most systems."""
        require_positive("clip", self.clip, "try 1.0")

    @property
    def noise(self) -> NoiseLaw:
        """Return the law of the noise: Gaussian, for most systems."""
        return "gaussian"

    @abstractmethod
    def promise(self, sizes: Sequence[int]) -> Promise:
        """Say what is promised, to whom and about what."""

    def budgets(self, clients: int) -> tuple[Budget, ...]:
        """Give every client its budget."""
        assert self.delta is not None
        return budgets(self.epsilon, self.delta, clients)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Return in words what leaves clients without noise."""
        return tuple(UNPAID[question] for question in questions_in(self.needs))


def questions_in(needs: Collection[Need]) -> tuple[Question, ...]:
    """Return what clients have to be asked for without noise, which only a paper's own calibration may do."""
    return tuple(question for question in UNPAID if question in needs)


def batch_of(sampling_rate: float | None) -> Full | Poisson:
    """Return Poisson batches at this rate, or full batches for None."""
    return Full() if sampling_rate is None else Poisson(sampling_rate)


def by_size(state: State, order: Callable[[int], Order]) -> dict[int, Order]:
    """Order the same from clients of the cohort that hold equally many records, on which it depends what a pass is."""
    sizes = state.problem.sizes
    orders = {records: order(records) for records in {sizes[client] for client in state.cohort}}
    return {client: orders[sizes[client]] for client in state.cohort}


def local_training(
    local_steps: int,
    local_epochs: int | None,
    batch_size: int | None,
    records: int,
    *,
    sampling_rate: float | None = None,
) -> dict[str, Any]:
    """Return the steps and batches of an order: so many steps, or so many passes over a client's shuffled records.

    batch_size: records a step; None for all of them, where a pass is a step.
    sampling_rate: of Poisson batches, which no pass is made of.
    """
    batch = batch_of(sampling_rate) if batch_size is None else Shuffled(batch_size)
    if local_epochs is None:
        return {"steps": local_steps, "batch": batch}
    return {"steps": batch.passes(local_epochs, records) if isinstance(batch, Shuffled) else local_epochs,
            "batch": batch}  # fmt: skip


def require_local_training(
    local_steps: int,
    local_epochs: int | None,
    batch_size: int | None,
    *,
    usual_steps: int,
    sampling_rate: float | None = None,
    clips_records: bool = False,
) -> None:
    """Refuse what `local_training` cannot make an order of, and options that say the same thing twice.

    usual_steps: the local steps where none are given, which may stand beside passes.
    clips_records: whether each record's gradient is clipped, for which shuffled batches have no price.
    """
    require_count("local_steps", local_steps, "take at least one local step a round")
    batch_of(sampling_rate)
    if batch_size is not None:
        require_count("batch_size", batch_size, "leave it out for all records in every step")
    for name, value in (("local_epochs", local_epochs), ("batch_size", batch_size)):
        if value is not None and sampling_rate is not None:
            raise BadInput(
                f"{name} must be left out with sampling_rate, whose batches make up no passes, was {value}; give the"
                " one or the other"
            )
    if batch_size is not None and clips_records:
        raise BadInput(
            f"batch_size must be left out where each record's gradient is clipped, was {batch_size}: how often a record"
            " of a shuffled batch counts is not priced; leave it out, or clip the parameters with clipping=model"
        )
    if local_epochs is None:
        return
    require_count("local_epochs", local_epochs, "leave it out to count local steps")
    if local_steps != usual_steps:
        raise BadInput(
            f"local_steps must be left out with local_epochs, which says how many there are, was {local_steps}; give"
            " the one or the other"
        )


def planned_replies(problem: Problem, first: int, last: int) -> list[int]:
    """Count the rounds from `first` to `last` that each client will answer, as one at least.

    The server draws all cohorts itself, so each client's noise can be exact for the rounds that it will answer.
    """
    return [max(1, int(count)) for count in problem.schedule.replies(first, last)]


def require_all_clients(system: System[S], why: str) -> None:
    """Refuse a cohort where a system asks every client in every round."""
    if system.cohort is not None:
        raise BadInput(f"cohort must be left out for {system.name}, which {why}, was {system.cohort}; leave it out")
