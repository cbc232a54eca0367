"""Carrying experiments out: train what is missing, then write tables, plots and pages from what is finished."""

from collections.abc import Sequence
from pathlib import Path

from dpfl.experiments.experiment import Experiment
from dpfl.experiments.pages import write_page
from dpfl.experiments.results import Results
from dpfl.experiments.store import Store
from dpfl.experiments.sweep import OnDone, missing, sweep


def reproduce(
    experiments: Sequence[Experiment],
    folder: Path,
    *,
    seed: int = 1,
    device: str = "cpu",
    processes: int | None = None,
    pages: bool = False,
    on_done: OnDone | None = None,
) -> list[Results]:
    """Carry out experiments, keep every finished cell in `folder` and write each one's table and plot there.

    pages: write a page for each paper too.
    """
    store = Store(folder)
    sweep(missing(experiments, store, seed), store, device=device, processes=processes, on_done=on_done)
    results = [Results(one, store, seed=seed, command=command(one, device)) for one in experiments]
    for one in results:
        one.save(folder)
    if pages:
        for paper in dict.fromkeys(one.paper for one in experiments):
            write_page(paper, [one for one in results if one.experiment.paper == paper], folder)
    return results


def command(experiment: Experiment, device: str) -> str:
    """Return how to repeat an experiment."""
    options = "" if experiment.scale == "smoke" else " --scale paper"
    options += "" if experiment.own_repetitions else f" --repetitions {experiment.repetitions}"
    return f"dpfl reproduce {experiment.name}{options}" + (" --device cuda" if device == "cuda" else "")
