"""The gradients of a batch's records in one layer: their norms and their weighted sum, with as little formed as can be.

Each class holds what a kind of layer left behind in one backward pass over R records, client after client. A norm is
returned as its power (Σ|g|, or Σg²), so that layers add up. Gradients that are formed are summed as they were measured:
whatever rounding did to them, their clipped sum keeps the bound. Only a product of two vectors is measured without
being formed, and none of its numbers is a sum, so that nothing in it cancels.

How far rounding can carry a norm or a sum is counted in units u of the numbers' own precision (`dpfl.gradients.layered`
leaves room for 128 of them): a sum of a row errs by at most 70·u, its root by half of that.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpfl.orders import Norm

_PIECE = 512
_LONG = 2**16
_SLENDER = 4096
# More than what squares and products lose below the smallest number: a norm is a tiny bit too large, never too small.
_TINY = {torch.float32: 1e-35, torch.float64: 1e-300}


class RecordGradients(Protocol):
    """The gradients of R records in the parameters of one layer."""

    def powers(self, norm: Norm) -> list[Tensor]:
        """Return summands [R] of Σ|g| or Σg² of each record, and keep what was formed for that."""

    def form(self) -> dict[str, Tensor]:
        """Return each record's gradient by parameter, [R, ...]."""

    def weighted_sum(self, weights: Tensor | None, clients: int) -> dict[str, Tensor]:
        """Return Σ_r weights[r]·g_r of each client by parameter, [clients, ...]; R/clients records belong to each.

        weights: [R]; None where all are one.
        """

    def without(self, rows: Tensor) -> "RecordGradients":
        """Return the same, measured as it was, with the gradients at these rows [R] zero, whatever they were."""

    def doubled(self) -> "RecordGradients":
        """Return the same in double precision, not measured yet."""


@dataclass
class Formed:
    """Gradients as they are: for parameters so few that nothing is gained by other ways."""

    gradients: dict[str, Tensor]  # [R, ...] by parameter

    def powers(self, norm: Norm) -> list[Tensor]:
        """Return one for each parameter."""
        return [powers(gradient.flatten(1), norm) for gradient in self.gradients.values()]

    def form(self) -> dict[str, Tensor]:
        """Return them."""
        return self.gradients

    def weighted_sum(self, weights: Tensor | None, clients: int) -> dict[str, Tensor]:
        """Add up with one small matrix product for each client."""
        return {part: sum_rows(gradient, weights, clients) for part, gradient in self.gradients.items()}

    def without(self, rows: Tensor) -> "Formed":
        """Zero the rows."""
        return Formed({part: silenced(gradient, rows) for part, gradient in self.gradients.items()})

    def doubled(self) -> "Formed":
        """Convert them."""
        return Formed({part: gradient.double() for part, gradient in self.gradients.items()})


class Products:
    """Gradients Σ_t δ_t·a_tᵀ of weights and Σ_t δ_t of biases, over the positions t of a record (words, pixels).

    With one position the norm is a product too, ‖δ‖·‖a‖ in L1 as in L2, and the weighted sum one matrix product: no
    gradient is ever formed. With more of them terms may cancel, so gradients are formed to be measured, and then added.
    """

    def __init__(self, inputs: Tensor, deltas: Tensor, *, biased: bool) -> None:
        """Take inputs a [R, T, in] and deltas δ [R, T, out], the derivatives of each record's loss by the outputs."""
        self.inputs, self.deltas, self.biased = inputs, deltas, biased
        self.input_powers: Tensor | None = None  # of each record's inputs [R], where they are known
        self._formed: Formed | None = None

    def powers(self, norm: Norm) -> list[Tensor]:
        """Multiply powers, where a record has one position; a bias is a weight whose input is 1.

        Inputs that are huge are said to be infinite: what they are multiplied by may have lost its last bits.
        """
        if self.inputs.shape[1] > 1:
            self._formed = Formed(self.form())
            return self._formed.powers(norm)
        known, dtype = self.input_powers, self.deltas.dtype
        inputs = powers(self.inputs[:, 0], norm) if known is None else known
        inputs = inputs.masked_fill(inputs > torch.finfo(dtype).max ** (0.4 * norm), torch.inf)
        return [powers(self.deltas[:, 0], norm) * (inputs + self.biased) + _TINY[dtype]]

    @property
    def _is_slender(self) -> bool:
        """Tell whether a GPU multiplies faster record by record: a few sums, over very many positions."""
        _, positions, width = self.inputs.shape
        return self.inputs.is_cuda and positions > 64 and width * self.deltas.shape[-1] <= _SLENDER

    def form(self) -> dict[str, Tensor]:
        """Multiply record by record."""
        weight = {"weight": torch.bmm(self.deltas.mT, self.inputs)}
        return weight | {"bias": self.deltas.sum(dim=1)} if self.biased else weight

    def weighted_sum(self, weights: Tensor | None, clients: int) -> dict[str, Tensor]:
        """Add formed gradients, or multiply all records of a client at once."""
        if self._formed is not None:
            return self._formed.weighted_sum(weights, clients)
        if self._is_slender:
            return Formed(self.form()).weighted_sum(weights, clients)
        scaled = weigh(self.deltas, weights).reshape(clients, -1, self.deltas.shape[-1])
        inputs = self.inputs.reshape(clients, -1, self.inputs.shape[-1])
        total = {"weight": scaled[0].T.mm(inputs[0])[None] if clients == 1 else torch.bmm(scaled.mT, inputs)}
        if not self.biased:
            return total
        one_row = weights is not None and self.deltas.shape[1] == 1
        return total | {"bias": sum_rows(self.deltas[:, 0], weights, clients) if one_row else scaled.sum(dim=1)}

    def without(self, rows: Tensor) -> "Products":
        """Zero both factors: zero times infinity is no zero."""
        rest = Products(silenced(self.inputs, rows), silenced(self.deltas, rows), biased=self.biased)
        rest._formed = self._formed and self._formed.without(rows)
        return rest

    def doubled(self) -> "Products":
        """Convert both factors."""
        return Products(self.inputs.double(), self.deltas.double(), biased=self.biased)


