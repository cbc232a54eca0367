"""Finding the numbers at which something is least: a ladder first, and then ever smaller steps."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import minimize_scalar

Numbers = dict[str, int]


def ladder(first: int, last: int, *, factor: float = 2.0) -> list[int]:
    """Return whole numbers that grow by about `factor` from `first` to `last`, both included.

    >>> ladder(1, 20)
    [1, 2, 4, 8, 16, 20]
    """
    found, at = [first], float(first)
    while found[-1] < last:
        at = max(at * factor, found[-1] + 1)
        found.append(min(round(at), last))
    return found


def least(
    value: Callable[[Numbers], float],
    ranges: Mapping[str, tuple[int, int]],
    *,
    beside: Callable[[Sequence[Numbers]], list[Numbers]] = list,
) -> Numbers:
    """Return the numbers, each within its range, at which `value` is least (where that is the only valley).

    beside: adds to a list of candidates those that deserve a look besides, where the valley has teeth.
    """
    names = list(ranges)
    rungs = itertools.product(*(ladder(*ranges[name]) for name in names))
    best = min(beside([dict(zip(names, rung, strict=True)) for rung in rungs]), key=value)
    steps = {name: max(1, best[name] // 2) for name in names}
    while True:
        near = [
            {name: best[name] + sign * steps[name] for name, sign in zip(names, signs, strict=True)}
            for signs in itertools.product((-1, 0, 1), repeat=len(names))
        ]
        near = [one for one in near if all(low <= one[name] <= high for name, (low, high) in ranges.items())]
        ahead = min(beside(near), key=value, default=best)
        if value(ahead) < value(best):
            best = ahead
        elif all(step == 1 for step in steps.values()):
            return best
        else:
            steps = {name: max(1, step // 2) for name, step in steps.items()}


def around(best: int, first: int, last: int, *, factors: Sequence[float] = (1 / 4, 1 / 2, 1, 2, 4)) -> list[int]:
    """Return whole numbers around `best` and within a range, `best` among them.

    >>> around(10, 1, 25)
    [3, 5, 10, 20, 25]
    """
    wanted = (math.ceil(best * factor) if factor < 1 else round(best * factor) for factor in factors)
    return sorted({min(max(number, first), last) for number in wanted} | {best})


def least_real(value: Callable[[float], float], low: float, high: float) -> float:
    """Return the least point of a function of one number, by a grid in its logarithm and then a search."""
    grid = np.geomspace(low, high, 400) if high > low else np.array([low])
    values = [value(float(at)) for at in grid]
    best = int(np.argmin(values))
    around = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    if around[0] == around[1]:
        return float(grid[best])
    found = minimize_scalar(value, bounds=around, method="bounded", options={"xatol": 1e-9 * around[1]})
    return min((float(found.x), float(grid[best])), key=value)
