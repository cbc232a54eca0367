"""The certificate: what was promised, what was really spent, against whom, and what is not promised at all.

It is computed from the books alone, at the end of a run and whenever somebody asks again. What counts as spent is what
the run was allowed (`allowed`), whenever it ended; beside it stands what all runs cost together (`totals`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpfl import run_folder
from dpfl.errors import BadInput
from dpfl.privacy.accounting import Mechanism, tight_each
from dpfl.privacy.allowed import Allowed, View, counted, filled, from_plain, is_filtered, limit
from dpfl.privacy.books import BookedRun, Books
from dpfl.privacy.budget import Observer, Promise, cautions
from dpfl.privacy.totals import Total, is_simulation, together


@dataclass(frozen=True)
class Observed:
    """The privacy spent against one observer, for the client that spent most, and what the number rests on."""

    epsilon: float | None  # None: no finite ε holds
    delta: float | None
    basis: str  # "proved" by the clipping performed, or "none" where nothing is promised
    claimed_epsilon: float | None = None  # with the paper's own sensitivity, where it differs from the proved one
    claimed_basis: str | None = None  # then "claimed"
    slack: float | None = None  # promised minus spent, for the client that has least of it; None: not promised to it


@dataclass(frozen=True)
class Spending:
    """One client's line."""

    client: int
    replies: int
    claimed_epsilon: float
    delta: float
    server_epsilon: float | None  # None: no finite ε holds, here and below
    released_epsilon: float | None
    uplink_epsilon: float | None = None  # only where somebody may listen
    name: str | None = None  # of the client, where it has one


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A statement about one training; `certify` makes it, and printing it says it in words."""

    system: str
    clients: int
    rounds: int
    calibration: str | None
    unit: str | None
    neighbours: str | None
    claimed: dict[str, float] | None  # epsilon and delta: the largest ε any client was promised
    against: tuple[Observer, ...]  # to whom that is promised
    exposures: int | None  # uploads of a client that the uplink shows
    observers: dict[str, Observed]
    uncounted: tuple[str, ...]
    cautions: tuple[str, ...]
    noise_source: str | None  # "operating system", or "seed": then it can be repeated and subtracted
    config: str | None  # hash of the run's config
    versions: dict[str, str]
    spending: tuple[Spending, ...]
    allowed_more: bool = False  # whether more was allowed than happened; it is counted
    together: Total | None = None  # all runs of the ledger up to this one; None for a simulation
    head: str | None = None  # of the ledger's chain of hashes, after the run's last entry; None in memory
    held_out: str | None = None  # whose records were tested on, and are reported on without noise; None: public ones

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as plain data for JSON."""
        return {"version": run_folder.CERTIFICATE_VERSION} | asdict(self)

    def __str__(self) -> str:
        from dpfl.report.certificate import text  # what computes needs no words until somebody prints it

        return text(self.to_dict())

    def _repr_html_(self) -> str:
        from dpfl.report.notebook import certificate

        return certificate(self.to_dict())


