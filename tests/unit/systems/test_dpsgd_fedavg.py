"""FedAvg with DP-SGD: given noise ends with the budget, chosen noise lasts for all rounds; refusals."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpfl.config import parse
from dpfl.errors import BadInput, BudgetRefused
from dpfl.federation import Schedule, federate
from dpfl.orders import Full, Gaussian, Order, Poisson, RecordClip
from dpfl.privacy.accounting import Mechanism, tight
from dpfl.privacy.certificate import certify
from dpfl.privacy.gaussian_dp import mu_of
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.paper_formulas import ali_epsilon
from dpfl.repetitions import repeat
from dpfl.streams import Streams
from dpfl.systems import DPSGDFedAvg, Feedback, Problem
from dpfl.systems.dpsgd_fedavg import DPSGDState
from grids import each

SIZES = (10, 20)


def begin(system: DPSGDFedAvg, sizes: tuple[int, ...] = SIZES) -> DPSGDState:
    problem = Problem(sizes, 3, Schedule(system.cohorts(len(sizes)), Streams(0).public))
    return system.begin(problem, torch.zeros(3), Feedback())


def trained(system: DPSGDFedAvg, sizes: tuple[int, ...] = SIZES) -> tuple[Ledger, list[set[int]]]:
    """Play all rounds; return the ledger and who answered in each."""
    state, ledger, answered = begin(system, sizes), Ledger(system.promise(sizes), sizes), []
    while state.round < state.rounds:
        orders = system.orders(state)
        paid = ledger.charge(orders)
        assert paid.keys() == orders.keys()  # nobody is ever refused
        answered.append(set(paid))
        uploads = dict.fromkeys(paid, torch.zeros(3))
        state = system.adapt(replace(state, round=state.round + 1), Feedback(answered=uploads))
    return ledger, answered


def test_an_order_is_dpsgd_with_noise_in_every_step() -> None:
    system = DPSGDFedAvg(local_steps=4, lr=0.3, clip=2.0, sampling_rate=0.25, noise_multiplier=3.0, epsilon=2.0)
    expected = Order(
        steps=4, learning_rate=0.3, batch=Poisson(0.25), clip=RecordClip(2.0), noise=Gaussian(6.0), noise_on="step"
    )
    assert system.orders(begin(system)) == {0: expected, 1: expected}


def test_a_pull_and_a_divisor_change_the_steps_and_nothing_of_their_price() -> None:
    plain = DPSGDFedAvg(local_steps=3, clip=2.0, sampling_rate=0.25, noise_multiplier=3.0, epsilon=2.0)
    system = replace(plain, proximal=0.2, divisor=64.0)
    for client, order in system.orders(begin(system)).items():
        assert order == replace(plain.orders(begin(plain))[client], proximal=0.2, fixed_divisor=64.0)
        assert order.divisor(SIZES[client]) == 64.0
    assert begin(system).left == begin(plain).left
    assert begin(system).rounds == begin(plain).rounds
    for field, options in (("proximal", {"proximal": -1.0}), ("divisor", {"divisor": 0.0})):
        with pytest.raises(BadInput, match=f"^{field} must"):
            replace(plain, **options)


@each(("local_steps", "rounds"), [(1, 69), (2, 34), (10, 6), (69, 1)])
def test_with_given_noise_it_ends_when_the_steps_are_used_up(local_steps: int, rounds: int) -> None:
    # On full batches at σ = 4 a budget of (8, 1e-3) affords R_c = 69 steps.
    system = DPSGDFedAvg(rounds=500, local_steps=local_steps, sampling_rate=1.0, noise_multiplier=4.0)
    assert begin(system).left == (69, 69)
    assert begin(system).rounds == rounds == 69 // local_steps
    assert trained(system)[1] == [{0, 1}] * rounds
    assert begin(replace(system, rounds=1)).rounds == 1  # or when the rounds are


@pytest.mark.parametrize(("calibration", "accountant"), [("tight", tight), ("paper", ali_epsilon)])
def test_given_noise_on_sampled_batches(calibration: str, accountant: Any) -> None:
    system = DPSGDFedAvg(
        rounds=500, local_steps=3, sampling_rate=0.3, noise_multiplier=1.5, epsilon=3.0, calibration=calibration
    )
    most = begin(system).left[0]
    step = Mechanism("gaussian", 1.5, 0.3)
    assert accountant({step: most}, 1e-3) <= 3.0 < accountant({step: most + 1}, 1e-3)
    assert len(trained(system)[1]) == most // 3


def test_a_client_with_a_smaller_budget_stops_and_the_others_go_on() -> None:
    system = DPSGDFedAvg(rounds=500, local_steps=2, sampling_rate=1.0, noise_multiplier=4.0, epsilon=(4.0, 8.0))
    few, many = begin(system).left
    _, answered = trained(system)
    assert answered == [{0, 1}] * (few // 2) + [{1}] * (many // 2 - few // 2)


def test_a_cohort_ends_with_the_last_client_that_can_pay() -> None:
    system = DPSGDFedAvg(rounds=500, cohort=1, local_steps=10, sampling_rate=1.0, noise_multiplier=4.0)
    state = begin(system)
    cohorts = [state.problem.schedule.cohort(round)[0] for round in range(1, state.rounds + 1)]
    _, answered = trained(system)
    assert sorted(client for one in answered for client in one) == [0] * 6 + [1] * 6
    assert cohorts[-1] in answered[-1]  # no round is wasted at the end


@each(("rounds", "local_steps"), [(1, 1), (4, 3)])
@each("sampling_rate", [0.4, 1.0])
def test_chosen_noise_lasts_for_all_rounds_and_not_one_more(
    rounds: int, local_steps: int, sampling_rate: float
) -> None:
    system = DPSGDFedAvg(
        rounds=rounds, local_steps=local_steps, sampling_rate=sampling_rate, epsilon=(1.5, 6.0), delta=1e-4
    )
    state = begin(system)
    ledger, answered = trained(system)
    assert answered == [{0, 1}] * rounds
    for line, granted, z in zip(
        certify(ledger.books, ledger.run).spending, (1.5, 6.0), state.noise_multipliers, strict=True
    ):
        assert line.replies == rounds
        assert granted * (1 - 2e-3) <= line.server_epsilon <= granted
        step = Mechanism("gaussian", z, sampling_rate)
        assert tight({step: rounds * local_steps}, 1e-4) == pytest.approx(line.server_epsilon, rel=1e-5)
    with pytest.raises(BudgetRefused):
        ledger.charge(system.orders(state))


def test_chosen_noise_is_for_the_rounds_that_each_client_will_answer() -> None:
    system = DPSGDFedAvg(rounds=9, cohort=1, local_steps=2, sampling_rate=1.0)
    state = begin(system, (10, 10, 10))
    replies = state.problem.schedule.replies(1, 9)
    assert len(set(replies)) > 1
    whole = begin(DPSGDFedAvg(rounds=1, local_steps=1, sampling_rate=1.0)).noise_multipliers[0]
    assert state.noise_multipliers == pytest.approx([whole * math.sqrt(2 * max(1, n)) for n in replies], rel=1e-6)
    assert state.left == tuple(2 * max(1, int(n)) for n in replies)


@each("sampling_rate", [0.05, 0.5, 1.0])
def test_the_papers_noise_is_by_the_papers_formula_at_every_rate(sampling_rate: float) -> None:
    # At q = 1 Theorem 2 is min over α of T·α/(2σ²) + ln(1/δ)/(α − 1), which asks for more than the exact price.
    system = DPSGDFedAvg(rounds=5, local_steps=2, sampling_rate=sampling_rate, epsilon=4.0, calibration="paper")
    z = begin(system).noise_multipliers[0]

    def claimed(multiplier: float) -> float:
        return ali_epsilon({Mechanism("gaussian", multiplier, sampling_rate): 10}, 1e-3)

    assert claimed(z) <= 4.0 < claimed(z * (1 - 1e-4))


def test_the_promise_is_for_one_record_added_or_removed() -> None:
    for calibration in ("tight", "paper"):
        promise = DPSGDFedAvg(epsilon=(1.0, 2.0), calibration=calibration).promise((10, 10))
        assert (promise.unit, promise.neighbours, promise.noise) == ("record", "add-remove", "fixed")
        assert (promise.calibration, promise.uncounted) == (calibration, ())


def test_more_steps_a_round_than_any_budget_affords_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^local_steps must be at most the 69 that a budget affords in all, was 70"):
        begin(DPSGDFedAvg(local_steps=70, sampling_rate=1.0, noise_multiplier=4.0, epsilon=(1.0, 8.0)))


def test_noise_too_small_for_any_step_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^noise_multiplier must be large enough for one step"):
        begin(DPSGDFedAvg(sampling_rate=1.0, noise_multiplier=0.1, epsilon=1.0))


@each(
    ("options", "field"),
    [
        ({"rounds": 0}, "rounds"),
        ({"local_steps": 0}, "local_steps"),
        ({"lr": 0.0}, "lr"),
        ({"lr": None}, "lr"),
        ({"clip": 0.0}, "clip"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"sampling_rate": 1.5}, "sampling_rate"),
        ({"sampling_rate": None}, "sampling_rate"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"calibration": "loose"}, "calibration"),
        ({"cohort": 0}, "cohort"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} must "):
        DPSGDFedAvg(**options)


def test_an_option_that_it_does_not_take_is_refused_with_those_it_does() -> None:
    with pytest.raises(BadInput, match=r"^heterogeneity must .* dpsgd-fedavg takes .*local_steps.*noise_multiplier"):
        parse({"system": "dpsgd-fedavg", "heterogeneity": 1.0})


def moved(system: DPSGDFedAvg, updates: list[float]) -> list[float]:
    """Return the models that the server sends out, where each round's weighted sum of updates is given."""
    model, memory, models = torch.zeros(3), None, []
    for round, update in enumerate(updates, start=1):
        model, memory = system.optimiser.step(
            model, torch.full((3,), update), memory, round=round, rounds=system.rounds
        )
        models.append(float(model[0]))
    return models


