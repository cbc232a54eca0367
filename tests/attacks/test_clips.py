"""Clips at the ends of floating point: whatever number a record holds, what it adds is as long as its bound at most.

The clipped gradient of a single record is measured in double precision. In the model's precision a sum of many records
is rounded like any other sum; what is promised here is what each of them puts into it.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dpfl
from attacks.moves import moved, replaced
from dpfl.gradients.clipping import clip, clip_rows, sum_of_clipped
from dpfl.gradients.layered import Layered
from dpfl.gradients.record_gradients import Lookups
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy, squared_error
from grids import each

ROUNDING = 2.0**-44  # of double precision; the prices' share for arithmetic is 2⁻³⁰
unhurried = settings(deadline=None, max_examples=60, derandomize=True, database=None)
norms = st.sampled_from([1, 2])
bounds = st.floats(1e-30, 1e30)

pytestmark = pytest.mark.filterwarnings("ignore::dpfl.Caution")


def numbers(width: int) -> Any:
    """Any float there is, and more often than chance would have it those at the ends."""
    most = 3.4e38 if width == 32 else 1.7e308
    ends = [sign * 10.0**power for sign in (1, -1) for power in (*range(-45, 39, 3), 38)]
    near = st.sampled_from([*ends, 1e-45, 1.4e-45, 1.2e-38, 8.4e24, 1.8e19, 1.9e19, most, 0.0, math.inf, math.nan])
    return near.map(lambda number: float(torch.tensor(number))) | st.floats(width=width)


def rows(width: int) -> Any:
    return st.lists(numbers(width), min_size=1, max_size=5)


def length(vector: Tensor, norm: int) -> float:
    """Return a norm exactly enough, whatever the numbers are."""
    numbers = vector.double().flatten().tolist()
    return math.fsum(map(abs, numbers)) if norm == 1 else math.hypot(*numbers)


@unhurried
@given(row=rows(32) | rows(64), bound=bounds, norm=norms, single=st.booleans())
def test_whatever_is_clipped_ends_within_its_bound(row: Any, bound: Any, norm: Any, single: Any) -> None:
    vector = torch.tensor(row, dtype=torch.float32 if single else torch.float64)
    limits = torch.tensor([bound], dtype=torch.float64)
    for clipped in (
        clip(vector, bound, norm),
        clip_rows(vector[None], limits, norm)[0],
        sum_of_clipped([vector[None, :1], vector[None, 1:]], bound, norm),
    ):
        assert length(clipped, norm) <= bound * (1 + ROUNDING)


def test_a_scale_that_single_precision_cannot_hold_was_the_attack() -> None:
    # The twin: a scale of 2·10⁻⁴⁵ is a denormal number, and half as large again as it should be.
    gradient = torch.tensor([3e38, 3e38])
    scale = torch.tensor(1.0 / (gradient.double().norm().item() * 1e6)).float()
    assert abs(scale.double() * gradient.double().norm() * 1e6 - 1) > 0.1
    assert length(clip(gradient.double() * 1e6, 1.0, 2), 2) <= 1 + ROUNDING


class Words(nn.Module):
    """Looks words up, and lets numbers that the next layer holds be as large as one likes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)
        self.register_buffer("scale", torch.tensor([[1e3, 1.0], [-1e3, 1.0], [1.0, -1e-3]]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.table(x) * self.scale).flatten(1).sum(1, keepdim=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 1), (4,)),
    "two layers": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), (4,)),
    "positions": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Flatten(), nn.Linear(6, 1)), (2, 2)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(2, 1)), (1, 2, 2)),
    "normalised": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)), (4,)),
}


def in_every_way(layers: Layered, x: Tensor, y: Tensor, bound: float, norm: Any) -> list[Tensor]:
    """Return the clipped gradient of one record by each way there is; haste may say that it does not know."""
    limits, model = (torch.full((1,), bound, dtype=torch.float64), norm), layers.model
    found = [layers.sums(model.vector(), x, y, None, limits, 1, careful=careful)[0] for careful in (False, True)]
    known = [found[1], *(one for one in found[:1] if torch.isfinite(one).all())]
    for vectorised in (True, False):
        blocks = model.record_gradients(model.vector(), x, y, vectorised=vectorised)
        known.append(sum_of_clipped(blocks, bound, norm))
    return known


