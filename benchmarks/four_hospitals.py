"""Plan the trainings of docs/results/four-hospitals.md: the rows of its two private experiments.

A plan is made of public facts alone: four sites of 199, 172, 30 and 85 records, 13 features, two classes and a budget.
No hospital's records are looked at, for training or for testing. What is printed here is what stands in
src/dpfl/experiments/four-hospitals/*.toml; --write puts it there.

python benchmarks/four_hospitals.py [--seconds 15] [--write]
"""

import argparse
import multiprocessing
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import dpfl

HOME = Path(__file__).resolve().parents[1] / "src" / "dpfl" / "experiments" / "four-hospitals"
EPSILONS = (0.1, 1.0, 5.0, 10.0, 50.0)
DELTAS = (1e-1, 1e-2, 1e-3, 1e-4)
NUMBERS = ("rounds", "lr", "clip", "averaged")
SYSTEMS: Mapping[str, Any] = {
    "add-remove": dpfl.DPSGDFedAvg(sampling_rate=1.0, local_steps=1),
    "replace": dpfl.UDP(),
}
_PLANNED = "  { delta = "  # how the rows begin that are written here

Plan = Mapping[str, float]  # what was chosen, by the names of the options


def plan(experiment: str, delta: float, epsilon: float, seconds: float) -> Plan:
    """Return what a plan chooses for one budget."""
    torch.set_num_threads(1)  # plans are made side by side
    warnings.simplefilter("ignore", dpfl.Caution)
    found = dpfl.plan(
        replace(SYSTEMS[experiment], epsilon=epsilon, delta=delta),
        dpfl.federate("heart"),
        keep=("local_steps", "cohort"),
        seed=1,
        time_limit=seconds,
    )
    return {name: getattr(found.system, name) for name in NUMBERS}


def every_plan(seconds: float) -> dict[tuple[str, float, float], Plan]:
    """Plan every experiment, δ and ε, as many at a time as there are cores."""
    places = list(product(SYSTEMS, DELTAS, EPSILONS))
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        planned = pool.map(plan, *zip(*places, strict=True), [seconds] * len(places))
        return dict(zip(places, planned, strict=True))


def row(delta: float, plans: Sequence[Plan]) -> str:
    """Return a row of TOML: what was chosen for a δ, at each ε."""
    columns = ", ".join(f"{name} = [{', '.join(_number(each[name]) for each in plans)}]" for name in NUMBERS)
    return f"{_PLANNED}{delta!r}, by_column = {{ {columns} }} }},\n"


def _number(value: float) -> str:
    return repr(value if isinstance(value, int) else float(f"{value:.4g}"))


def written(text: str, rows: Sequence[str]) -> str:
    """Return an experiment's file with these rows in place of its planned ones."""
    lines = text.splitlines(keepends=True)
    first = next(at for at, line in enumerate(lines) if line.startswith(_PLANNED))
    return "".join([*lines[:first], *rows, *(line for line in lines[first:] if not line.startswith(_PLANNED))])


def main(words: Sequence[str] | None = None) -> None:
    """Plan every budget; print the rows, and write them where that is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0, help="for each of the 40 plans")
    parser.add_argument("--write", action="store_true", help="put the rows into the experiments' files, too")
    asked = parser.parse_args(words)
    plans = every_plan(asked.seconds)
    for experiment in SYSTEMS:
        rows = [row(delta, [plans[experiment, delta, epsilon] for epsilon in EPSILONS]) for delta in DELTAS]
        print(f"# {experiment}.toml\n{''.join(rows)}", end="")
        if asked.write:
            path = HOME / f"{experiment}.toml"
            path.write_text(written(path.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
