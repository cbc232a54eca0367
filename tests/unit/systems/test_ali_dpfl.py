"""ALI-DPFL: its orders, R_c in both calibrations, what it asks clients for, refusals."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpfl.config import parse
from dpfl.errors import BadInput
from dpfl.federation import Schedule
from dpfl.orders import UNPAID, Gaussian, Order, Poisson, RecordClip
from dpfl.privacy.accounting import Mechanism, tight
from dpfl.privacy.certificate import certify
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.paper_formulas import ali_epsilon
from dpfl.streams import Streams
from dpfl.systems import ALIDPFL, Feedback, Problem, questions_in
from dpfl.systems.ali_dpfl import ALIState
from grids import each


def begin(system: ALIDPFL, sizes: tuple[int, ...], dim: int = 3) -> ALIState:
    problem = Problem(sizes, dim, Schedule(system.cohorts(len(sizes)), Streams(0).public))
    return system.begin(problem, torch.zeros(dim), Feedback())


def test_an_order_is_dpsgd_with_noise_in_every_step() -> None:
    system = ALIDPFL(
        rounds=2, local_steps=2, lr=0.3, clip=2.0, sampling_rate=0.25, noise_multiplier=3.0, epsilon=3.0,
        calibration="paper",
    )  # fmt: skip
    expected = Order(
        steps=2, learning_rate=0.3, batch=Poisson(0.25), clip=RecordClip(2.0), noise=Gaussian(6.0), noise_on="step"
    )
    assert system.orders(begin(system, (10, 20))) == {0: expected, 1: expected}


@pytest.mark.parametrize(("calibration", "accountant"), [("tight", tight), ("paper", ali_epsilon)])
def test_each_budget_affords_the_most_steps_that_its_accountant_allows(calibration: str, accountant: Any) -> None:
    system = ALIDPFL(
        rounds=5, sampling_rate=0.3, noise_multiplier=1.5, epsilon=(2.0, 5.0), delta=(1e-5, 1e-3),
        calibration=calibration,
    )  # fmt: skip
    state = begin(system, (10, 20))
    for most, epsilon, delta in zip(state.left, system.epsilon, system.delta, strict=True):
        step = Mechanism("gaussian", 1.5, 0.3)
        assert accountant({step: most}, delta) <= epsilon < accountant({step: most + 1}, delta)
    assert state.total_steps == max(state.left)


@each(("rounds", "steps"), [(68, 1), (69, 1), (70, 1), (34, 2), (23, 3), (22, 3), (17, 4), (1, 5)])
def test_the_first_steps_leave_something_for_every_round(rounds: int, steps: int) -> None:
    # On full batches at σ = 4 a budget of (8, 1e-3) affords R_c = 69 steps.
    system = ALIDPFL(rounds=rounds, local_steps=5, sampling_rate=1.0, noise_multiplier=4.0)
    state = begin(system, (10, 20))
    assert state.left == (69, 69)
    assert state.steps == steps


@each(("spare", "steps"), [(1, 1), (0, 1), (-1, 5)])
def test_rounds_are_plenty_from_the_number_of_steps_on(spare: int, steps: int) -> None:
    # R_s ≥ R_c, R_s = R_c included; the paper holds nothing back, so that this alone decides.
    system = ALIDPFL(local_steps=5, sampling_rate=1.0, noise_multiplier=4.0, calibration="paper")
    system = replace(system, rounds=48 + spare)
    state = begin(system, (10, 20))
    assert (state.total_steps, state.steps) == (48, steps)
    answers = {"curvature from the sum": {0: 0.01, 1: 0.01}}  # so flat that τ* is far above 5
    uploads = dict.fromkeys((0, 1), torch.ones(3))
    later = system.adapt(
        replace(state, model=state.model + 1, round=1), Feedback(answered=uploads, total=torch.ones(3), answers=answers)
    )
    assert (later.steps == 1) == (steps == 1)


def test_a_client_that_cannot_pay_for_a_step_is_not_asked() -> None:
    system = ALIDPFL(rounds=3, sampling_rate=1.0, noise_multiplier=0.8, epsilon=(0.5, 8.0))
    state = begin(system, (10, 20))
    assert state.left[0] == 0 < state.left[1]
    assert list(system.orders(state)) == [1]


def test_everything_is_spent_where_rounds_are_plenty_and_nothing_more() -> None:
    system = ALIDPFL(rounds=500, sampling_rate=0.5, noise_multiplier=1.5, epsilon=4.0)
    state, sizes = begin(system, (10, 20)), (10, 20)
    ledger = Ledger(system.promise(sizes), sizes)
    while state.round < state.rounds:
        paid = ledger.charge(system.orders(state))
        state = system.adapt(
            replace(state, round=state.round + 1),
            Feedback(answered=dict.fromkeys(paid, torch.ones(3)), total=torch.ones(3)),
        )
    most = begin(system, sizes).total_steps
    assert state.round == most
    with pytest.raises(RuntimeError, match="budget"):  # and the ledger agrees that it was the last
        ledger.charge(system.orders(begin(system, sizes)))
    step = Mechanism("gaussian", 1.5, 0.5)
    for line in certify(ledger.books, ledger.run).spending:
        assert line.replies == most
        assert line.server_epsilon == pytest.approx(tight({step: most}, 1e-3), rel=1e-6)
        assert line.server_epsilon <= 4.0


def test_only_the_paper_asks_clients_for_their_curvature() -> None:
    assert questions_in(ALIDPFL().needs) == ()
    assert ALIDPFL().promise((10, 10)).uncounted == ()
    paper = ALIDPFL(calibration="paper")
    assert questions_in(paper.needs) == ("curvature from the sum",)
    (named,) = paper.promise((10, 10)).uncounted
    assert "gradient" in named


def test_the_curvature_is_asked_for_where_it_is_to_be_taken_and_named_so() -> None:
    told = {
        where: ALIDPFL(calibration="paper", curvature_from=where).promise((10, 10)).uncounted
        for where in ("broadcast", "aggregate")
    }
    assert told["broadcast"] == (UNPAID["curvature"],)
    assert told["aggregate"] == (UNPAID["curvature from the sum"],)
    assert ALIDPFL(calibration="paper").curvature_from == "aggregate"  # as the paper has it
    assert questions_in(ALIDPFL(calibration="tight").needs) == ()


@each("where", ["broadcast", "aggregate"])
def test_the_curvature_that_was_asked_for_is_the_one_that_counts(where: Any) -> None:
    system = ALIDPFL(
        rounds=9, sampling_rate=1.0, noise_multiplier=4.0, heterogeneity=0.0, calibration="paper", curvature_from=where
    )
    state = begin(system, (900, 100))
    question, other = ("curvature", "curvature from the sum")[:: 1 if where == "broadcast" else -1]
    answers = {question: {0: 0.5, 1: 0.5}, other: {0: 9.0, 1: 9.0}}
    feedback = Feedback(answered=(0, 1), total=torch.ones(3), answers=answers)
    # As below: τ* = 3.16; with the other one it would be 1.6.
    assert system.adapt(replace(state, model=torch.ones(3), round=1), feedback).steps == 3


def test_a_divisor_of_ones_own_changes_steps_and_no_price() -> None:
    system = ALIDPFL(rounds=9, sampling_rate=0.5, noise_multiplier=4.0, divisor=64.0)
    state = begin(system, (10, 20))
    assert {order.divisor(10) for order in system.orders(state).values()} == {64.0}
    assert state.left == begin(replace(system, divisor=None), (10, 20)).left


@pytest.mark.parametrize("epsilon", [4.0, (1.0, 4.0)])
def test_where_rounds_are_plenty_nobody_is_asked(epsilon: float | tuple[float, ...]) -> None:
    short = ALIDPFL(calibration="paper", epsilon=epsilon, sampling_rate=0.1, noise_multiplier=2.0, rounds=1)
    most = begin(short, (10, 10)).total_steps
    for rounds, asked in ((most - 1, ("curvature from the sum",)), (most, ())):
        system = replace(short, rounds=rounds)
        assert questions_in(system.needs) == asked
        assert len(system.promise((10, 10)).uncounted) == len(asked)
    state = begin(replace(short, rounds=most), (10, 10))
    moved = replace(state, model=torch.ones(3), round=1)
    after = replace(short, rounds=most).adapt(
        moved, Feedback(answered=dict.fromkeys((0, 1), torch.ones(3)), total=torch.ones(3))
    )
    assert (after.steps, after.left) == (1, tuple(left - 1 for left in state.left))


@each("answered", [(0, 1), (0,), (1,)])
def test_the_curvature_is_a_mean_over_those_who_answered(answered: tuple[int, ...]) -> None:
    # A client whose budget is gone tells nothing: that must not make the loss look flat, and τ* large.
    system = ALIDPFL(rounds=9, sampling_rate=1.0, noise_multiplier=4.0, heterogeneity=0.0, calibration="paper")
    state = begin(system, (900, 100))
    assert state.total_steps > 40
    feedback = Feedback(
        answered=dict.fromkeys(answered, torch.ones(3)),
        total=torch.ones(3),
        answers={"curvature from the sum": dict.fromkeys(answered, 0.5)},
    )
    # 4/μ² = 16 and σ²C²d/B̂² = 16·3/100² = 0.0048, T = 9: τ* = √(1 + 19.0048/((2 + 1/9)·1.0048)) = 3.16.
    assert system.adapt(replace(state, model=torch.ones(3), round=1), feedback).steps == 3


def test_the_promise_is_for_one_record_added_or_removed() -> None:
    promise = ALIDPFL(epsilon=(1.0, 2.0)).promise((10, 10))
    assert (promise.unit, promise.neighbours, promise.noise) == ("record", "add-remove", "fixed")
    assert [budget.epsilon for budget in promise.budgets] == [1.0, 2.0]


def test_weights_are_shares_of_the_records_that_answered() -> None:
    system = ALIDPFL()
    state = begin(system, (10, 30, 60))
    assert system.weights(state, [0, 1, 2]) == pytest.approx({0: 0.1, 1: 0.3, 2: 0.6})
    assert system.weights(state, [0, 1]) == pytest.approx({0: 0.25, 1: 0.75})


def test_every_client_is_asked_in_every_round() -> None:
    with pytest.raises(BadInput, match=r"^cohort must be left out for ali-dpfl, .*, was 3"):
        ALIDPFL(cohort=3)


def test_noise_too_small_for_any_step_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^noise_multiplier must be large enough for one step within ε = 1"):
        begin(ALIDPFL(sampling_rate=1.0, noise_multiplier=0.1, epsilon=(0.5, 1.0)), (10, 10))


@each(
    ("options", "field"),
    [
        ({"rounds": 0}, "rounds"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": 1.5}, "local_steps"),
        ({"lr": 0.0}, "lr"),
        ({"clip": -1.0}, "clip"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"sampling_rate": 1.01}, "sampling_rate"),
        ({"sampling_rate": math.nan}, "sampling_rate"),
        ({"sampling_rate": None}, "sampling_rate"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": None}, "noise_multiplier"),
        ({"heterogeneity": -1.0}, "heterogeneity"),
        ({"heterogeneity": math.nan}, "heterogeneity"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"calibration": "exact"}, "calibration"),
        ({"cohort": 0}, "cohort"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} must "):
        ALIDPFL(**options)


def test_an_option_that_it_does_not_take_is_refused_with_those_it_does() -> None:
    with pytest.raises(BadInput, match=r"^proximal must .* ali-dpfl takes .*heterogeneity.*noise_multiplier"):
        parse({"system": "ali-dpfl", "proximal": 0.5})
