"""All clients' records in one tensor: where each one's lie, and what fills the gaps."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfl.clients.pool import Batch, Pool
from dpfl.federation import Records
from grids import each


def client(*values: float) -> Records:
    return Records(torch.tensor(values)[:, None], torch.tensor(values).long() % 10)


def pool() -> Pool:
    return Pool([client(1, 2), client(11, 12), client(21, 22, 23), client(31, 32)])


def found(pool: Pool, rows: slice | Tensor) -> list[float]:
    return pool.take(rows).x[:, 0].tolist()


def test_records_lie_one_after_the_other_before_a_row_of_zeros() -> None:
    whole = pool()
    assert (whole.sizes, whole.starts, whole.gap) == ([2, 2, 3, 2], [0, 2, 4, 7], 9)
    assert whole.x[:, 0].tolist() == [1, 2, 11, 12, 21, 22, 23, 31, 32, 0]
    assert whole.y.tolist() == [1, 2, 1, 2, 1, 2, 3, 1, 2, 0]
    assert whole.y.dtype == torch.int64


def test_neighbours_of_one_size_are_a_slice() -> None:
    rows, real = pool().whole([0, 1])
    assert isinstance(rows, slice)
    assert real is None
    assert found(pool(), rows) == [1, 2, 11, 12]
    assert pool().whole([2]) == Batch(slice(4, 7), None)


@each(("clients", "values"), [([0, 3], [1, 2, 31, 32]), ([1, 0], [11, 12, 1, 2]), ([3, 0, 1], [31, 32, 1, 2, 11, 12])])
def test_clients_of_one_size_have_no_gaps_wherever_they_are(clients: list[int], values: list[float]) -> None:
    rows, real = pool().whole(clients)
    assert real is None
    assert found(pool(), rows) == values


def test_clients_in_another_order_are_not_taken_for_neighbours() -> None:
    alike = Pool([client(1), client(2), client(3), client(4)])
    assert found(alike, alike.whole([0, 2, 1, 3]).rows) == [1, 3, 2, 4]
    assert found(alike, alike.whole([1, 2, 3]).rows) == [2, 3, 4]
    assert found(alike, alike.whole([0, 0, 3, 3]).rows) == [1, 1, 4, 4]  # as many as from the first to the last


@each(
    ("clients", "values", "reals"),
    [
        ([0, 2], [1, 2, 1, 21, 22, 23], [1, 1, 0, 1, 1, 1]),
        ([2, 3], [21, 22, 23, 31, 32, 31], [1, 1, 1, 1, 1, 0]),
        ([1, 2, 3], [11, 12, 11, 21, 22, 23, 31, 32, 31], [1, 1, 0, 1, 1, 1, 1, 1, 0]),
    ],
)
def test_smaller_clients_are_filled_up_with_records_of_their_own(
    clients: list[int], values: list[float], reals: list[float]
) -> None:
    rows, real = pool().whole(clients)
    assert found(pool(), rows) == values
    assert real is not None
    assert real.tolist() == reals
    assert pool().take(rows).y.tolist() == [int(value) % 10 for value in values]


def test_some_records_of_each_client_and_what_is_nobodys() -> None:
    rows, real = pool().some([2, 0, 3], [np.array([0, 2]), np.array([], dtype=np.int64), np.array([1])])
    assert found(pool(), rows) == [21, 23, 0, 0, 32, 0]
    assert real.tolist() == [1, 1, 0, 0, 1, 0]


def test_nobody_chosen_is_no_row() -> None:
    rows, real = pool().some([2, 0], [np.array([], dtype=np.int64)] * 2)
    assert len(rows) == len(real) == len(pool().take(rows)) == 0


def test_which_records_are_real_is_said_in_the_precision_of_the_records() -> None:
    double = Pool([Records(one.x.double(), one.y) for one in (client(1), client(2, 3))])
    _, real = double.whole([0, 1])
    assert real is not None
    assert real.dtype == torch.float64
    assert double.some([0], [np.array([0])])[1].dtype == torch.float64


def test_tokens_are_pooled_too() -> None:
    words = Pool([Records(torch.tensor([[3, 4]]), torch.tensor([1])), Records(torch.ones(2, 2).long(), torch.ones(2))])
    rows, real = words.whole([0, 1])
    assert words.take(rows).x.tolist() == [[3, 4], [3, 4], [1, 1], [1, 1]]
    assert real is not None
    assert real.tolist() == [1, 0, 1, 1]


@each("at_once", [1, 3, 2**14])
def test_records_are_measured_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.clients.pool._AT_ONCE", at_once)
    whole = Pool([client(1.0, -2.0), client(3.0)])
    assert whole.powers(1, slice(0, 4)).tolist() == [1, 2, 3, 0]
    assert whole.powers(2, torch.tensor([2, 0])).tolist() == [9, 1]
    whole.x += 1  # records stay as they are; if they did not, it would not be noticed
    assert whole.powers(2, torch.tensor([2, 0])).tolist() == [9, 1]
