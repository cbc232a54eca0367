"""The ledger charges before anything happens, refuses what it cannot pay or price, and never counts too little."""

import math
import sqlite3
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfl.errors import BadInput, BudgetRefused
from dpfl.orders import GRID_SHARE, ClientClip, Gaussian, Laplace, Order, Poisson, RecordClip
from dpfl.privacy.accounting import Mechanism, tight
from dpfl.privacy.books import Books, Grant, Release
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.gaussian_dp import mu_of
from dpfl.privacy.ledger import Charged, Ledger, release_of
from grids import each


def promise(*granted: Budget, **changes: Any) -> Promise:
    usual = {"budgets": granted, "unit": "record", "neighbours": "replace", "calibration": "tight"}
    return Promise(**usual | changes)


def order(std: float, **changes: Any) -> Order:
    """Return a step with η = 0.5 and C = 1, so Δ = 2ηC/n = 1/n for a replaced record."""
    return Order(**({"steps": 1, "learning_rate": 0.5, "clip": RecordClip(1.0), "noise": Gaussian(std)} | changes))


def laplace(scale: float, **changes: Any) -> Order:
    """Return a step with an L1 clip, so that Δ₁ = 1/n for a replaced record: ε = 1/(n·scale)."""
    return order(1.0, noise=Laplace(scale), clip=RecordClip(1.0, 1), **changes)


GRANTED = Budget(8.0, 1e-3)
WORTH = float(mu_of(8.0, 1e-3)) ** 2  # of GRANTED, in μ²


def std_for(price: float, records: int) -> float:
    """Return the noise at which `order` costs this much: (1/n/σ)² = price."""
    return 1 / records / math.sqrt(price)


def price_of(one: Order, records: int, **changes: Any) -> float:
    """Return what a plain Gaussian order costs in μ²."""
    release = release_of(one, records, **({"unit": "record", "neighbours": "replace"} | changes))
    return release.count * release.mechanism.mu_squared


def spent(ledger: Ledger) -> dict[int, float]:
    """Return what each client has spent in this run, in μ²."""
    found = ledger.books.spent(ledger.run)
    return {client: math.fsum(n * one.mu_squared for one, n in seen.items()) for client, seen in found.items()}


def replies(ledger: Ledger) -> dict[int, int]:
    return ledger.books.replies(ledger.run)


def epsilon(ledger: Ledger, client: int = 0) -> float:
    """Return what a client has spent, at the δ it was promised."""
    return tight(ledger.books.spent(ledger.run)[client], ledger.promise.budgets[client].delta)


def charge_to_the_end(ledger: Ledger, *orders: Order) -> int:
    """Charge client 0 for one order after the other until its budget refuses; return how many rounds it paid for."""
    for rounds, one in enumerate(cycle(orders)):
        try:
            ledger.charge({0: one})
        except BudgetRefused:
            return rounds
    raise AssertionError


# Receipts.


def test_clients_with_one_order_and_size_share_a_receipt() -> None:
    ledger = Ledger(promise(GRANTED, GRANTED, GRANTED), (10, 10, 30))
    one = order(0.2)
    paid = ledger.charge({0: one, 1: one, 2: one})
    assert paid == {0: Charged(one, 10), 1: Charged(one, 10), 2: Charged(one, 30)}
    assert paid[0] is paid[1]


# What a plain order costs.


def test_a_charge_is_sensitivity_over_noise_squared() -> None:
    # Δ = 1/10 and 1/20: with σ = 0.2, (Δ/σ)² is 1/4 and 1/16.
    ledger = Ledger(promise(GRANTED, GRANTED, GRANTED), (10, 20, 30))
    paid = ledger.charge({0: order(0.2), 1: order(0.2)})
    assert paid == {0: Charged(order(0.2), 10), 1: Charged(order(0.2), 20)}
    assert spent(ledger) == pytest.approx({0: 0.25, 1: 0.0625})
    ledger.charge({1: order(0.1)})  # twice the precision, four times the price
    assert spent(ledger) == pytest.approx({0: 0.25, 1: 0.0625 + 0.25})
    assert replies(ledger) == {0: 1, 1: 2}


def test_the_price_follows_the_unit() -> None:
    # All ten records replaced move the upload ten times as far: Δ = 2ηC = 1.
    assert price_of(order(0.2), 10) == pytest.approx(0.25)
    assert price_of(order(0.2), 10, unit="client") == pytest.approx(25.0)


def test_a_client_gradient_costs_the_same_whatever_the_number_of_records() -> None:
    clipped = order(2.0, clip=ClientClip(1.0))  # Δ = 2ηC = 1
    assert price_of(clipped, 10) == price_of(clipped, 1000) == pytest.approx(0.25)


def test_noise_in_every_step_costs_steps_times_one() -> None:
    # On the sum Δ = 2C = 2; σ = 4 makes (2/4)² = 1/4 a step.
    five = order(4.0, steps=5, noise_on="step")
    assert price_of(five, 10) == pytest.approx(5 * 0.25)
    ledger = Ledger(promise(GRANTED), (10,))
    ledger.charge({0: five})
    assert spent(ledger) == pytest.approx({0: 1.25})
    assert replies(ledger) == {0: 1}


