"""What a plan looks like: on the screen, and as files in a folder from which it can be run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpfl import run_folder
from dpfl.config import Config
from dpfl.planning.by_bound import Plan
from dpfl.planning.constants import SYMBOLS
from dpfl.planning.regret import Check
from dpfl.planning.task import NAMES, Point, counted
from dpfl.report import notebook
from dpfl.report.plan import draw
from dpfl.report.together import NOTHING, simulated
from dpfl.run_folder import write_json

_PREDICTED = "predicted certificate, of the run that is planned here"


def text(plan: Plan, clients: int, check: Check | None = None) -> str:
    """Return the plan for the screen."""
    parts = [
        _numbers(plan, clients),
        _measure(plan),
        *(_columns(*rows) for rows in _tables(plan)),
        _noise(plan),
        "why\n" + "\n".join(f"  - {sentence}" for sentence in plan.why),
        _constants(plan),
        f"{_PREDICTED}\n{_indented(str(plan.certificate))}",
        "" if check is None else _check(check),
        NOTHING if check is None else simulated(check.if_real, check.neighbours),
    ]
    return "\n\n".join(part for part in parts if part)


def html(plan: Plan) -> str:
    """Return the plan for a notebook."""
    return notebook.page(
        _numbers(plan, plan.certificate.clients),
        _measure(plan),
        *_tables(plan),
        _noise(plan),
        notebook.sentences(plan.why),
        _PREDICTED,
        notebook.certificate(plan.certificate.to_dict()),
    )


def _numbers(plan: Plan, clients: int) -> str:
    """Say what was chosen."""
    best = plan.best
    everyone = "all " if best.cohort == clients else ""
    others = "".join(f", {key} {value}" for key, value in plan.options.items() if key not in NAMES)
    return (
        f"{plan.system.name}: {counted(best.rounds, 'round')}, {counted(best.local_steps, 'local step')} each,"
        f" {everyone}{counted(best.cohort, 'client')} a round{others}"
    )


def _measure(plan: Plan) -> str:
    if plan.expected is not None:
        where = "made-up tasks of this shape" if plan.expected["made_up"] else "public records"
        return f"chosen by a pilot on {where}\n{expected(plan)}"
    what, in_loss = "the loss above its least value", ""
    if plan.of == "distance":
        what, in_loss = "the squared distance from the optimum", f", at most {plan.in_loss:.4g} in loss"
    return f"bound on {what}: {plan.best.bound:.4g}{in_loss} ({plan.form} form){_as_printed(plan)}"


def expected(plan: Plan) -> str:
    """Say what accuracy, or loss, a pilot makes one expect."""
    assert plan.expected is not None
    what, unit, factor = ("accuracy", " %", 100.0) if plan.expected["accuracy"] else ("loss", "", 1.0)
    found = {key: value if value is None else factor * value for key, value in plan.expected[what].items()}
    if found["mean"] is None:
        return "to expect  no end: it diverged"
    digits = ".1f" if unit else ".3g"
    mean, low, high = (f"{found[key]:{digits}}" for key in ("mean", "low", "high"))
    why = ": nobody knows how hard the real task is" if plan.expected["made_up"] else " in single trainings"
    return f"to expect  {what} {mean}{unit}, from {low} to {high}{unit}{why}"


def _as_printed(plan: Plan) -> str:
    """Say what the bound as its paper prints it would choose, where that is something else."""
    best, papers = plan.best, plan.papers
    if plan.form == "paper" or papers is None:
        return ""
    numbers = {name: getattr(papers, name) for name in NAMES if getattr(papers, name) != getattr(best, name)}
    chosen = ", ".join(f"{number} {NAMES[name]}" for name, number in numbers.items())
    return f"\nas its paper prints it, the bound would choose {chosen}" if chosen else ""


def _tables(plan: Plan) -> list[list[list[str]]]:
    """Return what was weighed, each table as rows: the bound along every number, and a pilot's losses."""
    return [rows for rows in (*(_along(name, plan) for name in NAMES), _pilots(plan)) if rows]


