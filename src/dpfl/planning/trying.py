"""Trainings of a pilot: candidates on records that are nobody's, with the noise that the real clients would add."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfl.clients.repeated import RepeatedClients, perform_together
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Engine, Request, Separate, Summed, Uploads
from dpfl.federation import Records
from dpfl.gradients.capabilities import Capabilities
from dpfl.models import Model
from dpfl.orders import Full, Gaussian, Laplace, Need, Order, Question, RecordClip
from dpfl.planning.bounds import Facts, begun, orders_of
from dpfl.planning.public_proxy import StandIn
from dpfl.planning.task import Task
from dpfl.privacy.ledger import Ledger
from dpfl.repetitions import repeatable
from dpfl.round import ask, combine, walk
from dpfl.server.evaluation import PublicSplit, Score, evaluate
from dpfl.session import Session, problem_of
from dpfl.streams import Streams
from dpfl.systems import PrivateSystem

Seen = tuple[Score, ...]  # what one candidate reached with one seed, on each task


class Stage(Protocol):
    """Where candidates are tried."""

    @property
    def task(self) -> Task:
        """Return what is planned."""

    @property
    def tasks(self) -> tuple[StandIn, ...]:
        """Return the records to try it on."""

    @property
    def capabilities(self) -> Capabilities:
        """Return what the engine knows of the model."""


def trials(stage: Stage, systems: Sequence[PrivateSystem[Any]], seed: int) -> list[Seen]:
    """Train each of these on every task with the real problem's noise; return what they reached on held-out records."""
    if len(systems) > 1 and all(map(repeatable, systems)):
        reached = [list(rows) for rows in trained_together(stage, systems, seed)]
    else:
        reached = [[trained(stage, system, seed, one) for one in stage.tasks] for system in systems]
    model = replace_seed(stage.task, seed).model()
    return [
        tuple(score(model, its, one.held_out) for its, one in zip(parameters, stage.tasks, strict=True))
        for parameters in reached
    ]


def score(model: Model, parameters: Tensor, records: Records) -> Score:
    """Score parameters; a loss that is no number is infinite."""
    found = evaluate(model, parameters, records)
    assert found is not None
    return found if math.isfinite(found.loss) else replace(found, loss=math.inf)


def trained(stage: Stage, system: PrivateSystem[Any], seed: int, public: StandIn) -> Tensor:
    """Return the parameters [d] that a candidate reaches on a task."""
    opened = _Opened(stage, system, seed, public)
    session = opened.session(system, opened.clients)
    state = session.begin()
    for reached, _ in walk(session, state):
        state = reached
    found: Tensor = state.model
    return found


def trained_together(stage: Stage, systems: Sequence[PrivateSystem[Any]], seed: int) -> list[Tensor]:
    """Return that of every task, [tasks, d], for candidates that take as many steps with the same clients.

    They are trained as one program. What is ordered does not depend on the task, so it is decided once for all tasks.
    """
    tasks = [_Opened(stage, systems[0], seed, one) for one in stage.tasks]
    first = tasks[0]
    alone = [[RepeatedClients(one.trained, [one.streams])] * len(systems) for one in tasks]
    sessions = [first.session(system, its) for system, its in zip(systems, alone[0], strict=True)]
    states = [session.begin(first.model.vector().expand(len(tasks), -1)) for session in sessions]
    while going := [at for at, state in enumerate(states) if state.round < state.rounds]:
        requests = {at: ask(sessions[at], states[at]) for at in going}
        scaled = [first.clients.scaled(request) for request in requests.values()]
        by_task = []
        for row, clients in enumerate(alone):
            its = [replace(request, broadcast=request.broadcast[row : row + 1]) for request in scaled]
            by_task.append(perform_together(clients[: len(its)], its))
        for at, uploads in zip(going, zip(*by_task, strict=True), strict=True):
            total = Summed(torch.cat([one.total for one in uploads]), uploads[0].clients)
            states[at], _ = combine(sessions[at], states[at], requests[at], total)
    return [state.model for state in states]