def test_a_count_is_paid_for_with_its_upload_and_both_know_their_noise() -> None:
    one = order(0.2, count_noise=Gaussian(5.0))
    ledger = Ledger(promise(GRANTED), (10,))
    paid = ledger.charge({0: one})[0]
    assert spent(ledger) == pytest.approx({0: 0.25 + 0.04})
    assert (paid.relative_noise, paid.relative_count_noise) == pytest.approx((2.0, 5.0))
    assert ledger.charge({0: order(0.2)})[0].count_sensitivity is None
    unpaid = Ledger(None, (10,)).charge({0: one})[0]
    for relative in ("relative_noise", "relative_count_noise"):
        with pytest.raises(BadInput, match="noise must be paid for before it is drawn"):
            getattr(unpaid, relative)


def test_counts_that_no_model_follows_tell_readers_nothing_and_eavesdroppers_what_they_hear() -> None:
    ledger = Ledger(promise(GRANTED, GRANTED, against=("uplink", "released"), exposures=1), (10, 10))
    for _ in range(2):
        ledger.charge(dict.fromkeys((0, 1), order(0.2, count_noise=Gaussian(5.0))))
        ledger.broadcast({0: 0.5, 1: 0.5})
    released, overheard = ledger.books.released(ledger.run), ledger.books.overheard(ledger.run, 1)
    assert released is not None
    told = 0.25 / 2  # of an upload under twice the variance
    for found, expected in ((released, 2 * told), (overheard, told + 0.25 + 0.04)):
        assert math.fsum(n * one.mu_squared for one, n in found[0].items()) == pytest.approx(expected, rel=1e-5)


def test_each_clients_epsilon_is_at_its_own_delta() -> None:
    ledger = Ledger(promise(Budget(50.0, 1e-2), Budget(50.0, 1e-9)), (10, 10))
    ledger.charge({0: order(0.1), 1: order(0.1)})  # both at μ = 1
    # A release with μ = 1 is (4.378, 1e-5)-DP; a larger δ costs less, a smaller one more.
    assert epsilon(ledger, 0) < 4.378 < epsilon(ledger, 1)


# What an order lets out.


ADDED, REPLACED = ("record", "add-remove"), ("record", "replace")

# Of a client with 100 records; η = 0.5 and C = 1.
LETS_OUT = [
    # A step of 20 expected records: the clipped sum moves by C = 1 under σ = 3, and η/20 = 0.025 is left of both.
    (order(3.0, batch=Poisson(0.2), noise_on="step"), ADDED, Release(Mechanism("gaussian", 3.0, 0.2), 1, 0.075, 0.025)),
    # On the upload of one step it is the same release: the update moves by ηC/20 = 0.025 under σ = 0.05.
    (order(0.05, batch=Poisson(0.2)), ADDED, Release(Mechanism("gaussian", 2.0, 0.2), 1, 0.05, 0.025)),
    # Several noised steps are amplified one by one, and later ones train on the noise of earlier ones.
    (order(3.0, batch=Poisson(0.2), noise_on="step", steps=4), ADDED, Release(Mechanism("gaussian", 3.0, 0.2), 4)),
    # Several steps under one noise saw several batches: ηC/20·(1 + 201) = 5.05, and no amplification.
    (order(10.1, batch=Poisson(0.2), steps=2), ADDED, Release(Mechanism("gaussian", 2.0), 1, 10.1, 5.05)),
    # A replaced record moves the update twice as far, 0.05, and is not sampled like one that is not there.
    (order(0.1, batch=Poisson(0.2)), REPLACED, Release(Mechanism("gaussian", 2.0), 1, 0.1, 0.05)),
    # All 100 records of a client move it by ηC·100/20 = 2.5: some of them are in every batch.
    (order(5.0, batch=Poisson(0.2)), ("client", "add-remove"), Release(Mechanism("gaussian", 2.0), 1, 5.0, 2.5)),
    # A full batch: the sum moves by 2C = 2 under σ = 8, of which η/100 = 0.005 is left.
    (order(8.0, noise_on="step"), REPLACED, Release(Mechanism("gaussian", 4.0), 1, 0.04, 0.01)),
    # A clipped client gradient is not divided: 2C = 2 under σ = 8, times η.
    (order(8.0, noise_on="step", clip=ClientClip(1.0)), REPLACED, Release(Mechanism("gaussian", 4.0), 1, 4.0, 1.0)),
    # A count beside it: 1 under σ = 4 for a replaced record, ½ for one that is not there, 100 for a client. What 3 and
    # 4 cost together 2.4 costs alone.
    (order(0.03, count_noise=Gaussian(4.0)), REPLACED, Release(Mechanism("gaussian", 2.4), 1, 0.03, 0.01)),
    (
        order(0.015, count_noise=Gaussian(2.0)),
        ADDED,
        Release(Mechanism("gaussian", 2.4), 1, 0.015, 0.005),
    ),
    (
        order(3.0, count_noise=Gaussian(400.0)),
        ("client", "replace"),
        Release(Mechanism("gaussian", 2.4), 1, 3.0, 1.0),
    ),
    # Of a sampled batch both are, so that they are one sampled release.
    (
        order(0.075, batch=Poisson(0.2), count_noise=Gaussian(2.0)),
        ADDED,
        Release(Mechanism("gaussian", 2.4, 0.2), 1, 0.075, 0.025),
    ),
    (
        order(3.0, batch=Poisson(0.2), noise_on="step", count_noise=Gaussian(2.0)),
        ADDED,
        Release(Mechanism("gaussian", 2.4, 0.2), 1, 0.075, 0.025),
    ),
    # Laplace noise is priced by the L1 clip (ηC/100·2 = 0.01, or ηC/20 = 0.025), and its sums have no closed form.
    (laplace(0.03), REPLACED, Release(Mechanism("laplace", 3.0), 1)),
    (laplace(0.075, batch=Poisson(0.2)), ADDED, Release(Mechanism("laplace", 3.0, 0.2), 1)),
]


