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
from torch import Tensor

from dpfl.clients.pool import Pool
from dpfl.orders import Gaussian, Laplace
from dpfl.privacy.mechanisms import draw, draw_on_device
from dpfl.streams import Streams

Law = type[Gaussian] | type[Laplace]


class Draws(Protocol):
    """The randomness of some clients in one round."""

    def batch(self, pool: Pool, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Choose each client's records independently, each with its client's rate.

        Returns where they lie in the pool, as many for each client, and which of them are records and not gaps.
        """

    def noise(self, law: Law, dim: int) -> Tensor:
        """Draw noise of size 1 for each client, [k, dim]."""


class EachClient:
    """Every client draws from its own streams."""

    def __init__(self, streams: Streams, clients: Sequence[int], round: int) -> None:
        self._clients = clients
        self._batches = [streams.generator("batches", client=client, round=round) for client in clients]
        self._noises = [streams.generator("noise", client=client, round=round) for client in clients]

    def batch(self, pool: Pool, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Choose each client's records."""
        streams = zip(self._clients, self._batches, rates, strict=True)
        return pool.some(
            self._clients, [np.flatnonzero(rng.random(pool.sizes[client]) < rate) for client, rng, rate in streams]
        )

    def noise(self, law: Law, dim: int) -> Tensor:
        """Draw each client's noise, on the host."""
        return torch.from_numpy(np.stack([draw(law, (dim,), rng) for rng in self._noises]))


class OneStream:
    """All clients of a chunk draw from one stream, named after the first of them."""

    def __init__(self, streams: Streams, clients: Sequence[int], round: int) -> None:
        self._clients = clients
        self._batches = streams.generator("chunk batches", client=clients[0], round=round)
        self._noises = streams.generator("chunk noise", client=clients[0], round=round)

    def batch(self, pool: Pool, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Choose each client's records."""
        pairs = [(pool.sizes[client], rate) for client, rate in zip(self._clients, rates, strict=True)]
        return pool.some(self._clients, [np.flatnonzero(self._batches.random(size) < rate) for size, rate in pairs])

    def noise(self, law: Law, dim: int) -> Tensor:
        """Draw the noise of all."""
        return torch.from_numpy(draw(law, (len(self._clients), dim), self._noises))


class OnDevice:
    """The same from one stream on a GPU, which must never wait for the host."""

    def __init__(self, streams: Streams, clients: Sequence[int], round: int, device: torch.device) -> None:
        self._clients = clients
        self._rng = streams.on_device("chunk", device, client=clients[0], round=round)

    def batch(self, pool: Pool, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Choose the records whose uniform number is below the rate, among the smallest of their client.

        A batch has room for ten standard deviations and ten records more than it is expected to hold, so that the
        chance of cutting one is below 1e-18.
        """
        sizes = torch.tensor([pool.sizes[client] for client in self._clients], device=pool.device)
        starts = torch.tensor([pool.starts[client] for client in self._clients], device=pool.device)
        below = torch.tensor(rates, dtype=torch.float64, device=pool.device)
        longest = max(pool.sizes[client] for client in self._clients)
        room = max(room_for(pool.sizes[client], rate) for client, rate in zip(self._clients, rates, strict=True))
        uniform = torch.rand(len(sizes), longest, dtype=torch.float64, device=pool.device, generator=self._rng)
        uniform.masked_fill_(torch.arange(longest, device=pool.device) >= sizes[:, None], 2.0)
        least, positions = uniform.topk(min(room, longest), dim=1, largest=False, sorted=False)
        real = least < below[:, None]
        rows = torch.where(real, positions + starts[:, None], pool.gap)
        return rows.flatten(), real.flatten().to(pool.x.dtype)

    def noise(self, law: Law, dim: int) -> Tensor:
        """Draw the noise of all."""
        return draw_on_device(law, (len(self._clients), dim), self._rng)


def room_for(records: int, rate: float) -> int:
    """Return a number of records that a Poisson batch stays below but for a chance of 1e-18."""
    expected = records * rate
    return min(records, math.ceil(expected + 10 * math.sqrt(expected * (1 - rate)) + 10))


def draw_sum(law: Law, sizes: Tensor, dim: int, streams: Streams, first: int, round: int) -> Tensor:
    """Draw Σ_i sizes[i]·noise_i, [dim]: if it is Gaussian in one draw, else in as many as there are."""
    if sizes.device.type == "cpu":
        host = streams.generator("sum of noise", client=first, round=round)
        if law is Gaussian:
            return torch.from_numpy(draw(law, (dim,), host)) * sizes.square().sum().sqrt()
        total = np.zeros(dim)
        for size in sizes.tolist():
            total += size * draw(law, (dim,), host)
        return torch.from_numpy(total)
    rng = streams.on_device("sum of noise", sizes.device, client=first, round=round)
    if law is Gaussian:
        return draw_on_device(law, (dim,), rng) * sizes.square().sum().sqrt()
    summed = torch.zeros(dim, device=sizes.device)
    for size in sizes:
        summed += size * draw_on_device(law, (dim,), rng)
    return summed
