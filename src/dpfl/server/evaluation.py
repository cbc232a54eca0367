"""Evaluation on public records: how good a model is."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpfl.federation import Records
from dpfl.models import Model

_BATCH = 4096


@dataclass(frozen=True)
class Score:
    """The mean loss, and for classifiers the share of records classified correctly."""

    loss: float
    accuracy: float | None


@torch.no_grad()
def evaluate(model: Model, parameters: Tensor, records: Records) -> Score | None:
    """Score the parameters [d] on the records, in batches; None where there are none."""
    if len(records) == 0:
        return None
    model.module.eval()
    named = model.split(parameters)
    loss, correct = 0.0, 0
    for start in range(0, len(records), _BATCH):
        x, y = records.x[start : start + _BATCH], records.y[start : start + _BATCH]
        outputs = model.outputs(named, x)
        loss += model.objective(named, outputs, y).item() * len(x)
        if model.classify is not None:
            correct += int((model.classify(outputs) == y).sum())
    return Score(loss / len(records), correct / len(records) if model.classify is not None else None)


class Public(Protocol):
    """What a server may judge a model by."""

    def score(self, parameters: Tensor, round: int) -> Score | None:
        """Score the model [d] that was sent out after a round; None where nothing is public."""


@dataclass(frozen=True)
class PublicSplit:
    """Public records."""

    model: Model
    records: Records

    def score(self, parameters: Tensor, round: int) -> Score | None:
        """Score the model on them."""
        return evaluate(self.model, parameters, self.records)