@dataclass
class Lookups:
    """Gradients of a table of which each record looked up T rows: δ_t at row i_t."""

    indices: Tensor  # [R, T]
    deltas: Tensor  # [R, T, width]
    rows: int  # of the table
    measured: bool = False  # whether rows that a record looked up several times are added up, at the first of them

    def powers(self, norm: Norm) -> list[Tensor]:
        """Add up rows that a record looked up several times, u_t = Σ_s δ_s over i_s = i_t, and count each row once.

        The sums are kept: added in another order, where much of them cancels, they would be other numbers.
        """
        same = self.indices[:, :, None] == self.indices[:, None, :]
        again = same.tril(-1).any(dim=2)
        self.deltas = torch.bmm(same.to(self.deltas.dtype), self.deltas).masked_fill(again[:, :, None], 0)
        self.measured = True
        return [powers(self.deltas.flatten(1), norm)]

    def form(self) -> dict[str, Tensor]:
        """Write each record's rows into a table of its own."""
        records, _, width = self.deltas.shape
        tables = self.deltas.new_zeros(records, self.rows, width)
        index = self.indices[:, :, None].expand_as(self.deltas)
        return {"weight": tables.scatter_add(1, index, self.deltas)}

    def weighted_sum(self, weights: Tensor | None, clients: int) -> dict[str, Tensor]:
        """Write the records of each client into one table."""
        width = self.deltas.shape[-1]
        scaled = weigh(self.deltas, weights).reshape(clients, -1, width)
        index = self.indices.reshape(clients, -1, 1).expand_as(scaled)
        return {"weight": self.deltas.new_zeros(clients, self.rows, width).scatter_add(1, index, scaled)}

    def without(self, rows: Tensor) -> "Lookups":
        """Zero what would be written."""
        return Lookups(self.indices, silenced(self.deltas, rows), self.rows, self.measured)

    def doubled(self) -> "Lookups":
        """Convert what would be written."""
        return Lookups(self.indices, self.deltas.double(), self.rows)


def powers(rows: Tensor, norm: Norm) -> Tensor:
    """Return Σ|x|, or Σx², of each row of [R, n], in the precision of the rows.

    Squares in single precision overflow or vanish where numbers are huge or tiny, and a huge input times a tiny
    derivative is a gradient like any other. So Σx² is infinite above 1e38, which nobody will take for a norm, and a
    tiny bit too large, which makes a gradient longer than it is and never shorter. Whoever must know doubles the rows.
    """
    if rows.shape[1] > _LONG and rows.is_cuda:  # whose threads would add too many numbers one after the other
        rows = rows.double()
    if norm == 1:
        return rows.abs().sum(dim=1)
    return _squares(rows).add_(_TINY[rows.dtype])


def _squares(rows: Tensor) -> Tensor:
    """Return Σx² of each row, by vector_norm() where it is exact: it is three times faster than squaring and adding.

    On the CPU it adds in lanes, of which there are eight or more, one number after the other, so that errors grow with
    the length of a row. Rows of at most 512 numbers, or pieces of so many, keep them below 70·u.
    """
    width = rows.shape[1]
    short = width <= _PIECE or rows.device.type != "cpu"
    if not short and (width % _PIECE or not rows.is_contiguous()):
        return rows.square().sum(dim=1)
    pieces = rows if short else rows.view(len(rows), -1, _PIECE)
    norms: Tensor = torch.linalg.vector_norm(pieces, dim=-1)
    return norms.square() if short else norms.square().sum(dim=1)


def weigh(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Return each row of [R, ...] times its weight."""
    return rows if weights is None else rows * weights.view(-1, *[1] * (rows.ndim - 1))


def sum_rows(gradient: Tensor, weights: Tensor | None, clients: int) -> Tensor:
    """Return Σ_r weights[r]·gradient[r] of each client: [clients, ...] of [R, ...]."""
    rows = gradient.reshape(clients, len(gradient) // clients, -1)
    if weights is None:
        return rows.sum(dim=1).view(clients, *gradient.shape[1:])
    return torch.bmm(weights.reshape(clients, 1, -1), rows).view(clients, *gradient.shape[1:])


def silenced(value: Tensor, rows: Tensor) -> Tensor:
    """Return `value` [R, ...] with zeros at these rows; multiplying by zero would not silence a NaN."""
    return value.masked_fill(rows.view(-1, *[1] * (value.ndim - 1)), 0)
