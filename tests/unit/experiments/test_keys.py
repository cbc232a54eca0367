"""A key holds what a result depends on and nothing else, and cells that release 0.1 trained are still found."""

import json
import shutil
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import dpfl
from dpfl.config import Config, Settings, parse
from dpfl.errors import BadInput
from dpfl.experiments import cells, keys
from dpfl.experiments.cells import Ask, Cell, perform
from dpfl.experiments.store import Store
from dpfl.systems import SYSTEMS, UDP, DPSGDFedAvg, FedAvg

KEPT = Path(__file__).parents[2] / "data" / "formats" / "0.1"

# The cells of which release 0.1 left a record, in the order of its records.
TABLES: list[dict[str, Any]] = [
    {"system": "fedavg", "local_steps": 2, "sampling_rate": 0.5},
    {"system": "fedsgd", "lr": 0.25, "model": "mlp", "precision": "tf32"},
    {"system": "fedprox", "proximal": 0.5, "sizes": [20, 40], "share": 0.5},
    {"system": "dp-fedavg", "cohort": 2, "lr": 0.1, "norm": 1, "validation_share": 0.2},
    {"system": "udp", "epsilon": [8.0, 4.0, 2.0, 1.0], "discount": 0.5, "calibration": "paper"},
    {"system": "nbafl", "clipping": "record", "exposures": 2, "cohort": 2, "partition": "dirichlet:1.0"},
    {"system": "ali-dpfl", "heterogeneity": 0.0, "delta": 1e-5, "test_share": 0.3},
    {"system": "fedsgd-dpc", "mechanism": "laplace", "lr": 0.1, "min_records": 5},
    {"system": "fedsgd-dpc", "strong_convexity": 0.5, "smoothness": 2.0, "sampling_rate": 0.5},
    {"system": "dpsgd-fedavg", "server_momentum": 0.5, "averaged": 0.5, "noise_multiplier": 6.0},
    {"system": "dpsgd-fedavg", "device": "cpu", "backend": "reference"},
    {"system": "pe-dpfl", "proximal": 0.2, "clip": 0.5},
    {"system": "adap-dpfl", "clip_factor": 2.0, "noise_decay": 0.9, "patience": 2},
    {"system": "lei", "noise_fall": 0.25, "cohort": 2, "scheduling": "round-robin"},
]
ASK = Ask("rounds", "paper", (("lipschitz", 1.0),), 50)


def old_cells() -> list[Cell]:
    first = [Cell(config=parse({"rounds": 2, "clients": 4} | table), repetitions=2, seed=1) for table in TABLES]
    curve, planned = (
        replace(first[4], fresh_data=True, evaluate_every=1, seed=3),
        replace(first[7], repetitions=1, ask=ASK),
    )
    return [*first, curve, planned]


def cell(system: Any, **settings: Any) -> Cell:
    return Cell(config=Config(system, Settings(**settings)), repetitions=2, seed=1)


@pytest.fixture
def another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dpfl, cells, keys):
        monkeypatch.setattr(module, "__version__", "9.9.9", raising=False)


@pytest.mark.usefixtures("another_release")
def test_what_release_0_1_trained_is_found() -> None:
    store, trained = Store(KEPT), old_cells()
    assert {one.config.system.name for one in trained} == set(SYSTEMS) & set(keys._OPTIONS_OF_0_1)
    lines = (KEPT / "cells" / "kept.jsonl").read_text(encoding="utf-8").splitlines()
    assert [store[one] for one in trained] == [json.loads(line) for line in lines]
    for one in trained:
        assert replace(one, seed=one.seed + 1) not in store


def test_what_is_trained_today_stands_beside_what_release_0_1_trained(tmp_path: Path) -> None:
    shutil.copytree(KEPT / "cells", tmp_path / "cells")
    new = cell(UDP(rounds=1), clients=4)
    store = Store(tmp_path)
    assert new not in store
    (record,) = perform([new], "cpu")
    store.add("new", record)
    assert (record["version"], record["key"]) == (2, new.key)
    again = Store(tmp_path)
    assert again[new] == record
    assert all(one in again for one in old_cells())


def test_records_of_a_newer_version_are_refused_in_a_sentence(tmp_path: Path) -> None:
    Store(tmp_path).add("table", {"version": 3, "key": "0123"})
    with pytest.raises(BadInput, match=r"cells must be of version 2 or older, but .*table\.jsonl' is of version 3.*"):
        Store(tmp_path)


