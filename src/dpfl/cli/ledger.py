"""`dpfl ledger`: what every client has spent, ever, and what it may; and whether the file is as it was written."""

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import app
from dpfl.errors import BadInput

_EPILOG = """[bold]Examples[/bold]

dpfl ledger runs/demo

dpfl ledger hospitals.sqlite --new --grant 10 --delta 1e-5

dpfl run udp --epsilon 3 --delta 1e-5 --ledger hospitals.sqlite

dpfl ledger hospitals.sqlite --head 694475b3b0d074e3831c31327dba141c
"""


@app.command(epilog=_EPILOG, no_args_is_help=True)
def ledger(
    where: Annotated[Path, typer.Argument(metavar="RUN_OR_FILE", help="The folder of a run, or a ledger file.")],
    new: Annotated[bool, typer.Option("--new", help="Make the file.")] = False,
    grant: Annotated[
        str | None, typer.Option(metavar="X", help="Limit what a client may spend in all runs together to this ε.")
    ] = None,
    delta: Annotated[str, typer.Option(metavar="Y", help="The δ of the grant.")] = "1e-5",
    client: Annotated[
        str | None,
        typer.Option(metavar="I", help="Grant it to this client only: its number, or its name where a run knew it."),
    ] = None,
    unit: Annotated[str, typer.Option(metavar="record|client", help="What the grant protects.")] = "record",
    neighbours: Annotated[str, typer.Option(metavar="replace|add-remove", help="How its data may differ.")] = "replace",
    currency: Annotated[
        str,
        typer.Option(
            metavar="plain|renyi", help="plain: noise on all records, counted exactly. renyi: sampled batches as well."
        ),
    ] = "plain",
    new_people: Annotated[
        bool,
        typer.Option(
            "--new-people",
            help="Say, as the owner, that from now on clients hold other people's records: nothing is spent yet.",
        ),
    ] = False,
    head: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="Refuse the file unless it holds this head, as a certificate names it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Print what every client has spent over all runs of a ledger; with --grant, limit it first.

    The file is checked against its own chain of hashes. One that was put back to an earlier state, or written anew as a
    whole, is noticed only by whoever kept a head: on a certificate, or from an earlier look.
    """
    from dpfl import run_folder
    from dpfl.options import literal
    from dpfl.privacy.books import Books, Grant
    from dpfl.privacy.budget import Budget
    from dpfl.privacy.chain import SHOWN
    from dpfl.privacy.statement import state
    from dpfl.report.statement import text

    if new and where.exists():
        raise BadInput(f"ledger must not exist yet with --new, but {str(where)!r} does; leave --new out")
    path = run_folder.ledger_of(where)[0] if where.is_dir() else where
    budget = None if grant is None else Budget(literal(grant), literal(delta))
    if head is not None and (len(head) < SHOWN or not set(head.lower()) <= set("0123456789abcdef")):
        raise BadInput(f"head must be at least {SHOWN} digits of 0-9 and a-f, was {head!r}; copy it from a certificate")
    with closing(Books(path, create=new)) as books:
        books.require_whole(*([] if head is None else [head]))
        if new_people:
            books.add_people()
        if budget is not None:
            names = books.names()
            whom = None if client is None else names.index(client) if client in names else literal(client)
            books.grant(Grant(whom, budget, unit, neighbours, currency))  # type: ignore[arg-type]
        statement = state(books)
    print(json.dumps(statement, ensure_ascii=False) if as_json else text(statement))
