"""Clipping: the step that makes sensitivity finite, so it must hold for every input, broken ones included.

A gradient that is not finite, or so long that its norm overflows, counts as zero: it cannot be scaled, and letting it
through would tell the world that its record is there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfl.orders import Norm


def clip(vector: Tensor, clip_norm: float, norm: Norm) -> Tensor:
    """Scale a vector [d] down to at most `clip_norm`; a shorter one stays as it is."""
    return sum_of_clipped([vector[None]], clip_norm, norm)


def clip_rows(vectors: Tensor, clip_norms: Tensor, norm: Norm) -> Tensor:
    """Scale each row of [k, d] down to at most its own norm of [k]."""
    lengths = row_lengths([vectors], norm)[:, None]
    scales = (clip_norms[:, None] / lengths).clamp(max=1)
    return torch.where(lengths < torch.inf, scales * vectors, 0.0)  # a NaN is below nothing


def sum_of_clipped(blocks: Sequence[Tensor], clip_norm: float, norm: Norm) -> Tensor:
    """Clip each row of [B, d], given as blocks [B, d_k] that lie side by side, and return the sum of the rows [d]."""
    lengths = row_lengths(blocks, norm)
    finite = torch.isfinite(lengths)
    if not finite.all():  # left out altogether: a weight of zero would not silence a NaN
        blocks, lengths = [block[finite] for block in blocks], lengths[finite]
    scales = torch.where(lengths > clip_norm, clip_norm / lengths, 1.0)
    return torch.cat([scales @ block for block in blocks])


def row_lengths(blocks: Sequence[Tensor], norm: Norm) -> Tensor:
    """Return the norm of each row [B].

    By way of sum(), which adds in a cascade: vector_norm() adds up one after the other, and in single precision that
    makes the L1 norm of 10⁶ equal numbers half a percent too short, and the clip as much too generous.
    """
    sums = [(block.abs() if norm == 1 else block.square()).sum(dim=1) for block in blocks]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0)
    return total if norm == 1 else total.sqrt()
