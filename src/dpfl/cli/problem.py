"""The options that describe a problem, which `dpfl run` and `dpfl plan` share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import pair

Data = Annotated[
    str | None,
    typer.Option(metavar="D", help="digits (embedded), mnist, fashion-mnist, femnist, cifar10, adult or lending-club."),
]
PartitionRule = Annotated[
    str | None, typer.Option(metavar="P", help="iid, dirichlet:ALPHA, classes:C, sorted or writer.")
]
Clients = Annotated[str | None, typer.Option(metavar="N", help="How many clients hold the data.")]
Cohort = Annotated[str | None, typer.Option(metavar="K", help="Clients a round; all when left out.")]
Rounds = Annotated[str | None, typer.Option(metavar="R", help="Rounds of training.")]
LocalSteps = Annotated[str | None, typer.Option(metavar="E", help="Local steps of a client in a round.")]
Epsilon = Annotated[str | None, typer.Option(metavar="X", help="Each client's budget ε for the whole training.")]
Delta = Annotated[str | None, typer.Option(metavar="Y", help="Each client's budget δ.")]
Clip = Annotated[str | None, typer.Option(metavar="C", help="Clipping threshold.")]
LearningRate = Annotated[str | None, typer.Option(metavar="L", help="Learning rate.")]
Calibration = Annotated[
    str | None, typer.Option(metavar="tight|paper", help="tight: the promise is true. paper: the published formula.")
]
Device = Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Where to train.")]
Seed = Annotated[
    str | None, typer.Option(metavar="S", help="Repeats the run bit for bit, noise included: for simulations.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the config, such as model=mlp."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def given(options: dict[str, str | None], pairs: Sequence[str] | None) -> dict[str, Any]:
    """Return the keys that were given on the command line, `--set` last."""
    from dpfl.options import literal

    named = {key: literal(value) for key, value in options.items() if value is not None}
    return named | dict(map(pair, pairs or []))


def base(what: str) -> dict[str, Any]:
    """Read a config file, or take the name of a system."""
    from dpfl import config

    return config.read(Path(what)) if what.endswith(".toml") else {"system": what}
