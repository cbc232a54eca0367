"""What releases cost, exactly or with the tightest bound known: every ε here is rounded up.

A release is a `Mechanism`; what a client has let out is how often it used which. Plain Gaussian noise has a closed form
(`gaussian_dp`), plain Laplace noise adds up to a pure ε, and everything sampled, or Laplace at δ > 0, goes through
privacy-loss distributions from `dp-accounting`, which is imported only then. Their grid is chosen from the spread of
the losses, so that its rounding (always upwards) costs about 1e-4 of ε whatever the scale. Where a Fourier transform in
double precision loses its meaning (a δ about 1e-12, more than a million releases), Rényi DP takes over.

These are the prices of a plan that was fixed in advance. Noise that is chosen along the way needs a filter (`filters`).
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from scipy.optimize import brentq

from dpfl.errors import BadInput, require_one_of, require_positive
from dpfl.privacy import gaussian_dp
from dpfl.privacy.budget import Budget

NoiseLaw = Literal["gaussian", "laplace"]
Sampling = Literal["poisson", "fixed"]
_NOISES, _SAMPLINGS = get_args(NoiseLaw), get_args(Sampling)


@dataclass(frozen=True)
class Mechanism:
    """One noised release, in the only terms that its price depends on.

    Poisson-sampled batches are for neighbours that add or remove a record, batches of fixed size for neighbours that
    replace one; the multiplier is relative to the sensitivity under the same neighbours. `replaced` prices a record of
    Poisson-sampled batches that is replaced by another: it is drawn or not, and then moves the value by up to one
    sensitivity in one direction where the other record would have moved it as far in the opposite one.
    """

    noise: NoiseLaw
    multiplier: float  # the noise (standard deviation or Laplace scale) in units of the sensitivity
    sampling_rate: float = 1.0
    sampling: Sampling = "poisson"
    replaced: bool = False  # one sampled record by another; the multiplier is still relative to what one adds

    def __post_init__(self) -> None:
        require_one_of("mechanism", self.noise, _NOISES)
        require_one_of("sampling", self.sampling, _SAMPLINGS)
        require_positive("noise_multiplier", self.multiplier, "noise of 1 sensitivity is a common start")
        if not (isinstance(self.sampling_rate, (int, float)) and 0 < self.sampling_rate <= 1):
            raise BadInput(f"sampling_rate must lie in (0, 1], was {self.sampling_rate!r}; use 1 for all records")
        if self.noise == "laplace" and self.sampling == "fixed" and self.sampling_rate < 1:
            raise BadInput(
                "sampling must be 'poisson' with laplace noise, was 'fixed': no bound for it is built in; sample by"
                " Poisson or add gaussian noise"
            )

        if self.replaced and (self.plain or self.sampling != "poisson" or self.noise != "gaussian"):
            raise BadInput(
                f"replaced must come with gaussian noise and Poisson-sampled batches, was given for {self.noise} noise"
                f" and {self.sampling} batches of rate {self.sampling_rate:g}; elsewhere replacing is a sensitivity"
            )

    @property
    def plain(self) -> bool:
        """Return whether every release sees all records."""
        return self.sampling_rate == 1

    @property
    def unsampled(self) -> "Mechanism":
        """Return the same noise on all records, which covers it, whichever were drawn."""
        return Mechanism(self.noise, self.multiplier / 2 if self.replaced else self.multiplier)

    @property
    def overwhelmed(self) -> bool:
        """Return whether the noise is so small that squares of the privacy loss overflow: no ε is worth finding."""
        return 1 / self.multiplier > 1e100

    @property
    def pure(self) -> float:
        """Return the ε at which the release is purely private, amplified by its sampling; infinite for Gaussian noise.

        >>> Mechanism("laplace", 2.0).pure
        0.5
        """
        if self.noise == "gaussian":
            return math.inf
        epsilon = 1 / self.multiplier
        return epsilon if self.plain or epsilon > 700 else math.log1p(self.sampling_rate * math.expm1(epsilon))

    @property
    def mu_squared(self) -> float:
        """Return the squared Gaussian-DP parameter that covers the release; infinite where none does."""
        if self.noise == "gaussian":
            return (1 / self.multiplier) * (1 / self.multiplier) if self.plain else math.inf
        return gaussian_dp.mu_of_pure(self.pure) ** 2


Spent = Mapping[Mechanism, int]  # how often each mechanism was used
Accountant = Callable[[Spent, float], float]  # (spent, δ) → ε


def tight(spent: Spent, delta: float) -> float:
    """Return the ε, rounded up, at which all of `spent` together is (ε, δ)-DP; infinite where none is.

    >>> round(tight({Mechanism("gaussian", 10.0): 100}, 1e-5), 3)
    4.377
    >>> tight({Mechanism("laplace", 10.0): 5}, 0.0)
    0.5
    """
    spent = {mechanism: count for mechanism, count in spent.items() if count > 0}
    pure = math.fsum(count * mechanism.pure for mechanism, count in spent.items())
    if delta == 0 or not spent:
        return pure
    if all(map(_is_plain_gaussian, spent)):
        return tight_each([spent], [delta])[0]
    return min(pure, _by_loss_distribution(tuple(spent.items()), delta))


def tight_each(spent: Sequence[Spent], deltas: Sequence[float]) -> list[float]:
    """Do `tight` for many clients, asking once for those that spent alike."""
    found = [0.0] * len(deltas)
    plain = [i for i, one in enumerate(spent) if deltas[i] > 0 and one and all(map(_is_plain_gaussian, one))]
    if plain:
        mu = [math.sqrt(math.fsum(n * m.mu_squared for m, n in spent[i].items())) for i in plain]
        for i, epsilon in zip(plain, gaussian_dp.epsilon_of(mu, [deltas[i] for i in plain]), strict=True):
            found[i] = float(epsilon)
    known: dict[Any, float] = {}
    for i in set(range(len(deltas))) - set(plain):
        key = (frozenset(spent[i].items()), deltas[i])
        if key not in known:
            known[key] = tight(spent[i], deltas[i])
        found[i] = known[key]
    return found


@lru_cache(maxsize=4096)  # rehearsals, calibrations and certificates ask for the same prices again and again
def _by_loss_distribution(priced: tuple[tuple[Mechanism, int], ...], delta: float) -> float:
    """Take the least bound that holds: unsampled noise, loss distributions, Rényi DP where those lose their meaning."""
    from dpfl.privacy import renyi

    spent = dict(priced)
    bounds = [math.inf]
    if all(mechanism.noise == "gaussian" for mechanism in spent):  # whichever records were drawn
        mu_squared = math.fsum(n * one.unsampled.mu_squared for one, n in spent.items())
        bounds.append(float(gaussian_dp.epsilon_of(math.sqrt(mu_squared), delta)))
    if any(mechanism.multiplier < _LEAST_NOISE[mechanism.noise] for mechanism in spent):
        return min(bounds)
    fixed = any(mechanism.sampling == "fixed" and not mechanism.plain for mechanism in spent)
    count = sum(spent.values())
    error = _FOURIER_ERROR + _FOURIER_ERROR_EACH * count
    if not fixed and delta > error and count <= _MOST_COUNTED:
        with np.errstate(over="ignore"):
            bounds.append(_composed(spent).get_epsilon_for_delta(delta - error) * (1 + _MARGIN))
    if len(bounds) == 1 or fixed or delta < 100 * error or count > _MOST_COUNTED or bounds[-1] > _LARGE_EPSILON:
        bounds.append(renyi.epsilon(spent, delta))
    return min(bounds)


_MARGIN = 1e-7
# What Fourier transforms of double precision get wrong in δ, in all and for each release: measured up to 0.4·2⁻⁵² of
# each, against transforms that are tilted to hold small numbers.
_FOURIER_ERROR, _FOURIER_ERROR_EACH = 1e-14, 2.3e-16
_LARGE_EPSILON = 500.0  # where e^ε is about to overflow
_LEAST_NOISE = {"gaussian": 1e-3, "laplace": 2e-3}  # below, losses are so large that sampling is worthless
_MOST_COUNTED = 1_000_000  # releases
_GRID = 0.015  # the width of the grid, in standard deviations of a single loss
_MOST_POINTS = 200_000  # of a single loss distribution
_MOST_COMPOSED = 4e6  # of a composition
_MOST_PARTS = 16  # different mechanisms that are composed as they are


def _composed(spent: Spent) -> Any:
    """Compose all privacy-loss distributions; plain Gaussian releases are one release however often they were used."""
    parts = _few({mechanism: count for mechanism, count in spent.items() if not _is_plain_gaussian(mechanism)})
    mu_squared = math.fsum(n * mechanism.mu_squared for mechanism, n in spent.items() if _is_plain_gaussian(mechanism))
    if mu_squared > 0:
        whole = Mechanism("gaussian", 1 / math.sqrt(mu_squared))
        parts[whole] = parts.get(whole, 0) + 1
    # Rounding a loss to a grid of width h adds at most h²/4 to its variance: it has to be small beside the whole.
    count = sum(parts.values())
    spread = math.sqrt(math.fsum(n * _spread(mechanism) ** 2 for mechanism, n in parts.items()))
    width = _GRID * spread / math.sqrt(count)
    width = max(width, 17 * spread / _MOST_COMPOSED, *(_reach(mechanism) / _MOST_POINTS for mechanism in parts))
    width = 2.0 ** math.floor(math.log2(width))  # few widths, so that distributions are found again
    bounded = [1 / mechanism.multiplier for mechanism in parts if mechanism.noise == "laplace"]
    if bounded:  # the losses of Laplace noise end at ±1/b, often: there must be a point of the grid
        width = bounded[0] / math.ceil(4 * bounded[0] / width)
    composed = None
    for mechanism, times in parts.items():
        part = _loss_distribution(mechanism, width)
        part = part.self_compose(times) if times > 1 else part
        composed = part if composed is None else composed.compose(part)
    return composed


def _few(spent: Spent) -> dict[Mechanism, int]:
    """Round very many different multipliers down to levels 2 % apart: with less noise a release costs more."""
    if len(spent) <= _MOST_PARTS:
        return dict(spent)
    levels: Counter[Mechanism] = Counter()
    for mechanism, count in spent.items():
        level = math.floor(math.log(mechanism.multiplier) / math.log(1.02))
        levels[replace(mechanism, multiplier=1.02**level)] += count
    return dict(levels)


def _is_plain_gaussian(mechanism: Mechanism) -> bool:
    return mechanism.noise == "gaussian" and mechanism.plain


@lru_cache(maxsize=24)
def _loss_distribution(mechanism: Mechanism, width: float) -> Any:
    made = dp_accounting().pld.privacy_loss_distribution
    make = made.from_gaussian_mechanism if mechanism.noise == "gaussian" else made.from_laplace_mechanism
    rate, relation = mechanism.sampling_rate, {}
    if mechanism.replaced:
        if "neighboring_relation" not in inspect.signature(make).parameters:  # an older package
            return _loss_distribution(mechanism.unsampled, width)
        relation = {"neighboring_relation": dp_accounting().NeighboringRelation.REPLACE_ONE}
    return make(mechanism.multiplier, value_discretization_interval=width, sampling_prob=rate, **relation)


def _spread(mechanism: Mechanism) -> float:
    """Return about the standard deviation of one privacy loss."""
    if mechanism.replaced:  # a record less and one more
        return 2 * _spread(replace(mechanism, replaced=False))
    loss = 1 / mechanism.multiplier
    if mechanism.plain:
        return loss
    power = loss * loss if mechanism.noise == "gaussian" else loss
    return min(loss, mechanism.sampling_rate * math.sqrt(math.expm1(min(power, 700.0))))


def _reach(mechanism: Mechanism) -> float:
    """Return about the largest privacy loss that a distribution has to hold."""
    if mechanism.replaced:
        return 2 * _reach(replace(mechanism, replaced=False))
    if mechanism.noise == "laplace":
        return 2 / mechanism.multiplier
    tail = 10 / mechanism.multiplier + 0.5 / mechanism.multiplier**2
    return math.log1p(mechanism.sampling_rate * math.expm1(tail)) if tail < 700 else tail


def dp_accounting() -> Any:
    """Import `dp-accounting`, here and nowhere else, only when something is priced that needs it."""
    try:
        import dp_accounting
        import dp_accounting.pld  # not loaded by the package itself
    except ImportError:
        raise BadInput(
            "dp-accounting must be installed to price sampled batches (and Laplace noise at δ > 0), was not found;"
            " pip install dp-accounting, or order plain Gaussian noise"
        ) from None
    return dp_accounting


def most_steps(accountant: Accountant, mechanism: Mechanism, budget: Budget) -> int:
    """Return the largest number of releases within the budget, rounded down; 0 where not even one fits.

    >>> most_steps(tight, Mechanism("laplace", 10.0), Budget(0.3, 0.0))
    3
    """
    if budget.delta == 0:
        if mechanism.noise == "gaussian":
            return 0
        if mechanism.plain:
            return _sane(math.floor(_as_typed(budget.epsilon) * _as_typed(mechanism.multiplier)), mechanism)

    def fits(steps: int) -> bool:
        return accountant({mechanism: steps}, budget.delta) <= budget.epsilon

    if not fits(1):
        return 0
    enough, too_many = 1, 2
    while fits(too_many):
        enough, too_many = too_many, _sane(2 * too_many, mechanism)
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        enough, too_many = (middle, too_many) if fits(middle) else (enough, middle)
    return enough


def _as_typed(number: float) -> Fraction:
    """Return the decimal number that was meant: three times 0.1 is 0.3, whatever binary fractions make of it."""
    return Fraction(repr(float(number)))


_MOST_STEPS = 1e10


def _sane(steps: int, mechanism: Mechanism) -> int:
    if steps > _MOST_STEPS:
        raise BadInput(
            f"noise_multiplier must be small enough for the budget to matter, was {mechanism.multiplier:g}: more than"
            f" {_MOST_STEPS:.0e} steps fit; lower it"
        )
    return steps


_NARROW = 1e-5  # how much noise, relatively, the search may give away


def least_noise(accountant: Accountant, mechanism: Mechanism, steps: int, budget: Budget) -> float:
    """Return the smallest noise multiplier, rounded up, at which `steps` releases keep within the budget.

    >>> round(least_noise(tight, Mechanism("gaussian", 1.0), 1, Budget(1.0, 1e-5)), 2)
    3.73
    """
    if budget.delta == 0:
        if mechanism.noise == "gaussian":
            raise BadInput("delta must be above 0 with gaussian noise, was 0; choose 1e-5, say, or laplace noise")
        if mechanism.plain:
            exact = Fraction(steps) / _as_typed(budget.epsilon)
            nearest = float(exact)
            return nearest if nearest >= exact else math.nextafter(nearest, math.inf)

    def excess(log_multiplier: float) -> float:
        """Compare ε with the budget on a log scale, where it is smooth; negative is within."""
        one = replace(mechanism, multiplier=math.exp(log_multiplier))
        spent = accountant({one: steps}, budget.delta)
        return min(max(math.log(max(spent, 1e-300)) - math.log(budget.epsilon), -50.0), 50.0)

    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + 1
        if high > _LARGEST_LOG:
            raise BadInput(
                f"epsilon must be large enough for {steps} steps, was {budget.epsilon!r}: no noise up to"
                f" {math.exp(_LARGEST_LOG):.0e} sensitivities meets it; raise epsilon or delta"
            )
    while excess(low) <= 0:
        low, high = low - 1, low
        if low < -_LARGEST_LOG:
            raise BadInput(
                f"epsilon must be small enough to ask for noise, was {budget.epsilon!r}: it is met with almost none;"
                " lower epsilon"
            )
    found = math.exp(float(brentq(excess, low, high, xtol=_NARROW)))
    while accountant({replace(mechanism, multiplier=found): steps}, budget.delta) > budget.epsilon:
        found *= 1 + _NARROW
    return found


_LARGEST_LOG = 30.0