def certify(books: Books, run: BookedRun) -> Certificate:
    """Read the books of a run and state what they show."""
    facts = run.facts
    common: dict[str, Any] = {
        "system": facts["system"], "clients": len(facts["sizes"]), "rounds": books.rounds(run),
        "config": facts["config"], "versions": facts["versions"], "together": together(books, run),
        # A simulation is to be repeated bit for bit, and there is nothing in it to be kept from a change.
        "head": None if is_simulation(facts) else books.head(run), "held_out": facts.get("held_out"),
    }  # fmt: skip
    if facts["promise"] is None:
        return Certificate(
            **common, calibration=None, unit=None, neighbours=None, claimed=None, against=(), exposures=None,
            uncounted=("every upload, as it is",), cautions=(), observers={"server": Observed(None, None, "none")},
            noise_source=None, spending=(),
        )  # fmt: skip
    promise = Promise.from_plain(facts["promise"])
    deltas = [budget.delta for budget in promise.budgets]
    seen = views_of(books, run, promise)
    replies, allowed = books.replies(run), from_plain(facts.get("allowed"))
    filtered = is_filtered(allowed, promise, common["rounds"])
    views = {observer: counted(view, allowed, observer, deltas) for observer, view in seen.items()}
    spent = {observer: _priced(observer, view, promise, allowed, filtered) for observer, view in views.items()}
    spent["released"] = [min(pair) for pair in zip(spent["released"], spent["server"], strict=True)]
    happened = {observer: tight_each(view, deltas) for observer, view in seen.items()}
    names = facts.get("names")
    most = max(promise.budgets, key=lambda budget: budget.epsilon)
    return Certificate(
        **common,
        calibration=promise.calibration,
        unit=promise.unit,
        neighbours=promise.neighbours,
        claimed={"epsilon": most.epsilon, "delta": most.delta},
        against=promise.against,
        exposures=promise.exposures,
        observers={
            observer: _observed(observer, views[observer], spent[observer], promise, allowed, filtered)
            for observer in views
        },
        uncounted=promise.uncounted,
        cautions=cautions(promise, facts["sizes"], facts.get("names", ())),
        noise_source=facts.get("noise_source", "seed" if facts["seeded"] else "operating system"),
        spending=tuple(
            Spending(
                client, replies.get(client, 0), budget.epsilon, budget.delta,
                **{f"{observer}_epsilon": finite(epsilons[client]) for observer, epsilons in spent.items()},
                name=names[client] if names else None,
            )
            for client, budget in enumerate(promise.budgets)
        ),
        allowed_more=any(
            most > least * (1 + 1e-4)
            for observer in promise.against
            for most, least in zip(spent[observer], happened[observer], strict=True)
        ),
    )  # fmt: skip


def views_of(books: Books, run: BookedRun, promise: Promise) -> dict[Observer, View]:
    """Return who saw what. The server drew the cohorts itself, and readers may know them: nothing is amplified."""

    def complete(seen: Mapping[int, Counter[Mechanism]]) -> View:
        return [seen.get(client, Counter()) for client in range(len(promise.budgets))]

    uploads = books.spent(run)
    views: dict[Observer, View] = {"server": complete(uploads)}
    # Where models tell less than uploads only by an argument that does not hold here, they tell no more.
    follows = bool(promise.uncounted) or run.facts.get("follows_uploads", False)
    if promise.exposures is not None:
        views["uplink"] = complete(uploads if follows else books.overheard(run, promise.exposures))
    released = None if follows else books.released(run)
    views["released"] = complete(uploads if released is None else released)
    return views


def _priced(observer: Observer, view: View, promise: Promise, allowed: Allowed | None, filtered: bool) -> list[float]:
    """Return each client's ε. What was decided along the way is covered by its filter: as much as that lets pass."""
    held = "server" in promise.against or ("uplink" in promise.against and observer != "server")  # who reads hears less
    if filtered and held:
        most = (
            filled(seen, budget, promise, allowed, client)
            for client, (seen, budget) in enumerate(zip(view, promise.budgets, strict=True))
        )
        return [limit(one, budget) for one, budget in zip(most, promise.budgets, strict=True)]
    return tight_each(view, [budget.delta for budget in promise.budgets])


def _observed(
    observer: Observer, view: View, spent: Sequence[float], promise: Promise, allowed: Allowed | None, filtered: bool
) -> Observed:
    worst = max(range(len(spent)), key=lambda client: spent[client])
    shown = Observed(finite(spent[worst]), promise.budgets[worst].delta, "proved")
    if observer in promise.against:
        slack = min(budget.epsilon - epsilon for budget, epsilon in zip(promise.budgets, spent, strict=True))
        shown = replace(shown, slack=finite(slack))
    shares = promise.claimed_shares
    if shares is None:
        return shown
    believed = [
        Counter({replace(m, multiplier=m.multiplier / share): n for m, n in seen.items()})
        for seen, share in zip(view, shares, strict=True)
    ]
    return replace(shown, claimed_epsilon=finite(max(_priced(observer, believed, promise, allowed, filtered))),
                   claimed_basis="claimed")  # fmt: skip


