"""Aggregation: the weighted sum of updates moves the model."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Together(Protocol):
    """Uploads that are never seen one by one."""

    def weighted_sum(self, weights: Mapping[int, float]) -> Tensor:
        """Return Σ_i weights[i]·uploads[i], [d]."""


def aggregate(model: Tensor, uploads: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
    """Return the model [d] moved by Σ_i weights[i]·uploads[i].

    Clients are added up in the order of their numbers, so that no bit of the result depends on who answered first.
    """
    if isinstance(uploads, Together):
        return model + uploads.weighted_sum(weights)
    moved = model
    for client in sorted(uploads):
        moved = torch.add(moved, uploads[client], alpha=weights[client])
    return moved
