"""Chunks: clients whose orders are of one kind and differ in numbers alone, so that they can train together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dpfl.orders import Gaussian, Laplace, Order, Poisson, RecordClip
from dpfl.privacy.ledger import Charged


@dataclass(frozen=True)
class Chunk:
    """Clients with their paid orders; what differs among them comes as columns [k, 1]."""

    clients: list[int]
    paid: list[Charged]

    @property
    def order(self) -> Order:
        """Return one of the orders, for what is alike in all."""
        return self.paid[0].order

    @property
    def is_one_batch(self) -> bool:
        """Tell whether the sum of the uploads is one sum over all records: a single step, clipped record by record."""
        order = self.order
        return order.steps == 1 and (order.clip is None or isinstance(order.clip, RecordClip))

    @property
    def sampling_rates(self) -> list[float]:
        """Return the rate of each client's Poisson batches."""
        return [one.order.batch.sampling_rate for one in self.paid if isinstance(one.order.batch, Poisson)]

    def positions(self, device: torch.device) -> Tensor:
        """Return the clients' numbers [k]."""
        return torch.tensor(self.clients, device=device)

    def weighed(self, weights: Mapping[int, float], like: Tensor) -> Tensor:
        """Return how much each client's upload counts."""
        return self._column([weights[client] for client in self.clients], like)

    def rates(self, like: Tensor) -> Tensor:
        """Return the learning rate of each step, [k, steps]."""
        return self._rows(lambda paid: paid.order.learning_rates, like)

    def pulls(self, like: Tensor) -> Tensor:
        """Return the strength of each client's pull towards the broadcast model."""
        return self._rows(lambda paid: (paid.order.proximal,), like)

    def divisors(self, like: Tensor) -> Tensor:
        """Return what sums of record gradients are divided by."""
        return self._rows(lambda paid: (paid.order.divisor(paid.records),), like)

    def clip_norms(self, like: Tensor) -> Tensor:
        """Return each client's clipping threshold; one for those who clip nothing, who do not look at it."""
        return self._rows(lambda paid: (paid.order.clip.clip_norm if paid.order.clip else 1.0,), like)

    def step_noise(self, like: Tensor) -> Tensor:
        """Return the size of the noise on each client's gradient, where it is noised in every step."""
        return self._rows(lambda paid: (_size(paid.order.noise) * _in_gradient(paid),), like)

    def late_noise(self, like: Tensor) -> Tensor:
        """Return the size that the last noise has in each client's upload: nothing is trained on it any more."""
        return self._rows(lambda paid: (_late_size(paid),), like)

    def cut(self, room: int, cost: Callable[[int], int]) -> Iterator["Chunk"]:
        """Cut into chunks of clients of much the same cost, each within the room, or of one client."""
        costs = {client: cost(client) for client in self.clients}
        order = sorted(range(len(self.clients)), key=lambda i: costs[self.clients[i]])
        start = 0
        for end in range(1, len(order) + 1):
            # All are filled up to the largest, which comes last.
            full = end == len(order) or (end + 1 - start) * costs[self.clients[order[end]]] > room
            if full:
                part = order[start:end]
                yield Chunk([self.clients[i] for i in part], [self.paid[i] for i in part])
                start = end

    @cached_property
    def _alike(self) -> bool:
        first = self.paid[0]
        return all(one.order is first.order and one.records == first.records for one in self.paid)

    def _rows(self, of: Callable[[Charged], Sequence[float]], like: Tensor) -> Tensor:
        if self._alike:
            row = torch.tensor([of(self.paid[0])], dtype=like.dtype, device=like.device)
            return row.expand(len(self.paid), -1)
        return torch.tensor([of(one) for one in self.paid], dtype=like.dtype, device=like.device)

    def _column(self, values: Sequence[float], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def by_kind(charged: Mapping[int, Charged]) -> list[Chunk]:
    """Put clients together whose orders are of one kind."""
    kinds: dict[tuple[object, ...], Chunk] = {}
    known: dict[int, Chunk] = {}  # by the order itself: many clients often share one
    for client, paid in charged.items():
        chunk = known.get(id(paid.order))
        if chunk is None:
            chunk = known[id(paid.order)] = kinds.setdefault(_kind(paid.order), Chunk([], []))
        chunk.clients.append(client)
        chunk.paid.append(paid)
    return list(kinds.values())


def _kind(order: Order) -> tuple[object, ...]:
    clip = order.clip
    laws = type(order.batch), type(clip), clip and clip.norm, type(order.noise)
    return order.steps, order.noise_on, order.proximal > 0, *laws


def _size(noise: Gaussian | Laplace | None) -> float:
    assert noise is not None
    return noise.std if isinstance(noise, Gaussian) else noise.scale


def _in_gradient(paid: Charged) -> float:
    """Return what one unit of a step's noise is in the gradient: it is added to what the clip bounds."""
    return 1 / paid.order.divisor(paid.records) if isinstance(paid.order.clip, RecordClip) else 1.0


def _late_size(paid: Charged) -> float:
    size = _size(paid.order.noise)
    return size if paid.order.noise_on == "upload" else size * _in_gradient(paid) * paid.order.learning_rates[-1]
