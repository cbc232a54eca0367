"""What each way to be fast is worth: the same work with it and without."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dpfl.bench.timing import medians
from dpfl.bench.workloads import WORKLOADS, DrawnWorkload, draw
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Request
from dpfl.federation import Records
from dpfl.gradients.capabilities import Capabilities, capabilities_of
from dpfl.gradients.clipping import sum_of_clipped
from dpfl.gradients.layered import Layered
from dpfl.privacy.ledger import Ledger
from dpfl.server.aggregation import aggregate
from dpfl.streams import Streams

Pair = tuple[Callable[[], object], Callable[[], object]]


def tricks(*, device: str = "cpu", seconds: float = 1.0) -> dict[str, dict[str, float]]:
    """Return for each trick the milliseconds with it and without it."""
    where = torch.device(device)
    found: dict[str, dict[str, float]] = {}
    for name, prepare in _TRICKS.items():
        fast, slow = prepare(where)
        taken = medians({"with": fast, "without": slow}, seconds=seconds, device=where)
        found[name] = {"with_ms": taken["with"], "without_ms": taken["without"]}
    return found


def _norms_from_layers(device: torch.device) -> Pair:
    problem, batch, layers = _batch("W3", device, 90)
    model, parameters = problem.model, problem.broadcast
    norms = torch.ones(len(batch), device=device)

    def formed() -> object:
        return sum_of_clipped(model.record_gradients(parameters, batch.x, batch.y, vectorised=True), 1.0, 2)

    return lambda: layers.sums(parameters, batch.x, batch.y, None, (norms, 2), 1), formed


def _channels_last(device: torch.device) -> Pair:
    problem, batch, layers = _batch("W2", device, 200)
    parameters = problem.broadcast
    return (
        lambda: layers.sums(parameters, batch.x, batch.y, None, None, 1),
        lambda: problem.model.gradient(parameters, batch.x, batch.y),
    )


def _one_batch_one_draw(device: torch.device) -> Pair:
    problem = draw(WORKLOADS["W1"], device)
    clients = _clients(problem, capabilities_of(problem.model, _few(problem)))
    return _play(problem, clients, separate=False), _play(problem, clients, separate=True)


def _small_clients_stacked(device: torch.device) -> Pair:
    problem = draw(WORKLOADS["W4"], device)
    known = replace(capabilities_of(problem.model, _few(problem)), least_squares=False)
    together, alone = _clients(problem, known), _clients(problem, known, room=1)
    return _play(problem, together, separate=False), _play(problem, alone, separate=False)


def _moments(device: torch.device) -> Pair:
    problem = draw(WORKLOADS["W4"], device)
    known = capabilities_of(problem.model, _few(problem))
    return (
        _play(problem, _clients(problem, known), separate=False),
        _play(problem, _clients(problem, replace(known, least_squares=False)), separate=False),
    )


_TRICKS: dict[str, Callable[[torch.device], Pair]] = {
    "norms from layers, not from formed gradients (a batch of W3)": _norms_from_layers,
    "channels last, pooling first (a client's step of W2)": _channels_last,
    "one batch and one draw for all, not uploads one by one (W1)": _one_batch_one_draw,
    "small clients stacked, not one by one (W4 without moments)": _small_clients_stacked,
    "two moments of the data instead of the records (W4)": _moments,
}


def _batch(name: str, device: torch.device, records: int) -> tuple[DrawnWorkload, Records, Layered]:
    problem = draw(WORKLOADS[name], device)
    batch = problem.records[0].take(torch.arange(records, device=device))
    layers = capabilities_of(problem.model, batch).layers
    assert layers is not None
    return problem, batch, layers


def _few(problem: DrawnWorkload) -> Records:
    return problem.records[0].take(torch.arange(8, device=problem.device))


def _clients(problem: DrawnWorkload, known: Capabilities, room: int | None = None) -> StackedClients:
    return StackedClients(problem.model, problem.records, Streams(1), capabilities=known, room=room)


def _play(problem: DrawnWorkload, clients: StackedClients, *, separate: bool) -> Callable[[], object]:
    sizes: Sequence[int] = [len(one) for one in problem.records]
    paid = Ledger(None, sizes, system="bench").charge(dict.fromkeys(problem.cohort, problem.workload.order))
    weights = dict.fromkeys(problem.cohort, 1 / len(problem.cohort))

    request = Request("bench", 1, 1, paid, (), problem.broadcast, weights, separate)
    return lambda: aggregate(problem.broadcast, clients.perform(request), weights)
