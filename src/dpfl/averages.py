"""How sure a mean over several runs is."""

import math
import statistics
from collections.abc import Sequence


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None of a single value, or where one is not finite.

    >>> standard_error([1.0, 2.0, 3.0, 2.0]), standard_error([1.0]), standard_error([1.0, math.inf])
    (0.408248290463863, None, None)
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values) / math.sqrt(len(values))
