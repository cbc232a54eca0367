"""A model as its layers, against the same sums formed record by record; and for which models it is allowed."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from dpfl.errors import BadInput
from dpfl.federation import Records
from dpfl.gradients.clipping import sum_of_clipped
from dpfl.gradients.layered import Layered, layered, sum_of_clipped_layered
from dpfl.models import Model, build
from dpfl.models.architectures import cross_entropy, hinge, squared_error
from dpfl.models.losses import Loss
from dpfl.orders import Norm, RecordClip
from dpfl.streams import Streams
from grids import each

FEATURES, CLASSES = 6, 3
ROOM = 2**-16  # what scales leave for rounding in single precision, twice: a clipped gradient ends below its bound


@pytest.fixture(autouse=True)
def same_layers() -> None:
    torch.manual_seed(0)  # torch's own layers fill themselves


def records(count: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Records:
    source = torch.Generator().manual_seed(1)
    x = scale * torch.randn(count, FEATURES, generator=source, dtype=dtype)
    return Records(x, torch.randint(0, CLASSES, (count,), generator=source))


def shaped(*shape: int, count: int = 12, dtype: torch.dtype = torch.float32) -> Records:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(count, *shape, generator=source, dtype=dtype)
    return Records(x, torch.randint(0, CLASSES, (count,), generator=source))


def words(length: int, *, count: int = 12, table: int = 9) -> Records:
    source = torch.Generator().manual_seed(1)
    x = torch.randint(0, table, (count, length), generator=source)
    return Records(x, torch.randint(0, CLASSES, (count,), generator=source))


def classifier(*layers: nn.Module) -> Model:
    return Model(nn.Sequential(*layers), cross_entropy)


def mlp(*, bias: bool = True, activation: type[nn.Module] = nn.ReLU) -> Model:
    return classifier(
        nn.Linear(FEATURES, 8, bias=bias), activation(), nn.Linear(8, 5, bias=not bias), activation(),
        nn.Linear(5, CLASSES, bias=bias),
    )  # fmt: skip


def named(name: str) -> tuple[Model, Records]:
    """Return one of the papers' models with records that fit it."""
    classes = None if name == "linear" else 2 if name == "svm" else CLASSES
    shape = (1, 16, 16) if "cnn" in name else (2, 3)
    model = build(name, shape=shape, classes=classes, rng=Streams(0).public.generator("model"))
    source = torch.Generator().manual_seed(1)
    x = torch.randn(12, *shape, generator=source)
    y = torch.randn(12, generator=source) if classes is None else torch.randint(0, classes, (12,), generator=source)
    return model, Records(x, y)


def clipped(model: Model, batch: Records, bound: RecordClip, parameters: Tensor | None = None) -> Tensor:
    parameters = model.vector() if parameters is None else parameters
    return sum_of_clipped_layered(Layered(model, batch.x), parameters, batch.x, batch.y, bound)


def quickly(model: Model, batch: Records, bound: RecordClip) -> Tensor:
    """Return the same without care: right, or not finite."""
    norms = torch.full((len(batch),), bound.clip_norm, dtype=torch.float64)
    return Layered(model, batch.x).sums(model.vector(), batch.x, batch.y, None, (norms, bound.norm), 1)[0]


def one_by_one(model: Model, batch: Records, parameters: Tensor | None = None) -> Tensor:
    """Return the gradient of each record [R, d]."""
    parameters = model.vector() if parameters is None else parameters
    return model.record_gradients(parameters, batch.x, batch.y, vectorised=False)[0]


def record_by_record(model: Model, batch: Records, bound: RecordClip, parameters: Tensor | None = None) -> Tensor:
    return sum_of_clipped([one_by_one(model, batch, parameters)], bound.clip_norm, bound.norm)


def lengths(gradients: Tensor, norm: int) -> Tensor:
    return torch.linalg.vector_norm(gradients.double(), ord=norm, dim=1)


ROOM = 2.0**-17  # that a clip by layers leaves in single precision for what rounding adds
ALIKE = 1e-5 + ROOM


def assert_alike(ours: Tensor, theirs: Tensor, relative: float = ALIKE) -> None:
    assert ours.shape == theirs.shape
    assert torch.linalg.vector_norm(ours - theirs) <= relative * torch.linalg.vector_norm(theirs)


def assert_trusted_and_right(model: Model, batch: Records, relative: float = ALIKE) -> Layered:
    """Check that the model is taken, and that sums are those of gradients formed one by one, for some clips."""
    layers = layered(model, batch.x, batch.y)
    assert layers is not None
    model.module.train()
    alone = one_by_one(model, batch)
    for norm in (1, 2):
        reach = lengths(alone, norm)
        for bound in (float(reach.min()) / 2 or 0.1, float(reach.median()) or 0.1, float(reach.max()) * 2 or 0.1):
            ours = sum_of_clipped_layered(layers, model.vector(), batch.x, batch.y, RecordClip(bound, norm))
            assert_alike(ours, sum_of_clipped([alone], bound, norm), relative)
    return layers


