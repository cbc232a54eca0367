"""The kinds of layers whose records' gradients are known without forming them one by one.

A kind runs a layer over R records under parameters that are handed in: one set for all records ([...] as the layer has
them), or one for each client ([k, ...], and R/k records belong to each). It says what is to be kept of the pass, and
makes the records' gradients of that and of the derivatives δ by the layer's outputs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfl.gradients.convolution import Convolved, as_image, convolve
from dpfl.gradients.record_gradients import Formed, Lookups, Products, RecordGradients

Parameters = Mapping[str, Tensor]  # by parameter: "weight", "bias"


class Pass(NamedTuple):
    """What a layer should know about the pass."""

    apart: bool  # whether gradients will be asked for client by client, or record by record
    measured: bool  # whether norms will be, record by record
    forgiving: bool  # whether a record that cannot be computed makes numbers that are none, and no error
    recall: dict[str, Tensor] | None  # where a layer that sees the records may remember what it made of them


class Kind(Protocol):
    """One kind of layer."""

    def fits(self, layer: Any) -> bool:
        """Tell whether the layer does nothing that is not done here."""

    def run(self, layer: Any, x: Tensor, parameters: Parameters, this: Pass) -> tuple[Tensor, Tensor]:
        """Return what is to be kept and the outputs [R, ...]."""

    def gradients(self, layer: Any, kept: Tensor, deltas: Tensor, *, biased: bool) -> RecordGradients:
        """Return the gradients of the records."""

    def formed(self, layer: Any, kept: Tensor) -> int:
        """Return how many numbers are formed for each record when its gradient is measured."""


class Linear:
    """z = W·a + b, for one row a record or several."""

    def fits(self, layer: nn.Linear) -> bool:
        """Take every linear layer."""
        return True

    def run(self, layer: nn.Linear, x: Tensor, parameters: Parameters, this: Pass) -> tuple[Tensor, Tensor]:
        """Multiply all rows by one matrix, or those of each client by its own."""
        weight, bias = parameters["weight"], parameters.get("bias")
        if weight.ndim == 2:
            return x, functional.linear(x, weight, bias)
        rows = x.reshape(len(weight), -1, x.shape[-1])
        product = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
        return x, product.view(*x.shape[:-1], weight.shape[1])

    def gradients(self, layer: nn.Linear, kept: Tensor, deltas: Tensor, *, biased: bool) -> RecordGradients:
        """Pair inputs and derivatives, position by position."""
        positions = (len(kept), -1)
        inputs, deltas = kept.reshape(*positions, kept.shape[-1]), deltas.reshape(*positions, deltas.shape[-1])
        return Products(inputs, deltas, biased=biased)

    def formed(self, layer: nn.Linear, kept: Tensor) -> int:
        """Form nothing, where a record has one row."""
        return layer.weight.numel() if kept.ndim > 2 else 0


class Convolution:
    """A convolution over one or two dimensions: a linear layer over the patches of the image."""

    def fits(self, layer: nn.Conv1d | nn.Conv2d) -> bool:
        """Take those whose channels are all connected and whose borders are zeros."""
        return layer.groups == 1 and layer.padding_mode == "zeros"

    def run(self, layer: nn.Conv1d | nn.Conv2d, x: Tensor, parameters: Parameters, this: Pass) -> tuple[Tensor, Tensor]:
        """Convolve the image."""
        if x.ndim == layer.weight.ndim - 1:  # one image without a batch: no rows of records
            raise ValueError("a convolution needs records")
        weight, bias = parameters["weight"], parameters.get("bias")
        kept, outputs = convolve(
            layer, as_image(x), weight, bias, apart=this.apart, measured=this.measured, recall=this.recall
        )
        return kept, outputs.squeeze(2) if x.ndim == 3 else outputs

    def gradients(self, layer: nn.Conv1d | nn.Conv2d, kept: Tensor, deltas: Tensor, *, biased: bool) -> RecordGradients:
        """Pair patches and derivatives, pixel by pixel."""
        return Convolved(layer, kept, as_image(deltas), biased=biased)

    def formed(self, layer: nn.Conv1d | nn.Conv2d, kept: Tensor) -> int:
        """Form the patches, where they are not kept already, and the gradient."""
        patches = kept[0].numel() * layer.weight[0, 0].numel() if kept.ndim == 4 else 0
        return layer.weight.numel() + patches


class Normalisation:
    """z = γ·x̂ + β, where x̂ is normalised within the record: by group or by layer."""

    def fits(self, layer: nn.GroupNorm | nn.LayerNorm) -> bool:
        """Take every one that has parameters."""
        return layer.weight is not None

    def run(
        self, layer: nn.GroupNorm | nn.LayerNorm, x: Tensor, parameters: Parameters, this: Pass
    ) -> tuple[Tensor, Tensor]:
        """Normalise, scale and shift."""
        if isinstance(layer, nn.GroupNorm):
            normal = functional.group_norm(x, layer.num_groups, eps=layer.eps)
        else:
            normal = functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        weight, bias = (self._spread(layer, part, x) for part in (parameters["weight"], parameters.get("bias")))
        assert weight is not None
        return normal, normal * weight if bias is None else normal * weight + bias

    def _spread(self, layer: nn.GroupNorm | nn.LayerNorm, part: Tensor | None, x: Tensor) -> Tensor | None:
        """View a parameter so that it meets its place in [R, ...]."""
        if part is None:
            return None
        own = part.ndim > layer.weight.ndim
        if own:  # [k, ...] → [R, ...]
            part = part.repeat_interleave(len(x) // len(part), dim=0)
        if isinstance(layer, nn.GroupNorm):
            return part.view(*part.shape, *[1] * (x.ndim - 2))
        middle = [1] * (x.ndim - 1 - layer.weight.ndim)
        return part.view(len(x), *middle, *layer.weight.shape) if own else part

    def gradients(
        self, layer: nn.GroupNorm | nn.LayerNorm, kept: Tensor, deltas: Tensor, *, biased: bool
    ) -> RecordGradients:
        """Form them: they are as few as the parameters."""
        parts = {"weight": deltas * kept} | ({"bias": deltas} if biased else {})
        if isinstance(layer, nn.GroupNorm):
            return Formed({name: part.flatten(2).sum(dim=2) if part.ndim > 2 else part for name, part in parts.items()})
        shape = layer.weight.shape
        return Formed({name: part.reshape(len(part), -1, *shape).sum(dim=1) for name, part in parts.items()})

    def formed(self, layer: nn.GroupNorm | nn.LayerNorm, kept: Tensor) -> int:
        """Form γ's and β's."""
        return 2 * layer.weight.numel()


class Embedding:
    """z = W[i]: rows of a table."""

    def fits(self, layer: nn.Embedding) -> bool:
        """Take those that neither change their table as they go nor weigh by how often a row was looked up."""
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse

    def run(self, layer: nn.Embedding, x: Tensor, parameters: Parameters, this: Pass) -> tuple[Tensor, Tensor]:
        """Look up, each client in its own table where there are several."""
        table = parameters["weight"]
        indices, absent = known_rows(x, table.shape[-2]) if this.forgiving else (x, None)
        if table.ndim == 2:
            found = functional.embedding(indices, table)
        else:
            clients, rows, width = table.shape
            first = rows * torch.arange(clients, device=x.device).view(-1, *[1] * x.ndim)
            places = indices.view(clients, len(x) // clients, *x.shape[1:]) + first
            found = functional.embedding(places.view(x.shape), table.reshape(clients * rows, width))
        return indices, found if absent is None else found.masked_fill(absent, torch.nan)

    def gradients(self, layer: nn.Embedding, kept: Tensor, deltas: Tensor, *, biased: bool) -> RecordGradients:
        """Pair indices and derivatives; the row for padding learns nothing."""
        indices, deltas = kept.reshape(len(kept), -1), deltas.reshape(len(kept), -1, deltas.shape[-1])
        if layer.padding_idx is not None:
            deltas = deltas.masked_fill((indices == layer.padding_idx)[:, :, None], 0)
        return Lookups(indices, deltas, layer.num_embeddings)

    def formed(self, layer: nn.Embedding, kept: Tensor) -> int:
        """Form the sums of rows that were looked up several times."""
        positions = kept[0].numel()
        return positions * (positions + layer.embedding_dim)


def known_rows(indices: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the indices with zeros in place of those that a table of so many rows has not, and where these are.

    A GPU that is asked for one of them stops the whole process.
    """
    absent = (indices < 0) | (indices >= rows)
    return indices.masked_fill(absent, 0), absent[..., None]


KINDS: dict[type[nn.Module], Kind] = {
    nn.Linear: Linear(),
    nn.Conv1d: Convolution(),
    nn.Conv2d: Convolution(),
    nn.GroupNorm: Normalisation(),
    nn.LayerNorm: Normalisation(),
    nn.Embedding: Embedding(),
}


def kind_of(layer: nn.Module) -> Kind | None:
    """Return the kind of exactly this type of layer, or None: a subclass may do anything."""
    kind = KINDS.get(type(layer))
    return kind if kind is not None and kind.fits(layer) else None
