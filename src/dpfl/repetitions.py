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
from typing import Any

import torch
from torch import nn

from dpfl.clients.stacked import StackedClients
from dpfl.errors import BadInput, require_count
from dpfl.federation import Federation, Records, Schedule
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Loss, Model
from dpfl.privacy.certificate import Certificate, certify
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.mechanisms import add_noise
from dpfl.server.evaluation import Score, evaluate
from dpfl.streams import Streams, layer_randomness
from dpfl.systems import Feedback, Problem, State, System
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
    systems = [system] if epsilons is None else [_with_epsilon(system, one) for one in epsilons]
    target, shared = as_device(device), Streams(seed)
    own = [Streams(shared.generator("repetition", round=i).integers(2**62).item()) for i in range(repetitions)]
    learners = [as_model(model, loss, federation, streams) for streams in own]
    learner = learners[0]
    learner.module.to(target)
    public = (federation.validation if len(federation.validation) else federation.test).to(target)
    with layer_randomness(shared.generator("probe"), target):
        learner.check(public.x, public.y)
        known = capabilities_of(learner, public)
    clients = StackedClients(learner, tuple(one.to(target) for one in federation.clients), shared, capabilities=known)

    started = time.perf_counter()
    starts = torch.stack([one.weights().to(target) for one in learners])
    trainings = []
    for place, budgeted in enumerate(systems):
        apart = [Streams(mine.generator("budget", round=place).integers(2**62).item()) for mine in own]
        streams = own if len(systems) == 1 else apart
        trainings.append(_Training(budgeted, federation, shared, starts, streams, seeded=seed is not None))
    validation, test = federation.validation.to(target), federation.test.to(target)
    while going := [one for one in trainings if one.state.round < one.state.rounds]:
        paid = [one.charge() for one in going]
        weights = [one.weights(mine) for one, mine in zip(going, paid, strict=True)]
        moved = clients.repeat(
            [mine for mine in paid for _ in own],
            [mine for mine in weights for _ in own],
            torch.cat([one.models for one in going]),
            [mine for one in going for mine in one.streams],
            going[0].state.round + 1,
        ).view(len(going), repetitions, -1)
        for one, mine, sums in zip(going, weights, moved, strict=True):
            one.move(sums, mine)
            at = one.state.round
            if at == one.state.rounds or (evaluate_every is not None and at % evaluate_every == 0):
                one.look(learner, test)
    seconds = time.perf_counter() - started
    return [one.finish(learner, validation, seconds) for one in trainings]


class _Training:
    """All repetitions with one budget: one ledger, one state of the system, and a model each."""

    def __init__(
        self,
        system: System[Any],
        federation: Federation,
        shared: Streams,
        starts: torch.Tensor,
        streams: Sequence[Streams],
        *,
        seeded: bool,
    ) -> None:
        self.system, self.models, self.streams = system, starts, streams
        self.history: list[Look] = []
        schedule = Schedule(system.cohorts(len(federation.clients)), shared)
        problem = Problem(federation.sizes, starts.shape[1], schedule)
        self.state: State = system.begin(problem, starts[0], Feedback())
        promise = system.promise(federation.sizes)
        self.ledger = Ledger(promise, federation.sizes, system=system.name, seeded=seeded)

    def charge(self) -> dict[int, Any]:
        """Let each client pay for its next order."""
        return self.ledger.charge(self.system.orders(self.state))

    def weights(self, paid: dict[int, Any]) -> dict[int, float]:
        """Return how much each update counts."""
        return self.system.weights(self.state, sorted(paid))

    def move(self, sums: torch.Tensor, weights: dict[int, float]) -> None:
        """Move all models, and let the system go on to the next round."""
        round = self.state.round + 1
        self.models = self.models + sums
        downlink = self.system.downlink(self.state, sorted(weights))
        if downlink is not None:
            noised = [add_noise(one, downlink, mine.generator("downlink", round=round))
                      for one, mine in zip(self.models, self.streams, strict=True)]  # fmt: skip
            self.models = torch.stack(noised)
        self.ledger.broadcast(weights, noise_std=downlink.std if downlink else 0.0)
        after = replace(self.state, model=self.models[0], round=round)
        self.state = self.system.adapt(after, Feedback(uploads=dict.fromkeys(weights, sums[0])))

    def look(self, learner: Model, test: Records) -> None:
        """Score all models on the test split."""
        scores = self._scores(learner, test)
        rates = [score.accuracy for score in scores if score.accuracy is not None]
        self.history.append(Look(self.state.round, [score.loss for score in scores], rates or None))

    def finish(self, learner: Model, validation: Records, seconds: float) -> Repetitions:
        """Close the books and say what came of it."""
        last = self.history[-1]
        public = [score.loss for score in self._scores(learner, validation)]
        certificate = certify(self.ledger.books, self.ledger.run)
        self.ledger.books.close()
        budget = getattr(self.system, "epsilon", None)
        return Repetitions(budget, last.losses, last.accuracies, public or None, self.history, certificate, seconds)

    def _scores(self, learner: Model, records: Records) -> list[Score]:
        return [score for one in self.models if (score := evaluate(learner, one, records)) is not None]


def repeatable(system: System[Any]) -> bool:
    """Tell whether all repetitions can be trained as one: the same is ordered, and models move alike."""
    return not (system.watches_training or system.until_spent or system.remembers_models)


def _with_epsilon(system: System[Any], epsilon: float) -> System[Any]:
    options: dict[str, Any] = {"epsilon": epsilon}  # which only systems with a promise have
    return replace(system, **options)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error
