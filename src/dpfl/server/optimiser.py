"""The server's optimiser: what it makes of the sum of uploads before the next model is sent out.

It sees only what was released, the sum with all noise on it, so whatever it does is post-processing and costs nothing.
Plain averaging adds the sum to the model; momentum takes a part of the last steps again; Adam and Yogi scale each
coordinate by how much it has been moving (Reddi et al., Adaptive Federated Optimization, 2021: no bias correction).
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from torch import Tensor

Kind = Literal["sgd", "adam", "yogi"]

_ADAPTIVE_LR = 0.01  # of Adam and Yogi, whose steps are about as long as the rate in every coordinate


@dataclass(frozen=True)
class Memory:
    """What the optimiser remembers between rounds."""

    velocity: Tensor
    squares: Tensor
    mean: Tensor  # of the models that count for the average
    latest: Tensor  # the model that the next step starts from: an average that is sent out at the end is no start
    counted: int = 0  # models that the mean is of


@dataclass(frozen=True, kw_only=True)
class ServerOptimiser:
    """How a model moves by the sum of uploads."""

    kind: Kind = "sgd"
    lr: float | None = None  # η; None: 1 for sgd, 0.01 for the others
    momentum: float = 0.0  # β₁: how much of the last steps is taken again
    second_momentum: float = 0.99  # β₂ of Adam and Yogi
    adaptivity: float = 1e-3  # τ of Adam and Yogi: coordinates that move less than this are not sped up
    averaged: float = 0.0  # the last part of the rounds whose models are averaged for the result

    @property
    def plain(self) -> bool:
        """Tell whether the sum is just added, and nothing is remembered."""
        return self.kind == "sgd" and self.lr in (None, 1.0) and not (self.momentum or self.averaged)

    def step(
        self, model: Tensor, total: Tensor, memory: Memory | None, *, round: int, rounds: int
    ) -> tuple[Tensor, Memory | None]:
        """Return the model to be sent out after this round of `rounds`, and what is remembered.

        total: the sum of uploads, with all noise on it.
        """
        if self.plain:
            return model + total, None
        if memory is None:
            still = model.new_zeros(model.shape)
            memory = Memory(still, still + self.adaptivity**2, still, model)
        memory = self._moved(memory, total)
        # The decimal number that was written: a tenth of 10 rounds is 1, in binary 0.99…
        if self.averaged and round > (1 - Fraction(repr(self.averaged))) * rounds:
            counted = memory.counted + 1
            memory = replace(memory, mean=memory.mean + (memory.latest - memory.mean) / counted, counted=counted)
        return self.sent_out(memory.latest, memory, round=round, rounds=rounds), memory

    def sent_out(self, latest: Tensor, memory: Memory | None, *, round: int, rounds: int) -> Tensor:
        """Return what is sent out after a round: the mean after the last, where models are averaged."""
        if memory is None or memory.counted == 0 or round < rounds:
            return latest
        return memory.mean

    def _moved(self, memory: Memory, total: Tensor) -> Memory:
        """Return the memory with one more step taken."""
        if self.kind == "sgd":
            velocity = self.momentum * memory.velocity + total
            latest = memory.latest + (1.0 if self.lr is None else self.lr) * velocity
            return replace(memory, velocity=velocity, latest=latest)
        velocity = self.momentum * memory.velocity + (1 - self.momentum) * total
        squared = total.square()
        # Adam forgets old squares at a rate of 1 − β₂ of themselves; Yogi at that of the new ones, however old.
        fading = (memory.squares - squared).sign() * squared if self.kind == "yogi" else memory.squares - squared
        squares = memory.squares - (1 - self.second_momentum) * fading
        rate = _ADAPTIVE_LR if self.lr is None else self.lr
        latest = memory.latest + rate * velocity / (squares.sqrt() + self.adaptivity)
        return replace(memory, velocity=velocity, squares=squares, latest=latest)
