"""Constants from probes, on problems whose constants are known: ridge regression, quadratics, points on a line.

Probes are to be right within ten per cent. On a quadratic they are far better where all directions are looked at, and
the tests ask for that: CLOSE for what a quadratic tells in closed form.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpfl.errors import BadInput
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.orders import ClientClip, ModelClip, RecordClip
from dpfl.planning import estimate_constants
from dpfl.planning.constants import SYMBOLS, Constants, read
from dpfl.planning.estimate_constants import estimate
from dpfl.streams import Streams
from grids import each

CLOSE = 1e-3  # part of the value
PROBED = 0.1  # what is promised of any probe
CURVED = ("strong_convexity", "smoothness", "polyak_lojasiewicz", "initial_distance", "initial_gap", "heterogeneity")
Truth = dict[str, float]


def probe(model: Model, clients: Sequence[Records], *, clip: Any = None, seed: int | None = 3) -> Constants:
    return estimate(model, clients, clip=clip, streams=Streams(seed), source="known records")


def assert_known(found: Constants, truth: Truth, names: Sequence[str] = CURVED, *, rel: float = CLOSE) -> None:
    for name in names:
        assert getattr(found, name) == pytest.approx(truth[name], rel=rel), name


def assert_spread(found: Constants, name: str, seen: float) -> None:
    """Assert that what is seen at the first model lies within the spread that was noted."""
    note = found.notes[name]
    assert note.low * (1 - CLOSE) <= seen <= note.high * (1 + CLOSE), (name, note, seen)


def assert_curved(found: Constants) -> None:
    assert found.notes["strong_convexity"].how.startswith("least curvature")
    assert found.notes["polyak_lojasiewicz"].how.startswith("least curvature")


def assert_flat(found: Constants) -> None:
    assert "the loss is flat" in found.notes["strong_convexity"].how
    assert "least curvature" not in found.notes["polyak_lojasiewicz"].how
    for name in ("initial_distance", "initial_gap"):
        assert "the end of the descent" in found.notes[name].how


def assert_sound(found: Constants) -> None:
    """Assert what holds of all constants: known, finite, not below zero, each within its spread and explained."""
    assert found.missing == ()
    assert set(found.notes) == set(SYMBOLS)
    for name, note in found.notes.items():
        value = getattr(found, name)
        assert type(value) is float
        assert math.isfinite(value)
        assert value >= 0, name
        assert note.how
        if note.low is not None:
            assert note.low <= value <= note.high, (name, note, value)
    for name in ("strong_convexity", "smoothness", "polyak_lojasiewicz", "gradient_bound", "lipschitz"):
        assert getattr(found, name) > 0, name
    assert found.strong_convexity <= found.smoothness * (1 + 1e-9)
    assert found.gradient_bound <= found.lipschitz * (1 + 1e-9)
    assert found.dissimilarity >= 1 - 1e-9


# (a) Ridge regression: everything in closed form from the Hessian.


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - targets).square() / 2


def regression(
    spectrum: Sequence[float], sizes: Sequence[int], *, seed: int = 0, apart: float = 0.5, scale: float = 1.0
) -> list[Records]:
    """Make clients whose records together have X'X/n with exactly these eigenvalues; apart: how far clients differ."""
    rng = np.random.default_rng(seed)
    records, dim = sum(sizes), len(spectrum)
    orthonormal = np.linalg.qr(rng.standard_normal((records, dim)))[0]
    turned = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    x = orthonormal * np.sqrt(records * np.asarray(spectrum)) @ turned.T
    y = x @ rng.standard_normal(dim)
    own = np.repeat(apart * rng.standard_normal(len(sizes)), sizes)
    y = scale * (y / np.abs(y).mean() + own + 0.3 * rng.standard_normal(records))
    cuts = np.cumsum(sizes)[:-1]
    return [
        Records(torch.tensor(rows), torch.tensor(targets))
        for rows, targets in zip(np.split(x, cuts), np.split(y, cuts), strict=True)
    ]


def linear(dim: int, *, bias: bool = False, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Linear:
    rng = np.random.default_rng(seed)
    layer = nn.Linear(dim, 1, bias=bias).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.tensor(0.5 * rng.standard_normal(tuple(parameter.shape))))
    return layer