@each(("one", "promised", "released"), LETS_OUT)
def test_an_order_lets_out_what_its_clip_batch_and_noise_say(
    one: Order, promised: tuple[Any, Any], released: Release
) -> None:
    unit, neighbours = promised
    found = release_of(one, 100, unit=unit, neighbours=neighbours)
    mechanism, expected = found.mechanism, released.mechanism
    assert (mechanism.noise, mechanism.sampling_rate) == (expected.noise, expected.sampling_rate)
    assert mechanism.multiplier == pytest.approx(expected.multiplier)
    assert found.count == released.count
    assert (found.noise_std, found.sensitivity) == pytest.approx((released.noise_std, released.sensitivity))


# A budget in Gaussian DP.


def test_a_budget_pays_to_its_end_and_then_refuses() -> None:
    third = order(std_for(WORTH / 3.001, 10))
    ledger = Ledger(promise(GRANTED), (10,))
    for _ in range(3):
        assert list(ledger.charge({0: third})) == [0]
    before = spent(ledger)
    with pytest.raises(BudgetRefused, match=r"budget of all 1 clients.* 3 rounds.*raise epsilon"):
        ledger.charge({0: third})
    assert spent(ledger) == before
    assert replies(ledger) == {0: 3}
    assert 7.99 < epsilon(ledger) <= 8.0


def test_a_budget_pays_for_exactly_its_worth() -> None:
    # μ² = 1/4 four times is 1 without any rounding; the budget is what μ = 1 costs, and a little less is too little.
    at_one = tight({Mechanism("gaussian", 1.0): 1}, 1e-5)
    quarter = order(2.0, clip=ClientClip(1.0))
    enough, short = (Ledger(promise(Budget(at_one * factor, 1e-5)), (10,)) for factor in (1 + 1e-6, 1 - 1e-6))
    for _ in range(3):
        enough.charge({0: quarter})
        short.charge({0: quarter})
    assert list(enough.charge({0: quarter})) == [0]
    with pytest.raises(BudgetRefused):
        short.charge({0: quarter})


def test_a_client_that_cannot_pay_sits_out_and_the_others_go_on() -> None:
    dear = order(std_for(0.6 * WORTH, 10))
    ledger = Ledger(promise(GRANTED, Budget(80.0, 1e-3)), (10, 10))
    assert sorted(ledger.charge({0: dear, 1: dear})) == [0, 1]
    assert sorted(ledger.charge({0: dear, 1: dear})) == [1]
    assert spent(ledger) == pytest.approx({0: 0.6 * WORTH, 1: 1.2 * WORTH})
    assert replies(ledger) == {0: 1, 1: 2}


def test_a_refused_client_may_still_pay_for_something_cheaper() -> None:
    ledger = Ledger(promise(GRANTED), (10,))
    ledger.charge({0: order(std_for(0.9 * WORTH, 10))})
    with pytest.raises(BudgetRefused):
        ledger.charge({0: order(std_for(0.2 * WORTH, 10))})
    assert list(ledger.charge({0: order(std_for(0.09 * WORTH, 10))})) == [0]


def test_a_price_beyond_all_numbers_is_refused_like_any_other() -> None:
    ledger = Ledger(promise(GRANTED), (10,))
    with pytest.raises(BudgetRefused):
        ledger.charge({0: order(1e-200)})
    assert spent(ledger) == replies(ledger) == {}


def test_a_price_beyond_all_numbers_is_recorded_where_nothing_is_limited() -> None:
    ledger = Ledger(promise(GRANTED, calibration="paper"), (10,))
    ledger.charge({0: order(1e-200)})
    assert epsilon(ledger) == math.inf


def test_a_round_without_clients_is_no_refusal() -> None:
    assert Ledger(promise(GRANTED), (10,)).charge({}) == {}


def test_what_was_spent_is_never_less_than_the_releases_cost() -> None:
    rng = np.random.default_rng(0)
    ledger = Ledger(promise(GRANTED), (10,))
    prices = []
    for share in rng.uniform(0, 0.05, 200):
        one = order(std_for(share * WORTH, 10))
        try:
            ledger.charge({0: one})
        except BudgetRefused:
            continue
        prices.append((0.1 / one.noise.std) ** 2)
    assert 20 < len(prices) < 200
    assert spent(ledger)[0] >= math.fsum(prices) * (1 - 1e-12)
    assert spent(ledger)[0] <= WORTH
    assert 7.5 < epsilon(ledger) <= 8.0


@pytest.mark.parametrize("noise", ["fixed", "adaptive"])
def test_plain_noise_may_change_from_round_to_round_at_no_higher_price(noise: str) -> None:
    # Shares of 1/2, 1/3 and 1/6 are the whole, whatever the order and whether or not they were planned.
    ledger = Ledger(promise(GRANTED, noise=noise), (10,))
    for share in (1 / 2, 1 / 3, 1 / 6):
        ledger.charge({0: order(std_for(share * WORTH * (1 - 1e-9) / (1 + GRID_SHARE) ** 2, 10))})
    with pytest.raises(BudgetRefused):
        ledger.charge({0: order(std_for(1e-6 * WORTH, 10))})
    assert epsilon(ledger) == pytest.approx(8.0, rel=1e-6)


