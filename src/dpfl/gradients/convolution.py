"""Convolutions over a whole cohort: fast where clients share a model, possible where each has its own.

Images are kept with their channels last in memory (the numbers of a pixel side by side), where convolutions and above
all max-pooling are several times faster. A convolution is a product of the image's patches and the kernel: with a
kernel for each client it is one batched product, where a convolution in groups, one for each client, would be slower
than a loop. The same patches times the derivatives by the outputs are the gradient of each record.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfl.gradients.record_gradients import Formed, Products, silenced, weigh
from dpfl.orders import Norm

_Pairs = tuple[tuple[int, int], tuple[int, int]]
_PAIRS = ((torch.float32, torch.complex64, 2), (torch.float64, torch.complex128, 2))
_WIDE = ((torch.float32, torch.complex128, 4), *_PAIRS)


def _on_gpu(x: Tensor) -> bool:
    """Tell whose ways are the faster ones; both lead to the same numbers, wherever they are taken."""
    return x.is_cuda


def _in_tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def as_image(x: Tensor) -> Tensor:
    """View signals [R, C, L] as images of height 1 and keep images [R, C, H, W], channels last in memory."""
    return _channels_last(x[:, :, None] if x.ndim == 3 else x)


def _channels_last(image: Tensor) -> Tensor:
    """Lay the channels last; with a single one only the strides tell, which torch leaves as they are by itself."""
    image = image.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = image.shape
    return image if channels > 1 else image.as_strided(image.shape, (height * width, 1, width, 1))


def convolve(
    layer: nn.Conv1d | nn.Conv2d,
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    apart: bool,
    measured: bool,
    recall: dict[str, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return what is to be kept and the layer's outputs [R, out, H, W], under one kernel or one for each client.

    By patches, which are kept, where there are several kernels, and where gradients are wanted apart and the image is
    the record itself: the patches are then needed anyway. Else by torch's convolution, and the image is kept.

    A GPU is slow to convolve the few channels of a record, and fast later on if it may multiply in TF32: then patches
    are taken of records alone, and if no norms are asked for it convolves client by client. In full precision products
    of patches are faster throughout.

    recall: where the patches of records are remembered, which are the same in every step on the same batch.
    """
    shared = weight.ndim == layer.weight.ndim
    if shared and (image.requires_grad or not (apart or _on_gpu(image))):
        return image, _convolved(layer, image, weight, bias)
    if _on_gpu(image) and _in_tf32() and image.requires_grad and not measured:
        kernels = weight[:, :, :, None] if weight.ndim == 4 else weight
        kernels = kernels.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)  # at once, and not one by one
        each = zip(image.chunk(len(weight)), kernels, strict=True)
        outputs = torch.cat([_convolved(layer, some, kernel, None) for some, kernel in each])
        if bias is not None:
            by_client = outputs.view(len(weight), -1, *outputs.shape[1:])
            outputs = (by_client + bias[:, None, :, None, None]).flatten(0, 1)
        return image, outputs
    height, width = _grid(layer, image)
    patches = recall.get("patches") if recall is not None else None
    if patches is None:
        patches = _patches(layer, image, biased=bias is not None)
    if recall is not None:
        recall["patches"] = patches
    channels = 1 if shared else 2
    kernels = weight.movedim(channels, -1).flatten(channels)
    if _on_gpu(patches):  # they end in a one for the bias, and in zeros
        ended = kernels if bias is None else torch.cat([kernels, bias[..., None]], dim=-1)
        kernels, bias = functional.pad(ended, (0, patches.shape[-1] - ended.shape[-1])), None
    if shared:
        product = functional.linear(patches, kernels, bias)
    else:
        rows = patches.reshape(len(weight), -1, patches.shape[-1])
        product = torch.bmm(rows, kernels.mT) if bias is None else torch.baddbmm(bias[:, None], rows, kernels.mT)
    return patches, product.view(len(image), height, width, -1).permute(0, 3, 1, 2)


