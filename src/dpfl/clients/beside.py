"""What clients tell beside their uploads: how many records their clip left as they were, or how long what it clips was.

A count is paid for and leaves a client with noise on it, drawn from a stream of the client's own whoever trains it, so
that it is the same number with every engine. A length is what a paper's own calibration asks for, without noise.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpfl.clients.chunks import Chunk
from dpfl.clients.draws import own_stream
from dpfl.clients.uploads import Request
from dpfl.orders import Gaussian
from dpfl.privacy.mechanisms import add_noise
from dpfl.streams import Keystream, Streams

Told = dict[int, tuple[float, ...]]  # each client's count and length, without noise


def counts_and_lengths(lengths: Tensor, clip_norms: Tensor, real: Tensor | None = None) -> Tensor:
    """Return for each client its count, ½ for a record that is not clipped and −½ for another, and the median length.

    lengths: [k, R/k], of the records' gradients; one that is no number is clipped.
    clip_norms: [k, 1]; real: [k, R/k], zero for what only fills a gap.
    """
    counts = (lengths <= clip_norms).to(torch.float64) - 0.5
    if real is not None:
        counts, lengths = counts * real, lengths.masked_fill(real == 0, torch.nan)
    if lengths.shape[1] == 0:
        return torch.stack([counts.sum(dim=1), counts.new_full((len(counts),), torch.nan)], dim=1)
    return torch.stack([counts.sum(dim=1), lengths.double().nanmedian(dim=1).values], dim=1)


def told_by(chunks: Sequence[Chunk], told: Sequence[Tensor | None]) -> Told:
    """Return what each client of some chunks tells, of which each has computed a table; only now is a device asked."""
    found: Told = {}
    for chunk, rows in zip(chunks, told, strict=True):
        if rows is not None:
            found |= dict(zip(chunk.clients, map(tuple, rows.tolist()), strict=True))
    return found


def beside(streams: Streams, request: Request, told: Told) -> tuple[dict[int, float], dict[int, float]]:
    """Return the counts that were ordered, with the noise that was paid for, and the lengths that will be asked for."""
    counts = {}
    for client, paid in request.charged.items():
        if paid.order.count_noise is None:
            continue
        source = own_stream(streams, "count", client, request)
        relative = paid.relative_count_noise if isinstance(source, Keystream) else 1.0
        count = torch.tensor([told[client][0]], dtype=torch.float64)
        counts[client] = add_noise(count, Gaussian, paid.order.count_noise.std, source, relative_size=relative).item()
    asked = told if "length" in request.questions else {}
    return counts, {client: length for client, (_, length) in asked.items()}


def weighed(request: Request, counts: Mapping[int, float]) -> float | None:
    """Return Σ_i weights[i]·count_i/(records in i's batch); None where nobody counted."""
    if not counts:
        return None
    charged = request.charged
    return math.fsum(
        request.weights[client] * count / charged[client].order.expected_batch(charged[client].records)
        for client, count in counts.items()
    )
