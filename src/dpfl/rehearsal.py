"""Rehearsals: every order of a training is priced and nobody trains; and the claim at which a true ε is a target."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from dpfl.clients.uploads import Engine, Request, Separate, Summed, Uploads
from dpfl.errors import BadInput
from dpfl.models import Model
from dpfl.orders import CURVATURES, NEEDS, Need, Question
from dpfl.privacy.allowed import Allowed, Course, Filters, Rounds
from dpfl.privacy.budget import Observer
from dpfl.privacy.certificate import Certificate, certify, views_of
from dpfl.privacy.currency import CommonNeighbours, Sent, Spendings, Unpriced, kind_of, price, spendings
from dpfl.privacy.ledger import Ledger
from dpfl.round import walk
from dpfl.server.evaluation import Score
from dpfl.session import Session, follows_training, follows_uploads, problem_of
from dpfl.streams import Streams
from dpfl.systems import PrivateSystem, System


def is_true(
    system: PrivateSystem[Any],
    sizes: Sequence[int],
    observer: Observer = "server",
    neighbours: CommonNeighbours | None = None,
) -> bool:
    """Tell whether what a system promises is what the observer may learn, for these neighbours, by exact accounting.

    Who sees less than the promise is made for learns less: of a promise to eavesdroppers, who only reads the models.
    """
    promise = system.promise(sizes)
    overhears_all = observer == "server" and (promise.exposures or 0) >= system.rounds
    sees_most = next(one for one in get_args(Observer) if one in promise.against)
    same_currency = neighbours is None or kind_of(neighbours) == (promise.unit, promise.neighbours)
    return promise.calibration == "tight" and same_currency and (observer == sees_most or overhears_all)


def at_true_epsilon(
    system: PrivateSystem[Any],
    sizes: Sequence[int],
    epsilon: float,
    streams: Streams,
    *,
    neighbours: CommonNeighbours | None = None,
    observer: Observer = "server",
    tolerance: float = 1e-5,
) -> PrivateSystem[Any]:
    """Return the system with the claimed ε at which no client really loses more than `epsilon` against the observer.

    neighbours: those that all are priced in; the system's own if left out.
    tolerance: how far below, as a part of ε, that may be.

    Raises `Unpriced` where what the system lets out has no price under these neighbours, or no claim comes to this one.
    """
    if is_true(system, sizes, observer, neighbours):
        return system

    def excess(log_claim: float) -> float:
        claiming = replace(system, epsilon=math.exp(log_claim))
        try:
            seen = _seen(claiming, sizes, streams, neighbours, observer)
        except Unpriced:
            raise
        except BadInput:  # so little that it cannot even begin
            if log_claim >= math.log(epsilon):
                raise
            return -50.0
        return min(max(math.log(max(seen, 1e-30) / epsilon), -50.0), 50.0)

    low = high = math.log(epsilon)
    while excess(low) > 0:
        low -= 1
        _require_reachable(system, low, epsilon)
    reached = -math.inf
    while (now := excess(high)) <= 0:
        if now == reached and system.calibration == "tight":  # its rounds end before its budget: it spends less
            return replace(system, epsilon=epsilon * math.exp(round(high - math.log(epsilon)) - 1))
        reached, high = now, high + 1
        _require_reachable(system, high, epsilon)
    claim = float(brentq(excess, low, high, xtol=tolerance))
    while excess(claim) > 0:  # steps are whole numbers: end on the safe side
        claim -= tolerance
    found = replace(system, epsilon=math.exp(claim))
    try:
        _seen(found, sizes, streams, neighbours, observer)
    except BadInput as refusal:  # so little that it cannot even begin
        raise Unpriced(str(refusal)) from None
    return found


def _seen(
    system: PrivateSystem[Any],
    sizes: Sequence[int],
    streams: Streams,
    neighbours: CommonNeighbours | None,
    observer: Observer,
) -> float:
    if neighbours is not None:
        return Rehearsal(system, sizes, streams).price(neighbours, observer)
    seen = rehearse(system, sizes, streams).observers[observer].epsilon
    return math.inf if seen is None else seen


def _require_reachable(system: PrivateSystem[Any], log_claim: float, epsilon: float) -> None:
    if abs(log_claim - math.log(epsilon)) > 15:
        raise Unpriced(
            f"epsilon must be one that {system.name} can really spend, was {epsilon:g}: no claim of its formula comes"
            " near; choose another"
        )


def rehearse(system: System[Any], sizes: Sequence[int], streams: Streams) -> Certificate:
    """Return the certificate of a training that spends all it may, by pricing its orders and training nobody."""
    return Rehearsal(system, sizes, streams).certificate


class Rehearsal:
    """A training that spends all it may: its orders are priced and nobody trains.

    A controller is told what lets it go on longest: losses that keep falling, and no curvature to speak of (each local
    step moves the model by nearly the same).
    """

    def __init__(self, system: System[Any], sizes: Sequence[int], streams: Streams) -> None:
        """Walk all its rounds."""
        self.promise, self.sizes, self._follows = system.promise(sizes), tuple(sizes), follows_uploads(system)
        session = _opened(system, sizes, streams)
        self._ledger, self.rounds = session.ledger, list[Sent]()
        state = session.begin()
        for reached, outcome in walk(session, state):
            downlink = system.downlink(state, outcome.answered)
            weights = system.weights(state, outcome.answered) if outcome.answered else {}
            self.rounds.append(Sent(outcome.orders, weights, downlink.std if downlink else 0.0))
            state = reached

    @cached_property
    def certificate(self) -> Certificate:
        """Return what its certificate would say."""
        return certify(self._ledger.books, self._ledger.run)

    @property
    def course(self) -> Course:
        """Return what every observer would see of each client."""
        assert self.promise is not None
        return Course(len(self.rounds), views_of(self._ledger.books, self._ledger.run, self.promise))

    def price(self, neighbours: CommonNeighbours, observer: Observer = "server") -> float:
        """Return the ε under these neighbours, of the client that loses most."""
        return price(
            self.promise, self.rounds, self.sizes, neighbours, observer=observer, follows_uploads=self._follows
        )

    def spendings(self, neighbours: CommonNeighbours) -> Spendings:
        """Return what each client lets out towards the server, in this currency."""
        return spendings(self.promise, self.rounds, self.sizes, neighbours)


def _opened(system: System[Any], sizes: Sequence[int], streams: Streams) -> Session[Any]:
    """Open a training whose clients compute nothing."""
    promise = system.promise(sizes)
    decided = follows_training(system) or not _is_known(system)
    filtered = promise is not None and promise.calibration == "tight" and "server" in promise.against and decided
    ledger = Ledger(
        promise, sizes, system=system.name, follows_uploads=follows_uploads(system),
        allowed=Filters() if filtered else None,
    )  # fmt: skip
    model = Model(_OneParameter(), lambda outputs, targets: outputs)
    problem = problem_of(system, sizes, 1, streams)
    return Session(system, problem, model, PricedClients(len(sizes)), ledger, streams, _FallingLoss())


def allowance(system: System[Any], sizes: Sequence[int], streams: Streams) -> Allowed | None:
    """Return what a training may let out at most, for its ledger to write down; None where nothing is promised."""
    promise = system.promise(sizes)
    if promise is None:
        return None
    decided = follows_training(system) or not _is_known(system)
    if promise.calibration == "tight" and "server" in promise.against and decided:
        return Filters()
    if decided or promise.calibration == "paper" or "server" not in promise.against or system.until_spent:
        return Rehearsal(system, sizes, streams).course
    session = _opened(system, sizes, streams)
    rounds = session.begin().rounds
    return Rounds(rounds, [int(count) for count in session.problem.schedule.replies(1, rounds)])


def _is_known(system: System[Any]) -> bool:
    """Tell whether a system is one of dpfl's own: only of these is it known that they look at what they say."""
    return type(system).__module__.startswith("dpfl.systems.")


