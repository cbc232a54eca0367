"""`dpfl account`: one question to three accountants, compared with dp-accounting and with sums done by hand."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import dp_accounting
import dp_accounting.pld
import pytest

from e2e.command_line import dpfl
from grids import each

SAMPLED = ("--sampling-rate", ".015", "--delta", "1e-5")  # the setting of ALI-DPFL, with --noise-multiplier 1.1


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Account = Callable[..., Done]


@pytest.fixture
def account(tmp_path: Path) -> Account:
    """Run `dpfl account`."""

    def call(*args: str) -> Done:
        done = dpfl("account", *args, cwd=tmp_path)
        return Done(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def found(account: Account) -> Callable[..., dict[str, Any]]:
    """Ask with --json and return the answers of the three accountants to the question of that name."""

    def call(question: str, *args: str) -> dict[str, Any]:
        done = account(*args, "--json")
        assert (done.code, done.err) == (0, "")
        document = json.loads(done.out)  # one document and nothing else, or this fails
        assert list(document) == [question]
        assert list(document[question]) == ["tight", "rdp", "paper"]
        return document[question]

    return call


def sampled(noise_multiplier: float, rate: float = 0.015) -> Any:
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier))


def by_rdp(event: Any, steps: int, delta: float = 1e-5, **options: Any) -> float:
    return float(dp_accounting.rdp.RdpAccountant(**options).compose(event, steps).get_epsilon(delta))


def by_pld(event: Any, steps: int, delta: float = 1e-5) -> float:
    return float(dp_accounting.pld.PLDAccountant().compose(event, steps).get_epsilon(delta))


def by_integer_orders(noise_multiplier: float, rate: float, steps: int, delta: float = 1e-5) -> float:
    """Return ALI-DPFL's ε by its own sum, term by term: enough orders for the minimum, few enough for doubles."""

    def divergence(order: int) -> float:
        terms = (
            math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * math.exp((k * k - k) / 2 / noise_multiplier**2)
            for k in range(order + 1)
        )
        return math.log(math.fsum(terms)) / (order - 1)

    return min(steps * divergence(order) + math.log(1 / delta) / (order - 1) for order in range(2, 30))


Found = Callable[..., dict[str, Any]]


# ε.


def test_the_epsilon_of_plain_gaussian_noise(found: Found) -> None:
    # A hundred steps of multiplier 10 are one of multiplier 1. The papers: α/2 + ln(10⁵)/(α − 1), least at α = 6.
    epsilon = found("epsilon", "--noise-multiplier", "10", "--steps", "100", "--delta", "1e-5")
    assert epsilon["tight"] == pytest.approx(dp_accounting.get_epsilon_gaussian(1.0, 1e-5), rel=1e-6)
    assert epsilon["rdp"] == pytest.approx(by_rdp(dp_accounting.GaussianDpEvent(1.0), 1), rel=1e-9)
    assert epsilon["paper"] == pytest.approx(3 + math.log(1e5) / 5, rel=1e-12)


def test_the_epsilon_of_sampled_gaussian_noise(found: Found) -> None:
    # 79 steps, for which ALI-DPFL claims 1.55, are really worth 0.77.
    epsilon = found("epsilon", "--noise-multiplier", "1.1", "--steps", "79", *SAMPLED)
    assert epsilon["tight"] == pytest.approx(0.77, abs=0.005)
    assert epsilon["tight"] == pytest.approx(by_pld(sampled(1.1), 79), rel=1e-3)
    assert epsilon["rdp"] == pytest.approx(by_rdp(sampled(1.1), 79), rel=1e-6)
    assert epsilon["paper"] == pytest.approx(by_integer_orders(1.1, 0.015, 79), rel=1e-9)
    assert epsilon["paper"] == pytest.approx(1.55, abs=0.005)


def test_the_epsilon_of_batches_of_fixed_size(found: Found) -> None:
    epsilon = found("epsilon", "--noise-multiplier", "2", "--steps", "100", *SAMPLED, "--sampling", "fixed")
    drawn = dp_accounting.SampledWithoutReplacementDpEvent(1000, 15, dp_accounting.GaussianDpEvent(2.0))
    replaced = dp_accounting.NeighboringRelation.REPLACE_ONE
    assert epsilon["rdp"] == pytest.approx(by_rdp(drawn, 100, neighboring_relation=replaced), rel=1e-6)
    assert epsilon["tight"] == epsilon["rdp"]  # the best that is known
    assert epsilon["paper"] is None  # no paper counts this


def test_fixed_batches_are_no_cheaper_than_poisson_ones(found: Found) -> None:
    question = ("epsilon", "--noise-multiplier", "2", "--steps", "100", *SAMPLED)
    assert found(*question, "--sampling", "fixed")["tight"] > found(*question, "--sampling", "poisson")["tight"]


