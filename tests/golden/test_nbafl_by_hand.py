"""Two rounds of NbAFL, every number worked out here from the paper.

Source: NbAFL, Algorithm 1 (proximal local training, parameters clipped, noise on both ways), Section III (σ_U), Theorem
1 (σ_D where all clients take part) and Lemma 4 (where K do); the exact noise is worked out from Gaussian DP. The noise
is switched to known multiples of its size; tolerance: 1e-6 on every weight of the model. The exact σ_D is allowed to be
2e-6 more of the whole noise of a model than it must, the digits to which books round it, and not a bit less.
"""

import math
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, root
from scipy.stats import norm as normal
from torch import nn

from conformance.asking import session_of
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.models.architectures import squared_error
from dpfl.orders import ModelClip, RecordClip
from dpfl.privacy.certificate import certify
from dpfl.round import play
from dpfl.streams import Streams
from dpfl.systems import NbAFL
from golden.known import switch_downlink, switch_noise

SIZES = (4, 7, 5, 6)
N, M = len(SIZES), min(SIZES)
EPSILON, DELTA = 3.0, 1e-2
RATE, MU, STEPS, C = 0.05, 0.4, 3, 0.8
SEED = 4
START = np.array([0.9, -0.7, 0.8])  # of length 1.4: some clients come below C by training and some do not


def federation(sizes: Any = SIZES) -> Any:
    source = np.random.default_rng(2)
    return [(source.normal(size=(n, 2)), source.normal(scale=2, size=n)) for n in sizes]


def linear() -> Any:
    """w·x + b with the squared error, in double precision: the order of the parameters is w₁, w₂, b."""
    model = Model(nn.Sequential(nn.Linear(2, 1)).double(), squared_error)
    model.load(torch.from_numpy(START))
    return model


def record_gradients(w: Any, x: Any, y: Any) -> Any:
    """Return each record's 2(w·x + b − y)·(x, 1)."""
    ones = np.column_stack([x, np.ones(len(x))])
    return 2 * (ones @ w - y)[:, None] * ones


def clipped(vectors: Any) -> Any:
    """Return v/max(1, ‖v‖/C) of each row."""
    return vectors / np.maximum(1, np.linalg.norm(vectors, axis=-1, keepdims=True) / C)


def delta_of(epsilon: Any, mu: Any) -> Any:
    """Return the δ of a Gaussian release with parameter μ: Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2)."""
    return normal.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * normal.cdf(-epsilon / mu - mu / 2)


def gaussian_mu() -> Any:
    """Return the μ at which one Gaussian release is exactly (ε, δ)."""
    return brentq(lambda mu: delta_of(EPSILON, mu) - DELTA, 1e-3, 50, xtol=1e-14)


PATTERNS = np.random.default_rng(7).normal(size=(100, 3)) / 10
DOWN = np.random.default_rng(1).normal(size=(2, 3)) / 10


