"""ALI-DPFL for any course of the training: no budget is overdrawn, and the local steps are those that τ* asks for.

The controller is fed with models and curvatures at random, as the round loop would feed it, and every order is paid for
by a real ledger.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance.asking import session_of
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.federation import Records, Schedule
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Model
from dpfl.orders import Order
from dpfl.privacy.ledger import Ledger
from dpfl.round import play
from dpfl.streams import Streams
from dpfl.systems import ALIDPFL, DPSGDFedAvg, Feedback, Problem
from dpfl.systems.ali_dpfl import ALIState, optimal_local_steps
from grids import each

unhurried = settings(deadline=None, derandomize=True, max_examples=8)  # a busy machine is no failure
DIM = 4
positive = st.floats(0.01, 100)


@dataclass
class Run:
    """What a training did: the state before each round and after the last, and the orders of each."""

    states: list[ALIState]
    orders: list[dict[int, Order]]
    curvatures: list[dict[int, float]]  # that clients told of, where they were asked

    @property
    def steps(self) -> Counter:
        """Return how many local steps each client took in all."""
        taken: Counter[int] = Counter()
        for orders in self.orders:
            taken.update({client: order.steps for client, order in orders.items()})
        return taken


def trained(system: ALIDPFL, sizes: Sequence[int], seed: int = 0) -> Run:
    """Play a whole training whose models wander about."""
    rng = np.random.default_rng(seed)
    problem = Problem(tuple(sizes), DIM, Schedule(system.cohorts(len(sizes)), Streams(seed).public))
    state = system.begin(problem, torch.from_numpy(rng.normal(size=DIM)), Feedback())
    ledger = Ledger(system.promise(sizes), sizes)
    run = Run([state], [], [])
    while state.round < state.rounds:
        orders = system.orders(state)
        assert ledger.charge(orders).keys() == orders.keys() != set()  # nobody is refused, and somebody is asked
        step = torch.from_numpy(rng.normal(size=DIM) * 10.0 ** rng.uniform(-3, 1))
        moved = state.model + step
        curvatures = {client: float(10.0 ** rng.uniform(-2, 1)) for client in orders}
        answers = {"curvature from the sum": curvatures} if system.calibration == "paper" else {}
        state = replace(state, model=moved, round=state.round + 1)
        state = system.adapt(state, Feedback(answered=orders, total=step, answers=answers))
        run.states.append(state)
        run.orders.append(orders)
        run.curvatures.append(curvatures)
    return run


@st.composite
def systems(draw: Any) -> Any:
    """Draw ALI-DPFL for clients with budgets of their own, on full batches (whose prices cost no time)."""
    clients = draw(st.integers(1, 4))
    system = ALIDPFL(
        rounds=draw(st.integers(1, 25)), local_steps=draw(st.integers(1, 9)), lr=draw(st.floats(0.05, 2)),
        clip=draw(st.floats(0.1, 5)), sampling_rate=1.0, noise_multiplier=draw(st.floats(0.8, 4)),
        heterogeneity=draw(st.sampled_from([0.0, 1.0, 10.0])), calibration=draw(st.sampled_from(["tight", "paper"])),
        epsilon=tuple(draw(st.lists(st.floats(3, 12), min_size=clients, max_size=clients))), delta=1e-3,
    )  # fmt: skip
    sizes = tuple(draw(st.lists(st.integers(1, 300), min_size=clients, max_size=clients)))
    assume(max(allowed_steps(system, sizes)) > 0)
    return system, sizes


def allowed_steps(system: ALIDPFL, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return R_c of each client for full batches: by Gaussian DP, or by ε(α) = α/(2σ²) over integer orders."""
    sigma = system.noise_multiplier
    if system.calibration == "paper":
        return tuple(
            max(
                0,
                *(math.floor((one - math.log(1e3) / (a - 1)) * 2 * sigma**2 / a) for a in range(2, 257)),
            )
            for one in system.epsilon
        )
    return tuple(math.floor(gaussian_mu(one) ** 2 * sigma**2) for one in system.epsilon)


def gaussian_mu(epsilon: float) -> float:
    """Return μ of (ε, 1e-3) by halving an interval in which Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) rises."""

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = 1e-3, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        delta = phi(-epsilon / middle + middle / 2) - math.exp(epsilon) * phi(-epsilon / middle - middle / 2)
        low, high = (middle, high) if delta <= 1e-3 else (low, middle)
    return low


