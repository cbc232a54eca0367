"""Lei's approach: noise that falls linearly, a training that ends with the budget, refusals."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpfl.config import parse
from dpfl.errors import BadInput, BudgetRefused
from dpfl.federation import Schedule
from dpfl.orders import Gaussian, Order, RecordClip
from dpfl.privacy.certificate import certify
from dpfl.privacy.gaussian_dp import mu_of
from dpfl.privacy.ledger import Ledger
from dpfl.streams import Streams
from dpfl.systems import UDP, Feedback, Lei, Problem
from grids import each


def begin(system: Lei | UDP, sizes: tuple[int, ...], seed: int = 0) -> Any:
    return system.begin(
        Problem(sizes, 3, Schedule(system.cohorts(len(sizes)), Streams(seed).public)), torch.zeros(3), Feedback()
    )


def until_refused(system: Lei, sizes: tuple[int, ...]) -> tuple[Ledger, list[dict[int, Order]]]:
    """Play until the plan or the budgets end; return the ledger and the orders that were paid."""
    state, ledger, paid = begin(system, sizes), Ledger(system.promise(sizes), sizes), []
    try:
        while state.round < state.rounds:
            paid.append({client: one.order for client, one in ledger.charge(system.orders(state)).items()})
            uploads = dict.fromkeys(paid[-1], torch.zeros(3))
            state = system.adapt(replace(state, round=state.round + 1), Feedback(public_loss=1.0, answered=uploads))
    except BudgetRefused:
        pass
    return ledger, paid


def test_an_order_is_one_clipped_step_with_noise_on_the_upload() -> None:
    system = Lei(lr=0.5, clip=3.0, rounds=10)
    for order in system.orders(begin(system, (10, 20))).values():
        assert (order.steps, order.learning_rate, order.noise_on) == (1, 0.5, "upload")
        assert order.clip == RecordClip(3.0)


def test_the_noise_falls_linearly_by_the_same_share_at_every_client() -> None:
    system = Lei(rounds=10, noise_fall=0.6, lr=0.5, clip=2.0, epsilon=(2.0, 8.0), delta=1e-4)
    state = begin(system, (10, 40))
    for done in range(10):
        stds = [order.noise.std for order in system.orders(replace(state, given=(done, done))).values()]
        for i, n in enumerate((10, 40)):
            first = 2 * 0.5 * 2.0 / n * math.sqrt(10) / float(mu_of(system.epsilon[i], 1e-4))  # type: ignore[index]
            assert stds[i] == pytest.approx(first * (1 - 0.06 * done), rel=1e-6)


def test_without_a_fall_it_is_udp_to_the_end() -> None:
    sizes = (10, 20, 30)
    system = Lei(rounds=9, noise_fall=0.0)
    assert begin(system, sizes).first_stds == begin(UDP(rounds=9), sizes).noise_stds
    ledger, paid = until_refused(system, sizes)
    assert len(paid) == 9
    for line in certify(ledger.books, ledger.run).spending:
        assert 8.0 * (1 - 1e-3) <= line.server_epsilon <= 8.0


@each("fall", [0.2, 0.5, 0.9])
def test_it_ends_by_itself_when_no_budget_pays_for_another_round(fall: float) -> None:
    rounds, epsilon, sizes = 40, (1.0, 4.0, 12.0), (10, 50, 20)
    system = Lei(rounds=rounds, noise_fall=fall, epsilon=epsilon, delta=1e-4)
    assert system.until_spent
    ledger, paid = until_refused(system, sizes)
    # A share 1/R·(1 − f·(t−1)/R)^−2 of each budget goes in round t, at every client alike.
    shares = [1 / (rounds * (1 - fall * t / rounds) ** 2) for t in range(rounds)]
    expected = max(k for k in range(rounds + 1) if sum(shares[:k]) <= 1)
    assert len(paid) == expected < rounds
    assert all(len(orders) == 3 for orders in paid)
    for line, granted, n in zip(certify(ledger.books, ledger.run).spending, epsilon, sizes, strict=True):
        assert line.replies == expected
        assert line.server_epsilon <= granted
        bound, worth = 2 * 2.0 / n, float(mu_of(granted, 1e-4)) ** 2
        spent = sum((bound / orders[line.client].noise.std) ** 2 for orders in paid)  # type: ignore[misc]
        assert spent <= worth < spent + worth * shares[expected]  # not one more round


def shares(planned: int, fall: float) -> list[float]:
    """Return what each reply of a client takes of its budget."""
    return [1 / (planned * (1 - fall * k / planned) ** 2) for k in range(planned)]


@each("seed", range(4))
@each("options", [{"cohort": 3}, {"cohort": 1}, {"cohort": 3, "scheduling": "round-robin"}, {"noise_fall": 0.9}])
def test_it_ends_with_the_last_round_whose_whole_cohort_can_pay(seed: int, options: dict[str, Any]) -> None:
    sizes, epsilon = (10, 50, 20, 30, 30), (1.0, 4.0, 12.0, 8.0, 8.0)
    system = Lei(rounds=60, epsilon=epsilon, delta=1e-4, **options)
    state, ledger = begin(system, sizes, seed), Ledger(system.promise(sizes), sizes)
    last, schedule, fall = state.rounds, state.problem.schedule, system.noise_fall
    planned = [int(count) for count in schedule.replies(1, 60)]
    for round in range(1, last + 1):
        orders = system.orders(state)
        assert ledger.charge(orders).keys() == orders.keys()  # nobody is refused
        told = Feedback(public_loss=1.0, answered=tuple(orders))
        state = system.adapt(replace(state, round=round), told)
    given = [int(count) for count in schedule.replies(1, last)]
    assert state.given == tuple(given)
    spent = [sum(shares(many, fall)[:count]) for many, count in zip(planned, given, strict=True)]
    assert max(spent) <= 1 + 1e-9
    assert 1 <= last < 60
    following = schedule.cohort(last + 1)  # of whom at least one cannot pay
    assert max(sum(shares(planned[i], fall)[: given[i] + 1]) for i in following) > 1 + 1e-9


def test_in_paper_calibration_it_ends_when_udps_own_sum_is_spent() -> None:
    # Σ 1/σ² over all rounds is ε²/(2qΔ²·ln(1/δ)) at most: the first σ would fill it in 40 rounds.
    sizes, epsilon = (10, 50), (4.0, 8.0)
    options: Any = {"rounds": 40, "cohort": 1, "epsilon": epsilon, "delta": 1e-3, "calibration": "paper"}
    system, udp = Lei(noise_fall=0.5, **options), UDP(**options)
    state = begin(system, sizes)
    assert state.first_stds == begin(udp, sizes).noise_stds
    last = state.rounds
    assert sum(shares(40, 0.5)[:last]) <= 1 < sum(shares(40, 0.5)[: last + 1])
    assert last < 40
    stds: list[list[float]] = [[], []]
    while state.round < last:
        ((client, order),) = system.orders(state).items()
        assert isinstance(order.noise, Gaussian)
        assert order.noise.std == pytest.approx(state.first_stds[client] * (1 - 0.5 * state.round / 40))
        stds[client].append(order.noise.std)
        state = system.adapt(replace(state, round=state.round + 1), Feedback(answered=(client,)))
    assert all(stds)
    assert system.promise(sizes).cautions == udp.promise(sizes).cautions != ()


def test_it_reads_the_paper_as_udp_does() -> None:
    options: Any = {"clip": "median", "clipping": "model", "local_epochs": 2, "batch_size": 5, "calibration": "paper"}
    lei, udp = Lei(rounds=9, noise_fall=0.0, **options), UDP(rounds=9, **options)
    assert lei.needs == udp.needs == {"length"}
    one, other = begin(lei, (10, 20)), begin(udp, (10, 20))
    assert lei.orders(one) == udp.orders(other)
    told = Feedback(answered=(0, 1), answers={"length": {0: 3.0, 1: 5.0}})
    one, other = (system.adapt(replace(state, round=1), told) for system, state in ((lei, one), (udp, other)))
    assert lei.orders(one) == udp.orders(other)
    assert one.clip == 4.0
    promises = [system.promise((10, 20)) for system in (lei, udp)]
    assert promises[0] == promises[1]


def test_each_client_has_noise_for_the_rounds_that_it_will_answer() -> None:
    system = Lei(rounds=30, cohort=1, noise_fall=0.0)
    state = begin(system, (10, 10, 10))
    replies = state.problem.schedule.replies(1, 30)
    assert len(set(replies)) > 1
    expected = [2 * 2.0 / 10 * math.sqrt(count) / float(mu_of(8.0, 1e-3)) for count in replies]
    assert state.first_stds == pytest.approx(expected, rel=1e-6)


def test_noise_falls_with_a_clients_own_replies_so_that_a_late_turn_can_be_paid() -> None:
    # One of three clients a round, in turn: each answers twice, the second time with f/2 less noise than the first.
    system = Lei(rounds=6, cohort=1, scheduling="round-robin", noise_fall=0.4)
    state = begin(system, (10, 10, 10))
    assert state.planned == (2, 2, 2)
    first = state.first_stds[0]
    seen: list[float] = []
    for _ in range(6):
        ((client, order),) = system.orders(state).items()
        seen.append(order.noise.std / first)
        state = system.adapt(
            replace(state, round=state.round + 1), Feedback(public_loss=1.0, answered={client: torch.zeros(3)})
        )
    assert seen == pytest.approx([1.0, 1.0, 1.0, 0.8, 0.8, 0.8])


def test_the_promise_is_for_one_record_replaced_and_exact() -> None:
    promise = Lei(epsilon=(1.0, 2.0)).promise((10, 10))
    assert (promise.unit, promise.neighbours, promise.calibration) == ("record", "replace", "tight")
    assert (promise.against, promise.uncounted) == (("server",), ())
    assert [budget.epsilon for budget in promise.budgets] == [1.0, 2.0]


@each(
    ("options", "field"),
    [
        ({"noise_fall": -0.1}, "noise_fall"),
        ({"noise_fall": 1.0}, "noise_fall"),
        ({"noise_fall": math.nan}, "noise_fall"),
        ({"noise_fall": "half"}, "noise_fall"),
        ({"calibration": "papper"}, "calibration"),
        ({"rounds": 0}, "rounds"),
        ({"lr": -1.0}, "lr"),
        ({"lr": None}, "lr"),
        ({"clip": 0.0}, "clip"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"cohort": 0}, "cohort"),
        ({"scheduling": "turns"}, "scheduling"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} must "):
        Lei(**options)


def test_an_option_that_it_does_not_take_is_refused_with_those_it_does() -> None:
    with pytest.raises(BadInput, match=r"^sampling_rate must .* lei takes .*noise_fall.*, every run takes"):
        parse({"system": "lei", "sampling_rate": 0.5})
    with pytest.raises(BadInput, match=r"^noise_fal must .*did you mean 'noise_fall'"):
        parse({"system": "lei", "noise_fal": 0.5})
