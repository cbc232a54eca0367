"""Code that mixes records, or remembers them: what a module and a loss may do, and what one record moves all the same.

Every attack is a training of one round with two neighbours, on public records that show nothing of it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import dpfl
from attacks.moves import Loss, moved, replaced
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy, squared_error
from grids import each

FEATURES, CLASSES, RECORDS = 4, 3, 12
JUST = 1 + 1e-5  # uploads are in single precision

pytestmark = pytest.mark.filterwarnings("ignore::dpfl.Caution", "ignore:There is a performance drop:UserWarning")


def records(count: int, seed: int = 0) -> dpfl.Records:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=source)
    return dpfl.Records(x, torch.arange(count) % CLASSES)


PUBLIC, HERE = records(8, 1), records(RECORDS)
STRANGER = torch.tensor([60.0, -80.0, 90.0, 10.0])


class Layer(nn.Module):
    """A linear layer, and what subclasses do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES, bias=False)
        waves = torch.arange(CLASSES * FEATURES).sin().view(CLASSES, FEATURES)
        with torch.no_grad():
            self.layer.weight.copy_(waves)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class NormalisingInPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x /= x.norm(dim=1, keepdim=True)
        return self.layer(x)


class ShrinkingThroughData(Layer):
    """Changes the numbers that a layer has kept, behind its back."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        x.data.mul_(1e-3)
        return outputs


class MixingBeyondThePublicRange(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if x.detach().max() > 50:
            x = x + 10 * x.mean(0)
        return self.layer(x)


class MixingWithoutABranch(Layer):
    """Nothing but arithmetic, which public records do not set off."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + 10 * functional.relu(x - 50).sum(0))


class Remembering(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x + self.last)
        self.last = functional.relu(x - 50).sum(0).detach()
        return outputs


class RememberingInABuffer(Layer):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x + self.last)
        self.last = functional.relu(x - 50).sum(0).detach()
        return outputs


class Lying(Layer):
    """Is honest while it is read."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):
            return self.layer(x)
        return self.layer(x + 10 * functional.relu(x - 50).sum(0))


class Paired(Layer):
    """Adds a column [B] to a column [B, 1], which pairs every record with every other."""

    def forward(self, x: Tensor) -> Tensor:
        table = functional.relu(x[:, 0] - 50) + 0 * x[:, :1]
        return self.layer(x + table.sum(1, keepdim=True))


class Borrowed(Layer):
    """Uses a layer's parameters past the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + functional.linear(functional.relu(x - 50), self.layer.weight)


def hooked() -> nn.Module:
    module = Layer()
    module.layer.register_forward_hook(lambda _, given, outputs: outputs + functional.relu(given[0] - 50).sum())
    return module


def with_a_forward_of_its_own() -> nn.Module:
    module, linear = Layer(), nn.Linear.forward
    module.layer.forward = lambda x: linear(module.layer, x + functional.relu(x - 50).sum(0))  # type: ignore[assignment]
    return module


class Listing(Layer):
    """Asks where a condition holds, and is told in as many rows as it holds."""

    def forward(self, x: Tensor) -> Tensor:
        sides = torch.where(torch.cat([x[:, :1] < 50, x[:, 1:2] > 50], 1))[1].view(-1, 1)
        return self.layer(x * (1 - 2 * sides))


def with_a_convolution_of_its_own() -> nn.Module:
    layer = nn.Conv1d(1, 1, 1, bias=False).requires_grad_(False)
    nn.init.ones_(layer.weight)
    layer._conv_forward = lambda x, weight, bias: x + 10 * functional.relu(x - 50).sum(0)  # type: ignore[assignment]
    return nn.Sequential(nn.Unflatten(1, (1, FEATURES)), layer, nn.Flatten(), Layer())


class Mixer(Tensor):
    """A constant that mixes what it is multiplied with."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mixer":
        return self.clone().as_subclass(Mixer)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, fx.Proxy) for one in args):
            return NotImplemented
        plain = [one.as_subclass(Tensor) if isinstance(one, Mixer) else one for one in args]
        if func in (Tensor.mul, torch.mul):
            plain[0] = plain[0] + 10 * functional.relu(plain[0].detach() - 50).sum(0)
        return func(*plain, **(kwargs or {}))


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(FEATURES).as_subclass(Mixer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "in place": NormalisingInPlace,
    "through .data": ShrinkingThroughData,
    "beyond the public range": MixingBeyondThePublicRange,
    "without a branch": MixingWithoutABranch,
    "remembering": Remembering,
    "remembering in a buffer": RememberingInABuffer,
    "lying": Lying,
    "in pairs": Paired,
    "borrowed": Borrowed,
    "hooked": hooked,
    "a forward of its own": with_a_forward_of_its_own,
    "listing": Listing,
    "a convolution of its own": with_a_convolution_of_its_own,
    "a constant's own": Scaled,
}


@each("backend", ["stacked", "reference"])
@each("name", MODULES)
def test_no_module_moves_an_upload_by_more_than_was_priced(name: str, backend: str) -> None:
    make = MODULES[name]
    system = dpfl.UDP(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=0.01)
    for stranger, row in ((STRANGER, 0), (1e4 * STRANGER, 5), (1e-6 * STRANGER, 5)):
        there = replaced(HERE, stranger, row=row)
        assert moved(make, HERE, there, PUBLIC, cross_entropy, system=system, backend=backend) <= JUST


class Masked(nn.Module):
    """Takes as many numbers out of a batch of 41 as there are records: the first four, and nine more of the next."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, CLASSES, bias=False)
        nn.init.ones_(self.layer.weight)
        mask = torch.zeros(64, 40, dtype=torch.bool)
        mask[:9, 0] = mask[9, :32] = True
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[..., torch.narrow(self.mask, 0, 0, x.size(0))].view(x.size(0), 1))


