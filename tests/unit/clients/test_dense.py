"""Clipping by outer products, against the same sum formed record by record; and for which models it is allowed."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from dpfl.clients.dense import is_dense, record_lengths_dense, sum_of_clipped_dense
from dpfl.clients.reference import ReferenceClients, _sum_of_clipped
from dpfl.federation import Records
from dpfl.models import Model, build
from dpfl.models.architectures import cross_entropy, squared_error
from dpfl.orders import Norm, Order, Poisson, RecordClip
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams

FEATURES, CLASSES = 6, 3


@pytest.fixture(autouse=True)
def same_layers() -> None:
    torch.manual_seed(0)  # torch's own layers fill themselves


def records(count: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Records:
    source = torch.Generator().manual_seed(1)
    x = scale * torch.randn(count, FEATURES, generator=source, dtype=dtype)
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
    model = build(name, shape=shape, classes=classes, rng=Streams(0).generator("model"))
    source = torch.Generator().manual_seed(1)
    x = torch.randn(12, *shape, generator=source)
    y = torch.randn(12, generator=source) if classes is None else torch.randint(0, classes, (12,), generator=source)
    return model, Records(x, y)


def dense(model: Model, batch: Records, bound: RecordClip) -> Tensor:
    return sum_of_clipped_dense(model, model.weights(), batch.x, batch.y, bound)


def record_by_record(model: Model, batch: Records, bound: RecordClip, *, vectorised: bool = True) -> Tensor:
    return _sum_of_clipped(bound, model, model.weights(), batch, vectorised)


def lengths(model: Model, batch: Records, norm: int) -> Tensor:
    blocks = model.record_gradients(model.weights(), batch.x, batch.y, vectorised=True)
    return torch.linalg.vector_norm(torch.cat(blocks, dim=1), ord=norm, dim=1)


def assert_alike(ours: Tensor, theirs: Tensor, relative: float = 1e-5) -> None:
    assert torch.linalg.vector_norm(ours - theirs) <= relative * torch.linalg.vector_norm(theirs)


# By hand.


def test_one_record_of_a_linear_layer_by_hand() -> None:
    # w = (1, 2), b = 0 and the squared error: at x = (2, 1), y = 1 the output is 4 and δ = 2·3 = 6, so the gradient is
    # (12, 6, 6), of length √216 = 6√6 and 24 in L1.
    model = Model(nn.Sequential(nn.Linear(2, 1)), squared_error)
    model.load(torch.tensor([1.0, 2.0, 0.0]))
    batch = Records(torch.tensor([[2.0, 1.0]]), torch.tensor([1.0]))
    assert dense(model, batch, RecordClip(30.0)).tolist() == pytest.approx([12, 6, 6])
    half = dense(model, batch, RecordClip(3 * math.sqrt(6)))
    assert half.tolist() == pytest.approx([6, 3, 3])
    assert dense(model, batch, RecordClip(12.0, 1)).tolist() == pytest.approx([6, 3, 3])


def test_two_records_are_clipped_each_by_itself() -> None:
    # As above, and x = (0, 1), y = 2: the output is 2, the gradient 0; and x = (0, 0), y = 1: δ = −2, (0, 0, −2).
    model = Model(nn.Sequential(nn.Linear(2, 1)), squared_error)
    model.load(torch.tensor([1.0, 2.0, 0.0]))
    batch = Records(torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), torch.tensor([1.0, 2.0, 1.0]))
    assert dense(model, batch, RecordClip(3 * math.sqrt(6))).tolist() == pytest.approx([6, 3, 1])
    assert dense(model, batch, RecordClip(12.0, 1)).tolist() == pytest.approx([6, 3, 1])


def test_a_record_is_measured_over_all_layers() -> None:
    # w = 2 and v = 3 without biases, at x = 1, y = 5: h = 2, the output 6, its δ = 2; the gradient is 6 in w, 4 in v.
    model = Model(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), squared_error)
    model.load(torch.tensor([2.0, 3.0]))
    batch = Records(torch.tensor([[1.0]]), torch.tensor([5.0]))
    assert dense(model, batch, RecordClip(math.sqrt(52) / 2)).tolist() == pytest.approx([3, 2])
    assert dense(model, batch, RecordClip(5.0, 1)).tolist() == pytest.approx([3, 2])


# Against gradients formed one by one.

MODELS = {
    "mlp": mlp,
    "mlp, other biases": lambda: mlp(bias=False),
    "mlp with tanh": lambda: mlp(activation=nn.Tanh),
    "softmax": lambda: classifier(nn.Linear(FEATURES, CLASSES)),
    "softmax without bias": lambda: classifier(nn.Linear(FEATURES, CLASSES, bias=False)),
    "residual": lambda: Model(Residual(), cross_entropy),
}


class Residual(nn.Module):
    """Layers whose order of use is not that of their names, and one that feeds two."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.second, self.first = nn.Linear(5, CLASSES), nn.Linear(5, 5, bias=False), nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.first(x))
        return self.last(h + functional.gelu(self.second(h)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 33])
