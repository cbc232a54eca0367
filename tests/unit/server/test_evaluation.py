"""Scores by hand, the same however the records are batched."""

import math

import pytest
import torch
from torch import nn

from dpfl.federation import Records
from dpfl.models import Model, build
from dpfl.server import evaluation
from dpfl.server.evaluation import Score, evaluate
from dpfl.streams import Streams
from grids import each


def test_a_regression_by_hand() -> None:
    # w = 2: outputs 2, 4, 6 against targets 1, 4, 9: squared errors 1, 0, 9.
    model = build("linear", shape=(1,), classes=None, rng=Streams(0).public.generator("model"))
    records = Records(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 4.0, 9.0]))
    assert evaluate(model, torch.tensor([2.0, 0.0]), records) == Score(pytest.approx(10 / 3), None)


def test_a_classifier_by_hand() -> None:
    # The logits are ±ln 3 on either side: (3/4, 1/4) for x = 1 and (1/4, 3/4) for x = −1. Two of three are right.
    model = build("softmax-no-bias", shape=(1,), classes=2, rng=Streams(0).public.generator("model"))
    records = Records(torch.tensor([[1.0], [-1.0], [1.0]]), torch.tensor([0, 1, 1]))
    score = evaluate(model, torch.tensor([math.log(3) / 2, -math.log(3) / 2]), records)
    assert score.accuracy == pytest.approx(2 / 3)
    assert score.loss == pytest.approx((2 * math.log(4 / 3) + math.log(4)) / 3)


def test_the_penalty_is_part_of_the_loss() -> None:
    # The SVM's κ/2·‖w‖² with κ = 0.01 and w = (3, 4), and hinges of 1 for all-zero records, in every batch.
    model = build("svm", shape=(2,), classes=2, rng=Streams(0).public.generator("model"))
    score = evaluate(model, torch.tensor([3.0, 4.0]), Records(torch.zeros(3, 2), torch.tensor([0, 1, 1])))
    assert score == Score(pytest.approx(1.125), pytest.approx(1 / 3))  # w·x = 0 counts as class 0


@each("batch", [1, 2, 3, 4, 7, 100])
@each("name", ["softmax", "svm"])
def test_batches_change_nothing(batch: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name, shape=(4,), classes=2, rng=Streams(0).public.generator("model"))
    source = torch.Generator().manual_seed(0)
    records = Records(torch.randn(7, 4, generator=source), torch.randint(0, 2, (7,), generator=source))
    whole = evaluate(model, model.vector(), records)
    monkeypatch.setattr(evaluation, "_BATCH", batch)
    pieces = evaluate(model, model.vector(), records)
    assert pieces.accuracy == whole.accuracy
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-6)


def test_the_parameters_that_are_asked_about_are_scored() -> None:
    model = build("linear", shape=(1,), classes=None, rng=Streams(0).public.generator("model"))
    before = model.vector()
    records = Records(torch.tensor([[1.0]]), torch.tensor([5.0]))
    assert evaluate(model, torch.tensor([5.0, 0.0]), records).loss == 0.0
    assert torch.equal(model.vector(), before)


def test_dropout_is_off() -> None:
    module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    model = Model(module, nn.CrossEntropyLoss(), classify=lambda outputs: outputs.argmax(-1))
    records = Records(torch.ones(5, 3), torch.zeros(5).long())
    assert evaluate(model, model.vector(), records) == evaluate(model, model.vector(), records)


def test_a_model_that_diverged_has_no_finite_loss() -> None:
    model = build("linear", shape=(1,), classes=None, rng=Streams(0).public.generator("model"))
    records = Records(torch.tensor([[1.0]]), torch.tensor([5.0]))
    assert not math.isfinite(evaluate(model, torch.tensor([math.nan, 0.0]), records).loss)