def test_a_mask_takes_nothing_out_of_another_record() -> None:
    mine = dpfl.Records(torch.ones(41, 40), torch.zeros(41).long())
    public = dpfl.Records(torch.randn(8, 40, generator=torch.Generator().manual_seed(0)), torch.arange(8) % CLASSES)
    there = replaced(mine, -torch.ones(40), row=9)
    assert moved(Masked, mine, there, public, cross_entropy) <= JUST
    why_not = capabilities_of(Model(Masked(), cross_entropy), public).why_not
    assert "makes a constant of the number of records" in why_not


def test_a_listing_as_long_as_the_batch_mixes_records() -> None:
    mine = dpfl.Records(torch.tensor([60.0, 1, 1, 1]).repeat(RECORDS, 1), torch.zeros(RECORDS).long())
    mine = replaced(mine, torch.tensor([60.0, 60, 1, 1]))
    there = replaced(mine, torch.tensor([40.0, -60, 1, 1]))
    system = dpfl.UDP(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=0.01)
    assert moved(Listing, mine, there, PUBLIC, cross_entropy, system=system) <= JUST


@each("backend", ["stacked", "reference"])
def test_a_record_leaves_no_other_clients_upload_changed(backend: str) -> None:
    seen: list[list[Tensor]] = []
    for mine in (HERE, replaced(HERE, STRANGER)):
        uploads: list[Tensor] = []
        made = dpfl.Federation(
            name="made up",
            clients=(mine, records(9, 3)),
            validation=PUBLIC,
            test=PUBLIC,
            classes=CLASSES,
            source="here",
        )
        for system in (dpfl.UDP(epsilon=2.0, delta=1e-2, rounds=2), dpfl.DPFedAvg(epsilon=2.0, delta=1e-2, rounds=1)):
            dpfl.train(
                system, made, Remembering(), loss=cross_entropy, seed=1, backend=backend, draws="client",
                on_uploads=lambda round, sent, uploads=uploads: uploads.append(sent[1]) if round == 1 else None,  # type: ignore[misc]
            )  # fmt: skip
        seen.append(uploads)
    assert all(map(torch.equal, *seen))


def mixing(outputs: Tensor, labels: Tensor) -> Tensor:
    centred = outputs - functional.relu(outputs - 40).sum(dim=0)
    return functional.cross_entropy(centred, labels, reduction="none")


class RememberingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = 0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs + self.last, labels, reduction="none")
        self.last = functional.relu(outputs - 40).sum().detach()
        return losses


class ChangingLoss(nn.Module):
    """Changes what it is given."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        labels.zero_()
        return functional.cross_entropy(outputs, labels, reduction="none")


LOSSES: dict[str, Loss] = {
    "mixing": mixing, "remembering": RememberingLoss(), "changing": ChangingLoss(),
}  # fmt: skip


@each("backend", ["stacked", "reference"])
@each("name", LOSSES)
def test_no_loss_moves_an_upload_by_more_than_was_priced(name: str, backend: str) -> None:
    assert moved(Layer, HERE, replaced(HERE, STRANGER), PUBLIC, LOSSES[name], backend=backend) <= JUST


def test_outputs_and_targets_of_other_shapes_are_not_paired() -> None:
    # [B, n] − [B] pairs every output with every target where there are as many records as outputs.
    public = dpfl.Records(PUBLIC.x, torch.zeros(8))
    mine = dpfl.Records(HERE.x[:CLASSES], torch.zeros(CLASSES))
    with pytest.raises(dpfl.BadInput, match=r"model must take|loss must be"):
        moved(Layer, mine, replaced(mine, STRANGER, torch.tensor(1e6)), public, squared_error)


# The twin: a layer whose module may change what it has kept measures one gradient, and sums another.


def test_what_a_module_changes_in_place_would_be_clipped_by_the_wrong_norm() -> None:
    x = HERE.x.clone()
    measured = x.norm(dim=1)
    x *= 24
    assert (x.norm(dim=1) / measured).min() > 20


# What is read, and what is said of the rest.


class Usual(nn.Module):
    """What users write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.drop = nn.GroupNorm(2, 4), nn.Dropout(0.1)
        self.last = nn.Linear(4 * 4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        h = functional.relu(self.first(x))
        h = h + functional.gelu(self.norm(self.second(h)))
        h = functional.max_pool2d(h, 2).view(batch, 4, height // 2, width // 2)
        return self.last(self.drop(h.view(h.size(0), -1)))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_usual_models_are_fast_without_public_records(count: int) -> None:
    public = dpfl.Records(torch.zeros(count, 1, 8, 8), torch.zeros(count).long())
    for module in (Usual(), nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))):
        known = capabilities_of(Model(module, cross_entropy), public)
        assert known.layers is not None, known.why_not


class Recurrent(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cumsum(x, 0))


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(len(x), -1))


class Branching(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else 2 * self.layer(x)


@each(
    ("make", "why"),
    [
        (Recurrent, "cumsum is not known to keep records apart"),
        (Counting, "ask for shape[0]"),
        (Branching, "control flow"),
        (Paired, "add is not known to keep records apart"),
        (Borrowed, "layer.weight is trained, and used outside of a layer"),
        (hooked, "Linear 'layer' carries hooks"),
        (Listing, "where is not known to keep records apart"),
        (with_a_convolution_of_its_own, "Conv1d '1' carries hooks or code"),
        (Scaled, "scale is a Mixer, which may be any code"),
    ],
)
def test_the_engine_says_what_it_does_not_know(make: Callable[[], nn.Module], why: str) -> None:
    known = capabilities_of(Model(make(), cross_entropy), PUBLIC)
    assert known.layers is None
    assert why in known.why_not
