"""A session: what it refuses, whoever performs, and what no look at it changes."""

from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfl
from dpfl.clients.reference import ReferenceClients
from dpfl.errors import BadInput, Caution
from dpfl.federation import Federation
from dpfl.orders import Need, Question
from dpfl.rehearsal import PricedClients
from dpfl.streams import Streams
from dpfl.systems import SYSTEMS
from grids import each


def digits(**options: Any) -> Federation:
    return dpfl.federate("digits", **{"clients": 4, "sizes": 30, "seed": 1} | options)


FEW: dict[str, dict[str, Any]] = {"ali-dpfl": {"rounds": 4}, "adap-dpfl": {"rounds": 4, "epsilon": 20.0}}


@each("name", SYSTEMS)
def test_whoever_looks_on_changes_nothing(name: str) -> None:
    system = SYSTEMS[name](**{"rounds": 6} | FEW.get(name, {}))
    alone, seen = dpfl.train(system, digits(), seed=1), []

    def look(round: int, uploads: Mapping[int, Tensor]) -> None:
        seen.append(torch.stack(list(uploads.values())))

    looked_at = dpfl.train(system, digits(), seed=1, on_uploads=look)
    assert looked_at.loss == pytest.approx(alone.loss, rel=1e-4)
    assert looked_at.certificate.spending == alone.certificate.spending
    assert len(seen) == looked_at.rounds
    other = dpfl.train(system, digits(), seed=2, on_uploads=look)
    assert name.startswith("fed") or other.loss != pytest.approx(alone.loss, rel=1e-4)


@each("name", SYSTEMS)
def test_backends_agree_where_the_same_streams_are_drawn_from(name: str) -> None:
    system = SYSTEMS[name](**{"rounds": 4} | FEW.get(name, {}))
    stacked, reference = (
        dpfl.train(system, digits(), seed=1, backend=b, draws="client") for b in ("stacked", "reference")
    )
    assert stacked.loss == pytest.approx(reference.loss, rel=1e-3)


def test_who_draws_is_recorded_and_repeats_the_run(tmp_path: Any) -> None:
    from dpfl import config, training

    for backend, draws in (("stacked", "cohort"), ("reference", "client")):
        first = dpfl.train(dpfl.UDP(rounds=3), digits(), seed=1, backend=backend, out=tmp_path / backend)
        written = config.parse(config.read(tmp_path / backend / "config.toml"))
        assert written.settings.draws == draws
        assert training.run(written).loss == first.loss


def test_a_cohort_cannot_draw_for_clients_that_train_in_turn() -> None:
    with pytest.raises(BadInput, match="draws must be 'client' with the reference client, was 'cohort'"):
        dpfl.train(dpfl.UDP(rounds=2), digits(), seed=1, backend="reference", draws="cohort")


# Clients that are handed in.


class Counted(ReferenceClients):
    rounds: list[int] = []  # noqa: RUF012 (of all, for the test to look at)

    def perform(self, request: dpfl.Request) -> dpfl.Separate:
        self.rounds.append(request.round)
        assert request.weights.keys() == request.charged.keys()
        return super().perform(request)


def test_clients_can_be_handed_in_as_a_function_or_as_they_are() -> None:
    Counted.rounds.clear()
    made = dpfl.train(dpfl.UDP(rounds=3), digits(), seed=1, clients=Counted)
    assert Counted.rounds == [1, 2, 3]
    assert made.loss == pytest.approx(dpfl.train(dpfl.UDP(rounds=3), digits(), seed=1, backend="reference").loss)
    still = dpfl.train(dpfl.FedAvg(rounds=3), digits(), seed=1, clients=PricedClients(4))
    assert still.engine == "a rehearsal, in which nobody trains"


class SumsOnly(PricedClients):
    """As a secure sum would be: nobody's upload is seen by itself."""

    @property
    def serves(self) -> frozenset[Need]:
        return frozenset({"model", "public loss"})

    def answer(self, questions: Sequence[Question], *_: Any) -> dict[Question, dict[int, float]]:
        assert not questions
        return {}


