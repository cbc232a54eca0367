"""The reference client, step by step, against the papers' formulas worked out by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conformance.asking import uploads_of
from dpfl.clients import reference
from dpfl.clients.reference import ReferenceClients
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.orders import ClientClip, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip
from dpfl.privacy.ledger import Charged
from dpfl.streams import Streams, layer_randomness
from grids import each


class Dot(nn.Module):
    """Returns w·x, or w itself, so that gradients can be worked out by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def linear(size: int) -> Model:
    """Loss w·x of a record: its gradient is x, wherever the model stands."""
    return Model(Dot(size), lambda outputs, _: outputs)


def bowl() -> Model:
    """Loss (w − y)²/2 of a record (1, y): its gradient is w − y."""
    return Model(Dot(1), lambda outputs, y: (outputs - y).square() / 2)


def vector(*entries: float) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64)


def pulls(*targets: float) -> Records:
    return Records(torch.ones(len(targets), 1, dtype=torch.float64), vector(*targets))


def pushes(*rows: tuple[float, ...]) -> Records:
    return Records(torch.tensor(rows, dtype=torch.float64), torch.zeros(len(rows)))


class Coins:
    """A generator whose coins are known, one list for each step."""

    def __init__(self, *steps: list[float]) -> None:
        self.steps = list(steps)

    def random(self, count: int) -> np.ndarray:
        coins = self.steps.pop(0)
        assert len(coins) == count
        return np.array(coins)


def update(
    order: Order, model: Model, start: Tensor, records: Records, *, coins: Any = None, noise: Any = None, **options: Any
) -> Tensor:
    return reference.perform(
        Charged(order, len(records)), model, start, records, batches=coins, noise=noise, **options
    )  # fmt: skip


def test_a_udp_step_sums_clipped_gradients() -> None:
    # w − (η/n)·Σ clip(g, C) with η = 0.3, n = 3, C = 5. The gradients (3, 4), (6, 8) and (0, −20) have norms 5, 10
    # and 20, and are clipped to (3, 4), (3, 4) and (0, −5): the sum is (6, 3), the update −0.1·(6, 3).
    order = Order(steps=1, learning_rate=0.3, clip=RecordClip(5.0))
    moved = update(order, linear(2), vector(7.0, -1.0), pushes((3, 4), (6, 8), (0, -20)))
    assert moved.tolist() == pytest.approx([-0.6, -0.3])


def test_an_l1_clip_of_each_record() -> None:
    # The L1 norms are 7 and 2: clip(3, −4) to 3.5 is (1.5, −2), (1, 1) stays; half their sum (2.5, −1), at rate 1.
    order = Order(steps=1, learning_rate=1.0, clip=RecordClip(3.5, 1))
    assert update(order, linear(2), vector(0, 0), pushes((3, -4), (1, 1))).tolist() == pytest.approx([-1.25, 0.5])


def test_two_steps_of_fedavg() -> None:
    # Targets 1 and 3 have mean 2. From w = 0 with η = 0.5: w₁ = 0 − 0.5·(0 − 2) = 1, w₂ = 1 − 0.5·(1 − 2) = 1.5.
    order = Order(steps=2, learning_rate=0.5)
    assert update(order, bowl(), vector(0.0), pulls(1, 3)).tolist() == pytest.approx([1.5])


def test_the_update_is_local_minus_broadcast() -> None:
    # From w = 10 the same two steps give 10 − 0.5·8 = 6 and 6 − 0.5·4 = 4: an update of −6.
    order = Order(steps=2, learning_rate=0.5)
    start = vector(10.0)
    assert update(order, bowl(), start, pulls(1, 3)).tolist() == pytest.approx([-6.0])
    assert start.tolist() == [10.0]  # the broadcast model is not touched


