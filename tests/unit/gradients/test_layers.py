"""Every kind of layer, under shared parameters and under each client's own, against autograd record by record."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfl.federation import Records
from dpfl.gradients.layered import Layered, layered
from dpfl.gradients.layers import kind_of
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy
from dpfl.orders import Norm
from grids import each

CLASSES, RECORDS, CLIENTS = 3, 6, 3

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's, once


@pytest.fixture(autouse=True)
def same_layers() -> None:
    torch.manual_seed(0)  # torch's own layers fill themselves


def numbers(*shape: int) -> Tensor:
    return torch.randn(RECORDS, *shape, dtype=torch.float64)


def words(length: int, table: int = 7) -> Tensor:
    return torch.randint(0, table, (RECORDS, length))


class Bend(nn.Module):
    """Brings any outputs to one number a class, so that each of them has a derivative of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        flat = self.layer(x).flatten(1)
        waves = torch.arange(flat.shape[1] * CLASSES, dtype=flat.dtype).sin().view(flat.shape[1], CLASSES)
        return (flat + 0.3 * flat.square()) @ waves


def assert_right(module: nn.Module, x: Tensor) -> None:
    """Compare gradients, lengths and sums, clipped and not, with those of single records; and ask if it is trusted."""
    model, y = Model(module.double(), cross_entropy), torch.arange(len(x)) % CLASSES
    layers = Layered(model, x)
    own = model.vector() + 0.2 * torch.randn(CLIENTS, model.dim, dtype=torch.float64)
    each = len(x) // CLIENTS
    for parameters in (own[0], own):
        models = parameters if parameters.ndim == 2 else parameters.expand(CLIENTS, -1)
        alone = torch.stack([model.gradient(models[r // each], x[r : r + 1], y[r : r + 1]) for r in range(len(x))])
        assert_formed(layers, parameters, Records(x, y), alone)
        counts = torch.rand(len(x), dtype=torch.float64)
        for norm in (1, 2, None):
            assert_summed(layers, parameters, Records(x, y), alone, counts, norm)
            assert_summed(layers, parameters, Records(x, y), alone, None, norm)
        if parameters.ndim == 1:
            whole = layers.sums(parameters, x, y, counts, None, 1)[0]
            torch.testing.assert_close(whole, counts @ alone, rtol=1e-9, atol=1e-10)
    assert layered(model, x, y) is not None


def assert_formed(layers: Layered, parameters: Tensor, batch: Records, alone: Tensor) -> None:
    parts = {
        (f"{name}.{part}" if name else part): value
        for name, layer in layers.gradients(parameters, batch.x, batch.y).items()
        for part, value in layer.form().items()
    }
    formed = torch.cat([parts[name].flatten(1) for name in layers.model.split(parameters)], dim=1)
    torch.testing.assert_close(formed, alone, rtol=1e-9, atol=1e-10)
    for norm in (1, 2):
        found = layers.record_lengths(parameters, batch.x, batch.y, norm)
        torch.testing.assert_close(found, torch.linalg.vector_norm(alone, ord=norm, dim=1), rtol=1e-9, atol=1e-12)


def assert_summed(
    layers: Layered, parameters: Tensor, batch: Records, alone: Tensor, counts: Tensor | None, norm: Norm | None
) -> None:
    scales, bound = torch.ones(len(alone), dtype=torch.float64), None
    if norm is not None:
        reach = torch.linalg.vector_norm(alone, ord=norm, dim=1)
        limits = reach.median() * torch.logspace(-1, 1, len(alone), dtype=torch.float64)
        scales, bound = (limits / reach).clamp(max=1), (limits, norm)
        assert 0 < (scales < 1).sum() < len(scales)  # some are clipped, and some are not
    if counts is not None:
        scales = scales * counts
    expected = (scales[:, None] * alone).view(CLIENTS, -1, alone.shape[1]).sum(dim=1)
    for careful in (False, True):
        ours = layers.sums(parameters, batch.x, batch.y, counts, bound, CLIENTS, careful=careful)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


# Linear layers.


@each("bias", [True, False])
@each("positions", [(), (1,), (5,), (2, 3)])
def test_linear(bias: bool, positions: tuple[int, ...]) -> None:
    assert_right(Bend(nn.Linear(4, 5, bias=bias)), numbers(*positions, 4))


def test_a_module_that_is_itself_a_layer() -> None:
    assert_right(nn.Linear(4, CLASSES), numbers(4))


# Convolutions, by the ways of a CPU and by those of a GPU, which give the same numbers anywhere.


@pytest.fixture(params=["CPU", "GPU", "GPU in TF32"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.gradients.convolution._on_gpu", lambda x: "GPU" in request.param)
    monkeypatch.setattr("dpfl.gradients.convolution._in_tf32", lambda: "TF32" in request.param)


both_ways = pytest.mark.usefixtures("way")

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strided": {"stride": 2},
    "uneven strides": {"stride": (2, 1)},
    "dilated": {"dilation": 2},
    "uneven dilations": {"dilation": (1, 2)},
    "padded": {"padding": 1},
    "uneven paddings": {"padding": (2, 1)},
    "padded by name": {"padding": "same"},
    "unlike borders": {"padding": "same", "kernel_size": (2, 4)},
    "valid": {"padding": "valid"},
    "uneven kernel": {"kernel_size": (1, 3)},
    "single pixels": {"kernel_size": 1},
    "the whole image": {"kernel_size": (6, 7)},
    "all at once": {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 2), "dilation": (2, 1)},
}


@both_ways
@each("bias", [True, False])
@each("name", CONVOLUTIONS)
def test_convolution(name: str, bias: bool) -> None:
    layer = nn.Conv2d(2, 3, **({"kernel_size": 3} | CONVOLUTIONS[name]), bias=bias)
    assert_right(Bend(layer), numbers(2, 6, 7))


@both_ways
@each("channels", [1, 2])
@each(
    "options",
    [
        {}, {"stride": 3}, {"padding": 2}, {"padding": "same", "kernel_size": 4}, {"dilation": 2, "padding": "same"},
        {"bias": False}, {"kernel_size": 1},
    ],
    ids=str,
)  # fmt: skip
def test_convolution_of_signals(options: dict[str, int], channels: int) -> None:
    assert_right(Bend(nn.Conv1d(channels, 3, **({"kernel_size": 3} | options))), numbers(channels, 9))


@both_ways
@each("bias", [True, False])
def test_a_convolution_behind_another_hands_derivatives_on(bias: bool) -> None:
    # The image of the second is no record: torch's convolution and, with own kernels, the patches' backward are used.
    layers = (
        nn.Conv2d(1, 3, 3, padding=1, bias=bias), nn.Tanh(),
        nn.Conv2d(3, 2, (2, 3), stride=(1, 2), padding=(0, 1), dilation=(2, 1), bias=bias), nn.Tanh(),
        nn.Conv2d(2, 2, 2, padding="same"),
    )  # fmt: skip
    assert_right(Bend(nn.Sequential(*layers)), numbers(1, 6, 5))


@both_ways
def test_a_signal_behind_another_hands_derivatives_on() -> None:
    layers = nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv1d(3, 2, 2, dilation=2)
    assert_right(Bend(nn.Sequential(*layers)), numbers(2, 9))


@both_ways
def test_other_records_and_other_parameters_are_not_taken_for_the_last_ones() -> None:
    model = Model(Bend(nn.Conv2d(1, 2, 3)).double(), cross_entropy)
    layers, whole = Layered(model, numbers(1, 4, 4)), torch.zeros(RECORDS).long()
    limits = torch.full((RECORDS,), 0.1, dtype=torch.float64)
    for parameters in (model.vector(), model.vector().expand(CLIENTS, -1)):
        for x in (numbers(1, 4, 4), numbers(1, 4, 4), numbers(1, 4, 4)[:3]):
            clients, y, bound = len(parameters) if parameters.ndim == 2 else 1, whole[: len(x)], (limits[: len(x)], 2)
            ours = layers.sums(parameters, x, y, None, bound, clients).sum(dim=0)
            alone = Layered(model, x).sums(model.vector(), x, y, None, bound, 1)[0]
            torch.testing.assert_close(ours, alone, rtol=1e-9, atol=1e-10)
            again = layers.sums(2 * parameters, x, y, None, bound, clients).sum(dim=0)
            alone = Layered(model, x).sums(2 * model.vector(), x, y, None, bound, 1)[0]
            torch.testing.assert_close(again, alone, rtol=1e-9, atol=1e-10)


@both_ways
@each("last", [True, False])
def test_images_may_lie_in_memory_as_they_like(last: bool) -> None:
    x = numbers(2, 6, 7)
    x = x.contiguous(memory_format=torch.channels_last) if last else x.transpose(2, 3).contiguous().transpose(2, 3)
    assert_right(Bend(nn.Conv2d(2, 3, 3, padding=1)), x)


@each(
    "layers",
    [
        (nn.ReLU(), nn.MaxPool2d(2)),
        (nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=1, padding=1)),
        (nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        (nn.ReLU(), nn.AvgPool2d(2)),
        (nn.MaxPool2d(2), nn.ReLU()),
        (nn.ReLU6(), nn.MaxPool2d(2)),
    ],
    ids=str,
)
def test_pooling_before_or_behind_a_bend(layers: tuple[nn.Module, ...]) -> None:
    scale = 10 if isinstance(layers[0], nn.ReLU6) else 1  # else nothing is above 6
    assert_right(Bend(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), *layers)), scale * numbers(1, 6, 5))


# Normalisation.


@each("shape", [(6,), (6, 5), (6, 3, 4)])
@each("groups", [1, 3])
def test_group_norm(shape: tuple[int, ...], groups: int) -> None:
    assert_right(Bend(nn.GroupNorm(groups, 6)), numbers(*shape))


@each("bias", [True, False])
@each(("shape", "over"), [((6,), 1), ((4, 6), 1), ((4, 6), 2), ((2, 3, 4), 1), ((2, 3, 4), 2)])
def test_layer_norm(shape: tuple[int, ...], over: int, bias: bool) -> None:
    assert_right(Bend(nn.LayerNorm(shape[-over:], eps=0.1, bias=bias)), numbers(*shape))


def test_normalisation_between_layers_hands_derivatives_on() -> None:
    layers = (
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4, eps=0.1),
        nn.ReLU(),
        nn.Flatten(1, 2),
        nn.LayerNorm(3),
        nn.Linear(3, 2),
    )
    assert_right(Bend(nn.Sequential(*layers)), numbers(1, 5, 5))


# Tables.


@each("length", [(), (1,), (5,), (2, 3)])
def test_embedding(length: tuple[int, ...]) -> None:
    assert_right(Bend(nn.Embedding(7, 4)), torch.randint(0, 7, (RECORDS, *length)))


def test_words_that_a_record_repeats_add_up_before_they_are_measured() -> None:
    x = torch.tensor([[0, 0, 0, 0], [1, 1, 2, 2], [3, 4, 5, 6], [6, 0, 6, 0], [2, 2, 2, 1], [5, 5, 5, 5]])
    assert_right(Bend(nn.Embedding(7, 4)), x)


@each("padding", [0, 3, -1])
def test_the_word_for_padding_learns_nothing(padding: int) -> None:
    layer = nn.Embedding(7, 4, padding_idx=padding)
    x = words(5)
    x[:, 2] = padding % 7
    x[:, 4] = padding % 7
    assert_right(Bend(layer), x)
    model = Model(Bend(layer.double()), cross_entropy)
    total = Layered(model, x).sums(model.vector(), x, torch.zeros(RECORDS).long(), None, None, 1)
    assert total.view(7, 4)[padding].abs().sum() == 0
    assert total.abs().sum() > 0


# Whole modules.


class Block(nn.Module):
    """A residual block with a way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.way = nn.Conv2d(2, 4, 1, stride=2, bias=False)
        self.first, self.second = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(2, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(functional.relu(self.norm(self.first(x))))
        return self.last(functional.relu(h + self.way(x)).mean(dim=(2, 3)))


class Encoder(nn.Module):
    """A transformer of one layer with two heads, from plain parts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, width, padding_idx=0), nn.Embedding(5, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]).expand_as(x))
        normal = self.before(h)
        heads = (layer(normal).unflatten(2, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        h = h + self.out(attended)
        h = h + self.narrow(functional.gelu(self.wide(self.between(h))))
        return self.last(h.mean(dim=1))


class Forked(nn.Module):
    """Shows each record to several convolutions, two of them with patches of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(1, 2, 3, padding=1)
        self.wide, self.large = nn.Conv2d(1, 2, 3, padding=2, dilation=2), nn.Conv2d(1, 2, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        near = self.first(x).tanh() + self.second(x).square()
        far = self.wide(x).sin() * self.large(x)
        return (near + far).flatten(1)[:, :CLASSES]


class Branches(nn.Module):
    """A dictionary and a list of layers, nested, one of them used after those that come later."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"late": nn.Linear(3, CLASSES), "early": nn.Linear(4, 3)})
        self.steps = nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts["early"](x).tanh()
        for layer in reversed(self.steps):
            h = h + layer(h)
        return self.parts["late"](h)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual block": (Block, lambda: numbers(2, 6, 6)),
    "forked": (Forked, lambda: numbers(1, 5, 4)),
    "encoder": (Encoder, lambda: words(5)),
    "branches": (Branches, lambda: numbers(4)),
}


@each("name", MODULES)
def test_whole_modules(name: str) -> None:
    module, x = MODULES[name]
    assert_right(module(), x())


# Which layers are of a known kind.


class Other(nn.Linear):
    pass


@each(
    "layer",
    [
        Other(2, 2), nn.Conv2d(2, 2, 1, groups=2), nn.Conv1d(1, 1, 3, padding=1, padding_mode="replicate"),
        nn.Conv3d(1, 1, 1), nn.ConvTranspose1d(1, 1, 1), nn.GroupNorm(1, 2, affine=False),
        nn.LayerNorm(2, elementwise_affine=False), nn.Embedding(2, 2, max_norm=1.0), nn.Embedding(2, 2, sparse=True),
        nn.Embedding(2, 2, scale_grad_by_freq=True), nn.EmbeddingBag(2, 2), nn.RMSNorm(2), nn.InstanceNorm2d(2),
        nn.Bilinear(2, 2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_other_layers_have_no_kind(layer: nn.Module) -> None:
    assert kind_of(layer) is None


@each(
    "layer",
    [
        nn.Linear(2, 2), nn.Conv1d(1, 1, 3, padding=1), nn.Conv2d(2, 4, 1), nn.GroupNorm(1, 2), nn.LayerNorm(2),
        nn.Embedding(2, 2), nn.LayerNorm((2, 3), bias=False), nn.Embedding(3, 2, padding_idx=1),
    ],
    ids=str,
)  # fmt: skip
def test_known_layers_have_one(layer: nn.Module) -> None:
    assert kind_of(layer) is not None
