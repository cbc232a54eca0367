"""FedSGD-DPC's bound, and its right numbers of queries R and replies K (fedsgd-dpc, Theorems 3 and 4).

With the theory's rates η_t = 2/(μ(t + γ)), γ = 2λ/μ, the squared distance Y from the optimum obeys
Y_R ≤ ((4/μ²)(ω₀ + v) + γY₀)/(R + γ), where v = E‖noise‖² of one round at learning rate 1. Laplace noise has v ∝ K·R²,
which gives U(R, K) = (C₁/K + C₂KR² + C₃)/(R + γ) and a finite best R; Gaussian noise has v ∝ R, which gives none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpfl.planning.bounds import (
    Facts,
    Form,
    Planner,
    at_unit_rate,
    contract,
    in_turn,
    require_below,
    require_convex,
    round_noise,
    theorys_rates,
)
from dpfl.planning.constants import Constants
from dpfl.privacy.budget import Budget
from dpfl.privacy.paper_formulas import C2
from dpfl.systems import FedSGDDPC


def bound(
    *, rounds: float, strong_convexity: float, smoothness: float, initial_distance: float, spread: float,
    variance: float,
) -> float:  # fmt: skip
    """Return the bound on Y_R = E‖θ_R − θ*‖² (Theorems 3 and 4).

    spread: ω₀, what the clients' differences add. variance: v, of a round's noise at learning rate 1.
    """
    gamma = 2 * smoothness / strong_convexity
    return (4 / strong_convexity**2 * (spread + variance) + gamma * initial_distance) / (rounds + gamma)


def spread(
    *, clients: int, cohort: float, gradient_bound: float, smoothness: float, heterogeneity: float,
    sample_variance: float = 0.0,
) -> float:  # fmt: skip
    """Return ω₀ = 2G²(N−K)/((N−1)K) + 2λΓ, and for sampled records Σ n_iΛ_i²/(q·n²) on top (`sample_variance`)."""
    return 2 * gradient_bound**2 * in_turn(clients, cohort) + 2 * smoothness * heterogeneity + sample_variance


def poisson_variance(
    *, rate: float, records: int, clients: int, cohort: float, record_spread: float, gradient_bound: float
) -> float:
    """Return what Poisson samples add to ω₀: (N/K)·(1−q)(Λ² + G²)/(q·n), clients weighed by their records.

    The paper has Λ²/(q·n), which is for samples of a fixed size at every client. A sum over a Poisson sample, divided
    by the expected size, varies even where all records are alike, and fewer clients average less of it away.
    """
    return clients / cohort * (1 - rate) * (record_spread**2 + gradient_bound**2) / (rate * records)


def paper_variance(
    *, noise: str, dim: int, rounds: float, cohort: float, clip: float, records: int, budgets: Sequence[Budget],
    constants: Sequence[float] | None = None,
) -> float:  # fmt: skip
    """Return v as the paper substitutes it: ω₁/4 of its Theorems 3 and 4, n records in all, N = len(budgets).

    Laplace: 8dKR²C²/(N·n²)·Σ 1/ε_i². Gaussian: dRC²/n²·Σ c₂²·ln(1/δ_i)/ε_i², with each client's own c₂ (None: √2).
    """
    if noise == "laplace":
        total = math.fsum(1 / budget.epsilon**2 for budget in budgets)
        return 8 * dim * cohort * (rounds * clip / records) ** 2 / len(budgets) * total
    shares = [(constant / C2) ** 2 for constant in constants or [C2] * len(budgets)]
    total = math.fsum(
        share * (math.log(1 / budget.delta) / budget.epsilon**2) for share, budget in zip(shares, budgets, strict=True)
    )
    return C2**2 * dim * rounds * (clip / records) ** 2 * total


def laplace_bound(*, rounds: float, cohort: float, gamma: float, c1: float, c2: float, c3: float) -> float:
    """Return U(R, K) = (C₁/K + C₂KR² + C₃)/(R + γ) (Section V-B)."""
    return (c1 / cohort + c2 * cohort * rounds**2 + c3) / (rounds + gamma)


def laplace_constants(
    *, clients: int, dim: int, records: int, clip: float, budgets: Sequence[Budget], strong_convexity: float,
    smoothness: float, gradient_bound: float, heterogeneity: float, initial_distance: float,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Return γ, C₁ = 8NG²/(μ²(N−1)), C₂ = 32dC²/(μ²Nn²)·Σ 1/ε_i², C₃ = γY₀ + (4/μ²)(2λΓ − 2G²/(N−1))."""
    others = max(clients - 1, 1)
    gamma, per = 2 * smoothness / strong_convexity, 4 / strong_convexity**2
    one = paper_variance(noise="laplace", dim=dim, rounds=1, cohort=1, clip=clip, records=records, budgets=budgets)
    constant = per * (2 * smoothness * heterogeneity - 2 * gradient_bound**2 / others)
    return gamma, per * 2 * gradient_bound**2 * clients / others, per * one, gamma * initial_distance + constant


