"""`dpfl list`: what there is to choose from."""

import json
from typing import Annotated

import typer

from dpfl.cli import app
from dpfl.cli.problem import AsJson

_EPILOG = """[bold]Examples[/bold]

dpfl list systems

dpfl list data --json
"""


@app.command("list", epilog=_EPILOG, no_args_is_help=True)
def list_(
    what: Annotated[str, typer.Argument(metavar="systems|data|models|experiments", help="What to list.")],
    as_json: AsJson = False,
) -> None:
    """List the systems, data sets, models or experiments that dpfl knows, other packages' systems too."""
    from dpfl import catalogue
    from dpfl.errors import choose

    rows = choose("what", what, catalogue.LISTS)()
    print(json.dumps({what: rows}, ensure_ascii=False) if as_json else catalogue.text(rows))