def test_the_sum_is_that_of_gradients_clipped_one_by_one(name: str, norm: int, count: int) -> None:
    model, batch = MODELS[name](), records(count, scale=2.0)
    assert is_dense(model, batch.x, batch.y)
    reach = lengths(model, batch, norm)
    for bound in (1e-3, float(reach.min()) / 2, float(reach.median()), float(reach.max()) * 2, 1e6):
        one = RecordClip(bound, norm)
        assert_alike(dense(model, batch, one), record_by_record(model, batch, one))


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "softmax", "softmax-no-bias", "linear"])
def test_the_papers_dense_models(name: str, norm: int) -> None:
    model, batch = named(name)
    assert is_dense(model, batch.x, batch.y)
    one = RecordClip(float(lengths(model, batch, norm).median()), norm)
    assert_alike(dense(model, batch, one), record_by_record(model, batch, one))


def test_in_double_precision_they_agree_to_the_last_digits() -> None:
    model, batch = mlp(), records(9, dtype=torch.float64)
    model.module.double()
    for norm in (1, 2):
        one = RecordClip(float(lengths(model, batch, norm).median()), norm)
        assert_alike(dense(model, batch, one), record_by_record(model, batch, one), 1e-12)


def test_at_other_weights_than_the_modules() -> None:
    model, batch = mlp(), records(7)
    weights = 3 * torch.randn(model.dim)
    ours = sum_of_clipped_dense(model, weights, batch.x, batch.y, RecordClip(0.5))
    assert_alike(ours, _sum_of_clipped(RecordClip(0.5), model, weights, batch, True))
    assert not ours.requires_grad


def test_nothing_is_left_behind() -> None:
    model, batch = mlp(), records(7)
    before = model.weights().clone()
    is_dense(model, batch.x, batch.y)
    dense(model, batch, RecordClip(0.5))
    assert torch.equal(model.weights(), before)
    assert all(p.grad is None for p in model.module.parameters())
    assert not any(layer._forward_hooks for layer in model.module.modules())
    broken = Records(batch.x[:, :3], batch.y)
    with pytest.raises(RuntimeError):
        dense(model, broken, RecordClip(0.5))
    assert not any(layer._forward_hooks for layer in model.module.modules())


@pytest.mark.parametrize("norm", [1, 2])
def test_a_client_uploads_the_same_either_way(norm: int) -> None:
    model, data = mlp(), records(40)
    order = Order(steps=4, learning_rate=0.3, batch=Poisson(0.2), clip=RecordClip(0.7, norm), proximal=0.1)
    uploads = [
        ReferenceClients(model, (data,), Streams(3), dense=dense).perform({0: Charged(order, 40)}, model.weights(), 1)[
            0
        ]
        for dense in (True, False)
    ]
    assert_alike(*uploads)


