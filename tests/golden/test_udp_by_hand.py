"""UDP walked by hand for two rounds, without and with CRD: every number from the paper's formulas, in plain numpy.

Source: udp-crd, Algorithms 1 and 2 with equations (10) and (25), Δ_i = 2ηC/n_i; for the exact calibration the same rule
in the currency of Gaussian DP (μ from the exact trade-off of a Gaussian release). Below it the same for several steps
and a C that follows the median, as the paper's experiments have it (Section 5.2). The noise is switched to known
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
from golden.known import batches_of, records_of, switch_noise

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


# Several local steps at rates that fall, what is clipped, and a C that follows the median.


@dataclass(frozen=True)
class Reading:
    """How the paper is read: what is clipped, when, and what the noise is made for."""

    clipping: str
    calibration: str
    median: bool
    discount: bool = False

    @property
    def options(self) -> dict:
        local = {"local_epochs": 2, "batch_size": 2} if self.clipping == "model" else {"local_steps": 2}
        crd = {"discount": BETA, "least_gain": 1e9} if self.discount else {}
        first = {"first_clip": CLIP} if self.median and self.clipping == "record" else {}
        return {
            "clipping": self.clipping, "calibration": self.calibration, "clip": "median" if self.median else CLIP,
            "lr_schedule": "inverse-sqrt",
        } | local | crd | first  # fmt: skip


PAPERS, OURS = Reading("model", "paper", median=True), Reading("record", "tight", median=True)
READINGS = [
    PAPERS, Reading("model", "paper", median=True, discount=True), Reading("record", "paper", median=True),
    Reading("model", "tight", median=False), OURS, Reading("record", "tight", median=True, discount=True),
]  # fmt: skip
LARGE = (50.0, 60.0, 80.0)  # ε at which something is left of a count of so few records


def shuffled(i: int, t: int, size: int) -> Iterator[list[int]]:
    """Yield the batches of a client's passes, drawn as clients draw them."""
    coins, n = batches_of(SEED, i, t + 1), SIZES[i]
    while True:
        order = np.argsort(coins.random(n), kind="stable").tolist()
        yield from (order[start : start + size] for start in range(0, n - size + 1, size))


@dataclass
class Stepped:
    """What happens in the rounds, by hand."""

    stds: list[float] = field(default_factory=list)  # in the order of uploads
    models: list[np.ndarray] = field(default_factory=list)
    clips: list[float] = field(default_factory=list)  # C of the next round
    planned: list[int] = field(default_factory=list)


def walk_steps(how: Reading, cohort: int | None) -> Stepped:
    """Carry out two rounds in the currency of z = σ/Δ, whatever Δ is in each of them."""
    walked, w, planned, paper = Stepped(), START, ROUNDS, how.calibration == "paper"
    of_gradients = how.clipping == "record"
    q, noise = (cohort or 3) / 3, iter(NOISE)
    clip = CLIP if of_gradients or not how.median else float(np.linalg.norm(START))
    spent = [0.0] * 3  # Σ 1/z²

    def multiplier(i: int, t: int) -> float:
        if paper:
            return math.sqrt((planned - t) / (LARGE[i] ** 2 / (2 * q * math.log(1 / DELTA[i])) - spent[i]))
        replies = max(sum(i in cohort_of(tau, cohort) for tau in range(t, planned)), 1)
        return math.sqrt(replies / (exact_mu(LARGE[i], DELTA[i]) ** 2 - spent[i]))

    z = [multiplier(i, 0) for i in range(3)]
    for t in range(2):
        rate, uploads, lengths, counts = RATE / math.sqrt(t + 1), {}, {}, {}
        for i in cohort_of(t, cohort):
            mine, n, batches = w, SIZES[i], shuffled(i, t, 2)
            if of_gradients:
                first = [float(np.linalg.norm(gradient(w, record))) for record in CLIENTS[i]]
                lengths[i] = sorted(first)[(n - 1) // 2]
                counts[i] = sum(0.5 if length <= clip else -0.5 for length in first)
                for _ in range(2):
                    clipped = [gradient(mine, one) for one in CLIENTS[i]]
                    clipped = [g / max(1.0, np.linalg.norm(g) / clip) for g in clipped]
                    mine = mine - rate / n * sum(clipped)
                bound = 2 * rate * clip / n + 2 * rate * clip
            else:
                for _ in range(2 * (n // 2)):
                    mine = mine - rate / 2 * sum(gradient(mine, CLIENTS[i][r]) for r in next(batches))
                lengths[i] = float(np.linalg.norm(mine))
                mine = mine * min(1.0, clip / lengths[i])
                bound = 2 * clip / n if paper else 2 * clip
            of_upload = z[i]
            if how.median and not paper:
                of_count = max(n * math.sqrt(cohort or 3) / 20, math.sqrt(10) * z[i])
                of_upload = 1 / math.sqrt(z[i] ** -2 - of_count**-2)
                coin = Streams(SEED).of(i).generator("count", round=t + 1).standard_normal()
                counts[i] += of_count * coin
            walked.stds.append(of_upload * bound)
            uploads[i] = mine + walked.stds[-1] * next(noise)
        everybody = sum(SIZES[i] for i in uploads)
        w = sum(SIZES[i] / everybody * one for i, one in uploads.items())  # type: ignore[assignment]
        for i in range(3):
            spent[i] += z[i] ** -2 if paper or i in uploads else 0.0
        if how.median and paper:
            clip = float(np.median(list(lengths.values())))
        elif how.median:
            share = 0.5 + sum(SIZES[i] / everybody * counts[i] / SIZES[i] for i in uploads)
            clip *= math.exp(-0.2 * (min(max(share, 0.0), 1.0) - 0.5))
        if how.discount:
            planned = math.floor(BETA * (planned - t)) + t
            z = [multiplier(i, t + 1) for i in range(3)]
        walked.models.append(w)
        walked.clips.append(clip)
        walked.planned.append(planned)
    return walked


@pytest.mark.parametrize("how", READINGS, ids=lambda how: "-".join(map(str, vars(how).values())))
@pytest.mark.parametrize("cohort", [None, 2])
def test_two_rounds_of_several_steps(
    how: Reading, cohort: int | None, clients_of: Callable, known_noise: list[float]
) -> None:
    expected = walk_steps(how, cohort)
    system = UDP(rounds=ROUNDS, lr=RATE, epsilon=LARGE, delta=DELTA, cohort=cohort, **how.options)
    for t, (state, _) in enumerate(played(system, clients_of)):
        assert state.model.numpy() == pytest.approx(expected.models[t], rel=1e-6)
        assert system.clip_now(state.clip) == pytest.approx(expected.clips[t], rel=1e-6)
        assert state.rounds == expected.planned[t]
    assert known_noise == pytest.approx(expected.stds, rel=1e-6)


def test_the_walk_of_several_steps_in_numbers() -> None:
    # The paper's reading: C is ‖(0.3, −0.2, 0.1)‖ at first, and client 0 has two records: Δ = 2C/2.
    first = walk_steps(PAPERS, None).stds[0]
    assert first == pytest.approx(math.sqrt(0.14) * math.sqrt(24 * 6.907755278982137) / 50, rel=1e-12)
    # Ours: nobody's share is known so well that C moves by a tenth, and it moves.
    clips = walk_steps(OURS, None).clips
    assert clips[0] != CLIP
    assert all(abs(math.log(later / earlier)) <= 0.1 for earlier, later in zip([CLIP, *clips], clips, strict=False))
