"""The ledger charges before anything happens, refuses what it cannot pay or price, and never counts too little."""

import math

import numpy as np
import pytest

from dpfl.errors import BadInput, BudgetRefused
from dpfl.orders import ClientClip, Gaussian, Laplace, Order, Poisson, RecordClip
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.gaussian_dp import mu_of
from dpfl.privacy.ledger import Charged, Ledger, price_of


def promise(*granted: Budget, calibration: str = "tight", unit: str = "record") -> Promise:
    return Promise(budgets=granted, unit=unit, neighbours="replace", calibration=calibration)  # type: ignore[arg-type]


def order(std: float, **changes: object) -> Order:
    """Return a step with η = 0.5 and C = 1, so Δ = 2ηC/n = 1/n for a replaced record."""
    return Order(**({"steps": 1, "learning_rate": 0.5, "clip": RecordClip(1.0), "noise": Gaussian(std)} | changes))


GRANTED = Budget(8.0, 1e-3)
WORTH = float(mu_of(8.0, 1e-3)) ** 2  # of GRANTED, in μ²


def std_for(price: float, records: int) -> float:
    """Return the noise at which `order` costs this much: (1/n/σ)² = price."""
    return 1 / records / math.sqrt(price)


def test_a_charge_is_sensitivity_over_noise_squared() -> None:
    # Δ = 1/10 and 1/20: with σ = 0.2, (Δ/σ)² is 1/4 and 1/16.
    ledger = Ledger(promise(GRANTED, GRANTED, GRANTED), (10, 20, 30))
    paid = ledger.charge({0: order(0.2), 1: order(0.2)})
    assert paid == {0: Charged(order(0.2), 10), 1: Charged(order(0.2), 20)}
    assert ledger.spent.tolist() == pytest.approx([0.25, 0.0625, 0.0])
    ledger.charge({1: order(0.1)})  # twice the precision, four times the price
    assert ledger.spent.tolist() == pytest.approx([0.25, 0.0625 + 0.25, 0.0])
    assert ledger.replies.tolist() == [1, 2, 0]


def test_the_price_follows_the_unit() -> None:
    # All ten records replaced move the upload ten times as far: Δ = 2ηC = 1.
    assert price_of(order(0.2), 10, promise(GRANTED)) == pytest.approx(0.25)
    assert price_of(order(0.2), 10, promise(GRANTED, unit="client")) == pytest.approx(25.0)


def test_noise_in_every_step_costs_steps_times_one() -> None:
    # On the sum Δ = 2C = 2; σ = 4 makes (2/4)² = 1/4 a step.
    five = order(4.0, steps=5, noise_on="step")
    assert price_of(five, 10, promise(GRANTED)) == pytest.approx(5 * 0.25)
    ledger = Ledger(promise(GRANTED), (10,))
    ledger.charge({0: five})
    assert ledger.spent.tolist() == pytest.approx([1.25])
    assert ledger.replies.tolist() == [1]


def test_a_budget_pays_to_its_end_and_then_refuses() -> None:
    third = order(std_for(WORTH / 3.001, 10))
    ledger = Ledger(promise(GRANTED), (10,))
    for _ in range(3):
        assert list(ledger.charge({0: third})) == [0]
    before = ledger.spent.copy()
    with pytest.raises(BudgetRefused, match=r"budget of all 1 clients.*lower rounds or raise epsilon"):
        ledger.charge({0: third})
    assert ledger.spent.tolist() == before.tolist()
    assert ledger.replies.tolist() == [3]
    assert float(ledger.epsilon()[0]) <= 8.0


def test_a_client_that_cannot_pay_sits_out_and_the_others_go_on() -> None:
    dear = order(std_for(0.6 * WORTH, 10))
    ledger = Ledger(promise(GRANTED, Budget(80.0, 1e-3)), (10, 10))
    assert sorted(ledger.charge({0: dear, 1: dear})) == [0, 1]
    assert sorted(ledger.charge({0: dear, 1: dear})) == [1]
    assert ledger.spent.tolist() == pytest.approx([0.6 * WORTH, 1.2 * WORTH])
    assert ledger.replies.tolist() == [1, 2]


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
    assert ledger.spent.tolist() == [0.0]


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
    assert ledger.spent[0] >= math.fsum(prices) * (1 - 1e-12)
    assert ledger.spent[0] <= WORTH
    assert 7.5 < float(ledger.epsilon()[0]) <= 8.0


@pytest.mark.parametrize(
    ("unpriced", "reason"),
    [
        (order(1.0, noise=Laplace(1.0), clip=RecordClip(1.0, 1)), "Laplace"),
        (order(1.0, batch=Poisson(0.1)), "Poisson-sampled batches"),
        (order(1.0, noise=None), "noise must be set where privacy is promised, was None"),
        (order(1.0, clip=None), "clip must be set where privacy is promised, was None"),
    ],
)
@pytest.mark.parametrize("calibration", ["tight", "paper"])
def test_what_cannot_be_priced_is_refused_in_a_sentence(unpriced: Order, reason: str, calibration: str) -> None:
    ledger = Ledger(promise(GRANTED, calibration=calibration), (10,))
    with pytest.raises(BadInput, match=reason):
        ledger.charge({0: unpriced})
    assert ledger.spent.tolist() == [0.0]
    assert ledger.replies.tolist() == [0]


def test_an_order_that_cannot_be_priced_leaves_everybodys_books_alone() -> None:
    ledger = Ledger(promise(GRANTED, GRANTED), (10, 10))
    with pytest.raises(BadInput):
        ledger.charge({0: order(1.0), 1: order(1.0, noise=None)})
    assert ledger.spent.tolist() == [0.0, 0.0]
    assert ledger.replies.tolist() == [0, 0]


def test_the_papers_calibration_is_recorded_and_not_limited() -> None:
    ledger = Ledger(promise(GRANTED, calibration="paper"), (10,))
    for _ in range(3):
        ledger.charge({0: order(std_for(WORTH, 10))})
    assert ledger.spent.tolist() == pytest.approx([3 * WORTH])
    assert float(ledger.epsilon()[0]) > 8.0


def test_without_a_promise_nothing_is_charged_and_nothing_is_protected() -> None:
    ledger = Ledger(None, (10, 20))
    plain = Order(steps=5, learning_rate=0.5, batch=Poisson(0.5))
    assert ledger.charge({1: plain}) == {1: Charged(plain, 20)}
    assert ledger.spent.tolist() == [0.0, 0.0]
    assert ledger.epsilon().tolist() == [math.inf, math.inf]


def test_each_clients_epsilon_is_at_its_own_delta() -> None:
    ledger = Ledger(promise(Budget(50.0, 1e-2), Budget(50.0, 1e-9)), (10, 10))
    ledger.charge({0: order(0.1), 1: order(0.1)})  # both at μ = 1
    loose, strict = ledger.epsilon()
    assert loose < strict
    # A release with μ = 1 is (4.378, 1e-5)-DP; a larger δ costs less, a smaller one more.
    assert loose < 4.378 < strict


def test_clients_that_answered_nothing_have_spent_nothing() -> None:
    assert Ledger(promise(GRANTED, GRANTED), (10, 10)).epsilon().tolist() == [0.0, 0.0]


def test_a_client_gradient_costs_the_same_whatever_the_number_of_records() -> None:
    clipped = order(2.0, clip=ClientClip(1.0))  # Δ = 2ηC = 1
    assert price_of(clipped, 10, promise(GRANTED)) == price_of(clipped, 1000, promise(GRANTED)) == pytest.approx(0.25)
