"""Planning: how many rounds, local steps and clients a round a budget is best spent on.

One file a paper holds its bound and its best numbers as plain functions; `make` plans a whole training.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dpfl.errors import BadInput, require_one_of
from dpfl.planning.bounds import Facts, Form, Void
from dpfl.planning.check import Check, check
from dpfl.planning.constants import Constants, read
from dpfl.planning.pilot import OnTrial, pilot_plan
from dpfl.planning.plan import NUMBERS, PLANNERS, Plan, Task, plan
from dpfl.planning.probes import estimate
from dpfl.planning.recommend import Recommendation, recommend


def make(
    task: Task,
    *,
    method: str = "bound",
    form: str = "general",
    constants: Constants | None = None,
    search: Mapping[str, Sequence[Any]] | None = None,
    time_limit: float = 120.0,
    on_trial: OnTrial | None = None,
) -> Plan:
    """Plan by the system's bound, or by a pilot on public records with the bound's answer beside it."""
    require_one_of("method", method, ("bound", "pilot"))
    require_one_of("form", form, ("general", "paper"))
    written: Form = "paper" if form == "paper" else "general"
    if method == "bound":
        if search:
            raise BadInput(f"search must come with a pilot, was {sorted(search)} with a bound; add --method pilot")
        return plan(task, form=written, constants=constants)
    return pilot_plan(
        task, chooses=chooses(task), form=written, constants=constants, search=search, time_limit=time_limit,
        on_trial=on_trial,
    )  # fmt: skip


def chooses(task: Task) -> tuple[str, ...]:
    """Return the numbers that a plan for this system decides: where it has no bound, its rounds."""
    name = task.system.name
    return PLANNERS[name].chooses if name in PLANNERS else ("rounds",)


__all__ = [
    "NUMBERS", "PLANNERS", "Check", "Constants", "Facts", "Form", "Plan", "Recommendation", "Task", "Void",
    "check", "chooses", "estimate", "make", "plan", "read", "recommend",
]  # fmt: skip
