"""Rehearsals: every order of a training is priced and nobody trains; and the claim at which a true ε is a target."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from dpfl.clients.uploads import Engine, Request, Separate, Summed, Uploads
from dpfl.errors import BadInput
from dpfl.models import Model
from dpfl.orders import NEEDS, Need, Question
from dpfl.privacy.allowed import Allowed, Course, Filters, Rounds
from dpfl.privacy.budget import Observer
from dpfl.privacy.certificate import Certificate, certify, views_of
from dpfl.privacy.ledger import Ledger
from dpfl.round import walk
from dpfl.server.evaluation import Score
from dpfl.session import Session, follows_training, follows_uploads, problem_of
from dpfl.streams import Streams
from dpfl.systems import PrivateSystem, System


def is_true(system: PrivateSystem[Any], sizes: Sequence[int], observer: Observer = "server") -> bool:
    """Tell whether what a system promises is what the observer may learn, by exact accounting.

    Who sees less than the promise is made for learns less: of a promise to eavesdroppers, who only reads the models.
    """
    promise = system.promise(sizes)
    overhears_all = observer == "server" and (promise.exposures or 0) >= system.rounds
    sees_most = next(one for one in get_args(Observer) if one in promise.against)
    return promise.calibration == "tight" and (observer == sees_most or overhears_all)


def at_true_epsilon(
    system: PrivateSystem[Any],
    sizes: Sequence[int],
    epsilon: float,
    streams: Streams,
    *,
    observer: Observer = "server",
    tolerance: float = 1e-5,
) -> PrivateSystem[Any]:
    """Return the system with the claimed ε at which no client really loses more than `epsilon` against the observer.

    tolerance: how far below, as a part of ε, that may be.
    """
    if is_true(system, sizes, observer):
        return system

    def excess(log_claim: float) -> float:
        seen = rehearse(replace(system, epsilon=math.exp(log_claim)), sizes, streams).observers[observer].epsilon
        return 50.0 if seen is None else min(max(math.log(max(seen, 1e-30) / epsilon), -50.0), 50.0)

    low = high = math.log(epsilon)
    while excess(low) > 0:
        low -= 1
        _require_reachable(system, low, epsilon)
    while excess(high) <= 0:
        high += 1
        _require_reachable(system, high, epsilon)
    claim = float(brentq(excess, low, high, xtol=tolerance))
    while excess(claim) > 0:  # steps are whole numbers: end on the safe side
        claim -= tolerance
    return replace(system, epsilon=math.exp(claim))


def _require_reachable(system: PrivateSystem[Any], log_claim: float, epsilon: float) -> None:
    if abs(log_claim - math.log(epsilon)) > 15:
        raise BadInput(
            f"epsilon must be one that {system.name} can really spend, was {epsilon:g}: no claim of its formula comes"
            " near; choose another"
        )


def rehearse(system: System[Any], sizes: Sequence[int], streams: Streams) -> Certificate:
    """Return the certificate of a training that spends all it may, by pricing its orders and training nobody.

    A controller is told what lets it go on longest: losses that keep falling, and no curvature to speak of (each local
    step moves the model by nearly the same).
    """
    ledger = _rehearsed(system, sizes, streams)
    return certify(ledger.books, ledger.run)


def allowance(system: System[Any], sizes: Sequence[int], streams: Streams) -> Allowed | None:
    """Return what a training may let out at most, for its ledger to write down; None where nothing is promised."""
    promise = system.promise(sizes)
    if promise is None:
        return None
    if follows_training(system) or system.until_spent:
        if promise.calibration == "tight":
            return Filters()
        ledger = _rehearsed(system, sizes, streams)
        return Course(views_of(ledger.books, ledger.run, promise))
    session = _rehearsal(system, sizes, streams)
    rounds = session.begin().rounds
    return Rounds(rounds, [int(count) for count in session.problem.schedule.replies(1, rounds)])


def _rehearsed(system: System[Any], sizes: Sequence[int], streams: Streams) -> Ledger:
    """Play a training whose clients compute nothing, and return what it was charged."""
    session = _rehearsal(system, sizes, streams)
    for _ in walk(session, session.begin()):
        pass
    return session.ledger


def _rehearsal(system: System[Any], sizes: Sequence[int], streams: Streams) -> Session[Any]:
    """Open a training whose clients compute nothing."""
    promise = system.promise(sizes)
    filtered = promise is not None and promise.calibration == "tight" and follows_training(system)
    ledger = Ledger(
        promise, sizes, system=system.name, follows_uploads=follows_uploads(system),
        allowed=Filters() if filtered else None,
    )  # fmt: skip
    model = Model(_OneParameter(), lambda outputs, targets: outputs)
    problem = problem_of(system, sizes, 1, streams)
    return Session(system, problem, model, PricedClients(len(sizes)), ledger, streams, _FallingLoss())


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
        if request.separate:
            return Separate(dict.fromkeys(request.charged, torch.zeros_like(request.broadcast)))
        way = max((sum(paid.order.learning_rates) for paid in request.charged.values()), default=0.0)
        total = torch.full_like(request.broadcast, way * (1 + 1e-9 * (request.round - 1)))
        return Summed(total, tuple(request.charged))

    def answer(
        self, questions: Sequence[Question], before: Tensor, uploads: Uploads, after: Tensor
    ) -> dict[Question, dict[int, float]]:
        """Tell of a loss that has fallen much since it was last asked for, and of nearly no curvature."""
        self._asked += 1
        answers: dict[Question, dict[int, float]] = {
            "loss": dict.fromkeys(range(self.clients), -1e3 * self._asked),
            "curvature": dict.fromkeys(uploads.clients, 1e-9),
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
