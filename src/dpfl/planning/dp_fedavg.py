"""DP-FedAvg's bound, and its right number of local iterations E (dp-fedavg, Theorems 3 and 4).

With the theory's rates η_k = 2/(μ(k + γ)), γ = max(8λ/μ, E), the squared distance Y from the optimum after S = R·E
steps obeys Y ≤ (4ω₀/μ² + γY₀)/(S + γ) + (4/μ²)·R/(S + γ − 1)²·4v, where v = E‖noise‖² of a round at learning rate 1
(the 4 because a rate falls by at most half within a round). Laplace noise has v ∝ E²R², Gaussian noise v ∝ E²R.
"""

import math

import numpy as np

from dpfl.planning.bounds import (
    Facts,
    Form,
    Planner,
    Void,
    at_unit_rate,
    contract,
    in_turn,
    require_below,
    require_convex,
    round_noise,
    theorys_rates,
)
from dpfl.planning.constants import Constants
from dpfl.planning.search import least_real
from dpfl.privacy.budget import Budget
from dpfl.privacy.paper_formulas import C2
from dpfl.systems import DPFedAvg


def bound(
    *, rounds: float, local_steps: float, strong_convexity: float, smoothness: float, initial_distance: float,
    spread: float, variance: float,
) -> float:  # fmt: skip
    """Return the bound on Y after R·E steps (Theorem 3).

    spread: ω₀, what local training and the clients' differences add. variance: v, of a round's noise at rate 1.
    """
    steps, per = rounds * local_steps, 4 / strong_convexity**2
    gamma = max(8 * smoothness / strong_convexity, local_steps)
    learned = (per * spread + gamma * initial_distance) / (steps + gamma)
    return learned + per * rounds / (steps + gamma - 1) ** 2 * 4 * variance


def spread(
    *, clients: int, cohort: float, local_steps: float, gradient_bound: float, smoothness: float, heterogeneity: float
) -> float:
    """Return ω₀ = 6λΓ + 8(E−1)²G² + 4E²G²(N−K)/((N−1)K)."""
    drift = 8 * (local_steps - 1) ** 2 + 4 * local_steps**2 * in_turn(clients, cohort)
    return 6 * smoothness * heterogeneity + drift * gradient_bound**2


def paper_variance(
    *, noise: str, dim: int, rounds: float, local_steps: float, clients: int, cohort: float, clip: float,
    budget: Budget, constant: float = C2,
) -> float:  # fmt: skip
    """Return v as the paper substitutes it: ω₁/4 of its Theorem 3, for clients of equal size and budget.

    Laplace: 2dK·(E·C·R)²/(N²ε²). Gaussian: 2d·c₂²·ln(1/δ)·(E·C)²·R/(Nε²), twice what its own noise adds.
    """
    reach = dim * (local_steps * clip / budget.epsilon) ** 2
    if noise == "laplace":
        return 2 * reach * cohort * (rounds / clients) ** 2
    return 2 * reach * constant**2 * math.log(1 / budget.delta) * rounds / clients


def papers_local_steps(*, total_steps: float, power: int) -> float:
    """Return S^(z/(z+1)), the order of the best E (Theorem 4): z = 2 for Laplace noise, 1 for Gaussian.

    >>> papers_local_steps(total_steps=1000, power=2)
    99.9...
    """
    return float(total_steps ** (power / (power + 1)))


def optimal_local_steps(
    *, total_steps: float, gamma: float, gradient_bound: float, clients: int, cohort: float, noise: float,
    power: int = 2,
) -> float:  # fmt: skip
    """Return the E at which the bound is least for S = R·E steps and γ = 8λ/μ ≥ E.

    noise: C_M in ω₁ = 4v = C_M·E²·R^z, and power: z. With z = 1 the noise does not depend on E, and 1 is best. With
    z = 2 the bound is a(E−1)² + bE² + c/E, whose derivative is a cubic: (a + b)E³ − aE² − c/2 = 0.
    """
    if power == 1:
        return 1.0
    if gradient_bound == 0:
        return total_steps  # nothing drifts: one round
    a, b = 8 * gradient_bound**2, 4 * gradient_bound**2 * in_turn(clients, cohort)
    c = noise * total_steps**3 * (total_steps + gamma) / (total_steps + gamma - 1) ** 2
    roots = np.roots([a + b, -a, 0.0, -c / 2])
    return max(1.0, float(max(root.real for root in roots if abs(root.imag) < 1e-9 * max(1.0, abs(root)))))


