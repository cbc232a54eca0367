"""A user's own data: arrays, tensors, or any map-style torch data set of (features, target) pairs.

Values are taken as they are: whoever wants them scaled scales them, with numbers that are public.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dpfl.errors import BadInput, require_count
from dpfl.federation.records import Dataset, Records

Array = ArrayLike | Tensor


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
    the test split stays empty and `federate` cuts one off. `classes` is needed only where some label has no
    record.

    >>> from_arrays([[0.0], [1.0], [2.0]], [0, 1, 1]).classes
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
    found = _count_classes(torch.cat([pool.y, held_out.y]), classes)
    return Dataset(name, pool, held_out, found, f"{name}, {len(pool):,} + {len(held_out):,} records")


def from_torch(dataset: Any, *, test: Any = None, classes: int | None = None, name: str = "own data set") -> Dataset:
    """Make a data set of a map-style torch data set that yields (features, target) pairs of one shape."""
    x, y = _stack(dataset)
    return from_arrays(x, y, test=None if test is None else _stack(test), classes=classes, name=name)


def _stack(dataset: Any) -> tuple[Tensor, Tensor]:
    try:
        pairs = [dataset[i] for i in range(len(dataset))]
    except TypeError as problem:
        raise BadInput(
            f"data must be a map-style data set, with a length and items by number, was "
            f"{type(dataset).__name__!r} ({problem}); give a list of its (features, target) pairs instead"
        ) from problem
    if not pairs:
        raise BadInput("data must have at least one record, had none; check how it was selected")
    try:
        features, targets = zip(*pairs, strict=True)
        x = torch.stack([_tensor(one, "data features") for one in features])
        return x, torch.stack([_tensor(one, "data targets") for one in targets])
    except (TypeError, ValueError, RuntimeError) as problem:
        raise BadInput(
            f"data must yield (features, target) pairs of tensors that all have one shape, did not "
            f"({problem}); add a transform that turns each item into such a pair"
        ) from problem


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
    features = features.float()
    targets = targets.float() if targets.is_floating_point() else targets.long()
    require_finite(features, f"{field} features", "drop or fill those records")
    require_finite(targets, f"{field} targets", "drop those records")
    return Records(features, targets)


def require_finite(values: Tensor, field: str, way_out: str) -> None:
    """Refuse values with NaN or infinity, and say in how many rows and where the first one is."""
    bad = ~torch.isfinite(values).reshape(len(values), -1).all(dim=1)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise BadInput(
            f"{field} must be finite, had NaN or infinity in {int(bad.sum())} of {len(bad)} rows, "
            f"first in row {first}; {way_out}"
        )


def _tensor(values: Array, field: str) -> Tensor:
    try:
        # np.array copies: torch cannot use read-only memory, and later changes by the caller stay outside.
        tensor = values.detach().cpu() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as problem:
        raise BadInput(f"{field} must be an array of numbers, was not ({problem}); convert them") from problem
    if tensor.is_complex():
        raise BadInput(f"{field} must be real numbers, were {tensor.dtype}; convert them")
    return tensor


def _count_classes(labels: Tensor, classes: int | None) -> int | None:
    if labels.is_floating_point():
        if classes is not None:
            raise BadInput(
                f"classes must be left out for floating-point targets, was {classes!r}; "
                f"leave it out for regression, or give whole-number labels"
            )
        return None
    present = np.unique(labels.numpy())
    low, high = int(present[0]), int(present[-1])
    if classes is None:
        if low != 0 or high + 1 != len(present):
            raise BadInput(
                f"data must have labels 0..C-1 with each of them present, had {len(present)} labels from "
                f"{low} to {high}; number them so, say how many there are with classes=, or make them float "
                f"for regression"
            )
        return high + 1
    require_count("classes", classes, "leave it out to count the labels")
    if low < 0 or high >= classes:
        raise BadInput(
            f"data must have labels 0..{classes - 1} for classes={classes}, had labels from {low} to {high}; "
            f"number them so, or raise classes"
        )
    return classes


def _shape(records: Records) -> list[int]:
    return list(records.x.shape[1:])
