"""The noise itself: drawn from the generator that is passed in, never from a default one.

Noise is drawn in double precision and added in the precision of the value. Floating-point noise lies on a finite grid,
which a patient adversary with the exact bits of an upload can exploit (Mironov, 2012); a simulation has no such reader.
"""

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from dpfl.orders import Gaussian, Laplace


def add_noise(value: Tensor, noise: Gaussian | Laplace, rng: Generator) -> Tensor:
    """Return `value` plus independent noise on every coordinate."""
    drawn: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    if isinstance(noise, Gaussian):
        drawn = rng.standard_normal(tuple(value.shape)) * noise.std
    else:
        drawn = rng.laplace(scale=noise.scale, size=tuple(value.shape))
    return value + torch.from_numpy(drawn).to(device=value.device, dtype=value.dtype)
