"""What twenty repetitions of W4's experiment cost, beside one."""

from collections.abc import Callable

import torch

from dpfl.bench.timing import medians
from dpfl.bench.workloads import WORKLOADS, draw
from dpfl.federation import Federation
from dpfl.repetitions import repeat
from dpfl.systems import DPFedAvg

REPETITIONS, ROUNDS = 20, 10


def repetitions(*, device: str = "cpu", seconds: float = 3.0) -> dict[str, float]:
    """Time whole trainings, ledger and certificate included: one, and twenty as one program, in milliseconds."""
    problem = draw(WORKLOADS["W4"])
    public = problem.records[0]
    federation = Federation("w4", problem.records, public, public, None, "random numbers")
    system = DPFedAvg(rounds=ROUNDS, local_steps=1, cohort=problem.workload.cohort, epsilon=50.0)

    def train(times: int) -> Callable[[], object]:
        return lambda: repeat(system, federation, "linear", repetitions=times, seed=1, device=device)

    taken = medians({"one": train(1), "all": train(REPETITIONS)}, seconds=seconds, device=torch.device(device))
    return {"one_ms": taken["one"], "all_ms": taken["all"], "repetitions": REPETITIONS, "rounds": ROUNDS}
