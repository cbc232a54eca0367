"""What a run was allowed to let out: that is what its certificate states, whatever of it happened.

Whether somebody stops a training after looking at it, or a controller takes fewer steps, can depend on what was
released. Then what happened to be let out is no bound, and would itself tell something; what could have been let out at
most is one. Before its first round a run writes down how that is known:

- `Rounds`: nobody decides anything on the way. Once all rounds are over, what happened is what was planned; before,
  each client's filter holds the limit.
- `Filters`: a controller decides. The filters hold the limit, at the end too.
- `Course`: the longest course was rehearsed. That is wanted where somebody may see what no filter limits (a paper's
  formula has none, and a promise against an eavesdropper limits nothing that the server sees), and where budgets say
  when it is over.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dpfl.privacy.accounting import Mechanism, Spent, most_steps, tight, tight_each
from dpfl.privacy.budget import Budget, Observer, Promise
from dpfl.privacy.gaussian_dp import mu_of

View = Sequence[Spent]  # what one observer saw of each client

_ROUNDING = 1e-9  # by which two sums of the same numbers may differ


@dataclass(frozen=True)
class Rounds:
    """A plan of so many rounds that nothing changes."""

    rounds: int
    replies: Sequence[int]  # of each client, over all rounds


@dataclass(frozen=True)
class Filters:
    """As much as the clients' filters let pass."""


@dataclass(frozen=True)
class Course:
    """What every observer sees of each client on the longest course, and how many rounds that has."""

    rounds: int
    views: Mapping[Observer, View]


Allowed = Rounds | Filters | Course


def to_plain(allowed: Allowed) -> Any:
    """Return plain data for JSON, in which clients that are alike share one entry."""
    if isinstance(allowed, Filters):
        return "filters"
    if isinstance(allowed, Rounds):
        return {"rounds": allowed.rounds, "replies": [int(count) for count in allowed.replies]}
    return {
        "rounds": allowed.rounds, "course": {observer: _packed(view) for observer, view in allowed.views.items()}
    }  # fmt: skip


def from_plain(plain: Any) -> Allowed | None:
    """Read what `to_plain` wrote; None of a run that wrote nothing down."""
    if plain is None or plain == "filters":
        return None if plain is None else Filters()
    if "course" in plain:
        return Course(
            plain["rounds"], {observer: _unpacked(packed) for observer, packed in plain["course"].items()}
        )  # fmt: skip
    return Rounds(plain["rounds"], plain["replies"])


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


def is_filtered(allowed: Allowed | None, promise: Promise, rounds: int) -> bool:
    """Tell whether it is the clients' filters that limit what a run lets out, `rounds` of which are over."""
    if promise.calibration != "tight":
        return False
    if isinstance(allowed, Rounds | Course) and rounds < allowed.rounds:
        return True
    return promise.noise == "adaptive" or isinstance(allowed, Filters)


def counted(seen: View, allowed: Allowed | None, observer: Observer, deltas: Sequence[float]) -> View:
    """Return for each client what it was to let out on the longest course, or what was seen where that is more."""
    if not isinstance(allowed, Course) or observer not in allowed.views:
        return seen
    longest = allowed.views[observer]
    happened, planned = (tight_each(view, deltas) for view in (seen, longest))
    more = [ours > theirs * (1 + _ROUNDING) for ours, theirs in zip(happened, planned, strict=True)]
    return [one if is_more else other for one, other, is_more in zip(seen, longest, more, strict=True)]


def filled(seen: Spent, budget: Budget, promise: Promise, allowed: Allowed | None, client: int) -> Spent | Budget:
    """Return what a client's filter lets pass of what was begun so: releases, or where only that is known, ε and δ.

    A client that was not asked yet may still be, unless a plan says that it never will.
    """
    if not seen:
        never = isinstance(allowed, Rounds) and allowed.replies[client] == 0
        return {} if never else budget
    if all(one.plain for one in seen):
        gaussian = budget.delta > 0 and all(one.noise == "gaussian" for one in seen)
        return {Mechanism("gaussian", float(1 / mu_of(budget.epsilon, budget.delta))): 1} if gaussian else budget
    if promise.noise == "adaptive":
        return budget
    first = min(seen, key=lambda one: one.multiplier)  # a count holds what it was fixed by, and what is noised more
    return {first: max(_most(first, budget), sum(seen.values()))}


def limit(most: Spent | Budget, budget: Budget) -> float:
    """Return the ε of what a client's filter lets pass."""
    if isinstance(most, Budget) or (most and all(one.plain for one in most)):
        return budget.epsilon
    return tight(most, budget.delta)


@lru_cache(maxsize=1024)
def _most(mechanism: Mechanism, budget: Budget) -> int:
    return most_steps(tight, mechanism, budget)
