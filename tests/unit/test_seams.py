"""Attacks on the seams of a round, by systems and clients that do what they should not."""

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import dpfl
from conformance.asking import session_of
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.uploads import Summed
from dpfl.errors import BadInput
from dpfl.federation import Federation, Records
from dpfl.models import Model
from dpfl.orders import UNPAID, Need
from dpfl.privacy.ledger import Ledger
from dpfl.round import play
from dpfl.streams import Streams
from grids import each


def digits() -> Federation:
    return dpfl.federate("digits", clients=3, sizes=30, seed=1)


def still(streams: Streams) -> tuple[Model, tuple[Records, ...], ReferenceClients]:
    """Return clients that learn nothing: what they upload is noise."""
    model = Model(torch.nn.Linear(50, 1, bias=False), lambda outputs, targets: 0 * outputs.sum(dim=1))
    records = tuple(Records(torch.zeros(4, 50), torch.zeros(4)) for _ in range(3))
    return model, records, ReferenceClients(model, records, streams)


@each("seed", [None, 1])
def test_a_round_that_is_played_again_is_paid_again_and_has_other_noise(seed: int | None) -> None:
    streams = Streams(seed)
    model, records, clients = still(streams)
    session = session_of(dpfl.NbAFL(rounds=5, epsilon=5.0), model, records, streams, clients)
    state = session.begin()
    first, second = (play(session, state)[0].model - state.model for _ in range(2))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.7
    assert session.ledger.charged == 2
    again = session_of(dpfl.NbAFL(rounds=5, epsilon=5.0), model, records, streams, clients)
    same = play(again, again.begin())[0].model - state.model
    assert torch.equal(same, first) == (seed is not None)  # another run's noise is its own, but in a simulation


@dataclass(frozen=True, kw_only=True)
class Rewinding(dpfl.UDP):
    name: ClassVar[str] = "rewinding"

    def adapt(self, state: Any, feedback: dpfl.Feedback) -> Any:
        return replace(state, round=state.round - 1) if state.round == 1 else state


@dataclass(frozen=True, kw_only=True)
class Choosing(dpfl.UDP):
    """Take one client's upload for the sum, as robust aggregation may."""

    name: ClassVar[str] = "choosing"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"uploads"})

    def adapt(self, state: Any, feedback: dpfl.Feedback) -> Any:
        return replace(state, model=state.model - feedback.total + feedback.uploads[0])


@dataclass(frozen=True, kw_only=True)
class Reading(dpfl.UDP):
    """Look at uploads one by one, and change nothing by them that is seen here."""

    name: ClassVar[str] = "reading"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"uploads"})


def test_adapt_moves_neither_the_round_nor_the_model() -> None:
    for system in (Rewinding(rounds=3), Choosing(rounds=3)):
        with pytest.raises(BadInput, match=f"adapt of {system.name} must leave the round and the model as they are"):
            dpfl.train(system, digits(), seed=1)


def test_whoever_follows_uploads_promises_readers_no_more_than_the_server_sees() -> None:
    reading, plain = (dpfl.train(kind(rounds=3), digits(), seed=1).certificate for kind in (Reading, dpfl.UDP))
    assert plain.observers["released"].epsilon < plain.observers["server"].epsilon
    assert reading.observers["released"].epsilon == reading.observers["server"].epsilon
    counting = dpfl.train(dpfl.UDP(rounds=3, clip="median"), digits(), seed=1).certificate  # C follows each count
    assert counting.observers["released"].epsilon == counting.observers["server"].epsilon
    measured = dpfl.UDP(rounds=3, clip="median", calibration="paper", epsilon=1.0)  # and here each length
    certificate = dpfl.train(measured, digits(), seed=1).certificate
    assert certificate.observers["released"].epsilon == certificate.observers["server"].epsilon
    assert certificate.uncounted == (UNPAID["length"],)
    asking = dpfl.UDP(rounds=3, discount=0.9, calibration="paper", epsilon=1.0)  # rounds follow exact losses
    told = dpfl.train(asking, digits(), seed=1).certificate
    assert told.observers["released"].epsilon == told.observers["server"].epsilon


