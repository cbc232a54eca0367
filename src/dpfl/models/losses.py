"""Losses of records: the papers' own, and what to do with a label that is no class."""

import copy
from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the softmax cross-entropy of each record."""
    return functional.cross_entropy(outputs, labels, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of each record."""
    return (outputs.squeeze(-1) - targets).square()


def hinge(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return max(0, 1 − y·wᵀx) of each record, with y = ±1 for labels 1 and 0."""
    return (1 - (2 * labels - 1) * outputs.squeeze(-1)).clamp(min=0)


def keeps_apart(loss: Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Tell whether a loss is known to make one value of each record's outputs and target, whatever they are.

    Any other is code that may do anything with a batch, and is shown one record at a time.
    """
    if targets.ndim != 1:
        return False
    if loss is cross_entropy:
        return outputs.ndim == 2
    return loss in (squared_error, hinge) and (outputs.ndim == 1 or outputs.shape[1:] == (1,))


def without_strangers(loss: Loss, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Give a record whose label is no class the first class, and outputs that are no numbers: nor is its gradient.

    A GPU that is asked for the probability of such a class stops the whole process.
    """
    classes = loss in (cross_entropy, functional.cross_entropy, functional.nll_loss)
    classes = classes or type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)
    if not classes or labels.is_floating_point() or outputs.ndim != labels.ndim + 1:
        return outputs, labels
    ignored = getattr(loss, "ignore_index", -100)
    known = ((labels >= 0) & (labels < outputs.shape[1])) | (labels == ignored)
    numbers = torch.where(known, 1.0, torch.nan).to(outputs)
    return outputs * numbers.unsqueeze(1), torch.where(known, labels, 0)


def fresh(loss: Loss) -> Loss:
    """Return a loss that remembers no record it has seen."""
    return loss if isinstance(loss, FunctionType) else copy.deepcopy(loss)
