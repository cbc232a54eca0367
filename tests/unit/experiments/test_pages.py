"""The pages in docs/results are what `make results` writes from the cells beside them."""

import json
import os
import re
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import dpfl
from dpfl.errors import BadInput
from dpfl.experiments import cells, keys, results
from dpfl.experiments.cells import Cell
from dpfl.experiments.claims import Claim, Place
from dpfl.experiments.experiment import Experiment, Scale
from dpfl.experiments.reading import find
from dpfl.experiments.run import write_pages
from dpfl.experiments.store import Store
from dpfl.experiments.sweep import jobs_of
from dpfl.experiments.words import markdown
from dpfl.options import read_toml

DOCS = Path(__file__).parents[3] / "docs" / "results"
PAGES = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "README")
OF_PAPERS = ["ali-dpfl", "dp-fedavg", "fedsgd-dpc", "nbafl", "udp-crd"]


def experiments(paper: str) -> list[Experiment]:
    return find([paper], "paper")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(DOCS / "cells", tmp_path / "cells")
    monkeypatch.setattr(results, "draw", lambda plain, path: path.write_bytes(b""))  # a plot takes a second
    return tmp_path


def test_there_are_pages() -> None:
    assert set(PAGES) == {*OF_PAPERS, "four-hospitals", "same-budget"}


def test_pages_are_what_the_cells_say(folder: Path) -> None:
    *pages, index = write_pages(find(["all"], "paper"), folder)
    assert {page.stem for page in pages} == set(PAGES)
    for page in (*pages, index):
        assert page.read_text() == (DOCS / page.name).read_text(), "run `make results`"
    assert {path.name for path in folder.glob("*.png")} == {path.name for path in DOCS.glob("*.png")}


def test_no_table_or_figure_is_left_out() -> None:
    for paper in PAGES:
        assert "## Not tried yet" not in (DOCS / f"{paper}.md").read_text()


