"""`dpfl run`: train, and print how good the model is and what it cost in privacy."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfl.cli import app, fresh_folder, note
from dpfl.cli.problem import ALL_SYSTEMS, AsJson, NamesSystems, base, describes_a_problem
from dpfl.errors import BadInput, BudgetRefused

if TYPE_CHECKING:
    from dpfl.config import Config
    from dpfl.planning import Plan
    from dpfl.training import RoundMetrics, Run

_EPILOG = """[bold]Examples[/bold]

dpfl run udp --data digits --clients 20 --epsilon 8 --delta 1e-3

dpfl run fedavg --partition dirichlet:0.5 --local-steps 5 --seed 7 --out runs/first

dpfl run runs/first/config.toml --out runs/again

dpfl run fedsgd-dpc --epsilon 3 --plan

dpfl run udp --data mnist --clients 50 --sizes 800 --model mlp --json

dpfl run fedsgd-dpc --sites hospitals/ --epsilon 1

Exit code 0 = done, 2 = bad input (nothing is written), 3 = the privacy budget refused.
"""
_PLANNING = 40.0  # seconds for a plan before a run; `dpfl plan` takes its time


@app.command(cls=NamesSystems, epilog=_EPILOG, no_args_is_help=True)
@describes_a_problem()
def run(
    named: dict[str, Any],
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG.toml|SYSTEM",
            help=f"A config file, or a system: {ALL_SYSTEMS}. `dpfl list systems` says what each does.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Run folder; a new one below runs/ when left out.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run that is in --out.")] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Choose rounds, local steps, cohort, learning rate, clip and averaging where not given."
        ),
    ] = False,
    method: Annotated[
        str | None, typer.Option(metavar="bound|pilot", help="How --plan chooses; see `dpfl plan`. \\[default: pilot]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model over many clients and certify the privacy that was really spent."""
    from dpfl import config, training

    parsed = config.parse(config.merged(base(what), named))
    if plan:
        parsed = config.Config(parsed.system, training.settled(parsed.settings))
    planned = _planned(parsed, named, method) if plan else None
    if planned is None and method is not None:
        raise BadInput(f"method must come with --plan, was {method!r} without it; add --plan, or leave it out")
    parsed = parsed if planned is None else config.Config(planned.system, parsed.settings)
    folder = out or fresh_folder(f"{parsed.system.name}-{parsed.settings.data}")
    try:
        with _Progress(parsed.system.rounds) as progress:
            finished = training.run(
                parsed, out=folder, force=force, on_round=progress.show,
                on_open=None if as_json else lambda session: print(f"clients train {session.clients.engine}\n"),
            )  # fmt: skip
    except BudgetRefused as refusal:
        kept = f" (the rounds before it are in {folder})" if folder.exists() else ""
        raise BudgetRefused(f"{refusal}{kept}") from None
    except KeyboardInterrupt:
        kept = f"its finished rounds are in {folder}" if folder.exists() else "nothing was written"
        print(f"dpfl: the run was interrupted; {kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    plain = finished.to_dict()
    if planned is not None:
        from dpfl.planning.output import save

        save(planned, parsed, folder)
        plain["plan"] = planned.to_dict()
    print(json.dumps(plain, ensure_ascii=False) if as_json else _summary(finished))


def _planned(parsed: "Config", named: dict[str, Any], method: str | None) -> "Plan":
    """Plan what was not given, and say on stderr what was chosen and why."""
    from dpfl.planning import PLANNED, Task, make
    from dpfl.planning.output import expected
    from dpfl.training import federation_of

    task = Task(parsed, federation_of(parsed.settings), frozenset(named) & set(PLANNED))
    found = make(task, method=method or "pilot", time_limit=_PLANNING, on_trial=note)
    chosen = ", ".join(f"{key} = {value}" for key, value in found.options.items() if value is not None)
    told = [f"planned: {chosen}", *(f"  - {sentence}" for sentence in found.why)]
    print("\n".join([*told, *([expected(found)] if found.expected is not None else [])]), file=sys.stderr)
    return found


class _Progress:
    """A live bar on stderr, so that stdout stays for the result; where nobody looks on, only its last state.

    When the run fails it leaves no trace: an error is one sentence, with nothing above it.
    """

    def __init__(self, rounds: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=Console(file=sys.stderr))
        self.task = self.bar.add_task("", total=rounds, note="starting")

    def __enter__(self) -> "_Progress":
        if self.bar.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, problem: type[BaseException] | None, *_: object) -> None:
        self.bar.live.transient = problem is not None
        if self.bar.console.is_terminal or problem is None:
            self.bar.start()  # does nothing where it has started already
            self.bar.stop()

    def show(self, metrics: "RoundMetrics") -> None:
        """Move the bar by one round."""
        note = "loss –" if metrics["validation_loss"] is None else f"loss {metrics['validation_loss']:.3f}"
        if metrics["validation_accuracy"] is not None:
            note += f"  accuracy {100 * metrics['validation_accuracy']:.1f} %"
        self.bar.update(self.task, completed=metrics["round"], note=note)


def _summary(finished: "Run") -> str:
    from dpfl.report.run import result
    from dpfl.report.sites import evaluation, text

    where = f"{text(finished.sites)}\n\n" if finished.sites else ""
    paid = "" if finished.evaluation is None else f"\n\n{evaluation(finished.evaluation.to_dict())}"
    return f"{result(finished.to_dict())}\n\n{where}{finished.certificate}{paid}\n\nrun folder  {finished.out}"
