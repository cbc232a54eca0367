"""ALI-DPFL walked by hand: DP-SGD clients, R_c, the curvature and τ*, every number in plain numpy.

Source: ali-dpfl, Algorithm 2 with equation (9) and the three lines that feed it (μ, T, B̂), R_c from Theorem 2 over
integer orders (with the logarithm that equation 12 misses); sums are divided by the expected batch q·n_i. μ compares
each client's model with the new aggregate, as the paper has it, or with the one it began with. In the exact
calibration μ comes from the noised models alone, and τ is held to what is left of R_c over the rounds left. Batches are
drawn again from the streams, and the noise is switched to known vectors. Tolerance 1e-6.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

from conformance.asking import session_of
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.round import play
from dpfl.streams import Streams
from dpfl.systems import ALIDPFL
from golden.known import batches_of, records_of, switch_noise

SEED = 10
RATE, CLIP, GAMMA = 0.2, 1.5, 3.0  # η, C, Γ
START = np.array([0.3, -0.2, 0.1])  # two weights and a bias
CLIENTS = (
    [((1.0, 2.0), 0.5), ((-1.0, 0.5), -0.4)],
    [((0.2, 0.1), 0.3), ((3.0, -1.0), 2.0), ((0.5, 0.5), 0.0)],
    [((1.5, 0.0), -1.0), ((0.1, -0.3), 0.2), ((-0.2, 0.4), 0.1), ((2.0, 2.0), 1.0), ((0.0, 1.0), -0.3)],
)
SIZES = tuple(map(len, CLIENTS))
NOBODY = Records(torch.zeros(0, 2, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))


def noise_vectors() -> Iterator[np.ndarray]:
    """Yield the vectors that stand for standard normal noise, one for each local step of each client in turn."""
    return (np.sin(3.0 * k + np.arange(3)) for k in itertools.count())


def gradient(w: np.ndarray, record: tuple) -> np.ndarray:
    """Return the gradient of (w·x + b − y)² for one record."""
    x, y = np.array([*record[0], 1.0]), record[1]
    return 2 * (w @ x - y) * x


def mean_gradient(w: np.ndarray, records: list) -> np.ndarray:
    return np.mean([gradient(w, record) for record in records], axis=0)


def renyi_steps(q: float, sigma: float, epsilon: float, delta: float) -> int:
    """Return the largest T with min over α of T·ε(α) + ln(1/δ)/(α − 1) within ε, ε(α) = ln(A_α)/(α − 1) by (15)."""

    found = 0
    for alpha in range(2, 257):
        terms = [
            math.log(math.comb(alpha, k)) + (k * k - k) / (2 * sigma**2)
            + ((alpha - k) * math.log(1 - q) if k < alpha else 0.0) + k * math.log(q)
            for k in range(alpha + 1) if q < 1 or k == alpha
        ]  # fmt: skip
        each = (max(terms) + math.log(math.fsum(math.exp(term - max(terms)) for term in terms))) / (alpha - 1)
        found = max(found, math.floor((epsilon - math.log(1 / delta) / (alpha - 1)) / each))  # at this α alone
    return found


def exact_steps(sigma: float, epsilon: float, delta: float) -> int:
    """Return the same for full batches, exactly: T releases of μ = 1/σ are one of √T/σ."""

    def excess(mu: float) -> float:
        return norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2) - delta

    return math.floor(brentq(excess, 1e-3, 50, xtol=1e-13) ** 2 * sigma**2)


@dataclass(frozen=True)
class Case:
    """A setting in the paper's symbols."""

    calibration: str
    q: float
    sigma: float
    rounds: int  # R_s
    first: int  # τ of the first round
    epsilon: float = 8.0
    delta: float = 1e-3
    curvature_from: str = "broadcast"
    most: int | None = None  # R_c, where it has to be taken on trust (sampled batches, exactly)


@dataclass
class Walked:
    """What happens in the rounds, by hand."""

    steps: list[int] = field(default_factory=list)  # τ of each round
    models: list[np.ndarray] = field(default_factory=list)
    wanted: list[float] = field(default_factory=list)  # τ* before it is rounded and held back; NaN where not known


