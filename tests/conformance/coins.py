"""Coins in the place of random streams, so that neighbours draw alike."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dpfl.streams import Streams


class TakesAll:
    """Coins of a sampler that happens to take every record: the bound must allow for it."""

    def random(self, count: int) -> np.ndarray:
        return np.zeros(count)


class Coins:
    """Coins that are the same for neighbours: each call has its own, however many the calls before asked for."""

    def __init__(self, seed: int) -> None:
        self.seed, self.calls = seed, 0

    def random(self, count: int) -> np.ndarray:
        self.calls += 1
        return np.random.default_rng([self.seed, self.calls]).random(count)


class CoinsOf(Streams):
    """Streams of which only coins are ever drawn; a generator is at its beginning, as theirs are."""

    def __init__(self, coins: Callable[[], Any]) -> None:
        super().__init__(0)
        self.public = self.secret = _Coins(coins)  # type: ignore[assignment]

    def of(self, client: int) -> Any:
        return self.secret


class _Coins:
    def __init__(self, coins: Callable[[], Any]) -> None:
        self.coins = coins

    def generator(self, purpose: str, **name: Any) -> Any:
        return self.coins()