@pytest.mark.parametrize("version", [None, "9.9.9"])
def test_every_kept_cell_belongs_to_some_table_in_this_release_and_the_next(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no table shows any more, because its config has changed, is not kept."""
    for module in (dpfl, cells, keys):
        if version is not None:
            monkeypatch.setattr(module, "__version__", version, raising=False)
    shown = [job.cell for paper in PAGES for experiment in experiments(paper) for job in jobs_of(experiment, 1)]
    kept = Store(DOCS)
    assert len(kept.records) > 1000
    assert not set(kept.records) - {kept[cell]["key"] for cell in shown if cell in kept}


# What pages say in words.

_NAMED = re.compile(
    r"(Figs?\.|Tables?|Theorems?|Eqs?\.|equations?|Secs?\.|Lemma|Algorithms?)"
    r" [\dIVXa-c()]+((,| and| to|–) [\dIVXa-c()]+)*"
)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")


def numbers_of(text: str) -> list[str]:
    return [found.replace(",", "") for found in _NUMBER.findall(re.sub(r"`[^`]*`", "", _NAMED.sub("", text)))]


def untold(verdict: str, tables: str) -> list[str]:
    """Return the numbers of a verdict that no table holds, to the digits that it gives."""
    told = [float(number) for number in numbers_of(tables)]
    return [
        number for number in numbers_of(verdict)
        if not any(round(value, len(number.partition(".")[2])) == float(number) for value in told)
    ]  # fmt: skip


def test_a_number_that_no_table_holds_is_found() -> None:
    tables = "| a | 88.12 ± 0.10 | 1,200 |\n"
    assert untold("In Table IV and Figs. 5 and 6 it is 88.1 % after 1200 rounds, or 88.12", tables) == []
    assert untold("it is 88.2 %, or 12 of 1,201", tables) == ["88.2", "12", "1201"]


@pytest.mark.parametrize("paper", PAGES)
def test_every_number_of_a_verdict_stands_in_a_table_below_it(paper: str) -> None:
    page = (DOCS / f"{paper}.md").read_text()
    about = read_toml("paper", Path(str(files("dpfl.experiments"))) / paper / "paper.toml")
    assert about["verdict"].strip() in page
    tables = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    plain = "\n".join(main["plain"] for main in about.get("main", []))
    assert untold(about["verdict"] + about["promises"] + plain, tables) == []


def test_every_number_that_the_readme_says_of_the_papers_stands_in_a_table() -> None:
    readme = (DOCS.parents[1] / "README.md").read_text()
    said = readme[readme.index("## The papers' results, again") : readme.index("## Fast")]
    pages = "\n".join((DOCS / f"{paper}.md").read_text() for paper in PAGES)
    assert untold(said, "\n".join(line for line in pages.splitlines() if line.startswith("|"))) == []


def ended_before(experiment: Experiment, claim: Claim, store: Store) -> list[str]:
    """Return the rows of which a training had ended before the round at which a claim reads its local steps off."""
    rounds = [int(place.column) for place in (claim.less, claim.than) if place.column is not None]
    return [
        row.label
        for look in claim.looks
        for reading in (experiment.readings[0 if look == "paper" else -1],)
        for row in reading.rows
        for _, cell in reading.cells(row, reading.columns[0], at_true=look == "true", seed=1)
        if cell in store and min(store[cell]["rounds"]) < max(rounds)
    ]


def test_local_steps_are_read_off_before_any_training_ends() -> None:
    """The last round takes what is left of the budget: it says nothing of where the number of steps settles."""
    store = Store(DOCS)
    read = [one for one in experiments("ali-dpfl") if one.measure == "local_steps"]
    assert read
    for one in read:
        for claim in one.claims:
            assert ended_before(one, claim, store) == [], f"{one.name}: {claim.says}"
    (fifth,) = (one for one in read if one.name == "ali-dpfl-fig-4-fifth")
    late = replace(fifth.claims[0], than=Place(column="150"))
    assert "Fashion-MNIST, R_s = 158, ε = 2.75" in ended_before(fifth, late, store)


def test_the_true_epsilon_of_ali_dpfl_is_what_it_was_allowed_whatever_a_training_took() -> None:
    """Its noise and its limit of steps follow from ε alone in these tables, so that one ε is worth one true ε."""
    store, found = Store(DOCS), dict[tuple[float, str], set[float]]()
    for experiment in experiments("ali-dpfl"):
        for job in jobs_of(experiment, 1):
            if job.cell.config.system.name == "ali-dpfl" and job.cell in store:
                privacy = store[job.cell]["privacy"]
                found.setdefault((privacy["claimed"], privacy["calibration"]), set()).add(privacy["true"])
    assert len(found) > 10
    assert {key: worth for key, worth in found.items() if len(worth) > 1} == {}


# Claims are the papers' own.


def folded(text: str) -> str:
    """Fold what a page's layout does to words: line breaks, hyphenation, quotation marks."""
    text = re.sub(r"-\s*\n\s*", "", text).replace("’", "'")
    return re.sub(r"[\s$\\{}]+", "", text).lower()


@pytest.mark.parametrize("paper", OF_PAPERS)
def test_every_claim_quotes_its_paper(paper: str) -> None:
    claims = [(one.name, claim) for one in experiments(paper) if not one.own for claim in one.claims]
    assert claims
    for name, claim in claims:
        assert claim.quote, f"{name}: {claim.says}"
        assert claim.where, f"{name}: {claim.says}"
    text = Path(os.environ.get("DPFL_DATA", ""), "..", "papers", f"{paper}.txt")
    if not text.is_file():
        pytest.skip(f"the text of {paper} is not here")
    whole = folded(text.read_text(encoding="utf-8"))
    assert [(name, claim.quote) for name, claim in claims if folded(claim.quote) not in whole] == []


def test_a_tally_leaves_out_panels_of_ours() -> None:
    for page in set(PAGES) - set(OF_PAPERS):
        assert all(one.own for one in experiments(page))
        assert "None of this is a claim of a paper." in (DOCS / f"{page}.md").read_text()


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
        "site_accuracy": rates, "rounds": [5] * cell.repetitions, "history": [history] * cell.repetitions,
        "distinctness": rates, "portraits": {"shape": [1, 1, 1], "grey": "AA=="},
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
        assert "nan" not in markdown(shown)


def test_experiments_that_nobody_tried_are_named_and_nothing_is_trained(folder: Path) -> None:
    for path in (folder / "cells").glob("*.jsonl"):
        if path.name.startswith("nbafl") and path.stem != "nbafl-fig-8":
            path.unlink()
    page, _ = write_pages(experiments("nbafl"), folder)
    text = page.read_text()
    assert "## Fig. 8:" in text
    assert "## Fig. 10:" not in text
    assert "Fig. 10 (`dpfl reproduce nbafl-fig-10 --scale paper`)" in text[text.index("## Not tried yet") :]
    with pytest.raises(BadInput, match="out must hold finished cells"):
        write_pages(experiments("nbafl"), folder / "empty")