@each(
    ("system", "options", "words"),
    [
        (dpfl.AdapDPFL(rounds=2), {}, "each client's upload by itself, which adap-dpfl needs"),
        (
            dpfl.UDP(rounds=2),
            {"on_uploads": lambda round, uploads: None},
            "each client's upload by itself, which on_uploads",
        ),
        (
            dpfl.ALIDPFL(rounds=2, calibration="paper"),
            {},
            "the curvature on clients' data after the round, which ali-dpfl needs",
        ),
        (dpfl.UDP(rounds=2, discount=0.9, calibration="paper"), {}, "the loss on clients' data, which udp needs"),
    ],
)
def test_clients_refuse_what_they_cannot_give(system: Any, options: dict[str, Any], words: str, tmp_path: Any) -> None:
    with pytest.raises(BadInput, match=f"^clients must be able to give {words}"):
        dpfl.train(system, digits(), seed=1, clients=SumsOnly(4), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert dpfl.train(dpfl.UDP(rounds=2), digits(), seed=1, clients=SumsOnly(4)).rounds == 2


def test_a_session_is_frozen_and_shown_before_the_first_round() -> None:
    shown: list[dpfl.Session[Any]] = []
    dpfl.train(dpfl.UDP(rounds=2), digits(), seed=1, on_open=shown.append)
    (session,) = shown
    with pytest.raises(FrozenInstanceError):
        session.system = dpfl.UDP()  # type: ignore[misc]
    assert session.clients.engine.name == "stacked, a whole cohort at once"
    assert session.run == session.simulated
    real = replace(session, streams=Streams(None))
    assert real.run == session.ledger.run.name != session.simulated


def test_what_cannot_begin_leaves_nothing_behind(tmp_path: Any) -> None:
    too_little = dpfl.ALIDPFL(rounds=3, noise_multiplier=0.01, epsilon=0.1)
    with pytest.raises(BadInput, match="noise_multiplier must be large enough"):
        dpfl.train(too_little, digits(), seed=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Strangers(ReferenceClients):
    """Upload for a client that nobody asked."""

    def perform(self, request: dpfl.Request) -> dpfl.Separate:
        honest = super().perform(request)
        return dpfl.Separate({**honest.by_client, 99: next(iter(honest.by_client.values()))})


class Greedy(ReferenceClients):
    """Ask for more than was paid."""

    def perform(self, request: dpfl.Request) -> dpfl.Separate:
        request.charged[99] = next(iter(request.charged.values()))  # type: ignore[index]
        return super().perform(request)


class Fewer(ReferenceClients):
    """Lose an upload on the way."""

    def perform(self, request: dpfl.Request) -> dpfl.Separate:
        everyone = super().perform(request)
        return dpfl.Separate({client: upload for client, upload in everyone.by_client.items() if client != 2})


def test_what_nobody_paid_for_is_no_upload() -> None:
    with pytest.raises(BadInput, match=r"clients must upload what was charged .* but \[99\] uploaded in round 1"):
        dpfl.train(dpfl.UDP(rounds=2), digits(), seed=1, clients=Strangers)
    with pytest.raises(TypeError, match="does not support item assignment"):
        dpfl.train(dpfl.UDP(rounds=2), digits(), seed=1, clients=Greedy)


def test_who_was_charged_and_lost_has_still_paid() -> None:
    run = dpfl.train(dpfl.UDP(rounds=2), digits(), seed=1, clients=Fewer)
    whole = dpfl.train(dpfl.UDP(rounds=2), digits(), seed=1, backend="reference")
    assert [line.server_epsilon for line in run.certificate.spending] == [
        line.server_epsilon for line in whole.certificate.spending
    ]
    assert run.certificate.spending[2].released_epsilon == 0.0  # nothing of it is in any model
    assert run.certificate.spending[1].released_epsilon > whole.certificate.spending[1].released_epsilon


def test_a_look_cannot_touch_what_is_added_up() -> None:
    def spoil(round: int, uploads: dict[int, Tensor]) -> None:
        for upload in uploads.values():
            upload.zero_()
        uploads.clear()

    alone = dpfl.train(dpfl.UDP(rounds=3), digits(), seed=1)
    assert dpfl.train(dpfl.UDP(rounds=3), digits(), seed=1, on_uploads=spoil).loss == pytest.approx(
        alone.loss, rel=1e-5
    )


# The engine is told aloud.


def own(*layers: nn.Module) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": nn.Sequential(*layers), "loss": functional.cross_entropy}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.flatten(1)


def test_a_model_of_unknown_layers_says_why_it_is_slow_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.gradients.capabilities._cost", lambda *_: 12.3)
    with pytest.warns(
        Caution, match=r"about 12 times .* because Scaled is not among the layers.*; to be faster, build"
    ) as told:
        run = dpfl.train(dpfl.UDP(rounds=2), digits(), **own(Scaled(), nn.Linear(64, 10)), seed=1)
    assert len(told) == 1
    assert run.engine == (
        "one after the other, records' gradients at once (Scaled is not among the layers that are known)"
    )
    monkeypatch.setattr("dpfl.gradients.capabilities._cost", lambda *_: 2.9)
    dpfl.train(dpfl.UDP(rounds=2), digits(), **own(Scaled(), nn.Linear(64, 10)), seed=1)  # a warning would be an error


@pytest.mark.parametrize("held", [1, 2, 5])
def test_few_public_records_are_enough_for_a_module_of_ones_own(held: int) -> None:
    whole = digits()
    few = replace(whole, validation=whole.validation.take(torch.arange(held)))
    run = dpfl.train(
        dpfl.UDP(rounds=2), few, **own(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)), seed=1
    )
    assert run.engine == "stacked, a whole cohort at once (by layers)"


# What CONTRIBUTING tells users to build is at hand.


def test_public_names_are_there_and_written_down() -> None:
    for name in dpfl.__all__:
        assert getattr(dpfl, name) is not None
    needed = {
        "System", "PrivateSystem", "State", "Feedback", "Problem", "Promise", "Budget", "Order", "RecordClip",
        "ClientClip", "ModelClip", "Gaussian", "Laplace", "Full", "Poisson", "sensitivity", "Certificate", "compare",
        "account", "Session", "Clients", "Request", "Summed", "Separate", "RoundMetrics", "repeat", "train", "plan",
        "federate",
    }  # fmt: skip
    assert needed <= set(dpfl.__all__)
    assert dpfl.account(noise_multiplier=10.0, epsilon=0.5, mechanism="laplace")["steps"]["tight"] == 5


def test_systems_are_compared_from_python() -> None:
    found = dpfl.compare([dpfl.FedSGD(rounds=2), "fedavg"], seeds=1)
    assert [result.label for result in found.results] == ["fedsgd", "fedavg"]
