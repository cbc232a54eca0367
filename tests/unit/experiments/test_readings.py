"""An experiment as its paper did it, and as we would: two tables, one set of claims, a verdict for each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpfl.errors import BadInput
from dpfl.experiments import pages, results
from dpfl.experiments.claims import Place
from dpfl.experiments.experiment import Experiment
from dpfl.experiments.pages import tally, what_is_private, write_index, write_page
from dpfl.experiments.reading import load
from dpfl.experiments.results import Results
from dpfl.experiments.store import Store
from dpfl.experiments.sweep import jobs_of
from dpfl.experiments.words import markdown
from dpfl.report.experiment import draw
from grids import each

TWICE = """
title = "digits"
shows = "Fig. 1"
measure = "loss"
repetitions = 2
across = "rounds"
reading = "at rate 1, which is printed"
rows = [{ label = "little", epsilon = 2.0 }, { label = "much", epsilon = 9.0 }]
columns = [{ rounds = 2 }, { rounds = 4 }]
differs = ["nothing"]

[base]
system = "udp"
calibration = "paper"
delta = 1e-3
clients = 4
lr = 1.0

[ours]
reading = "at rate 2"
differs = ["the rate"]
repetitions = 3
base = { system = "udp", calibration = "paper", delta = 1e-3, clients = 4, lr = 2.0 }
at_true = { clip = 0.5 }
columns = [{ rounds = 2 }, { rounds = 4 }, { rounds = 8 }]

[smoke]
columns = [2, 8]

[[claims]]
says = "noise costs"
quote = "more noise, more loss"
where = "Sec. 1"
less = { row = "much" }
than = { row = "little" }
decides = "the rate, which is not printed"
"""


@pytest.fixture
def twice(tmp_path: Path) -> Experiment:
    path = tmp_path / "twice.toml"
    path.write_text(TWICE, encoding="utf-8")
    return load(path, "paper")


def record(key: str, losses: list[float], calibration: str) -> dict[str, Any]:
    privacy = {
        "unit": "record", "neighbours": "replace", "calibration": calibration, "claimed": 1.0, "true": 2.0,
        "with_papers_sensitivity": None,
    }  # fmt: skip
    return {
        "key": key, "loss": losses, "accuracy": [1 - loss / 10 for loss in losses], "validation_loss": losses,
        "rounds": [2] * len(losses), "history": None, "privacy": privacy, "seconds": 1.0, "device": "cpu",
        "date": "2026-01-01",
    }  # fmt: skip


def filled(experiment: Experiment, folder: Path, *, paper: bool = True) -> Results:
    """Let the claim fail in the paper's reading, hold in ours, and stay open at true ε."""
    store = Store(folder)
    for job in jobs_of(experiment, 1):
        system = job.cell.config.system
        much = system.epsilon == 9.0  # type: ignore[attr-defined]
        tight = system.calibration == "tight"  # type: ignore[attr-defined]
        if tight:
            middle = 1.0
        elif system.lr == 1.0:
            middle = 2.0 if much else 1.0
        else:
            middle = 1.0 if much else 2.0
        if paper or system.lr != 1.0:
            losses = [middle + 0.01 * (-1) ** at for at in range(job.cell.repetitions)]
            store.records[job.cell.key] = record(job.cell.key, losses, "tight" if tight else "paper")
    return Results(experiment, store, seed=1)


def test_what_is_true_is_asked_of_our_reading_alone(twice: Experiment) -> None:
    assert twice.ours is not None
    kinds = {
        (job.cell.config.system.lr, job.cell.config.system.calibration, job.cell.repetitions)  # type: ignore[attr-defined]
        for job in jobs_of(twice, 1)
    }
    assert kinds == {(1.0, "paper", 2), (2.0, "paper", 3), (2.0, "tight", 3)}
    assert len(jobs_of(twice, 1)) == 2 * 2 + 2 * 3 * 2
    assert [column.label for column in twice.ours.columns] == ["2", "4", "8"]


def test_a_scale_cuts_both_readings(tmp_path: Path) -> None:
    path = tmp_path / "twice.toml"
    path.write_text(TWICE, encoding="utf-8")
    small = load(path, "smoke")
    assert small.ours is not None
    assert [column.label for column in small.columns] == ["2"]  # the paper's reading has no 8
    assert [column.label for column in small.ours.columns] == ["2", "8"]


