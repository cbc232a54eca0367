"""One cell of an experiment: a config with all its repetitions, carried out; or a question to a planner or a formula.

A system that orders the same in every repetition is trained as one program (`repeat`). One that watches its training,
or repetitions that share the data out anew, are trained one after the other. Cells that differ only in when somebody
looks are one training, and so are those whose budget only says when to stop, since their noise is given: one training
then ends for each of them where it would alone.
"""

import gc
import math
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import torch

from dpfl.config import Config, Settings
from dpfl.errors import BadInput, Caution
from dpfl.experiments import keys
from dpfl.experiments.computed import COMPUTED, compute
from dpfl.experiments.portraits import portrayed
from dpfl.federation import Federation
from dpfl.planning import NUMBERS, Constants, Task, make
from dpfl.precision import products
from dpfl.privacy.certificate import Certificate
from dpfl.rehearsal import rehearse
from dpfl.repetitions import Repetitions, repeat, repeatable
from dpfl.streams import Streams
from dpfl.training import Run, federation_of, train

Record = dict[str, Any]  # what came of a cell, as plain data for JSON
_SHARES = ("accuracy", "site_accuracy")  # which are shown in %
PLANNED = {"planned_rounds": "rounds", "planned_cohort": "cohort", "bound": "bound"}


@dataclass(frozen=True)
class Ask:
    """What a planner is asked for: the best rounds, the best cohort, or the bound at the numbers given.

    Or what a formula says at the config's numbers and these constants, which needs no form and no limit.
    """

    number: str
    form: str
    constants: tuple[tuple[str, float], ...]
    max_rounds: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A config without a seed, how often it is repeated and from which seed on."""

    config: Config
    repetitions: int
    seed: int
    fresh_data: bool = False  # whether each repetition shares the data out anew
    evaluate_every: int | None = None  # rounds between looks at the test split; None for one, at the end
    ask: Ask | None = None
    portraits: bool = False  # whether to draw what the models take for each class
    by_site: bool = False  # whether to score the models at each site, on its own test records

    @property
    def together(self) -> bool:
        """Tell whether all repetitions are trained as one program."""
        try:
            alone = self.fresh_data or self.portraits or self.by_site
            return not alone and repeatable(self.config.system)
        except BadInput:  # which will be said where it is carried out
            return False

    @property
    def course(self) -> tuple[str, int] | None:
        """Return a fingerprint of the trainings of which this is the beginning, and after how many rounds it ends.

        None where it is like no other, or cannot be carried out at all.
        """
        if self._stands_alone:
            return None
        try:
            found = self.config.system.course
        except BadInput:  # which will be said where it is carried out
            return None
        if found is None:
            return None
        shared, rounds = found
        return replace(self, config=replace(self.config, system=shared), evaluate_every=None).key, rounds

    @property
    def training(self) -> str:
        """Return a fingerprint of the training that this is read off: other cells may be, at other rounds."""
        if self._stands_alone:
            return self.key
        course = self.course
        return replace(self, evaluate_every=None).key if course is None else course[0]

    @property
    def _stands_alone(self) -> bool:
        return self.together or self.portraits or self.by_site or self.ask is not None

    @property
    def key(self) -> str:
        """Return a fingerprint of everything that the result depends on."""
        return keys.key(self.config, self._how)

    @property
    def key_of_0_1(self) -> str | None:
        """Return the key of the same cell in records of release 0.1, or None where that knew no such cell."""
        return None if self.portraits or self.by_site else keys.key_of_0_1(self.config, self._how)

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "repetitions": self.repetitions, "seed": self.seed, "fresh_data": self.fresh_data,
            "evaluate_every": self.evaluate_every, "ask": None if self.ask is None else asdict(self.ask),
            **({"portraits": True} if self.portraits else {}), **({"by_site": True} if self.by_site else {}),
        }  # fmt: skip


def perform(cells: Sequence[Cell], device: str) -> list[Record]:
    """Carry out one cell, or several that are one training, and return what came of each."""
    started, first = time.perf_counter(), cells[0]
    with warnings.catch_warnings(), products(first.config.settings.precision):
        warnings.simplefilter("ignore", Caution)  # what they say stands in the table: the true ε
        if first.ask is not None:
            found = [_answered(first, first.ask)]
        elif first.together:
            found = [_together(first, device)]
        else:
            found = _one_by_one(cells, device)
    _tidy(device)
    same = {
        "seconds": round((time.perf_counter() - started) / len(cells), 3),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "date": datetime.now(UTC).date().isoformat(),
    }
    return [{"version": keys.VERSION, "key": cell.key, **one, **same} for cell, one in zip(cells, found, strict=True)]


def _answered(cell: Cell, ask: Ask) -> Record:
    if ask.number in COMPUTED:
        return {"answer": _short(compute(ask.number, cell.config, dict(ask.constants)))}
    settings = replace(cell.config.settings, seed=cell.seed)
    kept = frozenset(NUMBERS) - {ask.number}
    task = Task(Config(cell.config.system, settings), _federation(settings), kept, ask.max_rounds)
    plan = make(task, method="bound", form=ask.form, constants=Constants().overridden(dict(ask.constants)))
    return {"answer": _short(getattr(plan.best, ask.number))}


def _one_by_one(cells: Sequence[Cell], device: str) -> list[Record]:
    """Train the longest of the cells, one repetition after the other, and look where each of them looks and ends."""
    ends = [0 if (course := cell.course) is None else course[1] for cell in cells]  # 0: all are of one length
    cell = cells[ends.index(max(ends))]
    every = math.gcd(*(one.evaluate_every or 0 for one in cells)) or 10**9
    runs = []
    for seed in range(cell.seed, cell.seed + cell.repetitions):
        data = replace(cell.config.settings, data_seed=seed if cell.fresh_data else cell.seed)
        run = train(
            cell.config.system, _federation(data), data.model, seed=seed, device=device, backend=data.backend,
            precision=data.precision, evaluate_every=every, evaluate_after=ends,
        )  # fmt: skip
        sizes, each = _federation(data).sizes, zip(cells, ends, strict=True)
        runs.append([run if one.config == cell.config else _beginning(run, one, end, sizes, seed) for one, end in each])
        _tidy(device)
    return [_recorded(one, its) for one, its in zip(cells, zip(*runs, strict=True), strict=True)]


def _beginning(run: Run, cell: Cell, end: int, sizes: Sequence[int], seed: int) -> Run:
    """Return the training of a cell that ends earlier on the same course, with what it really spent."""
    history = run.history[:end]
    certificate = rehearse(cell.config.system, sizes, Streams(seed))
    accuracy, loss = history[-1]["accuracy"], history[-1]["loss"]
    return replace(run, rounds=len(history), history=history, accuracy=accuracy, loss=loss, certificate=certificate)


def _recorded(cell: Cell, runs: Sequence[Run]) -> Record:
    drawn: Record = {}
    if cell.portraits:
        data = _federation(replace(cell.config.settings, data_seed=cell.seed))
        drawn = portrayed([one.model for one in runs], data.test, data.classes)
    if cell.by_site:
        drawn["site_accuracy"] = _shorts(statistics.fmean(site.accuracy or 0.0 for site in one.sites) for one in runs)
    return {
        "loss": _shorts(one.loss for one in runs),
        "accuracy": _shorts(one.accuracy for one in runs),
        "validation_loss": _shorts(one.history[-1]["validation_loss"] for one in runs),
        "rounds": [one.rounds for one in runs],
        "history": None if cell.evaluate_every is None else [_history(one, cell.evaluate_every) for one in runs],
        "privacy": _privacy([one.certificate for one in runs]),
        **drawn,
    }


def _together(cell: Cell, device: str) -> Record:
    settings = replace(cell.config.settings, data_seed=cell.seed)
    (found,) = repeat(
        cell.config.system, _federation(settings), settings.model, repetitions=cell.repetitions, seed=cell.seed,
        device=device, evaluate_every=cell.evaluate_every,
    )  # fmt: skip
    return {
        "loss": _shorts(found.losses),
        "accuracy": _shorts(found.accuracies or [None] * cell.repetitions),
        "validation_loss": _shorts(found.validation_losses or [None] * cell.repetitions),
        "rounds": [found.history[-1].round] * cell.repetitions,
        "history": None if cell.evaluate_every is None else _histories(found),
        "privacy": _privacy([found.certificate]),
    }


def _tidy(device: str) -> None:
    """Give a GPU's memory back between trainings: recorded steps hold on to theirs, and other processes wait for it."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _history(run: Run, every: int) -> Record:
    """Return what was seen after every so many rounds and at the end, whatever others saw in between."""
    seen = [dict(line) for line in run.history if line["round"] % every == 0 or line is run.history[-1]]
    keys = ("round", "loss", "accuracy", "local_steps")
    return {key: _shorts(line[key] for line in seen) for key in keys}


