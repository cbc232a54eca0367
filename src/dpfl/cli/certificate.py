"""`dpfl certificate`: print what a finished run promised and really spent."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import app


@app.command(epilog="[bold]Example[/bold]  dpfl certificate runs/demo")
def certificate(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Print the privacy certificate of a run."""
    from dpfl import run_folder
    from dpfl.privacy.certificate import text

    content = run_folder.read_json(run, run_folder.CERTIFICATE)
    print(json.dumps(content, ensure_ascii=False) if as_json else text(content))
