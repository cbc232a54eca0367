"""A workload's round as dpfl plays it: in a simulation, for real, by the reference client, and without any privacy."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dpfl.bench.workloads import DrawnWorkload
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Request
from dpfl.gradients.capabilities import capabilities_of
from dpfl.orders import Order, Sampler
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.ledger import Ledger
from dpfl.server.aggregation import aggregate
from dpfl.streams import Streams


def stacked(problem: DrawnWorkload) -> Callable[[], Tensor]:
    """Return a round of the stacked clients and the server: all that is in the model after it, and no more."""
    return _round(problem, problem.workload.order, reference=False)


def exactly_noised(problem: DrawnWorkload) -> Callable[[], Tensor]:
    """Return the same with noise as real runs draw it."""
    return _round(problem, problem.workload.order, reference=False, sampler="exact")


def without_privacy(problem: DrawnWorkload) -> Callable[[], Tensor]:
    """Return the same without clip and noise."""
    return _round(problem, replace(problem.workload.order, clip=None, noise=None), reference=False)


def reference(problem: DrawnWorkload) -> Callable[[], Tensor]:
    """Return a round of the reference client."""
    return _round(problem, problem.workload.order, reference=True)


def _round(problem: DrawnWorkload, order: Order, *, reference: bool, sampler: Sampler = "fast") -> Callable[[], Tensor]:
    streams = Streams(1, sampler=sampler)
    few = problem.records[0].take(torch.arange(min(8, problem.workload.records), device=problem.device))
    clients = (
        ReferenceClients(problem.model, problem.records, streams)
        if reference
        else StackedClients(problem.model, problem.records, streams, capabilities=capabilities_of(problem.model, few))
    )
    # Clients perform nothing that no ledger has seen; this one counts, and limits nothing.
    sizes = [len(one) for one in problem.records]
    promise = Promise(
        budgets=(Budget(8.0, 1e-3),) * len(sizes), unit="record", neighbours="replace", calibration="paper"
    )
    paid = Ledger(promise if order.noise else None, sizes, system="bench").charge(dict.fromkeys(problem.cohort, order))
    weights = dict.fromkeys(problem.cohort, 1 / len(problem.cohort))
    played = 0

    def play() -> Tensor:
        nonlocal played
        played += 1
        uploads = clients.perform(Request("bench", played, played, paid, (), problem.broadcast, weights))
        return problem.broadcast + aggregate(problem.broadcast, uploads, weights)

    return play
