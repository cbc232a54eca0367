"""The baselines without privacy, against plain gradient descent that knows nothing of clients."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from conformance.asking import session_of
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.errors import BadInput
from dpfl.federation import Records, Schedule
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import Model, build
from dpfl.orders import Full, Order, Poisson, Shuffled
from dpfl.privacy.certificate import certify
from dpfl.privacy.ledger import Ledger
from dpfl.round import play
from dpfl.streams import Streams
from dpfl.systems import FedAvg, FedProx, FedSGD, Feedback, Problem, System
from grids import each

SIZES = (4, 11, 7)  # clients that differ in size, so that weights matter


def federation() -> tuple[Records, ...]:
    source = torch.Generator().manual_seed(3)
    return tuple(
        Records(torch.randn(n, 5, generator=source), torch.randint(0, 3, (n,), generator=source)) for n in SIZES
    )


def model() -> Model:
    return build("softmax", shape=(5,), classes=3, rng=Streams(1).public.generator("model"))


def play_rounds(
    backend: str,
    system: System,
    rounds: int,
    clients: tuple[Records, ...] | None = None,
    *,
    ledger: Ledger | None = None,
) -> Tensor:
    """Play some rounds and return the parameters."""
    clients, learner, streams = clients or federation(), model(), Streams(2)
    performers: ReferenceClients | StackedClients = ReferenceClients(learner, clients, streams)
    if backend == "stacked":
        known = capabilities_of(learner, clients[0])
        assert known.layers is not None
        performers = StackedClients(learner, clients, streams, capabilities=known)
    session = session_of(system, learner, clients, streams, performers, ledger=ledger)
    state = session.begin()
    for _ in range(rounds):
        state, _ = play(session, state)
    return state.model


@pytest.fixture(params=["reference", "stacked"])
def trained(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Return `play_rounds` with either client; the stacked one forms only the sum of the uploads here."""
    return partial(play_rounds, request.param)


def test_a_round_of_fedsgd_is_a_step_of_gradient_descent_on_all_records(trained: Callable[..., Tensor]) -> None:
    clients = federation()
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    linear = model().module
    for rounds in (1, 2, 3):
        linear.zero_grad()
        functional.cross_entropy(linear(x), y).backward()
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter -= 0.7 * parameter.grad  # type: ignore[misc]
        centralised = torch.cat([p.detach().flatten() for p in linear.parameters()])
        torch.testing.assert_close(trained(FedSGD(lr=0.7), rounds), centralised, rtol=0, atol=1e-6)


def test_fedavg_with_one_local_step_is_fedsgd(trained: Callable[..., Tensor]) -> None:
    assert torch.equal(trained(FedAvg(local_steps=1, lr=0.7), 3), trained(FedSGD(lr=0.7), 3))