# By hand.


def test_one_record_of_a_linear_layer_by_hand() -> None:
    # w = (1, 2), b = 0 and the squared error: at x = (2, 1), y = 1 the output is 4 and δ = 2·3 = 6, so the gradient is
    # (12, 6, 6), of length √216 = 6√6 and 24 in L1.
    model = Model(nn.Sequential(nn.Linear(2, 1)), squared_error)
    model.load(torch.tensor([1.0, 2.0, 0.0]))
    batch = Records(torch.tensor([[2.0, 1.0]]), torch.tensor([1.0]))
    for total in (clipped, quickly):
        assert total(model, batch, RecordClip(30.0)).tolist() == pytest.approx([12, 6, 6], rel=ROOM)
        assert total(model, batch, RecordClip(3 * math.sqrt(6))).tolist() == pytest.approx([6, 3, 3], rel=ROOM)
        assert total(model, batch, RecordClip(12.0, 1)).tolist() == pytest.approx([6, 3, 3], rel=ROOM)


def test_two_records_are_clipped_each_by_itself() -> None:
    # As above, and x = (0, 1), y = 2: the output is 2, the gradient 0; and x = (0, 0), y = 1: δ = −2, (0, 0, −2).
    model = Model(nn.Sequential(nn.Linear(2, 1)), squared_error)
    model.load(torch.tensor([1.0, 2.0, 0.0]))
    batch = Records(torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), torch.tensor([1.0, 2.0, 1.0]))
    for total in (clipped, quickly):
        assert total(model, batch, RecordClip(3 * math.sqrt(6))).tolist() == pytest.approx([6, 3, 1], rel=3 * ROOM)
        assert total(model, batch, RecordClip(12.0, 1)).tolist() == pytest.approx([6, 3, 1], rel=3 * ROOM)


def test_a_record_is_measured_over_all_layers() -> None:
    # w = 2 and v = 3 without biases, at x = 1, y = 5: h = 2, the output 6, its δ = 2; the gradient is 6 in w, 4 in v.
    model = Model(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), squared_error)
    model.load(torch.tensor([2.0, 3.0]))
    batch = Records(torch.tensor([[1.0]]), torch.tensor([5.0]))
    assert clipped(model, batch, RecordClip(math.sqrt(52) / 2)).tolist() == pytest.approx([3, 2], rel=ROOM)
    assert clipped(model, batch, RecordClip(5.0, 1)).tolist() == pytest.approx([3, 2], rel=ROOM)


def test_a_penalty_is_clipped_with_the_record_by_hand() -> None:
    # w = (3, 0) and κ = 0.5 at x = (0, 2), y = 1: the output is 0, δ = −2, so the record's gradient is
    # (0, −4) + 0.5·(3, 0) = (1.5, −4), 5.5 long in L1.
    model = Model(nn.Sequential(nn.Linear(2, 1, bias=False)), squared_error, ridge=0.5)
    model.load(torch.tensor([3.0, 0.0]))
    batch = Records(torch.tensor([[0.0, 2.0]]), torch.tensor([1.0]))
    for total in (clipped, quickly):
        assert total(model, batch, RecordClip(10.0)).tolist() == pytest.approx([1.5, -4], rel=ROOM)
        assert total(model, batch, RecordClip(2.75, 1)).tolist() == pytest.approx([0.75, -2], rel=ROOM)


def test_clients_with_models_of_their_own_by_hand() -> None:
    # w·x with the squared error: δ = 2·(w·x − y) and the gradient δ·x. Client 0 (w = 1) has x = 1, y = 0 and x = 2,
    # y = 1, which give 2 and 4; client 1 (w = −1) the same records, which give −2 and −12. Clipped to 3 and counted
    # once and twice: 2 + 2·3 = 8 and −2 − 2·3 = −8; not clipped, 2 + 2·4 = 10 and −2 − 2·12 = −26.
    model = Model(nn.Sequential(nn.Linear(1, 1, bias=False)), squared_error)
    x, y = torch.tensor([[1.0], [2.0], [1.0], [2.0]]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    parameters, counts = torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0, 2.0, 1.0, 2.0])
    layers = Layered(model, x)
    assert layers.sums(parameters, x, y, counts, None, 2).tolist() == [[10.0], [-26.0]]
    for norm in (1, 2):
        for careful in (False, True):
            total = layers.sums(parameters, x, y, counts, (torch.full((4,), 3.0), norm), 2, careful=careful)
            assert total.tolist() == [[pytest.approx(8.0, rel=ROOM)], [pytest.approx(-8.0, rel=ROOM)]]


def test_each_record_has_a_clip_norm_of_its_own() -> None:
    # The gradients are 2 and 4, as above; clipped to 0.5 and 3 they are 0.5 and 3.
    model = Model(nn.Sequential(nn.Linear(1, 1, bias=False)), squared_error)
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 1.0])
    total = Layered(model, x).sums(torch.tensor([1.0]), x, y, None, (torch.tensor([0.5, 3.0]), 2), 1)
    assert total.tolist() == [[pytest.approx(3.5, rel=ROOM)]]


