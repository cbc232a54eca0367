"""Two rounds of DP-FedAvg, every number worked out here from the paper.

Source: DP-FedAvg, Algorithm 1 (round robin, E full-batch steps, noise on the model that is uploaded), Theorems 1 and 2
(noise), Theorem 3 (learning rates) and the clip of its experiments. Weights are applied to updates, which is the
paper's average of models where all clients have as many records. The noise is switched to known multiples of its size;
tolerance: 1e-6 on every weight of the model.
"""

import math
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm as normal
from torch import nn

from conformance.asking import session_of
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.models.architectures import squared_error
from dpfl.orders import ClientClip, Gaussian, Laplace
from dpfl.round import play
from dpfl.streams import Streams
from dpfl.systems import DPFedAvg
from golden.known import switch_noise

N, K, R, E = 4, 3, 7, 3  # K·R/N = 5.25: no client can answer that often
SIZES = (2, 5, 3, 6)
CLIP = {1: 3.0, 2: 2.0}  # of each norm, so that some gradients are clipped and some are not
EPSILONS, DELTA = (1.0, 2.5, 0.5, 4.0), 1e-4
MU, LAMBDA = 0.8, 0.2  # of the theory: 8λ/μ = 2 < E = 3, so γ = 3
SCHEDULES = {
    "constant": ({"lr": 0.1}, lambda k: 0.1),
    "decaying": ({"lr": 0.1, "lr_schedule": "inverse:4.0"}, lambda k: 0.1 * 4 / (k + 4)),
    "theory, γ = E": ({"strong_convexity": MU, "smoothness": LAMBDA}, lambda k: 2 / (MU * (k + 3))),
    "theory, γ = 8λ/μ": ({"strong_convexity": 2.0, "smoothness": 2.5}, lambda k: 2 / (2.0 * (k + 10))),
}


def federation(sizes: Any = SIZES) -> Any:
    source = np.random.default_rng(5)
    return [(source.normal(size=(n, 2)), source.normal(scale=2, size=n)) for n in sizes]


def linear() -> Any:
    """w·x + b with the squared error, in double precision: the order of the parameters is w₁, w₂, b."""
    module = nn.Sequential(nn.Linear(2, 1)).double()
    model = Model(module, squared_error)
    model.load(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64))
    return model


def gradient(theta: Any, x: Any, y: Any) -> Any:
    """Return the mean of 2(w·x + b − y)·(x, 1)."""
    ones = np.column_stack([x, np.ones(len(x))])
    return 2 * (ones @ theta - y) @ ones / len(x)


def clipped(g: Any, length: Any) -> Any:
    return g / max(1.0, np.linalg.norm(g, ord=length) / CLIP[length])


def gaussian_mu(epsilon: Any) -> Any:
    """Return the μ at which one Gaussian release is exactly (ε, δ): δ = Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2)."""

    def excess(mu: Any) -> Any:
        return normal.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * normal.cdf(-epsilon / mu - mu / 2) - DELTA

    return brentq(excess, 1e-3, 50, xtol=1e-14)


def answers(client: Any) -> Any:
    """Count the turns of a client in R rounds: round t asks clients tK, tK + 1, …, tK + K − 1 modulo N."""
    return sum((t * K + place) % N == client for t in range(R) for place in range(K))


def noise_size(mechanism: Any, calibration: Any, client: Any, rates: Any, clip: Any) -> Any:
    """Return Laplace's scale or the Gaussian's standard deviation."""
    epsilon = EPSILONS[client]
    if calibration == "paper":
        xi, replies = max(rates) * E * clip, K * R / N  # Ξ = η̃_t·E·ξ, T_l = b·T_g/N
        if mechanism == "laplace":
            return replies * xi / epsilon
        return math.sqrt(2) * math.sqrt(replies * math.log(1 / DELTA)) / epsilon * xi
    moved = 2 * sum(rates) * clip  # replacing a client can turn every clipped gradient around
    if mechanism == "laplace":
        return answers(client) * moved / epsilon
    return math.sqrt(answers(client)) * moved / gaussian_mu(epsilon)


PATTERNS = np.random.default_rng(8).normal(size=(100, 3)) / 10