def known(clients: Sequence[Records], first: np.ndarray, *, ridge: float = 0.0, bias: bool = False) -> Truth:
    """Return the constants of ridge regression; those of gradients as they are at the first model."""
    data = [(one.x.double().numpy(), one.y.double().numpy()) for one in clients]
    if bias:
        data = [(np.column_stack([x, np.ones(len(x))]), y) for x, y in data]
    shares = np.array([len(y) for _, y in data]) / sum(len(y) for _, y in data)
    pooled = tuple(np.concatenate(parts) for parts in zip(*data, strict=True))

    def hessian(x: np.ndarray) -> np.ndarray:
        return x.T @ x / len(x) + ridge * np.eye(x.shape[1])

    def best(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.linalg.lstsq(hessian(x), x.T @ y / len(y), rcond=1e-12)[0]

    def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
        return float(np.mean((x @ w - y) ** 2) / 2 + ridge / 2 * w @ w)

    curvatures = np.linalg.eigvalsh(hessian(pooled[0]))
    optimum = best(*pooled)
    lowest = loss(optimum, *pooled)
    by_record = [x * (x @ first - y)[:, None] + ridge * first for x, y in data]
    gradients = np.array([rows.mean(0) for rows in by_record])
    mean = shares @ gradients
    lengths = np.linalg.norm(gradients, axis=1)
    spreads = [np.mean(np.sum((rows - rows.mean(0)) ** 2, axis=1)) for rows in by_record]
    return {
        "strong_convexity": curvatures[0],
        "smoothness": curvatures[-1],
        "polyak_lojasiewicz": curvatures[0],
        "initial_distance": float(np.sum((first - optimum) ** 2)),
        "initial_gap": loss(first, *pooled) - lowest,
        "heterogeneity": lowest - float(shares @ [loss(best(x, y), x, y) for x, y in data]),
        "gradient_bound": float(lengths.max()),
        "lipschitz": float(lengths.max()),
        "divergence": float(shares @ np.sum((gradients - mean) ** 2, axis=1)),
        "dissimilarity": math.sqrt(shares @ lengths**2) / float(np.linalg.norm(mean)),
        "record_spread": math.sqrt(shares @ np.array(spreads)),
    }


GRADIENTS = ("gradient_bound", "lipschitz", "divergence", "dissimilarity", "record_spread")
UNEQUAL = (20, 35, 50, 15)
RIDGES = [
    ([3.0], 0.0, False),
    ([3.0], 0.5, True),
    (np.geomspace(0.5, 4.0, 6), 0.0, False),
    (np.geomspace(0.5, 4.0, 6), 0.3, True),
    (np.geomspace(1e-3, 2.0, 12), 0.1, False),
    (np.geomspace(0.1, 40.0, 20), 0.02, True),
]


@each(("spectrum", "ridge", "bias"), RIDGES)
def test_ridge_regression(spectrum: Sequence[float], ridge: float, bias: bool) -> None:
    clients = regression(spectrum, UNEQUAL)
    model = Model(linear(len(spectrum), bias=bias), half_square, ridge=ridge)
    truth = known(clients, model.vector().numpy(), ridge=ridge, bias=bias)
    if not bias:
        assert truth["strong_convexity"] == pytest.approx(min(spectrum) + ridge)
    found = probe(model, clients)
    assert_sound(found)
    assert_curved(found)
    assert_known(found, truth)
    for name in GRADIENTS:
        assert_spread(found, name, truth[name])
    for name in ("gradient_bound", "lipschitz", "divergence", "record_spread"):  # the largest along the way
        assert getattr(found, name) == found.notes[name].high
    assert found.gradient_bound == pytest.approx(found.lipschitz)


@each(("spectrum", "ridge"), [(np.geomspace(0.5, 4.0, 6), 0.0), (np.geomspace(0.5, 4.0, 6), 0.3)])
def test_fedsgd_dpcs_own_estimates_are_of_clients_that_train_alone(spectrum: Sequence[float], ridge: float) -> None:
    clients = regression(spectrum, UNEQUAL)
    model = Model(linear(len(spectrum)), half_square, ridge=ridge)
    first, shares = model.vector().numpy(), np.array(UNEQUAL) / sum(UNEQUAL)
    apart, least = [], []
    for one in clients:
        x, y = one.x.numpy(), one.y.numpy()
        best = np.linalg.solve(x.T @ x / len(x) + ridge * np.eye(len(spectrum)), x.T @ y / len(x))
        apart.append(float(np.sum((first - best) ** 2)))
        least.append(float(np.mean((x @ best - y) ** 2) / 2 + ridge / 2 * best @ best))
    found = estimate(model, clients, clip=None, streams=Streams(3), source="known records", estimator="paper")
    assert_sound(found)
    assert found.initial_distance == pytest.approx(shares @ apart, rel=CLOSE)
    assert found.heterogeneity == pytest.approx(max(least) - shares @ least, rel=CLOSE)
    general = probe(model, clients)
    for name in CURVED:
        if name in ("initial_distance", "heterogeneity"):
            assert getattr(found, name) > 1.01 * getattr(general, name)  # neither is what the bound is about
            assert found.notes[name].how.endswith("(FedSGD-DPC's)")
        else:
            assert getattr(found, name) == getattr(general, name)


def test_clients_that_want_the_same_model_have_their_longest_gradients_at_first() -> None:
    # Whatever a client holds, its gradient H(w − w*) shrinks on the way down: G, B and Λ are those of the first model.
    one = regression(np.geomspace(0.5, 4.0, 6), [40])[0]
    clients = [Records(one.x * factor, one.y * factor) for factor in (1.0, 1.2, 0.8)]
    model = Model(linear(6), half_square)
    truth = known(clients, model.vector().numpy())
    assert truth["heterogeneity"] == pytest.approx(0.0, abs=0.1)
    found = probe(model, clients)
    assert_known(found, truth, ("strong_convexity", "smoothness", "gradient_bound", "lipschitz", "divergence"))


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_units_of_the_targets_are_taken_along(scale: float) -> None:
    clients = regression(np.geomspace(0.5, 20.0, 8), UNEQUAL, scale=scale)
    model = Model(linear(8), half_square)
    assert_known(probe(model, clients), known(clients, model.vector().numpy()))


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_units_of_the_features_are_taken_along(factor: float) -> None:
    clients = [Records(one.x * factor, one.y) for one in regression(np.geomspace(0.5, 20.0, 8), UNEQUAL)]
    model = Model(linear(8), half_square)
    assert_known(probe(model, clients), known(clients, model.vector().numpy()))


def test_the_first_model_is_the_one_that_was_passed_in() -> None:
    clients = regression(np.geomspace(0.5, 4.0, 6), UNEQUAL)
    for seed in (1, 2):
        model = Model(linear(6, seed=seed), half_square)
        assert_known(probe(model, clients), known(clients, model.vector().numpy()))


@pytest.fixture(scope="module")
def plain() -> tuple[list[Records], Model, Truth, Constants]:
    """Return the clients and the model of a plain regression, its constants, and those that a probe finds."""
    clients = regression(np.geomspace(0.5, 4.0, 6), UNEQUAL)
    model = Model(linear(6), half_square)
    return clients, model, known(clients, model.vector().numpy()), probe(model, clients)


# (b) Quadratics: records are points, and a model is as good as it is near to them, axis by axis.


class Shift(nn.Module):
    """Subtract a vector that is learned."""

    def __init__(self, first: Sequence[float]) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor(np.asarray(first, dtype=float)))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.at


