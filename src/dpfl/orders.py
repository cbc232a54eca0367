"""The order: everything a client is asked to do in one round, as plain data, and the sensitivity that follows from it.

An order is printed, logged, hashed and sent as it is (`to_json` and `from_json` lose nothing). Nobody passes a
sensitivity in: `sensitivity` derives it from the order and the client's number of records, and refuses with a
sentence where no bound is proved.
"""

import json
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from dpfl.errors import (
    BadInput,
    require_count,
    require_not_negative,
    require_one_of,
    require_positive,
    require_readable,
)

Unit = Literal["record", "client"]
Neighbours = Literal["replace", "add-remove"]
Norm = Literal[1, 2]
UNITS, NEIGHBOURS, NORMS = get_args(Unit), get_args(Neighbours), get_args(Norm)
_VERSION = 1  # of an order's JSON form

# Signal and noise meet on a grid (`dpfl.privacy.exact_noise`), fine enough that rounding to it adds at most this part
# to a sensitivity. Prices and calibrations count it, in simulations too: they are to tell what the real thing costs.
GRID_SHARE = 2.0**-30

Sampler = Literal["exact", "fast"]  # how noise is drawn: on that grid, or in floating point, as suits simulations

# What a server may ask beside an order. The answer leaves a client without noise and is paid for by nobody: only a
# paper's own calibration may ask, and the certificate names it with these words.
Question = Literal["loss", "curvature", "curvature from the sum", "length"]
UNPAID: dict[Question, str] = {
    "loss": "the loss of every model on each client's records",
    "curvature": "how much each client's exact gradient changes from the broadcast model to its own",
    "curvature from the sum": "how much each client's exact gradient changes from the new broadcast model to its own",
    "length": "how long what each client clips was before (the median, where it clips records' gradients)",
}

CURVATURES: frozenset[Question] = frozenset({"curvature", "curvature from the sum"})

# What a system wants to know of a round before it orders the next: each client's upload by itself, and not their sum
# alone; the counts that orders asked for beside the uploads; how the round moved the model; the loss on public data
# after every round; or answers to a question.
Need = Literal["uploads", "counts", "model", "public loss", "loss", "curvature", "curvature from the sum", "length"]
NEEDS: frozenset[Need] = frozenset(get_args(Need))


@dataclass(frozen=True)
class Full:
    """Each iteration sees all records of the client."""


@dataclass(frozen=True)
class Poisson:
    """Each iteration sees every record independently with this probability; the expected size divides the sum."""

    sampling_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise BadInput(f"sampling_rate must lie in (0, 1], was {self.sampling_rate!r}; use Full for all records")


