"""All clients' records side by side, so that those of many clients are one tensor."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfl.federation import Records
from dpfl.gradients.record_gradients import powers
from dpfl.orders import Norm

_AT_ONCE = 2**14  # records that are measured at a time


class Batch(NamedTuple):
    """Where some records of some clients lie in the pool, as many for each client."""

    rows: slice | Tensor
    real: Tensor | None  # one for a record and zero for what fills a gap; None where there are no gaps


class Pool:
    """Records of N clients, one after the other, and a last row of zeros that fills gaps: finite, and nobody's.

    In a batch of all of a client's records one of its own fills them: whatever a model makes of it, an infinity
    perhaps, it makes of the record itself too. Where records are sampled that one may have to stay out, and zeros do.
    """

    def __init__(self, records: Sequence[Records]) -> None:
        self.sizes = [len(its) for its in records]
        *self.starts, self.gap = accumulate(self.sizes, initial=0)
        self.x = torch.cat([*(its.x for its in records), records[0].x.new_zeros(1, *records[0].x.shape[1:])])
        self.y = torch.cat([*(its.y for its in records), records[0].y.new_zeros(1, *records[0].y.shape[1:])])
        self.device, self.longest = self.x.device, max(self.sizes)
        self._powers: dict[Norm, Tensor] = {}

    def whole(self, clients: Sequence[int]) -> Batch:
        """Return where all records of these clients lie."""
        sizes = [self.sizes[client] for client in clients]
        start, longest = self.starts[clients[0]], max(sizes)
        together = list(clients) == list(range(clients[0], clients[0] + len(clients)))
        if together and min(sizes) == longest:
            return Batch(slice(start, start + len(clients) * longest), None)
        first = torch.tensor([self.starts[client] for client in clients], device=self.device)[:, None]
        each = torch.arange(longest, device=self.device)
        if min(sizes) == longest:
            return Batch((first + each).flatten(), None)
        real = each < torch.tensor(sizes, device=self.device)[:, None]
        return Batch((first + torch.where(real, each, 0)).flatten(), real.flatten().to(self.x.dtype))

    def some(self, clients: Sequence[int], positions: Sequence[NDArray[np.int64]]) -> Batch:
        """Return where some records of each client lie, at these positions among its own."""
        rows = np.full((len(clients), max(map(len, positions))), self.gap)
        for row, client, chosen in zip(rows, clients, positions, strict=True):
            row[: len(chosen)] = self.starts[client] + chosen
        found = torch.from_numpy(rows.ravel()).to(self.device)
        return Batch(found, (found != self.gap).to(self.x.dtype))

    def powers(self, norm: Norm, rows: slice | Tensor) -> Tensor:
        """Return Σ|x| or Σx² of the records that lie there, measured once for all rounds: records stay as they are."""
        if norm not in self._powers:
            pieces = [powers(piece.flatten(1), norm) for piece in torch.split(self.x, _AT_ONCE)]
            self._powers[norm] = torch.cat(pieces)
        return self._powers[norm][rows]

    def take(self, rows: slice | Tensor) -> Records:
        """Return the records that lie there."""
        return Records(self.x[rows], self.y[rows])
