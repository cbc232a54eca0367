"""Several systems on the same data at the same true ε in one currency, over several seeds.

Systems claim ε for different neighbours, against different observers, by different formulas. Here each is given the
claim at which a record (replaced, or added or removed: the same for all; or a client's whole data) really loses no more
than the target against the server, by the exact accounting of its own orders. Where the promise is that already, it is
the target itself; else it is rehearsed (every order priced, nobody trained) until its true ε meets the target. What has
no price in that currency is trained at the target as its own claim, and stands apart.

All of it runs on seeds: it is a simulation, in which nobody's records are protected. What the same trainings would cost
the people whose records they see is added up all the same, those of a search too.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl import run_folder
from dpfl.averages import standard_error
from dpfl.comparison import rows
from dpfl.comparison.contender import Contender, as_contenders
from dpfl.config import Config
from dpfl.errors import BadInput, require_count
from dpfl.privacy.budget import Budget
from dpfl.privacy.certificate import finite
from dpfl.privacy.currency import CommonNeighbours, Spendings, Unpriced, bill, common
from dpfl.rehearsal import Rehearsal, at_true_epsilon
from dpfl.report import frames, latex, notebook
from dpfl.report.comparison import parts, save, text
from dpfl.settings import COMPARED
from dpfl.streams import Streams
from dpfl.systems import PrivateSystem, System
from dpfl.training import Run, federation_of, run

if TYPE_CHECKING:
    from pandas import DataFrame

OnRun = Callable[[str, int], None]  # told before each run: whose, and with which seed

_MORE = 1 + 1e-3  # how much more than it was rehearsed to spend a training may be certified for, by rounding


@dataclass(frozen=True)
class FairRun:
    """One training, and its price in the currency of the comparison: for a training that spends all it may."""

    run: Run
    epsilon: float | None  # None where it has none
    spent: Spendings | None  # what each client let out, as far as that can be added up
    why: str | None  # it has no price


@dataclass(frozen=True)
class Result:
    """What one contender reached: of several seeds, and of the best candidate where there was a search."""

    label: str
    config: Config
    searched: dict[str, Any]
    neighbours: CommonNeighbours
    fair: tuple[FairRun, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return the trainings themselves."""
        return tuple(one.run for one in self.fair)

    @property
    def true_epsilon(self) -> float | None:
        """Return the ε that all the trainings keep, each by itself; None where one has no price."""
        priced = [one.epsilon for one in self.fair if one.epsilon is not None]
        return max(priced) if len(priced) == len(self.fair) else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        first = self.runs[0].certificate
        own = [run.certificate.observers["server"].epsilon for run in self.runs]
        promise = {
            "unit": first.unit, "neighbours": first.neighbours, "epsilon": first.claimed and first.claimed["epsilon"],
            "delta": first.claimed and first.claimed["delta"],
            "true_epsilon": None if None in own else max(value for value in own if value is not None),
        }  # fmt: skip
        true = self.true_epsilon
        return {
            "label": self.label,
            "system": self.config.system.name,
            "calibration": first.calibration,
            "neighbours": None if true is None else self.neighbours,
            "true_epsilon": true,
            "together": None,  # these are simulations
            "apart": next((one.why for one in self.fair if one.why is not None), None),
            "claimed": first.claimed,
            "promise": None if first.claimed is None else promise,
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
    neighbours: CommonNeighbours
    seeds: int
    settings: dict[str, Any]
    results: tuple[Result, ...]
    if_real: dict[str, Any]  # what all trainings together, those of a search too, would cost the people they see
    out: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return what `dpfl compare --json` prints."""
        return {
            "epsilon": finite(self.epsilon),
            "delta": self.delta,
            "neighbours": self.neighbours,
            "seeds": self.seeds,
            "together": None,  # nobody's records were protected: noise that follows from a seed can be subtracted
            "if_real": self.if_real,
            "settings": self.settings,
            "systems": [result.to_dict() for result in self.results],
            "out": None if self.out is None else str(self.out),
        }

    def to_frame(self) -> "DataFrame":
        """Return a pandas frame with a row for each training."""
        return frames.frame(rows.trainings(self.results))

    def summary_frame(self) -> "DataFrame":
        """Return a pandas frame with a row for each system: means over the seeds, and their standard errors."""
        return frames.frame(rows.summary(self.results))

    def history_frame(self) -> "DataFrame":
        """Return a pandas frame with a row for each round of each training."""
        return frames.frame(rows.histories(self.results))

    def to_csv(self, path: str | Path) -> None:
        """Write a row for each training as CSV."""
        frames.write(rows.trainings(self.results), path)

    def to_latex(self) -> str:
        """Return the table in LaTeX, for the package booktabs."""
        return latex.table(self.to_dict())

    def __str__(self) -> str:
        return text(self.to_dict())

    def _repr_html_(self) -> str:
        return notebook.page("Comparison", *parts(self.to_dict()))


def compare(
    contenders: Sequence[Contender | System[Any] | str],
    *,
    seeds: int = 3,
    epsilon: float | None = None,
    delta: float | None = None,
    neighbours: str = "replace",
    out: Path | None = None,
    on_run: OnRun | None = None,
) -> Comparison:
    """Run every contender with seeds 1 to `seeds` at the same true (ε, δ) against the server, in one currency.

    contenders: what `dpfl.contenders` reads, or systems and names of systems, on the usual data.
    epsilon: the target; None for what all of them promise, where that is the same.
    delta: likewise; each system keeps its own where it is None.
    neighbours: what ε is for: a record replaced ("replace"), or added or removed ("add-remove"), or all records of a
        client replaced ("client").
    out: a new folder for the table (in several formats), the plot and every run.
    """
    require_count("seeds", seeds, "use at least 2 for a standard error")
    currency = common(neighbours)
    compared = as_contenders(contenders)
    target = _common_epsilon(compared) if epsilon is None else Budget(epsilon, 0.5).epsilon
    if out is not None:
        run_folder.claim(out, force=False)
    results, trained = [], []
    for contender in compared:
        tried = []
        for choice, config in contender.candidates():
            name = "-".join([contender.label, *(f"{key}={value}" for key, value in choice.items())])
            fair = []
            for seed in range(1, seeds + 1):
                if on_run is not None:
                    on_run(name, seed)
                folder = None if out is None else out / name / f"seed-{seed}"
                fair.append(_fair_run(config, seed, target, delta, currency, folder))
            tried.append(Result(contender.label, config, choice, currency, tuple(fair)))
            trained += fair
        results.append(min(tried, key=_public_loss))
    shared = {key: getattr(compared[0].config.settings, key) for key in COMPARED}
    whole = Comparison(target, delta, currency, seeds, shared, tuple(results), _if_real(trained), out)
    if out is not None:
        save(whole.to_dict(), out)
        whole.to_csv(out / "comparison.csv")
        (out / "comparison.tex").write_text(whole.to_latex(), encoding="utf-8")
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


def _fair_run(
    config: Config, seed: int, epsilon: float, delta: float | None, neighbours: CommonNeighbours, out: Path | None
) -> FairRun:
    """Train with this seed and with the claim at which the true ε is the target, in this currency."""
    settings, system = replace(config.settings, seed=seed), config.system
    if not isinstance(system, PrivateSystem):
        return FairRun(run(Config(system, settings), out=out), None, None, "it promises nothing")
    changed: dict[str, Any] = {"epsilon": epsilon} | ({} if delta is None else {"delta": delta})
    claiming, sizes, streams = replace(system, **changed), federation_of(settings).sizes, Streams(seed)
    try:
        fair = at_true_epsilon(claiming, sizes, epsilon, streams, neighbours=neighbours)
        rehearsal = Rehearsal(fair, sizes, streams)
        true = rehearsal.price(neighbours)
    except Unpriced as refusal:
        return FairRun(run(Config(claiming, settings), out=out), None, None, str(refusal))
    done = run(Config(fair, settings), out=out)
    rehearsed, certified = (one.observers["server"].epsilon for one in (rehearsal.certificate, done.certificate))
    if rehearsed is None or certified is None or certified > rehearsed * _MORE:
        return FairRun(done, None, None, "it spent more than it was rehearsed to")
    return FairRun(done, true, _spent(rehearsal, neighbours), None)


def _spent(rehearsal: Rehearsal, neighbours: CommonNeighbours) -> Spendings | None:
    try:
        return rehearsal.spendings(neighbours)
    except Unpriced:  # a filter holds it, and keeps no sum that others could be added to
        return None


def _if_real(trained: Sequence[FairRun]) -> dict[str, Any]:
    """Add up what all of it would cost at the least δ of any."""
    priced = [one for one in trained if one.spent is not None]
    delta = min((line.delta for one in priced for line in one.run.certificate.spending), default=None)
    return bill([one.spent for one in trained], delta)


def _mean(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean and its standard error; none of a value that some run does not have, nor of a single run."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return {"mean": None, "standard_error": None}
    return {"mean": statistics.fmean(present), "standard_error": standard_error(present)}
