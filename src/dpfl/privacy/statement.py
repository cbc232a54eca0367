"""A statement of account: what every client's people have lost in all runs of a ledger, and what its owner granted."""

import math
from collections.abc import Sequence
from typing import Any

from dpfl.privacy.books import Books
from dpfl.privacy.budget import Promise
from dpfl.privacy.totals import Account, Kind, accounts, is_simulation, kind_of, priced, strangers

Statement = dict[str, Any]

_EVERYTHING = "something left it without noise"  # and why no ε holds
_HANDED_IN = "its noise was drawn by clients that were handed in"
_STRANGERS = "it is not known whether it held the same people's records in all runs"


def state(books: Books) -> Statement:
    """Add up the books: one total for each client that holds records of the people of now."""
    people = books.population
    runs, names = books.runs(), books.names()
    return {
        "ledger": None if books.path is None else str(books.path),
        "head": books.head(),
        "extract": books.is_extract,  # of one run, so that others are not in it
        "people": people,
        "simulations": sum(is_simulation(run.facts) for run in runs),
        "runs": [
            {
                "run": run.name,
                "opened": run.opened,
                "system": run.facts["system"],
                "calibration": (run.facts["promise"] or {}).get("calibration"),
                "rounds": books.rounds(run),
                "config": run.facts["config"],
                "people": run.facts.get("population", 1),
                "simulation": is_simulation(run.facts),
            }
            for run in runs
        ],
        "grants": [
            {
                "client": grant.client, "name": _name(names, grant.client),
                "epsilon": grant.budget.epsilon, "delta": grant.budget.delta,
                "unit": grant.unit, "neighbours": grant.neighbours, "currency": grant.currency,
            }
            for grant in books.grants()
        ],
        "clients": [line | {"name": _name(names, line["client"])} for line in _lines(books, people)],
    }  # fmt: skip


def _name(names: Sequence[str], client: int | None) -> str | None:
    return names[client] if client is not None and client < len(names) else None


def _why(account: Account, *, strangers: bool) -> str | None:
    if account.everything:
        return _EVERYTHING
    return _HANDED_IN if not account.vouched else _STRANGERS if strangers else None


def _lines(books: Books, people: int) -> list[dict[str, Any]]:
    """Return a line for each client, in the terms of its grant, or of what all runs promised."""
    runs = books.runs_of(people)
    promised = kind_of(Promise.from_plain(run.facts["promise"]) for run in runs if run.facts["promise"] is not None)
    clients = sorted({client for run in runs for client in books.replies(run)})  # who was asked for anything yet
    grants = books.grants_of(clients)
    kinds = {
        client: promised if (grant := grants[client]) is None else Kind(grant.unit, grant.neighbours)
        for client in clients
    }
    lines = []
    for kind in dict.fromkeys(kinds.values()):
        own = [client for client in clients if kinds[client] == kind]
        found, let_out = (
            {client: one for client, one in accounts(books, runs, kind, only_happened=only).items() if client in own}
            for only in (False, True)
        )
        deltas = {
            client: found[client].delta if (grant := grants[client]) is None else grant.budget.delta for client in own
        }
        prices = priced(found, deltas)
        happened = priced(let_out, deltas)
        unknown = strangers(runs)
        for client in own:
            account, (epsilon, delta), grant = found[client], prices[client], grants[client]
            if account.granted and grant is not None and grant.budget.epsilon < epsilon:  # which held all of it
                epsilon, delta = max(happened[client][0], grant.budget.epsilon), grant.budget.delta
            why = _why(account, strangers=unknown and account.runs > 1)
            spent = None if why else {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta}
            granted = None if grant is None else {"epsilon": grant.budget.epsilon, "delta": grant.budget.delta}
            lines.append(
                {
                    "client": client,
                    "unit": kind.unit,
                    "neighbours": kind.neighbours,
                    "runs": account.runs,
                    "uploads": account.uploads,
                    "spent": spent,
                    "why": why,
                    "granted": granted,
                }
            )
    return sorted(lines, key=lambda line: int(line["client"]))