class Lazy(dict[int, dpfl.Order]):
    """Show one order and hand out another."""

    def __getitem__(self, client: int) -> dpfl.Order:
        return dpfl.Order(steps=1, learning_rate=1.0)


def test_what_is_charged_is_what_is_performed() -> None:
    system, sizes = dpfl.UDP(rounds=3), (9, 9, 9)
    ledger = Ledger(system.promise(sizes), sizes)
    honest = dpfl.Order(steps=1, learning_rate=1.0, clip=dpfl.RecordClip(1.0), noise=dpfl.Gaussian(1.0))
    paid = ledger.charge(Lazy({0: honest}))
    assert paid[0].order == honest
    odd: list[Any] = [np.int64(2), -1, 3, True, "0", 1.0]
    assert list(ledger.charge({odd[0]: honest})) == [2]
    assert all(type(client) is int for client in ledger.books.replies(ledger.run))
    for stranger in odd[1:]:
        with pytest.raises(BadInput, match="orders must be for clients 0 to 2"):
            ledger.charge({stranger: honest})
    with pytest.raises(BadInput, match="client 0 must be given an Order"):
        ledger.charge({0: "train"})  # type: ignore[dict-item]


class Uncounted(ReferenceClients):
    """Perform everything but the count."""

    def perform(self, request: dpfl.Request) -> dpfl.Separate:
        return replace(super().perform(request), counts={})


class Unable(ReferenceClients):
    @property
    def serves(self) -> frozenset[Need]:
        return frozenset({"uploads"})


def test_a_count_that_is_needed_must_come() -> None:
    with pytest.raises(BadInput, match="clients must return the noised counts that they were ordered to tell"):
        dpfl.train(dpfl.UDP(rounds=3, clip="median"), digits(), seed=1, clients=Uncounted)
    with pytest.raises(BadInput, match="clients must be able to give how many records were not clipped, which udp"):
        dpfl.train(dpfl.UDP(rounds=3, clip="median"), digits(), seed=1, clients=Unable)
    with pytest.raises(BadInput, match="clients must be able to give how long is what clients clip, which udp needs"):
        dpfl.train(dpfl.UDP(rounds=3, clip="median", calibration="paper"), digits(), seed=1, clients=Unable)


def test_a_clip_that_follows_the_median_finds_it_whoever_trains() -> None:
    """Half of the records are clipped at last: from far above, from far below, and by either engine."""
    found = []
    for clients, first in ((None, 0.05), (None, 50.0), (ReferenceClients, 5.0)):
        clips: list[float] = []

        def noted(session: Any, clips: list[float] = clips) -> None:
            right = session.system.__class__.orders

            def orders(self: Any, state: Any) -> Any:
                clips.append(state.clip)
                return right(self, state)

            object.__setattr__(session.system, "__class__", type("Noted", (dpfl.UDP,), {"orders": orders}))

        system = dpfl.UDP(rounds=60, clip="median", first_clip=first, lr=0.05, epsilon=300.0)
        dpfl.train(system, digits(), seed=1, clients=clients, on_open=noted)
        found.append(clips[-1])
    assert max(found) < 1.5 * min(found)


@dataclass(frozen=True, kw_only=True)
class Curious(dpfl.UDP):
    """Ask for nothing while it is looked at, and for everything afterwards."""

    name: ClassVar[str] = "curious"
    times: ClassVar[list[int]] = []

    @property
    def needs(self) -> frozenset[Need]:
        self.times.append(1)
        return frozenset() if len(self.times) < 12 else frozenset({"loss"})

    def adapt(self, state: Any, feedback: dpfl.Feedback) -> Any:
        assert not feedback.answers
        return state


def test_what_was_checked_is_what_is_served() -> None:
    dpfl.train(Curious(rounds=4), digits(), seed=1)


