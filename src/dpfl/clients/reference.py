"""The reference client: the papers' local training as a plain loop. Every faster client must agree with it."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dpfl.clients.beside import Told, beside, counts_and_lengths
from dpfl.clients.draws import DrawnBy, batch_positions, own_stream
from dpfl.clients.uploads import Engine, Request, Separate, Uploads
from dpfl.federation import Records
from dpfl.gradients.clipping import clip, row_lengths, sum_of_clipped
from dpfl.models import Model
from dpfl.orders import NEEDS, ClientClip, Full, ModelClip, Need, Order, Poisson, Question, RecordClip, Shuffled
from dpfl.privacy.ledger import Charged
from dpfl.privacy.mechanisms import Source, add_noise
from dpfl.streams import Keystream, Streams, layer_randomness

# Per-record gradients are formed for as many records at a time as fit into this many numbers (16 MiB of float32):
# larger blocks go back to the operating system after each use, and getting them again costs more than the arithmetic.
_GRADIENT_ENTRIES = 2**22


class ReferenceClients:
    """The clients of a federation, visited one after the other; the order of visits changes nothing."""

    drawn_by: DrawnBy = "client"

    def __init__(
        self,
        model: Model,
        records: tuple[Records, ...],
        streams: Streams,
        *,
        vectorised: bool = True,
    ) -> None:
        """Take the model, each client's records and the streams of the run.

        vectorised: whether the model gives the gradients of many records at once (`Model.vectorises`), asked with
            public records: even so small an answer would be one about private ones.
        """
        self.model, self.records, self.streams = model, records, streams
        self.vectorised = vectorised

    @property
    def serves(self) -> frozenset[Need]:
        """Serve whatever a system may need."""
        return NEEDS

    @property
    def engine(self) -> Engine:
        """Return how they train."""
        how = "records' gradients at once" if self.vectorised else "records' gradients one by one"
        return Engine("one after the other, by the reference client", how)

    def perform(self, request: Request) -> Separate:
        """Return what each client of the cohort uploads: its update [d], noised as it was ordered; always apart."""
        self.model.module.train()
        uploads: dict[int, Tensor] = {}
        told: Told = {}
        for client, paid in request.charged.items():
            batches, noise, layers = (
                own_stream(self.streams, purpose, client, request) for purpose in ("batches", "noise", "layers")
            )
            asked: list[Tensor] | None = None
            if paid.order.count_noise is not None or "length" in request.questions:
                asked = []
            with layer_randomness(layers, request.broadcast.device):
                uploads[client] = perform(
                    paid,
                    self.model,
                    request.broadcast,
                    self.records[client],
                    batches=batches,
                    noise=noise,
                    vectorised=self.vectorised,
                    lengths=asked,
                )
            if asked is not None:
                told[client] = _count_and_length(paid.order, asked)
        return Separate(uploads, *beside(self.streams, request, told))

    def answer(
        self, questions: Sequence[Question], before: Tensor, uploads: Uploads, after: Tensor
    ) -> dict[Question, dict[int, float]]:
        """Return what clients tell about the models before and after a round, without noise."""
        self.model.module.eval()
        sent = uploads.by_client if isinstance(uploads, Separate) else {}
        asked = {
            "loss": range(len(self.records)), "curvature": sorted(sent), "curvature from the sum": sorted(sent),
            "length": sorted(uploads.lengths),
        }  # fmt: skip
        tell = {
            "loss": lambda client: self._loss(after, self.records[client]),
            "curvature": lambda client: self._curvature(before, before + sent[client], sent[client], client),
            "curvature from the sum": lambda client: self._curvature(
                after, before + sent[client], before + sent[client] - after, client
            ),
            "length": lambda client: uploads.lengths[client],
        }
        return {question: {client: tell[question](client) for client in asked[question]} for question in questions}

    @torch.no_grad()
    def _loss(self, parameters: Tensor, records: Records) -> float:
        return self.model.mean_loss(self.model.split(parameters), records.x, records.y).item()

    def _curvature(self, here: Tensor, there: Tensor, way: Tensor, client: int) -> float:
        """Return ‖∇F_i(there) − ∇F_i(here)‖/‖way‖, which leads from here to there."""
        records = self.records[client]
        changed = self.model.gradient(there, records.x, records.y) - self.model.gradient(here, records.x, records.y)
        return float(torch.linalg.vector_norm(changed) / torch.linalg.vector_norm(way))


def perform(
    charged: Charged,
    model: Model,
    broadcast: Tensor,
    records: Records,
    *,
    batches: Source,
    noise: Source,
    vectorised: bool = True,
    lengths: list[Tensor] | None = None,
) -> Tensor:
    """Carry out one paid order and return the update (local − broadcast) [d].

    batches, noise: the sources that choose records and draw noise.
    lengths: where it is put how long was what the clip shortens: the gradients of the first step, or the parameters.
    """
    order = charged.order
    # What a model has moved by is added up by itself: a difference of two models would be rounded before it is noised.
    start, moved = broadcast.double(), torch.zeros_like(broadcast, dtype=torch.float64)
    drawn = _batches(order.batch, records, batches)
    measured = None if isinstance(order.clip, ModelClip) else lengths
    for rate in order.learning_rates:
        batch = drawn()
        parameters = (start + moved).to(broadcast.dtype)
        gradient = _clipped_gradient(charged, model, parameters, batch, noise, vectorised, measured)
        measured = None
        moved = moved - rate * (gradient + order.proximal * moved)
    if isinstance(order.clip, ModelClip):
        if lengths is not None:
            lengths.append(row_lengths([(start + moved)[None]], order.clip.norm))
        moved = clip(start + moved, order.clip.clip_norm, order.clip.norm) - start
    if order.noise_on == "upload":
        moved = _noised(charged, moved, noise)
    return moved.to(broadcast.dtype)


def _noised(charged: Charged, value: Tensor, source: Source) -> Tensor:
    noise = charged.order.noise
    if noise is None:
        return value
    relative = charged.relative_noise if isinstance(source, Keystream) else 1.0
    return add_noise(value, type(noise), noise.size, source, relative_size=relative)


def _batches(batch: Full | Poisson | Shuffled, records: Records, rng: Source) -> Callable[[], Records]:
    """Return what draws the next batch of a client's records."""
    if isinstance(batch, Full):
        return lambda: records
    positions = batch_positions(batch, len(records), rng)
    return lambda: records.take(torch.from_numpy(positions()).to(records.x.device))


