"""Records that cannot be computed: a word that no table has, a label that is no class, a value that code objects to.

They count as zero and end nothing: an error would tell everybody that the record is there.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfl
from attacks.moves import Loss, federation, first_uploads
from dpfl.models.architectures import cross_entropy
from grids import each

WORDS, LENGTH, CLASSES, RECORDS = 7, 3, 3, 6

pytestmark = pytest.mark.filterwarnings("ignore::dpfl.Caution", "ignore:There is a performance drop:UserWarning")


def records(count: int) -> dpfl.Records:
    source = torch.Generator().manual_seed(count)
    return dpfl.Records(torch.randint(0, WORDS, (count, LENGTH), generator=source), torch.arange(count) % CLASSES)


def read() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.Linear(4 * LENGTH, CLASSES))


class Unread(nn.Module):
    """The same, as a graph that nobody knows; or code that looks at values, which cannot be mapped over records."""

    def __init__(self, branching: bool = False) -> None:
        super().__init__()
        self.inner, self.branching = read(), branching

    def forward(self, x: Tensor) -> Tensor:
        if self.branching and int(x.max()) < 0:
            return self.inner(x)
        return self.inner(x.reshape(len(x), -1))


class Objecting(Unread):
    """Refuses what it has not expected."""

    def forward(self, x: Tensor) -> Tensor:
        if int(x.max()) >= WORDS:
            raise ValueError(f"{x.max()} is no word")
        return self.inner(x)


def objecting(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, functional.one_hot(labels, CLASSES).to(outputs))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": read, "at once": Unread, "one by one": lambda: Unread(branching=True), "objecting": Objecting,
}  # fmt: skip
LOSSES: dict[str, Loss] = {"own": cross_entropy, "torch's": nn.CrossEntropyLoss(), "objecting": objecting}
CLIPS = {
    "records": dpfl.UDP(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=1.0),
    "clients": dpfl.DPFedAvg(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=1.0),
    "models": dpfl.NbAFL(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=1.0),
}


def spoilt(what: str, mine: dpfl.Records) -> dpfl.Records:
    x, y = mine.x.clone(), mine.y.clone()
    if what == "word":
        x[2, 1] = WORDS + 3
    else:
        y[2] = {"label": CLASSES + 4, "negative label": -7}[what]
    return dpfl.Records(x, y)


@each("backend", ["stacked", "reference"])
@each("what", ["word", "label", "negative label"])
@each("loss", LOSSES)
@each("model", ["layers", "at once", "objecting"])
def test_a_record_that_cannot_be_computed_ends_nothing(model: str, loss: str, what: str, backend: str) -> None:
    made = federation(spoilt(what, records(RECORDS)), records(8), CLASSES)
    (upload,) = first_uploads(CLIPS["records"], made, MODELS[model](), LOSSES[loss], backend=backend)
    assert torch.isfinite(upload).all()


@each("backend", ["stacked", "reference"])
@each("what", ["word", "label"])
def test_without_a_promise_errors_stay_errors(what: str, backend: str) -> None:
    made = federation(spoilt(what, records(RECORDS)), records(8), CLASSES)
    for make in (read, Unread):
        # A label is held to the classes before any round, in a sentence; how many words a model knows, it knows alone.
        with pytest.raises(dpfl.BadInput if what == "label" else (IndexError, RuntimeError)):
            first_uploads(dpfl.FedSGD(rounds=1, lr=1.0), made, make(), cross_entropy, backend=backend)


@each("backend", ["stacked", "reference"])
@each("clip", CLIPS)
@each("what", ["word", "label"])
@each("model", ["layers", "objecting"])
def test_it_moves_nothing_of_another_client(model: str, what: str, clip: str, backend: str) -> None:
    seen: list[Tensor] = []
    for mine in (records(RECORDS), spoilt(what, records(RECORDS))):
        made = federation(mine, records(8), CLASSES)
        dpfl.train(
            CLIPS[clip], made, MODELS[model](), loss=cross_entropy, seed=1, backend=backend, draws="client",
            on_uploads=lambda _, sent: seen.append(sent[1]),
        )  # fmt: skip
    assert torch.isfinite(seen[0]).all()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-6, atol=1e-6)


@each("backend", ["stacked", "reference"])
@each("what", ["word", "label"])
@each("model", MODELS)
def test_the_others_contribute_what_they_did(model: str, what: str, backend: str) -> None:
    # Record 2 spoilt and record 2 replaced by a stranger: what is between them is one clipped gradient, C/n.
    mine = records(RECORDS)
    one, other = (
        first_uploads(CLIPS["records"], federation(its, records(8), CLASSES), MODELS[model](), cross_entropy,
                      backend=backend)[0]
        for its in (mine, spoilt(what, mine))
    )  # fmt: skip
    assert 0.1 / RECORDS <= (one - other).norm() <= (1 + 1e-5) / RECORDS


@each("backend", ["stacked", "reference"])
@each("number", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_leaves_the_model_where_it_was(number: float, backend: str) -> None:
    # Under a clip of the parameters; the twin is an upload that is minus the model, as if the client had sent zeros.
    x = torch.randn(RECORDS, LENGTH, generator=torch.Generator().manual_seed(0))
    mine, public = (
        dpfl.Records(x.clone(), torch.arange(RECORDS) % CLASSES),
        dpfl.Records(x, torch.arange(RECORDS) % CLASSES),
    )
    mine.x[0] = number
    layer = nn.Linear(LENGTH, CLASSES)
    start = torch.cat([part.detach().flatten() for part in layer.parameters()]).double()
    system = dpfl.NbAFL(epsilon=1e7, delta=1e-2, rounds=1, clip=2.0, clipping="model")
    (upload,) = first_uploads(system, federation(mine, public, CLASSES), layer, cross_entropy, backend=backend)
    assert upload.norm() < 0.1 * start.norm()


class Flat(nn.Module):
    """Puts out one number a record, and no column of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(x.shape[0])