def _along(name: str, plan: Plan) -> list[list[str]]:
    """Return the bound along one number, the others as planned: two short rows."""
    centre = plan.bounds_answer or plan.best
    here = {"rounds": centre.rounds, "local_steps": centre.local_steps, "cohort": centre.cohort}
    line = [point for point in plan.curve if all(getattr(point, key) == here[key] for key in NAMES if key != name)]
    if len(line) < 2:
        return []
    numbers = [f"{getattr(point, name)}{'*' if getattr(point, name) == here[name] else ''}" for point in line]
    return [[NAMES[name], *numbers], ["bound", *(_bound(point) for point in line)]]


def _bound(point: Point) -> str:
    return "–" if point.bound is None else f"{point.bound:.4g}"


def _pilots(plan: Plan) -> list[list[str]]:
    if not plan.tried:
        return []
    shown = plan.tried[:6]
    keys = [key for key in shown[0] if key not in ("loss", "standard_error", "trials")]
    rows = [[NAMES.get(key, key), *(_value(one[key]) for one in shown)] for key in keys]
    rows.append(["pilot's loss", *("diverged" if one["loss"] is None else f"{one['loss']:.4g}" for one in shown)])
    rows.append(["  ±", *("–" if one["standard_error"] is None else f"{one['standard_error']:.2g}" for one in shown)])
    return rows


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _columns(*rows: Sequence[str]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ("  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:],
             strict=True))]) for row in rows)  # fmt: skip
    return "\n".join(f"  {line}" for line in lines)


def _noise(plan: Plan) -> str:
    stds = list(plan.noise.stds.values())
    low, high = f"{min(stds):.4g}", f"{max(stds):.4g}"
    size = low if low == high else f"{low} to {high}"
    where = "in every local step" if plan.noise.on == "step" else "before it uploads"
    downlink = f"; the server adds {plan.noise.downlink:.4g} to the model" if plan.noise.downlink else ""
    return (
        f"noise  each client adds {plan.noise.law.capitalize()} noise {where}: a standard deviation of {size} on every"
        f" coordinate of its upload{downlink}"
    )


def _constants(plan: Plan) -> str:
    if plan.constants is None:
        return ""
    rows = []
    for name, entry in plan.constants.to_dict().items():
        if name == "source":
            continue
        spread = "" if entry["low"] is None else f"{entry['low']:.3g} … {entry['high']:.3g}"
        rows.append([f"{SYMBOLS[name]:<8}", name, f"{entry['value']:.4g}", spread, entry["how"]])
    widths = [max(len(row[at]) for row in rows) for at in range(5)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return f"constants  {plan.constants.source}\n" + "\n".join(f"  {line}" for line in lines)


def _check(check: Check) -> str:
    rows = [["", *check.planned.numbers, "loss", "±"]]
    for cell in check.cells:
        plain = cell.to_dict()
        mark = "planned" if cell is check.planned else ""
        mark += (" and " if mark else "") + "best" if cell is check.best else ""
        loss = "diverged" if plain["loss"] is None else f"{plain['loss']:.4g}"
        error = "–" if plain["standard_error"] is None else f"{plain['standard_error']:.2g}"
        rows.append([mark, *map(str, cell.numbers.values()), loss, error])
    return (
        f"check  {check.seeds} simulated runs at each point, on the clients' own records; loss on the test split\n"
        f"{_columns(*rows)}\n"
        f"  regret {check.regret:.1%}: the planned loss is {check.planned.mean:.4g}, the best of the grid"
        f" {check.best.mean:.4g}"
    )


def _indented(block: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in block.splitlines())


def as_plain(plan: Plan, check: Check | None) -> dict[str, Any]:
    """Return what `dpfl plan --json` prints; a check is a simulation, in which nobody's records are protected."""
    return plan.to_dict() | ({} if check is None else {"check": check.to_dict(), "together": None})


def save(plan: Plan, config: Config, folder: Path, check: Check | None = None) -> None:
    """Keep a plan: its numbers, a plot, the constants, and a config that `dpfl run` takes."""
    plain = as_plain(plan, check)
    run_folder.make(folder)
    write_json(folder, run_folder.PLAN, plain)
    draw(plain, folder / run_folder.PLAN_PLOT)
    if plan.constants is not None:
        (folder / run_folder.CONSTANTS).write_text(plan.constants.to_toml(), encoding="utf-8")
    planned = Config(plan.system, config.settings)
    if not (folder / run_folder.CONFIG).exists():  # that of a finished run is its own
        (folder / run_folder.CONFIG).write_text(planned.to_toml(), encoding="utf-8")
