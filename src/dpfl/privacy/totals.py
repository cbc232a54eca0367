"""What all runs of a ledger cost a client's people together: one total, in one kind of neighbours.

Runs promise different things: that one record hardly matters or all of a client's, replaced or taken away. Each is
turned into the kind of the total by a factor k on how far a release may be moved, which is never too small for any
clip and any number of local steps (`dpfl.orders.sensitivity`): 2 between replacing and adding or removing, either way,
and n from one record to all of a client's. Sampling amplifies for the neighbours it was priced for only. A run counts
for what it was allowed. What a filter holds that knows no common currency is added as it is, ε to ε and δ to δ.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dpfl.orders import Neighbours, Unit
from dpfl.privacy.accounting import Mechanism, tight_each
from dpfl.privacy.allowed import View, counted, filled, from_plain, is_filtered
from dpfl.privacy.books import FAST, BookedRun, Books
from dpfl.privacy.budget import Budget, Promise


@dataclass(frozen=True)
class Total:
    """What all runs of a ledger up to one of them cost together, for the client that lost most."""

    epsilon: float | None  # None: no finite ε holds, or none is known to
    delta: float | None
    unit: str | None
    neighbours: str | None
    runs: int
    why: str | None = None  # no ε holds

    @staticmethod
    def from_plain(plain: Mapping[str, Any] | None) -> "Total | None":
        """Read the plain data of one."""
        return None if plain is None else Total(**plain)


class Kind(NamedTuple):
    """What neighbouring data are."""

    unit: Unit
    neighbours: Neighbours


@dataclass
class Account:
    """What one client's people have lost in some runs, in the terms of one kind."""

    runs: int = 0
    uploads: int = 0
    delta: float = 0.0  # the least above 0 that was promised: at a smaller one the same noise costs more
    spent: Counter[Mechanism] = field(default_factory=Counter)
    held: list[Budget] = field(default_factory=list)  # by filters of their own
    everything: bool = False  # it sent something without noise
    vouched: bool = True  # whether all noise was drawn here
    granted: bool = True  # whether a grant held all of its runs


def kind_of(promises: Iterable[Promise]) -> Kind:
    """Return the kind in which these are added up: their own where they share it, else the strongest of what all are.

    >>> kind_of([])
    Kind(unit='record', neighbours='replace')
    """
    kinds = {Kind(promise.unit, promise.neighbours) for promise in promises}
    if len(kinds) == 1:
        return kinds.pop()
    return Kind("client" if kinds and all(kind.unit == "client" for kind in kinds) else "record", "replace")


def distance(of: Kind, to: Kind, records: int) -> int:
    """Return by how much further neighbours of another kind may move what is bounded for the one.

    >>> distance(Kind("record", "add-remove"), Kind("record", "replace"), 10)
    2
    >>> distance(Kind("record", "replace"), Kind("client", "replace"), 10)
    10
    """
    if of == to:
        return 1
    times = records if (of.unit, to.unit) == ("record", "client") else 1
    if of.neighbours != to.neighbours:
        # Of a record that comes, the others' gradients are averaged with one more: that is no replacement by nothing.
        return 2 * times
    return 4 if (of.unit, to.unit, to.neighbours) == ("client", "record", "add-remove") else times


def moved(mechanism: Mechanism, times: int) -> Mechanism:
    """Return what a release costs where its data may move so many times as far."""
    if times == 1:
        return mechanism
    return replace(mechanism, multiplier=mechanism.multiplier / times, sampling_rate=1.0)


def moved_budget(budget: Budget, times: int) -> Budget:
    """Return what (ε, δ) is for so many neighbours in a row: kε, and δ·(1 + e^ε + … + e^(k−1)ε)."""
    if times == 1:
        return budget
    growth = math.fsum(math.exp(min(step * budget.epsilon, 700.0)) for step in range(times))
    return Budget(times * budget.epsilon, min(budget.delta * growth, 1 - 1e-16))


