"""What `torch.func.vmap` shows a record of the others: tables that it reads past the end, and code made for batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

import dpfl
from attacks.moves import moved, replaced
from attacks.test_graphs import CLASSES, HERE, JUST, PUBLIC, STRANGER, Layer
from dpfl.models.architectures import cross_entropy
from grids import each

pytestmark = pytest.mark.filterwarnings("ignore::dpfl.Caution", "ignore:There is a performance drop:UserWarning")


class Mix(torch.autograd.Function):
    """Brings code for batches, which vmap calls."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x + 10 * functional.relu(x - 50).sum(0, keepdim=True), 0


class Mixing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(Mix.apply(x.reshape(len(x), -1)))


def mixing(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(Mix.apply(outputs), labels)


class Own(nn.Module):
    """Looks up in a table of the record's own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, CLASSES, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[1.0], [0.0], [-1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        at = x[:, 0].long() + 4 * torch.arange(len(x))
        return self.layer(functional.embedding(at, x[:, 1:].reshape(-1, 1)))


def of_own(count: int) -> dpfl.Records:
    x = torch.cat([torch.arange(count)[:, None] % 4, torch.ones(count, 4)], dim=1)
    return dpfl.Records(x, torch.arange(count) % CLASSES)


LOOKED_UP = of_own(12)
LOOKED_UP.x[:, 0] = 4 * (11 - torch.arange(12))
LOOKED_UP.y[:] = 0

CASES: dict[str, tuple[Callable[[], nn.Module], Any, dpfl.Records, Tensor, int, dpfl.Records]] = {
    "code for batches": (Mixing, cross_entropy, HERE, STRANGER, 0, PUBLIC),
    "a loss's code for batches": (Layer, mixing, HERE, 10 * STRANGER, 0, PUBLIC),
    "a table": (Own, cross_entropy, LOOKED_UP, torch.tensor([0.0, -1, -1, -1, -1]), 11, of_own(8)),
}


@each("backend", ["stacked", "reference"])
@each("name", CASES)
def test_no_record_is_shown_another(name: str, backend: str) -> None:
    make, loss, here, stranger, row, public = CASES[name]
    assert moved(make, here, replaced(here, stranger, row=row), public, loss, backend=backend) <= JUST


def test_vmap_reads_the_next_records_table() -> None:  # the twin
    tables = torch.arange(12.0).view(3, 4, 1)
    places = torch.tensor([[5], [0], [0]])
    past = vmap(lambda at, table: functional.embedding(at, table))(places, tables)
    assert past[0].item() == tables[1, 1].item()
