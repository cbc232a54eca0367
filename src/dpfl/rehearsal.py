"""Rehearsals: every order of a training is priced and nobody trains; and the claim at which a true ε is a target."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from scipy.optimize import brentq

from dpfl.errors import BadInput
from dpfl.federation import Schedule
from dpfl.privacy.budget import Observer
from dpfl.privacy.certificate import Certificate, certify
from dpfl.privacy.ledger import Ledger
from dpfl.streams import Streams
from dpfl.systems import Feedback, PrivateSystem, Problem, System


def is_true(system: PrivateSystem[Any], sizes: Sequence[int], observer: Observer = "server") -> bool:
    """Tell whether what a system promises already holds against the observer, by exact accounting."""
    promise = system.promise(sizes)
    overhears_all = observer == "server" and (promise.exposures or 0) >= system.rounds
    return promise.calibration == "tight" and (observer in promise.against or overhears_all)


def at_true_epsilon(
    system: PrivateSystem[Any],
    sizes: Sequence[int],
    epsilon: float,
    streams: Streams,
    *,
    observer: Observer = "server",
    tolerance: float = 1e-5,
) -> PrivateSystem[Any]:
    """Return the system with the claimed ε at which no client really loses more than `epsilon` against the observer.

    tolerance: how far below, as a part of ε, that may be.
    """
    if is_true(system, sizes, observer):
        return system

    def excess(log_claim: float) -> float:
        seen = rehearse(replace(system, epsilon=math.exp(log_claim)), sizes, streams).observers[observer].epsilon
        return 50.0 if seen is None else min(max(math.log(max(seen, 1e-30) / epsilon), -50.0), 50.0)

    low = high = math.log(epsilon)
    while excess(low) > 0:
        low -= 1
        _require_reachable(system, low, epsilon)
    while excess(high) <= 0:
        high += 1
        _require_reachable(system, high, epsilon)
    claim = float(brentq(excess, low, high, xtol=tolerance))
    while excess(claim) > 0:  # steps are whole numbers: end on the safe side
        claim -= tolerance
    return replace(system, epsilon=math.exp(claim))


def _require_reachable(system: PrivateSystem[Any], log_claim: float, epsilon: float) -> None:
    if abs(log_claim - math.log(epsilon)) > 15:
        raise BadInput(
            f"epsilon must be one that {system.name} can really spend, was {epsilon:g}: no claim of its formula comes"
            " near; choose another"
        )


def rehearse(system: System[Any], sizes: Sequence[int], streams: Streams) -> Certificate:
    """Return the certificate of a training that spends all it may, by pricing its orders and training nobody.

    A controller is told what lets it go on longest: losses that keep falling, and no curvature to speak of (each local
    step moves the model by nearly the same).
    """
    problem = Problem(tuple(sizes), 1, Schedule(system.cohorts(len(sizes)), streams))
    ledger = Ledger(system.promise(sizes), sizes, system=system.name)
    still = torch.zeros(1, dtype=torch.float64)

    def told(round: int, answered: Iterable[int]) -> Feedback:
        loss, uploads = -1e3 * round, dict.fromkeys(answered, still)
        return Feedback(
            loss, uploads, {"loss": dict.fromkeys(range(len(sizes)), loss), "curvature": dict.fromkeys(uploads, 1e-9)}
        )

    state = system.begin(problem, still, told(0, ()))
    while state.round < state.rounds:
        orders = system.orders(state)
        charged = ledger.charge(orders)
        noise = system.downlink(state, sorted(charged))
        ledger.broadcast(system.weights(state, sorted(charged)), noise_std=noise.std if noise else 0.0)
        way = max((sum(order.learning_rates) for order in orders.values()), default=0.0)
        moved = state.model + way * (1 + 1e-9 * state.round)
        state = system.adapt(replace(state, model=moved, round=state.round + 1), told(state.round + 1, charged))
    return certify(ledger.books, ledger.run)
