"""Max-pooling as fast as it can be, and exactly as it was.

It comes before ReLU where it follows one: the largest of some numbers, or zero, is zero or the largest of them, and so
are the derivatives, but there are fewer numbers. And where windows do not overlap, each derivative has one place to go:
a GPU writes it there, where torch's own kernel would look for it from every pixel.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def pool_well(module: nn.Module) -> None:
    """Let all max-pooling layers of a module run so; its outputs stay what they were."""
    uses: dict[int, int] = {}
    for _, layer in module.named_modules(remove_duplicate=False):
        uses[id(layer)] = uses.get(id(layer), 0) + 1
    for layer in module.modules():
        if type(layer) is nn.MaxPool2d and not layer.return_indices:
            _replace(layer, partial(_pool, layer))
    for chain in module.modules():
        if type(chain) is not nn.Sequential:
            continue
        for relu, pool in pairwise(chain):
            plain = type(pool) in (nn.MaxPool1d, nn.MaxPool2d) and not pool.return_indices
            if plain and type(relu) is nn.ReLU and uses[id(relu)] == uses[id(pool)] == 1:
                _replace(pool, partial(_pool_then_relu, pool.forward))
                _replace(relu, _as_it_is)


def _replace(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Let one layer run in another way."""
    layer.forward = forward


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _pool_then_relu(pool: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.relu(pool(x))


def _pool(layer: nn.MaxPool2d, x: Tensor) -> Tensor:
    size, stride, dilation = (_pair(one) for one in (layer.kernel_size, layer.stride, layer.dilation))
    apart = stride[0] >= size[0] and stride[1] >= size[1] and dilation == (1, 1)
    if x.is_cuda and x.ndim == 4 and apart and x.requires_grad:
        outputs: Tensor = _Scattered.apply(x, layer)  # type: ignore[no-untyped-call]
        return outputs
    return functional.max_pool2d(
        x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, ceil_mode=layer.ceil_mode
    )


class _Scattered(torch.autograd.Function):
    """Max-pooling of images [R, C, H, W] whose windows do not overlap."""

    @staticmethod
    def forward(context: Any, x: Tensor, layer: nn.MaxPool2d) -> Tensor:
        """Pool, and remember where each maximum was."""
        outputs, places = functional.max_pool2d(
            x, layer.kernel_size, layer.stride, layer.padding, ceil_mode=layer.ceil_mode, return_indices=True
        )
        context.save_for_backward(places)
        context.shape = x.shape
        return outputs

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Write each derivative to where its maximum was; channels lie last in memory, and stay there."""
        (places,) = context.saved_tensors
        rows, channels, height, width = context.shape
        to, what = (one.permute(0, 2, 3, 1).reshape(rows, -1, channels) for one in (places, gradients[0]))
        image = what.new_zeros(rows, height * width, channels).scatter_(1, to, what)
        return image.view(rows, height, width, channels).permute(0, 3, 1, 2), None


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
