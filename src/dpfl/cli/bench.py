"""`dpfl bench`: how long a round takes, and how long others take for it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import app, fresh_folder, note
from dpfl.errors import BadInput

_EPILOG = """[bold]Examples[/bold]

dpfl bench

dpfl bench W3 W4 --peers opacus --seconds 5

dpfl bench repetitions growth

W1 to W4 are one round each of an MLP, a CNN, DP-SGD on a CNN and a linear regression. [bold]repetitions[/bold] times
twenty trainings of W4 as one program, [bold]growth[/bold] times rounds of ever more clients and parameters, and
[bold]tricks[/bold] shows what each way to be fast is worth.
"""


@app.command(epilog=_EPILOG)
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[W1 W2 W3 W4 repetitions growth tricks]…", help="What to time.")
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="P,…", help="Of pfl, flower and opacus: which to time too, or none; all installed if left out."
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to train.")] = "cpu",
    seconds: Annotated[float, typer.Option(metavar="S", help="How long to time each contender.")] = 3.0,
    precision: Annotated[
        str, typer.Option(metavar="float32|tf32", help="tf32: products of ten bits of mantissa, on a GPU.")
    ] = "float32",
    reference: Annotated[bool, typer.Option(help="Time the reference client too, which is slow.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; a new one below runs/ if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Time one round of each workload: dpfl, the floor that arithmetic sets, a plain loop and other libraries."""
    from dpfl.bench.output import save, summary
    from dpfl.bench.suite import run

    if not seconds > 0:
        raise BadInput(f"seconds must be above 0, was {seconds:g}; try 3")
    wanted = None if peers is None else [] if peers == "none" else [name.strip() for name in peers.split(",")]
    results = run(
        names or [], peers=wanted, device=device, seconds=seconds, reference=reference, precision=precision,
        on_start=note,
    )  # fmt: skip
    folder = save(results, out or fresh_folder("bench"), device=device)
    print(json.dumps(results) if as_json else f"{summary(results)}\n\nresults  {folder}")