# Against gradients formed one by one.


class Residual(nn.Module):
    """Layers whose order of use is not that of their names, and one that feeds two."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.second, self.first = nn.Linear(5, CLASSES), nn.Linear(5, 5, bias=False), nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.first(x))
        return self.last(h + functional.gelu(self.second(h)))


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": mlp,
    "mlp, other biases": lambda: mlp(bias=False),
    "mlp with tanh": lambda: mlp(activation=nn.Tanh),
    "softmax": lambda: classifier(nn.Linear(FEATURES, CLASSES)),
    "a bare layer": lambda: Model(nn.Linear(FEATURES, CLASSES), cross_entropy),
    "residual": lambda: Model(Residual(), cross_entropy),
    "with a penalty": lambda: Model(mlp().module, cross_entropy, ridge=0.1),
    "a mean loss": lambda: Model(mlp().module, functional.cross_entropy),
    "normalised": lambda: classifier(nn.Linear(FEATURES, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, CLASSES)),
}


@each("name", MODELS)
@each("norm", [1, 2])
@each("count", [1, 2, 13])
def test_the_sum_is_that_of_gradients_clipped_one_by_one(name: str, norm: int, count: int) -> None:
    model, batch = MODELS[name](), records(count, scale=2.0)
    assert layered(model, batch.x, batch.y) is not None
    alone = one_by_one(model, batch)
    reach = lengths(alone, norm)
    for bound in (1e-3, float(reach.median()), float(reach.max()) * 2):
        expected = sum_of_clipped([alone], bound, norm)
        assert_alike(clipped(model, batch, RecordClip(bound, norm)), expected)
        assert_alike(quickly(model, batch, RecordClip(bound, norm)), expected)


@each(
    "name",
    [
        "mlp",
        "softmax",
        "softmax-no-bias",
        "linear",
        "svm",
        "femnist-cnn",
        "femnist-cnn-small",
        "udp-cnn",
        "ali-cnn",
        "ali-authors-cnn",
    ],
)
def test_the_papers_models(name: str) -> None:
    assert_trusted_and_right(*named(name))


def test_in_double_precision_they_agree_to_the_last_digits() -> None:
    model, batch = mlp(), records(9, dtype=torch.float64)
    model.module.double()
    for norm in (1, 2):
        one = RecordClip(float(lengths(one_by_one(model, batch), norm).median()), norm)
        assert_alike(clipped(model, batch, one), record_by_record(model, batch, one), 1e-12)
        assert_alike(quickly(model, batch, one), record_by_record(model, batch, one), 1e-12)
    assert layered(model, batch.x, batch.y) is not None


def test_at_other_parameters_than_the_modules() -> None:
    model, batch = mlp(), records(7)
    parameters = 3 * torch.randn(model.dim)
    ours = clipped(model, batch, RecordClip(0.5), parameters)
    assert_alike(ours, record_by_record(model, batch, RecordClip(0.5), parameters))
    assert not ours.requires_grad


def test_parameters_that_want_gradients_are_left_alone() -> None:
    model, batch = mlp(), records(7)
    parameters = model.vector().requires_grad_()
    assert not clipped(model, batch, RecordClip(0.5), parameters).requires_grad
    assert parameters.grad is None


def test_nothing_is_left_behind() -> None:
    model, batch = mlp(), records(7)
    before = model.vector().clone()
    forwards = [layer.forward for layer in model.module.modules()]
    layers = layered(model, batch.x, batch.y)
    assert layers is not None
    layers.sums(model.vector(), batch.x, batch.y, None, None, 1)
    assert torch.equal(model.vector(), before)
    assert all(p.grad is None for p in [*model.module.parameters(), *layers.module.parameters()])
    assert [layer.forward for layer in model.module.modules()] == forwards
    with pytest.raises(RuntimeError):
        layers.sums(before, batch.x[:, :3], batch.y, None, None, 1)
    total = layers.sums(before, batch.x, batch.y, None, None, 1)[0]  # a batch that failed is forgotten
    assert_alike(total, 7 * model.gradient(before, batch.x, batch.y))


@each("name", MODELS)
@each("bound", [None, 1, 2])
def test_several_clients_are_each_as_if_alone(name: str, bound: Norm | None) -> None:
    model, batch = MODELS[name](), records(12)
    model.module.double()
    batch = Records(batch.x.double(), batch.y)
    parameters = model.vector() + 0.3 * torch.randn(3, model.dim, dtype=torch.float64)
    counts = torch.rand(12, dtype=torch.float64)
    limits = None if bound is None else (torch.linspace(0.1, 2, 12, dtype=torch.float64), bound)
    layers = Layered(model, batch.x)
    for together, models in ((parameters, parameters), (parameters[0], parameters[:1].expand(3, -1))):
        ours = layers.sums(together, batch.x, batch.y, counts, limits, 3)
        assert ours.shape == (3, model.dim)
        for client, own in enumerate(models):
            rows = range(4 * client, 4 * client + 4)
            alone = [model.gradient(own, batch.x[r : r + 1], batch.y[r : r + 1]) for r in rows]
            if limits is not None:
                norms = [torch.linalg.vector_norm(gradient, ord=bound) for gradient in alone]
                alone = [g * min(1, limits[0][r] / norm) for g, norm, r in zip(alone, norms, rows, strict=True)]
            expected = sum(counts[r] * g for g, r in zip(alone, rows, strict=True))
            torch.testing.assert_close(ours[client], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", [1, 2])
def test_lengths_are_those_of_the_records_own_gradients(norm: Norm) -> None:
    for name in ("mlp", "softmax", "svm", "ali-cnn"):
        model, batch = named(name)
        found = Layered(model, batch.x).record_lengths(model.vector(), batch.x, batch.y, norm)
        torch.testing.assert_close(found, lengths(one_by_one(model, batch), norm), rtol=1e-5, atol=1e-30)


# Broken records.


@each("norm", [1, 2])
@each("broken", [math.nan, math.inf, -math.inf, 1e38])
@each("name", ["mlp", "softmax", "mlp with tanh", "with a penalty", "a mean loss", "normalised"])
def test_a_broken_record_counts_as_zero_and_its_neighbours_do_not(norm: int, broken: float, name: str) -> None:
    model, batch = MODELS[name](), records(5)
    bound = RecordClip(0.5, norm)
    expected = clipped(model, Records(batch.x[1:], batch.y[1:]), bound)
    for spoilt in (batch.x[0].clone(), torch.full((FEATURES,), broken)):
        spoilt[2] = broken
        total = clipped(model, Records(torch.cat([spoilt[None], batch.x[1:]]), batch.y), bound)
        assert torch.isfinite(total).all()
        if math.isfinite(broken):  # so large that it may or may not be measured; it is within the bound in any case
            assert torch.linalg.vector_norm((total - expected).double(), ord=norm) <= 0.5 * (1 + 1e-5)
        else:
            assert_alike(total, expected)


@each("norm", [1, 2])
@each("broken", [math.nan, math.inf])
def test_a_broken_image_or_sequence_counts_as_zero(norm: int, broken: float) -> None:
    convolution, image = named("udp-cnn")
    rows = classifier(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, CLASSES)), shaped(5, 3)
    for model, batch in ((convolution, image), rows):
        bound = RecordClip(0.5, norm)
        expected = clipped(model, Records(batch.x[1:], batch.y[1:]), bound)
        batch.x[0].flatten()[3] = broken
        assert_alike(clipped(model, batch, bound), expected)
        assert not torch.isfinite(quickly(model, batch, bound)).all()  # so that whoever asked will ask with care


@pytest.mark.parametrize("norm", [1, 2])
def test_a_broken_record_alone_is_nothing(norm: int) -> None:
    model = mlp()
    batch = Records(torch.full((2, FEATURES), math.nan), torch.tensor([0, 1]))
    assert torch.equal(clipped(model, batch, RecordClip(0.5, norm)), torch.zeros(model.dim))


def test_a_broken_target_counts_as_zero() -> None:
    model = Model(nn.Sequential(nn.Linear(FEATURES, 1)), squared_error)
    batch = Records(records(3).x, torch.tensor([math.nan, math.inf, 0.5]))
    expected = clipped(model, Records(batch.x[2:], batch.y[2:]), RecordClip(0.5))
    assert_alike(clipped(model, batch, RecordClip(0.5)), expected)


# What one record can do.


@each("norm", [1, 2])
@each("scale", [0.01, 1.0, 1e4, 1e18])
def test_no_record_moves_the_sum_by_more_than_twice_the_clip(norm: int, scale: float) -> None:
    model, batch = mlp(), records(8)
    strangers = records(16, scale=scale)
    for bound in (1e-2, 2.0):
        clip = RecordClip(bound, norm)
        start = clipped(model, batch, clip).double()
        for i in range(len(strangers)):
            x, y = batch.x.clone(), batch.y.clone()
            x[i % 8], y[i % 8] = strangers.x[i], strangers.y[i]
            moved = clipped(model, Records(x, y), clip).double()
            assert torch.linalg.vector_norm(moved - start, ord=norm) <= 2 * bound * (1 + 1e-5)


def test_two_opposite_records_come_near_twice_the_clip() -> None:
    # The bound would be of no use if nothing came near it: outputs w·x without bias turn around with the target.
    model = Model(nn.Sequential(nn.Linear(2, 1, bias=False)), squared_error)
    model.load(torch.zeros(2))
    x = torch.tensor([[3.0, 4.0]])
    one, other = (clipped(model, Records(x, torch.tensor([y])), RecordClip(0.5)) for y in (10.0, -10.0))
    assert 1 - 1.01 * ROOM <= torch.linalg.vector_norm(one - other) <= 1.0


# A record whose loss is almost 0 has a derivative δ whose square single precision cannot hold; its other feature, which
# the model ignores, is huge. The gradient is their product, and must be clipped like any other.
FAINT_AND_HUGE = [(-21.5, 1.8e19), (-16.05, 1e25), (-16.05, 1e15), (-16.05, 1e30), (0.0, 1e11), (29.0, 1e11)]


@each("norm", [1, 2])
@each(("other", "huge"), FAINT_AND_HUGE)
def test_a_tiny_derivative_of_a_huge_input_is_measured(other: float, huge: float, norm: int) -> None:
    model = classifier(nn.Linear(2, 2, bias=False))
    model.load(torch.tensor([30.0, 0.0, other, 0.0]))
    batch = Records(torch.tensor([[1.0, huge]]), torch.tensor([0]))
    for bound in (1e-4, 1e-7):
        one = RecordClip(bound, norm)
        total = clipped(model, batch, one)
        assert torch.linalg.vector_norm(total.double(), ord=norm) <= bound * (1 + 1e-5)
        assert total.abs().sum() > 0
        fast = quickly(model, batch, one)
        if torch.isfinite(fast).all():  # else whoever asked will ask with care
            assert torch.linalg.vector_norm(fast.double(), ord=norm) <= bound * (1 + 1e-5)


@each("size", [1e9, 1e10, 2e10, 1e15, 1e18])
@each("norm", [1, 2])
def test_a_long_gradient_is_never_taken_for_one_that_needs_no_clip(size: float, norm: int) -> None:
    for model, x in (
        (classifier(nn.Linear(2, 2)), torch.full((2, 2), size)),
        (classifier(nn.Conv1d(1, 1, 2), nn.Flatten(), nn.Linear(3, 2)), torch.full((2, 1, 4), size)),
        (classifier(nn.Linear(2, 2), nn.Flatten(), nn.Linear(4, 2)), torch.full((2, 2, 2), size)),
    ):
        fast = quickly(model, Records(x, torch.tensor([0, 1])), RecordClip(1.0, norm))
        reach = torch.linalg.vector_norm(fast.double(), ord=norm)
        assert not torch.isfinite(reach) or reach <= 2 * (1 + 1e-5)


def test_a_tiny_gradient_is_not_lost() -> None:
    # δ ≈ 4e-23: its square vanishes in single precision, but the record is far below the clip and must stay as it is.
    model = classifier(nn.Linear(2, 2, bias=False))
    model.load(torch.tensor([30.0, 0.0, -21.5, 0.0]))
    batch = Records(torch.tensor([[1.0, 0.5]]), torch.tensor([0]))
    expected = model.gradient(model.vector(), batch.x, batch.y)
    for total in (clipped, quickly):
        torch.testing.assert_close(total(model, batch, RecordClip(1.0)), expected, rtol=1e-5, atol=0.0)


# For which models it is allowed.


def says_no(module: nn.Module, batch: Records | None = None, loss: Loss = cross_entropy, **options: float) -> bool:
    batch = batch or records(12)
    return layered(Model(module, loss, **options), batch.x, batch.y) is None


def test_a_penalty_is_known_where_it_cannot_be_seen_yet() -> None:
    layer = nn.Linear(FEATURES, CLASSES)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)  # the gradient of the penalty is zero here, and only here
    assert_trusted_and_right(Model(nn.Sequential(layer), cross_entropy, ridge=0.1), records(12))


@each(
    "loss",
    [
        functional.cross_entropy,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        # Divided by the weights of all labels of the batch, one record of a heavy class would shrink the gradients of
        # all others before they are clipped. Alone, each record's weight cancels.
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1000.0, 1.0])),
        lambda outputs, y: functional.mse_loss(outputs, functional.one_hot(y, CLASSES).to(outputs.dtype)),
    ],
    ids=["cross-entropy", "smoothed", "weighted", "squares"],
)
def test_a_loss_that_is_a_mean_is_asked_for_each_record_alone(loss: Loss) -> None:
    batch = records(12)
    assert len(set(batch.y[:8].tolist())) > 1
    assert_trusted_and_right(Model(mlp().module, loss), batch)


def test_a_loss_with_several_values_a_record_is_not_taken_as_their_sum() -> None:
    several = lambda outputs, y: (outputs - functional.one_hot(y, CLASSES)).square()  # noqa: E731
    assert_trusted_and_right(Model(nn.Sequential(nn.Linear(FEATURES, CLASSES)), several), records(12))  # but their mean


def test_a_hinge_whose_records_are_all_beyond_it_teaches_nothing_and_is_known() -> None:
    model = Model(nn.Sequential(nn.Linear(FEATURES, 1)), hinge)
    model.load(torch.tensor([0.0] * FEATURES + [5.0]))
    batch = Records(0.1 * records(12).x, torch.ones(12).long())
    layers = layered(model, batch.x, batch.y)
    assert layers is not None
    assert layers.sums(model.vector(), batch.x, batch.y, None, None, 1).abs().sum() == 0


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.inner(x)))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.spare = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


class Borrowed(nn.Module):
    """The layer's parameters are used once by the layer and once behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + functional.linear(x.tanh(), self.layer.weight)


