"""Exact bits: what the last bits of an upload tell about what its noise hides, through `dpfl.train`.

A float32 sum of a signal a and a noise n, with |a + n| < |a|/2, is a whole multiple of ulp(a)/2: so is a, and so is any
float32 n of at least half its size. An upload that is near zero and no such multiple proves that the signal was not a.
In such sums, the wrong twin here, the proof is never mistaken.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl.orders import Gaussian, Laplace
from dpfl.privacy import exact_noise
from dpfl.privacy.exact_noise import add_exact_noise, floored_noise, grid_bits
from dpfl.streams import Keystream

COLUMNS, RECORDS = 4000, 8


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def federation(*, ink: bool) -> dpfl.Federation:
    """Two clients with blank records, but for one of the first client's, which has ink everywhere or nowhere."""
    x = torch.zeros(2 * RECORDS, COLUMNS)
    y = torch.ones(2 * RECORDS)
    x[0] = 1.0 if ink else 0.0
    data = dpfl.from_arrays(x, y, test=(x[:1] * 0, y[:1]))
    shares = (dpfl.Records(x[:RECORDS], y[:RECORDS]), dpfl.Records(x[RECORDS:], y[RECORDS:]))
    public = dpfl.Records(data.test.x, data.test.y)
    return dpfl.Federation(name="ink", clients=shares, validation=public, test=public, classes=None, source="made up")


def uploads(system: dpfl.System, *, ink: bool, **settings: object) -> Tensor:
    """Return what the first client uploads, all rounds side by side."""
    seen: list[Tensor] = []
    module = nn.Linear(COLUMNS, 1, bias=False)
    nn.init.zeros_(module.weight)
    dpfl.train(
        system, federation(ink=ink), module, loss=squared, evaluate_every=100,
        on_uploads=lambda _, sent: seen.append(sent[0]), **settings,
    )  # fmt: skip
    return torch.cat(seen).float()


def proofs_of_no_ink(sent: Tensor, signal: float) -> int:
    """Count the uploads that no float32 sum with this signal can be."""
    spacing = 2.0 ** (math.floor(math.log2(signal)) - 24)
    near = sent.double()[sent.abs() < signal / 2]
    return int((near / spacing != (near / spacing).round()).sum())


SYSTEMS: dict[str, Any] = {
    "udp": dpfl.UDP(epsilon=8.0, delta=1e-2, rounds=2, lr=1.0),
    "dp-sgd": dpfl.DPSGDFedAvg(epsilon=8.0, delta=1e-2, rounds=2, lr=1.0, local_steps=1, sampling_rate=1.0),
    "fedsgd-dpc": dpfl.FedSGDDPC(epsilon=1000.0, mechanism="laplace", rounds=2, lr=1.0, clip=60.0),
}


@pytest.mark.filterwarnings("ignore::dpfl.Caution")
@pytest.mark.parametrize("backend", ["stacked", "reference"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_bits_of_an_upload_tell_nothing(name: str, backend: str) -> None:
    system = SYSTEMS[name]
    clip = system.clip / (math.sqrt(COLUMNS) if name != "fedsgd-dpc" else COLUMNS)
    signal = system.lr * clip / RECORDS
    blank, inked = (uploads(system, ink=ink, backend=backend) for ink in (False, True))
    # The twin, a sum in single precision: true proofs and no false ones, so that the question is answered for certain.
    assert proofs_of_no_ink(blank + torch.tensor(signal), signal) == 0
    assert proofs_of_no_ink(blank, signal) >= 5
    in_blank, in_inked = (proofs_of_no_ink(sent, signal) for sent in (blank, inked))
    assert in_inked > 0
    assert abs(in_blank - in_inked) < 5 * math.sqrt(in_blank + in_inked)  # missed by chance once in a million times


@pytest.mark.filterwarnings("ignore::dpfl.Caution")
def test_sums_of_uploads_lie_on_a_grid_that_data_does_not_move() -> None:
    """Only a sum is formed where nobody looks: the model that comes of it is on the public grid of the sum's noise."""
    system = dpfl.UDP(epsilon=8.0, delta=1e-2, rounds=1, lr=1.0)
    for ink in (False, True):
        module = nn.Linear(COLUMNS, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(module.weight)
        shares = federation(ink=ink)
        doubled = [dpfl.Records(its.x.double(), its.y.double()) for its in (*shares.clients, shares.test)]
        run = dpfl.train(
            system,
            dpfl.Federation(
                name="ink", clients=tuple(doubled[:2]), validation=doubled[2], test=doubled[2], classes=None,
                source="made up",
            ),
            module, loss=squared,
        )  # fmt: skip
        std = run.history[0]["noise_std"]
        assert isinstance(system.clip, float)
        bound = 2 * system.lr * system.clip / RECORDS
        assert std is not None
        total_std = std / math.sqrt(2)  # two clients of the same size
        bits = grid_bits(Gaussian, total_std / (bound / 2), COLUMNS)
        steps = module.weight.detach().flatten().numpy() / math.ldexp(total_std, -bits)
        assert np.abs(steps - steps.round()).max() < 1e-3  # 2⁻⁵² of some 2⁴⁰ spacings


@pytest.mark.parametrize("law", [Gaussian, Laplace])
def test_what_floating_point_cannot_tell_is_decided_alike(law: type, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = floored_noise(law, 200, 41, Keystream(b"k" * 32))
    monkeypatch.setattr(exact_noise, "_CLOSE", 2.0)  # everything is too close to call
    slow = floored_noise(law, 200, 41, Keystream(b"k" * 32))
    assert fast.tolist() == slow.tolist()


def test_what_lies_on_a_threshold_is_drawn_on() -> None:
    proposal = exact_noise._PROPOSALS[Gaussian]
    cell = int(proposal.thresholds[0])
    wholes = {exact_noise._decided(Gaussian, cell, 0, 0, Keystream(bytes([number] * 32)))[0] for number in range(64)}
    assert wholes == {0, 1}


def test_a_grid_is_fine_enough_and_its_price_is_counted() -> None:
    """Two signals a sensitivity apart are no further apart on the grid than the price allows for."""
    rng, dim, sensitivity = np.random.default_rng(1), 500, 1e-3
    std = 7 * sensitivity
    bits = grid_bits(Gaussian, 7.0, dim)
    spacing = math.ldexp(std, -bits)
    assert math.sqrt(dim) * spacing <= dpfl.orders.GRID_SHARE * sensitivity
    here = torch.from_numpy(rng.normal(size=dim))
    step = torch.from_numpy(rng.normal(size=dim))
    there = here + step / step.norm() * sensitivity
    # The same key draws the same noise: what is left of the difference is the signals' on the grid.
    noised = [add_exact_noise(value, Gaussian, std, bits, Keystream(b"k" * 32)) for value in (here, there)]
    assert (noised[1] - noised[0]).norm() <= sensitivity * (1 + dpfl.orders.GRID_SHARE)


def test_noise_too_large_for_any_grid_is_refused_in_a_sentence() -> None:
    with pytest.raises(dpfl.BadInput, match=r"noise must be below .* was 1e\+12 times"):
        grid_bits(Laplace, 1e12, 1000)
