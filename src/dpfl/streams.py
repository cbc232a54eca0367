"""Randomness as an argument: one independent stream for each (seed, purpose, client, round).

Because a stream is found by its name and not by what was drawn before, results do not depend on the order in which
clients are visited, and no two rounds share noise. Without a seed the root key is 256 bits from the operating
system and is kept nowhere: seeded noise can be subtracted by whoever knows the seed, so a seed is for simulations.
This is the only module of dpfl that makes a generator.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random import SFC64, Generator, SeedSequence

from dpfl.errors import BadInput


class Streams:
    """The named random streams of one run.

    >>> a = Streams(7).generator("noise", client=3, round=1).random()
    >>> b = Streams(7).generator("noise", client=3, round=1).random()
    >>> c = Streams(7).generator("noise", client=3, round=2).random()
    >>> a == b, a == c
    (True, False)
    """

    def __init__(self, seed: int | None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise BadInput(
                f"seed must be a whole number of at least 0, was {seed!r}; leave it out for noise nobody can repeat"
            )
        self.seeded = seed is not None
        root = os.urandom(32) if seed is None else str(seed).encode()
        self._root = hashlib.blake2b(root, digest_size=32, person=b"dpfl.streams").digest()

    def generator(self, purpose: str, *, client: int | None = None, round: int | None = None) -> Generator:
        """Return the generator of this name, at its beginning."""
        # All 256 bits count: torch's CPU generator would keep 32 bits of any seed, few enough to try them all.
        key = self._key(purpose, client, round)
        return Generator(SFC64(SeedSequence(np.frombuffer(key, "<u4"), pool_size=8)))

    def _key(self, purpose: str, client: int | None, round: int | None) -> bytes:
        name = json.dumps([purpose, client, round]).encode()
        return hashlib.blake2b(name, digest_size=32, key=self._root).digest()

    def seed_device(
        self, source: torch.Generator, purpose: str, *, client: int | None = None, round: int | None = None
    ) -> torch.Generator:
        """Set a GPU's generator to the beginning of this stream, with about all of the 64 bits that it can keep.

        For simulations: that is fewer than the root has, but nobody else sees what a simulation draws.
        """
        return source.manual_seed(int.from_bytes(self._key(purpose, client, round)[:8], "little") >> 1)


def device_generator(device: torch.device) -> torch.Generator:
    """Return a generator of a GPU's own, to be seeded before use."""
    return torch.Generator(device)


def fresh_seed() -> int:
    """Return a seed from the operating system, for what is to be drawn at random once and then kept."""
    return int.from_bytes(os.urandom(7), "little")


@contextmanager
def layer_randomness(rng: Generator, device: torch.device) -> Iterator[None]:
    """Let random layers (dropout) draw from `rng` inside the block; torch's own state is as before afterwards."""
    cuda = device.type == "cuda"
    index = (device.index or 0) if cuda else 0
    with torch.random.fork_rng(devices=[index] if cuda else []):
        source = torch.cuda.default_generators[index] if cuda else torch.default_generator
        source.manual_seed(int(rng.integers(2**63)))
        yield
