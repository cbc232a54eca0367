"""ALI-DPFL on MNIST: how τ* responds to R_c, to C and to the smallest client (σ = 1.1, q = 0.015, δ = 1e-5, Γ = 10).

Ten clients, softmax regression, R_s = 30, paper calibration, which caps τ by the steps left only. The smallest client
enters through B̂ = q·min n_i: its noise, σ²C²d/B̂², drowns everything else in τ*.
"""

import statistics

import pytest

from claims.trainings import Outcomes, Training, clearly_less, outcomes


def ali(*, clip: float = 0.5, epsilon: float = 2.0, smallest: int = 1500) -> Training:
    options = {
        "calibration": "paper", "epsilon": epsilon, "delta": 1e-5, "clip": clip, "lr": 0.5, "rounds": 30,
        "sampling_rate": 0.015, "noise_multiplier": 1.1,
    }  # fmt: skip
    return Training("ali-dpfl", options, "mnist", {"clients": 10, "sizes": (smallest, 4000)}, "softmax", seeds=(1, 2))


@pytest.fixture(scope="module")
def trained() -> dict[str, Outcomes]:
    named = {
        "usual": ali(),
        "smaller clip": ali(clip=0.25),
        "larger clip": ali(clip=2.0),
        "smaller clip, more steps": ali(clip=0.25, epsilon=3.25),  # R_c = 1119 instead of 314
        "small client": ali(smallest=80),
        "no small client": ali(smallest=4000),
    }
    return dict(zip(named, outcomes(list(named.values())), strict=True))


def settled(reached: Outcomes) -> list[float]:
    """Return where τ settled with each seed: its median, without the first round and the last, which takes the rest."""
    return [statistics.median(steps[2:-1]) for steps in reached.steps]


def test_more_steps_to_spend_mean_more_steps_a_round(trained: dict[str, Outcomes]) -> None:
    # Where R_s·τ is beyond R_c, which then is the T of τ*.
    assert clearly_less(settled(trained["smaller clip"]), settled(trained["smaller clip, more steps"]))


def test_a_larger_clip_means_fewer_steps_a_round(trained: dict[str, Outcomes]) -> None:
    assert clearly_less(settled(trained["usual"]), settled(trained["smaller clip"]))
    assert clearly_less(settled(trained["larger clip"]), settled(trained["usual"]))


def test_the_smallest_client_decides(trained: dict[str, Outcomes]) -> None:
    assert clearly_less(settled(trained["small client"]), settled(trained["usual"]))
    assert clearly_less(settled(trained["usual"]), settled(trained["no small client"]))


def test_the_steps_never_overrun_what_the_budget_allows(trained: dict[str, Outcomes]) -> None:
    for reached in trained.values():
        assert all(sum(steps) <= 1119 and len(steps) <= 30 for steps in reached.steps)
