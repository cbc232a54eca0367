"""Who draws: every client from streams of its own, as on its own machine, or a cohort from one stream.

The laws are the same. Clients' own streams give what the reference client gives, draw for draw; one stream saves making
two generators for each client, and on a GPU the trip from the host. Noise that is only ever seen in a sum is drawn
once: a sum of independent Gaussians is a Gaussian whose variance is the sum of theirs. Should somebody look at a cohort
one by one after all, each client's noise is drawn so that it adds up to just that sum: a look changes nothing.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from dpfl.clients.chunks import Chunk
from dpfl.clients.pool import Batch, Pool
from dpfl.clients.uploads import Request
from dpfl.orders import Full, Gaussian, Order, Poisson, Shuffled
from dpfl.privacy.exact_noise import Law
from dpfl.privacy.mechanisms import Source, add_noise, draw, draw_on_device
from dpfl.streams import Keystream, Streams

DrawnBy = Literal["cohort", "client"]  # from one stream for all of a cohort, or each from its own

_AT_ONCE = 2**24  # numbers that are drawn on a GPU at a time


class Draws(Protocol):
    """The randomness of a chunk's clients in one round."""

    def batch(self) -> Batch:
        """Choose each client's records independently, each with its client's sampling rate."""

    def add_noise(self, values: Tensor, sizes: Tensor) -> Tensor:
        """Add noise of the size in its row of [k, 1] to each client's value of [k, d]."""


def own_stream(streams: Streams, purpose: str, client: int, request: Request) -> Source:
    """Return a client's own stream: a function of its key, the run, the charge and the order, and of nothing else.

    Whoever could ask for the same round under two orders would subtract one answer from the other, noise and all. In a
    simulation nobody does, and the order is left out: a threshold that another engine finds equal but for its last bit
    would draw other noise, and candidates that are compared under one seed could not be compared.
    """
    order = None if streams.seeded else _fingerprint(request.charged[client].order)
    root = streams.of(client)
    make = root.generator if streams.fast else root.keystream
    return make(purpose, run=request.run, round=request.charge, order=order)


def cohort_stream(streams: Streams, purpose: str, chunk: Chunk, request: Request) -> Source:
    """Return a stream of a cohort's."""
    make = streams.secret.generator if streams.fast else streams.secret.keystream
    return make(purpose, **of_cohort(chunk, request))


@lru_cache(maxsize=4096)
def _fingerprint(order: Order) -> str:
    return hashlib.blake2b(order.to_json().encode(), digest_size=16).hexdigest()


def batch_positions(batch: Poisson | Shuffled, records: int, rng: Source) -> Callable[[], NDArray[np.int64]]:
    """Return what draws a client's next batch, as positions among its records.

    Shuffled batches are taken one after the other from a new order of the records for every pass.
    """
    if isinstance(batch, Poisson):
        rate = batch.sampling_rate
        return lambda: np.flatnonzero(rng.random(records) < rate)
    return partial(next, _shuffled(batch, records, rng))


def _shuffled(batch: Shuffled, records: int, rng: Source) -> Iterator[NDArray[np.int64]]:
    size = min(batch.batch_size, records)
    while True:
        # Places by sorted uniform numbers: what every source of randomness can give.
        rows = np.argsort(rng.random(records), kind="stable")
        for start in range(0, records - size + 1, size):
            yield rows[start : start + size]


def _choosers(chunk: Chunk, pool: Pool, sources: Sequence[Source]) -> list[Callable[[], NDArray[np.int64]]]:
    """Return what draws the batches of each client; nothing where all its records are one."""
    return [
        batch_positions(paid.order.batch, pool.sizes[client], rng)
        for client, paid, rng in zip(chunk.clients, chunk.paid, sources, strict=True)
        if not isinstance(paid.order.batch, Full)
    ]


class EachClient:
    """Every client draws from its own streams."""

    def __init__(self, streams: Streams, pool: Pool, chunk: Chunk, request: Request, dim: int) -> None:
        self._pool, self._chunk, self._dim = pool, chunk, dim
        self._batches, self._noises = (
            [own_stream(streams, purpose, client, request) for client in chunk.clients]
            for purpose in ("batches", "noise")
        )
        self._choose = _choosers(chunk, pool, self._batches)

    def batch(self) -> Batch:
        """Choose each client's records."""
        return self._pool.some(self._chunk.clients, [choose() for choose in self._choose])

    def add_noise(self, values: Tensor, sizes: Tensor) -> Tensor:
        """Add each client's noise, on the host."""
        return _add_to_rows(values, self._chunk, sizes, self._noises)