def points(*clients: Any) -> list[Records]:
    rows = [torch.tensor(np.asarray(one, dtype=float)) for one in clients]
    return [Records(one, torch.zeros(len(one), dtype=torch.float64)) for one in rows]


def near(first: Sequence[float], curvatures: Sequence[float]) -> Model:
    """Return a model whose loss on a record x is Σ_j a_j·(w_j − x_j)²/2."""
    weights = torch.tensor(np.asarray(curvatures, dtype=float))
    return Model(Shift(first), lambda outputs, _: (weights * outputs.square()).sum(1) / 2)


def quadratic(
    curvatures: np.ndarray, seed: int = 0, sizes: Sequence[int] = (10, 30, 20)
) -> tuple[Model, list[Records], Truth]:
    """Return a quadratic with its clients and constants. Only the gradients at the models on the way down are left."""
    rng = np.random.default_rng(seed)
    dim = len(curvatures)
    clouds = [rng.standard_normal(dim) + rng.standard_normal((size, dim)) for size in sizes]
    first = 3 * rng.standard_normal(dim)
    shares = np.array(sizes) / sum(sizes)
    centres = np.array([cloud.mean(0) for cloud in clouds])
    optimum = shares @ centres
    pulls = curvatures * (first - centres)
    truth = {
        "strong_convexity": curvatures.min(),
        "smoothness": curvatures.max(),
        "polyak_lojasiewicz": curvatures.min(),
        "initial_distance": np.sum((first - optimum) ** 2),
        "initial_gap": np.sum(curvatures * (first - optimum) ** 2) / 2,
        "heterogeneity": shares @ np.sum(curvatures * (centres - optimum) ** 2, axis=1) / 2,
        # Those two are the same at every model.
        "divergence": shares @ np.sum((curvatures * (centres - optimum)) ** 2, axis=1),
        "record_spread": math.sqrt(
            shares @ [np.mean(np.sum((curvatures * (cloud - cloud.mean(0))) ** 2, axis=1)) for cloud in clouds]
        ),
        "first_gradient": np.linalg.norm(pulls, axis=1).max(),
        "first_dissimilarity": math.sqrt(shares @ np.sum(pulls**2, axis=1)) / np.linalg.norm(shares @ pulls),
    }
    return near(first, curvatures), points(*clouds), truth