def test_a_proximal_step_pulls_towards_the_broadcast_model() -> None:
    # From 0 with η = 0.5, μ = 0.4: w₁ = 1 as before (no distance yet), then w₂ = 1 − 0.5·((1 − 2) + 0.4·(1 − 0)) = 1.3.
    order = Order(steps=2, learning_rate=0.5, proximal=0.4)
    assert update(order, bowl(), vector(0.0), pulls(1, 3)).tolist() == pytest.approx([1.3])
    # From 10: w₁ = 10 − 0.5·8 = 6, w₂ = 6 − 0.5·((6 − 2) + 0.4·(6 − 10)) = 4.8.
    assert update(order, bowl(), vector(10.0), pulls(1, 3)).tolist() == pytest.approx([-5.2])


def test_a_schedule_gives_each_step_its_own_rate() -> None:
    # w₁ = 0 + 0.5·2 = 1, w₂ = 1 + 0.1·1 = 1.1.
    order = Order(steps=2, learning_rate=(0.5, 0.1))
    assert update(order, bowl(), vector(0.0), pulls(1, 3)).tolist() == pytest.approx([1.1])


def test_a_client_clip_bounds_the_mean_gradient_in_every_step() -> None:
    # The mean of (8, 0) and (4, 16) is (6, 8), of norm 10; clipped to 5 it is (3, 4), and two steps of 0.1 make
    # −(0.6, 0.8).
    order = Order(steps=2, learning_rate=0.1, clip=ClientClip(5.0))
    assert update(order, linear(2), vector(1, 1), pushes((8, 0), (4, 16))).tolist() == pytest.approx([-0.6, -0.8])
    # In the L1 norm (6, 8) is 14 long; clipped to 7 it is (3, 4) again.
    in_l1 = Order(steps=2, learning_rate=0.1, clip=ClientClip(7.0, 1))
    assert update(in_l1, linear(2), vector(1, 1), pushes((8, 0), (4, 16))).tolist() == pytest.approx([-0.6, -0.8])


def test_the_client_clip_leaves_the_proximal_pull_alone() -> None:
    # Steps of rate 1 with gradient 10 clipped to 1 and μ = 0.5: w₁ = −1, w₂ = −1 − (1 + 0.5·(−1)) = −1.5.
    order = Order(steps=2, learning_rate=1.0, clip=ClientClip(1.0), proximal=0.5)
    assert update(order, linear(1), vector(0.0), pushes((10,))).tolist() == pytest.approx([-1.5])


def test_a_model_clip_bounds_the_parameters_that_the_client_ends_with() -> None:
    # From (1, 0) one step of rate 1 along −(−2, −4) ends at (3, 4), of norm 5; clipped to 2.5 it is (1.5, 2).
    order = Order(steps=1, learning_rate=1.0, clip=ModelClip(2.5))
    assert update(order, linear(2), vector(1, 0), pushes((-2, -4))).tolist() == pytest.approx([0.5, 2.0])


def test_a_poisson_batch_is_divided_by_its_expected_size() -> None:
    # q = 0.5 of n = 4 expects 2 records, whoever comes. The coins take records 0, 1 and 3: their sum is 1 + 2 + 8 = 11,
    # the update −0.1·11/2; by the realised size it would be −0.1·11/3.
    records = pushes((1,), (2,), (4,), (8,))
    for clip in (RecordClip(100.0), None):
        order = Order(steps=1, learning_rate=0.1, batch=Poisson(0.5), clip=clip)
        coins = Coins([0.1, 0.49, 0.5, 0.0])
        assert update(order, linear(1), vector(0.0), records, coins=coins).tolist() == pytest.approx([-0.55])


def test_every_step_draws_its_own_poisson_batch() -> None:
    # Record 0 alone, then record 1 alone, each divided by 0.5·2 = 1: −0.1·(3 + 5).
    order = Order(steps=2, learning_rate=0.1, batch=Poisson(0.5), clip=RecordClip(100.0))
    coins = Coins([0.0, 0.9], [0.9, 0.0])
    assert update(order, linear(1), vector(0.0), pushes((3,), (5,)), coins=coins).tolist() == pytest.approx([-0.8])