def of_cohort(chunk: Chunk, request: Request) -> dict[str, int | str]:
    """Return what names the streams of a cohort's draws."""
    return {"client": chunk.clients[0], "run": request.run, "round": request.charge}


class OneStream:
    """All clients of a chunk draw from one stream, named after the first of them."""

    def __init__(self, streams: Streams, pool: Pool, chunk: Chunk, request: Request, dim: int) -> None:
        self._pool, self._chunk, self._dim = pool, chunk, dim
        self._rng = cohort_stream(streams, "chunk", chunk, request)
        self._choose = _choosers(chunk, pool, [self._rng] * len(chunk.clients))

    def batch(self) -> Batch:
        """Choose each client's records."""
        return self._pool.some(self._chunk.clients, [choose() for choose in self._choose])

    def add_noise(self, values: Tensor, sizes: Tensor) -> Tensor:
        """Add the noise of all."""
        if isinstance(self._rng, Keystream):
            return _add_to_rows(values, self._chunk, sizes, [self._rng] * len(self._chunk.clients))
        drawn = torch.from_numpy(draw(self._chunk.law, (len(self._chunk.clients), self._dim), self._rng))
        return values + drawn.to(values) * sizes


def _add_to_rows(values: Tensor, chunk: Chunk, sizes: Tensor, sources: Sequence[Source]) -> Tensor:
    """Add noise from a source of its own to each client's row."""
    relative = (paid.relative_noise for paid in chunk.paid) if isinstance(sources[0], Keystream) else repeat(1.0)
    rows = zip(values, sizes[:, 0].tolist(), sources, relative, strict=False)
    noised = [add_noise(row, chunk.law, size, source, relative_size=one) for row, size, source, one in rows]
    return torch.stack(noised).to(values)


