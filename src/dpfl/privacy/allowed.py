"""What a run was allowed to let out, written down before its first round: that is what its certificate states.

Whether somebody stops a training after looking at it, or a controller takes fewer steps, can depend on what was
released. Then what happened to be let out is no bound, and would itself tell something; what could have been let out at
most is one. Where a plan does not depend on what is released, its rehearsal knows that, for each client and observer.
Where it does, the client's filter holds the limit.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dpfl.privacy.accounting import Mechanism, Spent, most_steps, tight, tight_each
from dpfl.privacy.budget import Budget, Observer

View = Sequence[Spent]  # what one observer saw of each client

BY_FILTER = "filter"  # in the place of a plan: as much as the filters let pass
_ROUNDING = 1e-9  # by which two sums of the same numbers may differ


@dataclass(frozen=True)
class Plan:
    """What every observer would see of each client if all went on as long as it may."""

    views: Mapping[Observer, View]

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON, in which clients that are alike share one entry."""
        return {observer: _packed(view) for observer, view in self.views.items()}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "Plan":
        """Read what `to_plain` wrote."""
        return Plan({observer: _unpacked(packed) for observer, packed in plain.items()})  # type: ignore[misc]


def _packed(view: View) -> dict[str, Any]:
    entries: dict[frozenset[tuple[Mechanism, int]], int] = {}
    of = [entries.setdefault(frozenset(spent.items()), len(entries)) for spent in view]
    plain = [
        [[one.noise, one.multiplier, one.sampling_rate, int(count)] for one, count in sorted(entry, key=repr)]
        for entry in entries
    ]
    return {"entries": plain, "of": of}


def _unpacked(packed: Mapping[str, Any]) -> View:
    entries = [Counter({Mechanism(*kind): count for *kind, count in entry}) for entry in packed["entries"]]
    return [entries[which] for which in packed["of"]]


def counted(seen: View, facts: Mapping[str, Any], observer: Observer, deltas: Sequence[float]) -> View:
    """Return for each client what the plan of its run allowed, or what was seen where that is more."""
    plan = facts.get("allowed")
    if not isinstance(plan, Mapping) or observer not in plan:
        return seen
    allowed = Plan.from_plain({observer: plan[observer]}).views[observer]
    different = [i for i, (one, other) in enumerate(zip(seen, allowed, strict=True)) if one != other]
    prices = [tight_each([view[i] for i in different], [deltas[i] for i in different]) for view in (seen, allowed)]
    more = {i for i, ours, planned in zip(different, *prices, strict=True) if ours > planned * (1 + _ROUNDING)}
    return [one if i in more else other for i, (one, other) in enumerate(zip(seen, allowed, strict=True))]


def limit(seen: Spent, budget: Budget, *, adaptive: bool) -> float:
    """Return the ε up to which a client's filter lets pass what was begun so; 0 where nothing was."""
    if not seen:
        return 0.0
    if adaptive or all(one.plain for one in seen):
        return budget.epsilon
    first = min(seen, key=lambda one: one.multiplier)  # a count holds what it was fixed by, and what is noised more
    return _most(first, max(sum(seen.values()), 1), budget)


@lru_cache(maxsize=1024)
def _most(mechanism: Mechanism, least: int, budget: Budget) -> float:
    steps = max(most_steps(tight, mechanism, budget), least)
    found = tight({mechanism: steps}, budget.delta)
    return found if math.isfinite(found) else budget.epsilon