class InPlace(ReferenceClients):
    def perform(self, request: dpfl.Request) -> dpfl.Separate:
        uploads = super().perform(request)
        request.broadcast.add_(100.0)
        return uploads


class Short(ReferenceClients):
    def perform(self, request: dpfl.Request) -> Any:
        return Summed(request.broadcast[:1], tuple(request.charged))


class Unasked(ReferenceClients):
    def perform(self, request: dpfl.Request) -> Any:
        return Summed(torch.zeros_like(request.broadcast), tuple(request.charged))


def test_clients_cannot_touch_the_model_nor_return_what_was_not_asked_for() -> None:
    plain, touched = (
        dpfl.train(dpfl.UDP(rounds=3), digits(), seed=1, clients=c).loss for c in (ReferenceClients, InPlace)
    )
    assert plain == touched
    with pytest.raises(BadInput, match="uploads must have the shape of the model"):
        dpfl.train(dpfl.UDP(rounds=3), digits(), seed=1, clients=Short)
    with pytest.raises(BadInput, match="one by one where they are asked to"):
        dpfl.train(dpfl.UDP(rounds=3), digits(), seed=1, clients=Unasked, on_uploads=lambda round, uploads: None)


def test_the_certificate_does_not_vouch_for_noise_that_others_draw(tmp_path: Any) -> None:
    def seeded(model: Model, records: tuple[Records, ...], streams: Streams) -> ReferenceClients:
        return ReferenceClients(model, records, Streams(7))

    run = dpfl.train(dpfl.UDP(rounds=2), digits(), clients=seeded, out=tmp_path / "run")
    assert run.certificate.noise_source == "the clients that were handed in"
    assert "not vouched for      the noise, which was drawn by the clients that were handed in" in str(run.certificate)
    assert "handed over in Python" in (tmp_path / "run" / "config.toml").read_text().splitlines()[0]
    assert dpfl.train(dpfl.UDP(rounds=2), digits()).certificate.noise_source == "operating system"


def test_nobody_answers_before_a_shared_ledger_has_agreed(tmp_path: Any) -> None:
    from dpfl.privacy.books import Books, Grant

    asked = []

    class Asked(ReferenceClients):
        def answer(self, questions: Any, before: Tensor, uploads: Any, after: Tensor) -> Any:
            asked.extend(questions)
            return super().answer(questions, before, uploads, after)

    books = Books(tmp_path / "all.sqlite")
    books.grant(Grant(None, dpfl.Budget(5.0, 1e-3), "record", "replace", "plain"))
    books.close()
    system = dpfl.UDP(rounds=3, discount=0.9, calibration="paper")
    with pytest.raises(BadInput, match="calibration must be one that counts everything"):
        dpfl.train(system, digits(), clients=Asked, ledger=tmp_path / "all.sqlite")
    assert asked == []


def test_a_mean_is_of_the_models_that_were_trained() -> None:
    """A round that is passed over adds no model to the mean, and does not keep it from being the result."""
    from dpfl.server.optimiser import ServerOptimiser

    optimiser = ServerOptimiser(averaged=0.5)
    model, memory = torch.zeros(1), None
    for round in (1, 2, 4):  # nobody could pay for the third
        model, memory = optimiser.step(model, torch.ones(1), memory, round=round, rounds=5)
    assert optimiser.sent_out(model, memory, round=5, rounds=5).tolist() == [3.0]  # nor for the last
    nine = ServerOptimiser(averaged=0.9)
    model, memory = torch.zeros(1), None
    for round in range(1, 11):
        model, memory = nine.step(model, torch.ones(1), memory, round=round, rounds=10)
    assert model.tolist() == [6.0]  # of models 2 to 10


def test_a_callback_that_fails_leaves_a_certificate(tmp_path: Any) -> None:
    def fail(session: Any) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        dpfl.train(dpfl.UDP(rounds=2), digits(), seed=1, out=tmp_path / "run", on_open=fail)
    assert "certificate.json" in os.listdir(tmp_path / "run")
