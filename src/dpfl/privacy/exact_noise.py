"""Noise without a trace of what it was added to: exact draws, on a grid that everybody may know.

A floating-point sum of signal and noise tells by its last bits which signals were possible (Mironov, 2012). Here the
signal is first rounded to a grid of spacing γ = size·2^(−bits), and what is added is ⌊N/γ⌋ for a real N of exactly the
promised law. Since the signal s is a whole number of spacings, s/γ + ⌊N/γ⌋ = ⌊(s + N)/γ⌋: post-processing of the ideal
mechanism, which costs what the ideal one costs. Rounding the signal moves each coordinate by γ/2 at most, two
neighbours by γ·√d in L2 and γ·d in L1; the spacing is so small that this stays below GRID_SHARE of the sensitivity, and
every price and every calibration counts it (`dpfl.orders.GRID_SHARE`).

The draws are exact and not exact up to rounding: |N| = k + x with a whole k and an x in [0, 1) is drawn by rejection
(Karney, 2016), x is accepted with a probability that floating point knows to within far less than it is compared with,
and what is too close to call is decided with as many more random bits and decimal digits as it takes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfl.errors import BadInput
from dpfl.orders import GRID_SHARE, Gaussian, Laplace
from dpfl.streams import Keystream

_HALF_SHARE = -math.log2(GRID_SHARE / 2)  # half for the grid; the other for what float64 does to a signal before it
_MOST_BITS = 57  # so that noise of 40 times its size, which nobody will ever see, fits into 64 bits
_LARGEST = 2.0**61  # where signals are cut off, in spacings: a cut lengthens no distance
_CLOSE = 2.0**-30  # what 31 random bits and the rounding of float64 leave open about a comparison
_AT_ONCE = 2**15  # proposals, which a core keeps near
_DIGITS = 120  # of what is decided by decimal arithmetic

Law = type[Gaussian] | type[Laplace]


@dataclass(frozen=True)
class _Proposal:
    """How |N| = k + x is proposed and accepted: k by its weight e^−a(k), x uniform, accepted with e^−b(k, x)."""

    whole: Callable[[int], Decimal]  # a
    part: Callable[[Decimal, Decimal], Decimal]  # b
    accepted: Callable[[NDArray[np.int64], NDArray[np.float64]], NDArray[np.float64]]  # e^−b in floating point
    most: int  # beyond which k has a chance below 1e-100

    @cached_property
    def chances(self) -> tuple[Decimal, ...]:
        """Return the chances that k is at most 0, 1, 2, …, with more digits than anybody asks for."""
        with localcontext(prec=2 * _DIGITS):
            cumulated = tuple(accumulate((-self.whole(k)).exp() for k in range(self.most + 40)))
            return tuple(chance / cumulated[-1] for chance in cumulated[: self.most])

    @cached_property
    def thresholds(self) -> NDArray[np.float64]:
        """Return which of 2³² numbers belong to each k in part and to the next in part; the last to all that follow."""
        cells = [float(int(chance * 2**32)) for chance in self.chances]
        return np.array([*(cell for cell in cells if cell < 2**32 - 1), 2.0**32 - 1])


_PROPOSALS: dict[Law, _Proposal] = {
    # e^−(k + x)²/2 = e^−k²/2 · e^−x(2k + x)/2
    Gaussian: _Proposal(
        lambda k: Decimal(k * k) / 2, lambda k, x: x * (2 * k + x) / 2, lambda k, x: np.exp(x * (2 * k + x) / -2), 24
    ),
    Laplace: _Proposal(Decimal, lambda k, x: x, lambda k, x: np.exp(-x), 250),
}


def grid_bits(law: Law, relative_size: float, dim: int) -> int:
    """Return how many bits finer than the noise a grid must be.

    relative_size: the noise in units of the sensitivity, of the client whose share of it is least.
    """
    corners = math.sqrt(dim) if law is Gaussian else dim
    bits = math.ceil(_HALF_SHARE + math.log2(max(1.0, relative_size * corners)))
    if bits > _MOST_BITS:
        raise BadInput(
            f"noise must be below {2.0 ** (_MOST_BITS - _HALF_SHARE) / corners:.3g} times the sensitivity for a model"
            f" of {dim} parameters, was {relative_size:.3g} times; clip or train less, or ask for a simulation"
        )
    return bits


def add_exact_noise(value: Tensor, law: Law, size: float, bits: int, source: Keystream) -> Tensor:
    """Round a value [d] to the grid and add noise of this law and size; the result is in double precision."""
    spacing = math.ldexp(size, -bits)
    steps = value.detach().to("cpu", torch.float64).div(spacing).nan_to_num(0.0).clamp(-_LARGEST, _LARGEST).round()
    noised = steps.to(torch.int64) + torch.from_numpy(floored_noise(law, value.numel(), bits, source))
    return (noised.to(torch.float64) * spacing).to(value.device)


def floored_noise(law: Law, count: int, bits: int, source: Keystream) -> NDArray[np.int64]:
    """Draw ⌊2^bits·N⌋ for `count` independent N, of standard deviation 1 or of scale 1."""
    found = np.empty(count, np.int64)
    done = 0
    while done < count:
        drawn = _accepted(law, min(int((count - done) * 1.6) + 8, _AT_ONCE), bits, source)[: count - done]
        found[done : done + len(drawn)] = drawn
        done += len(drawn)
    return found


def _accepted(law: Law, proposals: int, bits: int, source: Keystream) -> NDArray[np.int64]:
    """Make so many proposals, and return those that are accepted."""
    proposal, thresholds = _PROPOSALS[law], _PROPOSALS[law].thresholds
    fraction, coins = source.words(2 * proposals).reshape(2, -1)
    uniform, choice = (coins >> np.uint64(33)).astype(np.float64), (coins & np.uint64(2**32 - 1)).astype(np.float64)
    whole = np.searchsorted(thresholds, choice)  # k, of which some lie on a threshold and are open yet
    x, u = np.ldexp(fraction.astype(np.float64), -64), uniform * 2.0**-31
    chance = proposal.accepted(whole, x)
    accepted = u < chance
    unclear = (np.abs(u - chance) <= _CLOSE) | (thresholds[whole] == choice)
    for place in np.flatnonzero(unclear):
        whole[place], accepted[place] = _decided(
            law, int(choice[place]), int(fraction[place]), int(uniform[place]), source
        )
    size = (whole << bits) + (fraction >> np.uint64(64 - bits)).view(np.int64)
    sign = -((coins >> np.uint64(32)) & np.uint64(1)).view(np.int64)  # 0 or −1, the bit between choice and uniform
    drawn: NDArray[np.int64] = (size ^ sign)[accepted]  # ⌊−y⌋ = −⌊y⌋ − 1 = ~⌊y⌋: no y is whole
    return drawn


def _decided(law: Law, choice: int, fraction: int, uniform: int, source: Keystream) -> tuple[int, bool]:
    """Decide one proposal by drawing its numbers on, bit after bit, until nothing is left open."""
    proposal, chances = _PROPOSALS[law], _PROPOSALS[law].chances
    choice_bits, fraction_bits, uniform_bits = 32, 64, 31
    while True:
        with localcontext(prec=_DIGITS + fraction_bits):
            low, high = _interval(choice, choice_bits)
            k = sum(chance <= low for chance in chances)
            if k == len(chances) or high <= chances[k]:
                left, right = _interval(fraction, fraction_bits)
                likely, unlikely = ((-proposal.part(Decimal(k), x)).exp() for x in (left, right))
                below, above = _interval(uniform, uniform_bits)
                if above <= unlikely or below >= likely:
                    return k, above <= unlikely
        more = [int(word) for word in source.words(3)]
        choice, fraction, uniform = ((a << 64) | b for a, b in zip((choice, fraction, uniform), more, strict=True))
        choice_bits, fraction_bits, uniform_bits = choice_bits + 64, fraction_bits + 64, uniform_bits + 64


def _interval(number: int, bits: int) -> tuple[Decimal, Decimal]:
    """Return between what a real number of [0, 1) lies of which so many bits are drawn."""
    return Decimal(number) / 2**bits, Decimal(number + 1) / 2**bits
