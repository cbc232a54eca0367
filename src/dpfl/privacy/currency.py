"""One currency: what the very same orders cost under other neighbours than those that they were promised for.

An ε for a record that is added or removed and one for a record that is replaced are not the same privacy, and a ranking
that mixes them is decided by the mixture. What was ordered, and its noise, are fixed; its sensitivity is derived again
under the neighbours that all are to be priced in. Plain Gaussian and Laplace noise is priced exactly. A record of a
Poisson-sampled batch that is replaced has the exact price of the pair (1−q)·N(0) + q·N(±C) (`dp-accounting`), where
each record is clipped; wherever no amplification is proved, the price is that of the noise alone.

Noise that is chosen along the way is held by a filter in its own currency. On all records that filter limits Σ μ², and
another currency multiplies it by the squared ratio of the sensitivities. Sampled noise of that kind has no price in
another currency, and neither has what leaves clients without noise: `Unpriced` says so.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

from dpfl.errors import BadInput, require_one_of
from dpfl.orders import Neighbours, Order, RecordClip, Unit
from dpfl.privacy.accounting import Mechanism, tight_each
from dpfl.privacy.books import Release
from dpfl.privacy.budget import Observer, Promise
from dpfl.privacy.gaussian_dp import mu_of
from dpfl.privacy.ledger import release_of

# One record replaced by any other, one record added or removed, or all records of one client replaced by any others.
CommonNeighbours = Literal["replace", "add-remove", "client"]
COMMON_NEIGHBOURS: tuple[CommonNeighbours, ...] = get_args(CommonNeighbours)

Spendings = list[Counter[Mechanism]]  # what each client let out


class Unpriced(BadInput):
    """What was let out has no finite price in the currency asked for, or none that is known."""


@dataclass(frozen=True)
class Sent:
    """What one round let out."""

    orders: Mapping[int, Order]  # that were paid for and performed
    weights: Mapping[int, float]  # of the uploads in the model that everybody sees
    downlink_std: float  # of the noise that the server added to it


def kind_of(neighbours: CommonNeighbours) -> tuple[Unit, Neighbours]:
    """Return the unit and the relation that common neighbours stand for."""
    return ("client", "replace") if neighbours == "client" else ("record", neighbours)


def release_in(order: Order, records: int, neighbours: CommonNeighbours) -> Release:
    """Derive what an order lets out, in the currency of these neighbours."""
    unit, relation = kind_of(neighbours)
    if neighbours == "replace" and isinstance(order.clip, RecordClip):
        added = release_of(order, records, unit="record", neighbours="add-remove")
        if not added.mechanism.plain and added.mechanism.noise == "gaussian":
            return replace(added, mechanism=replace(added.mechanism, replaced=True))
    return release_of(order, records, unit=unit, neighbours=relation)


def price(
    promise: Promise | None,
    rounds: Sequence[Sent],
    sizes: Sequence[int],
    neighbours: CommonNeighbours,
    *,
    observer: Observer = "server",
    follows_uploads: bool = False,
) -> float:
    """Return the ε against an observer, at its own δ, of the client that loses most; `spendings` says what it takes."""
    if promise is not None and _is_held(promise) and _own(promise, neighbours) and not promise.uncounted:
        asked = {client for sent in rounds for client in sent.orders}
        return max((promise.budgets[client].epsilon for client in asked), default=0.0)
    spent = spendings(promise, rounds, sizes, neighbours, observer=observer, follows_uploads=follows_uploads)
    assert promise is not None
    return max(tight_each(spent, [budget.delta for budget in promise.budgets]))


def spendings(
    promise: Promise | None,
    rounds: Sequence[Sent],
    sizes: Sequence[int],
    neighbours: CommonNeighbours,
    *,
    observer: Observer = "server",
    follows_uploads: bool = False,
) -> Spendings:
    """Return what each client let out, as mechanisms in this currency, for an observer: the server, or readers.

    follows_uploads: whether models may depend on uploads in other ways than through their noised sum.
    """
    _require_priced(promise)
    assert promise is not None
    if _is_held(promise):
        return _limits(promise, rounds, sizes, neighbours)
    if observer == "released" and not follows_uploads:
        shown = _shown_to_readers(rounds, sizes, neighbours)
        if shown is not None:
            return shown
    return _shown_to_the_server(rounds, sizes, neighbours)


def together(trainings: Sequence[Spendings], delta: float) -> float:
    """Return the ε at δ of several trainings on the same people, for one who was at the dearest client in each.

    Data may be shared out anew between trainings, so that a record sits at one client here and at another there.
    """
    total: Counter[Mechanism] = Counter()
    for spent in trainings:
        prices = tight_each(spent, [delta] * len(spent))
        total += spent[prices.index(max(prices))]
    return tight_each([total], [delta])[0]


def bill(trainings: Sequence[Spendings | None], delta: float | None) -> dict[str, Any]:
    """Return as plain data what trainings would cost together, were their noise real; None among them has no price."""
    priced = [spent for spent in trainings if spent is not None]
    epsilon = together(priced, delta) if priced and delta is not None else 0.0
    return {
        "trainings": len(priced),
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": delta,
        "not_counted": len(trainings) - len(priced),
    }


def common(neighbours: str) -> CommonNeighbours:
    """Return the name of common neighbours as such, or refuse it."""
    require_one_of("neighbours", neighbours, COMMON_NEIGHBOURS)
    return next(one for one in COMMON_NEIGHBOURS if one == neighbours)


def _require_priced(promise: Promise | None) -> None:
    if promise is None:
        raise Unpriced("a price must be of noise, but these clients upload without any; run a private system")
    if promise.uncounted:
        raise Unpriced(
            f"a price must be of all that leaves a client, but {'; '.join(promise.uncounted)} leave it without noise;"
            " calibrate tightly"
        )


def _own(promise: Promise, neighbours: CommonNeighbours) -> bool:
    return (promise.unit, promise.neighbours) == kind_of(neighbours)


def _is_held(promise: Promise) -> bool:
    """Tell whether noise was chosen along the way: then the budget is what was spent, whatever the sum says."""
    return promise.noise == "adaptive" and promise.calibration == "tight" and "server" in promise.against


def _shown_to_the_server(rounds: Sequence[Sent], sizes: Sequence[int], neighbours: CommonNeighbours) -> Spendings:
    derived = cache(release_in)
    spent: Spendings = [Counter() for _ in sizes]
    for sent in rounds:
        for client, order in sent.orders.items():
            release = derived(order, sizes[client], neighbours)
            spent[client][release.mechanism] += release.count
    return spent


def _shown_to_readers(rounds: Sequence[Sent], sizes: Sequence[int], neighbours: CommonNeighbours) -> Spendings | None:
    """Return what models show: client i moves one by p_i·Δ_i under noise of variance Σ p_j²σ_j² + σ_D².

    None where an upload is not a plain sum with Gaussian noise on it: then readers are counted as if they saw uploads.
    """
    derived = cache(release_in)
    spent: Spendings = [Counter() for _ in sizes]
    for sent in rounds:
        releases = {client: derived(order, sizes[client], neighbours) for client, order in sent.orders.items()}
        noise = [sent.weights[client] * (release.noise_std or 0.0) for client, release in releases.items()]
        std = math.hypot(*noise, sent.downlink_std)
        for client, release in releases.items():
            if release.noise_std is None or release.sensitivity is None:
                return None
            moved = sent.weights[client] * release.sensitivity
            if moved > 0:  # rounded down, so that rounds that differ by rounding alone are counted together
                multiplier = float(f"{std / moved * (1 - 1e-6):.6e}")
                spent[client][replace(release.mechanism, multiplier=multiplier)] += release.count
    return spent


def _limits(promise: Promise, rounds: Sequence[Sent], sizes: Sequence[int], neighbours: CommonNeighbours) -> Spendings:
    """Return what each client's filter may let out: its μ², times the dearest squared ratio of the two prices."""
    derived = cache(release_in)
    own = cache(lambda order, records: release_of(order, records, unit=promise.unit, neighbours=promise.neighbours))
    ratios = [0.0] * len(sizes)
    for sent in rounds:
        for client, order in sent.orders.items():
            here, there = own(order, sizes[client]).mechanism, derived(order, sizes[client], neighbours).mechanism
            if not (here.plain and there.plain and here.noise == there.noise == "gaussian"):
                raise Unpriced(
                    "noise that is chosen along the way must be on all records to have a price here, was sampled: its"
                    f" filter holds for {promise.unit}, {promise.neighbours} alone; compare it there"
                )
            ratios[client] = max(ratios[client], here.multiplier / there.multiplier)
    worth = mu_of([budget.epsilon for budget in promise.budgets], [budget.delta for budget in promise.budgets])
    return [
        Counter({Mechanism("gaussian", float(1 / (ratio * mu))): 1}) if ratio else Counter()
        for ratio, mu in zip(ratios, worth, strict=True)
    ]
