"""CUDA graphs: the hundred small kernels of a step, launched as one.

A GPU finishes a small kernel sooner than Python can launch the next. What is done again and again with the same shapes
is recorded once, and then replayed with other numbers in the same places.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor, Tensor, Tensor | None]  # the last only where it was asked for
Function = Callable[..., Results]
_Recording = tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Results, Function]  # whose tensors a replay reads

_MOST = 64  # graphs that are kept: each holds on to its inputs and results


class Graphs:
    """Recorded functions, by what they were recorded for. One runs at a time, so that they share their memory."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    def run(self, key: Hashable, function: Function, rng: torch.Generator, *inputs: Tensor) -> Results:
        """Return function(*inputs), replayed if it was called like this before. The results hold until the next call.

        key: all that the function depends on beside its inputs, which may still be on the host.
        rng: the generator that the function draws from, which may be seeded anew before each call.
        """
        whole = (key, *((tuple(one.shape), one.dtype) for one in inputs))
        if whole not in self._recorded:
            inputs = tuple(one.to(rng.device) for one in inputs)
            if whole not in self._seen or len(self._recorded) == _MOST:  # what happens once is not worth recording
                self._seen.add(whole)
                return function(*inputs)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._recorded[whole] = _record(function, rng, inputs, self._pool)
        graph, places, results, _ = self._recorded[whole]
        for place, one in zip(places, inputs, strict=True):
            place.copy_(one, non_blocking=True)
        graph.replay()
        return results


def _record(function: Function, rng: torch.Generator, inputs: tuple[Tensor, ...], pool: Any) -> _Recording:
    places, seed = tuple(one.clone() for one in inputs), rng.initial_seed()
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # libraries choose their kernels before anything is recorded
        for _ in range(3):
            function(*places)
    torch.cuda.current_stream().wait_stream(aside)
    rng.manual_seed(seed)  # what the rehearsals drew is drawn again
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(rng)
    with torch.cuda.graph(graph, pool=pool):
        results = function(*places)
    return graph, places, results, function
