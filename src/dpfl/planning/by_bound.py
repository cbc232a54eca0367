"""A plan: the numbers that a budget is best spent on, by the bound of the system's paper, and why."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from dpfl.errors import BadInput
from dpfl.models import Model
from dpfl.orders import Laplace
from dpfl.planning import ali_dpfl
from dpfl.planning.bounds import Facts, Form, Planner, Void, begun, first_orders, orders_of
from dpfl.planning.constants import Constants
from dpfl.planning.estimate_constants import estimate
from dpfl.planning.made_up import stand_ins
from dpfl.planning.search import Numbers, around, least
from dpfl.planning.task import NAMES, NUMBERS, PLANNERS, Point, Task
from dpfl.privacy.certificate import Certificate, finite
from dpfl.rehearsal import rehearse
from dpfl.streams import Streams
from dpfl.systems import ALIDPFL, PrivateSystem
from dpfl.systems.queried import QueriedSystem


@dataclass(frozen=True)
class PlannedNoise:
    """The noise that clients will add, as its standard deviation on each coordinate of an upload."""

    law: Literal["gaussian", "laplace"]
    on: Literal["upload", "step"]
    stds: dict[int, float]  # of the clients that will be asked
    downlink: float  # that the server adds to the model


@dataclass(frozen=True)
class Plan:
    """The chosen numbers and everything that speaks for them."""

    system: PrivateSystem[Any]  # with the chosen numbers
    options: dict[str, Any]  # of the system, that were chosen
    method: Literal["bound", "pilot"]
    form: Form
    best: Point
    of: Literal["loss", "distance"]
    in_loss: float | None  # the bound in units of loss
    curve: tuple[Point, ...]
    papers: Point | None  # what the bound as its paper prints it would choose
    constants: Constants | None
    noise: PlannedNoise
    certificate: Certificate
    why: tuple[str, ...]
    seconds: float
    tried: tuple[dict[str, Any], ...] = ()  # by a pilot: the numbers, mean loss, standard error, runs
    bounds_answer: Point | None = None  # what the bound would have chosen, beside a pilot's answer
    # Of a pilot: mean, low and high of "loss" and "accuracy" over its trials, and whether their tasks were "made_up".
    expected: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what `dpfl plan --json` prints."""
        stds = list(self.noise.stds.values())
        return {
            "system": self.system.name,
            "method": self.method,
            "form": self.form,
            "rounds": self.best.rounds,
            "local_steps": self.best.local_steps,
            "cohort": self.best.cohort,
            "bound": self.best.bound,
            "bound_of": self.of,
            "bound_in_loss": self.in_loss,
            "options": self.options,
            "curve": [vars(point) for point in self.curve],
            "papers": None if self.papers is None else vars(self.papers),
            "bounds_answer": None if self.bounds_answer is None else vars(self.bounds_answer),
            "tried": list(self.tried),
            "expected": self.expected,
            "constants": None if self.constants is None else self.constants.to_dict(),
            "noise": {
                "law": self.noise.law,
                "on": self.noise.on,
                "least_std": min(stds),
                "most_std": max(stds),
                "downlink_std": self.noise.downlink,
                "clients": {str(client): std for client, std in self.noise.stds.items()},
            },
            "certificate": self.certificate.to_dict(),
            "why": list(self.why),
            "together": 0.0,  # what planning cost the clients' people: nothing of them was looked at
            "seconds": round(self.seconds, 3),
        }

    def _repr_html_(self) -> str:
        from dpfl.planning.output import html  # which prints plans, and so knows them

        return html(self)


def known_constants(
    task: Task, model: Model, given: Constants, needs: Sequence[str], within: float = math.inf
) -> Constants:
    """Return the given constants, those that are missing estimated on the public split, or on made-up records."""
    if not set(needs) & set(given.missing):
        return given
    streams = Streams(task.config.settings.seed)
    public = stand_ins(task.federation, hold_out=0.0, streams=streams)[-1]
    order = next(iter(orders_of(task.system, begun(task.system, task.facts(model)), 1).values()))
    found = estimate(
        model, public.clients, clip=order.clip, streams=streams, source=public.source, estimator=task.estimator,
        within=within,
    )  # fmt: skip
    known = {name: entry for name, entry in given.to_dict().items() if name != "source"}
    return found.overridden(known)


