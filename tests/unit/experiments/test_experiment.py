"""The files of the papers' experiments, and what a file may say."""

import itertools
from pathlib import Path

import pytest

from dpfl.errors import BadInput
from dpfl.experiments.experiment import Experiment
from dpfl.experiments.reading import find, load, names
from dpfl.experiments.sweep import jobs_of
from dpfl.systems import PrivateSystem
from grids import each

TINY = """
title = "digits"
measure = "accuracy"
repetitions = 2
rows = [{ label = "little", epsilon = 2.0 }, { label = "none", system = "fedavg" }]
columns = [{ rounds = 2 }, { rounds = 4 }]

[base]
system = "udp"
calibration = "paper"
delta = 1e-3
clients = 4
lr = 1.0

[at_true]
clip = 0.5

[smoke]
rows = ["little"]
repetitions = 1
set = { clients = 2 }

[printed]
cells = [[1.0, 2.0], [nan, 4.0]]

[[claims]]
says = "noise costs"
less = { row = "little" }
than = { row = "none" }
"""


def written(folder: Path, text: str = TINY) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return path


PAPERS = {
    "dp-fedavg": ["fig-1", "fig-2", "table-2", "fig-4", "table-3", "table-4", "fig-7"],
    "udp-crd": [
        *("fig-2", "fig-3", "fig-4a", "fig-4b", "fig-5", "fig-6", "fig-7", "fig-8a", "fig-8b", "fig-9a", "fig-9b"),
        *("fig-10", "fig-11", "fig-12", "fig-13", "fig-14", "fig-15"),
    ],
    "nbafl": [f"fig-{number}" for number in range(2, 12)],
    "ali-dpfl": [
        *(f"table-{n}-{rounds}" for n in (2, 3, 4) for rounds in ("plenty", "short")),
        "table-5",
        "fig-1",
        *(f"fig-{n}-{part}" for n in (4, 5) for part in ("half", "fifth")),
        "authors",
    ],
    "fedsgd-dpc": ["table-1", *(f"fig-{n}-{law}" for n in range(1, 9) for law in ("laplace", "gaussian"))],
}


def test_every_table_and_figure_is_there() -> None:
    wanted = {f"{paper}-{name}" for paper, its in PAPERS.items() for name in its}
    assert wanted <= set(names())


@pytest.fixture(scope="module")
def at_paper_scale() -> list[Experiment]:
    return find(["all"], "paper")


def test_every_file_says_what_it_is(at_paper_scale: list[Experiment]) -> None:
    for one in at_paper_scale:
        assert one.title
        assert one.shows, one.name
        assert one.claims, f"{one.name} claims nothing"
        assert one.across


def test_every_cell_of_every_file_is_a_config(at_paper_scale: list[Experiment]) -> None:
    for one in at_paper_scale:
        jobs = jobs_of(one, 1)
        assert jobs
        papers = [job for job in jobs if getattr(job.cell.config.system, "calibration", None) == "paper"]
        tight = [job for job in jobs if getattr(job.cell.config.system, "calibration", None) == "tight"]
        assert not papers or tight, f"{one.name} is not trained at true ε"


def test_the_smoke_scale_is_a_small_part(at_paper_scale: list[Experiment]) -> None:
    for whole, small in zip(at_paper_scale, find(["all"], "smoke"), strict=True):
        assert small.name == whole.name
        assert {row.label for row in small.rows} <= {row.label for row in whole.rows}
        assert len(jobs_of(small, 1)) <= min(30, len(jobs_of(whole, 1)))
        assert small.repetitions <= 3


def test_papers_printed_numbers_are_those_of_their_tables(at_paper_scale: list[Experiment]) -> None:
    by_name = {one.name: one for one in at_paper_scale}
    assert by_name["ali-dpfl-table-2-plenty"].printed.cells[-1][:3] == (86.10, 80.17, 39.82)
    assert by_name["ali-dpfl-table-4-short"].printed.cells[-1][-3:] == (98.82, 84.58, 57.25)
    assert by_name["dp-fedavg-table-4"].printed.best_at[1:] == (24, 12, 12, 2)
    assert by_name["dp-fedavg-table-3"].printed.best_at == (12, 3, 2, 1)
    assert by_name["fedsgd-dpc-table-1"].printed.cells[0] == (5, 32, 67)
    assert by_name["four-hospitals-add-remove"].printed.cells[2] == (62.92, 70.15, 69.97, 69.81, 69.95)


def test_rows_and_columns_change_the_config(tmp_path: Path) -> None:
    one = load(written(tmp_path), "paper")
    ((_, cell),) = one.cells(one.rows[0], one.columns[1], at_true=False, seed=1)
    system = cell.config.system
    assert isinstance(system, PrivateSystem)
    assert (system.name, system.rounds, system.epsilon, system.calibration, system.clip) == (
        "udp",
        4,
        2.0,
        "paper",
        1.0,
    )
    assert cell.config.settings.clients == 4