@each("name", MODELS)
@each("dtype", [torch.float32, torch.float64])
@each("ridge", [0.0, 0.1])
def test_a_record_of_any_numbers_is_clipped_by_every_way(name: str, dtype: torch.dtype, ridge: float) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    layers = Layered(Model(make().to(dtype), squared_error, ridge=ridge), torch.zeros(1, *shape, dtype=dtype))

    @settings(unhurried, max_examples=12)
    @given(row=st.lists(numbers(32), min_size=4, max_size=4), target=numbers(32), bound=bounds, norm=norms)
    def holds(row: Any, target: Any, bound: Any, norm: Any) -> None:
        x, y = torch.tensor(row, dtype=dtype).view(1, *shape), torch.tensor([target], dtype=dtype)
        for clipped in in_every_way(layers, x, y, bound, norm):
            assert torch.isfinite(clipped).all()
            assert length(clipped, norm) <= bound * (1 + ROUNDING)

    holds()


@unhurried
@given(words=st.lists(st.integers(0, 4), min_size=3, max_size=3), target=numbers(32), bound=bounds, norm=norms)
def test_words_are_clipped_by_every_way(words: Any, target: Any, bound: Any, norm: Any) -> None:
    torch.manual_seed(0)
    layers = Layered(Model(Words(), squared_error), torch.tensor([words]))
    for clipped in in_every_way(layers, torch.tensor([words]), torch.tensor([target]), bound, norm):
        assert length(clipped, norm) <= bound * (1 + ROUNDING)


@pytest.mark.parametrize("norm", [1, 2])
def test_rows_of_a_table_are_summed_as_they_were_measured(norm: Any) -> None:
    # Three derivatives of one word that cancel but for rounding: added in another order they are another number.
    source = torch.Generator().manual_seed(0)
    near = 1e10 * (1 + 1e-6 * torch.rand(2000, 1, 1, generator=source))
    deltas = torch.cat([near, -near.roll(1, 0), 300 * torch.rand(2000, 1, 1, generator=source)], dim=1)
    one = Lookups(torch.zeros(2000, 3, dtype=torch.long), deltas, 2)
    lengths = one.powers(norm)[0].double().pow(1 / norm)
    for row in range(0, 2000, 40):
        weights = torch.zeros(2000)
        weights[row] = 1 / lengths[row]
        assert length(one.weighted_sum(weights, 1)["weight"], norm) <= 1 + 1e-5


# Where 2a² is about 10⁴⁵ single precision has a number or two for the scale, none of them near.
OUTLIERS = [1.55e22, 2.6e22, 8.4e24, -8.4e24, 1e12, 3e38, 1e-20]


@each("backend", ["stacked", "reference"])
@each("outlier", OUTLIERS)
def test_an_outlier_moves_an_upload_by_what_was_priced(outlier: float, backend: str) -> None:
    source = torch.Generator().manual_seed(0)
    public = dpfl.Records(torch.randn(8, 3, generator=source), torch.randn(8, generator=source))
    here = dpfl.Records(*(part[:5].clone() for part in (public.x, public.y)))
    here = replaced(here, torch.tensor([1.0, 0.0, 0.0]), torch.tensor(1e6))  # as far as a clip allows, one way
    there = replaced(here, torch.tensor([outlier, 0.0, 0.0]), torch.tensor(0.0))  # and the other

    def make() -> nn.Module:
        layer = nn.Linear(3, 1)
        nn.init.constant_(layer.weight, 1.0)
        nn.init.zeros_(layer.bias)
        return layer

    for system in (
        dpfl.UDP(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=1.0),
        dpfl.DPFedAvg(epsilon=2.0, delta=1e-2, rounds=1, lr=1.0, clip=1.0, local_steps=1),
    ):
        times = moved(make, here, there, public, squared_error, system=system, backend=backend)
        most = 1 if isinstance(system, dpfl.UDP) else len(here)  # a client's whole gradient is clipped
        assert times <= most * (1 + 1e-5)


def test_a_tiny_derivative_of_a_huge_number_is_clipped_or_nothing() -> None:
    model = Model(nn.Linear(2, 2, bias=False), cross_entropy)
    layers, y = Layered(model, torch.zeros(1, 2)), torch.tensor([0])
    for other in torch.arange(-90.0, 30.0, 10.0).tolist():
        parameters = torch.tensor([30.0, 0.0, other, 0.0])
        for huge in (1e5, 1e12, 1e19, 1e25, 1e31, 1e38):
            for bound, norm in ((1e-12, 1), (1e-3, 2), (1e-3, 1), (1.0, 1)):
                limits = torch.full((1,), bound, dtype=torch.float64), norm
                for careful in (False, True):
                    x = torch.tensor([[1.0, huge]])
                    clipped = layers.sums(parameters, x, y, None, limits, 1, careful=careful)[0]
                    assert careful is False or torch.isfinite(clipped).all()
                    assert not torch.isfinite(clipped).all() or length(clipped, norm) <= bound * (1 + ROUNDING)
