"""A model is a vector of parameters and a loss; a record's gradient is the same however it is computed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfl.errors import BadInput
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy
from grids import each


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 4)
    )


class Branching(nn.Module):
    """Looks at the value of its input to decide what to do, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.linear(x)
        return 2 * outputs if x[:, 0].sum().item() > 0 else outputs


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(x)[0][:, -1])


SHAPES = {mlp: (3,), cnn: (1, 6, 6), Branching: (3,), Recurrent: (5, 2)}


def model_and_data(make: Any, count: int = 6, **options: Any) -> tuple[Model, Records]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make().double()
        x = torch.randn(count, *SHAPES[make], dtype=torch.float64)
    return Model(module, cross_entropy, **options), Records(x, torch.arange(count) % 4)


def record_gradients(model: Model, parameters: Tensor, x: Tensor, y: Tensor, *, vectorised: bool) -> Tensor:
    """Return [B, d]: the blocks lie side by side in the order of the parameters."""
    return torch.cat(model.record_gradients(parameters, x, y, vectorised=vectorised), dim=1)


def by_plain_autograd(model: Model, records: Records) -> Tensor:
    """Return [n, d] from a loop over records and .backward(), as one would write it without dpfl."""
    rows = []
    for i in range(len(records)):
        model.module.zero_grad()
        functional.cross_entropy(model.module(records.x[i : i + 1]), records.y[i : i + 1]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.module.parameters()]))
    return torch.stack(rows)


def test_the_vector_is_a_copy_in_the_order_of_the_module() -> None:
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 2.0]]))
        module.bias.copy_(torch.tensor([3.0]))
    model = Model(module, cross_entropy)
    parameters = model.vector()
    assert parameters.tolist() == [1.0, 2.0, 3.0]
    parameters.zero_()
    assert model.vector().tolist() == [1.0, 2.0, 3.0]


def test_split_and_load_invert_the_vector() -> None:
    model = Model(mlp(), cross_entropy)
    parameters = torch.arange(float(model.dim))
    parts = model.split(parameters)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "0.weight": (5, 3),
        "0.bias": (5,),
        "2.weight": (4, 5),
        "2.bias": (4,),
    }
    assert torch.equal(torch.cat([part.flatten() for part in parts.values()]), parameters)
    model.load(parameters)
    assert torch.equal(model.vector(), parameters)
    assert torch.equal(model.module[2].weight.detach(), torch.arange(20.0, 40.0).reshape(4, 5))  # type: ignore[index]


def test_mean_loss_is_torchs_own() -> None:
    model, records = model_and_data(mlp)
    ours = model.mean_loss(model.split(model.vector()), records.x, records.y)
    assert torch.equal(ours, functional.cross_entropy(model.module(records.x), records.y, reduction="none").mean())


def test_the_gradient_by_hand() -> None:
    # Loss (w·x − y)² at w = 2: x = 3, y = 1 gives 2·(6 − 1)·3 = 30; x = 1, y = 4 gives 2·(2 − 4)·1 = −4.
    model = Model(nn.Linear(1, 1, bias=False), lambda outputs, y: (outputs.squeeze(-1) - y).square())
    parameters, x, y = torch.tensor([2.0]), torch.tensor([[3.0], [1.0]]), torch.tensor([1.0, 4.0])
    for vectorised in (True, False):
        assert record_gradients(model, parameters, x, y, vectorised=vectorised).tolist() == [[30.0], [-4.0]]
    assert model.gradient(parameters, x, y).tolist() == [13.0]


@pytest.mark.parametrize("make", [mlp, cnn])
def test_record_gradients_agree_with_plain_autograd(make: Any) -> None:
    model, records = model_and_data(make)
    expected = by_plain_autograd(model, records)
    assert model.vectorises(records.x, records.y)
    for vectorised in (True, False):
        gradients = record_gradients(model, model.vector(), records.x, records.y, vectorised=vectorised)
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.gradient(model.vector(), records.x, records.y), expected.mean(0))


