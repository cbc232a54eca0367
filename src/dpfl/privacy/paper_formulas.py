"""The papers' formulas, to the letter and in their symbols' order, so that their experiments can be repeated.

They are not equivalent to the guarantee they claim: nothing but `paper` calibration may call the noise formulas, and
the certificate of a run says what they were really worth. Each docstring names the paper and the equation.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from dpfl.errors import BadInput
from dpfl.privacy.accounting import Mechanism, Spent, least_noise, most_steps
from dpfl.privacy.budget import Budget
from dpfl.privacy.gaussian_dp import epsilon_of

C2 = math.sqrt(2)  # our choice where DP-FedAvg and FedSGD-DPC leave it open: the leading order of Gaussian composition
ALI_ORDERS = range(2, 257)  # ALI-DPFL says "any integer α ≥ 2"; with these its printed R_c come out best


def udp_noise_std(*, sensitivity: float, cohort_rate: float, rounds: int, epsilon: float, delta: float) -> float:
    """Return σ_i = Δ_i·√(2qT·ln(1/δ_i))/ε_i (UDP, equation 10), with q = K/U and T rounds.

    The factor q is an amplification by client sampling that does not hold against the server which drew the cohort, and
    the bound on ln(1/δ) is taken from the wrong side: at q = 1 and δ = 1e-3 a claimed ε of 20 is really 30.32.
    """
    return sensitivity * math.sqrt(2 * cohort_rate * rounds * math.log(1 / delta)) / epsilon


def udp_recomputed_noise_std(
    *,
    sensitivity: float,
    cohort_rate: float,
    rounds: int,
    done: int,
    earlier_stds: Sequence[float],
    epsilon: float,
    delta: float,
) -> float:
    """Return σ_i^t = √[(T − t)/(ε_i²/(2qΔ²·ln(1/δ_i)) − Σ_τ 1/(σ_i^τ)²)] (UDP, equation 25), after t of now T rounds.

    With T unchanged the noise does not change (equations 30 and 31).
    """
    granted = epsilon**2 / (2 * cohort_rate * sensitivity**2 * math.log(1 / delta))
    left = granted - math.fsum(1 / std**2 for std in earlier_stds)
    if rounds <= done or left <= 0:
        raise BadInput(
            f"rounds must leave some of the budget for later, was {rounds} after {done} rounds that used"
            f" {1 - left / granted:.1%} of it; stop here"
        )
    return math.sqrt((rounds - done) / left)


def udp_log_moment(*, cohort_rate: float, ratio: float, moment: int, swapped: bool = False) -> float:
    """Return ln D(ν₁, ν₀) = ln E_{z∼ν₀}(ν₁/ν₀)^(λ+1) (UDP, equations 7 and 14), or swapped ln D(ν₀, ν₁) (equation 8).

    ν₀ is N(0, σ²), ν₁ the mixture qN(Δ, σ²) + (1−q)N(0, σ²), the ratio is Δ/σ. In z/σ the integrand is a Gaussian times
    a power of 1 − q + q·e^(z·Δ/σ − Δ²/2σ²), smooth and without bound: it is added up in logarithms, on a fine grid.
    """
    power = -moment if swapped else moment + 1
    lowest, highest = min(0.0, power * ratio) - 12, max(0.0, power * ratio) + 12  # where the integrand lives
    z = np.linspace(lowest, highest, math.ceil(100 * (highest - lowest)))
    with np.errstate(divide="ignore"):  # ln 0 where every client takes part
        log_ratio = np.logaddexp(np.log1p(-cohort_rate), np.log(cohort_rate) + z * ratio - ratio**2 / 2)
    return float(logsumexp(-(z**2) / 2 + power * log_ratio) + math.log((z[1] - z[0]) / math.sqrt(2 * math.pi)))


def udp_log_moment_bound(*, cohort_rate: float, ratio: float, moment: int) -> float:
    """Return qλ(λ+1)Δ²/(2σ²), which is to bound ln D(ν₁, ν₀) where λΔ²/(2σ²) is small (UDP, equation 15)."""
    return cohort_rate * moment * (moment + 1) * ratio**2 / 2


def udp_cautions(budgets: Sequence[Budget]) -> tuple[str, ...]:
    """Say for which budgets equation (10) does not even keep its own promise, with every client in every round."""
    worst = max(budgets, key=lambda budget: _udp_worth(budget) / budget.epsilon)
    if _udp_worth(worst) <= worst.epsilon:
        return ()
    return (
        f"epsilon should be small enough for UDP's equation (10) to hold, was {worst.epsilon:g} at δ = {worst.delta:g},"
        f" where its noise is really worth ε ≤ {_udp_worth(worst):.4g}; calibrate tightly to keep the promise",
    )


def _udp_worth(budget: Budget) -> float:
    return float(epsilon_of(budget.epsilon / math.sqrt(2 * math.log(1 / budget.delta)), budget.delta))


def nbafl_uplink_noise_std(*, clip: float, fewest_records: int, exposures: int, epsilon: float, delta: float) -> float:
    """Return σ_U = c·L·Δs_U/ε with c = √(2·ln(1.25/δ)) and Δs_U = 2C/m (NbAFL, Section III), for L exposures.

    Clipping the parameters to C proves a sensitivity of 2C only, and the classical c is proved for ε < 1 only.
    """
    return _classical(delta) * exposures * (2 * clip / fewest_records) / epsilon


def nbafl_downlink_noise_std(
    *,
    clip: float,
    fewest_records: int,
    clients: int,
    cohort: int,
    exposures: int,
    rounds: int,
    epsilon: float,
    delta: float,
    weights: Sequence[float] | None = None,
) -> float:
    """Return σ_D: NbAFL's Theorem 1 (equation 10) where all clients take part, its Lemma 4 (equation 21) for K of N.

    Zero for T ≤ L√N, and for T ≤ ε/γ, where the uplink noise is held to suffice (below it b is not defined).

    weights: what all clients' p_i are in proportion to, 1/N if left out. Theorem 1 is printed for p_i = 1/N; its proof
    wants σ_D² + Σp_i²σ_U² = (c·T·Δs_D/ε)² with Δs_D = 2C·max p_i/m (equation 9), which is what unequal ones get.
    """
    if cohort == clients:
        relative = [1.0] * clients if weights is None else [weight / max(weights) for weight in weights]
        excess = float(rounds**2 - exposures**2 * math.fsum(one**2 for one in relative))
        counted = math.fsum(relative)  # 1/max p_i, N where all are equal
    else:
        rate = cohort / clients
        gamma = -math.log1p(rate * math.expm1(-epsilon / (exposures * math.sqrt(cohort))))
        if rounds <= epsilon / gamma:
            return 0.0
        b = -(rounds / epsilon) * math.log1p(math.expm1(-epsilon / rounds) / rate)
        excess, counted = (rounds / b) ** 2 - exposures**2 * cohort, cohort
    return 2 * _classical(delta) * clip * math.sqrt(max(excess, 0.0)) / (fewest_records * counted * epsilon)


def _classical(delta: float) -> float:
    return math.sqrt(2 * math.log(1.25 / delta))


def nbafl_cautions(budgets: Sequence[Budget]) -> tuple[str, ...]:
    """Say that the classical Gaussian mechanism is proved below ε = 1 only, where a budget lies above."""
    largest = max(budgets, key=lambda budget: budget.epsilon)
    if largest.epsilon < 1:
        return ()
    return (
        f"epsilon should be below 1 for NbAFL's c = √(2·ln(1.25/δ)), which is proved only there, was"
        f" {largest.epsilon:g}; calibrate tightly to keep the promise",
    )


def dp_fedavg_laplace_scale(
    *, replies: float, largest_lr: float, local_steps: int, clip: float, epsilon: float
) -> float:
    """Return T_l·Ξ₁/ε with Ξ₁ = η̃_t·E·ξ₁ (DP-FedAvg, Theorem 1); the clipping proves a sensitivity of 2Ξ₁."""
    return replies * largest_lr * local_steps * clip / epsilon


def dp_fedavg_noise_std(
    *, replies: float, largest_lr: float, local_steps: int, clip: float, epsilon: float, delta: float,
    constant: float = C2,
) -> float:  # fmt: skip
    """Return σ·Ξ₂ with σ = c₂·√(T_l·ln(1/δ))/ε and Ξ₂ = η̃_t·E·ξ₂ (DP-FedAvg, Theorem 2, q = 1)."""
    return constant * math.sqrt(replies * math.log(1 / delta)) / epsilon * largest_lr * local_steps * clip


def fedsgd_dpc_laplace_scale(*, replies: float, clip: float, records: int, epsilon: float) -> float:
    """Return 2·(bT/N)·ξ₁/(d_i·ε_i) on the mean gradient (FedSGD-DPC, Theorem 1); bT/N need not be whole."""
    return 2 * replies * clip / (records * epsilon)


def fedsgd_dpc_noise_std(
    *, replies: float, clip: float, records: int, epsilon: float, delta: float, constant: float = C2
) -> float:
    """Return σ_i = c₂·ξ₂·√((bT/N)·ln(1/δ_i))/(d_i·ε_i) on the mean gradient (FedSGD-DPC, Theorem 2, equation 5)."""
    return constant * clip * math.sqrt(replies * math.log(1 / delta)) / (records * epsilon)


def open_constant(chosen: float | str | None, *, replies: float, budget: Budget, sampling_rate: float = 1.0) -> float:
    """Return c₂, of which DP-FedAvg and FedSGD-DPC say only that it exists: a number that was chosen, or √2 for None.

    For "accountant" it is the least one at which an accountant of the papers' kind (`ali_epsilon`) finds their promise
    kept: by the noise of so many answers, for the sensitivity that the papers take.

    >>> round(open_constant("accountant", replies=10, budget=Budget(1.0, 1e-5)), 3)
    1.445
    """
    if chosen is None:
        return C2
    if not isinstance(chosen, str):
        return chosen
    multiplier = _accounted_noise(replies, budget, sampling_rate)
    return multiplier * budget.epsilon / (sampling_rate * math.sqrt(replies * math.log(1 / budget.delta)))


@lru_cache(maxsize=4096)  # each round asks for the same clients' noise
def _accounted_noise(replies: float, budget: Budget, sampling_rate: float) -> float:
    least = math.log(1 / budget.delta) / (ALI_ORDERS[-1] - 1)
    if budget.epsilon <= least:
        raise BadInput(
            f"epsilon must be above {least:.3g} for an accountant of orders up to {ALI_ORDERS[-1]} to find any noise"
            f" enough at δ = {budget.delta:g}, was {budget.epsilon:g}; raise it, or give paper_constant a number"
        )

    def epsilon_of_all(spent: Spent, delta: float) -> float:  # K·R/N answers need not be a whole number
        return ali_epsilon(dict.fromkeys(spent, replies), delta)

    return least_noise(epsilon_of_all, Mechanism("gaussian", 1.0, sampling_rate), 1, budget)


def open_constant_cautions(chosen: float | str | None) -> tuple[str, ...]:
    """Say that c₂ is not the papers', where their noise is taken with a number for it."""
    if isinstance(chosen, str):
        return ()
    given = "left out, which makes it dpfl's own √2" if chosen is None else f"{chosen:g}"
    return (
        f"paper_constant should come from the paper, which says only that a constant c₂ exists, was {given}: another"
        " choice has another true ε; say accountant for noise that an accountant finds enough, or calibrate tightly",
    )


