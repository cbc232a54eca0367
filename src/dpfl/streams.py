"""Randomness as an argument: independent streams, found by their names, under two roots that are apart.

The public root decides what everybody may know: who takes part in which round, how data is shared out, where a model
starts. It may be written down. The secret root decides what nobody may know: noise and batches. Under it every client
has a key of its own, and its noise is a function of (key, run, round, order) alone: whoever else takes part or looks on
changes nothing, and no two orders share noise. With a seed both roots follow from it: whoever knows the seed can
subtract the noise, so a seed is for simulations. Without one each root is 256 bits from the operating system, the
secret one is kept nowhere, and what is drawn under it comes from a cryptographic generator: of a fast one whoever sees
enough noise can find the rest. This is the only module of dpfl that makes a generator.
"""

import copy
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.random import SFC64, Generator, SeedSequence
from numpy.typing import NDArray

from dpfl.errors import BadInput
from dpfl.orders import Sampler

Name = str | int | None  # part of a stream's name


class Keystream:
    """Random bits from a key by SHAKE-256: without the key nobody tells them from chance, however many were seen."""

    def __init__(self, key: bytes) -> None:
        self._key, self._drawn = key, 0

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return so many times 64 bits, never the same ones again."""
        name, self._drawn = self._drawn.to_bytes(8, "little"), self._drawn + 1
        return np.frombuffer(hashlib.shake_256(self._key + name).digest(8 * count), "<u8")

    def random(self, count: int) -> NDArray[np.float64]:
        """Return numbers of [0, 1), whole multiples of 2⁻⁵³."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, below: int) -> int:
        """Return a whole number below a power of two."""
        return int(self.words(1)[0]) % below


@dataclass(frozen=True)
class Root:
    """A key, and the streams that are named under it.

    >>> a, b = (Streams(7).of(3).generator("noise", round=round).random() for round in (1, 2))
    >>> a == Streams(7).of(3).generator("noise", round=1).random(), a == b
    (True, False)
    """

    key: bytes = field(repr=False)  # 256 bits

    def generator(self, purpose: str, **name: Name) -> Generator:
        """Return the generator of this name, at its beginning."""
        # All 256 bits count: torch's CPU generator would keep 32 bits of any seed, few enough to try them all.
        return Generator(SFC64(SeedSequence(np.frombuffer(self._key(purpose, name), "<u4"), pool_size=8)))

    def child(self, purpose: str, **name: Name) -> "Root":
        """Return a root of its own, from which nobody finds back to this one."""
        return Root(self._key(purpose, name))

    def keystream(self, purpose: str, **name: Name) -> Keystream:
        """Return the cryptographic generator of this name, at its beginning."""
        return Keystream(self._key(purpose, name))

    def seed_device(self, source: torch.Generator, purpose: str, **name: Name) -> torch.Generator:
        """Set a GPU's generator to the beginning of this stream, with about all of the 64 bits that it can keep.

        For simulations: that is fewer than the root has, but nobody else sees what a simulation draws.
        """
        return source.manual_seed(int.from_bytes(self._key(purpose, name)[:8], "little") >> 1)

    def _key(self, purpose: str, name: dict[str, Name]) -> bytes:
        others = sorted(item for item in name.items() if item[0] not in ("client", "round"))
        parts = [purpose, name.get("client"), name.get("round"), *others]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=32, key=self.key).digest()


class Streams:
    """The random streams of one run: its public and its secret root.

    >>> Streams(7).public == Streams(7).public, Streams(7).public == Streams(7).secret
    (True, False)
    """

    def __init__(self, seed: int | None, *, sampler: Sampler | None = None) -> None:
        """Take a seed, or None for roots from the operating system.

        sampler: how noise is drawn: exactly, or fast, as suits simulations; fast with a seed if left out.
        """
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise BadInput(
                f"seed must be a whole number of at least 0, was {seed!r}; leave it out for noise nobody can repeat"
            )
        self.seeded = seed is not None
        self.fast = self.seeded if sampler is None else sampler == "fast"
        self.public = Root(_root(seed, b"dpfl.streams"))
        self.secret = Root(_root(seed, b"dpfl.secret"))

    def of(self, client: int) -> Root:
        """Return the root of a client's own streams: its key."""
        return self.secret.child("client", client=client)

    def part(self, purpose: str, number: int) -> "Streams":
        """Return streams for one of several trainings, apart from those of all others."""
        other = copy.copy(self)
        other.public, other.secret = (root.child(purpose, round=number) for root in (self.public, self.secret))
        return other


def _root(seed: int | None, purpose: bytes) -> bytes:
    source = os.urandom(32) if seed is None else str(seed).encode()
    return hashlib.blake2b(source, digest_size=32, person=purpose).digest()


def device_generator(device: torch.device) -> torch.Generator:
    """Return a generator of a GPU's own, to be seeded before use."""
    return torch.Generator(device)


def fresh_seed() -> int:
    """Return a seed from the operating system, for what is to be drawn at random once and then kept."""
    return int.from_bytes(os.urandom(7), "little")


@contextmanager
def layer_randomness(rng: Generator | Keystream, device: torch.device) -> Iterator[None]:
    """Let random layers (dropout) draw from `rng` inside the block; torch's own state is as before afterwards."""
    cuda = device.type == "cuda"
    index = (device.index or 0) if cuda else 0
    with torch.random.fork_rng(devices=[index] if cuda else []):
        source = torch.cuda.default_generators[index] if cuda else torch.default_generator
        source.manual_seed(int(rng.integers(2**63)))
        yield
