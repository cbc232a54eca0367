"""The local steps of some clients with orders of one kind: batch → gradient → clip → noise → step, as one tensor.

Everything here is arithmetic on tensors, without a look at their values, so that a GPU need not stop and the whole of
it can be recorded (`graphs`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from dpfl.clients.chunks import Columns
from dpfl.clients.pool import Batch, Pool
from dpfl.federation import Records
from dpfl.gradients.clipping import clip_rows
from dpfl.gradients.layered import Layered
from dpfl.gradients.least_squares import Moments
from dpfl.orders import ClientClip, ModelClip, Norm, Order, Poisson, RecordClip


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
        noise: Callable[[], Tensor],
        *,
        late_noise: bool,
    ) -> Tensor:
        """Return what each client's model has moved by, [k, d].

        order: one of the orders, for what is alike in all; what differs is in the numbers.
        batch, noise: draw the next batch, and the next noise of size 1 for every client.
        late_noise: whether to add the noise on which nothing is trained any more: that on the last step or the upload.
        """
        weights, before, records = broadcast, None, None
        for step in range(order.steps):
            drawn = batch()
            if drawn is not before and self.moments is None:  # the records of a full batch are taken once
                records = self.pool.take(drawn.rows)
            before = drawn
            gradient = self._gradient(order, numbers, weights, drawn, records)
            late = step == order.steps - 1 and has_late_noise(order)
            if order.noise is not None and order.noise_on == "step" and (late_noise or not late):
                gradient = gradient + noise().to(gradient) * numbers.step_noise
            if order.proximal:
                gradient = gradient + numbers.pulls * (weights - broadcast)
            weights = weights - numbers.rates[:, step : step + 1] * gradient
        self.layers.forget()
        if isinstance(order.clip, ModelClip):
            weights = clip_rows(weights, numbers.clip_norms[:, 0], order.clip.norm)
        update = weights - broadcast
        if order.noise is not None and order.noise_on == "upload" and late_noise:
            update = update + noise().to(update) * numbers.late_noise
        return update

    def weighted_sum(
        self,
        order: Order,
        numbers: Columns,
        broadcast: Tensor,
        batch: Callable[[], Batch],
        noise: Callable[[], Tensor],
    ) -> Tensor:
        """Return the sum of all updates as the numbers weigh them [d], without the late noise."""
        if order.steps > 1 or isinstance(order.clip, ModelClip):
            updates = self.updates(order, numbers, broadcast, batch, noise, late_noise=False)
            return numbers.weights[:, 0] @ updates
        # One step from one model, where nothing pulls yet, is −η_i·gradient_i.
        each, drawn = -numbers.weights * numbers.rates, batch()
        if is_one_batch(order) and self.moments is None:
            # Then Σ_i p_i·(−η_i/m_i)·Σ_r clipped gradient is a sum over all records of all clients.
            each = each / numbers.divisors
            total = self._sums(order, numbers, broadcast, drawn, self.pool.take(drawn.rows), each)[0]
        else:
            records = self.pool.take(drawn.rows) if self.moments is None else None
            total = each[:, 0] @ self._gradient(order, numbers, broadcast, drawn, records)
        self.layers.forget()
        return total

    def _gradient(
        self, order: Order, numbers: Columns, weights: Tensor, batch: Batch, records: Records | None
    ) -> Tensor:
        """Return what a step follows, [k, d]: clipped, and divided by the expected number of records."""
        if records is not None:
            total = self._sums(order, numbers, weights, batch, records)
        else:
            assert self.moments is not None
            assert isinstance(batch.rows, Tensor)  # the clients themselves
            total = self.moments.sums(weights, batch.rows)
        gradient = total / numbers.divisors
        if isinstance(order.clip, ClientClip):
            return clip_rows(gradient, numbers.clip_norms[:, 0], order.clip.norm)
        return gradient

    def _sums(
        self,
        order: Order,
        numbers: Columns,
        weights: Tensor,
        batch: Batch,
        records: Records,
        each: Tensor | None = None,
    ) -> Tensor:
        """Return Σ_r gradient of record r, clipped if so ordered, for each client [k, d].

        each: [k, 1], how much the records of each client count in one sum over all clients, [1, d].
        """
        clients, count = len(numbers.divisors), len(records)
        sums = 1 if each is not None else clients
        if count == 0:
            return weights.new_zeros(sums, weights.shape[-1])
        counts = batch.real
        if each is not None:
            spread = each.expand(-1, count // clients).flatten()
            counts = spread if counts is None else spread * counts
        bound = powers = None
        if isinstance(order.clip, RecordClip):
            bound = numbers.clip_norms.expand(-1, count // clients).flatten(), order.clip.norm
            powers = partial(self.pool.powers, order.clip.norm, batch.rows)
        careful = self.careful or (bound is None and isinstance(order.batch, Poisson))  # whose gaps are zeros
        if weights.ndim == 1 and sums > 1 and weights.is_cuda:
            weights = weights.expand(clients, -1)  # with sums apart, batched products are faster from the start
        return sums_of(
            self.layers, weights, records, counts, sums, self.rows, bound=bound, powers=powers, careful=careful
        )


def sums_of(
    layers: Layered,
    weights: Tensor,
    records: Records,
    counts: Tensor | None,
    clients: int,
    rows: int,
    *,
    bound: tuple[Tensor, Norm] | None = None,
    powers: Callable[[], Tensor] | None = None,
    careful: bool = False,
) -> Tensor:
    """Return each client's sum over its records [clients, d], one client's so many at a time: it may exceed the memory.

    weights, counts, clients, bound, powers, careful: as the layers take them.
    """
    shared = weights[0] if weights.ndim == 2 and len(weights) == 1 else weights
    if clients > 1 or len(records) <= rows:
        return layers.sums(shared, records.x, records.y, counts, bound, clients, powers=powers, careful=careful)
    total = shared.new_zeros(1, len(shared))
    for start in range(0, len(records), rows):
        some = slice(start, start + rows)
        limit = None if bound is None else (bound[0][some], bound[1])
        counted, x, y = None if counts is None else counts[some], records.x[some], records.y[some]
        total += layers.sums(shared, x, y, counted, limit, 1, careful=careful)
    return total


def has_late_noise(order: Order) -> bool:
    """Tell whether the last noise is in the upload as it is: added there, or to a last step that nothing clips."""
    return order.noise is not None and (order.noise_on == "upload" or not isinstance(order.clip, ModelClip))


def is_one_batch(order: Order) -> bool:
    """Tell whether the sum of the uploads is one sum over all records: a single step, clipped record by record."""
    return order.steps == 1 and (order.clip is None or isinstance(order.clip, RecordClip))
