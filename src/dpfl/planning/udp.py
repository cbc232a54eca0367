"""UDP's bound and its right number of rounds R (udp-crd, Theorems 2 and 3).

E F(w_R) − F* ≤ A^R·Θ + (1 − A^R)/(μη(2 − ηL))·(L/2)·(v + η²ε̄·(N−K)/(K(N−1))), with A = 1 − 2μη + μη²L, where μ is the
constant of the Polyak–Łojasiewicz inequality, v = E‖noise‖² of a round and ε̄ the divergence of the clients' gradients.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import wrightomega

from dpfl.planning.bounds import Facts, Form, Planner, Void, in_turn, require_below, require_convex, round_noise
from dpfl.planning.constants import Constants
from dpfl.privacy.budget import Budget
from dpfl.systems import UDP


def contraction(*, lr: float, curvature: float, smoothness: float) -> float:
    """Return A = 1 − 2μη + μη²L, by which a round without noise shrinks the gap; below 1 for 0 < η < 2/L."""
    return 1 - curvature * lr * (2 - lr * smoothness)


def bound(
    *, rounds: float, lr: float, curvature: float, smoothness: float, initial_gap: float, divergence: float,
    clients: int, cohort: float, variance: float,
) -> float:  # fmt: skip
    """Return the bound on E F(w_R) − F* (Theorem 2) in terms of the noise that is really added."""
    left = float(contraction(lr=lr, curvature=curvature, smoothness=smoothness) ** rounds)
    added = smoothness / 2 * (variance + lr**2 * divergence * in_turn(clients, cohort))
    return left * initial_gap + (1 - left) / (curvature * lr * (2 - lr * smoothness)) * added


def paper_bound(
    *, rounds: float, lr: float, curvature: float, smoothness: float, initial_gap: float, divergence: float,
    clients: int, cohort: float, sensitivity: float, budgets: Sequence[Budget],
) -> float:  # fmt: skip
    """Return Theorem 2 as printed: A^R·Θ + (1−A^R)(κ₀RK/N²·Σ ln(1/δ_i)/ε_i² + κ₁N(N−K)/(K(N−1))).

    κ₀ = L²Δ²/μ and κ₁ = η²L²ε̄/(2μ). It takes η = 1/L, drops the model's dimension d, averages the noise with Σp_i
    instead of Σp_i² (a factor K) and has an N too many beside κ₁.
    """
    left = float(contraction(lr=lr, curvature=curvature, smoothness=smoothness) ** rounds)
    kappa0 = (smoothness * sensitivity) ** 2 / curvature
    kappa1 = (lr * smoothness) ** 2 * divergence / (2 * curvature)
    paid = math.fsum(math.log(1 / budget.delta) / budget.epsilon**2 for budget in budgets)
    noise = kappa0 * rounds * cohort / clients**2 * paid
    return left * initial_gap + (1 - left) * (noise + kappa1 * clients * in_turn(clients, cohort))


def optimal_rounds(*, contraction: float, initial_gap: float, noise: float, constant: float = 0.0) -> float:
    """Return the R at which A^R·Θ + (1 − A^R)(a·R + b) is least, for noise a > 0 a round and a constant b.

    Setting the derivative to zero gives e^u + u = 1 + ln(1/A)·(Θ − b)/a with u = R·ln(1/A), hence Wright's ω function.
    There is one such point, and 0 where Θ ≤ b: the model is already as good as training could make it.
    """
    if initial_gap <= constant:
        return 0.0
    if contraction <= 0:
        return 1.0  # a single round brings all there is
    if noise == 0:
        return math.inf
    rate = math.log(1 / contraction)
    level = 1 + rate * (initial_gap - constant) / noise
    return math.log(float(np.real(wrightomega(level)))) / rate  # u = level − ω = ln ω


def predicted(system: UDP, facts: Facts, constants: Constants, form: Form) -> float:
    """Return the bound on the loss above its least value for this system."""
    clients, clip = len(facts.sizes), _clip_of_one_step(system)
    curvature, smoothness = constants.need("polyak_lojasiewicz", "smoothness")
    gap, divergence = constants.need("initial_gap", "divergence")
    require_convex(curvature, system.name, "polyak_lojasiewicz (l)")
    require_below("lr", system.lr, 2 / smoothness, "2/L", system.name, strictly=True)
    if contraction(lr=system.lr, curvature=curvature, smoothness=smoothness) < 0:
        raise Void(
            f"polyak_lojasiewicz (l) must be at most the smoothness L = {smoothness:.4g} for the bound of udp, was"
            f" {curvature:.4g}; correct one of the two"
        )
    common: dict[str, Any] = {
        "rounds": system.rounds, "lr": system.lr, "curvature": curvature, "smoothness": smoothness,
        "initial_gap": gap, "divergence": divergence, "clients": clients, "cohort": system.cohort or clients,
    }  # fmt: skip
    if form == "general":
        return bound(**common, variance=round_noise(system, facts))
    largest = 2 * system.lr * clip / min(facts.sizes)  # Δ = 2ηC/n_i of the smallest client
    return paper_bound(**common, sensitivity=largest, budgets=system.budgets(clients))


def _clip_of_one_step(system: UDP) -> float:
    """Return the C of one full-batch step on clipped gradients; refuse all that Theorem 2 is not about."""
    if isinstance(system.clip, str):
        raise Void(
            f"clip must be a number for the bound of {system.name}, whose noise is the same in every round, was"
            f" {system.clip!r}; give one, or use --method pilot"
        )
    steps = system.local_steps if system.local_epochs is None else system.local_epochs
    if system.clips_parameters or steps > 1:
        raise Void(
            f"clipping must be 'record' and local_steps 1 for the bound of {system.name}, which is for one full-batch"
            f" step, were {system.clipping or 'record'!r} and {steps}; leave them out, or use --method pilot"
        )
    return system.clip


PLANNER = Planner(
    predicted,
    chooses=("rounds",),
    knows=("rounds", "cohort"),
    needs=("polyak_lojasiewicz", "smoothness", "initial_gap", "divergence"),
    of="loss",
)