def test_gradients_are_taken_at_the_parameters_that_are_asked_about() -> None:
    model, records = model_and_data(mlp)
    parameters = model.vector() + 0.1
    asked = record_gradients(model, parameters, records.x, records.y, vectorised=True)
    assert not torch.equal(model.vector(), parameters)  # the module itself has not moved
    model.load(parameters)
    torch.testing.assert_close(asked, by_plain_autograd(model, records), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("vectorised", [True, False])
def test_every_records_gradient_holds_the_ridge_penalty(vectorised: bool) -> None:
    # The gradient of κ/2·‖w‖² is κ·w, in each record's gradient and so in their mean.
    plain, records = model_and_data(mlp)
    ridged, _ = model_and_data(mlp, ridge=0.3)
    parameters = plain.vector()
    rows = [record_gradients(m, parameters, records.x, records.y, vectorised=vectorised) for m in (plain, ridged)]
    torch.testing.assert_close(rows[1] - rows[0], (0.3 * parameters).expand_as(rows[0]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ridged.gradient(parameters, records.x, records.y), rows[1].mean(0))


def test_frozen_parameters_stay_out() -> None:
    module = mlp()
    module[0].requires_grad_(False)  # type: ignore[index]
    before = module[0].weight.clone()  # type: ignore[index]
    model = Model(module, cross_entropy, ridge=0.1)
    assert model.dim == 4 * 5 + 4
    assert list(model.split(model.vector())) == ["2.weight", "2.bias"]
    x, y = torch.ones(2, 3), torch.tensor([0, 1])
    for vectorised in (True, False):
        assert record_gradients(model, model.vector(), x, y, vectorised=vectorised).shape == (2, 24)
    model.load(torch.zeros(24))
    assert torch.equal(module[0].weight, before)  # type: ignore[index]


def test_a_parameter_that_the_loss_never_sees_has_a_zero_gradient() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.linear = nn.Parameter(torch.ones(2)), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    model = Model(Idle(), cross_entropy)
    for vectorised in (True, False):
        rows = record_gradients(model, model.vector(), torch.ones(2, 3), torch.tensor([0, 1]), vectorised=vectorised)
        assert rows[:, :2].abs().max() == 0
        assert rows[:, 2:].abs().max() > 0


def test_integer_buffers_are_left_alone() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 4)
            self.register_buffer("columns", torch.tensor([2, 0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x[:, self.columns])  # type: ignore[index]

    model = Model(Picky(), cross_entropy)
    assert model.dim == 2 * 4 + 4
    assert "columns" not in model.split(model.vector())
    model.load(torch.full((12,), 0.5))
    assert model.module.columns.tolist() == [2, 0]  # type: ignore[operator]
    assert model.module.columns.dtype == torch.int64
    records = Records(torch.tensor([[1.0, 9.0, 2.0], [0.0, 9.0, 1.0]]), torch.tensor([0, 3]))
    rows = [record_gradients(model, model.vector(), records.x, records.y, vectorised=v) for v in (True, False)]
    torch.testing.assert_close(*rows)


@each(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, track_running_stats=False),  # it mixes the records of a batch all the same
        nn.BatchNorm2d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, track_running_stats=True),
    ],
    ids=repr,
)
def test_a_layer_that_mixes_records_is_refused_with_a_way_out(layer: nn.Module) -> None:
    with pytest.raises(BadInput, match=r"model must not mix records.*nn\.GroupNorm") as refusal:
        Model(nn.Sequential(nn.Linear(2, 4), nn.Sequential(layer)), cross_entropy)
    assert "'1.0'" in str(refusal.value)  # where it sits
    assert type(layer).__name__ in str(refusal.value)
    with pytest.raises(BadInput, match="itself"):
        Model(layer, cross_entropy)


@each("layer", [nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm1d(4)], ids=repr)
def test_a_layer_that_keeps_records_apart_is_accepted(layer: nn.Module) -> None:
    assert Model(nn.Sequential(nn.Linear(2, 4), layer), cross_entropy).dim >= 12


def test_a_module_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(BadInput, match="trainable parameters"):
        Model(nn.ReLU(), cross_entropy)
    with pytest.raises(BadInput, match="requires_grad"):
        Model(mlp().requires_grad_(False), cross_entropy)


def test_check_accepts_what_fits() -> None:
    for make in (mlp, cnn):
        model, records = model_and_data(make)
        model.check(records.x, records.y)


