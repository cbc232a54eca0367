"""Noise of known values, for rounds that are worked out by hand."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from dpfl.federation import Records
from dpfl.orders import Gaussian, Laplace

Law = Gaussian | Laplace


def size_of(law: Law) -> float:
    return law.scale if isinstance(law, Laplace) else law.std


def switch_noise(
    monkeypatch: pytest.MonkeyPatch,
    vectors: Iterable[np.ndarray],
    *,
    at: str = "dpfl.clients.reference",
    noted: Callable[[Law], Any] = size_of,
) -> list[Any]:
    """Let the n-th noise that is added there be its size times the n-th vector; return what is noted of each."""
    turn, notes = iter(vectors), []

    def add(value: torch.Tensor, law: Law, rng: object) -> torch.Tensor:
        notes.append(noted(law))
        return value + size_of(law) * torch.from_numpy(next(turn))

    monkeypatch.setattr(f"{at}.add_noise", add)
    return notes


def records_of(rows: list, targets: torch.dtype = torch.float64) -> Records:
    x, y = zip(*rows, strict=True)
    return Records(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=targets))
