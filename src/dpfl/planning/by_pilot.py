"""A plan by a pilot: what did best on records that are nobody's, with the bound's answer beside it, and why."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dpfl.errors import BadInput
from dpfl.planning.bounds import Form
from dpfl.planning.by_bound import Plan, noise_of, plan_by_bound
from dpfl.planning.constants import Constants
from dpfl.planning.pilot import OnTrial, PilotResult, Trials, pilot
from dpfl.planning.task import NAMES, PLANNERS, Task
from dpfl.rehearsal import rehearse

# Seconds, and part of the time limit, on top of it: large models' constants take minutes.
_FOR_THE_BOUND, _PART_FOR_THE_BOUND = 10.0, 0.25


def plan_by_pilot(
    task: Task,
    *,
    chooses: Sequence[str],
    form: Form = "general",
    constants: Constants | None = None,
    search: Mapping[str, Sequence[Any]] | None = None,
    time_limit: float = 120.0,
    on_trial: OnTrial | None = None,
) -> Plan:
    """Choose the numbers by a pilot, with the answer of the bound, if it has one, beside it."""
    started = time.perf_counter()
    bound, void = None, f"There is no bound for {task.system.name}: its paper gives none."
    if task.system.name in PLANNERS:
        try:
            bound = plan_by_bound(
                task, form=form, constants=constants, within=max(_FOR_THE_BOUND, _PART_FOR_THE_BOUND * time_limit)
            )
        except BadInput as refusal:
            void = f"The bound says nothing here: {refusal}."
    answer = None if bound is None else _numbers(task, bound, chooses)
    found = pilot(task, chooses, search=search, start=answer, time_limit=time_limit, on_trial=on_trial)
    system = task.at(found.best.options)
    facts = task.facts(task.model())
    return Plan(
        system=system,
        options=task.chosen(found.best.options),
        method="pilot",
        form=form,
        best=task.point(system, None),
        of="loss" if bound is None else bound.of,
        in_loss=None,
        curve=() if bound is None else bound.curve,
        papers=None if bound is None else bound.papers,
        constants=None if bound is None else bound.constants,
        noise=noise_of(system, facts),
        certificate=rehearse(system, task.federation.sizes, facts.streams),
        why=(*_reasons(task.system.name, found), void if bound is None else _beside_the_bound(bound, answer, found)),
        seconds=time.perf_counter() - started,
        tried=tuple(one.to_dict() for one in found.ranked),
        expected=found.best.expected() | {"made_up": found.is_made_up},
        bounds_answer=None if bound is None else bound.best,
    )


def _numbers(task: Task, bound: Plan, chooses: Sequence[str]) -> dict[str, int]:
    return {name: int(getattr(bound.system, name) or task.clients) for name in task.ranges(chooses)}


def _reasons(system: str, found: PilotResult) -> list[str]:
    best, trials = found.best, sum(len(one.seen) for one in found.ranked)
    sentences = [
        f"Tried on {found.source} with the noise of the real problem: {len(found.ranked)} candidates, {trials}"
        f" trainings{' on each' if found.is_made_up else ''} in {found.seconds:.0f} s.",
    ]
    on = "of all these tasks" if found.is_made_up else "on other public records"
    next_best = "".join(f", the next best ({_named(one)}) {_measured(one, found)}" for one in found.ranked[1:2])
    sentences.append(f"The chosen one reached a loss of {_measured(best, found, on)}{next_best}.")
    if found.usual is not None and found.usual is not best:
        anyway = f"The numbers that {system} has anyway ({_named(found.usual)}) reached {_measured(found.usual, found)}"
        sentences.append(f"{anyway}.")
    for name, number in best.options.items():
        alike = [one for one in found.ranked if all(one.options[k] == v for k, v in best.options.items() if k != name)]
        sides = [
            min((one for one in alike if one.options[name] < number), key=lambda one: -one.options[name], default=None),
            min((one for one in alike if one.options[name] > number), key=lambda one: one.options[name], default=None),
        ] if isinstance(number, int) else []  # fmt: skip
        near = [f"{_measured(one, found)} with {one.options[name]}" for one in sides if one is not None]
        if near:
            sentences.append(f"With other {NAMES.get(name, name)} than {number} it was {' and '.join(near)}.")
    if best.mean >= found.untrained:
        sentences.append(
            f"The untrained model has a loss of {found.untrained:.4g}, no worse than the best candidate: at this budget"
            " training does not pay; raise ε, find more clients or records, or lower clip or lr."
        )
    if found.untried:
        sentences.append(
            f"{found.untried} costlier candidates were not tried within the time limit; raise it to try them too."
        )
    return sentences


def _beside_the_bound(bound: Plan, answer: Mapping[str, int] | None, found: PilotResult) -> str:
    there = ", ".join(f"{name} = {value}" for name, value in (answer or {}).items())
    tried = next((one for one in found.ranked if dict(answer or {}).items() <= one.options.items()), None)
    measured = f", which the pilot measured at {_measured(tried, found)}" if tried is not None else ""
    return f"The bound alone would choose {there}{measured}."


def _named(one: Trials) -> str:
    return ", ".join(f"{name} = {value}" for name, value in one.options.items())


def _measured(one: Trials, found: PilotResult, on: str = "") -> str:
    """Say how good a candidate was; of made-up tasks how far above the least loss it was on the worst of them, too."""
    loss = _loss(one) + (f" {on}" if on else "")
    if not found.is_made_up or not math.isfinite(one.mean):
        return loss
    return f"{loss} ({one.regret(found.least)[0]:.3g} above the least on the worst of them)"


def _loss(one: Trials) -> str:
    if not math.isfinite(one.mean):
        return "no end (it diverged)"
    return f"{one.mean:.4g}" + (f" ± {one.error:.2g}" if one.error is not None else "")