EXACT = (*CURVED, "divergence", "record_spread")


@each("condition", [1.0, 2.0, 50.0, 2000.0])
@each("dim", [2, 9, 40])
def test_quadratics_of_few_dimensions(dim: int, condition: float) -> None:
    model, clients, truth = quadratic(np.random.default_rng(dim).permutation(np.geomspace(0.3, 0.3 * condition, dim)))
    found = probe(model, clients)
    assert_sound(found)
    assert_curved(found)
    assert_known(found, truth, EXACT)
    assert_spread(found, "gradient_bound", truth["first_gradient"])
    assert_spread(found, "dissimilarity", truth["first_dissimilarity"])


def test_a_single_parameter() -> None:
    model, clients, truth = quadratic(np.array([7.0]))
    found = probe(model, clients)
    assert_known(found, truth, EXACT, rel=1e-6)
    assert found.strong_convexity == pytest.approx(found.smoothness, rel=1e-6)


@each(("dim", "least"), [(64, 0.01), (65, 0.01), (130, 0.4), (200, 0.1)])
def test_a_least_curvature_that_stands_apart_is_found_in_many_dimensions(dim: int, least: float) -> None:
    curvatures = np.append(np.linspace(1.0, 3.0, dim - 1), least)
    model, clients, truth = quadratic(curvatures)
    found = probe(model, clients)
    assert_curved(found)
    assert_known(found, truth, EXACT)


# Beyond 64 parameters not all directions are looked at.
CROWDED = {
    "ten": np.geomspace(1.0, 10.0, 100),
    "thousands": np.geomspace(1.0, 2000.0, 200),
    "just below a crowd": np.append(np.linspace(1.0, 1.2, 120), [0.8, *np.linspace(100.0, 2000.0, 20)]),
}


@each("kind", CROWDED)
def test_a_least_curvature_in_a_crowd_is_right_or_none_is_claimed(kind: str) -> None:
    model, clients, truth = quadratic(CROWDED[kind])
    found = probe(model, clients)
    assert_sound(found)
    assert_known(found, truth, ("smoothness", "divergence", "record_spread"))
    if found.notes["strong_convexity"].how.startswith("least curvature"):
        assert_known(found, truth, rel=PROBED)
    else:
        assert_flat(found)
        assert found.strong_convexity <= found.smoothness


@each("condition", [10.0, 300.0, 2000.0])
def test_heterogeneity_is_right_however_far_the_descent_came(condition: float) -> None:
    # F* and each F_i* must be sought equally well: what the descent has not yet reached is no difference of clients.
    clients = regression(np.geomspace(1.0, condition, 100), (60, 50, 70, 60))
    model = Model(linear(100), half_square)
    found = probe(model, clients)
    assert_known(found, known(clients, model.vector().numpy()), ("heterogeneity",), rel=PROBED)


def test_directions_without_any_curvature_are_flat() -> None:
    model, clients, truth = quadratic(np.append(np.geomspace(1.0, 5.0, 7), [0.0, 0.0]))
    found = probe(model, clients)
    assert_flat(found)
    assert_known(found, truth, ("smoothness", "initial_gap", "heterogeneity", "divergence", "record_spread"))
    assert found.strong_convexity >= 1.0 - CLOSE  # on the seven others
    assert found.polyak_lojasiewicz == pytest.approx(1.0, rel=3.0)  # it holds in spite of them