class BorrowedWhileTraining(Borrowed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.layer(x)


class MixedWhileTraining(Borrowed):
    """Takes the mean of its batch away, so that one record is in the derivatives of all."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x).tanh()
        return outputs - outputs.mean(dim=0) if self.training else outputs


class Mixed(Borrowed):
    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x).tanh()
        return outputs - outputs.mean(dim=0)


class Aside(Borrowed):
    """A layer that is run by its class's own method."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self.layer, x)


class Cut(Borrowed):
    """A layer whose own gradient is cut off, but not that of what comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.layer(x)
        return h + self.before(x)[:, :CLASSES]


class ChangedInPlace(Borrowed):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(functional.relu_(self.layer(x)))


class ChangedWhileTraining(ChangedInPlace):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.outer(functional.relu(self.layer(x)))


class Reversed(Borrowed):
    """Takes the records from last to first: all is well but where they are not of one client."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flip(0)).flip(0)


class Free(Borrowed):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Keyword(Borrowed):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


class AlwaysDropping(Borrowed):
    """Drops numbers when it is tested too, so that no two answers agree."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.layer(x), 0.5)


class Own(nn.Linear):
    """A layer that does something else than its kind."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def tied() -> nn.Module:
    inner, outer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    outer.weight = inner.weight
    return nn.Sequential(inner, nn.Tanh(), outer)


def one_layer_in_two_places() -> nn.Module:
    layer = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(layer, nn.Tanh(), layer)


def shortened() -> nn.Module:
    layer = nn.Linear(FEATURES, CLASSES)
    prune.l1_unstructured(layer, "weight", amount=3)  # trains weight_orig, which the layer masks before each use
    return nn.Sequential(layer)


def shortened_bias() -> nn.Module:
    layer = nn.Linear(FEATURES, CLASSES)
    prune.l1_unstructured(layer, "bias", amount=1)
    return nn.Sequential(layer)


def partly_frozen(name: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES))
    module.get_parameter(name).requires_grad_(False)
    return module


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a layer used twice": Twice,
    "a layer never used": Unused,
    "one layer in two places": one_layer_in_two_places,
    "tied parameters": tied,
    "parameters used elsewhere too": Borrowed,
    "parameters used elsewhere while training": BorrowedWhileTraining,
    "records that mix": Mixed,
    "records that mix while training": MixedWhileTraining,
    "a layer run by its class": Aside,
    "a layer under no_grad": Cut,
    "an output changed in place": ChangedInPlace,
    "an output changed in place while training": ChangedWhileTraining,
    "records in another order": Reversed,
    "a parameter of no layer": Free,
    "an argument by its name": Keyword,
    "dropout that is always on": AlwaysDropping,
    "a subclassed layer": lambda: nn.Sequential(Own(FEATURES, CLASSES)),
    "a pruned layer": shortened,
    "a pruned bias": shortened_bias,
    "a parametrised layer": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES))),
    "PReLU": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.PReLU(), nn.Linear(8, CLASSES)),
    "a bilinear layer": lambda: Pair(),
    "part of a layer frozen: weight": lambda: partly_frozen("0.weight"),
    "part of a layer frozen: bias": lambda: partly_frozen("2.bias"),
    "part of a layer frozen: scale": lambda: partly_frozen("1.weight"),
}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(FEATURES, FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


@each("name", REFUSED)
def test_what_cannot_be_vouched_for_is_refused(name: str) -> None:
    assert says_no(REFUSED[name]())


def test_what_the_refused_ones_are_made_of_is_taken() -> None:
    # Else the refusals above would prove nothing.
    for module in (Residual(), nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES))):
        assert_trusted_and_right(Model(module, cross_entropy), records(12))


