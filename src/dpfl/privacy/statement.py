"""A statement of account: what every client has spent in all runs of a ledger, and what its owner granted."""

from collections import Counter
from typing import Any

from dpfl.privacy.accounting import tight_each
from dpfl.privacy.books import BookedRun, Books
from dpfl.privacy.budget import Promise
from dpfl.privacy.certificate import finite

Statement = dict[str, Any]


def state(books: Books) -> Statement:
    """Add up the books, for each kind of promise (unit and neighbours) apart: sums over kinds would mean nothing."""
    runs = books.runs()
    kinds: dict[tuple[str, str], list[BookedRun]] = {}
    for run in runs:
        if run.facts["promise"] is not None:
            kinds.setdefault((run.facts["promise"]["unit"], run.facts["promise"]["neighbours"]), []).append(run)
    unprotected = books.unprotected(*runs)
    lines = [line for kind, group in kinds.items() for line in _lines(books, kind, group)]
    lines += [
        {
            "client": client,
            "unit": None,
            "neighbours": None,
            "runs": None,
            "uploads": None,
            "spent": None,
            "granted": None,
        }
        for client in sorted(unprotected)
    ]
    return {
        "ledger": None if books.path is None else str(books.path),
        "runs": [
            {
                "run": run.name,
                "opened": run.opened,
                "system": run.facts["system"],
                "calibration": (run.facts["promise"] or {}).get("calibration"),
                "rounds": books.rounds(run),
                "config": run.facts["config"],
            }
            for run in runs
        ],
        "grants": [
            {
                "client": grant.client, "epsilon": grant.budget.epsilon, "delta": grant.budget.delta,
                "unit": grant.unit, "neighbours": grant.neighbours, "currency": grant.currency,
            }
            for grant in books.grants()
        ],
        "clients": lines,
    }  # fmt: skip


def _lines(books: Books, kind: tuple[str, str], runs: list[BookedRun]) -> list[dict[str, Any]]:
    spent = books.spent(*runs)
    joined: Counter[int] = Counter()
    deltas: dict[int, float] = {}
    for run in runs:
        promised = Promise.from_plain(run.facts["promise"]).budgets
        for client in books.replies(run):
            joined[client] += 1
            # At a smaller δ the same noise costs more: the smallest that was promised does not flatter.
            deltas[client] = min(deltas.get(client, 1.0), promised[client].delta)
    uploads, clients = books.replies(*runs), sorted(joined)
    grants = {
        client: grant if grant is not None and (grant.unit, grant.neighbours) == kind else None
        for client, grant in books.grants_of(clients).items()
    }
    at = [grant.budget.delta if (grant := grants[client]) is not None else deltas[client] for client in clients]
    epsilons = tight_each([spent[client] for client in clients], at)
    return [
        {
            "client": client,
            "unit": kind[0],
            "neighbours": kind[1],
            "runs": joined[client],
            "uploads": uploads[client],
            "spent": {"epsilon": finite(epsilon), "delta": delta},
            "granted": None
            if (grant := grants[client]) is None
            else {"epsilon": grant.budget.epsilon, "delta": grant.budget.delta},
        }
        for client, epsilon, delta in zip(clients, epsilons, at, strict=True)
    ]
