"""What a system is: the server half of a federated algorithm, as plain data and a few pure functions.

A system never touches records. It sees the problem (public facts) and released values, and decides who takes part, what
they are ordered to do, how their updates are weighed and what changes for the next round. What most systems do stands
here; a system's own file holds what is special about it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar, cast

from torch import Tensor

from dpfl.errors import require_count, require_positive
from dpfl.federation import CohortRule, Everyone, RandomK, Schedule
from dpfl.options import fit_fields
from dpfl.orders import Full, Order, Poisson
from dpfl.privacy.budget import Promise


@dataclass(frozen=True)
class Problem:
    """The public facts that a system plans with."""

    sizes: tuple[int, ...]  # records of each client
    dim: int  # model parameters
    schedule: Schedule  # who takes part in which round


@dataclass(frozen=True, kw_only=True)
class State:
    """Where the training stands, as the server knows it. A system that remembers more extends it."""

    problem: Problem
    model: Tensor  # [d], as broadcast
    rounds: int  # how many rounds are planned now; a controller may change it
    round: int = 0  # how many are done

    @property
    def cohort(self) -> tuple[int, ...]:
        """Return who takes part in the next round."""
        return self.problem.schedule.cohort(self.round + 1)


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Feedback:
    """What the server learned in a round, from public data alone."""

    validation_loss: float


@dataclass(frozen=True, kw_only=True)
class System(ABC, Generic[S]):
    """A federated algorithm whose states are of type S.

    `name` is what the command line calls it; its dataclass fields are its options.
    """

    name: ClassVar[str]
    rounds: int
    lr: float
    cohort: int | None = None  # clients a round; None for all of them

    def __post_init__(self) -> None:
        """Check the options; a system that adds some checks them too."""
        fit_fields(self)
        require_count("rounds", self.rounds, "train for at least one round")
        require_positive("lr", self.lr, "try 0.1")
        if self.cohort is not None:
            require_count("cohort", self.cohort, "leave it out for all clients")

    @abstractmethod
    def orders(self, state: S) -> dict[int, Order]:
        """Decide what each client of the next cohort does."""

    def promise(self, clients: int) -> Promise | None:
        """Return what every client is promised: nothing, for a system without privacy."""
        return None

    def cohorts(self, clients: int) -> CohortRule:
        """Return the rule by which clients are chosen: K at random a round, or all."""
        if self.cohort is None or self.cohort == clients:
            return Everyone(clients)
        return RandomK(clients, self.cohort)

    def begin(self, problem: Problem, model: Tensor) -> S:
        """Stand at the first round; a system that extends the state begins by itself."""
        return cast(S, State(problem=problem, model=model, rounds=self.rounds))

    def weights(self, state: S, answered: Sequence[int]) -> dict[int, float]:
        """Decide how much each update counts: n_i/Σ n_j over the clients that answered."""
        total = sum(state.problem.sizes[client] for client in answered)
        return {client: state.problem.sizes[client] / total for client in answered}

    def adapt(self, state: S, feedback: Feedback) -> S:
        """Change what is to change for the next round: nothing, for a system without a controller."""
        return state


def batch_of(sampling_rate: float | None) -> Full | Poisson:
    """Return Poisson batches at this rate, or full batches for None."""
    return Full() if sampling_rate is None else Poisson(sampling_rate)
