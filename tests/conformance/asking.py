"""Rounds asked of clients by themselves: what each uploads, or their weighted sum; and sessions over given clients."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Clients, Request, Separate, Summed
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.privacy.ledger import Charged, Ledger
from dpfl.server.evaluation import PublicSplit
from dpfl.session import Session, problem_of
from dpfl.streams import Streams
from dpfl.systems import System


def request(
    charged: Mapping[int, Charged],
    model: Tensor,
    round: int = 1,
    weights: Mapping[int, float] | None = None,
    *,
    separate: bool = False,
) -> Request:
    counted = dict.fromkeys(charged, 1.0) if weights is None else weights
    return Request("simulation", round, round, charged, (), model, counted, separate)


def uploads_of(clients: Clients, charged: Mapping[int, Charged], model: Tensor, round: int = 1) -> Mapping[int, Tensor]:
    """Return what each client uploads where it draws for itself, as the reference client does."""
    if isinstance(clients, StackedClients):
        clients = copy.copy(clients)
        clients.drawn_by = "client"
    found = clients.perform(request(charged, model, round, separate=True))
    assert isinstance(found, Separate)
    return found.by_client


def sum_of(
    clients: Clients, charged: Mapping[int, Charged], model: Tensor, round: int, weights: Mapping[int, float]
) -> Tensor:
    """Return the weighted sum of what a cohort uploads, of which nothing else is formed."""
    found = clients.perform(request(charged, model, round, weights))
    assert isinstance(found, Summed)
    assert found.clients == tuple(charged)
    return found.total


def session_of(
    system: System[Any],
    model: Model,
    records: Sequence[Records],
    streams: Streams,
    clients: Clients,
    *,
    public: Records | None = None,
    ledger: Ledger | None = None,
) -> Session[Any]:
    """Open a session over these clients, with a ledger in memory and nothing public if nothing is given."""
    sizes = tuple(map(len, records))
    held = public if public is not None else records[0].take(torch.arange(0))
    return Session(
        system, problem_of(system, sizes, model.dim, streams), model, clients,
        ledger or Ledger(system.promise(sizes), sizes), streams, PublicSplit(model, held),
    )  # fmt: skip