def plan_by_bound(
    task: Task, *, form: Form = "general", constants: Constants | None = None, within: float = math.inf
) -> Plan:
    """Choose the numbers at which the bound of the system's paper is least.

    constants: those that are known already; what is missing is estimated on the public split, or on made-up records.
    within: so many seconds for the estimates, or BadInput is raised.
    Raises Void (a BadInput) where the bound says nothing for any of the numbers.
    """
    started = time.perf_counter()
    if task.system.name not in PLANNERS:
        raise BadInput(
            f"system must be one whose paper gives a bound ({', '.join(PLANNERS)}), was {task.system.name!r}; use"
            " --method pilot"
        )
    if not task.system.optimiser.plain:
        raise Void(
            f"server_optimiser must be plain averaging for the bound of {task.system.name}, which knows no other"
            f" server, was {task.system.server_optimiser!r} with server_lr, server_momentum or averaged; leave them"
            " out, or use --method pilot"
        )
    if task.system.lr_schedule != "constant" and not isinstance(task.system, QueriedSystem):
        raise Void(
            f"lr_schedule must be 'constant' for the bound of {task.system.name}, which is for one learning rate, was"
            f" {task.system.lr_schedule!r}; leave it out, or use --method pilot"
        )
    planner = PLANNERS[task.system.name]
    model = task.model()
    facts = task.facts(model)
    known = known_constants(task, model, constants or Constants(), planner.needs, within)
    best, values = search(task, planner, facts, known, form)
    system, bound = task.at(best), values(**best)
    chosen = task.point(system, bound)
    papers = None
    try:
        other, others = search(task, planner, facts, known, "paper")
        papers = task.point(task.at(other), others(**other))
    except BadInput:
        pass  # the printed bound says nothing here; the general one does
    in_loss = bound * known.need("smoothness")[0] / 2 if planner.of == "distance" else bound
    return Plan(
        system=system,
        options=task.chosen(best),
        method="bound",
        form=form,
        best=chosen,
        of=planner.of,
        in_loss=in_loss,
        curve=_curve(task, planner, best, values),
        papers=papers,
        constants=known,
        noise=noise_of(system, facts),
        certificate=rehearse(system, task.federation.sizes, facts.streams),
        why=_why(task, planner, facts, known, form, best, values),
        seconds=time.perf_counter() - started,
    )


def search(task: Task, planner: Planner, facts: Facts, constants: Constants, form: Form) -> tuple[Numbers, Any]:
    """Return the numbers at which the bound is least, and the bound as a function of the numbers."""
    refusals: list[BadInput] = []

    @cache
    def value(**numbers: int) -> float:
        try:
            return planner.bound(task.at(numbers), facts, constants, form)
        except Void as refusal:
            refusals.append(refusal)
            return math.inf

    ranges = task.ranges(planner.chooses)
    if isinstance(task.system, ALIDPFL) and "local_steps" in ranges:  # more than R_c/R_s a round would not be paid for
        most = ali_dpfl.affordable(task.system, facts)
        ranges["local_steps"] = (1, max(1, math.ceil(most / task.system.rounds)))
    best = least(lambda numbers: value(**numbers), ranges, beside=task.with_whole_turns)
    if not math.isfinite(value(**best)):
        planner.bound(task.at({}), facts, constants, form)  # says what is wrong with the numbers as they were given
        raise refusals[0]
    return best, value


def noise_of(system: PrivateSystem[Any], facts: Facts) -> PlannedNoise:
    """Return the noise that each client will add when it is first asked."""
    state = begun(system, facts)
    orders = first_orders(system, state)
    one = next(iter(orders.values()))
    stds = {i: math.sqrt(orders[i].noise_variance(facts.sizes[i])) for i in sorted(orders)}
    downlink = system.downlink(state, sorted(orders_of(system, state, 1)))
    law: Literal["gaussian", "laplace"] = "laplace" if isinstance(one.noise, Laplace) else "gaussian"
    return PlannedNoise(law, one.noise_on, stds, downlink.std if downlink else 0.0)


def _curve(task: Task, planner: Planner, best: Numbers, values: Any) -> tuple[Point, ...]:
    """Return the bound along each number that it knows, the others being as planned."""
    limits = replace(task, fixed=frozenset()).ranges(NUMBERS)
    here = vars(task.point(task.at(best), None))
    points: dict[tuple[int, int, int], Point] = {}
    for name in planner.knows:
        first, last = limits.get(name, (1, task.most_rounds))
        for number in around(here[name], first, max(last, here[name])):
            try:
                system = task.at({**best, name: number})
            except BadInput:
                continue  # such a number is no option of this system
            bound = finite(values(**{**best, name: number}))
            point = task.point(system, bound)
            points[point.rounds, point.local_steps, point.cohort] = point
    return tuple(sorted(points.values(), key=lambda point: (point.rounds, point.local_steps, point.cohort)))