def test_momentum_takes_a_part_of_the_last_step_again() -> None:
    system = DPSGDFedAvg(rounds=4, epsilon=2.0, server_momentum=0.5)
    assert moved(system, [1.0, 1.0, 0.0, 0.0]) == pytest.approx([1.0, 2.5, 3.25, 3.625])
    plain = DPSGDFedAvg(rounds=4, epsilon=2.0)
    assert moved(plain, [1.0, 1.0, 0.0, 0.0]) == pytest.approx([1.0, 2.0, 2.0, 2.0])


def test_the_result_can_be_the_mean_of_the_last_models() -> None:
    system = DPSGDFedAvg(rounds=4, epsilon=2.0, averaged=0.5)
    assert moved(system, [1.0, 1.0, 1.0, 3.0]) == pytest.approx([1.0, 2.0, 3.0, (3.0 + 6.0) / 2])
    both = DPSGDFedAvg(rounds=4, epsilon=2.0, averaged=0.5, server_momentum=0.5)
    assert moved(both, [1.0, 1.0, 0.0, 0.0])[-1] == pytest.approx((3.25 + 3.625) / 2)


def test_what_the_server_remembers_costs_no_privacy() -> None:
    plain = DPSGDFedAvg(rounds=5, epsilon=2.0)
    clever = replace(plain, server_momentum=0.9, averaged=0.5)
    assert plain.orders(begin(plain)) == clever.orders(begin(clever))
    (one, _), (other, _) = trained(plain), trained(clever)
    assert certify(one.books, one.run).observers == certify(other.books, other.run).observers


