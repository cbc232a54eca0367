"""FedSGD-DPC on MNIST, N = K = 10, two digits a client, softmax without bias, Laplace noise, C = 300, η = 0.05.

R* is the closed form √(γ² + (C₁/K + C₃)/(C₂K)) − γ with γ = 3.36, C₁/C₂ = 476ε² and C₃/C₂ = 157ε², the constants that
reproduce the paper's Table I: 2, 20 and 42 rounds. The bound is loose, so R* is near the best in what it costs, not in
the number: the loss there is within 15 % of the least on the grid, which lies inside the grid.
"""

import pytest

from claims.trainings import Outcomes, Training, clearly_less, mean, outcomes
from dpfl.planning import fedsgd_dpc

GRIDS = {1.0: (2, 8, 32), 5.0: (5, 20, 40, 80), 10.0: (10, 42, 84, 168)}


def optimal_rounds(epsilon: float, cohort: int = 10) -> float:
    return fedsgd_dpc.optimal_rounds(gamma=3.36, c1=476 * epsilon**2, c2=1.0, c3=157 * epsilon**2, cohort=cohort)


@pytest.fixture(scope="module")
def losses() -> dict[float, dict[int, Outcomes]]:
    cells = [(epsilon, rounds) for epsilon, grid in GRIDS.items() for rounds in grid]
    trainings = [
        Training(
            "fedsgd-dpc",
            {"mechanism": "laplace", "epsilon": epsilon, "clip": 300.0, "lr": 0.05, "rounds": rounds},
            "mnist",
            {"clients": 10, "partition": "classes:2"},
            "softmax-no-bias",
            seeds=(1, 2),
        )
        for epsilon, rounds in cells
    ]
    found: dict[float, dict[int, Outcomes]] = {epsilon: {} for epsilon in GRIDS}
    for (epsilon, rounds), reached in zip(cells, outcomes(trainings), strict=True):
        found[epsilon][rounds] = reached
    return found


@pytest.mark.parametrize("epsilon", GRIDS)
def test_the_best_number_of_rounds_lies_inside(losses: dict[float, dict[int, Outcomes]], epsilon: float) -> None:
    cells = losses[epsilon]
    best = min(cells, key=lambda rounds: mean(cells[rounds].loss))
    fewest, most = min(cells), max(cells)
    assert fewest < best < most
    assert clearly_less(cells[best].loss, cells[fewest].loss)
    assert clearly_less(cells[best].loss, cells[most].loss)


@pytest.mark.parametrize("epsilon", GRIDS)
def test_the_planned_number_of_rounds_is_near_it(losses: dict[float, dict[int, Outcomes]], epsilon: float) -> None:
    planned = min(GRIDS[epsilon], key=lambda rounds: abs(rounds - optimal_rounds(epsilon)))
    assert abs(planned - optimal_rounds(epsilon)) < 1.0
    least = min(mean(cell.loss) for cell in losses[epsilon].values())
    assert mean(losses[epsilon][planned].loss) < 1.15 * least