def test_gaussian_noise_cannot_be_paid_at_a_delta_of_zero() -> None:
    with pytest.raises(BudgetRefused, match="0 rounds"):
        Ledger(promise(Budget(8.0, 0.0)), (10,)).charge({0: order(1000.0)})


# Laplace noise.


def test_laplace_noise_adds_up_to_a_pure_epsilon() -> None:
    # 1/10 under a scale of 0.2 is ε = 1/2 a round: a budget of 2 pays for four.
    ledger = Ledger(promise(Budget(2.0, 0.0)), (10,))
    for _ in range(4):
        ledger.charge({0: laplace(0.2)})
    assert epsilon(ledger) == pytest.approx(2.0 * (1 + GRID_SHARE), rel=1e-12)
    with pytest.raises(BudgetRefused, match="4 rounds"):
        ledger.charge({0: laplace(0.2)})


def test_at_a_positive_delta_laplace_noise_is_counted_by_its_losses() -> None:
    # ε = 1/100 a round and a budget of 1: a hundred rounds in pure ε, and more where δ pays for the tail.
    ledger = Ledger(promise(Budget(1.0, 1e-5)), (10,))
    rounds = charge_to_the_end(ledger, laplace(10.0))
    ((mechanism, times),) = ledger.books.spent(ledger.run)[0].items()
    assert (mechanism.noise, mechanism.multiplier, times) == ("laplace", pytest.approx(100.0), rounds)
    assert rounds > 300
    assert tight({mechanism: rounds}, 1e-5) <= 1.0 < tight({mechanism: rounds + 1}, 1e-5)


def test_adaptive_laplace_noise_is_paid_in_pure_epsilon_or_gaussian_dp_and_never_both() -> None:
    budget = Budget(1.0, 1e-5)
    ledger = Ledger(promise(budget, noise="adaptive"), (10,))
    ledger.charge({0: laplace(0.4)})  # ε = 1/4
    ledger.charge({0: laplace(0.2)})  # ε = 1/2
    with pytest.raises(BudgetRefused):
        ledger.charge({0: laplace(0.39)})
    assert list(ledger.charge({0: laplace(0.4)})) == [0]
    assert epsilon(ledger) <= 1.0 + GRID_SHARE


# Sampled batches.

SAMPLED = {"batch": Poisson(0.015), "noise_on": "step"}
SAMPLING = {"unit": "record", "neighbours": "add-remove"}


def test_sampled_noise_that_was_fixed_is_counted_by_its_losses() -> None:
    # At σ/C = 1.1, q = 0.015 and δ = 1e-5, 422 steps are within ε = 1.55 and 423 are not.
    ledger = Ledger(promise(Budget(1.55, 1e-5), **SAMPLING), (1000,))
    for _ in range(422):
        ledger.charge({0: order(1.1, **SAMPLED)})
    with pytest.raises(BudgetRefused, match="422 rounds"):
        ledger.charge({0: order(1.1, **SAMPLED)})
    ((mechanism, steps),) = ledger.books.spent(ledger.run)[0].items()
    assert (mechanism.multiplier, mechanism.sampling_rate, steps) == (pytest.approx(1.1), 0.015, 422)
    assert epsilon(ledger) <= 1.55


def test_every_noised_step_of_a_round_is_counted() -> None:
    # 422 steps are 84 rounds of five; two more steps would fit, a round does not.
    ledger = Ledger(promise(Budget(1.55, 1e-5), **SAMPLING), (1000,))
    for _ in range(84):
        ledger.charge({0: order(2.2, **SAMPLED, clip=RecordClip(2.0), steps=5)})
    with pytest.raises(BudgetRefused, match="84 rounds"):
        ledger.charge({0: order(2.2, **SAMPLED, clip=RecordClip(2.0), steps=5)})


@each("other", [{"std": 1.0}, {"std": 1.1, "batch": Poisson(0.016)}, {"std": 1.1, "batch": None}])
def test_sampled_noise_that_was_fixed_may_not_shrink_and_its_batches_may_not_change(other: dict[str, Any]) -> None:
    ledger = Ledger(promise(Budget(1.55, 1e-5), **SAMPLING), (1000,))
    ledger.charge({0: order(1.1, **SAMPLED)})
    changed = {key: value for key, value in (SAMPLED | other).items() if value is not None}
    with pytest.raises(
        BadInput, match=r"must stay gaussian of multiplier 1\.1 at rate 0\.015.*promise noise='adaptive'"
    ):
        ledger.charge({0: order(changed.pop("std"), **changed)})
    assert replies(ledger) == {0: 1}


def test_plain_noise_may_not_turn_into_sampled_noise() -> None:
    ledger = Ledger(promise(GRANTED, **SAMPLING), (1000,))
    ledger.charge({0: order(4.0, noise_on="step")})
    with pytest.raises(BadInput, match=r"must be on all records, was gaussian of multiplier 4 at rate 0\.015"):
        ledger.charge({0: order(4.0, **SAMPLED)})
    assert replies(ledger) == {0: 1}


