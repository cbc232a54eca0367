"""The grid of a problem: where its best points are, and what they and the system's defaults reach.

The best of thousands of noisy numbers is partly the luckiest. So the grid is only where the search begins: its best
two dozen points are trained anew, the best two of those once more, client by client and with seeds that nothing was
chosen by, and the better of the two is called the best. What little luck is left in that choice makes it look better
than it is, and plans worse.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from held_out_problems import Problem
from one_step_grid import AVERAGED, Grid, Point, noise_of

import dpfl
from dpfl.averages import standard_error
from dpfl.federation import Federation
from dpfl.systems import SYSTEMS, PrivateSystem

EPSILONS = (0.3, 1.0, 3.0, 10.0)
NUMBERS = ("rounds", "lr", "clip", "averaged")
Numbers = tuple[int, float, float, float]  # of these
Losses = dict[Numbers, list[float]]

_ROUNDS = (1, 2, 5, 10, 20, 40, 80, 160, 300)  # 300 are the most that a plan chooses from unless it is told otherwise
_STEPS = tuple(2.0**k for k in range(-4, 5))  # lr·clip, the longest way that a round without noise can go
_CLIPS = tuple(2.0**k for k in range(-2, 3))
_WIDENINGS = 4  # times that a grid whose best point is at its edge is widened, by two factors of 2
_GAIN = 0.01  # part by which an edge must be better than what is inside, for what lies beyond to be looked at
_BEST, _BEST_OF_THOSE = 24, 2
_FRESH_SEED = 2  # of the last trainings


def losses_of(system: PrivateSystem[Any], federation: Federation, repetitions: int) -> list[float]:
    """Train client by client with fresh seeds, the same ones whatever the system; infinite where it diverged."""
    (found,) = dpfl.repeat(system, federation, repetitions=repetitions, seed=_FRESH_SEED)
    return [loss if math.isfinite(loss) else math.inf for loss in found.losses]


def system_at(name: str, epsilon: float, delta: float) -> PrivateSystem[Any]:
    """Return the system with its defaults, but for the budget."""
    made = SYSTEMS[name](epsilon=epsilon, delta=delta)  # type: ignore[call-arg]
    assert isinstance(made, PrivateSystem)
    return made


def summary(losses: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and its standard error; None for what is not finite, as JSON has it."""
    return finite(statistics.fmean(losses)), finite(standard_error(losses) or 0.0)


def finite(value: float) -> float | None:
    """Return the value, or None where it is not finite."""
    return value if math.isfinite(value) else None


def search_grid(problem: Problem, name: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Train the whole grid of a problem at every ε, and the system's defaults; return plain data for JSON."""
    started = time.perf_counter()
    federation = problem.load()
    seeds, more, fresh = problem.trainings
    grid, again = Grid(federation, seeds=range(seeds)), Grid(federation, seeds=range(seeds, seeds + more))
    cases = {}
    for epsilon in EPSILONS:
        search = _Search(system_at(name, epsilon, problem.delta), federation, grid, {})
        search.look_around()
        second = search.best_trained_again(again)
        best = sorted(second, key=lambda one: statistics.fmean(second[one]))[:_BEST_OF_THOSE]
        usual: Any = tuple(getattr(search.system, name) for name in NUMBERS)
        last = {one: losses_of(_at(search.system, one), federation, fresh) for one in (*best, usual)}
        cases[f"{epsilon:g}"] = {
            "finalists": [_plain(one, last[one]) for one in best],
            "defaults": _plain(usual, last[usual]),
            "again": [[*one, *summary(found)] for one, found in second.items()],
            "points": [[*one, *summary(search.losses[one])] for one in search.ranked()],
        }
        tell(f"{problem.name}, ε = {epsilon:g}: {time.perf_counter() - started:.0f} s")
    return {
        "title": problem.title, "delta": problem.delta, "sizes": federation.sizes, "seeds": seeds,
        "untrained": statistics.fmean(again.untrained()), "seconds": time.perf_counter() - started, "cases": cases,
    }  # fmt: skip


@dataclass
class _Search:
    """The grid of one case: what was trained, and what came of it."""

    system: PrivateSystem[Any]
    federation: Federation
    grid: Grid
    losses: Losses

    def look_around(self) -> None:
        """Train the grid, and what lies beyond its edges as long as the best point is there."""
        steps, clips = list(_STEPS), list(_CLIPS)
        self._look(steps, clips)
        for _ in range(_WIDENINGS):
            if not self._widen(steps, clips):
                return
            self._look(steps, clips)

    def ranked(self) -> list[Numbers]:
        """Return the points from best to worst."""
        return sorted(self.losses, key=lambda one: statistics.fmean(self.losses[one]))

    def best_trained_again(self, again: Grid) -> Losses:
        """Train the best points once more, from other starts and with other noise."""
        found: Losses = {}
        best = self.ranked()[:_BEST]
        for rounds in {one[0] for one in best}:
            points = sorted({one[1:3] for one in best if one[0] == rounds})
            self._train(again, rounds, points, found, seed=2)
        return {one: found[one] for one in best}

    def _look(self, steps: Sequence[float], clips: Sequence[float]) -> None:
        """Train the points that were not trained yet."""
        wanted = [(step / clip, clip) for step in steps for clip in clips]
        for rounds in _ROUNDS:
            missing = [one for one in wanted if (rounds, *one, 0.0) not in self.losses]
            self._train(self.grid, rounds, missing, self.losses, seed=1)

    def _train(
        self, grid: Grid, rounds: int, points: Sequence[tuple[float, float]], into: Losses, *, seed: int
    ) -> None:
        """Train for so many rounds at each (lr, clip), once from each of the grid's starts."""
        if not points:
            return
        unit = replace(self.system, rounds=rounds, lr=1.0, clip=1.0)
        noise = noise_of(unit, self.federation, grid.dim)  # which grows as lr·clip does
        found = grid.train([Point(lr, clip, lr * clip * noise) for lr, clip in points], rounds, seed=seed)
        for (lr, clip), averages in zip(points, found.tolist(), strict=True):
            for averaged, losses in zip(AVERAGED, averages, strict=True):
                into[rounds, lr, clip, averaged] = losses

    def _widen(self, steps: list[float], clips: list[float]) -> bool:
        """Add values beyond the edges at which the best point lies; tell whether there were such."""
        best = self.ranked()[0]
        changed = False
        for values, of in ((steps, lambda one: one[1] * one[2]), (clips, lambda one: one[2])):
            edge = of(best)
            if edge in (min(values), max(values)) and self._gains(edge, of):
                factor = 2.0 if edge == max(values) else 0.5
                values += [edge * factor, edge * factor**2]
                changed = True
        return changed

    def _gains(self, edge: float, of: Callable[[Numbers], float]) -> bool:
        """Tell whether the best point, at this edge, is clearly better than all that are not."""
        inside = min(statistics.fmean(found) for one, found in self.losses.items() if of(one) != edge)
        return statistics.fmean(self.losses[self.ranked()[0]]) < (1 - _GAIN) * inside


def _at(system: PrivateSystem[Any], numbers: Numbers) -> PrivateSystem[Any]:
    return replace(system, **dict(zip(NUMBERS, numbers, strict=True)))


def _plain(numbers: Numbers, losses: Sequence[float]) -> dict[str, Any]:
    return {**dict(zip(NUMBERS, numbers, strict=True)), "losses": [finite(loss) for loss in losses]}
