"""Plan the trainings of docs/results/four-hospitals.md, and print them as rows of its experiments.

A plan is made of public facts alone: four sites of 199, 172, 30 and 85 records, 13 features, two classes and a budget.
No hospital's records are looked at, for training or for testing. What is printed here stands in
src/dpfl/experiments/four-hospitals/*.toml, and a test holds one of them to it.

python benchmarks/four_hospitals.py [--seconds 20]
"""

import argparse
import warnings
from typing import Any

import dpfl

EPSILONS = (0.1, 1.0, 5.0, 10.0, 50.0)
DELTAS = (1e-1, 1e-2, 1e-3, 1e-4)
SYSTEMS = {"add-remove": "dpsgd-fedavg", "replace": "udp"}


def planned(system: str, epsilon: float, delta: float, seconds: float) -> dict[str, Any]:
    """Return what a plan chooses for one budget."""
    from dpfl.systems import SYSTEMS as KINDS

    options = {"sampling_rate": 1.0, "local_steps": 1} if system == "dpsgd-fedavg" else {}
    plan = dpfl.plan(
        KINDS[system](epsilon=epsilon, delta=delta, **options), dpfl.federate("heart"), keep=("local_steps", "cohort"),
        seed=1, time_limit=seconds,
    )  # fmt: skip
    return {name: getattr(plan.system, name) for name in ("rounds", "lr", "clip", "averaged")}


def main() -> None:
    """Plan every budget and print a row of TOML for each ε."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="for each plan")
    seconds = parser.parse_args().seconds
    warnings.simplefilter("ignore", dpfl.Caution)
    for experiment, system in SYSTEMS.items():
        print(f"# {experiment}.toml")
        for epsilon in EPSILONS:
            plans = [planned(system, epsilon, delta, seconds) for delta in DELTAS]
            columns = ", ".join(
                f"{name} = [{', '.join(f'{plan[name]:g}' for plan in plans)}]" for name in plans[0]
            )  # fmt: skip
            print(f'  {{ label = "ε = {epsilon:g}", epsilon = {epsilon!r}, by_column = {{ {columns} }} }},', flush=True)


if __name__ == "__main__":
    main()
