"""Carrying experiments out: train what is missing, then write tables, plots and pages from what is finished."""

from collections.abc import Sequence
from pathlib import Path

from dpfl.errors import BadInput
from dpfl.experiments.experiment import Experiment
from dpfl.experiments.pages import write_index, write_page
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
    on_done: OnDone | None = None,
) -> list[Results]:
    """Carry out experiments, keep every finished cell in `folder` and write each one's table and plot there."""
    store = Store(folder)
    sweep(missing(experiments, store, seed), store, device=device, processes=processes, on_done=on_done)
    results = [Results(one, store, seed=seed) for one in experiments]
    for one in results:
        one.save(folder)
    return results


def write_pages(experiments: Sequence[Experiment], folder: Path, *, seed: int = 1) -> list[Path]:
    """Write a page for each paper, of all of its experiments that are finished in `folder`, and a list of all pages.

    Nothing is trained.
    """
    store = Store(folder)
    finished = [Results(one, store, seed=seed) for one in experiments if not missing([one], store, seed)]
    if not finished:
        raise BadInput(
            f"out must hold finished experiments for pages, but {str(folder)!r} has none of these; reproduce one first"
        )
    paths = []
    for paper in dict.fromkeys(one.experiment.paper for one in finished):
        its = [one for one in finished if one.experiment.paper == paper]
        done = {one.experiment.name for one in its}
        left = [one for one in experiments if one.paper == paper and one.name not in done]
        paths.append(write_page(paper, its, left, folder))
    return [*paths, write_index(folder)]