def test_an_empty_sample_is_a_sum_of_zero() -> None:
    model, data = mlp(), records(3)
    order = Order(steps=1, learning_rate=0.3, batch=Poisson(1e-9), clip=RecordClip(0.7))
    clients = ReferenceClients(model, (data,), Streams(3), dense=True)
    assert torch.equal(clients.perform({0: Charged(order, 3)}, model.weights(), 1)[0], torch.zeros(model.dim))


# Broken records.


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("name", ["mlp", "softmax", "mlp with tanh"])
def test_a_broken_record_counts_as_zero_and_its_neighbours_do_not(norm: int, broken: float, name: str) -> None:
    model, batch = MODELS[name](), records(5)
    bound = RecordClip(0.5, norm)
    expected = dense(model, Records(batch.x[1:], batch.y[1:]), bound)
    for spoilt in (batch.x[0].clone(), torch.full((FEATURES,), broken)):
        spoilt[2] = broken
        total = dense(model, Records(torch.cat([spoilt[None], batch.x[1:]]), batch.y), bound)
        assert torch.isfinite(total).all()
        if math.isfinite(broken):  # so large that it may or may not be measured; it is within the bound in any case
            assert torch.linalg.vector_norm((total - expected).double(), ord=norm) <= 0.5 * (1 + 1e-5)
        else:
            assert_alike(total, expected)


@pytest.mark.parametrize("norm", [1, 2])
def test_a_broken_record_alone_is_nothing(norm: int) -> None:
    model = mlp()
    batch = Records(torch.full((2, FEATURES), math.nan), torch.tensor([0, 1]))
    assert torch.equal(dense(model, batch, RecordClip(0.5, norm)), torch.zeros(model.dim))


def test_a_broken_target_counts_as_zero() -> None:
    model = Model(nn.Sequential(nn.Linear(FEATURES, 1)), squared_error)
    batch = Records(records(3).x, torch.tensor([math.nan, math.inf, 0.5]))
    expected = dense(model, Records(batch.x[2:], batch.y[2:]), RecordClip(0.5))
    assert_alike(dense(model, batch, RecordClip(0.5)), expected)


# What one record can do.


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("scale", [0.01, 1.0, 1e4, 1e18])
def test_no_record_moves_the_sum_by_more_than_twice_the_clip(norm: int, scale: float) -> None:
    model, batch = mlp(), records(8)
    strangers = records(40, scale=scale)
    for bound in (1e-2, 0.3, 2.0):
        clip = RecordClip(bound, norm)
        start = dense(model, batch, clip).double()
        for i in range(len(strangers)):
            x, y = batch.x.clone(), batch.y.clone()
            x[i % 8], y[i % 8] = strangers.x[i], strangers.y[i]
            moved = dense(model, Records(x, y), clip).double()
            assert torch.linalg.vector_norm(moved - start, ord=norm) <= 2 * bound * (1 + 1e-5)


def test_two_opposite_records_come_near_twice_the_clip() -> None:
    # The bound would be of no use if nothing came near it: outputs w·x without bias turn around with the target.
    model = Model(nn.Sequential(nn.Linear(2, 1, bias=False)), squared_error)
    model.load(torch.zeros(2))
    x = torch.tensor([[3.0, 4.0]])
    one, other = (dense(model, Records(x, torch.tensor([y])), RecordClip(0.5)) for y in (10.0, -10.0))
    assert torch.linalg.vector_norm(one - other) == pytest.approx(1.0)


def test_a_tiny_derivative_of_a_huge_input_is_measured() -> None:
    # A record whose loss is almost 0 has δ ≈ 4e-23, whose square is below what single precision can hold; its other
    # feature, which the model ignores, is 1.8e19. The gradient is their product, 7.7e-4, and must be clipped.
    model = classifier(nn.Linear(2, 2, bias=False))
    model.load(torch.tensor([30.0, 0.0, -21.5, 0.0]))
    batch = Records(torch.tensor([[1.0, 1.8e19]]), torch.tensor([0]))
    for bound in (1e-4, 1e-5):
        for total in (record_by_record(model, batch, RecordClip(bound)), dense(model, batch, RecordClip(bound))):
            assert torch.linalg.vector_norm(total.double()) <= bound * (1 + 1e-5)


