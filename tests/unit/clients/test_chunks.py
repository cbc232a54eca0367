"""Clients put together by the kind of their orders, and cut so that they fit the memory."""

import math
from dataclasses import replace

import pytest
import torch

from dpfl.clients.chunks import Chunk, Columns, by_kind
from dpfl.orders import ClientClip, Full, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip
from dpfl.privacy.exact_noise import Law
from dpfl.privacy.ledger import Charged
from grids import each

PLAIN = Order(steps=2, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(0.1))


def clients_of(chunks: list[Chunk]) -> list[list[int]]:
    return [chunk.clients for chunk in chunks]


def charged(*orders: Order) -> dict[int, Charged]:
    return {client: Charged(order, 10) for client, order in enumerate(orders)}


# By kind.


@each(
    "other",
    [
        replace(PLAIN, steps=3),
        replace(PLAIN, batch=Poisson(0.5)),
        replace(PLAIN, clip=None),
        replace(PLAIN, clip=ClientClip(1.0)),
        replace(PLAIN, clip=ModelClip(1.0)),
        replace(PLAIN, clip=RecordClip(1.0, 1)),
        replace(PLAIN, noise=None),
        replace(PLAIN, noise=Laplace(0.1)),
        replace(PLAIN, noise_on="step"),
        replace(PLAIN, proximal=0.1),
    ],
    ids=str,
)
def test_orders_of_unlike_kinds_are_kept_apart(other: Order) -> None:
    assert clients_of(by_kind(charged(PLAIN, other, PLAIN, other))) == [[0, 2], [1, 3]]


@each(
    "other",
    [
        replace(PLAIN),
        replace(PLAIN, learning_rate=(0.1, 0.2)),
        replace(PLAIN, clip=RecordClip(7.0)),
        replace(PLAIN, noise=Gaussian(3.0)),
        replace(PLAIN, batch=Full()),
    ],
    ids=str,
)
def test_orders_that_differ_in_numbers_alone_go_together(other: Order) -> None:
    (chunk,) = by_kind(charged(PLAIN, other, PLAIN))
    assert chunk.clients == [0, 1, 2]
    assert [one.order for one in chunk.paid] == [PLAIN, other, PLAIN]


def test_sampling_rates_differ_within_a_kind() -> None:
    (chunk,) = by_kind(charged(replace(PLAIN, batch=Poisson(0.5)), replace(PLAIN, batch=Poisson(0.1))))
    assert chunk.sampling_rates == [0.5, 0.1]


def test_clients_keep_the_order_they_came_in() -> None:
    other = replace(PLAIN, steps=1)
    paid = {7: Charged(PLAIN, 1), 2: Charged(other, 2), 5: Charged(PLAIN, 3), 0: Charged(PLAIN, 4)}
    chunks = by_kind(paid)
    assert clients_of(chunks) == [[7, 5, 0], [2]]
    assert [one.records for one in chunks[0].paid] == [1, 3, 4]


def test_nobody_makes_no_chunk() -> None:
    assert by_kind({}) == []


@each(("noise", "law"), [(Gaussian(0.1), Gaussian), (Laplace(0.1), Laplace), (None, Gaussian)], ids=str)
def test_the_law_is_that_of_the_noise(noise: Gaussian | Laplace | None, law: Law) -> None:
    assert by_kind(charged(replace(PLAIN, noise=noise)))[0].law is law


# Cut.


def cut(costs: dict[int, int], room: int, waste: float = math.inf) -> list[list[int]]:
    whole = Chunk(list(costs), [Charged(PLAIN, 100 + client) for client in costs])
    parts = list(whole.cut(room, list(costs.values()), waste))
    assert all([one.records - 100 for one in part.paid] == part.clients for part in parts)  # each with its own order
    return clients_of(parts)


def test_clients_of_one_cost_are_cut_in_the_order_they_came_in() -> None:
    costs = dict.fromkeys([4, 1, 3, 0, 2], 10)
    assert cut(costs, 1000) == [[4, 1, 3, 0, 2]]
    assert cut(costs, 50) == [[4, 1, 3, 0, 2]]  # they fill the room
    assert cut(costs, 49) == [[4, 1, 3, 0], [2]]
    assert cut(costs, 20) == [[4, 1], [3, 0], [2]]
    assert cut(costs, 19) == cut(costs, 1) == [[4], [1], [3], [0], [2]]


def test_clients_of_much_the_same_cost_go_together() -> None:
    # All are filled up to the largest: 3 clients of 1 cost 3, but with one of 30 they would cost 120.
    assert cut({0: 30, 1: 1, 2: 1, 3: 30, 4: 1}, 60) == [[1, 2, 4], [0, 3]]
    assert cut({0: 30, 1: 1, 2: 1, 3: 30, 4: 1}, 150) == [[0, 1, 2, 3, 4]]  # nothing to cut, nothing to sort


def test_a_client_larger_than_the_room_comes_alone() -> None:
    assert cut({0: 5, 1: 1000, 2: 5}, 10) == [[0, 2], [1]]
    assert cut({0: 1000}, 10) == [[0]]


