"""Two rounds of FedSGD-DPC, every number worked out here from the paper.

Source: FedSGD-DPC, Algorithm 1 (round robin, one step, noise on the gradient), Theorems 1 and 2 (noise) and Theorem 3
(learning rates); each record's gradient is clipped, which makes its Assumptions 1 and 2 true. Weights are applied to
updates, which is the paper's average of models where all clients have as many records. The noise is switched to known
multiples of its size; tolerance: 1e-6 on every weight of the model. The exact noise of sampled batches is compared with
a privacy-loss distribution on a grid of 1e-4, to 1e-3 of ε.
"""

import math
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.optimize import brentq
from scipy.stats import norm as normal
from torch import nn

from conformance.asking import session_of
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy
from dpfl.orders import Gaussian, Laplace, RecordClip
from dpfl.round import play
from dpfl.streams import Streams
from dpfl.systems import FedSGDDPC
from golden.known import batches_of, switch_noise

N, K, R, Q = 4, 3, 6, 0.5  # K·R/N = 4.5: two clients answer 5 times and two 4 times
SIZES = (1, 5, 3, 6)  # the sample of the first is empty every other time
EPSILONS, DELTAS = (1.0, 2.5, 0.5, 4.0), (1e-4, 1e-3, 1e-5, 1e-2)
SEED = 6
CLIP = {1: 2.5, 2: 1.2}  # of each norm, so that some gradients are clipped and some are not
CLASSES, FEATURES = 3, 2
START = np.linspace(-0.4, 0.4, CLASSES * FEATURES + CLASSES)
SCHEDULES = {
    "constant": ({"lr": 0.7}, lambda t: 0.7),
    "decaying": ({"lr": 0.7, "lr_schedule": "inverse:1.5"}, lambda t: 0.7 * 1.5 / (t + 1.5)),
    "theory": ({"strong_convexity": 0.8, "smoothness": 1.0}, lambda t: 2 / (0.8 * (t + 2.5))),  # γ = 2λ/μ
}


def federation(sizes: Any = SIZES) -> Any:
    source = np.random.default_rng(3)
    return [(source.normal(size=(n, FEATURES)), source.integers(0, CLASSES, n)) for n in sizes]


def softmax() -> Any:
    """Softmax regression in double precision: the weights of the classes one after the other, then the biases."""
    model = Model(nn.Sequential(nn.Linear(FEATURES, CLASSES)).double(), cross_entropy)
    model.load(torch.from_numpy(START))
    return model


def record_gradients(theta: Any, x: Any, y: Any) -> Any:
    """Return each record's (p − e_y)·(x, 1)."""
    w, b = theta[: CLASSES * FEATURES].reshape(CLASSES, FEATURES), theta[CLASSES * FEATURES :]
    scores = np.exp(x @ w.T + b)
    errors = scores / scores.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y]
    outer = errors[:, :, None] * x[:, None, :]
    return np.column_stack([outer.reshape(len(x), CLASSES * FEATURES), errors])


def answers(client: Any) -> Any:
    """Count the turns of a client in R rounds: round t asks clients tK, tK + 1, …, tK + K − 1 modulo N."""
    return sum((t * K + place) % N == client for t in range(R) for place in range(K))


def gaussian_mu(epsilon: Any, delta: Any) -> Any:
    """Return the μ at which one Gaussian release is exactly (ε, δ): δ = Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2)."""

    def excess(mu: Any) -> Any:
        return normal.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * normal.cdf(-epsilon / mu - mu / 2) - delta

    return brentq(excess, 1e-3, 50, xtol=1e-14)


def papers_noise(mechanism: Any, client: Any) -> Any:
    """Return the noise on the mean gradient: 2bTξ₁/(N·d_i·ε_i), or c₂ξ₂√(bT·ln(1/δ_i)/N)/(d_i·ε_i) with c₂ = √2."""
    replies, records = K * R / N, SIZES[client]
    if mechanism == "laplace":
        return 2 * replies * CLIP[1] / (records * EPSILONS[client])
    return math.sqrt(2) * CLIP[2] * math.sqrt(replies * math.log(1 / DELTAS[client])) / (records * EPSILONS[client])


