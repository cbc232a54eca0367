"""A sweep: every cell that is not finished yet, several at a time, each kept as soon as it is done.

Cells are whole trainings and know nothing of each other, so they are shared out among processes, one core each: small
models do not profit from more. On a GPU the processes share it, since one small training leaves most of it idle.
"""

import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from threading import Thread

import torch

from dpfl.errors import BadInput, BudgetRefused
from dpfl.experiments.cells import Cell, Record, perform
from dpfl.experiments.cost import flops
from dpfl.experiments.experiment import Experiment
from dpfl.experiments.store import Store
from dpfl.training import as_device

_ON_A_GPU = 8  # processes
_OF_THE_MEMORY = 0.8  # of a GPU, for what trains; the rest is the driver's, for each process and recorded step


@dataclass(frozen=True)
class Job:
    """A cell, and where it stands."""

    experiment: str
    where: str  # in words, for messages
    cell: Cell


OnDone = Callable[[Job, Record, int, int], None]  # told of each finished cell, how many are done and how many in all


def jobs_of(experiment: Experiment, seed: int) -> list[Job]:
    """Return every cell of an experiment once, those at true ε among them."""
    found: dict[str, Job] = {}
    for reading in experiment.readings:
        for row, column, at_true in product(reading.rows, reading.columns, reading.sides):
            for choice, cell in reading.cells(row, column, at_true=at_true, seed=seed):
                words = [row.label, *([] if column.at_round else [column.label])]
                words += [f"{key} = {value}" for key, value in choice.items()]
                found.setdefault(cell.key, Job(experiment.name, ", ".join(words), cell))
    return list(found.values())


def missing(experiments: Iterable[Experiment], store: Store, seed: int) -> list[Job]:
    """Return the cells that are still to be done, the longest first, so that no core waits for the last."""
    jobs = {job.cell.key: job for experiment in experiments for job in jobs_of(experiment, seed)}
    return sorted((job for job in jobs.values() if job.cell not in store), key=lambda job: -flops(job.cell))


def sweep(todo: Sequence[Job], store: Store, *, device: str = "cpu", processes: int | None = None,
          on_done: OnDone | None = None) -> None:  # fmt: skip
    """Carry out cells and keep them.

    processes: how many at a time; None for one a core, or eight on a GPU. 1 stays in this process. Cells that find no
        room in a GPU's memory are trained again afterwards, half as many at a time; a GPU that is full says so in many
        ways, so that is tried whatever ends a training there.

    Raises what the first cell that could not be carried out raised, after all others are done.
    """
    as_device(device)
    cores = os.cpu_count() or 1
    count = processes or (min(_ON_A_GPU, cores) if device == "cuda" else cores)
    failed: list[tuple[Job, Exception]] = []
    done = 0

    def keep(job: Job, record: Record) -> None:
        nonlocal done
        store.add(job.experiment, record)
        done += 1
        if on_done is not None:
            on_done(job, record, done, len(todo))

    waiting = _trainings(todo)
    while waiting:
        count = min(count, len(waiting))
        crowded: list[list[Job]] = []  # found no room on the GPU beside the others
        with closing(_outcomes(waiting, device, count, max(1, cores // count))) as outcomes:
            for jobs, outcome in outcomes:
                try:
                    for job, record in zip(jobs, outcome(), strict=True):
                        keep(job, record)
                except (BadInput, BudgetRefused) as problem:
                    failed += [(job, problem) for job in jobs]
                except RuntimeError:
                    if count == 1 or device != "cuda":
                        raise
                    crowded.append(jobs)
        waiting, count = crowded, max(1, count // 2)
    if failed:
        job, first = failed[0]
        more = f" (and {len(failed) - 1} more cells)" if len(failed) > 1 else ""
        raise type(first)(f"{job.experiment}, {job.where}{more}: {first}")


def _trainings(jobs: Sequence[Job]) -> list[list[Job]]:
    """Put cells together that are one training, at which some look more often, or end before others."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.cell.training, []).append(job)
    return list(found.values())


def _outcomes(
    trainings: Sequence[list[Job]], device: str, processes: int, threads: int
) -> Generator[tuple[list[Job], Callable[[], list[Record]]]]:
    """Carry cells out, several at a time; what came of them is returned, or raised, by the function beside them."""
    cells = [[job.cell for job in jobs] for jobs in trainings]
    if processes == 1:
        yield from ((jobs, partial(perform, its, device)) for jobs, its in zip(trainings, cells, strict=True))
        return
    with _pool(processes, threads, device) as pool:
        running = {pool.submit(perform, its, device): jobs for jobs, its in zip(trainings, cells, strict=True)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result


@contextmanager
def _pool(processes: int, threads: int, device: str) -> Iterator[ProcessPoolExecutor]:
    """Start processes with so many threads each, and leave none behind: what was interrupted is dropped."""
    share = _OF_THE_MEMORY / processes if device == "cuda" else None
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin_process, initargs=(threads, share)
    )
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _begin_process(threads: int, share: float | None) -> None:
    torch.set_num_threads(threads)
    if share is not None:  # what one process keeps for later, another would not get
        torch.cuda.set_per_process_memory_fraction(share)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, killed perhaps: nobody would keep what it trains."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
