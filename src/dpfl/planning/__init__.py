"""Planning: how many rounds, local steps and clients a round a budget is best spent on.

One file a paper holds its bound and its best numbers as plain functions; `plan` plans a whole training.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from dpfl.config import Config
from dpfl.errors import BadInput, require_one_of
from dpfl.federation import Federation
from dpfl.models import Loss
from dpfl.planning.bounds import Facts, Form, Void
from dpfl.planning.by_bound import Plan, plan_by_bound
from dpfl.planning.by_pilot import plan_by_pilot
from dpfl.planning.constants import Constants, read
from dpfl.planning.estimate_constants import Estimator, estimate
from dpfl.planning.pilot import OnTrial
from dpfl.planning.recommend import Recommendation, recommend
from dpfl.planning.regret import Check, check
from dpfl.planning.task import NUMBERS, PLANNED, PLANNERS, SCALES, Task
from dpfl.streams import Streams
from dpfl.systems import System
from dpfl.training import as_model, settings_of


def plan(
    system: System[Any],
    federation: Federation,
    model: str | nn.Module | None = None,
    *,
    loss: Loss | None = None,
    keep: Collection[str] = (),
    method: str = "pilot",
    form: str = "general",
    estimator: Estimator = "general",
    constants: Constants | None = None,
    search: Mapping[str, Sequence[Any]] | None = None,
    max_rounds: int = 300,
    total_steps: int | None = None,
    time_limit: float = 120.0,
    seed: int | None = None,
    on_trial: OnTrial | None = None,
) -> Plan:
    """Choose how `system` spends its budget; `plan(...).system` is ready for `dpfl.train`.

    Rounds, local steps and clients a round are chosen, and by a pilot the learning rate, the clip and the averaging of
    models too. Nothing of the federation is looked at but its public validation split and how many records its clients
    hold; without public records a pilot tries made-up tasks of the same shape.

    model, loss, seed: as for `dpfl.train`; a module is left as it is.
    keep: what stays as the system has it, of "rounds", "local_steps", "cohort", "lr", "clip", "noise_multiplier" and
        "averaged".
    method: "pilot", by trying for `time_limit` seconds, or "bound", by the paper's (`form`: "general" or "paper").
    estimator: of missing constants; "paper" for fedsgd-dpc's Y₀ and Γ as its authors estimate them.
    constants: of the bound, as far as they are known. search: options and values that a pilot is to try besides.
    """
    for name in keep:
        require_one_of("keep", name, PLANNED)
    own = isinstance(model, nn.Module) or loss is not None
    config = Config(system, settings_of(federation, model=None if own else model, seed=seed))
    task = Task(
        config, federation, frozenset(keep), max_rounds, total_steps, estimator=estimator,
        own_model=as_model(model, loss, federation, Streams(seed)) if own else None,
    )  # fmt: skip
    return make(
        task, method=method, form=form, constants=constants, search=search, time_limit=time_limit, on_trial=on_trial
    )


def make(
    task: Task,
    *,
    method: str = "pilot",
    form: str = "general",
    constants: Constants | None = None,
    search: Mapping[str, Sequence[Any]] | None = None,
    time_limit: float = 120.0,
    on_trial: OnTrial | None = None,
) -> Plan:
    """Plan by a pilot, with the bound's answer beside it, or by the bound of the system's paper alone."""
    require_one_of("method", method, ("bound", "pilot"))
    require_one_of("form", form, ("general", "paper"))
    written: Form = "paper" if form == "paper" else "general"
    if method == "bound":
        if search:
            raise BadInput(f"search must come with a pilot, was {sorted(search)} with a bound; add --method pilot")
        return plan_by_bound(task, form=written, constants=constants)
    return plan_by_pilot(
        task, chooses=(*task.chooses, *SCALES, "averaged"), form=written, constants=constants, search=search,
        time_limit=time_limit, on_trial=on_trial,
    )  # fmt: skip


__all__ = [
    "NUMBERS", "PLANNED", "PLANNERS", "Check", "Constants", "Estimator", "Facts", "Form", "Plan", "Recommendation",
    "Task", "Void", "check", "estimate", "make", "plan", "read", "recommend",
]  # fmt: skip