def _count_and_length(order: Order, lengths: list[Tensor]) -> tuple[float, float]:
    """Return how many records were not clipped, from the middle on, and the median length of what was measured."""
    found = torch.cat([torch.zeros(0, dtype=torch.float64), *(some.double().cpu() for some in lengths)])
    bound = torch.full((1, 1), order.clip.clip_norm if order.clip else math.inf, dtype=torch.float64)
    count, length = counts_and_lengths(found[None], bound)[0].tolist()
    return count, length


def _clipped_gradient(
    charged: Charged,
    model: Model,
    parameters: Tensor,
    batch: Records,
    rng: Source,
    vectorised: bool,
    lengths: list[Tensor] | None,
) -> Tensor:
    """Return the gradient that one step follows: clipped, noised where the order says so, and averaged.

    Sums are divided by the expected number of records, which is public; an empty batch is a sum of zero and is noised
    like any other, because a step without noise would tell that it was empty.
    """
    order = charged.order
    expected = order.divisor(charged.records)
    noised = partial(_noised, charged, source=rng) if order.noise_on == "step" else Tensor.double

    if isinstance(order.clip, RecordClip):
        total = _sum_of_clipped(order.clip, model, parameters, batch, vectorised, lengths)
        return noised(total) / expected

    gradient = torch.zeros_like(parameters)
    if len(batch):
        gradient = _gradient(order, model, parameters, batch) * (len(batch) / expected)
    if isinstance(order.clip, ClientClip):
        if lengths is not None:
            lengths.append(row_lengths([gradient[None].double()], order.clip.norm))
        gradient = clip(gradient, order.clip.clip_norm, order.clip.norm)
    if isinstance(order.clip, ModelClip) and not gradient.isfinite().all():  # the other steps count as they are
        gradient = torch.zeros_like(gradient)
    return noised(gradient)


def _gradient(order: Order, model: Model, parameters: Tensor, batch: Records) -> Tensor:
    """Return the gradient of a batch; where something is clipped, and so promised, one that fails is zero."""
    model.fresh()  # or say, before anything is tried, that it cannot be copied
    try:
        return model.gradient(parameters, batch.x, batch.y)
    except Exception:
        if order.clip is None:
            raise
        return torch.zeros_like(parameters)


def _sum_of_clipped(
    bound: RecordClip,
    model: Model,
    parameters: Tensor,
    batch: Records,
    vectorised: bool,
    lengths: list[Tensor] | None = None,
) -> Tensor:
    total = torch.zeros_like(parameters, dtype=torch.float64)
    rows = max(1, _GRADIENT_ENTRIES // model.dim)
    for start in range(0, len(batch), rows):
        chunk = slice(start, start + rows)
        gradients = model.record_gradients(parameters, batch.x[chunk], batch.y[chunk], vectorised=vectorised)
        total = total + sum_of_clipped(gradients, bound.clip_norm, bound.norm)
        if lengths is not None:
            lengths.append(row_lengths([block.double() for block in gradients], bound.norm))
    return total
