"""The pilot: a plan found by trying, on public records in the clients' place and with the noise of the real problem.

Bounds hold for the worst case and are often far from what happens. A pilot trains for real, so it is right wherever the
public records are like the clients'. The noise is exactly what the clients' own orders would add to the model; only the
gradients come from public records. Candidates are thinned out by successive halving: the losers of one run are not
tried again, and what is left is tried with more seeds; then the neighbours of the winner are tried too.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from dpfl.averages import standard_error
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Engine, Request, Separate, Uploads
from dpfl.errors import BadInput, require_positive, suggestion
from dpfl.federation import Records
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Model
from dpfl.orders import Full, Gaussian, Laplace, Need, Order, Question, RecordClip
from dpfl.planning.bounds import Facts, begun, orders_of
from dpfl.planning.public_proxy import StandIn, stand_in
from dpfl.planning.search import ladder
from dpfl.planning.task import Task
from dpfl.privacy.ledger import Ledger
from dpfl.round import walk
from dpfl.server.evaluation import PublicSplit, evaluate
from dpfl.session import Session, problem_of
from dpfl.streams import Streams, layer_randomness
from dpfl.systems import PrivateSystem

OnTrial = Callable[[str], None]  # told before each trial what it is

Options = dict[str, Any]  # what a candidate sets: the planned numbers, and keys that were asked to be searched

_COARSE = 4.0  # the factor between neighbouring candidates of the first look
_KEPT = 4  # candidates that are tried again whatever the first look says
_SEEDS = (1, 3)  # trials of a candidate in the first look, and among the better ones
_FINALS = ((4, 8), (3, 16), (2, 32))  # candidates and trials at the end, until the best two are told apart


@dataclass
class Trials:
    """What a candidate reached on the held-out public records, once a seed."""

    options: Options
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of one trial

    @property
    def mean(self) -> float:
        """Return the mean loss: infinite where a trial diverged or none was made."""
        return statistics.fmean(self.losses) if self.losses else math.inf

    @property
    def error(self) -> float | None:
        """Return the standard error of the mean."""
        return standard_error(self.losses)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        mean = self.mean if math.isfinite(self.mean) else None
        return {**self.options, "loss": mean, "standard_error": self.error, "trials": len(self.losses)}


@dataclass(frozen=True)
class PilotResult:
    """What a pilot found: the candidates from best to worst, and how many the time did not suffice for."""

    ranked: tuple[Trials, ...]
    untried: int
    source: str  # of the records it was tried on
    seconds: float
    untrained: float  # the loss of the first model, before any training

    @property
    def best(self) -> Trials:
        """Return the winner."""
        return self.ranked[0]


def pilot(
    task: Task,
    chooses: Sequence[str],
    *,
    search: Mapping[str, Sequence[Any]] | None = None,
    start: Mapping[str, int] | None = None,
    time_limit: float = 120.0,
    on_trial: OnTrial | None = None,
) -> PilotResult:
    """Try numbers (and values of the keys in `search`) on public records, and return what they reached.

    start: numbers to try besides, such as the answer of a bound.
    time_limit: in seconds; candidates are tried from the cheapest on, and those that would end too late are left out.
    """
    require_positive("time_limit", time_limit, "give it a minute")
    if task.system.until_spent:
        raise BadInput(
            f"system must be one whose rounds can be planned, was {task.system.name!r}, which trains until its budget"
            " is spent; plan another, or compare values of its options with `dpfl compare`"
        )
    began = time.perf_counter()
    stage = Stage(task, time_limit=time_limit, on_trial=on_trial)
    ranges = task.ranges(chooses)
    _require_options(task, search or {}, ranges)
    grid: list[Options] = [{}]
    for name, (low, high) in ranges.items():
        grid = [{**one, name: number} for one in grid for number in ladder(low, high, factor=_COARSE)]
    grid = task.with_whole_turns(grid)
    if start is not None:
        grid.append({name: start[name] for name in ranges})
    for key, values in (search or {}).items():
        grid = [{**one, key: value} for one in grid for value in values]
    stage.look(grid, _SEEDS[0], share=0.5)
    if not stage.trials:
        raise BadInput(
            f"time_limit must be long enough for one trial at least, was {time_limit:g} s; raise it, or lower"
            " max_rounds"
        )
    stage.look([one.options for one in stage.ranked()[: max(_KEPT, len(grid) // 3)]], _SEEDS[1], share=0.7)
    reach = _COARSE / 2
    while reach > 1.2:  # the valley's floor: halfway to the neighbours, and halfway again
        best = stage.ranked()[0].options
        sides = {name: [best[name], *_beside(best[name], *limits, reach)] for name, limits in ranges.items()}
        near = [dict(zip(sides, numbers, strict=True)) for numbers in itertools.product(*sides.values())]
        stage.look(task.with_whole_turns([{**best, **numbers} for numbers in near]), _SEEDS[1], share=0.8)
        reach = math.sqrt(reach)
    for kept, seeds in _FINALS:
        leading = stage.ranked()[:kept]
        stage.look([one.options for one in leading], seeds)
        if _told_apart(stage.ranked()):
            break
    return PilotResult(tuple(stage.ranked()), len(stage.untried), stage.public.source, time.perf_counter() - began,
                   stage.untrained())  # fmt: skip


def _require_options(task: Task, search: Mapping[str, Sequence[Any]], ranges: Mapping[str, Any]) -> None:
    """Refuse keys that the system does not have or that are planned anyway, and values that it does not take."""
    own = {one.name for one in fields(task.system)}
    for key, values in search.items():
        if key not in own:
            raise BadInput(
                f"search must name options of {task.system.name}, was {key!r}; it takes {', '.join(sorted(own))}"
                f"{suggestion(key, own)}"
            )
        if key in ranges:
            raise BadInput(f"search must name other keys than {key!r}, which the pilot plans itself; leave it out")
        for value in values:
            task.at({key: value})


def _told_apart(ranked: Sequence[Trials]) -> bool:
    """Tell whether the best is better than the next by two standard errors of the difference."""
    first, second = (*ranked[:2], None, None)[:2]
    if first is None or second is None or first.error is None or second.error is None:
        return second is None
    return second.mean - first.mean > 2 * math.hypot(first.error, second.error)


def _beside(number: int, low: int, high: int, factor: float) -> list[int]:
    sides = {max(low, round(number / factor)), min(high, max(number + 1, round(number * factor)))}
    return sorted(sides - {number})


class Stage:
    """Where candidates are tried: public records, a model, and the time that is left."""

    def __init__(self, task: Task, *, time_limit: float, on_trial: OnTrial | None) -> None:
        self.task, self.on_trial = task, on_trial
        self.began, self.time_limit = time.perf_counter(), time_limit
        self.public = stand_in(
            task.federation, hold_out=0.5, rng=Streams(task.config.settings.seed).public.generator("stand-in")
        )
        self.trials: dict[tuple[tuple[str, Any], ...], Trials] = {}
        self.untried: set[tuple[tuple[str, Any], ...]] = set()
        self.pace = 0.0  # seconds for one client's step, as measured
        model = task.model()
        few = self.public.held_out.take(torch.arange(min(8, len(self.public.held_out))))
        with layer_randomness(Streams(0).public.generator("probe"), torch.device("cpu")):
            self.capabilities = capabilities_of(model, few)

    def ranked(self) -> list[Trials]:
        """Return what was tried, the best first; what was tried too seldom to be told from luck comes last."""
        enough = min(_SEEDS[1], max((len(one.losses) for one in self.trials.values()), default=0))
        return sorted(self.trials.values(), key=lambda one: (len(one.losses) < enough, one.mean))

    def look(self, grid: Sequence[Options], seeds: int, *, share: float = 1.0) -> None:
        """Try every candidate with this many seeds in all, the cheapest first, until a share of the time is over."""
        deadline = self.began + share * self.time_limit
        for options in sorted(grid, key=self.cost):
            key = tuple(sorted(options.items()))
            try:
                system = self.task.at(options)
            except BadInput:
                continue  # such numbers are no options of this system
            known = self.trials.get(key, Trials(options))
            for seed in range(len(known.losses) + 1, seeds + 1):
                expected = known.seconds or self.pace * self.cost(options)
                if time.perf_counter() + expected > deadline:
                    if not known.losses:
                        self.untried.add(key)
                    break
                if self.on_trial is not None:
                    self.on_trial(", ".join(f"{name} = {value}" for name, value in options.items()) + f", seed {seed}")
                started = time.perf_counter()
                known.losses.append(trial(self, system, seed))
                known.seconds = time.perf_counter() - started
                self.pace = max(known.seconds / self.cost(options), self.pace / 2)
                self.trials[key] = known
                self.untried.discard(key)

    def untrained(self) -> float:
        """Return the loss of the model that training begins with."""
        model = self.task.model()
        score = evaluate(model, model.vector(), self.public.held_out)
        assert score is not None
        return score.loss

    def cost(self, options: Options) -> float:
        """Return how many steps of clients a trial takes."""
        point = {"rounds": self.task.system.rounds, "local_steps": getattr(self.task.system, "local_steps", 1) or 1}
        point |= {"cohort": self.task.system.cohort or self.task.clients} | options
        if self.task.total_steps is not None:
            return float(self.task.total_steps * point["cohort"])
        return float(point["rounds"] * point["local_steps"] * point["cohort"])


def trial(stage: Stage, system: PrivateSystem[Any], seed: int) -> float:
    """Train on the public records with the real problem's noise; return the loss on those held out."""
    model, reached = trained(stage, system, seed)
    score = evaluate(model, reached, stage.public.held_out)
    assert score is not None
    return score.loss if math.isfinite(score.loss) else math.inf


