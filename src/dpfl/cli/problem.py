"""The options that describe a problem, which `dpfl run`, `dpfl plan` and `dpfl compare` share.

Every setting is one, and the commonest options of systems; all others are set by `--set`.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand

from dpfl.cli import pair
from dpfl.options import literal
from dpfl.settings import DataSettings, Settings, TrainSettings

OF_SYSTEMS = {
    "rounds": ("R", "Rounds of training."),
    "local_steps": ("E", "Local steps of a client in a round."),
    "cohort": ("K", "Clients a round; all if left out."),
    "lr": ("L", "Learning rate."),
    "clip": ("C|median", "Clipping threshold; with udp and lei it can follow the median of what is clipped."),
    "epsilon": ("X", "Each client's budget ε for the whole training."),
    "delta": ("Y", "Each client's budget δ."),
    "calibration": ("tight|paper", "tight: the promise is true. paper: the published formula."),
}

ALL_SYSTEMS = "ALL_SYSTEMS"  # stands in a help for their names
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
InNeighbours = Annotated[
    str,
    typer.Option(
        metavar="replace|add-remove|client",
        help="What the true ε of all is for: a record replaced, or added or removed, or all of a client replaced.",
    ),
]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the config, such as discount=0.9.")
]
_LISTS = {"sites"}  # options that may be given again and again
_WORDS = {name for name, hint in get_type_hints(Settings).items() if hint in (str, str | None)}


def describes_a_problem(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a problem; what was given reaches it as `named`, by the keys of a config.

    without: options that the command does not take, or has in a sense of its own.
    """

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: option for name, option in _options().items() if name not in without}
        own = dict(inspect.signature(command).parameters)
        del own["named"]

        @functools.wraps(command)
        def call(**given: Any) -> None:
            named = {name: _value(name, given.pop(name)) for name in options if given[name] not in (None, [])}
            pairs = dict(map(pair, given.pop("set_") or []))
            command(named=named | pairs, **{name: given[name] for name in own})

        offered = {name: _parameter(name, annotation) for name, annotation in {**options, "set_": _Set}.items()}
        shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (own | offered).values()]
        vars(call)["__signature__"] = inspect.Signature(shown)
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return call

    return extend


def _options() -> dict[str, Any]:
    panels = {"The system": OF_SYSTEMS, "The data": _described(DataSettings), "The training": _described(TrainSettings)}
    return {
        name: Annotated[
            list[str] | None if name in _LISTS else str | None,
            typer.Option(metavar=metavar, help=text, rich_help_panel=panel),
        ]
        for panel, options in panels.items()
        for name, (metavar, text) in options.items()
    }


def _described(kind: type[DataSettings] | type[TrainSettings]) -> dict[str, tuple[str, str]]:
    described = {}
    for setting in fields(kind):
        default = "" if setting.default is None else rf" \[default: {setting.default}]"  # \[ is no markup
        described[setting.name] = (setting.metadata["metavar"], setting.metadata["help"] + default)
    return described


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _value(name: str, text: str | list[str]) -> Any:
    return text if name in _WORDS or isinstance(text, list) else literal(text)


class NamesSystems(TyperCommand):
    """A command whose help names every system, other packages' too; they are looked up when it is printed."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        from dpfl.systems import SYSTEMS

        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.help is not None:
                parameter.help = parameter.help.replace(ALL_SYSTEMS, " ".join(SYSTEMS))
        super().format_help(ctx, formatter)


def base(what: str) -> dict[str, Any]:
    """Read a config file, or take the name of a system."""
    from dpfl import config

    return config.read(Path(what)) if what.endswith(".toml") else {"system": what}
