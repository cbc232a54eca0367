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
    from dpfl.report.run import write

    page, curve = write(run)
    print(json.dumps({"report": str(page), "curve": str(curve)}) if as_json else f"report      {page}")
