"""Per-record clipping for models made of linear layers, without ever forming a record's gradient.

A record's gradient in a layer z = W·a + b is the outer product of δ = ∂loss/∂z and its input a. Its norm is a product,
‖δ‖·‖a‖ (in L1 as in L2), and the sum of the clipped gradients is one matrix product Σ_r s_r·δ_r·a_rᵀ: private training
at about the price of plain training, where forming every gradient costs some forty times as much.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpfl.models import Model
from dpfl.orders import Norm, RecordClip


def is_dense(model: Model, x: Tensor, y: Tensor) -> bool:
    """Tell, with a few public records, whether all of the model's gradients are such outer products.

    That every parameter is a linear layer's is not enough: a weight may be used elsewhere too, or a layer's output be
    changed in place. So the sum is compared with the gradient that torch computes.
    """
    x, y = x[:8], y[:8]
    layers = _layers(model)
    owned = {f"{name}.{part}" for name, layer in layers.items() for part, _ in layer.named_parameters()}
    trained = {name for name, p in model.module.named_parameters() if p.requires_grad}
    if model.ridge or owned != trained:
        return False
    model.module.eval()
    weights = model.weights()
    with _watched(layers) as seen:
        model.outputs(model.split(weights), x)
    if sorted(name for name, *_ in seen) != sorted(layers) or any(inputs.ndim != 2 for _, inputs, _ in seen):
        return False
    ours = sum_of_clipped_dense(model, weights, x, y, RecordClip(torch.finfo(weights.dtype).max))
    return torch.allclose(ours / len(x), model.gradient(weights, x, y), rtol=1e-3, atol=1e-6)


def sum_of_clipped_dense(model: Model, weights: Tensor, x: Tensor, y: Tensor, bound: RecordClip) -> Tensor:
    """Clip the gradient of each record [B, ...] and return the sum [d]. The model must be one that `is_dense`."""
    leaves = {name: p.detach().requires_grad_() for name, p in model.split(weights).items()}
    with _watched(_layers(model)) as seen:
        total = model.mean_loss(leaves, x, y) * len(x)
    # Row r of a derivative by a layer's outputs is record r's own: records do not mix.
    deltas = torch.autograd.grad(total, [outputs for _, _, outputs in seen])
    inputs = [layer_inputs.detach() for _, layer_inputs, _ in seen]
    biased = [f"{name}.bias" in leaves for name, _, _ in seen]

    lengths = _lengths(inputs, list(deltas), biased, bound.norm)
    scales = torch.where(lengths > bound.clip_norm, bound.clip_norm / lengths, 1.0)
    finite = torch.isfinite(lengths)  # a gradient that cannot be scaled counts as zero, as in `clipping`
    sums: dict[str, Tensor] = {}
    for (name, _, _), layer_inputs, delta, has_bias in zip(seen, inputs, deltas, biased, strict=True):
        if not finite.all():
            layer_inputs, delta = layer_inputs[finite], delta[finite]
        scaled = delta * scales[finite][:, None]
        sums[f"{name}.weight"] = scaled.T @ layer_inputs
        if has_bias:
            sums[f"{name}.bias"] = scaled.sum(dim=0)
    return torch.cat([sums[name].flatten() for name in leaves])


def _lengths(inputs: list[Tensor], deltas: list[Tensor], biased: list[bool], norm: Norm) -> Tensor:
    """Return the norm of each record's gradient over all layers [B]: a bias is a weight whose input is 1."""
    parts = []
    for layer_inputs, delta, has_bias in zip(inputs, deltas, biased, strict=True):
        if norm == 1:
            parts.append(delta.abs().sum(dim=1) * (layer_inputs.abs().sum(dim=1) + has_bias))
        else:
            parts.append(delta.square().sum(dim=1) * (layer_inputs.square().sum(dim=1) + has_bias))
    total = torch.stack(parts).sum(dim=0)
    return total if norm == 1 else total.sqrt()


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