def test_the_epsilon_of_laplace_noise_adds_up_where_delta_is_left_out(found: Found) -> None:
    assert found("epsilon", "--mechanism", "laplace", "--noise-multiplier", "4", "--steps", "3") == {
        "tight": 0.75, "rdp": 0.75, "paper": 0.75,
    }  # fmt: skip


def test_the_epsilon_of_laplace_noise_at_some_delta(found: Found) -> None:
    question = ("--mechanism", "laplace", "--noise-multiplier", "10", "--steps", "100", "--delta", "1e-5")
    epsilon = found("epsilon", *question)
    assert epsilon["tight"] == pytest.approx(by_pld(dp_accounting.LaplaceDpEvent(10.0), 100), rel=1e-4)
    assert epsilon["rdp"] == pytest.approx(by_rdp(dp_accounting.LaplaceDpEvent(10.0), 100), rel=1e-6)
    assert epsilon["paper"] == pytest.approx(10.0)  # the papers have only the sum


def test_the_epsilon_of_sampled_laplace_noise(found: Found) -> None:
    # Pure: ln(1 + q(e − 1)) a step. Papers never sample with Laplace noise.
    question = ("--mechanism", "laplace", "--noise-multiplier", "1", "--steps", "20", "--sampling-rate", "0.1")
    pure = found("epsilon", *question)
    assert pure["tight"] == pure["rdp"] == pytest.approx(20 * math.log(1 + 0.1 * (math.e - 1)))
    some = found("epsilon", *question, "--delta", "1e-5")
    drawn = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(1.0))
    assert some["tight"] == pytest.approx(by_pld(drawn, 20), rel=1e-3)
    assert some["tight"] < some["rdp"] < pure["rdp"]
    assert pure["paper"] is some["paper"] is None


# Steps.


def test_the_steps_of_sampled_gaussian_noise(found: Found) -> None:
    # ALI-DPFL's first column: 422 by privacy-loss distributions, 78 by its own count.
    steps = found("steps", "--noise-multiplier", "1.1", "--epsilon", "1.55", *SAMPLED)
    assert (steps["tight"], steps["paper"]) == (422, 78)
    assert by_rdp(sampled(1.1), steps["rdp"]) <= 1.55 < by_rdp(sampled(1.1), steps["rdp"] + 1)
    assert all(isinstance(number, int) for number in steps.values())


def test_the_steps_of_plain_gaussian_noise(found: Found) -> None:
    # S steps of multiplier 10 have μ = √S/10; the last that fits, and the first that does not.
    steps = found("steps", "--noise-multiplier", "10", "--epsilon", "8", "--delta", "1e-5")
    of = {
        "tight": lambda count: dp_accounting.get_epsilon_gaussian(10 / math.sqrt(count), 1e-5),
        "rdp": lambda count: by_rdp(dp_accounting.GaussianDpEvent(10.0), count),
        "paper": lambda count: min(count * a / 200 + math.log(1e5) / (a - 1) for a in range(2, 257)),
    }
    for name, epsilon in of.items():
        assert epsilon(steps[name]) <= 8 < epsilon(steps[name] + 1)
    assert steps["tight"] > steps["rdp"] > steps["paper"]


def test_the_steps_of_laplace_noise(found: Found) -> None:
    # Three tenths are 0.3 as typed, although in binary their sum is more.
    assert found("steps", "--mechanism", "laplace", "--noise-multiplier", "10", "--epsilon", "0.3") == {
        "tight": 3, "rdp": 3, "paper": 3,
    }  # fmt: skip


def test_no_step_at_all_may_fit(found: Found, account: Account) -> None:
    question = ("--noise-multiplier", "0.5", "--epsilon", "0.1", "--delta", "1e-5")
    assert found("steps", *question) == {"tight": 0, "rdp": 0, "paper": 0}
    assert "not even one step fits; add noise, or raise epsilon or delta" in account(*question).out


# Noise.


def test_the_noise_for_plain_steps(found: Found) -> None:
    # A hundred steps need ten times the noise of one.
    noise = found("noise_multiplier", "--steps", "100", "--epsilon", "8", "--delta", "1e-5")
    least = 10 * dp_accounting.get_sigma_gaussian(8.0, 1e-5)
    assert least * (1 - 1e-6) <= noise["tight"] <= least * (1 + 2e-5)
    by_rdp_then = by_rdp(dp_accounting.GaussianDpEvent(noise["rdp"]), 100)
    assert 8 * (1 - 1e-4) <= by_rdp_then <= 8
    paper = min(100 * a / 2 / noise["paper"] ** 2 + math.log(1e5) / (a - 1) for a in range(2, 257))
    assert 8 * (1 - 1e-4) <= paper <= 8