def test_adaptive_sampled_noise_never_costs_more_than_the_budget() -> None:
    ledger = Ledger(promise(Budget(4.0, 1e-5), **SAMPLING, noise="adaptive"), (1000,))
    pairs = product((1.1, 1.6), (0.015, 0.03))
    charge_to_the_end(ledger, *(order(std, batch=Poisson(q), noise_on="step", steps=20) for std, q in pairs))
    assert len(ledger.books.spent(ledger.run)[0]) == 4
    assert 2.0 < epsilon(ledger) <= 4.0  # a filter costs something, but not half


def test_what_may_change_pays_for_less_than_what_was_fixed() -> None:
    def rounds(noise: str) -> int:
        ledger = Ledger(promise(Budget(4.0, 1e-5), **SAMPLING, noise=noise), (1000,))
        return charge_to_the_end(ledger, order(1.1, **SAMPLED, steps=100))

    fixed = rounds("fixed")
    assert fixed / 2 < rounds("adaptive") < fixed


# A promise against an eavesdropper.


@pytest.mark.parametrize("noise", ["fixed", "adaptive"])
def test_against_the_uplink_a_few_uploads_are_paid_and_all_models(noise: str) -> None:
    # Among ten alike a model tells a tenth of an upload: 4 that are heard and 60 that are read make the budget of 10.
    crowd = promise(*[GRANTED] * 10, against=("uplink",), exposures=4, noise=noise)
    ledger = Ledger(crowd, (10,) * 10)
    alike = dict.fromkeys(range(10), order(std_for(WORTH / 10.001, 10)))
    for _ in range(64):
        assert sorted(ledger.charge(alike)) == list(range(10))
        ledger.broadcast(dict.fromkeys(range(10), 1 / 10))
    assert 7.98 < tight(ledger.books.overheard(ledger.run, 4)[0], 1e-3) <= 8.0
    assert epsilon(ledger) > 8.0  # the server, which is not promised anything, saw all of them
    with pytest.raises(BudgetRefused):  # which might be heard instead of one before
        ledger.charge(alike)
    quieter = dict.fromkeys(range(10), order(std_for(WORTH / 11.2, 10)))  # no more than one that was heard brought
    assert sorted(ledger.charge(quieter)) == list(range(10))
    with pytest.raises(
        BudgetRefused, match=r"the model after round 65 must tell no more of client 0 than .* order more"
    ):
        ledger.broadcast(dict.fromkeys(range(10), 1 / 10))
    assert tight(ledger.books.overheard(ledger.run, 4)[0], 1e-3) <= 8.0  # what was kept back is in no book
    ledger.pass_over()
    assert ledger.books.rounds(ledger.run) == 66


def test_against_the_uplink_noise_of_the_server_is_counted() -> None:
    # Alone a model tells all of an upload; with three times the upload's variance from the server, a quarter.
    std = std_for(WORTH / 2.001, 10)
    alone, helped = (Ledger(promise(GRANTED, against=("uplink",), exposures=1), (10,)) for _ in range(2))
    for _ in range(2):
        alone.charge({0: order(std)})
        alone.broadcast({0: 1.0})
    with pytest.raises(BudgetRefused):
        alone.charge({0: order(std)})
    for _ in range(5):  # 1 + 4/4
        helped.charge({0: order(std)})
        helped.broadcast({0: 1.0}, noise_std=math.sqrt(3) * std)
    helped.charge({0: order(1.16 * std)})
    with pytest.raises(BudgetRefused, match="let the server add some"):
        helped.broadcast({0: 1.0})
    helped.broadcast({0: 0.0})


@pytest.mark.parametrize("noise", ["fixed", "adaptive"])
def test_where_models_follow_uploads_an_eavesdropper_is_priced_as_the_server(noise: str) -> None:
    ledger = Ledger(promise(GRANTED, against=("uplink",), exposures=1, noise=noise), (10,), follows_uploads=True)
    for _ in range(4):
        ledger.charge({0: order(std_for(WORTH / 4.001, 10))})
    with pytest.raises(BudgetRefused):
        ledger.charge({0: order(std_for(WORTH / 4.001, 10))})


@pytest.mark.parametrize(
    "hidden",
    [
        order(1.1, batch=Poisson(0.015)),
        order(3.0, noise_on="step", steps=2),
        laplace(1.0),
    ],
)
def test_what_no_model_hides_cannot_be_promised_against_the_uplink_alone(hidden: Order) -> None:
    terms = {"neighbours": "add-remove", "against": ("uplink",), "exposures": 1}
    with pytest.raises(BadInput, match=r"plain sums with Gaussian noise on them.*; promise against the server"):
        Ledger(promise(GRANTED, **terms), (1000,)).charge({0: hidden})


@pytest.mark.parametrize("against", [("server",), ("server", "uplink")])
def test_a_promise_against_the_server_counts_every_upload(against: tuple[str, ...]) -> None:
    quarter = order(std_for(WORTH / 4.001, 10))
    ledger = Ledger(promise(GRANTED, against=against, exposures=2), (10,))
    for _ in range(4):
        ledger.charge({0: quarter})
    with pytest.raises(BudgetRefused):
        ledger.charge({0: quarter})


# What cannot be priced.


@each(
    ("unpriced", "reason"),
    [
        (order(1.0, noise=None), "noise must be set where privacy is promised, was None"),
        (order(1.0, clip=None), "clip must be set where privacy is promised, was None"),
        (order(1.0, noise=Laplace(1.0)), "clip must be in the L1 norm for an L1 sensitivity"),
    ],
)
@each("calibration", ["tight", "paper"])
def test_what_cannot_be_priced_is_refused_in_a_sentence(unpriced: Order, reason: str, calibration: str) -> None:
    ledger = Ledger(promise(GRANTED, calibration=calibration), (10,))
    with pytest.raises(BadInput, match=reason):
        ledger.charge({0: unpriced})
    assert spent(ledger) == replies(ledger) == {}