# For which models it is allowed.


def says_no(module: nn.Module, batch: Records | None = None, **options: float) -> bool:
    batch = batch or records(12)
    return not is_dense(Model(module, cross_entropy, **options), batch.x, batch.y)


def test_convolutions_are_not_dense() -> None:
    for name in ("femnist-cnn", "femnist-cnn-small", "udp-cnn", "ali-cnn"):
        model, batch = named(name)
        assert not is_dense(model, batch.x, batch.y)


def test_a_penalty_is_not_dense() -> None:
    model, batch = named("svm")
    assert not is_dense(model, batch.x, batch.y)
    assert says_no(nn.Sequential(nn.Linear(FEATURES, CLASSES)), ridge=0.1)
    assert not says_no(nn.Sequential(nn.Linear(FEATURES, CLASSES)))


def test_a_penalty_is_not_dense_where_it_cannot_be_seen_yet() -> None:
    layer = nn.Linear(FEATURES, CLASSES)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)  # the gradient of the penalty is zero here, and only here
    assert says_no(nn.Sequential(layer), ridge=0.1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.inner(x)))


def test_a_layer_used_twice_is_not_dense() -> None:
    assert says_no(Twice())


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.spare = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


def test_a_layer_never_used_is_not_dense() -> None:
    assert says_no(Unused())


class Borrowed(nn.Module):
    """The layer's weights are used once by the layer and once behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + functional.linear(x.tanh(), self.layer.weight)


def test_weights_used_elsewhere_too_are_not_dense() -> None:
    assert says_no(Borrowed())


def test_tied_weights_are_not_dense() -> None:
    inner, outer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    outer.weight = inner.weight
    assert says_no(nn.Sequential(inner, nn.Tanh(), outer))


def test_an_output_changed_in_place_is_not_dense() -> None:
    layers = nn.Linear(FEATURES, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)
    assert says_no(nn.Sequential(*layers))


def test_an_output_changed_in_place_is_seen_where_the_first_gradients_are_zero() -> None:
    layers = nn.Linear(FEATURES, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)
    nn.init.zeros_(layers[2].weight)  # a common start, at which nothing reaches the first layer
    assert says_no(nn.Sequential(*layers))


def test_an_output_changed_in_place_only_while_training_is_not_dense() -> None:
    layers = nn.Linear(FEATURES, 8), nn.Dropout(0.5, inplace=True), nn.Tanh(), nn.Linear(8, CLASSES)
    assert says_no(nn.Sequential(*layers))


def test_dropout_into_a_new_tensor_is_dense() -> None:
    model = classifier(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, CLASSES))
    batch = records(12)
    assert is_dense(model, batch.x, batch.y)
    model.module.train()
    torch.manual_seed(5)
    ours = dense(model, batch, RecordClip(1e6))
    torch.manual_seed(5)  # the same units are dropped
    assert_alike(ours, 12 * model.gradient(model.weights(), batch.x, batch.y))


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_frozen_parameters_leave_the_clipping_to_others(frozen: str) -> None:
    # The gradient of a frozen weight is not uploaded and must not count into the norm: only what is trained is summed.
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    module.get_parameter(frozen).requires_grad_(False)
    model, batch = Model(module, cross_entropy), records(12)
    assert not is_dense(model, batch.x, batch.y)
    assert model.dim == sum(p.numel() for p in module.parameters()) - module.get_parameter(frozen).numel()
    bound = float(lengths(model, batch, 2).median())
    total = record_by_record(model, batch, RecordClip(bound))
    assert total.shape == (model.dim,)
    assert_alike(total, record_by_record(model, batch, RecordClip(bound), vectorised=False))


def test_a_frozen_layer_leaves_the_clipping_to_others() -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    module[0].requires_grad_(False)
    assert says_no(module)


def test_sequences_and_embeddings_are_not_dense() -> None:
    source = torch.Generator().manual_seed(1)
    y = torch.randint(0, CLASSES, (12,), generator=source)
    sequence = nn.Sequential(nn.Linear(FEATURES, 4), nn.Flatten(), nn.Linear(20, CLASSES))
    assert says_no(sequence, Records(torch.randn(12, 5, FEATURES, generator=source), y))
    words = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, CLASSES))
    assert says_no(words, Records(torch.randint(0, 9, (12, 5), generator=source), y))


def test_parameters_of_other_kinds_are_not_dense() -> None:
    assert says_no(nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)))
    assert says_no(nn.Sequential(nn.Linear(FEATURES, 8), nn.PReLU(), nn.Linear(8, CLASSES)))
    assert not says_no(
        nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, CLASSES))
    )


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


@pytest.mark.parametrize("module", [Patches, Doubled])
def test_rows_that_are_not_records_are_not_dense(module: type[nn.Module]) -> None:
    # Each row would be clipped by itself, and a record of three rows could move the sum three times as far.
    torch.manual_seed(0)
    assert says_no(module())


def test_a_loss_that_weighs_records_by_each_other_is_not_dense() -> None:
    # Divided by the weights of all labels of the batch, one record of a heavy class shrinks the gradients of all others
    # before they are clipped. Alone, each record's weight cancels, so gradients formed one by one are safe.
    model = Model(
        nn.Sequential(nn.Linear(FEATURES, CLASSES)), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1000.0, 1.0]))
    )
    batch = records(12)
    assert len(set(batch.y[:8].tolist())) > 1
    assert not is_dense(model, batch.x, batch.y)


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


class Idle(nn.Module):
    """A head whose output is computed and thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.layer(x)


