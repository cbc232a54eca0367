"""`dpfl certificate`: compute a run's certificate anew from its ledger and compare."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import app

_CHECKED = """computed anew from the ledger{finished}; its chain of hashes is whole.
A folder put back or made anew, ledger and all, is not noticed here: compare the head with one kept elsewhere"""


@app.command(epilog="[bold]Example[/bold]  dpfl certificate runs/demo")
def certificate(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
    ledger: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the run was charged to a ledger that many share: check it against that as well."
        ),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Print only what came of it, not the certificate itself.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Compute the privacy certificate of a run anew from its ledger, compare it with the one it wrote, and print it."""
    from dpfl.privacy.certificate import recertify

    computed, finished = recertify(run, ledger)
    checked = _CHECKED.format(finished=", and as the run wrote it" if finished else "")
    if as_json:
        print(json.dumps(computed.to_dict(), ensure_ascii=False))
    elif brief:
        print("certificate", checked.replace("\n", "\n" + 12 * " "))
    else:
        print(f"{computed}\n\n{checked}")
    if not finished:
        print(
            "dpfl: caution: the run ended before it wrote a certificate; this is what it was charged", file=sys.stderr
        )