def test_fedavg_of_one_client_is_gradient_descent_for_rounds_times_steps(trained: Callable[..., Tensor]) -> None:
    alone = federation()[1:2]
    torch.testing.assert_close(
        trained(FedAvg(local_steps=3, lr=0.7), 2, alone), trained(FedSGD(lr=0.7), 6, alone), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("sampling_rate", [None, 0.5])
def test_fedprox_without_a_pull_is_fedavg(sampling_rate: float | None, trained: Callable[..., Tensor]) -> None:
    options = {"local_steps": 3, "lr": 0.7, "sampling_rate": sampling_rate}
    assert torch.equal(trained(FedProx(proximal=0.0, **options), 2), trained(FedAvg(**options), 2))


def test_a_pull_keeps_clients_nearer_to_the_broadcast_model(trained: Callable[..., Tensor]) -> None:
    start = model().vector()
    moved = [
        torch.linalg.vector_norm(trained(FedProx(proximal=proximal, local_steps=5, lr=0.5), 1) - start).item()
        for proximal in (0.0, 0.2, 1.0)
    ]
    assert moved[0] > moved[1] > moved[2] > 0


def test_a_cohort_averages_over_those_who_answered(trained: Callable[..., Tensor]) -> None:
    # With one client a round the model is that client's own; the average over all would be another.
    system = FedSGD(cohort=1, lr=0.7)
    (chosen,) = Schedule(system.cohorts(3), Streams(2).public).cohort(1)
    alone = trained(FedSGD(lr=0.7), 1, federation()[chosen : chosen + 1])
    torch.testing.assert_close(trained(system, 1), alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("system", [FedAvg(), FedProx(), FedSGD(), FedAvg(cohort=2)])
def test_every_upload_is_noted_as_one_without_noise(system: System, trained: Callable[..., Tensor]) -> None:
    ledger = Ledger(None, SIZES, system=system.name)
    trained(system, 3, ledger=ledger)
    replies = ledger.books.replies(ledger.run)
    assert sum(replies.values()) == 3 * (system.cohort or 3)
    assert ledger.books.unprotected(ledger.run) == set(replies)
    assert ledger.books.spent(ledger.run) == {}
    certificate = certify(ledger.books, ledger.run)
    assert (certificate.rounds, certificate.claimed) == (3, None)
    assert certificate.observers["server"].epsilon is None


def state_of(system: System) -> Any:
    return system.begin(Problem(SIZES, 18, Schedule(system.cohorts(3), Streams(0).public)), torch.zeros(18), Feedback())


def test_orders_by_hand() -> None:
    for system, expected in [
        (FedSGD(lr=0.2), Order(steps=1, learning_rate=0.2, batch=Full())),
        (FedAvg(local_steps=4, lr=0.2), Order(steps=4, learning_rate=0.2)),
        (FedAvg(local_steps=4, lr=0.2, sampling_rate=0.3), Order(steps=4, learning_rate=0.2, batch=Poisson(0.3))),
        (FedProx(local_steps=4, lr=0.2, proximal=0.6), Order(steps=4, learning_rate=0.2, proximal=0.6)),
        (FedAvg(local_epochs=4, lr=0.2), Order(steps=4, learning_rate=0.2)),
        (FedAvg(batch_size=7, local_steps=4, lr=0.2), Order(steps=4, learning_rate=0.2, batch=Shuffled(7))),
    ]:
        assert system.orders(state_of(system)) == {0: expected, 1: expected, 2: expected}
        assert system.promise(SIZES) is None


def test_local_epochs_are_as_many_steps_as_a_clients_records_fill() -> None:
    for system in (FedAvg(local_epochs=3, batch_size=5, lr=0.2), FedProx(local_epochs=3, batch_size=5, lr=0.2)):
        orders = system.orders(state_of(system))
        assert [order.steps for order in orders.values()] == [3 * max(1, size // 5) for size in SIZES]
        assert {order.batch for order in orders.values()} == {Shuffled(5)}


def test_a_pass_over_the_shuffled_records_is_seen_by_every_engine_alike(trained: Callable[..., Tensor]) -> None:
    # A batch of all records is a step of gradient descent, in whatever order they come.
    whole = trained(FedAvg(local_epochs=3, batch_size=max(SIZES), lr=0.5), 2)
    torch.testing.assert_close(whole, trained(FedAvg(local_steps=3, lr=0.5), 2), rtol=0, atol=1e-5)


def test_nothing_adapts() -> None:
    system = FedAvg()
    state = replace(state_of(system), round=4)
    assert system.adapt(state, None) is state
    assert state.rounds == system.rounds


@each(
    ("system", "options", "field"),
    [
        *[(system, {"rounds": 0}, "rounds") for system in (FedAvg, FedSGD, FedProx)],
        *[(system, {"lr": 0.0}, "lr") for system in (FedAvg, FedSGD, FedProx)],
        *[(system, {"lr": math.nan}, "lr") for system in (FedAvg, FedSGD, FedProx)],
        *[(system, {"cohort": 0}, "cohort") for system in (FedAvg, FedSGD, FedProx)],
        *[(system, {"local_steps": 0}, "local_steps") for system in (FedAvg, FedProx)],
        *[(system, {"sampling_rate": 0.0}, "sampling_rate") for system in (FedAvg, FedProx)],
        *[(system, {"sampling_rate": 1.5}, "sampling_rate") for system in (FedAvg, FedProx)],
        *[(system, {"local_epochs": 0}, "local_epochs") for system in (FedAvg, FedProx)],
        *[(system, {"batch_size": 0}, "batch_size") for system in (FedAvg, FedProx)],
        *[(system, {"local_epochs": 2, "local_steps": 3}, "local_steps") for system in (FedAvg, FedProx)],
        *[(system, {"local_epochs": 2, "sampling_rate": 0.5}, "local_epochs") for system in (FedAvg, FedProx)],
        *[(system, {"batch_size": 2, "sampling_rate": 0.5}, "batch_size") for system in (FedAvg, FedProx)],
        (FedProx, {"proximal": -0.1}, "proximal"),
        (FedProx, {"proximal": math.inf}, "proximal"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(system: type[System], options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} "):
        system(**options)
