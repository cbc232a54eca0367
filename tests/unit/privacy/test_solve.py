"""Two of noise, steps and ε are given: three accountants find the third, and asked back they return the first."""

import math
import re
from typing import Any

import pytest

from dpfl.errors import BadInput
from dpfl.privacy import renyi
from dpfl.privacy.accounting import Mechanism, tight
from dpfl.privacy.paper_formulas import ali_epsilon
from dpfl.privacy.solve import answer
from grids import each

SAMPLED = {"sampling_rate": 0.2, "delta": 1e-5}


def test_epsilon_for_noise_and_steps() -> None:
    question, found = answer(noise_multiplier=2.0, steps=60, **SAMPLED)
    assert question == "epsilon"
    spent = {Mechanism("gaussian", 2.0, 0.2): 60}
    assert found == {"tight": tight(spent, 1e-5), "rdp": renyi.epsilon(spent, 1e-5), "paper": ali_epsilon(spent, 1e-5)}
    assert found["tight"] < found["rdp"] < found["paper"]


def test_steps_for_noise_and_epsilon() -> None:
    question, found = answer(noise_multiplier=2.0, epsilon=4.0, **SAMPLED)
    assert question == "steps"
    step = Mechanism("gaussian", 2.0, 0.2)
    for name, accountant in (("tight", tight), ("rdp", renyi.epsilon), ("paper", ali_epsilon)):
        assert accountant({step: found[name]}, 1e-5) <= 4.0 < accountant({step: found[name] + 1}, 1e-5)
    assert found["tight"] > found["rdp"] > found["paper"]


def test_noise_for_steps_and_epsilon() -> None:
    question, found = answer(steps=60, epsilon=4.0, **SAMPLED)
    assert question == "noise_multiplier"
    for name, accountant in (("tight", tight), ("rdp", renyi.epsilon), ("paper", ali_epsilon)):
        enough, less = (Mechanism("gaussian", found[name] * factor, 0.2) for factor in (1.0, 1 - 1e-3))
        assert accountant({enough: 60}, 1e-5) <= 4.0 < accountant({less: 60}, 1e-5)
    assert found["tight"] < found["rdp"] < found["paper"]


@each(
    "setting",
    [
        SAMPLED,
        {"delta": 1e-5},
        {"mechanism": "laplace"},
        {"mechanism": "laplace", "delta": 1e-6},
        {"mechanism": "laplace", "sampling_rate": 0.2, "delta": 1e-6},
    ],
    ids=str,
)
def test_the_three_questions_answer_each_other(setting: dict[str, Any]) -> None:
    _, noise = answer(steps=60, epsilon=3.0, **setting)
    for accountant, multiplier in noise.items():
        if multiplier is None:
            continue
        multiplier *= 1 + 1e-9  # where ε is a straight line the search ends on it, in the last bit on either side
        _, spent = answer(noise_multiplier=multiplier, steps=60, **setting)
        assert 3.0 * (1 - 1e-3) <= spent[accountant] <= 3.0
        _, steps = answer(noise_multiplier=multiplier, epsilon=3.0, **setting)
        assert steps[accountant] == 60


@each("noise", [1.0, 5.0, 40.0])
@each("delta", [1e-9, 1e-3])
@each("rate", [0.05, 1.0])
def test_tight_is_below_renyi_is_below_the_papers(noise: float, delta: float, rate: float) -> None:
    _, found = answer(noise_multiplier=noise, steps=30, delta=delta, sampling_rate=rate)
    assert found["tight"] <= found["rdp"] * (1 + 1e-6)
    assert found["rdp"] <= found["paper"]  # a better conversion, and more orders


def test_pure_laplace_noise_is_linear_for_all_three() -> None:
    for question, given in (
        ("epsilon", {"noise_multiplier": 10.0, "steps": 5}),
        ("steps", {"noise_multiplier": 10.0, "epsilon": 0.5}),
        ("noise_multiplier", {"steps": 5, "epsilon": 0.5}),
    ):
        asked, found = answer(**given, mechanism="laplace")
        expected = {"epsilon": 0.5, "steps": 5, "noise_multiplier": 10.0}[question]
        assert asked == question
        assert found == {"tight": expected, "rdp": expected, "paper": expected}


def test_a_little_delta_buys_a_lot_of_laplace_noise() -> None:
    _, pure = answer(noise_multiplier=10.0, steps=100, mechanism="laplace", delta=0.0)
    _, found = answer(noise_multiplier=10.0, steps=100, mechanism="laplace", delta=1e-6)
    assert found["paper"] == pure["tight"] == pytest.approx(10.0)
    assert found["tight"] < found["rdp"] < 6.0