def test_ragged_clients_never_fill_more_than_the_room() -> None:
    costs = {client: 1 + client * client % 17 for client in range(40)}
    for room in (1, 7, 20, 55, 200, 10_000):
        parts = cut(costs, room)
        assert sorted(client for part in parts for client in part) == list(range(40))
        assert all(len(part) == 1 or len(part) * max(costs[client] for client in part) <= room for part in parts)


def test_what_fills_clients_up_to_the_largest_is_no_more_than_a_chunk_is_worth() -> None:
    costs = {0: 30, 1: 1, 2: 1, 3: 30, 4: 1}
    assert cut(costs, 1000, 87) == [[0, 1, 2, 3, 4]]
    assert cut(costs, 1000, 86) == [[1, 2, 4], [0, 3]]
    assert cut(dict(enumerate([1, 2, 3, 4, 5])), 1000, 3) == [[0, 1, 2], [3, 4]]
    assert cut(dict(enumerate([1, 2, 3, 4, 5])), 1000, 0) == [[0], [1], [2], [3], [4]]
    ragged = {client: 1 + client * client % 17 for client in range(40)}
    for waste in (0, 5, 40):
        parts = cut(ragged, 100, waste)
        assert sorted(client for part in parts for client in part) == list(range(40))
        for part in parts:
            mine = [ragged[client] for client in part]
            assert len(part) == 1 or len(part) * max(mine) - sum(mine) <= waste


# What differs among clients.


def numbers_of(chunk: Chunk) -> Columns:
    return Columns.of(chunk.table())


def test_numbers_come_as_a_row_for_each_client() -> None:
    # Client 0: 20 records at rate 0.5 are 10; noise of 3 on their sum is 0.3 in the gradient, and 0.3·0.2 in the upload
    # of the last step. Client 1: 5 records at rate 0.2 are 1; noise of 2, and 2·0.4 in the upload.
    one = Order(
        steps=2, learning_rate=(0.1, 0.2), batch=Poisson(0.5), clip=RecordClip(7.0), noise=Gaussian(3.0),
        noise_on="step", proximal=0.25,
    )  # fmt: skip
    other = replace(one, learning_rate=0.4, batch=Poisson(0.2), clip=RecordClip(9.0), noise=Gaussian(2.0), proximal=1.0)
    chunk = Chunk([3, 8], [Charged(one, 20), Charged(other, 5)])
    numbers = numbers_of(chunk)
    assert numbers.divisors.tolist() == [[10.0], [1.0]]
    assert numbers.clip_norms.tolist() == [[7.0], [9.0]]
    assert numbers.pulls.tolist() == [[0.25], [1.0]]
    assert numbers.rates.tolist() == [[0.1, 0.2], [0.4, 0.4]]
    assert numbers.step_noise.tolist() == [[pytest.approx(0.3)], [2.0]]
    assert numbers.late_noise.tolist() == [[pytest.approx(0.06)], [pytest.approx(0.8)]]
    assert numbers.weights.tolist() == [[1.0], [1.0]]
    weighed = Columns.of(chunk.table({8: 0.75, 3: 0.25}))
    assert weighed.weights.tolist() == [[0.25], [0.75]]
    assert weighed.divisors.tolist() == [[10.0], [1.0]]
    assert chunk.late_noise({8: 0.75, 3: 0.25}) == pytest.approx([0.06 * 0.25, 0.8 * 0.75])
    assert chunk.table().dtype == torch.float64


def test_one_order_with_unlike_numbers_of_records_is_not_alike() -> None:
    chunk = Chunk([0, 1], [Charged(PLAIN, 20), Charged(PLAIN, 5)])
    assert numbers_of(chunk).divisors.tolist() == [[20.0], [5.0]]
    alike = Chunk([0, 1], [Charged(PLAIN, 20), Charged(PLAIN, 20)])
    assert numbers_of(alike).divisors.tolist() == [[20.0], [20.0]]
    weighed = Columns.of(alike.table({0: 2.0, 1: 3.0}))
    assert weighed.weights.tolist() == [[2.0], [3.0]]
    assert weighed.divisors.tolist() == [[20.0], [20.0]]
    assert alike.late_noise({0: 2.0, 1: 3.0}) == pytest.approx([0.2, 0.3])
    assert chunk.late_noise({0: 2.0, 1: 3.0}) == pytest.approx([0.2, 0.3])


@pytest.mark.parametrize("clip", [ClientClip(1.0), None])
def test_noise_on_a_clients_own_gradient_is_not_divided(clip: ClientClip | None) -> None:
    order = Order(steps=1, learning_rate=0.5, clip=clip, noise=Laplace(3.0), noise_on="step")
    numbers = numbers_of(Chunk([0], [Charged(order, 20)]))
    assert numbers.step_noise.tolist() == [[3.0]]
    assert numbers.late_noise.tolist() == [[1.5]]


def test_noise_on_the_upload_is_as_large_as_it_was_ordered() -> None:
    for clip in (RecordClip(2.0), ModelClip(2.0), None):
        order = Order(steps=3, learning_rate=0.5, clip=clip, noise=Gaussian(0.7))
        numbers = numbers_of(Chunk([0], [Charged(order, 20)]))
        assert numbers.late_noise.tolist() == [[0.7]]
