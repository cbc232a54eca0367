"""Clipping: the step that makes sensitivity finite, so it must hold for every input, broken ones included.

A gradient that is not finite, so long that its norm overflows, or so long that what scales it down would lose its last
bits, counts as zero: letting it through would tell the world that its record is there.

Vectors are measured and scaled in double precision. What rounding does there, at most 2⁻⁴⁵ of the clip norm, is part of
the share that every price leaves for arithmetic (`dpfl.orders.GRID_SHARE`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfl.orders import Norm

_LEAST = 1e-290  # scales below are no longer, or soon will not be, as exact as all others
_TINY = 1e-300  # more than squares lose below the smallest number: a norm is never taken for too short


def clip(vector: Tensor, clip_norm: float, norm: Norm) -> Tensor:
    """Scale a vector [d] down to at most `clip_norm`, in double precision; a shorter one stays as it is."""
    return sum_of_clipped([vector[None]], clip_norm, norm)


def clip_rows(vectors: Tensor, clip_norms: Tensor, norm: Norm) -> Tensor:
    """Scale each row of [k, d] down to at most its own norm of [k], in double precision."""
    vectors = vectors.double()
    scales = scales_of(row_lengths([vectors], norm), clip_norms)[:, None]
    return torch.where(scales > _LEAST, scales * vectors, 0.0)  # a NaN is above nothing


def sum_of_clipped(blocks: Sequence[Tensor], clip_norm: float, norm: Norm) -> Tensor:
    """Clip each row of [B, d], given as blocks [B, d_k] that lie side by side, and return the sum of the rows [d]."""
    blocks = [block.double() for block in blocks]
    scales = scales_of(row_lengths(blocks, norm), clip_norm)
    told = scales > _LEAST
    if not told.all():  # left out altogether: a weight of zero would not silence a NaN
        blocks, scales = [block[told] for block in blocks], scales[told]
    return torch.cat([scales @ block for block in blocks])


def scales_of(lengths: Tensor, clip_norms: Tensor | float) -> Tensor:
    """Return what vectors of these lengths are multiplied by [k]; next to nothing, or a NaN, is no scale."""
    return (clip_norms / lengths).clamp(max=1)


def row_lengths(blocks: Sequence[Tensor], norm: Norm) -> Tensor:
    """Return the norm of each row [B].

    By way of sum(), which adds in a cascade: vector_norm() adds up one after the other, and makes the norm of very
    many equal numbers too short, and the clip as much too generous.
    """
    sums = [(block.abs() if norm == 1 else block.square()).sum(dim=1) for block in blocks]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0)
    return total if norm == 1 else total.add_(_TINY).sqrt_()
