"""`dpfl compare`: several systems at the same true ε, over several seeds."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import app, fresh_folder
from dpfl.cli.problem import ALL_SYSTEMS, AsJson, InNeighbours, NamesSystems, describes_a_problem

_EPILOG = """[bold]Examples[/bold]

dpfl compare udp ali-dpfl fedsgd-dpc --epsilon 3 --seeds 5

dpfl compare udp dp-fedavg --epsilon 8 --neighbours client

dpfl compare udp.toml crd.toml optimal.toml --data mnist --clients 50

A file may hold a table such as `search.rounds = [25, 50, 100]`: the value with the best loss on public data is shown.
"""


@app.command(cls=NamesSystems, epilog=_EPILOG, no_args_is_help=True)
@describes_a_problem(without=("seed", "epsilon", "delta"))
def compare(
    named: dict[str, Any],
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG.toml|SYSTEM…", help=f"What to compare: config files, or systems: {ALL_SYSTEMS}."
        ),
    ],
    epsilon: Annotated[
        float | None,
        typer.Option(metavar="X", help="True ε for all, against the server; what all promise if left out."),
    ] = None,
    delta: Annotated[float | None, typer.Option(metavar="Y", help="δ for all; each system's own if left out.")] = None,
    neighbours: InNeighbours = "replace",
    seeds: Annotated[int, typer.Option(metavar="S", help="Runs of each system, with seeds 1 to S.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder for all runs; a new one below runs/ when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare systems at the same true ε: a table of mean ± standard error over seeds, and a plot."""
    from dpfl import comparison

    whole = comparison.compare(
        comparison.contenders(names, named), seeds=seeds, epsilon=epsilon, delta=delta,
        neighbours=neighbours, out=out or fresh_folder("compare"),
        on_run=lambda label, seed: print(f"{label}, seed {seed} of {seeds}", file=sys.stderr),
    )  # fmt: skip
    print(json.dumps(whole.to_dict(), ensure_ascii=False) if as_json else f"{whole}\n\nall runs  {whole.out}")
