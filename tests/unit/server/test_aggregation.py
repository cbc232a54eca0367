"""A round moves the model by the weighted sum of uploads, whoever answered first."""

import itertools

import torch

from dpfl.clients.uploads import Separate, Summed
from dpfl.server.aggregation import aggregate


def test_by_hand() -> None:
    # 0.25·(4, 0) + 0.75·(0, 8) = (1, 6)
    uploads = {0: torch.tensor([4.0, 0.0]), 3: torch.tensor([0.0, 8.0])}
    assert aggregate(torch.tensor([1.0, 2.0]), Separate(uploads), {0: 0.25, 3: 0.75}).tolist() == [1.0, 6.0]


def test_weights_need_not_sum_to_one() -> None:
    uploads = {0: torch.tensor([4.0]), 1: torch.tensor([8.0])}
    assert aggregate(torch.tensor([1.0]), Separate(uploads), {0: 1.0, 1: 0.5}).tolist() == [8.0]


def test_what_was_summed_already_is_taken_as_it_is() -> None:
    total = torch.tensor([3.0, -1.0])
    assert aggregate(torch.tensor([1.0, 2.0]), Summed(total, (0, 3)), {0: 0.25, 3: 0.75}).tolist() == [3.0, -1.0]


def test_nobody_answered_and_the_model_stays() -> None:
    assert aggregate(torch.tensor([1.0, 2.0]), Separate({}), {}).tolist() == [0.0, 0.0]


def test_the_model_that_was_broadcast_is_not_changed() -> None:
    model = torch.tensor([1.0])
    aggregate(model, Separate({0: torch.tensor([5.0])}), {0: 1.0})
    assert model.tolist() == [1.0]


def test_not_a_bit_depends_on_who_answered_first() -> None:
    # Sums of such different sizes round differently in each order.
    uploads = {client: torch.tensor([10.0 ** (4 * client) / 3, (-1) ** client * 1e8 / 7]) for client in range(4)}
    weights = {client: (client + 1) / 10 for client in range(4)}
    start = torch.tensor([0.1, 0.1])
    results = [
        aggregate(start, Separate({client: uploads[client] for client in order}), weights)
        for order in itertools.permutations(range(4))
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    backwards = torch.zeros_like(start)
    for client in (3, 2, 1, 0):
        backwards = torch.add(backwards, uploads[client], alpha=weights[client])
    assert not torch.equal(backwards, results[0])  # so the order would have mattered