def _histories(found: Repetitions) -> list[Record]:
    return [
        {
            "round": [look.round for look in found.history],
            "loss": _shorts(look.losses[place] for look in found.history),
            "accuracy": _shorts(look.accuracies and look.accuracies[place] for look in found.history),
        }
        for place in range(len(found.losses))
    ]


def _privacy(certificates: Sequence[Certificate]) -> Record | None:
    """Return what was promised and what was really spent against those it was promised to, in the worst repetition."""
    first = certificates[0]
    if first.claimed is None:
        return None

    def worst(read: Any) -> float | None:
        spent = [read(one.observers[observer]) for one in certificates for observer in first.against]
        return None if None in spent else _short(max(spent))

    believed = [one.observers[observer].claimed_epsilon for one in certificates for observer in first.against]
    return {
        "unit": first.unit,
        "neighbours": first.neighbours,
        "against": list(first.against),
        "calibration": first.calibration,
        "claimed": first.claimed["epsilon"],
        "delta": first.claimed["delta"],
        "true": worst(lambda seen: seen.epsilon),
        "with_papers_sensitivity": None if None in believed else _short(max(b for b in believed if b is not None)),
        "server": None if (seen := first.observers["server"].epsilon) is None else _short(seen),
        "uncounted": list(first.uncounted),
    }


