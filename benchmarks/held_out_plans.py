"""Do plans made of public facts alone pay? Target: within 10 % of the best grid point in 14 of 16 cases.

The cases are four federations without a public record (`held_out_problems.py`) at ε = 0.3, 1, 3 and 10. For each a grid
of rounds, lr, clip and averages in factors of 2 is trained (`held_out_grid.py`), and its best points once more with
fresh seeds. The same seeds then train what was planned; and the system as it is, where nobody plans. Clients' records
and test records serve to measure: a plan is made without either.

python benchmarks/held_out_plans.py --grid grid.json [--system udp] [--seconds 60] [--valleys valleys.md] [--json]

The grids take a quarter of an hour on one core and stay in their file: what is in it is not trained again.
"""

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from held_out_grid import EPSILONS, NUMBERS, finite, losses_of, search_grid, summary, system_at
from held_out_problems import PROBLEMS, USUAL, Problem

import dpfl
from dpfl.averages import standard_error
from dpfl.federation import Federation
from dpfl.systems import SYSTEMS, PrivateSystem

_WITHIN = 0.1  # the regret that a plan may have
_OF_POINTS: dict[str, Callable[[Sequence[Any]], float]] = {
    "rounds": lambda one: one[0],
    "lr·clip": lambda one: one[1] * one[2],
    "clip": lambda one: one[2],
    "averaged": lambda one: one[3],
}


def planned(system: PrivateSystem[Any], federation: Federation, by: str, seconds: float) -> PrivateSystem[Any]:
    """Return the system with the numbers that a plan gives it."""
    if by == "defaults":  # no plan, for a try of all that follows
        return system
    return dpfl.plan(system, federation, method=by, seed=1, time_limit=seconds).system