def test_the_divisor_is_the_number_that_was_paid_for() -> None:
    # The ledger priced 4 records; a client that turns up with 2 still divides by 4.
    order = Order(steps=1, learning_rate=1.0, clip=RecordClip(10.0))
    moved = reference.perform(
        Charged(order, 4), linear(1), vector(0.0), pushes((3,), (5,)), batches=None, noise=None
    )  # fmt: skip
    assert moved.tolist() == pytest.approx([-2.0])


@pytest.mark.parametrize("clip", [RecordClip(1.0), ClientClip(1.0)])
def test_an_empty_batch_moves_by_noise_alone(clip: RecordClip | ClientClip) -> None:
    # An empty sum is 0, noised like any other: −η·(noise/(q·n)) for records (q·n = 1), −η·noise for the client.
    order = Order(
        steps=1, learning_rate=0.5, batch=Poisson(0.5), clip=clip, noise=Gaussian(3.0), noise_on="step"
    )  # fmt: skip
    drawn = np.random.default_rng(5).standard_normal(1) * 3.0
    moved = update(
        order, linear(1), vector(0.0), pushes((7,), (9,)), coins=Coins([0.9, 0.9]), noise=np.random.default_rng(5)
    )
    assert moved.tolist() == pytest.approx((-0.5 * drawn).tolist())


def test_an_empty_batch_without_noise_stays_where_it_is() -> None:
    for clip in (RecordClip(1.0), ClientClip(1.0), None):
        order = Order(steps=1, learning_rate=0.5, batch=Poisson(0.5), clip=clip)
        assert update(order, linear(1), vector(4.0), pushes((7,)), coins=Coins([0.9])).tolist() == [0.0]


def test_noise_on_the_upload_is_the_generators_draw_added_once() -> None:
    quiet = Order(steps=3, learning_rate=0.5, clip=RecordClip(1.0))
    loud = Order(steps=3, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(0.25))
    records = pushes((3, 4), (0, 1))
    plain = update(quiet, linear(2), vector(1, 2), records)
    noised = update(loud, linear(2), vector(1, 2), records, noise=np.random.default_rng(8))
    drawn = np.random.default_rng(8).standard_normal(2) * 0.25
    assert (noised - plain).tolist() == pytest.approx(drawn.tolist(), rel=1e-12)


def test_laplace_noise_is_the_generators_draw() -> None:
    order = Order(steps=1, learning_rate=0.5, clip=ClientClip(1.0, 1), noise=Laplace(0.25))
    noised = update(order, linear(2), vector(0, 0), pushes((1, 0)), noise=np.random.default_rng(8))
    drawn = np.random.default_rng(8).laplace(scale=0.25, size=2)
    assert noised.tolist() == pytest.approx((np.array([-0.5, 0.0]) + drawn).tolist(), rel=1e-12)


def test_noise_on_a_step_joins_the_sum_before_it_is_divided() -> None:
    # Two steps with n = 4, gradients clipped to 1 each: −η·Σ_k (4 + noise_k)/4.
    order = Order(steps=2, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(2.0), noise_on="step")
    noised = update(order, linear(1), vector(0.0), pushes((9,), (9,), (9,), (9,)), noise=np.random.default_rng(3))
    rng = np.random.default_rng(3)
    first, second = rng.standard_normal(1) * 2.0, rng.standard_normal(1) * 2.0
    assert noised.tolist() == pytest.approx((-0.5 * ((4 + first) / 4 + (4 + second) / 4)).tolist(), rel=1e-12)


def test_noise_on_a_step_joins_the_clipped_client_gradient_as_it_is() -> None:
    order = Order(steps=1, learning_rate=0.5, clip=ClientClip(1.0), noise=Gaussian(2.0), noise_on="step")
    noised = update(order, linear(1), vector(0.0), pushes((9,), (9,)), noise=np.random.default_rng(3))
    drawn = np.random.default_rng(3).standard_normal(1) * 2.0
    assert noised.tolist() == pytest.approx((-0.5 * (1 + drawn)).tolist(), rel=1e-12)


