"""What is computed and not trained: the numbers of a config reach the formula, and what it cannot take is refused."""

from dataclasses import replace
from typing import Any

import pytest

from dpfl import config as configs
from dpfl.config import Config
from dpfl.errors import BadInput
from dpfl.experiments.cells import Ask, Cell, perform, restored
from dpfl.experiments.computed import COMPUTED, compute
from dpfl.experiments.experiment import MEASURES
from dpfl.experiments.reading import find
from dpfl.privacy.paper_formulas import udp_log_moment, udp_log_moment_bound
from grids import each

CONSTANTS = {"noise_std": 0.01, "moment": 10.0}
MOMENTS = {"moment", "swapped_moment", "moment_bound", "moment_gap"}


def config(**changes: Any) -> Config:
    table = {"system": "udp", "data": "mnist", "clients": 50, "sizes": 800, "lr": 2.0, "clip": 1.0, "epsilon": 4.0}
    return configs.parse(table | {"delta": 1e-3} | changes)


def test_each_has_words_for_tables() -> None:
    assert COMPUTED.keys() <= MEASURES.keys()


def test_the_ratio_is_that_of_the_config_s_sensitivity() -> None:
    # Δ = 2ηC/|D_i| = 2·2·1/800 = 0.005, of σ = 0.01 a half; q = 45/50.
    half = {"cohort_rate": 0.9, "ratio": 0.5, "moment": 10}
    found = {measure: compute(measure, config(cohort=45), CONSTANTS) for measure in MOMENTS}
    assert found["moment"] == pytest.approx(udp_log_moment(**half), rel=1e-12)
    assert found["swapped_moment"] == pytest.approx(udp_log_moment(**half, swapped=True), rel=1e-12)
    assert found["moment_bound"] == pytest.approx(udp_log_moment_bound(**half), rel=1e-12)
    assert found["moment_gap"] == pytest.approx(found["moment_bound"] - found["moment"], rel=1e-9)
    assert compute("moment_bound", config(), CONSTANTS) == pytest.approx(found["moment_bound"] / 0.9, rel=1e-12)


def test_more_clients_at_the_same_rate_change_nothing() -> None:
    few, many = config(clients=50, cohort=45), config(clients=200, cohort=180)
    assert compute("moment", few, CONSTANTS) == compute("moment", many, CONSTANTS)


@each(
    ("changes", "constants", "says"),
    [
        ({"system": "fedavg", "clip": None}, CONSTANTS, "system must be 'udp'"),
        ({"sizes": [400, 800] * 25}, CONSTANTS, "with one number for sizes"),
        ({}, {"moment": 10.0}, "constants must be noise_std above 0 and moment from 1 on"),
        ({}, {"noise_std": 0.0, "moment": 10.0}, "constants must be noise_std above 0"),
        ({}, {"noise_std": 0.01, "moment": 0.0}, "moment from 1 on"),
    ],
)
def test_what_has_no_moments_is_refused(changes: dict[str, Any], constants: dict[str, float], says: str) -> None:
    if changes.get("system") == "fedavg":
        asked = configs.parse({"system": "fedavg", "data": "mnist", "clients": 50, "sizes": 800})
    else:
        asked = config(**changes)
    with pytest.raises(BadInput, match=says):
        compute("moment", asked, constants)


def test_a_cell_of_it_is_answered_at_once_and_read_off() -> None:
    settings = replace(config().settings, seed=None)
    ask = Ask("moment_bound", "", (("moment", 10.0), ("noise_std", 0.01)), 0)
    (record,) = perform([Cell(config=Config(config().system, settings), repetitions=1, seed=1, ask=ask)], "cpu")
    assert restored(record, "moment_bound", None) == [pytest.approx(110 * 0.25 / 2)]


def test_figure_2_has_both_directions_and_the_bound() -> None:
    (figure,) = find(["udp-crd-fig-2"], "paper")
    assert {figure.measure_of(row) for row in figure.rows} == MOMENTS
    ((_, cell),) = figure.cells(figure.rows[0], figure.columns[-1], at_true=False, seed=1)
    assert cell.ask is not None
    assert dict(cell.ask.constants) == {"moment": 100, "noise_std": 0.01}


# FedSGD-DPC's closed form.


def closed(**changes: Any) -> Config:
    table = {"system": "fedsgd-dpc", "data": "mnist", "clients": 10, "mechanism": "laplace", "clip": 300.0}
    return configs.parse(table | {"epsilon": 1.0, "rounds": 50} | changes)


@each(
    ("changes", "ratio", "cohort"),
    [
        ({}, 2500.0, 1),  # √2500/50
        ({}, 2501.0, 2),  # just above, and up
        ({"epsilon": 4.0}, 2501.0, 5),  # C₂ falls as 1/ε²
        ({"rounds": 25}, 2501.0, 3),
        ({"epsilon": 100.0}, 2500.0, 10),  # no more than there are
        ({"epsilon": 0.01}, 2500.0, 1),  # one at least
    ],
)
def test_the_closed_form_s_cohort_is_rounded_up_and_held_to_the_clients(
    changes: dict[str, Any], ratio: float, cohort: int
) -> None:
    assert compute("closed_cohort", closed(**changes), {"c1_by_c2": ratio}) == cohort


@each(
    ("asked", "constants", "says"),
    [
        (config(), {"c1_by_c2": 1.0}, "system must be 'fedsgd-dpc'"),
        (closed(mechanism="gaussian"), {"c1_by_c2": 1.0}, "with Laplace noise"),
        (closed(epsilon=[1.0] * 10), {"c1_by_c2": 1.0}, "one number for epsilon"),
        (closed(), {}, "constants must be c1_by_c2 above 0"),
        (closed(), {"c1_by_c2": 0.0}, "constants must be c1_by_c2 above 0"),
        (closed(), CONSTANTS, "constants must be c1_by_c2 above 0"),
    ],
)
def test_what_has_no_closed_form_is_refused(asked: Config, constants: dict[str, float], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        compute("closed_cohort", asked, constants)


def test_table_1_shows_every_entry_of_the_closed_form() -> None:
    (table,) = find(["fedsgd-dpc-table-1"], "paper")
    rows = [at for at, row in enumerate(table.rows) if table.measure_of(row) == "closed_cohort"]
    assert len(rows) == 2
    for at in rows:
        cells = [table.cells(table.rows[at], column, at_true=False, seed=1)[0][1] for column in table.columns]
        found = [compute("closed_cohort", cell.config, dict(cell.ask.constants)) for cell in cells if cell.ask]
        assert found == list(table.printed.cells[at])
