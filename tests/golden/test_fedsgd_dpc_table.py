"""FedSGD-DPC's Table I for MNIST: the best number of queries for given replies, and of replies for given queries.

Source: FedSGD-DPC, Table I (MNIST, N = 10, Laplace noise, ε = 1, 5 and 10) and equations 6 and 8. The paper does not
print its constants; γ = 3.36, C₁/C₂ = 476·ε² and C₃/C₂ = 157·ε² reproduce the table: three numbers for twelve entries.
Tolerance: one round or 3 % of the entry, whichever is more; K* exactly, once rounded up.
"""

import math
from typing import Any

from dpfl.planning.fedsgd_dpc import optimal_cohort, optimal_laplace, optimal_rounds
from grids import each

GAMMA, CLIENTS, QUERIES = 3.36, 10, 50
EPSILONS = (1.0, 5.0, 10.0)
ROUNDS = {5: (5, 32, 67), 10: (2, 20, 42), 1: (22, 121, 244)}  # R* for each K and ε
COHORTS = (1, 3, 5)  # K* for R = 50
ENTRIES = [
    (cohort, epsilon, entry) for cohort, row in ROUNDS.items() for epsilon, entry in zip(EPSILONS, row, strict=True)
]


def constants(epsilon: float) -> dict[str, float]:
    """Return γ, C₁, C₂ and C₃ in units of C₂."""
    return {"gamma": GAMMA, "c1": 476 * epsilon**2, "c2": 1.0, "c3": 157 * epsilon**2}


def is_printed(found: float, entry: int) -> bool:
    return abs(found - entry) <= max(1.0, 0.03 * entry)


@each(("cohort", "epsilon", "entry"), ENTRIES)
def test_rounds_for_a_cohort(cohort: int, epsilon: float, entry: int) -> None:
    assert is_printed(optimal_rounds(cohort=cohort, **constants(epsilon)), entry)


@each(("epsilon", "entry"), list(zip(EPSILONS, COHORTS, strict=True)))
def test_cohort_for_fifty_rounds(epsilon: float, entry: int) -> None:
    known = constants(epsilon)
    assert math.ceil(optimal_cohort(c1=known["c1"], c2=known["c2"], rounds=QUERIES)) == entry


@each(("epsilon", "entry"), list(zip(EPSILONS, ROUNDS[1], strict=True)))
def test_one_client_a_round_is_best_of_all(epsilon: float, entry: int) -> None:
    # The last column, T*(b* = 1), is the paper's best of all rounds and cohorts.
    best = optimal_laplace(clients=CLIENTS, **constants(epsilon))
    assert best.cohort == 1
    assert is_printed(best.rounds, entry)


# Twins that misread equations 6 and 8: each of them misses the table.


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
        for cohort, row in ROUNDS.items()
        for epsilon, entry in zip(EPSILONS, row, strict=True)
        if not is_printed(twin(cohort, **constants(epsilon)), entry)
    ]
    assert len(missed) >= 2


def test_a_cohort_whose_root_is_left_out_misses_the_table() -> None:
    found = [math.ceil(constants(epsilon)["c1"] / QUERIES) for epsilon in EPSILONS]
    assert all(one != entry for one, entry in zip(found, COHORTS, strict=True))
