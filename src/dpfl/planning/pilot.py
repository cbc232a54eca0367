"""The pilot: a plan found by trying, on records that are nobody's and with the noise of the real problem.

Bounds hold for the worst case and are often far from what happens. A pilot trains for real, on public records in the
clients' place where there are any, and else on a family of made-up tasks of the same shape. The noise is exactly what
the clients' own orders would add to the model; only the gradients come from other records. On one task the candidate of
least loss wins, on several the one whose loss is nowhere far above the least one there: the least worst-case regret.

Candidates are thinned out by successive halving: the losers of one run are not tried again, and what is left is tried
with more seeds; then the neighbours of the winner are tried too. The numbers that the system has anyway are among the
candidates, so that a plan is not worse than none as far as the pilot can tell.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from dpfl.averages import standard_error
from dpfl.errors import BadInput, require_positive, suggestion
from dpfl.gradients.capabilities import capabilities_of
from dpfl.planning.made_up import stand_ins
from dpfl.planning.public_proxy import StandIn
from dpfl.planning.search import ladder
from dpfl.planning.task import SCALES, Task
from dpfl.planning.trying import Seen, score, trials
from dpfl.streams import Streams, layer_randomness
from dpfl.systems import PrivateSystem

OnTrial = Callable[[str], None]  # told before each trial what it is

Options = dict[str, Any]  # what a candidate sets: the planned numbers, and keys that were asked to be searched

_COARSE = 4.0  # the factor between neighbouring candidates of the first look
_FEW_ROUNDS = 64  # of a first look that looks for rates as well, and by how much longer the better ones may be
_LONGER = (4.0, math.inf)
_KEPT = 4  # candidates that are tried again whatever the first look says
_SEEDS = (1, 3)  # trials of a candidate in the first look, and among the better ones
_FINALS = ((4, 8), (3, 16), (2, 32))  # candidates and trials at the end, until the best two are told apart
_FINALS_OF_A_FAMILY = ((4, 8),)  # more would tell apart what is true of made-up tasks alone


@dataclass
class Trials:
    """What a candidate reached on held-out records: of each task, once a seed."""

    options: Options
    seen: list[Seen] = field(default_factory=list)
    seconds: float = 0.0  # of one trial

    @property
    def losses(self) -> list[float]:
        """Return the loss of each trial, the mean over the tasks: infinite where one diverged."""
        return [statistics.fmean(score.loss for score in scores) for scores in self.seen]

    @property
    def by_task(self) -> list[float]:
        """Return the mean loss on each task."""
        return [statistics.fmean(score.loss for score in scores) for scores in zip(*self.seen, strict=True)]

    @property
    def mean(self) -> float:
        """Return the mean loss: infinite where a trial diverged or none was made."""
        return statistics.fmean(self.losses) if self.seen else math.inf

    @property
    def error(self) -> float | None:
        """Return the standard error of the mean."""
        return standard_error(self.losses)

    def regret(self, least: Sequence[float]) -> tuple[float, float | None]:
        """Return by how much the loss is above the least one, on the task where it is worst, and its standard error.

        least: the least mean loss that any candidate reached on each task.
        """
        if not self.seen:
            return math.inf, None
        above = [loss - best for loss, best in zip(self.by_task, least, strict=True)]
        if not all(map(math.isfinite, above)):
            return math.inf, None
        worst = max(range(len(above)), key=above.__getitem__)
        return above[worst], standard_error([scores[worst].loss for scores in self.seen])

    def expected(self) -> dict[str, Any]:
        """Return what the trials say of the loss, and of the accuracy where there is one: its mean and its spread."""
        scores = [score for scores in self.seen for score in scores]
        rates = [score.accuracy for score in scores if score.accuracy is not None]
        return {"loss": _spread([score.loss for score in scores]), "accuracy": _spread(rates) if rates else None}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        mean = self.mean if math.isfinite(self.mean) else None
        return {**self.options, "loss": mean, "standard_error": self.error, "trials": len(self.seen)}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    found = {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


@dataclass(frozen=True)
class PilotResult:
    """What a pilot found: the candidates from best to worst, and how many the time did not suffice for."""

    ranked: tuple[Trials, ...]
    untried: int
    source: str  # of the records it was tried on
    seconds: float
    untrained: float  # the loss of the first model, before any training
    least: tuple[float, ...]  # mean loss that any candidate reached on each task
    usual: Trials | None  # the numbers that the system has anyway; None where the time did not suffice for them

    @property
    def best(self) -> Trials:
        """Return the winner."""
        return self.ranked[0]

    @property
    def is_made_up(self) -> bool:
        """Tell whether it was tried on several made-up tasks, and not on public records."""
        return len(self.least) > 1


def pilot(
    task: Task,
    chooses: Sequence[str],
    *,
    search: Mapping[str, Sequence[Any]] | None = None,
    start: Mapping[str, int] | None = None,
    time_limit: float = 120.0,
    on_trial: OnTrial | None = None,
) -> PilotResult:
    """Try numbers (and values of the keys in `search`) on records that are nobody's, and return what they reached.

    start: numbers to try besides, such as the answer of a bound.
    time_limit: in seconds; candidates are tried from the cheapest on, and those that would end too late are left out.
    """
    require_positive("time_limit", time_limit, "give it a minute")
    if task.system.until_spent:
        raise BadInput(
            f"system must be one whose rounds can be planned, was {task.system.name!r}, which trains until its budget"
            " is spent; plan another, or compare values of its options with `dpfl compare`"
        )
    began = time.perf_counter()
    stage = Stage(task, time_limit=time_limit, on_trial=on_trial)
    ranges = task.ranges(chooses)
    _require_options(task, search or {}, ranges)
    scales = {name: values for name, values in task.scales(chooses).items() if name not in (search or {})}
    usual = task.usual((*ranges, *scales))
    grid: list[Options] = [{}]
    for name, (low, high) in ranges.items():
        # Long trainings cost most and are much like shorter ones of larger steps, from which they are reached below.
        last = max(low, min(_FEW_ROUNDS, high)) if name == "rounds" and "lr" in scales else high
        grid = [{**one, name: number} for one in grid for number in ladder(low, last, factor=_COARSE)]
    grid = task.with_whole_turns(grid)
    if start is not None:
        grid.append({name: start[name] for name in ranges})
    grid = [{**one, **values} for one in grid for values in _scaled(usual, scales)]
    for key, values in (search or {}).items():
        grid = [{**one, key: value} for one in grid for value in values]
        usual = {**usual, key: getattr(task.system, key)}
    if scales:
        grid.append(usual)
        stage.look([usual], _SEEDS[1], share=0.5)  # first: a plan must not be worse than none
    stage.look(grid, _SEEDS[0], share=0.5)
    if not stage.trials:
        raise BadInput(
            f"time_limit must be long enough for one trial at least, was {time_limit:g} s; raise it, or lower"
            " max_rounds"
        )
    leading = [one.options for one in stage.ranked()[: 2 * _KEPT]]
    stage.look([longer for one in leading for longer in _as_long(one, scales, ranges, _LONGER)], _SEEDS[0], share=0.6)
    kept = max(_KEPT, len(grid) // (12 if scales else 3))
    stage.look([one.options for one in stage.ranked()[:kept]], _SEEDS[1], share=0.7)
    reach = _COARSE / 2
    while reach > 1.2:  # the valley's floor: halfway to the neighbours, and halfway again
        best = stage.ranked()[0].options
        sides = {name: [best[name], *_beside(best[name], *limits, reach)] for name, limits in ranges.items()}
        near = [{**best, **dict(zip(sides, numbers, strict=True))} for numbers in itertools.product(*sides.values())]
        near += _rescaled(best, scales, reach) + _as_long(best, scales, ranges, (1 / reach, reach))
        stage.look(task.with_whole_turns(near), _SEEDS[1], share=0.8)
        reach = math.sqrt(reach)
    for count, seeds in _FINALS_OF_A_FAMILY if len(stage.tasks) > 1 else _FINALS:
        leading = [one.options for one in stage.ranked()[:count]]
        stage.look([*leading, usual] if scales and usual not in leading else leading, seeds)
        if stage.told_apart():
            break
    return PilotResult(
        tuple(stage.ranked()), len(stage.untried), stage.source, time.perf_counter() - began, stage.untrained(),
        tuple(stage.least()), stage.trials.get(_key(usual)) if scales else None,
    )  # fmt: skip


def _as_long(
    options: Options, scales: Mapping[str, Any], ranges: Mapping[str, tuple[int, int]], factors: Sequence[float]
) -> list[Options]:
    """Return a candidate that goes as far in more rounds of smaller steps, or in fewer of larger ones.

    Rounds and rates trade almost freely for each other: what a budget pays for is how far a model may go.
    """
    if "lr" not in scales or "rounds" not in ranges:
        return []
    low, high = ranges["rounds"]
    found = []
    for factor in factors:
        rounds = round(min(max(factor * options["rounds"], low), high))
        if rounds != options["rounds"]:
            rate = _short(options["lr"] * options["rounds"] / rounds)
            found.append({**options, "rounds": rounds, "lr": rate})
    return found


def _key(options: Options) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items()))


def _scaled(usual: Options, scales: Mapping[str, Sequence[Any]]) -> list[Options]:
    """Return combinations of values: all of what is a scale, and the first of what else there is to choose.

    A rate is for the usual clip: what counts is rate times clip.
    """
    found: list[Options] = [{}]
    for name, values in scales.items():
        found = [{**one, name: value} for one in found for value in (values if name in SCALES else values[:1])]
    if {"lr", "clip"} <= scales.keys():
        found = [{**one, "lr": _short(one["lr"] * usual["clip"] / one["clip"])} for one in found]
    return found


def _rescaled(best: Options, scales: Mapping[str, Sequence[Any]], reach: float) -> list[Options]:
    """Return the best candidate with each of its scales moved by a factor, and with every other choice of the rest."""
    found: list[Options] = []
    for name, values in scales.items():
        if name in SCALES:
            for factor in (1 / reach, reach):
                moved = {**best, name: _short(factor * best[name])}
                if name == "clip" and "lr" in scales:
                    moved["lr"] = _short(best["lr"] / factor)
                found.append(moved)
        else:
            found += [{**best, name: value} for value in values if value != best[name]]
    return found


def _short(value: float) -> float:
    """Return a number with the digits that matter: nobody should have to type more."""
    return float(f"{value:.2g}")


def _require_options(task: Task, search: Mapping[str, Sequence[Any]], ranges: Mapping[str, Any]) -> None:
    """Refuse keys that the system does not have or that are planned anyway, and values that it does not take."""
    own = {one.name for one in fields(task.system)}
    for key, values in search.items():
        if key not in own:
            raise BadInput(
                f"search must name options of {task.system.name}, was {key!r}; it takes {', '.join(sorted(own))}"
                f"{suggestion(key, own)}"
            )
        if key in ranges:
            raise BadInput(f"search must name other keys than {key!r}, which the pilot plans itself; leave it out")
        for value in values:
            task.at({key: value})


def _beside(number: int, low: int, high: int, factor: float) -> list[int]:
    sides = {max(low, round(number / factor)), min(high, max(number + 1, round(number * factor)))}
    return sorted(sides - {number})


class Stage:
    """Where candidates are tried: tasks of records that are nobody's, a model, and the time that is left."""

    def __init__(self, task: Task, *, time_limit: float, on_trial: OnTrial | None) -> None:
        self.task, self.on_trial = task, on_trial
        self.began, self.time_limit = time.perf_counter(), time_limit
        self.tasks = stand_ins(task.federation, hold_out=0.5, streams=Streams(task.config.settings.seed))
        many = f"{len(self.tasks)} made-up tasks of this shape (no records are public)"
        self.source = many if len(self.tasks) > 1 else self.public.source
        self.trials: dict[tuple[tuple[str, Any], ...], Trials] = {}
        self.untried: set[tuple[tuple[str, Any], ...]] = set()
        self.pace = 0.0  # seconds for one client's step, as measured
        model = task.model()
        few = self.public.held_out.take(torch.arange(min(8, len(self.public.held_out))))
        with layer_randomness(Streams(0).public.generator("probe"), torch.device("cpu")):
            self.capabilities = capabilities_of(model, few)

    @property
    def public(self) -> StandIn:
        """Return the first of the tasks, which is the only one where there are public records."""
        return self.tasks[0]

    def least(self) -> list[float]:
        """Return the least mean loss on each task, of the candidates that were tried often enough."""
        enough = self._enough()
        known = [one.by_task for one in self.trials.values() if len(one.seen) >= enough]
        return [min(losses) for losses in zip(*known, strict=True)]

    def ranked(self) -> list[Trials]:
        """Return what was tried, the best first; what was tried too seldom to be told from luck comes last."""
        enough, least = self._enough(), self.least()
        return sorted(self.trials.values(), key=lambda one: (len(one.seen) < enough, one.regret(least)[0], one.mean))

    def told_apart(self) -> bool:
        """Tell whether the best is better than the next by two standard errors of the difference."""
        if len(self.trials) < 2:
            return True
        least = self.least()
        (first, its), (second, other) = (one.regret(least) for one in self.ranked()[:2])
        if its is None or other is None:
            return False
        return second - first > 2 * math.hypot(its, other)

    def _enough(self) -> int:
        return min(_SEEDS[1], max((len(one.seen) for one in self.trials.values()), default=0))

    def look(self, grid: Sequence[Options], seeds: int, *, share: float = 1.0) -> None:
        """Try every candidate with this many seeds in all, the cheapest first, until a share of the time is over.

        Those that take the same steps are trained as one program.
        """
        deadline = self.began + share * self.time_limit
        distinct = {_key(options): options for options in sorted(grid, key=self.cost)}
        for _, group in itertools.groupby(distinct.values(), key=self._steps):
            able = [(options, system) for options in group if (system := self._system(options)) is not None]
            for seed in range(1, seeds + 1):
                due = [(o, s) for o, s in able if len(self._known(o).seen) < seed]
                fits = self._that_fit(due, deadline)
                self.untried |= {_key(o) for o, _ in due[len(fits) :] if not self._known(o).seen}
                if fits:
                    self._try(fits, seed)

    def _try(self, candidates: Sequence[tuple[Options, PrivateSystem[Any]]], seed: int) -> None:
        if self.on_trial is not None:
            options = candidates[0][0]
            alike = self._steps(options) if len(candidates) > 1 else tuple(options.items())
            many = f"{len(candidates)} candidates with " if len(candidates) > 1 else ""
            self.on_trial(many + ", ".join(f"{name} = {value}" for name, value in alike) + f", seed {seed}")
        started = time.perf_counter()
        found = trials(self, [system for _, system in candidates], seed)
        each = (time.perf_counter() - started) / len(candidates)
        for (options, _), scores in zip(candidates, found, strict=True):
            known = self._known(options)
            known.seen.append(scores)
            known.seconds = each
            self.trials[_key(options)] = known
            self.untried.discard(_key(options))
            self.pace = max(each / self.cost(options), self.pace / 2)

    def _that_fit(
        self, due: Sequence[tuple[Options, PrivateSystem[Any]]], deadline: float
    ) -> list[tuple[Options, PrivateSystem[Any]]]:
        """Return as many of these as the time suffices for."""
        ends = itertools.accumulate(self._known(o).seconds or self.pace * self.cost(o) for o, _ in due)
        now = time.perf_counter()
        return [one for one, end in zip(due, ends, strict=True) if now + end <= deadline]

    def _known(self, options: Options) -> Trials:
        return self.trials.get(_key(options)) or Trials(options)

    def _system(self, options: Options) -> PrivateSystem[Any] | None:
        try:
            return self.task.at(options)
        except BadInput:
            return None  # such numbers are no options of this system

    def _steps(self, options: Options) -> tuple[tuple[str, Any], ...]:
        """Return all that decides who does what when: candidates that differ in scales alone take the same steps."""
        return tuple((name, value) for name, value in _key(options) if name not in (*SCALES, "averaged"))

    def untrained(self) -> float:
        """Return the loss of the model that training begins with, the mean over the tasks."""
        model = self.task.model()
        scores = [score(model, model.vector(), one.held_out) for one in self.tasks]
        return statistics.fmean(one.loss for one in scores)

    def cost(self, options: Options) -> float:
        """Return how many steps of clients a trial takes."""
        point = {"rounds": self.task.system.rounds, "local_steps": getattr(self.task.system, "local_steps", 1) or 1}
        point |= {"cohort": self.task.system.cohort or self.task.clients} | options
        if self.task.total_steps is not None:
            return float(self.task.total_steps * point["cohort"])
        return float(point["rounds"] * point["local_steps"] * point["cohort"])
