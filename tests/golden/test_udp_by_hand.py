"""UDP walked by hand for two rounds, without and with CRD: every number from the paper's formulas, in plain numpy.

Source: udp-crd, Algorithms 1 and 2 with equations (10) and (25), Δ_i = 2ηC/n_i; for the exact calibration the same rule
in the currency of Gaussian DP (μ from the exact trade-off of a Gaussian release). The noise is switched to known
vectors. Tolerance 1e-6, beside an exact calibration that is rounded to the safe side by about 1e-8.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

from conformance.asking import session_of
from dpfl.models import Model
from dpfl.round import play
from dpfl.streams import Streams
from dpfl.systems import UDP
from golden.known import records_of, switch_noise

SEED = 5
RATE, CLIP, BETA, ROUNDS = 0.25, 1.5, 0.6, 12  # η, C, CRD's β and the R to begin with
EPSILON, DELTA = (2.0, 5.0, 9.0), (1e-3, 1e-2, 1e-4)
START = np.array([0.3, -0.2, 0.1])  # two weights and a bias

# (features, target) of each record: three clients of different sizes, some gradients above the clip and some below.
CLIENTS = (
    [((1.0, 2.0), 0.5), ((-1.0, 0.5), -0.4)],
    [((0.2, 0.1), 0.3), ((3.0, -1.0), 2.0), ((0.5, 0.5), 0.0)],
    [((1.5, 0.0), -1.0), ((0.1, -0.3), 0.2), ((-0.2, 0.4), 0.1), ((2.0, 2.0), 1.0), ((0.0, 1.0), -0.3)],
)
PUBLIC = [((1.0, 1.0), 0.4), ((-0.5, 1.0), 0.0)]
SIZES = tuple(map(len, CLIENTS))
# The vectors that stand for standard normal noise, in the order in which uploads are noised: short, so that the loss
# falls and ζ can decide.
NOISE = [np.array(u) / 50 for u in ([0.5, -1.0, 0.2], [-0.3, 0.4, 1.1], [0.9, 0.1, -0.6], [-1.2, 0.3, 0.7],
                                    [0.05, -0.8, 0.4], [0.6, 0.6, -0.1])]  # fmt: skip


def gradient(w: np.ndarray, record: tuple) -> np.ndarray:
    """Return the gradient of (w·x + b − y)² for one record."""
    x, y = np.array([*record[0], 1.0]), record[1]
    return 2 * (w @ x - y) * x


def loss(w: np.ndarray, records: list) -> float:
    return float(np.mean([(w @ np.array([*x, 1.0]) - y) ** 2 for x, y in records]))


def exact_mu(epsilon: float, delta: float) -> float:
    """Return the μ at which Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) is δ."""

    def excess(mu: float) -> float:
        return norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2) - delta

    return brentq(excess, 1e-3, 50, xtol=1e-13)


@dataclass
class Walked:
    """What happens in the rounds, by hand."""

    stds: list[float] = field(default_factory=list)  # in the order of uploads
    models: list[np.ndarray] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)  # R after each round
    next_stds: list[list[float]] = field(default_factory=list)  # of all clients, after each round that is not the last
    gains: list[float] = field(default_factory=list)


def cohort_of(t: int, cohort: int | None) -> list[int]:
    """Return who takes part in the round that counts from 0, drawn as the schedule draws it."""
    if cohort is None:
        return [0, 1, 2]
    drawn = Streams(SEED).public.generator("cohort", round=t + 1).choice(3, cohort, replace=False)
    return sorted(int(one) for one in drawn)


def walk(calibration: str, cohort: int | None, discount: bool, least_gain: float) -> Walked:
    """Carry out Algorithm 2 (Algorithm 1 is the one whose T never changes), line by line."""
    walked, w, planned = Walked(), START, ROUNDS
    q = (cohort or 3) / 3
    bounds = [2 * RATE * CLIP / n for n in SIZES]  # Δ_i
    earlier: list[list[float]] = [[], [], []]  # σ_i^τ of the rounds that count
    noise = iter(NOISE)

    def watched(w: np.ndarray) -> float:
        """V(w): on all clients' data in the paper, on public data where the promise is to be true."""
        return loss(w, [record for records in CLIENTS for record in records] if calibration == "paper" else PUBLIC)

    def std(i: int, t: int) -> float:
        past = sum(1 / one**2 for one in earlier[i])
        if calibration == "paper":  # (25), which is (10) for t = 0
            return math.sqrt(
                (planned - t) / (EPSILON[i] ** 2 / (2 * q * bounds[i] ** 2 * math.log(1 / DELTA[i])) - past)
            )
        replies = sum(i in cohort_of(tau, cohort) for tau in range(t, planned))
        return bounds[i] * math.sqrt(max(replies, 1) / (exact_mu(EPSILON[i], DELTA[i]) ** 2 - bounds[i] ** 2 * past))

    for t in range(2):
        now = [std(i, t) for i in range(3)]
        uploads = {}
        for i in cohort_of(t, cohort):
            total = np.zeros(3)
            for record in CLIENTS[i]:
                g = gradient(w, record)
                total = total + g / max(1.0, np.linalg.norm(g) / CLIP)
            uploads[i] = w - RATE / SIZES[i] * total + now[i] * next(noise)
            walked.stds.append(now[i])
        everybody = sum(SIZES[i] for i in uploads)
        after = sum(SIZES[i] / everybody * one for i, one in uploads.items())
        for i in range(3):
            if calibration == "paper" or i in uploads:
                earlier[i].append(now[i])
        walked.gains.append(watched(w) - watched(after))
        if discount and walked.gains[-1] < least_gain:
            planned = math.floor(BETA * (planned - t)) + t
        w = after  # type: ignore[assignment]
        walked.models.append(w)
        walked.planned.append(planned)
        walked.next_stds.append([std(i, t + 1) for i in range(3)])
    return walked


