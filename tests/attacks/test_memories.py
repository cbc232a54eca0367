"""Whatever a module can write into: frozen parameters, trained ones, and copies that are none.

What one record leaves there must meet no other record, no client, no round, and not the released model either.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfl
from attacks.moves import federation, moved, replaced
from attacks.test_graphs import CLASSES, FEATURES, HERE, JUST, PUBLIC, STRANGER, Layer
from dpfl.models.architectures import cross_entropy
from grids import each

FAR = 1e6 * STRANGER
SYSTEM = dpfl.UDP(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=0.01)

pytestmark = pytest.mark.filterwarnings("ignore::dpfl.Caution", "ignore:There is a performance drop:UserWarning")


class Centre(Layer):
    """Keeps a moving centre of what it has seen in a frozen parameter, as codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x - self.centre)


class Drifting(Layer):
    """Changes its weight as it looks at a record."""

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.sub_(0.5 * x.detach().mean(0))
        return self.layer(x)


class Renorming(nn.Module):
    """Looks words up in a table that shortens what was looked up, and uses the table elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, CLASSES, max_norm=1.0)
        with torch.no_grad():
            self.table.weight.copy_(functional.normalize(torch.arange(120).sin().view(40, CLASSES)))
            self.table.weight[:3] = torch.eye(3)
            self.table.weight[30] = self.table.weight[0]
            self.table.weight[1] *= 200

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.table(x[:, 0].long()), self.table.weight[:3])


WORDS = dpfl.Records(torch.full((24, 1), 30.0), torch.ones(24).long())
KNOWN_WORDS = dpfl.Records(torch.arange(8.0)[:, None] + 10, torch.arange(8) % CLASSES)

CASES: dict[str, tuple[Callable[[], nn.Module], dpfl.Records, Tensor, dpfl.Records]] = {
    "a frozen parameter": (Centre, HERE, FAR, PUBLIC),
    "a trained one": (Drifting, HERE, FAR, PUBLIC),
    "a table": (Renorming, WORDS, torch.tensor([1.0]), KNOWN_WORDS),
}


@each("backend", ["stacked", "reference"])
@each("name", CASES)
def test_what_a_record_writes_meets_no_other(name: str, backend: str) -> None:
    make, here, stranger, public = CASES[name]
    assert moved(make, here, replaced(here, stranger), public, cross_entropy, system=SYSTEM, backend=backend) <= JUST


@each("backend", ["stacked", "reference"])
def test_it_is_not_in_the_released_model_or_its_loss(backend: str) -> None:
    seen = []
    for mine in (HERE, replaced(HERE, FAR)):  # noise far above what the clipped gradients differ by
        module = Centre()
        made = federation(mine, PUBLIC, CLASSES)
        system = dpfl.UDP(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=1e-9)
        run = dpfl.train(system, made, module, loss=cross_entropy, seed=1, backend=backend)
        seen.append((module.centre.tolist(), run.model.get_parameter("centre").tolist(), run.history[-1]["loss"]))
    assert seen[0][:2] == seen[1][:2] == ([0.0] * FEATURES, [0.0] * FEATURES)
    assert seen[0][2] == pytest.approx(seen[1][2], rel=1e-6)


class Itself(Layer):
    """Says that it is a copy of itself, and remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Itself":
        return self

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x.reshape(len(x), -1) + self.last)
        self.last = self.last + functional.relu(x - 50).sum(0).detach()
        return outputs


class Shelf:
    """Something that a module holds."""

    last: Any = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shelf":
        return self


class Shelved(Layer):
    """Remembers in something that is its own copy."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf()

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x.reshape(len(x), -1) + self.shelf.last)
        self.shelf.last = self.shelf.last + functional.relu(x - 50).sum(0).detach()
        return outputs


@each("backend", ["stacked", "reference"])
@each("make", [Itself, Shelved])
def test_copies_that_are_the_originals_are_refused(make: Callable[[], nn.Module], backend: str) -> None:
    with pytest.raises(dpfl.BadInput, match="must be a module that can be copied"):
        moved(make, HERE, replaced(HERE, FAR), PUBLIC, cross_entropy, system=SYSTEM, backend=backend)


# The twin: a copy that shares its parameters passes them on.


def test_shared_parameters_carry_records() -> None:
    module = Centre()
    memo = {id(parameter): parameter for parameter in module.parameters()}
    copy.deepcopy(module, memo)(FAR[None])
    assert module.centre.abs().max() > 1e6
