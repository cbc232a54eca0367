"""The check: does a plan pay? A grid around it is simulated, and the plan's loss is compared with the best there.

A check trains on the clients' own records and looks at the test split. That is for simulations, and runs on seeds: with
real clients every one of its runs would cost a budget, and what they would cost together is added up.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dpfl.averages import standard_error
from dpfl.errors import BadInput, BudgetRefused, require_count
from dpfl.planning.by_bound import Plan
from dpfl.planning.search import around
from dpfl.planning.task import Task
from dpfl.privacy.currency import CommonNeighbours, Spendings, Unpriced, bill, common
from dpfl.rehearsal import Rehearsal
from dpfl.streams import Streams
from dpfl.systems import PrivateSystem
from dpfl.training import train

OnRun = Callable[[str], None]  # told before each run what it is

# Rounds matter most and are looked at most closely; with more numbers to vary, each other one is halved and doubled.
_FACTORS = (1 / 4, 1 / 2, 1, 2, 4)
_FEWER_FACTORS = (1 / 2, 1, 2)


@dataclass(frozen=True)
class GridPoint:
    """One point of the grid and what its runs reached on the test split."""

    numbers: dict[str, int]
    losses: tuple[float, ...]  # one a seed; infinite where a run diverged

    @property
    def mean(self) -> float:
        """Return the mean loss over the seeds."""
        return statistics.fmean(self.losses)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        mean, error = self.mean, standard_error(self.losses)
        return {**self.numbers, "loss": mean if math.isfinite(mean) else None, "standard_error": error}


@dataclass(frozen=True)
class Check:
    """A simulated grid around a plan."""

    planned: GridPoint
    cells: tuple[GridPoint, ...]
    seeds: int
    neighbours: CommonNeighbours  # that its trainings are priced for
    if_real: dict[str, Any]  # what all of them together would cost the people whose records they saw

    @property
    def best(self) -> GridPoint:
        """Return the best point of the grid."""
        return min(self.cells, key=lambda cell: cell.mean)

    @property
    def regret(self) -> float:
        """Return by which part the planned loss is above the best one: 0 where the plan is the best."""
        if not math.isfinite(self.best.mean):
            raise BadInput("lr must be low enough for one run of the grid to end, but all diverged; lower it")
        return self.planned.mean / self.best.mean - 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "regret": self.regret if math.isfinite(self.regret) else None,
            "planned": self.planned.to_dict(),
            "best": self.best.to_dict(),
            "grid": [cell.to_dict() for cell in self.cells],
            "seeds": self.seeds,
            "neighbours": self.neighbours,
            "together": None,  # nobody's records were protected: noise that follows from a seed can be subtracted
            "if_real": self.if_real,
        }


def check(task: Task, plan: Plan, *, seeds: int = 3, neighbours: str = "replace", on_run: OnRun | None = None) -> Check:
    """Train at every point of a grid around the plan, with seeds 1 to `seeds`.

    neighbours: what the trainings are priced for, all together: "replace", "add-remove" or "client".
    """
    require_count("seeds", seeds, "use at least 2 for a standard error")
    currency = common(neighbours)
    ranges = task.ranges(task.chooses)
    if not ranges:
        raise BadInput(
            f"at least one of {', '.join(task.chooses)} must be left to the plan for a check, all were given; leave one"
            " out"
        )
    here = {name: getattr(plan.system, name) or task.clients for name in ranges}
    sides = [
        around(here[name], low, high, factors=_FACTORS if at == 0 else _FEWER_FACTORS)
        for at, (name, (low, high)) in enumerate(ranges.items())
    ]
    cells, spent = [], []
    for values in itertools.product(*sides):
        numbers = dict(zip(ranges, values, strict=True))
        if on_run is not None:
            on_run(", ".join(f"{name} = {value}" for name, value in numbers.items()))
        system = replace(plan.system, **task.chosen(numbers))
        cells.append(GridPoint(numbers, tuple(_loss(task, system, seed) for seed in range(1, seeds + 1))))
        spent += [_spent(task, system, seed, currency) for seed in range(1, seeds + 1)]
    planned = next(cell for cell in cells if cell.numbers == here)
    delta = min(budget.delta for budget in plan.system.budgets(task.clients))
    return Check(planned, tuple(cells), seeds, currency, bill(spent, delta))


def _spent(task: Task, system: PrivateSystem[Any], seed: int, neighbours: CommonNeighbours) -> Spendings | None:
    try:
        return Rehearsal(system, task.federation.sizes, Streams(seed)).spendings(neighbours)
    except (Unpriced, BudgetRefused):
        return None


def _loss(task: Task, system: PrivateSystem[Any], seed: int) -> float:
    settings, own = task.config.settings, task.own_model
    try:
        run = train(
            system, task.federation,
            settings.model if own is None else task.model().module,
            loss=None if own is None else own.loss, seed=seed, device=settings.device, evaluate_every=10**9,
        )  # fmt: skip
    except BudgetRefused:
        return math.inf  # these numbers cannot be paid for
    return math.inf if run.loss is None else run.loss
