"""The best numbers of the five planners, against brute force over dense grids of the bounds that they are to minimise.

Constants are drawn over several orders of magnitude. A closed form may be as good as the best grid point up to rounding
(1e-9 of the bound), never worse; it need not be a point of the grid.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpfl.planning import ali_dpfl, dp_fedavg, fedsgd_dpc, nbafl, udp
from dpfl.planning.bounds import in_turn
from dpfl.privacy.budget import Budget

unhurried = settings(deadline=None, derandomize=True, max_examples=80)  # a busy machine is no failure
ROUNDING = 1e-9


def spanning(low: float, high: float) -> st.SearchStrategy[float]:
    """Draw a number whose logarithm is uniform."""
    return st.floats(math.log10(low), math.log10(high)).map(lambda power: 10.0**power)


def grid_around(best: float, low: float, high: float, points: int = 1500) -> np.ndarray:
    """Return a dense grid from `low` to `high`, denser still within one per cent of `best`."""
    near = np.clip(best * np.linspace(0.99, 1.01, 101), low, high)
    return np.concatenate([np.geomspace(low, high, points), near])


def assert_nothing_is_better(value: Callable[[Any], Any], best: float, grid: np.ndarray, size: float = 0.0) -> None:
    """Assert that `best` is as good as every point of the grid; size: that of terms which cancel in the value."""
    values = np.array([value(float(at)) for at in grid])
    least = int(np.argmin(values))
    slack = ROUNDING * max(abs(values[least]), size)
    assert value(best) <= values[least] + slack, f"{grid[least]} is better than {best}"


# FedSGD-DPC: rounds and cohort together.

laplaces = st.fixed_dictionaries(
    {
        "gamma": spanning(0.1, 1e3),
        "c1": spanning(1e-3, 1e5) | st.just(0.0),
        "c2": spanning(1e-5, 1e3),
        "c3": spanning(1e-3, 1e5) | spanning(1e-3, 1e3).map(lambda number: -number) | st.just(0.0),
    }
)


def beyond(constants: dict[str, float]) -> float:
    """Return a number of rounds above every best one: U falls in R only as long as C₂KR² is below C₁/K + C₃."""
    return 10 * (math.sqrt((constants["c1"] + abs(constants["c3"])) / constants["c2"]) + constants["gamma"])


@unhurried
@given(constants=laplaces, cohort=st.integers(1, 1000))
def test_no_other_number_of_rounds_is_better_for_a_given_cohort(constants: dict[str, float], cohort: int) -> None:
    best = fedsgd_dpc.optimal_rounds(cohort=cohort, **constants)

    def value(rounds: float) -> float:
        return fedsgd_dpc.laplace_bound(rounds=rounds, cohort=cohort, **constants)

    grid = np.append(grid_around(best, 1e-4 * beyond(constants), beyond(constants)), 0.0)
    assert best >= 0
    assert_nothing_is_better(value, best, grid, size=abs(constants["c3"]) / constants["gamma"])


@unhurried
@given(constants=laplaces, rounds=spanning(0.1, 1e4))
def test_no_other_cohort_is_better_for_given_rounds(constants: dict[str, float], rounds: float) -> None:
    assume(constants["c1"] > 0)
    best = fedsgd_dpc.optimal_cohort(c1=constants["c1"], c2=constants["c2"], rounds=rounds)

    def value(cohort: float) -> float:
        return fedsgd_dpc.laplace_bound(rounds=rounds, cohort=cohort, **constants)

    grid = grid_around(best, 1e-3 * best, 1e3 * best)
    assert_nothing_is_better(value, best, grid, size=abs(constants["c3"]) / (rounds + constants["gamma"]))


@unhurried
@given(constants=laplaces, clients=st.integers(1, 300))
def test_of_all_rounds_and_cohorts_none_is_better_than_the_best_of_three(
    constants: dict[str, float], clients: int
) -> None:
    choice = fedsgd_dpc.optimal_laplace(clients=clients, **constants)
    assert choice.rounds >= 0
    assert 1 <= choice.cohort <= clients
    at = fedsgd_dpc.laplace_bound(rounds=choice.rounds, cohort=choice.cohort, **constants)
    assert choice.bound == pytest.approx(at, rel=1e-12, abs=0)
    rounds = np.append(grid_around(choice.rounds, 1e-5 * beyond(constants), beyond(constants), 800), 0.0)
    cohorts = np.concatenate([np.geomspace(1, clients, 100), np.linspace(1, clients, 100)])
    values = fedsgd_dpc.laplace_bound(rounds=rounds[:, None], cohort=cohorts[None, :], **constants)
    slack = ROUNDING * max(abs(values.min()), abs(constants["c3"]) / constants["gamma"])  # type: ignore[attr-defined]
    assert choice.bound <= values.min() + slack  # type: ignore[attr-defined]


def test_each_of_the_three_is_the_best_somewhere() -> None:
    def chosen(**constants: float) -> tuple[float, bool]:
        best = fedsgd_dpc.optimal_laplace(clients=10, **constants)
        return best.cohort, best.rounds > 0

    assert chosen(gamma=1.0, c1=1.0, c2=1.0, c3=100.0) == (1, True)  # noise is what hurts: few replies
    assert chosen(gamma=10.0, c1=1e4, c2=1.0, c3=0.0) == (10, True)  # the clients' differences hurt: all of them
    assert chosen(gamma=1.0, c1=1.0, c2=1.0, c3=-0.1) == (10, False)  # nothing is left to learn


@unhurried
@given(
    clients=st.integers(2, 40),
    mu=spanning(0.01, 10),
    condition=spanning(1, 100),
    others=st.tuples(spanning(1e-2, 1e2), spanning(1e-3, 1e2), spanning(1e-3, 1e3)),
    clip=spanning(1e-2, 1e2),
    epsilon=spanning(0.05, 50),
)
def test_gaussian_noise_wants_all_clients_and_all_rounds_or_none(
    clients: int, mu: float, condition: float, others: tuple[float, float, float], clip: float, epsilon: float
) -> None:
    (length, heterogeneity, distance), most, records, dim = others, 500.0, 100 * clients, 20
    smoothness, budgets = mu * condition, [Budget(epsilon, 1e-5)] * clients
    gamma, per = 2 * smoothness / mu, 4 / mu**2

    def value(rounds: float, cohort: float) -> float:
        variance = fedsgd_dpc.paper_variance(
            noise="gaussian", dim=dim, rounds=rounds, cohort=cohort, clip=clip, records=records, budgets=budgets
        )
        spread = fedsgd_dpc.spread(
            clients=clients, cohort=cohort, gradient_bound=length, smoothness=smoothness, heterogeneity=heterogeneity
        )
        return fedsgd_dpc.bound(
            rounds=rounds, strong_convexity=mu, smoothness=smoothness, initial_distance=distance, spread=spread,
            variance=variance,
        )  # fmt: skip

    # Equation 13: E₁/(K(R+γ)) + E₂/(R+γ) + E₃, where E₃ is what the noise of one round is worth.
    e1 = per * 2 * length**2 * clients / (clients - 1)
    e3 = per * 2 * dim * (clip / records) ** 2 * clients * math.log(1e5) / epsilon**2
    e2 = per * (2 * smoothness * heterogeneity - 2 * length**2 / (clients - 1)) + gamma * (distance - e3)
    assert value(7.0, 1.5) == pytest.approx(e1 / (1.5 * (7 + gamma)) + e2 / (7 + gamma) + e3, rel=1e-9)
    rounds, cohort = fedsgd_dpc.optimal_gaussian(e1=e1, e2=e2, clients=clients, most_rounds=most)
    assert (rounds in (0.0, most), cohort) == (True, clients)
    grid = [value(r, k) for r in np.append(np.geomspace(0.01, most, 60), 0.0) for k in np.linspace(1, clients, 30)]
    assert value(rounds, cohort) <= min(grid) * (1 + ROUNDING)


def test_gaussian_noise_wants_both_all_and_no_rounds_somewhere() -> None:
    assert fedsgd_dpc.optimal_gaussian(e1=4.0, e2=-0.9, clients=4, most_rounds=80) == (80, 4)
    assert fedsgd_dpc.optimal_gaussian(e1=4.0, e2=-1.1, clients=4, most_rounds=80) == (0, 4)
    assert fedsgd_dpc.optimal_gaussian(e1=4.0, e2=1.0, clients=4) == (math.inf, 4)


# DP-FedAvg: local steps, and steps in all.


@unhurried
@given(
    total=spanning(1, 1e4),
    mu=spanning(0.01, 10),
    condition=spanning(1, 1e3),
    length=spanning(1e-2, 1e2),
    rest=st.tuples(spanning(1e-3, 1e3), spanning(1e-3, 1e3)),
    cohort=st.tuples(st.integers(2, 500), st.floats(0, 1)),
    noise=spanning(1e-12, 1e2),
    power=st.sampled_from([1, 2]),
)
def test_no_other_number_of_local_steps_is_better(
    total: float, mu: float, condition: float, length: float, rest: tuple[float, float], cohort: tuple[int, float],
    noise: float, power: int,
) -> None:  # fmt: skip
    clients, (heterogeneity, distance), smoothness = cohort[0], rest, mu * condition
    taken, gamma = max(1, round(cohort[1] * clients)), 8 * smoothness / mu
    best = dp_fedavg.optimal_local_steps(
        total_steps=total, gamma=gamma, gradient_bound=length, clients=clients, cohort=taken, noise=noise, power=power
    )

    def value(steps: float) -> float:
        spread = dp_fedavg.spread(
            clients=clients, cohort=taken, local_steps=steps, gradient_bound=length, smoothness=smoothness,
            heterogeneity=heterogeneity,
        )  # fmt: skip
        rounds = total / steps
        return dp_fedavg.bound(
            rounds=rounds, local_steps=steps, strong_convexity=mu, smoothness=smoothness, initial_distance=distance,
            spread=spread, variance=noise * steps**2 * rounds**power / 4,
        )  # fmt: skip

    assert best >= 1
    # Beyond γ the theory changes its rates; the bound is convex in E below, so that γ itself is best then.
    held = min(best, gamma)
    assert_nothing_is_better(value, held, grid_around(held, 1, gamma))


@pytest.mark.parametrize(("power", "exponent"), [(2, 2 / 3), (1, 1 / 2)])
def test_the_papers_local_steps_are_a_power_of_all_steps(power: int, exponent: float) -> None:
    for total in (10.0, 250.0, 1e6):
        assert dp_fedavg.papers_local_steps(total_steps=total, power=power) == pytest.approx(total**exponent)


def test_the_best_local_steps_grow_with_the_papers_power_of_all_steps() -> None:
    def best(total: float) -> float:
        return dp_fedavg.optimal_local_steps(
            total_steps=total, gamma=8.0, gradient_bound=1.0, clients=10, cohort=2, noise=1.0
        )

    growth = math.log(best(1e12) / best(1e10)) / math.log(100)
    assert growth == pytest.approx(2 / 3, abs=1e-3)


def test_without_gradients_to_drift_along_the_noise_alone_decides() -> None:
    # a = b = 0 leaves c/E, which more local steps only lower: S of them, in one round.
    best = dp_fedavg.optimal_local_steps(
        total_steps=10.0, gamma=80.0, gradient_bound=0.0, clients=5, cohort=5, noise=1.0
    )
    assert best >= 10


@unhurried
@given(
    steps=st.integers(1, 50),
    mu=spanning(0.01, 10),
    condition=spanning(1, 1e3),
    distance=spanning(1e-3, 1e4),
    spread=spanning(1e-3, 1e4),
    noise=spanning(1e-10, 1e3),
    power=st.sampled_from([1, 2]),
    most=spanning(1e3, 1e9),
)
def test_no_other_number_of_steps_in_all_is_better(
    steps: int, mu: float, condition: float, distance: float, spread: float, noise: float, power: int, most: float
) -> None:
    gamma = max(8 * condition, steps)
    best = dp_fedavg.optimal_total_steps(
        local_steps=steps, gamma=gamma, initial_distance=distance, strong_convexity=mu, spread=spread, noise=noise,
        power=power, most=most,
    )  # fmt: skip

    def value(total: float) -> float:
        rounds = total / steps
        return dp_fedavg.bound(
            rounds=rounds, local_steps=steps, strong_convexity=mu, smoothness=mu * condition,
            initial_distance=distance, spread=spread, variance=noise * steps**2 * rounds**power / 4,
        )  # fmt: skip

    assert steps * (1 - ROUNDING) <= best <= most * (1 + ROUNDING)
    assert_nothing_is_better(value, best, grid_around(best, steps, most))


def test_laplace_noise_has_a_finite_best_number_of_steps_and_gaussian_noise_need_not() -> None:
    options = {"local_steps": 2, "gamma": 8.0, "initial_distance": 10.0, "strong_convexity": 1.0, "spread": 1.0}
    assert dp_fedavg.optimal_total_steps(noise=1e-3, power=2, **options) < 1e3
    assert dp_fedavg.optimal_total_steps(noise=1e-3, power=1, most=1e7, **options) == pytest.approx(1e7)


# UDP: rounds.


@unhurried
@given(
    rate=spanning(1e-5, 3),
    gap=spanning(1e-3, 1e3),
    noise=spanning(1e-8, 1e2),
    constant=st.just(0.0) | spanning(1e-4, 1e2),
)
def test_no_other_number_of_udp_rounds_is_better(rate: float, gap: float, noise: float, constant: float) -> None:
    shrink = math.exp(-rate)
    best = udp.optimal_rounds(contraction=shrink, initial_gap=gap, noise=noise, constant=constant)

    def value(rounds: float) -> float:
        left = shrink**rounds
        return left * gap + (1 - left) * (noise * rounds + constant)

    assert best >= 0
    assert (best > 0) == (gap > constant)
    grid = np.append(grid_around(best, 1e-4 / rate, 1e3 / rate), 0.0)
    assert_nothing_is_better(value, best, grid)


@unhurried
@given(
    smoothness=spanning(1e-2, 1e2),
    condition=spanning(1.1, 1e3),
    step=st.floats(0.01, 1.99),
    gap=spanning(1e-2, 1e3),
    divergence=spanning(1e-4, 1e2),
    noise=spanning(1e-8, 1),
    cohort=st.tuples(st.integers(2, 100), st.floats(0, 1)),
)
def test_no_other_number_of_rounds_is_better_by_udps_bound(
    smoothness: float, condition: float, step: float, gap: float, divergence: float, noise: float,
    cohort: tuple[int, float],
) -> None:  # fmt: skip
    clients, taken = cohort[0], max(1, round(cohort[1] * cohort[0]))
    lr, curvature = step / smoothness, smoothness / condition
    shrink = udp.contraction(lr=lr, curvature=curvature, smoothness=smoothness)
    assert 0 < shrink < 1
    assert shrink == pytest.approx(1 - 2 * curvature * lr + curvature * lr**2 * smoothness)
    worth = smoothness / 2 / (1 - shrink)  # of a round's squared noise, once it has built up
    best = udp.optimal_rounds(
        contraction=shrink, initial_gap=gap, noise=worth * noise,
        constant=worth * lr**2 * divergence * in_turn(clients, taken),
    )  # fmt: skip

    def value(rounds: float) -> float:
        return udp.bound(
            rounds=rounds, lr=lr, curvature=curvature, smoothness=smoothness, initial_gap=gap, divergence=divergence,
            clients=clients, cohort=taken, variance=noise * rounds,
        )  # fmt: skip

    time = -1 / math.log(shrink)
    assert_nothing_is_better(value, best, np.append(grid_around(best, 1e-3 * time, 100 * time), 0.0))


def test_the_less_noise_the_more_rounds_however_little_it_is() -> None:
    found = [udp.optimal_rounds(contraction=0.9, initial_gap=10.0, noise=10.0**-power) for power in range(1, 25)]
    assert found == sorted(found)
    # e^u + u = 1 + x has u = ln(x) up to ln(x)/x where x is large.
    rate = math.log(1 / 0.9)
    assert found[-1] == pytest.approx(math.log(rate * 10 / 1e-24) / rate, rel=1e-6)


def test_a_round_that_brings_all_there_is_to_bring_is_enough() -> None:
    # η = 1/L and l = L make A = 0, for which A^R·Θ + (1 − A^R)(aR + b) is aR + b after the first round.
    assert 0 < udp.optimal_rounds(contraction=0.0, initial_gap=10.0, noise=0.1) <= 1


# NbAFL: rounds and cohort.


@unhurried
@given(
    shortfall=spanning(1e-4, 0.99),
    gap=spanning(1e-2, 1e2),
    kappa1=spanning(1e-5, 1e2),
    kappa0=spanning(1e-5, 1e2),
    epsilon=spanning(0.1, 100),
)
def test_no_other_number_of_nbafl_rounds_is_better(
    shortfall: float, gap: float, kappa1: float, kappa0: float, epsilon: float
) -> None:
    shrink = 1 - shortfall
    best = nbafl.optimal_rounds(initial_gap=gap, contraction=shrink, kappa1=kappa1, kappa0=kappa0, epsilon=epsilon)

    def value(rounds: float) -> float:
        # Theorem 2 with P = `shrink`, slope and curve chosen so that they come out as κ₁ and κ₀.
        slope = kappa1 * (1 - shrink) * math.sqrt(math.pi / 2)
        terms = nbafl.Terms(contraction=shrink, slope=slope, curve=kappa0 * (1 - shrink))
        return nbafl.paper_bound(rounds=rounds, initial_gap=gap, terms=terms, size=rounds / epsilon)

    assert_nothing_is_better(value, best, grid_around(best, 1e-3, 1e6, 3000))


@unhurried
@given(
    clients=st.integers(1, 500),
    smoothness=spanning(0.01, 10),
    dissimilarity=st.floats(0.01, 0.9),
    pull=spanning(20, 1e3),
    rounds=st.integers(1, 100),
    noise=st.tuples(spanning(1e-4, 1e2), spanning(1e-6, 1)),
)
def test_no_other_cohort_is_better_by_nbafls_bound(
    clients: int, smoothness: float, dissimilarity: float, pull: float, rounds: int, noise: tuple[float, float]
) -> None:
    def cost(cohort: float) -> float:
        terms = nbafl.terms_of_cohort(
            proximal=pull * smoothness, smoothness=smoothness, lipschitz=1.0, curvature=smoothness / 2,
            dissimilarity=dissimilarity, clients=clients, cohort=cohort,
        )  # fmt: skip
        variance = noise[0] / cohort + noise[1] * cohort
        return nbafl.bound(rounds=rounds, initial_gap=1.0, terms=terms, variance=variance)

    best = nbafl.optimal_cohort(cost=cost, clients=clients)
    assert 1 <= best <= clients
    assert_nothing_is_better(cost, best, grid_around(best, 1, clients))


@unhurried
@given(few=spanning(1e-6, 1e6), clients=st.integers(1, 1000))
def test_a_best_cohort_outside_of_one_to_all_is_held_to_it(few: float, clients: int) -> None:
    best = nbafl.optimal_cohort(cost=lambda cohort: few / cohort + cohort, clients=clients)
    assert best == pytest.approx(min(max(math.sqrt(few), 1.0), clients), rel=1e-4)


def test_the_best_cohort_is_found_though_another_is_good_nearby() -> None:
    def cost(cohort: float) -> float:
        return math.log(cohort / 2) ** 2 * (math.log(cohort / 100) ** 2 + 0.1)  # 0 at K = 2, low at K = 100 too

    assert nbafl.optimal_cohort(cost=cost, clients=1000) == pytest.approx(2, rel=1e-3)


# ALI-DPFL: local steps.


@unhurried
@given(
    mu=spanning(1e-2, 1e2),
    clip=spanning(1e-2, 1e2),
    heterogeneity=st.just(0.0) | spanning(1e-2, 1e2),
    total=spanning(1, 1e4),
    multiplier=spanning(0.1, 100),
    dim=st.integers(1, 10**6),
    batch=spanning(0.1, 1e4),
    rest=st.tuples(spanning(0.1, 10), spanning(1e-3, 1e3)),
)
def test_no_other_number_of_local_iterations_is_better_by_alis_bound(
    mu: float, clip: float, heterogeneity: float, total: float, multiplier: float, dim: int, batch: float,
    rest: tuple[float, float],
) -> None:  # fmt: skip
    noise = ali_dpfl.papers_variance(noise_multiplier=multiplier, clip=clip, dim=dim, batch=batch)
    best = ali_dpfl.optimal_local_steps(
        curvature=mu, clip=clip, heterogeneity=heterogeneity, total_steps=total, noise_multiplier=multiplier, dim=dim,
        batch=batch,
    )  # fmt: skip

    def value(steps: float) -> float:
        """Return G(τ) = T·h(τ)/τ."""
        return total / steps * ali_dpfl.bound(
            total_steps=total, local_steps=steps, lr=1 / (mu * total), strong_convexity=mu, smoothness=rest[0],
            initial_distance=rest[1], clip=clip, heterogeneity=heterogeneity, client_variance=noise, variance=noise,
        )  # fmt: skip

    assert best >= 1
    assert_nothing_is_better(value, best, grid_around(best, 1, 1e3 * best))
