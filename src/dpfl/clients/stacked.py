"""The stacked clients: a whole cohort trains at once, and agrees with the reference client.

Clients with orders of one kind are cut into chunks that fit the memory; a chunk's models are one tensor [k, d], and
each step takes the batches of its k clients through the model together (`layered`). What is small is stacked; what is
large enough to keep a core busy comes alone, one client on each core. Where nobody asks for uploads one by one, only
their weighted sum is formed: after a single step that is one batch over all clients' records, and noise on which
nothing is trained any more is drawn once (`draws`). A model that is not made of known layers trains by the reference
client's loop.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from dpfl.clients.answers import Answers
from dpfl.clients.beside import Told, beside, told_by, weighed
from dpfl.clients.chunks import Chunk, Columns, by_kind
from dpfl.clients.cores import Cores, one_core
from dpfl.clients.draws import (
    DrawnBy,
    Draws,
    EachClient,
    OnDevice,
    OneStream,
    adding_up_to,
    cohort_stream,
    draw_each,
    draw_sum,
    of_cohort,
    own_stream,
    room_for,
)
from dpfl.clients.graphs import Graphs, Results
from dpfl.clients.local_steps import LocalSteps, Trained, has_late_noise, is_one_batch
from dpfl.clients.pool import Batch, Pool
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.uploads import Engine, Request, Separate, Summed, Uploads
from dpfl.federation import Records
from dpfl.gradients.capabilities import Capabilities
from dpfl.gradients.layered import Layered
from dpfl.gradients.least_squares import Moments
from dpfl.models import Model
from dpfl.orders import NEEDS, Full, Gaussian, Laplace, Need, Poisson, Question, RecordClip, Shuffled
from dpfl.privacy.mechanisms import add_noise
from dpfl.streams import Streams, device_generator, layer_randomness

# A cohort draws chunk by chunk, so these numbers are part of what a seed means: another cut draws other batches.
# On the CPU a chunk of several clients holds at most this many numbers (16 MiB of float32), which a core keeps near. A
# client that is larger comes alone, with at most three times as many at a time: of much more the allocator would give
# the memory back after each step, and ask for it again. On a GPU it is a part of the memory that this process may have.
_CPU_CHUNK = 2**22
_CPU_BLOCK = 3 * _CPU_CHUNK
_TINY = 2**18
_GPU_SHARE = 32
_GPU_CHUNK = 2**26  # numbers that a GPU has done with by the time that the kernels of one more chunk take to start
_GPU_GRAPH = 2**28  # numbers below which a step is so short that launching its kernels takes longer than they do

T = TypeVar("T")
W = TypeVar("W")


class StackedClients:
    """The clients of a federation, trained together."""

    def __init__(
        self,
        model: Model,
        records: tuple[Records, ...],
        streams: Streams,
        *,
        capabilities: Capabilities,
        drawn_by: DrawnBy = "cohort",
        room: int | None = None,
    ) -> None:
        """Take the model, each client's records and the streams of the run.

        capabilities: by which the model can be trained (`dpfl.gradients.capabilities`).
        drawn_by: whether a cohort draws from one stream, or each client from its own, as the reference client does.
        room: numbers that a chunk of several clients may hold at a time; None for what suits the machine.
        """
        self._given_room = room
        self.model, self.records, self.streams = model, records, streams
        self.capabilities = capabilities
        self._loop = ReferenceClients(model, records, streams, vectorised=capabilities.vectorised)
        self._layers, self._least_squares = capabilities.layers, capabilities.least_squares
        if drawn_by == "client" and self._layers is not None and self._layers.random:
            self._layers = None  # what a layer draws for a cohort is not what it draws for each client
        self.drawn_by: DrawnBy = "client" if self._layers is None else drawn_by
        self._graphs = Graphs()

    @property
    def serves(self) -> frozenset[Need]:
        """Serve whatever a system may need."""
        return NEEDS

    @property
    def engine(self) -> Engine:
        """Return how they train."""
        known = self.capabilities
        if self._layers is not None:
            how = "by two moments of their records" if self._least_squares else "by layers"
            return Engine("stacked, a whole cohort at once", how)
        why = known.why_not or "each client draws for its own random layers"
        return Engine(f"one after the other, {known}", why, known.cost, known.way_out)

    def perform(self, request: Request) -> Uploads:
        """Return the weighted sum of what the cohort uploads, or each client's where that is asked for."""
        if self._layers is None:
            return self._loop.perform(request)
        if not request.charged:  # coins may leave a round to nobody
            return Separate({}) if request.separate else Summed(torch.zeros_like(request.broadcast), ())
        if request.separate or self.drawn_by == "client" or self._is_exact_laplace(request):
            updates, told = self._one_by_one(request)
            return Separate(updates, *beside(self.streams, request, told))
        total, told = self._sum(request)
        counts, lengths = beside(self.streams, request, told)
        return Summed(total, tuple(request.charged), weighed(request, counts), lengths)

    def answer(
        self, questions: Sequence[Question], before: Tensor, uploads: Uploads, after: Tensor
    ) -> dict[Question, dict[int, float]]:
        """Return what clients tell about the models before and after a round, without noise."""
        if not questions:
            return {}
        if self._layers is None or self._layers.random:
            return self._loop.answer(questions, before, uploads, after)
        footprint = self._layers.footprint(formed=False)
        room = min(self._room, _GPU_GRAPH)  # what is larger keeps a GPU busy alone, and is filled up to no other's size
        answers = Answers(self._pool, room, self._rows(footprint), footprint, self._spread)
        sent = uploads.by_client if isinstance(uploads, Separate) else {}
        tell: dict[Question, Callable[[], dict[int, float]]] = {
                "loss": partial(answers.losses, self._layers, after),
                "curvature": partial(answers.curvatures, before, sent),
                "curvature from the sum": partial(answers.curvatures, before, sent, after),
                "length": lambda: dict(uploads.lengths),
        }  # fmt: skip
        return {question: tell[question]() for question in questions}

    def _one_by_one(self, request: Request) -> tuple[dict[int, Tensor], Told]:
        """Return each client's upload; what a cohort draws adds up to what it draws where nobody looks."""
        kinds = by_kind(request.charged)
        chunks = self._chunks(kinds)
        train = partial(self._updates, request)
        parts = list(self._on_chunks(partial(train, careful=False), chunks))
        if not all(math.isfinite(health) for _, health in parts):
            parts = list(self._on_chunks(partial(train, careful=True), chunks))
        pairs = zip(chunks, (part.moved for part, _ in parts), strict=True)
        found = {client: update for chunk, rows in pairs for client, update in zip(chunk.clients, rows, strict=True)}
        if self.drawn_by == "cohort" and self.streams.fast:
            for kind in kinds:
                if has_late_noise(kind.order):
                    noises = self._late_noise_each(request, kind)
                    found |= {client: found[client] + one for client, one in zip(kind.clients, noises, strict=True)}
        told = told_by(chunks, [part.told for part, _ in parts])
        return {client: found[client].to(request.broadcast.dtype) for client in request.charged}, told

    def _sum(self, request: Request) -> tuple[Tensor, Told]:
        """Return Σ_i weights[i]·upload_i; noise on which nothing is trained any more is drawn once for all."""
        kinds = by_kind(request.charged)
        chunks = self._chunks(kinds)
        total, health, told = self._add_up(request, chunks, careful=False)
        late = [kind for kind in kinds if has_late_noise(kind.order)]
        add_noise = partial(self._add_late_noise, self.streams, late, request)
        noised = add_noise(total)
        if math.isfinite(health):  # only now is the device asked how it went: it has been working all the while
            return noised, told_by(chunks, told)
        total, _, told = self._add_up(request, chunks, careful=True)
        return add_noise(total), told_by(chunks, told)  # the same noise: nobody has seen the other sum

    def _add_up(
        self, request: Request, chunks: Sequence[Chunk], *, careful: bool
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Return Σ_i weights[i]·update_i without late noise, a number that is finite if all went well, and the told."""
        work = partial(self._weighted, request, careful=careful)
        total = health = None
        told: list[Tensor | None] = []
        for part, healthy, tells in self._on_chunks(work, chunks):  # which hold until the next are made
            total = part.clone() if total is None else total + part
            health = healthy.clone() if health is None else health + healthy
            told.append(None if tells is None else tells.clone())
        assert total is not None
        assert health is not None
        return total, health, told

    def _add_late_noise(self, streams: Streams, kinds: Sequence[Chunk], request: Request, total: Tensor) -> Tensor:
        """Add to a sum of updates [d] the noise that clients of these kinds add last, weighed as their uploads are."""
        model = request.broadcast
        if kinds and not streams.fast:
            sizes = np.concatenate([kind.late_noise(request.weights) for kind in kinds])
            least = min(filter(None, (kind.least_sensitivity(request.weights) for kind in kinds)), default=0.0)
            if least:
                std, source = float(np.linalg.norm(sizes)), cohort_stream(streams, "sum of noise", kinds[0], request)
                total = add_noise(total, Gaussian, std, source, relative_size=std / least)
            return total.to(model.dtype)
        for kind in kinds:
            rng = self._late_stream(streams, kind, request)
            total = total + draw_sum(kind.law, kind.late_noise(request.weights), model.shape[-1], rng).to(total)
        return total.to(model.dtype)

    def _is_exact_laplace(self, request: Request) -> bool:
        """Tell whether clients must be noised one by one: a sum of Laplace noises on their own grids is on none."""
        if self.streams.fast:
            return False
        return any(isinstance(receipt.order.noise, Laplace) for receipt in request.charged.values())

    def _late_noise_each(self, request: Request, kind: Chunk) -> Tensor:
        """Draw the same noise apart, [k, d]: Gaussian noises of the clients' own that add up to the sum."""
        model, sizes = request.broadcast, torch.as_tensor(kind.late_noise(dict.fromkeys(kind.clients, 1.0)))
        rng, dim = self._late_stream(self.streams, kind, request), len(model)
        if kind.law is not Gaussian:  # of which each is drawn anyway
            drawn = draw_each(kind.law, len(kind.clients), dim, rng)
            return (sizes.to(drawn)[:, None] * drawn).to(model)
        total = draw_sum(kind.law, kind.late_noise(request.weights), dim, rng).double().cpu()
        rngs = (own_stream(self.streams, "noise", client, request) for client in kind.clients)
        own = torch.stack([
            add_noise(torch.zeros(dim), kind.law, size, own_rng, relative_size=1.0)
            for size, own_rng in zip(sizes.tolist(), rngs, strict=True)
        ])  # fmt: skip
        weights = torch.tensor([request.weights[client] for client in kind.clients], dtype=torch.float64)
        return adding_up_to(total, own, sizes, weights).to(model)

    def _late_stream(self, streams: Streams, kind: Chunk, request: Request) -> Generator | torch.Generator:
        purpose, name = "sum of noise", of_cohort(kind, request)
        if self._rng is None:
            return streams.secret.generator(purpose, **name)
        return streams.secret.seed_device(self._rng, purpose, **name)

    def _weighted(self, request: Request, layers: Layered, chunk: Chunk, *, careful: bool) -> Results:
        """Return the weighted sum of a chunk's updates without the noise that is drawn for all, and its health."""
        broadcast = request.broadcast
        steps, table = self._steps(layers, chunk, careful, request), chunk.table(request.weights)
        if self._rng is not None and (self.streams.fast or not chunk.draws):
            return self._on_gpu(steps, chunk, table, request)
        table = table.to(broadcast.device)
        draws = OneStream(self.streams, self._pool, chunk, request, len(broadcast)) if chunk.draws else None
        batch = draws.batch if draws is not None and chunk.is_sampled else self._always(chunk)
        noise = _no_noise if draws is None else draws.add_noise
        with self._randomness(chunk, request):
            total, told = steps.weighted_sum(chunk.order, Columns.of(table), broadcast, batch, noise)
            return total, _health(chunk, total), told

    def _on_gpu(self, steps: LocalSteps, chunk: Chunk, table: Tensor, request: Request) -> Results:
        """Return the same; a batch that was cut is not healthy. What is short is recorded, and replayed later."""
        assert self._rng is not None
        broadcast = request.broadcast
        whole, draws = Batch(slice(0, 0), None), None
        if chunk.draws:
            draws = self._drawn_on_gpu(chunk, request, roomy=steps.careful)
        if not chunk.is_sampled:
            whole = self._always(chunk)()
        sampled = [draws.facts] if chunk.is_sampled and draws is not None else None
        given = sampled or [one for one in whole if isinstance(one, Tensor)]

        def train(broadcast: Tensor, table: Tensor, *given: Tensor) -> Results:
            rows = whole.rows if isinstance(whole.rows, slice) else given[0]
            fixed = Batch(rows, None if whole.real is None else given[-1])
            noise = _no_noise if draws is None else draws.add_noise
            if draws is None or not chunk.is_sampled:
                total, told = steps.weighted_sum(chunk.order, Columns.of(table), broadcast, lambda: fixed, noise)
                return total, _health(chunk, total), told
            draws.begin(given[0])
            total, told = steps.weighted_sum(chunk.order, Columns.of(table), broadcast, draws.batch, noise)
            return total, _health(chunk, total).masked_fill(draws.cut, torch.nan), told

        size = len(chunk.clients) * self._cost(chunk, max(self._pool.sizes[client] for client in chunk.clients))
        if steps.careful or steps.layers.random or size > _GPU_GRAPH:
            with self._randomness(chunk, request):
                return train(*(one.to(broadcast.device) for one in (broadcast, table, *given)))
        fixed = (whole.rows.start, whole.rows.stop) if isinstance(whole.rows, slice) else None
        room = None if draws is None else (draws.room, draws.longest, draws.passes)
        return self._graphs.run((chunk.kind, fixed, room, steps.measured), train, self._rng, broadcast, table, *given)

    def _drawn_on_gpu(self, chunk: Chunk, request: Request, *, roomy: bool) -> OnDevice:
        assert self._rng is not None
        self.streams.secret.seed_device(self._rng, "chunk", **of_cohort(chunk, request))
        return OnDevice(self._rng, self._pool, chunk, len(request.broadcast), roomy=roomy)

    def _updates(self, request: Request, layers: Layered, chunk: Chunk, *, careful: bool) -> tuple[Trained, Tensor]:
        """Return what each client's model has moved by [k, d], with its noise but for what a cohort draws at last.

        And how that went: a number that is not finite where it must be done again with care.
        """
        broadcast, draws = request.broadcast, self._draws(chunk, request, roomy=careful)
        batch = draws.batch if chunk.is_sampled else self._always(chunk)
        steps, columns = self._steps(layers, chunk, careful, request), Columns.of(chunk.table().to(broadcast.device))
        late = isinstance(draws, EachClient) or not has_late_noise(chunk.order)
        with self._randomness(chunk, request):
            trained = steps.updates(chunk.order, columns, broadcast, batch, draws.add_noise, late_noise=late)
        health = _health(chunk, trained.moved)
        return trained, health.masked_fill(draws.cut, torch.nan) if isinstance(draws, OnDevice) else health

    def _draws(self, chunk: Chunk, request: Request, *, roomy: bool) -> Draws:
        """Return who draws for clients that are looked at one by one: the same as where only their sum is formed.

        Outside simulations that is each client: what nobody can repeat need not be the same.
        """
        if self.drawn_by == "client" or not self.streams.fast:
            return EachClient(self.streams, self._pool, chunk, request, len(request.broadcast))
        if self._rng is None:
            return OneStream(self.streams, self._pool, chunk, request, len(request.broadcast))
        draws = self._drawn_on_gpu(chunk, request, roomy=roomy)
        draws.begin(draws.facts.to(request.broadcast.device))
        return draws

    def _steps(self, layers: Layered, chunk: Chunk, careful: bool, request: Request) -> LocalSteps:
        moments, rows = self._moments if self._by_moments(chunk) else None, self._rows(self._numbers_a_record(chunk))
        return LocalSteps(layers, self._pool, moments, rows, careful, measured="length" in request.questions)

    def _always(self, chunk: Chunk) -> Callable[[], Batch]:
        """Return all records of the clients in every step, or the clients themselves where moments stand for them."""
        if self._by_moments(chunk):
            batch = Batch(torch.from_numpy(np.array(chunk.clients[:: chunk.times])).to(self._pool.device), None)
        else:
            batch = self._pool.whole(chunk.clients)
        return lambda: batch

    def _randomness(self, chunk: Chunk, request: Request) -> AbstractContextManager[None]:
        """Let random layers draw from a stream of the chunk's own, where the model has any."""
        assert self._layers is not None
        if not self._layers.random:
            return nullcontext()
        return layer_randomness(cohort_stream(self.streams, "layers", chunk, request), self._pool.device)

    def _on_chunks(self, work: Callable[[Layered, Chunk], T], chunks: Sequence[Chunk]) -> Iterator[T]:
        """Do the work of all chunks; results are in their order."""
        with one_core() if self._rng is None and self._is_tiny(chunks) else nullcontext():
            yield from self._spread(work, chunks)

    def _spread(self, work: Callable[[Layered, W], T], pieces: Sequence[W]) -> Iterator[T]:
        """Do all pieces of work, each on a core of its own where there are several; results are in their order."""
        assert self._layers is not None
        if self._rng is None and torch.get_num_threads() > 1 and len(pieces) > 1 and not self._layers.random:
            yield from self._cores.spread(work, pieces)
        else:
            yield from (work(self._layers, piece) for piece in pieces)

    def repeat(self, requests: Sequence[Request], streams: Sequence[Streams]) -> Tensor:
        """Return the weighted sums of the uploads of several trainings that ask the same clients, [m, d].

        requests, streams: of each training. Where their orders are of one kind all train as one cohort of m·k clients;
        else one training after the other.
        """
        first, times = requests[0], len(requests)
        charged, weights = [request.charged for request in requests], [request.weights for request in requests]
        kinds = _once(by_kind, charged)
        alike = all(len(one) == 1 and one[0].kind == kinds[0][0].kind for one in kinds)
        fits = self._layers is not None and not self._layers.random and self.drawn_by == "cohort"
        fits = fits and self.streams.fast
        if not fits or not alike or len({tuple(one) for one in charged}) > 1:
            return self._in_turn(requests, streams)
        assert self._layers is not None
        broadcasts = torch.stack([request.broadcast for request in requests])
        total = torch.zeros_like(broadcasts, dtype=torch.float64)
        for chunk in self._chunks(kinds[0], times=times):
            clients = chunk.clients
            members = _once(lambda one, its=clients: Chunk(its, [one[client] for client in its]), charged)
            whole = chunk.repeated(members)
            table = torch.stack(_once(Chunk.table, members, weights), dim=1)
            columns = Columns.of(table.flatten(0, 1).to(broadcasts.device))
            draws = OneStream(streams[0], self._pool, whole, first, broadcasts.shape[1])
            batch = draws.batch if chunk.is_sampled else self._always(whole)
            starts = broadcasts.repeat(len(chunk.clients), 1)
            steps = self._steps(self._layers, chunk, False, first)
            with one_core() if self._rng is None and self._is_tiny([whole]) else nullcontext():
                updates, _ = steps.updates(chunk.order, columns, starts, batch, draws.add_noise, late_noise=False)
                total += (updates * columns.weights).view(len(chunk.clients), times, -1).sum(dim=0)
        if not math.isfinite(_health(kinds[0][0], total)):
            return self._in_turn(requests, streams)
        if not has_late_noise(kinds[0][0].order):
            return total.to(broadcasts.dtype)
        rows = zip(streams, kinds, requests, total, strict=True)
        return torch.stack([self._add_late_noise(*row) for row in rows])

    def _in_turn(self, requests: Sequence[Request], streams: Sequence[Streams]) -> Tensor:
        sums = []
        for request, stream in zip(requests, streams, strict=True):
            uploads = self._with(stream).perform(request)
            by_client = {} if isinstance(uploads, Summed) else uploads.by_client
            total = uploads.total if isinstance(uploads, Summed) else torch.zeros_like(request.broadcast)
            sums.append(sum((request.weights[client] * upload for client, upload in by_client.items()), total))
        return torch.stack(sums)

    def _with(self, streams: Streams) -> "StackedClients":
        """Return the same clients, who draw from other streams.

        Recorded steps, which they share, know one pool of records and one generator: those are made before the copy.
        """
        if self._layers is not None:
            _ = self._pool, self._rng
        other = copy.copy(self)
        other.streams = streams
        other._loop = ReferenceClients(self.model, self.records, streams, vectorised=self._loop.vectorised)
        return other

    def _chunks(self, kinds: Sequence[Chunk], *, times: int = 1) -> list[Chunk]:
        """Cut clients of each kind into chunks that fit the memory, each client so many times."""
        chunks: list[Chunk] = []
        for kind in kinds:
            if len(kind.clients) * times * self._cost(kind, self._pool.longest) <= min(self._room, self._waste):
                chunks.append(kind)
                continue
            sizes = [self._pool.sizes[client] for client in kind.clients]
            costs = {size: times * self._cost(kind, size) for size in set(sizes)}
            chunks += kind.cut(self._room, [costs[size] for size in sizes], self._waste)
        return chunks

    def _is_tiny(self, chunks: Sequence[Chunk]) -> bool:
        """Tell whether the work is so little that telling another core about it takes longer."""
        only = chunks[0]
        return len(chunks) == 1 and len(only.clients) * self._cost(only, self._pool.sizes[only.clients[0]]) < _TINY

    def _cost(self, kind: Chunk, records: int) -> int:
        """Return how many numbers a client with so many records adds to a chunk of this kind."""
        own = 0 if is_one_batch(kind.order) else 4 * self.model.dim
        if self._by_moments(kind):
            return own + self.model.dim**2
        batch = kind.order.batch
        size = records
        if isinstance(batch, Poisson):
            size = room_for(records, max(kind.sampling_rates))
        elif isinstance(batch, Shuffled):
            size = batch.taken(records)
        return own + size * self._numbers_a_record(kind)

    def _rows(self, numbers: int) -> int:
        """Return how many records of one client, of so many numbers each, fit into memory at a time."""
        return max(1, max(self._room, _CPU_BLOCK) // numbers)

    def _numbers_a_record(self, kind: Chunk) -> int:
        assert self._layers is not None
        return self._layers.footprint(formed=isinstance(kind.order.clip, RecordClip))

    def _by_moments(self, kind: Chunk) -> bool:
        full = isinstance(kind.order.batch, Full) and not isinstance(kind.order.clip, RecordClip)
        return self._least_squares and full

    @cached_property
    def _room(self) -> int:
        if self._given_room is not None:
            return self._given_room
        if self._rng is None:
            return _CPU_CHUNK
        return _room_on_gpu(self._pool.device)

    @property
    def _waste(self) -> float:
        """Return how many numbers clients of a chunk may be filled up with: what a chunk costs by itself."""
        return math.inf if self._rng is None else _GPU_CHUNK

    @cached_property
    def _rng(self) -> torch.Generator | None:
        """Return the generator of the GPU; None on the CPU."""
        return device_generator(self._pool.device) if self._pool.device.type == "cuda" else None

    @cached_property
    def _pool(self) -> Pool:
        return Pool(self.records)

    @cached_property
    def _moments(self) -> Moments:
        return Moments(self.model, self.records)

    @cached_property
    def _cores(self) -> Cores:
        assert self._layers is not None
        return Cores(self._layers)


def _room_on_gpu(device: torch.device) -> int:
    """Return how many numbers a chunk may hold: a part of the memory, or of what of it this process was limited to."""
    limit = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # older versions of torch do not tell
    share = 1.0 if limit is None else limit(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory) // 4 // _GPU_SHARE


def _no_noise(values: Tensor, sizes: Tensor) -> Tensor:
    raise AssertionError("no noise is drawn while this order is performed")


def _health(chunk: Chunk, total: Tensor) -> Tensor:
    """Return a number that is not finite if the norm of a record could not be told, and with it the sum."""
    return total.sum() if isinstance(chunk.order.clip, RecordClip) else total.new_zeros(())


def _once(make: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
    """Call `make` for each row of the columns, once for rows of the very same objects: repetitions share theirs."""
    made: dict[tuple[int, ...], T] = {}
    for row in zip(*columns, strict=True):
        what = tuple(map(id, row))
        if what not in made:
            made[what] = make(*row)
    return [made[tuple(map(id, row))] for row in zip(*columns, strict=True)]
