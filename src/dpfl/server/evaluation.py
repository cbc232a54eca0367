"""Evaluation on public records: how good a model is."""

from dataclasses import dataclass

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
def evaluate(model: Model, weights: Tensor, records: Records) -> Score | None:
    """Score the weights [d] on the records, in batches; None where there are none."""
    if len(records) == 0:
        return None
    model.module.eval()
    parameters = model.split(weights)
    loss, correct = 0.0, 0
    for start in range(0, len(records), _BATCH):
        x, y = records.x[start : start + _BATCH], records.y[start : start + _BATCH]
        outputs = model.outputs(parameters, x)
        loss += model.objective(parameters, outputs, y).item() * len(x)
        if model.classify is not None:
            correct += int((model.classify(outputs) == y).sum())
    return Score(loss / len(records), correct / len(records) if model.classify is not None else None)