def test_the_twin_is_the_same_with_a_true_promise(tmp_path: Path) -> None:
    one = load(written(tmp_path), "paper")
    ((_, cell),) = one.cells(one.rows[0], one.columns[0], at_true=True, seed=1)
    system = cell.config.system
    assert isinstance(system, PrivateSystem)
    assert (system.calibration, system.epsilon, system.clip) == ("tight", 2.0, 0.5)


def test_a_row_without_privacy_is_its_own_twin(tmp_path: Path) -> None:
    one = load(written(tmp_path), "paper")
    (first, second) = (
        one.cells(one.rows[1], one.columns[0], at_true=at_true, seed=1)[0][1] for at_true in (False, True)
    )
    assert first == second
    assert first.config.system.name == "fedavg"  # which knows no clip, and is not asked for one


def test_the_smoke_scale_sets_what_it_says_last(tmp_path: Path) -> None:
    one = load(written(tmp_path), "smoke")
    assert [row.label for row in one.rows] == ["little"]
    ((_, cell),) = one.cells(one.rows[0], one.columns[0], at_true=False, seed=1)
    assert (cell.config.settings.clients, cell.repetitions) == (2, 1)
    assert one.printed.cells == ((1.0, 2.0),)


def test_a_scale_cuts_what_is_printed_with_its_errors(tmp_path: Path) -> None:
    errors = "[printed]\nerrors = [[0.1, 0.2], [nan, 0.4]]"
    text = TINY.replace("[printed]", errors).replace('rows = ["little"]', 'rows = ["little"]\ncolumns = [4]')
    assert load(written(tmp_path, text), "paper").printed.errors[0] == (0.1, 0.2)
    small = load(written(tmp_path, text), "smoke").printed
    assert (small.cells, small.errors) == (((2.0,),), ((0.2,),))


def test_keys_tell_apart_what_makes_a_difference(tmp_path: Path) -> None:
    one = load(written(tmp_path), "paper")
    cells = [
        one.cells(row, column, at_true=at_true, seed=seed)[0][1]
        for row, column, at_true, seed in itertools.product(one.rows, one.columns, (False, True), (1, 2))
    ]
    assert len({cell.key for cell in cells}) == 2 * 3 * 2  # the row without privacy is its own at_true
    assert (
        cells[0].key
        == load(written(tmp_path), "paper").cells(one.rows[0], one.columns[0], at_true=False, seed=1)[0][1].key
    )


@each(
    ("old", "new", "says"),
    [
        ('measure = "accuracy"', 'measure = "beauty"', "measure of experiment 'tiny' must be one of loss, accuracy"),
        ('title = "digits"', 'tittle = "digits"', "tittle of experiment 'tiny' must be left out"),
        ("[[1.0, 2.0], [nan, 4.0]]", "[[1.0, 2.0]]", "printed.cells of experiment 'tiny' must be 2 rows of 2 numbers"),
        ("[printed]", "[printed]\nerrors = [[0.1, 0.1]]", "printed.errors of experiment 'tiny' must be 2 rows of 2"),
        ("cells = [[1.0, 2.0], [nan, 4.0]]", "errors = [[1.0, 2.0], [3.0, 4.0]]", "must be those of printed.cells"),
        ('rows = ["little"]', 'rows = ["much"]', "smoke.rows of experiment 'tiny' must be labels among"),
        ('than = { row = "none" }', 'than = { row = "nobody" }', "claims.than.row of experiment 'tiny' must be one of"),
        ("lr = 1.0", "lrr = 1.0", "lrr must be a setting or an option of udp"),
        ("{ rounds = 4 }", "{ rounds = 2 }", "must be tables with labels of their own"),
        ("set = { clients = 2 }", "sat = { clients = 2 }", "smoke of experiment 'tiny' must be a table of repetitions"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in TINY
    with pytest.raises(BadInput, match=says.replace("(", "\\(")):
        jobs_of(load(written(tmp_path, TINY.replace(old, new)), "smoke"), 1)


def test_names_papers_and_files_can_be_asked_for(tmp_path: Path) -> None:
    assert [one.name for one in find(["nbafl-fig-2"], "smoke")] == ["nbafl-fig-2"]
    assert len(find(["nbafl"], "smoke")) == 10
    assert [one.name for one in find([str(written(tmp_path))], "smoke")] == ["tiny"]
    with pytest.raises(BadInput, match="did you mean 'nbafl-fig-2'"):
        find(["nbafl-fig2"], "smoke")


def test_other_repetitions_can_be_asked_for() -> None:
    (one,) = find(["nbafl-fig-2"], "paper", repetitions=7)
    assert one.repetitions == 7
    assert not one.own_repetitions
