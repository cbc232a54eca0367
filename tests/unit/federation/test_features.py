"""Scattering features: what they keep, what they do not see, and that only public images are learned from."""

import math

import pytest
import torch

from dpfl.errors import BadInput
from dpfl.federation import Dataset, Records, federate, load
from dpfl.federation.features import deskew, reduction, scattered, scattering, wavelets


def blob(row: float, column: float, *, slant: float = 0.0, side: int = 28) -> torch.Tensor:
    """Draw an upright bar with soft edges, centred here and sheared by so much."""
    y, x = torch.meshgrid(torch.arange(side) - row, torch.arange(side) - column, indexing="ij")
    return torch.exp(-(((x - slant * y) / 1.5) ** 2) - (y / 6) ** 2)[None, None]


@pytest.mark.parametrize(("shape", "expected"), [((2, 1, 28, 28), (2, 81, 7, 7)), ((2, 3, 32, 32), (2, 243, 4, 4))])
def test_shapes(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert scattering(torch.rand(shape, generator=torch.Generator().manual_seed(0))).shape == expected


def test_wavelets_do_not_see_brightness_and_each_hears_its_own_frequency() -> None:
    for octave, filters in enumerate(wavelets(48, 48)):
        assert filters[:, 0, 0].abs().max() < 1e-6
        peak = 3 / 8 * 48 / 2**octave  # ξ = 3π/4·2^−j, in waves over 48 pixels
        across = filters[0, 0]  # along x, for the first angle
        assert abs(int(across.argmax()) - peak) <= 1
        assert filters[4, :, 0].argmax() == across.argmax()  # a quarter turn further: along y


def test_brightness_moves_the_averages_alone() -> None:
    image = blob(13, 14)
    dark, bright = scattering(image), scattering(image + 0.5)
    assert torch.allclose(bright[:, 0], dark[:, 0] + 0.5, atol=1e-5)
    assert torch.allclose(bright[:, 1:], dark[:, 1:], atol=1e-5)


def test_a_wave_is_found_by_the_wavelet_of_its_direction() -> None:
    x = torch.arange(28.0)
    wave = torch.cos(3 * math.pi / 4 * x)[None, None, None, :].expand(1, 1, 28, 28)  # varies along x
    first = scattering(wave)[0, 1:9].mean(dim=(1, 2))
    assert first.argmax() == 0
    assert first[0] > 3 * first[4]


def test_small_shifts_change_little_of_it() -> None:
    here, moved, far = (scattering(blob(13, 13 + by)) for by in (0, 1, 8))
    assert (here - moved).norm() < 0.35 * here.norm() < (here - far).norm()
    pixels = blob(13, 13), blob(13, 14)
    assert (here - moved).norm() / here.norm() < (pixels[0] - pixels[1]).norm() / pixels[0].norm()


def test_deskewing_rights_and_centres_what_is_slanted() -> None:
    upright = blob(13.5, 13.5)
    found = deskew(blob(11.0, 16.0, slant=0.6))
    assert (found - upright).abs().mean() < 0.01
    assert (deskew(upright) - upright).abs().max() < 0.02
    assert torch.isfinite(deskew(torch.zeros(1, 1, 28, 28))).all()


def features(count: int, seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    wide = torch.tensor([9.0, 3.0, 1.0, 0.1])[:, None, None]
    return wide * torch.randn(count, 4, 2, 2, generator=source) + 5


def test_reduced_records_have_length_one_and_directions_of_much_the_same_weight() -> None:
    reduce = reduction(features(4000, 0))
    found = reduce(features(4000, 1))
    assert found.shape == (4000, 16)
    assert torch.allclose(found.norm(dim=1), torch.ones(4000), atol=1e-5)
    variances = found.var(dim=0)
    assert variances.max() / variances.min() < 1.5  # the scales of the channels are gone


def test_the_reduction_is_learned_from_public_records_alone() -> None:
    source = torch.Generator().manual_seed(0)
    images = torch.rand(60, 1, 16, 16, generator=source)
    labels = torch.arange(60) % 2

    def federated(secret: float) -> tuple[torch.Tensor, torch.Tensor]:
        changed = images.clone()
        probe = federate(
            Dataset("toy", Records(torch.arange(60.0)[:, None], labels), Records(torch.zeros(1, 1), labels[:1]), 2, ""),
            clients=2, validation_share=0.5, seed=1,
        )  # fmt: skip
        mine = torch.cat([one.x for one in probe.clients])[:, 0].long()
        changed[mine[0]] += secret  # one private record is another
        data = Dataset("toy", Records(changed, labels), Records(changed[:5], labels[:5]), 2, "random")
        found = federate(scattered("toy", lambda _: data), clients=2, validation_share=0.5, seed=1)
        return found.validation.x, torch.cat([one.x for one in found.clients])

    scattered.cache_clear()
    public, private = federated(0.0)
    scattered.cache_clear()
    public_too, private_too = federated(0.3)
    assert torch.equal(public, public_too)
    assert (private != private_too).any(dim=1).sum() == 1


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(BadInput, match=r"data must be images of at least 16×16 pixels for \+scattering, was 'digits'"):
        load("digits+scattering")
    with pytest.raises(BadInput, match="features must be one of scattering"):
        load("digits+scatering")
    with pytest.raises(BadInput, match="did you mean 'digits'"):
        load("digit+scattering")