def test_an_output_changed_in_place_is_seen_where_the_first_gradients_are_zero() -> None:
    module = ChangedInPlace()
    nn.init.zeros_(module.outer.weight)  # a common start, at which nothing reaches the first layer
    assert says_no(module)


@each(
    "layer",
    [
        nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), nn.ConvTranspose2d(2, 2, 3),
    ],
    ids=["grouped", "circular", "reflected", "transposed"],
)  # fmt: skip
def test_convolutions_of_other_kinds_are_refused(layer: nn.Module) -> None:
    batch = shaped(2, 6, 6)
    flat = layer(batch.x[:1]).numel()
    assert says_no(nn.Sequential(layer, nn.Flatten(), nn.Linear(flat, CLASSES)), batch)
    plain = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(32, CLASSES))
    assert not says_no(plain, batch)


@each("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_tables_that_do_more_than_look_up_are_refused(options: dict[str, float]) -> None:
    def module(**more: float) -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4, **more), nn.Flatten(), nn.Linear(20, CLASSES))

    assert says_no(module(**options), words(5))
    assert not says_no(module(), words(5))


class Patches(nn.Module):
    """One linear layer for all parts of a record, which come to it as rows of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 2)).reshape(len(x), 3, CLASSES).mean(dim=1)


class Doubled(nn.Module):
    """Sees each record and its mirror image in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        there, mirrored = self.layer(torch.cat([x, x.flip(1)])).chunk(2)
        return there + mirrored


