"""Clients that train many times at once: the models of all repetitions of a training are the rows of one tensor."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Engine, Request, Summed, Uploads
from dpfl.orders import Need, Question
from dpfl.streams import Streams


class RepeatedClients:
    """Clients whose broadcast is [m, d], a model for each repetition, and so is the sum of their uploads."""

    def __init__(self, clients: StackedClients, streams: Sequence[Streams]) -> None:
        """Take the clients that train, and the streams of each repetition."""
        self.clients, self.streams = clients, streams

    @property
    def serves(self) -> frozenset[Need]:
        """Serve nothing that depends on how a training goes: repetitions would go different ways."""
        return frozenset()

    @property
    def engine(self) -> Engine:
        """Return how they train."""
        return replace(self.clients.engine, name=f"repetitions at once, {self.clients.engine.name}")

    def perform(self, request: Request) -> Summed:
        """Train every repetition, and return the sums of their uploads [m, d]."""
        return perform_together([self], [request])[0]

    def answer(
        self, questions: Sequence[Question], before: Tensor, uploads: Uploads, after: Tensor
    ) -> dict[Question, dict[int, float]]:
        """Answer nothing, as nothing is served."""
        return {}


def perform_together(clients: Sequence[RepeatedClients], requests: Sequence[Request]) -> list[Summed]:
    """Train the repetitions of several sessions with the same clients as one cohort."""
    each = [replace(request, broadcast=model) for request in requests for model in request.broadcast]
    streams = [stream for one in clients for stream in one.streams]
    sums = torch.split(clients[0].clients.repeat(each, streams), [len(one.streams) for one in clients])
    return [Summed(total, tuple(request.charged)) for total, request in zip(sums, requests, strict=True)]