def test_each_reading_has_a_verdict(twice: Experiment, tmp_path: Path) -> None:
    found = filled(twice, tmp_path)
    (verdicts,) = found.verdicts()
    assert {look: one.verdict for look, one in verdicts.by.items()} == {
        "paper": "failed", "ours": "held", "true": "open",
    }  # fmt: skip
    assert verdicts.failed_under == ["paper"]
    assert {look: one.pairs for look, one in verdicts.by.items()} == {"paper": 2, "ours": 3, "true": 3}
    text = markdown(found)
    readings = "| claim | under the paper's reading (2 repetitions) | under our reading (3 repetitions) |"
    assert f"{readings} at true ε, in our settings (3 repetitions) |" in text
    assert (
        "“noise costs” failed under the paper's reading. What would decide it: the rate, which is not printed." in text
    )
    assert "(Sec. 1: “more noise, more loss”)" in text
    assert text.index("**The paper's reading**: at rate 1") < text.index("**Our reading**: at rate 2")
    plain = found.to_dict()
    assert plain["claims"][0]["ours"].startswith("failed")
    assert plain["claims"][0]["our_reading"].startswith("held")
    assert plain["claims"][0]["at_true_epsilon"].startswith("open")
    assert {one["at_true_epsilon"] for one in plain["rows"]} == {None}
    assert len(plain["our_reading"]["rows"]) == 6
    draw(plain, tmp_path / "twice.png")
    assert (tmp_path / "twice.png").read_bytes().startswith(b"\x89PNG")


def test_plots_name_the_readings_and_join_no_names(
    twice: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = "[printed]\ncells = [[1.0, 2.0], [3.0, 4.0]]\n\n[ours]"
    named = TWICE.replace(
        "[{ rounds = 2 }, { rounds = 4 }]", '[{ label = "few", rounds = 2 }, { label = "many", rounds = 4 }]'
    )
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **named: drawn.append(figure))

    def first(text: str) -> list[str]:
        text = text.replace("columns = [{ rounds = 2 }, { rounds = 4 }, { rounds = 8 }]\n", "")
        text = text.replace("[smoke]\ncolumns = [2, 8]\n", "")
        one = alike(twice, tmp_path, text.replace("[ours]", printed), f"drawn{len(drawn)}")
        draw(filled(one, tmp_path).to_dict(), tmp_path / "drawn.png")
        axes = drawn[-1].axes[0]
        return [line.get_linestyle() for line in axes.lines if line.get_marker() == "x"]

    assert first(TWICE) == [":", ":"]  # a printed curve
    titles = [axes.get_title() for axes in drawn[-1].axes]
    assert titles == ["the paper's reading, its formula", "our reading, its formula", "at true ε, in our settings"]
    assert first(named) == ["None", "None"]  # there is nothing between two names
    first("own = true\n" + TWICE)
    assert drawn[-1].axes[0].get_title() == "the first way, its formula"


def test_a_reading_that_nobody_tried_decides_nothing(twice: Experiment, tmp_path: Path) -> None:
    found = filled(twice, tmp_path, paper=False)
    assert (found.left, found.is_empty) == (4, False)
    (verdicts,) = found.verdicts()
    assert [one.verdict for one in verdicts.by.values()] == ["not tried", "held", "open"]
    assert "Not tried yet: `dpfl reproduce twice --scale paper`." in markdown(found)
    assert "one record, replaced by any other (`udp`)" in what_is_private([found])  # of the other reading
    assert tally([found]) == (
        "1 claim is tested here: under the paper's reading 1 not decided yet; under our reading 1 held; at true ε, in"
        " our settings 1 stayed open."
    )


