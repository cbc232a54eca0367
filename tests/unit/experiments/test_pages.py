"""The pages in docs/results are what `make results` writes from the cells beside them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import dpfl
from dpfl.errors import BadInput
from dpfl.experiments import cells, keys, results
from dpfl.experiments.cells import Cell
from dpfl.experiments.experiment import Experiment, Scale
from dpfl.experiments.reading import find
from dpfl.experiments.run import write_pages
from dpfl.experiments.store import Store
from dpfl.experiments.sweep import jobs_of, missing

DOCS = Path(__file__).parents[3] / "docs" / "results"
REPETITIONS = {"fedsgd-dpc": 5}  # others than the paper's, as in the Makefile
PAGES = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "README")


def experiments(paper: str) -> list[Experiment]:
    return find([paper], "paper", repetitions=REPETITIONS.get(paper))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(DOCS / "cells", tmp_path / "cells")
    monkeypatch.setattr(results, "draw", lambda plain, path: path.write_bytes(b""))  # a plot takes a second
    return tmp_path


def test_there_are_pages() -> None:
    assert {"ali-dpfl", "dp-fedavg", "fedsgd-dpc", "nbafl", "same-budget", "udp-crd"} == set(PAGES)


@pytest.mark.parametrize("paper", PAGES)
def test_a_page_is_what_its_cells_say(paper: str, folder: Path) -> None:
    page, index = write_pages(experiments(paper), folder)
    assert page.read_text() == (DOCS / f"{paper}.md").read_text(), "run `make results`"
    (line,) = [line for line in index.read_text().splitlines() if line.startswith("- ")]
    assert line in (DOCS / "README.md").read_text(), "run `make results`"
    shown = {path.name for path in folder.glob("*.png")}
    assert shown == {path.name for path in DOCS.glob(f"{paper}-*.png")}


def test_no_table_or_figure_is_left_out() -> None:
    assert not [path.name for path in DOCS.glob("*.md") if "## Not here yet" in path.read_text()]


def test_every_kept_cell_belongs_to_some_table() -> None:
    """What no table shows any more, because its config has changed, is not kept."""
    shown = [job.cell for paper in PAGES for experiment in experiments(paper) for job in jobs_of(experiment, 1)]
    kept = Store(DOCS)
    assert len(kept.records) > 1000
    assert not set(kept.records) - {kept[cell]["key"] for cell in shown}


def test_kept_cells_outlive_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dpfl, cells, keys):
        monkeypatch.setattr(module, "__version__", "9.9.9", raising=False)
    everything = [experiment for paper in PAGES for experiment in experiments(paper)]
    assert missing(everything, Store(DOCS), 1) == []


def made_up(cell: Cell, place: int) -> dict[str, Any]:
    """Return a record as training would leave it: one repetition in seven diverged."""
    values = [1 + (place + at) % 7 / 10 for at in range(cell.repetitions)]
    losses = [None if (place + at) % 7 == 0 else value for at, value in enumerate(values)]
    rates = [value / 2 for value in values]
    history = {"round": [1, 5, 10], "loss": [2.0, None, 1.0], "accuracy": [0.1, 0.2, 0.3], "local_steps": [1, 2, 3]}
    calibration = getattr(cell.config.system, "calibration", None)
    privacy = {
        "unit": "record",
        "neighbours": "replace",
        "calibration": calibration,
        "claimed": 1.0,
        "true": 2.0,
        "with_papers_sensitivity": None,
    }
    return {
        "key": cell.key, "answer": 5, "loss": losses, "accuracy": rates, "validation_loss": losses,
        "rounds": [5] * cell.repetitions, "history": [history] * cell.repetitions,
        "privacy": privacy if calibration else None, "seconds": 1.0, "device": "cpu", "date": "2026-01-01",
    }  # fmt: skip


@pytest.mark.parametrize("scale", ["smoke", "paper"])
def test_whatever_comes_out_every_experiment_can_be_shown(scale: Scale, tmp_path: Path) -> None:
    for experiment in find(["all"], scale):
        store = Store(tmp_path)
        for place, job in enumerate(jobs_of(experiment, 1)):
            store.records[job.cell.key] = made_up(job.cell, place)
        shown = results.Results(experiment, store, seed=1)
        json.dumps(shown.to_dict(), allow_nan=False)
        assert "nan" not in shown.markdown()


def test_unfinished_experiments_are_named_and_nothing_is_trained(folder: Path) -> None:
    (folder / "cells" / "nbafl-fig-8.jsonl").unlink()
    page, _ = write_pages(experiments("nbafl"), folder)
    text = page.read_text()
    assert "## Fig. 8:" not in text
    assert "## Not here yet\n\nFig. 8 (`dpfl reproduce nbafl-fig-8 --scale paper`)" in text
    with pytest.raises(BadInput, match="out must hold finished experiments"):
        write_pages(experiments("nbafl"), folder / "empty")
