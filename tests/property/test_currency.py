"""Prices in one currency: how they are ordered, and that a claim is found at which the price is the target."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl.errors import BadInput
from dpfl.orders import ClientClip, Full, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip
from dpfl.privacy.accounting import Mechanism, tight
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.currency import CommonNeighbours, Sent, Unpriced, price, release_in, spendings, together
from dpfl.rehearsal import Rehearsal, at_true_epsilon
from dpfl.streams import Streams
from dpfl.systems import (
    ALIDPFL,
    PEDPFL,
    UDP,
    AdapDPFL,
    DPFedAvg,
    DPSGDFedAvg,
    FedSGDDPC,
    Lei,
    NbAFL,
    PrivateSystem,
)  # fmt: skip
from grids import each

DELTA = 1e-4
SIZES = (30, 40, 60)


def promise(**changed: object) -> Promise:
    return replace(
        Promise(budgets=(Budget(1.0, DELTA),) * 3, unit="record", neighbours="replace", calibration="tight"), **changed
    )


@st.composite
def orders(draw: st.DrawFn) -> Order:
    laplace = draw(st.booleans())
    size = draw(st.floats(0.3, 30.0))
    kind, steps = draw(st.sampled_from([RecordClip, ClientClip, ModelClip])), draw(st.integers(1, 4))
    noise_on = "upload" if kind is ModelClip else draw(st.sampled_from(["step", "upload"]))
    countable = kind is RecordClip and not laplace and (noise_on == "upload" or steps == 1)
    return Order(
        steps=steps,
        learning_rate=draw(st.floats(0.05, 2.0)),
        batch=draw(st.sampled_from([Full(), Poisson(0.02), Poisson(0.3), Poisson(0.95)])),
        clip=kind(draw(st.floats(0.1, 3.0)), norm=1 if laplace else 2),
        noise=Laplace(size) if laplace else Gaussian(size),
        noise_on=noise_on,
        count_noise=Gaussian(draw(st.floats(0.3, 30.0))) if countable and draw(st.booleans()) else None,
    )


def priced(rounds: list[Order], neighbours: CommonNeighbours) -> float:
    sent = [Sent({0: order}, {0: 1.0}, 0.0) for order in rounds]
    return price(promise(), sent, SIZES, neighbours)


@given(st.lists(orders(), min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_a_client_costs_no_less_than_a_record_and_replacing_no_less_than_adding(rounds: list[Order]) -> None:
    add, replaced, client = (priced(rounds, which) for which in ("add-remove", "replace", "client"))
    # Uploads after several steps apart: there a record that is added may move more than one that is replaced.
    if all(order.noise_on == "step" or order.steps == 1 for order in rounds):
        assert add <= replaced * (1 + 1e-3)
    if all(order.noise_on == "step" or order.steps == 1 or not isinstance(order.clip, RecordClip) for order in rounds):
        assert replaced <= client * (1 + 1e-3)


@given(st.floats(0.5, 50.0), st.integers(1, 50))
@settings(deadline=None, max_examples=30)
def test_replacing_is_exactly_twice_the_distance_where_noise_is_on_all_records(size: float, times: int) -> None:
    order = Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(size), noise_on="step")
    add, replaced = (release_in(order, 30, which).mechanism for which in ("add-remove", "replace"))
    assert math.sqrt(replaced.mu_squared) == pytest.approx(2 * math.sqrt(add.mu_squared), rel=1e-12)
    assert priced([order] * times, "replace") == pytest.approx(
        tight({Mechanism("gaussian", add.multiplier / 2): times}, DELTA), rel=1e-9
    )


@given(st.lists(orders(), min_size=2, max_size=3), st.sampled_from(["replace", "add-remove", "client"]))
@settings(deadline=None, max_examples=30)
def test_more_rounds_cost_more_and_trainings_add_up_like_rounds(
    rounds: list[Order], neighbours: CommonNeighbours
) -> None:
    apart = [spendings(promise(), [Sent({0: order}, {0: 1.0}, 0.0)], SIZES, neighbours) for order in rounds]
    whole = priced(rounds, neighbours)
    assert whole >= priced(rounds[:-1], neighbours) * (1 - 1e-3)
    assert together(apart, DELTA) == pytest.approx(whole, rel=1e-6)


def test_a_sampled_record_costs_no_more_replaced_than_on_all_records_and_the_same_at_rate_one() -> None:
    for rate in (0.01, 0.3, 0.9, 1 - 1e-9):
        sampled = tight({Mechanism("gaussian", 4.0, rate, replaced=True): 20}, DELTA)
        added = tight({Mechanism("gaussian", 4.0, rate): 20}, DELTA)
        unsampled = tight({Mechanism("gaussian", 2.0): 20}, DELTA)
        assert added <= sampled <= unsampled * (1 + 1e-9)
    assert sampled == pytest.approx(unsampled, rel=1e-3)
    for wrong in ({"sampling_rate": 1.0}, {"sampling_rate": 0.5, "sampling": "fixed"}):
        with pytest.raises(BadInput, match="replaced must come with gaussian noise and Poisson-sampled batches"):
            Mechanism("gaussian", 1.0, replaced=True, **wrong)


def test_a_count_is_priced_with_its_upload_in_every_currency() -> None:
    # Of 30 records at a rate of ½ the sum of 15 moves by 1 under σ = 6, and the count by ½ under σ = 4: 1/36 + 1/64.
    order = Order(
        steps=1, learning_rate=0.5, batch=Poisson(0.5), clip=RecordClip(1.0), noise=Gaussian(6.0), noise_on="step",
        count_noise=Gaussian(4.0),
    )  # fmt: skip
    added, replaced, client = (release_in(order, 30, which).mechanism for which in ("add-remove", "replace", "client"))
    assert added.multiplier == replaced.multiplier == pytest.approx(4.8)
    assert (added.sampling_rate, added.replaced, replaced.replaced) == (0.5, False, True)
    assert (client.multiplier, client.sampling_rate) == (pytest.approx(4.8 / 60), 1.0)


SYSTEMS: list[PrivateSystem] = [
    UDP(rounds=7), UDP(rounds=7, cohort=2), UDP(rounds=7, discount=0.9), UDP(rounds=7, calibration="paper"),
    UDP(rounds=7, clip="median"), UDP(rounds=7, clip="median", discount=0.9, lr_schedule="inverse-sqrt"),
    UDP(rounds=7, clipping="model", calibration="paper"), Lei(rounds=6, calibration="paper", cohort=2),
    PEDPFL(rounds=5), Lei(rounds=6, noise_fall=0.0), NbAFL(rounds=6, exposures=2), DPFedAvg(rounds=3),
    DPFedAvg(rounds=3, mechanism="laplace"), FedSGDDPC(rounds=5), FedSGDDPC(rounds=5, sampling_rate=0.3),
    DPSGDFedAvg(rounds=4), DPSGDFedAvg(rounds=4, local_steps=2, sampling_rate=0.1, calibration="paper"),
]  # fmt: skip


@each("system", SYSTEMS, ids=lambda system: f"{system.name}-{system.calibration}")
@each("neighbours", ["replace", "add-remove"])
def test_a_claim_is_found_whose_price_is_the_target(system: PrivateSystem, neighbours: CommonNeighbours) -> None:
    fair = at_true_epsilon(replace(system, epsilon=2.0), SIZES, 2.0, Streams(1), neighbours=neighbours)
    assert 2.0 * (1 - 1e-3) <= Rehearsal(fair, SIZES, Streams(1)).price(neighbours) <= 2.0 * (1 + 1e-9)


def test_in_its_own_currency_a_price_is_what_the_certificate_says() -> None:
    for system in SYSTEMS:
        rehearsal = Rehearsal(system, SIZES, Streams(1))
        made = rehearsal.promise
        assert made is not None
        own: CommonNeighbours = "client" if made.unit == "client" else made.neighbours
        for observer in ("server", "released"):
            said = rehearsal.certificate.observers[observer].epsilon
            assert rehearsal.price(own, observer) == pytest.approx(said, rel=1e-5)


def test_steps_are_whole_so_a_count_of_them_stays_below() -> None:
    system = ALIDPFL(sampling_rate=0.2, noise_multiplier=1.5, rounds=500, delta=DELTA, epsilon=2.0)
    fair = at_true_epsilon(system, SIZES, 2.0, Streams(1), neighbours="replace")
    assert 1.9 <= Rehearsal(fair, SIZES, Streams(1)).price("replace") <= 2.0


def test_what_has_no_price_says_why() -> None:
    order = Order(steps=1, learning_rate=0.5, batch=Poisson(0.5), clip=RecordClip(1.0), noise=Gaussian(3.0))
    sent = [Sent({0: order}, {0: 1.0}, 0.0)]
    with pytest.raises(Unpriced, match="upload without any"):
        price(None, sent, SIZES, "replace")
    asked = promise(calibration="paper", uncounted=("the loss of every model on each client's records",))
    with pytest.raises(Unpriced, match="the loss of every model"):
        price(asked, sent, SIZES, "replace")
    adaptive = promise(noise="adaptive", neighbours="add-remove")
    with pytest.raises(Unpriced, match="chosen along the way must be on all records"):
        price(adaptive, sent, SIZES, "replace")
    assert price(adaptive, sent, SIZES, "add-remove") == 1.0  # the budget that its filter holds
    with pytest.raises(Unpriced, match="chosen along the way"):
        at_true_epsilon(AdapDPFL(epsilon=2.0), SIZES, 2.0, Streams(1), neighbours="client")
    few = DPSGDFedAvg(sampling_rate=0.2, noise_multiplier=1.5, rounds=2, calibration="paper")
    with pytest.raises(Unpriced, match="epsilon must be one that dpsgd-fedavg can really spend"):
        at_true_epsilon(few, SIZES, 50.0, Streams(1), neighbours="replace")


def test_who_has_spent_all_its_rounds_below_the_target_keeps_a_claim_that_is_true() -> None:
    few = DPSGDFedAvg(sampling_rate=0.2, noise_multiplier=1.5, rounds=2, epsilon=20.0)
    fair = at_true_epsilon(few, SIZES, 20.0, Streams(1), neighbours="replace")
    assert 1.0 < Rehearsal(fair, SIZES, Streams(1)).price("replace") < 5.0


def test_noise_chosen_along_the_way_is_priced_by_what_its_filter_allows() -> None:
    """Whatever the discounts were, Σ μ² stays within the budget's; a record added has half of each distance."""
    rehearsal = Rehearsal(UDP(rounds=7, discount=0.5, epsilon=2.0), SIZES, Streams(1))
    assert rehearsal.price("replace") == 2.0
    spent = rehearsal.spendings("replace")
    assert spent == [Counter(one.keys()) for one in spent]
    assert together([spent], 1e-3) == pytest.approx(2.0, rel=1e-6)
    plain = Rehearsal(UDP(rounds=7, epsilon=2.0), SIZES, Streams(1))
    assert rehearsal.price("add-remove") == pytest.approx(plain.price("add-remove"), rel=1e-6)