def test_clients_that_curve_alike_are_known_wherever_one_stands() -> None:
    # All curvatures are 2, so one step of 1/2 ends at the optimum: the first model and that one are all that is seen.
    # At first the heavy client is 4 away and the light one 2; at the optimum they are 0.6 and 5.4 away.
    model, clients = near([4.0, 0.0], [2.0, 2.0]), points([[0.0, 0.0]] * 9, [[6.0, 0.0]])
    found = probe(model, clients)
    assert_known(found, {
        "strong_convexity": 2.0, "smoothness": 2.0, "polyak_lojasiewicz": 2.0,
        "gradient_bound": 2 * 5.4, "lipschitz": 2 * 5.4,
        "divergence": 4 * (0.9 * 0.6**2 + 0.1 * 5.4**2),
        "dissimilarity": math.sqrt(0.9 * 4.0**2 + 0.1 * 2.0**2) / 3.4,
        "heterogeneity": 0.9 * 0.6**2 + 0.1 * 5.4**2,
        "initial_distance": 3.4**2, "initial_gap": 3.4**2,
    }, [*CURVED, "gradient_bound", "lipschitz", "divergence", "dissimilarity"], rel=1e-6)  # fmt: skip
    assert found.record_spread == pytest.approx(0.0, abs=1e-9)
    assert found.notes["gradient_bound"].low == pytest.approx(2 * 4.0)
    gaps = found.notes["heterogeneity"]
    assert (gaps.low, gaps.high) == pytest.approx((found.heterogeneity,) * 2)  # each client's own least loss is 0


def test_clients_with_the_same_records_do_not_differ() -> None:
    one = regression(np.geomspace(0.5, 4.0, 6), [40])[0]
    found = probe(Model(linear(6), half_square), [one] * 3)
    assert found.divergence == pytest.approx(0.0, abs=1e-18)
    assert found.dissimilarity == pytest.approx(1.0)
    assert found.heterogeneity == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dim", [30, 100])
def test_clients_with_the_same_records_do_not_differ_where_the_loss_is_flat(dim: int) -> None:
    rng = np.random.default_rng(0)
    same = Records(torch.tensor(rng.standard_normal((40, dim))), torch.tensor(rng.integers(0, 2, 40)))
    model = Model(nn.Linear(dim, 2).double(), nn.CrossEntropyLoss(reduction="none"))  # labels that can all be learned
    found = probe(model, [same] * 3)
    assert_flat(found)
    assert found.heterogeneity < 0.01 * found.initial_gap


# (c) Λ in closed form.


