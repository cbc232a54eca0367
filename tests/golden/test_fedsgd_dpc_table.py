"""FedSGD-DPC's Table I: the best number of queries for given replies, and of replies for given queries.

Source: FedSGD-DPC, Table I (N = 10, Laplace noise, ε = 1, 5 and 10) and the closed forms of Section V-B. The paper
prints neither its constants nor how it rounds. γ, C₁/C₂ and C₃/C₂ are fitted to the table here, three numbers to the
twelve entries of a data set, and many others fit as well: what the table confirms is the form of the equations.
Tolerance: none, once R* is rounded to the nearest whole number (or down, with a smaller γ) and K* up.
"""

import math
from collections.abc import Callable
from typing import Any

from dpfl.planning.fedsgd_dpc import optimal_cohort, optimal_laplace, optimal_rounds
from grids import each

CLIENTS, QUERIES = 10, 50
EPSILONS = (1.0, 5.0, 10.0)
ROUNDS = {  # R* for each K and ε
    "mnist": {5: (5, 32, 67), 10: (2, 20, 42), 1: (22, 121, 244)},
    "femnist": {5: (2, 22, 48), 10: (1, 14, 31), 1: (11, 70, 145)},
}
COHORTS = {"mnist": (1, 3, 5), "femnist": (1, 2, 3)}  # K* for R = 50
FITS: dict[str, list[tuple[Callable[[float], int], tuple[float, float, float]]]] = {  # γ, C₁/(C₂ε²), C₃/(C₂ε²)
    "mnist": [(round, (2.85, 457, 152)), (math.floor, (2.05, 457, 152)), (math.floor, (1.7, 458, 146))],
    "femnist": [(round, (4.8, 107, 116)), (math.floor, (4.05, 109, 114))],
}


def constants(fitted: tuple[float, float, float], epsilon: float) -> dict[str, float]:
    """Return γ, C₁, C₂ and C₃ in units of C₂."""
    gamma, c1, c3 = fitted
    return {"gamma": gamma, "c1": c1 * epsilon**2, "c2": 1.0, "c3": c3 * epsilon**2}


@each(("data", "rounded", "fitted"), [(data, *fit) for data, fits in FITS.items() for fit in fits])
def test_every_entry_is_met(data: str, rounded: Callable[[float], int], fitted: tuple[float, float, float]) -> None:
    for cohort, row in ROUNDS[data].items():
        found = [rounded(optimal_rounds(cohort=cohort, **constants(fitted, epsilon))) for epsilon in EPSILONS]
        assert found == list(row)
    cohorts = [
        math.ceil(optimal_cohort(c1=known["c1"], c2=known["c2"], rounds=QUERIES))
        for known in (constants(fitted, epsilon) for epsilon in EPSILONS)
    ]
    assert cohorts == list(COHORTS[data])


@each("data", ["mnist", "femnist"])
def test_one_client_a_round_is_best_of_all(data: str) -> None:
    # The last column, T*(b* = 1), is the paper's best of all rounds and cohorts.
    rounded, fitted = FITS[data][0]
    for epsilon, entry in zip(EPSILONS, ROUNDS[data][1], strict=True):
        best = optimal_laplace(clients=CLIENTS, **constants(fitted, epsilon))
        assert best.cohort == 1
        assert rounded(best.rounds) == entry


# Twins that misread the closed forms: each of them misses the table.


def without_cohort(cohort: int, *, gamma: float, c1: float, c2: float, c3: float) -> float:
    return math.sqrt(gamma**2 + (c1 + c3) / c2) - gamma


def without_cohort_beside_c1(cohort: int, *, gamma: float, c1: float, c2: float, c3: float) -> float:
    return math.sqrt(gamma**2 + (c1 + c3) / (c2 * cohort)) - gamma


def without_cohort_beside_c2(cohort: int, *, gamma: float, c1: float, c2: float, c3: float) -> float:
    return math.sqrt(gamma**2 + (c1 / cohort + c3) / c2) - gamma


def without_gamma(cohort: int, *, gamma: float, c1: float, c2: float, c3: float) -> float:
    return math.sqrt((c1 / cohort + c3) / (c2 * cohort))


@each("twin", [without_cohort, without_cohort_beside_c1, without_cohort_beside_c2, without_gamma])
def test_a_formula_that_is_not_the_papers_misses_the_table(twin: Any) -> None:
    missed = [
        (cohort, epsilon)
        for cohort, row in ROUNDS["mnist"].items()
        for epsilon, entry in zip(EPSILONS, row, strict=True)
        if abs(twin(cohort, **constants(FITS["mnist"][0][1], epsilon)) - entry) > max(1.0, 0.03 * entry)
    ]
    assert len(missed) >= 2


def test_a_cohort_whose_root_is_left_out_misses_the_table() -> None:
    found = [math.ceil(constants(FITS["mnist"][0][1], epsilon)["c1"] / QUERIES) for epsilon in EPSILONS]
    assert all(one != entry for one, entry in zip(found, COHORTS["mnist"], strict=True))
