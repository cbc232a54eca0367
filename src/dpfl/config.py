"""A run's config: one flat table of plain values, read from TOML and written back complete.

A key is either a setting (which data, how it is shared out, seed, device) or an option of the system. A key that
neither knows is refused. Writing is done here because the standard library only reads TOML, and a flat table is easy.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpfl.errors import BadInput, choose, suggestion
from dpfl.options import deciding, option_names, read_toml
from dpfl.settings import Settings as Settings
from dpfl.systems import SYSTEMS, System


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


def parse(table: Mapping[str, Any]) -> Config:
    """Check a flat table of keys and make the config it describes."""
    options = dict(table)
    name = options.pop("system", None)
    if not isinstance(name, str):
        raise BadInput(f"system must be one of {', '.join(sorted(SYSTEMS))}, was {name!r}; name one")
    kind = choose("system", name, SYSTEMS)
    settings, own = (set(option_names(part)) for part in (Settings, kind))
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


def read(path: Path) -> dict[str, Any]:
    """Read a config file into a flat table, without judging its keys yet."""
    return read_toml("config", path)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