def test_an_order_that_cannot_be_priced_leaves_everybodys_books_alone() -> None:
    ledger = Ledger(promise(GRANTED, GRANTED), (10, 10))
    with pytest.raises(BadInput):
        ledger.charge({0: order(1.0), 1: order(1.0, noise=None)})
    assert spent(ledger) == replies(ledger) == {}


def test_a_client_whose_noise_changed_leaves_everybodys_books_alone() -> None:
    budget = Budget(1.55, 1e-5)
    ledger = Ledger(promise(budget, budget, **SAMPLING), (1000, 1000))
    ledger.charge(dict.fromkeys((0, 1), order(1.1, **SAMPLED)))
    with pytest.raises(BadInput, match="must stay"):
        ledger.charge({0: order(1.1, **SAMPLED), 1: order(1.0, **SAMPLED)})
    assert replies(ledger) == {0: 1, 1: 1}


# Where nothing is limited.


def test_the_papers_calibration_is_recorded_and_not_limited() -> None:
    ledger = Ledger(promise(GRANTED, calibration="paper"), (10,))
    for _ in range(3):
        ledger.charge({0: order(std_for(WORTH, 10))})
    assert spent(ledger) == pytest.approx({0: 3 * WORTH})
    assert epsilon(ledger) > 8.0


def test_without_a_promise_nothing_is_charged_and_nothing_is_protected() -> None:
    ledger = Ledger(None, (10, 20))
    plain = Order(steps=5, learning_rate=0.5, batch=Poisson(0.5))
    assert ledger.charge({1: plain}) == {1: Charged(plain, 20)}
    assert spent(ledger) == {}
    assert replies(ledger) == {1: 1}
    assert ledger.books.unprotected(ledger.run) == {1}  # client 0 has uploaded nothing yet


def test_clients_that_answered_nothing_have_spent_nothing() -> None:
    ledger = Ledger(promise(GRANTED, GRANTED), (10, 10))
    assert spent(ledger) == replies(ledger) == {}


# What is on disk, and when.


def test_a_charge_is_on_disk_when_the_orders_are_handed_out(tmp_path: Path) -> None:
    ledger = Ledger(promise(GRANTED, GRANTED), (10, 20), books=Books(tmp_path / "l.sqlite"))
    for rounds in (1, 2):
        ledger.charge({0: order(0.2), 1: order(0.2)})
        read = Books(tmp_path / "l.sqlite")
        assert read.replies(read.run(ledger.run.name)) == {0: rounds, 1: rounds}
        assert read.spent(read.run(ledger.run.name)) == ledger.books.spent(ledger.run)
        read.close()


