"""PE-DPFL: proximal steps, noise that spends each budget and no more, refusals."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpfl.config import parse
from dpfl.errors import BadInput, BudgetRefused
from dpfl.federation import Schedule
from dpfl.orders import Full, Gaussian, Order, RecordClip
from dpfl.privacy.certificate import certify
from dpfl.privacy.gaussian_dp import mu_of
from dpfl.privacy.ledger import Ledger
from dpfl.streams import Streams
from dpfl.systems import PEDPFL, UDP, DPSGDFedAvg, Feedback, Problem
from dpfl.systems.dpsgd_fedavg import DPSGDState
from grids import each


def begin(system: PEDPFL | UDP, sizes: tuple[int, ...], seed: int = 0) -> Any:
    problem = Problem(sizes, 3, Schedule(system.cohorts(len(sizes)), Streams(seed).public))
    return system.begin(problem, torch.zeros(3), Feedback())


def test_an_order_is_proximal_steps_with_noise_on_the_upload() -> None:
    system = PEDPFL(local_steps=3, lr=0.5, clip=3.0, proximal=0.2)
    state = begin(system, (10, 20))
    for client, order in system.orders(state).items():
        assert order == Order(
            steps=3, learning_rate=0.5, batch=Full(), clip=RecordClip(3.0), noise=Gaussian(state.noise_stds[client]),
            noise_on="upload", proximal=0.2,
        )  # fmt: skip


@each("pull", [0.0, 0.1, 3.0])
def test_with_one_step_the_noise_is_that_of_udp_whatever_the_pull(pull: float) -> None:
    # The pull is zero at the broadcast model, where the only step is taken.
    system = PEDPFL(local_steps=1, proximal=pull, rounds=12, epsilon=(1.0, 8.0))
    assert begin(system, (10, 40)).noise_stds == begin(UDP(rounds=12, epsilon=(1.0, 8.0)), (10, 40)).noise_stds


@each(
    ("steps", "pull", "moved"),
    [
        # η = 0.5, C = 2, n = 10: 2ηC/n = 0.2 and 2ηC = 2.
        (1, 0.0, 0.2),
        (2, 0.0, 2.2),
        (3, 0.0, 4.2),
        (2, 1.0, 0.5 * 0.2 + 2),
        (3, 1.0, 0.5 * (0.5 * 0.2 + 2) + 2),
        (2, 2.0, 2.0),  # the pull takes the second step back to the broadcast model
        (2, 6.0, 2 * 0.2 + 2),  # and too strong a pull overshoots it: |1 − ημ| = 2
    ],
)
def test_noise_covers_what_one_record_can_move(steps: int, pull: float, moved: float) -> None:
    system = PEDPFL(local_steps=steps, proximal=pull, lr=0.5, clip=2.0, rounds=9, epsilon=4.0, delta=1e-4)
    (std,) = begin(system, (10,)).noise_stds
    assert std == pytest.approx(moved * 3 / float(mu_of(4.0, 1e-4)), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 3])
def test_exact_noise_spends_each_budget_and_no_more(steps: int) -> None:
    sizes, epsilon = (10, 30, 50, 20), (0.5, 2.0, 8.0, 4.0)
    system = PEDPFL(rounds=15, cohort=2, local_steps=steps, epsilon=epsilon, delta=1e-4)
    state, ledger = begin(system, sizes), Ledger(system.promise(sizes), sizes)
    while state.round < state.rounds:
        orders = system.orders(state)
        assert len(orders) == 2
        assert ledger.charge(orders).keys() == orders.keys()  # nobody is ever refused
        state = system.adapt(replace(state, round=state.round + 1), Feedback())
    for line, granted in zip(certify(ledger.books, ledger.run).spending, epsilon, strict=True):
        assert line.replies > 0
        assert granted * (1 - 1e-3) <= line.server_epsilon <= granted
    with pytest.raises(BudgetRefused):
        ledger.charge(system.orders(begin(system, sizes)))


def test_the_promise_is_for_one_record_replaced_and_exact() -> None:
    promise = PEDPFL(epsilon=(1.0, 2.0)).promise((10, 10))
    assert (promise.unit, promise.neighbours, promise.noise) == ("record", "replace", "fixed")
    assert (promise.calibration, promise.uncounted) == ("tight", ())


@each(
    ("options", "field"),
    [
        ({"calibration": "paper", "noise_on": "upload"}, "calibration"),
        ({"sampling_rate": 0.5}, "sampling_rate"),
        ({"noise_multiplier": 2.0}, "noise_multiplier"),
        ({"noise_on": "step", "sampling_rate": 1.5}, "sampling_rate"),
        ({"noise_on": "step", "noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_on": "model"}, "noise_on"),
        ({"rounds": 0}, "rounds"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": True}, "local_steps"),
        ({"lr": 0.0}, "lr"),
        ({"lr": None}, "lr"),
        ({"clip": 0.0}, "clip"),
        ({"proximal": -0.1}, "proximal"),
        ({"proximal": math.inf}, "proximal"),
        ({"proximal": math.nan}, "proximal"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"cohort": 0}, "cohort"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} must "):
        PEDPFL(**options)


STEPS = {"noise_on": "step", "local_steps": 3, "sampling_rate": 0.3, "lr": 0.5, "clip": 2.0, "proximal": 0.2}


@pytest.mark.parametrize("given", [None, 1.7])
@pytest.mark.parametrize("calibration", ["tight", "paper"])
def test_with_noise_on_each_step_it_is_dpsgd_with_a_pull(calibration: Any, given: float | None) -> None:
    system = PEDPFL(**STEPS, calibration=calibration, rounds=7, epsilon=(2.0, 4.0), noise_multiplier=given)
    twin = DPSGDFedAvg(
        local_steps=3, sampling_rate=0.3, lr=0.5, clip=2.0, calibration=calibration, rounds=7, epsilon=(2.0, 4.0),
        noise_multiplier=given,
    )  # fmt: skip
    state, plain = begin(system, (10, 20)), begin(twin, (10, 20))
    assert isinstance(state, DPSGDState)
    assert (state.noise_multipliers, state.left, state.rounds) == (plain.noise_multipliers, plain.left, plain.rounds)
    for _ in range(3):
        pulled = {client: replace(order, proximal=0.2) for client, order in twin.orders(plain).items()}
        assert system.orders(state) == pulled
        answered = tuple(pulled)
        state, plain = system.adapt(state, Feedback(answered=answered)), twin.adapt(plain, Feedback(answered=answered))
        assert isinstance(state, DPSGDState)
        assert state.left == plain.left
    assert system.promise((10, 20)) == twin.promise((10, 20))


def test_steps_are_noised_where_the_paper_counts_them() -> None:
    assert PEDPFL(calibration="paper").promise((10,)).neighbours == "add-remove"
    assert PEDPFL(noise_on="step").promise((10,)).neighbours == "add-remove"
    assert PEDPFL().promise((10,)).neighbours == "replace"


def test_trainings_that_differ_in_their_budgets_are_one_where_the_noise_of_steps_is_given() -> None:
    given = PEDPFL(**STEPS, noise_multiplier=3.0, rounds=400)
    assert given.course is not None
    any_budget, ends = given.course[0], {}
    for epsilon in (2.0, 4.0):
        for calibration in ("tight", "paper"):
            one = replace(given, epsilon=epsilon, calibration=calibration)
            assert one.course is not None
            shared, ends[epsilon, calibration] = one.course
            assert shared == any_budget
            assert begin(one, (10, 20)).rounds == ends[epsilon, calibration]
    assert ends[2.0, "paper"] < ends[2.0, "tight"] < ends[4.0, "tight"]
    assert PEDPFL(**STEPS).course is None
    assert PEDPFL().course is None


def test_an_option_that_it_does_not_take_is_refused_with_those_it_does() -> None:
    with pytest.raises(BadInput, match=r"^discount must .* pe-dpfl takes .*local_steps.*proximal"):
        parse({"system": "pe-dpfl", "discount": 0.5})