def test_the_noise_for_sampled_steps(found: Found) -> None:
    # 422 steps are what noise of 1.1 affords at 1.55, and 423 are not: 1.1 is enough, and hardly too much.
    noise = found("noise_multiplier", "--steps", "422", "--epsilon", "1.55", *SAMPLED)
    assert 1.1 * (1 - 1e-3) < noise["tight"] <= 1.1
    assert by_rdp(sampled(noise["rdp"]), 422) == pytest.approx(1.55, rel=1e-4)
    assert by_integer_orders(noise["paper"], 0.015, 422) == pytest.approx(1.55, rel=1e-4)


def test_the_noise_for_laplace_steps(found: Found) -> None:
    noise = found("noise_multiplier", "--mechanism", "laplace", "--steps", "10", "--epsilon", "0.8")
    assert noise == {"tight": 12.5, "rdp": 12.5, "paper": 12.5}


# How it is asked and answered.


def test_words_for_people(account: Account) -> None:
    done = account("--noise-multiplier", "10", "--steps", "100", "--delta", "1e-5")
    assert (done.code, done.err) == (0, "")
    tight, rdp, paper = done.out.splitlines()
    assert tight.split()[:4] == ["tight", "ε", "≤", "4.378"]  # 4.37718, rounded up
    assert rdp.split()[:3] == ["rdp", "ε", "≤"]
    assert "Rényi" in rdp
    assert paper.split()[:4] == ["paper", "ε", "≤", "5.303"]  # 5.30259
    assert "papers" in paper


def test_every_question_has_its_sign(account: Account) -> None:
    noise = account("--mechanism", "laplace", "--steps", "10", "--epsilon", "1").out
    assert [line.split()[:4] for line in noise.splitlines()] == [
        [name, "noise", "≥", "10"] for name in ("tight", "rdp", "paper")
    ]
    steps = account("--mechanism", "laplace", "--noise-multiplier", "10", "--epsilon", "1").out
    assert [line.split()[:4] for line in steps.splitlines()] == [
        [name, "steps", "≤", "10"] for name in ("tight", "rdp", "paper")
    ]


def test_what_has_no_formula_is_a_dash(account: Account) -> None:
    done = account("--noise-multiplier", "2", "--steps", "5", *SAMPLED, "--sampling", "fixed")
    paper = done.out.splitlines()[2]
    assert paper.split()[:4] == ["paper", "ε", "≤", "–"]
    assert paper.endswith("no formula, or no finite answer")


@pytest.mark.parametrize(
    ("spelt", "plainly"),
    [
        (("--noise-multiplier", "10.", "--delta", ".00001"), ("--noise-multiplier", "10", "--delta", "1e-5")),
        (("--noise-multiplier", "1e1", "--delta", "1E-5"), ("--noise-multiplier", "10", "--delta", "1e-5")),
        (("--noise-multiplier", "+10.0", "--delta", "0.00001"), ("--noise-multiplier", "10", "--delta", "1e-5")),
        (("--noise-multiplier", "10", "--delta", "1.e-5"), ("--noise-multiplier", "10", "--delta", "1e-5")),
    ],
)
def test_numbers_are_read_as_people_write_them(spelt: tuple[str, ...], plainly: tuple[str, ...], found: Found) -> None:
    assert found("epsilon", "--steps", "10", *spelt) == found("epsilon", "--steps", "10", *plainly)