def judge(problem: Problem, kept: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Plan each case of a problem, train what was planned, and hold it against the grid."""
    federation = problem.load()
    for epsilon in EPSILONS:
        case = kept["cases"][f"{epsilon:g}"]
        started = time.perf_counter()
        usual = system_at(options.system, epsilon, problem.delta)
        system = planned(usual, federation, options.plan_by, options.seconds)
        seconds = time.perf_counter() - started
        best, defaults = best_of(case), _losses(case["defaults"])
        losses = losses_of(system, federation, len(defaults))
        loss, least = statistics.fmean(losses), statistics.fmean(_losses(best))
        regret = loss / least - 1
        yield {
            "problem": problem.name, "epsilon": epsilon,
            "planned": {name: getattr(system, name) for name in NUMBERS}, "besides": _besides(system, usual),
            "loss": summary(losses),
            "best": {name: best[name] for name in NUMBERS}, "best_loss": summary(_losses(best)),
            "defaults_loss": summary(defaults), "untrained_loss": kept["untrained"],
            "regret": finite(regret), "within": regret <= _WITHIN,
            "worse_than_defaults": loss > statistics.fmean(defaults),
            "clearly_worse_than_defaults": _clearly_above(losses, defaults), "planning_seconds": seconds,
        }  # fmt: skip


def best_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the finalist of least loss in the last trainings."""
    best: dict[str, Any] = min(case["finalists"], key=lambda one: statistics.fmean(_losses(one)))
    return best


def verdict(row: Mapping[str, Any]) -> str:
    """Return a line about one case."""
    worse = ""
    if row["worse_than_defaults"]:
        clearly = "" if row["clearly_worse_than_defaults"] else ", by less than two standard errors"
        worse = f"; WORSE than the defaults' {_written(row['defaults_loss'])}{clearly}"
    return (
        f"{row['problem']}, ε = {row['epsilon']:g}: loss {_written(row['loss'])}, the best"
        f" {_written(row['best_loss'])}: {'' if row['within'] else 'NOT '}within {100 * _WITHIN:g} %{worse}"
        f" (planned in {row['planning_seconds']:.0f} s)"
    )


def tally(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the sum of all verdicts."""
    within, worse, clearly = (
        sum(row[key] for row in rows) for key in ("within", "worse_than_defaults", "clearly_worse_than_defaults")
    )
    beyond_luck = f", in {clearly} of them by more than two standard errors" if worse else ""
    return f"{within} of {len(rows)} within {100 * _WITHIN:g} %, worse than the defaults in {worse}{beyond_luck}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the cases as a table in Markdown."""
    head = ("", "ε", "planned (R, η, C, averaged)", "loss there", "best of the grid", "its loss", "regret",
            "defaults", "untrained")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    before = None
    for row in rows:
        plan, best = (", ".join(f"{row[key][name]:.3g}" for name in NUMBERS) for key in ("planned", "best"))
        plan += "".join(f", {name} = {value}" for name, value in row["besides"].items())
        cells = (
            "" if row["problem"] == before else PROBLEMS[row["problem"]].title, f"{row['epsilon']:g}", plan,
            _written(row["loss"]), best, _written(row["best_loss"]),
            "diverged" if row["regret"] is None else f"{100 * row['regret']:.0f} %", _written(row["defaults_loss"]),
            f"{row['untrained_loss']:.3g}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
        before = row["problem"]
    return "\n".join(lines)


def valley(problem: str, kept: Mapping[str, Any]) -> str:
    """Return in Markdown where each case's best points are, and how steeply the loss rises on each side of them."""
    lines = [
        f"## {kept['title']}: δ = {kept['delta']:g}, untrained {kept['untrained']:.4g}",
        "",
        "By how much the best grid point with a value is above the best of all; and the losses where one number alone"
        " is another than in the best point.",
        "",
    ]
    for epsilon, case in kept["cases"].items():
        best, usual, points = best_of(case), case["defaults"], [one for one in case["points"] if one[4] is not None]
        least = points[0][4]
        near = [one for one in points if one[4] <= (1 + _WITHIN) * least]
        spans = (f"{name} {min(map(of, near)):.3g} to {max(map(of, near)):.3g}" for name, of in _OF_POINTS.items())
        lines += [
            f"### {problem}, ε = {epsilon}",
            f"- best: {_numbers_of(best)}: loss {_written(summary(_losses(best)))}",
            f"- defaults: {_numbers_of(usual)}: loss {_written(summary(_losses(usual)))}",
            f"- within {100 * _WITHIN:g} % of the least, {least:.4g} (of {kept['seeds']} seeds, and the luckiest), are"
            f" {len(near)} of {len(case['points'])} points: {', '.join(spans)}",
        ]
        products = {
            "lr": lambda one: one[1],
            "rounds·lr·clip, to a factor of 2": lambda one: 2.0 ** round(math.log2(one[0] * one[1] * one[2])),
        }
        lines += [f"- {name}: {_profile(points, of, least)}" for name, of in (_OF_POINTS | products).items()]
        here = [best[name] for name in NUMBERS]
        lines += [f"- {name} alone: {_slice(case['points'], here, of)}" for name, of in _OF_POINTS.items()]
        lines.append("")
    return "\n".join(lines)


def _besides(system: PrivateSystem[Any], usual: PrivateSystem[Any]) -> dict[str, Any]:
    """Return what a plan chose that the grid does not vary."""
    names = [one.name for one in fields(system) if one.name not in NUMBERS]
    return {name: getattr(system, name) for name in names if getattr(system, name) != getattr(usual, name)}


def _profile(points: Sequence[Any], of: Callable[[Sequence[Any]], float], least: float) -> str:
    best: dict[float, float] = {}
    for one in points:
        best[of(one)] = min(one[4], best.get(of(one), math.inf))
    return ", ".join(f"{value:g}: {100 * (loss / least - 1):+.0f} %" for value, loss in sorted(best.items()))


def _slice(points: Sequence[Any], here: Sequence[float], of: Callable[[Sequence[Any]], float]) -> str:
    others = [other for other in _OF_POINTS.values() if other is not of]
    found = {of(one): one[4] for one in points if all(math.isclose(other(one), other(here)) for other in others)}
    return ", ".join(f"{value:g}: {'∞' if loss is None else f'{loss:.4g}'}" for value, loss in sorted(found.items()))


def _losses(kept: Mapping[str, Any]) -> list[float]:
    return [math.inf if loss is None else loss for loss in kept["losses"]]


def _clearly_above(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Tell whether losses are above those with the same seeds by more than two standard errors."""
    if not math.isfinite(statistics.fmean(others)):
        return False
    differences = [one - other for one, other in zip(losses, others, strict=True)]
    return statistics.fmean(differences) > 2 * (standard_error(differences) or 0.0)


def _numbers_of(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {point[name]:g}" for name in NUMBERS)


def _written(found: Sequence[float | None]) -> str:
    mean, error = found
    return "diverged" if mean is None or error is None else f"{mean:.4g} ± {error:.2g}"


def _read(path: Path, system: str) -> dict[str, Any]:
    """Return the grids that are kept."""
    if not path.exists():
        return {"system": system, "problems": {}}
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if kept["system"] != system:
        raise SystemExit(f"{path} holds grids of {kept['system']}, not of {system}; name another file")
    return kept


def main() -> None:
    """Train the grids that are not kept yet, then plan every case and say how good the plans are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, required=True, help="file in which the grids are kept")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(USUAL))
    parser.add_argument("--system", choices=sorted(SYSTEMS), default="udp")
    parser.add_argument("--plan-by", choices=("pilot", "bound", "defaults"), default="pilot")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each plan")
    parser.add_argument(
        "--valleys", type=Path, help="file to describe the grids in: their best points, how flat they are"
    )
    parser.add_argument("--grid-only", action="store_true", help="make no plans")
    parser.add_argument("--json", action="store_true", help="print the cases as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", dpfl.Caution)

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    kept, chosen = _read(options.grid, options.system), [PROBLEMS[name] for name in options.problems]
    for problem in chosen:
        if problem.name not in kept["problems"]:
            kept["problems"][problem.name] = search_grid(problem, options.system, tell)
            options.grid.write_text(json.dumps(kept), encoding="utf-8")
        if options.valleys:
            known = [valley(one.name, kept["problems"][one.name]) for one in chosen if one.name in kept["problems"]]
            options.valleys.write_text("\n".join(known), encoding="utf-8")
    if options.grid_only:
        return
    rows = []
    for problem in chosen:
        for row in judge(problem, kept["problems"][problem.name], options):
            rows.append(row)
            tell(verdict(row))
    if options.json:
        print(json.dumps({"system": options.system, "cases": rows, "tally": tally(rows)}, indent=2))
    else:
        print(table(rows), tally(rows), sep="\n\n")


if __name__ == "__main__":
    main()
