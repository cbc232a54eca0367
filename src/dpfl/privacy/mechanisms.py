"""The noise itself: drawn from the source that is passed in, never from a default one.

From a keystream, which real runs draw from, it is exact, on a public grid (`exact_noise`). From a generator it is fast,
in floating point, and the bits of a sum may tell what it was added to: for simulations, which have no such reader.
"""

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from dpfl.orders import Gaussian
from dpfl.privacy.exact_noise import Law, add_exact_noise, grid_bits
from dpfl.streams import Keystream

Source = Generator | Keystream


def add_noise(value: Tensor, law: Law, size: float, source: Source, *, relative_size: float) -> Tensor:
    """Return a value [d] plus independent noise on every coordinate, in double precision.

    size: the standard deviation, or the scale; relative_size: the same in units of the value's sensitivity.
    """
    if isinstance(source, Keystream):
        return add_exact_noise(value, law, size, grid_bits(law, relative_size, value.numel()), source)
    drawn = draw(law, tuple(value.shape), source) * size
    return value.double() + torch.from_numpy(drawn).to(value.device)


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