def test_the_spread_of_records_under_a_linear_model() -> None:
    # Two records a client, x = ±c and y = d at w = 0: gradients are ∓c·d, and their mean is 0. Going down changes
    # nothing, since there is nowhere to go.
    rng = np.random.default_rng(4)
    clients, squares = [], []
    for _ in range(3):
        c, d = rng.standard_normal(5), rng.uniform(1.0, 2.0)
        clients.append(Records(torch.tensor(np.array([c, -c] * 4)), torch.full((8,), d, dtype=torch.float64)))
        squares.append(d**2 * c @ c)
    one_more = Records(torch.tensor(rng.standard_normal((8, 5))), torch.tensor(rng.standard_normal(8)))
    clients.append(one_more)
    rows = one_more.x.numpy() * -one_more.y.numpy()[:, None]
    squares.append(np.mean(np.sum((rows - rows.mean(0)) ** 2, axis=1)))
    layer = nn.Linear(5, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    found = probe(Model(layer, half_square, ridge=0.2), clients)
    assert_spread(found, "record_spread", math.sqrt(np.mean(squares)))
    truth = known(clients, np.zeros(5), ridge=0.2)
    assert truth["record_spread"] == pytest.approx(math.sqrt(np.mean(squares)))


def test_heavier_clients_count_for_more() -> None:
    model = near([0.0], [1.0])
    clients = points([[-1.0], [1.0]] * 15, [[-10.0], [10.0]] * 5)  # spreads of 1 and 10, weights of 3/4 and 1/4
    model.module.at.data.fill_(5.0)  # type: ignore[operator]
    assert probe(model, clients).record_spread == pytest.approx(math.sqrt(0.75 * 1 + 0.25 * 100))


# (d) Clips.

ON_A_LINE = (-10.0, -0.1, 0.1, 10.0)
"""Points whose gradients 2(w − x) are clipped to 1: the outer two pull against each other and add nothing.

From w = 0.3 the field is (1 + 0.8 + 0.4 − 1)/4 = 0.3, and it falls to nothing at 0 with the slope 2·2/4 = 1.
"""


def test_constants_are_those_of_clipped_record_gradients() -> None:
    clients = points(*[[[x] for x in ON_A_LINE]] * 3)
    found = probe(near([0.3], [2.0]), clients, clip=RecordClip(1.0))
    assert_sound(found)
    assert_known(found, {
        "strong_convexity": 1.0, "smoothness": 1.0, "polyak_lojasiewicz": 1.0,
        "gradient_bound": 0.3, "lipschitz": 0.6, "record_spread": math.sqrt((1 + 0.64 + 0.16 + 1) / 4 - 0.09),
        "dissimilarity": 1.0, "initial_distance": 0.09, "initial_gap": 0.09,
    }, ["strong_convexity", "smoothness", "polyak_lojasiewicz", "gradient_bound", "lipschitz", "record_spread",
        "dissimilarity", "initial_distance", "initial_gap"], rel=1e-6)  # fmt: skip
    assert found.divergence == pytest.approx(0.0, abs=1e-12)
    raw = probe(near([0.3], [2.0]), clients)
    assert raw.smoothness == pytest.approx(2.0)
    assert (raw.gradient_bound, raw.lipschitz) == pytest.approx((found.lipschitz,) * 2)


def test_constants_are_those_of_clipped_client_gradients() -> None:
    # One client a point: each is clipped, and then the mean is taken, so the slopes are as they are with records.
    clients = points(*([[x]] * 4 for x in ON_A_LINE))
    found = probe(near([0.3], [2.0]), clients, clip=ClientClip(1.0))
    assert_known(found, {
        "gradient_bound": 1.0, "lipschitz": 20.6,
        "divergence": (1 + 0.64 + 0.16 + 1) / 4 - 0.09,
        "dissimilarity": math.sqrt((1 + 0.64 + 0.16 + 1) / 4) / 0.3,
    }, ["gradient_bound", "lipschitz", "divergence", "dissimilarity"], rel=1e-6)  # fmt: skip
    assert_known(found, {"smoothness": 1.0, "strong_convexity": 1.0}, ["smoothness", "strong_convexity"], rel=PROBED)


@each("kind", [RecordClip, ClientClip])
@each("norm", [1, 2])
@each("bound", [0.05, 0.7])
def test_no_clipped_gradient_is_longer_than_the_clip(kind: type, norm: int, bound: float, plain: Any) -> None:
    clients, model, truth, free = plain
    found = probe(model, clients, clip=kind(bound, norm))
    assert_sound(found)
    assert 0 < found.gradient_bound <= bound * (1 + 1e-9)
    if kind is ClientClip and norm == 2:
        assert found.gradient_bound == pytest.approx(bound)  # some client's is longer
    if kind is RecordClip:
        assert found.record_spread <= bound
    assert found.lipschitz > 1.1 * found.gradient_bound
    assert found.lipschitz >= truth["lipschitz"] * (1 - CLOSE)
    assert found.smoothness <= free.smoothness * (1 + CLOSE)
    assert found.divergence <= min(free.divergence, bound**2) * (1 + CLOSE)


@pytest.mark.parametrize("kind", [RecordClip, ClientClip])
def test_a_clip_that_nothing_reaches_changes_nothing(kind: type, plain: Any) -> None:
    clients, model, _, free = plain
    found = probe(model, clients, clip=kind(1e6))
    for name in SYMBOLS:
        assert getattr(found, name) == pytest.approx(getattr(free, name), rel=1e-6), name


def test_a_clip_of_parameters_leaves_gradients_alone(plain: Any) -> None:
    clients, model, _, free = plain
    assert probe(model, clients, clip=ModelClip(1e-3)) == free


@each("clip", [RecordClip(1e-3), RecordClip(1e-3, 1), ClientClip(1e-3)])
def test_a_clip_so_tight_that_only_directions_are_left(clip: RecordClip | ClientClip, plain: Any) -> None:
    # Record by record a linear model's gradient then hardly depends on it: there is next to no curvature anywhere.
    clients, model, *_ = plain
    found = probe(model, clients, clip=clip)
    assert_sound(found)
    assert_flat(found)
    assert found.gradient_bound <= 1e-3 * (1 + 1e-9)


# (e) Softmax regression.


def labelled(sizes: Sequence[int] = (40, 30, 50), dim: int = 5, classes: int = 3, seed: int = 2) -> list[Records]:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((classes, dim))
    clients = []
    for size in sizes:
        labels = rng.integers(0, classes, size)
        features = centres[labels] + 1.5 * rng.standard_normal((size, dim))
        clients.append(Records(torch.tensor(features, dtype=torch.float32), torch.tensor(labels)))
    return clients


def softmax(*, ridge: float = 0.0, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(nn.Linear(5, 3), nn.CrossEntropyLoss(reduction="none"), ridge=ridge, name="softmax")


@each("clip", [None, RecordClip(0.5), ClientClip(0.1)])
def test_softmax_without_a_penalty_is_flat(clip: RecordClip | ClientClip | None) -> None:
    found = probe(softmax(), labelled(), clip=clip)  # adding one number to all outputs changes nothing
    assert_sound(found)
    assert_flat(found)
    assert all(value > 0 for value in found.need(*SYMBOLS))


@pytest.mark.parametrize("ridge", [0.01, 0.2])
def test_softmax_with_a_penalty_curves_by_it(ridge: float) -> None:
    # In the flat direction the penalty is all the curvature there is; softmax adds at most ‖x‖²/2 in any.
    clients = labelled()
    found = probe(softmax(ridge=ridge), clients)
    assert_sound(found)
    assert_curved(found)
    assert found.strong_convexity == pytest.approx(ridge, rel=CLOSE)
    assert found.polyak_lojasiewicz == pytest.approx(ridge, rel=CLOSE)
    rows = torch.cat([one.x for one in clients]).double()
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    assert ridge < found.smoothness <= ridge + float(torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]) / 2


def test_softmax_distances_are_squares() -> None:
    # At the least loss of a penalised problem the optimum is unique: found here by plain descent.
    clients, model = labelled(), softmax(ridge=0.2)
    pooled = Records(torch.cat([one.x for one in clients]), torch.cat([one.y for one in clients]))
    precise = Model(copy.deepcopy(model.module).double(), model.loss, ridge=0.2)
    first = parameters = precise.vector()
    for _ in range(2000):
        parameters = parameters - 0.3 * precise.gradient(parameters, pooled.x.double(), pooled.y)
    found = probe(model, clients)
    assert found.initial_distance == pytest.approx(float((first - parameters).square().sum()), rel=1e-6)


# (f) Nothing but the arguments counts, and they stay as they are.


def test_the_same_streams_give_the_same_constants() -> None:
    for clip in (None, RecordClip(0.5)):
        assert probe(softmax(), labelled(), clip=clip, seed=5) == probe(softmax(), labelled(), clip=clip, seed=5)


def test_other_streams_change_little(plain: Any) -> None:
    clients, model, truth, _ = plain
    for seed in (0, 1, None):
        assert_known(probe(model, clients, seed=seed), truth)


@pytest.mark.parametrize(("training", "dtype"), [(True, torch.float32), (False, torch.float64)])
def test_the_model_that_is_passed_in_stays_as_it_is(training: bool, dtype: torch.dtype) -> None:
    model = Model(nn.Sequential(nn.Linear(5, 2), nn.Dropout(0.5), nn.Linear(2, 3)), nn.CrossEntropyLoss(), ridge=0.5)
    model.module.to(dtype).train(training)
    before = copy.deepcopy(model.module.state_dict())
    clients = labelled()
    features = [one.x.clone() for one in clients]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    probe(model, clients, clip=RecordClip(0.5))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(layer.training == training for layer in model.module.modules())
    assert all(
        torch.equal(value, before[name]) and value.dtype == dtype for name, value in model.module.state_dict().items()
    )
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.module.parameters())
    assert all(torch.equal(one.x, old) and one.x.dtype == old.dtype for one, old in zip(clients, features, strict=True))