class Centred(nn.Module):
    """Subtracts the mean of the batch, so that each record is seen in every other's output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - x.mean(0))


class Remembering(nn.Module):
    """Keeps a running mean of what it has seen, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(x.detach().mean(0))  # type: ignore[operator]
        return self.inner(x)


def test_check_refuses_a_module_that_mixes_records() -> None:
    x, y = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    with pytest.raises(BadInput, match="do not mix records"):
        Model(Centred(), cross_entropy).check(x, y)
    model, records = model_and_data(Branching)  # decides for all records by the first
    with pytest.raises(BadInput, match="do not mix records"):
        model.check(records.x, records.y)


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_check_refuses_a_loss_that_pairs_every_output_with_every_target() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(BadInput, match="match the shapes"):
        Model(nn.Linear(5, 1), nn.MSELoss()).check(x, torch.tensor([1.0, -3.0, 0.0, 2.0]))


def test_check_refuses_a_module_that_remembers_records() -> None:
    with pytest.raises(BadInput, match="buffer 'seen' changes"):
        Model(Remembering(), cross_entropy).check(torch.ones(4, 5), torch.tensor([0, 1, 2, 0]))


def test_check_refuses_records_of_another_shape() -> None:
    model, _ = model_and_data(mlp)
    wrong = Records(torch.zeros(2, 7, dtype=torch.float64), torch.tensor([0, 1]))
    with pytest.raises(BadInput, match=r"model must take records of shape \[7\], but Sequential failed") as refusal:
        model.check(wrong.x, wrong.y)
    assert "\n" not in str(refusal.value)


def test_check_refuses_labels_that_the_model_has_no_output_for() -> None:
    model, records = model_and_data(mlp)
    with pytest.raises(BadInput, match="model must take"):
        model.check(records.x, records.y + 4)


def test_check_refuses_a_summed_loss() -> None:
    _, records = model_and_data(mlp)
    with pytest.raises(BadInput, match=r"loss must be a mean.*reduction='mean' or 'none'"):
        Model(mlp().double(), nn.CrossEntropyLoss(reduction="sum")).check(records.x, records.y)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_check_refuses_a_loss_that_is_not_finite(value: float) -> None:
    _, records = model_and_data(mlp)
    with pytest.raises(BadInput, match=f"loss must be finite on the first records, was {value}"):
        Model(mlp().double(), lambda outputs, y: outputs.abs().sum(-1) * value).check(records.x, records.y)


@pytest.mark.parametrize("vectorised", [True, False])
def test_a_mean_loss_and_a_loss_of_each_record_are_the_same(vectorised: bool) -> None:
    model, records = model_and_data(mlp)
    parameters, rows, means = model.vector(), [], []
    for reduction in ("mean", "none"):
        same = Model(model.module, nn.CrossEntropyLoss(reduction=reduction))
        same.check(records.x, records.y)
        rows.append(record_gradients(same, parameters, records.x, records.y, vectorised=vectorised))
        means.append(same.gradient(parameters, records.x, records.y))
    torch.testing.assert_close(*rows, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(*means, rtol=1e-12, atol=1e-14)


def test_what_cannot_be_vectorised_is_right_one_by_one() -> None:
    model, records = model_and_data(Branching)
    assert len({bool(x > 0) for x in records.x[:, 0]}) == 2  # both branches are taken
    assert model.vectorises(records.x, records.y) is False
    rows = record_gradients(model, model.vector(), records.x, records.y, vectorised=False)
    torch.testing.assert_close(rows, by_plain_autograd(model, records), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_recurrent_model_is_right_whichever_way_it_is_taken() -> None:
    model, records = model_and_data(Recurrent)
    ways = {False, model.vectorises(records.x, records.y)}
    for vectorised in ways:
        rows = record_gradients(model, model.vector(), records.x, records.y, vectorised=vectorised)
        torch.testing.assert_close(rows, by_plain_autograd(model, records), rtol=1e-8, atol=1e-10)


def test_tied_parameters_count_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    model = Model(module.double(), cross_entropy)
    assert model.dim == 9 + 3 + 3
    records = Records(torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 2]))
    expected = by_plain_autograd(model, records)
    for vectorised in (True, False):
        rows = record_gradients(model, model.vector(), records.x, records.y, vectorised=vectorised)
        torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)
