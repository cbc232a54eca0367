"""How far one record moves an upload, in units of the certified sensitivity: two neighbours under one seed, subtracted.

Under one seed both trainings draw the same noise, so that the difference of their uploads is that of their signals.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dpfl
from dpfl.orders import Norm, sensitivity

Loss = Callable[[Tensor, Tensor], Tensor]


def federation(mine: dpfl.Records, public: dpfl.Records, classes: int | None) -> dpfl.Federation:
    """Make two clients, of which the first holds these records, and the other the public ones."""
    return dpfl.Federation(
        name="made up", clients=(mine, public), validation=public, test=public, classes=classes, source="made up"
    )


def first_uploads(
    system: dpfl.System, made: dpfl.Federation, module: nn.Module, loss: Loss, **options: Any
) -> list[Tensor]:
    """Return what the first client uploads, round by round."""
    seen: list[Tensor] = []
    dpfl.train(
        system, made, module, loss=loss, seed=1, on_uploads=lambda _, sent: seen.append(sent[0].double()), **options
    )
    return seen


def moved(
    make: Callable[[], nn.Module],
    here: dpfl.Records,
    there: dpfl.Records,
    public: dpfl.Records,
    loss: Loss,
    *,
    system: Any = None,
    norm: Norm = 2,
    **options: Any,
) -> float:
    """Return by how many times its certified sensitivity the first upload differs between two neighbours."""
    system = system or dpfl.UDP(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=1.0)
    classes = None if here.y.is_floating_point() else int(public.y.max()) + 1
    one, other = (
        first_uploads(system, federation(mine, public, classes), make(), loss, **options)[0] for mine in (here, there)
    )
    order = dpfl.Order(
        steps=1, learning_rate=system.lr, clip=dpfl.RecordClip(system.clip, norm), noise=dpfl.Gaussian(1.0)
    )
    bound = sensitivity(order, records=len(here), unit="record", neighbours="replace", norm=norm)
    return torch.linalg.vector_norm(one - other, ord=norm).item() / bound


def replaced(records: dpfl.Records, x: Tensor, y: Tensor | None = None, row: int = 0) -> dpfl.Records:
    """Return the same records but for one."""
    columns, labels = records.x.clone(), records.y.clone()
    columns[row] = x
    if y is not None:
        labels[row] = y
    return dpfl.Records(columns, labels)
