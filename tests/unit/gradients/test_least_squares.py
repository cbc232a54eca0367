"""Linear regression by its moments: which models are one, and that their gradients are autograd's."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfl.federation import Records
from dpfl.gradients import least_squares
from dpfl.gradients.least_squares import Moments, is_least_squares
from dpfl.models import Model, build
from dpfl.models.architectures import squared_error
from dpfl.models.losses import Loss
from dpfl.streams import Streams
from grids import each

FEATURES = 4


@pytest.fixture(autouse=True)
def same_layers() -> None:
    torch.manual_seed(0)  # torch's own layers fill themselves


def records(count: int, *shape: int) -> Records:
    source = torch.Generator().manual_seed(count)
    x = torch.randn(count, *(shape or (FEATURES,)), generator=source, dtype=torch.float64)
    return Records(x, torch.randn(count, generator=source, dtype=torch.float64))


def regression(*, bias: bool = True) -> Model:
    return Model(nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 1, bias=bias)).double(), squared_error)


# Moments.


def test_the_moments_by_hand() -> None:
    # Records x = 1, y = 2 and x = 3, y = 1 at w = 2, b = 1: the outputs are 3 and 7, so 2·(1·1 + 6·3) = 38 in w and
    # 2·(1 + 6) = 14 in b.
    model = Model(nn.Linear(1, 1), squared_error)
    clients = [Records(torch.tensor([[1.0], [3.0]]), torch.tensor([2.0, 1.0]))]
    moments = Moments(model, clients)
    assert moments.moments.tolist() == [[[20.0, 8.0, -10.0], [8.0, 4.0, -6.0]]]  # twice (XᵀX | −Xᵀy)
    assert moments.sums(torch.tensor([2.0, 1.0]), torch.tensor([0])).tolist() == [[38.0, 14.0]]


@each("bias", [True, False])
@each("at_once", [1, 60, 2**24])
def test_sums_of_gradients_are_autograds_for_clients_of_any_size(
    bias: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(least_squares, "_AT_ONCE", at_once)
    model, clients = regression(bias=bias), [records(count) for count in (3, 8, 3, 1, 8, 8)]
    moments = Moments(model, clients)
    shared = torch.randn(model.dim, dtype=torch.float64)
    own = torch.randn(3, model.dim, dtype=torch.float64)
    chosen = [4, 0, 3]
    for parameters, models in ((shared, shared.expand(3, -1)), (own, own)):
        found = moments.sums(parameters, torch.tensor(chosen))
        for row, at, client in zip(found, models, chosen, strict=True):
            mine = clients[client]
            expected = len(mine) * model.gradient(at, mine.x, mine.y)
            torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-12)


def test_moments_are_taken_and_summed_in_double_precision() -> None:
    # Targets of 10⁴ + a little: in single precision the products would lose the little.
    model = Model(nn.Linear(1, 1, bias=False), squared_error)
    x, y = torch.full((1000, 1), 1.0), 10_000 + torch.linspace(0, 1, 1000)
    found = Moments(model, [Records(x, y)]).sums(torch.tensor([10_000.0]), torch.tensor([0]))
    assert found.dtype == torch.float64
    true = 2 * (10_000 - y.double()).sum()
    assert found.item() == pytest.approx(true.item(), rel=1e-6)


# Which models are linear regressions.


@each("shape", [(FEATURES,), (2, 2)])
@each("bias", [True, False])
def test_linear_regressions_are_known(shape: tuple[int, ...], bias: bool) -> None:
    batch = records(12, *shape)
    assert is_least_squares(regression(bias=bias), batch.x, batch.y)


def test_the_named_one_is_known() -> None:
    model = build("linear", shape=(2, 3), classes=None, rng=Streams(0).public.generator("model"))
    batch = records(12, 2, 3)
    assert is_least_squares(model, batch.x.float(), batch.y.float())
    bare = Model(nn.Linear(FEATURES, 1).double(), squared_error)
    assert is_least_squares(bare, records(12).x, records(12).y)


class Shifted(nn.Module):
    """Not linear, although its layers are: with a public sample far from the kink nobody would notice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        nn.init.constant_(self.layer.bias, 50.0)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layer(x))


class Dropping(nn.Module):
    """Not linear while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(functional.dropout(x, 0.5, self.training))


class Moved(nn.Module):
    """Adds a number that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("offset", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.offset


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.square())


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.huber_loss(outputs.squeeze(-1), targets, reduction="none", delta=100.0)


def halved(outputs: Tensor, targets: Tensor) -> Tensor:
    return squared_error(outputs, targets) / 2


@each(
    ("module", "loss", "ridge"),
    [
        (nn.Linear(FEATURES, 1), squared_error, 0.1),
        (nn.Linear(FEATURES, 1), huber, 0.0),
        (nn.Linear(FEATURES, 1), halved, 0.0),
        (nn.Sequential(nn.Linear(FEATURES, 1), nn.Linear(1, 1)), squared_error, 0.0),
        (nn.Sequential(nn.Linear(FEATURES, 1), nn.ReLU()), squared_error, 0.0),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 1)), squared_error, 0.0),
        (nn.Sequential(nn.Tanh(), nn.Linear(FEATURES, 1)), squared_error, 0.0),
        (Moved(), squared_error, 0.0),
        (Squared(), squared_error, 0.0),
        (Shifted(), squared_error, 0.0),
        (Dropping(), squared_error, 0.0),
    ],
    ids=[
        "penalty", "huber", "halved", "two layers", "relu", "dropout", "tanh", "buffer", "squared inputs",
        "a bend far away", "dropout inside",
    ],
)  # fmt: skip
def test_other_models_are_not(module: nn.Module, loss: Loss, ridge: float) -> None:
    model, batch = Model(module.double(), loss, ridge=ridge), records(12)
    model.module.eval()
    assert not is_least_squares(model, batch.x, batch.y)


def test_a_frozen_bias_is_not_forgotten() -> None:
    layer = nn.Linear(FEATURES, 1).double()
    nn.init.constant_(layer.bias, 3.0)
    layer.bias.requires_grad_(False)
    batch = records(12)
    assert not is_least_squares(Model(layer, squared_error), batch.x, batch.y)
