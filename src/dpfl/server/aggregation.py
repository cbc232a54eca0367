"""Aggregation: the weighted sum of uploads."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dpfl.clients.uploads import Summed, Uploads


def aggregate(model: Tensor, uploads: Uploads, weights: Mapping[int, float]) -> Tensor:
    """Return Σ_i weights[i]·upload_i, by which a round moves the model [d]; zeros where nobody uploaded.

    Clients are added up in the order of their numbers, so that no bit of the result depends on who answered first.
    """
    if isinstance(uploads, Summed):
        return uploads.total
    total = torch.zeros_like(model)
    for client in sorted(uploads.by_client):
        total = torch.add(total, uploads.by_client[client], alpha=weights[client])
    return total
