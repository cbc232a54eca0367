"""The ledger: every client's budget, charged before the client computes anything, and refusing what it cannot pay.

The price is derived from the order itself: its sensitivity, its noise and the sampler that runs. A round's charges are
on disk (`books`) before the first of its uploads can exist; a privacy filter (`filters`) decides who may go on, in the
run and, where the owner of the books granted a limit, over all runs. What cannot be priced is refused, never ignored.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from dpfl.errors import BadInput, BudgetRefused
from dpfl.orders import (
    GRID_SHARE,
    Gaussian,
    Laplace,
    Neighbours,
    Norm,
    Order,
    Poisson,
    Unit,
    count_sensitivity,
    sensitivity,
)
from dpfl.privacy.accounting import Mechanism
from dpfl.privacy.allowed import Allowed, to_plain
from dpfl.privacy.books import FAST, BookedRun, Books, Release, told_multiplier
from dpfl.privacy.budget import Promise, called
from dpfl.privacy.filters import CountFilter, Filter, OverheardFilter, PlainFilter, RenyiFilter, Unlimited, worth_of
from dpfl.privacy.lifetime import Lifetime
from dpfl.privacy.people import Fingerprints


@dataclass(frozen=True)
class Charged:
    """An order that has been paid for. Only the ledger makes one, and clients perform nothing else."""

    order: Order
    records: int  # the public number of records that the price was derived from, and that divides sums
    sensitivity: float | None = field(default=None, compare=False)  # of what is noised; None: nothing is promised
    count_sensitivity: float | None = field(default=None, compare=False)  # of the count; None: nothing is, or promised

    @property
    def relative_noise(self) -> float:
        """Return the size of the noise in units of the sensitivity."""
        return _relative(self.order.noise, self.sensitivity)

    @property
    def relative_count_noise(self) -> float:
        """Return the same of the noise on the count."""
        return _relative(self.order.count_noise, self.count_sensitivity)

    @property
    def upload_sensitivity(self) -> float:
        """Return how far the client's data can move its upload, where that is the plain sum that was priced."""
        return (self.sensitivity or 0.0) * (self.order.noise_in_upload(self.records) or 1.0)


def _relative(noise: Gaussian | Laplace | None, bound: float | None) -> float:
    assert noise is not None
    if bound is None:
        raise BadInput("noise must be paid for before it is drawn, but this order was not; charge it to a ledger")
    return noise.size / bound