def pruned() -> nn.Module:
    layer = nn.Linear(FEATURES, CLASSES)
    prune.l1_unstructured(layer, "weight", amount=3)  # trains weight_orig, which the layer masks before each use
    return nn.Sequential(layer)


@pytest.mark.parametrize("module", [Keyword, Idle, pruned])
def test_unusual_modules_are_answered_and_do_not_fail(module: type[nn.Module]) -> None:
    # They train well enough with gradients formed one by one; the question alone must not end the training.
    model, batch = Model(module(), cross_entropy), records(12)
    model.check(batch.x, batch.y)
    if is_dense(model, batch.x, batch.y):
        assert_alike(dense(model, batch, RecordClip(0.5)), record_by_record(model, batch, RecordClip(0.5)))


def test_a_bare_linear_layer_is_answered() -> None:
    model, batch = Model(nn.Linear(FEATURES, CLASSES), cross_entropy), records(12)
    if is_dense(model, batch.x, batch.y):
        assert_alike(dense(model, batch, RecordClip(0.5)), record_by_record(model, batch, RecordClip(0.5)))


def test_a_few_records_suffice_to_tell() -> None:
    for count in (1, 2, 20):
        batch = records(count)
        assert is_dense(mlp(), batch.x, batch.y)


@pytest.mark.parametrize("norm", [1, 2])
def test_lengths_are_those_of_the_records_own_gradients(norm: Norm) -> None:
    streams = Streams(3)
    model = build("mlp", shape=(1, 6, 6), classes=3, rng=streams.generator("model"))
    rng = streams.generator("data")
    x, y = torch.from_numpy(rng.standard_normal((9, 1, 6, 6))).float(), torch.from_numpy(rng.integers(3, size=9))
    weights = model.weights()
    alone = torch.stack([model.gradient(weights, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]).double()
    found = record_lengths_dense(model, weights, x, y, norm)
    torch.testing.assert_close(found, torch.linalg.vector_norm(alone, ord=norm, dim=1), rtol=1e-5, atol=0.0)
