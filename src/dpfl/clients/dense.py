"""Per-record clipping for models made of linear layers, without ever forming a record's gradient.

A record's gradient in a layer z = W·a + b is the outer product of δ = ∂loss/∂z and its input a. Its norm is a product,
‖δ‖·‖a‖ (in L1 as in L2), and the sum of the clipped gradients is one matrix product Σ_r s_r·δ_r·a_rᵀ: private training
at about the price of plain training, where forming every gradient costs some forty times as much.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpfl.clients.clipping import sum_of_clipped
from dpfl.errors import BadInput
from dpfl.models import Model
from dpfl.orders import Norm, RecordClip


def is_dense(model: Model, x: Tensor, y: Tensor) -> bool:
    """Tell, with a few public records, whether all of the model's gradients are such outer products.

    That every parameter is a linear layer's is not enough: a weight may be used elsewhere too, a layer's output be
    changed in place, a row be less than a record, or records be mixed by the loss. So each layer must be used once, for
    one row a record that stays as it is; the loss must come as one value a record; and clipped sums must be those of
    records taken one by one. Whatever else a module does, the answer is no.
    """
    x, y = x[:8], y[:8]
    layers = _layers(model)
    owned = {_named(name, part) for name, layer in layers.items() for part, _ in layer.named_parameters()}
    if model.ridge or owned != {name for name, p in model.module.named_parameters() if p.requires_grad}:
        return False
    # Away from where the training begins: a layer of zeros would hide what happens before it.
    weights = model.weights()
    weights = weights + 0.1 * torch.cos(torch.arange(len(weights), dtype=weights.dtype, device=weights.device))
    try:
        model.module.train()
        with _watched(layers) as seen:
            losses = model.loss(model.outputs(model.split(weights), x), y)
        rows = {(inputs.ndim, len(inputs), outputs._version) for _, inputs, outputs in seen}
        if sorted(name for name, *_ in seen) != sorted(layers) or rows != {(2, len(x), 0)} or losses.ndim == 0:
            return False
        model.module.eval()
        alone = [model.gradient(weights, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
        middle = torch.stack([gradient.norm() for gradient in alone]).median().item()
        bound = RecordClip(middle or 1.0)
        ours = sum_of_clipped_dense(model, weights, x, y, bound)
    except (RuntimeError, IndexError, KeyError, BadInput):
        return False
    theirs = sum_of_clipped([torch.stack(alone)], bound.clip_norm, bound.norm)
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * bound.clip_norm)


class _Layer(NamedTuple):
    """What a layer adds to the records' gradients: the outer products of `deltas` and `inputs`, row by row."""

    name: str
    inputs: Tensor  # [B, in]
    deltas: Tensor  # [B, out], derivatives of each record's loss by the layer's outputs
    biased: bool


def sum_of_clipped_dense(model: Model, weights: Tensor, x: Tensor, y: Tensor, bound: RecordClip) -> Tensor:
    """Clip the gradient of each record [B, ...] and return the sum [d]. The model must be one that `is_dense`."""
    layers = _differentiated(model, weights, x, y)
    lengths = _lengths(layers, bound.norm)
    finite = torch.isfinite(lengths)  # a gradient that cannot be scaled counts as zero, as in `clipping`
    scales = torch.where(lengths > bound.clip_norm, bound.clip_norm / lengths, 1.0)[finite].to(weights.dtype)
    sums: dict[str, Tensor] = {}
    for name, inputs, deltas, biased in layers:
        if not finite.all():
            inputs, deltas = inputs[finite], deltas[finite]
        scaled = deltas * scales[:, None]
        sums[_named(name, "weight")] = scaled.T @ inputs
        if biased:
            sums[_named(name, "bias")] = scaled.sum(dim=0)
    return torch.cat([sums[name].flatten() for name in model.split(weights)])


def record_lengths_dense(model: Model, weights: Tensor, x: Tensor, y: Tensor, norm: Norm) -> Tensor:
    """Return the norm of each record's gradient [B], before any clip. The model must be one that `is_dense`."""
    return _lengths(_differentiated(model, weights, x, y), norm)


def _differentiated(model: Model, weights: Tensor, x: Tensor, y: Tensor) -> list[_Layer]:
    leaves = {name: p.detach().requires_grad_() for name, p in model.split(weights).items()}
    with _watched(_layers(model)) as seen:
        total = model.mean_loss(leaves, x, y) * len(x)
    # Row r of a derivative by a layer's outputs is record r's own: records do not mix.
    deltas = torch.autograd.grad(total, [outputs for _, _, outputs in seen])
    return [
        _Layer(name, inputs.detach(), delta, _named(name, "bias") in leaves)
        for (name, inputs, _), delta in zip(seen, deltas, strict=True)
    ]


def _lengths(layers: list[_Layer], norm: Norm) -> Tensor:
    """Return the norm of each record's gradient over all layers [B]: a bias is a weight whose input is 1."""
    parts = [_powers(layer.deltas, norm) * (_powers(layer.inputs, norm) + layer.biased) for layer in layers]
    total = torch.stack(parts).sum(dim=0)
    return total if norm == 1 else total.sqrt()


def _powers(rows: Tensor, norm: Norm) -> Tensor:
    """Return Σ|x|, or Σx², of each row [B] in double precision.

    Squares in single precision vanish or overflow where numbers are tiny or huge, and a tiny derivative times a huge
    input is a gradient like any other: such rows are squared in double precision.
    """
    if norm == 1:
        return rows.abs().sum(dim=1).double()
    squares = rows.square().sum(dim=1).double()
    odd = ~((squares > 1e-30) & (squares < 1e30))
    if odd.any():
        squares[odd] = rows[odd].double().square().sum(dim=1)
    return squares


def _named(layer: str, part: str) -> str:
    """Return what the module calls a layer's parameter; a module that is itself a layer calls it by its part alone."""
    return f"{layer}.{part}" if layer else part


def _layers(model: Model) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.module.named_modules() if type(layer) is nn.Linear}


@contextmanager
def _watched(layers: dict[str, nn.Linear]) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Note (name, inputs, outputs) of every call of a layer inside the block."""
    seen: list[tuple[str, Tensor, Tensor]] = []

    def watch(name: str, layer: nn.Linear) -> torch.utils.hooks.RemovableHandle:
        return layer.register_forward_hook(lambda _, inputs, outputs: seen.append((name, inputs[0], outputs)))

    handles = [watch(name, layer) for name, layer in layers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
