"""Finding the whole numbers at which something is least: a ladder over each, and then ever smaller steps."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

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
