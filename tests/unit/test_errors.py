"""Refusals are sentences that name the field and end in a way out."""

import math

import pytest

from dpfl.errors import (
    BadInput,
    BudgetRefused,
    choose,
    require_count,
    require_positive,
    require_readable,
    suggestion,
)
from grids import each

KNOWN = {"udp": 1, "fedavg": 2, "fedprox": 3}


def test_a_known_name_is_found() -> None:
    assert choose("system", "fedavg", KNOWN) == 2


@each(
    ("name", "end"),
    [
        ("upd", "was 'upd'; did you mean 'udp'?"),
        ("FedAvg", "was 'FedAvg'; did you mean 'fedavg'?"),
        ("zzz", "was 'zzz'"),  # nothing is near
        ("", "was ''"),
    ],
)
def test_an_unknown_name_gets_the_choices_and_the_nearest(name: str, end: str) -> None:
    with pytest.raises(BadInput) as refusal:
        choose("system", name, KNOWN)
    assert str(refusal.value) == f"system must be one of fedavg, fedprox, udp, {end}"


def test_a_suggestion_is_the_nearest_or_nothing() -> None:
    assert suggestion("epsilonn", ["delta", "epsilon"]) == "; did you mean 'epsilon'?"
    assert suggestion("qqqq", ["delta", "epsilon"]) == ""


@each("value", [1, 0.5, 1e-300])
def test_a_positive_number_passes(value: float) -> None:
    require_positive("lr", value, "try 0.1")


@each("value", [0, -1.0, math.nan, math.inf, "1", None])
def test_anything_else_is_refused_with_the_way_out(value: object) -> None:
    with pytest.raises(BadInput) as refusal:
        require_positive("lr", value, "try 0.1")
    assert str(refusal.value) == f"lr must be a finite number above 0, was {value!r}; try 0.1"


def test_a_count_passes() -> None:
    require_count("rounds", 1, "train")
    require_count("seed", 0, "leave it out", at_least=0)


@each("value", [0, -3, True, 2.0, "2", None])
def test_what_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(BadInput) as refusal:
        require_count("rounds", value, "train for one")
    assert str(refusal.value) == f"rounds must be a whole number of at least 1, was {value!r}; train for one"


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_up_to_the_newest_passes(version: int) -> None:
    require_readable("order", "this one", version, newest=2)


@pytest.mark.parametrize("version", [3, True, "2", 1.5, None])
def test_a_version_that_cannot_be_known_is_refused(version: object) -> None:
    with pytest.raises(BadInput) as refusal:
        require_readable("order", "this one", version, newest=2)
    assert str(refusal.value) == (
        f"order must be of version 2 or older, but this one is of version {version!r}, from a newer dpfl; update dpfl"
    )


def test_the_two_refusals_are_no_relatives() -> None:
    assert issubclass(BadInput, ValueError)
    assert not issubclass(BudgetRefused, ValueError)
