"""Answers without noise, as papers' own calibrations ask for them: the loss of a model and its curvature, everywhere.

The same numbers as the reference client's, for many clients at once: small ones together, large ones alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from dpfl.clients.chunks import cut
from dpfl.clients.local_steps import sums_of
from dpfl.clients.pool import Pool
from dpfl.gradients.layered import Layered

# Work on some clients with a copy of the model, carried out for all of them, on several cores perhaps.
Work = Callable[[Layered, list[int]], Tensor]
Spread = Callable[[Work, Sequence[list[int]]], Iterator[Tensor]]


@dataclass(frozen=True)
class Answers:
    """What is needed to answer."""

    pool: Pool
    room: int  # numbers that several clients may hold at a time
    rows: int  # records of one client that fit into memory at a time
    footprint: int  # numbers that are held for a record
    spread: Spread

    def losses(self, layers: Layered, vector: Tensor) -> dict[int, float]:
        """Return the mean loss of a model at every client."""
        model, pool = layers.model, self.pool
        model.module.eval()
        parameters = model.split(vector)
        with torch.no_grad():
            blocks = [slice(start, min(start + self.rows, pool.gap)) for start in range(0, pool.gap, self.rows)]
            losses = [layers.losses(model.outputs(parameters, pool.x[some]), pool.y[some]).double() for some in blocks]
            sizes = torch.tensor(pool.sizes, device=pool.device)
            means = torch.segment_reduce(torch.cat(losses), "mean", lengths=sizes)
            penalty = model.ridge / 2 * vector.double().square().sum() if model.ridge else 0.0
        return dict(enumerate((means + penalty).tolist()))

    def curvatures(
        self, before: Tensor, uploads: Mapping[int, Tensor], after: Tensor | None = None
    ) -> dict[int, float]:
        """Return ‖∇F_i(w_i) − ∇F_i(w)‖/‖w_i − w‖ of every client i that uploaded w_i − before.

        after: w, the model after the round; None for the one before it.
        """
        clients = sorted(uploads)
        costs = [4 * before.numel() + self.pool.sizes[client] * self.footprint for client in clients]
        groups = [[clients[place] for place in places] for places in cut(self.room, costs)]
        # All are taken before the first is read: a GPU is not asked in between.
        curvatures = list(self.spread(partial(self._curvatures, before, uploads, after), groups))
        return dict(sorted(zip(chain(*groups), chain(*(some.tolist() for some in curvatures)), strict=True)))

    def _curvatures(
        self,
        before: Tensor,
        uploads: Mapping[int, Tensor],
        after: Tensor | None,
        layers: Layered,
        clients: list[int],
    ) -> Tensor:
        updates = torch.stack([uploads[client] for client in clients])
        own = before + updates
        here, ways = (before, updates) if after is None else (after, own - after)
        batch = self.pool.whole(clients)
        records = self.pool.take(batch.rows)
        there, here = (sums_of(layers, models, records, batch.real, len(clients), self.rows) for models in (own, here))
        layers.forget()
        sizes = torch.tensor([self.pool.sizes[client] for client in clients]).to(before)
        changed, moved = (torch.linalg.vector_norm(rows, dim=1) for rows in (there - here, ways))
        curvatures: Tensor = changed / sizes / moved
        return curvatures
