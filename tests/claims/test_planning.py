"""Plans pay: the loss at the planned numbers is within 10 % of the best on a grid around them.

FedSGD-DPC on MNIST as in its paper (N = K = 10, two digits a client, softmax without bias, C = 300, η = 0.05) and
DP-FedAvg on the loans with 500 clients, 50 a round (C = 150, η = 0.05), both with Laplace noise. The plans are made by
pilots on public records. The noise in the loans' models makes their loss vary by a third from seed to seed, hence more
seeds there.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from dpfl import config
from dpfl.planning import Check, Task, check, make
from dpfl.training import federation_of


@dataclass(frozen=True)
class Setting:
    table: dict[str, Any]
    most_rounds: int
    seeds: int


SETTINGS = {
    "mnist": Setting(
        {
            "system": "fedsgd-dpc", "data": "mnist", "model": "softmax-no-bias", "clients": 10,
            "partition": "classes:2", "mechanism": "laplace", "clip": 300.0, "lr": 0.05, "cohort": 10,
        },
        most_rounds=200,
        seeds=3,
    ),
    "loans": Setting(
        {
            "system": "dp-fedavg", "data": "lending-club", "clients": 500, "cohort": 50, "partition": "sorted",
            "mechanism": "laplace", "clip": 150.0, "lr": 0.05,
        },
        most_rounds=100,
        seeds=10,
    ),
}  # fmt: skip


def checked(setting: Setting, epsilon: float) -> Check:
    parsed = config.parse(setting.table | {"epsilon": epsilon, "seed": 1})
    given = frozenset({"cohort", "lr", "clip", "averaged"})
    task = Task(parsed, federation_of(parsed.settings), given, setting.most_rounds)
    plan = make(task, method="pilot", time_limit=120.0)
    return check(task, plan, seeds=setting.seeds)


TIED = pytest.mark.xfail(
    reason="R = 20, E = 1 and R = 10, E = 2 cannot be told apart on public records, and on clients' one is better"
)


@pytest.mark.parametrize(
    ("name", "epsilon"),
    [
        *((name, epsilon) for name in SETTINGS for epsilon in (1.0, 5.0)),
        ("mnist", 10.0),
        pytest.param("loans", 10.0, marks=TIED),
    ],
)
def test_the_planned_loss_is_within_a_tenth_of_the_best(name: str, epsilon: float) -> None:
    found = checked(SETTINGS[name], epsilon)
    assert found.regret <= 0.1
    assert max(cell.mean for cell in found.cells) > 1.2 * found.best.mean  # the grid is wide enough to lose on