@unhurried
@given(case=systems(), seed=st.integers(0, 99))
def test_nobody_takes_more_steps_than_its_budget_allows(case: Any, seed: Any) -> None:
    system, sizes = case
    run = trained(system, sizes, seed)
    allowed = allowed_steps(system, sizes)
    assert run.states[0].left == allowed
    for client, most in enumerate(allowed):
        assert run.steps[client] <= most
        assert run.states[-1].left[client] == most - run.steps[client]
        # A client that can pay is asked, for as much of τ as it can pay for; one that cannot is not.
        left = most
        for state, orders in zip(run.states, run.orders, strict=False):
            assert (client in orders) == (left > 0)
            if left > 0:
                assert orders[client].steps == min(state.steps, left)
                left -= orders[client].steps


@unhurried
@given(case=systems(), seed=st.integers(0, 99))
def test_the_training_ends_with_the_rounds_or_the_budgets(case: Any, seed: Any) -> None:
    system, sizes = case
    run = trained(system, sizes, seed)
    most = max(allowed_steps(system, sizes))
    if system.rounds >= most:  # one step a round until nobody can pay
        assert {state.steps for state in run.states} == {1}
        assert len(run.orders) == most
    elif system.calibration == "tight":  # the steps are made to last
        assert len(run.orders) == system.rounds
    else:  # the paper spends as τ* asks, and stops at the first limit
        assert len(run.orders) == system.rounds or max(run.states[-1].left) == 0
        assert all(max(state.left) > 0 for state in run.states[:-1])
    assert all(order.steps >= 1 for orders in run.orders for order in orders.values())


