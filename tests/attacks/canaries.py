"""Canaries: records of the worst gradient that a clip allows, planted in a real training, and what they can prove.

The loss is linear, so a record x = 10⁶·e_j with target ±1 has the clipped gradient ±C·e_j at every model, and target 0
none. A secret fair bit chooses; nobody else of the client's records touches coordinate j. So one training is as many
independent experiments as it has records.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta, norm
from torch import Tensor, nn

import dpfl
from dpfl.clients.uploads import Request
from dpfl.privacy.gaussian_dp import epsilon_of
from dpfl.systems import System
from dpfl.training import Run

Scores = NDArray[np.float64]


@dataclass
class Seen:
    """What observers of a training saw: orders and broadcasts by round, uploads by round and client."""

    run: Run | None = None
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


def watch(system: System[Any], *, canaries: int, clients: int, away: float, seed: int) -> Seen:
    """Train with one canary on each coordinate; `away` is the target of those whose bit is down (−1, or 0)."""
    rng = np.random.default_rng(seed)
    targets = torch.from_numpy(np.where(rng.random(canaries) < 0.5, 1.0, away)).float()
    test = (torch.eye(2, canaries), torch.zeros(2))
    data = dpfl.from_arrays(1e6 * torch.eye(canaries), targets, test=test)
    federation = dpfl.federate(data, clients=clients, validation_share=0.0, seed=seed)
    seen = Seen(
        bits=[records.y.double().numpy() for records in federation.clients],
        places=[records.x.argmax(dim=1) for records in federation.clients],
    )

    def listen(session: Any) -> None:
        perform, broadcast = session.clients.perform, session.ledger.broadcast

        def heard(request: Request) -> Any:
            seen.requests.append(request)
            return perform(request)

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


def matched(seen: Seen) -> tuple[Scores, NDArray[np.bool_]]:
    """Return the matched filter Σ_t y_t/σ_t² of every canary over all uploads, and which bits are up."""
    scores, up = [], []
    for client, (bits, places) in enumerate(zip(seen.bits, seen.places, strict=True)):
        total, weight = np.zeros(len(bits)), 0.0
        for request, uploads in zip(seen.requests, seen.uploads, strict=True):
            if client in uploads:
                paid = request.charged[client]
                variance = paid.order.noise_variance(paid.records)
                total -= uploads[client][places].double().numpy() / variance
                weight += 1 / variance
        scores.append(total / math.sqrt(weight))
        up.append(bits > 0)
    return np.concatenate(scores), np.concatenate(up)


def eavesdropped(seen: Seen, exposures: int) -> tuple[Scores, NDArray[np.bool_]]:
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


def gaussian_bound(scores: Scores, up: NDArray[np.bool_], delta: float, alpha: float) -> float:
    """Bound ε from below for two normal laws of one variance, by the distance of their means."""
    one, other = scores[up], scores[~up]
    spread = math.sqrt((one.var(ddof=1) * len(one) + other.var(ddof=1) * len(other)) / len(scores))
    distance = (one.mean() - other.mean()) / spread
    error = math.sqrt(1 / len(one) + 1 / len(other) + distance**2 / (2 * len(scores)))
    least = max(distance - norm.isf(alpha) * error, 0.0)
    return float(epsilon_of(least, delta))


def counted_bound(scores: Scores, up: NDArray[np.bool_], delta: float, alpha: float) -> float:
    """Bound ε from below whatever the laws: Clopper–Pearson, at a threshold chosen on the other half."""
    half = np.arange(len(scores)) % 2 == 0
    thresholds = np.quantile(scores[half], np.linspace(0.01, 0.99, 99))
    chosen = max(thresholds, key=lambda at: _counted(scores[half], up[half], at, delta, alpha))
    return _counted(scores[~half], up[~half], chosen, delta, alpha)


def _counted(scores: Scores, up: NDArray[np.bool_], at: float, delta: float, alpha: float) -> float:
    above, hits, alarms = scores > at, int(up.sum()), int((~up).sum())

    def least(count: int, of: int) -> float:
        return float(beta.ppf(alpha / 4, count, of - count + 1)) if count else 0.0

    def most(count: int, of: int) -> float:
        return float(beta.isf(alpha / 4, count + 1, of - count)) if count < of else 1.0

    pairs: Sequence[tuple[float, float]] = (
        (least(int((above & up).sum()), hits), most(int((above & ~up).sum()), alarms)),
        (least(int((~above & ~up).sum()), alarms), most(int((~above & up).sum()), hits)),
    )
    return max(math.log(max(right - delta, 1e-300) / wrong) for right, wrong in pairs)
