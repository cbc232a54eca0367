"""Comparison: several systems on the same data at the same true ε, over several seeds.

Systems claim ε in different currencies. Here each is given the claim at which a record (or client: what its certificate
protects stands in the table) really loses no more than the target against the server, by the exact accounting of its
own releases. Where the promise is true already, that is the target itself; a paper's formula, or a promise against an
eavesdropper alone, is rehearsed (every order priced, nobody trained) until its true ε meets the target.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfl import config as configs
from dpfl import run_folder
from dpfl.config import Config
from dpfl.errors import BadInput, require_count
from dpfl.options import option_names
from dpfl.privacy.budget import Budget
from dpfl.privacy.certificate import finite, rounded_up
from dpfl.rehearsal import at_true_epsilon, is_true
from dpfl.report.comparison import draw
from dpfl.settings import COMPARED, Settings
from dpfl.streams import Streams
from dpfl.systems import SYSTEMS, PrivateSystem
from dpfl.training import Run, federation_of, run

OnRun = Callable[[str, int], None]  # told before each run: whose, and with which seed


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


@dataclass(frozen=True)
class Result:
    """What one contender reached: of several seeds, and of the best candidate where there was a search."""

    label: str
    config: Config
    searched: dict[str, Any]
    runs: tuple[Run, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        first = self.runs[0].certificate
        spent = [one.certificate.observers["server"].epsilon for one in self.runs]
        return {
            "label": self.label,
            "system": self.config.system.name,
            "calibration": first.calibration,
            "unit": first.unit,
            "neighbours": first.neighbours,
            "claimed": first.claimed,
            "true_epsilon": None if None in spent else max(value for value in spent if value is not None),
            "uncounted": list(first.uncounted),
            "searched": self.searched,
            "rounds": _mean([float(one.rounds) for one in self.runs]),
            "accuracy": _mean([one.accuracy for one in self.runs]),
            "loss": _mean([one.loss for one in self.runs]),
            "seconds": _mean([one.seconds for one in self.runs]),
            "runs": [one.to_dict() for one in self.runs],
        }


def contenders(names: Sequence[str], given: Mapping[str, Any]) -> list[Contender]:
    """Read config files and names of systems; `given` is set in every one that knows the key.

    A file may hold a table `[search]` of keys with several values: the best by the loss on public data is shown.
    """
    if not names:
        raise BadInput("at least one config or system must be named to compare, none was; name two or more")
    settings = set(option_names(Settings))
    known: set[str] = set()
    found = []
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
        found.append(Contender(label if times[label] == 1 else f"{label}-{times[label]}", parsed, search))
    for key in given:
        if key not in known:
            raise BadInput(f"{key} must be a setting or an option of a system that is compared, but none knows it")
    _require_shared(found)
    return found


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


def _require_shared(found: Sequence[Contender]) -> None:
    """Refuse to compare what was measured on different data."""
    first = found[0]
    for other in found[1:]:
        for key in COMPARED:
            one, another = (getattr(each.config.settings, key) for each in (first, other))
            if one != another:
                raise BadInput(
                    f"{key} must be the same in all that is compared, was {one!r} for {first.label} and {another!r} for"
                    f" {other.label}; set it for all with --set {key}=…"
                )


@dataclass(frozen=True)
class Comparison:
    """The results of all contenders, and what they share."""

    epsilon: float
    delta: float | None
    seeds: int
    settings: dict[str, Any]
    results: tuple[Result, ...]
    out: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return what `dpfl compare --json` prints."""
        return {
            "epsilon": finite(self.epsilon),
            "delta": self.delta,
            "seeds": self.seeds,
            "settings": self.settings,
            "systems": [one.to_dict() for one in self.results],
            "out": None if self.out is None else str(self.out),
        }

    def rows(self) -> list[list[str]]:
        """Return the table as text, the heading first."""
        return [_HEADING, *(_row(one.to_dict()) for one in self.results)]

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADING))]
        padded = (
            "   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )
        kinds = {row[1] for row in rows[1:]} - {_NOTHING}
        mixed = (
            "\n\nWhat rows protect differs: replacing a record is removing one and adding another; a client is more."
        )
        return "\n".join(padded) + (mixed if len(kinds) > 1 else "")


def compare(
    found: Sequence[Contender],
    *,
    seeds: int = 3,
    epsilon: float | None = None,
    delta: float | None = None,
    out: Path | None = None,
    on_run: OnRun | None = None,
) -> Comparison:
    """Run every contender with seeds 1 to `seeds` at the same true (ε, δ) against the server.

    epsilon: the target; None for what all of them promise, where that is the same.
    delta: likewise; each system keeps its own where it is None.
    out: a new folder for the table, the plot and every run.
    """
    require_count("seeds", seeds, "use at least 2 for a standard error")
    target = _common_epsilon(found) if epsilon is None else Budget(epsilon, 0.5).epsilon
    if out is not None:
        run_folder.claim(out, force=False)
    results = []
    for one in found:
        tried = []
        for choice, config in one.candidates():
            name = "-".join([one.label, *(f"{key}={value}" for key, value in choice.items())])
            runs = []
            for seed in range(1, seeds + 1):
                if on_run is not None:
                    on_run(name, seed)
                fair = _fair(config, seed, target, delta)
                runs.append(run(fair, out=None if out is None else out / name / f"seed-{seed}"))
            tried.append(Result(one.label, config, choice, tuple(runs)))
        results.append(min(tried, key=_public_loss))
    shared = {key: getattr(found[0].config.settings, key) for key in COMPARED}
    whole = Comparison(target, delta, seeds, shared, tuple(results), out)
    if out is not None:
        _save(whole, out)
    return whole


def _save(whole: Comparison, folder: Path) -> None:
    plain, (heading, *rows) = whole.to_dict(), whole.rows()
    run_folder.write_json(folder, "comparison.json", plain)
    lines = [heading, ["---"] * len(heading), *rows]
    markdown = "".join(f"| {' | '.join(row)} |\n" for row in lines)
    (folder / "comparison.md").write_text(markdown, encoding="utf-8")
    draw(plain["systems"], folder / "comparison.png")


def _common_epsilon(found: Sequence[Contender]) -> float:
    promised = {one.label: one.config.system.epsilon for one in found if isinstance(one.config.system, PrivateSystem)}
    kinds = set(promised.values())
    if len(kinds) > 1 or any(isinstance(value, tuple) for value in kinds):
        raise BadInput(
            f"epsilon must be the same for all that is compared, was {promised!r}; give one target with --epsilon"
        )
    return float(next(iter(promised.values()), math.inf))  # type: ignore[arg-type]


def _public_loss(result: Result) -> float:
    losses = [one.history[-1]["validation_loss"] for one in result.runs]
    return math.inf if None in losses else statistics.fmean(losses)


def _fair(config: Config, seed: int, epsilon: float, delta: float | None) -> Config:
    """Return the config with this seed, and with the claim at which its true ε is the target."""
    settings = replace(config.settings, seed=seed)
    if not isinstance(config.system, PrivateSystem):
        return Config(config.system, settings)
    changed: dict[str, Any] = {"epsilon": epsilon} | ({} if delta is None else {"delta": delta})
    system = replace(config.system, **changed)
    if is_true(system, [1] * settings.clients):
        return Config(system, settings)
    return Config(at_true_epsilon(system, federation_of(settings).sizes, epsilon, Streams(seed)), settings)


def _mean(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean and its standard error; none of a value that some run does not have, nor of a single run."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return {"mean": None, "standard_error": None}
    error = statistics.stdev(present) / math.sqrt(len(present)) if len(present) > 1 else None
    return {"mean": statistics.fmean(present), "standard_error": error}


_NOTHING = "nothing"
_HEADING = ["", "protects", "claimed ε", "true ε", "rounds", "accuracy in %", "loss"]


def _row(one: Mapping[str, Any]) -> list[str]:
    claimed, chosen = one["claimed"], ", ".join(f"{key} = {value}" for key, value in one["searched"].items())
    return [
        f"{one['label']} ({chosen})" if chosen else one["label"],
        f"{one['unit']}, {one['neighbours']}" if claimed else _NOTHING,
        f"{claimed['epsilon']:.4g}" if claimed else "–",
        rounded_up(one["true_epsilon"]),
        _with_error(one["rounds"], 1, 1),
        _with_error(one["accuracy"], 100, 1),
        _with_error(one["loss"], 1, 3),
    ]


def _with_error(value: Mapping[str, float | None], scale: float, digits: int) -> str:
    mean, error = value["mean"], value["standard_error"]
    if mean is None:
        return "–"
    shown = f"{scale * mean:.{digits}f}"
    return shown if error is None else f"{shown} ± {scale * error:.{digits}f}"
