"""TF32 rounds the factors of a product to eleven bits: a clipped gradient must stay within its bound all the same.

Skipped where there is no GPU. The gradient of one record that was clipped is measured in double precision.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpfl.gradients.layered import Layered
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy
from dpfl.orders import Norm
from dpfl.precision import products
from grids import each

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")

CLASSES, RECORDS = 10, 64


def images(*shape: int) -> Tensor:
    """Return records whose numbers are all rounded up by as much as eleven bits can."""
    up = 1 + 2.0**-11 + 2.0**-20
    powers = torch.randint(-3, 4, (RECORDS, *shape), generator=torch.Generator().manual_seed(1))
    return up * 2.0**powers


def words() -> Tensor:
    return torch.randint(0, 7, (RECORDS, 6), generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(512, CLASSES), lambda: images(512)),
    "two layers": (
        lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, CLASSES)), lambda: images(256)
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 5 * 5, CLASSES),
        ),
        lambda: images(3, 16, 16),
    ),
    "words": (
        lambda: nn.Sequential(nn.Embedding(7, 32), nn.Linear(32, 64), nn.ReLU(), nn.Flatten(),
                              nn.Linear(384, CLASSES)),
        words,
    ),
}  # fmt: skip


def longest(name: str, norm: Norm, bound: float, *, careful: bool = False) -> float:
    """Return the norm of the longest clipped gradient, in units of its bound."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = Model(make().cuda(), cross_entropy)
    x, y = inputs().cuda(), (torch.arange(RECORDS) % CLASSES).cuda()
    layers, found = Layered(model, x), []
    limits = torch.full((RECORDS,), bound, dtype=torch.float64, device="cuda")
    for row in range(RECORDS):
        counts = torch.zeros(RECORDS, device="cuda")
        counts[row] = 1
        total = layers.sums(model.vector(), x, y, counts, (limits, norm), 1, careful=careful)[0]
        found.append(torch.linalg.vector_norm(total.double(), ord=norm).item() / bound)
    return max(found)


@each("norm", [1, 2])
@each("name", MODELS)
@each("bound", [1e-3, 0.37])
def test_a_clipped_gradient_stays_within_its_bound(name: str, norm: Norm, bound: float) -> None:
    for precision in ("float32", "tf32"):
        with products(precision):
            reached = longest(name, norm, bound)
        print(f"{name}, L{norm}, clip {bound}, {precision}: {reached:.7f} of the bound")
        assert reached <= 1
        assert reached >= 0.995  # or the bound would be of little use
        with products(precision):
            assert longest(name, norm, bound, careful=True) <= 1 + 2.0**-44


def test_without_room_the_bound_would_be_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    # The twin: scales that leave room for nothing.
    monkeypatch.setattr("dpfl.gradients.layered._room", lambda *_: 0.0)
    with products("tf32"):
        assert max(longest(name, norm, 1e-3) for name in MODELS for norm in (1, 2)) > 1