def test_single_precision_gives_what_double_precision_does() -> None:
    clients = regression(np.geomspace(0.5, 40.0, 6), UNEQUAL)
    single = [Records(one.x.float(), one.y.float()) for one in clients]
    model = Model(linear(6, dtype=torch.float32), half_square)
    found = probe(model, single)
    assert_curved(found)
    assert_known(found, known(single, model.vector().double().numpy()))


def test_layers_that_are_random_in_training() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Dropout(0.5), nn.Linear(2, 3))
    loss = nn.CrossEntropyLoss(reduction="none")
    found = probe(Model(module, loss, ridge=0.1), labelled(), clip=RecordClip(0.5))
    calm = probe(
        Model(nn.Sequential(module[0], module[1], module[3]), loss, ridge=0.1), labelled(), clip=RecordClip(0.5)
    )
    assert_sound(found)
    for name in SYMBOLS:  # they are not random in probes
        assert getattr(found, name) == pytest.approx(getattr(calm, name), rel=1e-6), name


def test_parameters_that_are_not_trained_are_no_part_of_it() -> None:
    clients = regression(np.geomspace(0.5, 4.0, 6), UNEQUAL)
    layer = linear(6, bias=True)
    with torch.no_grad():
        layer.bias.zero_()
    layer.bias.requires_grad_(False)
    found = probe(Model(layer, half_square), clients)
    assert_known(found, known(clients, layer.weight.detach().numpy()[0]))


# What is looked at where there is much.


