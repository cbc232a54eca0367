"""How many test records of each site a model gets right, as something that clients upload with noise like any other.

A count is one round of a model with a single parameter: a record's gradient is −½ where the trained model is right
about it and ½ where it is wrong, clipped to ½, so that what a client uploads is its accuracy less ½. Sensitivity,
noise, the ledger's charge and the certificate are those of every training; nothing about evaluation is priced
anywhere else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpfl.errors import BadInput
from dpfl.federation import Federation, Records, Schedule
from dpfl.models import Model
from dpfl.orders import Neighbours
from dpfl.streams import Streams
from dpfl.systems import UDP, DPSGDFedAvg, Feedback, PrivateSystem, Problem

CLIP = 0.5  # of a record that is right or wrong, and none is longer


def require_countable(federation: Federation, model: Model) -> None:
    """Refuse what nothing can be counted of."""
    if not federation.site_tests:
        raise BadInput(
            "paid_evaluation must be for clients that keep records for testing, but these keep none; leave it out, or"
            " give sites a test_share"
        )
    if model.classify is None:
        raise BadInput("paid_evaluation must be for classes, of which right answers are counted, but targets are"
                       " numbers here; leave it out")  # fmt: skip


def without_tests(federation: Federation) -> Federation:
    """Return the federation as somebody sees it who looks at no site's test records."""
    nothing = federation.test.take(torch.arange(0))
    return replace(federation, test=nothing, site_tests=())


def to_be_counted(model: Model, parameters: Tensor, federation: Federation) -> tuple[Federation, nn.Module]:
    """Return clients that hold a mark for each of their test records, and the model whose gradient is those marks."""
    marks = tuple(_marks(model, parameters, tests.to(parameters.device)) for tests in federation.site_tests)
    nothing = marks[0].take(torch.arange(0))
    counting = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(counting.weight)
    counted = Federation(
        name=federation.name, clients=marks, validation=nothing, test=nothing, classes=None,
        source=f"whether the model is right about the test records of {federation.source}", names=federation.names,
        untouched=lambda: (*federation.site_tests, nothing, nothing),
    )  # fmt: skip
    return counted, counting


def counting_system(epsilon: float, deltas: tuple[float, ...], neighbours: Neighbours) -> PrivateSystem[Any]:
    """Return the system that counts, for the neighbours that the training was for, so that both add up."""
    common: dict[str, Any] = {"rounds": 1, "lr": 1.0, "clip": CLIP, "epsilon": epsilon, "delta": deltas}
    return UDP(**common) if neighbours == "replace" else DPSGDFedAvg(**common, local_steps=1, sampling_rate=1.0)


def noise_of(system: PrivateSystem[Any], sizes: Sequence[int], streams: Streams) -> list[float]:
    """Return the standard deviation of the noise on each client's accuracy."""
    problem = Problem(tuple(sizes), 1, Schedule(system.cohorts(len(sizes)), streams.public))
    orders = system.orders(system.begin(problem, torch.zeros(1), Feedback()))
    return [math.sqrt(orders[client].noise_variance(size)) for client, size in enumerate(sizes)]


def accuracies(uploads: Mapping[int, Tensor], clients: int) -> list[float | None]:
    """Return what uploads say of each client's accuracy; None for one that could not pay."""
    shares: Sequence[float | None] = [
        float(uploads[client][0]) + CLIP if client in uploads else None for client in range(clients)
    ]
    return [None if share is None else min(max(share, 0.0), 1.0) for share in shares]


@torch.no_grad()
def _marks(model: Model, parameters: Tensor, tests: Records) -> Records:
    """Return x = 1 and the target whose squared error at zero has the gradient ∓½; 0 for what cannot be computed.

    Records are shown to the model one at a time: one that mixes them would let a single one change many marks.
    """
    named, y = model.split(parameters), torch.zeros(len(tests))
    model.module.eval()
    assert model.classify is not None
    for row in range(len(tests)):
        try:
            outputs = model.outputs(named, tests.x[row : row + 1])
            if torch.isfinite(tests.x[row]).all() and torch.isfinite(outputs).all():
                y[row] = CLIP / 2 if bool((model.classify(outputs) == tests.y[row : row + 1]).all()) else -CLIP / 2
        except Exception:  # of any kind, and what it says may quote the record
            pass
    return Records(torch.ones(len(tests), 1), y)
