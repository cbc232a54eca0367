"""Thousands of trainings of a linear model at once: the grid that plans are measured against (`held_out_plans.py`).

Where every client takes one step a round with all of its records, each clipped, the sum of the uploads is one step of
gradient descent over all records with Gaussian noise on it. So a training needs no clients, and of linear and softmax
regression the gradients of all records under all models are three products of matrices. What noise a round adds is
read off the system's own orders. `dpfl.repeat` trains the same thing client by client, ten times slower; whatever is
reported in the end is trained by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpfl.federation import Federation, Records
from dpfl.orders import Full, Gaussian, RecordClip
from dpfl.planning.bounds import Facts, begun, orders_of
from dpfl.streams import Streams
from dpfl.systems import PrivateSystem
from dpfl.training import as_model

AVERAGED = (0.0, 0.25, 0.5, 0.75)  # parts of the rounds whose models are averaged: they cost no training of their own
_ROOM = 2**20  # numbers that a tensor may hold, so that a core keeps a step's tensors near


@dataclass(frozen=True)
class Point:
    """The numbers of one training but its rounds and averages."""

    lr: float
    clip: float
    noise: float  # standard deviation that a round adds to every parameter


def noise_of(system: PrivateSystem[Any], federation: Federation, dim: int) -> float:
    """Return the standard deviation of what a round adds to every parameter, by the orders of the first round."""
    facts = Facts(federation.sizes, dim, Streams(0))
    state = begun(system, facts)
    orders = orders_of(system, state, 1)
    one_step = all(
        order.steps == 1 and isinstance(order.batch, Full) and isinstance(order.clip, RecordClip)
        and order.clip.norm == 2 and isinstance(order.noise, Gaussian) for order in orders.values()
    )  # fmt: skip
    if not one_step or len(orders) < len(federation.clients) or system.lr_schedule != "constant" or system.needs:
        raise SystemExit(f"the grid is for one full step of everybody with Gaussian noise, which {system.name} is not")
    weights = system.weights(state, sorted(orders))
    total = sum(weights[i] ** 2 * one.noise_variance(federation.sizes[i]) for i, one in orders.items())
    return math.sqrt(total)


class Grid:
    """All records of a federation as one batch, and the models that training starts from."""

    def __init__(self, federation: Federation, *, seeds: Sequence[int]) -> None:
        self.classes = federation.classes
        pool = Records(
            torch.cat([one.x for one in federation.clients]), torch.cat([one.y for one in federation.clients])
        )
        self.x, self.y = _with_ones(pool.x), pool.y
        self.test_x, self.test_y = _with_ones(federation.test.x), federation.test.y
        self.lengths = self.x.norm(dim=1)[:, None]
        outputs = self.classes or 1
        starts = []
        for seed in seeds:
            vector = as_model(None, None, federation, Streams(seed)).vector()
            self.dim = len(vector)
            weights, bias = vector[:-outputs].view(outputs, -1), vector[-outputs:]
            starts.append(torch.cat([weights, bias[:, None]], dim=1))
        self.starts = torch.stack(starts)  # [s, outputs, p]
        # Of two classes the difference is all that counts: it moves twice as far, under noise of both.
        self.binary = self.classes == 2
        if self.binary:
            self.starts = self.starts[:, 1:] - self.starts[:, :1]

    def untrained(self) -> list[float]:
        """Return the test loss of every start."""
        return self._losses(self.starts[None])[0].tolist()

    def train(self, points: Sequence[Point], rounds: int, *, seed: int) -> Tensor:
        """Return the test losses [points, averages, starts] after so many rounds; infinite where a training diverged.

        All points see the same noise but for its size, so that they differ by what they are and not by luck.
        """
        per_point = len(self.x) * self.starts[..., 0].numel()
        each = max(1, _ROOM // per_point)
        parts = [self._train(points[at : at + each], rounds, seed) for at in range(0, len(points), each)]
        return torch.cat(parts)

    def _train(self, points: Sequence[Point], rounds: int, seed: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        lr, clip, noise = (
            torch.tensor([getattr(one, name) for one in points], dtype=torch.float32)[:, None, None, None]
            for name in ("lr", "clip", "noise")
        )
        noise = noise * (math.sqrt(2) if self.binary else 1.0)
        model = self.starts.repeat(len(points), 1, 1, 1)  # [points, s, outputs, p]
        sums = {part: torch.zeros_like(model) for part in AVERAGED if part}
        counts = dict.fromkeys(sums, 0)
        for done in range(1, rounds + 1):
            drawn = torch.randn(self.starts.shape, generator=rng)
            model = model - lr * self._gradient(model, clip[..., 0]) + noise * drawn
            for part, total in sums.items():
                if done > (1 - Fraction(repr(part))) * rounds:
                    total += model
                    counts[part] += 1
        found = [model if not part else sums[part] / counts[part] for part in AVERAGED]
        return torch.stack([self._losses(one) for one in found], dim=1)

    def _gradient(self, model: Tensor, clip: Tensor) -> Tensor:
        """Return the mean of the clipped gradients of all records under every model [points, s, outputs, p].

        A record's gradient is the outer product of what its outputs should be less of and its features.
        """
        flat = model.flatten(0, 2)
        outputs = (self.x @ flat.T).view(len(self.x), *model.shape[:3])  # [n, points, s, outputs]
        if self.binary:
            excess = torch.sigmoid_(outputs).sub_(self.y[:, None, None, None])
            lengths = math.sqrt(2) * excess.abs()
        elif self.classes:
            excess = functional.softmax(outputs, dim=3)
            excess[torch.arange(len(self.y)), :, :, self.y] -= 1
            lengths = excess.norm(dim=3, keepdim=True)
        else:
            excess = outputs.sub_(self.y[:, None, None, None]).mul_(2)
            lengths = excess.abs()
        lengths = lengths.mul_(self.lengths[:, None, None]).clamp_(min=1e-12)
        excess *= (clip[None] / lengths).clamp_(max=1.0)
        total = (excess.view(len(self.x), -1).T @ self.x).view_as(model)
        return total * ((2.0 if self.binary else 1.0) / len(self.x))

    def _losses(self, model: Tensor) -> Tensor:
        """Return the test loss of every model [points, s, outputs, p]."""
        each = max(1, 4 * _ROOM // (len(self.test_x) * model[0, :, :, 0].numel()))
        return torch.cat([self._score(model[at : at + each]) for at in range(0, len(model), each)])

    def _score(self, model: Tensor) -> Tensor:
        outputs = (self.test_x @ model.flatten(0, 2).T).view(len(self.test_x), *model.shape[:3])
        if self.binary:
            losses = functional.softplus(outputs) - outputs * self.test_y[:, None, None, None]
        elif self.classes:
            losses = -functional.log_softmax(outputs, dim=3)[torch.arange(len(self.test_y)), :, :, self.test_y]
        else:
            losses = (outputs - self.test_y[:, None, None, None]).square()
        mean = losses.view(len(self.test_x), *model.shape[:2], -1).double().mean(dim=(0, 3))
        return mean.nan_to_num(nan=math.inf)


def _with_ones(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    return torch.cat([flat, torch.ones(len(flat), 1)], dim=1)
