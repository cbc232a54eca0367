"""The local steps of some clients with orders of one kind: batch → gradient → clip → noise → step, as one tensor.

Everything here is arithmetic on tensors, without a look at their values, so that a GPU need not stop and the whole of
it can be recorded (`graphs`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from dpfl.clients.beside import counts_and_lengths
from dpfl.clients.chunks import Columns
from dpfl.clients.pool import Batch, Pool
from dpfl.federation import Records
from dpfl.gradients.clipping import clip_rows, row_lengths
from dpfl.gradients.layered import Layered
from dpfl.gradients.least_squares import Moments
from dpfl.orders import ClientClip, Full, ModelClip, Norm, Order, RecordClip

AddNoise = Callable[[Tensor, Tensor], Tensor]  # to the clients' values [k, d], of the sizes [k, 1]


class Trained(NamedTuple):
    """What came of some clients' training."""

    moved: Tensor  # by how much each model moved [k, d], or the weighted sum of all [d]
    told: Tensor | None  # [k, 2], each client's count and length, without noise (`beside`); None: nobody asks


@dataclass(frozen=True)
class LocalSteps:
    """What the steps are taken with."""

    layers: Layered
    pool: Pool
    moments: Moments | None  # of the clients' records, where these are all that a step needs
    rows: int  # records of one client that fit into memory at a time
    careful: bool  # whether gradients that are not finite are looked for, and left out
    measured: bool = False  # whether somebody wants to know how long what is clipped was

    def updates(
        self,
        order: Order,
        numbers: Columns,
        broadcast: Tensor,
        batch: Callable[[], Batch],
        add_noise: AddNoise,
        *,
        late_noise: bool,
    ) -> Trained:
        """Return what each client's model has moved by, [k, d], in double precision.

        It is added up by itself and never found as a difference of models: next to a large parameter a small move is
        rounded to what that parameter can tell apart, which is more than the noise was made for.

        order: one of the orders, for what is alike in all; what differs is in the numbers.
        batch, add_noise: draw the next batch, and add the next noise to what every client has.
        late_noise: whether to add the noise on which nothing is trained any more: that on the last step or the upload.
        """
        parameters, before, records, told = broadcast, None, None, None
        start, moved = broadcast.double(), broadcast.new_zeros((), dtype=torch.float64)
        for step in range(order.steps):
            drawn = batch()
            if drawn is not before and self.moments is None:  # the records of a full batch are taken once
                records = self.pool.take(drawn.rows)
            before = drawn
            gradient, found = self._gradient(order, numbers, parameters, drawn, records, first=step == 0)
            told = found if step == 0 else told  # at the broadcast model
            late = step == order.steps - 1 and has_late_noise(order)
            if order.noise is not None and order.noise_on == "step" and (late_noise or not late):
                gradient = add_noise(gradient, numbers.step_noise)
            if order.proximal:
                gradient = gradient + numbers.pulls * moved
            moved = moved - numbers.rates[:, step : step + 1] * gradient
            parameters = (start + moved).to(broadcast.dtype)
        self.layers.forget()
        if isinstance(order.clip, ModelClip):
            told = self._length_of(start + moved, numbers, order.clip.norm)
            moved = clip_rows(start + moved, numbers.clip_norms[:, 0], order.clip.norm) - start
        if order.noise is not None and order.noise_on == "upload" and late_noise:
            moved = add_noise(moved, numbers.late_noise)
        return Trained(moved, told)

    def weighted_sum(
        self,
        order: Order,
        numbers: Columns,
        broadcast: Tensor,
        batch: Callable[[], Batch],
        add_noise: AddNoise,
    ) -> Trained:
        """Return the sum of all updates as the numbers weigh them [d], without the late noise."""
        if order.steps > 1 or isinstance(order.clip, ModelClip):
            updates, told = self.updates(order, numbers, broadcast, batch, add_noise, late_noise=False)
            return Trained(numbers.weights[:, 0] @ updates, told)
        # One step from one model, where nothing pulls yet, is −η_i·gradient_i.
        factors, drawn = -numbers.weights * numbers.rates, batch()
        if is_one_batch(order) and self.moments is None:
            # Then Σ_i p_i·(−η_i/m_i)·Σ_r clipped gradient is a sum over all records of all clients.
            factors, taken = factors / numbers.divisors, self.pool.take(drawn.rows)
            sums, told = self._sums(order, numbers, broadcast, drawn, taken, factors, measured=self._measures(order))
            total = sums[0]
        else:
            records = self.pool.take(drawn.rows) if self.moments is None else None
            gradient, told = self._gradient(order, numbers, broadcast, drawn, records, first=True)
            total = factors[:, 0] @ gradient
        self.layers.forget()
        return Trained(total.double(), told)

    def _measures(self, order: Order) -> bool:
        """Tell whether somebody wants to know how long records' gradients are, or how many are clipped."""
        return isinstance(order.clip, RecordClip) and (self.measured or order.count_noise is not None)

    def _length_of(self, rows: Tensor, numbers: Columns, norm: Norm) -> Tensor | None:
        """Return the length of the one thing that each client clips, where that was asked for."""
        if not self.measured:
            return None
        return counts_and_lengths(row_lengths([rows.double()], norm)[:, None], numbers.clip_norms)

    def _gradient(
        self,
        order: Order,
        numbers: Columns,
        parameters: Tensor,
        batch: Batch,
        records: Records | None,
        *,
        first: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what a step follows, [k, d]: clipped, and divided by the expected number of records.

        first: whether this is the first step, in which is measured what clients tell of their gradients.
        """
        told = None
        if records is not None:
            measured = first and self._measures(order)
            total, told = self._sums(order, numbers, parameters, batch, records, measured=measured)
        else:
            assert self.moments is not None
            assert isinstance(batch.rows, Tensor)  # the clients themselves
            total = self.moments.sums(parameters, batch.rows)
        gradient = total / numbers.divisors
        if isinstance(order.clip, ClientClip):
            told = self._length_of(gradient, numbers, order.clip.norm) if first else None
            gradient = clip_rows(gradient, numbers.clip_norms[:, 0], order.clip.norm)
        if isinstance(order.clip, ModelClip):  # a step that is no number counts as zero, and the others as they are
            gradient = torch.where(gradient.isfinite().all(dim=1, keepdim=True), gradient, 0.0)
        return gradient, told

    def _sums(
        self,
        order: Order,
        numbers: Columns,
        parameters: Tensor,
        batch: Batch,
        records: Records,
        factors: Tensor | None = None,
        *,
        measured: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return Σ_r gradient of record r, clipped if so ordered, for each client [k, d]; and what its clip did.

        factors: [k, 1], how much the records of each client count in one sum over all clients, [1, d].
        measured: whether to say what the clip did (`beside`).
        """
        clients, count = len(numbers.divisors), len(records)
        sums = 1 if factors is not None else clients
        lengths = [parameters.new_zeros(0)] if measured else None
        if count == 0:
            return parameters.new_zeros(sums, parameters.shape[-1]), _what_clips_did(lengths, numbers, None)
        counts = batch.real
        if factors is not None:
            spread = factors.expand(-1, count // clients).flatten()
            counts = spread if counts is None else spread * counts
        bound = powers = None
        if isinstance(order.clip, RecordClip):
            bound = numbers.clip_norms.expand(-1, count // clients).flatten(), order.clip.norm
            powers = partial(self.pool.powers, order.clip.norm, batch.rows)
        careful = self.careful or (bound is None and not isinstance(order.batch, Full))  # whose gaps are zeros
        if parameters.ndim == 1 and sums > 1 and parameters.is_cuda:
            parameters = parameters.expand(clients, -1)  # with sums apart, batched products are faster from the start
        total = sums_of(
            self.layers, parameters, records, counts, sums, self.rows, bound=bound, powers=powers, careful=careful,
            forgiving=order.clip is not None, lengths=lengths,
        )  # fmt: skip
        return total, _what_clips_did(lengths, numbers, batch.real)


def _what_clips_did(lengths: list[Tensor] | None, numbers: Columns, real: Tensor | None) -> Tensor | None:
    if lengths is None:
        return None
    rows = torch.cat(lengths).view(len(numbers.divisors), -1)
    return counts_and_lengths(rows, numbers.clip_norms, None if real is None else real.view_as(rows))


def sums_of(
    layers: Layered,
    parameters: Tensor,
    records: Records,
    counts: Tensor | None,
    clients: int,
    rows: int,
    *,
    bound: tuple[Tensor, Norm] | None = None,
    powers: Callable[[], Tensor] | None = None,
    careful: bool = False,
    forgiving: bool = False,
    lengths: list[Tensor] | None = None,
) -> Tensor:
    """Return each client's sum over its records [clients, d], so many records at a time: all may exceed the memory.

    parameters, counts, clients, bound, powers, careful, forgiving, lengths: as the layers take them.
    """
    shared = parameters[0] if parameters.ndim == 2 and len(parameters) == 1 else parameters
    if len(records) <= rows:
        return layers.sums(
            shared, records.x, records.y, counts, bound, clients, powers=powers, careful=careful, forgiving=forgiving,
            lengths=lengths,
        )  # fmt: skip
    each = len(records) // clients
    several = max(1, rows // each)  # clients at a time, where there are several

    def sums(start: int, end: int) -> Tensor:
        some, first = slice(start, end), start // each
        return sums_of(
            layers, shared if shared.ndim == 1 else shared[first : first + several],
            Records(records.x[some], records.y[some]), None if counts is None else counts[some],
            min(several, clients - first), rows, bound=None if bound is None else (bound[0][some], bound[1]),
            powers=None if powers is None else lambda: powers()[some], careful=careful, forgiving=forgiving,
            lengths=lengths,
        )  # fmt: skip

    size = rows if clients == 1 else several * each
    parts = (sums(start, start + size) for start in range(0, len(records), size))
    return torch.cat(list(parts)) if clients > 1 else reduce(torch.add, (part.double() for part in parts))


def has_late_noise(order: Order) -> bool:
    """Tell whether the last noise is in the upload as it is: added there, or to a last step that nothing clips."""
    return order.noise is not None and (order.noise_on == "upload" or not isinstance(order.clip, ModelClip))


def is_one_batch(order: Order) -> bool:
    """Tell whether the sum of the uploads is one sum over all records: a single step, clipped record by record."""
    return order.steps == 1 and (order.clip is None or isinstance(order.clip, RecordClip))