class Ledger:
    """What each client of a run has spent so far, against what it granted."""

    def __init__(
        self,
        promise: Promise | None,
        sizes: Sequence[int],
        *,
        books: Books | None = None,
        system: str = "",
        config: str | None = None,
        seeded: bool = False,
        noise_source: str | None = None,
        follows_uploads: bool = False,
        versions: Mapping[str, str] | None = None,
        allowed: Allowed | None = None,
        sharing: str | None = None,
        names: Sequence[str] = (),
        held_out: str | None = None,
        recognise: Callable[[bytes], Fingerprints] | None = None,
    ) -> None:
        """Take the books of a run (in memory, where none are given).

        promise: None is a training without privacy, where uploads are noted and nothing is promised.
        system, config, seeded, versions: what the certificate will say about the run.
        noise_source: where noise comes from, if neither from a seed nor from the operating system.
        follows_uploads: whether models may depend on uploads in other ways than through their noised sum.
        allowed: what may be let out at most, as far as that is known beforehand.
        sharing: what names how data were shared out among the clients; None where that is not known.
        names: of the clients, where they have any.
        held_out: whose records were kept for testing and are reported on without noise, in words.
        recognise: make the fingerprints of the run's people and noise under a key, for a ledger that runs share.
        """
        self.promise, self.sizes, self.names = promise, tuple(sizes), tuple(names)
        self.books = books or Books()
        self.books.require_writable()
        self._people = None if recognise is None else recognise(self.books.key)
        if self._people is not None:
            self.books.require_whole()
            self.books.require_known(self._people)
        self._filters: dict[int, Filter] = {}
        self._overheard: dict[int, OverheardFilter] = {}  # those of them that models are charged to as well
        self._lifetime = Lifetime(
            self.books, promise, self.sizes, self.names, real=not (seeded or noise_source == FAST)
        )
        self._facts: dict[str, Any] = {
            "system": system, "config": config, "seeded": seeded, "versions": dict(versions or {})
        }  # fmt: skip
        self._facts |= {} if noise_source is None else {"noise_source": noise_source}
        self._facts |= {"follows_uploads": True} if follows_uploads else {}
        self._facts |= {} if allowed is None else {"allowed": to_plain(allowed)}
        self._facts |= {"granted": True} if self._lifetime else {}
        self._facts |= {"names": list(names)} if names else {}
        self._facts |= {} if held_out is None else {"held_out": held_out}
        self._facts |= {"sharing": sharing if recognise is None else "recognised"}
        self._follows_uploads = follows_uploads
        self._round = 0
        self._charges: dict[int, int] = {}  # the numbers of the last round's
        self._paid: Mapping[int, Release | None] = {}  # what they were for
        self._number_of = lru_cache(maxsize=4096)(self.books.add_release)

    @cached_property
    def run(self) -> BookedRun:
        """Return the run in the books, which begins when it is first asked for."""
        plain = None if self.promise is None else self.promise.to_plain()
        return self.books.open_run({"promise": plain, "sizes": list(self.sizes)} | self._facts, self._people)

    @property
    def charged(self) -> int:
        """Return how often clients were charged, rounds that were passed over included."""
        return self._round

    def charge(self, orders: Mapping[int, Order]) -> dict[int, Charged]:
        """Charge each client for its order and return the orders that are paid; a client that cannot pay is left out.

        When this returns, the charges are on disk. Raises BudgetRefused when not one client of the cohort can pay.
        """
        orders = self._understood(orders)
        wanted = self._releases(orders)
        able = {
            client: release for client, release in wanted.items() if release is None or self._affords(client, release)
        }
        if wanted and not able:
            way_out = f"set rounds to {self._round} or raise epsilon" if self._round else "raise epsilon or the noise"
            raise BudgetRefused(
                f"the budget of all {len(wanted)} clients of this round is spent after {self._round} rounds, and none"
                f" may upload again; {way_out}"
            )
        try:
            paid = self._write(able)
        except BaseException:
            self._number_of.cache_clear()  # what was rolled back has no number
            raise
        self._round, self._paid = self._round + 1, paid
        for client, release in paid.items():
            if client in self._filters and release is not None:
                self._filters[client].pay(release.mechanism, release.count)
        self._lifetime.pay(paid.items())
        return self._receipts({client: orders[client] for client in paid})

    def _understood(self, orders: Mapping[int, Order]) -> dict[int, Order]:
        """Return a copy, so that what is charged is what is performed; refuse whoever is no client of this ledger."""
        known = range(len(self.sizes))
        understood = {}
        for client, order in orders.items():
            if isinstance(client, bool) or not hasattr(client, "__index__") or operator.index(client) not in known:
                raise BadInput(f"orders must be for clients 0 to {len(known) - 1}, but one is for {client!r}; name one")
            if type(order) is not Order:
                raise BadInput(f"client {client} must be given an Order, was given a {type(order).__name__}; order one")
            understood[operator.index(client)] = order
        return understood

    def _receipts(self, orders: Mapping[int, Order]) -> dict[int, Charged]:
        """Write one receipt for all clients that share an order and a number of records."""
        written: dict[tuple[int, int], Charged] = {}
        receipts = {}
        for client, order in orders.items():
            what = id(order), self.sizes[client]
            if what not in written:
                written[what] = Charged(order, self.sizes[client], *self._sensitivities(order, self.sizes[client]))
            receipts[client] = written[what]
        return receipts

    def _sensitivities(self, order: Order, records: int) -> tuple[float | None, float | None]:
        if self.promise is None:
            return None, None
        unit, neighbours = self.promise.unit, self.promise.neighbours
        return _sensitivity(order, records, unit=unit, neighbours=neighbours), (
            None if order.count_noise is None
            else count_sensitivity(order, records=records, unit=unit, neighbours=neighbours)
        )  # fmt: skip

    def _write(self, releases: Mapping[int, Release | None]) -> Mapping[int, Release | None]:
        """Leave out those whose lifetime is spent and put the charges of the others on disk, as one."""
        run = self.run  # which begins in a transaction of its own
        with self.books.transaction():
            self._lifetime.renew(run)
            paid = {
                client: release
                for client, release in releases.items()
                if release is None or self._lifetime.affords(client, release)
            }
            if releases and not paid:
                raise BudgetRefused(
                    f"what the ledger {str(self.books.path)!r} grants to all {len(releases)} clients of this round is"
                    f" spent after {self._round} rounds of this run; let its owner grant more, or run with more noise"
                )
            numbers = {client: None if one is None else self._number_of(one) for client, one in paid.items()}
            self._charges = self.books.add_charges(run, self._round + 1, numbers)
        return paid

    def pass_over(self) -> None:
        """Count a round in which nobody could pay: the model is sent out as it was."""
        self._round, self._charges = self._round + 1, {}
        self.broadcast({})

    def broadcast(self, weights: Mapping[int, float], *, noise_std: float = 0.0) -> None:
        """Note how the uploads of the round just charged went into the model that everybody will see.

        noise_std: of the Gaussian noise that the server added to it, on every coordinate.

        Raises BudgetRefused where the model, after what may have been overheard, would tell more than was promised.
        """
        told = self._told(weights, noise_std) if self._overheard else {}
        for client, mu_squared in told.items():
            if not self._overheard[client].affords_model(mu_squared):
                raise BudgetRefused(
                    f"the model after round {self._round} must tell no more of {called(client, self.names)} than its"
                    " budget allows"
                    " beside what may have been overheard, but would have, and is not sent out; order more noise, or"
                    " let the server add some"
                )
        counted = {self._charges[client]: weight for client, weight in weights.items()}
        self.books.add_broadcast(self.run, self._round, counted, noise_std)
        for client, mu_squared in told.items():
            self._overheard[client].pay_model(mu_squared)

    def _told(self, weights: Mapping[int, float], noise_std: float) -> dict[int, float]:
        """Return what a model tells of each upload in it, in μ²: a move of p_iΔ_i under Σ p_j²σ_j² + σ_D²."""
        stds, moves = {}, {}
        for client, weight in weights.items():
            release = self._paid[client]  # a plain sum, or it would not have been paid
            assert release is not None
            assert release.noise_std is not None
            assert release.sensitivity is not None
            if weight != 0:
                stds[client], moves[client] = weight * release.noise_std, weight * release.sensitivity
        variance = noise_std**2 + math.fsum(std**2 for std in stds.values())
        return {
            client: Mechanism("gaussian", told_multiplier(variance, move**2)).mu_squared
            for client, move in moves.items()
        }

    def _releases(self, orders: Mapping[int, Order]) -> dict[int, Release | None]:
        """Derive what each client would let out, once for all that share an order and a number of records."""
        if self.promise is None:
            return dict.fromkeys(orders)
        unit, neighbours = self.promise.unit, self.promise.neighbours
        derived: dict[tuple[int, int], Release] = {}
        releases: dict[int, Release | None] = {}
        for client, order in orders.items():
            what = id(order), self.sizes[client]
            if what not in derived:
                derived[what] = release_of(order, self.sizes[client], unit=unit, neighbours=neighbours)
            releases[client] = derived[what]
        return releases

    def _affords(self, client: int, release: Release) -> bool:
        if client not in self._filters:
            self._filters[client] = self._filter(client, release.mechanism)
        return _affords(self._filters[client], release)

    def _filter(self, client: int, first: Mechanism) -> Filter:
        """Fix the client's filter by the first release it is asked for, before anything of it is out."""
        assert self.promise is not None
        if self.promise.calibration == "paper":
            return Unlimited()  # the client agreed to a paper's formula: its true price is recorded, not limited
        if "server" not in self.promise.against and self.promise.exposures is not None and not self._follows_uploads:
            self._overheard[client] = OverheardFilter(self._worth[client], self.promise.exposures)
            return self._overheard[client]
        budget, adaptive = self.promise.budgets[client], self.promise.noise == "adaptive"
        if first.plain and (first.noise == "gaussian" or adaptive or budget.delta == 0):
            return PlainFilter(budget, self._worth[client])
        return RenyiFilter(budget, first) if adaptive else CountFilter(budget, first)

    @cached_property
    def _worth(self) -> list[float]:
        return [] if self.promise is None else worth_of(self.promise.budgets)


