"""What an experiment will cost: the arithmetic of its trainings, and how long that takes on a machine like this.

An estimate, good to a factor of two or three: enough to choose between a minute, an evening and a GPU.
"""

import os
from functools import lru_cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from dpfl.experiments.cells import Cell
from dpfl.federation import count_of
from dpfl.models import build, default_model
from dpfl.orders import CURVATURES
from dpfl.streams import Streams

# Records to share out, the shape of one, and classes.
_DATA: dict[str, tuple[int, tuple[int, ...], int | None]] = {
    "digits": (1438, (1, 8, 8), 10),
    "mnist": (60_000, (1, 28, 28), 10),
    "fashion-mnist": (60_000, (1, 28, 28), 10),
    "femnist": (36_000, (1, 28, 28), 62),
    "cifar10": (20_000, (3, 32, 32), 10),
    "adult": (32_561, (100,), 2),
    "lending-club": (34_000, (10,), None),
    "heart": (486, (13,), 2),
}
_WRITERS = 224  # of FEMNIST, that are clients where each writer is one
_CORE, _GPU = 5e10, 1.5e13  # floating-point operations a second, as trainings of small models reach them
_ROUND, _CLIENT = 2e-3, 3e-5  # seconds of a round, and of each client in it, that no arithmetic explains
_BOTH_WAYS = 3  # forward, and backward to parameters and inputs


def flops(cell: Cell) -> float:
    """Return the floating-point operations of a cell, roughly."""
    if cell.ask is not None:
        return 1e9
    settings, system = cell.config.settings, cell.config.system
    pool, _, _ = _DATA.get(settings.data, _DATA["mnist"])
    if isinstance(settings.sizes, tuple):
        records = sum(settings.sizes) / len(settings.sizes)
    else:
        sharing = _WRITERS if settings.partition == "writer" else count_of(settings)
        records = settings.sizes or pool * (1 - settings.validation_share) / sharing
    taking_part = system.cohort or count_of(settings)
    # A local epoch is one pass, in however many batches.
    steps = getattr(system, "local_epochs", None) or getattr(system, "local_steps", None) or 1
    rate = getattr(system, "sampling_rate", None) or 1.0
    # Curvature, where a paper asks for it, is two gradients of all records in every round.
    passes = rate * steps + (2 if CURVATURES & system.needs else 0)
    trained = records * settings.share * passes * taking_part
    name = settings.model or default_model(settings.data, _DATA.get(settings.data, _DATA["mnist"])[2])
    return cell.repetitions * system.rounds * trained * _BOTH_WAYS * _forward(name, settings.data)


def seconds(cells: list[Cell], device: str = "cpu") -> float:
    """Return about how long cells take together, with all cores or one GPU."""
    cores = os.cpu_count() or 1
    rate, at_once = (_GPU, 4) if device == "cuda" else (_CORE * cores, cores)
    return sum(map(flops, cells)) / rate + sum(map(_waiting, cells)) / at_once


def _waiting(cell: Cell) -> float:
    """Return the seconds of a cell that no arithmetic explains: orders, ledger, launching what is small."""
    if cell.ask is not None:
        return 1.0
    system, settings = cell.config.system, cell.config.settings
    clients = system.cohort or count_of(settings)
    return (1 if cell.together else cell.repetitions) * system.rounds * (_ROUND + _CLIENT * clients)


@lru_cache(maxsize=64)
def _forward(model: str, data: str) -> float:
    """Return the operations of one record, forward, counted by torch on shapes alone."""
    _, shape, classes = _DATA.get(data, _DATA["mnist"])
    module = build(model, shape=shape, classes=classes, rng=Streams(0).public.generator("model")).module.to("meta")
    with FlopCounterMode(display=False) as counter:
        module(torch.empty(1, *shape, device="meta"))
    return float(counter.get_total_flops())
