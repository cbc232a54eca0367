"""CRD for any sequence of losses: the rounds follow the paper's rule, and no budget is overspent or left over.

The controller is fed with losses, as the round loop would feed it, and every order is paid for by a real ledger.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpfl.config import parse
from dpfl.errors import BadInput
from dpfl.federation import Schedule
from dpfl.orders import Order
from dpfl.privacy.budget import Budget
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.privacy.gaussian_dp import mu_of
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.paper_formulas import udp_recomputed_noise_std
from dpfl.streams import Streams
from dpfl.systems import UDP, Feedback, Problem, questions_in
from dpfl.systems.udp import UDPState
from grids import each

unhurried = settings(deadline=None, derandomize=True, max_examples=12)  # a busy machine is no failure
GAIN = 0.01  # CRD's ζ

# What a round may do to the loss: a gain, too little of one, none, or a loss that is no number.
changes = st.lists(st.sampled_from([-0.5, -0.02, -0.005, 0.0, 0.3, math.nan]), min_size=40, max_size=40)
falling = st.lists(st.sampled_from([-0.02, -0.5]), min_size=40, max_size=40)


@st.composite
def systems(draw: Any, calibrations: Any = ("tight", "paper")) -> Any:
    """Draw CRD for clients that all differ: (system, sizes)."""
    clients = draw(st.integers(1, 5))
    calibration = draw(st.sampled_from(calibrations))
    scheduling = "random" if calibration == "paper" else draw(st.sampled_from(["random", "round-robin", "poisson"]))

    def each(low: float, high: float) -> tuple[float, ...]:
        return tuple(draw(st.lists(st.floats(low, high), min_size=clients, max_size=clients)))

    sizes = tuple(draw(st.lists(st.integers(1, 400), min_size=clients, max_size=clients)))
    system = UDP(
        rounds=draw(st.integers(1, 40)), lr=draw(st.floats(0.01, 5)), clip=draw(st.floats(0.1, 10)),
        cohort=draw(st.none() | st.integers(1, clients)), scheduling=scheduling, epsilon=each(0.2, 15),
        delta=tuple(10**power for power in each(-7, -2)), calibration=calibration,
        discount=draw(st.sampled_from([0.1, 0.25, 0.5, 0.6, 0.75, 0.8, 0.9, 0.95])), least_gain=GAIN,
    )  # fmt: skip
    return system, sizes


@dataclass
class Run:
    """What a training did: the state before each round and after the last, and the orders of each."""

    states: list[UDPState]
    orders: list[dict[int, Order]]
    ledger: Ledger

    def stds(self, client: int) -> list[float]:
        """Return the noise of the rounds that a client answered."""
        return [orders[client].noise.std for orders in self.orders if client in orders]


def told(system: UDP, sizes: Sequence[int], loss: float, cohort: Sequence[int] = ()) -> Feedback:
    """Tell V(w) as the calibration hears it: by the clients (p_i-weighted to `loss`), or from public data."""
    uploads = {client: torch.zeros(1) for client in cohort}
    if system.calibration == "paper":
        return Feedback(
            public_loss=math.nan, answered=uploads, answers={"loss": dict.fromkeys(range(len(sizes)), loss)}
        )
    return Feedback(public_loss=loss, answered=uploads)


def trained(system: UDP, sizes: tuple[int, ...], steps: Sequence[float], seed: int = 0) -> Run:
    """Play a whole training in which the loss changes as given."""
    loss = 5.0
    problem = Problem(sizes, 1, Schedule(system.cohorts(len(sizes)), Streams(seed).public))
    state = system.begin(problem, torch.zeros(1), told(system, sizes, loss))
    run = Run([state], [], Ledger(system.promise(sizes), sizes))
    for step in steps:
        if state.round == state.rounds:
            break
        orders = system.orders(state)
        assert run.ledger.charge(orders).keys() == orders.keys()  # no client is ever refused
        loss = (5.0 if math.isnan(loss) else loss) + step
        state = system.adapt(replace(state, round=state.round + 1), told(system, sizes, loss, tuple(orders)))
        run.states.append(state)
        run.orders.append(orders)
    assert state.round == state.rounds
    return run


def sensitivities(system: UDP, sizes: Sequence[int]) -> list[float]:
    return [2 * system.lr * system.clip_now(None) / n for n in sizes]


@unhurried
@given(case=systems(), steps=falling)
def test_while_the_rounds_stay_the_noise_does_not_change(case: Any, steps: Any) -> None:
    system, sizes = case
    run = trained(system, sizes, steps)
    assert len(run.orders) == system.rounds
    assert {state.rounds for state in run.states} == {system.rounds}
    assert {state.noise_stds for state in run.states} == {run.states[0].noise_stds}


@unhurried
@given(case=systems(["paper"]), steps=falling)
def test_the_papers_noise_recomputed_in_any_round_is_the_same(case: Any, steps: Any) -> None:
    # Equations (30) and (31): after any t of T rounds with one σ, (25) gives that σ again.
    system, sizes = case
    run = trained(system, sizes, steps)
    q = (system.cohort or len(sizes)) / len(sizes)
    for i, bound in enumerate(sensitivities(system, sizes)):
        std = run.states[0].noise_stds[i]
        by_hand = bound * math.sqrt(2 * q * system.rounds * math.log(1 / system.delta[i])) / system.epsilon[i]
        assert std == pytest.approx(by_hand, rel=1e-12)
        for t in range(system.rounds):
            again = udp_recomputed_noise_std(
                sensitivity=bound, cohort_rate=q, rounds=system.rounds, done=t, earlier_stds=[std] * t,
                epsilon=system.epsilon[i], delta=system.delta[i],
            )  # fmt: skip
            assert again == pytest.approx(std, rel=1e-9)


@unhurried
@given(case=systems(["tight"]), steps=falling)
def test_exact_noise_recomputed_in_any_round_is_the_same(case: Any, steps: Any) -> None:
    system, sizes = case
    run = trained(system, sizes, steps)
    bounds = sensitivities(system, sizes)
    granted = [Budget(*pair) for pair in zip(system.epsilon, system.delta, strict=True)]
    schedule = run.states[0].problem.schedule
    first = run.states[0].noise_stds
    for t in range(0, system.rounds, 1 + system.rounds // 6):
        done, left = (schedule.replies(*span) for span in ((1, t), (t + 1, system.rounds)))
        spent = [n * (bound / std) ** 2 for n, bound, std in zip(done, bounds, first, strict=True)]
        again = gaussian_noise_stds(bounds, [max(1, int(n)) for n in left], granted, spent=spent)
        for i, std in enumerate(again):
            if left[i]:
                # All noise is 1e-9 larger than it must be; what earlier rounds saved so is shared out among those left.
                assert std == pytest.approx(first[i], rel=1e-9 * (1 + done[i] / left[i]) + 1e-12)


@unhurried
@given(case=systems(), steps=changes)
def test_rounds_are_cut_to_the_letter_and_never_grow(case: Any, steps: Any) -> None:
    system, sizes = case
    run = trained(system, sizes, steps)
    beta, loss, planned = Fraction(repr(system.discount)), 5.0, system.rounds
    for t in range(len(run.orders)):  # w^t becomes w^(t+1)
        new = (5.0 if math.isnan(loss) else loss) + steps[t]
        gained = loss - new >= GAIN  # never with a NaN on either side
        if not gained:
            planned = math.floor(beta * (planned - t)) + t
        loss = new
        assert run.states[t + 1].rounds == max(planned, t + 1)
        if planned <= t + 1:
            break
    plans = [state.rounds for state in run.states]
    assert plans == sorted(plans, reverse=True)
    assert len(run.orders) == t + 1 == plans[-1] <= system.rounds


@unhurried
@given(case=systems(), steps=changes)
def test_noise_changes_only_with_the_rounds_and_then_falls(case: Any, steps: Any) -> None:
    run = trained(*case, steps)  # type: ignore[call-arg]
    for before, after in zip(run.states, run.states[1:], strict=False):
        if after.rounds == before.rounds or after.round == after.rounds:
            assert after.noise_stds == before.noise_stds
        else:
            for i, (old, new) in enumerate(zip(before.noise_stds, after.noise_stds, strict=True)):
                replies = after.problem.schedule.replies(after.round + 1, after.rounds)[i]
                assert new <= old * (1 + 1e-9) or replies == 0  # else nobody will ask for it


@unhurried
@given(case=systems(["tight"]), steps=changes)
def test_no_budget_is_overspent_and_none_is_left_over(case: Any, steps: Any) -> None:
    system, sizes = case
    run = trained(system, sizes, steps)
    # The last change of plan that rounds still followed, as the number of rounds that were done by then.
    plans = [state.rounds for state in run.states]
    known_since = min(k for k, planned in enumerate(plans) if planned == plans[-1])
    worths = mu_of(system.epsilon, system.delta) ** 2
    for i, (bound, worth) in enumerate(zip(sensitivities(system, sizes), worths, strict=True)):
        spent = math.fsum((bound / std) ** 2 for std in run.stds(i))
        assert spent <= worth
        if spent:  # what μ² means, without the code under test
            mu, epsilon = math.sqrt(spent), system.epsilon[i]
            delta = norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))
            assert delta <= system.delta[i] * (1 + 1e-6)
        if any(i in orders for orders in run.orders[known_since:]):
            assert spent >= worth * (1 - 1e-3)


@unhurried
@given(case=systems(), steps=changes)
def test_every_noise_by_hand(case: Any, steps: Any) -> None:
    # (25), and the same rule in μ² over the rounds that a client answered and will answer.
    system, sizes = case
    run = trained(system, sizes, steps)
    schedule = run.states[0].problem.schedule
    q = (system.cohort or len(sizes)) / len(sizes)
    worths = mu_of(system.epsilon, system.delta) ** 2
    cuts = [k for k in range(1, len(run.orders)) if run.states[k].rounds < run.states[k - 1].rounds]
    for t in [0, *cuts]:
        planned = run.states[t].rounds
        for i, bound in enumerate(sensitivities(system, sizes)):
            if system.calibration == "paper":
                past = math.fsum(1 / state.noise_stds[i] ** 2 for state in run.states[:t])  # answered or not
                budget = system.epsilon[i] ** 2 / (2 * q * bound**2 * math.log(1 / system.delta[i]))
                expected = math.sqrt((planned - t) / (budget - past))
            else:
                past = math.fsum(1 / orders[i].noise.std ** 2 for orders in run.orders[:t] if i in orders)
                replies = int(schedule.replies(t + 1, planned)[i])
                if replies == 0:
                    continue  # nobody will ask for it
                expected = bound * math.sqrt(replies / (worths[i] - bound**2 * past))
            assert run.states[t].noise_stds[i] == pytest.approx(expected, rel=1e-6)


def test_a_client_that_sat_out_pays_for_the_rounds_it_answered_alone() -> None:
    # Clients 0 and 1 answer in turn. After three rounds client 0 has answered two and client 1 one.
    system = UDP(rounds=12, cohort=1, scheduling="round-robin", discount=0.5, least_gain=GAIN, epsilon=4.0)
    run = trained(system, (50, 50), [-1.0, -1.0, 0.0] + [-1.0] * 40)
    first, cut = run.states[0].noise_stds, run.states[3]
    assert first[0] == first[1]
    assert cut.rounds == math.floor(0.5 * (12 - 2)) + 2 == 7  # four more: client 1, 0, 1, 0
    # Each had six replies planned. Client 0 shares four sixths of its budget among two, client 1 five sixths.
    assert cut.noise_stds[0] == pytest.approx(first[0] * math.sqrt(2 / 6 / (4 / 6)), rel=1e-6)
    assert cut.noise_stds[1] == pytest.approx(first[1] * math.sqrt(2 / 6 / (5 / 6)), rel=1e-6)


def test_the_paper_counts_every_round_whoever_answered() -> None:
    system = UDP(rounds=12, cohort=1, discount=0.5, least_gain=GAIN, epsilon=4.0, calibration="paper")
    run = trained(system, (50, 50), [-1.0, -1.0, 0.0] + [-1.0] * 40)
    first, cut = run.states[0].noise_stds, run.states[3]
    assert len({client for orders in run.orders[:3] for client in orders}) <= 2
    assert cut.rounds == 7
    expected = [std * math.sqrt(4 / 12 / (9 / 12)) for std in first]  # 4 rounds share what 3 of 12 left
    assert cut.noise_stds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("calibration", ["tight", "paper"])
def test_a_loss_that_is_no_number_is_no_gain(calibration: str) -> None:
    system = UDP(rounds=20, discount=0.5, least_gain=0.0, calibration=calibration)
    run = trained(system, (50, 50), [math.nan, -1.0, -1.0] + [-0.1] * 40)
    # To NaN: ⌊0.5·20⌋ = 10. From NaN: ⌊0.5·9⌋ + 1 = 5. Then it falls again.
    assert [state.rounds for state in run.states[:4]] == [20, 10, 5, 5]


def test_a_gain_of_exactly_the_threshold_is_enough() -> None:
    system = UDP(rounds=20, discount=0.5, least_gain=0.25)
    run = trained(system, (50,), [-0.25] * 40)
    assert len(run.orders) == 20


def test_the_first_round_is_measured_against_the_model_it_began_with() -> None:
    # V(w^0) = 5 is told before the first round: without it that round could not be judged.
    system = UDP(rounds=10, discount=0.5, least_gain=GAIN)
    assert trained(system, (50,), [-1.0] * 40).states[1].rounds == 10
    assert trained(system, (50,), [0.0] + [-1.0] * 40).states[1].rounds == 5


def test_clients_losses_are_weighed_by_their_records() -> None:
    system = UDP(rounds=10, discount=0.5, least_gain=0.0, calibration="paper")
    problem = Problem((10, 30), 1, Schedule(system.cohorts(2), Streams(0).public))

    def after(before: dict, now: dict) -> int:
        state = system.begin(problem, torch.zeros(1), Feedback(answers={"loss": before}))
        return system.adapt(replace(state, round=1), Feedback(answers={"loss": now})).rounds

    # (10·a + 30·b)/40: client 0 may lose three times what client 1 gains.
    assert after({0: 1.0, 1: 1.0}, {0: 1.29, 1: 0.9}) == 10
    assert after({0: 1.0, 1: 1.0}, {0: 1.31, 1: 0.9}) == 5


def test_the_training_ends_where_the_discount_leaves_no_further_round() -> None:
    system = UDP(rounds=10, discount=0.1, least_gain=GAIN)
    run = trained(system, (50,), [0.0] * 40)
    assert len(run.orders) == run.states[-1].rounds == 1  # ⌊0.1·10⌋ = 1 round, which is done
    run = trained(system, (50,), [-1.0, -1.0, 0.0])
    assert len(run.orders) == 3  # ⌊0.1·8⌋ + 2 = 2 has passed already


@each(("discount", "rounds", "kept"), [(0.9, 200, 180), (0.5, 7, 3), (0.7, 90, 63), (0.7, 180, 126), (0.29, 100, 29)])
def test_a_discount_means_the_decimal_number_that_was_written(discount: float, rounds: int, kept: int) -> None:
    # 0.7·90 is 63, and 62.99999999999999 in binary fractions: β = 0.7 is in the paper's own sweep.
    system = UDP(rounds=rounds, discount=discount, least_gain=GAIN)
    assert trained(system, (50,), [0.0] + [-1.0] * rounds).states[1].rounds == kept


def test_without_public_data_exact_crd_says_why_it_cannot_watch_the_loss() -> None:
    system = UDP(discount=0.9)
    problem = Problem((10, 10), 1, Schedule(system.cohorts(2), Streams(0).public))
    why = r"^validation_share must be above 0 for CRD in tight calibration, was 0: it watches the loss, .*uncounted"
    with pytest.raises(BadInput, match=why):
        system.begin(problem, torch.zeros(1), Feedback(public_loss=None))
    UDP().begin(problem, torch.zeros(1), Feedback(public_loss=None))  # without CRD nobody watches


def test_only_the_papers_crd_asks_clients_for_their_loss() -> None:
    assert questions_in(UDP(discount=0.9).needs) == questions_in(UDP(calibration="paper").needs) == ()
    assert UDP(discount=0.9).promise((10,)).uncounted == ()
    paper = UDP(discount=0.9, calibration="paper")
    assert questions_in(paper.needs) == ("loss",)
    assert "loss" in paper.promise((10,)).uncounted[0]
    assert [UDP(discount=one).promise((10,)).noise for one in (None, 0.9)] == ["fixed", "adaptive"]


@each(
    ("options", "field"),
    [
        ({"discount": 0.0}, "discount"),
        ({"discount": 1.0}, "discount"),
        ({"discount": -0.5}, "discount"),
        ({"discount": math.nan}, "discount"),
        ({"discount": "much"}, "discount"),
        ({"least_gain": -1e-3}, "least_gain"),
        ({"least_gain": math.nan}, "least_gain"),
        ({"least_gain": math.inf}, "least_gain"),
        ({"least_gain": None}, "least_gain"),
        ({"calibration": "paper", "cohort": 2, "scheduling": "round-robin"}, "scheduling"),
        ({"calibration": "paper", "cohort": 2, "scheduling": "poisson"}, "scheduling"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} must "):
        UDP(**options)


def test_an_option_that_it_does_not_take_is_refused_with_those_it_does() -> None:
    with pytest.raises(BadInput, match=r"^discnt must .* udp takes .*discount.*least_gain.*did you mean 'discount'"):
        parse({"system": "udp", "discnt": 0.9})