def weighing(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0])[targets.long()] * (outputs - targets).square()


@each("backend", ["stacked", "reference"])
def test_a_loss_that_fails_on_flat_outputs_ends_nothing(backend: str) -> None:
    x = torch.randn(RECORDS, LENGTH, generator=torch.Generator().manual_seed(0))
    mine, public = (dpfl.Records(x, torch.arange(RECORDS) % 3.0) for _ in range(2))
    mine.y[2] = 7.0
    made = federation(mine, public, None)
    (upload,) = first_uploads(CLIPS["records"], made, Flat(), weighing, backend=backend)
    assert torch.isfinite(upload).all()


@each("draws", ["cohort", "client"])
@each("number", [float("nan"), 1e30, 3e38])
def test_no_bit_of_another_clients_upload_depends_on_what_one_record_needs(number: float, draws: str) -> None:
    """A record that single precision cannot clip is clipped apart: all else is added up as if it were not there."""

    def uploads(first: float) -> dict[int, Tensor]:
        seen: list[dict[int, Tensor]] = []
        parts = []
        for client in (1, 2, 3):
            source = torch.Generator().manual_seed(client)
            parts.append(dpfl.Records(torch.randn(900, 20, generator=source), torch.arange(900) % 3))
        parts[0].x[7] = first
        public = dpfl.Records(parts[2].x[:20], parts[2].y[:20])
        made = dpfl.Federation(
            name="made up", clients=tuple(parts), validation=public, test=public, classes=3, source="made up"
        )
        dpfl.train(
            dpfl.UDP(rounds=1, epsilon=2.0), made, "softmax", seed=1, draws=draws, on_uploads=lambda _, sent:
            seen.append(sent),
        )  # fmt: skip
        return seen[0]

    usual, other = uploads(0.5), uploads(number)
    assert torch.equal(usual[1], other[1])
    assert torch.equal(usual[2], other[2])
    assert 0 < torch.linalg.vector_norm((usual[0] - other[0]).double()) <= 2 * 2.0 / 900 * (1 + 1e-5)
