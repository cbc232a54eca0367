"""Who is compared: config files and names of systems, on the same data, with the values that are to be searched."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfl import config as configs
from dpfl.config import Config
from dpfl.errors import BadInput, suggestion
from dpfl.options import option_names
from dpfl.settings import COMPARED, Settings
from dpfl.systems import SYSTEMS, System


@dataclass(frozen=True)
class Contender:
    """One line of a comparison: a config, and the keys for which the best of several values is to be found."""

    label: str
    config: Config
    search: Mapping[str, Sequence[Any]]

    def candidates(self) -> list[tuple[dict[str, Any], Config]]:
        """Return every combination of the values to be searched, with its config."""
        choices = [dict(zip(self.search, values, strict=True)) for values in itertools.product(*self.search.values())]
        return [(choice, replace(self.config, system=replace(self.config.system, **choice))) for choice in choices]


def contenders(names: Sequence[str], given: Mapping[str, Any]) -> list[Contender]:
    """Read config files and names of systems; `given` is set in every one that knows the key.

    A file may hold a table `[search]` of keys with several values: the best by the loss on public data is shown.
    """
    if not names:
        raise BadInput("at least one config or system must be named to compare, none was; name two or more")
    settings = set(option_names(Settings))
    known: set[str] = set()
    read = []
    times: Counter[str] = Counter()
    for name in names:
        from_file = name.endswith(".toml")
        table: dict[str, Any] = configs.read(Path(name)) if from_file else {"system": name}
        label, search = Path(name).stem if from_file else name, table.pop("search", {})
        kind = SYSTEMS.get(str(table.get("system")))
        own = set(option_names(kind)) if kind else set()
        known |= settings | own
        parsed = configs.parse(table | {key: value for key, value in given.items() if key in settings | own})
        _require_search(label, search, parsed)
        times[label] += 1
        read.append(Contender(label if times[label] == 1 else f"{label}-{times[label]}", parsed, search))
    for key in given:
        if key not in known:
            way_out = suggestion(key, known) or "; leave it out"
            raise BadInput(
                f"{key} must be a setting or an option of a system that is compared, which none knows{way_out}"
            )
    _require_shared(read)
    return read


def as_contenders(given: Sequence[Contender | System[Any] | str]) -> list[Contender]:
    """Take contenders as they are, systems on the usual data, and names as the command line does."""
    made: list[Contender] = []
    for entry in given:
        if isinstance(entry, str):
            made += contenders([entry], {})
        elif isinstance(entry, System):
            made.append(Contender(entry.name, Config(entry, Settings()), {}))
        else:
            made.append(entry)
    if not made:
        raise BadInput("at least one config or system must be named to compare, none was; name two or more")
    _require_shared(made)
    return made


def _require_search(label: str, search: Any, config: Config) -> None:
    options = option_names(type(config.system))
    for key, values in search.items() if isinstance(search, dict) else [("search", search)]:
        if key not in options:
            raise BadInput(
                f"search must name options of {config.system.name} with a list of values each, but {label!r} has"
                f" {key!r}; it takes {', '.join(sorted(options))}"
            )
        if not isinstance(values, list) or not values:
            raise BadInput(f"search.{key} must be a list of values to try, was {values!r}; write [25, 50, 100]")
    if search and config.settings.validation_share == 0:
        raise BadInput("validation_share must be above 0 for a search, which public data decides, was 0; use 0.1")


def _require_shared(contenders: Sequence[Contender]) -> None:
    """Refuse to compare what was measured on different data."""
    first, *others = contenders
    for other in others:
        for key in COMPARED:
            here, there = (getattr(contender.config.settings, key) for contender in (first, other))
            if here != there:
                raise BadInput(
                    f"{key} must be the same in all that is compared, was {here!r} for {first.label} and {there!r} for"
                    f" {other.label}; set it for all with --{key.replace('_', '-')}"
                )
