"""Clipping: the step that makes sensitivity finite, so it must hold for every input, broken ones included."""

import torch
from torch import Tensor

from dpfl.orders import Norm


def clip_rows(rows: Tensor, clip_norm: float, norm: Norm) -> Tensor:
    """Scale each row of [B, d] down to at most `clip_norm`; shorter rows stay as they are.

    A row with an infinite or undefined entry becomes zero: it cannot be scaled, and letting it through would tell the
    world that its record is there.
    """
    finite = torch.isfinite(rows).all(dim=1, keepdim=True)
    rows = torch.where(finite, rows, torch.zeros_like(rows))
    lengths = torch.linalg.vector_norm(rows, ord=norm, dim=1, keepdim=True)  # [B, 1]
    # maximum(), not clip_norm / length: an all-zero row must stay zero, not become NaN.
    scales: Tensor = clip_norm / lengths.clamp(min=clip_norm)
    return rows * scales


def clip(vector: Tensor, clip_norm: float, norm: Norm) -> Tensor:
    """Scale one vector [d] down to at most `clip_norm`."""
    return clip_rows(vector[None], clip_norm, norm)[0]