@dataclass(frozen=True)
class Shuffled:
    """Each iteration sees the next so many records of all, shuffled anew for every pass: local epochs.

    What is left at the end of a pass, less than a batch, is not seen in it. Where in a pass a record comes is no secret
    that anything is gained by: a shuffled batch is priced like one that everybody knows.
    """

    batch_size: int

    def __post_init__(self) -> None:
        require_count("batch_size", self.batch_size, "leave it out for all records in every step")

    def passes(self, epochs: int, records: int) -> int:
        """Return how many steps so many passes over a client's records are.

        >>> Shuffled(128).passes(10, 800), Shuffled(128).passes(2, 50)
        (60, 2)
        """
        return epochs * (records // self.taken(records))

    def taken(self, records: int) -> int:
        """Return how many of so many records a batch holds: all, where there are fewer."""
        return min(self.batch_size, records)


@dataclass(frozen=True)
class _Clip:
    clip_norm: float
    norm: Norm = 2  # the norm in which clip_norm is meant: L1 (for Laplace noise) or L2 (for Gaussian noise)

    def __post_init__(self) -> None:
        require_positive("clip", self.clip_norm, "a gradient clipped to nothing teaches nothing")
        if self.norm not in NORMS:
            raise BadInput(f"the norm of a clip must be 1 or 2, was {self.norm!r}; use 2 with Gaussian noise")


class RecordClip(_Clip):
    """Clip the gradient of each record."""


class ClientClip(_Clip):
    """Clip the gradient of the client's whole batch."""


class ModelClip(_Clip):
    """Clip the parameters that the client ends with."""


@dataclass(frozen=True)
class Gaussian:
    """Normal noise of this standard deviation on every coordinate."""

    std: float

    def __post_init__(self) -> None:
        require_positive("noise_std", self.std, "order noise=None for a round without privacy")

    @property
    def size(self) -> float:
        """Return the standard deviation."""
        return self.std


@dataclass(frozen=True)
class Laplace:
    """Laplace noise of this scale (mean absolute value) on every coordinate."""

    scale: float

    def __post_init__(self) -> None:
        require_positive("noise scale", self.scale, "order noise=None for a round without privacy")

    @property
    def size(self) -> float:
        """Return the scale."""
        return self.scale


@dataclass(frozen=True, kw_only=True)
class Order:
    """What one client does in one round.

    `noise_on="step"` adds the noise to what the clip bounds in every iteration: the sum of the clipped record
    gradients, or the clipped client gradient. `noise_on="upload"` adds it once to the update (local − broadcast).

    `count_noise` asks for a number beside the upload: how many records of the first step's batch had gradients that the
    clip left as they were. Each counts as ½ and each other one as −½, so that nobody counts more by being clipped.
    """

    steps: int
    learning_rate: float | tuple[float, ...]  # one rate, or one for each step
    batch: Full | Poisson | Shuffled = Full()
    clip: RecordClip | ClientClip | ModelClip | None = None
    noise: Gaussian | Laplace | None = None
    noise_on: Literal["step", "upload"] = "upload"
    proximal: float = 0.0  # strength of the pull towards the broadcast model
    fixed_divisor: float | None = None  # what sums of record gradients are divided by; None: the expected batch size
    count_noise: Gaussian | None = None  # on how many records were not clipped; None: they are not counted

    def __post_init__(self) -> None:
        require_count("steps", self.steps, "order at least one local step")
        rates = self.learning_rate if isinstance(self.learning_rate, tuple) else (self.learning_rate,)
        for rate in rates:
            require_positive("lr", rate, "try 0.1")
        if isinstance(self.learning_rate, tuple) and len(rates) != self.steps:
            raise BadInput(
                f"lr must hold one rate for each of the {self.steps} steps, was {len(rates)} rates; give one number"
                " to use it for every step"
            )
        require_not_negative("proximal", self.proximal, "use 0 for no pull")
        if isinstance(self.batch, Shuffled) and isinstance(self.clip, RecordClip):
            raise BadInput(
                f"batch must be Full or Poisson with a RecordClip, was {self.batch}: how often a record of a shuffled"
                " batch counts is not priced; order Poisson batches, or clip the client's gradient or its parameters"
            )
        if self.fixed_divisor is not None:
            require_positive("divisor", self.fixed_divisor, "leave it out for the expected batch size")
            if not isinstance(self.clip, RecordClip):
                raise BadInput(
                    f"divisor must be left out without a RecordClip, was {self.fixed_divisor:g}: it divides sums of"
                    " clipped record gradients, and here a mean is taken; order a RecordClip"
                )
        if self.noise_on not in ("step", "upload"):
            raise BadInput(f"noise_on must be 'step' or 'upload', was {self.noise_on!r}; choose one of the two")
        if self.count_noise is not None:
            self._require_countable()

    def _require_countable(self) -> None:
        if not isinstance(self.clip, RecordClip):
            raise BadInput(
                f"count_noise must be left out without a RecordClip, was given with {self.clip}: what is counted is how"
                " many records' gradients are not clipped; leave it out, or order a RecordClip"
            )
        if isinstance(self.noise, Laplace) or (self.noise_on == "step" and self.steps > 1):
            raise BadInput(
                "count_noise must come beside one value with Gaussian noise on it, was given for"
                f" {self.releases} of {type(self.noise).__name__} noise: the two are priced as one; leave it out, or"
                " order Gaussian noise on the upload"
            )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Return the rate of each step."""
        rate = self.learning_rate
        return rate if isinstance(rate, tuple) else (rate,) * self.steps

    @property
    def releases(self) -> int:
        """Return how many noised values this round lets out, each of the sensitivity derived below."""
        return self.steps if self.noise_on == "step" else 1

    def noise_in_upload(self, records: int) -> float | None:
        """Return what one unit of the noise is in the upload: 1 there, η/divisor in a single step.

        None where several steps are noised: the later ones train on the noise of the earlier.
        """
        if self.noise_on == "upload":
            return 1.0
        if self.steps > 1:
            return None
        return self.learning_rates[0] / (self.divisor(records) if isinstance(self.clip, RecordClip) else 1.0)

    def noise_variance(self, records: int) -> float:
        """Return the variance that the noise adds to each coordinate of the upload, steps added up as independent."""
        if self.noise is None:
            return 0.0
        one = self.noise.std**2 if isinstance(self.noise, Gaussian) else 2 * self.noise.scale**2
        if self.noise_on == "upload":
            return one
        divisor = self.divisor(records) if isinstance(self.clip, RecordClip) else 1.0
        return one * math.fsum((rate / divisor) ** 2 for rate in self.learning_rates)

    def divisor(self, records: int) -> float:
        """Return what a sum of record gradients is divided by: the expected batch size, or a number given; both public.

        The bound is derived and the client divides with this one number; were there two, the bound could be wrong.
        """
        return self.expected_batch(records) if self.fixed_divisor is None else self.fixed_divisor

    def expected_batch(self, records: int) -> float:
        """Return how many records a batch holds on average."""
        if isinstance(self.batch, Shuffled):
            return float(self.batch.taken(records))
        return records * (self.batch.sampling_rate if isinstance(self.batch, Poisson) else 1.0)

    def to_json(self) -> str:
        """Write the order as one line of JSON.

        >>> order = Order(steps=1, learning_rate=0.1, clip=RecordClip(1.0), noise=Gaussian(0.01))
        >>> Order.from_json(order.to_json()) == order
        True
        """
        plain = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        if self.fixed_divisor is None:  # as orders were written before there was one: noise is named by this text
            del plain["fixed_divisor"]
        if self.count_noise is None:  # then every release can read it
            del plain["count_noise"]
        return json.dumps({"version": _VERSION} | plain)

    @staticmethod
    def from_json(text: str) -> "Order":
        """Read what `to_json` wrote, of this version or an older one; anything else is refused."""
        try:
            plain = json.loads(text)
            require_readable("order", repr(text), plain.pop("version", 1), _VERSION)  # release 0.1 named none
            return Order(**{name: _rich(value) for name, value in plain.items()})
        except BadInput:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise BadInput(
                f"order must be the JSON form of an order, was {text!r} ({problem}); use Order.to_json"
            ) from None


_PARTS = {
    part.__name__: part for part in (Full, Poisson, Shuffled, RecordClip, ClientClip, ModelClip, Gaussian, Laplace)
}


def _plain(value: Any) -> Any:
    if type(value).__name__ not in _PARTS:
        return list(value) if isinstance(value, tuple) else value
    return {"kind": type(value).__name__} | {field.name: getattr(value, field.name) for field in fields(value)}


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return _PARTS[value.pop("kind")](**value)
    return tuple(value) if isinstance(value, list) else value


def sensitivity(order: Order, *, records: int, unit: Unit, neighbours: Neighbours, norm: Norm) -> float:
    """Derive how far one unit of data can move one noised value of this round, in the given norm.

    The bound holds for every model, loss and data set: it uses only what the clip enforces. Neighbours differ in one
    record of the client, or in all of its records (the unit); the number by which sums are divided is the public
    `records` (times the sampling rate) in both. A removed client is one whose gradients are all zero.

    Raises BadInput where nothing is proved: no clip, an L1 bound from an L2 clip, noise inside steps whose gradients
    are not clipped.

    >>> order = Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(0.1))
    >>> sensitivity(order, records=100, unit="record", neighbours="replace", norm=2)
    0.01
    """
    require_count("records", records, "a client without records has nothing to protect")
    require_one_of("unit", unit, UNITS)
    require_one_of("neighbours", neighbours, NEIGHBOURS)
    require_one_of("norm", norm, NORMS)
    clip = order.clip
    if clip is None:
        raise BadInput(
            "clip must be set where privacy is promised, was None: an unclipped gradient has no bounded sensitivity;"
            " order a RecordClip, ClientClip or ModelClip"
        )
    if clip.norm == 2 and norm == 1:
        raise BadInput(
            "clip must be in the L1 norm for an L1 sensitivity (Laplace noise), was L2: an L2 bound says nothing about"
            " L1 that does not grow with the model's dimension; clip with norm=1 or add Gaussian noise"
        )  # the other way round is free: the L2 norm never exceeds the L1 norm
    if isinstance(clip, ModelClip):
        if order.noise_on == "step":
            raise BadInput(
                "noise_on must be 'upload' with a ModelClip, was 'step': the gradients inside the steps are not"
                " clipped, so no bound is proved for them; order a RecordClip or ClientClip"
            )
        # Both clipped models lie in a ball of radius C, wherever training took them; a removed client stays at the
        # broadcast model, which may lie on the far side of that ball, so removal is no cheaper than replacement.
        return 2 * clip.clip_norm

    same_model, other_model = _gradient_distances(order, clip, records=records, unit=unit, neighbours=neighbours)
    if order.noise_on == "step":
        # Each noised step is a release of its own: given what came before, both runs stand at the same model.
        return same_model * (order.divisor(records) if isinstance(clip, RecordClip) else 1.0)

    # Upload after E steps. The runs start at one model; from the second step on they stand at different ones. The
    # proximal pull w − η·μ·(w − broadcast) touches no data and scales the distance by |1 − η·μ|.
    distance, reach = 0.0, same_model
    for rate in order.learning_rates:
        distance = abs(1 - rate * order.proximal) * distance + rate * reach
        reach = other_model
    return distance


def count_sensitivity(order: Order, *, records: int, unit: Unit, neighbours: Neighbours) -> float:
    """Derive how far one unit of data can move the count of an order.

    It is taken in the first step, where both runs stand at the same model: a record counts ½ or −½ whatever the others
    are, and a removed one, whose gradient is zero and in no batch, counts nothing.
    """
    assert order.count_noise is not None
    require_one_of("unit", unit, UNITS)
    require_one_of("neighbours", neighbours, NEIGHBOURS)
    each = 1.0 if neighbours == "replace" else 0.5
    return each * records if unit == "client" else each


def _gradient_distances(
    order: Order, clip: RecordClip | ClientClip, *, records: int, unit: Unit, neighbours: Neighbours
) -> tuple[float, float]:
    """Bound the distance between the two runs' clipped gradients: at the same model, and at different models."""
    bound = clip.clip_norm
    if unit == "client" and neighbours == "add-remove":
        whole = bound if isinstance(clip, ClientClip) else bound * records / order.divisor(records)
        return whole, whole  # the removed client's gradients are zero wherever it stands
    if isinstance(clip, ClientClip):
        # One record without a bound of its own can turn the clipped gradient around, added, removed or replaced.
        return 2 * bound, 2 * bound
    per_record = bound / order.divisor(records)
    if unit == "client":
        return 2 * per_record * records, 2 * per_record * records
    if neighbours == "replace":
        return 2 * per_record, 2 * per_record * records
    # At different models every shared record may turn around, and the added record comes on top.
    return per_record, per_record * (2 * records + 1)
