"""Max-pooling as fast as it can be, and exactly as it was.

Where windows do not overlap, each derivative has one place to go: a GPU writes it there, where torch's own kernel would
look for it from every pixel.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def pool_well(module: nn.Module) -> None:
    """Let all max-pooling layers of a module run so; its outputs stay what they were."""
    for layer in module.modules():
        if type(layer) is nn.MaxPool2d:
            setattr(layer, "forward", partial(_pool, layer))  # noqa: B010 (mypy takes it for a method)


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