@pytest.fixture
def known_noise(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the n-th noise of each way be its size times the way's n-th pattern; keep the sizes."""
    return {
        "up": switch_noise(monkeypatch, PATTERNS),
        "down": switch_downlink(monkeypatch, DOWN),
    }


def played(system: Any, data: Any, clients_of: Any) -> Any:
    """Play two rounds with the real round, clients and ledger; return models, cohorts, orders and certificate."""
    model, streams = linear(), Streams(SEED)
    records = tuple(Records(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data)
    session = session_of(system, model, records, streams, clients_of(model, records, streams))
    state, ledger = session.begin(), session.ledger
    models, cohorts = [], []
    orders: list[Any] = []
    for _ in range(2):
        state, outcome = play(session, state)
        assert outcome.refused == ()
        models.append(state.model.numpy())
        cohorts.append(sorted(outcome.orders))
        orders += outcome.orders.values()
    return models, cohorts, orders, certify(ledger.books, ledger.run)


def drawn(round: Any, clients: Any, k: Any) -> Any:
    """Return the cohort of a round by the stream it is drawn from."""
    return sorted(Streams(SEED).public.generator("cohort", round=round).choice(clients, k, replace=False).tolist())


def walked(data: Any, cohorts: Any, uplink: Any, downlink: Any, *, steps: Any, clip: Any) -> Any:
    """Return by hand the model after each round, and the lengths of all that was or could have been clipped."""
    w, turn, models, lengths = START, count(), [], []
    for t, cohort in enumerate(cohorts):
        average = np.zeros(3)
        for client in cohort:
            x, y = data[client]
            local = w
            for _ in range(steps):
                g = record_gradients(local, x, y)
                if clip == "record":
                    lengths += np.linalg.norm(g, axis=1).tolist()
                    g = clipped(g)
                local = local - RATE * (g.mean(axis=0) + MU * (local - w))  # of F_i(w) + μ/2·‖w − w⁽ᵗ⁻¹⁾‖²
            if clip == "model":
                lengths.append(np.linalg.norm(local))
                local = clipped(local)
            average += (local + uplink[client] * PATTERNS[next(turn)]) / len(cohort)
        w = average + downlink * DOWN[t]
        models.append(w)
    assert min(lengths) < C < max(lengths)
    return models


OPTIONS = {"lr": RATE, "proximal": MU, "clip": C, "epsilon": EPSILON, "delta": DELTA}
CLASSICAL = math.sqrt(2 * math.log(1.25 / DELTA))  # c


@pytest.mark.parametrize(("rounds", "exposures"), [(7, 1), (7, 3), (6, 3), (5, 3)])
def test_the_paper_where_all_take_part(rounds: Any, exposures: Any, clients_of: Any, known_noise: Any) -> None:
    data, everyone = federation(), [list(range(N))] * 2
    system = NbAFL(calibration="paper", rounds=rounds, exposures=exposures, local_steps=STEPS, **OPTIONS)
    models, cohorts, orders, _ = played(system, data, clients_of)
    sigma_u = CLASSICAL * exposures * (2 * C / M) / EPSILON
    sigma_d = 0.0
    if rounds > exposures * math.sqrt(N):  # Theorem 1
        sigma_d = 2 * CLASSICAL * C * math.sqrt(rounds**2 - exposures**2 * N) / (M * N * EPSILON)
    assert cohorts == everyone
    assert {order.clip for order in orders} == {ModelClip(C)}
    assert known_noise["up"] == pytest.approx([sigma_u] * 2 * N, rel=1e-12)
    assert known_noise["down"] == pytest.approx([sigma_d] * 2 if rounds == 7 else [], rel=1e-12)
    assert (sigma_d > 0) == (rounds == 7)  # 6 = 3·√4 needs none
    expected = walked(data, everyone, [sigma_u] * N, sigma_d, steps=STEPS, clip="model")
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rounds", [6, 7, 20])
def test_the_paper_where_k_take_part_at_random(rounds: Any, clients_of: Any, known_noise: Any) -> None:
    k, exposures = 2, 2
    data, expected_cohorts = federation(), [drawn(round, N, k) for round in (1, 2)]
    assert expected_cohorts[0] != expected_cohorts[1]
    system = NbAFL(calibration="paper", rounds=rounds, exposures=exposures, local_steps=STEPS, cohort=k, **OPTIONS)
    models, cohorts, _, _ = played(system, data, clients_of)
    sigma_u = CLASSICAL * exposures * (2 * C / M) / EPSILON
    # Lemma 4, with γ = −ln(1 − 1/2 + e^{−3/(2√2)}/2) = 0.4256: ε/γ = 7.05.
    gamma = -math.log(1 - k / N + k / N * math.exp(-EPSILON / (exposures * math.sqrt(k))))
    sigma_d = 0.0
    if rounds > EPSILON / gamma:
        b = -rounds / EPSILON * math.log(1 - N / k + N / k * math.exp(-EPSILON / rounds))
        sigma_d = 2 * CLASSICAL * C * math.sqrt(rounds**2 / b**2 - exposures**2 * k) / (M * k * EPSILON)
    assert (sigma_d > 0) == (rounds == 20)
    assert cohorts == expected_cohorts
    assert known_noise["up"] == pytest.approx([sigma_u] * 2 * k, rel=1e-12)
    assert known_noise["down"] == pytest.approx([sigma_d] * 2 if rounds == 20 else [], rel=1e-9)
    expected = walked(data, cohorts, [sigma_u] * N, sigma_d, steps=STEPS, clip="model")
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("rounds", "clipping"), [(12, None), (12, "model"), (3, None), (2, None)])
def test_exact_noise_where_all_take_part(rounds: Any, clipping: Any, clients_of: Any, known_noise: Any) -> None:
    data, everyone, heard = federation(), [list(range(N))] * 2, 2
    system = NbAFL(rounds=rounds, exposures=heard, clipping=clipping, **OPTIONS)
    models, _, orders, certificate = played(system, data, clients_of)
    # One step of clipped record gradients proves 2ηC/n_i, clipped parameters prove 2C.
    bounds = [2 * C] * N if clipping == "model" else [2 * RATE * C / n for n in SIZES]

    def variances(total: float) -> list[float]:
        """Return σ_i² = LΔ_i²/(μ² − (R − L)·p²Δ_i²/V): two uploads are heard, the other rounds tell by their model."""
        left = [gaussian_mu() ** 2 - (rounds - heard) * (bound / N) ** 2 / total for bound in bounds]
        return [heard * bound**2 / rest for bound, rest in zip(bounds, left, strict=True)]

    least = (rounds - heard) * (max(bounds) / N / gaussian_mu()) ** 2
    total = brentq(lambda v: sum(variances(v)) / N**2 - v, least * (1 + 1e-9) + 1e-12, 1e6, rtol=1e-14)
    uplink = [math.sqrt(variance) for variance in variances(total)]
    assert {order.clip for order in orders} == {ModelClip(C) if clipping == "model" else RecordClip(C)}
    assert known_noise["up"] == pytest.approx(uplink * 2, rel=3e-6)
    assert known_noise["down"] == []  # the server adds none
    # Two models let out p·Δ_i each, under the noise of all clients; so far both rounds were heard, for the uplink.
    for line, bound, std in zip(certificate.spending, bounds, uplink, strict=True):
        mu = math.sqrt(2) * bound / N / math.sqrt(total)
        assert delta_of(line.released_epsilon, mu) == pytest.approx(DELTA, rel=1e-4)
        assert delta_of(line.uplink_epsilon, math.sqrt(2) * bound / std) == pytest.approx(DELTA, rel=1e-4)
    steps, clip = (5, "model") if clipping == "model" else (1, "record")
    expected = walked(data, everyone, uplink, 0.0, steps=steps, clip=clip)
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-5)


