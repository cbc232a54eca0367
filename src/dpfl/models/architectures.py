"""The papers' models by name, with the losses they are trained on.

Layers are built without touching torch's global generator and then filled as torch itself would fill them, uniformly in
±1/√fan_in, from the stream that is passed in: the same seed gives the same model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.random import Generator
from torch import Tensor, nn

from dpfl.errors import BadInput, choose
from dpfl.models.losses import Loss, cross_entropy, hinge, squared_error
from dpfl.models.model import Model

__all__ = ["ARCHITECTURES", "Architecture", "build", "cross_entropy", "default_model", "hinge", "squared_error"]

Shape = tuple[int, ...]


def _largest(outputs: Tensor) -> Tensor:
    return outputs.argmax(dim=-1)


def _side(outputs: Tensor) -> Tensor:
    return (outputs.squeeze(-1) > 0).long()


@dataclass(frozen=True)
class Architecture:
    """How to build a model for records of a shape and a number of classes, and what it is trained on."""

    build: Callable[[Shape, int], nn.Module]
    loss: Loss = cross_entropy
    classify: Callable[[Tensor], Tensor] | None = _largest
    ridge: float = 0.0
    smallest: int = 0  # side of the smallest image it can see; 0 where it takes records of any shape


def _linear(shape: Shape, _: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 1))


def _svm(shape: Shape, _: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 1, bias=False))


def _softmax(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def _softmax_without_bias(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes, bias=False))


def _mlp(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 256), nn.ReLU(), nn.Linear(256, classes))


def _femnist_cnn(shape: Shape, classes: int) -> nn.Module:
    """DP-FedAvg's CNN: 214,590 parameters for 28×28 images of 62 classes."""
    flat = 64 * (shape[1] // 4) * (shape[2] // 4)
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 7, padding=3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(flat, classes),
    )  # fmt: skip


def _femnist_cnn_small(shape: Shape, classes: int) -> nn.Module:
    """FedSGD-DPC's CNN: 416 + 12,832 + 97,278 = 110,526 parameters for 28×28 images of 62 classes."""
    flat = 32 * (shape[1] // 4) * (shape[2] // 4)
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(flat, classes),
    )  # fmt: skip


def _udp_cnn(shape: Shape, classes: int) -> nn.Module:
    """UDP's CNN: one 5×5 convolution with padding 4. The paper prints no width; 16 channels and a 2×2 pool are ours."""
    side = [(length + 4) // 2 for length in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 5, padding=4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * side[0] * side[1], classes),
    )  # fmt: skip


def _ali_cnn(shape: Shape, classes: int) -> nn.Module:
    """ALI-DPFL's two convolutions and two linear layers, as the usual small CNN of the DP-SGD literature."""
    side = [((length // 2 - 1) - 4) // 2 for length in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(32 * side[0] * side[1], 32), nn.ReLU(), nn.Linear(32, classes),
    )  # fmt: skip


def _ali_authors_cnn(shape: Shape, classes: int) -> nn.Module:
    """Build the CNN of ALI-DPFL's authors' code: 582,026 parameters for 28×28 images of 10 classes."""
    side = [((length - 4) // 2 - 4) // 2 for length in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * side[0] * side[1], 512), nn.ReLU(), nn.Linear(512, classes),
    )  # fmt: skip


ARCHITECTURES = {
    "linear": Architecture(_linear, squared_error, None),
    "svm": Architecture(_svm, hinge, _side, ridge=1e-2),
    "softmax": Architecture(_softmax),
    "softmax-no-bias": Architecture(_softmax_without_bias),
    "mlp": Architecture(_mlp),
    "femnist-cnn": Architecture(_femnist_cnn, smallest=8),
    "femnist-cnn-small": Architecture(_femnist_cnn_small, smallest=8),
    "udp-cnn": Architecture(_udp_cnn, smallest=8),
    "ali-cnn": Architecture(_ali_cnn, smallest=14),
    "ali-authors-cnn": Architecture(_ali_authors_cnn, smallest=16),
}

# What the papers train on each data set, or the plainest model that fits it.
_DEFAULTS = {
    "digits": "softmax",
    "heart": "softmax",
    "mnist": "mlp",
    "fashion-mnist": "mlp",
    "femnist": "femnist-cnn",
    "cifar10": "udp-cnn",
    "adult": "svm",
    "lending-club": "linear",
}


def default_model(data: str, classes: int | None) -> str:
    """Return the name of the model that fits a data set when none is asked for."""
    return _DEFAULTS.get(data, "linear" if classes is None else "softmax")


def build(name: str, *, shape: Shape, classes: int | None, rng: Generator) -> Model:
    """Build the named model for records of this shape (classes=None: regression), its parameters drawn from `rng`."""
    architecture = choose("model", name, ARCHITECTURES)
    kind = "regression" if architecture.classify is None else "classification"
    if (classes is None) != (architecture.classify is None):
        fitting = [n for n, a in ARCHITECTURES.items() if (a.classify is None) == (classes is None)]
        raise BadInput(
            f"model must fit the data's targets, was {name!r}, which is for {kind}; use {', '.join(fitting)}"
        )
    if architecture.loss is hinge and classes != 2:
        raise BadInput(f"model 'svm' must have data of 2 classes, was {classes}; use softmax")
    side = architecture.smallest
    if side and not (len(shape) == 3 and min(shape[1:]) >= side):
        raise BadInput(
            f"model {name!r} must be given images of at least {side}×{side} pixels, was given records of shape"
            f" {list(shape)}; use softmax or mlp"
        )
    with torch.random.fork_rng(devices=[]):  # torch fills the parameters too, and nobody shall notice
        module = architecture.build(shape, classes or 1)
    _fill(module, rng)
    return Model(module, architecture.loss, classify=architecture.classify, ridge=architecture.ridge, name=name)


def _fill(module: nn.Module, rng: Generator) -> None:
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters(recurse=False):
                parameter.data.copy_(torch.from_numpy(rng.uniform(-bound, bound, tuple(parameter.shape))))
