"""Budgets and promises: only what makes sense can be granted or promised, and JSON loses nothing of it."""

import json
import math
from typing import Any

import numpy as np
import pytest

from dpfl.errors import BadInput
from dpfl.privacy.budget import Budget, Promise, budgets, cautions, require_budgets
from grids import each


def promise(*granted: Budget, **terms: Any) -> Promise:
    usual = {"unit": "record", "neighbours": "replace", "calibration": "tight"}
    return Promise(budgets=granted, **usual | terms)


# Budgets.


def test_a_budget_may_be_purely_private() -> None:
    assert Budget(0.5, 0.0).delta == 0
    assert Budget(3, 0) == Budget(3.0, 0.0)  # whole numbers are numbers


@each("epsilon", [0, -1.0, math.nan, math.inf, -math.inf, "8", None, [8.0]])
def test_an_epsilon_is_a_finite_number_above_zero(epsilon: Any) -> None:
    with pytest.raises(BadInput, match=r"^epsilon must be a finite number above 0, was .*; grant some"):
        Budget(epsilon, 1e-5)


@each("delta", [-1e-9, 1, 1.0, 2, math.nan, math.inf, "1e-5", None, [1e-5]])
def test_a_delta_is_a_number_from_zero_to_below_one(delta: Any) -> None:
    with pytest.raises(BadInput, match=r"^delta must be at least 0 \(pure privacy.*\) and below 1, was .*; choose"):
        Budget(8.0, delta)


def test_a_refusal_shows_what_was_given() -> None:
    with pytest.raises(BadInput, match="was '8'"):
        Budget("8", 1e-5)
    with pytest.raises(BadInput, match=r"was 1\.5"):
        Budget(8.0, 1.5)


def test_one_number_is_for_every_client_and_a_list_is_one_each() -> None:
    assert budgets(8.0, 1e-3, 3) == (Budget(8.0, 1e-3),) * 3
    assert budgets(8, (1e-3, 0.0), 2) == (Budget(8.0, 1e-3), Budget(8.0, 0.0))
    assert budgets((1, 2.5), [1e-3, 1e-4], 2) == (Budget(1.0, 1e-3), Budget(2.5, 1e-4))
    assert budgets(np.array([1.0, 2.0]), 1e-3, 2) == (Budget(1.0, 1e-3), Budget(2.0, 1e-3))
    assert budgets((8.0,), (1e-3,), 1) == (Budget(8.0, 1e-3),)