class _Opened:
    """A task with its model and clients, for one seed: what all candidates have in common, luck included."""

    def __init__(self, stage: Stage, system: PrivateSystem[Any], seed: int, public: StandIn) -> None:
        self.streams = Streams(seed, sampler="fast")  # records that are nobody's
        self.model = replace_seed(stage.task, seed).model()
        self.facts = stage.task.facts(self.model)
        self._public = public
        orders = orders_of(system, begun(system, self.facts), 1)
        sampled = any(not isinstance(order.batch, Full) for order in orders.values())
        records = _records(public, self.facts, self.streams, sampled=sampled)
        self.trained = StackedClients(self.model, records, self.streams, capabilities=stage.capabilities)
        self.clients = PublicClients(self.trained, self.facts.sizes)

    def session(self, system: PrivateSystem[Any], clients: "PublicClients | RepeatedClients") -> Session[Any]:
        """Return a session for a candidate."""
        return Session(
            system, problem_of(system, self.facts.sizes, self.model.dim, self.streams), self.model, clients,
            Ledger(None, self.facts.sizes, system="pilot"),  # nothing is promised of these records
            self.streams, PublicSplit(self.model, self._public.held_out), simulated="pilot",  # the same luck for all
        )  # fmt: skip


def replace_seed(task: Task, seed: int) -> Task:
    """Return the task with another seed, and so another first model."""
    return replace(task, config=replace(task.config, settings=replace(task.config.settings, seed=seed)))


def _records(public: StandIn, facts: Facts, streams: Streams, *, sampled: bool) -> tuple[Records, ...]:
    """Give every client its public records; as many as its own, drawn again and again, where batches are sampled."""
    pieces = public.clients
    if not sampled:
        return tuple(pieces[client % len(pieces)] for client in range(len(facts.sizes)))
    drawn = []
    for client, size in enumerate(facts.sizes):
        piece = pieces[client % len(pieces)]
        rows = streams.public.generator("stand-in", client=client).integers(len(piece), size=size)
        drawn.append(piece.take(torch.from_numpy(rows)))
    return tuple(drawn)


class PublicClients:
    """Clients that hold public records, with the noise scaled so that the model gets what it would get.

    Noise on the sum of n_i records' gradients is divided by n_i afterwards; where a stand-in holds m_i, the noise on
    its sum is m_i/n_i of that.
    """

    def __init__(self, clients: StackedClients, sizes: Sequence[int]) -> None:
        """Take the clients that hold public records, and how many records the real ones hold."""
        self.clients, self.sizes = clients, sizes
        self._held = [len(records) for records in clients.records]
        self._ledger = Ledger(None, self._held, system="pilot")

    @property
    def serves(self) -> frozenset[Need]:
        """Serve what those clients serve."""
        return self.clients.serves

    @property
    def engine(self) -> Engine:
        """Return how they train."""
        return self.clients.engine

    def scaled(self, request: Request) -> Request:
        """Return the request as it is for clients of these sizes."""
        orders = {client: self._scaled(client, paid.order) for client, paid in request.charged.items()}
        return replace(request, charged=self._ledger.charge(orders))

    def perform(self, request: Request) -> Uploads:
        """Perform the same orders for clients of other sizes."""
        uploads = self.clients.perform(self.scaled(request))
        if isinstance(uploads, Separate) and uploads.counts:  # of as many records as the real ones hold
            counts = {client: count / self._part(client) for client, count in uploads.counts.items()}
            return replace(uploads, counts=counts)
        return uploads

    def answer(
        self, questions: Sequence[Question], before: Tensor, uploads: Uploads, after: Tensor
    ) -> dict[Question, dict[int, float]]:
        """Answer from public records."""
        return self.clients.answer(questions, before, uploads, after)

    def _part(self, client: int) -> float:
        return self._held[client] / self.sizes[client]

    def _scaled(self, client: int, order: Order) -> Order:
        part = self._part(client)
        if order.count_noise is not None:
            order = replace(order, count_noise=Gaussian(part * order.count_noise.std))
        if order.noise is None or order.noise_on == "upload" or not isinstance(order.clip, RecordClip):
            return order
        if isinstance(order.noise, Gaussian):
            return replace(order, noise=Gaussian(part * order.noise.std))
        return replace(order, noise=Laplace(part * order.noise.scale))
