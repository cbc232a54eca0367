"""Checks of a plan against a grid around it, and recommendations at the same true ε for all."""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from dpfl.config import Settings, parse
from dpfl.errors import BadInput, BudgetRefused
from dpfl.federation import Federation
from dpfl.planning import PLANNERS, Constants, Plan, Task, by_bound, check, make, pilot, recommend
from dpfl.planning.pilot import Stage
from dpfl.planning.recommend import RankedSystem, Recommendation
from dpfl.planning.regret import Check, GridPoint
from dpfl.planning.trying import Seen
from dpfl.server.evaluation import Score
from dpfl.systems import SYSTEMS, PrivateSystem
from dpfl.systems.registry import GROUP
from dpfl.training import federation_of
from grids import each

# The modules: their package calls functions by these names.
REGRET, RECOMMEND = (importlib.import_module(f"dpfl.planning.{name}") for name in ("regret", "recommend"))
N = 5
CONSTANTS = Constants(
    strong_convexity=0.5, smoothness=2.0, polyak_lojasiewicz=0.4, gradient_bound=1.3, lipschitz=1.7, record_spread=0.8,
    divergence=0.6, dissimilarity=1.2, heterogeneity=0.3, initial_distance=5.0, initial_gap=3.0,
)  # fmt: skip


@cache
def shared(settings: Settings) -> Federation:
    return federation_of(settings)


def task(
    system: str, *, fixed: tuple[str, ...] = (), most_rounds: int = 8, total_steps: int | None = None, **given: Any
) -> Task:
    config = parse({"system": system, "clients": N, "seed": 1, "delta": 1e-4, "share": 0.3, **given})
    return Task(config, shared(config.settings), frozenset(fixed), most_rounds, total_steps)


def planned(of: Task, **options: Any) -> Plan:
    return make(of, constants=CONSTANTS, **({"method": "bound"} | options))


@dataclass
class Ended:
    loss: float | None


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PrivateSystem, int]]:
    """Let runs end at once, with a loss that grows with the distance from 6 rounds, and a little with the seed."""
    seen: list[tuple[PrivateSystem, int]] = []

    def train(system: PrivateSystem, federation: Federation, model: Any, *, seed: int, **_: Any) -> Ended:
        seen.append((system, seed))
        return Ended(1.0 + abs(system.rounds - 6) + 0.1 * seed)

    monkeypatch.setattr(REGRET, "train", train)
    return seen


def measured(monkeypatch: pytest.MonkeyPatch, loss: Callable[[PrivateSystem, int], float]) -> None:
    """Let pilots measure a known loss."""

    def trials(stage: Stage, systems: Sequence[PrivateSystem], seed: int) -> list[Seen]:
        return [tuple(Score(loss(system, seed), None) for _ in stage.tasks) for system in systems]

    monkeypatch.setattr(pilot, "trials", trials)


# Checks.


def test_the_grid_is_around_the_plan_and_holds_it(runs: list[tuple[PrivateSystem, int]]) -> None:
    of = task("udp", lr=0.5, most_rounds=100)
    plan = replace(planned(of), system=replace(of.system, rounds=8))
    told: list[str] = []
    found = check(of, plan, seeds=2, on_run=told.append)
    assert [cell.numbers for cell in found.cells] == [{"rounds": rounds} for rounds in (2, 4, 8, 16, 32)]
    assert found.planned.numbers == {"rounds": 8}
    assert told == [f"rounds = {rounds}" for rounds in (2, 4, 8, 16, 32)]
    assert [(system.rounds, seed) for system, seed in runs] == [(r, s) for r in (2, 4, 8, 16, 32) for s in (1, 2)]
    assert {replace(system, rounds=1) for system, _ in runs} == {replace(of.system, rounds=1)}


def test_a_grid_of_two_numbers_and_its_limits(runs: list[tuple[PrivateSystem, int]]) -> None:
    of = task("fedsgd-dpc", lr=0.1, most_rounds=8)
    plan = planned(of)
    assert (plan.best.rounds, plan.best.cohort) == (8, N)
    found = check(of, plan, seeds=1)
    assert [cell.numbers for cell in found.cells] == [
        {"rounds": rounds, "cohort": cohort} for rounds in (2, 4, 8) for cohort in (3, 5)
    ]
    assert found.planned.numbers == {"rounds": 8, "cohort": 5}
    assert {system.cohort for system, _ in runs} == {3, None}
    whole = task("dp-fedavg", lr=0.1, total_steps=24, most_rounds=24)
    shares = check(whole, planned(whole), seeds=1)
    assert [set(cell.numbers) for cell in shares.cells] == [{"local_steps"}] * len(shares.cells)
    assert all(system.rounds == max(1, round(24 / system.local_steps)) for system, _ in runs[-len(shares.cells) :])  # type: ignore[attr-defined]