class Transposed(nn.Module):
    """Has positions first and records second, as recurrent layers like them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).tanh().sum(dim=0)


class OneImage(nn.Module):
    """Shows a whole batch of lines as one image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, (1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0]


@each("module", [Patches, Doubled, OneImage])
def test_rows_that_are_not_records_are_refused(module: type[nn.Module]) -> None:
    # Each row would be clipped by itself, and a record of three rows could move the sum three times as far.
    assert says_no(module())


@each("length", [4, 8, 12])
def test_positions_are_not_taken_for_records_when_there_are_as_many(length: int) -> None:
    assert says_no(Transposed(), shaped(length, 2))


class Stubborn(nn.Module):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(FEATURES, CLASSES), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Remembering(nn.Module):
    """Keeps what it saw last, for whoever wants to look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.layer(x)
        return self.seen


class Asserting(Borrowed):
    """Insists on the layer it was made with."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.layer.forward.__func__ is nn.Linear.forward  # type: ignore[attr-defined]
        return self.layer(x)


def test_what_cannot_be_copied_is_refused_with_a_way_out() -> None:
    model, batch = Model(Stubborn(), cross_entropy), records(2)
    for ask in (model.check, lambda x, y: layered(model, x, y), lambda x, y: model.gradient(model.vector(), x, y)):
        with pytest.raises(BadInput, match=r"model must be a module that can be copied.*keep locks, files and threads"):
            ask(batch.x, batch.y)


