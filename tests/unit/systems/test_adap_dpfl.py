"""Adap DP-FL: when the noise decays, how the clip follows the uploads, and that the Rényi filter has the last word."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpfl.config import parse
from dpfl.errors import BadInput, BudgetRefused
from dpfl.federation import Schedule
from dpfl.orders import Gaussian, Order, Poisson, RecordClip
from dpfl.privacy import renyi
from dpfl.privacy.accounting import Mechanism
from dpfl.privacy.budget import Budget
from dpfl.privacy.filters import RenyiFilter
from dpfl.privacy.gaussian_dp import mu_of
from dpfl.privacy.ledger import Ledger
from dpfl.streams import Streams
from dpfl.systems import AdapDPFL, Feedback, Problem
from dpfl.systems.adap_dpfl import AdapState
from grids import each

SIZES = (10, 20)


def begin(system: AdapDPFL, sizes: tuple[int, ...] = SIZES, loss: float | None = 5.0) -> AdapState:
    problem = Problem(sizes, 3, Schedule(system.cohorts(len(sizes)), Streams(0).public))
    return system.begin(problem, torch.zeros(3), Feedback(public_loss=loss))


def decays(patience: int, losses: Sequence[float]) -> list[int]:
    """Return the rounds after which the noise shrank; the loss before the first is 5."""
    system = AdapDPFL(rounds=50, sampling_rate=1.0, patience=patience, noise_decay=0.5)
    state, found = begin(system), []
    for round, loss in enumerate(losses, start=1):
        before = state.noise_multipliers
        state = system.adapt(replace(state, round=round), Feedback(public_loss=loss))
        if state.noise_multipliers != before:
            assert state.noise_multipliers == pytest.approx([one / 2 for one in before], rel=1e-12)
            found.append(round)
    return found


def test_the_first_orders_are_dpsgd_with_the_noise_of_all_rounds() -> None:
    system = AdapDPFL(rounds=3, local_steps=2, lr=0.3, clip=2.0, sampling_rate=0.5, epsilon=4.0)
    state = begin(system)
    for client, order in system.orders(state).items():
        z = state.noise_multipliers[client]
        assert order == Order(
            steps=2, learning_rate=0.3, batch=Poisson(0.5), clip=RecordClip(2.0), noise=Gaussian(2.0 * z),
            noise_on="step",
        )  # fmt: skip
        for multiplier, enough in ((z, True), (z / 1.02, False)):  # of the filter that will judge them
            one = Mechanism("gaussian", multiplier, 0.5)
            assert RenyiFilter(Budget(4.0, 1e-3), one).affords(one, 6) == enough


@each(
    ("patience", "losses", "expected"),
    [
        (1, [4, 3, 3, 2, 2.5], [1, 2, 4]),
        (2, [4, 3, 2, 1, 0.5], [2, 4]),  # after a decay patience begins anew
        (4, [4, 3, 2, 1, 0.9, 0.8, 0.7, 0.6], [4, 8]),
        (4, [4, 3, 2, 2, 1.9, 1.8, 1.7, 1.6], [8]),  # a loss that stayed is none that fell
        (4, [4, 3, 2, 2.1, 1.9, 1.8, 1.7, 1.6], [8]),
        (4, [6, 5, 4, 3, 2], [5]),
        (3, [4, 3, math.nan, 2, 1, 0.5, 0.4], [7]),  # one that is no number neither, on either side
        (3, [5, 5, 5, 5], []),
        (3, [4, 3], []),
    ],
)
def test_noise_decays_exactly_when_the_loss_fell_in_all_of_the_last_rounds(
    patience: int, losses: list[float], expected: list[int]
) -> None:
    assert decays(patience, losses) == expected


def next_clip(upload: float, **options: Any) -> tuple[float, ...]:
    """Return the thresholds after client 1 (of 20 records) uploaded a vector of this length."""
    system = AdapDPFL(rounds=6, sampling_rate=1.0, epsilon=50.0, **options)
    state = replace(begin(system), round=1)
    return system.adapt(
        state,
        Feedback(
            public_loss=6.0,
            answered={1: torch.tensor([0.0, -upload, 0.0])},
            uploads={1: torch.tensor([0.0, -upload, 0.0])},
        ),
    ).clips


def test_a_clip_is_a_multiple_of_the_gradient_that_stands_out_from_the_noise() -> None:
    # ‖upload‖/(ηE) = 3/(0.5·2) = 3; ‖noise‖² is d·(zC/n)²/E in expectation.
    options = {"lr": 0.5, "local_steps": 2, "clip": 2.0}
    z = begin(AdapDPFL(rounds=6, sampling_rate=1.0, epsilon=50.0, **options)).noise_multipliers[1]
    expected = math.sqrt(9 - 3 * (z * 2.0 / 20) ** 2 / 2)
    assert next_clip(3.0, **options) == pytest.approx((2.0, expected), rel=1e-6)  # who did not answer keeps his own
    assert next_clip(3.0, clip_factor=0.5, **options) == pytest.approx((2.0, expected / 2), rel=1e-6)


@each(("upload", "clip"), [(0.0, 0.2), (1e-6, 0.2), (1e3, 20.0), (math.inf, 20.0)])
def test_a_clip_stays_between_a_tenth_and_ten_times_the_first(upload: float, clip: float) -> None:
    assert next_clip(upload, lr=0.5, clip=2.0) == pytest.approx((2.0, clip))


def together(total: float, **options: Any) -> AdapState:
    """Return the state after both clients (of 10 and 20 records) sent a sum of this length."""
    system = AdapDPFL(rounds=6, sampling_rate=1.0, epsilon=50.0, threshold_from="cohort", **options)
    state = replace(begin(system), round=1)
    return system.adapt(
        state, Feedback(public_loss=6.0, answered=(0, 1), total=torch.tensor([0.0, -total, 0.0], dtype=torch.float64))
    )


def test_one_clip_for_the_cohort_follows_the_gradient_of_all() -> None:
    # Client i's noise is z_i·C/n_i a coordinate and step, weighed n_i/30: z_i·C/30 whoever it is.
    options = {"lr": 0.5, "local_steps": 2, "clip": 2.0}
    z = begin(AdapDPFL(rounds=6, sampling_rate=1.0, epsilon=50.0, **options)).noise_multipliers
    expected = math.sqrt(9 - 3 * sum((one * 2.0 / 30) ** 2 for one in z) / 2)
    assert together(3.0, **options).clips == pytest.approx((expected, expected), rel=1e-9)
    assert together(3.0, clip_factor=0.5, **options).clips == pytest.approx((expected / 2,) * 2, rel=1e-9)
    assert together(0.0, **options).clips == pytest.approx((0.2, 0.2))
    assert together(1e9, **options).clips == pytest.approx((20.0, 20.0))
    assert together(math.nan, **options).clips == (2.0, 2.0)


def test_where_nobody_answered_the_clip_stays() -> None:
    system = AdapDPFL(rounds=6, sampling_rate=1.0, threshold_from="cohort", clip=2.0)
    state = system.adapt(replace(begin(system), round=1), Feedback(public_loss=6.0, total=torch.zeros(3)))
    assert state.clips == (2.0, 2.0)


def test_only_thresholds_of_clients_need_uploads_one_by_one() -> None:
    assert AdapDPFL().needs == {"uploads", "public loss"}
    assert AdapDPFL(threshold_from="cohort").needs == {"model", "public loss"}


def test_a_rate_of_the_threshold_keeps_steps_as_long_as_the_first() -> None:
    system = AdapDPFL(rounds=6, sampling_rate=1.0, lr=0.5, clip=2.0, lr_of="threshold")
    state = replace(begin(system), clips=(0.5, 8.0))
    assert [order.learning_rate for order in system.orders(state).values()] == [2.0, 0.125]  # η·2/C_i
    # What is read off an upload is a gradient all the same: ‖upload‖/(η_i·E).
    options = {"lr": 0.5, "clip": 2.0, "lr_of": "threshold"}
    state = replace(begin(AdapDPFL(rounds=6, sampling_rate=1.0, epsilon=50.0, **options)), clips=(4.0, 4.0))
    z = state.noise_multipliers[1]
    upload = {1: torch.tensor([0.0, 1.0, 0.0])}
    after = AdapDPFL(rounds=6, sampling_rate=1.0, epsilon=50.0, **options).adapt(
        state, Feedback(public_loss=6.0, answered=upload, uploads=upload)
    )
    assert after.clips[1] == pytest.approx(math.sqrt((1 / 0.25) ** 2 - 3 * (z * 4.0 / 20) ** 2), rel=1e-6)


@each("sampling_rate", [0.3, 1.0])
def test_the_first_noise_leaves_room_for_every_decay_where_it_is_to(sampling_rate: float) -> None:
    system = AdapDPFL(
        rounds=9, local_steps=2, patience=2, noise_decay=0.9, sampling_rate=sampling_rate, epsilon=(2.0, 4.0),
        room_for_decay="yes",
    )  # fmt: skip
    for falling, without in ((True, False), (False, False), (True, True)):
        one = replace(system, room_for_decay="no" if without else "yes")
        rounds = [orders.keys() for orders in until_refused(one, falling=falling)]
        enough = [sum(client in asked for asked in rounds) >= 9 for client in range(2)]
        assert enough == [not without] * 2


def test_who_replies_to_some_rounds_only_is_given_room_for_the_last_of_them() -> None:
    system = AdapDPFL(rounds=9, local_steps=2, patience=4, noise_decay=0.5)
    assert system._fall(9) == {1.0: 8, 0.5: 8, 0.25: 2}
    assert system._fall(3) == {0.5: 4, 0.25: 2}


def test_the_noise_follows_the_clip() -> None:
    system = AdapDPFL(rounds=6, sampling_rate=1.0)
    state = replace(begin(system), clips=(0.5, 3.0), noise_multipliers=(2.0, 4.0))
    orders = system.orders(state)
    assert [(one.clip, one.noise) for one in orders.values()] == [
        (RecordClip(0.5), Gaussian(1.0)),
        (RecordClip(3.0), Gaussian(12.0)),
    ]


def until_refused(system: AdapDPFL, falling: bool) -> list[dict[int, Order]]:
    """Play until the plan or the budgets end; return the orders that were paid."""
    state, ledger, paid = begin(system), Ledger(system.promise(SIZES), SIZES), []
    try:
        while state.round < state.rounds:
            charged = ledger.charge(system.orders(state))
            paid.append({client: one.order for client, one in charged.items()})
            loss = 5.0 - 0.01 * (state.round + 1) if falling else 5.0
            uploads = dict.fromkeys(charged, torch.ones(3))
            state = system.adapt(
                replace(state, round=state.round + 1), Feedback(public_loss=loss, answered=uploads, uploads=uploads)
            )
    except BudgetRefused:
        pass
    return paid


def affordable(multipliers: Sequence[float], sampling_rate: float, budget: Budget) -> int:
    """Return how many rounds of these multipliers a filter of the whole budget lets pass."""
    purse = RenyiFilter(budget, Mechanism("gaussian", multipliers[0], sampling_rate))
    worth, spent = float(mu_of(budget.epsilon, budget.delta)) ** 2, 0.0
    for count, z in enumerate(multipliers):
        if sampling_rate == 1:  # on all records Gaussian DP is exact, and adds up whatever was chosen before
            spent += 1 / z**2
            if spent > worth:
                return count
        else:
            one = Mechanism("gaussian", z, sampling_rate)
            if not purse.affords(one, 1):
                return count
            purse.pay(one, 1)
    return len(multipliers)


@each("falling", [True, False])
@each("sampling_rate", [0.5, 1.0])
def test_it_ends_by_itself_before_any_budget_is_overdrawn(sampling_rate: float, falling: bool) -> None:
    system = AdapDPFL(
        rounds=10, sampling_rate=sampling_rate, patience=4, noise_decay=0.6, epsilon=(3.0, 8.0), delta=1e-4
    )
    assert system.until_spent
    paid = until_refused(system, falling)
    first = begin(system).noise_multipliers
    for client, granted in enumerate(system.epsilon):
        multipliers = [first[client] * (0.6 ** (t // 4) if falling else 1.0) for t in range(10)]
        replies = [orders[client] for orders in paid if client in orders]
        assert [one.noise.std / one.clip.clip_norm for one in replies] == pytest.approx(multipliers[: len(replies)])
        assert len(replies) == affordable(multipliers, sampling_rate, Budget(granted, 1e-4)) > 4
        assert (len(replies) < 10) == falling
        if sampling_rate < 1:  # the plan as it turned out, priced as if it had been fixed in advance
            spent = Counter(Mechanism("gaussian", z, sampling_rate) for z in multipliers[: len(replies)])
            assert renyi.epsilon(spent, 1e-4) <= granted


@pytest.mark.parametrize("rounds", [1, 10])
def test_without_a_decay_all_rounds_that_were_planned_can_be_paid(rounds: int) -> None:
    # A single round included, whose filter shares δ out as well.
    system = AdapDPFL(rounds=rounds, sampling_rate=0.5, noise_decay=1.0)
    assert len(until_refused(system, falling=False)) == rounds


def test_the_promise_lets_the_noise_change() -> None:
    promise = AdapDPFL(epsilon=(1.0, 2.0)).promise((10, 10))
    assert (promise.unit, promise.neighbours) == ("record", "add-remove")
    assert (promise.noise, promise.calibration, promise.uncounted) == ("adaptive", "tight", ())


def test_without_public_data_it_says_why_it_cannot_watch_the_loss() -> None:
    with pytest.raises(BadInput, match=r"^validation_share must be above 0 for adap-dpfl, was 0: it watches the loss"):
        begin(AdapDPFL(sampling_rate=1.0), loss=None)


@each(
    ("options", "field"),
    [
        ({"calibration": "paper"}, "calibration"),
        ({"rounds": 0}, "rounds"),
        ({"local_steps": 0}, "local_steps"),
        ({"lr": 0.0}, "lr"),
        ({"lr": None}, "lr"),
        ({"clip": 0.0}, "clip"),
        ({"clip_factor": 0.0}, "clip_factor"),
        ({"clip_factor": math.inf}, "clip_factor"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"sampling_rate": 2.0}, "sampling_rate"),
        ({"noise_decay": 0.0}, "noise_decay"),
        ({"noise_decay": 1.01}, "noise_decay"),
        ({"noise_decay": math.nan}, "noise_decay"),
        ({"patience": 0}, "patience"),
        ({"patience": 2.5}, "patience"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"cohort": 0}, "cohort"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} must "):
        AdapDPFL(**options)


def test_an_option_that_it_does_not_take_is_refused_with_those_it_does() -> None:
    with pytest.raises(BadInput, match=r"^noise_multiplier must .* adap-dpfl takes .*clip_factor.*patience"):
        parse({"system": "adap-dpfl", "noise_multiplier": 1.0})