@each("entries", [1, 20, 50])
@each("vectorised", [True, False])
def test_gradients_in_small_pieces_add_up_to_the_same(
    entries: int, vectorised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    records = Records(rows, torch.zeros(7))
    order = Order(steps=2, learning_rate=0.5, clip=RecordClip(1.0))
    whole = update(order, linear(10), torch.zeros(10, dtype=torch.float64), records, vectorised=vectorised)
    monkeypatch.setattr(reference, "_GRADIENT_ENTRIES", entries)  # 1, 2 and 5 records at a time
    pieces = update(order, linear(10), torch.zeros(10, dtype=torch.float64), records, vectorised=vectorised)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12)


# A whole cohort.

NOISY = Order(
    steps=2, learning_rate=0.5, batch=Poisson(0.5), clip=RecordClip(1.0), noise=Gaussian(0.1), noise_on="step"
)  # fmt: skip


def cohort(model: Model, seed: int = 0) -> ReferenceClients:
    rows = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(2))
    streams = Streams(seed)
    with layer_randomness(streams.public.generator("probe"), torch.device("cpu")):
        return ReferenceClients(model, tuple(Records(x, torch.arange(6) % 2) for x in rows), streams)


def classifier(*, dropout: float) -> Model:
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + index, parameter.numel()).reshape(parameter.shape))
    return Model(module, nn.CrossEntropyLoss())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_order_of_visits_changes_nothing(dropout: float) -> None:
    model = classifier(dropout=dropout)
    clients, broadcast = cohort(model), model.vector()
    forwards = uploads_of(clients, {c: Charged(NOISY, 6) for c in (0, 1, 2, 3)}, broadcast, 1)
    backwards = uploads_of(clients, {c: Charged(NOISY, 6) for c in (3, 1, 0)}, broadcast, 1)
    assert list(backwards) == [3, 1, 0]
    assert all(torch.equal(backwards[client], forwards[client]) for client in backwards)


def test_no_two_clients_or_rounds_share_randomness() -> None:
    model = classifier(dropout=0.0)
    x = torch.ones(2, 6, 3)
    clients = ReferenceClients(model, tuple(Records(rows, torch.zeros(6).long()) for rows in x), Streams(0))
    order = Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(0.1))
    paid = {client: Charged(order, 6) for client in (0, 1)}
    one, two = (uploads_of(clients, paid, model.vector(), round) for round in (1, 2))
    uploads = [*one.values(), *two.values()]  # same data, same model, same order: only the noise can differ
    assert not any(torch.equal(uploads[i], uploads[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("clip", [RecordClip(1.0), None])
def test_dropout_repeats_with_the_streams_and_leaves_torchs_own_alone(clip: RecordClip | None) -> None:
    order = Order(steps=2, learning_rate=0.5, clip=clip)
    paid = {client: Charged(order, 6) for client in range(4)}

    def uploads(model: Model, seed: int) -> Tensor:
        before = torch.get_rng_state()
        result = uploads_of(cohort(model, seed), paid, model.vector(), 1)
        assert torch.equal(torch.get_rng_state(), before)
        return torch.stack([result[client] for client in sorted(result)])

    one = uploads(classifier(dropout=0.5), 0)
    torch.rand(3)  # whoever else draws from torch's generator is not heard
    assert torch.equal(one, uploads(classifier(dropout=0.5), 0))
    assert not torch.equal(one, uploads(classifier(dropout=0.5), 1))
    assert not torch.equal(one, uploads(classifier(dropout=0.0), 0))  # dropout did drop something


def test_dropout_is_on_although_the_module_was_being_evaluated() -> None:
    model = classifier(dropout=0.5)
    clients = cohort(model)
    paid = {0: Charged(Order(steps=1, learning_rate=0.5), 6)}
    training = uploads_of(clients, paid, model.vector(), 1)[0]
    model.module.eval()
    assert torch.equal(uploads_of(clients, paid, model.vector(), 1)[0], training)