class PricedClients:
    """Clients that compute nothing."""

    def __init__(self, clients: int) -> None:
        self.clients, self._asked = clients, 0

    @property
    def serves(self) -> frozenset[Need]:
        """Serve whatever a system may need."""
        return NEEDS

    @property
    def engine(self) -> Engine:
        """Return that they do not train."""
        return Engine("a rehearsal, in which nobody trains")

    def perform(self, request: Request) -> Uploads:
        """Move the model by as much as its steps are long, a little more in every round."""
        counted = [client for client, paid in request.charged.items() if paid.order.count_noise is not None]
        if request.separate:
            nothing = dict.fromkeys(request.charged, torch.zeros_like(request.broadcast))
            return Separate(nothing, dict.fromkeys(counted, 0.0))
        way = max((sum(paid.order.learning_rates) for paid in request.charged.values()), default=0.0)
        total = torch.full_like(request.broadcast, way * (1 + 1e-9 * (request.round - 1)))
        return Summed(total, tuple(request.charged), 0.0 if counted else None)

    def answer(
        self, questions: Sequence[Question], before: Tensor, uploads: Uploads, after: Tensor
    ) -> dict[Question, dict[int, float]]:
        """Tell of a loss that has fallen much since it was last asked for, of nearly no curvature, and of length 1."""
        self._asked += 1
        answers: dict[Question, dict[int, float]] = {
            "loss": dict.fromkeys(range(self.clients), -1e3 * self._asked),
            **{curvature: dict.fromkeys(uploads.clients, 1e-9) for curvature in CURVATURES},
            "length": dict.fromkeys(uploads.clients, 1.0),
        }
        return {question: answers[question] for question in questions}


class _FallingLoss:
    """A public split on which every model is much better than the one before."""

    def score(self, parameters: Tensor, round: int) -> Score:
        return Score(-1e3 * round, None)


class _OneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
