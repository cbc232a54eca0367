"""Carrying experiments out: train what is missing, then write tables, plots and pages from what is finished."""

from collections.abc import Sequence
from pathlib import Path

from dpfl.errors import BadInput
from dpfl.experiments.experiment import Experiment
from dpfl.experiments.pages import write_index, write_page
from dpfl.experiments.reading import find
from dpfl.experiments.results import Results
from dpfl.experiments.store import Store
from dpfl.experiments.sweep import OnDone, missing, sweep
from dpfl.experiments.words import markdown


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
        name = one.experiment.name
        (folder / f"{name}.md").write_text(markdown(one, f"{name}.png"), encoding="utf-8")
    return results


def write_pages(experiments: Sequence[Experiment], folder: Path, *, seed: int = 1) -> list[Path]:
    """Write a page for each paper, of all of its experiments that are begun in `folder`, and the page about all papers.

    Nothing is trained.
    """
    store = Store(folder)
    begun = [found for one in experiments if not (found := Results(one, store, seed=seed)).is_empty]
    if not begun:
        raise BadInput(
            f"out must hold finished cells of experiments for pages, but {str(folder)!r} has none of these; reproduce"
            " one first"
        )
    paths = []
    for paper in dict.fromkeys(one.experiment.paper for one in begun):
        its = [one for one in begun if one.experiment.paper == paper]
        shown = {one.experiment.name for one in its}
        left = [one for one in experiments if one.paper == paper and one.name not in shown]
        paths.append(write_page(paper, its, left, folder))
    read = {one.experiment.name: one for one in begun}
    every = []
    for one in find(["all"], experiments[0].scale):
        known = read.get(one.name)
        every.append(known if known and known.experiment == one else Results(one, store, seed=seed))
    return [*paths, write_index([one for one in every if not one.is_empty], folder)]
