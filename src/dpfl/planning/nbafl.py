"""NbAFL's bounds, and its right numbers of rounds R and of clients K (nbafl, Theorems 2 and 3).

With v = E‖n‖² of the noise in a broadcast model, all clients: P^R·Θ + (1−P^R)/(1−P)·(λ₁β√v + λ₀v); K at random:
Q^R·Θ + (1−Q^R)/(1−Q)·(α₁β√v + α₀v). Both want a pull μ (`proximal`) that is strong enough to make P and Q less than 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpfl.planning.bounds import Facts, Form, Planner, Void, round_noise
from dpfl.planning.constants import Constants
from dpfl.planning.search import least_real
from dpfl.systems import NbAFL


@dataclass(frozen=True)
class Terms:
    """What a round does to the gap: it shrinks by `contraction`, and the noise adds slope·E‖n‖ + curve·E‖n‖²."""

    contraction: float  # P or Q
    slope: float  # λ₁β or α₁β
    curve: float  # λ₀ or α₀


def terms_of_all(
    *, proximal: float, smoothness: float, lipschitz: float, curvature: float, dissimilarity: float
) -> Terms:
    """Return P, λ₁β and λ₀ of Theorem 2; curvature: l of the Polyak–Łojasiewicz inequality, dissimilarity: B."""
    mu, rho, b = proximal, smoothness, dissimilarity
    lambda2 = -1 / mu + rho * b / mu**2 + rho * b**2 / (2 * mu**2)
    return Terms(1 + 2 * curvature * lambda2, (1 / mu + rho * b / mu) * lipschitz, rho / 2)


def terms_of_cohort(
    *, proximal: float, smoothness: float, lipschitz: float, curvature: float, dissimilarity: float, clients: int,
    cohort: float,
) -> Terms:  # fmt: skip
    """Return Q, α₁β and α₀ of Theorem 3, for K of N clients at random."""
    mu, rho, b, root = proximal, smoothness, dissimilarity, math.sqrt(cohort)
    inside = rho * b**2 / 2 + rho * b + rho * b**2 / cohort + 2 * rho * b**2 / root + mu * b / root - mu
    slope = (1 + 2 * rho * b / mu + 2 * rho * b * root / (mu * clients)) * lipschitz
    return Terms(1 + 2 * curvature / mu**2 * inside, slope, 2 * rho * cohort / clients + rho)


def bound(*, rounds: float, initial_gap: float, terms: Terms, variance: float) -> float:
    """Return the bound on E F(w_R) − F* for noise with v = E‖n‖² in every broadcast model."""
    left = float(terms.contraction**rounds)
    added = terms.slope * math.sqrt(variance) + terms.curve * variance
    return left * initial_gap + (1 - left) / (1 - terms.contraction) * added


def paper_bound(*, rounds: float, initial_gap: float, terms: Terms, size: float) -> float:
    """Return Theorem 2 or 3 as printed, which puts √(2/π)·s for E‖n‖ and s² for E‖n‖² (`size`: s)."""
    left = float(terms.contraction**rounds)
    added = terms.slope * math.sqrt(2 / math.pi) * size + terms.curve * size**2
    return left * initial_gap + (1 - left) / (1 - terms.contraction) * added


def papers_noise_size(
    *, rounds: float, clients: int, cohort: int, fewest_records: int, epsilon: float, delta: float
) -> float:
    """Return s: c·R/(mε√N) for all clients, c/(−mK·ln(1 − N/K + (N/K)e^(−ε/R))) for K of them.

    Against the noise that is really added, d·σ², the first drops 2C and puts N where d belongs; the second drops both.
    """
    c = math.sqrt(2 * math.log(1.25 / delta))
    if cohort == clients:
        return c * rounds / (fewest_records * epsilon * math.sqrt(clients))
    inside = math.expm1(-epsilon / rounds) * clients / cohort
    if inside <= -1:
        least = math.floor(-epsilon / math.log1p(-cohort / clients)) + 1
        raise Void(
            f"rounds must be at least {least} for Theorem 3 as printed, was {rounds:g}: below it the logarithm of"
            " 1 − N/K + (N/K)·exp(−ε/R) does not exist; plan more rounds, or use --form general"
        )
    return c / (-fewest_records * cohort * math.log1p(inside))


def optimal_rounds(*, initial_gap: float, contraction: float, kappa1: float, kappa0: float, epsilon: float) -> float:
    """Return the R at which P^R·Θ + (κ₁R/ε + κ₀R²/ε²)(1 − P^R) is least (Theorem 2 as printed)."""

    def value(rounds: float) -> float:
        left = float(contraction**rounds)
        return left * initial_gap + (kappa1 * rounds / epsilon + kappa0 * (rounds / epsilon) ** 2) * (1 - left)

    return least_real(value, 1e-3, 1e6)


def optimal_cohort(*, cost: Callable[[float], float], clients: int) -> float:
    """Return the K between 1 and N at which a bound along K is least."""
    return least_real(cost, 1.0, float(clients))


def predicted(system: NbAFL, facts: Facts, constants: Constants, form: Form) -> float:
    """Return the bound on the loss above its least value for this system."""
    clients = len(facts.sizes)
    cohort = system.cohort or clients
    (gap,) = constants.need("initial_gap")
    terms = terms_of(system, clients, cohort, constants)
    if form == "general":
        return bound(rounds=system.rounds, initial_gap=gap, terms=terms, variance=round_noise(system, facts))
    if system.weighing != "equal":
        raise Void(
            f"weighing must be 'equal' for NbAFL's theorems as printed, which put 1/N for p_i, was {system.weighing!r};"
            " leave it out, or use --form general"
        )
    budget = facts.strictest(system)
    size = papers_noise_size(
        rounds=system.rounds, clients=clients, cohort=cohort, fewest_records=min(facts.sizes), epsilon=budget.epsilon,
        delta=budget.delta,
    )  # fmt: skip
    return paper_bound(rounds=system.rounds, initial_gap=gap, terms=terms, size=size)


def terms_of(system: NbAFL, clients: int, cohort: int, constants: Constants) -> Terms:
    """Return P (all clients) or Q (K of them) and what goes with it, or say what must change for it to be below 1."""
    smoothness, lipschitz, curvature, dissimilarity = constants.need(
        "smoothness", "lipschitz", "polyak_lojasiewicz", "dissimilarity"
    )

    def terms(proximal: float) -> Terms:
        common = {
            "proximal": proximal, "smoothness": smoothness, "lipschitz": lipschitz, "curvature": curvature,
            "dissimilarity": dissimilarity,
        }  # fmt: skip
        return (
            terms_of_all(**common) if cohort == clients else terms_of_cohort(**common, clients=clients, cohort=cohort)
        )

    name = "P" if cohort == clients else "Q"
    if curvature <= 0:
        raise Void(
            f"polyak_lojasiewicz (l) must be above 0 for NbAFL's bound, was {curvature:g}: {name} = 1 + 2l·(…) is not"
            " below 1 otherwise; add a ridge penalty, correct the constant, or use --method pilot"
        )
    if system.proximal <= 0:
        raise Void(
            f"proximal (μ) must be above 0 for NbAFL's bound, which divides by it, was {system.proximal:g}; set it, or"
            " use --method pilot"
        )
    found = terms(system.proximal)
    if 0 <= found.contraction < 1:
        return found
    pulls = [float(f"{pull:.3g}") for pull in np.geomspace(1e-6, 1e12, 360)]  # as they will be named
    mends = [pull for pull in pulls if 0 <= terms(pull).contraction < 1]
    if mends:  # nearer to the least that suffices
        nearer = [float(f"{pull:.3g}") for pull in np.geomspace(mends[0] / 1.2, mends[0], 24)]
        mends[0] = next(pull for pull in [*nearer, mends[0]] if 0 <= terms(pull).contraction < 1)
    mend = (
        f"set proximal to {mends[0]:g} or more" if mends and mends[-1] > 1e11
        else f"set proximal between {mends[0]:g} and {mends[-1]:g}" if mends
        else "let more clients take part: no pull makes it so with this few"
    )  # fmt: skip
    raise Void(
        f"{name} must be at least 0 and below 1 for NbAFL's bound to say anything, was {found.contraction:.4g} (from"
        f" l = {curvature:.3g}, ρ = {smoothness:.3g}, B = {dissimilarity:.3g}, μ = {system.proximal:g}); {mend}, or"
        " use --method pilot"
    )


PLANNER = Planner(
    predicted,
    chooses=("rounds", "cohort"),
    knows=("rounds", "cohort"),
    needs=("smoothness", "lipschitz", "polyak_lojasiewicz", "dissimilarity", "initial_gap"),
    of="loss",
)
