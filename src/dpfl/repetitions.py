"""Repetitions as a dimension: many trainings of one system, and of several budgets, as one program.

The data, who takes part when, and so what is charged are the same in all repetitions of a budget; where the model
starts, the batches and the noise are drawn anew in each. So one ledger stands for all of them, and the clients of all
trainings are one cohort: for small models twenty trainings take little longer than one.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from dpfl.clients.backends import make_clients
from dpfl.clients.repeated import RepeatedClients, perform_together
from dpfl.clients.stacked import StackedClients
from dpfl.errors import BadInput, require_count
from dpfl.federation import Federation, Records
from dpfl.models import Loss
from dpfl.precision import Precision, products
from dpfl.privacy.certificate import Certificate, certify
from dpfl.privacy.ledger import Ledger
from dpfl.round import ask, combine
from dpfl.server.evaluation import PublicSplit, Score, evaluate
from dpfl.session import Session, problem_of
from dpfl.streams import Streams
from dpfl.systems import State, System
from dpfl.training import as_device, as_model


@dataclass(frozen=True)
class Look:
    """How good the models of all repetitions were after a round, on the test split."""

    round: int
    losses: list[float]
    accuracies: list[float] | None  # None for regression


@dataclass(frozen=True)
class Repetitions:
    """What came of all trainings with one budget."""

    epsilon: float | tuple[float, ...] | None  # as asked for; None without privacy
    losses: list[float]  # on the test split, of each repetition
    accuracies: list[float] | None  # likewise; None for regression
    validation_losses: list[float] | None  # on the public split; None where there is none
    history: list[Look]  # along the way, as often as was asked for, and at the end
    certificate: Certificate  # of each
    seconds: float  # for all trainings of all budgets

    @property
    def loss(self) -> tuple[float, float]:
        """Return the mean of the losses and its standard error."""
        return _mean(self.losses)

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """Return the mean of the accuracies and its standard error."""
        return None if self.accuracies is None else _mean(self.accuracies)


def repeat(
    system: System[Any],
    federation: Federation,
    model: str | nn.Module | None = None,
    *,
    repetitions: int = 20,
    epsilons: Sequence[float] | None = None,
    loss: Loss | None = None,
    seed: int | None = None,
    device: str = "cpu",
    precision: Precision = "float32",
    evaluate_every: int | None = None,
) -> list[Repetitions]:
    """Train many times over the same clients, and return what came of it for each budget.

    epsilons: budgets to train with; the system's own if left out.
    seed: repeats everything bit for bit, noise included; None draws from the operating system.
    evaluate_every: rounds between looks at the test split; None for one look, after the last.

    Raises BadInput for a system that watches its training: its repetitions would go different ways.
    """
    require_count("repetitions", repetitions, "train at least once")
    if not repeatable(system):
        raise BadInput(
            f"system must order the same in every repetition, but {system.name} follows its training; train it several"
            " times instead, with a seed each"
        )
    if epsilons is not None and not hasattr(system, "epsilon"):
        raise BadInput(f"epsilons must be left out for {system.name}, which promises nothing; leave them out")
    systems = [system] if epsilons is None else [_with_epsilon(system, epsilon) for epsilon in epsilons]
    target, shared = as_device(device), Streams(seed)
    own = [shared.part("repetition", number) for number in range(repetitions)]
    learners = [as_model(model, loss, federation, streams) for streams in own]
    learner = learners[0]
    learner.module.to(target)
    validation, test = federation.validation.to(target), federation.test.to(target)
    records = tuple(records.to(target) for records in federation.clients)
    public = validation if len(validation) else test
    clients = make_clients("stacked", learner, records, shared, public=public)
    assert isinstance(clients, StackedClients)

    started = time.perf_counter()
    starts = torch.stack([one.vector().to(target) for one in learners])
    trainings = []
    for place, budgeted in enumerate(systems):
        streams = own if len(systems) == 1 else [stream.part("budget", place) for stream in own]
        ledger = Ledger(
            budgeted.promise(federation.sizes), federation.sizes, system=budgeted.name, seeded=seed is not None
        )
        session = Session(
            budgeted, problem_of(budgeted, federation.sizes, learner.dim, shared), learner,
            RepeatedClients(clients, streams), ledger, shared.part("server", place), PublicSplit(learner, validation),
        )  # fmt: skip
        trainings.append(_Training(session, session.begin(starts)))
    with products(precision):
        while going := [one for one in trainings if one.state.round < one.state.rounds]:
            _play_together(going)
            for one in going:
                at = one.state.round
                if at == one.state.rounds or (evaluate_every is not None and at % evaluate_every == 0):
                    one.look(test)
    seconds = time.perf_counter() - started
    return [one.finish(validation, seconds) for one in trainings]


class _Training:
    """All repetitions with one budget: one session, whose model is [m, d], and where it stands."""

    def __init__(self, session: Session[Any], state: State) -> None:
        self.session, self.state = session, state
        self.history: list[Look] = []

    def look(self, test: Records) -> None:
        """Score all models on the test split."""
        scores = self._scores(test)
        rates = [score.accuracy for score in scores if score.accuracy is not None]
        self.history.append(Look(self.state.round, [score.loss for score in scores], rates or None))

    def finish(self, validation: Records, seconds: float) -> Repetitions:
        """Close the books and say what came of it."""
        last, ledger = self.history[-1], self.session.ledger
        public = [score.loss for score in self._scores(validation)]
        certificate = certify(ledger.books, ledger.run)
        ledger.books.close()
        budget = getattr(self.session.system, "epsilon", None)
        return Repetitions(budget, last.losses, last.accuracies, public or None, self.history, certificate, seconds)

    def _scores(self, records: Records) -> list[Score]:
        scores = (evaluate(self.session.model, parameters, records) for parameters in self.state.model)
        return [score for score in scores if score is not None]


def _play_together(trainings: Sequence[_Training]) -> None:
    """Play a round of each, all their clients as one cohort."""
    requests = [ask(one.session, one.state) for one in trainings]
    clients = [cast(RepeatedClients, one.session.clients) for one in trainings]
    sums = perform_together(clients, requests)
    for one, request, uploads in zip(trainings, requests, sums, strict=True):
        one.state, _ = combine(one.session, one.state, request, uploads)


def repeatable(system: System[Any]) -> bool:
    """Tell whether all repetitions can be trained as one: the same is ordered however each of them goes."""
    return not (system.needs or system.until_spent)


def _with_epsilon(system: System[Any], epsilon: float) -> System[Any]:
    options: dict[str, Any] = {"epsilon": epsilon}  # which only systems with a promise have
    return replace(system, **options)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error