def _federation(settings: Settings) -> Federation:
    """Share the data out, or take what was shared out last: most cells of a table have the same clients."""
    return _shared(replace(settings, model=None, evaluate_every=1, seed=None, ledger=None, device="cpu"), settings.seed)


@lru_cache(maxsize=3)
def _shared(settings: Settings, seed: int | None) -> Federation:
    return federation_of(replace(settings, data_seed=seed if settings.data_seed is None else settings.data_seed))


def _shorts(values: Any) -> list[Any]:
    return [_short(value) for value in values]


def _short(value: Any) -> Any:
    """Return a number with the digits that matter, and None for what is no finite number."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None


def restored(record: Mapping[str, Any], measure: str, at_round: int | None) -> list[float] | None:
    """Return what a measure was in each repetition; a loss that is no number is infinite. None: not measured."""
    if measure in PLANNED or measure in COMPUTED:
        return None if record["answer"] is None else [float(record["answer"])]
    if measure == "best_accuracy":
        return [_best(history["accuracy"]) for history in record["history"]]
    if at_round is None and measure != "local_steps":
        found = record[measure]
    else:
        found = [_read_off(history, measure, at_round) for history in record["history"]]
    if measure == "loss":
        return [math.inf if value is None else value for value in found]
    return None if None in found else [100 * value if measure in _SHARES else float(value) for value in found]


def _best(accuracies: Sequence[float | None]) -> float:
    """Return the highest of the accuracies in %: who reports it has chosen the round by the test split."""
    return 100 * max((one for one in accuracies if one is not None), default=math.nan)


def _read_off(history: Mapping[str, Any], measure: str, at_round: int | None) -> float | None:
    """Return the last value up to a round: a training that ended earlier stays where it ended."""
    seen = [at for at, round in enumerate(history["round"]) if at_round is None or round <= at_round]
    value: float | None = history[measure][seen[-1] if seen else 0]
    return value
