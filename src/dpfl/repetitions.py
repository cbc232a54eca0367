"""Repetitions as a dimension: many trainings of one system, and of several budgets, as one program.

The data, who takes part when, and so what is charged are the same in all repetitions of a budget; where the model
starts, the batches and the noise are drawn anew in each. So one ledger stands for all of them, and the clients of all
trainings are one cohort, which draws from one stream whatever the budgets are: for small models twenty trainings take
little longer than one. All of it is a simulation: on people's records each repetition would cost its budget again.
"""

import math
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dpfl import run_folder
from dpfl.averages import standard_error
from dpfl.clients.backends import make_clients
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.repeated import RepeatedClients, perform_together
from dpfl.clients.stacked import StackedClients
from dpfl.config import Config
from dpfl.errors import BadInput, require_count
from dpfl.federation import Federation, Records
from dpfl.federation.facts import require_usable
from dpfl.gradients.capabilities import Capabilities
from dpfl.models import Loss
from dpfl.precision import products
from dpfl.privacy.books import FAST
from dpfl.privacy.certificate import Certificate, certify
from dpfl.privacy.ledger import Ledger
from dpfl.report import frames
from dpfl.round import Outcome, ask, combine
from dpfl.server.evaluation import PublicSplit, Score, evaluate
from dpfl.session import OnUploads, Session, problem_of
from dpfl.settings import TrainSettings, read, takes
from dpfl.streams import Streams
from dpfl.systems import State, System
from dpfl.training import OnOpen, OnRound, as_device, as_model, metrics_of, settings_of

