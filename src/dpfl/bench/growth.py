"""How the cost of a whole round grows: with all clients there are, with the cohort, with the model."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dpfl.bench.timing import medians
from dpfl.clients.stacked import StackedClients
from dpfl.federation import Records
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import build
from dpfl.privacy.ledger import Ledger
from dpfl.round import play
from dpfl.server.evaluation import PublicSplit
from dpfl.session import Session, problem_of
from dpfl.streams import Streams
from dpfl.systems import DPFedAvg

CLIENTS = (10**2, 10**3, 10**4, 10**5, 10**6)
COHORTS = (1, 10, 100, 1000)
PARAMETERS = (10, 10**2, 10**3, 10**4, 10**5, 10**6, 10**7)


def growth(*, device: str = "cpu", seconds: float = 1.0) -> dict[str, Any]:
    """Time whole rounds of DP-FedAvg, orders and ledger included; return the times and their slopes.

    A slope is that of the logarithm of the time by the logarithm of the size: 0 where it does not matter, 1 where it is
    proportional; of the larger half of the sizes, where fixed costs no longer hide it.
    """
    where = torch.device(device)
    series = {
        "clients": {size: _ms(where, seconds, clients=size, cohort=100, features=10) for size in CLIENTS},
        "cohort": {size: _ms(where, seconds, clients=1000, cohort=size, features=10) for size in COHORTS},
        "parameters": {size: _ms(where, seconds, clients=2, cohort=2, features=size) for size in PARAMETERS},
    }
    return {name: {"ms": times, "slope": slope(times)} for name, times in series.items()}


def slope(times: dict[int, float]) -> float:
    """Return the slope of log time by log size over the larger half of the sizes, by least squares."""
    points = [
        (math.log(size), math.log(time)) for size, time in list(times.items())[-max(2, len(times) - len(times) // 2) :]
    ]
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    steepness: float = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    return steepness


def _ms(device: torch.device, seconds: float, *, clients: int, cohort: int, features: int) -> float:
    taken = medians({"round": _rounds(device, clients, cohort, features)}, seconds=seconds, device=device)
    return taken["round"]


def _rounds(device: torch.device, clients: int, cohort: int, features: int) -> Callable[[], object]:
    """Return a function that plays the next round; all clients hold the same few records."""
    streams, each = Streams(1), 10 if features <= 1000 else 2
    source = torch.Generator().manual_seed(0)
    one = Records(torch.randn(each, features, generator=source), torch.randn(each, generator=source)).to(device)
    model = build("linear", shape=(features,), classes=None, rng=streams.public.generator("model"))
    model.module.to(device)
    system = DPFedAvg(rounds=10**4, local_steps=1, cohort=None if cohort == clients else cohort, epsilon=100.0)
    sizes = (each,) * clients
    performers = StackedClients(model, (one,) * clients, streams, capabilities=capabilities_of(model, one))
    nobody = one.take(torch.arange(0, device=device))
    session = Session(
        system, problem_of(system, sizes, model.dim, streams), model, performers,
        Ledger(system.promise(sizes), sizes, system=system.name), streams, PublicSplit(model, nobody),
    )  # fmt: skip
    state = session.begin()

    def next_round() -> None:
        nonlocal state
        state, _ = play(session, state)

    return next_round