@pytest.mark.parametrize("problem", [sqlite3.OperationalError("disk is full"), KeyboardInterrupt()])
def test_a_round_that_was_not_written_was_not_charged_and_may_be_charged_again(
    problem: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(promise(GRANTED), (10,))
    half = order(std_for(0.4 * WORTH, 10))

    def fail(*_: object) -> None:
        raise problem

    with monkeypatch.context() as broken:
        broken.setattr(ledger.books, "add_charges", fail)
        with pytest.raises((BadInput, KeyboardInterrupt)):
            ledger.charge({0: half})
    assert spent(ledger) == {}
    ledger.charge({0: order(std_for(0.5 * WORTH, 10))})  # takes the number that the failed one would have had
    ledger.charge({0: half})
    assert spent(ledger) == pytest.approx({0: 0.9 * WORTH})
    assert ledger.books.rounds(ledger.run) == 2


def test_what_was_weighed_is_noted_with_its_own_round(tmp_path: Path) -> None:
    # In round 1 both clients count by half, so each moves the model by Δ/2 under √(σ²/4 + σ²/4); in round 2 client 1 is
    # alone. Δ = 0.1 and σ = 0.2: μ² = 0.05²/0.02 = 1/8 and 1/4.
    ledger = Ledger(promise(GRANTED, GRANTED), (10, 10))
    ledger.charge({0: order(0.2), 1: order(0.2)})
    ledger.broadcast({0: 0.5, 1: 0.5})
    ledger.charge({1: order(0.2)})
    ledger.broadcast({1: 1.0})
    released = ledger.books.released(ledger.run)
    assert {client: n * one.mu_squared for client, seen in released.items() for one, n in seen.items()} == (
        pytest.approx({0: 1 / 8, 1: 3 / 8}, rel=1e-5)
    )


def test_the_servers_own_noise_is_noted() -> None:
    # Δ = 0.1 under √(0.2² + 0.1²): μ² = 0.01/0.05.
    ledger = Ledger(promise(GRANTED), (10,))
    ledger.charge({0: order(0.2)})
    ledger.broadcast({0: 1.0}, noise_std=0.1)
    ((one, times),) = ledger.books.released(ledger.run)[0].items()
    assert times * one.mu_squared == pytest.approx(1 / 5, rel=1e-5)


# Limits over many runs of one ledger.


def limited(*grants: Grant) -> Books:
    books = Books()
    for one in grants:
        books.grant(one)
    return books


def grant(epsilon: float, client: int | None = None, delta: float = 1e-3, **changes: Any) -> Grant:
    usual = {"unit": "record", "neighbours": "replace", "currency": "plain"}
    return Grant(client, Budget(epsilon, delta), **usual | changes)


def test_a_grant_limits_all_runs_together() -> None:
    # Each run is promised what a third of the grant's μ² is worth: three runs fit, and a fourth may not begin.
    books = limited(grant(8.0))
    third = promise(Budget(tight({Mechanism("gaussian", 1 / math.sqrt(WORTH / 3.001)): 1}, 1e-3), 1e-3))
    for _ in range(3):
        Ledger(third, (10,), books=books).charge({0: order(std_for(WORTH / 3.002, 10))})
    with pytest.raises(BudgetRefused, match=r"grant of client 0 .*leaves ε = .* at δ = 0.001"):
        Ledger(third, (10,), books=books)
    assert tight(books.spent(*books.runs())[0], 1e-3) <= 8.0


def test_runs_that_take_turns_see_each_others_charges_and_their_own_once() -> None:
    books = limited(grant(8.0))
    tenth = order(std_for(WORTH / 10.001, 10))
    first, second = (Ledger(promise(GRANTED), (10,), books=books) for _ in range(2))
    for ledger in [first, second, second, first, first] * 2:
        ledger.charge({0: tenth})
    for ledger in (first, second):
        with pytest.raises(BudgetRefused):
            ledger.charge({0: tenth})
    assert tight(books.spent(*books.runs())[0], 1e-3) == pytest.approx(8.0, rel=1e-3)


def test_a_client_without_anything_left_sits_out_and_the_others_go_on() -> None:
    books = limited(grant(80.0), grant(8.0, client=1))
    dear = order(std_for(0.6 * WORTH, 10))
    first, second = (Ledger(promise(GRANTED, GRANTED), (10, 10), books=books) for _ in range(2))
    assert sorted(first.charge({0: dear, 1: dear})) == [0, 1]
    assert sorted(second.charge({0: dear, 1: dear})) == [0]


def test_a_papers_calibration_is_limited_by_a_grant() -> None:
    books = limited(grant(8.0))
    ledger = Ledger(promise(Budget(1.0, 1e-3), calibration="paper"), (10,), books=books)
    ledger.charge({0: order(std_for(0.9 * WORTH, 10))})  # more than it was promised, and within the grant
    with pytest.raises(BudgetRefused):
        ledger.charge({0: order(std_for(0.2 * WORTH, 10))})


def test_what_is_overheard_of_one_run_is_charged_in_full_to_a_grant() -> None:
    books = limited(grant(8.0))
    ledger = Ledger(promise(GRANTED, against=("uplink",), exposures=1), (10,), books=books)
    ledger.charge({0: order(std_for(0.6 * WORTH, 10))})
    with pytest.raises(BudgetRefused):
        ledger.charge({0: order(std_for(0.6 * WORTH, 10))})


def test_sampled_noise_needs_a_grant_in_renyi_currency() -> None:
    sampled = promise(Budget(1.55, 1e-3), **SAMPLING)
    plain = Ledger(sampled, (1000,), books=limited(grant(8.0, neighbours="add-remove")))
    with pytest.raises(BadInput, match="grant the ledger's budget with --currency renyi"):
        plain.charge({0: order(1.1, **SAMPLED)})
    books = limited(grant(1.6, neighbours="add-remove", currency="renyi"))
    for _ in range(2):
        charge_to_the_end(Ledger(sampled, (1000,), books=books), order(1.1, **SAMPLED, steps=100))
    assert 0.5 < tight(books.spent(*books.runs())[0], 1e-3) <= 1.6


@each(
    ("given", "promised", "reason"),
    [
        (grant(8.0), None, "system must be a private one with the ledger"),
        (grant(8.0, client=0), promise(GRANTED, GRANTED), "client 1 must have a grant.*--client 1"),
    ],
)
def test_a_limited_ledger_refuses_what_it_cannot_limit(given: Grant, promised: Promise | None, reason: str) -> None:
    books = limited(given)
    with pytest.raises(BadInput, match=reason):
        Ledger(promised, (10, 10), books=books)
    assert books.runs() == []


def test_a_limit_is_refused_where_somebody_has_uploaded_without_noise_already() -> None:
    books = Books()
    Ledger(None, (10, 10), books=books).charge({1: Order(steps=1, learning_rate=0.5)})
    books.grant(grant(8.0))
    with pytest.raises(BadInput, match="client 1 has uploaded or answered without noise"):
        Ledger(promise(GRANTED, GRANTED), (10, 10), books=books)


def test_a_limit_counts_what_was_charged_under_another_kind_of_promise() -> None:
    books = Books()
    Ledger(promise(GRANTED, unit="client"), (10,), books=books).charge({0: order(20.0)})
    books.grant(grant(8.0))
    with pytest.raises(BudgetRefused, match=r"leaves ε = 7\.99"):  # whoever replaces all records replaces one of them
        Ledger(promise(GRANTED), (10,), books=books)


def test_a_grant_prices_a_release_in_its_own_kind_of_neighbours() -> None:
    """An add/remove μ is worth half of what replacing costs, and a record a tenth of a client with ten."""
    for terms, times in (({"neighbours": "add-remove"}, 2), ({}, 1), ({"unit": "client"}, 1)):
        std = std_for(WORTH / 4, 10) * (2 if times == 1 else 1)  # a fourth of the grant, or a fourth of that
        books = limited(grant(float(GRANTED.epsilon)))
        ledger = Ledger(promise(Budget(1e3, 1e-3), calibration="paper", **terms), (10,), books=books)
        ((mechanism, _),) = [
            (release_of(order(std), 10, **{"unit": "record", "neighbours": "replace"} | terms).mechanism, 1)
        ]
        fits = int(WORTH * (1 + 1e-9) / (times**2 * mechanism.mu_squared))
        for _ in range(fits):
            ledger.charge({0: order(std)})
        with pytest.raises(BudgetRefused, match=r"what the ledger .* grants"):
            ledger.charge({0: order(std)})


def test_a_limited_ledger_takes_no_simulation_and_nothing_uncounted() -> None:
    books = limited(grant(8.0))
    for how in ({"seeded": True}, {"noise_source": "a fast sampler"}):
        with pytest.raises(BadInput, match="seed must be left out with the ledger"):
            Ledger(promise(GRANTED), (10,), books=books, **how)
    told = promise(GRANTED, calibration="paper", uncounted=("the loss of every model",))
    with pytest.raises(BadInput, match="calibration must be one that counts everything"):
        Ledger(told, (10,), books=books)


def test_a_grant_that_comes_during_a_simulation_ends_it() -> None:
    books = Books()
    ledger = Ledger(promise(GRANTED), (10,), books=books, seeded=True)
    ledger.charge({0: order(std_for(WORTH / 4, 10))})
    books.grant(grant(8.0))
    with pytest.raises(BadInput, match="seed must be left out"):
        ledger.charge({0: order(std_for(WORTH / 4, 10))})


def test_a_ledger_without_limits_takes_every_kind_of_run() -> None:
    books = Books()
    for promised in (None, promise(GRANTED), promise(GRANTED, unit="client")):
        Ledger(promised, (10,), books=books).charge({0: order(20.0)})
    assert [len(books.spent(run)) for run in books.runs()] == [0, 1, 1]


# What owners change, and what plans meet exactly.


def test_a_grant_that_is_lowered_during_a_run_binds_its_next_round() -> None:
    books = limited(grant(100.0))
    ledger = Ledger(promise(GRANTED), (10,), books=books)
    third = order(std_for(WORTH / 3.001, 10))
    ledger.charge({0: third})
    books.grant(grant(float(GRANTED.epsilon) / 2))  # worth less than the two thirds that a second round would make
    with pytest.raises(BudgetRefused, match=r"what the ledger .* grants"):
        ledger.charge({0: third})
    books.grant(grant(100.0))
    assert list(ledger.charge({0: third})) == [0]


def test_a_limit_set_during_a_run_without_privacy_ends_it() -> None:
    books = Books()
    ledger = Ledger(None, (10,), books=books)
    plain = Order(steps=1, learning_rate=0.5)
    ledger.charge({0: plain})
    books.grant(grant(1.0))
    with pytest.raises(BadInput, match="system must be a private one"):
        ledger.charge({0: plain})


def test_a_mistaken_grant_is_mended_by_the_next_one() -> None:
    books = limited(grant(8.0, unit="client"), grant(8.0))
    assert list(Ledger(promise(Budget(4.0, 1e-3)), (10,), books=books).charge({0: order(10.0)})) == [0]


def test_a_purely_private_run_is_not_held_to_what_is_left_in_gaussian_dp() -> None:
    # A past ε = 0.5 is more than all of μ²(1, 1e-5); a pure 0.4 still fits into a pure 1.
    books = limited(grant(1.0, delta=1e-5))
    Ledger(promise(Budget(0.5, 0.0)), (10,), books=books).charge({0: laplace(0.2)})
    assert list(Ledger(promise(Budget(0.4, 0.0)), (10,), books=books).charge({0: laplace(0.25)})) == [0]
    with pytest.raises(BudgetRefused):
        Ledger(promise(Budget(0.2, 0.0)), (10,), books=books).charge({0: laplace(0.5)})


@each("delta", [0.0, 1e-5])
@each("rounds", [3, 7, 10, 49])
def test_a_plan_that_is_exactly_the_budget_is_carried_out_to_its_end(rounds: int, delta: float) -> None:
    # ε = 0.3 in so many equal parts; in binary fractions their sum may be a little more.
    scale = rounds / 0.3 * 0.1  # Δ₁ = 1/10
    ledger = Ledger(promise(Budget(0.3, delta)), (10,))
    assert charge_to_the_end(ledger, laplace(scale)) >= rounds
    if delta == 0:
        with pytest.raises(BudgetRefused):
            ledger.charge({0: laplace(scale)})
        assert tight(ledger.books.spent(ledger.run)[0], 0.0) == pytest.approx(0.3, rel=1e-9)


def test_the_same_sampled_noise_computed_another_way_is_the_same_noise() -> None:
    rates = [0.1, 0.3, 0.7, 1.1]  # C/(qn)·η and σ·η/(qn) round differently for each
    ledger = Ledger(promise(Budget(8.0, 1e-5), neighbours="add-remove"), (1000,))
    for rate in rates:
        bound = rate / (0.015 * 1000)
        ledger.charge({0: order(1.1 * bound, batch=Poisson(0.015), learning_rate=rate)})
    seen = ledger.books.spent(ledger.run)[0]
    assert sum(seen.values()) == 4
    assert max(one.multiplier for one in seen) <= 1.1
    assert min(one.multiplier for one in seen) >= 1.1 * (1 - 3e-9)
