"""Canaries: records of the worst gradient that a clip allows, planted in a real training, and what is seen of them.

The loss is linear, so a record x = 10⁶·e_j with target ±1 has the clipped gradient ±C·e_j at every model, and target 0
none. A secret fair bit chooses; nobody else of the client's records touches coordinate j. So one training is as many
independent experiments as it has records.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp
from scipy.stats import binom
from torch import Tensor, nn

import dpfl
from attacks.bounds import Bits, Scores
from dpfl.clients.uploads import Request
from dpfl.orders import Laplace, Poisson, RecordClip
from dpfl.privacy.ledger import Charged
from dpfl.systems import System
from dpfl.training import Run


@dataclass
class Seen:
    """What observers of a training saw: orders and broadcasts by round, uploads by round and client."""

    run: Run | None = None
    away: float = -1.0  # what a bit that is down stands for
    bits: list[Scores] = field(default_factory=list)  # of each client's canaries: ±1, or 1 and 0
    places: list[Tensor] = field(default_factory=list)  # their coordinates
    requests: list[Request] = field(default_factory=list)
    uploads: list[dict[int, Tensor]] = field(default_factory=list)
    downlink: list[float] = field(default_factory=list)  # the noise of the server's own on each sum

    def sums(self) -> list[Tensor]:
        """Return by how much each broadcast moved the model, which is what its readers learn."""
        assert self.run is not None
        models = [*(request.broadcast for request in self.requests), *self.run.model.state_dict().values()]
        flat = [model.flatten().double() for model in models]
        return [after - before for before, after in pairwise(flat)]

    def sum_variance(self, round: int) -> float:
        """Return the variance Σ p_j²σ_j² + σ_D² of the noise in a sum; rounds count from 0."""
        request = self.requests[round]
        variances = {client: paid.order.noise_variance(paid.records) for client, paid in request.charged.items()}
        own = math.fsum(weight**2 * variances[client] for client, weight in request.weights.items())
        return own + self.downlink[round] ** 2


def watch(
    system: System[Any],
    *,
    canaries: int = 1600,
    clients: int = 2,
    sizes: tuple[int, ...] | None = None,
    away: float = -1.0,
    seed: int = 5,
    asked: Callable[[Request], Request] = lambda request: request,
) -> Seen:
    """Train with one canary on each coordinate; `away` is the target of those whose bit is down (−1, or 0).

    asked: changes what the clients are asked for, as a wrong twin does.
    """
    rng = np.random.default_rng(seed)
    targets = torch.from_numpy(np.where(rng.random(canaries) < 0.5, 1.0, away)).float()
    test = (torch.eye(2, canaries), torch.zeros(2))
    data = dpfl.from_arrays(1e6 * torch.eye(canaries), targets, test=test)
    federation = dpfl.federate(data, clients=clients, sizes=sizes, validation_share=0.0, seed=seed)
    seen = Seen(
        away=away,
        bits=[records.y.double().numpy() for records in federation.clients],
        places=[records.x.argmax(dim=1) for records in federation.clients],
    )

    def listen(session: Any) -> None:
        perform, broadcast = session.clients.perform, session.ledger.broadcast

        def heard(request: Request) -> Any:
            seen.requests.append(request)
            return perform(asked(request))

        def sent_out(weights: Any, *, noise_std: float = 0.0) -> None:
            seen.downlink.append(noise_std)
            broadcast(weights, noise_std=noise_std)

        session.clients.perform, session.ledger.broadcast = heard, sent_out

    module = nn.Linear(canaries, 1, bias=False)
    nn.init.zeros_(module.weight)
    seen.run = dpfl.train(
        system, federation, module, loss=lambda outputs, y: outputs.squeeze(1) * y, seed=seed, on_open=listen,
        on_uploads=lambda _, uploads: seen.uploads.append(uploads), evaluate_every=10**6,
    )  # fmt: skip
    return seen


def likelihood_ratios(seen: Seen) -> tuple[Scores, Bits]:
    """Return the log-likelihood ratio of every canary's bit over all uploads, and which bits are up."""
    scores, up = [], []
    for client, (bits, places) in enumerate(zip(seen.bits, seen.places, strict=True)):
        total = np.zeros(len(bits))
        for request, uploads in zip(seen.requests, seen.uploads, strict=True):
            if client in uploads:
                total += Shown.by(request.charged[client]).ratio(-uploads[client][places].double().numpy(), seen.away)
        scores.append(total)
        up.append(bits > 0)
    return np.concatenate(scores), np.concatenate(up)


