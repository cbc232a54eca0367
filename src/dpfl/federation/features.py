"""Features of images that cost no privacy: a fixed scattering transform, reduced by what public images show.

A few noisy steps can train a small linear model, and a linear model is as good as its features. The scattering
transform (Bruna and Mallat, 2013) is made of wavelets, moduli and averages and learns nothing; principal components
and scales are fitted on the public split, without labels. So `mnist+scattering` is a data set whose records have 300
numbers each, of length 1.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from dpfl.errors import BadInput
from dpfl.federation.records import Dataset, Records, Separate

_ANGLES = 8
_SCALES = 2  # wavelets of the first and the second octave, and averages over 4×4 pixels
_REACH = 6  # pixels that are mirrored at each side, at least: as far as most of a wavelet reaches
_MOST = 4096  # numbers of a record; where there are more, four neighbouring averages become one
_COMPONENTS = 300
_WHITENING = 0.9  # 1: all components are made equally long; 0: none is changed
_FLOOR = 1e-3  # of the largest variance: what is smaller is taken for noise
_AT_ONCE = 500  # images


@lru_cache(maxsize=1)  # minutes of work, which every repetition would do again
def scattered(dataset_name: str, load: Callable[[str], Dataset]) -> Dataset:
    """Return a data set of images as scattering features, to be reduced by its public split."""
    images = load(dataset_name)
    if images.pool.x.dim() != 4 or min(images.pool.x.shape[2:]) < 16:
        raise BadInput(
            f"data must be images of at least 16×16 pixels for +scattering, was {dataset_name!r} with records of shape"
            f" {list(images.pool.x.shape[1:])}; leave +scattering out"
        )
    upright = deskew if dataset_name == "mnist" else _as_it_is
    pool, test = (Records(_in_parts(part.x, upright), part.y) for part in (images.pool, images.test))
    return replace(
        images, name=f"{dataset_name}+scattering", pool=pool, test=test, fit=reduction, raw=(images.pool, images.test),
        source=f"{images.source}, as scattering features",
    )  # fmt: skip


def _in_parts(images: Tensor, upright: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([scattering(upright(part)).half() for part in torch.split(images, _AT_ONCE)])


def _as_it_is(images: Tensor) -> Tensor:
    return images


def scattering(images: Tensor) -> Tensor:
    """Return averages of the image, of its wavelet moduli and of theirs: [n, c, h, w] → [n, c·81, h/4, w/4].

    x itself, |x ⋆ ψ_{j,θ}| for two octaves and eight angles, and ||x ⋆ ψ_{0,θ}| ⋆ ψ_{1,θ'}|, averaged by a Gaussian.
    """
    n, _, height, width = images.shape
    margins = [_margin(side) for side in (width, width, height, height)]
    padded = functional.pad(images.flatten(0, 1)[:, None], margins, mode="reflect")
    fine, coarse = wavelets(*padded.shape[2:])
    seen = torch.fft.fft2(padded)
    first = torch.fft.ifft2(seen * fine).abs()  # [nc, 8, H, W]
    second = _every_other(seen * coarse).abs()  # [nc, 8, H/2, W/2]: the coarse ones need only every other pixel
    deeper = _every_other(torch.fft.fft2(first)[:, :, None] * coarse).abs().flatten(1, 2)
    averaged = [
        torch.einsum("ah,nchw,bw->ncab", _averages(height, step), maps, _averages(width, step))
        for step, maps in ((1, padded), (1, first), (2, second), (2, deeper))
    ]
    features = torch.cat(averaged, dim=1)
    features = features.reshape(n, -1, *features.shape[2:])
    return features if features[0].numel() <= _MOST else functional.avg_pool2d(features, 2)


def _margin(side: int) -> int:
    """Return how far to mirror each side, so that the whole is a multiple of 16, which is fast to transform."""
    return (16 * math.ceil((side + 2 * _REACH) / 16) - side) // 2


def _every_other(spectrum: Tensor) -> Tensor:
    """Return every other pixel, down and across, of the image with this Fourier transform: its quarters, folded."""
    height, width = (side // 2 for side in spectrum.shape[-2:])
    upper, lower = spectrum[..., :height, :], spectrum[..., height:, :]
    folded = upper[..., :width] + upper[..., width:] + lower[..., :width] + lower[..., width:]
    image: Tensor = torch.fft.ifft2(folded) / 4
    return image


@lru_cache(maxsize=4)
def wavelets(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return Morlet wavelets of both octaves by their Fourier transforms, [8, h, w] each.

    A wavelet of octave j is a bump of width 1/(0.8·2^j) around the frequency ξ = 3π/4·2^−j at an angle, less what makes
    its mean zero; across its direction it is half as wide.
    """

    def bump(x: Tensor, y: Tensor, octave: int, angle: float, centre: float) -> Tensor:
        along = x * math.cos(angle) + y * math.sin(angle) - centre
        beside = y * math.cos(angle) - x * math.sin(angle)
        return torch.exp(-((0.8 * 2**octave) ** 2) * (along**2 + (beside / 0.5) ** 2) / 2)

    turns = 2 * math.pi * torch.arange(-1.0, 2)  # frequencies are the same a whole turn further
    y = (2 * math.pi * torch.fft.fftfreq(height))[:, None, None, None] + turns[:, None]
    x = (2 * math.pi * torch.fft.fftfreq(width))[None, :, None, None] + turns
    octaves = []
    for octave in range(_SCALES):
        centre, filters = 3 * math.pi / 4 / 2**octave, []
        for angle in (turn * math.pi / _ANGLES for turn in range(_ANGLES)):
            wave, average = (bump(x, y, octave, angle, at).sum(dim=(2, 3)) for at in (centre, 0.0))
            filters.append(wave - wave[0, 0] / average[0, 0] * average)
        octaves.append(torch.stack(filters))
    fine, coarse = octaves
    return fine, coarse


def _averages(side: int, step: int) -> Tensor:
    """Return the weights of Gaussian averages at every fourth pixel, of a mirrored side with pixels `step` apart."""
    stride, margin = 2**_SCALES, _margin(side)
    centres = torch.arange(side // stride) * stride + (stride - 1) / 2 + margin
    distances = torch.arange(0, side + 2 * margin, step)[None] - centres[:, None]
    weights = torch.exp(-((distances / (0.8 * 2 ** (_SCALES - 1))) ** 2) / 2)
    return weights / weights.sum(dim=1, keepdim=True)


def reduction(public: Tensor) -> Separate:
    """Learn scales and main directions from public features [n, c, h, w]; return the map to unit vectors [n, k]."""
    scale = (public.float() - public.float().mean(dim=0)).square().mean(dim=(0, 2, 3), keepdim=True).sqrt() + 1e-6
    flat = (public.float() / scale).flatten(1)
    mean = flat.mean(dim=0)
    centred = flat - mean
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    count = min(_COMPONENTS, len(public) - 1, len(variances))
    variances, directions = variances.flip(0)[:count], directions.flip(1)[:, :count]
    basis = directions * (variances + _FLOOR * variances[0]) ** (-_WHITENING / 2)

    def reduce(features: Tensor) -> Tensor:
        parts = [((part.float() / scale).flatten(1) - mean) @ basis for part in torch.split(features, 5000)]
        return functional.normalize(torch.cat(parts))

    return Separate(reduce)


def deskew(images: Tensor) -> Tensor:
    """Move each image's centre of mass to the middle and shear its slant away, by its own moments alone."""
    n, _, height, width = images.shape
    ink = images.sum(dim=1)
    y, x = torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2
    mass = ink.sum(dim=(1, 2)).clamp(min=1e-6)
    centre_y, centre_x = (ink.sum(dim=2) @ y) / mass, (ink.sum(dim=1) @ x) / mass
    dy, dx = y - centre_y[:, None], x - centre_x[:, None]
    slant = torch.einsum("nij,ni,nj->n", ink, dy, dx) / torch.einsum("nij,ni->n", ink, dy**2).clamp(min=1e-6)
    moves = torch.zeros(n, 2, 3)
    moves[:, 0, 0] = moves[:, 1, 1] = 1
    moves[:, 0, 1], moves[:, 0, 2], moves[:, 1, 2] = slant.clamp(-1, 1), centre_x * 2 / width, centre_y * 2 / height
    grid = functional.affine_grid(moves, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)
