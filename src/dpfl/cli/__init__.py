"""The command line: parse, make one call, print. It decides nothing."""

import sys
import warnings
from typing import Annotated

import typer

from dpfl import __version__
from dpfl.errors import BadInput, BudgetRefused, Caution

app = typer.Typer(
    name="dpfl",
    help="Differentially private federated learning, with a certificate of the privacy really spent.",
    epilog="[bold]Start here[/bold]  dpfl run udp --data digits --epsilon 8 --delta 1e-3",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dpfl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 bad input, 3 the budget refused, 130 interrupted."""
    from dpfl.cli import account, certificate, ledger, report, run  # noqa: F401  (each adds its command to `app`)

    warnings.showwarning = _warn
    sys.exit(_exit_code())


def _warn(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    print(f"dpfl: {'caution' if category is Caution else 'warning'}: {message}", file=sys.stderr)


def _exit_code() -> int:
    try:
        return int(app(standalone_mode=False) or 0)
    except BudgetRefused as problem:
        return _say(str(problem), 3)
    except BadInput as problem:
        return _say(str(problem), 2)
    except Exception as problem:
        # A wrong option. Its class lives in click for older typers and inside typer for newer ones.
        if not hasattr(problem, "format_message"):
            raise
        # Called with nothing at all, typer has printed the help already and leaves no message.
        return _say(problem.format_message(), 2) if "NoArgs" not in type(problem).__name__ else 2


def _say(sentence: str, code: int) -> int:
    print(f"dpfl: {sentence}", file=sys.stderr)
    return code
