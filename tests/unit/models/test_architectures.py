"""The named models have the papers' sizes, fit only the data they are for, and are drawn from the stream alone."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dpfl.errors import BadInput
from dpfl.models import ARCHITECTURES, Model, build, default_model
from dpfl.streams import Streams
from grids import each

SIZES = {
    # (name, shape of a record, classes): parameters
    ("linear", (10,), None): 10 + 1,
    ("svm", (58,), 2): 58,
    ("softmax", (784,), 10): 784 * 10 + 10,  # 7,850
    ("softmax", (1, 28, 28), 10): 7_850,  # images are flattened
    ("softmax-no-bias", (784,), 10): 7_840,
    ("mlp", (784,), 10): 784 * 256 + 256 + 256 * 10 + 10,  # 203,530
    # 1·32·49 + 32 = 1,600; 32·64·9 + 64 = 18,496; two pools leave 7×7: 64·49·62 + 62 = 194,494
    ("femnist-cnn", (1, 28, 28), 62): 214_590,
    # 1·16·25 + 16 = 416; 16·32·25 + 32 = 12,832; 32·49·62 + 62 = 97,278
    ("femnist-cnn-small", (1, 28, 28), 62): 110_526,
    # 3·16·25 + 16 = 1,216; padding 4 makes 32 + 8 − 4 = 36, the pool 18: 16·18·18·10 + 10 = 51,850
    ("udp-cnn", (3, 32, 32), 10): 53_066,
    # 16·64 + 16 = 1,040; 16·32·16 + 32 = 8,224; sides 28 → 14 → 13 → 5 → 4: 32·16·32 + 32 = 16,416; 32·10 + 10 = 330
    ("ali-cnn", (1, 28, 28), 10): 26_010,
    # 3·16·64 + 16 = 3,088; 8,224; sides 32 → 16 → 15 → 6 → 5: 32·25·32 + 32 = 25,632; 330
    ("ali-cnn", (3, 32, 32), 10): 37_274,
    # 32·25 + 32 = 832; 64·32·25 + 64 = 51,264; sides 28 → 24 → 12 → 8 → 4: 1,024·512 + 512 = 524,800; 5,130
    ("ali-authors-cnn", (1, 28, 28), 10): 582_026,
    # 3·32·25 + 32 = 2,432; 51,264; sides 32 → 28 → 14 → 10 → 5: 1,600·512 + 512 = 819,712; 5,130
    ("ali-authors-cnn", (3, 32, 32), 10): 878_538,
}
IMAGE_MODELS = sorted(name for name, architecture in ARCHITECTURES.items() if architecture.smallest)


def make(name: str, shape: tuple[int, ...], classes: int | None, seed: int = 0) -> Model:
    return build(name, shape=shape, classes=classes, rng=Streams(seed).public.generator("model"))


def labels(count: int, classes: int | None) -> torch.Tensor:
    return torch.zeros(count) if classes is None else torch.arange(count) % classes


def test_every_model_is_measured_here() -> None:
    assert {name for name, _, _ in SIZES} == set(ARCHITECTURES)


@each(("name", "shape", "classes"), SIZES)
def test_the_number_of_parameters_is_exact(name: str, shape: tuple[int, ...], classes: int | None) -> None:
    model = make(name, shape, classes)
    assert model.dim == SIZES[name, shape, classes]
    assert model.vector().shape == (model.dim,)


@each(("name", "shape", "classes"), SIZES)
def test_a_batch_goes_through_and_costs_something_finite(
    name: str, shape: tuple[int, ...], classes: int | None
) -> None:
    model = make(name, shape, classes)
    x = torch.linspace(0, 1, 3 * math.prod(shape)).reshape(3, *shape)
    parameters = model.split(model.vector())
    outputs = model.outputs(parameters, x)
    assert outputs.shape == (3, 1 if name in ("linear", "svm") else classes)
    assert ARCHITECTURES[name].loss(outputs, labels(3, classes)).shape == (3,)  # one value a record
    assert torch.isfinite(model.mean_loss(parameters, x, labels(3, classes)))
    if model.classify is not None:
        assert model.classify(outputs).shape == (3,)


@each(("name", "shape", "classes"), SIZES)
def test_the_stream_decides_the_parameters(name: str, shape: tuple[int, ...], classes: int | None) -> None:
    one, same, other = (make(name, shape, classes, seed).vector() for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@each(("name", "shape", "classes"), SIZES)
def test_parameters_fill_plus_minus_one_over_the_root_of_fan_in(
    name: str, shape: tuple[int, ...], classes: int | None
) -> None:
    layers = [layer for layer in make(name, shape, classes).module if isinstance(layer, (nn.Linear, nn.Conv2d))]  # type: ignore[attr-defined]
    assert layers
    for layer in layers:
        bound = 1 / math.sqrt(layer.weight[0].numel())
        for parameter in layer.parameters():
            values = parameter.detach().numpy()
            assert np.abs(values).max() <= bound * (1 + 1e-6)
            if values.size >= 400:  # a uniform draw has mean 0 and standard deviation bound/√3; 5 standard errors
                assert abs(values.mean()) < 5 * bound / math.sqrt(3 * values.size)
                assert values.std() == pytest.approx(bound / math.sqrt(3), rel=5 * 0.45 / math.sqrt(values.size))


@each(("name", "shape", "classes"), SIZES)
def test_building_leaves_torchs_own_randomness_alone(name: str, shape: tuple[int, ...], classes: int | None) -> None:
    before = torch.get_rng_state()
    make(name, shape, classes)
    assert torch.equal(torch.get_rng_state(), before)


@each(
    ("name", "shape", "classes", "reason"),
    [
        ("linear", (10,), 3, "regression"),
        ("softmax", (10,), None, "classification"),
        ("svm", (10,), None, "classification"),
        ("svm", (10,), 10, "2 classes"),
        ("ali-cnn", (1, 8, 8), 10, "at least 14×14"),
        ("udp-cnn", (784,), 10, "images"),
        ("sofmax", (10,), 3, "did you mean 'softmax'"),
        ("femnist_cnn", (1, 28, 28), 62, "did you mean 'femnist-cnn'"),
        ("zzz", (10,), 3, "linear, mlp, softmax"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name(
    name: str, shape: tuple[int, ...], classes: int | None, reason: str
) -> None:
    with pytest.raises(BadInput, match=r"^model ") as refusal:
        make(name, shape, classes)
    assert repr(name) in str(refusal.value)
    assert reason in str(refusal.value)


@each("name", IMAGE_MODELS)
@each("side", range(6, 16))
def test_a_small_image_goes_through_or_is_refused(name: str, side: int) -> None:
    try:
        model = make(name, (1, side, side), 10)
    except BadInput:
        return
    assert model.outputs(model.split(model.vector()), torch.zeros(2, 1, side, side)).shape == (2, 10)


def test_losses_by_hand() -> None:
    squared, hinge, entropy = (ARCHITECTURES[name].loss for name in ("linear", "svm", "softmax"))
    outputs = torch.tensor([[3.0], [0.5], [-2.0]])
    assert squared(outputs, torch.tensor([1.0, 0.5, -1.0])).tolist() == [4.0, 0.0, 1.0]
    # max(0, 1 − y·output) with y = +1, −1, −1 for labels 1, 0, 0
    assert hinge(outputs, torch.tensor([1, 0, 0])).tolist() == [0.0, 1.5, 0.0]
    # Logits (ln 3, 0) are the probabilities (3/4, 1/4).
    logits = torch.tensor([[math.log(3), 0.0]] * 2)
    assert entropy(logits, torch.tensor([0, 1])).tolist() == pytest.approx([math.log(4 / 3), math.log(4)])


def test_classes_by_hand() -> None:
    side, largest = (ARCHITECTURES[name].classify for name in ("svm", "softmax"))
    assert side(torch.tensor([[0.1], [-0.1], [0.0]])).tolist() == [1, 0, 0]
    assert largest(torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]])).tolist() == [1, 0]
    assert ARCHITECTURES["linear"].classify is None


def test_the_svm_carries_its_ridge_penalty() -> None:
    # κ/2·‖w‖² with κ = 0.01 and w = (3, 4), and a hinge of max(0, 1 − 1·0) for an all-zero record of label 1.
    model = make("svm", (2,), 2)
    loss = model.mean_loss(model.split(torch.tensor([3.0, 4.0])), torch.zeros(1, 2), torch.tensor([1]))
    assert loss.item() == pytest.approx(1 + 0.01 / 2 * 25)


def test_data_without_a_model_of_its_own_gets_the_plainest() -> None:
    assert default_model("digits", 10) == "softmax"
    assert default_model("femnist", 62) == "femnist-cnn"
    assert default_model("arrays", 3) == "softmax"
    assert default_model("arrays", None) == "linear"
