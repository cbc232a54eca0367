"""`dpfl compare`: several systems at the same true ε, over several seeds."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import app, fresh_folder, pair

_EPILOG = """[bold]Examples[/bold]

dpfl compare udp ali-dpfl fedsgd-dpc --epsilon 3 --seeds 5

dpfl compare udp.toml crd.toml optimal.toml --data mnist --set clients=50

A file may hold a table such as `search.rounds = [25, 50, 100]`: the value with the best loss on public data is shown.
"""


@app.command(epilog=_EPILOG, no_args_is_help=True)
def compare(
    names: Annotated[list[str], typer.Argument(metavar="CONFIG.toml|SYSTEM…", help="What to compare.")],
    epsilon: Annotated[
        float | None,
        typer.Option(metavar="X", help="True ε for all, against the server; what all promise if left out."),
    ] = None,
    delta: Annotated[float | None, typer.Option(metavar="Y", help="δ for all; each system's own if left out.")] = None,
    seeds: Annotated[int, typer.Option(metavar="S", help="Runs of each system, with seeds 1 to S.")] = 3,
    data: Annotated[str | None, typer.Option(metavar="D", help="Data set for all.")] = None,
    partition: Annotated[str | None, typer.Option(metavar="P", help="How it is shared out.")] = None,
    clients: Annotated[str | None, typer.Option(metavar="N", help="How many clients hold the data.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of the config, for all that know it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all runs; a new one below runs/ when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Compare systems at the same true ε: a table of mean ± standard error over seeds, and a plot."""
    from dpfl import comparison
    from dpfl.options import literal

    given = {"data": data, "partition": partition, "clients": clients}
    fixed = {key: literal(value) for key, value in given.items() if value is not None} | dict(map(pair, set_ or []))
    whole = comparison.compare(
        comparison.contenders(names, fixed), seeds=seeds, epsilon=epsilon, delta=delta,
        out=out or fresh_folder("compare"),
        on_run=lambda label, seed: print(f"{label}, seed {seed} of {seeds}", file=sys.stderr),
    )  # fmt: skip
    print(json.dumps(whole.to_dict(), ensure_ascii=False) if as_json else f"{whole}\n\nall runs  {whole.out}")
