"""Many trainings: noise that is drawn twice, people who are asked again and again, and what they are told of it."""

import itertools
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import dpfl
from dpfl.comparison import contenders
from dpfl.federation import Federation
from dpfl.privacy.gaussian_dp import epsilon_of, mu_of
from dpfl.session import Session
from dpfl.systems import PEDPFL, UDP, DPSGDFedAvg, NbAFL, PrivateSystem
from e2e.command_line import dpfl as command
from grids import each

DROWNED = 1e-3  # an ε at which an upload is all noise


def clients(**options: Any) -> Federation:
    return dpfl.federate("digits", **{"clients": 3, "sizes": 30, "seed": 1} | options)


def first_uploads(system: PrivateSystem, federation: Federation, **settings: Any) -> np.ndarray:
    """Return what the first client uploads in the first rounds, each round in units of its own length."""
    seen: list[Tensor] = []
    dpfl.train(
        system, federation, "softmax", seed=1, on_uploads=lambda _, uploads: seen.append(uploads[0].double()),
        **settings,
    )  # fmt: skip
    rows = torch.stack([upload / upload.norm() for upload in seen[:2]])
    return rows.flatten().numpy()


def alikeness(one: np.ndarray, other: np.ndarray) -> float:
    return abs(float(np.corrcoef(one, other)[0, 1]))


# With 2·650 coordinates, independent noise correlates by more than 0.15 once in ten million times.
INDEPENDENT = 0.15

UDP_LIKE = (
    UDP(rounds=2, epsilon=DROWNED), PEDPFL(rounds=2, epsilon=DROWNED), NbAFL(rounds=2, epsilon=DROWNED, exposures=2),
)  # fmt: skip


@each("draws", ["cohort", "client"])
def test_systems_that_share_a_seed_share_no_noise(draws: str) -> None:
    uploads = [first_uploads(system, clients(), draws=draws) for system in UDP_LIKE]
    assert all(alikeness(*pair) < INDEPENDENT for pair in itertools.combinations(uploads, 2))
    # The twin: noise that is named by the seed alone is the same noise, and one upload is subtracted from another.
    with mock.patch.object(Session, "run", property(lambda _: "simulation")):
        uploads = [first_uploads(system, clients(), draws=draws) for system in UDP_LIKE]
    assert all(alikeness(*pair) > 0.99 for pair in itertools.combinations(uploads, 2))


@each(
    "changed",
    [
        (UDP(rounds=2, epsilon=2 * DROWNED), {}),
        (UDP(rounds=3, epsilon=DROWNED), {}),
        (UDP(rounds=2, epsilon=DROWNED, lr=1.0), {}),
        (UDP(rounds=2, epsilon=DROWNED), {"partition": "classes:2"}),
        (UDP(rounds=2, epsilon=DROWNED), {"sizes": 31}),
    ],
)
def test_so_do_other_options_and_other_data(changed: tuple[PrivateSystem, dict[str, Any]]) -> None:
    system, options = changed
    here, there = first_uploads(UDP_LIKE[0], clients()), first_uploads(system, clients(**options))
    assert alikeness(here, there) < INDEPENDENT


def test_how_it_is_carried_out_changes_no_noise() -> None:
    plain = first_uploads(UDP_LIKE[0], clients(), draws="client")
    for settings in ({"backend": "reference"}, {"evaluate_every": 2}):
        other = first_uploads(UDP_LIKE[0], clients(), **{"draws": "client"} | settings)
        assert other == pytest.approx(plain, abs=1e-6)


def test_the_beginning_of_a_training_is_that_training() -> None:
    """Where noise is given, a budget only says when to stop: what is released twice is the same, and tells once."""
    given = DPSGDFedAvg(rounds=2, noise_multiplier=50.0, epsilon=1.0)
    here, there = (first_uploads(system, clients()) for system in (given, DPSGDFedAvg(
        rounds=9, noise_multiplier=50.0, epsilon=3.0)))  # fmt: skip
    assert (here == there).all()


def test_what_everybody_may_know_of_a_seed_stays() -> None:
    """Who takes part and where the model starts follow from the seed alone, so that systems can be compared."""
    seen: list[Session] = []
    for system in (UDP(rounds=2, cohort=2), NbAFL(rounds=2, exposures=2, cohort=2)):
        dpfl.train(system, clients(), "softmax", seed=1, on_open=seen.append)
    first, second = seen
    assert first.run != second.run
    assert [first.problem.schedule.cohort(at) for at in (1, 2)] == [second.problem.schedule.cohort(at) for at in (1, 2)]
    assert first.streams.public == second.streams.public


def many(epsilon: float, trainings: int, delta: float = 1e-3) -> float:
    """Return what so many trainings cost together, each exactly ε under Gaussian noise on all records."""
    return float(epsilon_of(math.sqrt(trainings) * float(mu_of(epsilon, delta)), delta))


def test_a_table_says_what_all_of_its_trainings_would_cost() -> None:
    """Three systems with three seeds are nine trainings on the same people, at ε = 3 each."""
    found = contenders(["udp", "fedsgd-dpc", "nbafl"], {"clients": 3, "sizes": 30, "rounds": 3})
    whole = dpfl.compare(found, seeds=3, epsilon=3.0)
    plain = whole.to_dict()
    assert plain["together"] is None
    assert plain["if_real"]["trainings"] == 9
    assert plain["if_real"]["epsilon"] == pytest.approx(many(3.0, 9), rel=1e-3)
    assert "the 9 trainings would cost each client's people ε ≤ 12.45 (replace) at δ = 0.001" in str(whole)
    # The twin: the only ε that was printed.
    assert max(row["true_epsilon"] for row in plain["systems"]) <= 3.0 < many(3.0, 9) / 4


def test_a_search_pays_for_every_candidate(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('system = "udp"\nsearch.rounds = [1, 2, 3]\n')
    found = contenders([str(tmp_path / "mine.toml")], {"clients": 3, "sizes": 30})
    plain = dpfl.compare(found, seeds=2, epsilon=2.0).to_dict()
    assert len(plain["systems"][0]["runs"]) == 2  # what is shown: the winner's
    assert plain["if_real"]["trainings"] == 6
    assert plain["if_real"]["epsilon"] == pytest.approx(many(2.0, 6), rel=1e-3)


def test_a_check_trains_on_people_and_says_what_that_would_cost(tmp_path: Path) -> None:
    """It printed "left uncounted  nothing", and then trained on everybody's records at each point of a grid."""
    known = "".join(f"{name} = 1.0\n" for name in ("smoothness", "initial_gap", "gradient_bound", "lipschitz"))
    (tmp_path / "known.toml").write_text(known + "strong_convexity = 0.5\npolyak_lojasiewicz = 0.4\ndivergence = 0.5\n")
    told = command(
        "plan", "udp", "--clients", "3", "--set", "sizes=30", "--epsilon", "2", "--lr", "0.5", "--seed", "1",
        "--method", "bound", "--constants", "known.toml", "--max-rounds", "2", "--check", "--seeds", "2",
        "--json", cwd=tmp_path,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    plain = json.loads(told.stdout)
    trainings = 2 * len(plain["check"]["grid"])
    assert trainings == 4
    assert plain["together"] is None
    assert plain["check"]["if_real"]["trainings"] == trainings
    assert plain["check"]["if_real"]["epsilon"] == pytest.approx(many(2.0, trainings), rel=1e-3)
    # The twin: the predicted certificate, which knows of one of them, and of nothing uncounted.
    assert plain["certificate"]["observers"]["server"]["epsilon"] == pytest.approx(2.0)
    assert plain["certificate"]["uncounted"] == []