def finite(number: float) -> float | None:
    """Return the number for JSON, which knows no infinity."""
    return number if math.isfinite(number) else None


def recertify(folder: Path, ledger: Path | None = None) -> tuple[Certificate, bool]:
    """Compute the certificate of a run folder anew from its ledger; say too whether the run wrote one to compare with.

    ledger: the file that the run shared with others, for what the folder's own extract of it cannot tell.

    Raises BadInput where the two do not agree, and where the ledger does not fit its own chain of hashes, or no longer
    holds what the certificate was issued on.
    """
    path, name = run_folder.ledger_of(folder)
    finished = (folder / run_folder.CERTIFICATE).exists()
    stored = run_folder.read_json(folder, run_folder.CERTIFICATE) if finished else {}
    head = stored.get("head")
    if not isinstance(head, str | None):
        raise BadInput(f"{run_folder.CERTIFICATE} must name its head as text, but names {head!r}; believe the ledger")
    with closing(Books(ledger or path, create=False)) as books:
        books.require_whole(*([] if head is None else [head]))
        run = books.run(name)
        certificate, extract = certify(books, run), books.is_extract
    if extract:  # of a single run: what all cost together is in the ledger itself
        why = "the ledger that it was charged to may hold others; give that with --ledger"
        certificate = replace(certificate, together=Total(None, None, None, None, 0, why))
    if not finished:
        return certificate, False
    computed = certificate.to_dict()
    if stored.get("version", 1) == 1 and "sharing" not in run.facts:  # as 0.2 wrote them, which knew nothing of these
        computed = {key: value for key, value in computed.items() if key not in ("allowed_more", "together", "head")}
        computed["version"] = stored["version"] = 1
    if extract or _is_at_least(stored.get("together"), computed.get("together")):
        computed["together"] = stored.get("together")
    different = disagreements(stored, computed)
    if different:
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise BadInput(
            f"{run_folder.CERTIFICATE} must agree with the ledger, but {different[0]}{more}; believe the ledger"
        )
    return certificate, True


def _is_at_least(stored: Any, computed: Any) -> bool:
    """Tell whether a total that was stated covers what is known now: runs beside this one may have ended meanwhile."""
    if not isinstance(stored, dict) or computed is None or computed["epsilon"] is None:
        return False
    alike = all(stored.get(key) == computed[key] for key in ("unit", "neighbours", "runs", "why"))
    numbers = (stored.get(key) for key in ("epsilon", "delta"))
    return alike and all(
        isinstance(one, float) and one >= computed[key] * (1 - 1e-6)
        for one, key in zip(numbers, ("epsilon", "delta"), strict=True)
    )


def disagreements(stored: Any, recomputed: Any, place: str = "") -> list[str]:
    """Say where a stored certificate and one computed anew differ by more than rounding."""
    if isinstance(stored, dict) and isinstance(recomputed, dict):
        keys = [*stored, *(key for key in recomputed if key not in stored)]
        parts = ((stored.get(key), recomputed.get(key), f"{place}.{key}".lstrip(".")) for key in keys)
        return [line for part in parts for line in disagreements(*part)]
    if isinstance(stored, (list, tuple)) and isinstance(recomputed, (list, tuple)) and len(stored) == len(recomputed):
        pairs = enumerate(zip(stored, recomputed, strict=True))
        return [line for index, pair in pairs for line in disagreements(*pair, f"{place}[{index}]")]
    if stored == recomputed:
        return []
    if isinstance(stored, float) and isinstance(recomputed, float):
        close = 1e-6 if place.endswith("slack") else 0.0  # a difference, which rounding can change by all of itself
        if math.isclose(stored, recomputed, rel_tol=1e-6, abs_tol=close):
            return []
    return [f"{place} is {stored!r} in the certificate and {recomputed!r} by the ledger"]
