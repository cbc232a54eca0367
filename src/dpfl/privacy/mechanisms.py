"""The noise itself: drawn from the generator that is passed in, never from a default one.

Noise is drawn in double precision and added in the precision of the value. Floating-point noise lies on a finite grid,
which a patient adversary with the exact bits of an upload can exploit (Mironov, 2012); a simulation has no such reader.
"""

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from dpfl.orders import Gaussian, Laplace

Law = type[Gaussian] | type[Laplace]


def add_noise(value: Tensor, noise: Gaussian | Laplace, rng: Generator) -> Tensor:
    """Return `value` plus independent noise on every coordinate."""
    size = noise.std if isinstance(noise, Gaussian) else noise.scale
    drawn = draw(type(noise), tuple(value.shape), rng) * size
    return value + torch.from_numpy(drawn).to(device=value.device, dtype=value.dtype)


def draw(law: Law, shape: tuple[int, ...], rng: Generator) -> NDArray[np.float64]:
    """Draw noise of standard deviation 1, or of scale 1."""
    return rng.standard_normal(shape) if law is Gaussian else rng.laplace(size=shape)


def draw_on_device(law: Law, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw the same on the device of a generator of torch's, in single precision."""
    drawn = torch.empty(shape, device=rng.device)
    if law is Gaussian:
        return drawn.normal_(generator=rng)
    # The difference of two exponentials is Laplace.
    return drawn.exponential_(generator=rng) - torch.empty_like(drawn).exponential_(generator=rng)