def test_of_many_records_an_even_part_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    # Records come as blocks, again and again, and a quarter of each client's is whole blocks: all constants stay.
    monkeypatch.setattr(estimate_constants, "_RECORDS", 240)
    blocks = regression(np.geomspace(0.5, 4.0, 6), (20, 30, 10))
    clients = [Records(one.x.repeat(16, 1), one.y.repeat(16)) for one in blocks]
    model = Model(linear(6), half_square)
    truth = known(blocks, model.vector().numpy())
    assert truth == pytest.approx(known(clients, model.vector().numpy()))
    seen = []
    field = estimate_constants._Probe.field
    monkeypatch.setattr(
        estimate_constants._Probe,
        "field",
        lambda self, *rest: seen.append(sum(self.sizes)) or field(self, *rest),  # type: ignore[func-returns-value]
    )
    assert_known(probe(model, clients), truth)
    assert set(seen) == {240}


def test_of_many_clients_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_constants, "_CLIENTS", 4)
    clients = regression(np.geomspace(0.5, 4.0, 6), UNEQUAL)
    twice = [one for client in clients for one in (client, client)]
    model = Model(linear(6), half_square)
    assert probe(model, twice).heterogeneity == probe(model, clients).heterogeneity
    assert "4 clients" in probe(model, twice).notes["heterogeneity"].how


def test_clients_with_a_record_each() -> None:
    one = regression(np.geomspace(0.5, 4.0, 3), [12])[0]
    clients = [one.take(torch.tensor([row])) for row in range(12)]
    model = Model(linear(3), half_square)
    found = probe(model, clients)
    assert_sound(found)
    assert found.record_spread == 0.0
    assert_known(found, known(clients, model.vector().numpy()))


# What is said about it.


def test_what_constants_were_estimated_on_is_kept(tmp_path: Any) -> None:
    found = probe(softmax(), labelled())
    assert found.source == "known records, model softmax"
    (tmp_path / "found.toml").write_text(found.to_toml(), encoding="utf-8")
    back = read(tmp_path / "found.toml")
    assert back.need(*SYMBOLS) == found.need(*SYMBOLS)
    assert back == found


def test_the_steps_of_the_descent_are_told() -> None:
    found = probe(near([4.0], [2.0]), points([[0.0], [1.0]], [[3.0], [4.0]]))
    assert "2 models along a descent of 1 steps" in found.notes["lipschitz"].how


def test_a_model_that_is_best_already() -> None:
    # Nothing is left to descend, and no ratio can be taken; the curvature is there to be seen all the same.
    found = probe(near([0.0, 0.0], [1.0, 2.0]), points([[1.0, 1.0], [-1.0, -1.0]], [[2.0, 0.0], [-2.0, 0.0]]))
    assert_known(found, {"strong_convexity": 1.0, "smoothness": 2.0}, ["strong_convexity", "smoothness"])
    assert (found.initial_gap, found.initial_distance) == pytest.approx((0.0, 0.0), abs=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("factor", [math.nan, 1e200])
def test_gradients_that_are_not_finite_are_refused(factor: float) -> None:
    clients = [Records(one.x * factor, one.y) for one in regression(np.geomspace(0.5, 4.0, 6), UNEQUAL)]
    with pytest.raises(BadInput, match=r"model must have finite gradients .*, had not; check the data's scale"):
        probe(Model(linear(6), half_square), clients)


# (h) Wrong references are told apart from right ones.


@each("name", CURVED)
def test_a_reference_that_is_a_tenth_off_is_noticed(name: str, plain: Any) -> None:
    *_, truth, found = plain
    assert_known(found, truth, rel=PROBED)
    for factor in (0.85, 1.15):
        with pytest.raises(AssertionError, match=name):
            assert_known(found, {**truth, name: factor * truth[name]}, rel=PROBED)


def test_swapped_and_unsquared_references_are_noticed(plain: Any) -> None:
    *_, truth, found = plain
    least, largest, squared = truth["strong_convexity"], truth["smoothness"], truth["initial_distance"]
    assert abs(squared - 1) > 2 * PROBED  # else a distance and its square are alike
    for wrong in (
        {"strong_convexity": largest, "smoothness": least},
        {"polyak_lojasiewicz": largest},
        {"polyak_lojasiewicz": 2 * least},
        {"initial_distance": math.sqrt(squared)},
        {"initial_gap": largest / 2 * squared},
        {"heterogeneity": truth["divergence"]},
    ):
        with pytest.raises(AssertionError):
            assert_known(found, {**truth, **wrong}, rel=PROBED)