def test_a_place_that_is_not_trained_is_left_out_and_said(twice: Experiment, tmp_path: Path) -> None:
    found = filled(twice, tmp_path)
    store = Store(tmp_path / "other")
    keys = [job.cell.key for job in jobs_of(twice, 1)]
    whole = {key: record(key, [1.0, 2.0], "paper") for key in keys[1:]}
    store.records.update(whole)
    partly = Results(twice, store, seed=1)
    assert (found.left, partly.left) == (0, 1)
    (verdicts,) = partly.verdicts()
    assert {look: (one.pairs, len(one.compared)) for look, one in verdicts.by.items()} == {
        "paper": (2, 1), "ours": (3, 3), "true": (3, 3),
    }  # fmt: skip
    assert str(verdicts.by["paper"]) == "not decided yet (in 0 of 2, failed in 0, 1 not tried)"
    assert str(verdicts.by["ours"]) == "open (in 0 of 3, failed in 0)"
    assert "1 of 4 places are not tried yet: what they could decide is not decided." in markdown(partly)


def test_a_rows_best_is_not_told_before_all_of_it_is_tried(twice: Experiment, tmp_path: Path) -> None:
    printed = "[printed]\nbest_at = [2, 4]\nbest = [0.7, 0.3]\n\n[ours]"
    one = alike(twice, tmp_path, TWICE.replace("[ours]", printed), "printed")
    store = Store(tmp_path / "part")
    keys = [job.cell.key for job in jobs_of(one, 1)]
    store.records.update({key: record(key, [1.0, 2.0], "paper") for key in keys[1:]})
    little, much = Results(one, store, seed=1).to_dict()["summary"]
    assert little["ours"] is None
    assert much["ours"]["best"] == 1.5
    shown = markdown(Results(one, store, seed=1))
    assert "| little | not all tried | 2 | not all tried | 0.7 |" in shown
    assert "| much | 2 | 4 | 1.5 | 0.3 |" in shown


# The tally.


def alike(twice: Experiment, tmp_path: Path, text: str, name: str) -> Experiment:
    path = tmp_path / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, "paper")


def test_figures_that_are_one_training_are_one_claim(twice: Experiment, tmp_path: Path) -> None:
    accuracy = TWICE.replace('measure = "loss"', 'measure = "accuracy"').replace('"much" }\nthan', '"little" }\nthan')
    accuracy = accuracy.replace('than = { row = "little"', 'than = { row = "much"')
    other = alike(twice, tmp_path, accuracy, "accuracy")
    both = [filled(twice, tmp_path), filled(other, tmp_path)]
    assert both[0].verdicts()[0].about == both[1].verdicts()[0].about
    assert tally(both).startswith("1 claim is tested here: under the paper's reading 1 failed;")
    rounds = alike(twice, tmp_path, TWICE.replace('measure = "loss"', 'measure = "rounds"'), "rounds")
    assert tally([*both, filled(rounds, tmp_path)]).startswith("2 claims")  # how long is not how well
    elsewhere = alike(twice, tmp_path, TWICE.replace("lr = 1.0", "lr = 0.5"), "elsewhere")
    assert tally([*both, filled(elsewhere, tmp_path)]).startswith("2 claims")


def test_figures_that_look_at_one_training_at_other_rounds_are_one_claim(twice: Experiment, tmp_path: Path) -> None:
    seen = alike(twice, tmp_path, TWICE.replace("[{ rounds = 2 }, { rounds = 4 }]", "[{ at_round = 4 }]"), "seen")
    often = alike(
        twice, tmp_path, TWICE.replace("[{ rounds = 2 }, { rounds = 4 }]", "[{ at_round = 2 }, { at_round = 4 }]"), "of"
    )
    about = []
    for one in (seen, often):
        one = replace(
            one, claims=(replace(one.claims[0], less=Place("much", "4"), than=Place("little", "4")),), ours=None
        )
        store = Store(tmp_path / one.name)
        for job in jobs_of(one, 1):
            history = [{"round": [2, 4], "loss": [1.0, 2.0]}] * 2
            store.records[job.cell.key] = record(job.cell.key, [1.0, 2.0], "paper") | {"history": history}
        about.append(Results(one, store, seed=1).verdicts()[0].about)
    assert about[0] == about[1]


