"""What owners granted over all runs of a ledger, and whether a client may still upload under it.

A grant is a privacy filter over everything that a client's people were ever charged for, whatever each run promised: a
release is priced in the grant's own kind of neighbours (`totals`). Only real, fully counted releases can be limited, so
a ledger with grants takes no simulation and nothing that leaves a client uncounted.
"""

import math
from collections.abc import Iterable, Sequence

from dpfl.errors import BadInput, BudgetRefused
from dpfl.privacy.books import BookedRun, Books, Grant, Release
from dpfl.privacy.budget import Promise, called
from dpfl.privacy.filters import Filter, PlainFilter, RenyiFilter, worth_of
from dpfl.privacy.gaussian_dp import epsilon_of
from dpfl.privacy.totals import Kind, distance, moved, moved_budget


class Lifetime:
    """The grants of a ledger as one run's clients see them."""

    def __init__(
        self, books: Books, promise: Promise | None, sizes: Sequence[int], names: Sequence[str] = (), *, real: bool
    ) -> None:
        """Read the books.

        real: whether the noise of the run is drawn exactly, from the operating system.
        """
        self.books, self.promise, self.sizes, self.names, self._real = books, promise, sizes, names, real
        self._people = books.population  # whose records this run is on, whoever comes after them
        self._filters: dict[int, Filter] = {}
        self._grants: dict[int, Grant] = {}
        self._granted = self._seen = 0  # the newest grant and charge that are known
        self._read()
        if self._filters and promise is not None and promise.calibration == "tight":
            self._require_left(promise)

    def __bool__(self) -> bool:
        """Tell whether anything is limited."""
        return bool(self._filters)

    def affords(self, client: int, release: Release) -> bool:
        """Say whether the client's grant still pays for a release of this run."""
        assert self.promise is not None
        purse = self._filters.get(client)
        times = self._times(self.promise, self.sizes, client) if purse is not None else 1
        return purse is None or purse.affords(moved(release.mechanism, times), release.count)

    def pay(self, charges: Iterable[tuple[int, Release | None]]) -> None:
        """Add what this run was charged."""
        if self.promise is not None:
            self._pay(self.promise, self.sizes, charges)

    def renew(self, run: BookedRun) -> None:
        """Read what changed since: owners may change their minds, and other runs charge the same clients."""
        if self.books.last_grant() != self._granted:
            self._read()
        elif self._filters:
            others: dict[int, list[tuple[int, Release | None]]] = {}
            for other, client, release in self.books.charges_of_others(run, self._seen):
                others.setdefault(other, []).append((client, release))
            facts = {run.id: run.facts for run in self._same_people()} if others else {}
            for other, charges in others.items():
                if other in facts and facts[other]["promise"] is not None:
                    self._pay(Promise.from_plain(facts[other]["promise"]), facts[other]["sizes"], charges)
            self._seen = self.books.last_charge()

    def _read(self) -> None:
        self._granted, self._seen = self.books.last_grant(), self.books.last_charge()
        self._filters, self._grants = {}, {}
        if not self.books.grants():
            return
        where, clients = repr(str(self.books.path)), range(len(self.sizes))
        if self.promise is None:
            raise BadInput(
                f"system must be a private one with the ledger {where}, which limits what its clients may spend, but"
                " this one promises nothing; choose another system or ledger"
            )
        self._require_real(self.promise)
        granted = self.books.grants_of(clients)
        self._grants = {client: grant for client, grant in granted.items() if grant is not None}
        if without := [client for client in clients if client not in self._grants]:
            raise BadInput(
                f"{called(without[0], self.names)} must have a grant in the ledger {where}, which limits others, but"
                f" has none; grant one with `dpfl ledger FILE --grant EPSILON --client {without[0]}`"
            )
        earlier = self._same_people()
        exposed = self.books.unprotected(*earlier)
        for run in earlier:
            exposed |= set(self.books.replies(run)) if (run.facts["promise"] or {}).get("uncounted") else set()
        if exposed:
            raise BadInput(
                f"ledger must hold noised uploads only, but {called(min(exposed), self.names)} has uploaded or answered"
                f" without noise in {where}; no budget can pay for that: use another ledger"
            )
        budgets = [self._grants[client].budget for client in clients]
        worth = worth_of(budgets)
        self._filters = {
            client: PlainFilter(grant.budget, worth[client]) if grant.currency == "plain" else RenyiFilter(grant.budget)
            for client, grant in self._grants.items()
        }
        for run in earlier:
            if run.facts["promise"] is not None:
                spent = self.books.spent(run)
                charges = [(i, Release(*pair)) for i in spent for pair in spent[i].items()]
                self._pay(Promise.from_plain(run.facts["promise"]), run.facts["sizes"], charges)

    def _same_people(self) -> list[BookedRun]:
        return self.books.runs_of(self._people)

    def _pay(self, promise: Promise, sizes: Sequence[int], charges: Iterable[tuple[int, Release | None]]) -> None:
        for client, release in charges:
            if release is not None and client in self._filters:
                mechanism = moved(release.mechanism, self._times(promise, sizes, client))
                self._filters[client].pay(mechanism, release.count)

    def _times(self, promise: Promise, sizes: Sequence[int], client: int) -> int:
        """Return by how much dearer what was promised so is in the terms of the client's grant."""
        grant = self._grants[client]
        to = Kind(grant.unit, grant.neighbours)
        return distance(Kind(promise.unit, promise.neighbours), to, sizes[client])

    def _require_real(self, promise: Promise) -> None:
        where = repr(str(self.books.path))
        if not self._real:
            raise BadInput(
                f"seed must be left out with the ledger {where}, whose grants are of real people's privacy: a"
                " simulation, whose noise can be drawn again, protects nobody; leave seed (and --sampler fast) out"
            )
        if promise.uncounted:
            raise BadInput(
                f"calibration must be one that counts everything with the ledger {where}, which limits what clients"
                f" lose, but here they tell without noise {' and '.join(promise.uncounted)}; calibrate tightly"
            )

    def _require_left(self, promise: Promise) -> None:
        """Refuse a run that would be stopped half-way: tight noise is planned to spend all that was promised."""
        worth = worth_of(promise.budgets)
        for client, purse in self._filters.items():
            if not isinstance(purse, PlainFilter):
                continue
            times, promised = self._times(promise, self.sizes, client), promise.budgets[client]
            planned = moved_budget(promised, times)
            if purse.spent_epsilon + planned.epsilon <= purse.epsilon:
                continue
            left = max(purse.mu_squared - purse.spent_mu_squared, 0.0) / times**2
            if worth[client] > left:
                most = float(epsilon_of(math.sqrt(left), promised.delta)) * (1 - 1e-4)
                raise BudgetRefused(
                    f"the grant of {called(client, self.names)} in the ledger {str(self.books.path)!r} leaves"
                    f" ε = {most:.4g} at δ = {promised.delta:g}, and this run is planned to spend"
                    f" {promised.epsilon:g}; lower epsilon, or let the owner grant more"
                )