def optimal_rounds(*, gamma: float, c1: float, c2: float, c3: float, cohort: float) -> float:
    """Return R* = √(γ² + (C₁/K + C₃)/(C₂K)) − γ for a given K (equation 6), 0 where training does not pay at all.

    >>> optimal_rounds(gamma=2.85, c1=457, c2=1, c3=152, cohort=5)  # MNIST at ε = 1: 5 in the paper's Table I
    4.68...
    """
    inside = gamma**2 + (c1 / cohort + c3) / (c2 * cohort)
    return max(0.0, math.sqrt(max(inside, 0.0)) - gamma)


def optimal_cohort(*, c1: float, c2: float, rounds: float) -> float:
    """Return K* = √(C₁/C₂)/R for a given R (Section V-B), before it is held to 1 … N and rounded (up, in Table I)."""
    return math.sqrt(c1 / c2) / rounds


def whole_cohort(*, c1: float, c2: float, rounds: float, clients: int) -> int:
    """Return K* for a given R as Table I prints it: rounded up, and held to 1 … N.

    >>> [whole_cohort(c1=457 * epsilon**2, c2=1, rounds=50, clients=10) for epsilon in (1, 5, 10)]  # its MNIST
    [1, 3, 5]
    """
    return min(clients, max(1, math.ceil(optimal_cohort(c1=c1, c2=c2, rounds=rounds))))


@dataclass(frozen=True)
class Choice:
    """A number of rounds (queries) and of clients a round, not rounded, and the bound there."""

    rounds: float
    cohort: float
    bound: float


def laplace_candidates(*, gamma: float, c1: float, c2: float, c3: float, clients: int) -> list[Choice]:
    """Return the three points that the KKT conditions leave: K = 1 and K = N with the best R of each, and R = 0."""
    found = []
    for cohort in (1, clients):
        rounds = optimal_rounds(gamma=gamma, c1=c1, c2=c2, c3=c3, cohort=cohort)
        value = laplace_bound(rounds=rounds, cohort=cohort, gamma=gamma, c1=c1, c2=c2, c3=c3)
        found.append(Choice(rounds, cohort, value))
    nothing = laplace_bound(rounds=0, cohort=clients, gamma=gamma, c1=c1, c2=c2, c3=c3)
    return [*found, Choice(0.0, clients, nothing)]


def optimal_laplace(*, gamma: float, c1: float, c2: float, c3: float, clients: int) -> Choice:
    """Return the best of the three."""
    return min(laplace_candidates(gamma=gamma, c1=c1, c2=c2, c3=c3, clients=clients), key=lambda one: one.bound)


def optimal_gaussian(*, e1: float, e2: float, clients: int, most_rounds: float = math.inf) -> tuple[float, float]:
    """Return R* and K* for U = E₁/(K(R+γ)) + E₂/(R+γ) + E₃ (Section VI-B): K = N, and all rounds or none.

    More rounds only pay where E₁/N + E₂ is above 0; `most_rounds` is as many as are allowed.
    """
    return (most_rounds if e1 / clients + e2 > 0 else 0.0), float(clients)


def predicted(system: FedSGDDPC, facts: Facts, constants: Constants, form: Form) -> float:
    """Return the bound on Y for this system."""
    clients, records = len(facts.sizes), sum(facts.sizes)
    cohort = system.cohort or clients
    mu, smoothness, distance = constants.need("strong_convexity", "smoothness", "initial_distance")
    gradient_bound, heterogeneity = constants.need("gradient_bound", "heterogeneity")
    require_convex(mu, system.name)
    samples = 0.0
    if system.sampling_rate is not None:
        (record_spread,) = constants.need("record_spread")
        rate = system.sampling_rate
        samples = record_spread**2 / (rate * records) if form == "paper" else poisson_variance(
            rate=rate, records=records, clients=clients, cohort=cohort, record_spread=record_spread,
            gradient_bound=gradient_bound,
        )  # fmt: skip
    omega = spread(
        clients=clients, cohort=cohort, gradient_bound=gradient_bound, smoothness=smoothness,
        heterogeneity=heterogeneity, sample_variance=samples,
    )  # fmt: skip
    if form == "paper":
        granted, replies = system.budgets(clients), system.papers_replies(clients)
        variance = paper_variance(
            noise=system.mechanism, dim=facts.dim, rounds=system.rounds, cohort=cohort, clip=system.clip,
            records=records, budgets=granted,
            constants=[system.open_constant(one, replies) for one in granted],
        )  # fmt: skip
    else:
        variance = round_noise(at_unit_rate(system), facts)
    if form == "paper" or theorys_rates(system, mu, smoothness):
        return bound(
            rounds=system.rounds, strong_convexity=mu, smoothness=smoothness, initial_distance=distance,
            spread=omega, variance=variance,
        )  # fmt: skip
    rates = np.asarray(system.rates(0, system.rounds))
    require_below("lr", float(rates.max()), 1 / smoothness, "1/λ", system.name)
    return contract(distance, 1 - mu * rates, rates**2 * (omega + variance))


PLANNER = Planner(
    predicted,
    chooses=("rounds", "cohort"),
    knows=("rounds", "cohort"),
    needs=("strong_convexity", "smoothness", "initial_distance", "gradient_bound", "heterogeneity", "record_spread"),
    of="distance",
)
