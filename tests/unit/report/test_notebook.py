"""What notebooks show: the words of the screen, self-contained, readable on any ground, and names only ever as text."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

import dpfl
from dpfl.comparison import Comparison, compare, contenders
from dpfl.planning import Plan
from dpfl.report import certificate as on_screen
from dpfl.report import comparison as compared
from dpfl.report import notebook
from dpfl.training import Run
from grids import each
from unit.report.test_certificate import certificate

HOSTILE = "<script>alert('x')</script><img src=http://x/y onerror=z>&\"'"


@cache
def trained() -> Run:
    return dpfl.train(dpfl.UDP(epsilon=8, delta=1e-3, rounds=3), dpfl.federate("digits", clients=4, seed=1), seed=1)


@cache
def planned() -> Plan:
    return dpfl.plan(dpfl.UDP(epsilon=8, delta=1e-3), dpfl.federate("digits", clients=4, seed=1), method="bound")


@cache
def several() -> Comparison:
    return compare(contenders(["udp", "fedavg"], {"clients": 3, "rounds": 2}), seeds=2, epsilon=4.0)


def shown(result: Any) -> str:
    return str(result._repr_html_())


def words(html: str) -> str:
    """Return what a reader sees, with single spaces; it fails where the HTML is not well formed."""
    return " ".join(" ".join(ElementTree.fromstring(html).itertext()).split())


RESULTS: list[Callable[[], Any]] = [trained, lambda: trained().certificate, planned, several]
NAMES = ["run", "certificate", "plan", "comparison"]


def faults(html: str) -> list[str]:
    """Return what would reach out of the notebook, run in it, or fix a colour of its text or ground."""
    forbidden = r"<script|<style|<link|<img|http|url\(|@import|\son\w+=|background|[\s\";]color:"
    return re.findall(forbidden, html)


@each("result", RESULTS, ids=NAMES)
def test_it_is_well_formed_self_contained_and_leaves_text_and_ground_to_the_notebook(result: Callable[[], Any]) -> None:
    html = shown(result())
    assert words(html)
    assert faults(html) == []


def test_a_piece_that_is_not_is_found() -> None:
    assert faults('<p style="color: black">') == ['"color:']
    assert faults(f"<div>{HOSTILE}</div>") == ["<script", "<img", "http", " onerror="]


def test_a_run_shows_its_result_its_curves_and_its_certificate() -> None:
    run = trained()
    html = shown(run)
    assert f"udp: accuracy {100 * run.accuracy:.1f} %, loss {run.loss:.4f} on the test split after 3 rounds" in html
    assert html.count("<svg") == 2
    assert html.count("<polyline") == 4
    assert "ε ≤ 8, within the promise" in words(html)


def test_a_curve_fills_its_frame_and_round_by_round() -> None:
    lines = [
        {"round": at, "loss": loss, "validation_loss": None, "accuracy": None, "validation_accuracy": None}
        for at, loss in ((1, 4.0), (2, None), (3, 3.0), (5, 2.0))
    ]
    run = trained().to_dict() | {"history": lines, "accuracy": None}
    html = str(notebook.run(run))
    assert re.findall(r'points="([^"]*)"', html) == ["0.0,0.0 140.0,55.0 280.0,110.0"]  # no accuracy, no second frame
    (frame,) = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert words(frame) == "loss 4 2 round 1 5 test"


def test_a_single_round_is_a_dot_and_a_diverged_training_shows_no_curve() -> None:
    line = {"round": 1, "loss": 2.5, "validation_loss": 2.5, "accuracy": None, "validation_accuracy": None}
    html = str(notebook.run(trained().to_dict() | {"history": [line]}))
    assert re.findall(r'points="([^"]*)"', html) == ["140.0,55.0 140.0,55.0"] * 2
    gone = line | {"loss": None, "validation_loss": None}
    html = str(notebook.run(trained().to_dict() | {"history": [gone], "loss": None}))
    assert "<svg" not in html
    assert "not finite (the training diverged; lower lr)" in html


@pytest.mark.parametrize(
    "plain",
    [
        certificate(),
        certificate(against=["uplink"], exposures=2, noise_source="dice", cautions=["mind the gap"], head="ab" * 32),
        certificate(claimed=None, calibration=None, uncounted=["every upload, as it is"], noise_source=None),
    ],
    ids=["plain", "much to say", "no promise"],
)
def test_a_certificate_says_every_word_of_the_screen(plain: dict[str, Any]) -> None:
    said = words(str(notebook.certificate(plain)))
    for part in re.split(r"\s{2,}|\n", on_screen.text(plain)):
        assert part.strip() in said


def test_more_than_promised_is_said() -> None:
    plain = certificate()
    plain["spending"] = [line | {"server_epsilon": 8.8} for line in plain["spending"]]
    assert "ε ≤ 8.8, 10 % MORE than promised" in words(str(notebook.certificate(plain)))


def test_a_plan_shows_its_numbers_its_reasons_and_the_certificate_to_come() -> None:
    plan = planned()
    said = words(shown(plan))
    assert said.startswith(f"udp: {plan.best.rounds} rounds, 1 local step each, all 4 clients a round")
    for sentence in plan.why:
        assert sentence in said
    assert f"{plan.best.rounds}*" in said
    assert "predicted certificate" in said
    assert "within the promise" in said


def test_a_comparison_shows_the_tables_of_the_screen() -> None:
    whole = several()
    said = words(shown(whole))
    for part in compared.parts(whole.to_dict()):
        for text in [part] if isinstance(part, str) else [cell for row in part for cell in row]:
            assert " ".join(text.split()) in said


def hostile(plain: Any) -> Any:
    """Return a certificate's plain data with a hostile name in all that is free text."""
    return plain | {
        "system": HOSTILE, "calibration": HOSTILE, "config": HOSTILE, "uncounted": [HOSTILE], "cautions": [HOSTILE],
        "noise_source": HOSTILE, "head": HOSTILE,
    }  # fmt: skip


def with_a_hostile_client() -> str:
    plain = certificate()
    plain["spending"] = [line | {"name": HOSTILE} for line in plain["spending"]]
    return str(notebook.certificate(plain))


def hostile_plan() -> str:
    whole = planned()
    certificate = replace(whole.certificate, **hostile({}))
    return shown(replace(whole, why=(HOSTILE,), options={HOSTILE: HOSTILE}, certificate=certificate))


def hostile_comparison() -> str:
    whole = several()
    named = [replace(result, label=HOSTILE, searched={HOSTILE: HOSTILE}) for result in whole.results]
    return shown(replace(whole, results=tuple(named)))


@each(
    "html",
    [
        lambda: str(notebook.run(trained().to_dict() | {"system": HOSTILE})),
        lambda: str(notebook.certificate(hostile(certificate()))),
        hostile_plan,
        hostile_comparison,
        with_a_hostile_client,
    ],
    ids=[*NAMES, "client"],
)
def test_a_hostile_name_comes_out_as_text(html: Callable[[], str]) -> None:
    text = html()
    assert HOSTILE in "".join(ElementTree.fromstring(text).itertext())
    assert not re.search(r"<script|<img", text)


def test_a_name_that_is_taken_for_html_would_be_noticed() -> None:
    with pytest.raises(ElementTree.ParseError):
        ElementTree.fromstring(notebook.page("title", Markup(HOSTILE)))
