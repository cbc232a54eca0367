"""A statement of account: what every client has spent in all runs of a ledger, and what its owner granted."""

import math
from collections import Counter
from typing import Any

from dpfl.privacy.accounting import tight_each
from dpfl.privacy.books import BookedRun, Books
from dpfl.privacy.budget import Promise
from dpfl.privacy.certificate import finite, rounded_up

_SHOWN = 20  # clients that a screen can hold

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


def text(statement: Statement) -> str:
    """Print the statement on a screen: the newest runs, and the clients that spent most."""
    runs, clients = statement["runs"], statement["clients"]
    lines = [f"ledger {statement['ledger']}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}"]
    if len(runs) > _SHOWN:
        lines.append(f"  the newest {_SHOWN}:")
    for run in runs[-_SHOWN:]:
        how = "no privacy" if run["calibration"] is None else f"{run['calibration']} calibration"
        lines.append(f"  {run['opened']}  {run['run']}  {run['system']}, {how}, {run['rounds']} rounds")
    for grant in statement["grants"]:
        whom = "every client" if grant["client"] is None else f"client {grant['client']}"
        lines.append(
            f"  granted to {whom}: ε = {grant['epsilon']:g}, δ = {grant['delta']:g} over all runs"
            f" ({grant['unit']}, {grant['neighbours']}; {grant['currency']})"
        )
    if not clients:
        return "\n".join([*lines, "nobody has been charged yet"])
    rows = sorted(clients, key=lambda line: (-_most(line), line["client"]))
    lines += [
        "",
        f"{'client':>6}  {'runs':>5}  {'uploads':>7}  {'spent, ever':<26}  {'granted':<22}  one … is protected",
    ]
    lines += [_row(line) for line in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        lines.append(f"  … and {len(rows) - _SHOWN} that spent less; --json has all of them")
    return "\n".join(lines)


def _most(line: dict[str, Any]) -> float:
    """Return the printed ε, so that clients which print alike stay in their order."""
    spent = line["spent"]
    return math.inf if spent is None or spent["epsilon"] is None else float(rounded_up(spent["epsilon"]))


def _row(line: dict[str, Any]) -> str:
    if line["spent"] is None:
        return f"{line['client']:>6}  {'':>5}  {'':>7}  everything: it uploaded without noise"
    spent, granted = line["spent"], line["granted"]
    shown = f"ε ≤ {rounded_up(spent['epsilon'])}, δ = {spent['delta']:g}"
    limit = "–" if granted is None else f"ε = {granted['epsilon']:g}, δ = {granted['delta']:g}"
    how = {"replace": "replaced", "add-remove": "added or removed"}[line["neighbours"]]
    return (
        f"{line['client']:>6}  {line['runs']:>5}  {line['uploads']:>7}  {shown:<26}  {limit:<22}  {line['unit']}, {how}"
    )