class OnDevice:
    """The same from one stream on a GPU, which never waits for the host."""

    def __init__(self, rng: torch.Generator, pool: Pool, chunk: Chunk, dim: int, *, roomy: bool) -> None:
        """Draw from `rng`; roomy: make room for batches of any size, where else almost all fit."""
        self._pool, self._law, self._dim, self._rng = pool, chunk.law, dim, rng
        self._clients = len(chunk.clients)
        self.facts = torch.zeros(0)  # size, start and sampling rate of each client
        self.cut = torch.zeros((), dtype=torch.bool)  # whether a batch did not fit
        self.longest = self.room = 0
        self.passes = 0  # over the records of those who are through with them soonest, where batches are shuffled
        self._steps = self._left = chunk.order.steps
        self._drawn: list[Batch] = []
        if chunk.is_sampled:
            sizes = [pool.sizes[client] for client in chunk.clients]
            starts = [pool.starts[client] for client in chunk.clients]
            self.longest = max(sizes)
            if isinstance(chunk.order.batch, Shuffled):
                batches = [paid.order.batch for paid in chunk.paid]
                taken = [batch.taken(size) for batch, size in zip(batches, sizes, strict=True)]  # type: ignore[union-attr]
                self.facts, self.room = torch.tensor([sizes, starts, taken], dtype=torch.float64), max(taken)
                self.passes = max(
                    math.ceil(self._steps / (size // few)) for size, few in zip(sizes, taken, strict=True)
                )
            else:
                self.facts = torch.tensor([sizes, starts, chunk.sampling_rates], dtype=torch.float64)
                self.room = self.longest if roomy else max(map(room_for, sizes, chunk.sampling_rates))

    def begin(self, facts: Tensor) -> None:
        """Draw for clients of these sizes, starts and sampling rates (or batch sizes), which are on the device now."""
        self.facts, self.cut = facts, torch.zeros_like(self.cut, device=facts.device)
        self._left, self._drawn = self._steps, []

    def batch(self) -> Batch:
        """Choose each client's records, for as many steps at once as there is room for."""
        if not self._drawn and self.passes:
            self._drawn = self._shuffle()
        elif not self._drawn:
            several = max(1, min(self._left, _AT_ONCE // (self._clients * self.longest)))
            self._drawn, self._left = self._draw(several), self._left - several
        return self._drawn.pop()

    def _shuffle(self) -> list[Batch]:
        """Shuffle each client's records for all its passes, and return the batches of the round, the last step first.

        A client's pass ends where no whole batch is left of it, so that clients of other sizes begin theirs at other
        steps.
        """
        sizes, starts, taken = self.facts[:, :, None].long()
        shape = (self.passes, self._clients, self.longest)
        keys = torch.rand(shape, dtype=torch.float64, device=sizes.device, generator=self._rng)
        each = torch.arange(self.longest, device=sizes.device)
        shuffled = torch.where(each < sizes, keys, 2.0).argsort(dim=2)  # what is nobody's comes last
        place, client = torch.arange(self.room, device=sizes.device), torch.arange(self._clients, device=sizes.device)
        drawn = []
        for step in reversed(range(self._steps)):
            one_pass = sizes // taken
            at = (step % one_pass * taken + place).clamp(max=self.longest - 1)
            rows = starts + shuffled[(step // one_pass)[:, 0], client].gather(1, at)
            rows = torch.where(place < taken, rows, self._pool.gap).flatten()
            drawn.append(Batch(rows, (rows != self._pool.gap).to(self._pool.x.dtype)))
        return drawn

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

    def add_noise(self, values: Tensor, sizes: Tensor) -> Tensor:
        """Add the noise of all."""
        return values + draw_on_device(self._law, (self._clients, self._dim), self._rng).to(values) * sizes


def room_for(records: int, rate: float) -> int:
    """Return a number of records that a Poisson batch stays below but for a chance of about one in a thousand."""
    expected = records * rate
    return min(records, math.ceil(expected + 3 * math.sqrt(expected * (1 - rate)) + 4))


def draw_sum(
    law: Law, sizes: Sequence[float] | NDArray[np.float64], dim: int, rng: Generator | torch.Generator
) -> Tensor:
    """Draw Σ_i sizes[i]·noise_i, [dim]: if it is Gaussian in one draw, else in as many as there are."""
    if law is Gaussian:
        return _several(law, 1, dim, rng)[0] * float(np.linalg.norm(sizes))
    total: Tensor | None = None
    for some in torch.split(torch.as_tensor(np.asarray(sizes)), max(1, _AT_ONCE // dim)):
        noise = _several(law, len(some), dim, rng)
        total = some.to(noise) @ noise if total is None else total + some.to(noise) @ noise
    assert total is not None
    return total


def draw_each(law: Law, count: int, dim: int, rng: Generator | torch.Generator) -> Tensor:
    """Draw the noises of size 1 [count, dim] that `draw_sum` adds up, where it draws as many as there are."""
    blocks = torch.split(torch.arange(count), max(1, _AT_ONCE // dim))
    return torch.cat([_several(law, len(block), dim, rng) for block in blocks])


def _several(law: Law, count: int, dim: int, rng: Generator | torch.Generator) -> Tensor:
    if isinstance(rng, Generator):
        return torch.from_numpy(draw(law, (count, dim), rng))
    return draw_on_device(law, (count, dim), rng)


def adding_up_to(total: Tensor, noises: Tensor, stds: Tensor, weights: Tensor) -> Tensor:
    """Return Gaussian noises [k, d] of these standard deviations [k] with Σ_i weights[i]·noise_i = total.

    noises: independent, of just these standard deviations; total: independent of them, with the law of such a sum.
    n_i = x_i + w_i·s_i²/V·(total − Σ_j w_j·x_j), where V = Σ_j w_j²·s_j². All covariances cancel: Cov(x_i, Σ_j w_j·x_j)
    is w_i·s_i², and total and that sum both have variance V. So the n_i are independent with variance s_i², as the x_i.
    """
    shares = weights * stds.square()
    variance = (weights * shares).sum()
    if variance == 0:  # nothing of it is in the sum
        return noises
    return noises + (shares / variance)[:, None] * (total - weights @ noises)