@pytest.fixture
def known_noise(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Switch the clients' noise to the known vectors, and note its standard deviations."""
    return switch_noise(monkeypatch, NOISE)


def played(system: UDP, clients_of: Callable) -> Iterator[tuple]:
    """Yield (state, outcome) after each of two real rounds."""
    module = nn.Linear(2, 1).double()
    model = Model(module, lambda outputs, targets: (outputs.squeeze(-1) - targets).square())
    model.load(torch.from_numpy(START))
    streams, clients = Streams(SEED), tuple(map(records_of, CLIENTS))
    validation = records_of(PUBLIC)
    performers = clients_of(model, clients, streams)
    session = session_of(system, model, clients, streams, performers, public=validation)
    state = session.begin()
    for _ in range(2):
        state, outcome = play(session, state)
        yield state, outcome


# ζ decides which rounds are followed by a discount: none, the one that gained less, both.
@pytest.mark.parametrize("cut", ["no CRD", "neither", "the lesser", "both"])
@pytest.mark.parametrize("cohort", [None, 2])
@pytest.mark.parametrize("calibration", ["tight", "paper"])
def test_two_rounds(
    calibration: str, cohort: int | None, cut: str, clients_of: Callable, known_noise: list[float]
) -> None:
    discount = cut != "no CRD"
    first, second = walk(calibration, cohort, False, 0.0).gains
    assert first > 1.1 * second > 0
    least_gain = {"no CRD": 1e9, "neither": 0.0, "the lesser": (first + second) / 2, "both": 1e9}[cut]
    expected = walk(calibration, cohort, discount, least_gain)
    options = {"discount": BETA, "least_gain": least_gain} if discount else {}
    system = UDP(
        rounds=ROUNDS, lr=RATE, clip=CLIP, epsilon=EPSILON, delta=DELTA, cohort=cohort, calibration=calibration,
        **options,
    )  # fmt: skip
    for t, (state, outcome) in enumerate(played(system, clients_of)):
        assert tuple(outcome.orders) == tuple(cohort_of(t, cohort))
        assert state.model.numpy() == pytest.approx(expected.models[t], rel=1e-6)
        assert state.rounds == expected.planned[t]
        assert state.noise_stds == pytest.approx(expected.next_stds[t], rel=1e-6)
        if "public loss" in system.needs:
            assert outcome.public.loss == pytest.approx(loss(expected.models[t], PUBLIC), rel=1e-6)
    assert known_noise == pytest.approx(expected.stds, rel=1e-6)
    # ⌊0.6·12⌋ = 7 after the first round, then ⌊0.6·6⌋ + 1 = 4; or ⌊0.6·11⌋ + 1 = 7 after the second alone.
    assert (
        tuple(expected.planned) == {"no CRD": (12, 12), "neither": (12, 12), "the lesser": (12, 7), "both": (7, 4)}[cut]
    )


def test_the_first_noise_in_numbers() -> None:
    # Δ_i = 0.75/n_i; client 0: 0.375·√(2·12·ln 1000)/2.
    paper = walk("paper", None, False, 0.0)
    assert paper.stds[0] == pytest.approx(0.375 * math.sqrt(24 * 6.907755278982137) / 2, rel=1e-12)
    assert paper.stds[0] == pytest.approx(2.4142, abs=1e-4)
    # What the other calibration begins with, once the μ of (2, 1e-3) is checked against the trade-off it solves.
    mu = exact_mu(2.0, 1e-3)
    assert norm.cdf(-2 / mu + mu / 2) - math.exp(2) * norm.cdf(-2 / mu - mu / 2) == pytest.approx(1e-3, rel=1e-9)
    assert walk("tight", None, False, 0.0).stds[0] == pytest.approx(0.375 * math.sqrt(12) / mu, rel=1e-12)
