"""The page of the four hospitals: what its trainings promise, and that their numbers are those of plans."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dpfl.experiments.experiment import Experiment
from dpfl.experiments.reading import find, load
from dpfl.experiments.store import Store
from dpfl.experiments.sweep import jobs_of
from dpfl.systems import PrivateSystem

ROOT = Path(__file__).parents[3]
PLANNED = ["add-remove", "replace"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Return benchmarks/four_hospitals.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("four_hospitals", ROOT / "benchmarks" / "four_hospitals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def experiments() -> dict[str, Experiment]:
    return {one.name.removeprefix("four-hospitals-"): one for one in find(["four-hospitals"], "paper")}


def promised(experiment: Experiment) -> list[dict[str, Any]]:
    kept = Store(ROOT / "docs" / "results")
    return [kept[job.cell]["privacy"] for job in jobs_of(experiment, 1)]


@pytest.mark.parametrize("name", PLANNED)
def test_the_rows_are_what_the_script_prints(name: str, script: ModuleType, experiments: dict[str, Experiment]) -> None:
    rows = []
    for row in experiments[name].rows:
        plans = [dict(zip(row.by_column, chosen, strict=True)) for chosen in zip(*row.by_column.values(), strict=True)]
        rows.append(script.row(row.changes["delta"], plans))
    text = (script.HOME / f"{name}.toml").read_text(encoding="utf-8")
    assert "".join(rows) in text
    assert script.written(text, rows) == text


@pytest.mark.parametrize("name", PLANNED)
def test_budgets_are_those_of_flamby_s_curve(name: str, script: ModuleType, experiments: dict[str, Experiment]) -> None:
    one = experiments[name]
    assert tuple(row.changes["delta"] for row in one.rows) == script.DELTAS
    assert tuple(column.changes["epsilon"] for column in one.columns) == script.EPSILONS
    for job in jobs_of(one, 1):
        system = job.cell.config.system
        assert isinstance(system, PrivateSystem)
        assert type(system) is type(script.SYSTEMS[name])
        assert system.calibration == "tight"
        assert job.cell.by_site
        assert (job.cell.config.settings.data, job.cell.repetitions) == ("heart", 5)


def test_each_table_has_the_neighbours_that_it_says(experiments: dict[str, Experiment]) -> None:
    for name in PLANNED:
        for privacy in promised(experiments[name]):
            assert (privacy["unit"], privacy["neighbours"], privacy["against"]) == ("record", name, ["server"])
            assert 0.99 * privacy["claimed"] < privacy["true"] <= privacy["claimed"]
    assert promised(experiments["without-privacy"]) == [None, None]


def test_the_readme_has_the_page_s_numbers() -> None:
    page = (ROOT / "docs" / "results" / "four-hospitals.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = page[page.index("| 0.001 | ours |") :].splitlines()
    for line, name in zip(table, ("dpfl", "FLamby's figures"), strict=False):
        means = [cell.split(" ±")[0] for cell in line.strip("| ").split(" | ")[-5:]]
        assert f"| {name} | {' | '.join(means)} |\n" in readme


def test_one_step_a_round_on_all_records(experiments: dict[str, Experiment]) -> None:
    for job in jobs_of(experiments["add-remove"], 1):
        system: Any = job.cell.config.system
        assert (system.sampling_rate, system.local_steps, system.cohort) == (1.0, 1, None)


def test_plans_are_written_in_place_and_nothing_else_is_changed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = {
        (name, delta, epsilon): {"rounds": at + 1, "lr": 0.3 * epsilon / 7, "clip": 2.0, "averaged": 0.0}
        for name in PLANNED for at, delta in enumerate(script.DELTAS) for epsilon in script.EPSILONS
    }  # fmt: skip
    before = {name: (script.HOME / f"{name}.toml").read_text(encoding="utf-8") for name in PLANNED}
    for path in script.HOME.glob("*.toml"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(script, "HOME", tmp_path)
    monkeypatch.setattr(script, "every_plan", lambda seconds: plans)
    script.main([])
    printed = capsys.readouterr().out
    assert {name: (tmp_path / f"{name}.toml").read_text(encoding="utf-8") for name in PLANNED} == before
    script.main(["--write"])
    assert capsys.readouterr().out == printed
    for name in PLANNED:
        path = tmp_path / f"{name}.toml"
        rows = [row.by_column for row in load(path, "paper").rows]
        assert [row["rounds"] for row in rows] == [[at + 1] * 5 for at in range(4)]
        assert rows[0]["lr"] == [0.004286, 0.04286, 0.2143, 0.4286, 2.143]
        after = path.read_text(encoding="utf-8").splitlines()
        assert set(after) - set(before[name].splitlines()) <= set(printed.splitlines())
        assert len(after) == len(before[name].splitlines())
