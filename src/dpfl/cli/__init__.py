"""The command line: parse, make one call, print. It decides nothing."""

import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

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
    pretty_exceptions_show_locals=False,  # which hold records; older typers print them where nothing is said
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


def pair(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE."""
    from dpfl.options import literal

    key, equals, value = text.partition("=")
    if not equals:
        raise BadInput(f"--set must be KEY=VALUE, was {text!r}; write for example --set model=mlp")
    return key.strip(), literal(value.strip())


def note(text: str) -> None:
    """Show on stderr what is being done, on one line that the next note replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr)


def fresh_folder(stem: str) -> Path:
    """Name a folder below runs/ that does not exist yet."""
    name = f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs", name if again == 1 else f"{name}-{again}") for again in range(1, 1000))
    return next(folder for folder in candidates if not folder.exists())


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 bad input, 3 the budget refused, 130 interrupted."""
    from dpfl.cli import account, bench, certificate, compare, ledger, list, plan, report, reproduce, run, schema  # noqa: F401  (each adds its command to `app`)

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
