"""A round costs what its cohort costs: systems do not go through the clients that sit it out."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpfl.federation import Schedule
from dpfl.streams import Streams
from dpfl.systems import SYSTEMS, Feedback, PrivateSystem, Problem
from grids import each

WITH_COHORTS = [name for name in SYSTEMS if name != "ali-dpfl"]  # which asks every client in every round


class Sizes(tuple[int, ...]):
    """Records of each client, which may be looked up but, once watched, not gone through."""

    watched = False

    def __iter__(self) -> Iterator[int]:
        assert not self.watched, "the sizes of all clients were gone through"
        return super().__iter__()


def play(system: Any, state: Any) -> Any:
    """Play the system's part of a round."""
    orders = system.orders(state)
    cohort, model = sorted(orders), state.model
    assert sum(system.weights(state, cohort).values()) > 0
    system.downlink(state, cohort)
    return system.adapt(
        replace(state, model=model + 1, round=state.round + 1),
        Feedback(public_loss=1.0, answered=dict.fromkeys(cohort, model)),
    )


@each("name", WITH_COHORTS)
def test_a_round_does_not_go_through_all_clients(name: str) -> None:
    kind, sizes = SYSTEMS[name], Sizes((24, 33, 47, 30, 30, 30))
    budget = {"epsilon": 5.0, "delta": 1e-3} if issubclass(kind, PrivateSystem) else {}
    system: Any = kind(rounds=6, cohort=2, **budget)
    problem = Problem(sizes, 3, Schedule(system.cohorts(6), Streams(1).public))
    state = play(system, system.begin(problem, torch.zeros(3), Feedback(public_loss=2.0)))
    sizes.watched = True
    play(system, play(system, state))
    with pytest.raises(AssertionError, match="gone through"):
        sum(sizes)
