"""A state on disk is the state, for every system and server, and a training goes on from it as if nothing happened."""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import dpfl
from conformance.asking import session_of
from dpfl import checkpoint
from dpfl.clients.stacked import StackedClients
from dpfl.errors import BadInput
from dpfl.federation import Records
from dpfl.gradients.capabilities import capabilities_of
from dpfl.models import build
from dpfl.round import play
from dpfl.session import Session
from dpfl.streams import Streams
from dpfl.systems import SYSTEMS, State, System
from grids import each

ODD: dict[str, System[Any]] = {
    "crd": dpfl.UDP(rounds=9, discount=0.9, epsilon=(3.0, 4.0, 5.0)),
    "crd, paper": dpfl.UDP(rounds=9, discount=0.9, calibration="paper"),
    "ali, paper": dpfl.ALIDPFL(rounds=6, calibration="paper"),
    "momentum": dpfl.DPSGDFedAvg(rounds=6, server_momentum=0.9, averaged=0.5),
    "adam": dpfl.FedAvg(rounds=6, server_optimiser="adam", server_momentum=0.9),
    "yogi": dpfl.NbAFL(rounds=6, server_optimiser="yogi"),
    "counts": dpfl.UDP(rounds=6, clip="median", discount=0.9),
    "lengths": dpfl.UDP(rounds=6, clip="median", clipping="model", calibration="paper"),
}
EVERY = {name: kind(**{"rounds": 6}) for name, kind in SYSTEMS.items()} | ODD


def session(system: System[Any]) -> Session[Any]:
    source = torch.Generator().manual_seed(0)
    sizes = (9, 12, 15, 20)
    *records, public = (
        Records(torch.randn(n, 5, generator=source), torch.randint(0, 3, (n,), generator=source)) for n in sizes
    )
    streams = Streams(1)
    model = build("softmax", shape=(5,), classes=3, rng=streams.public.generator("model"))
    clients = StackedClients(model, tuple(records), streams, capabilities=capabilities_of(model, public))
    return session_of(system, model, records, streams, clients, public=public)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, tuple):
        return type(other) is tuple and len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name))
            for field in fields(one)
            if field.name != "problem"
        )
    return type(one) is type(other) and one == other


@each("name", EVERY)
def test_a_training_goes_on_from_the_file_to_the_same_bits(name: str, tmp_path: Path) -> None:
    training = session(EVERY[name])
    state = first = training.begin()
    for _ in range(2):
        state, _ = play(training, state)
    checkpoint.save(state, tmp_path / "state")
    read = checkpoint.load(tmp_path / "state", first)
    assert same(read, state)
    assert read.problem is first.problem
    if state.round < state.rounds:
        again = session(EVERY[name])  # another process, with the same seed
        again_first = again.begin()
        for _ in range(2):
            again_first, _ = play(again, again_first)
        assert same(play(again, read)[0], play(training, state)[0])


def test_a_state_from_before_clips_could_change_is_read(tmp_path: Path) -> None:
    training = session(dpfl.UDP(rounds=6))
    first = training.begin()
    assert (first.clip, first.first_clip) == (None, None)
    checkpoint.save(first, tmp_path / "state")
    with safe_open(tmp_path / "state", framework="pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["dpfl"])  # noqa: SIM118
    del about["state"]["clip"], about["state"]["first_clip"]
    save_file(tensors, tmp_path / "older", metadata={"dpfl": json.dumps(about)})
    assert same(checkpoint.load(tmp_path / "older", first), first)


@dataclass(frozen=True, kw_only=True)
class Kept(State):
    numbers: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    mixed: tuple[float | int | None, ...] = ()
    word: str = ""
    odd: Any = None


def test_numbers_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    start = replace(session(dpfl.FedAvg(rounds=2)).begin())
    many = tuple(0.1 * i for i in range(200))
    state = Kept(
        problem=start.problem, model=start.model.double() / 3, rounds=2, numbers=(*many, math.pi, 5e-324), word="ε",
        counts=tuple(range(100)), mixed=(1, 1.0, None, math.inf, -math.inf, math.nan), spent=frozenset({3, 1}),
    )  # fmt: skip
    checkpoint.save(state, tmp_path / "state")
    read = checkpoint.load(tmp_path / "state", state)
    assert same(read, state)
    assert [type(number) for number in read.mixed[:2]] == [int, float]


def test_what_is_no_plain_data_is_refused_by_name(tmp_path: Path) -> None:
    start = session(dpfl.FedAvg(rounds=2)).begin()
    state = Kept(problem=start.problem, model=start.model, rounds=2, odd=object())
    with pytest.raises(BadInput, match="its odd is a object"):
        checkpoint.save(state, tmp_path / "state")


def test_other_files_are_refused(tmp_path: Path) -> None:
    state = session(dpfl.FedAvg(rounds=2)).begin()
    path = tmp_path / "state"
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(BadInput, match="state must be a file that dpfl wrote"):
        checkpoint.load(path, state)
    save_file({"model": torch.zeros(1)}, path)
    with pytest.raises(BadInput, match="state must be a file that dpfl wrote"):
        checkpoint.load(path, state)
    checkpoint.save(state, path)
    with pytest.raises(BadInput, match="state must be a Kept, but"):
        checkpoint.load(path, Kept(problem=state.problem, model=state.model, rounds=2))
    save_file({}, path, metadata={"dpfl": '{"version": 2, "kind": "State", "state": {}}'})
    with pytest.raises(BadInput, match=r"state must be of version 1 or older, .* update dpfl"):
        checkpoint.load(path, state)