@lru_cache(maxsize=4096)  # a search for steps or noise asks for the same orders again and again
def ali_renyi(*, sampling_rate: float, noise_multiplier: float, order: int) -> float:
    """Return ε(α) = (1/(α−1))·ln Σ_k C(α,k)·(1−q)^(α−k)·q^k·exp((k²−k)/(2σ²)) (ALI-DPFL, equation 15).

    The paper's equations 12 and 16 miss the logarithm.
    """
    k = np.arange(order + 1)
    binomials = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    log_terms = binomials + (k * k - k) / (2 * noise_multiplier**2)
    if sampling_rate < 1:
        log_terms = log_terms + (order - k) * math.log1p(-sampling_rate) + k * math.log(sampling_rate)
        return float(logsumexp(log_terms)) / (order - 1)
    return float(log_terms[-1]) / (order - 1)


def ali_total_steps(*, sampling_rate: float, noise_multiplier: float, epsilon: float, delta: float) -> int:
    """Return R_c, the largest number of local iterations within (ε, δ) (ALI-DPFL, Algorithm 3), rounded down.

    The printed algorithm returns the end of its search that may overspend; this one does not.
    """
    mechanism = Mechanism("gaussian", noise_multiplier, sampling_rate)
    return most_steps(ali_epsilon, mechanism, Budget(epsilon, delta))


def ali_epsilon(spent: Mapping[Mechanism, float], delta: float) -> float:
    """Return ε = min over integer α of Σ T·ε(α) + ln(1/δ)/(α−1) (ALI-DPFL, Theorem 2); linear for Laplace noise.

    Laplace noise is not in that paper: DP-FedAvg's and FedSGD-DPC's Theorems 1 add ε up. None of them samples with it.

    >>> round(ali_epsilon({Mechanism("gaussian", 1.1, 0.015): 78}, 1e-5), 2)
    1.55
    """
    if all(mechanism.noise == "laplace" for mechanism in spent):
        return math.fsum(count / mechanism.multiplier for mechanism, count in spent.items())
    if delta == 0 or any(one.noise == "laplace" or one.overwhelmed for one in spent):  # no paper mixes the two
        return math.inf
    return min(
        math.fsum(
            count * ali_renyi(sampling_rate=one.sampling_rate, noise_multiplier=one.multiplier, order=order)
            for one, count in spent.items()
        )
        + math.log(1 / delta) / (order - 1)
        for order in ALI_ORDERS
    )