def test_exact_noise_where_k_take_part_at_random(clients_of: Any, known_noise: Any) -> None:
    sizes, k, rounds = (5,) * 4, 2, 9
    data = federation(sizes)
    system = NbAFL(rounds=rounds, cohort=k, **OPTIONS)
    models, cohorts, _, _ = played(system, data, clients_of)
    turns = [drawn(round, 4, k) for round in range(1, rounds + 1)]

    def overspent(logs: Any) -> Any:
        """Compare each client's cost with μ²: its upload in the round whose model tells least, the other models."""
        variances, found = np.exp(logs), []
        for client in range(4):
            told = sorted(1 / sum(variances[other] for other in turn) for turn in turns if client in turn)
            found.append(1 / variances[client] + sum(told[1:]) - gaussian_mu() ** 2)
        return found

    stds = 2 * RATE * C / 5 * np.exp(root(overspent, np.zeros(4), tol=1e-12).x / 2)
    assert max(stds) > 1.05 * min(stds)  # some take part more often
    assert known_noise["up"] == pytest.approx([stds[client] for cohort in turns[:2] for client in cohort], rel=3e-6)
    assert known_noise["down"] == []
    assert cohorts == turns[:2]
    expected = walked(data, cohorts, stds, 0.0, steps=1, clip="record")
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-6)
