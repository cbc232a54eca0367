"""The stacked clients on a GPU: the same uploads, the same sums, recorded or not. Skipped where there is no GPU."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from conformance.asking import request, sum_of, uploads_of
from dpfl.clients import draws
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Separate
from dpfl.federation import Records
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Model, build
from dpfl.orders import ClientClip, Gaussian, Order, Poisson, Question, RecordClip
from dpfl.precision import products
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams
from grids import each

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")

SIZES = (7, 12, 7, 3)
ORDERS = {
    "one step, records": Order(steps=1, learning_rate=0.5, clip=RecordClip(0.1)),
    "steps, records": Order(steps=3, learning_rate=0.5, clip=RecordClip(0.1)),
    "steps, clients": Order(steps=2, learning_rate=0.5, clip=ClientClip(0.1)),
}


def problem(name: str) -> tuple[Model, tuple[Records, ...]]:
    source = torch.Generator().manual_seed(0)
    classes = None if name == "linear" else 3
    model = build(name, shape=(1, 16, 16), classes=classes, rng=Streams(0).public.generator("model"))
    model.module.cuda()

    def some(n: int) -> Records:
        x = torch.randn(n, 1, 16, 16, generator=source)
        y = torch.randn(n, generator=source) if classes is None else torch.randint(0, 3, (n,), generator=source)
        return Records(x, y).to(torch.device("cuda"))

    return model, tuple(some(n) for n in SIZES)


def paid(order: Order) -> dict[int, Charged]:
    return {client: Charged(order, size) for client, size in enumerate(SIZES)}


@each("name", ["linear", "mlp", "femnist-cnn-small", "ali-cnn"])
@each("kind", ORDERS)
def test_sums_are_those_of_the_reference_client(name: str, kind: str) -> None:
    model, records = problem(name)
    with products("float32"):
        stacked = StackedClients(model, records, Streams(1), capabilities=capabilities_of(model, records[1]))
        weights = {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}
        theirs = uploads_of(ReferenceClients(model, records, Streams(1)), paid(ORDERS[kind]), model.vector(), 1)
        wanted = sum(weights[client] * update for client, update in theirs.items())
        for _ in range(4):  # eager, recorded, replayed twice
            ours = sum_of(stacked, paid(ORDERS[kind]), model.vector(), 1, weights)
            assert torch.linalg.vector_norm(ours - wanted) <= 1e-3 * torch.linalg.vector_norm(wanted)
        apart = uploads_of(stacked, paid(ORDERS[kind]), model.vector(), 1)
        for client, update in theirs.items():
            assert torch.linalg.vector_norm(apart[client] - update) <= 1e-3 * torch.linalg.vector_norm(update)


NOISY = Order(
    steps=4, learning_rate=0.5, batch=Poisson(0.5), clip=RecordClip(1.0), noise=Gaussian(0.3), noise_on="step"
)


def rounds(name: str) -> list[torch.Tensor]:
    """Return the sums of six noisy rounds: the first eager, the second recorded, the others replayed."""
    model, records = problem(name)
    stacked, weights = (
        StackedClients(model, records, Streams(5), capabilities=capabilities_of(model, records[1])),
        dict.fromkeys(range(4), 0.25),
    )
    with products("float32"):
        return [sum_of(stacked, paid(NOISY), model.vector(), i, weights) for i in range(6)]


def test_replays_draw_anew_in_every_round_and_again_with_the_same_seed() -> None:
    first, again = rounds("mlp"), rounds("mlp")
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, again, strict=True))
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in pairwise(first))


def test_a_replay_draws_what_would_have_been_drawn_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = rounds("ali-cnn")
    monkeypatch.setattr("dpfl.clients.stacked._GPU_GRAPH", 0)
    for ours, eager in zip(replayed, rounds("ali-cnn"), strict=True):
        assert torch.linalg.vector_norm(ours - eager) <= 1e-4 * torch.linalg.vector_norm(eager)


def test_recordings_of_several_kinds_share_their_memory_and_nothing_else() -> None:
    """Some steps more or less are recorded each for itself; whichever is replayed, its numbers are its own."""
    model, records = problem("ali-cnn")
    weights = dict.fromkeys(range(4), 0.25)
    orders = [replace(ORDERS["steps, records"], steps=steps) for steps in (1, 2, 4)]
    with products("float32"):
        stacked = StackedClients(model, records, Streams(1), capabilities=capabilities_of(model, records[1]))

        def sums(order: Order) -> torch.Tensor:
            return sum_of(stacked, paid(order), model.vector(), 1, weights)

        eager = [sums(order) for order in orders]
        for _ in range(3):  # recorded, replayed in turn
            for order, wanted in zip(orders, eager, strict=True):
                assert torch.allclose(sums(order), wanted, atol=1e-6)


def test_trainings_in_turn_are_what_each_is_alone() -> None:
    """Clients who take unlike numbers of steps are no one cohort: recorded steps serve one training after the other."""
    model, records = problem("mlp")
    capable, weights = capabilities_of(model, records[1]), dict.fromkeys(range(4), 0.25)
    orders = {at: Charged(replace(NOISY, steps=2 + at % 2), size) for at, size in enumerate(SIZES)}
    with products("float32"):
        alone = [StackedClients(model, records, Streams(seed), capabilities=capable) for seed in (1, 2)]
        together = StackedClients(model, records, Streams(3), capabilities=capable)
        for at in range(6):  # eager, recorded, replayed
            asked = [request(orders, model.vector(), at, weights)] * 2
            wanted = torch.stack([sum_of(one, orders, model.vector(), at, weights) for one in alone])
            assert torch.allclose(together.repeat(asked, [Streams(1), Streams(2)]), wanted, atol=1e-6)


@each("name", ["mlp", "femnist-cnn-small", "ali-cnn"])
def test_answers_are_those_of_the_reference_client(name: str) -> None:
    model, records = problem(name)
    moved = {client: 0.1 * torch.randn_like(model.vector()) for client in (0, 1, 3)}
    questions: tuple[Question, ...] = ("loss", "curvature", "curvature from the sum")
    asked = questions, model.vector(), Separate(moved), model.vector() + 0.5 * moved[0]
    with products("float32"):
        ours = StackedClients(model, records, Streams(1), capabilities=capabilities_of(model, records[1])).answer(
            *asked
        )
        theirs = ReferenceClients(model, records, Streams(1)).answer(*asked)
    for question, told in theirs.items():
        assert ours[question] == pytest.approx(told, rel=1e-3)


def test_a_batch_that_did_not_fit_is_drawn_again_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, records = problem("mlp")
    order = Order(steps=2, learning_rate=0.5, batch=Poisson(0.7), clip=ClientClip(1.0))
    weights = dict.fromkeys(range(4), 0.25)

    def sums() -> torch.Tensor:
        stacked = StackedClients(model, records, Streams(5), capabilities=capabilities_of(model, records[1]))
        return sum_of(stacked, paid(order), model.vector(), 1, weights)

    def apart() -> torch.Tensor:
        stacked = StackedClients(model, records, Streams(5), capabilities=capabilities_of(model, records[1]))
        found = stacked.perform(request(paid(order), model.vector(), 1, separate=True))
        assert isinstance(found, Separate)
        return torch.stack(list(found.by_client.values()))

    whole, each = sums(), apart()
    monkeypatch.setattr(draws, "room_for", lambda records, rate: 1)
    assert torch.allclose(sums(), whole, atol=1e-6)
    assert torch.allclose(apart(), each, atol=1e-6)
