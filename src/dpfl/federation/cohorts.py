"""Who takes part in a round: everyone, K at random, K in turn, or each client by its own coin.

A rule is public plain data; randomness comes as an argument. `Schedule` joins a rule to a run's public root, so
that the cohort of any round can be asked for at any time, and the rounds that each client will answer can be
counted before the first one: noise has to be calibrated for the participation that really happens, not for
its average.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from dpfl.errors import BadInput, require_count
from dpfl.streams import Root


class CohortRule(Hashable, Protocol):
    """A way to choose the clients of a round."""

    @property
    def clients(self) -> int:
        """Return how many clients there are."""

    def draw(self, round: int, rng: Generator) -> tuple[int, ...]:
        """Return the numbers of the clients of this round, sorted; rounds count from 1."""


@dataclass(frozen=True)
class Everyone:
    """Every client in every round."""

    clients: int

    def __post_init__(self) -> None:
        _require_clients(self.clients)

    def draw(self, round: int, rng: Generator) -> tuple[int, ...]:
        """Return all clients."""
        return tuple(range(self.clients))


@dataclass(frozen=True)
class RandomK:
    """`cohort` clients at random, each set of that size as likely as any other, anew in every round."""

    clients: int
    cohort: int

    def __post_init__(self) -> None:
        _require_cohort(self.cohort, self.clients)

    def draw(self, round: int, rng: Generator) -> tuple[int, ...]:
        """Return a random set of `cohort` clients."""
        return _sorted(rng.choice(self.clients, self.cohort, replace=False))


@dataclass(frozen=True)
class RoundRobin:
    """The next `cohort` clients in turn, starting again at client 0 after the last.

    >>> rule = RoundRobin(clients=5, cohort=2)
    >>> [rule.draw(t, None) for t in (1, 2, 3)]
    [(0, 1), (2, 3), (0, 4)]
    """

    clients: int
    cohort: int

    def __post_init__(self) -> None:
        _require_cohort(self.cohort, self.clients)

    def draw(self, round: int, rng: Generator | None) -> tuple[int, ...]:
        """Return the clients whose turn it is."""
        first = (round - 1) * self.cohort
        return _sorted((first + np.arange(self.cohort)) % self.clients)


@dataclass(frozen=True)
class PoissonCohort:
    """Each client with probability `rate`, independently; a round may have nobody."""

    clients: int
    rate: float

    def __post_init__(self) -> None:
        _require_clients(self.clients)
        if not (isinstance(self.rate, (int, float)) and 0 < self.rate <= 1):
            raise BadInput(
                f"rate must be above 0 and at most 1, was {self.rate!r}; use cohort / clients for that many on average"
            )

    def draw(self, round: int, rng: Generator) -> tuple[int, ...]:
        """Return the clients whose coin came up."""
        return _sorted(np.flatnonzero(rng.random(self.clients) < self.rate))


@dataclass(frozen=True)
class Schedule:
    """A rule with the public root of one run: the cohort of every round, past or to come."""

    rule: CohortRule
    root: Root  # the public one: a schedule is no secret

    def cohort(self, round: int) -> tuple[int, ...]:
        """Return the clients that take part in `round`, the same whenever it is asked."""
        require_count("round", round, "rounds count from 1")
        return _drawn(self.rule, self.root, round)

    def replies(self, first: int, last: int) -> NDArray[np.int64]:
        """Count for each client the rounds from `first` to `last`, both included, that it answers."""
        counts = np.zeros(self.rule.clients, np.int64)
        for round in range(first, last + 1):
            counts[list(self.cohort(round))] += 1
        return counts


@lru_cache(maxsize=4096)  # planning and calibration ask for the same cohorts again and again
def _drawn(rule: CohortRule, root: Root, round: int) -> tuple[int, ...]:
    return rule.draw(round, root.generator("cohort", round=round))


def _require_clients(clients: int) -> None:
    require_count("clients", clients, "give at least one")


def _require_cohort(cohort: int, clients: int) -> None:
    _require_clients(clients)
    require_count("cohort", cohort, "give at least one")
    if cohort > clients:
        raise BadInput(f"cohort must be at most the {clients} clients there are, was {cohort}; lower it")


def _sorted(numbers: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(sorted(numbers.tolist()))
