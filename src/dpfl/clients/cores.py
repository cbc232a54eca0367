"""The cores of the CPU: what keeps a core busy comes one to each; what does not stays on one.

Two cores that share each product of a large batch wait for each other at every step; with a chunk of clients each they
do not. And work that takes microseconds is done before another core has heard of it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import torch

from dpfl.gradients.layered import Layered

W = TypeVar("W")
T = TypeVar("T")


class Cores:
    """A thread for each core, on which torch uses one, and a copy of the model for each: it knows one batch at a time.

    They last, for threads have caches of their own.
    """

    def __init__(self, layers: Layered) -> None:
        """Count the cores: torch must not have been told to use fewer for the moment."""
        count = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        self._copies: SimpleQueue[Layered] = SimpleQueue()
        for _ in range(count):
            self._copies.put(layers.another())

    def spread(self, do: Callable[[Layered, W], T], work: Sequence[W]) -> Iterator[T]:
        """Do all of the work, and return what came of it in its order."""

        def with_a_copy(one: W) -> T:
            copy = self._copies.get()
            try:
                return do(copy, one)
            finally:
                self._copies.put(copy)

        with one_core(), _quick_turns():  # whoever takes the results shall not wake cores that are at work
            yield from self._executor.map(with_a_copy, work)


@contextmanager
def _quick_turns() -> Iterator[None]:
    """Let threads hand the interpreter over ten times as quickly: each needs it for a moment between two products."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 10)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def one_core() -> Iterator[None]:
    """Let torch use one core inside the block."""
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(cores)
