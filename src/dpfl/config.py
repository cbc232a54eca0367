"""A run's config: one flat table of plain values, read from TOML and written back complete.

A key is either a setting (which data, how it is shared out, seed, device) or an option of the system. A key that
neither knows is refused. Where clients are sites, `[sites.NAME]` may give one of them a budget of its own. Writing is
done here because the standard library only reads TOML, and a flat table is easy.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dpfl.errors import BadInput, choose, suggestion
from dpfl.federation import names_of
from dpfl.options import deciding, option_names, read_toml
from dpfl.settings import DataSettings
from dpfl.settings import Settings as Settings
from dpfl.systems import SYSTEMS, System

_FILES = "files"  # in a table of sites: where they are; every other key is the name of one


@dataclass(frozen=True)
class Config:
    """A complete description of a run."""

    system: System[Any]
    settings: Settings

    def to_toml(self) -> str:
        """Write every key; reading the text gives this config back."""
        table = {"system": self.system.name} | asdict(self.system) | asdict(self.settings)
        return "".join(f"{key} = {_toml(value)}\n" for key, value in table.items() if value is not None)

    @property
    def hash(self) -> str:
        """Return a short fingerprint of everything but the seeds.

        Certificates show it to whoever sees them, and who knows all of a config but its seed would find that by trying.
        """
        seedless = replace(self, settings=replace(self.settings, seed=None, data_seed=None))
        return hashlib.sha256(seedless.to_toml().encode()).hexdigest()[:12]

    @property
    def simulated(self) -> str:
        """Return what names the noise of a simulation: the system, its options and the data, nothing of how it is run.

        Trainings that differ in any of these share a seed, its cohorts and its first model, but no noise: one would be
        subtracted from the other, and a comparison of both would count the same luck twice. Where noise is given, a
        budget only says when to stop, and the beginning of a training has its name: what it releases is the same.
        """
        course = self.system.course
        options = deciding(self.system if course is None else course[0])
        text = json.dumps([self.system.name, options, deciding(self.settings.of_data)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def merged(table: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with what was given besides, which counts more; sites that are given keep their own budgets."""
    whole = {**table, **given}
    if isinstance(own := table.get("sites"), Mapping) and "sites" in given:
        whole["sites"] = {**own, _FILES: given["sites"]}
    return whole


def parse(table: Mapping[str, Any]) -> Config:
    """Check a flat table of keys and make the config it describes."""
    options = dict(table)
    name = options.pop("system", None)
    if not isinstance(name, str):
        raise BadInput(f"system must be one of {', '.join(sorted(SYSTEMS))}, was {name!r}; name one")
    kind = choose("system", name, SYSTEMS)
    settings, own = (set(option_names(part)) for part in (Settings, kind))
    if isinstance(options.get("sites"), Mapping):
        options |= _of_sites(options.pop("sites"), options, kind)
    for key in options:
        if key == "search":
            raise BadInput(
                "search must be left out here: only `dpfl compare` tries several values; give one for each key"
            )
        if key not in settings | own:
            raise BadInput(
                f"{key} must be a setting or an option of {name}, but neither knows it; {name} takes"
                f" {', '.join(sorted(own))}, every run takes {', '.join(sorted(settings))}"
                f"{suggestion(key, settings | own)}"
            )
    return Config(
        kind(**{key: value for key, value in options.items() if key in own}),
        Settings(**{key: value for key, value in options.items() if key in settings}),
    )


def _of_sites(table: Mapping[str, Any], options: Mapping[str, Any], kind: type[System[Any]]) -> dict[str, Any]:
    """Return the options that a table of sites stands for: where they are, and one budget for each in their order."""
    files = table.get(_FILES)
    budgets = {name: own for name, own in table.items() if name != _FILES}
    found: dict[str, Any] = {} if files is None else {"sites": files}
    if not budgets:
        return found
    known = {**options, **found}
    names = names_of(DataSettings(**{key: known[key] for key in option_names(DataSettings) if key in known}))
    for name, own in budgets.items():
        if name not in names:
            raise BadInput(
                f"sites.{name} must be the name of a site, but there are {', '.join(names) or 'none with names'}"
                f"{suggestion(name, names) or '; correct it, or leave it out'}"
            )
        if not isinstance(own, Mapping) or not set(own) <= {"epsilon", "delta"}:
            raise BadInput(f"sites.{name} must be a table of epsilon, delta or both, was {own!r}; write epsilon = 1.0")
    usual = {**{option.name: option.default for option in fields(kind)}, **options}
    for key in ("epsilon", "delta"):
        if any(key in own for own in budgets.values()):
            common = usual.get(key)
            lacking = [name for name in names if key not in budgets.get(name, {})]
            if lacking and not isinstance(common, (int, float)):
                raise BadInput(
                    f"{key} must be one number for the sites that have none of their own ({', '.join(lacking)}), was"
                    f" {common!r}; give it, or one to each"
                )
            found[key] = [budgets.get(name, {}).get(key, common) for name in names]
    return found


def read(path: Path) -> dict[str, Any]:
    """Read a config file into a flat table, without judging its keys yet."""
    return read_toml("config", path)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