def _why(
    task: Task, planner: Planner, facts: Facts, constants: Constants, form: Form, best: Numbers, values: Any
) -> tuple[str, ...]:
    """Say in sentences why these numbers and no others."""
    system, bound = task.at(best), values(**best)
    here = vars(task.point(system, None))
    unit = "the loss above its least value" if planner.of == "loss" else "the squared distance from the optimum"
    sentences = [f"The bound is on {unit}, and is {bound:.4g} at these numbers."]
    ranges = task.ranges(planner.chooses)
    for name, number in best.items():
        last = ranges[name][1]
        fewer, more = max(ranges[name][0], number // 2), min(2 * number, last)
        less, much = values(**{**best, name: fewer}), values(**{**best, name: more})
        sentences.append(_sentence(name, number, last, fewer, less, more, much))
    if system.cohort is not None and "cohort" not in best:
        sentences.append(f"{here['cohort']} of {task.clients} clients a round were given.")
    private = _without_noise(task, planner, facts, constants, form, best)
    if private is not None and bound > 0:
        part = max(0.0, 1 - private / bound)
        sentences.append(
            f"{part:.0%} of the bound is noise: without any it would be {private:.4g} at the same numbers."
        )
    if isinstance(system, ALIDPFL):
        sentences += _ali_sentences(system, facts, constants)
    start = constants.initial_distance if planner.of == "distance" else constants.initial_gap
    if start is not None and bound > start / 2:
        gain = "nothing" if bound >= start else f"{1 - bound / start:.0%}"
        sentences.append(
            f"The bound promises {gain} of the {start:.4g} that training begins with: it holds for the worst case, and"
            " training is mostly better; --method pilot tries it out."
        )
    return tuple(sentences)


def _sentence(name: str, number: int, last: int, fewer: int, less: float, more: int, much: float) -> str:
    what = NAMES[name]
    if fewer == number == last:
        return f"There is no choice of {what}: {number}."
    if number == last:
        limit = "clients" if name == "cohort" else f"{what} that are allowed"
        return f"All {number} {limit} are worth having: the bound {_says(less)} with {fewer}."
    half = f", and {_says(less)} with {fewer}" if fewer < number else ""
    reasons = {
        "rounds": f"Beyond round {number} the noise that each extra round adds outweighs what it learns",
        "local_steps": f"More local steps a round than {number} let clients drift apart by more than they learn",
        "cohort": f"With more clients a round than {number} each is asked, and noised, more often than averaging mends",
    }
    return f"{reasons[name]}: the bound {_says(much)} with {more}{half}."


def _says(bound: float) -> str:
    return f"is {bound:.4g}" if math.isfinite(bound) else "says nothing"


def _without_noise(
    task: Task, planner: Planner, facts: Facts, constants: Constants, form: Form, best: Numbers
) -> float | None:
    """Return what the bound would be with a budget so large that its noise is nothing; None where noise is given."""
    if isinstance(task.system, ALIDPFL):
        return None
    generous = replace(task, config=replace(task.config, system=replace(task.system, epsilon=1e6)))
    try:
        return planner.bound(generous.at(best), facts, constants, form)
    except BadInput:
        return None


def _ali_sentences(system: ALIDPFL, facts: Facts, constants: Constants) -> list[str]:
    most = ali_dpfl.affordable(system, facts)
    if system.rounds >= most:
        return [
            f"The {system.rounds} rounds allowed are enough for all {most} steps that the budget pays for, one each."
        ]
    (mu,) = constants.need("strong_convexity")
    tau = ali_dpfl.optimal_local_steps(
        curvature=mu, clip=system.clip, heterogeneity=system.heterogeneity,
        total_steps=min(system.rounds * system.local_steps, most), noise_multiplier=system.noise_multiplier,
        dim=facts.dim, batch=system.sampling_rate * min(facts.sizes),
    )  # fmt: skip
    return [
        f"The budget pays for {most} local steps in all, and {system.rounds} rounds are allowed; the paper's equation"
        f" (9) gives τ* = {tau:.3g}. During training τ is chosen again after every round."
    ]
