"""`dpfl plan`: how a budget is best spent, by how much noise, and why."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dpfl.cli import app, fresh_folder, note, pair
from dpfl.cli.problem import AsJson, InNeighbours, base, describes_a_problem
from dpfl.errors import BadInput

_EPILOG = """[bold]Examples[/bold]

dpfl plan fedsgd-dpc --data digits --epsilon 3

dpfl plan udp --epsilon 8 --time-limit 60

dpfl plan fedsgd-dpc --sites hospitals/ --epsilon 1

dpfl plan dp-fedavg --total-steps 120 --constants constants.toml --constant G=2.5

dpfl plan udp --epsilon 8 --check --seeds 5

dpfl plan --recommend --clients 50 --epsilon 2 --max-rounds 100 --trusted nobody

What is given here (--rounds, --local-steps, --cohort, --lr, --clip, …) is kept; the rest is chosen.
"""


@app.command(epilog=_EPILOG, no_args_is_help=True)
@describes_a_problem()
def plan(
    named: dict[str, Any],
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG.toml|SYSTEM]",
            help="A config file, or a system: dp-fedavg udp nbafl ali-dpfl fedsgd-dpc; by --method pilot others that"
            " spend a budget too. None with --recommend.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="bound|pilot",
            help="By the paper's bound, or by trying with the real noise: on public records, or on made-up tasks of"
            r" this shape where none are public. \[default: pilot]",
        ),
    ] = None,
    form: Annotated[
        str, typer.Option(metavar="general|paper", help="The bound with the noise really added, or as printed.")
    ] = "general",
    estimator: Annotated[
        str,
        typer.Option(
            metavar="general|paper",
            help="fedsgd-dpc: estimate Y₀ and Γ from the public optimum, or as its authors do, from clients that train"
            " alone (public records in their place).",
        ),
    ] = "general",
    constants: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Constants of the bound; others are estimated on public data.")
    ] = None,
    constant: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="One constant, such as smoothness=4.2 or mu=0.1.")
    ] = None,
    max_rounds: Annotated[int, typer.Option(metavar="R", help="How many rounds are allowed.")] = 300,
    total_steps: Annotated[
        int | None, typer.Option(metavar="S", help="dp-fedavg: local steps in all, to be shared out among rounds.")
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="A pilot tries these values of another key too, such as lr=0.5,1,2."),
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help=r"For pilots. \[default: 120; 60 a system with --recommend]")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Simulate a grid around the plan and report its regret.")
    ] = False,
    seeds: Annotated[int, typer.Option(metavar="S", help="Simulated runs at each point of the check.")] = 3,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Plan all systems at the same true ε and rank them.")
    ] = False,
    trusted: Annotated[
        str, typer.Option(metavar="nobody|server", help="With --recommend: whom clients trust with their uploads.")
    ] = "nobody",
    neighbours: InNeighbours = "replace",
    out: Annotated[Path | None, typer.Option(help="Folder for the plan; a new one below runs/ when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose rounds, local steps, cohort, learning rate, clip and averaging for a budget, and say why."""
    from dpfl import config, planning, run_folder
    from dpfl.planning.output import as_plain, save, text
    from dpfl.training import federation_of, settled

    if recommend:
        ranking = planning.recommend(
            named, systems=() if what is None else (what,), trusted=trusted, neighbours=neighbours,
            method=method or "pilot", most_rounds=named.pop("rounds", max_rounds), time_limit=time_limit, on_trial=note,
        )  # fmt: skip
        print(json.dumps(ranking.to_dict(), ensure_ascii=False) if as_json else str(ranking))
        return
    if what is None:
        raise BadInput("a system must be named to plan for, none was; name one, or use --recommend")
    parsed = config.parse(config.merged(base(what), named))
    parsed = config.Config(parsed.system, settled(parsed.settings))
    folder = out or fresh_folder(f"plan-{parsed.system.name}-{parsed.settings.data}")
    run_folder.claim(folder, force=False)
    known = planning.read(constants) if constants is not None else planning.Constants()
    known = known.overridden(dict(map(pair, constant or [])))
    task = planning.Task(
        parsed, federation_of(parsed.settings), frozenset(named) & set(planning.PLANNED), max_rounds, total_steps,
        estimator=cast("planning.Estimator", estimator),
    )  # fmt: skip
    try:
        found = planning.make(
            task, method=method or "pilot", form=form, constants=known, search=dict(map(_values, search or [])),
            time_limit=120.0 if time_limit is None else time_limit, on_trial=note,
        )  # fmt: skip
        checked = None
        if check:
            checked = planning.check(task, found, seeds=seeds, neighbours=neighbours, on_run=note)
    except KeyboardInterrupt:
        print("dpfl: the plan was interrupted; nothing was written", file=sys.stderr)
        raise typer.Exit(130) from None
    save(found, parsed, folder, checked)
    if as_json:
        plain = as_plain(found, checked)
        print(json.dumps(plain | {"out": str(folder)}, ensure_ascii=False))
        return
    if sys.stderr.isatty():
        note("")
    print(text(found, task.clients, checked))
    print(f"\nplan folder  {folder}\nto run it    dpfl run {folder / run_folder.CONFIG}")


def _values(written: str) -> tuple[str, list[Any]]:
    """Read KEY=V1,V2,…"""
    from dpfl.options import literal

    key, equals, values = written.partition("=")
    if not equals or not values:
        raise BadInput(f"search must be KEY=V1,V2, was {written!r}; write for example --search lr=0.5,1,2")
    return key.strip(), [literal(value.strip()) for value in values.split(",")]
