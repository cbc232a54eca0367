"""`dpfl report`: a page and a plot for a finished run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import app


@app.command(epilog="[bold]Example[/bold]  dpfl report runs/demo")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Write report.html and curve.png into the run's folder: the training curve, the certificate, the config."""
    from dpfl import run_folder
    from dpfl.privacy.certificate import recertify
    from dpfl.report.run import write

    if run_folder.ledger_of(run)[0].exists():
        computed, _ = recertify(run)  # one that was edited is refused, as by `dpfl certificate`
        certificate, checked = computed.to_dict(), "Computed anew from the ledger."
    else:
        certificate = run_folder.read_json(run, run_folder.CERTIFICATE)
        checked = "Not checked: the ledger that the run was charged to is not here."
    page, curve = write(run, certificate, checked)
    print(json.dumps({"report": str(page), "curve": str(curve)}) if as_json else f"report      {page}")
