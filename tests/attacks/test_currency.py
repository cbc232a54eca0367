"""One currency: rankings in which every ε means the same, checked by the test that an adversary would make."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

import dpfl
from dpfl.comparison import Comparison, contenders
from dpfl.privacy.accounting import Mechanism, tight
from dpfl.rehearsal import Rehearsal
from dpfl.streams import Streams
from dpfl.systems import UDP, DPSGDFedAvg, FedSGDDPC, PrivateSystem
from grids import each

Array = NDArray[np.float64]
SIZE, DELTA = 40, 1e-3
FEW = {"clients": 3, "sizes": SIZE}


def compared(*systems: PrivateSystem, **options: Any) -> Comparison:
    made = [replace(one, config=replace(one.config, system=system))
            for system in systems for one in contenders([system.name], FEW)]  # fmt: skip
    return dpfl.compare(made, seeds=1, **options)


def noise_std(system: PrivateSystem, claim: float) -> float:
    """Return the standard deviation that a client's first upload gets where the system claims this ε."""
    sent = Rehearsal(replace(system, epsilon=claim), (SIZE,) * 3, Streams(1)).rounds[0]
    return math.sqrt(sent.orders[0].noise_variance(SIZE))


@each("target", [1.0, 3.0])
def test_the_same_training_has_the_same_noise_whoever_promises_it(target: float) -> None:
    """UDP and full-batch FedSGD-DPC clip, step and noise alike; one names a replaced record, one an added one."""
    udp, dpc = UDP(rounds=4, lr=1.0, clip=1.0), FedSGDDPC(rounds=4, lr=1.0, clip=1.0)
    rows = compared(udp, dpc, epsilon=target).to_dict()["systems"]
    assert [row["neighbours"] for row in rows] == ["replace", "replace"]
    first, second = (row["claimed"]["epsilon"] for row in rows)
    assert first == target
    assert second < target / 1.8
    assert noise_std(dpc, second) == pytest.approx(noise_std(udp, first), rel=1e-4)
    # The twin: both at "the same ε", as each of them means it, is half the noise for one of them.
    assert noise_std(dpc, target) == pytest.approx(noise_std(udp, target) / 2, rel=1e-6)


def replaced(x: Array, q: float, std: float, steps: int) -> tuple[Array, Array]:
    """Return the densities of `steps` noised sums on a grid, with the record at +1 and with the one that replaces it.

    The other records cancel. A record of gradient +1 is drawn with chance q, or one of gradient −1 in its place.
    """
    with_one, with_other = ((1 - q) * norm.pdf(x, 0, std) + q * norm.pdf(x, at, std) for at in (1.0, -1.0))
    for _ in range(steps - 1):
        with_one, with_other = np.multiply.outer(with_one, with_one), np.multiply.outer(with_other, with_other)
    return with_one, with_other


def delta_of(epsilon: float, q: float, std: float, steps: int) -> float:
    """Return the least δ at which an adversary who knows all other records cannot tell the two at ε."""
    x, width = np.linspace(-1 - 9 * std, 1 + 9 * std, 200_001 if steps == 1 else 2501, retstep=True)
    one, other = replaced(x, q, std, steps)
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * width**steps)


@each(("rate", "steps"), [(0.5, 1), (0.1, 1), (0.5, 2)])
def test_a_sampled_record_that_is_replaced_is_not_told_apart(rate: float, steps: int) -> None:
    system = DPSGDFedAvg(rounds=steps, sampling_rate=rate, delta=DELTA)
    (row,) = compared(system, epsilon=1.0).to_dict()["systems"]
    assert 1.0 * (1 - 1e-3) <= row["true_epsilon"] <= 1.0

    def told_apart(claim: float) -> float:
        order = Rehearsal(replace(system, epsilon=claim), (SIZE,), Streams(1)).rounds[0].orders[0]
        return delta_of(1.0, rate, order.noise.size / order.clip.clip_norm, steps)

    assert 0.97 * DELTA <= told_apart(row["claimed"]["epsilon"]) <= DELTA
    # The twin: the price of adding or removing, printed as if it were that of replacing.
    assert told_apart(1.0) > 1.3 * DELTA


def test_no_other_pair_of_gradients_is_told_apart_more_easily() -> None:
    """In the plane, for clipped gradients in any two directions: the dearest are opposite, and as long as the clip."""
    rng, rate, std = np.random.default_rng(7), 0.3, 0.8
    side, width = np.linspace(-1 - 8 * std, 1 + 8 * std, 301, retstep=True)
    plane = np.stack(np.meshgrid(side, side), axis=-1)

    def density(mean: Array) -> Array:
        return np.asarray(np.exp(-((plane - mean) ** 2).sum(-1) / (2 * std**2)) / (2 * math.pi * std**2))

    for epsilon in (0.1, 1.0, 2.5):
        allowed = delta_of(epsilon, rate, std, 1)
        for _ in range(40):
            one, other = (g / max(1.0, float(np.linalg.norm(g))) for g in rng.normal(size=(2, 2)) * 1.5)
            p, q = ((1 - rate) * density(np.zeros(2)) + rate * density(mean) for mean in (one, other))
            assert (np.maximum(p - math.exp(epsilon) * q, 0).sum() * width**2) <= allowed * (1 + 1e-6)


def test_without_the_relation_in_the_package_the_price_is_the_safe_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpfl.privacy import accounting

    sampled = Mechanism("gaussian", 3.0, 0.3, replaced=True)
    with_it = tight({sampled: 5}, 1e-5)
    made = accounting.dp_accounting().pld.privacy_loss_distribution
    newer = made.from_gaussian_mechanism

    def older(standard_deviation: float, value_discretization_interval: float = 1e-4, sampling_prob: float = 1) -> Any:
        width = value_discretization_interval
        return newer(standard_deviation, value_discretization_interval=width, sampling_prob=sampling_prob)

    monkeypatch.setattr(made, "from_gaussian_mechanism", older)
    accounting._by_loss_distribution.cache_clear()
    accounting._loss_distribution.cache_clear()
    try:
        without = tight({sampled: 5}, 1e-5)
    finally:
        accounting._by_loss_distribution.cache_clear()
        accounting._loss_distribution.cache_clear()
    unsampled = tight({Mechanism("gaussian", 1.5): 5}, 1e-5)
    assert with_it < 0.7 * without
    assert without == pytest.approx(unsampled, rel=1e-3)