@unhurried
@given(case=systems(), seed=st.integers(0, 99))
def test_tau_is_the_rounded_optimum_within_what_is_left(case: Any, seed: Any) -> None:
    system, sizes = case
    run = trained(system, sizes, seed)
    most = max(allowed_steps(system, sizes))
    assume(system.rounds < most)
    for k in range(1, len(run.states)):
        before, state = run.states[k - 1], run.states[k]
        if state.round >= state.rounds or len(run.orders[k - 1]) < len(sizes):
            continue
        limit = max(state.left)
        if system.calibration == "tight":
            limit = max(1, limit // (system.rounds - k))
            if k == 1:  # one gradient alone tells nothing about curvature
                assert state.steps == min(before.steps, limit)
                continue
            models = [one.model for one in run.states[k - 2 : k + 1]]
            earlier = (models[0] - models[1]) / (system.lr * run.states[k - 2].steps)
            later = (models[1] - models[2]) / (system.lr * before.steps)
            curvature = float(torch.dist(later, earlier) / torch.dist(models[1], models[0]))
        else:
            curvature = sum(n / sum(sizes) * run.curvatures[k - 1][i] for i, n in enumerate(sizes))
        wanted = tau(system, curvature, min(system.rounds * before.steps, most), min(sizes))
        assert state.steps == max(1, min(round(wanted), limit))


def tau(system: ALIDPFL, mu: float, total: float, smallest: int) -> float:
    """Return equation (9) as printed."""
    c, sigma, gamma = system.clip, system.noise_multiplier, system.heterogeneity
    batch = system.sampling_rate * smallest
    spread = sigma**2 * c**2 * DIM / batch**2
    above = 4 / mu**2 + 3 * c**2 + 2 * gamma * total * mu + spread
    return math.sqrt(1 + above / ((2 + 1 / total) * (c**2 + spread)))


def test_tau_by_hand() -> None:
    # μ = 2, C = 1, Γ = 3, T = 10, σ = 2, d = 9, B̂ = 3: σ²C²d/B̂² = 4; (1 + 3 + 120 + 4)/(2.1·5) = 128/10.5.
    found = optimal_local_steps(
        curvature=2.0, clip=1.0, heterogeneity=3.0, total_steps=10, noise_multiplier=2.0, dim=9, batch=3.0
    )
    assert found == pytest.approx(math.sqrt(1 + 128 / 10.5), rel=1e-12)
    # μ = 1/2, C = 2, Γ = 0, T = 1, σ = 1, d = 4, B̂ = 2: 4; (16 + 12 + 0 + 4)/(3·8) = 4/3.
    found = optimal_local_steps(
        curvature=0.5, clip=2.0, heterogeneity=0.0, total_steps=1, noise_multiplier=1.0, dim=4, batch=2.0
    )
    assert found == pytest.approx(math.sqrt(1 + 4 / 3), rel=1e-12)


@unhurried
@given(
    curvature=positive, clip=positive, heterogeneity=st.floats(0, 20), total_steps=st.integers(1, 1000),
    noise_multiplier=st.floats(0.1, 20), dim=st.integers(1, 10**6), batch=st.floats(0.1, 1000),
    factor=st.floats(1.5, 10),
)  # fmt: skip
def test_tau_rises_with_steps_and_batches_and_falls_with_the_clip(factor: Any, **facts: Any) -> None:
    def scaled(**changed: Any) -> float:
        return optimal_local_steps(**(facts | changed))

    now = scaled()
    assert now > 1
    assert scaled(total_steps=facts["total_steps"] * factor) > now
    assert scaled(heterogeneity=facts["heterogeneity"] + factor) > now
    rounding = now * (1 + 1e-12)  # where the noise is everything, or nothing, these stop mattering
    assert scaled(batch=facts["batch"] * factor) >= now / (1 + 1e-12)
    assert scaled(clip=facts["clip"] * factor) <= rounding
    assert scaled(noise_multiplier=facts["noise_multiplier"] * factor) <= rounding
    assert scaled(dim=facts["dim"] * 2) <= rounding


def test_the_smallest_client_sets_the_batch() -> None:
    # Through a whole adapt(): the same course of the training, with one client made smaller, asks for fewer steps.
    def chosen(sizes: tuple[int, ...]) -> int:
        system = ALIDPFL(
            rounds=5, sampling_rate=1.0, noise_multiplier=30.0, heterogeneity=1.0, clip=1.0, calibration="paper",
            epsilon=8.0,
        )  # fmt: skip
        problem = Problem(sizes, DIM, Schedule(system.cohorts(2), Streams(0).public))
        state = replace(system.begin(problem, torch.zeros(DIM), Feedback()), round=1)
        answers = {"curvature from the sum": {0: 0.1, 1: 0.1}}
        return system.adapt(
            state, Feedback(answered={0: torch.ones(DIM), 1: torch.ones(DIM)}, total=torch.ones(DIM), answers=answers)
        ).steps

    # B̂ = 300 and σ²C²d/B̂² = 0.04, or B̂ = 20 and 9: (400 + 3 + 1 + 0.04)/(2.2·1.04), (400 + 3 + 1 + 9)/(2.2·10).
    assert chosen((300, 300)) == round(math.sqrt(1 + 404.04 / 2.288)) == 13
    assert chosen((20, 580)) == chosen((580, 20)) == round(math.sqrt(1 + 413 / 22)) == 4


def test_clients_answer_for_the_curvature_by_their_records() -> None:
    system = ALIDPFL(rounds=5, sampling_rate=1.0, noise_multiplier=30.0, heterogeneity=0.0, calibration="paper")
    problem = Problem((100, 300), DIM, Schedule(system.cohorts(2), Streams(0).public))
    state = replace(system.begin(problem, torch.zeros(DIM), Feedback()), round=1)
    uploads = {0: torch.ones(DIM), 1: torch.ones(DIM)}
    told = system.adapt(
        state, Feedback(answered=uploads, total=uploads[0], answers={"curvature from the sum": {0: 0.04, 1: 0.12}})
    )
    # μ = (0.04 + 3·0.12)/4 = 0.1; 4/μ² = 400, σ²C²d/B̂² = 900·4/100² = 0.36.
    assert told.steps == round(math.sqrt(1 + (400 + 3 + 0.36) / (2.2 * 1.36))) == 12


@pytest.mark.parametrize("calibration", ["tight", "paper"])
def test_clients_with_smaller_budgets_stop_earlier_and_the_others_go_on(calibration: str) -> None:
    system = ALIDPFL(
        rounds=60, local_steps=2, sampling_rate=1.0, noise_multiplier=4.0, epsilon=(3.0, 12.0, 6.0),
        calibration=calibration, heterogeneity=0.0, clip=5.0,
    )  # fmt: skip
    run = trained(system, (40, 20, 30), seed=3)
    first, second, third = (sum(client in orders for orders in run.orders) for client in range(3))
    assert 0 < first < third < second == len(run.orders)
    steps = run.steps
    allowed = allowed_steps(system, (40, 20, 30))
    assert (steps[0], steps[2]) == (allowed[0], allowed[2])  # to the last step
    assert steps[1] <= allowed[1]


@each("rounds", [3, 7, 1000])
def test_sampled_batches_are_paid_for_to_the_last_step(rounds: int) -> None:
    system = ALIDPFL(rounds=rounds, local_steps=3, sampling_rate=0.5, noise_multiplier=1.2, epsilon=(4.0, 6.0))
    run = trained(system, (40, 20), seed=1)
    small, large = run.states[0].left
    assert 3 < small < large
    assert len(run.orders) == min(rounds, large)
    assert run.steps[0] <= small
    assert run.steps[1] <= large
    if rounds == 1000:
        assert (run.steps[0], run.steps[1]) == (small, large)
        assert {state.steps for state in run.states} == {1}


@each("told", [0.0, math.nan, math.inf])
def test_a_curvature_that_says_nothing_changes_nothing(told: float) -> None:
    system = ALIDPFL(rounds=5, local_steps=4, sampling_rate=1.0, calibration="paper")
    problem = Problem((100, 300), DIM, Schedule(system.cohorts(2), Streams(0).public))
    state = replace(system.begin(problem, torch.zeros(DIM), Feedback()), round=1)
    uploads = {0: torch.zeros(DIM), 1: torch.zeros(DIM)}
    assert (
        system.adapt(
            state, Feedback(answered=uploads, total=uploads[0], answers={"curvature from the sum": {0: told, 1: told}})
        ).steps
        == 4
    )


def test_models_that_do_not_move_change_nothing() -> None:
    system = ALIDPFL(rounds=9, local_steps=4, sampling_rate=1.0)
    problem = Problem((100, 300), DIM, Schedule(system.cohorts(2), Streams(0).public))
    state = system.begin(problem, torch.zeros(DIM), Feedback())
    uploads = {0: torch.zeros(DIM), 1: torch.zeros(DIM)}
    for round in (1, 2, 3):
        state = system.adapt(replace(state, round=round), Feedback(answered=uploads, total=uploads[0]))
        assert state.steps == 4


# ALI with τ = 1 and equal clients is DP-SGD on all records


class Known:
    """Noise that is known: the unit vectors that a test chose, in turn."""

    def __init__(self, units: Sequence[Tensor]) -> None:
        self.units = list(units)
        self.stds: list[float] = []

    def __call__(self, value: Tensor, law: Any, size: float, source: Any, *, relative_size: float) -> Tensor:
        self.stds.append(size)
        return value + size * self.units[len(self.stds) - 1]

    def summed(self, law: Any, sizes: Tensor, dim: int, *stream: Any) -> Tensor:
        """Return the sum of the noises in the uploads, whose sign is that of a step down."""
        return -sum(size * unit for size, unit in zip(sizes, self.units, strict=True))


def one_round(
    system: Any, clients: Sequence[Records], units: Sequence[Tensor], backend: str
) -> tuple[Tensor, list[float], Mapping]:
    module = nn.Linear(3, 1).double()
    model = Model(module, lambda outputs, targets: (outputs.squeeze(-1) - targets).square())
    model.load(torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64))
    streams, noise = Streams(4), Known(units)
    performers = ReferenceClients(model, tuple(clients), streams)
    if backend == "stacked":
        known = capabilities_of(model, clients[0])
        assert known.layers is not None
        performers = StackedClients(model, tuple(clients), streams, capabilities=known)  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpfl.clients.reference.add_noise", noise)
        patch.setattr("dpfl.clients.stacked.draw_sum", noise.summed)
        session = session_of(system, model, clients, streams, performers)
        state, outcome = play(session, session.begin())
    if backend == "stacked":  # no noise was added to an upload: their sum came with it
        assert noise.stds == []
        noise.stds = [order.noise.std for order in outcome.orders.values()]
    return state.model, noise.stds, outcome.orders


