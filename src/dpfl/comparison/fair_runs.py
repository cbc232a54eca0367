"""Several systems on the same data at the same true ε, over several seeds.

Systems claim ε in different currencies. Here each is given the claim at which a record (or client: what its certificate
protects stands in the table) really loses no more than the target against the server, by the exact accounting of its
own releases. Where the promise is true already, that is the target itself; a paper's formula, or a promise against an
eavesdropper alone, is rehearsed (every order priced, nobody trained) until its true ε meets the target.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfl import run_folder
from dpfl.averages import standard_error
from dpfl.comparison.contender import Contender, as_contenders
from dpfl.config import Config
from dpfl.errors import BadInput, require_count
from dpfl.privacy.budget import Budget
from dpfl.privacy.certificate import finite
from dpfl.rehearsal import at_true_epsilon, is_true
from dpfl.report.comparison import save, text
from dpfl.settings import COMPARED
from dpfl.streams import Streams
from dpfl.systems import PrivateSystem, System
from dpfl.training import Run, federation_of, run

OnRun = Callable[[str, int], None]  # told before each run: whose, and with which seed


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
        spent = [run.certificate.observers["server"].epsilon for run in self.runs]
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
            "rounds": _mean([float(run.rounds) for run in self.runs]),
            "accuracy": _mean([run.accuracy for run in self.runs]),
            "loss": _mean([run.loss for run in self.runs]),
            "seconds": _mean([run.seconds for run in self.runs]),
            "runs": [run.to_dict() for run in self.runs],
        }


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
            "systems": [result.to_dict() for result in self.results],
            "out": None if self.out is None else str(self.out),
        }

    def __str__(self) -> str:
        return text(self.to_dict())


def compare(
    contenders: Sequence[Contender | System[Any] | str],
    *,
    seeds: int = 3,
    epsilon: float | None = None,
    delta: float | None = None,
    out: Path | None = None,
    on_run: OnRun | None = None,
) -> Comparison:
    """Run every contender with seeds 1 to `seeds` at the same true (ε, δ) against the server.

    contenders: what `dpfl.contenders` reads, or systems and names of systems, on the usual data.
    epsilon: the target; None for what all of them promise, where that is the same.
    delta: likewise; each system keeps its own where it is None.
    out: a new folder for the table, the plot and every run.
    """
    require_count("seeds", seeds, "use at least 2 for a standard error")
    compared = as_contenders(contenders)
    target = _common_epsilon(compared) if epsilon is None else Budget(epsilon, 0.5).epsilon
    if out is not None:
        run_folder.claim(out, force=False)
    results = []
    for contender in compared:
        tried = []
        for choice, config in contender.candidates():
            name = "-".join([contender.label, *(f"{key}={value}" for key, value in choice.items())])
            runs = []
            for seed in range(1, seeds + 1):
                if on_run is not None:
                    on_run(name, seed)
                fair = _fair(config, seed, target, delta)
                runs.append(run(fair, out=None if out is None else out / name / f"seed-{seed}"))
            tried.append(Result(contender.label, config, choice, tuple(runs)))
        results.append(min(tried, key=_public_loss))
    shared = {key: getattr(compared[0].config.settings, key) for key in COMPARED}
    whole = Comparison(target, delta, seeds, shared, tuple(results), out)
    if out is not None:
        save(whole.to_dict(), out)
    return whole


def _common_epsilon(contenders: Sequence[Contender]) -> float:
    systems = {contender.label: contender.config.system for contender in contenders}
    promised = {label: system.epsilon for label, system in systems.items() if isinstance(system, PrivateSystem)}
    kinds = set(promised.values())
    if len(kinds) > 1 or any(isinstance(value, tuple) for value in kinds):
        raise BadInput(
            f"epsilon must be the same for all that is compared, was {promised!r}; give one target with --epsilon"
        )
    return float(next(iter(promised.values()), math.inf))  # type: ignore[arg-type]


def _public_loss(result: Result) -> float:
    losses = [run.history[-1]["validation_loss"] for run in result.runs]
    return statistics.fmean(math.inf if loss is None else loss for loss in losses)


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
    return {"mean": statistics.fmean(present), "standard_error": standard_error(present)}
