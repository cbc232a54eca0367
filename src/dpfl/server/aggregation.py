"""Aggregation: the weighted sum of updates moves the model."""

from collections.abc import Mapping

import torch
from torch import Tensor


def aggregate(model: Tensor, uploads: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
    """Return the model [d] moved by Σ_i weights[i]·uploads[i].

    Clients are added up in the order of their numbers, so that no bit of the result depends on who answered first.
    """
    weighted_sum = getattr(uploads, "weighted_sum", None)
    if weighted_sum is not None:  # they are never seen one by one
        together: Tensor = weighted_sum(weights)
        return model + together
    moved = model
    for client in sorted(uploads):
        moved = torch.add(moved, uploads[client], alpha=weights[client])
    return moved
