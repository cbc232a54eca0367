"""`dpfl account`: what noise costs, or buys, without running anything."""

import json
from typing import Annotated

import typer

from dpfl.cli import app

_EPILOG = """[bold]Examples[/bold]

dpfl account --noise-multiplier 1.1 --sampling-rate 0.015 --steps 422 --delta 1e-5

dpfl account --noise-multiplier 1.1 --sampling-rate 0.015 --epsilon 1.55 --delta 1e-5

dpfl account --steps 100 --epsilon 8 --delta 1e-5 --json

dpfl account --mechanism laplace --steps 10 --epsilon 1
"""


@app.command(epilog=_EPILOG, no_args_is_help=True)
def account(
    noise_multiplier: Annotated[
        str | None, typer.Option(metavar="Z", help="Noise (standard deviation or Laplace scale) over sensitivity.")
    ] = None,
    steps: Annotated[str | None, typer.Option(metavar="S", help="Releases, each noised afresh.")] = None,
    epsilon: Annotated[str | None, typer.Option(metavar="X", help="The ε of all steps together.")] = None,
    delta: Annotated[str | None, typer.Option(metavar="Y", help="Its δ; 0 when left out, for laplace only.")] = None,
    sampling_rate: Annotated[str, typer.Option(metavar="Q", help="Chance of a record to be in a step.")] = "1",
    mechanism: Annotated[str, typer.Option(metavar="gaussian|laplace", help="The noise.")] = "gaussian",
    sampling: Annotated[
        str,
        typer.Option(
            metavar="poisson|fixed",
            help="poisson: each record by its own coin (a record is added or removed). fixed: batches of fixed size (a"
            " record is replaced).",
        ),
    ] = "poisson",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Give all but one of noise multiplier, steps and epsilon; it finds the missing one.

    tight: exact, or a privacy-loss distribution. rdp: Rényi DP. paper: what the papers count (integer-order Rényi DP
    with ln(1/δ)/(α−1); a sum for Laplace noise). Every number is on the safe side.
    """
    from dpfl.options import literal
    from dpfl.privacy.solve import answer
    from dpfl.report.account import text

    given = {"noise_multiplier": noise_multiplier, "steps": steps, "epsilon": epsilon, "delta": delta,
             "sampling_rate": sampling_rate}  # fmt: skip
    numbers = {name: literal(value) for name, value in given.items() if value is not None}
    question, found = answer(mechanism=mechanism, sampling=sampling, **numbers)
    print(json.dumps({question: found}) if as_json else text(question, found))
