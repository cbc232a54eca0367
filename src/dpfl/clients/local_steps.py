"""The local steps of some clients with orders of one kind: batch → gradient → clip → noise → step, as one tensor.

Everything here is arithmetic on tensors, without a look at their values, so that a GPU need not stop and the whole of
it can be recorded (`graphs`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpfl.clients.chunks import Columns
from dpfl.clients.pool import Batch, Pool
from dpfl.federation import Records
from dpfl.gradients.clipping import clip_rows
from dpfl.gradients.layered import Layered
from dpfl.gradients.least_squares import Moments
from dpfl.orders import ClientClip, Full, ModelClip, Norm, Order, RecordClip

AddNoise = Callable[[Tensor, Tensor], Tensor]  # to the clients' values [k, d], of the sizes [k, 1]


@dataclass(frozen=True)
class LocalSteps:
    """What the steps are taken with."""

    layers: Layered
    pool: Pool
    moments: Moments | None  # of the clients' records, where these are all that a step needs
    rows: int  # records of one client that fit into memory at a time
    careful: bool  # whether gradients that are not finite are looked for, and left out

    def updates(
        self,
        order: Order,
        numbers: Columns,
        broadcast: Tensor,
        batch: Callable[[], Batch],
        add_noise: AddNoise,
        *,
        late_noise: bool,
    ) -> Tensor:
        """Return what each client's model has moved by, [k, d], in double precision.

        It is added up by itself and never found as a difference of models: next to a large parameter a small move is
        rounded to what that parameter can tell apart, which is more than the noise was made for.

        order: one of the orders, for what is alike in all; what differs is in the numbers.
        batch, add_noise: draw the next batch, and add the next noise to what every client has.
        late_noise: whether to add the noise on which nothing is trained any more: that on the last step or the upload.
        """
        parameters, before, records = broadcast, None, None
        start, moved = broadcast.double(), broadcast.new_zeros((), dtype=torch.float64)
        for step in range(order.steps):
            drawn = batch()
            if drawn is not before and self.moments is None:  # the records of a full batch are taken once
                records = self.pool.take(drawn.rows)
            before = drawn
            gradient = self._gradient(order, numbers, parameters, drawn, records)
            late = step == order.steps - 1 and has_late_noise(order)
            if order.noise is not None and order.noise_on == "step" and (late_noise or not late):
                gradient = add_noise(gradient, numbers.step_noise)
            if order.proximal:
                gradient = gradient + numbers.pulls * moved
            moved = moved - numbers.rates[:, step : step + 1] * gradient
            parameters = (start + moved).to(broadcast.dtype)
        self.layers.forget()
        if isinstance(order.clip, ModelClip):
            moved = clip_rows(start + moved, numbers.clip_norms[:, 0], order.clip.norm) - start
        if order.noise is not None and order.noise_on == "upload" and late_noise:
            moved = add_noise(moved, numbers.late_noise)
        return moved

    def weighted_sum(
        self,
        order: Order,
        numbers: Columns,
        broadcast: Tensor,
        batch: Callable[[], Batch],
        add_noise: AddNoise,
    ) -> Tensor:
        """Return the sum of all updates as the numbers weigh them [d], without the late noise."""
        if order.steps > 1 or isinstance(order.clip, ModelClip):
            updates = self.updates(order, numbers, broadcast, batch, add_noise, late_noise=False)
            return numbers.weights[:, 0] @ updates
        # One step from one model, where nothing pulls yet, is −η_i·gradient_i.
        factors, drawn = -numbers.weights * numbers.rates, batch()
        if is_one_batch(order) and self.moments is None:
            # Then Σ_i p_i·(−η_i/m_i)·Σ_r clipped gradient is a sum over all records of all clients.
            factors = factors / numbers.divisors
            total = self._sums(order, numbers, broadcast, drawn, self.pool.take(drawn.rows), factors)[0]
        else:
            records = self.pool.take(drawn.rows) if self.moments is None else None
            total = factors[:, 0] @ self._gradient(order, numbers, broadcast, drawn, records)
        self.layers.forget()
        return total.double()

    def _gradient(
        self, order: Order, numbers: Columns, parameters: Tensor, batch: Batch, records: Records | None
    ) -> Tensor:
        """Return what a step follows, [k, d]: clipped, and divided by the expected number of records."""
        if records is not None:
            total = self._sums(order, numbers, parameters, batch, records)
        else:
            assert self.moments is not None
            assert isinstance(batch.rows, Tensor)  # the clients themselves
            total = self.moments.sums(parameters, batch.rows)
        gradient = total / numbers.divisors
        if isinstance(order.clip, ClientClip):
            return clip_rows(gradient, numbers.clip_norms[:, 0], order.clip.norm)
        if isinstance(order.clip, ModelClip):  # a step that is no number counts as zero, and the others as they are
            return torch.where(gradient.isfinite().all(dim=1, keepdim=True), gradient, 0.0)
        return gradient

    def _sums(
        self,
        order: Order,
        numbers: Columns,
        parameters: Tensor,
        batch: Batch,
        records: Records,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Return Σ_r gradient of record r, clipped if so ordered, for each client [k, d].

        factors: [k, 1], how much the records of each client count in one sum over all clients, [1, d].
        """
        clients, count = len(numbers.divisors), len(records)
        sums = 1 if factors is not None else clients
        if count == 0:
            return parameters.new_zeros(sums, parameters.shape[-1])
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
        return sums_of(
            self.layers, parameters, records, counts, sums, self.rows, bound=bound, powers=powers, careful=careful,
            forgiving=order.clip is not None,
        )  # fmt: skip


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
) -> Tensor:
    """Return each client's sum over its records [clients, d], one client's so many at a time: it may exceed the memory.

    parameters, counts, clients, bound, powers, careful, forgiving: as the layers take them.
    """
    shared = parameters[0] if parameters.ndim == 2 and len(parameters) == 1 else parameters
    if clients > 1 or len(records) <= rows:
        return layers.sums(
            shared, records.x, records.y, counts, bound, clients, powers=powers, careful=careful, forgiving=forgiving
        )
    total = shared.new_zeros(1, len(shared), dtype=torch.float64)
    for start in range(0, len(records), rows):
        some = slice(start, start + rows)
        limit = None if bound is None else (bound[0][some], bound[1])
        counted, x, y = None if counts is None else counts[some], records.x[some], records.y[some]
        total += layers.sums(shared, x, y, counted, limit, 1, careful=careful, forgiving=forgiving)
    return total


def has_late_noise(order: Order) -> bool:
    """Tell whether the last noise is in the upload as it is: added there, or to a last step that nothing clips."""
    return order.noise is not None and (order.noise_on == "upload" or not isinstance(order.clip, ModelClip))


def is_one_batch(order: Order) -> bool:
    """Tell whether the sum of the uploads is one sum over all records: a single step, clipped record by record."""
    return order.steps == 1 and (order.clip is None or isinstance(order.clip, RecordClip))
