"""The model moves by the weighted sum of updates, whoever answered first."""

import itertools

import torch

from dpfl.server.aggregation import aggregate


def test_by_hand() -> None:
    # (1, 2) + 0.25·(4, 0) + 0.75·(0, 8) = (2, 8)
    uploads = {0: torch.tensor([4.0, 0.0]), 3: torch.tensor([0.0, 8.0])}
    assert aggregate(torch.tensor([1.0, 2.0]), uploads, {0: 0.25, 3: 0.75}).tolist() == [2.0, 8.0]


def test_weights_need_not_sum_to_one() -> None:
    uploads = {0: torch.tensor([4.0]), 1: torch.tensor([8.0])}
    assert aggregate(torch.tensor([1.0]), uploads, {0: 1.0, 1: 0.5}).tolist() == [9.0]


def test_nobody_answered_and_the_model_stays() -> None:
    assert aggregate(torch.tensor([1.0, 2.0]), {}, {}).tolist() == [1.0, 2.0]


def test_the_model_that_was_broadcast_is_not_changed() -> None:
    model = torch.tensor([1.0])
    aggregate(model, {0: torch.tensor([5.0])}, {0: 1.0})
    assert model.tolist() == [1.0]


def test_not_a_bit_depends_on_who_answered_first() -> None:
    # Sums of such different sizes round differently in each order.
    uploads = {client: torch.tensor([10.0 ** (4 * client) / 3, (-1) ** client * 1e8 / 7]) for client in range(4)}
    weights = {client: (client + 1) / 10 for client in range(4)}
    start = torch.tensor([0.1, 0.1])
    results = [
        aggregate(start, {client: uploads[client] for client in order}, weights)
        for order in itertools.permutations(range(4))
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    backwards = start
    for client in (3, 2, 1, 0):
        backwards = torch.add(backwards, uploads[client], alpha=weights[client])
    assert not torch.equal(backwards, results[0])  # so the order would have mattered
