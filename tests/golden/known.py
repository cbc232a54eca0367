"""Noise of known values, for rounds that are worked out by hand, and the clients that play them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.federation import Records
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Model
from dpfl.orders import Gaussian, Laplace
from dpfl.streams import Streams

Law = Gaussian | Laplace


def reference(model: Model, records: tuple[Records, ...], streams: Streams) -> ReferenceClients:
    """Make the clients that are visited one after the other."""
    return ReferenceClients(model, records, streams)


def stacked(model: Model, records: tuple[Records, ...], streams: Streams) -> StackedClients:
    """Make the clients that train together, which must know the model's layers: else this were the loop again."""
    public = Records(torch.cat([one.x for one in records]), torch.cat([one.y for one in records]))
    known = capabilities_of(model, public)
    assert known.layers is not None
    return StackedClients(model, records, streams, capabilities=known)


def size_of(law: Law) -> float:
    return law.scale if isinstance(law, Laplace) else law.std


def switch_noise(
    monkeypatch: pytest.MonkeyPatch,
    vectors: Iterable[np.ndarray],
    *,
    at: str = "dpfl.clients.reference",
    noted: Callable[[Law], Any] = size_of,
) -> list[Any]:
    """Let the n-th noise that is added there be its size times the n-th vector; return what is noted of each.

    The clients that train together draw in an order of their own: each is dealt the vectors of its turn beforehand.
    """
    turn, notes = iter(vectors), []

    def add(value: Tensor, law: Law, rng: object) -> Tensor:
        notes.append(noted(law))
        return value + size_of(law) * torch.from_numpy(next(turn))

    monkeypatch.setattr(f"{at}.add_noise", add)
    if at == "dpfl.clients.reference":
        _deal_to_stacked(monkeypatch, turn, lambda law: notes.append(noted(law)))
    return notes


class Dealer:
    """Stands for a client's generator of noise: gives the vectors that it was dealt, one after the other."""

    def __init__(self, vectors: list[np.ndarray]) -> None:
        self.left = iter(vectors)

    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        vector = next(self.left)
        assert vector.shape == shape
        return vector

    def laplace(self, *, size: tuple[int, ...]) -> np.ndarray:
        return self.standard_normal(size)


def _deal_to_stacked(monkeypatch: pytest.MonkeyPatch, turn: Iterator[np.ndarray], note: Callable[[Law], None]) -> None:
    dealt: dict[int, list[np.ndarray]] = {}
    dealers: dict[int, Dealer] = {}
    perform_right, generator_right = StackedClients.perform, Streams.generator

    def generator(self: Streams, purpose: str, *, client: int | None = None, round: int | None = None) -> Any:
        if purpose != "noise" or client not in dealt:
            return generator_right(self, purpose, client=client, round=round)
        dealers[client] = Dealer(dealt[client])
        return dealers[client]

    def perform(
        self: StackedClients, charged: Mapping[int, Any], broadcast: Tensor, round: int, *, apart: bool = True
    ) -> Mapping[int, Tensor]:
        for client, paid in charged.items():
            law = paid.order.noise
            dealt[client] = [next(turn) for _ in range(paid.order.releases if law is not None else 0)]
            for _ in dealt[client]:
                note(law)
        uploads = perform_right(self, charged, broadcast, round, apart=True)  # a vector each: no sum of noise
        assert all(next(dealers[client].left, None) is None for client in charged if dealt[client])  # all was used
        return uploads

    monkeypatch.setattr(Streams, "generator", generator)
    monkeypatch.setattr(StackedClients, "perform", perform)


def records_of(rows: list, targets: torch.dtype = torch.float64) -> Records:
    x, y = zip(*rows, strict=True)
    return Records(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=targets))
