"""Timing in turns: contenders alternate, so that a machine that is slow for a while is slow for all of them."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

_BURST = 0.05  # seconds of calls in a row: a short round is timed as often as a long one's turn allows


def medians(
    contenders: Mapping[str, Callable[[], object]], *, seconds: float, device: torch.device
) -> dict[str, float]:
    """Call all contenders in turns until each had its seconds and three calls; return the median of each, in ms."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        for _ in range(3 if device.type == "cuda" else 1):  # the first calls choose kernels, fill caches, record graphs
            contender()
    while any(_goes_on(taken, seconds) for taken in times.values()):
        for name, contender in contenders.items():
            if _goes_on(times[name], seconds):
                times[name] += _burst(contender, device)
    return {name: 1000 * median(taken) for name, taken in times.items()}


def _goes_on(taken: list[float], seconds: float) -> bool:
    return sum(taken) < seconds or len(taken) < 3


def _burst(contender: Callable[[], object], device: torch.device) -> list[float]:
    taken: list[float] = []
    end = time.perf_counter() + _BURST
    while not taken or time.perf_counter() < end:
        _finish(device)
        started = time.perf_counter()
        contender()
        _finish(device)
        taken.append(time.perf_counter() - started)
    return taken


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