def trained(stage: Stage, system: PrivateSystem[Any], seed: int) -> tuple[Model, Tensor]:
    """Return the model as it began, and the parameters [d] that it reached."""
    streams = Streams(seed, sampler="fast")  # a pilot trains on public records
    model = replace_seed(stage.task, seed).model()
    facts = stage.task.facts(model)
    sampled = any(not isinstance(order.batch, Full) for order in orders_of(system, begun(system, facts), 1).values())
    records = _records(stage.public, facts, streams, sampled=sampled)
    trained = StackedClients(model, records, streams, capabilities=stage.capabilities)
    session = Session(
        system, problem_of(system, facts.sizes, model.dim, streams), model, PublicClients(trained, facts.sizes),
        Ledger(None, facts.sizes, system="pilot"),  # public records: nothing is promised of them
        streams, PublicSplit(model, stage.public.held_out), simulated="pilot",  # the same luck for all candidates
    )  # fmt: skip
    state = session.begin()
    for reached, _ in walk(session, state):
        state = reached
    return model, state.model


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

    def perform(self, request: Request) -> Uploads:
        """Perform the same orders for clients of other sizes."""
        orders = {client: self._scaled(client, paid.order) for client, paid in request.charged.items()}
        uploads = self.clients.perform(replace(request, charged=self._ledger.charge(orders)))
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