def accounts(books: Books, runs: Sequence[BookedRun], kind: Kind, *, only_happened: bool = False) -> dict[int, Account]:
    """Add up what these runs were allowed to learn of each client, or only what they happened to."""
    found: dict[int, Account] = {}
    for run in runs:
        promise = None if run.facts["promise"] is None else Promise.from_plain(run.facts["promise"])
        replies = books.replies(run)
        for client, count in replies.items():
            account = found.setdefault(client, Account())
            account.runs, account.uploads = account.runs + 1, account.uploads + count
            if promise is None or promise.uncounted:
                account.everything = True
            account.vouched &= "noise_source" not in run.facts
            account.granted &= bool(run.facts.get("granted"))
        for client in books.unprotected(run):
            found[client].everything = True
        if promise is not None:
            _add(found, books, run, promise, kind, only_happened)
    return found


def _add(
    found: dict[int, Account], books: Books, run: BookedRun, promise: Promise, kind: Kind, only_happened: bool
) -> None:
    sizes, own = run.facts["sizes"], Kind(promise.unit, promise.neighbours)
    seen, rounds, allowed = books.spent(run), books.rounds(run), from_plain(run.facts.get("allowed"))
    view: View = [seen.get(client, Counter()) for client in range(len(sizes))]
    filtered = not only_happened and "server" in promise.against and is_filtered(allowed, promise, rounds)
    if not only_happened:
        view = counted(view, allowed, "server", [budget.delta for budget in promise.budgets])
    for client, (spent, budget) in enumerate(zip(view, promise.budgets, strict=True)):
        most = filled(spent, budget, promise, allowed, client) if filtered else spent
        if not most:
            continue
        times, account = distance(own, kind, sizes[client]), found.setdefault(client, Account())
        if budget.delta > 0:
            account.delta = min(account.delta or budget.delta, budget.delta)
        if isinstance(most, Budget):
            account.held.append(moved_budget(most, times))
        else:
            for one, count in most.items():
                account.spent[moved(one, times)] += count


def priced(found: Mapping[int, Account], deltas: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Return each client's (ε, δ): at the δ given for it, and what filters of their own hold beside it."""
    clients = sorted(found)
    epsilons = tight_each([found[client].spent for client in clients], [deltas[client] for client in clients])
    prices = {}
    for client, epsilon in zip(clients, epsilons, strict=True):
        account = found[client]
        delta = (deltas[client] if account.spent or not account.held else 0.0) + sum(one.delta for one in account.held)
        whole = float("inf") if account.everything else epsilon + sum(one.epsilon for one in account.held)
        prices[client] = whole, min(delta, 1.0)
    return prices


def together(books: Books, run: BookedRun) -> Total | None:
    """Add up this run and all before it on the same people; None where this one is a simulation."""
    if is_simulation(run.facts):
        return None
    runs = [one for one in books.runs_of(run.facts.get("population", 1)) if one.id <= run.id]
    nothing = Total(None, None, None, None, len(runs))
    if others := sum(is_simulation(one.facts) for one in runs):
        return replace(nothing, why=f"{others} of them were simulations, whose noise can be drawn again")
    if others := sum("noise_source" in one.facts for one in runs):
        return replace(nothing, why=f"the noise of {others} of them was drawn by clients that were handed in")
    if strangers(runs):
        return replace(nothing, why="it is not known whether their clients held the same people's records")
    kind = kind_of(Promise.from_plain(one.facts["promise"]) for one in runs if one.facts["promise"] is not None)
    found = accounts(books, runs, kind)
    if not found:
        return replace(nothing, epsilon=0.0, delta=0.0, unit=kind.unit, neighbours=kind.neighbours)
    epsilon, delta = max(priced(found, {client: one.delta for client, one in found.items()}).values())
    if math.isinf(epsilon):
        return replace(nothing, why="something left a client without noise")
    return Total(epsilon, delta, kind.unit, kind.neighbours, len(runs))


def strangers(runs: Sequence[BookedRun]) -> bool:
    """Tell whether it is not known that the clients' people are the same in all of these runs.

    A ledger that runs share recognises records; one in a run's own folder knows only how data were shared out.
    """
    how = {run.facts.get("sharing") for run in runs}
    return len(runs) > 1 and (None in how or len(how) > 1)


def is_simulation(facts: Mapping[str, Any]) -> bool:
    """Tell whether a run's noise can be subtracted, or its last bits tell what it hides."""
    return bool(facts["seeded"]) or facts.get("noise_source") == FAST