def test_what_is_checked_is_the_plan_with_all_that_it_chose(
    runs: list[tuple[PrivateSystem, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pilot that was asked to try learning rates plans one, and the check has to run with it.
    measured(monkeypatch, lambda system, seed: abs(system.lr - 0.25) + abs(system.rounds - 4))
    of = task("udp", lr=0.5, fixed=("clip", "averaged"))
    plan = planned(of, method="pilot", search={"lr": [0.25, 0.5]}, time_limit=20.0)
    assert plan.system.lr == 0.25
    check(of, plan, seeds=1)
    assert plan.system in [system for system, _ in runs]
    assert {system.lr for system, _ in runs} == {0.25}


def test_regret_is_how_much_worse_the_plan_is(runs: list[tuple[PrivateSystem, int]]) -> None:
    of = task("udp", lr=0.5, most_rounds=100)
    found = check(of, replace(planned(of), system=replace(of.system, rounds=3)), seeds=3)
    # Rounds 1, 2, 3, 6, 12; 6 is best with 1.2 on average, 3 has 4.2.
    assert found.best.numbers == {"rounds": 6}
    assert found.regret == pytest.approx(4.2 / 1.2 - 1)
    plain = found.to_dict()
    assert plain["planned"] == {"rounds": 3, "loss": pytest.approx(4.2), "standard_error": pytest.approx(0.1 / 3**0.5)}
    assert plain["best"]["rounds"] == 6
    assert plain["regret"] == found.regret
    assert (len(plain["grid"]), plain["seeds"]) == (5, 3)
    exact = check(of, replace(planned(of), system=replace(of.system, rounds=6)), seeds=1)
    assert exact.regret == 0.0
    assert exact.to_dict()["planned"]["standard_error"] is None


def test_cells_that_diverge_or_cannot_be_paid_for_are_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(system: PrivateSystem, *_: Any, seed: int, **__: Any) -> Ended:
        if system.rounds == 4:
            raise BudgetRefused("no more")
        return Ended(None if system.rounds == 2 and seed == 2 else 3.0 - 0.1 * system.rounds)

    monkeypatch.setattr(REGRET, "train", train)
    of = task("udp", lr=0.5, most_rounds=32)
    found = check(of, replace(planned(of), system=replace(of.system, rounds=8)), seeds=2)
    losses = {cell.numbers["rounds"]: cell.mean for cell in found.cells}
    assert losses == {2: math.inf, 4: math.inf, 8: pytest.approx(2.2), 16: pytest.approx(1.4), 32: pytest.approx(-0.2)}
    assert [cell["loss"] is None for cell in found.to_dict()["grid"]] == [True, True, False, False, False]
    assert found.to_dict()["grid"][0]["standard_error"] is None


def test_a_plan_that_diverged_has_no_finite_regret() -> None:
    lost, won = GridPoint({"rounds": 1}, (math.inf,)), GridPoint({"rounds": 2}, (1.0,))
    assert Check(lost, (lost, won), 1, "replace", {}).to_dict()["regret"] is None
    with pytest.raises(BadInput, match=r"^lr must be low enough for one run of the grid to end, but all diverged"):
        _ = Check(lost, (lost,), 1, "replace", {}).regret


def test_a_check_needs_something_to_vary() -> None:
    of = task("udp", lr=0.5, rounds=3, fixed=("rounds",))
    with pytest.raises(BadInput, match=r"^at least one of rounds must be left to the plan for a check, all were given"):
        check(of, planned(of))
    with pytest.raises(BadInput, match=r"^seeds must be a whole number of at least 1"):
        check(task("udp", lr=0.5), planned(task("udp", lr=0.5)), seeds=0)


def test_a_check_trains_for_real() -> None:
    of = task("udp", lr=0.5, epsilon=200.0, most_rounds=2)
    found = check(of, planned(of), seeds=2)
    assert [cell.numbers["rounds"] for cell in found.cells] == [1, 2]
    assert found.planned is found.best is found.cells[1]
    assert 1.0 < found.best.mean < found.cells[0].mean < 2.4


# Recommendations.

GIVEN = {"clients": N, "seed": 1, "share": 0.3, "delta": 1e-4, "lr": 0.1}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the constants be known, so that bounds are planned at once."""
    monkeypatch.setattr(by_bound, "estimate", lambda *_, **__: CONSTANTS)
    monkeypatch.setattr(RECOMMEND, "federation_of", shared)


def ranking(**options: Any) -> Recommendation:
    pull = {"proximal": 20.0} if "nbafl" in (options.get("systems") or PLANNERS) else {}
    given = GIVEN | pull | options.pop("given", {})
    return recommend(given, **({"method": "bound", "most_rounds": 8} | options))


def test_systems_of_other_packages_are_ranked_by_pilots(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {
        name: EntryPoint(name, f"{module}:{kind}", GROUP)
        for name, module, kind in [("udp", "dpfl.systems.udp", "UDP"), ("fedsgd", "dpfl.systems.fedsgd", "FedSGD")]
    }
    monkeypatch.setitem(vars(SYSTEMS), "others", theirs)
    assert RECOMMEND._candidates("bound") == tuple(PLANNERS)
    assert RECOMMEND._candidates("pilot") == (*PLANNERS, "udp")  # the other spends no budget


QUEUED = ("dp-fedavg", "udp", "fedsgd-dpc")  # those that take a cohort in turn, or at random
PROBLEMS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("nobody", (), {"epsilon": 3.0}),
    ("nobody", (), {"epsilon": 0.5, "partition": "dirichlet:1"}),
    ("nobody", QUEUED, {"epsilon": 3.0, "cohort": 2, "partition": "dirichlet:1"}),
    ("nobody", (*QUEUED, "ali-dpfl"), {"epsilon": 2.0, "calibration": "paper"}),
    ("nobody", ("dp-fedavg", "fedsgd-dpc"), {"epsilon": 1.0, "mechanism": "laplace", "delta": 0.0}),
    ("server", (*QUEUED, "nbafl"), {"epsilon": 3.0}),
    ("server", QUEUED, {"epsilon": 0.5, "cohort": 3, "partition": "dirichlet:1"}),
    ("server", ("udp", "fedsgd-dpc"), {"epsilon": 2.0, "calibration": "paper"}),
]


@each(("trusted", "systems", "given"), PROBLEMS, ids=lambda value: str(value))
@pytest.mark.usefixtures("known")
def test_all_really_spend_the_same(trusted: str, systems: tuple[str, ...], given: dict[str, Any]) -> None:
    target = given["epsilon"]
    found = ranking(given=given, systems=systems, trusted=trusted)
    against = "server" if trusted == "nobody" else "released"
    assert (found.epsilon, found.against) == (target, against)
    plans = {one.system: one.plan for one in found.ranked}
    rows = {one.system: one.true_epsilon for one in found.ranked}
    assert len(plans) == len(systems or PLANNERS)
    assert any(plans.values())
    for name, plan in plans.items():
        if plan is None:
            continue
        spent = rows[name]
        least = 1 - 2e-3 if name != "ali-dpfl" else 0.0  # whole steps, and eight rounds of one may be all there are
        assert least * target < spent <= target * (1 + 1e-6), name
        alike = (plan.certificate.unit, plan.certificate.neighbours) == ("record", "replace")
        own = plan.certificate.observers[against].epsilon
        assert own == pytest.approx(spent, rel=1e-4) if alike else own <= spent * (1 + 1e-4)


@pytest.mark.usefixtures("known")
def test_where_nobody_is_trusted_all_of_nbafls_uploads_count() -> None:
    found = ranking(given={"epsilon": 3.0}, systems=("nbafl",))
    (one,) = found.ranked
    assert one.plan.system.exposures == one.plan.system.rounds > 1  # type: ignore[attr-defined]
    assert "All its uploads count as overheard, because the server is not trusted." in one.why
    assert one.plan.certificate.observers["server"].epsilon == pytest.approx(3.0, rel=1e-5)
    (trusting,) = ranking(given={"epsilon": 3.0}, systems=("nbafl",), trusted="server").ranked
    assert trusting.plan.system.exposures == 1  # type: ignore[attr-defined]
    assert trusting.loss < one.loss  # the noise that hides uploads from the server is saved
    assert not [line for line in trusting.why if "overheard" in line]


@pytest.mark.usefixtures("known")
def test_the_best_comes_first_and_what_cannot_be_planned_last() -> None:
    found = ranking(given={"epsilon": 3.0, "proximal": 0.0}, systems=("nbafl", "udp", "fedsgd-dpc", "pe-dpfl", "lei"))
    names, losses = [one.system for one in found.ranked], [one.loss for one in found.ranked]
    assert losses == sorted(losses)
    assert set(names[-3:]) == {"nbafl", "pe-dpfl", "lei"}
    reasons = {one.system: one.why[0] for one in found.ranked if one.plan is None}
    assert reasons["nbafl"].startswith("It cannot be planned for this problem: proximal (μ) must be above 0")
    assert reasons["pe-dpfl"].startswith("It cannot be planned for this problem: system must be one whose paper gives")
    assert "use --method pilot" in reasons["lei"]
    best, second = found.ranked[:2]
    assert not [line for line in best.why if "above that of" in line]
    assert second.why[0] == f"Its loss is {second.loss / best.loss - 1:.0%} above that of {best.system}."
    plain = found.to_dict()
    assert plain["recommended"] == best.system
    assert (plain["rounds"], plain["bound"]) == (best.plan.best.rounds, best.plan.best.bound)
    assert plain["ranking"][-1]["plan"] is plain["ranking"][-1]["loss"] is None
    assert [one["system"] for one in plain["ranking"]] == names
    lines = str(found).splitlines()
    assert lines[0] == (
        "ranked by their bound on the loss, each at a true ε of 3 against the server, for one record, replaced by any"
        " other"
    )
    unranked = lines.index("not ranked")
    assert {line.split(":")[0] for line in lines[unranked + 1 : -2]} == {"- nbafl", "- pe-dpfl", "- lei"}
    assert lines[-1].startswith("all of this together: ε = 0, since of clients nothing was looked at")
    assert plain["neighbours"] == plain["ranking"][0]["neighbours"] == "replace"
    assert plain["together"] == plain["ranking"][0]["together"] == 0.0
    assert plain["ranking"][0]["true_epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert plain["ranking"][-1]["true_epsilon"] is plain["ranking"][-1]["neighbours"] is None
    assert lines[2].startswith(f"1. {best.system}")


@pytest.mark.usefixtures("known")
def test_bounds_are_compared_in_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_bound, "estimate", lambda *_, **__: replace(CONSTANTS, smoothness=1.5))
    found = {one.system: one for one in ranking(given={"epsilon": 3.0}).ranked}
    assert set(found) == set(PLANNERS)
    for one in found.values():
        assert one.loss == one.plan.in_loss
    distance = found["fedsgd-dpc"].plan
    assert found["fedsgd-dpc"].loss == pytest.approx(distance.best.bound * 1.5 / 2)


@pytest.mark.usefixtures("known")
def test_a_given_number_is_kept_and_rounds_are_a_limit() -> None:
    (one,) = ranking(given={"epsilon": 3.0, "cohort": 2, "rounds": 4}, systems=("fedsgd-dpc",), most_rounds=6).ranked
    assert (one.plan.best.cohort, one.plan.best.rounds <= 6) == (2, True)
    (ali,) = ranking(given={"epsilon": 3.0}, systems=("ali-dpfl",), most_rounds=6).ranked
    assert ali.plan.system.rounds == 6
    assert "2 clients" in one.why[0]


@pytest.mark.usefixtures("known")
def test_what_promises_differently_is_said() -> None:
    found = {one.system: " ".join(one.why) for one in ranking(given={"epsilon": 3.0}).ranked}
    assert "It protects whole clients" in found["dp-fedavg"]
    assert "Its own promise is then ε = 1.3" in found["fedsgd-dpc"]
    assert ", for one record, added or removed." in found["fedsgd-dpc"]
    assert "whole clients" not in found["udp"] + found["nbafl"] + found["fedsgd-dpc"]
    assert "added or removed" not in found["udp"]


@each(
    ("given", "options", "sentence"),
    [
        (
            {"colour": 1},
            {},
            r"^colour must be a setting or an option of a system that is ranked, which none knows",
        ),
        ({"discount": 0.5}, {"systems": ("nbafl",)}, r"^discount must be a setting or an option of a system"),
        ({"epsilon": [1.0] * N}, {}, r"^epsilon must be one number for all systems and clients to rank them by"),
        ({"epsilon": -1.0}, {}, r"^epsilon must be"),
        ({}, {"trusted": "everybody"}, r"^trusted must be one of nobody, server, was 'everybody'"),
        ({}, {"method": "guess"}, r"^method must be one of bound, pilot, was 'guess'"),
        ({}, {"systems": ("fedavg",)}, r"^system must be one that spends a privacy budget to be recommended, was"),
        ({}, {"systems": ("upd",)}, r"^system must be one of .*did you mean 'udp'"),
        ({}, {"systems": ("pe-dpfl",)}, r"^no system can be planned for this problem: It cannot be planned"),
        ({}, {"most_rounds": 0}, r"max_rounds must be a whole number of at least 1|rounds must be a whole number"),
    ],
)
@pytest.mark.usefixtures("known")
def test_what_cannot_be_ranked(given: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        ranking(given=given, **options)


@pytest.mark.usefixtures("known")
def test_pilots_rank_by_what_they_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(system: PrivateSystem, seed: int) -> float:
        if system.name == "dp-fedavg":
            return math.inf
        base = {"udp": 1.0, "fedsgd-dpc": 1.001, "nbafl": 1.5, "ali-dpfl": 3.0}[system.name]
        return base + 0.1 * abs(math.log(system.lr / 8.0)) + 0.01 * (seed % 2)

    measured(monkeypatch, loss)
    given = {key: value for key, value in GIVEN.items() if key != "lr"} | {"epsilon": 3.0, "clients": 3}
    found = recommend(given, most_rounds=4, time_limit=60.0)
    assert found.method == "pilot"
    assert [one.system for one in found.ranked] == ["udp", "fedsgd-dpc", "nbafl", "ali-dpfl", "dp-fedavg"]
    udp, near, third, _, last = found.ranked
    assert udp.plan.system.lr == 8.0  # four times its usual rate, which none was given for
    assert udp.loss == pytest.approx(udp.plan.tried[0]["loss"])
    assert udp.error == udp.plan.tried[0]["standard_error"]
    assert near.why[0] == "It cannot be told from udp: the difference is within two standard errors."
    assert third.why[0].startswith("Its loss is 50% above that of udp") or "49%" in third.why[0]
    assert last.why[0] == "It diverged wherever it was tried."
    assert last.to_dict()["loss"] is None
    for one in found.ranked:
        spent = one.plan.certificate.observers["server"].epsilon
        assert spent <= 3.0 * (1 + 1e-6), one.system


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("trusted", "second"), [("nobody", "ali-dpfl"), ("server", "fedsgd-dpc")])
def test_pilots_keep_to_the_time_for_all_of_them(trusted: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    granted: list[float] = []
    true = RECOMMEND.plan_by_pilot

    def watched(of: Task, **options: Any) -> Plan:
        granted.append(options["time_limit"])
        return true(of, **options)

    monkeypatch.setattr(RECOMMEND, "plan_by_pilot", watched)
    measured(monkeypatch, lambda system, seed: 1.0)
    given = {"epsilon": 3.0, "clients": 3, "seed": 1, "delta": 1e-4, "share": 0.3}
    recommend(given, systems=("udp", second), trusted=trusted, most_rounds=4, time_limit=40.0)
    assert granted
    assert sum(granted) <= 40.0 * (1 + 1e-9)


def test_a_tiny_pilot_for_real() -> None:
    given = GIVEN | {"epsilon": 30.0, "clients": 3}
    told: list[str] = []
    found = recommend(given, systems=("udp", "pe-dpfl"), most_rounds=2, time_limit=60.0, on_trial=told.append)
    assert {one.system for one in found.ranked} == {"udp", "pe-dpfl"}
    assert all(1.0 < one.loss < 2.6 for one in found.ranked)
    assert {line.split(":")[0] for line in told} == {"udp", "pe-dpfl"}
    assert str(found).startswith("ranked by their loss in a pilot on public records, each at a true ε of 30 against")


def test_a_verdict_as_plain_data() -> None:
    none = RankedSystem("nbafl", None, math.inf, None, ("It cannot be planned.",))
    assert none.to_dict() == {
        "system": "nbafl", "loss": None, "standard_error": None, "neighbours": None, "true_epsilon": None,
        "together": 0.0, "plan": None, "why": ["It cannot be planned."],
    }  # fmt: skip