@each("backend", ["reference", "stacked"])
@each("clients", [2, 4, 9])
def test_one_step_at_equal_clients_is_a_central_step_with_the_noise_of_all(clients: int, backend: str) -> None:
    rng = np.random.default_rng(clients)
    shares = [Records(torch.from_numpy(rng.normal(size=(6, 3))), torch.from_numpy(rng.normal(size=6)))
              for _ in range(clients)]  # fmt: skip
    whole = Records(torch.cat([one.x for one in shares]), torch.cat([one.y for one in shares]))
    units = [torch.from_numpy(rng.normal(size=4)) for _ in shares]
    options = {"lr": 0.3, "clip": 0.7, "sampling_rate": 1.0, "epsilon": 8.0}
    apart, stds, orders = one_round(
        ALIDPFL(rounds=10**4, local_steps=1, noise_multiplier=2.0, **options), shares, units, backend
    )
    assert {order.steps for order in orders.values()} == {1}
    # The sum of N noises of σC is one of √N·σC; the sum of all gradients is divided by all records.
    together = [sum(units) / math.sqrt(clients)]
    central, central_stds, _ = one_round(
        DPSGDFedAvg(rounds=1, local_steps=1, noise_multiplier=2.0 * math.sqrt(clients), **options),
        [whole],
        together,
        backend,
    )
    torch.testing.assert_close(apart, central, rtol=1e-12, atol=1e-12)
    assert stds == pytest.approx([2.0 * 0.7] * clients)
    assert central_stds == pytest.approx([2.0 * 0.7 * math.sqrt(clients)])
