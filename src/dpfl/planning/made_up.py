"""Made-up tasks in the shape of a federation: what plans are tried on where nobody's records are public.

They follow from public facts alone: how many records every client holds, the shape of a record, how many classes there
are. Nobody knows how hard the real task is, how its features are scaled, or how much clients differ, so there is a task
for each of several answers, and a plan has to do well on all of them. A task is a few common factors behind all
features, as in most real data, and means that tell the classes apart, or a slope for regression.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import norm

from dpfl.errors import BadInput
from dpfl.federation import Federation, Records
from dpfl.planning.public_proxy import StandIn, has_public, stand_in
from dpfl.streams import Streams

_MOST = 3000  # records of all clients together: noise is what it is for the real number, and more teach a pilot little
_LEAST = 10  # records of a client, and the most different clients that there is room for then
_HELD_OUT = 600
_FACTORS = 15  # behind all features
_RESIDUAL = 0.4  # how far a feature goes its own way, in units of what the factors make of it
_SPREAD, _MIDDLE = 0.3, 0.4  # of a regression's target, whose public range is from -1 to 1
_COLUMNS = 10  # of a table, about: encoded, a record is as long as that, however many features they become
_UNEVEN = 0.5  # how unlike in length records are, as the standard deviation of a logarithm


@dataclass(frozen=True)
class Kind:
    """What nobody knows of the real task, one answer to all of it."""

    name: str
    error: float  # of the best classifier, about; a quarter of the part of a regression's target that nothing explains
    skew: float | None  # of the classes' shares at a client: the parameter of Dirichlet's law; None: as everywhere
    positive: bool  # features from 0 to 1, as pixels and shares are, or around 0, as those of an encoded table


FAMILY = (
    Kind("easy, clients alike", 0.02, None, positive=True),
    Kind("easy, clients unlike", 0.02, 0.3, positive=False),
    Kind("hard, clients alike", 0.15, None, positive=False),
    Kind("hard, clients unlike", 0.15, 0.3, positive=True),
)


def stand_ins(federation: Federation, *, hold_out: float, streams: Streams) -> tuple[StandIn, ...]:
    """Return public records in the clients' place where there are enough, as one task, and else made-up tasks."""
    if has_public(federation):
        return (stand_in(federation, hold_out=hold_out, rng=streams.public.generator("stand-in")),)
    return made_up(federation, streams=streams)


def made_up(federation: Federation, *, streams: Streams, family: Sequence[Kind] = FAMILY) -> tuple[StandIn, ...]:
    """Return clients of the federation's number and sizes, or in proportion, for each kind of task."""
    if not federation.validation.x.is_floating_point():
        raise BadInput(
            "validation_share must leave public records to plan with where features are whole numbers, such as words,"
            " left none: made-up ones would say nothing of them; name a public file, or hold some records back"
        )
    return tuple(
        _task(kind, federation, streams.public.generator("made-up", client=number))
        for number, kind in enumerate(family)
    )


def _task(kind: Kind, federation: Federation, rng: Generator) -> StandIn:
    sizes = _sizes(federation.sizes)
    d = math.prod(federation.shape)
    factors = rng.standard_normal((min(d, _FACTORS), d)) / math.sqrt(min(d, _FACTORS))
    make = _classified if federation.classes is not None else _regressed
    clients, held_out = make(kind, federation.classes or 0, sizes, factors, rng)
    source = f"made-up records in {len(sizes)} clients ({kind.name})"
    shape = federation.shape

    def records(x: NDArray[np.float64], y: NDArray[Any]) -> Records:
        targets = torch.from_numpy(y)
        return Records(
            torch.from_numpy(x).float().reshape(-1, *shape),
            targets.long() if federation.classes is not None else targets.float(),
        )

    return StandIn(tuple(records(*one) for one in clients), records(*held_out), source)


def _sizes(sizes: Sequence[int]) -> list[int]:
    """Return how many records the clients hold, in proportion and of some clients only, where they are too many."""
    few = list(sizes[: _MOST // _LEAST])
    part = min(1.0, _MOST / sum(few))
    return [max(min(_LEAST, size), round(part * size)) for size in few]


Made = tuple[NDArray[np.float64], NDArray[Any]]  # features, and targets or classes


def _classified(
    kind: Kind, classes: int, sizes: Sequence[int], factors: NDArray[np.float64], rng: Generator
) -> tuple[list[Made], Made]:
    means = rng.standard_normal((classes, len(factors)))
    # So far apart are any two of them, about, in deviations within a class: an error for each other class.
    means *= -2 * norm.ppf(kind.error / max(1, classes - 1)) / math.sqrt(2 * len(factors))

    def draw(shares: NDArray[np.float64], number: int) -> Made:
        y = rng.choice(classes, size=number, p=shares)
        return _features(kind, means[y] + rng.standard_normal((number, len(factors))), factors, rng), y

    everywhere = np.ones(classes) if kind.skew is not None else 1 / np.arange(1, classes + 1)  # rare classes are common
    everywhere /= everywhere.sum()
    clients = []
    for size in sizes:
        shares = everywhere if kind.skew is None else rng.dirichlet(np.full(classes, kind.skew))
        clients.append(draw(shares, size))
    counts = np.bincount(np.concatenate([y for _, y in clients]), minlength=classes)
    return clients, draw(counts / counts.sum(), _HELD_OUT)


def _regressed(
    kind: Kind, classes: int, sizes: Sequence[int], factors: NDArray[np.float64], rng: Generator
) -> tuple[list[Made], Made]:
    unexplained = min(1.0, 4 * kind.error)
    slope = rng.standard_normal(len(factors)) * _SPREAD * math.sqrt((1 - unexplained) / len(factors))
    middle = rng.choice((-1, 1)) * _MIDDLE

    def draw(centre: NDArray[np.float64], number: int) -> Made:
        hidden = centre + rng.standard_normal((number, len(factors)))
        y = middle + hidden @ slope + _SPREAD * math.sqrt(unexplained) * rng.standard_normal(number)
        return _features(kind, hidden, factors, rng), y

    apart = 0.0 if kind.skew is None else 0.5
    centres = [apart * rng.standard_normal(len(factors)) for _ in sizes]
    clients = [draw(centre, size) for centre, size in zip(centres, sizes, strict=True)]
    whole = sum(sizes)
    tests = [draw(centre, max(1, round(_HELD_OUT * size / whole))) for centre, size in zip(centres, sizes, strict=True)]
    return clients, (np.concatenate([x for x, _ in tests]), np.concatenate([y for _, y in tests]))


def _features(
    kind: Kind, hidden: NDArray[np.float64], factors: NDArray[np.float64], rng: Generator
) -> NDArray[np.float64]:
    x = hidden @ factors * np.exp(_UNEVEN * rng.standard_normal((len(hidden), 1)))
    x += _RESIDUAL * rng.standard_normal(x.shape)
    if kind.positive:
        return np.clip(0.3 + 0.25 * x, 0.0, 1.0)
    return x * math.sqrt(min(1.0, _COLUMNS / x.shape[1]))