def test_all_records_in_every_step_are_priced_as_plain_noise() -> None:
    system = DPSGDFedAvg(rounds=9, epsilon=2.0, delta=1e-5, sampling_rate=1.0)
    order = system.orders(begin(system))[0]
    assert order.batch == Full()
    assert isinstance(order.noise, Gaussian)
    mu = float(mu_of(2.0, 1e-5))
    assert order.noise.std == pytest.approx(3 / mu, rel=1e-6)  # √9 releases of sensitivity 1


@each(("field", "value"), [("server_momentum", 1.0), ("averaged", -0.1), ("averaged", 1.0)])
def test_parts_are_parts(field: str, value: float) -> None:
    with pytest.raises(BadInput, match=f"{field} must be at least 0 and below 1"):
        DPSGDFedAvg(**{field: value})


def test_such_a_system_is_repeated_as_one_program_too() -> None:
    hospitals = federate("digits", clients=2, seed=1)
    quiet = DPSGDFedAvg(rounds=4, epsilon=1e6, sampling_rate=1.0, server_momentum=0.5, averaged=0.5)
    (found,) = repeat(quiet, hospitals, repetitions=2, seed=1)
    assert found.losses[0] != found.losses[1]  # each starts from a model of its own
    plain = replace(quiet, server_momentum=0.0, averaged=0.0)
    assert repeat(plain, hospitals, repetitions=2, seed=1)[0].losses != found.losses