if TYPE_CHECKING:
    from pandas import DataFrame


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

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; what is not finite is null."""
        plain = {
            "epsilon": self.epsilon, "losses": self.losses, "accuracies": self.accuracies,
            "validation_losses": self.validation_losses, "history": [asdict(look) for look in self.history],
            "seconds": self.seconds, "certificate": self.certificate.to_dict(),
        }  # fmt: skip
        return cast(dict[str, Any], _finite(plain))

    @property
    def loss(self) -> tuple[float, float]:
        """Return the mean of the losses and its standard error."""
        return _mean(self.losses)

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """Return the mean of the accuracies and its standard error."""
        return None if self.accuracies is None else _mean(self.accuracies)

    def to_frame(self) -> "DataFrame":
        """Return a pandas frame with a row for each look at each repetition."""
        return frames.frame(_rows(self.history))

    def to_csv(self, path: str | Path) -> None:
        """Write a row for each look at each repetition as CSV."""
        frames.write(_rows(self.history), path)


@takes(TrainSettings)
def repeat(
    system: System[Any],
    federation: Federation,
    model: str | nn.Module | None = None,
    *,
    repetitions: int = 20,
    epsilons: Sequence[float] | None = None,
    loss: Loss | None = None,
    evaluate_every: int | None = None,
    evaluate_after: Collection[int] = (),
    out: str | Path | None = None,
    force: bool = False,
    on_open: OnOpen | None = None,
    on_round: OnRound | None = None,
    on_uploads: OnUploads | None = None,
    **settings: Any,
) -> list[Repetitions]:
    """Train many times over the same clients, and return what came of it for each budget.

    It takes what `train` takes, but for clients of one's own and for a ledger that others share.

    epsilons: budgets to train with; the system's own if left out.
    evaluate_every: rounds between looks at the test split; None for one look, after the last.
    out: folder for what came of it; an existing one is refused unless `force`.
    on_open, on_round: called for each budget; metrics are means over its repetitions.

    Raises BadInput for a system that watches its training: its repetitions would go different ways.
    """
    require_count("repetitions", repetitions, "train at least once")
    chosen = read(TrainSettings, settings, by="repeat")
    _require_repeatable(system, epsilons, chosen)
    systems = [system] if epsilons is None else [_with_epsilon(system, epsilon) for epsilon in epsilons]
    target, shared = as_device(chosen.device), Streams(chosen.seed, sampler="fast")
    own = [shared.part("repetition", number) for number in range(repetitions)]
    learners = [as_model(model, loss, federation, streams) for streams in own]
    learner = learners[0]
    folder = None if out is None else Path(out)
    if folder is not None:
        run_folder.claim(folder, force=force)
    learner.module.to(target)
    validation, test = federation.validation.to(target), federation.test.to(target)
    records = tuple(records.to(target) for records in federation.clients)
    public = federation.example.to(target)
    clients = make_clients(chosen.backend, learner, records, shared, public=public, drawn_by=chosen.draws)
    if isinstance(clients, ReferenceClients):  # in turn, as any model of unknown layers is
        capable = Capabilities(None, False, clients.vectorised, "the reference client was asked for")
        clients = StackedClients(learner, records, shared, capabilities=capable)

    if system.promise(federation.sizes) is None:
        require_usable(federation)
    config = Config(system, settings_of(federation, **asdict(chosen) | {"model": learner.name}))
    started = time.perf_counter()
    starts = torch.stack([one.vector().to(target) for one in learners])
    trainings = []
    for place, budgeted in enumerate(systems):
        streams = own if len(systems) == 1 else [stream.part("budget", place) for stream in own]
        ledger = Ledger(
            budgeted.promise(federation.sizes), federation.sizes, system=budgeted.name, seeded=shared.seeded,
            noise_source=None if shared.seeded else FAST,
        )  # fmt: skip
        session = Session(
            budgeted, problem_of(budgeted, federation.sizes, learner.dim, shared), learner,
            RepeatedClients(clients, streams), ledger, shared.part("server", place), PublicSplit(learner, validation),
            on_uploads, replace(config, system=budgeted).simulated,
        )  # fmt: skip
        trainings.append(_Training(session, session.begin(starts)))
    if on_open is not None:
        for one in trainings:
            on_open(one.session)
    with products(chosen.precision):
        while going := [one for one in trainings if one.state.round < one.state.rounds]:
            outcomes = _play_together(going)
            for one, outcome in zip(going, outcomes, strict=True):
                at = one.state.round
                every = evaluate_every is not None and at % evaluate_every == 0
                if at == one.state.rounds or every or at in evaluate_after:
                    one.look(test)
                if on_round is not None:
                    on_round(metrics_of(at, outcome, None, one.seen_at(at)))
    seconds = time.perf_counter() - started
    results = [one.finish(validation, seconds) for one in trainings]
    if folder is not None:
        run_folder.create(folder, config.to_toml())
        run_folder.write_json(folder, "repetitions.json", {"budgets": [result.to_dict() for result in results]})
    return results


def _require_repeatable(system: System[Any], epsilons: Sequence[float] | None, chosen: TrainSettings) -> None:
    if not repeatable(system):
        raise BadInput(
            f"system must order the same in every repetition, but {system.name} follows its training; train it several"
            " times instead, with a seed each"
        )
    if epsilons is not None and not hasattr(system, "epsilon"):
        raise BadInput(f"epsilons must be left out for {system.name}, which promises nothing; leave them out")
    if chosen.ledger is not None:
        raise BadInput(
            f"ledger must be left out for repetitions, was {chosen.ledger!r}: each of them would spend the budgets of"
            " the same people again, and they are simulations; train once with it"
        )


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

    def seen_at(self, round: int) -> Score | None:
        """Return the mean score of all repetitions after a round, if somebody looked."""
        last = self.history[-1] if self.history else None
        if last is None or last.round != round:
            return None
        rates = last.accuracies
        return Score(statistics.fmean(last.losses), None if rates is None else statistics.fmean(rates))

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


def _play_together(trainings: Sequence[_Training]) -> list[Outcome]:
    """Play a round of each, all their clients as one cohort."""
    requests = [ask(one.session, one.state) for one in trainings]
    clients = [cast(RepeatedClients, one.session.clients) for one in trainings]
    sums = perform_together(clients, requests)
    outcomes = []
    for one, request, uploads in zip(trainings, requests, sums, strict=True):
        one.state, outcome = combine(one.session, one.state, request, uploads)
        outcomes.append(outcome)
    return outcomes


def repeatable(system: System[Any]) -> bool:
    """Tell whether all repetitions can be trained as one: the same is ordered however each of them goes."""
    return not (system.needs or system.until_spent)


def _with_epsilon(system: System[Any], epsilon: float) -> System[Any]:
    options: dict[str, Any] = {"epsilon": epsilon}  # which only systems with a promise have
    return replace(system, **options)


def _rows(history: Sequence[Look]) -> list[dict[str, Any]]:
    return [
        {
            "round": look.round,
            "repetition": number,
            "loss": _finite(loss),
            "accuracy": None if look.accuracies is None else look.accuracies[number - 1],
        }
        for look in history
        for number, loss in enumerate(look.losses, start=1)
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), standard_error(values) or 0.0
