"""By which ways a model can be trained fast, as its graph and a few public records tell.

What is found decides between ways that all keep records apart, so that nothing about privacy rests on it; but even so
small an answer about private records would be one that nobody paid for.
"""

import time
from dataclasses import dataclass

import torch

from dpfl.federation import Records
from dpfl.gradients.graph import NotLayered
from dpfl.gradients.layered import Layered, read_layers
from dpfl.gradients.layers import KINDS
from dpfl.gradients.least_squares import is_least_squares
from dpfl.models import Model
from dpfl.precision import products

_ENOUGH = 8  # records that models are tried with


@dataclass(frozen=True)
class Capabilities:
    """What is known about a model."""

    layers: Layered | None  # the model as its layers; None where it has others than known ones
    least_squares: bool  # whether it is a linear regression
    vectorised: bool  # whether torch gives the gradients of many records at once; not asked where layers are known
    why_not: str = ""  # by layers, in words
    cost: float | None = None  # gradients of records, beside that of their batch, as measured where layers are unknown

    def __str__(self) -> str:
        if self.layers is not None:
            return "records' gradients from layers"
        return "records' gradients at once" if self.vectorised else "records' gradients one by one"

    @property
    def way_out(self) -> str:
        """Say what would be faster."""
        known = ", ".join(sorted({kind.__name__ for kind in KINDS}))
        return (
            f"build the model of {known} layers, each used once, and of operations that keep records apart, or train it"
            " with fewer records or rounds"
        )

    @staticmethod
    def none(model: Model, public: Records, why_not: str = "") -> "Capabilities":
        """Take no way but the reference client's."""
        vectorised = model.vectorises(public.x, public.y)
        return Capabilities(None, False, vectorised, why_not, _cost(model, public, vectorised) if why_not else None)


def capabilities_of(model: Model, public: Records) -> Capabilities:
    """Find out; the arithmetic is checked with some public records, or with made-up ones where they are few."""
    tried = _enough(public)
    with products("float32"):  # results are compared
        try:
            layers = read_layers(model, tried.x, tried.y)
        except NotLayered as reason:
            return Capabilities.none(model, public if len(public) else tried, str(reason))
        return Capabilities(layers, is_least_squares(model, tried.x, tried.y), True)


def _enough(public: Records) -> Records:
    """Fill public records up to as many as a model is tried with.

    Each new one has its numbers from several of them, every number in its own place; of a single record the same
    numbers in another order: copies would check less.
    """
    count, device = len(public), public.x.device
    if count >= _ENOUGH:
        return public
    shape, numbers = public.x.shape[1:], public.x.shape[1:].numel()
    if count == 0:  # their shape is public still
        waves = torch.sin(1.7 * torch.arange(_ENOUGH * numbers, device=device)).to(public.x.dtype)
        return Records(waves.view(_ENOUGH, *shape), public.y.new_zeros(_ENOUGH))
    rows, places = torch.arange(_ENOUGH, device=device)[:, None], torch.arange(numbers, device=device)
    flat = public.x.flatten(1)
    if count == 1:
        filled = torch.stack([flat[0].roll(row) for row in range(_ENOUGH)])
    else:
        filled = flat[torch.where(rows < count, rows, rows + places) % count, places]
    return Records(filled.view(_ENOUGH, *shape), public.y[rows[:, 0] % count])


def _cost(model: Model, public: Records, vectorised: bool) -> float:
    """Return how many times as long the gradients of records take as that of their batch."""
    here, few = model.vector(), public.take(torch.arange(min(4, len(public)), device=public.x.device))

    def seconds(times: int, *, apart: bool) -> float:
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            if apart:
                model.record_gradients(here, few.x, few.y, vectorised=vectorised)
            else:
                model.gradient(here, few.x, few.y)
            if few.x.is_cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        return min(taken)

    return seconds(2, apart=True) / seconds(3, apart=False)