def as_if(seen: Seen, noise: float, count: int) -> tuple[Scores, Bits]:
    """Draw such ratios for canaries of clients like the first, had its noise been so many times as large."""
    rng = np.random.default_rng(7)
    up = rng.random(count) < 0.5
    scores = np.zeros(count)
    for request in seen.requests:
        shown = Shown.by(request.charged[0], noise)
        scores += shown.ratio(shown.drawn(np.where(up, 1.0, seen.away), rng), seen.away)
    return scores, up


@dataclass(frozen=True)
class Shown:
    """What one upload shows of a canary on its coordinate: step·k·bit + noise, with k of its steps that sampled it."""

    step: float  # how far one step moves it
    steps: int
    rate: float
    size: float  # of the noise: the standard deviation, or the scale
    laplace: bool

    @staticmethod
    def by(paid: Charged, noise: float = 1.0) -> "Shown":
        """Read it off an order, with so many times its noise."""
        order, (rate, *_) = paid.order, paid.order.learning_rates
        assert order.clip is not None
        divisor = order.divisor(paid.records) if isinstance(order.clip, RecordClip) else 1.0
        laplace = isinstance(order.noise, Laplace)
        return Shown(
            step=rate * order.clip.clip_norm / divisor,
            steps=order.steps,
            rate=order.batch.sampling_rate if isinstance(order.batch, Poisson) else 1.0,
            size=noise * math.sqrt(order.noise_variance(paid.records) / (2 if laplace else 1)),
            laplace=laplace,
        )

    def ratio(self, values: Scores, away: float) -> Scores:
        """Return ln p(value | bit up) − ln p(value | bit down)."""
        times = np.arange(self.steps + 1)
        share = binom.logpmf(times, self.steps, self.rate)

        def log_density(bit: float) -> Scores:
            off = np.abs(values[:, None] - self.step * bit * times) / self.size
            found: Scores = logsumexp(share - (off if self.laplace else off**2 / 2), axis=1)
            return found

        return log_density(1.0) - log_density(away)

    def drawn(self, bits: Scores, rng: np.random.Generator) -> Scores:
        """Draw what is shown of canaries with these bits."""
        noise = rng.laplace if self.laplace else rng.normal
        return self.step * bits * rng.binomial(self.steps, self.rate, len(bits)) + noise(0.0, self.size, len(bits))


def eavesdropped(seen: Seen, exposures: int) -> tuple[Scores, Bits]:
    """Return the matched filter of who hears the first uploads of every client, and reads all models.

    With none that are heard it is that of a reader. A round that is not heard tells of a canary by the noised sum in
    which it weighs p_i: Σ_heard y_t·Δ/σ_i² + Σ_unheard s_t·p_iΔ/V_t, where all Δ of a client are alike.
    """
    scores, up, sums = [], [], seen.sums()
    for client, (bits, places) in enumerate(zip(seen.bits, seen.places, strict=True)):
        total, weight = np.zeros(len(bits)), 0.0
        for round, request in enumerate(seen.requests):
            paid, share, shown, variance = request.charged[client], 1.0, seen.uploads[round][client], 0.0
            if round < exposures:
                variance = paid.order.noise_variance(paid.records)
            else:
                share, shown, variance = request.weights[client], sums[round], seen.sum_variance(round)
            total -= shown[places].double().numpy() * share / variance
            weight += share**2 / variance
        scores.append(total / math.sqrt(weight))
        up.append(bits > 0)
    return np.concatenate(scores), np.concatenate(up)
