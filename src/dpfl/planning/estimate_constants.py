"""Probes: short descents on public records, from which the constants of the bounds are read.

Bounds speak of the gradients that training follows, so the probes follow those too: the mean gradient as the system
clips it. Curvature is how that mean changes from one model to a near one (difference quotients, and a Lanczos iteration
for the largest and the least); everything else is read at a few models along the way down.
"""

import copy
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from dpfl.clients.reference import perform
from dpfl.errors import BadInput
from dpfl.federation import Records
from dpfl.gradients.layered import layered, sum_of_clipped_layered
from dpfl.models import Model
from dpfl.orders import ClientClip, ModelClip, Order, RecordClip
from dpfl.planning.constants import Constants, Note
from dpfl.privacy.ledger import Ledger
from dpfl.streams import Streams, layer_randomness

_RECORDS = 600  # looked at in all
_CLIENTS = 12  # looked at one by one
_STEPS = 100  # of the descent
_SEARCH = 100  # steps towards a least loss
_LANCZOS = 32  # directions, where the model has more
_COMPLETE = 64  # up to this many parameters all directions are taken, and curvatures are exact
_FLAT = 1e-4  # curvature below this part of the largest is none
_SMALL = 2**23  # records times parameters below which a second thread costs more than it brings
_LARGE_MODEL = 50_000  # parameters from which on everything is done a third as often

Clip = RecordClip | ClientClip | ModelClip | None
Estimator = Literal["general", "paper"]  # of Y₀ and Γ


def estimate(
    model: Model, clients: Sequence[Records], *, clip: Clip, streams: Streams, source: str,
    estimator: Estimator = "general", within: float = math.inf,
) -> Constants:  # fmt: skip
    """Estimate every constant for this model, as it stands, from records that are public, synthetic or paid for.

    clip: what the system does to gradients; the constants are those of the clipped field (a clip of parameters leaves
        gradients as they are).
    estimator: of Y₀ and Γ. FedSGD-DPC's authors ("paper") read both from models that each client trains alone.
    within: so many seconds, or BadInput is raised: large models take minutes.
    """
    probe = _Probe(model, clients, None if isinstance(clip, ModelClip) else clip, streams, within)
    with _threads(1 if probe.model.dim * len(probe.pooled) < _SMALL else torch.get_num_threads()):
        found = _estimated(probe, streams, f"{source}, model {model.name}")
        return found if estimator == "general" else _by_lone_clients(probe, found)