@pytest.mark.usefixtures("another_release")
def test_a_key_does_not_depend_on_the_release_or_on_where_it_was_trained() -> None:
    here = "d078a2a4ab7c198f"  # as the first release with this version of the key computed it
    assert cell(UDP()).key == cell(UDP(), device="cuda").key == here
    # Who draws decides what comes out, and the reference client draws for itself.
    assert cell(UDP(), draws="cohort").key == here
    assert cell(UDP(), backend="reference").key == cell(UDP(), draws="client").key != here


@pytest.mark.parametrize(
    "change",
    [
        {"repetitions": 3}, {"seed": 2}, {"fresh_data": True}, {"evaluate_every": 1}, {"ask": ASK},
        {"config": Config(UDP(epsilon=4.0), Settings())}, {"config": Config(UDP(discount=0.5), Settings())},
        {"config": Config(UDP(), Settings(clients=5))}, {"config": Config(UDP(), Settings(precision="tf32"))},
    ],
)  # fmt: skip
def test_a_key_holds_everything_that_a_result_depends_on(change: dict[str, Any]) -> None:
    one = cell(UDP())
    other = replace(one, **change)
    assert other.key != one.key
    assert other.key_of_0_1 != one.key_of_0_1


def test_each_ask_has_its_own_key() -> None:
    one = replace(cell(UDP()), ask=ASK)
    others = [{"number": "cohort"}, {"form": "general"}, {"constants": ()}, {"max_rounds": 51}]
    asked = [one, *(replace(one, ask=replace(ASK, **change)) for change in others)]
    assert len({other.key for other in asked}) == len({other.key_of_0_1 for other in asked}) == 5


def made(system: Any, *, backwards: bool = False, **more: Any) -> Any:
    """Return the same system with its options declared anew, in the other order or as `more` says."""
    declared = [
        (one.name, Any, field(default=getattr(system, one.name), **{"metadata": one.metadata} | more))
        for one in fields(system)
    ]
    return make_dataclass("Made", declared[::-1] if backwards else declared, namespace={"name": system.name})()


def test_the_order_of_fields_decides_nothing() -> None:
    old = FedAvg()
    for backwards in (False, True):
        other = cell(made(old, backwards=backwards))
        assert other.key == cell(old).key
        assert other.key_of_0_1 == cell(old).key_of_0_1 is not None


@dataclass(frozen=True, kw_only=True)
class Newer(UDP):
    """The same system in a later release, which has learned something."""

    name: ClassVar[str] = "udp"
    warmth: float = field(default=0.0, metadata={"added": "0.2"})
    grain: int | None = None


@dataclass(frozen=True, kw_only=True)
class NewerSettings(Settings):
    haste: str = field(default="none", metadata={"added": "0.2"})


@dataclass(frozen=True, kw_only=True)
class Careless(UDP):
    """An option that does not say when it was added may change what its default means."""

    name: ClassVar[str] = "udp"
    warmth: float = 0.0


def test_an_option_added_later_is_left_out_while_it_has_its_default() -> None:
    before = cell(UDP())
    after = replace(before, config=Config(Newer(), NewerSettings()))
    assert after.key == before.key
    assert after.key_of_0_1 == before.key_of_0_1 is not None
    for config in (
        Config(Newer(warmth=1.0), NewerSettings()),
        Config(Newer(grain=1), NewerSettings()),
        Config(Newer(), NewerSettings(haste="much")),
        Config(Careless(), Settings()),
    ):
        used = replace(before, config=config)
        assert used.key != before.key
        assert used.key_of_0_1 is None  # release 0.1 cannot have trained it


def test_release_0_1_named_every_option_that_it_had() -> None:
    """Also those that are declared anew, for all systems, as added later: they stand at their defaults in its keys."""
    old = DPSGDFedAvg()
    moved = made(old, metadata={"added": "0.2"})
    assert cell(moved).key_of_0_1 == cell(old).key_of_0_1 is not None


def test_a_system_that_release_0_1_did_not_have_has_no_key_there() -> None:
    newcomer = make_dataclass("Newcomer", [("rounds", int, 3)], namespace={"name": "newcomer"})()
    assert cell(newcomer).key_of_0_1 is None