def test_the_installed_command_says_the_same(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("dpfl")), "account", "--mechanism", "laplace", "--steps", "10"]
    done = subprocess.run(
        [*command, "--epsilon", "1", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == {"noise_multiplier": {"tight": 10.0, "rdp": 10.0, "paper": 10.0}}
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


STEPS_AND_DELTA = ("--steps", "10", "--delta", "1e-5")
NOISE_AND_STEPS = ("--noise-multiplier", "1", "--steps", "10")
BAD = {
    "nothing to go by": (("--delta", "1e-5"), ["noise_multiplier", "steps", "epsilon", "left out"]),
    "noise only": (("--noise-multiplier", "1", "--delta", "1e-5"), ["two of", "steps and epsilon were left out"]),
    "steps only": (STEPS_AND_DELTA, ["two of", "noise_multiplier and epsilon were left out"]),
    "epsilon only": (("--epsilon", "1", "--delta", "1e-5"), ["noise_multiplier and steps were left out"]),
    "all three": ((*NOISE_AND_STEPS, "--epsilon", "1", "--delta", "1e-5"), ["all three were", "leave out just one"]),
    "epsilon zero": ((*STEPS_AND_DELTA, "--epsilon", "0"), ["epsilon", "above 0", "was 0"]),
    "epsilon below zero": ((*STEPS_AND_DELTA, "--epsilon", "-1"), ["epsilon", "above 0", "was -1"]),
    "epsilon infinite": ((*STEPS_AND_DELTA, "--epsilon", "inf"), ["epsilon", "finite", "was inf"]),
    "epsilon no number": ((*STEPS_AND_DELTA, "--epsilon", "nan"), ["epsilon", "finite", "was nan"]),
    "epsilon a word": ((*STEPS_AND_DELTA, "--epsilon", "much"), ["epsilon", "number", "'much'"]),
    "epsilon a list": ((*STEPS_AND_DELTA, "--epsilon", "[1, 2]"), ["epsilon", "number", "[1, 2]"]),
    "no delta": (NOISE_AND_STEPS, ["delta", "must be given with gaussian noise"]),
    "delta zero": ((*NOISE_AND_STEPS, "--delta", "0"), ["delta", "above 0", "gaussian"]),
    "delta below zero": ((*NOISE_AND_STEPS, "--delta", "-0.1"), ["delta", "was -0.1"]),
    "delta one": ((*NOISE_AND_STEPS, "--delta", "1"), ["delta", "below 1", "was 1"]),
    "delta a word": ((*NOISE_AND_STEPS, "--delta", "tiny"), ["delta", "'tiny'"]),
    "delta of laplace": ((*NOISE_AND_STEPS, "--mechanism", "laplace", "--delta", "1.5"), ["delta", "was 1.5"]),
    "rate zero": ((*NOISE_AND_STEPS, "--delta", "1e-5", "--sampling-rate", "0"), ["sampling_rate", "(0, 1]", "was 0"]),
    "rate above one": ((*NOISE_AND_STEPS, "--delta", "1e-5", "--sampling-rate", "1.5"), ["sampling_rate", "was 1.5"]),
    "rate a word": ((*NOISE_AND_STEPS, "--delta", "1e-5", "--sampling-rate", "all"), ["sampling_rate", "'all'"]),
    "no steps": (("--steps", "0", "--epsilon", "1", "--delta", "1e-5"), ["steps", "at least 1", "was 0"]),
    "half a step": (("--steps", "1.5", "--epsilon", "1", "--delta", "1e-5"), ["steps", "whole number", "was 1.5"]),
    "steps a word": (("--steps", "many", "--epsilon", "1", "--delta", "1e-5"), ["steps", "whole number", "'many'"]),
    "no noise": (("--noise-multiplier", "0", "--steps", "1", "--delta", "1e-5"), ["noise_multiplier", "above 0"]),
    "negative noise": (("--noise-multiplier", "-1", "--steps", "1", "--delta", "1e-5"), ["noise_multiplier", "-1"]),
    "noise a word": (("--noise-multiplier", "x", "--steps", "1", "--delta", "1e-5"), ["noise_multiplier", "'x'"]),
    "mechanism": ((*NOISE_AND_STEPS, "--delta", "1e-5", "--mechanism", "cauchy"), ["mechanism", "laplace", "'cauchy'"]),
    "sampling": ((*NOISE_AND_STEPS, "--delta", "1e-5", "--sampling", "shuffled"), ["sampling", "fixed", "'shuffled'"]),
    "fixed batches with laplace noise": (
        (*NOISE_AND_STEPS, "--mechanism", "laplace", "--sampling", "fixed", "--sampling-rate", "0.1"),
        ["sampling", "poisson", "laplace"],
    ),
    "more steps than anybody takes": (
        ("--noise-multiplier", "1e9", "--epsilon", "8", "--delta", "1e-5"),
        ["noise_multiplier", "1e+10 steps", "lower it"],
    ),
    "more laplace steps than numbers": (
        ("--mechanism", "laplace", "--noise-multiplier", "1e200", "--epsilon", "1e200"),
        ["noise_multiplier"],
    ),
    "unknown option": ((*NOISE_AND_STEPS, "--delta", "1e-5", "--sigma", "1"), ["--sigma"]),
}  # fmt: skip


@each("as_json", [(), ("--json",)], ids=["words", "json"])
@each(("args", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence(
    args: tuple[str, ...], words: list[str], as_json: tuple[str, ...], account: Account
) -> None:
    done = account(*args, *as_json)
    assert (done.code, done.out) == (2, "")
    (sentence,) = done.err.splitlines()
    assert sentence.startswith("dpfl: ")
    for word in words:
        assert word in sentence


def test_called_with_nothing_it_explains_itself(account: Account) -> None:
    done = account()
    assert "--noise-multiplier" in done.out + done.err
    assert "dpfl account --steps 100 --epsilon 8" in done.out + done.err
