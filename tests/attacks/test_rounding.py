"""Rounding before noise: how far a record moves an upload in single precision, beside what the certificate counts on.

Under one seed two trainings draw the same noise, so that the difference of their uploads is that of their signals. The
model stands at w = 10 and moves in steps far below what float32 tells apart there.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl.orders import sensitivity

RECORDS, COLUMNS = 4, 3


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


class Plain(nn.Module):
    """A linear model whose parameters are no layer's, so that it is not trained by layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((COLUMNS,), 10.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w)[:, None]


def layer() -> nn.Module:
    linear = nn.Linear(COLUMNS, 1, bias=False)
    nn.init.constant_(linear.weight, 10.0)
    return linear


def first_uploads(system: dpfl.System, module: nn.Module, other: float, backend: str) -> Tensor:
    targets = torch.zeros(RECORDS)
    targets[0] = other
    mine = dpfl.Records(torch.ones(RECORDS, COLUMNS), targets)
    public = dpfl.Records(torch.zeros(8, COLUMNS), torch.zeros(8))
    federation = dpfl.Federation(
        name="made up", clients=(mine, mine), validation=public, test=public, classes=None, source="made up"
    )
    seen: list[Tensor] = []
    dpfl.train(
        system, federation, module, loss=squared, seed=1, backend=backend,
        on_uploads=lambda _, sent: seen.append(sent[0].double()),
    )  # fmt: skip
    return seen[0]


RATE = 3e-8
SYSTEMS: dict[str, Any] = {
    "udp": dpfl.UDP(epsilon=2.0, delta=1e-2, rounds=1, lr=RATE),
    "nbafl": dpfl.NbAFL(epsilon=2.0, delta=1e-2, rounds=1, lr=RATE, clipping="record", local_steps=3),
    "pe-dpfl": dpfl.PEDPFL(epsilon=2.0, delta=1e-2, rounds=1, lr=RATE),
}


@pytest.mark.filterwarnings("ignore::dpfl.Caution")
@pytest.mark.parametrize("make", [layer, Plain], ids=["layers", "no layers"])
@pytest.mark.parametrize("backend", ["stacked", "reference"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_record_moves_an_upload_as_far_as_was_priced(name: str, backend: str, make: Callable[[], nn.Module]) -> None:
    system = SYSTEMS[name]
    here, there = (first_uploads(system, make(), other, backend) for other in (1e3, -1e3))
    moved = (here - there).norm().item()
    steps = system.local_steps if name == "nbafl" else 1
    order = dpfl.Order(steps=steps, learning_rate=RATE, clip=dpfl.RecordClip(system.clip), noise=dpfl.Gaussian(1.0))
    bound = sensitivity(order, records=RECORDS, unit="record", neighbours="replace", norm=2)
    assert 0 < moved <= bound * (1 + 1e-5)
    # The twin: the difference of two models in single precision, which is what an upload used to be.
    start = torch.full((COLUMNS,), 10.0)
    step = RATE * system.clip / math.sqrt(COLUMNS) * torch.ones(COLUMNS)
    twin = ((start - step * 20) - start) - ((start - step * 10) - start)
    assert twin.norm() > 2 * bound or twin.norm() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(dpfl.BadInput, match=r"model must have parameters of type float32 or float64, but 'weight' is"):
        first_uploads(SYSTEMS["udp"], layer().to(dtype), 1.0, "stacked")
