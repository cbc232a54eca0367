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


def config(**changes: Any) -> Config:
    table = {"system": "udp", "data": "mnist", "clients": 50, "sizes": 800, "lr": 2.0, "clip": 1.0, "epsilon": 4.0}
    return configs.parse(table | {"delta": 1e-3} | changes)


def test_each_has_words_for_tables() -> None:
    assert COMPUTED.keys() <= MEASURES.keys()


def test_the_ratio_is_that_of_the_config_s_sensitivity() -> None:
    # Δ = 2ηC/|D_i| = 2·2·1/800 = 0.005, of σ = 0.01 a half; q = 45/50.
    half = {"cohort_rate": 0.9, "ratio": 0.5, "moment": 10}
    found = {measure: compute(measure, config(cohort=45), CONSTANTS) for measure in COMPUTED}
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
    assert {figure.measure_of(row) for row in figure.rows} == set(COMPUTED)
    ((_, cell),) = figure.cells(figure.rows[0], figure.columns[-1], at_true=False, seed=1)
    assert cell.ask is not None
    assert dict(cell.ask.constants) == {"moment": 100, "noise_std": 0.01}