@each(
    ("setting", "given"),
    [
        ({"mechanism": "laplace", "sampling_rate": 0.5}, {"noise_multiplier": 3.0, "steps": 5}),
        ({"mechanism": "laplace", "sampling_rate": 0.5}, {"noise_multiplier": 3.0, "epsilon": 5.0}),
        ({"mechanism": "laplace", "sampling_rate": 0.5}, {"steps": 5, "epsilon": 5.0}),
        ({"sampling": "fixed", "sampling_rate": 0.5, "delta": 1e-5}, {"noise_multiplier": 3.0, "steps": 5}),
        ({"sampling": "fixed", "sampling_rate": 0.5, "delta": 1e-5}, {"noise_multiplier": 3.0, "epsilon": 5.0}),
    ],
    ids=str,
)
def test_where_the_papers_have_no_formula_they_give_no_number(setting: dict[str, Any], given: dict[str, Any]) -> None:
    _, found = answer(**given, **setting)
    assert found["paper"] is None
    assert found["tight"] is not None
    assert found["rdp"] is not None


def test_all_records_are_a_batch_that_the_papers_know_however_it_is_called() -> None:
    _, fixed = answer(noise_multiplier=3.0, steps=5, delta=1e-5, sampling="fixed")
    _, poisson = answer(noise_multiplier=3.0, steps=5, delta=1e-5, sampling="poisson")
    assert fixed == poisson


def test_an_infinite_answer_is_none() -> None:
    # 1/z² = 1e400 is no number
    _, found = answer(noise_multiplier=1e-200, steps=1, delta=1e-5)
    assert found == {"tight": None, "rdp": None, "paper": None}


def test_whole_numbers_will_do_for_noise_and_epsilon() -> None:
    assert answer(noise_multiplier=10, steps=5, mechanism="laplace")[1]["tight"] == 0.5
    assert answer(noise_multiplier=10, epsilon=1, mechanism="laplace")[1]["tight"] == 10


# No


GIVEN = {"noise_multiplier": 1.0, "steps": 10, "epsilon": None, "delta": 1e-5}


@each(
    ("change", "message"),
    [
        ({"epsilon": 1.0}, "but all three were; leave out just one"),
        ({"steps": None}, "but steps and epsilon were left out; leave out just one"),
        (
            {"steps": None, "noise_multiplier": None},
            "but noise_multiplier and steps and epsilon were left out; leave out just one",
        ),
    ],
)
def test_exactly_one_must_be_left_out(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        answer(**(GIVEN | change))
    sentence = "two of noise_multiplier, steps and epsilon must be given, so that the third can be found, "
    assert str(refusal.value) == sentence + message


@each(
    ("change", "message"),
    [
        ({"delta": None}, "delta must be given with gaussian noise, was left out; choose 1e-5, say"),
        ({"delta": 0.0}, "delta must be above 0 with gaussian noise, was 0; choose 1e-5, say"),
        ({"delta": 1.0}, "delta must be at least 0 (pure privacy, for Laplace noise) and below 1, was 1.0"),
        ({"delta": -1e-5}, "delta must be at least 0 (pure privacy, for Laplace noise) and below 1, was -1e-05"),
        ({"delta": math.nan}, "delta must be at least 0 (pure privacy, for Laplace noise) and below 1, was nan"),
        ({"steps": 0}, "steps must be a whole number of at least 1, was 0; ask for at least one"),
        ({"steps": 2.5}, "steps must be a whole number of at least 1, was 2.5"),
        ({"steps": True}, "steps must be a whole number of at least 1, was True"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a finite number above 0, was 0.0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be a finite number above 0, was inf"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be a finite number above 0, was nan"),
        ({"steps": None, "epsilon": 0.0}, "epsilon must be a finite number above 0, was 0.0"),
        ({"steps": None, "epsilon": -1.0}, "epsilon must be a finite number above 0, was -1.0"),
        ({"steps": None, "epsilon": math.inf}, "epsilon must be a finite number above 0, was inf"),
        ({"sampling_rate": 0.0}, "sampling_rate must lie in (0, 1], was 0.0"),
        ({"sampling_rate": 1.1}, "sampling_rate must lie in (0, 1], was 1.1"),
        ({"mechanism": "cauchy"}, "mechanism must be one of gaussian, laplace, was 'cauchy'"),
        ({"mechanism": "cauchy", "delta": None}, "mechanism must be one of gaussian, laplace, was 'cauchy'"),
        ({"sampling": "shuffled"}, "sampling must be one of poisson, fixed, was 'shuffled'"),
        (
            {"mechanism": "laplace", "sampling": "fixed", "sampling_rate": 0.5},
            "sampling must be 'poisson' with laplace noise, was 'fixed'",
        ),
        (
            {"noise_multiplier": 1e6, "steps": None, "epsilon": 8.0},
            "noise_multiplier must be small enough for the budget to matter, was 1e+06",
        ),
        ({"noise_multiplier": None, "epsilon": 1e30}, "epsilon must be small enough to ask for noise, was 1e+30"),
        (
            {"noise_multiplier": None, "epsilon": 1e-12, "delta": 1e-30},
            "epsilon must be large enough for 10 steps, was 1e-12",
        ),
    ],
    ids=str,
)
def test_a_question_that_cannot_be_answered_is_refused_in_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        answer(**(GIVEN | change))
    assert str(refusal.value).startswith(message)
    assert re.fullmatch(r"[a-z_]+ must .+, was .+; .+[^.]", str(refusal.value)), str(refusal.value)