def _convolved(layer: nn.Conv1d | nn.Conv2d, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve an image with one kernel, by torch."""
    kernel = _channels_last(weight[:, :, None] if weight.ndim == 3 else weight)
    stride, dilation = _geometry(layer)
    return functional.conv2d(_padded(layer, image), kernel, bias, stride, _plain_padding(layer), dilation)


class Convolved:
    """The gradients of R records in a convolution."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, image: Tensor, deltas: Tensor, *, biased: bool) -> None:
        """Take the image [R, C, H, W], or its patches, and the derivatives by the outputs [R, out, H', W']."""
        self.layer, self.image, self.deltas, self.biased = layer, image, deltas, biased
        self._formed: Formed | None = None

    def powers(self, norm: Norm) -> list[Tensor]:
        """Form the gradients: a kernel is small, and each record's is the sum over many pixels."""
        self._formed = Formed(self._products().form())
        return self._formed.powers(norm)

    def form(self) -> dict[str, Tensor]:
        """Multiply patches and derivatives record by record."""
        return self._named(self._products().form())

    def weighted_sum(self, weights: Tensor | None, clients: int) -> dict[str, Tensor]:
        """Add formed gradients, or take the gradient of a client's whole batch."""
        if self._formed is not None:
            return self._named(self._formed.weighted_sum(weights, clients))
        if clients > 1 or self.image.ndim == 3 or _on_gpu(self.image):  # whose own kernels for this take longer
            return self._named(self._products().weighted_sum(weights, clients))
        scaled = weigh(self.deltas, weights)
        layer, image = self.layer, _padded(self.layer, self.image)
        kernel = layer.weight[:, :, None] if layer.weight.ndim == 3 else layer.weight
        stride, dilation = _geometry(layer)
        _, weight, bias = torch.ops.aten.convolution_backward(
            scaled, image, kernel.detach(), [len(kernel)], stride, _plain_padding(layer), dilation, False, (0, 0), 1,
            (False, True, self.biased),
        )  # fmt: skip
        total = {"weight": weight.view(1, *layer.weight.shape)}
        return total | {"bias": bias[None]} if self.biased else total

    def without(self, rows: Tensor) -> "Convolved":
        """Zero both factors."""
        rest = Convolved(self.layer, silenced(self.image, rows), silenced(self.deltas, rows), biased=self.biased)
        rest._formed = self._formed and self._formed.without(rows)
        return rest

    def doubled(self) -> "Convolved":
        """Convert both factors."""
        return Convolved(self.layer, self.image.double(), self.deltas.double(), biased=self.biased)

    def _products(self) -> Products:
        patches = self.image if self.image.ndim == 3 else _patches(self.layer, self.image, biased=self.biased)
        deltas = self.deltas.permute(0, 2, 3, 1).flatten(1, 2)
        return Products(patches, deltas, biased=self.biased and not _on_gpu(patches))

    def _named(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Bring kernels [n, out, height·width·C …] into the layer's order [n, out, C, height, width]."""
        channels, *size = self.layer.weight.shape[1:]
        flat, width = parts["weight"], channels * math.prod(size)
        named = parts | {"weight": flat[..., :width].reshape(*flat.shape[:2], *size, channels).movedim(-1, 2)}
        return named if "bias" in named or not self.biased else named | {"bias": flat[..., width]}


class _Patches(torch.autograd.Function):
    """The patches [R, H'·W', height·width·C …] of images [R, H, W, C] that are already padded."""

    @staticmethod
    def forward(
        context: Any,
        image: Tensor,
        size: tuple[int, int],
        geometry: _Pairs,
        grid: tuple[int, int],
        ones: int,
        zeros: int,
    ) -> Tensor:
        """Copy each patch, followed by ones and zeros; C numbers lie side by side, or all of a line of the kernel."""
        context.shape, context.size, context.geometry, context.grid = image.shape, size, geometry, grid
        rows, _, _, channels = image.shape
        (down, right), (further_down, further_right) = geometry
        row, line, pixel, channel = image.stride()
        view = image.as_strided(
            (rows, *grid, *size, channels),
            (row, line * down, pixel * right, line * further_down, pixel * further_right, channel),
        )
        if further_right == 1 and pixel == channels and channel == 1:
            view = view.as_strided((rows, *grid, size[0], size[1] * channels), (*view.stride()[:4], 1))
        width = size[0] * size[1] * channels
        patches = image.new_empty(rows, grid[0] * grid[1], width + ones + zeros)
        target, source = _wide(_WIDE, patches[..., :width].view(view.shape), view)
        target.copy_(source)
        patches[..., width : width + ones].fill_(1)
        patches[..., width + ones :].fill_(0)
        return patches

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """Add up what each pixel got from all patches it is in, one place of the kernel at a time."""
        rows, _, _, channels = context.shape
        (height, width), (size_down, size_right) = context.grid, context.size
        (down, right), (further_down, further_right) = context.geometry
        patches = gradients[0][..., : size_down * size_right * channels]
        patches = patches.reshape(rows, height, width, size_down, size_right, channels)
        (patches,) = _wide(_PAIRS, patches)  # complex numbers are added part by part
        image = patches.new_zeros(*context.shape[:3], patches.shape[-1])
        for i in range(size_down):
            for j in range(size_right):
                top, left = i * further_down, j * further_right
                place = image[:, top : top + down * height : down, left : left + right * width : right]
                place.add_(patches[:, :, :, i, j])
        return image.view(gradients[0].dtype), None, None, None, None, None


def _wide(types: Sequence[tuple[torch.dtype, torch.dtype, int]], *views: Tensor) -> tuple[Tensor, ...]:
    """View numbers that lie side by side as fewer, wider ones: what is moved number by number moves so much faster."""
    steps = [step for view in views for step in (view.shape[-1], view.storage_offset(), *view.stride()[:-1])]
    for narrow, wide, times in types:
        dense = all(view.dtype is narrow and view.stride(-1) == 1 for view in views)
        if dense and all(step % times == 0 for step in steps):
            return tuple(view.view(wide) for view in views)
    return views


def _patches(layer: nn.Conv1d | nn.Conv2d, image: Tensor, *, biased: bool) -> Tensor:
    """Return the patches of images [R, C, H, W].

    On a GPU a one follows each, which the bias is multiplied by, and zeros up to where its fast products begin.
    """
    last = image.permute(0, 2, 3, 1)
    top, bottom, left, right = _borders(layer)
    if top or bottom or left or right:
        last = functional.pad(last, (0, 0, left, right, top, bottom))
    ones = int(biased and _on_gpu(image))
    zeros = -(layer.weight[0].numel() + ones) % 4 if _on_gpu(image) else 0
    what = last, _size(layer), _geometry(layer), _grid(layer, image), ones, zeros
    patches: Tensor = _Patches.apply(*what)  # type: ignore[no-untyped-call]
    return patches


def _grid(layer: nn.Conv1d | nn.Conv2d, image: Tensor) -> tuple[int, int]:
    """Return the height and width of the grid that patches are taken at, which are those of the outputs."""
    (down, right), (further_down, further_right) = _geometry(layer)
    top, bottom, left, beside = _borders(layer)
    height, width = _size(layer)
    return (
        (image.shape[2] + top + bottom - further_down * (height - 1) - 1) // down + 1,
        (image.shape[3] + left + beside - further_right * (width - 1) - 1) // right + 1,
    )


def _size(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, int]:
    """Return the height and width of the kernel."""
    height, width = (1, *layer.kernel_size)[-2:]
    return height, width


def _geometry(layer: nn.Conv1d | nn.Conv2d) -> _Pairs:
    """Return stride and dilation, each down and to the right."""
    stride, dilation = (1, *layer.stride)[-2:], (1, *layer.dilation)[-2:]
    return (stride[0], stride[1]), (dilation[0], dilation[1])


def _borders(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, int, int, int]:
    """Return how many zeros go above, below, to the left and to the right."""
    borders = layer._reversed_padding_repeated_twice
    left, right = borders[0], borders[1]
    top, bottom = (borders[2], borders[3]) if len(borders) == 4 else (0, 0)
    return top, bottom, left, right


def _plain_padding(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, int]:
    top, bottom, left, right = _borders(layer)
    return (top, left) if (top, left) == (bottom, right) else (0, 0)


def _padded(layer: nn.Conv1d | nn.Conv2d, image: Tensor) -> Tensor:
    """Pad an image where its borders differ, which torch's convolution does not know."""
    top, bottom, left, right = _borders(layer)
    if (top, left) == (bottom, right):
        return image
    return _channels_last(functional.pad(image, (left, right, top, bottom)))