def test_a_claim_may_speak_of_some_looks_alone(twice: Experiment, tmp_path: Path) -> None:
    text = TWICE.replace("decides =", 'looks = ["paper", "ours"]\ndecides =')
    found = filled(alike(twice, tmp_path, text, "looked"), tmp_path)
    (verdicts,) = found.verdicts()
    assert list(verdicts.by) == ["paper", "ours"]
    assert "true" not in tally([found])
    two = text + '\n[[claims]]\nsays = "always"\nless = { row = "much" }\nthan = { row = "little" }\n'
    shown = markdown(filled(alike(twice, tmp_path, two, "both"), tmp_path))
    assert (
        "| noise costs (Sec. 1: “more noise, more loss”) | failed (in 0 of 2, failed in 2) | held (in 3 of 3" in shown
    )
    assert [line.endswith("| – |") for line in shown.splitlines() if line.startswith(("| noise", "| always"))] == [
        True, False,
    ]  # fmt: skip


def test_main_claims_may_stand_for_several(twice: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = alike(
        twice, tmp_path, TWICE.replace('less = { row = "much" }\nthan = { row = "little" }',
                                       'less = { row = "little" }\nthan = { row = "much" }'), "other"
    )  # fmt: skip
    main = {
        "claim": "noise costs",
        "plain": "so it seems",
        "experiment": "twice",
        "says": "noise costs",
        "also": [{"experiment": "other", "says": "noise costs"}],
    }
    about = dict.fromkeys(("title", "source", "verdict", "promises", "plot"), "") | {"main": [main]}
    monkeypatch.setattr(pages, "_about", lambda paper: about)
    monkeypatch.setattr(pages, "names", lambda: ["twice", "other"])
    page = write_index([filled(twice, tmp_path), filled(other, tmp_path)], tmp_path).read_text()
    assert "| claim | under the paper's reading | at true ε, in our settings | in plain words |" in page
    assert (
        "| noise costs | failed (2 claims: in 2 of 4, failed in 2); 2 repetitions |"
        " open (2 claims: in 0 of 6, failed in 0); 3 repetitions | so it seems |" in page
    )


def test_panels_of_ours_are_in_no_tally(twice: Experiment, tmp_path: Path) -> None:
    own = filled(alike(twice, tmp_path, "own = true\n" + TWICE, "own"), tmp_path)
    assert tally([own]) == "None of this is a claim of a paper."
    assert tally([own, filled(twice, tmp_path)]).startswith("1 claim ")
    shown = markdown(own)
    assert "A panel of ours" in shown
    assert "paper's reading" not in shown  # it has none
    assert (
        "| claim | the first way (2 repetitions) | the second way (3 repetitions) | at true ε, the second way" in shown
    )


def test_a_claim_that_failed_must_say_what_would_decide_it(
    twice: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_about", lambda paper: dict.fromkeys(("title", "source", "verdict"), ""))
    monkeypatch.setattr(results, "draw", lambda plain, path: path.write_bytes(b""))
    silent = alike(twice, tmp_path, TWICE.replace('decides = "the rate, which is not printed"\n', ""), "silent")
    with pytest.raises(BadInput, match=r"^decides of the claim 'noise costs' of experiment 'silent' must say"):
        write_page("udp-crd", [filled(silent, tmp_path)], [], tmp_path)
    assert write_page("udp-crd", [filled(twice, tmp_path)], [], tmp_path).is_file()


@each(
    ("old", "new", "says"),
    [
        ('reading = "at rate 2"\n', "", "^ours of experiment 'twice' must be a table of reading, base"),
        ('reading = "at rate 1, which is printed"\n', "", "^reading of experiment 'twice' must be given"),
        (
            'reading = "at rate 2"',
            'reading = "at rate 2"\nclaims = []',
            "^ours of experiment 'twice' must be a table of",
        ),
        ('reading = "at rate 2"', "reading = 2", "^reading must be a word, was 2"),
        ("columns = [2, 8]", "columns = [3]", "^smoke.columns of experiment 'twice' must be labels among"),
        ('quote = "more noise, more loss"', "quote = 3", "^claims.quote must be a word, was 3"),
        (
            'where = "Sec. 1"',
            'looks = ["theirs"]',
            "^claims.looks of experiment 'twice' must be a list of some of paper",
        ),
        ('where = "Sec. 1"', "looks = []", "^claims.looks of experiment 'twice' must be a list of some of paper"),
    ],
)
def test_wrong_readings_are_refused_by_name(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in TWICE
    path = tmp_path / "twice.toml"
    path.write_text(TWICE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BadInput, match=says):
        load(path, "smoke")
