"""What is answered without noise, for many clients at once: the numbers of the reference client."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfl.clients.answers import Answers, Work
from dpfl.clients.pool import Pool
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Separate
from dpfl.federation import Records
from dpfl.gradients.capabilities import capabilities_of
from dpfl.gradients.layered import Layered
from dpfl.models import Model, build
from dpfl.models.architectures import cross_entropy
from dpfl.orders import Question
from dpfl.streams import Streams
from grids import each

SIZES = (7, 4, 30, 12, 1, 7)
ALL: tuple[Question, ...] = ("loss", "curvature", "curvature from the sum")


def records(*shape: int, classes: int | None, seed: int = 1, sizes: tuple[int, ...] = SIZES) -> tuple[Records, ...]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), *shape, generator=source, dtype=torch.float64)
    y = x.flatten(1).sum(dim=1) if classes is None else torch.randint(0, classes, (len(x),), generator=source)
    return tuple(map(Records, torch.split(x, sizes), torch.split(y, sizes)))


def uploads(model: Model, clients: Sequence[int]) -> dict[int, Tensor]:
    source = torch.Generator().manual_seed(3)
    return {client: 0.1 * torch.randn(model.dim, generator=source, dtype=torch.float64) for client in clients}


def both(
    model: Model, data: tuple[Records, ...], asked: tuple[Question, ...], who: Sequence[int], room: int | None = None
) -> tuple[dict[Question, dict[int, float]], dict[Question, dict[int, float]]]:
    (public,) = records(*data[0].x.shape[1:], classes=2, seed=2, sizes=(8,))
    known = capabilities_of(model, Records(public.x, data[2].y[:8]))
    ours = StackedClients(model, data, Streams(0), capabilities=known, room=room)
    theirs = ReferenceClients(model, data, Streams(0), vectorised=False)
    before, moved = model.vector(), Separate(uploads(model, who))
    after = before + 0.1
    return ours.answer(asked, before, moved, after), theirs.answer(asked, before, moved, after)


def assert_same(ours: dict[Question, dict[int, float]], theirs: dict[Question, dict[int, float]]) -> None:
    assert list(ours) == list(theirs)
    for question, answers in theirs.items():
        assert list(ours[question]) == list(answers)
        assert list(ours[question].values()) == pytest.approx(list(answers.values()), rel=1e-9)


@each("room", [None, 1, 20_000])  # all together, each alone, in groups
@each("name", ["linear", "svm", "softmax", "mlp", "udp-cnn", "ali-cnn"])
def test_answers_are_those_of_the_reference_client(name: str, room: int | None) -> None:
    classes = None if name == "linear" else 2 if name == "svm" else 3
    shape = (1, 14, 14) if "cnn" in name else (5,)
    model = build(name, shape=shape, classes=classes, rng=Streams(0).public.generator("model"))
    model.module.double()
    assert_same(*both(model, records(*shape, classes=classes), ALL, (1, 2, 5), room))


def test_only_those_who_uploaded_tell_a_curvature_and_everyone_tells_the_loss() -> None:
    model = Model(nn.Linear(5, 3).double(), cross_entropy)
    ours, theirs = both(model, records(5, classes=3), ALL, (3, 0))
    assert [set(ours[one]) for one in ALL] == [set(range(6)), {0, 3}, {0, 3}]
    assert_same(ours, theirs)
    nobody, _ = both(model, records(5, classes=3), ("curvature",), ())
    assert nobody == {"curvature": {}}
    assert both(model, records(5, classes=3), (), (1,)) == ({}, {})


def test_a_loss_that_is_a_mean_is_told_apart() -> None:
    assert_same(*both(Model(nn.Linear(5, 3).double(), functional.cross_entropy), records(5, classes=3), ALL, (0, 2)))


def test_layers_that_draw_are_asked_one_by_one_and_draw_nothing() -> None:
    model = Model(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double(), cross_entropy)
    ours, theirs = both(model, records(5, classes=3), ALL, (0, 2))
    assert ours == theirs


def test_a_client_larger_than_the_memory_is_asked_in_blocks() -> None:
    model = Model(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double(), cross_entropy)
    data, seen = records(5, classes=3), []

    class Counting(Layered):
        def run(self, parameters: Tensor, x: Tensor, y: Tensor, *given: Any, **wanted: Any) -> Any:
            seen.append(len(x))
            return super().run(parameters, x, y, *given, **wanted)

    layers = Counting(model, data[0].x)

    def spread(work: Work, groups: Sequence[list[int]]) -> Iterator[Tensor]:
        yield from (work(layers, group) for group in groups)

    answers = Answers(Pool(data), room=1, rows=5, footprint=50, spread=spread)
    before, moved = model.vector(), uploads(model, range(6))
    theirs = ReferenceClients(model, data, Streams(0)).answer(ALL, before, Separate(moved), before)
    ours = {
        "loss": answers.losses(layers, before),
        "curvature": answers.curvatures(before, moved),
        "curvature from the sum": answers.curvatures(before, moved, before),
    }
    assert_same(ours, theirs)
    assert max(seen) == 5