def release_of(order: Order, records: int, *, unit: Unit, neighbours: Neighbours) -> Release:
    """Derive what an order lets out.

    A count beside the upload is of the same batch and is let out with it: both together are one Gaussian release.

    Sampling amplifies where one record is added or removed and every noised value comes from one sampled batch. In all
    other cases the price is that of the noise alone, which holds whichever records were drawn.
    """
    noise = order.noise
    if noise is None:
        raise BadInput("noise must be set where privacy is promised, was None; order Gaussian or Laplace noise")
    gaussian, size = isinstance(noise, Gaussian), noise.size
    bound = _sensitivity(order, records, unit=unit, neighbours=neighbours) * (1 + GRID_SHARE)
    one_batch = order.noise_on == "step" or order.steps == 1
    amplified = isinstance(order.batch, Poisson) and one_batch and unit == "record" and neighbours == "add-remove"
    rate = order.batch.sampling_rate if amplified and isinstance(order.batch, Poisson) else 1.0
    multiplier = size / bound
    if order.count_noise is not None:  # one Gaussian of both, each in its own units: their μ² add up
        counted = count_sensitivity(order, records=records, unit=unit, neighbours=neighbours) * (1 + GRID_SHARE)
        multiplier = 1 / math.hypot(1 / multiplier, counted / order.count_noise.std)
    if rate < 1:  # ten digits, rounded down: distributions are found again when the same noise was computed another way
        multiplier = float(f"{multiplier * (1 - 1e-9):.9e}")
    mechanism = Mechanism("gaussian" if gaussian else "laplace", multiplier, rate)
    scale = order.noise_in_upload(records) if gaussian else None
    if scale is None:
        return Release(mechanism, order.releases)
    return Release(mechanism, order.releases, size * scale, bound * scale)


def _sensitivity(order: Order, records: int, *, unit: Unit, neighbours: Neighbours) -> float:
    norm: Norm = 2 if isinstance(order.noise, Gaussian) else 1
    return sensitivity(order, records=records, unit=unit, neighbours=neighbours, norm=norm)


def _affords(purse: Filter, release: Release) -> bool:
    return purse.affords(release.mechanism, release.count)
