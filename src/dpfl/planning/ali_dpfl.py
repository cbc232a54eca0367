"""ALI-DPFL's bound, and its right number of local iterations τ (ali-dpfl, Theorem 1 and Lemma 2).

E F(w_T) − F* ≤ h(τ) = L/(2T)·(4/μ² + τΔ₁ + (τ−1)²(2 + ημ)(C² + v_c) + 3C² + 2Γ/η + v) for T = R·τ steps in all, with v
the noise in a step of the averaged model at rate 1 and v_c that of one client, which its own drift follows. The paper
puts σ²C²d/B̂² with the smallest client's batch B̂ for both; noises of N clients average out, so v is about v_c/N.
"""

import math
from dataclasses import replace
from functools import lru_cache

from dpfl.planning.bounds import Facts, Form, Planner, begun, require_convex
from dpfl.planning.constants import Constants
from dpfl.privacy.accounting import Mechanism, most_steps, tight
from dpfl.privacy.budget import Budget, Calibration
from dpfl.privacy.paper_formulas import ali_total_steps
from dpfl.systems import ALIDPFL
from dpfl.systems.ali_dpfl import ALIState, optimal_local_steps


def bound(
    *, total_steps: float, local_steps: float, lr: float, strong_convexity: float, smoothness: float,
    initial_distance: float, clip: float, heterogeneity: float, client_variance: float, variance: float,
) -> float:  # fmt: skip
    """Return h(τ) (equation 8), for T steps in all of which τ a round."""
    drift = (local_steps - 1) ** 2 * (2 + lr * strong_convexity) * (clip**2 + client_variance)
    rest = 4 / strong_convexity**2 + 3 * clip**2 + 2 * heterogeneity / lr + variance
    return smoothness / (2 * total_steps) * (rest + local_steps * initial_distance + drift)


def papers_variance(*, noise_multiplier: float, clip: float, dim: int, batch: float) -> float:
    """Return σ²C²d/B̂², which the paper takes for a client's noise and for that of the average alike."""
    return (noise_multiplier * clip / batch) ** 2 * dim


def total_steps(
    *, sampling_rate: float, noise_multiplier: float, epsilon: float, delta: float, calibration: Calibration = "tight"
) -> int:
    """Return R_c, the most local steps within (ε, δ): exactly, or as the paper counts (Algorithm 3, rounded down).

    >>> total_steps(sampling_rate=0.015, noise_multiplier=1.1, epsilon=1.55, delta=1e-5, calibration="paper")
    78
    """
    if calibration == "paper":
        return ali_total_steps(
            sampling_rate=sampling_rate, noise_multiplier=noise_multiplier, epsilon=epsilon, delta=delta
        )
    return most_steps(tight, Mechanism("gaussian", noise_multiplier, sampling_rate), Budget(epsilon, delta))


def predicted(system: ALIDPFL, facts: Facts, constants: Constants, form: Form) -> float:
    """Return the bound on the loss above its least value for this system, with `local_steps` in every round.

    η is 1/(μT), as in equation 9: the theory's rates fall like 1/t, and this is where they end.
    """
    mu, smoothness, distance = constants.need("strong_convexity", "smoothness", "initial_distance")
    require_convex(mu, system.name)
    total = min(system.rounds * system.local_steps, affordable(system, facts))
    if form == "paper":
        client_variance = variance = papers_variance(
            noise_multiplier=system.noise_multiplier, clip=system.clip, dim=facts.dim,
            batch=system.sampling_rate * min(facts.sizes),
        )  # fmt: skip
    else:
        client_variance, variance = _step_noise(system, facts)
    return bound(
        total_steps=total, local_steps=system.local_steps, lr=1 / (mu * total), strong_convexity=mu,
        smoothness=smoothness, initial_distance=distance, clip=system.clip, heterogeneity=system.heterogeneity,
        client_variance=client_variance, variance=variance,
    )  # fmt: skip


def affordable(system: ALIDPFL, facts: Facts) -> int:
    """Return R_c: how many local steps the largest budget pays for, by the calibration of the system."""
    return _state(replace(system, local_steps=1, rounds=1), facts).total_steps


@lru_cache(maxsize=64)
def _state(system: ALIDPFL, facts: Facts) -> ALIState:
    state: ALIState = begun(system, facts)
    return state


def _step_noise(system: ALIDPFL, facts: Facts) -> tuple[float, float]:
    """Return E‖noise‖² of one step at learning rate 1: of the clients on average, and of their weighted average."""
    single = replace(system, local_steps=1, rounds=1, lr=1.0)
    orders = single.orders(_state(single, facts))
    shares = {client: facts.sizes[client] / sum(facts.sizes) for client in orders}
    noises = {
        client: facts.dim * order.noise_variance(facts.sizes[client]) / order.steps for client, order in orders.items()
    }
    return (
        math.fsum(shares[client] * noise for client, noise in noises.items()),
        math.fsum(shares[client] ** 2 * noise for client, noise in noises.items()),
    )


PLANNER = Planner(
    predicted,
    chooses=("local_steps",),
    knows=("rounds", "local_steps"),
    needs=("strong_convexity", "smoothness", "initial_distance"),
    of="loss",
)

__all__ = ["PLANNER", "affordable", "bound", "optimal_local_steps", "papers_variance", "predicted", "total_steps"]
