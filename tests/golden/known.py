"""Noise of known values, for rounds that are worked out by hand, and the clients that play them."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from torch import Tensor

from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Request, Uploads
from dpfl.federation import Records
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Model
from dpfl.orders import Gaussian, Laplace
from dpfl.streams import Root, Streams

Law = Gaussian | Laplace


class Deck:
    """Vectors that are dealt in turn, in the place of noise of size 1, and what is noted of each."""

    def __init__(self, vectors: Iterable[np.ndarray], noted: Callable[[Law], Any]) -> None:
        self.left, self.noted, self.notes = iter(vectors), noted, list[Any]()

    def deal(self, law: Law | None, count: int) -> "Dealer":
        for _ in range(count if law is not None else 0):
            self.notes.append(self.noted(law))
        return Dealer([next(self.left) for _ in range(count if law is not None else 0)])


_deck: Deck | None = None  # of the test that runs


class Dealer:
    """Stands for a client's generator of noise: gives the vectors that it was dealt, one after the other."""

    def __init__(self, vectors: list[np.ndarray]) -> None:
        self.left = vectors

    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        vector = self.left.pop(0)
        assert vector.shape == shape
        return vector

    def laplace(self, *, size: tuple[int, ...]) -> np.ndarray:
        return self.standard_normal(size)


class KnownStreams(Streams):
    """Streams whose clients draw noise that they were dealt, and batches that a page can draw again."""

    def __init__(self, streams: Streams) -> None:
        self.seeded, self.fast = streams.seeded, streams.fast
        self.public, self.secret = streams.public, streams.secret
        self.dealers: dict[int, Dealer] = {}

    def of(self, client: int) -> Any:
        return _KnownRoot(super().of(client), self.dealers.get(client))


class _KnownRoot:
    def __init__(self, root: Root, dealer: Dealer | None) -> None:
        self.root, self.dealer = root, dealer

    def generator(self, purpose: str, *, run: str, round: int, order: str | None) -> Any:
        return self.dealer if purpose == "noise" and self.dealer else self.root.generator(purpose, round=round)


class KnownClients:
    """Clients to whom noise is dealt before they perform: each gets the vectors of its turn."""

    def __init__(self, clients: ReferenceClients | StackedClients, streams: KnownStreams) -> None:
        self.clients, self.streams = clients, streams
        self.serves, self.engine, self.answer = clients.serves, clients.engine, clients.answer

    def perform(self, request: Request) -> Uploads:
        for client, paid in request.charged.items() if _deck else ():
            self.streams.dealers[client] = _deck.deal(paid.order.noise, paid.order.releases)
        uploads = self.clients.perform(request)
        assert not any(dealer.left for dealer in self.streams.dealers.values())  # all was used
        return uploads


def batches_of(seed: int, client: int, round: int) -> Generator:
    """Return the coins by which a client draws its batches in a round."""
    return Streams(seed).of(client).generator("batches", round=round)


def reference(model: Model, records: tuple[Records, ...], streams: Streams) -> KnownClients:
    """Make the clients that are visited one after the other."""
    known = KnownStreams(streams)
    return KnownClients(ReferenceClients(model, records, known), known)


def stacked(model: Model, records: tuple[Records, ...], streams: Streams) -> KnownClients:
    """Make the clients that train together, which must know the model's layers: else this were the loop again."""
    public = Records(torch.cat([one.x for one in records]), torch.cat([one.y for one in records]))
    capable, known = capabilities_of(model, public), KnownStreams(streams)
    assert capable.layers is not None
    return KnownClients(StackedClients(model, records, known, capabilities=capable, drawn_by="client"), known)


def size_of(law: Law) -> float:
    return law.scale if isinstance(law, Laplace) else law.std


def switch_noise(
    monkeypatch: pytest.MonkeyPatch,
    vectors: Iterable[np.ndarray],
    *,
    noted: Callable[[Law], Any] = size_of,
) -> list[Any]:
    """Let the n-th noise of clients be its size times the n-th vector; return what is noted of each."""
    deck = Deck(vectors, noted)
    monkeypatch.setattr(sys.modules[__name__], "_deck", deck)
    return deck.notes


def switch_downlink(monkeypatch: pytest.MonkeyPatch, vectors: Iterable[np.ndarray]) -> list[float]:
    """Let the n-th noise of the server be its size times the n-th vector; return the sizes."""
    turn, notes = iter(vectors), []

    def add(value: Tensor, law: object, size: float, source: object, *, relative_size: float) -> Tensor:
        notes.append(size)
        return value + size * torch.from_numpy(next(turn))

    monkeypatch.setattr("dpfl.round.add_noise", add)
    return notes


def records_of(rows: list, targets: torch.dtype = torch.float64) -> Records:
    x, y = zip(*rows, strict=True)
    return Records(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=targets))
