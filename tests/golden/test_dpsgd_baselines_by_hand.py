"""The private baselines walked by hand for two rounds: FedAvg with DP-SGD, Adap DP-FL, PE-DPFL and Lei's approach.

Source: ali-dpfl, Algorithm 1 (FedAvg with DP-SGD) and what its Section V says of PE-DPFL and Adap DP-FL; udp-crd,
Section 5, of Lei's approach; what they leave open is stated in each system's file and repeated here. All in plain numpy
on a softmax model with its gradient written out; batches are drawn again from the streams, and the noise is switched to
known vectors. Tolerance 1e-6; noise that is found by a search may be larger than it must be (by 2e-5, or by 3 % where a
filter judges it), never smaller.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn
from torch.nn import functional

from conformance.asking import session_of
from dpfl.models import Model
from dpfl.round import play
from dpfl.streams import Streams
from dpfl.systems import PEDPFL, AdapDPFL, DPSGDFedAvg, Lei, System
from golden.known import batches_of, records_of, switch_noise

SEED = 1
RATE, CLIP = 0.4, 0.95  # η, C
EPSILON, DELTA = (2.0, 6.0), (1e-3, 1e-2)
DIM = 9  # three classes, two features and a bias
START = np.array([0.2, -0.1, 0.0, 0.3, -0.4, 0.1, 0.05, -0.05, 0.1])
CLIENTS = (
    [((1.0, 2.0), 0), ((-1.0, 0.5), 2), ((0.1, 0.2), 1)],
    [((0.2, 0.1), 1), ((3.0, -1.0), 0), ((0.5, 0.5), 2), ((-2.0, 0.3), 1), ((0.0, 0.1), 0)],
)
PUBLIC = [((1.0, 1.0), 0), ((-0.5, 1.0), 2), ((0.3, -0.2), 1)]
SIZES = tuple(map(len, CLIENTS))
SHARES = (3 / 8, 5 / 8)


def noise_vectors() -> Iterator[np.ndarray]:
    """Yield the vectors that stand for standard normal noise, in the order in which it is asked for."""
    return (np.sin(2.0 * k + np.arange(DIM)) / 10 for k in itertools.count())


def probabilities(w: np.ndarray, x: tuple) -> np.ndarray:
    scores = w[:6].reshape(3, 2) @ np.array(x) + w[6:]
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def gradient(w: np.ndarray, record: tuple) -> np.ndarray:
    """Return the gradient of −ln p_y for one record: (p − e_y)·xᵀ, and p − e_y for the bias."""
    x, label = record
    slope = probabilities(w, x) - np.eye(3)[label]
    return np.concatenate([np.outer(slope, x).ravel(), slope])


def loss(w: np.ndarray, records: list) -> float:
    return float(np.mean([-math.log(probabilities(w, x)[label]) for x, label in records]))


def clipped_sum(w: np.ndarray, records: list, clip: float) -> np.ndarray:
    total = np.zeros(DIM)
    for record in records:
        g = gradient(w, record)
        total = total + g / max(1.0, np.linalg.norm(g) / clip)
    return total


def dpsgd(
    w: Any, i: int, round: int, *, steps: int, q: float, clip: float, multiplier: float, noise: Iterator
) -> np.ndarray:
    """Return what client i ends with: lines 6 to 11 of Algorithm 1, divided by the expected batch."""
    batches = batches_of(SEED, i, round)
    for _ in range(steps):
        drawn = batches.random(SIZES[i]) < q
        total = clipped_sum(w, list(itertools.compress(CLIENTS[i], drawn)), clip)
        w = w - RATE * (total + multiplier * clip * next(noise)) / (q * SIZES[i])
    return w


def average(locals_: list[np.ndarray]) -> np.ndarray:
    return sum(share * one for share, one in zip(SHARES, locals_, strict=True))  # type: ignore[return-value]


def exact_mu(epsilon: float, delta: float) -> float:
    """Return the μ at which Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) is δ."""

    def excess(mu: float) -> float:
        return norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2) - delta

    return brentq(excess, 1e-3, 50, xtol=1e-13)


def ali_claim(q: float, multiplier: float, steps: int, delta: float) -> float:
    """Return ALI-DPFL's Theorem 2 (with its logarithm); the best integer order is far below 80 for these budgets."""
    found = math.inf
    for alpha in range(2, 80):
        terms = [
            math.log(math.comb(alpha, k)) + (alpha - k) * math.log(1 - q) + k * math.log(q)
            + (k * k - k) / (2 * multiplier**2)
            for k in range(alpha + 1)
        ]  # fmt: skip
        log_a = max(terms) + math.log(math.fsum(math.exp(term - max(terms)) for term in terms))
        found = min(found, (steps * log_a + math.log(1 / delta)) / (alpha - 1))
    return found