def walk(case: Case, most: int, rounds: int) -> Walked:
    """Carry out Algorithm 2, line by line; `most` is R_c."""
    walked, noise = Walked(), noise_vectors()
    w, used, shares = START, 0, [n / sum(SIZES) for n in SIZES]
    last_gradient, last_way = None, math.nan

    def held_back(wanted: int, k: int) -> int:
        left = most - used
        if case.calibration == "tight" and k < case.rounds:
            left = max(1, left // (case.rounds - k))
        return max(1, min(wanted, left))

    tau = 1 if case.rounds >= most else held_back(case.first, 0)
    for k in range(rounds):
        if used == most:
            break
        walked.steps.append(tau)
        locals_ = []
        for i, records in enumerate(CLIENTS):
            mine, batches = w, batches_of(SEED, i, k + 1)
            for _ in range(tau):
                drawn = batches.random(SIZES[i]) < case.q
                total = np.zeros(3)
                for record in itertools.compress(records, drawn):
                    g = gradient(mine, record)
                    total = total + g / max(1.0, np.linalg.norm(g) / CLIP)
                noised = total + case.sigma * CLIP * next(noise)
                mine = mine - RATE * noised / (case.q * SIZES[i])
            locals_.append(mine)
        after = sum(p * mine for p, mine in zip(shares, locals_, strict=True))
        used += tau
        if case.calibration == "paper":
            other = after if case.curvature_from == "aggregate" else w
            mu = math.fsum(
                p
                * float(np.linalg.norm(mean_gradient(mine, records) - mean_gradient(other, records)))
                / float(np.linalg.norm(mine - other))
                for p, mine, records in zip(shares, locals_, CLIENTS, strict=True)
            )
        else:
            mean = (w - after) / (RATE * tau)  # what clients followed on average, noise included
            mu = math.nan if last_gradient is None else np.linalg.norm(mean - last_gradient) / last_way  # type: ignore[assignment]
            last_gradient, last_way = mean, np.linalg.norm(after - w)  # type: ignore[assignment]
        total_steps = min(case.rounds * tau, most)  # T
        batch = case.q * min(SIZES)  # B̂
        spread = case.sigma**2 * CLIP**2 * 3 / batch**2  # σ²C²d/B̂²
        best = math.sqrt(
            1
            + (4 / mu**2 + 3 * CLIP**2 + 2 * GAMMA * total_steps * mu + spread)
            / ((2 + 1 / total_steps) * (CLIP**2 + spread))
        )
        walked.wanted.append(best)
        tau = 1 if case.rounds >= most else held_back(tau if math.isnan(best) else round(best), k + 1)
        w = after  # type: ignore[assignment]
        walked.models.append(w)
    walked.steps.append(tau)
    return walked


@pytest.fixture
def known_noise(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Switch the clients' noise to the known vectors, and note its standard deviations."""
    return switch_noise(monkeypatch, noise_vectors())


def played(system: ALIDPFL, rounds: int, clients_of: Callable) -> Iterator[tuple]:
    """Yield (state, outcome): first as the training begins, then after each real round."""
    module = nn.Linear(2, 1).double()
    model = Model(module, lambda outputs, targets: (outputs.squeeze(-1) - targets).square())
    model.load(torch.from_numpy(START))
    streams, clients = Streams(SEED), tuple(map(records_of, CLIENTS))
    performers = clients_of(model, clients, streams)
    session = session_of(system, model, clients, streams, performers)
    state = session.begin()
    yield state, None
    for _ in range(rounds):
        if state.round == state.rounds:
            break
        state, outcome = play(session, state)
        yield state, outcome


CASES = {
    # Full batches: R_c = ⌊μ²σ²⌋ has a closed form. τ* decides; then what is left of R_c over the rounds left does.
    "tight, full batches": Case("tight", 1.0, 4.0, rounds=9, first=2),
    "tight, held back": Case("tight", 1.0, 1.5, rounds=4, first=5),
    "tight, rounds are plenty": Case("tight", 1.0, 1.0, rounds=30, first=4),
    # R_c by privacy-loss distributions, checked below; here T = R_s·τ and nothing is held back.
    "tight, sampled": Case("tight", 0.6, 4.0, rounds=5, first=2, most=188),
    "paper, sampled": Case("paper", 0.6, 2.0, rounds=5, first=2),
    "paper, full batches": Case("paper", 1.0, 3.0, rounds=6, first=1),
    "paper, R_c within reach": Case("paper", 0.7, 1.3, rounds=5, first=3),
    "paper, from the aggregate": Case("paper", 0.6, 2.0, rounds=5, first=2, curvature_from="aggregate"),
    "paper, rounds are plenty": Case("paper", 0.7, 1.0, rounds=40, first=3),
}  # fmt: skip


@functools.cache
def most_steps(case: Case) -> int:
    if case.calibration == "paper":
        return renyi_steps(case.q, case.sigma, case.epsilon, case.delta)
    return case.most or exact_steps(case.sigma, case.epsilon, case.delta)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_three_rounds(case: Case, clients_of: Callable, known_noise: list[float]) -> None:
    most = most_steps(case)
    expected = walk(case, most, 3)
    system = ALIDPFL(
        rounds=case.rounds, local_steps=case.first, lr=RATE, clip=CLIP, sampling_rate=case.q, epsilon=case.epsilon,
        delta=case.delta, noise_multiplier=case.sigma, heterogeneity=GAMMA, calibration=case.calibration,
        curvature_from=case.curvature_from,
    )  # fmt: skip
    stages = list(played(system, 3, clients_of))
    assert stages[0][0].left == (most,) * 3
    for k, (state, outcome) in enumerate(stages[1:]):
        assert [order.steps for order in outcome.orders.values()] == [expected.steps[k]] * 3
        assert outcome.refused == ()
        assert state.model.numpy() == pytest.approx(expected.models[k], rel=1e-6)
        assert state.left == (most - sum(expected.steps[: k + 1]),) * 3
        if state.round < state.rounds:
            assert state.steps == expected.steps[k + 1]
    assert len(expected.models) == len(stages) - 1
    assert set(known_noise) == {case.sigma * CLIP}
    assert len(known_noise) == 3 * sum(expected.steps[:-1])


def test_the_cases_show_every_side_of_the_rule() -> None:
    walked = {name: (walk(case, most_steps(case), 3), most_steps(case)) for name, case in CASES.items()}
    chosen = {name: [round(x) for x in one.wanted if not math.isnan(x)] for name, (one, _) in walked.items()}
    assert chosen["paper, from the aggregate"] != chosen["paper, sampled"]
    for name in ("tight, full batches", "tight, sampled", "paper, sampled", "paper, full batches"):
        one, most = walked[name]
        assert one.steps[-len(chosen[name]) :] == chosen[name]  # τ* itself, not a limit
        assert len({*one.steps}) > 1
        assert sum(one.steps) < most
    held, most = walked["tight, held back"]
    assert held.steps[1:] != [held.steps[1], *chosen["tight, held back"]]
    assert sum(held.steps) <= most
    short, most = walked["paper, R_c within reach"]
    assert sum(short.steps[:-1]) == most  # the last round took what was left
    assert short.steps[-2] < round(short.wanted[-2])
    for name in ("tight, rounds are plenty", "paper, rounds are plenty"):
        one, most = walked[name]
        assert most <= CASES[name].rounds
        assert set(one.steps) == {1}


def test_the_number_that_was_taken_on_trust() -> None:
    case = CASES["tight, sampled"]
    one = privacy_loss_distribution.from_gaussian_mechanism(
        case.sigma, sampling_prob=case.q, value_discretization_interval=1e-3
    )
    spent = [one.self_compose(steps).get_epsilon_for_delta(case.delta) for steps in (case.most, case.most + 1)]
    assert spent[0] <= case.epsilon < spent[1]


def test_an_empty_batch_is_noised_like_any_other(clients_of: Callable, known_noise: list[float]) -> None:
    # At q = 0.05 the two records of client 0 are almost never drawn: its upload is −η/(q·n)·σC·u, nothing else.
    drawn = batches_of(SEED, 0, 1).random(2) < 0.05
    assert not drawn.any()
    system = ALIDPFL(
        rounds=5, lr=RATE, clip=CLIP, sampling_rate=0.05, noise_multiplier=2.0, epsilon=1.0, calibration="paper"
    )
    uploads = []

    def watched(*args: Any) -> Any:
        clients = clients_of(*args)
        perform = clients.perform

        def watch(request: Any) -> Any:
            uploads.append(perform(request))
            return uploads[-1]

        clients.perform = watch
        return clients

    list(played(system, 1, watched))
    expected = -RATE / (0.05 * 2) * 2.0 * CLIP * next(noise_vectors())
    assert uploads[0].by_client[0].numpy() == pytest.approx(expected, rel=1e-6)