@each("module", [Remembering, Asserting])
def test_the_question_alone_does_not_end_a_training(module: type[nn.Module]) -> None:
    # They train well enough with gradients formed one by one.
    model, batch = Model(module(), cross_entropy), records(12)
    model.gradient(model.vector(), batch.x, batch.y)
    layers = layered(model, batch.x, batch.y)
    if layers is not None:
        ours = sum_of_clipped_layered(layers, model.vector(), batch.x, batch.y, RecordClip(0.5))
        assert_alike(ours, record_by_record(model, batch, RecordClip(0.5)))


class Idle(nn.Module):
    """A head whose output is computed and thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.layer(x)


class Detached(nn.Module):
    """A layer that only gives what is not differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.given(x).detach()


class Feedback(nn.Module):
    """Leaves the sequence before the ReLU and the pool, whose order is changed, with its number in between."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2))
        self.last, self.side = nn.Linear(6, CLASSES), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.features[1](self.features[0](x[:, None]))
        return self.last(self.features[2](wide).flatten(1)) + self.side(wide.flatten(1))


@pytest.mark.parametrize("module", [Idle, Detached])
def test_layers_without_a_gradient_are_known(module: type[nn.Module]) -> None:
    assert_trusted_and_right(Model(module(), cross_entropy), records(12))


def test_a_sequence_whose_parts_are_used_alone_is_right_or_refused() -> None:
    model, batch = Model(Feedback(), cross_entropy), records(12)
    if layered(model, batch.x, batch.y) is not None:
        assert_trusted_and_right(model, batch)


def test_inplace_layers_are_known() -> None:
    for inplace in (nn.ReLU(inplace=True), nn.LeakyReLU(inplace=True), nn.Hardswish(inplace=True)):
        model = classifier(nn.Linear(FEATURES, 8), inplace, nn.Linear(8, CLASSES))
        assert_trusted_and_right(model, records(12))
        assert inplace.inplace  # the module itself stays as it was


@pytest.mark.parametrize("inplace", [True, False])
def test_dropout_is_known(inplace: bool) -> None:
    model = classifier(nn.Linear(FEATURES, 8), nn.Dropout(0.5, inplace=inplace), nn.Tanh(), nn.Linear(8, CLASSES))
    batch = records(12)
    layers = layered(model, batch.x, batch.y)
    assert layers is not None
    assert layers.random
    model.module.train()
    torch.manual_seed(5)
    ours = sum_of_clipped_layered(layers, model.vector(), batch.x, batch.y, RecordClip(1e6))
    torch.manual_seed(5)  # the same units are dropped
    assert_alike(ours, 12 * model.gradient(model.vector(), batch.x, batch.y))


def test_randomness_is_noticed_although_it_seldom_shows() -> None:
    # A layer that drops one number in a thousand drops none in most batches of eight.
    batch = records(12)
    rare = classifier(nn.Linear(FEATURES, 8), nn.Dropout(0.001), nn.Linear(8, CLASSES))
    layers = layered(rare, batch.x, batch.y)
    assert layers is None or layers.random
    never = classifier(nn.Linear(FEATURES, 8), nn.Dropout(0.0), nn.Linear(8, CLASSES))
    for model in (never, mlp()):
        layers = layered(model, batch.x, batch.y)
        assert layers is not None
        assert not layers.random


@each("frozen", [0, 1, 2])
def test_a_frozen_layer_stays_and_the_others_train(frozen: int) -> None:
    # The gradient of a frozen weight is not uploaded and must not count into the norm: only what is trained is summed.
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES))
    module[frozen].requires_grad_(False)
    model = Model(module, cross_entropy)
    assert model.dim == sum(p.numel() for i, layer in enumerate(module) for p in layer.parameters() if i != frozen)
    assert_trusted_and_right(model, records(12))


def test_a_frozen_layer_of_an_unknown_kind_does_not_matter() -> None:
    gate = nn.PReLU()
    gate.requires_grad_(False)
    assert_trusted_and_right(classifier(nn.Linear(FEATURES, 8), gate, nn.Linear(8, CLASSES)), records(12))


def test_several_rows_a_record_are_clipped_as_one() -> None:
    sequence = nn.Sequential(nn.Linear(FEATURES, 4), nn.Flatten(), nn.Linear(20, CLASSES))
    assert_trusted_and_right(Model(sequence, cross_entropy), shaped(5, FEATURES))
    table = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, CLASSES))
    assert_trusted_and_right(Model(table, cross_entropy), words(5))


def test_layers_without_parameters_do_not_matter() -> None:
    model = classifier(nn.Linear(FEATURES, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, CLASSES))
    assert_trusted_and_right(model, records(12))


def test_no_record_is_needed_to_read_a_graph_and_one_to_check_the_arithmetic() -> None:
    for count in (1, 2, 3, 20):
        batch = records(count)
        assert layered(mlp(), batch.x, batch.y) is not None
    assert Layered(mlp(), records(0).x).layers.keys() == {"0", "2", "4"}


def test_a_model_that_does_not_fit_the_records_is_refused() -> None:
    assert says_no(nn.Sequential(nn.Linear(FEATURES + 1, CLASSES)))
    assert says_no(nn.Sequential(nn.Linear(FEATURES, CLASSES - 1)))  # a label beyond its outputs


# Memory.


def test_the_footprint_grows_with_what_is_kept_and_formed() -> None:
    small, large = (classifier(nn.Linear(FEATURES, wide), nn.ReLU(), nn.Linear(wide, CLASSES)) for wide in (8, 800))
    batch, image = records(12), shaped(1, 8, 8)
    one, other = (layered(model, batch.x, batch.y) for model in (small, large))
    kernel = layered(classifier(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, CLASSES)), image.x, image.y)
    assert one is not None
    assert other is not None
    assert kernel is not None
    assert one.footprint(formed=False) == one.footprint(formed=True) >= FEATURES + 8 + CLASSES
    assert other.footprint(formed=False) >= one.footprint(formed=False) + 792
    assert kernel.footprint(formed=True) >= kernel.footprint(formed=False) + 36  # a kernel for each record


def test_a_penalty_makes_each_record_hold_a_whole_gradient() -> None:
    batch = records(12)
    plain, penalised = (
        layered(Model(mlp().module, cross_entropy, ridge=ridge), batch.x, batch.y) for ridge in (0.0, 0.1)
    )
    assert plain is not None
    assert penalised is not None
    assert penalised.footprint(formed=False) >= plain.footprint(formed=False) + plain.model.dim


# Records whose norms are known.


class TwiceAsLong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT.flatten(1)


@each("norm", [1, 2])
@each(
    ("before", "shape", "seen"),
    [
        (nn.Identity(), (6,), True),
        (nn.Flatten(), (2, 3), True),  # the same numbers in the same places
        (TwiceAsLong(), (6,), False),
        (Turned(), (2, 3), False),
        (nn.Linear(6, 6), (6,), True),  # here it is the first of two that sees them
        (nn.LayerNorm(6), (6,), False),
    ],
)
def test_known_norms_serve_the_layer_that_sees_the_records(
    norm: Norm, before: nn.Module, shape: tuple[int, ...], seen: bool
) -> None:
    model, data = classifier(before, nn.Linear(6, CLASSES)), shaped(*shape)
    layers = Layered(model, data.x)
    asked: list[Any] = []
    bound = (torch.full((12,), 0.7, dtype=torch.float64), norm)

    def known() -> Tensor:
        asked.append(None)
        return data.x.flatten(1).abs().pow(norm).sum(dim=1)

    ours = layers.sums(model.vector(), data.x, data.y, None, bound, 1, powers=known)
    theirs = layers.sums(model.vector(), data.x, data.y, None, bound, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert bool(asked) == seen
    if seen:  # a wrong norm would be seen
        wrong = layers.sums(model.vector(), data.x, data.y, None, bound, 1, powers=lambda: 100 * known())
        assert wrong.norm() < 0.8 * theirs.norm()
    careful = layers.sums(model.vector(), data.x, data.y, None, bound, 1, powers=known, careful=True)
    assert torch.equal(careful, ours)  # what needs no care is measured and added up as without
