"""The stacked clients: a whole cohort trains at once, and agrees with the reference client.

Clients with orders of one kind are cut into chunks that fit the memory; a chunk's models are one tensor [k, d], and
each step takes the batches of its k clients through the model together (`layered`). What is small is stacked; what is
large enough to keep a core busy comes alone, one client on each core. Where nobody asks for uploads one by one, only
their weighted sum is formed: after a single step that is one batch over all clients' records, and noise on which
nothing is trained any more is drawn once (`draws`). A model that is not made of known layers trains by the reference
client's loop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from queue import SimpleQueue

import torch
from torch import Tensor

from dpfl.clients.chunks import Chunk, by_kind
from dpfl.clients.clipping import clip_rows
from dpfl.clients.draws import Draws, EachClient, OnDevice, OneStream, draw_sum, room_for
from dpfl.clients.layered import Layered
from dpfl.clients.least_squares import Moments
from dpfl.clients.pool import Pool
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.together import Together
from dpfl.clients.ways import Ways
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.orders import ClientClip, Full, ModelClip, Poisson, Question, RecordClip
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams, layer_randomness

# On the CPU a chunk of several clients holds at most this many numbers (8 MiB of float32), which a core keeps near, and
# a client that is larger comes alone, with so many of its records at a time. A GPU is given an eighth of its memory.
_CPU_CHUNK = 2**21
_CPU_BLOCK = 2**26
_GPU_SHARE = 8


class StackedClients:
    """The clients of a federation, trained together."""

    def __init__(
        self,
        model: Model,
        records: tuple[Records, ...],
        streams: Streams,
        *,
        ways: Ways,
    ) -> None:
        """Take the model, each client's records and the streams of the run.

        ways: by which the model can be trained, as public records showed (`dpfl.clients.ways`).
        """
        self.model, self.records, self.streams = model, records, streams
        self._loop = ReferenceClients(model, records, streams, vectorised=ways.vectorised)
        self._layers, self._least_squares = ways.layers, ways.least_squares

    def perform(
        self, charged: Mapping[int, Charged], broadcast: Tensor, round: int, *, apart: bool = True
    ) -> Mapping[int, Tensor]:
        """Return what each client of the cohort uploads; where not apart, only their weighted sum can be asked for."""
        if self._layers is None:
            return self._loop.perform(charged, broadcast, round)
        if not apart:
            return Together(charged, lambda weights: self._sum(charged, weights, broadcast, round))
        work = partial(self._updates, broadcast=broadcast, round=round, apart=True)
        chunks = self._chunks(charged)
        updates = {
            client: update
            for chunk, rows in zip(chunks, self._spread(work, chunks), strict=True)
            for client, update in zip(chunk.clients, rows, strict=True)
        }
        return {client: updates[client] for client in charged}

    def answer(
        self, questions: Sequence[Question], before: Tensor, uploads: Mapping[int, Tensor], after: Tensor
    ) -> dict[Question, dict[int, float]]:
        """Return what clients tell about the models before and after a round, without noise."""
        return self._loop.answer(questions, before, uploads, after)

    def _sum(
        self, charged: Mapping[int, Charged], weights: Mapping[int, float], broadcast: Tensor, round: int
    ) -> Tensor:
        """Return Σ_i weights[i]·upload_i; noise on which nothing is trained any more is drawn once for all."""
        work = partial(self._weighted, weights=weights, broadcast=broadcast, round=round)
        total = torch.zeros_like(broadcast)
        for part in self._spread(work, self._chunks(charged)):
            total += part
        for kind in by_kind(charged):
            if kind.order.noise is not None:
                sizes = kind.weighed(weights, broadcast)[:, 0] * kind.late_noise(broadcast)[:, 0]
                drawn = draw_sum(type(kind.order.noise), sizes, len(broadcast), self.streams, kind.clients[0], round)
                total += drawn.to(broadcast.dtype)
        return total

    def _chunks(self, charged: Mapping[int, Charged]) -> list[Chunk]:
        """Cut the cohort into chunks of orders of one kind that fit the memory."""
        return [chunk for kind in by_kind(charged) for chunk in kind.cut(self._room, partial(self._cost, kind))]

    @cached_property
    def _room(self) -> int:
        if self._pool.device.type == "cpu":
            return _CPU_CHUNK
        return int(torch.cuda.get_device_properties(self._pool.device).total_memory) // 4 // _GPU_SHARE

    def _cost(self, kind: Chunk, client: int) -> int:
        """Return how many numbers a client of this kind adds to a chunk."""
        own = 0 if kind.is_one_batch else 4 * self.model.dim
        if self._by_moments(kind):
            return own + self.model.dim**2
        return own + self._batch_size(kind, client) * self._numbers_a_record(kind)

    def _batch_size(self, kind: Chunk, client: int) -> int:
        records, batch = self._pool.sizes[client], kind.order.batch
        return room_for(records, batch.sampling_rate) if isinstance(batch, Poisson) else records

    def _numbers_a_record(self, kind: Chunk) -> int:
        assert self._layers is not None
        return self._layers.footprint(formed=isinstance(kind.order.clip, RecordClip))

    def _by_moments(self, kind: Chunk) -> bool:
        full = isinstance(kind.order.batch, Full) and not isinstance(kind.order.clip, RecordClip)
        return self._least_squares and full

    @cached_property
    def _pool(self) -> Pool:
        return Pool(self.records)

    @cached_property
    def _moments(self) -> Moments:
        return Moments(self.model, self._pool)

    @cached_property
    def _twins(self) -> SimpleQueue[Layered]:
        """Return as many twins of the model as there are cores: a twin knows one batch at a time."""
        twins: SimpleQueue[Layered] = SimpleQueue()
        for _ in range(torch.get_num_threads()):
            twins.put(Layered(self.model))
        return twins

    def _spread(self, work: Callable[[Layered, Chunk], Tensor], chunks: Sequence[Chunk]) -> Iterator[Tensor]:
        """Do the work of all chunks, each on a core of its own where there are several; results are in their order."""
        assert self._layers is not None
        cores = torch.get_num_threads()
        if self._pool.device.type != "cpu" or cores == 1 or len(chunks) == 1 or self._layers.random:
            yield from (work(self._layers, chunk) for chunk in chunks)
            return

        def with_a_twin(chunk: Chunk) -> Tensor:
            twin = self._twins.get()
            try:
                return work(twin, chunk)
            finally:
                self._twins.put(twin)

        with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as executor:
            yield from executor.map(with_a_twin, chunks)

    def _weighted(
        self, layers: Layered, chunk: Chunk, *, weights: Mapping[int, float], broadcast: Tensor, round: int
    ) -> Tensor:
        """Return the weighted sum of a chunk's updates, without the noise that is drawn for all."""
        weighed = chunk.weighed(weights, broadcast)
        if not chunk.is_one_batch or self._by_moments(chunk):
            return weighed[:, 0] @ self._updates(layers, chunk, broadcast=broadcast, round=round, apart=False)
        draws = self._draws(chunk, round, apart=False)
        # One step from one model: Σ_i p_i·(−η_i/m_i)·Σ_r clipped gradient is a sum over all records of all clients.
        rows, real = self._batch(chunk, draws)
        batch = self._pool.take(rows)
        each = -weighed * chunk.rates(broadcast)[:, :1] / chunk.divisors(broadcast)
        counts = each.expand(-1, len(batch) // len(chunk.clients)).flatten()
        with self._randomness(chunk, round):
            return self._sums(layers, chunk, broadcast, batch, counts if real is None else real * counts, 1)[0]

    def _updates(self, layers: Layered, chunk: Chunk, *, broadcast: Tensor, round: int, apart: bool) -> Tensor:
        """Return the update of each client [k, d]; where not apart, without the noise that comes last."""
        order, draws = chunk.order, self._draws(chunk, round, apart=apart)
        rates = chunk.rates(broadcast)
        whole = None if isinstance(order.batch, Poisson) else self._batch(chunk, draws)
        weights = broadcast
        with self._randomness(chunk, round):
            for step in range(order.steps):
                gradient = self._gradient(layers, chunk, weights, whole or self._batch(chunk, draws))
                if order.noise is not None and order.noise_on == "step" and (apart or step < order.steps - 1):
                    noise = draws.noise(type(order.noise), len(broadcast)).to(gradient)
                    gradient = gradient + noise * chunk.step_noise(broadcast)
                if order.proximal:
                    gradient = gradient + chunk.pulls(broadcast) * (weights - broadcast)
                weights = weights - rates[:, step : step + 1] * gradient
        if isinstance(order.clip, ModelClip):
            weights = clip_rows(weights, chunk.clip_norms(broadcast)[:, 0], order.clip.norm)
        update = weights - broadcast
        if order.noise is not None and order.noise_on == "upload" and apart:
            update = update + draws.noise(type(order.noise), len(broadcast)).to(update) * chunk.late_noise(broadcast)
        return update

    def _gradient(
        self, layers: Layered, chunk: Chunk, weights: Tensor, batch: tuple[slice | Tensor, Tensor | None]
    ) -> Tensor:
        """Return what a step follows, [k, d]: clipped, and divided by the expected number of records."""
        clip = chunk.order.clip
        if self._by_moments(chunk):
            total = self._moments.sums(weights, chunk.positions(weights.device))
        else:
            rows, real = batch
            total = self._sums(layers, chunk, weights, self._pool.take(rows), real, len(chunk.clients))
        gradient = total / chunk.divisors(weights)
        if isinstance(clip, ClientClip):
            gradient = clip_rows(gradient, chunk.clip_norms(weights)[:, 0], clip.norm)
        return gradient

    def _sums(
        self, layers: Layered, chunk: Chunk, weights: Tensor, batch: Records, counts: Tensor | None, clients: int
    ) -> Tensor:
        """Return Σ_r counts[r]·gradient of record r, clipped if so ordered, for each client [clients, d].

        A client that came alone may be larger than the memory: its records are taken in blocks.
        """
        if len(batch) == 0:
            return weights.new_zeros(clients, self.model.dim)
        if weights.ndim == 2 and len(weights) == 1:
            weights = weights[0]
        clip, each = chunk.order.clip, len(batch) // len(chunk.clients)
        clip_norms = chunk.clip_norms(weights).expand(-1, each).flatten() if isinstance(clip, RecordClip) else None
        size = len(batch)
        if clients == 1:
            size = max(1, max(self._room, _CPU_BLOCK) // self._numbers_a_record(chunk))
        total = weights.new_zeros(clients, self.model.dim)
        for start in range(0, len(batch), size):
            block = slice(start, start + size)
            bound = None if clip_norms is None or clip is None else (clip_norms[block], clip.norm)
            counted = None if counts is None else counts[block]
            sums = partial(layers.sums, weights, batch.x[block], batch.y[block], counted, bound, clients)
            part = sums()
            if bound is not None and not torch.isfinite(part).all():  # a gradient that cannot be scaled counts as zero
                part = sums(careful=True)
            total = part if size >= len(batch) else total + part
        return total

    def _batch(self, chunk: Chunk, draws: Draws) -> tuple[slice | Tensor, Tensor | None]:
        """Return where the records of each client's next batch lie, and which of them are records and not gaps."""
        if isinstance(chunk.order.batch, Poisson):
            return draws.batch(self._pool, chunk.sampling_rates)
        return self._pool.whole(chunk.clients)

    def _draws(self, chunk: Chunk, round: int, *, apart: bool) -> Draws:
        if apart:
            return EachClient(self.streams, chunk.clients, round)
        if self._pool.device.type == "cpu":
            return OneStream(self.streams, chunk.clients, round)
        return OnDevice(self.streams, chunk.clients, round, self._pool.device)

    def _randomness(self, chunk: Chunk, round: int) -> AbstractContextManager[None]:
        """Let random layers draw from a stream of the chunk's own, where the model has any."""
        assert self._layers is not None
        if not self._layers.random:
            return nullcontext()
        rng = self.streams.generator("layers", client=chunk.clients[0], round=round)
        return layer_randomness(rng, self._pool.device)
