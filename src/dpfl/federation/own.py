"""A user's own data: arrays, tensors, or any map-style torch data set of (features, target) pairs.

Values are taken as they are: whoever wants them scaled scales them, with numbers that are public. Only shapes and types
are looked at here, which are the caller's; `federate` knows which records are public and can be judged by their values.
"""

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dpfl.errors import BadInput
from dpfl.federation.facts import classes_of
from dpfl.federation.records import Dataset, Records

Array = ArrayLike | Tensor
Item = tuple[Tensor, Tensor]  # features and target
Kind = tuple[torch.Size, torch.Size, torch.dtype]  # shapes of features and target, and the target's type


def from_arrays(
    x: Array,
    y: Array,
    *,
    test: tuple[Array, Array] | None = None,
    classes: int | None = None,
    name: str = "own arrays",
) -> Dataset:
    """Make a data set of features `x` [n, ...] and targets `y` [n].

    Whole-number targets are class labels 0..C-1, floating-point targets are for regression. Without `test`
    the test split stays empty and `federate` cuts one off. `classes` is how many classes there are; if left out,
    `federate` counts the labels of the public records, since labels of private ones must decide nothing.

    >>> from_arrays([[0.0], [1.0], [2.0]], [0, 1, 1], classes=2).classes
    2
    """
    pool = _records(x, y, "data")
    held_out = _records(*test, "data (its test part)") if test is not None else pool.take(torch.arange(0))
    if held_out.x.shape[1:] != pool.x.shape[1:] or held_out.y.dtype != pool.y.dtype:
        raise BadInput(
            f"data (its test part) must look like the rest, with features of shape {_shape(pool)} and "
            f"targets of type {pool.y.dtype}, had {_shape(held_out)} and {held_out.y.dtype}; prepare both in "
            f"the same way"
        )
    if classes is not None:
        classes_of(classes, [pool.y])
    return Dataset(name, pool, held_out, classes, f"{name}, {len(pool):,} + {len(held_out):,} records")


def from_torch(dataset: Any, *, test: Any = None, classes: int | None = None, name: str = "own data set") -> Dataset:
    """Make a data set of a map-style torch data set that yields (features, target) pairs of one shape.

    Shape and type are those of `test`, whose items are public and must be sound; without it they are those of most
    items. An item that cannot be read, or has others, becomes a record that counts as zero where it is private.
    """
    if test is None:
        items = _items(dataset)
        return from_arrays(*_stack(items, _usual(items)), classes=classes, name=name)
    public = _items(test)
    kind = _usual(public)
    return from_arrays(*_stack(_items(dataset), kind), test=_stack(public, kind), classes=classes, name=name)


def as_records(data: Any, field: str) -> Records:
    """Make records of a pair of arrays, or of a map-style torch data set."""
    if isinstance(data, tuple) and len(data) == 2:
        return _records(*data, field)
    items = _items(data, field)
    return _records(*_stack(items, _usual(items)), field)


def _items(dataset: Any, field: str = "data") -> list[Item | None]:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise BadInput(
            f"{field} must be a map-style data set, with a length and items by number, was "
            f"{type(dataset).__name__!r}; give a list of its (features, target) pairs instead"
        )
    items = [_item(dataset, i) for i in range(len(dataset))]
    if not items:
        raise BadInput(f"{field} must have at least one record, had none; check how it was selected")
    return items


def _kind(item: Item) -> Kind:
    features, target = item
    return features.shape, target.shape, target.dtype


def _usual(items: list[Item | None]) -> Kind:
    """Return shapes and type of more than half of the items: one of them changes it only where it tips the balance."""
    ((usual, count),) = Counter(None if item is None else _kind(item) for item in items).most_common(1)
    if usual is None or 2 * count <= len(items):
        raise BadInput(
            "data must yield (features, target) pairs of numbers that all have one shape, did not;"
            " add a transform that turns each item into such a pair"
        )
    return usual


def _stack(items: list[Item | None], kind: Kind) -> tuple[Tensor, Tensor]:
    """Stack items of one kind; any other becomes a record that cannot be computed."""
    shape, target_shape, dtype = kind
    blank = torch.full(shape, math.nan), torch.full(target_shape, math.nan if dtype.is_floating_point else -1).to(dtype)
    x, y = zip(*(blank if item is None or _kind(item) != kind else item for item in items), strict=True)
    return torch.stack(x), torch.stack(y)


def _item(dataset: Any, number: int) -> Item | None:
    """Read one item; None where that fails, in whatever way: an error would tell of the record, and may quote it."""
    try:
        features, target = dataset[number]
        return _tensor(features, "data features").float(), _target(_tensor(target, "data targets"))
    except Exception:
        return None


def _records(x: Array, y: Array, field: str) -> Records:
    features, targets = _tensor(x, f"{field} features"), _tensor(y, f"{field} targets")
    if targets.ndim != 1 or features.ndim < 2:
        raise BadInput(
            f"{field} must have features of shape [n, ...] and targets of shape [n], had "
            f"{list(features.shape)} and {list(targets.shape)}; reshape them"
        )
    if len(features) != len(targets):
        raise BadInput(
            f"{field} must have one target for each record, had {len(features)} records and {len(targets)} "
            f"targets; check how they were selected"
        )
    if len(features) == 0:
        raise BadInput(f"{field} must have at least one record, had none; check how it was selected")
    return Records(features.float(), _target(targets))


def _target(values: Tensor) -> Tensor:
    return values.float() if values.is_floating_point() else values.long()


def _tensor(values: Array, field: str) -> Tensor:
    tensor = _converted(values)
    if isinstance(tensor, str):
        raise BadInput(f"{field} must be an array of numbers, was {type(values).__name__!r} ({tensor}); convert them")
    if tensor.is_complex():
        raise BadInput(f"{field} must be real numbers, were {tensor.dtype}; convert them")
    return tensor


def _converted(values: Array) -> Tensor | str:
    """Return values as a tensor, or the kind of error that they ended in: what it says may quote one of them."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        # np.array copies: torch cannot use read-only memory, and later changes by the caller stay outside.
        return torch.from_numpy(np.array(values))
    except Exception as problem:
        return type(problem).__name__


def _shape(records: Records) -> list[int]:
    return list(records.x.shape[1:])