def optimal_total_steps(
    *, local_steps: float, gamma: float, initial_distance: float, strong_convexity: float, spread: float,
    noise: float, power: int = 2, most: float = 1e9,
) -> float:  # fmt: skip
    """Return the S at which the bound is least for a given E, `most` where it falls for ever.

    With Laplace noise (z = 2) it rises in the end. With Gaussian noise (z = 1) it tends to a constant: from above, so
    that no S is too large, or from below where there is little to learn.
    """
    per = 4 / strong_convexity**2
    learned = per * spread + gamma * initial_distance

    def value(steps: float) -> float:
        rounds = steps / local_steps
        added = per * rounds / (steps + gamma - 1) ** 2 * noise * local_steps**2 * rounds**power
        return learned / (steps + gamma) + added

    return least_real(value, local_steps, most)


def predicted(system: DPFedAvg, facts: Facts, constants: Constants, form: Form) -> float:
    """Return the bound on Y for this system."""
    if system.local_epochs is not None or system.batch_size is not None or system.noise_for_steps is not None:
        raise Void(
            "local_epochs, batch_size and noise_for_steps must be left out for DP-FedAvg's bound, which counts steps on"
            f" all records and their noise, were {system.local_epochs}, {system.batch_size} and"
            f" {system.noise_for_steps}; leave them out, or use --method pilot"
        )
    clients = len(facts.sizes)
    cohort, local = system.cohort or clients, system.local_steps
    mu, smoothness, distance = constants.need("strong_convexity", "smoothness", "initial_distance")
    gradient_bound, heterogeneity = constants.need("gradient_bound", "heterogeneity")
    require_convex(mu, system.name)
    omega = spread(
        clients=clients, cohort=cohort, local_steps=local, gradient_bound=gradient_bound, smoothness=smoothness,
        heterogeneity=heterogeneity,
    )  # fmt: skip
    if form == "paper":
        strictest = facts.strictest(system)
        variance = paper_variance(
            noise=system.mechanism, dim=facts.dim, rounds=system.rounds, local_steps=local, clients=clients,
            cohort=cohort, clip=system.clip, budget=strictest,
            constant=system.open_constant(strictest, system.papers_replies(clients)),
        )  # fmt: skip
    else:
        variance = round_noise(at_unit_rate(system), facts)
    if form == "paper" or theorys_rates(system, mu, smoothness):
        return bound(
            rounds=system.rounds, local_steps=local, strong_convexity=mu, smoothness=smoothness,
            initial_distance=distance, spread=omega, variance=variance,
        )  # fmt: skip
    rates = np.asarray(system.rates(0, system.rounds * local))
    require_below("lr", float(rates.max()), 1 / (4 * smoothness), "1/(4λ)", system.name)
    if (rates[::local] > 2 * rates[local - 1 :: local]).any():
        raise Void(
            f"lr_schedule must fall so slowly that a rate falls by no more than half within a round of {local} steps,"
            f" was {system.lr_schedule!r}; use inverse:{max(local - 1, 1)} or more, or fewer local steps"
        )
    # The one-step inequality of the paper's proof with the rates that are really used; noise comes once a round.
    added = rates**2 * omega
    added[local - 1 :: local] += rates[::local] ** 2 * variance
    return contract(distance, 1 - mu * rates, added)


PLANNER = Planner(
    predicted,
    chooses=("rounds", "local_steps"),
    knows=("rounds", "local_steps", "cohort"),
    needs=("strong_convexity", "smoothness", "initial_distance", "gradient_bound", "heterogeneity"),
    of="distance",
)