def exact_noise(mechanism: Any, client: Any) -> Any:
    """Return the noise on the mean gradient, which a replaced record moves by 2C/n_i, and one more or less by C/n_i."""
    if mechanism == "laplace":
        return answers(client) * (2 * CLIP[1] / SIZES[client]) / EPSILONS[client]
    return math.sqrt(answers(client)) * (CLIP[2] / SIZES[client]) / gaussian_mu(EPSILONS[client], DELTAS[client])


PATTERNS = np.random.default_rng(9).normal(size=(100, len(START))) / 10


@pytest.fixture
def known_noise(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the n-th noise be its size times the n-th pattern, and keep the laws that were asked for."""
    monkeypatch.setattr("dpfl.round.add_noise", None)  # nothing is noised on the way down
    return switch_noise(monkeypatch, PATTERNS, noted=lambda law: law)


def played(system: Any, data: Any, clients_of: Any) -> Any:
    """Play two rounds with the real round, clients and ledger; return the model after each, and the orders."""
    model, streams = softmax(), Streams(SEED)
    records = tuple(Records(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data)
    session = session_of(system, model, records, streams, clients_of(model, records, streams))
    state = session.begin()
    models, orders = [], []
    for _ in range(2):
        state, outcome = play(session, state)
        assert outcome.refused == ()
        models.append(state.model.numpy())
        orders.append(outcome.orders)
    return models, orders


def walked(data: Any, size_of: Any, rate: Any, length: Any, q: Any = None, sizes: Any = SIZES) -> Any:
    """Return by hand the model after each of two rounds, the lengths of all gradients and the sizes of all samples."""
    theta, turn, models, lengths, samples = START, count(), [], [], []
    for t in range(2):
        moved = np.zeros(len(START))
        for client in sorted((t * K + place) % N for place in range(K)):
            x, y = data[client]
            if q is not None:  # as the client draws it
                coins = batches_of(SEED, client, t + 1).random(len(x))
                x, y = x[coins < q], y[coins < q]
            samples.append(len(x))
            g = record_gradients(theta, x, y)
            reach = np.linalg.norm(g, ord=length, axis=1)
            lengths += reach.tolist()
            mean = (g / np.maximum(1, reach / CLIP[length])[:, None]).sum(axis=0) / ((q or 1) * sizes[client])
            noised = mean + size_of(client) * PATTERNS[next(turn)]
            moved += N / K * sizes[client] / sum(sizes) * (-rate(t) * noised)
        theta = theta + moved
        models.append(theta)
    return models, lengths, samples


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("calibration", ["paper", "tight"])
@pytest.mark.parametrize(("mechanism", "length"), [("laplace", 1), ("gaussian", 2)])
def test_two_rounds_on_all_records(
    mechanism: Any, length: Any, calibration: Any, schedule: Any, clients_of: Any, known_noise: Any
) -> None:
    options, rate = SCHEDULES[schedule]
    system = FedSGDDPC(
        mechanism=mechanism, calibration=calibration, rounds=R, cohort=K, clip=CLIP[length], epsilon=EPSILONS,
        delta=0.0 if mechanism == "laplace" else DELTAS, **options,
    )  # fmt: skip
    data = federation()
    models, orders = played(system, data, clients_of)
    noise = papers_noise if calibration == "paper" else exact_noise
    expected, lengths, _ = walked(data, lambda client: noise(mechanism, client), rate, length)
    for t, ordered in enumerate(orders):
        for client, order in ordered.items():
            assert (order.steps, order.noise_on, order.clip) == (1, "step", RecordClip(CLIP[length], length))
            assert order.learning_rates == pytest.approx((rate(t),), rel=1e-12)
            size = order.noise.scale if isinstance(order.noise, Laplace) else order.noise.std
            assert size == pytest.approx(SIZES[client] * noise(mechanism, client), rel=1e-7)  # on the sum
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-6)
    assert min(lengths) < CLIP[length] < max(lengths)
    law = Laplace if mechanism == "laplace" else Gaussian
    assert [type(one) for one in known_noise] == [law] * (2 * K)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_rounds_on_samples_with_the_papers_noise(schedule: Any, clients_of: Any, known_noise: Any) -> None:
    options, rate = SCHEDULES[schedule]
    system = FedSGDDPC(
        calibration="paper",
        rounds=R,
        cohort=K,
        clip=CLIP[2],
        epsilon=EPSILONS,
        delta=DELTAS,
        sampling_rate=Q,
        **options,
    )
    data = federation()
    models, _ = played(system, data, clients_of)
    expected, lengths, samples = walked(data, lambda client: papers_noise("gaussian", client), rate, 2, Q)
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-6)
    assert min(lengths) < CLIP[2] < max(lengths)
    assert 0 in samples  # a step without records is noised like any other
    assert len(set(samples)) > 2


def test_two_rounds_on_samples_with_exact_noise(clients_of: Any, known_noise: Any) -> None:
    # Four rounds of three clients: everybody answers three times, so that one noise multiplier serves all.
    epsilon, delta, rounds, replies = 2.0, 1e-3, 4, 3
    system = FedSGDDPC(rounds=rounds, cohort=K, clip=CLIP[2], epsilon=epsilon, delta=delta, sampling_rate=Q, lr=0.7)
    data = federation()
    models, orders = played(system, data, clients_of)
    multipliers = {
        order.noise.std / CLIP[2] for ordered in orders for order in ordered.values()
    }  # an added record moves by C
    multiplier = multipliers.pop()
    assert multipliers == set()
    prices = [
        from_gaussian_mechanism(z, value_discretization_interval=1e-4, sampling_prob=Q)
        .self_compose(replies)
        .get_epsilon_for_delta(delta)
        for z in (multiplier, 0.99 * multiplier)
    ]
    assert prices[0] == pytest.approx(epsilon, rel=1e-3)
    assert prices[1] > epsilon * 1.005  # not a bit less would do
    noise = [multiplier * CLIP[2] / (Q * n) for n in SIZES]
    expected, _, _ = walked(data, noise.__getitem__, lambda t: 0.7, 2, Q)
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_of_equal_clients_it_is_the_papers_average_of_models(mechanism: Any, clients_of: Any, known_noise: Any) -> None:
    # θ ← (N/b)·Σ (d_i/d)·θ_i as Algorithm 1 prints it.
    sizes, length = (4,) * N, 1 if mechanism == "laplace" else 2
    data = federation(sizes)
    system = FedSGDDPC(
        mechanism=mechanism, calibration="paper", rounds=R, cohort=K, clip=CLIP[length], epsilon=2.0, lr=0.7,
        delta=0.0 if mechanism == "laplace" else 1e-3,
    )  # fmt: skip
    models, _ = played(system, data, clients_of)
    replies = K * R / N
    size = {1: 2 * replies * CLIP[1] / (4 * 2), 2: CLIP[2] * math.sqrt(2 * replies * math.log(1e3)) / (4 * 2)}[length]
    theta, turn = START, count()
    for t, reached in enumerate(models):
        average = np.zeros(len(START))
        for client in sorted((t * K + place) % N for place in range(K)):
            g = record_gradients(theta, *data[client])
            g = g / np.maximum(1, np.linalg.norm(g, ord=length, axis=1) / CLIP[length])[:, None]
            average += N / K * 4 / 16 * (theta - 0.7 * (g.mean(axis=0) + size * PATTERNS[next(turn)]))
        theta = average
        np.testing.assert_allclose(reached, theta, rtol=0, atol=1e-6)
