"""What the five bounds share: the facts they take, the noise that training would really add, and when they are void.

One rule for all: a bound takes the variance of the noise from the system's own orders, so that it holds for every
calibration, and the best numbers move when the accounting improves. `form="paper"` is the papers' substitution.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from dpfl.errors import BadInput
from dpfl.federation import Schedule
from dpfl.orders import Order, Question
from dpfl.planning.constants import Constants
from dpfl.privacy.budget import Budget
from dpfl.streams import Streams
from dpfl.systems import Feedback, PrivateSystem, Problem
from dpfl.systems.queried import QueriedSystem

Form = Literal["general", "paper"]
Q = TypeVar("Q", bound=QueriedSystem)

_ROUNDING = 1 + 1e-9  # a number that is exactly at its limit may be rounded to just above it


class Void(BadInput):
    """A bound says nothing for these numbers; the message names the inequality that fails and what would mend it."""


@dataclass(frozen=True, eq=False)
class Facts:
    """The public facts about a problem that a planner needs."""

    sizes: tuple[int, ...]  # records of each client
    dim: int  # model parameters
    streams: Streams  # of the run that is planned: they decide its cohorts

    def strictest(self, system: PrivateSystem[Any]) -> Budget:
        """Return the smallest budget of any client, for formulas that know one only."""
        return min(system.budgets(len(self.sizes)), key=lambda budget: (budget.epsilon, budget.delta))


@dataclass(frozen=True)
class Planner:
    """How one system is planned: its bound, the numbers that the bound decides, and what it is a bound of."""

    bound: Callable[[Any, Facts, Constants, Form], float]
    chooses: tuple[str, ...]  # the numbers that are planned where they are not given
    knows: tuple[str, ...]  # the numbers that the bound depends on
    needs: tuple[str, ...]  # its constants
    of: Literal["loss", "distance"]  # the loss above its least value, or the squared distance from the optimum


def begun(system: PrivateSystem[Any], facts: Facts) -> Any:
    """Return the state in which the system would begin, its noise chosen."""
    problem = Problem(facts.sizes, facts.dim, Schedule(system.cohorts(len(facts.sizes)), facts.streams.public))
    answers: dict[Question, dict[int, float]] = {"loss": dict.fromkeys(range(len(facts.sizes)), 0.0)}
    return system.begin(problem, torch.zeros(1), Feedback(public_loss=0.0, answers=answers))


def orders_of(system: PrivateSystem[Any], state: Any, round: int) -> dict[int, Order]:
    """Return what would be ordered in a round if nothing were adapted before it."""
    return system.orders(replace(state, round=round - 1))


def first_orders(system: PrivateSystem[Any], state: Any) -> dict[int, Order]:
    """Return for every client that will be asked the first order it would get."""
    orders: dict[int, Order] = {}
    for round in range(1, system.rounds + 1):
        if not set(replace(state, round=round - 1).cohort) <= set(orders):
            orders = orders_of(system, state, round) | orders
        if len(orders) == len(state.problem.sizes):
            break
    return orders


def round_noise(system: PrivateSystem[Any], facts: Facts) -> float:
    """Return v = E‖noise‖² that a round adds to the model, on average over the rounds and cohorts that will be.

    A client's noise stays as it is until something is adapted, so its first order tells it for all rounds.
    """
    state = begun(system, facts)
    noises = {i: one.noise_variance(facts.sizes[i]) for i, one in first_orders(system, state).items()}
    alike = system.cohort in (None, len(facts.sizes))  # all clients in every round: one is like another
    drawn = {number: state.problem.schedule.cohort(number) for number in range(1, 2 if alike else system.rounds + 1)}
    times, number_of = Counter(drawn.values()), {cohort: number for number, cohort in drawn.items()}
    total = 0.0
    for cohort, number in number_of.items():
        before = replace(state, round=number - 1)
        answered = [client for client in cohort if client in noises]
        downlink = system.downlink(before, answered)
        added = sum(weight**2 * noises[client] for client, weight in system.weights(before, answered).items())
        total += times[cohort] * (added + (downlink.std**2 if downlink else 0.0))
    return facts.dim * total / times.total()


def in_turn(clients: int, cohort: float) -> float:
    """Return (N−K)/((N−1)K), by which asking K of N clients spreads a mean; 0 where all are asked."""
    return (clients - cohort) / ((clients - 1) * cohort) if clients > 1 else 0.0


def contract(start: float, shrinks: ArrayLike, added: ArrayLike) -> float:
    """Return where y ← shrink_k·y + added_k ends."""
    factors = np.asarray(shrinks, float)
    later = np.append(np.cumprod(factors[::-1])[::-1][1:], 1.0)  # Π of the factors after each step
    return float(start * later[0] * factors[0] + (later * np.asarray(added)).sum())


def at_unit_rate(system: Q) -> Q:
    """Return the system with learning rate 1, at which the theorems take their noise."""
    return replace(system, lr=1.0, lr_schedule="constant", strong_convexity=None, smoothness=None)


def theorys_rates(system: QueriedSystem, strong_convexity: float, smoothness: float) -> bool:
    """Tell whether the system follows the rates of the theory for these very constants."""
    given = (system.strong_convexity, system.smoothness)
    return given[0] is not None and bool(np.allclose(given, (strong_convexity, smoothness), rtol=1e-9, atol=0.0))  # type: ignore[arg-type]


def require_convex(value: float, system: str, name: str = "strong_convexity (μ)") -> None:
    """Refuse a curvature of zero or less."""
    if not value > 0:
        raise Void(
            f"{name} must be above 0 for the bound of {system}, which shrinks by 1 − μη a step only then, was"
            f" {value:g}; add a ridge penalty, correct the constant, or use --method pilot"
        )


def require_below(field: str, value: float, limit: float, formula: str, system: str, *, strictly: bool = False) -> None:
    """Refuse a learning rate for which the bound of the system does not hold."""
    if value < limit or (value <= limit * _ROUNDING and not strictly):
        return
    raise Void(
        f"{field} must be {'below' if strictly else 'at most'} {formula} = {limit:.4g} for the bound of {system} to"
        f" hold, was {value:g}; lower it, correct the smoothness, or use --method pilot"
    )
