"""Many trainings side by side, one core each: small models do not profit from several."""

import math
import multiprocessing
import os
import statistics
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

import dpfl
from dpfl.systems import SYSTEMS


@dataclass(frozen=True)
class Training:
    """One run: a system by name with its options, on data that is shared out anew for each seed."""

    system: str
    options: dict[str, Any]
    data: str
    sharing: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    seeds: tuple[int, ...] = (1, 2, 3)


@dataclass(frozen=True)
class Outcomes:
    """What each seed reached."""

    rounds: tuple[float, ...]
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    steps: tuple[tuple[int, ...], ...]  # local steps of each round


def outcomes(trainings: Sequence[Training]) -> list[Outcomes]:
    """Run them all, with every seed, and return what each reached."""
    jobs = [(training, seed) for training in trainings for seed in training.seeds]
    # Long ones first, so that no core waits for the last.
    order = sorted(range(len(jobs)), key=lambda at: -_length(jobs[at][0]))
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawned, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {at: pool.submit(_run, *jobs[at]) for at in order}
        done = iter([running[at].result() for at in range(len(jobs))])
    collected = []
    for training in trainings:
        rounds, accuracy, loss, steps = zip(*(next(done) for _ in training.seeds), strict=True)
        collected.append(Outcomes(rounds, accuracy, loss, steps))
    return collected


def _length(training: Training) -> float:
    return float(training.options.get("rounds", 100)) * (10 if training.model == "mlp" else 1)


def _run(training: Training, seed: int) -> tuple[int, float, float, tuple[int, ...]]:
    warnings.simplefilter("ignore", dpfl.Caution)  # papers' formulas are used here beyond where they hold
    federation = _federation(training.data, tuple(sorted(training.sharing.items())), seed)
    system = SYSTEMS[training.system](**training.options)
    run = dpfl.train(system, federation, training.model, seed=seed, evaluate_every=10_000)
    loss = math.inf if run.loss is None else run.loss  # it diverged
    return run.rounds, run.accuracy or math.nan, loss, tuple(line["local_steps"] for line in run.history)


@lru_cache(maxsize=4)
def _federation(data: str, sharing: tuple[tuple[str, Any], ...], seed: int) -> dpfl.Federation:
    return dpfl.federate(data, seed=seed, **dict(sharing))


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def clearly_less(low: Sequence[float], high: Sequence[float]) -> bool:
    """Say whether `low` is below `high` by more than two standard errors of their mean difference.

    A seed stands for the same data, shared out alike, and the same first model on both sides, so that differences are
    taken seed by seed.
    """
    differences = [above - below for below, above in zip(low, high, strict=True)]
    return mean(differences) > 2 * error(differences)
