"""Chunks: clients whose orders are of one kind and differ in numbers alone, so that they can train together."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfl.orders import Full, Gaussian, Order, Poisson, RecordClip
from dpfl.privacy.exact_noise import Law
from dpfl.privacy.ledger import Charged


@dataclass(frozen=True)
class Chunk:
    """Clients with their paid orders."""

    clients: list[int]
    paid: list[Charged]
    alike: bool = False  # whether all have the same order and number of records
    times: int = 1  # how often each client stands in the list: as often as it is trained, with a model each time

    @property
    def order(self) -> Order:
        """Return one of the orders, for what is alike in all."""
        return self.paid[0].order

    @property
    def law(self) -> Law:
        """Return the law of the noise."""
        return type(self.order.noise) if self.order.noise is not None else Gaussian

    @property
    def draws(self) -> bool:
        """Tell whether training draws anything: batches, or noise on a step that is not the last."""
        order = self.order
        return self.is_sampled or (order.noise is not None and order.noise_on == "step")

    @property
    def is_sampled(self) -> bool:
        """Tell whether batches are drawn, sampled or shuffled."""
        return not isinstance(self.order.batch, Full)

    @property
    def sampling_rates(self) -> list[float]:
        """Return the rate of each client's Poisson batches."""
        return [receipt.order.batch.sampling_rate for receipt in self.paid if isinstance(receipt.order.batch, Poisson)]

    def table(self, weights: Mapping[int, float] | None = None) -> Tensor:
        """Return what differs among the clients as a table, on the host and in double precision.

        weights: how much each client's upload counts, where it is to be summed.
        """
        table = np.empty((len(self.paid), len(Columns._fields) - 1 + self.order.steps))
        receipts = {id(receipt): receipt for receipt in self.paid}
        numbers = {number: _numbers_of(receipt) for number, receipt in receipts.items()}
        table[:] = _numbers_of(self.paid[0]) if self.alike else [numbers[id(receipt)] for receipt in self.paid]
        if weights is not None:
            table[:, 0] = self._weighed(weights)
        return torch.from_numpy(table)

    def repeated(self, others: Sequence["Chunk"]) -> "Chunk":
        """Return a chunk in which each client stands as often as there are chunks of the same clients."""
        paid = [receipt for column in zip(*(other.paid for other in others), strict=True) for receipt in column]
        return Chunk([client for client in self.clients for _ in others], paid, times=len(others))

    def late_noise(self, weights: Mapping[int, float]) -> NDArray[np.float64]:
        """Return the size that the last noise of each client has in the weighted sum, [k]."""
        sizes = _late_noise(self.paid[0]) if self.alike else np.array([_late_noise(receipt) for receipt in self.paid])
        return self._weighed(weights) * sizes

    def least_sensitivity(self, weights: Mapping[int, float]) -> float:
        """Return how far the client whose data moves the weighted sum least can move it, of those who can at all."""
        noise = self.late_noise(weights)
        return min((size / one.relative_noise for size, one in zip(noise, self.paid, strict=True) if size), default=0.0)

    def _weighed(self, weights: Mapping[int, float]) -> NDArray[np.float64]:
        return np.fromiter(map(weights.__getitem__, self.clients), float, len(self.clients))

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Return what is alike in all orders."""
        return _kind(self.order)

    def cut(self, room: int, costs: Sequence[int], waste: float = math.inf) -> Iterator["Chunk"]:
        """Cut into chunks of clients of much the same cost, each within the room, or of one client.

        waste: how much filling clients up to the largest of their chunk may cost.
        """
        whole = max(costs) * len(costs)
        if whole <= room and whole - sum(costs) <= waste:
            yield self
            return
        for part in cut(room, costs, waste):
            yield Chunk([self.clients[i] for i in part], [self.paid[i] for i in part], self.alike)


class Columns(NamedTuple):
    """What differs among the clients of a chunk, as columns [k, 1]."""

    weights: Tensor  # how much an upload counts in the sum, where only that is asked for
    divisors: Tensor  # of sums of record gradients
    clip_norms: Tensor  # one for those who clip nothing, and do not look at it
    pulls: Tensor  # strength of the pull towards the broadcast model
    step_noise: Tensor  # size of the noise on a gradient, where every step is noised
    late_noise: Tensor  # size that the last noise has in an upload: nothing is trained on it any more
    rates: Tensor  # of each step, [k, steps]

    @staticmethod
    def of(table: Tensor) -> "Columns":
        """View a chunk's table so."""
        columns = len(Columns._fields) - 1
        return Columns(*torch.split(table, [*[1] * columns, table.shape[1] - columns], dim=1))


def by_kind(charged: Mapping[int, Charged]) -> list[Chunk]:
    """Put clients together whose orders are of one kind."""
    clients, paid = list(charged), list(charged.values())
    if paid and all(map(is_, paid, repeat(paid[0]))):  # many clients often share one receipt
        return [Chunk(clients, paid, alike=True)]
    receipts = {id(receipt): receipt for receipt in paid}
    kinds = {number: _kind(receipt.order) for number, receipt in receipts.items()}
    if len(set(kinds.values())) == 1:
        distinct = {(id(receipt.order), receipt.records) for receipt in receipts.values()}
        return [Chunk(clients, paid, alike=len(distinct) == 1)]
    members: dict[tuple[object, ...], list[int]] = {}
    for i, receipt in enumerate(paid):
        members.setdefault(kinds[id(receipt)], []).append(i)
    return [Chunk([clients[i] for i in some], [paid[i] for i in some]) for some in members.values()]


def cut(room: int, costs: Sequence[int], waste: float = math.inf) -> Iterator[list[int]]:
    """Put places of much the same cost together, as many as fit the room and waste no more, or one alone."""
    order = sorted(range(len(costs)), key=costs.__getitem__)
    start = used = 0
    for end, place in enumerate(order):
        filled = (end + 1 - start) * costs[place]  # a chunk is filled up to the largest, which comes last
        if end > start and (filled > room or filled - used - costs[place] > waste):
            yield order[start:end]
            start, used = end, 0
        used += costs[place]
    if order:
        yield order[start:]


def _kind(order: Order) -> tuple[object, ...]:
    clip = order.clip
    laws = type(order.batch), type(clip), clip and clip.norm, type(order.noise)
    return order.steps, order.noise_on, order.proximal > 0, order.count_noise is not None, *laws


def _numbers_of(paid: Charged) -> list[float]:
    order = paid.order
    clip_norm = order.clip.clip_norm if order.clip else 1.0
    numbers = [order.divisor(paid.records), clip_norm, order.proximal, _step_noise(paid), _late_noise(paid)]
    return [1.0, *numbers, *order.learning_rates]


def _step_noise(paid: Charged) -> float:
    """Return the noise's size on a gradient: it is added to what the clip bounds, be it a sum that is divided."""
    noise = paid.order.noise
    if noise is None:
        return 0.0
    return noise.size / paid.order.divisor(paid.records) if isinstance(paid.order.clip, RecordClip) else noise.size


def _late_noise(paid: Charged) -> float:
    noise = paid.order.noise
    if noise is None or paid.order.noise_on == "step":
        return _step_noise(paid) * paid.order.learning_rates[-1]
    return noise.size