@pytest.fixture
def known_noise(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the n-th noise be its size times the n-th pattern, and keep the laws that were asked for."""
    monkeypatch.setattr("dpfl.round.add_noise", None)  # nothing is noised on the way down
    return switch_noise(monkeypatch, PATTERNS, noted=lambda law: law)


def played(system: Any, data: Any, clients_of: Any, rounds: Any = 2) -> Any:
    """Play with the real round, clients and ledger; return the model after each round and the orders."""
    model, streams = linear(), Streams(0)
    records = tuple(Records(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data)
    session = session_of(system, model, records, streams, clients_of(model, records, streams))
    state = session.begin()
    models, orders = [], []
    for _ in range(rounds):
        state, outcome = play(session, state)
        assert outcome.refused == ()
        models.append(state.model.numpy())
        orders.append(outcome.orders)
    return models, orders


def test_the_turns_of_this_page() -> None:
    assert [answers(client) for client in range(N)] == [6, 5, 5, 5]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("calibration", ["paper", "tight"])
@pytest.mark.parametrize(("mechanism", "length"), [("laplace", 1), ("gaussian", 2), ("gaussian", 1)])
def test_two_rounds(
    mechanism: Any, length: Any, calibration: Any, schedule: Any, clients_of: Any, known_noise: Any
) -> None:
    options, rate = SCHEDULES[schedule]
    system = DPFedAvg(
        mechanism=mechanism, calibration=calibration, rounds=R, cohort=K, local_steps=E, clip=CLIP[length],
        epsilon=EPSILONS, delta=0.0 if mechanism == "laplace" else DELTA, norm=length, **options,
    )  # fmt: skip
    data = federation()
    models, orders = played(system, data, clients_of)

    theta, turn, lengths = np.array([0.3, -0.2, 0.1]), count(), []
    for t, (reached, ordered) in enumerate(zip(models, orders, strict=True)):
        cohort = sorted((t * K + place) % N for place in range(K))
        assert sorted(ordered) == cohort
        rates = [rate(t * E + step) for step in range(E)]
        moved = np.zeros(3)
        for client in cohort:
            x, y = data[client]
            local = theta
            for eta in rates:
                g = gradient(local, x, y)
                lengths.append(np.linalg.norm(g, ord=length))
                local = local - eta * clipped(g, length)
            size = noise_size(mechanism, calibration, client, rates, CLIP[length])
            order = ordered[client]
            assert order.learning_rates == pytest.approx(tuple(rates), rel=1e-12)
            assert order.clip == ClientClip(CLIP[length], length)
            ordered_size = order.noise.scale if isinstance(order.noise, Laplace) else order.noise.std
            assert ordered_size == pytest.approx(size, rel=1e-7)
            uploaded = local + size * PATTERNS[next(turn)]
            moved += N / K * SIZES[client] / sum(SIZES) * (uploaded - theta)
        theta = theta + moved
        np.testing.assert_allclose(reached, theta, rtol=0, atol=1e-6)
    assert min(lengths) < CLIP[length] < max(lengths)
    law = Laplace if mechanism == "laplace" else Gaussian
    assert [type(noise) for noise in known_noise] == [law] * (2 * K)  # once for each upload


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_of_equal_clients_it_is_the_papers_average_of_models(mechanism: Any, clients_of: Any, known_noise: Any) -> None:
    # θ ← (N/b)·Σ (n_l/n)·θ̂_l as Algorithm 1 prints it.
    sizes, length = (3, 3, 3, 3), 1 if mechanism == "laplace" else 2
    data = federation(sizes)
    system = DPFedAvg(
        mechanism=mechanism, calibration="paper", rounds=R, cohort=K, local_steps=E, clip=CLIP[length],
        epsilon=EPSILONS, lr=0.1, delta=0.0 if mechanism == "laplace" else DELTA,
    )  # fmt: skip
    models, _ = played(system, data, clients_of)
    theta, turn = np.array([0.3, -0.2, 0.1]), count()
    for t, reached in enumerate(models):
        average = np.zeros(3)
        for client in sorted((t * K + place) % N for place in range(K)):
            local = theta
            for _ in range(E):
                local = local - 0.1 * clipped(gradient(local, *data[client]), length)
            local = local + noise_size(mechanism, "paper", client, [0.1] * E, CLIP[length]) * PATTERNS[next(turn)]
            average += N / K * 3 / 12 * local
        theta = average
        np.testing.assert_allclose(reached, theta, rtol=0, atol=1e-6)
