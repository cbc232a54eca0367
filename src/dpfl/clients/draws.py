"""Who draws: every client from streams of its own, as on its own machine, or a chunk of clients from one stream.

The laws are the same. Clients' own streams give what the reference client gives, draw for draw; one stream saves making
two generators for each client, and on a GPU the trip from the host. Noise that is only ever seen in a sum is drawn
once: a sum of independent Gaussians is a Gaussian whose variance is the sum of theirs.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from dpfl.clients.chunks import Chunk
from dpfl.clients.pool import Batch, Pool
from dpfl.orders import Gaussian, Poisson
from dpfl.privacy.mechanisms import Law, draw, draw_on_device
from dpfl.streams import Streams

_AT_ONCE = 2**24  # numbers that are drawn on a GPU at a time


class Draws(Protocol):
    """The randomness of a chunk's clients in one round."""

    def batch(self) -> Batch:
        """Choose each client's records independently, each with its client's sampling rate."""

    def noise(self) -> Tensor:
        """Draw noise of size 1 for each client, [k, d]."""


class EachClient:
    """Every client draws from its own streams."""

    def __init__(self, streams: Streams, pool: Pool, chunk: Chunk, round: int, dim: int) -> None:
        self._pool, self._chunk, self._dim = pool, chunk, dim
        self._batches = [streams.generator("batches", client=client, round=round) for client in chunk.clients]
        self._noises = [streams.generator("noise", client=client, round=round) for client in chunk.clients]

    def batch(self) -> Batch:
        """Choose each client's records."""
        clients = zip(self._batches, self._chunk.clients, self._chunk.sampling_rates, strict=True)
        chosen = [np.flatnonzero(rng.random(self._pool.sizes[client]) < rate) for rng, client, rate in clients]
        return self._pool.some(self._chunk.clients, chosen)

    def noise(self) -> Tensor:
        """Draw each client's noise, on the host."""
        law = self._chunk.law
        return torch.from_numpy(np.stack([draw(law, (self._dim,), rng) for rng in self._noises]))


class OneStream:
    """All clients of a chunk draw from one stream, named after the first of them."""

    def __init__(self, streams: Streams, pool: Pool, chunk: Chunk, round: int, dim: int) -> None:
        self._pool, self._chunk, self._dim = pool, chunk, dim
        self._rng = streams.generator("chunk", client=chunk.clients[0], round=round)

    def batch(self) -> Batch:
        """Choose each client's records."""
        clients = zip(self._chunk.clients, self._chunk.sampling_rates, strict=True)
        chosen = [np.flatnonzero(self._rng.random(self._pool.sizes[client]) < rate) for client, rate in clients]
        return self._pool.some(self._chunk.clients, chosen)

    def noise(self) -> Tensor:
        """Draw the noise of all."""
        return torch.from_numpy(draw(self._chunk.law, (len(self._chunk.clients), self._dim), self._rng))


class OnDevice:
    """The same from one stream on a GPU, which never waits for the host."""

    def __init__(self, rng: torch.Generator, pool: Pool, chunk: Chunk, dim: int, *, roomy: bool) -> None:
        """Draw from `rng`; roomy: make room for batches of any size, where else almost all fit."""
        self._pool, self._law, self._dim, self._rng = pool, chunk.law, dim, rng
        self._clients = len(chunk.clients)
        self.facts = torch.zeros(0)  # size, start and sampling rate of each client
        self.cut = torch.zeros((), dtype=torch.bool)  # whether a batch did not fit
        self.longest = self.room = 0
        self._steps = self._left = chunk.order.steps
        self._drawn: list[Batch] = []
        if isinstance(chunk.order.batch, Poisson):
            sizes = [pool.sizes[client] for client in chunk.clients]
            starts = [pool.starts[client] for client in chunk.clients]
            self.facts = torch.tensor([sizes, starts, chunk.sampling_rates], dtype=torch.float64)
            self.longest = max(sizes)
            self.room = self.longest if roomy else max(map(room_for, sizes, chunk.sampling_rates))

    def begin(self, facts: Tensor) -> None:
        """Draw for clients of these sizes, starts and sampling rates, which are on the device now."""
        self.facts, self.cut = facts, torch.zeros_like(self.cut, device=facts.device)
        self._left, self._drawn = self._steps, []

    def batch(self) -> Batch:
        """Choose each client's records, for as many steps at once as there is room for."""
        if not self._drawn:
            several = max(1, min(self._left, _AT_ONCE // (self._clients * self.longest)))
            self._drawn, self._left = self._draw(several), self._left - several
        return self._drawn.pop()

    def _draw(self, steps: int) -> list[Batch]:
        """Choose the records whose uniform number is below the rate, and put them side by side.

        Where there is no room for all of a client's, the batch is noted as cut, and must be drawn again with room.
        """
        sizes, starts, rates = self.facts[:, :, None]
        shape = (steps, self._clients, self.longest)
        uniform = torch.rand(shape, dtype=torch.float64, device=sizes.device, generator=self._rng)
        each = torch.arange(self.longest, device=sizes.device)
        chosen = (uniform < rates) & (each < sizes)
        place = chosen.cumsum(dim=2)  # of each chosen record in its batch, counted from one
        self.cut = self.cut | (place[:, :, -1] > self.room).any()
        place = torch.where(chosen, place, 0).clamp(max=self.room)
        rows = torch.full((steps, self._clients, self.room + 1), self._pool.gap, device=sizes.device)
        found = (each + starts.long()).expand(shape)
        rows = rows.scatter(2, place, found)[:, :, 1:].flatten(1)  # what was not chosen went to place 0
        real = (rows != self._pool.gap).to(self._pool.x.dtype)
        return [Batch(*one) for one in zip(rows, real, strict=True)]

    def noise(self) -> Tensor:
        """Draw the noise of all."""
        return draw_on_device(self._law, (self._clients, self._dim), self._rng)


def room_for(records: int, rate: float) -> int:
    """Return a number of records that a Poisson batch stays below but for a chance of about one in a thousand."""
    expected = records * rate
    return min(records, math.ceil(expected + 3 * math.sqrt(expected * (1 - rate)) + 4))


def draw_sum(
    law: Law, sizes: Sequence[float] | NDArray[np.float64], dim: int, rng: Generator | torch.Generator
) -> Tensor:
    """Draw Σ_i sizes[i]·noise_i, [dim]: if it is Gaussian in one draw, else in as many as there are."""

    def several(count: int) -> Tensor:
        if isinstance(rng, Generator):
            return torch.from_numpy(draw(law, (count, dim), rng))
        return draw_on_device(law, (count, dim), rng)

    if law is Gaussian:
        return several(1)[0] * float(np.linalg.norm(sizes))
    first, *others = torch.split(torch.as_tensor(np.asarray(sizes)), max(1, _AT_ONCE // dim))

    def weighted(some: Tensor) -> Tensor:
        noise = several(len(some))
        return some.to(noise) @ noise

    return sum((weighted(some) for some in others), weighted(first))