@each(
    ("epsilon", "delta", "words"),
    [
        ((1.0, 2.0), 1e-3, "epsilon must be one number or one for each of the 3 clients, was 2 numbers; give 3"),
        (8.0, (1e-3,) * 4, "delta must be one number or one for each of the 3 clients, was 4 numbers"),
        ((), 1e-3, "epsilon must be one number or one for each of the 3 clients, was 0 numbers"),
        ((1.0,), 1e-3, "was 1 numbers"),  # a list is a list, even of one
    ],
)
def test_a_list_has_one_entry_for_each_client(epsilon: Any, delta: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        budgets(epsilon, delta, 3)


def test_every_budget_of_a_list_is_checked() -> None:
    with pytest.raises(BadInput, match=r"epsilon .* was -2\.0"):
        budgets((1.0, -2.0), 1e-3, 2)
    with pytest.raises(BadInput, match=r"delta .* was 1\.0"):
        budgets(8.0, (1e-3, 1.0), 2)


def test_budgets_can_be_checked_before_there_are_clients() -> None:
    require_budgets((1.0, 2.0, 3.0), (1e-3, 1e-5), pure=False)  # how many there must be is not known yet
    for wrong in (0.0, (8.0, -1.0), (8.0, math.nan)):
        with pytest.raises(BadInput, match=r"^epsilon"):
            require_budgets(wrong, 1e-3, pure=False)
    for wrong in (1.0, (1e-3, -1e-3), (1e-3, math.nan)):
        with pytest.raises(BadInput, match=r"^delta"):
            require_budgets(8.0, wrong, pure=False)


@each("delta", [0, 0.0, (1e-3, 0.0)])
def test_a_delta_of_zero_is_for_those_who_can_keep_it(delta: Any) -> None:
    require_budgets(8.0, delta, pure=True)
    with pytest.raises(BadInput, match="delta must be above 0 with Gaussian noise, was 0; choose"):
        require_budgets(8.0, delta, pure=False)


# Promises.

FULL = promise(
    Budget(0.1, 1e-300), Budget(1 / 3, 0.0), Budget(1e5, 0.5),
    unit="client", neighbours="add-remove", calibration="paper", noise="adaptive",
    against=("server", "uplink", "released"), exposures=25, claimed_sensitivity=1 / 128,
    uncounted=("the test loss", "ε\nand a \"quote\""), cautions=("mind the step",),
)  # fmt: skip


OF_EACH = promise(Budget(8.0, 1e-3), Budget(4.0, 1e-3), claimed_sensitivity=(1 / 128, 0.5))


@each("one", [FULL, promise(Budget(8.0, 1e-3)), promise(Budget(8.0, 1e-3), exposures=1), OF_EACH])
def test_json_loses_nothing(one: Promise) -> None:
    plain = json.loads(json.dumps(one.to_plain(), allow_nan=False))
    assert Promise.from_plain(plain) == one
    assert Promise.from_plain(plain).to_plain() == one.to_plain()
    assert hash(Promise.from_plain(plain)) == hash(one)  # tuples again, not lists


def test_what_a_paper_claims_is_a_share_of_what_is_proved_for_all_or_for_each() -> None:
    assert promise(Budget(8.0, 1e-3)).claimed_shares is None
    assert promise(Budget(8.0, 1e-3), Budget(4.0, 1e-3), claimed_sensitivity=(1.0, 1.0)).claimed_shares is None
    assert promise(*FULL.budgets, claimed_sensitivity=1 / 4).claimed_shares == (1 / 4,) * 3
    assert OF_EACH.claimed_shares == (1 / 128, 0.5)
    with pytest.raises(
        BadInput, match="claimed_sensitivity must be one number or one for each of the 1 clients, was 2"
    ):
        promise(Budget(8.0, 1e-3), claimed_sensitivity=(1.0, 0.5))
    with pytest.raises(BadInput, match="claimed_sensitivity must be a finite number above 0"):
        promise(Budget(8.0, 1e-3), Budget(4.0, 1e-3), claimed_sensitivity=(1.0, 0.0))


def test_what_reads_a_promise_checks_it_again() -> None:
    plain = promise(Budget(8.0, 1e-3)).to_plain()
    with pytest.raises(BadInput, match="epsilon"):
        Promise.from_plain(plain | {"budgets": [[-8.0, 1e-3]]})
    with pytest.raises(BadInput, match="against"):
        Promise.from_plain(plain | {"against": []})


def test_the_usual_promise_is_against_the_server_with_noise_fixed_in_advance() -> None:
    usual = promise(Budget(8.0, 1e-3))
    assert (usual.against, usual.noise, usual.exposures, usual.claimed_sensitivity) == (("server",), "fixed", None, 1.0)
    assert usual.uncounted == usual.cautions == ()


def test_a_promise_against_eavesdroppers_says_how_much_they_hear() -> None:
    with pytest.raises(BadInput, match="exposures must be given where the promise is against the uplink, was None"):
        promise(Budget(8.0, 1e-3), against=("uplink",))
    with pytest.raises(BadInput, match="exposures"):
        promise(Budget(8.0, 1e-3), against=("server", "uplink"))
    assert promise(Budget(8.0, 1e-3), against=("uplink",), exposures=3).exposures == 3


@pytest.mark.parametrize("against", [(), ("released",)])
def test_a_promise_limits_somebodys_view_of_the_uploads(against: tuple[str, ...]) -> None:
    # What readers of models see depends on the other clients: no client's own ledger can hold it down.
    with pytest.raises(BadInput, match="against must name the server or the uplink") as refusal:
        promise(Budget(8.0, 1e-3), against=against)
    assert repr(against) in str(refusal.value)
    for enough in (("server", *against), ("uplink", *against)):
        promise(Budget(8.0, 1e-3), against=enough, exposures=2)


# Cautions.


def test_a_delta_well_below_one_in_the_number_of_records_needs_no_caution() -> None:
    assert cautions(promise(Budget(8.0, 1e-3), Budget(8.0, 1e-3)), (999, 10)) == ()
    assert cautions(promise(Budget(8.0, 0.0)), (10**9,)) == ()  # pure privacy fails never


def test_a_delta_of_one_in_the_number_of_records_is_cautioned() -> None:
    (said,) = cautions(promise(Budget(8.0, 1e-3)), (1000,))
    assert "was 0.001 for 1000 records of client 0:" in said
    assert "publishing a record at random would keep such a promise" in said


def test_the_first_such_client_is_named_and_the_others_are_counted() -> None:
    granted = [Budget(8.0, delta) for delta in (1e-5, 0.1, 1e-5, 0.2, 1e-5, 0.3)]
    (said,) = cautions(promise(*granted), (50, 10, 50, 5, 50, 4))  # 0.1 ≥ 1/10, 0.2 ≥ 1/5, 0.3 ≥ 1/4
    assert "was 0.1 for 10 records of client 1 and 2 others:" in said


def test_what_the_system_has_to_say_comes_first() -> None:
    own = promise(Budget(8.0, 0.5), cautions=("one", "two"))
    assert cautions(own, (1,)) == ("one", "two")  # 0.5 < 1/1
    first, second, third = cautions(own, (2,))
    assert (first, second) == ("one", "two")
    assert third.startswith("delta should be")