def filtered(q: float, multiplier: float, steps: int, delta: float) -> float:
    """Return the ε at which a Rényi filter lets the steps pass that gives its best order half of δ.

    The curve is dp-accounting's own; ε = ε(α) + ln(1 − 1/α) − ln(δα/2)/(α − 1).
    """
    orders = (1.5, 2.0, 2.5, *range(3, 11), 12, 14, 17, 20, 24, 32, 48, 64, 128)
    step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(multiplier))
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)  # it speaks of orders whose series does not converge, which are not the best
    curve = RdpAccountant(orders).compose(step, steps)._rdp
    absl.setLevel(level)
    return min(
        one + math.log1p(-1 / alpha) - math.log(delta * alpha / 2) / (alpha - 1)
        for one, alpha in zip(curve, orders, strict=True)
    )


@pytest.fixture
def known_noise(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Switch the clients' noise to the known vectors, and note its standard deviations."""
    return switch_noise(monkeypatch, noise_vectors())


def played(system: System, clients_of: Callable, rounds: int = 2) -> list:
    """Return the state as the training begins and after each real round."""
    model = Model(
        nn.Linear(2, 3).double(),
        lambda outputs, labels: functional.cross_entropy(outputs, labels, reduction="none"),
        classify=lambda outputs: outputs.argmax(-1),
    )
    model.load(torch.from_numpy(START))
    streams, clients, validation = (
        Streams(SEED),
        tuple(records_of(rows, torch.int64) for rows in CLIENTS),
        records_of(PUBLIC, torch.int64),
    )
    performers = clients_of(model, clients, streams)
    session = session_of(system, model, clients, streams, performers, public=validation)
    states = [session.begin()]
    for _ in range(rounds):
        state, outcome = play(session, states[-1])
        assert outcome.refused == ()
        states.append(state)
    return states


def walk(local: Callable[[np.ndarray, int, int], np.ndarray], rounds: int = 2) -> list[np.ndarray]:
    """Return the model after each round; local(w, i, round) is what client i ends with."""
    models = [START]
    for round in range(1, rounds + 1):
        models.append(average([local(models[-1], i, round) for i in range(2)]))
    return models


def assert_models(states: list, models: list[np.ndarray]) -> None:
    for state, expected in zip(states, models, strict=True):
        assert state.model.numpy() == pytest.approx(expected, rel=1e-6, abs=1e-7)


# FedAvg with DP-SGD


def test_dpsgd_fedavg_with_exact_noise_on_full_batches(clients_of: Callable, known_noise: list[float]) -> None:
    # R·τ = 15 releases of μ = 1/z are one of √15/z.
    multipliers = [math.sqrt(5 * 3) / exact_mu(*budget) for budget in zip(EPSILON, DELTA, strict=True)]
    system = DPSGDFedAvg(
        rounds=5, local_steps=3, lr=RATE, clip=CLIP, sampling_rate=1.0, epsilon=EPSILON, delta=DELTA
    )  # fmt: skip
    states, noise = played(system, clients_of), noise_vectors()
    assert states[0].noise_multipliers == pytest.approx(multipliers, rel=1e-6)
    models = walk(lambda w, i, round: dpsgd(
        w, i, round, steps=3, q=1.0, clip=CLIP, multiplier=multipliers[i], noise=noise
    ))  # fmt: skip
    assert_models(states, models)
    assert known_noise == pytest.approx(2 * [z * CLIP for z in multipliers for _ in range(3)], rel=1e-6)
    assert [state.left for state in states] == [(15, 15), (12, 12), (9, 9)]


def test_dpsgd_fedavg_with_given_noise_on_sampled_batches(clients_of: Callable, known_noise: list[float]) -> None:
    system = DPSGDFedAvg(
        rounds=5, local_steps=2, lr=RATE, clip=CLIP, sampling_rate=0.6, noise_multiplier=2.5, epsilon=EPSILON,
        delta=DELTA, calibration="paper",
    )  # fmt: skip
    states, noise = played(system, clients_of), noise_vectors()
    settings = {"steps": 2, "q": 0.6, "clip": CLIP, "multiplier": 2.5, "noise": noise}
    together = average([dpsgd(START, i, 1, **settings) for i in range(2)])
    # The smaller budget affords three steps, not four: in the second round the other client is the average.
    assert_models(states, [START, together, dpsgd(together, 1, 2, **settings)])
    assert known_noise == [2.5 * CLIP] * 6
    for i, most in enumerate(states[0].left):  # R_c of each budget, by the paper's formula
        assert ali_claim(0.6, 2.5, most, DELTA[i]) <= EPSILON[i] < ali_claim(0.6, 2.5, most + 1, DELTA[i])
    assert states[0].left[0] == 3
    assert states[2].left == (1, states[0].left[1] - 4)


def test_dpsgd_fedavg_with_the_papers_noise(clients_of: Callable, known_noise: list[float]) -> None:
    system = DPSGDFedAvg(
        rounds=4, local_steps=2, lr=RATE, clip=CLIP, sampling_rate=0.6, epsilon=EPSILON, delta=DELTA,
        calibration="paper",
    )  # fmt: skip
    states, noise = played(system, clients_of), noise_vectors()
    multipliers = states[0].noise_multipliers
    for z, epsilon, delta in zip(multipliers, EPSILON, DELTA, strict=True):
        assert ali_claim(0.6, z, 8, delta) <= epsilon < ali_claim(0.6, z * (1 - 2e-5), 8, delta)
    models = walk(lambda w, i, round: dpsgd(
        w, i, round, steps=2, q=0.6, clip=CLIP, multiplier=multipliers[i], noise=noise
    ))  # fmt: skip
    assert_models(states, models)


# Adap DP-FL


@pytest.mark.parametrize(("patience", "sampling_rate"), [(1, 1.0), (2, 0.7)])
def test_adap_dpfl(patience: int, sampling_rate: float, clients_of: Callable, known_noise: list[float]) -> None:
    steps, rounds, factor, decay = 2, 6, 1.3, 0.8
    granted = (45.0, 35.0)  # so large that the mean gradient stands out from the noise
    system = AdapDPFL(
        rounds=rounds, local_steps=steps, lr=RATE, clip=CLIP, clip_factor=factor, sampling_rate=sampling_rate,
        noise_decay=decay, patience=patience, epsilon=granted, delta=DELTA,
    )  # fmt: skip
    states, noise = played(system, clients_of), noise_vectors()
    first = states[0].noise_multipliers
    for z, epsilon, delta in zip(first, granted, DELTA, strict=True):
        if sampling_rate == 1:
            assert z == pytest.approx(math.sqrt(rounds * steps) / exact_mu(epsilon, delta), rel=1e-6)
        else:
            needed = [filtered(sampling_rate, one, rounds * steps, delta) for one in (z, z / 1.03)]
            assert needed[0] <= epsilon < needed[1]  # searched in steps of 1 %

    multipliers, clips, w, losses, stds = list(first), [CLIP, CLIP], START, [loss(START, PUBLIC)], []
    for round, state in enumerate(states[1:], start=1):
        locals_ = [
            dpsgd(w, i, round, steps=steps, q=sampling_rate, clip=clips[i], multiplier=multipliers[i], noise=noise)
            for i in range(2)
        ]
        stds += [multipliers[i] * clips[i] for i in range(2) for _ in range(steps)]
        # ‖upload/(ηE)‖² holds the mean gradient, and the mean of E noises of (zC/(q·n))² on each of d coordinates.
        for i in range(2):
            told = np.sum((locals_[i] - w) ** 2) / (RATE * steps) ** 2
            noised = DIM * (multipliers[i] * clips[i] / (sampling_rate * SIZES[i])) ** 2 / steps
            wanted = factor * math.sqrt(max(told - noised, 0.0))
            clips[i] = min(max(wanted, CLIP / 10), 10 * CLIP)
        w = average(locals_)
        losses.append(loss(w, PUBLIC))
        assert losses[-1] < losses[-2]  # so that patience alone decides
        if round % patience == 0:
            multipliers = [decay * one for one in multipliers]
        assert state.model.numpy() == pytest.approx(w, rel=1e-6, abs=1e-7)
        assert state.clips == pytest.approx(clips, rel=1e-6)
        assert state.noise_multipliers == pytest.approx(multipliers, rel=1e-12)
    assert known_noise == pytest.approx(stds, rel=1e-6)
    assert all(CLIP / 10 < one < 10 * CLIP and one != CLIP for one in states[1].clips)  # the rule, not its limits
    assert states[-1].noise_multipliers[0] == pytest.approx(first[0] * decay ** (2 // patience))


# PE-DPFL


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("pull", [0.0, 0.5, 4.0])
def test_pe_dpfl(steps: int, pull: float, clients_of: Callable, known_noise: list[float]) -> None:
    system = PEDPFL(rounds=6, local_steps=steps, lr=RATE, clip=CLIP, proximal=pull, epsilon=EPSILON, delta=DELTA)
    states, noise = played(system, clients_of), noise_vectors()
    stds = []
    for i, n in enumerate(SIZES):
        # After the first step the two runs differ by 2ηC/n; then each step pulls both back by 1 − ημ and turns every
        # record's clipped gradient around at worst: 2ηC.
        distance = 2 * RATE * CLIP / n
        for _ in range(steps - 1):
            distance = abs(1 - RATE * pull) * distance + 2 * RATE * CLIP
        stds.append(distance * math.sqrt(6) / exact_mu(EPSILON[i], DELTA[i]))
    assert states[0].noise_stds == pytest.approx(stds, rel=1e-6)

    def local(w: np.ndarray, i: int, round: int) -> np.ndarray:
        mine = w
        for _ in range(steps):  # down the slope of F_i(w) + μ/2·‖w − broadcast‖²
            mine = mine - RATE * (clipped_sum(mine, CLIENTS[i], CLIP) / SIZES[i] + pull * (mine - w))
        return mine + stds[i] * next(noise)

    assert_models(states, walk(local))
    assert known_noise == pytest.approx(2 * stds, rel=1e-6)


# Lei's approach


@pytest.mark.parametrize("fall", [0.0, 0.3, 0.9])
def test_lei(fall: float, clients_of: Callable, known_noise: list[float]) -> None:
    system = Lei(rounds=8, lr=RATE, clip=CLIP, noise_fall=fall, epsilon=EPSILON, delta=DELTA)
    states, noise = played(system, clients_of), noise_vectors()
    stds = {}
    for i, n in enumerate(SIZES):
        first = 2 * RATE * CLIP / n * math.sqrt(8) / exact_mu(EPSILON[i], DELTA[i])
        for round in (1, 2):
            stds[i, round] = first * (1 - fall * (round - 1) / 8)

    def local(w: np.ndarray, i: int, round: int) -> np.ndarray:
        return w - RATE / SIZES[i] * clipped_sum(w, CLIENTS[i], CLIP) + stds[i, round] * next(noise)

    assert_models(states, walk(local))
    assert known_noise == pytest.approx([stds[i, round] for round in (1, 2) for i in (0, 1)], rel=1e-6)


def test_the_records_lie_on_both_sides_of_the_clip() -> None:
    for w in (START, 0.5 * START):
        lengths = [np.linalg.norm(gradient(w, record)) for records in CLIENTS for record in records]
        assert min(lengths) < CLIP < max(lengths)
