"""Pilots on several made-up tasks: what they choose of rate, clip, noise and averaging, by the least worst-case regret.

Statistical tests draw with fixed seeds, and allow for five standard errors.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import dpfl
from dpfl.config import Settings, parse
from dpfl.errors import BadInput
from dpfl.federation import Federation, Records
from dpfl.planning import Constants, Facts, Task, make, pilot, trying
from dpfl.planning.bounds import round_noise
from dpfl.planning.output import html, text
from dpfl.planning.pilot import PilotResult, Stage, Trials
from dpfl.planning.task import PLANNED, SCALES
from dpfl.planning.trying import Seen, replace_seed, trained, trained_together
from dpfl.server.evaluation import Score
from dpfl.streams import Streams
from dpfl.systems import PrivateSystem
from dpfl.training import federation_of
from grids import each

TASKS = 4
Losses = Callable[[PrivateSystem, int], Sequence[float]]  # of each task
KNOWN = Constants(
    strong_convexity=0.5, smoothness=2.0, polyak_lojasiewicz=0.4, gradient_bound=1.3, lipschitz=1.7, record_spread=0.8,
    divergence=0.6, dissimilarity=1.2, heterogeneity=0.3, initial_distance=5.0, initial_gap=3.0,
)  # fmt: skip
WHOLE = ("rounds", *SCALES, "averaged")


@cache
def shared(settings: Settings) -> Federation:
    return federation_of(settings)


def task(
    system: str = "udp", *, fixed: tuple[str, ...] = (), most_rounds: int = 4, public: float = 0.0, **given: Any
) -> Task:
    """Return a task without public records, unless a share of the records is to be public."""
    config = parse({
        "system": system, "clients": 4, "seed": 1, "delta": 1e-4, "share": 0.3, "validation_share": public, **given,
    })  # fmt: skip
    return Task(config, shared(config.settings), frozenset(fixed), most_rounds)


@pytest.fixture
def surface(monkeypatch: pytest.MonkeyPatch) -> Callable[[Losses], list[PrivateSystem]]:
    """Put known losses in the place of training; return what is tried."""
    monkeypatch.setattr("dpfl.planning.pilot.time.perf_counter", lambda: 0.0)

    def install(losses: Losses) -> list[PrivateSystem]:
        tried: list[PrivateSystem] = []

        def fake(stage: Stage, systems: Sequence[PrivateSystem], seed: int) -> list[Seen]:
            tried.extend(systems)
            return [tuple(Score(loss, max(0.0, 1 - loss)) for loss in losses(system, seed)) for system in systems]

        monkeypatch.setattr(pilot, "trials", fake)
        return tried

    return install


def found_by(of: Task, chooses: Sequence[str] = WHOLE, **options: Any) -> PilotResult:
    return pilot.pilot(of, chooses, **({"time_limit": 9.0} | options))


def away(value: float, best: float) -> float:
    return math.log2(value / best) ** 2


# (a) Without public records.


def broken(records: Records) -> Records:
    return Records(torch.full_like(records.x, math.nan), torch.full_like(records.y, -7))


def test_hospitals_are_planned_for_without_a_look_at_any_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.planning.pilot.time.perf_counter", lambda: 0.0)  # the time that it takes decides nothing
    monkeypatch.setattr(pilot, "_FINALS_OF_A_FAMILY", ())
    monkeypatch.setattr(pilot, "_SEEDS", (1, 1))
    real = dpfl.federate("heart")
    assert len(real.validation) == 0
    lost = replace(
        real, clients=tuple(map(broken, real.clients)), test=broken(real.test),
        site_tests=tuple(map(broken, real.site_tests)),
    )  # fmt: skip
    fewer = tuple(records.take(torch.arange(len(records) // 3)) for records in real.clients)
    options = {"max_rounds": 2, "seed": 1, "keep": ("averaged", "clip"), "constants": KNOWN}
    federations = (real, lost, replace(real, clients=fewer))
    one, other, small = (dpfl.plan(dpfl.UDP(epsilon=2, delta=1e-3), of, **options) for of in federations)
    assert (one.system, one.expected, one.tried) == (other.system, other.expected, other.tried)
    assert [line for line in one.why if " s." not in line] == [line for line in other.why if " s." not in line]
    assert one.expected["made_up"]
    assert one.tried != small.tried  # sizes are public, and count
    assert "made-up tasks of this shape (no records are public)" in one.why[0]
    assert all(math.isfinite(line["loss"]) for line in one.tried)


def test_a_plan_without_public_records_pays_within_seconds() -> None:
    real = dpfl.federate("heart")
    found = dpfl.plan(dpfl.UDP(epsilon=4, delta=1e-3), real, max_rounds=30, seed=1, constants=KNOWN, time_limit=4.0)
    assert (found.method, found.expected["made_up"]) == ("pilot", True)
    losses = [dpfl.train(system, real, seed=1).loss for system in (found.system, dpfl.UDP(epsilon=4, delta=1e-3))]
    assert losses[0] < min(math.log(2), losses[1] + 0.05)  # better than nothing, and no worse than what is usual


def test_words_are_refused_in_a_sentence() -> None:
    real = dpfl.federate("heart")
    words = replace(real, clients=tuple(Records(one.x.long(), one.y) for one in real.clients),
                    validation=Records(real.validation.x.long(), real.validation.y))  # fmt: skip
    with pytest.raises(BadInput, match=r"^validation_share must leave public records to plan with where features are"):
        dpfl.plan(dpfl.UDP(epsilon=4, delta=1e-3), words, time_limit=1.0)


def test_public_records_are_used_where_there_are_enough(surface: Any) -> None:
    surface(lambda system, seed: [1.0])
    assert not found_by(task(public=0.2)).is_made_up
    assert len(Stage(task(public=0.2), time_limit=1.0, on_trial=None).tasks) == 1
    assert len(Stage(task(), time_limit=1.0, on_trial=None).tasks) == TASKS
    surface(lambda system, seed: [1.0] * TASKS)
    assert found_by(task()).is_made_up


# (b) Together as one by one.

ORDERED: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "upload": ("udp", {}, [{}, {"lr": 2.0, "clip": 0.5}, {"lr": 0.1, "averaged": 0.5}]),
    "upload, some clients": ("udp", {"cohort": 2}, [{}, {"clip": 0.3, "lr": 0.4}]),
    "upload, several steps": ("dp-fedavg", {"local_steps": 3}, [{}, {"lr": 0.02, "clip": 3.0}]),
    "step": ("fedsgd-dpc", {}, [{"lr": 0.5}, {"lr": 0.1, "clip": 2.0}, {"lr": 0.2, "averaged": 0.0}]),
    "downlink": ("nbafl", {}, [{}, {"lr": 0.05, "clip": 5.0}]),
}


def candidates(of: Task, changes: Sequence[dict[str, Any]]) -> list[PrivateSystem]:
    own = {one.name for one in fields(of.system)}
    return [replace(of.system, **{key: value for key, value in one.items() if key in own}) for one in changes]


@each("kind", list(ORDERED))
@each("public", [0.0, 0.3])
def test_candidates_that_are_trained_together_get_where_they_get_alone(kind: str, public: float) -> None:
    name, given, changes = ORDERED[kind]
    of = task(name, epsilon=1e7, rounds=4, public=public, **given)
    stage, systems = Stage(of, time_limit=1.0, on_trial=None), candidates(of, changes)
    together = trained_together(stage, systems, 3)
    assert [reached.shape for reached in together] == [(len(stage.tasks), 650)] * len(systems)
    first = replace_seed(of, 3).model().vector()
    for system, reached in zip(systems, together, strict=True):
        for row, public_ in zip(reached, stage.tasks, strict=True):
            alone = trained(stage, system, 3, public_)
            assert (row - alone).abs().max() <= 1e-5 * max(1.0, float(alone.abs().max()))
            assert (row - first).abs().max() > 1e-3  # it went somewhere
    # The twin: what one candidate reaches is not what another does.
    assert (together[0] - together[1]).abs().max() > 1e-3


NOISY: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "upload": ("udp", {"epsilon": 0.001}, [{}, {"lr": 2.0, "clip": 0.5}, {"clip": 3.0}]),
    "step": ("fedsgd-dpc", {"epsilon": 0.0005}, [{}, {"lr": 0.1, "clip": 2.0}, {"lr": 3.0, "clip": 0.5}]),
}


def of_sizes(federation: Federation, sizes: Sequence[int]) -> Federation:
    """Return the federation with clients of these sizes, who hold their records again and again."""
    pairs = zip(federation.clients, sizes, strict=True)
    return replace(federation, clients=tuple(one.take(torch.arange(size) % len(one)) for one, size in pairs))


@each("kind", list(NOISY))
def test_the_noise_of_candidates_that_are_trained_together_is_that_of_the_real_problem(kind: str) -> None:
    name, given, changes = NOISY[kind]
    of = task(name, rounds=2, averaged=0.0, **given)
    of = replace(of, federation=of_sizes(of.federation, (9000, 5000, 2000, 300)))
    stage, systems = Stage(of, time_limit=1.0, on_trial=None), candidates(of, changes)
    own = sum(len(one) for one in stage.public.clients)
    assert own < sum(of.federation.sizes) / 3  # so that a share that is left out would show
    squares = np.zeros((len(systems), len(stage.tasks)))
    expected = np.zeros(len(systems))
    for seed in range(1, 9):  # so many that a mean square varies by 2 %
        first = replace_seed(of, seed).model().vector()
        for at, reached in enumerate(trained_together(stage, systems, seed)):
            squares[at] += (reached - first).square().sum(dim=1).numpy()
            expected[at] += 2 * round_noise(systems[at], Facts(of.federation.sizes, 650, Streams(seed)))
    assert squares == pytest.approx(np.broadcast_to(expected[:, None], squares.shape), rel=0.1)
    assert len({round(value, 9) for value in expected}) == len(systems)  # the candidates' noise differs, so it tells


def test_more_clients_than_are_made_up_get_the_noise_of_all() -> None:
    # 400 clients of 8 records are too many to be made up; the noise has to be that of all of them still. Six trainings
    # of 650 numbers vary by 2.3 %.
    of = task("udp", epsilon=0.01, rounds=1, averaged=0.0)
    few = of.federation.clients[0].take(torch.arange(8))
    of = replace(of, federation=replace(of.federation, clients=(few,) * 400))
    stage = Stage(of, time_limit=1.0, on_trial=None)
    assert len(stage.public.clients) < 400
    gone, expected = 0.0, 0.0
    for seed in range(1, 7):
        reached, _ = trained_together(stage, [of.system, of.system], seed)
        gone += float((reached[0] - replace_seed(of, seed).model().vector()).square().sum())
        expected += round_noise(of.system, Facts(of.federation.sizes, 650, Streams(seed)))
    assert gone == pytest.approx(expected, rel=0.11)


def test_trials_of_one_and_of_several_say_the_same() -> None:
    of = task("udp", epsilon=1e7, rounds=3)
    stage, systems = Stage(of, time_limit=1.0, on_trial=None), candidates(of, [{}, {"lr": 0.1}])
    for seen, system in zip(trying.trials(stage, systems, 2), systems, strict=True):
        ((*alone,),) = trying.trials(stage, [system], 2)
        assert [one.loss for one in seen] == pytest.approx([one.loss for one in alone], rel=1e-4)
        assert [one.accuracy for one in seen] == pytest.approx([one.accuracy for one in alone], abs=0.01)


# (c) The least worst-case regret.


def test_the_least_worst_case_regret_wins_and_not_the_least_mean(surface: Any) -> None:
    # 1 round: least mean, and far above the least on the second task. 4 rounds: nowhere far above it.
    table = {1: (0.1, 1.0, 0.1, 0.1), 4: (0.5, 0.6, 0.5, 0.5), 2: (0.9, 0.3, 0.9, 0.9)}
    surface(lambda system, seed: table.get(system.rounds, (2.0,) * TASKS))
    found = found_by(task(), ("rounds",))
    by_rounds = {one.options["rounds"]: one for one in found.ranked}
    assert found.least == pytest.approx((0.1, 0.3, 0.1, 0.1))
    assert by_rounds[1].mean < by_rounds[4].mean
    assert {rounds: one.regret(found.least)[0] for rounds, one in by_rounds.items() if rounds != 3} == pytest.approx(
        {1: 0.7, 2: 0.8, 4: 0.4}
    )
    assert found.best.options == {"rounds": 4}
    # The twin: on each task alone another one wins.
    for at, best in ((0, 1), (1, 2)):
        surface(lambda system, seed, at=at: [table.get(system.rounds, (2.0,) * TASKS)[at]])
        assert found_by(task(public=0.2), ("rounds",)).best.options == {"rounds": best}


def test_of_equal_regrets_the_less_mean_wins(surface: Any) -> None:
    table = {1: (0.0, 1.0, 0.5, 0.5), 2: (1.0, 0.0, 0.2, 0.2)}
    surface(lambda system, seed: table.get(system.rounds, (3.0,) * TASKS))
    assert found_by(task(), ("rounds",)).best.options == {"rounds": 2}


def test_who_diverges_on_one_task_never_wins(surface: Any) -> None:
    table = {4: (0.0, 0.0, 0.0, math.inf)}
    surface(lambda system, seed: table.get(system.rounds, (5.0, 5.0, 5.0, 1.0 + 1 / system.rounds)))
    found = found_by(task(), ("rounds",))
    lost = next(one for one in found.ranked if one.options["rounds"] == 4)
    assert lost.regret(found.least) == (math.inf, None)
    assert lost.to_dict()["loss"] is None
    assert found.best.options["rounds"] == 3
    # Once in eight seeds is enough.
    surface(lambda system, seed: (math.inf if seed == 2 and system.rounds == 4 else 1 / system.rounds,) * TASKS)
    assert found_by(task(), ("rounds",)).best.options["rounds"] == 3


def test_where_everything_diverges_on_a_task_there_is_a_plan_that_says_so(surface: Any) -> None:
    surface(lambda system, seed: (1.0, math.inf, 1.0, 1.0))
    found = make(task("pe-dpfl"), constants=KNOWN, time_limit=9.0)
    assert found.tried[0]["loss"] is None
    assert found.expected["loss"] == {"mean": None, "low": 1.0, "high": None}
    assert any("diverged" in line for line in found.why)
    json.loads(json.dumps(found.to_dict(), allow_nan=False))


def test_regret_of_trials() -> None:
    some = Trials({}, [(Score(1.0, None), Score(5.0, None)), (Score(3.0, None), Score(5.0, None))])
    assert some.losses == [3.0, 4.0]
    assert some.by_task == [2.0, 5.0]
    assert some.regret([1.5, 4.9]) == (0.5, pytest.approx(1.0))  # on the first; 1 and 3 have a standard error of 1
    assert some.regret([1.5, 4.0]) == (1.0, 0.0)
    assert Trials({}).regret([]) == (math.inf, None)


# (d) The numbers that a system has anyway.


@each("public", [0.0, 0.2])
@each("noise", [0.0, 0.05, 1.0])
@each("drawn", range(2))
def test_the_winner_is_never_worse_than_the_numbers_that_the_system_has_anyway(
    drawn: int, noise: float, public: float, surface: Any
) -> None:
    rng = np.random.default_rng(drawn)
    lr, clip, rounds = (float(value) for value in rng.uniform((0.01, 0.1, 1), (10, 10, 40)))
    bends = rng.uniform(0.0, 0.3, size=(1 if public else TASKS, 3))

    def losses(system: PrivateSystem, seed: int) -> list[float]:
        own = [seed, int(1e4 * system.lr), int(1e4 * system.clip), system.rounds, int(10 * system.averaged)]
        luck = noise * np.random.default_rng(own).standard_normal(len(bends))
        here = np.array([away(system.lr, lr), away(system.clip, clip), away(system.rounds, rounds)])
        return [float(value) for value in 1.0 + bends @ here + luck]

    tried = surface(losses)
    of = task("udp", most_rounds=64, public=public, rounds=20)
    found = found_by(of)
    assert found.usual is not None
    assert found.usual.options == {key: getattr(of.system, key) for key in ("rounds", "lr", "clip", "averaged")}
    assert of.system in tried
    assert len(found.usual.seen) >= len(found.best.seen) >= 3
    assert found.best.regret(found.least)[0] <= found.usual.regret(found.least)[0]


def test_the_numbers_that_a_system_has_anyway_win_where_all_else_is_worse(surface: Any) -> None:
    usual = task("udp", rounds=3).system
    surface(lambda system, seed: (0.0 if system == usual else 1.0,) * TASKS)
    found = make(task("udp", rounds=3), constants=KNOWN, time_limit=9.0)
    assert found.system == usual
    assert not any("has anyway" in line for line in found.why)
    surface(lambda system, seed: (1.0 if system == usual else 0.5 + system.lr / 1000,) * TASKS)
    beside = make(task("udp", rounds=3), constants=KNOWN, time_limit=9.0)
    assert beside.system != usual
    (line,) = (line for line in beside.why if "has anyway" in line)
    assert line.startswith("The numbers that udp has anyway (")
    assert "reached 1 ± 0 (0.5 above" in line


def test_usual_numbers_are_tried_however_little_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def fake(stage: Stage, systems: Sequence[PrivateSystem], seed: int) -> list[Seen]:
        now[0] += sum(0.002 * system.rounds for system in systems)
        return [(Score(1 / system.rounds, None),) * TASKS for system in systems]

    monkeypatch.setattr("dpfl.planning.pilot.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(pilot, "trials", fake)
    found = found_by(task("udp", rounds=100, most_rounds=300), time_limit=2.0)
    assert now[0] <= 2.0
    assert found.untried > 0
    assert len(found.usual.seen) >= 3
    assert found.best.options["rounds"] == 100


def test_usual_numbers_keep_to_the_limits(surface: Any) -> None:
    tried = surface(lambda system, seed: (1.0,) * TASKS)
    found = found_by(task("udp", rounds=100, most_rounds=7))
    assert found.usual.options["rounds"] == 7
    assert max(system.rounds for system in tried) == 7


# (e) Rate, clip and averaging.


@each(("lr", "clip"), [(0.02, 0.5), (0.3, 4.0), (5.0, 1.0), (40.0, 0.2)])
def test_the_valley_of_rate_and_clip_is_found(lr: float, clip: float, surface: Any) -> None:
    of = task("udp", lr=1.0, clip=1.0, averaged=0.0, most_rounds=1, fixed=("rounds",))

    def losses(system: PrivateSystem, seed: int) -> list[float]:
        here = away(system.lr * system.clip, lr * clip) + away(system.clip, clip)
        return [1.0 + 0.05 * here + (0.2 if system.averaged == 0 else 0.0)] * TASKS

    tried = surface(losses)
    found = found_by(of)
    best = found.best.options
    assert set(best) == {"lr", "clip", "averaged"}
    assert best["averaged"] > 0
    assert 0.4 < best["lr"] * best["clip"] / (lr * clip) < 2.5
    assert 0.4 < best["clip"] / clip < 2.5
    assert len(tried) < 400


def significant(value: float) -> bool:
    return float(f"{value:.2g}") == value


def test_another_clip_keeps_rate_times_clip(surface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of = task("udp", lr=0.7, clip=1.3, averaged=0.25, rounds=3, fixed=("rounds",))
    tried = surface(lambda system, seed: (1.0 + away(system.clip, 1.3) + away(system.lr, 0.7),) * TASKS)
    monkeypatch.setattr(pilot, "_FINALS_OF_A_FAMILY", ())
    monkeypatch.setattr(pilot, "_SEEDS", (1, 1))
    monkeypatch.setattr(pilot, "_rescaled", lambda *_: [])  # the first look alone
    found_by(of)
    firsts: dict[float, set[float]] = {}
    for system in tried:
        firsts.setdefault(system.clip, set()).add(system.lr)
    assert len(firsts) >= 3
    usual = firsts[1.3]
    assert 0.7 in usual
    others = {clip: rates for clip, rates in firsts.items() if clip != 1.3}
    for clip, rates in others.items():  # the same products, but for the digits that are left out, 5 % at most
        assert [rate * clip for rate in sorted(rates)] == pytest.approx(
            [1.3 * rate for rate in sorted(usual)], rel=0.06
        )


def test_numbers_have_two_digits_and_stay_within_what_the_system_takes(surface: Any) -> None:
    for name, given in (("udp", {"lr": 1 / 3, "clip": 2 / 3}), ("fedsgd-dpc", {"lr": 0.0123, "clip": 1.0})):
        of = task(name, most_rounds=20, **given)
        tried = surface(lambda system, seed: (1.0 + system.lr + abs(math.log(system.clip / 3.7)),) * TASKS)
        found = found_by(of)
        usual = {"lr": of.system.lr, "clip": of.system.clip}
        for system in tried:
            assert system.lr > 0
            assert system.clip > 0
            assert 0 <= system.averaged < 1
            for key in usual:
                factor = getattr(system, key) / usual[key]  # times a round factor, or with two digits
                assert significant(getattr(system, key)) or significant(factor), (name, key, getattr(system, key))
        assert found.best.options["lr"] != usual["lr"]
        assert significant(found.best.options["lr"])


@each("name", ["lr", "clip", "averaged"])
def test_what_is_given_stays(name: str, surface: Any) -> None:
    given = {"lr": 0.37, "clip": 1.7, "averaged": 0.1}
    of = task("udp", fixed=(name,), **{name: given[name]})
    tried = surface(lambda system, seed: (system.lr + system.clip + system.averaged,) * TASKS)
    found = make(of, constants=KNOWN, time_limit=9.0)
    assert {getattr(system, name) for system in tried} == {given[name]} == {getattr(found.system, name)}
    assert name not in found.options
    assert set(found.options) == {"rounds", "lr", "clip", "averaged"} - {name}
    # The twin: what is not given moves.
    assert all(len({getattr(system, other) for system in tried}) > 1 for other in set(given) - {name})


def test_what_python_keeps_stays(surface: Any) -> None:
    surface(lambda system, seed: (system.lr + system.clip,) * TASKS)
    heart, system = dpfl.federate("heart"), dpfl.UDP(epsilon=4, delta=1e-3, lr=0.37, clip=1.7, averaged=0.1, rounds=9)
    kept = dpfl.plan(system, heart, keep=("lr",), constants=KNOWN, seed=1)
    assert (kept.system.lr, kept.system.clip != 1.7) == (0.37, True)
    for keep, left in ((("lr", "clip", "averaged"), "rounds"), (("rounds", "lr", "averaged"), "clip")):
        assert dpfl.plan(system, heart, keep=keep, constants=KNOWN, seed=1).options.keys() == {left}
    for name in PLANNED:
        dpfl.plan(system, heart, keep=(name,), constants=KNOWN, seed=1)
    with pytest.raises(BadInput, match=r"^keep must be one of rounds, local_steps, cohort, lr, clip, noise_multiplier"):
        dpfl.plan(system, heart, keep=("epsilon",), seed=1)


def test_noise_that_follows_from_the_budget_is_not_planned(surface: Any) -> None:
    assert task("dpsgd-fedavg", noise_multiplier=None).scales(WHOLE).keys() == {"lr", "clip", "averaged"}
    tried = surface(lambda system, seed: (system.lr,) * TASKS)
    found = found_by(task("dpsgd-fedavg", noise_multiplier=None))
    assert {system.noise_multiplier for system in tried} == {None}
    assert "noise_multiplier" not in found.best.options
    given = task("ali-dpfl", noise_multiplier=2.0, rounds=3)
    assert given.scales(WHOLE)["noise_multiplier"] == (1.0, 2.0, 4.0)
    tried = surface(lambda system, seed: (away(system.noise_multiplier, 3.9),) * TASKS)
    found = found_by(given, ("local_steps", *SCALES))
    assert 2.6 < found.best.options["noise_multiplier"] < 5.9
    words = task("udp", clip="median")
    assert words.scales(WHOLE).keys() == {"lr", "averaged"}


def test_what_is_searched_is_not_planned_besides(surface: Any) -> None:
    tried = surface(lambda system, seed: (abs(system.lr - 0.3) + away(system.clip, 1.0),) * TASKS)
    found = found_by(task("udp", lr=1.0, clip=1.0), search={"lr": [0.1, 0.3]})
    assert found.best.options["lr"] == 0.3
    assert {system.lr for system in tried} <= {0.1, 0.3, 1.0}  # and the usual one


def test_candidates_that_the_system_does_not_take_are_left_out(surface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    true = Task.at

    def at(of: Task, numbers: dict[str, Any]) -> PrivateSystem:
        if numbers.get("lr", 0.0) > 2:
            raise BadInput("lr must be at most 2")
        return true(of, numbers)

    monkeypatch.setattr(Task, "at", at)
    tried = surface(lambda system, seed: (1 / system.lr,) * TASKS)
    found = found_by(task("udp", lr=1.0))
    assert found.best.options["lr"] <= 2
    assert max(system.lr for system in tried) <= 2


# (f) What to expect.


def test_a_plan_says_what_to_expect(surface: Any) -> None:
    surface(lambda system, seed: [0.1, 0.2, 0.3, 0.4 + 0.01 * (seed % 2)])
    found = make(task(), constants=KNOWN, time_limit=9.0)
    assert found.expected["made_up"]
    loss, accuracy = found.expected["loss"], found.expected["accuracy"]
    assert (loss["low"], loss["high"]) == (0.1, pytest.approx(0.41))
    assert (accuracy["low"], accuracy["high"]) == (pytest.approx(0.59), 0.9)
    assert loss["mean"] == pytest.approx(1 - accuracy["mean"])
    assert 0.25 <= loss["mean"] <= 0.2525
    assert found.to_dict()["expected"] == json.loads(json.dumps(found.expected)) == found.expected
    surface(lambda system, seed: [0.25])
    one = make(task(public=0.2), constants=KNOWN, time_limit=9.0).expected
    assert one == {
        "made_up": False,
        "loss": {"mean": 0.25, "low": 0.25, "high": 0.25},
        "accuracy": {"mean": 0.75, "low": 0.75, "high": 0.75},
    }


@each(("classes", "public"), [(3, 0.0), (3, 0.2), (None, 0.0), (None, 0.2)])
def test_what_to_expect_is_an_interval(classes: int | None, public: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 5))
    y = x[:, 0] / 3 if classes is None else np.digitize(x[:, 0], (-0.5, 0.5))
    data = dpfl.from_arrays(x.astype(np.float32), y.astype(np.float32) if classes is None else y, classes=classes)
    federation = dpfl.federate(data, clients=3, seed=1, validation_share=public)
    found = dpfl.plan(dpfl.UDP(epsilon=8, delta=1e-3), federation, max_rounds=4, seed=1, constants=KNOWN,
                      time_limit=1.0)  # fmt: skip
    assert found.expected["made_up"] == (public == 0)
    said = [found.expected["loss"]] + ([] if classes is None else [found.expected["accuracy"]])
    assert (found.expected["accuracy"] is None) == (classes is None)
    for one in said:
        assert 0 <= one["low"] <= one["mean"] <= one["high"]
    if classes is not None:
        assert found.expected["accuracy"]["high"] <= 1
    assert text(found, 3)
    assert html(found)


def test_a_bound_expects_nothing() -> None:
    found = make(task(public=0.2, lr=0.5), method="bound")
    assert found.expected is None
    assert found.to_dict()["expected"] is None


def test_a_plan_does_not_wait_for_the_constants_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.planning.by_pilot._FOR_THE_BOUND", 1e-9)
    monkeypatch.setattr("dpfl.planning.by_pilot._PART_FOR_THE_BOUND", 1e-9)
    found = dpfl.plan(dpfl.UDP(epsilon=1.0, rounds=3), dpfl.federate("heart"), keep=PLANNED, seed=1, time_limit=9.0)
    assert found.why[-1].startswith("The bound says nothing here: constants must be given for this model, whose")
