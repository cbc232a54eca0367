"""The keys of finished cells: a fingerprint of everything that a result depends on, and of nothing else.

A key outlives releases. It knows nothing of the package's version, of the order of fields, or of where a training ran.
An option that a later release adds, declared with `field(default=…, metadata={"added": "0.2"})`, is left out while it
has its default: that default must mean "as before there was this option", and must never change. Where another value
means that, the metadata name it as `before`.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dpfl.config import Config
from dpfl.options import deciding

VERSION = 2  # of a record and its key; records of version 1 name none

_ANYWHERE = {"backend": "stacked", "device": "cpu"}  # settings that do not decide what comes out

# Version 1 hashed the config as text, its keys in the order of the fields that release 0.1 had.
_EVERY = "rounds lr cohort scheduling"
_PRIVATE = f"{_EVERY} clip epsilon delta calibration"
_QUERIED = f"{_PRIVATE} mechanism norm strong_convexity smoothness"  # and lr_gamma, which no kept cell had
_OPTIONS_OF_0_1 = {
    "fedavg": f"{_EVERY} local_steps sampling_rate",
    "fedsgd": _EVERY,
    "fedprox": f"{_EVERY} local_steps proximal sampling_rate",
    "dp-fedavg": f"{_QUERIED} local_steps",
    "udp": f"{_PRIVATE} discount least_gain",
    "nbafl": f"{_PRIVATE} clipping local_steps proximal exposures",
    "ali-dpfl": f"{_PRIVATE} local_steps sampling_rate noise_multiplier heterogeneity",
    "fedsgd-dpc": f"{_QUERIED} sampling_rate",
    "dpsgd-fedavg": f"{_PRIVATE} local_steps sampling_rate noise_multiplier server_momentum averaged",
    "pe-dpfl": f"{_PRIVATE} local_steps proximal",
    "adap-dpfl": f"{_PRIVATE} local_steps clip_factor sampling_rate noise_decay patience",
    "lei": f"{_PRIVATE} noise_fall",
}
_SETTINGS_OF_0_1 = (
    "data clients partition sizes share min_records validation_share test_share model evaluate_every backend device"
    " precision seed data_seed ledger"
)
_ASK_OF_0_1 = "number form constants max_rounds"


def key(config: Config, how: Mapping[str, Any]) -> str:
    """Return the fingerprint of a config and of how it is carried out: how often, from which seed on, and so on."""
    settings = {name: value for name, value in deciding(config.settings).items() if name not in {*_ANYWHERE, "draws"}}
    usual = "cohort" if config.settings.backend == "stacked" else "client"
    if (config.settings.draws or usual) != "cohort":
        settings["draws"] = "client"
    parts = {"version": VERSION, "system": config.system.name, "options": deciding(config.system),
             "settings": settings, **how}  # fmt: skip
    return _short_hash(json.dumps(parts, sort_keys=True))


def key_of_0_1(config: Config, how: Mapping[str, Any]) -> str | None:
    """Return the key that release 0.1 gave the same cell, or None where it knew no such thing."""
    system, settings = config.system, config.settings
    options = _OPTIONS_OF_0_1.get(system.name, "").split()
    if not deciding(system).keys() <= set(options) or not deciding(settings).keys() <= set(_SETTINGS_OF_0_1.split()):
        return None
    table = {"system": system.name} | {name: getattr(system, name) for name in options}
    table |= {name: getattr(settings, name) for name in _SETTINGS_OF_0_1.split()} | _ANYWHERE
    text = "".join(f"{name} = {_toml(value)}\n" for name, value in table.items() if value is not None)
    rest = [how[name] for name in ("repetitions", "seed", "fresh_data", "evaluate_every")]
    return _short_hash(json.dumps(["0.1.0", text, *rest, _ask_of_0_1(how["ask"])]))


def _ask_of_0_1(ask: Mapping[str, Any] | None) -> str:
    return "None" if ask is None else f"Ask({', '.join(f'{name}={ask[name]!r}' for name in _ASK_OF_0_1.split())})"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
