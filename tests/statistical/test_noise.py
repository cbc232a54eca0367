"""Is the noise what the order declares? Each test has a twin that is 5 % off and must be rejected.

Seeds are fixed. A test of the declared law rejects a right implementation with probability at most 1e-3 (the seed at
hand passes); with these sample sizes a scale that is 5 % off is rejected all but surely.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from conformance.asking import uploads_of
from dpfl.clients.reference import ReferenceClients, perform
from dpfl.federation import Records, federate
from dpfl.models import Model, build
from dpfl.orders import ClientClip, Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip
from dpfl.privacy.ledger import Charged
from dpfl.privacy.mechanisms import add_noise
from dpfl.streams import Root, Streams
from grids import each

FALSE_ALARM = 1e-3
DRAWS = 100_000


def fits(sample: np.ndarray, law: str, scale: float) -> bool:
    return bool(stats.kstest(sample, getattr(stats, law)(0, scale).cdf).pvalue > FALSE_ALARM)


SOURCES = {"fast": Root.generator, "exact": Root.keystream}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])


@devices
@each("std", [1e-6, 1.0, 300.0])
@each("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SOURCES)
def test_gaussian_noise_has_its_declared_law(std: float, dtype: torch.dtype, device: str, kind: str) -> None:
    value, source = torch.zeros(DRAWS, dtype=dtype, device=device), SOURCES[kind](Streams(1).secret, "noise")
    noised = add_noise(value, Gaussian, std, source, relative_size=3.0)
    assert (noised.device.type, noised.dtype) == (device, torch.float64)
    drawn = noised.cpu().numpy()
    assert fits(drawn, "norm", std)
    assert not fits(drawn, "norm", 1.05 * std)
    assert not fits(drawn, "norm", 0.95 * std)


@devices
@each("scale", [1e-6, 1.0, 300.0])
@pytest.mark.parametrize("kind", SOURCES)
def test_laplace_noise_has_its_declared_law(scale: float, device: str, kind: str) -> None:
    source = SOURCES[kind](Streams(1).secret, "noise")
    noised = add_noise(torch.zeros(DRAWS, device=device), Laplace, scale, source, relative_size=3.0)
    assert noised.device.type == device
    drawn = noised.cpu().numpy()
    assert fits(drawn, "laplace", scale)
    assert not fits(drawn, "laplace", 1.05 * scale)
    assert not fits(drawn, "laplace", 0.95 * scale)
    assert not fits(drawn, "norm", scale * np.sqrt(2))  # the same variance is not the same law


def uploads(order: Order, *, seed: int = 3, rounds: int = 1) -> np.ndarray:
    """Return what 10 clients upload in each round, [rounds, clients, d], through the real client."""
    federation = federate("digits", clients=10, seed=0)
    model = build("mlp", shape=federation.shape, classes=10, rng=Streams(0).public.generator("model"))
    clients = ReferenceClients(model, federation.clients, Streams(seed))
    charged = {client: Charged(order, size) for client, size in enumerate(federation.sizes)}
    played = [uploads_of(clients, charged, model.vector(), round) for round in range(1, rounds + 1)]
    return np.stack([np.stack([round[client].numpy() for client in range(10)]) for round in played])


@each(
    ("clip", "steps"),
    [(RecordClip(1.0), 1), (ClientClip(1.0), 2), (ModelClip(1.0), 2)],
    ids=["record", "client", "model"],
)
def test_upload_noise_through_the_real_client(clip: RecordClip | ClientClip | ModelClip, steps: int) -> None:
    plain = Order(steps=steps, learning_rate=0.1, clip=clip)
    noised = Order(steps=steps, learning_rate=0.1, clip=clip, noise=Gaussian(0.3))
    noise = (uploads(noised) - uploads(plain)).ravel()[:DRAWS]
    assert fits(noise, "norm", 0.3)
    assert not fits(noise, "norm", 0.3 * 1.05)


def test_step_noise_is_added_to_the_sum_and_divided_with_it() -> None:
    order = Order(steps=1, learning_rate=0.5, batch=Poisson(0.2), clip=RecordClip(1.0), noise_on="step")
    noised = Order(steps=1, learning_rate=0.5, batch=Poisson(0.2), clip=RecordClip(1.0), noise_on="step",
                   noise=Gaussian(1.1))  # fmt: skip
    sizes = np.array(federate("digits", clients=10, seed=0).sizes)[None, :, None]
    noise = ((uploads(noised) - uploads(order)) / 0.5 * 0.2 * sizes).ravel()[:DRAWS]
    assert fits(noise, "norm", 1.1)
    assert not fits(noise, "norm", 1.1 * 1.05)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


def test_noise_of_different_rounds_and_clients_is_uncorrelated() -> None:
    plain = Order(steps=1, learning_rate=0.1, clip=RecordClip(1.0))
    noised = Order(steps=1, learning_rate=0.1, clip=RecordClip(1.0), noise=Gaussian(1.0))
    noise = uploads(noised, rounds=3) - uploads(plain, rounds=3)  # [rounds, clients, d]
    pairs = [(noise[0], noise[1]), (noise[0], noise[2]), (noise[1], noise[2])]
    pairs += [(noise[0, client], noise[0, client + 1]) for client in range(9)]
    for one, other in pairs:  # |ρ|·√n beyond 4.5 has probability below 1e-5 each, 1e-4 in all
        assert abs(correlation(one, other)) * np.sqrt(one.size) < 4.5
    # The twin: one stream for all rounds, the mistake that lets noise be subtracted.
    assert correlation(noise[0], uploads(noised, rounds=1)[0] - uploads(plain, rounds=1)[0]) > 0.999


class Indicator(nn.Module):
    """Its gradient is the record itself, so that unit vectors as records tell which ones a batch took."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_poisson_batches_take_each_record_with_the_declared_rate() -> None:
    rate, records, trials = 0.3, 20, 4000
    order = Order(steps=1, learning_rate=1.0, batch=Poisson(rate), clip=RecordClip(2.0))
    data = Records(torch.eye(records), torch.zeros(records))
    model = Model(Indicator(records), lambda outputs, _: outputs)
    rng = Streams(5).secret.generator("batches")
    counts = np.zeros(records)
    for _ in range(trials):
        update = perform(Charged(order, records), model, torch.zeros(records), data, batches=rng, noise=rng)
        counts += -update.numpy() * rate * records  # one for each record that was taken
    spread = np.sqrt(trials * rate * (1 - rate))
    assert stats.chi2.sf((((counts - trials * rate) / spread) ** 2).sum(), df=records) > FALSE_ALARM
    assert stats.chi2.sf((((counts - trials * rate * 1.05) / spread) ** 2).sum(), df=records) < FALSE_ALARM