def _estimated(probe: "_Probe", streams: Streams, source: str) -> Constants:
    start = probe.model.vector()
    path = _descend(probe, start)
    stops = [path[at] for at in sorted({0, 1, 3, 10, 30, len(path) - 1} & set(range(len(path))))]
    curvatures = [_curvatures(probe, at, streams) for at in (stops[0], stops[len(stops) // 2], stops[-1])]
    smoothness, least = max(high for _, high in curvatures), min(low for low, _ in curvatures)
    convex = least > _FLAT * smoothness
    optimum = _polished(probe, path[-1]) if convex else path[-1]
    lowest = min(probe.loss(optimum), probe.loss(path[-1]))
    initial_gap = probe.loss(start) - lowest
    found = _along(probe, stops, optimum, lowest)
    found["smoothness"] = [high for _, high in curvatures]
    found["smoothness"] += [  # a clip may leave the field flat at each model, and yet different from one to another
        float((probe.field(there) - probe.field(here)).norm() / (there - here).norm())
        for here, there in itertools.pairwise(stops)
    ]
    values = {name: max(seen) for name, seen in found.items()}
    values["dissimilarity"] = float(np.median(found["dissimilarity"]))  # it grows without end towards the optimum
    values["polyak_lojasiewicz"] = min(found["polyak_lojasiewicz"])
    values["strong_convexity"] = min(found["strong_convexity"])
    walk = f"largest at {len(stops)} models along a descent of {len(path) - 1} steps"
    how = {
        "smoothness": "largest curvature (Lanczos on gradient differences) at 3 models",
        "strong_convexity": "least pull towards the end of the descent, by distance: the loss is flat elsewhere",
        "polyak_lojasiewicz": "least of slope² over twice the height above the end of the descent",
        "gradient_bound": f"longest clipped gradient of a client, {walk}",
        "lipschitz": f"longest gradient of a client, {walk}",
        "record_spread": f"root mean square over records, {walk}",
        "divergence": f"mean over clients, {walk}",
        "dissimilarity": f"root mean square over clients, median of {len(stops)} models along the descent",
    }
    if convex:
        found["strong_convexity"] = found["polyak_lojasiewicz"] = [low for low, _ in curvatures]
        values["strong_convexity"] = values["polyak_lojasiewicz"] = least
        how["strong_convexity"] = how["polyak_lojasiewicz"] = "least curvature (Lanczos) at 3 models"
    ending = "the least loss (L-BFGS)" if convex else "the end of the descent"
    notes = {name: Note(how[name], min(seen), max(seen)) for name, seen in found.items()}
    notes["initial_distance"] = Note(f"squared distance from the first model to {ending}")
    notes["initial_gap"] = Note(f"loss of the first model less that at {ending}")
    own = probe.own_least_losses(optimum)
    lowest = min(lowest, probe.least_loss(optimum, probe.pooled))  # sought as hard as the clients' own
    gaps = [max(0.0, lowest - each) for each in own]
    notes["heterogeneity"] = Note(f"F* less the mean of {len(own)} clients' own least losses", min(gaps), max(gaps))
    values["heterogeneity"] = max(0.0, lowest - float(np.average(own, weights=probe.sizes)))
    values["initial_distance"] = float((start - optimum).square().sum())
    values["initial_gap"] = initial_gap
    if not all(math.isfinite(value) for value in values.values()):
        raise BadInput("model must have finite gradients on the public records, had not; check the data's scale")
    return Constants(**values, source=source, notes=notes)


def _by_lone_clients(probe: "_Probe", found: Constants) -> Constants:
    """Replace Y₀ and Γ by FedSGD-DPC's estimates: Σ(n_i/n)·‖θ₀ − θ_i*‖² and max F_i* − Σ(n_i/n)·F_i*.

    Each client would send the server ‖θ₀ − θ_i*‖² and F_i* of its own best model as they are: two releases that nobody
    counts. Here public records stand in the clients' place.
    """
    start, count = probe.model.vector(), len(probe.clients)
    alone = [probe.least(start, one) for one in probe.clients]
    apart = [float((start - best).square().sum()) for best, _ in alone]
    gaps = [max(loss for _, loss in alone) - loss for _, loss in alone]
    notes = {
        "initial_distance": Note(
            f"mean squared distance from the first model to those of {count} clients that train alone (FedSGD-DPC's)",
            min(apart), max(apart),
        ),
        "heterogeneity": Note(
            f"largest of {count} lone clients' least losses, less their mean (FedSGD-DPC's)", min(gaps), max(gaps)
        ),
    }  # fmt: skip
    return replace(
        found,
        initial_distance=float(np.average(apart, weights=probe.sizes)),
        heterogeneity=float(np.average(gaps, weights=probe.sizes)),
        notes={**found.notes, **notes},
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use this many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Probe:
    """A model in double precision, with public records in the clients' place."""

    def __init__(
        self, model: Model, clients: Sequence[Records], clip: Clip, streams: Streams, within: float = math.inf
    ) -> None:
        self.within, self._began = within, time.perf_counter()
        module = copy.deepcopy(model.module).cpu().double()
        self.model = Model(module, model.loss, classify=model.classify, ridge=model.ridge, name=model.name)
        self.clip, self.rng = clip, streams.public.generator("probe")
        self.thrift = 3 if self.model.dim > _LARGE_MODEL else 1
        # A few clients, and of each the same part of its records, so that their weights stay as they are.
        some = list(clients)[:: max(1, math.ceil(len(clients) / _CLIENTS))]
        share = min(1.0, _RECORDS / self.thrift**2 / sum(map(len, some)))
        self.clients = [_double(one, max(1, round(share * len(one)))) for one in some]
        self.pooled = Records(torch.cat([one.x for one in self.clients]), torch.cat([one.y for one in self.clients]))
        self.sizes = [len(one) for one in self.clients]
        # Nothing is promised about public records, but clients perform nothing that no ledger has seen.
        counts, order = sorted({*self.sizes, len(self.pooled)}), Order(steps=1, learning_rate=1.0, clip=clip)
        paid = Ledger(None, counts, system="probe").charge(dict.fromkeys(range(len(counts)), order))
        self.charged = {one.records: one for one in paid.values()}
        with layer_randomness(self.rng, torch.device("cpu")):
            self.layers = layered(self.model, self.pooled.x, self.pooled.y)
            self.vectorised = self.layers is not None or self.model.vectorises(self.pooled.x, self.pooled.y)
        self.model.module.eval()
        if self.layers is not None:
            self.layers.module.eval()
        self.clips_clients = False
        if isinstance(clip, ClientClip):  # where it does not bite, the mean over all records is the same, and quicker
            start = self.model.vector()
            steepest = [self.model.gradient(start, one.x, one.y) for one in self.clients]
            lengths = [float(torch.linalg.vector_norm(one, ord=clip.norm)) for one in steepest]
            self.clips_clients = max(lengths) > clip.clip_norm

    def in_time(self) -> None:
        """Go on, or say that it takes too long."""
        if time.perf_counter() - self._began > self.within:
            raise BadInput(
                f"constants must be given for this model, whose estimates take longer than the {self.within:.0f} s that"
                " a pilot has for them; give --constants, or plan by --method bound, which waits"
            )

    def loss(self, parameters: Tensor) -> float:
        self.in_time()
        with torch.no_grad():
            return self.model.mean_loss(self.model.split(parameters), self.pooled.x, self.pooled.y).item()

    def field(self, parameters: Tensor, records: Records | None = None) -> Tensor:
        """Return the gradient that training follows: clipped as ordered. Performed by a client, as training is."""
        self.in_time()
        if records is None and self.clips_clients:  # the mean of what clients clip, not a clipped mean
            parts = [len(one) / len(self.pooled) * self.field(parameters, one) for one in self.clients]
            return torch.stack(parts).sum(0)
        taken = self.pooled if records is None else records
        if self.layers is not None and isinstance(self.clip, RecordClip):
            return sum_of_clipped_layered(self.layers, parameters, taken.x, taken.y, self.clip) / len(taken)
        return -perform(
            self.charged[len(taken)], self.model, parameters, taken, batches=self.rng, noise=self.rng,
            vectorised=self.vectorised,
        )  # fmt: skip

    def least(self, start: Tensor, records: Records) -> tuple[Tensor, float]:
        return _least_loss(self, start, records, steps=_SEARCH // self.thrift)

    def least_loss(self, start: Tensor, records: Records) -> float:
        return self.least(start, records)[1]

    def own_least_losses(self, start: Tensor) -> list[float]:
        return [self.least_loss(start, one) for one in self.clients]

    def record_spread(self, parameters: Tensor, records: Records) -> float:
        """Return the mean of ‖g_r − g‖² over some of a client's records, as clipped."""
        rows = max(2, min(len(records), 2**21 // self.model.dim, 64))
        x, y = records.x[:rows], records.y[:rows]
        if len(x) == 1:
            return 0.0
        clip = self.clip if isinstance(self.clip, RecordClip) else RecordClip(1e300)  # which never bites
        if self.layers is not None:  # ‖g_r‖² less ‖g‖², without forming a record's gradient
            lengths = self.layers.record_lengths(parameters, x, y, clip.norm)
            scales = torch.clamp(clip.clip_norm / lengths.clamp_min(1e-300), max=1.0)
            squares = (scales * self.layers.record_lengths(parameters, x, y, 2)).square().mean()
            mean = sum_of_clipped_layered(self.layers, parameters, x, y, clip) / len(x)
            return max(0.0, float(squares - mean.square().sum()))
        gradients = torch.cat(self.model.record_gradients(parameters, x, y, vectorised=self.vectorised), 1)
        lengths = torch.linalg.vector_norm(gradients, ord=clip.norm, dim=1, keepdim=True)
        gradients = gradients * torch.clamp(clip.clip_norm / lengths.clamp_min(1e-300), max=1.0)
        return float((gradients - gradients.mean(0)).square().sum(1).mean())


def _double(records: Records, rows: int) -> Records:
    y = records.y[:rows]
    return Records(records.x[:rows].double(), y.double() if y.is_floating_point() else y)


def _descend(probe: _Probe, start: Tensor) -> list[Tensor]:
    """Return the models of a descent with steps of one over the curvature at its start, or less where that rises."""
    rate = 1 / max(_curvature_along(probe, start), 1e-12)
    path, height = [start], probe.loss(start)
    for _ in range(_STEPS // probe.thrift):
        gradient = probe.field(path[-1])
        if float(gradient.norm()) < 1e-10:
            break
        ahead = path[-1] - rate * gradient
        while (reached := probe.loss(ahead)) > height + 1e-9 * abs(height) and rate > 1e-12:
            rate /= 2
            ahead = path[-1] - rate * gradient
        path.append(ahead)
        height = reached
    return path


def _curvature_along(probe: _Probe, at: Tensor) -> float:
    """Return the largest curvature by a few power iterations: enough for a step that goes down."""
    here = direction = probe.field(at)
    curvature = 0.0
    for _ in range(8):
        length = float(direction.norm())
        if length == 0:
            break
        direction = direction / length
        changed = _difference(probe, at, here, direction)
        direction, curvature = changed, float(direction @ changed)
    return abs(curvature)


def _difference(probe: _Probe, at: Tensor, here: Tensor, direction: Tensor) -> Tensor:
    """Return the derivative of the field in a direction, by a difference from its value `here`."""
    h = 1e-4 * max(1.0, float(at.norm()) / math.sqrt(len(at)))
    return (probe.field(at + h * direction) - here) / h


def _curvatures(probe: _Probe, at: Tensor, streams: Streams) -> tuple[float, float]:
    """Return the least and the largest curvature at a model: Lanczos with full orthogonalisation.

    The least is 0 where it has not settled: far more directions than were looked at are nearly flat.
    """
    dim = len(at)
    count = dim if dim <= _COMPLETE else _LANCZOS // probe.thrift
    direction = torch.from_numpy(streams.public.generator("probe", round=1).standard_gamma(1.0, dim) - 1.0)
    basis, diagonal, beside = [direction / direction.norm()], [], []
    here, length = probe.field(at), 0.0
    for _ in range(count):
        changed = _difference(probe, at, here, basis[-1])
        diagonal.append(float(changed @ basis[-1]))
        for one in (*basis, *basis):  # twice is enough
            changed = changed - (changed @ one) * one
        length = float(changed.norm())
        if len(diagonal) == count or length <= 1e-9 * max(map(abs, diagonal)):
            break
        beside.append(length)
        basis.append(changed / length)
    if not math.isfinite(length):
        raise BadInput("model must have finite gradients on the public records, had not; check the data's scale")
    inner = beside[: len(diagonal) - 1]
    ritz, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(inner, 1) + np.diag(inner, -1))
    unsettled = length * abs(vectors[-1, 0])  # how far from a true one the least may be
    return float(ritz[0]) if unsettled < 0.05 * ritz[0] else 0.0, float(ritz[-1])


def _along(probe: _Probe, stops: Sequence[Tensor], optimum: Tensor, lowest: float) -> dict[str, list[float]]:
    """Return what is seen at each stop of the descent."""
    weights = np.asarray(probe.sizes) / sum(probe.sizes)
    start_height = probe.loss(stops[0]) - lowest
    found: dict[str, list[float]] = {
        name: [] for name in ("gradient_bound", "lipschitz", "record_spread", "divergence", "dissimilarity",
                              "polyak_lojasiewicz", "strong_convexity")
    }  # fmt: skip
    for at in stops:
        clipped = torch.stack([probe.field(at, one) for one in probe.clients])
        raw = torch.stack([probe.model.gradient(at, one.x, one.y) for one in probe.clients])
        mean = torch.from_numpy(weights) @ clipped
        lengths = clipped.norm(dim=1).numpy()
        found["gradient_bound"].append(float(lengths.max()))
        found["lipschitz"].append(float(raw.norm(dim=1).max()))
        found["divergence"].append(float(weights @ (clipped - mean).square().sum(1).numpy()))
        found["record_spread"].append(
            math.sqrt(weights @ np.array([probe.record_spread(at, one) for one in probe.clients]))
        )
        height, away = probe.loss(at) - lowest, at - optimum
        if height > 1e-3 * start_height or at is stops[0]:
            slope, followed = probe.model.gradient(at, probe.pooled.x, probe.pooled.y), probe.field(at)
            found["dissimilarity"].append(math.sqrt(weights @ lengths**2) / max(float(mean.norm()), 1e-12))
            found["polyak_lojasiewicz"].append(float(slope @ followed) / max(2 * height, 1e-12))
            found["strong_convexity"].append(float(followed @ away) / max(float(away.square().sum()), 1e-12))
    return found


def _polished(probe: _Probe, start: Tensor) -> Tensor:
    return _least_loss(probe, start, probe.pooled, steps=500)[0]


def _least_loss(probe: _Probe, start: Tensor, records: Records, *, steps: int) -> tuple[Tensor, float]:
    """Return the model of least loss on these records near `start`, and that loss (L-BFGS)."""
    model = probe.model

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        probe.in_time()
        parameters = torch.from_numpy(flat)
        with torch.no_grad():
            height = model.mean_loss(model.split(parameters), records.x, records.y).item()
        return height, model.gradient(parameters, records.x, records.y).numpy()

    options = {"maxiter": steps, "ftol": 1e-14, "gtol": 1e-9}
    found = minimize(value, start.numpy(), jac=True, method="L-BFGS-B", options=options)
    return torch.from_numpy(found.x), float(found.fun)
