"""Plans by a bound: the best whole numbers, what was given is kept, why, and a certificate that training confirms."""

import itertools
import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from dpfl.config import Settings, parse
from dpfl.errors import BadInput
from dpfl.federation import Federation, Records
from dpfl.planning import PLANNERS, Constants, Facts, Form, Plan, Task, Void, by_bound, make, plan
from dpfl.planning.ali_dpfl import affordable
from dpfl.planning.constants import SYMBOLS
from dpfl.streams import Streams
from dpfl.systems import PrivateSystem
from dpfl.training import federation_of, train
from grids import each

N = 6
CONSTANTS = Constants(
    strong_convexity=0.5, smoothness=2.0, polyak_lojasiewicz=0.4, gradient_bound=1.3, lipschitz=1.7, record_spread=0.8,
    divergence=0.6, dissimilarity=1.2, heterogeneity=0.3, initial_distance=5.0, initial_gap=3.0,
)  # fmt: skip
BOUNDED: dict[str, dict[str, Any]] = {
    "dp-fedavg": {"lr": 0.1},
    "udp": {"lr": 0.5},
    "nbafl": {"proximal": 20.0, "fixed": ("cohort",)},  # all clients: it takes a while to plan some
    "ali-dpfl": {},
    "fedsgd-dpc": {"lr": 0.1},
}


@cache
def shared(settings: Settings) -> Federation:
    return federation_of(settings)


def task(
    system: str,
    *,
    fixed: tuple[str, ...] = (),
    most_rounds: int = 12,
    total_steps: int | None = None,
    all_overheard: bool = False,
    **given: Any,
) -> Task:
    config = parse({"system": system, "clients": N, "seed": 1, "delta": 1e-4, **given})
    return Task(config, shared(config.settings), frozenset(fixed), most_rounds, total_steps, all_overheard)


def planned(system: str, *, form: Form = "general", constants: Constants = CONSTANTS, **options: Any) -> Plan:
    return make(task(system, **options), method="bound", form=form, constants=constants)


def bound_of(of: Task, form: Form = "general", **numbers: int | None) -> float:
    """Return the bound at some numbers, infinite where it says nothing, without the planner's own search."""
    facts = Facts(of.federation.sizes, 650, Streams(1))  # softmax on 8×8 pixels
    try:
        return PLANNERS[of.system.name].bound(replace(of.system, **numbers), facts, CONSTANTS, form)
    except Void:
        return math.inf


def numbers_of(found: Plan, names: tuple[str, ...]) -> dict[str, int]:
    return {name: getattr(found.system, name) or N for name in names}


# (a) The best of all that is allowed.

SEARCHED = [
    ("udp", {}, {"rounds": 12}),
    ("udp", {"epsilon": 1.0}, {"rounds": 12}),
    ("udp", {"epsilon": 1.0, "cohort": 2, "fixed": ("cohort",)}, {"rounds": 12}),
    ("udp", {"epsilon": 0.5, "calibration": "paper"}, {"rounds": 12}),
    ("nbafl", {"fixed": ()}, {"rounds": 12, "cohort": N}),
    ("nbafl", {"proximal": 60.0, "epsilon": 20.0, "most_rounds": 5, "fixed": ()}, {"rounds": 5, "cohort": N}),
    ("nbafl", {"proximal": 60.0, "epsilon": 5.0, "calibration": "paper", "fixed": ()}, {"rounds": 12, "cohort": N}),
    ("ali-dpfl", {"rounds": 30}, {"local_steps": 7}),  # ⌈209/30⌉ = 7 are all that can be paid for
    ("ali-dpfl", {"rounds": 5}, {"local_steps": 42}),
    ("fedsgd-dpc", {}, {"rounds": 12, "cohort": N}),
    ("fedsgd-dpc", {"lr": 0.2, "epsilon": 0.1}, {"rounds": 12, "cohort": N}),
    ("fedsgd-dpc", {"lr": 0.2, "epsilon": 0.3, "calibration": "paper", "mechanism": "laplace", "delta": 0.0},
     {"rounds": 12, "cohort": N}),
    ("fedsgd-dpc", {"lr": 0.2, "epsilon": 0.5, "mechanism": "laplace", "delta": 0.0}, {"rounds": 12, "cohort": N}),
    ("fedsgd-dpc", {"lr": 0.2, "epsilon": 0.5, "mechanism": "laplace", "delta": 1e-3}, {"rounds": 12, "cohort": N}),
    ("dp-fedavg", {"epsilon": 300.0, "mechanism": "laplace", "delta": 0.0, "most_rounds": 4},
     {"rounds": 4, "local_steps": 100}),
    ("dp-fedavg", {"epsilon": 10.0, "mechanism": "laplace", "delta": 0.0, "most_rounds": 3, "lr": 0.002},
     {"rounds": 3, "local_steps": 100}),
]  # fmt: skip


@each(("system", "options", "most"), SEARCHED, ids=lambda value: str(value))
@each("form", ["general", "paper"])
def test_no_other_numbers_that_are_allowed_are_better(
    system: str, options: dict[str, Any], most: dict[str, int], form: Form
) -> None:
    given = BOUNDED[system] | options
    found, of = planned(system, form=form, **given), task(system, **given)
    every = {
        values: bound_of(of, form, **dict(zip(most, values, strict=True)))
        for values in itertools.product(*(range(1, last + 1) for last in most.values()))
    }
    chosen = tuple(numbers_of(found, tuple(most)).values())
    assert found.best.bound == pytest.approx(every[chosen], rel=1e-12)
    assert found.best.bound <= min(every.values()) * (1 + 1e-9)
    assert set(found.options) == set(most)


def test_some_best_numbers_lie_inside_their_ranges() -> None:
    # Otherwise the test above would say little: limits are found by any search.
    inside = {
        "udp": planned("udp", lr=0.5, epsilon=1.0).best.rounds,
        "fedsgd-dpc": planned("fedsgd-dpc", lr=0.2, epsilon=0.1).best.rounds,
    }
    assert all(1 < rounds < 12 for rounds in inside.values()), inside
    # A rate so small that clients hardly drift, and noise that rounds make worse: local steps are worth having.
    some = planned("dp-fedavg", epsilon=10.0, mechanism="laplace", delta=0.0, most_rounds=3, lr=0.002)
    assert 1 < some.best.local_steps < 100
    assert 1 < planned("ali-dpfl", rounds=5).best.local_steps < 42


def test_what_is_given_is_kept() -> None:
    free = planned("fedsgd-dpc", lr=0.2, epsilon=0.1)
    kept = planned("fedsgd-dpc", lr=0.2, epsilon=0.1, rounds=5, fixed=("rounds",))
    assert free.best.rounds != 5
    assert (kept.best.rounds, kept.options) == (5, {"cohort": None})
    assert kept.best.bound >= free.best.bound
    both = planned("fedsgd-dpc", lr=0.2, rounds=5, cohort=4, fixed=("rounds", "cohort"))
    assert (both.best.rounds, both.best.cohort, both.system.cohort, both.options) == (5, 4, 4, {})
    of = task("fedsgd-dpc", lr=0.2, rounds=5, cohort=4)
    assert both.best.bound == pytest.approx(bound_of(of), rel=1e-12)
    assert planned("dp-fedavg", lr=0.1, local_steps=3, fixed=("local_steps",)).best.local_steps == 3
    # Given numbers may be above the limit of those that are chosen; what is not planned stays as it is.
    assert planned("udp", lr=0.5, rounds=40, fixed=("rounds",)).best.rounds == 40
    assert planned("udp", lr=0.5, cohort=2).best.cohort == 2


@each("most", [1, 3, 12, 40])
@each("system", ["udp", "nbafl", "fedsgd-dpc", "dp-fedavg"])
def test_no_more_rounds_are_planned_than_are_allowed(system: str, most: int) -> None:
    found = planned(system, **BOUNDED[system], most_rounds=most, epsilon=1e4)
    assert 1 <= found.best.rounds <= most
    if system != "dp-fedavg":
        assert found.best.rounds == most  # without noise to speak of every round is worth having


def test_all_clients_are_no_cohort_at_all() -> None:
    found = planned("fedsgd-dpc", lr=0.1)
    assert (found.best.cohort, found.system.cohort, found.options["cohort"]) == (N, None, None)


# (b) Steps in all.


@each("total", [1, 7, 60])
def test_rounds_follow_from_steps_in_all(total: int) -> None:
    given = {"lr": 0.002, "epsilon": 30.0, "mechanism": "laplace", "delta": 0.0, "most_rounds": 60}
    found, of = planned("dp-fedavg", total_steps=total, **given), task("dp-fedavg", **given)
    every = {
        local: bound_of(of, local_steps=local, rounds=max(1, round(total / local))) for local in range(1, total + 1)
    }
    local = found.best.local_steps
    assert found.best.rounds == max(1, round(total / local)) == found.system.rounds == found.options["rounds"]
    assert found.best.bound == pytest.approx(min(every.values()), rel=1e-12)
    assert every[local] == min(every.values())
    if total == 60:
        assert 1 < local < 60


def test_steps_in_all_do_not_lift_the_limit_on_rounds() -> None:
    found = planned("dp-fedavg", lr=0.1, total_steps=120, most_rounds=20)
    assert found.best.rounds <= 20
    assert found.best.rounds * found.best.local_steps == pytest.approx(120, rel=0.2)


def test_fedsgd_dpcs_own_estimates_are_asked_for_by_name() -> None:
    asked = {"epsilon": 2.0, "lr": 0.2, "share": 0.3}
    general, papers = (
        make(replace(task("fedsgd-dpc", **asked), estimator=estimator), method="bound").constants
        for estimator in ("general", "paper")
    )
    differs = {name for name in SYMBOLS if getattr(general, name) != getattr(papers, name)}
    assert differs == {"initial_distance", "heterogeneity"}
    with pytest.raises(BadInput, match=r"^estimator must be 'general' for udp, was 'paper': only fedsgd-dpc's paper"):
        replace(task("udp"), estimator="paper")
    with pytest.raises(BadInput, match=r"^estimator must be one of general, paper, was 'papers'"):
        replace(task("fedsgd-dpc"), estimator="papers")


def test_steps_in_all_are_for_dp_fedavg_with_free_rounds() -> None:
    with pytest.raises(BadInput, match=r"^total_steps must be left out for udp, was 60"):
        task("udp", total_steps=60)
    with pytest.raises(BadInput, match=r"^rounds must be left out where total_steps is given, was 5"):
        task("dp-fedavg", total_steps=60, fixed=("rounds",))
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(BadInput, match=r"^total_steps must be a whole number of at least 1"):
            task("dp-fedavg", total_steps=wrong)
        with pytest.raises(BadInput, match=r"^max_rounds must be a whole number of at least 1"):
            task("dp-fedavg", most_rounds=wrong)


def test_local_epochs_are_as_many_steps_as_the_largest_client_takes() -> None:
    most = 3 * (max(task("dp-fedavg").federation.sizes) // 20)
    of = task("dp-fedavg", local_epochs=3, batch_size=20, total_steps=10 * most)
    assert of.ranges(("rounds", "local_steps")) == {}  # epochs say how many steps there are
    assert of.chosen({}) == {"rounds": 10}
    assert of.point(of.system, None).local_steps == most
    of = task("nbafl", calibration="paper", local_epochs=3)
    assert of.point(of.system, None).local_steps == 3  # a pass over all records at once is a step


def test_bounds_are_for_steps_on_all_records_and_printed_ones_for_equal_weights() -> None:
    for options in ({"local_epochs": 2}, {"batch_size": 5}, {"noise_for_steps": 1, "calibration": "paper"}):
        with pytest.raises(BadInput, match=r"^local_epochs, batch_size and noise_for_steps must be left out"):
            planned("dp-fedavg", lr=0.1, **options)
    weighed = BOUNDED["nbafl"] | {"weighing": "records"}
    assert math.isfinite(planned("nbafl", **weighed).best.bound)
    with pytest.raises(BadInput, match=r"^weighing must be 'equal' for NbAFL's theorems as printed"):
        planned("nbafl", form="paper", **weighed)


# (c) ALI-DPFL: two things are short.


def paid_for(system: PrivateSystem, clients: tuple[int, ...]) -> int:
    return affordable(system, Facts(clients, 650, Streams(1)))


@each("calibration", ["tight", "paper"])
@each("rounds", [5, 30, 100, 400])
def test_ali_ends_where_no_step_is_left_to_pay_for(rounds: int, calibration: str) -> None:
    found = planned("ali-dpfl", rounds=rounds, calibration=calibration)
    most = paid_for(found.system, task("ali-dpfl").federation.sizes)
    assert 100 < most < 400
    assert found.system.rounds == rounds  # R_s stays
    assert found.best.rounds == min(rounds, math.ceil(most / found.best.local_steps))
    assert found.best.rounds * found.best.local_steps < most + found.best.local_steps
    if rounds >= most:
        assert (found.best.local_steps, found.best.rounds) == (1, most)
    else:
        assert found.best.local_steps > 1


def test_ali_says_what_is_short() -> None:
    plenty = planned("ali-dpfl", rounds=400).why
    assert "The 400 rounds allowed are enough for all 209 steps that the budget pays for, one each." in plenty
    (few,) = (line for line in planned("ali-dpfl", rounds=30).why if "in all" in line)
    assert few.startswith("The budget pays for 209 local steps in all, and 30 rounds are allowed")


# (d) The noise that is really added.


def test_another_calibration_is_another_plan() -> None:
    tight, paper = (planned("udp", lr=0.5, epsilon=1.0, calibration=how) for how in ("tight", "paper"))
    assert (tight.best.rounds, paper.best.rounds) == (7, 5)  # the formula adds more noise than (1, 1e-4) needs
    assert tight.best.bound < paper.best.bound
    same = [planned("udp", lr=0.5, rounds=5, fixed=("rounds",), epsilon=1.0, calibration=how).noise.stds[0]
            for how in ("tight", "paper")]  # fmt: skip
    assert same[0] < 0.9 * same[1]


@each("system", list(BOUNDED))
def test_more_epsilon_never_plans_a_worse_bound(system: str) -> None:
    found = [planned(system, **BOUNDED[system], epsilon=epsilon).best.bound for epsilon in (2.0, 8.0, 32.0)]
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(found)), found
    assert found[-1] < found[0]


@each("system", ["udp", "nbafl", "dp-fedavg"])
def test_the_predicted_noise_is_what_the_orders_of_a_run_carry(system: str) -> None:
    given = BOUNDED[system] | {"most_rounds": 4, "epsilon": 300.0, "share": 0.3}
    found = planned(system, **given)
    assert (found.noise.law, found.noise.on) == ("gaussian", "upload")
    run = train(found.system, task(system, **given).federation, seed=1)
    assert run.rounds == found.best.rounds
    stds = found.noise.stds
    assert sorted(stds) == list(range(N))
    for metrics in run.history:
        assert metrics["noise_std"] == pytest.approx(sum(stds.values()) / N, rel=1e-9)
        assert metrics["cohort"] == found.best.cohort


def test_the_predicted_noise_of_a_step_is_as_the_upload_has_it() -> None:
    given = {"lr": 0.1, "most_rounds": 3, "share": 0.3, "partition": "dirichlet:1"}
    found, of = planned("fedsgd-dpc", **given), task("fedsgd-dpc", **given)
    assert (found.noise.law, found.noise.on, found.noise.downlink) == ("gaussian", "step", 0.0)
    run = train(found.system, of.federation, seed=1)
    on_the_sums = [std * size / 0.1 for std, size in zip(found.noise.stds.values(), of.federation.sizes, strict=True)]
    assert len(set(of.federation.sizes)) > 1
    assert run.history[0]["noise_std"] == pytest.approx(sum(on_the_sums) / N, rel=1e-9)


def test_noise_is_told_of_those_who_are_asked_and_of_the_server() -> None:
    found = planned("fedsgd-dpc", lr=0.1, rounds=2, cohort=2, fixed=("rounds", "cohort"), mechanism="laplace", delta=0)
    assert (found.noise.law, found.noise.on) == ("laplace", "step")
    assert sorted(found.noise.stds) == [0, 1, 2, 3]
    plain = found.to_dict()["noise"]
    assert plain["least_std"] == min(found.noise.stds.values())
    assert plain["most_std"] == max(found.noise.stds.values())
    assert set(plain["clients"]) == {"0", "1", "2", "3"}
    # Twelve rounds are more than √6: by the paper's formula the server has to add noise of its own, in truth never.
    loud = {"proximal": 20.0, "fixed": ("rounds", "cohort")}
    assert planned("nbafl", **loud, rounds=12, calibration="paper").noise.downlink > 0
    assert planned("nbafl", **loud, rounds=2, calibration="paper").noise.downlink == 0
    assert planned("nbafl", **loud, rounds=12).noise.downlink == 0


# (e) The certificate that a run will get.

RUN = [
    ("udp", {}),
    ("udp", {"cohort": 2, "epsilon": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), "lr": 0.5}),
    ("udp", {"calibration": "paper"}),
    ("fedsgd-dpc", {}),
    ("fedsgd-dpc", {"cohort": 3, "fixed": ("cohort",)}),
    ("dp-fedavg", {"epsilon": 300.0}),
    ("dp-fedavg", {"mechanism": "laplace", "delta": 0.0, "epsilon": 500.0}),
    ("nbafl", {}),
    ("nbafl", {"epsilon": 2.0, "exposures": 2, "proximal": 60.0}),
]


@each(("system", "options"), RUN, ids=lambda value: str(value))
@pytest.mark.filterwarnings("ignore::dpfl.errors.Caution")
def test_a_run_gets_the_predicted_certificate(system: str, options: dict[str, Any]) -> None:
    given = BOUNDED[system] | {"most_rounds": 3, "share": 0.3} | options
    found, of = planned(system, **given), task(system, **given)
    real = train(found.system, of.federation, seed=1).certificate
    said = found.certificate
    assert said.rounds == real.rounds == found.best.rounds
    assert (said.unit, said.neighbours, said.claimed) == (real.unit, real.neighbours, real.claimed)
    assert said.observers.keys() == real.observers.keys()
    for observer, seen in real.observers.items():
        assert said.observers[observer].epsilon == pytest.approx(seen.epsilon, rel=1e-6)
    for one, other in zip(said.spending, real.spending, strict=True):
        assert one.replies == other.replies
        assert one.server_epsilon == pytest.approx(other.server_epsilon, rel=1e-6)


@pytest.mark.parametrize("rounds", [10, 400])
def test_ali_never_spends_more_than_was_predicted(rounds: int) -> None:
    # What it does after its first round depends on the training: the prediction has to be the most that it may spend.
    given = {"rounds": rounds, "share": 0.3, "epsilon": 3.0}
    found, of = planned("ali-dpfl", **given), task("ali-dpfl", **given)
    real = train(found.system, of.federation, seed=1, evaluate_every=1000).certificate
    for observer, seen in real.observers.items():
        assert seen.epsilon <= found.certificate.observers[observer].epsilon * (1 + 1e-9)
    assert found.certificate.observers["server"].epsilon <= 3.0


# (f) The curve and the papers' answer.

CURVES = [
    ("udp", {"epsilon": 1.0}),
    ("nbafl", {"fixed": ()}),
    ("fedsgd-dpc", {"lr": 0.2, "epsilon": 0.1}),
    ("fedsgd-dpc", {"rounds": 7, "cohort": 5, "fixed": ("rounds", "cohort")}),
    ("dp-fedavg", {}),
    ("dp-fedavg", {"total_steps": 24, "epsilon": 30.0, "mechanism": "laplace", "delta": 0.0, "lr": 0.002}),
    ("ali-dpfl", {"rounds": 30}),
    ("ali-dpfl", {"rounds": 400}),
]


@each(("system", "options"), CURVES, ids=lambda value: str(value))
def test_the_curve_is_the_bound_around_the_plan(system: str, options: dict[str, Any]) -> None:
    given = BOUNDED[system] | options
    found, of = planned(system, **given), task(system, **(given | {"total_steps": None}))
    assert len(found.curve) > 2
    assert len({(one.rounds, one.local_steps, one.cohort) for one in found.curve}) == len(found.curve)
    for point in found.curve:
        own = {"rounds": point.rounds, "local_steps": point.local_steps, "cohort": point.cohort}
        own["cohort"] = None if point.cohort == N else point.cohort
        own = {name: number for name, number in own.items() if name in PLANNERS[system].knows}
        there = bound_of(of, **own)
        assert point.bound == (pytest.approx(there, rel=1e-12) if math.isfinite(there) else None)
    assert found.best in found.curve


def test_the_curve_turns_at_the_best_number_of_rounds() -> None:
    found = planned("udp", lr=0.5, epsilon=1.0, most_rounds=40)
    line = {one.rounds: one.bound for one in found.curve if one.cohort == N}
    assert list(line) == sorted(line)
    assert line[found.best.rounds] == min(line.values())
    assert min(line) < found.best.rounds < max(line)
    assert {one.cohort for one in found.curve} > {N}  # the bound knows the cohort, which is not planned


def test_the_papers_answer_stands_beside() -> None:
    for system, given in BOUNDED.items():
        beside, alone = planned(system, **given).papers, planned(system, form="paper", **given)
        assert beside is not None
        assert beside.bound == pytest.approx(alone.best.bound, rel=1e-12)
        assert beside.local_steps == alone.best.local_steps
        assert alone.form == "paper"
    udp = planned("udp", lr=0.5, epsilon=1.0)
    assert udp.papers.rounds != udp.best.rounds
    # Theorem 3 as printed has no noise for so few rounds of 5 of 6 clients.
    silent = planned("nbafl", most_rounds=3, proximal=60.0, cohort=5, fixed=("cohort",), epsilon=50.0)
    assert silent.papers is None
    with pytest.raises(Void, match=r"^rounds must be at least 28 for Theorem 3 as printed"):
        planned("nbafl", form="paper", most_rounds=3, proximal=60.0, cohort=5, fixed=("cohort",), epsilon=50.0)


@each("system", list(BOUNDED))
def test_a_distance_is_worth_so_much_loss(system: str) -> None:
    found = planned(system, **BOUNDED[system])
    distance = system in ("dp-fedavg", "fedsgd-dpc")
    assert found.of == ("distance" if distance else "loss")
    assert found.in_loss == pytest.approx(found.best.bound * (2.0 / 2 if distance else 1.0))
    halved = planned(system, constants=replace(CONSTANTS, smoothness=1.5, polyak_lojasiewicz=0.3), **BOUNDED[system])
    assert halved.in_loss == pytest.approx(halved.best.bound * (1.5 / 2 if distance else 1.0))


def test_the_plan_as_plain_data() -> None:
    found = planned("udp", lr=0.5, epsilon=1.0)
    plain = found.to_dict()
    assert (plain["system"], plain["method"], plain["form"]) == ("udp", "bound", "general")
    assert (plain["rounds"], plain["local_steps"], plain["cohort"]) == (7, 1, N)
    assert plain["bound"] == plain["bound_in_loss"] == found.best.bound
    assert plain["options"] == {"rounds": 7}
    assert {"rounds": 7, "local_steps": 1, "cohort": N, "bound": found.best.bound} in plain["curve"]
    assert plain["constants"]["smoothness"]["value"] == 2.0
    assert plain["papers"]["rounds"] == found.papers.rounds
    assert plain["why"] == list(found.why)
    assert (plain["tried"], plain["bounds_answer"]) == ([], None)
    assert found.system == replace(task("udp", lr=0.5, epsilon=1.0).system, rounds=7)


# (g) Why.


def only(found: Plan, beginning: str) -> str:
    (sentence,) = (one for one in found.why if one.startswith(beginning))
    return sentence


def test_a_limit_that_is_reached_is_named() -> None:
    found, of = planned("fedsgd-dpc", lr=0.1), task("fedsgd-dpc", lr=0.1)
    half = bound_of(of, rounds=6)
    assert only(found, "All 12") == (
        f"All 12 rounds that are allowed are worth having: the bound is {half:.4g} with 6."
    )
    fewer = bound_of(of, rounds=12, cohort=3)
    assert only(found, "All 6") == f"All 6 clients are worth having: the bound is {fewer:.4g} with 3."


def test_the_round_after_which_noise_outweighs_is_named() -> None:
    found, of = planned("udp", lr=0.5, epsilon=1.0), task("udp", lr=0.5, epsilon=1.0)
    more, less = bound_of(of, rounds=12), bound_of(of, rounds=3)  # twice as many are not allowed
    assert only(found, "Beyond") == (
        "Beyond round 7 the noise that each extra round adds outweighs what it learns: the bound is"
        f" {more:.4g} with 12, and is {less:.4g} with 3."
    )
    assert only(found, "The bound is on").startswith("The bound is on the loss above its least value, and is 1.283")
    assert found.best.bound < min(more, less)


def test_local_steps_that_drift_are_named() -> None:
    found, of = planned("ali-dpfl", rounds=5), task("ali-dpfl", rounds=5)
    assert found.best.local_steps == 2
    assert only(found, "More local steps") == (
        "More local steps a round than 2 let clients drift apart by more than they learn: the bound is"
        f" {bound_of(of, local_steps=4):.4g} with 4, and is {bound_of(of, local_steps=1):.4g} with 1."
    )


def test_neighbours_without_a_bound_say_nothing() -> None:
    found = planned("nbafl", proximal=20.0)
    assert not math.isfinite(bound_of(task("nbafl", proximal=20.0), cohort=3, rounds=found.best.rounds))
    assert only(found, "All 6") == "All 6 clients are worth having: the bound says nothing with 3."


def test_a_bound_that_promises_nothing_says_so() -> None:
    tiny = planned("udp", lr=0.5, epsilon=0.01)
    assert tiny.best.bound > 3.0
    assert only(tiny, "The bound promises").startswith("The bound promises nothing of the 3 that training begins with")
    some = planned("nbafl", **BOUNDED["nbafl"])
    assert 1.5 < some.best.bound < 3.0
    gain = f"{1 - some.best.bound / 3:.0%}"
    assert only(some, "The bound promises").startswith(f"The bound promises {gain} of the 3 that training begins with")
    assert not [one for one in planned("udp", lr=0.5).why if one.startswith("The bound promises")]
    # A bound on a distance is measured by the distance.
    far = planned("dp-fedavg", lr=0.1)
    assert only(far, "The bound promises").startswith("The bound promises nothing of the 5 that")


def test_how_much_of_the_bound_is_noise() -> None:
    found, of = planned("udp", lr=0.5, epsilon=1.0), task("udp", lr=0.5, epsilon=1e6)
    quiet = bound_of(of, rounds=7)
    share = 1 - quiet / found.best.bound
    sentence = f"{share:.0%} of the bound is noise: without any it would be {quiet:.4g} at the same numbers."
    assert sentence in found.why
    assert 0.2 < share < 0.9
    assert not [one for one in planned("ali-dpfl").why if "is noise" in one]  # its noise is given


def test_a_given_cohort_is_named() -> None:
    assert "2 of 6 clients a round were given." in planned("udp", lr=0.5, cohort=2).why


def test_exposures_do_not_stand_in_the_way_of_reasons() -> None:
    # Half of the four rounds that are the least with four uploads overheard are no option of the system.
    found = planned("nbafl", **BOUNDED["nbafl"], exposures=4, epsilon=1.0)
    assert 4 <= found.best.rounds <= 7
    assert found.why


# (h) Constants that are missing, and bounds that are void.


def refuse_to_estimate(*_: Any, **__: Any) -> Constants:
    raise AssertionError("nothing is missing")


@each("system", list(BOUNDED))
def test_only_what_is_needed_and_missing_is_estimated(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {name: getattr(CONSTANTS, name) for name in PLANNERS[system].needs}
    monkeypatch.setattr(by_bound, "estimate", refuse_to_estimate)
    whole = planned(system, **BOUNDED[system])
    assert planned(system, constants=Constants(**needed), **BOUNDED[system]).best == whole.best
    with pytest.raises(AssertionError, match="nothing is missing"):
        planned(system, constants=Constants(**(needed | {PLANNERS[system].needs[0]: None})), **BOUNDED[system])


def test_given_constants_stand_before_those_that_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def estimated(model: Any, clients: Any, **options: Any) -> Constants:
        asked.append((len(clients), options["clip"].clip_norm))
        return replace(CONSTANTS, initial_gap=77.0, smoothness=1e-9, source="public records")

    monkeypatch.setattr(by_bound, "estimate", estimated)
    found = planned("udp", lr=0.5, clip=0.7, constants=replace(CONSTANTS, initial_gap=None))
    assert asked == [(N, 0.7)]
    assert (found.constants.initial_gap, found.constants.smoothness) == (77.0, 2.0)
    assert found.constants.source == "public records"
    assert found.best.bound > planned("udp", lr=0.5, clip=0.7).best.bound


def test_without_public_records_constants_are_estimated_on_made_up_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    given = planned("udp", lr=0.5, validation_share=0.0)
    assert given.constants == CONSTANTS
    of = task("udp", lr=0.5, validation_share=0.0, epsilon=1.0, share=0.2)
    found = make(of, method="bound")
    assert found.constants.source.startswith(f"made-up records in {N} clients")
    assert not set(found.constants.missing) & set(PLANNERS["udp"].needs)
    assert 1 <= found.best.rounds <= 12
    # Clients' own records are not what the constants are of.
    broken = tuple(Records(torch.full_like(one.x, math.nan), one.y) for one in of.federation.clients)
    same = make(replace(of, federation=replace(of.federation, clients=broken)), method="bound")
    assert same.constants == found.constants
    # And other sizes, which are public, are other constants.
    fewer = make(task("udp", lr=0.5, validation_share=0.0, epsilon=1.0, share=0.1), method="bound")
    assert fewer.constants != found.constants


def test_a_void_bound_names_the_inequality_for_the_numbers_as_given() -> None:
    with pytest.raises(Void, match=r"^lr must be below 2/L = 1 for the bound of udp to hold, was 1.5"):
        planned("udp", lr=1.5)
    with pytest.raises(Void, match=r"^lr must be at most 1/\(4λ\) = 0.125 for the bound of dp-fedavg to hold, was 0.2"):
        planned("dp-fedavg", lr=0.2)
    with pytest.raises(Void, match=r"^lr must be at most 1/λ = 0.5 for the bound of fedsgd-dpc to hold, was 0.6"):
        planned("fedsgd-dpc", lr=0.6)
    with pytest.raises(Void, match=r"^lr_schedule must fall so slowly .* within a round of 10 steps, was 'inverse:2"):
        planned("dp-fedavg", lr=0.1, lr_schedule="inverse:2.0", local_steps=10, fixed=("local_steps",))
    with pytest.raises(Void, match=r"^clip must be a number for the bound of udp, .* was 'median'"):
        planned("udp", clip="median")
    for options in ({"clipping": "model"}, {"local_steps": 2}, {"local_epochs": 2}):
        with pytest.raises(Void, match=r"^clipping must be 'record' and local_steps 1 for the bound of udp"):
            planned("udp", **options)
    for system in ("ali-dpfl", "dp-fedavg", "fedsgd-dpc"):
        with pytest.raises(Void, match=r"^strong_convexity \(μ\) must be above 0"):
            planned(system, **BOUNDED[system], constants=replace(CONSTANTS, strong_convexity=0.0))


def test_nbafls_void_bound_is_told_for_all_clients_and_its_way_out_works() -> None:
    # All clients were to take part, so the refusal is that of P, and a stronger pull mends it.
    with pytest.raises(Void) as refusal:
        planned("nbafl")
    sentence = str(refusal.value)
    assert sentence.startswith("P must be at least 0 and below 1 for NbAFL's bound to say anything")
    pull = re.search(r"set proximal to ([\d.e+]+) or more", sentence)
    assert pull is not None
    assert math.isfinite(planned("nbafl", proximal=float(pull[1])).best.bound)
    with pytest.raises(Void, match=r"^Q must be at least 0 and below 1 .* let more clients take part"):
        planned("nbafl", cohort=1, fixed=("cohort",))


def test_systems_that_have_no_bound() -> None:
    with pytest.raises(BadInput, match=r"^system must be one whose paper gives a bound .*was 'dpsgd-fedavg'; use --me"):
        planned("dpsgd-fedavg")
    with pytest.raises(BadInput, match=r"^system must be one that spends a privacy budget, was 'fedavg'"):
        Task(parse({"system": "fedavg"}), task("udp").federation)


def test_how_a_plan_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    of = task("udp", lr=0.5)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("dpfl.planning.plan_by_pilot", lambda of, **options: asked.append(options))
    make(of, constants=CONSTANTS)
    make(of, method="pilot", constants=CONSTANTS)
    assert asked[0] == asked[1]  # a pilot unless a bound is asked for
    assert asked[0]["chooses"] == ("rounds", "lr", "clip", "noise_multiplier", "averaged")
    assert make(of, method="bound", constants=CONSTANTS).best == planned("udp", lr=0.5).best
    paper = make(of, method="bound", form="paper", constants=CONSTANTS)
    assert paper.best == planned("udp", form="paper", lr=0.5).best
    assert len(asked) == 2
    with pytest.raises(BadInput, match=r"^method must be one of bound, pilot, was 'guess'"):
        make(of, method="guess")
    with pytest.raises(BadInput, match=r"^form must be one of general, paper, was 'short'"):
        make(of, form="short")
    with pytest.raises(BadInput, match=r"^search must come with a pilot, was \['lr'\] with a bound"):
        make(of, method="bound", constants=CONSTANTS, search={"lr": [0.5, 1.0]})


def test_a_plan_from_python() -> None:
    of = task("udp", lr=0.5, epsilon=1.0)
    options = {"method": "bound", "constants": CONSTANTS, "max_rounds": 12, "seed": 1}
    found = plan(of.system, of.federation, **options)
    assert (found.best, found.certificate) == (
        planned("udp", lr=0.5, epsilon=1.0).best,
        make(of, method="bound", constants=CONSTANTS).certificate,
    )
    kept = plan(replace(of.system, rounds=3), of.federation, keep=("rounds",), **options)
    assert (kept.best.rounds, kept.options) == (3, {})
    # A module of one's own is planned for by its own size, and left as it is.
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10, bias=False))
    before = module[1].weight.clone()  # type: ignore[operator]
    own = plan(of.system, of.federation, module, loss=torch.nn.functional.cross_entropy, **options)
    assert torch.equal(module[1].weight, before)
    assert own.best.bound < found.best.bound  # 640 parameters are noised, not 650
    with pytest.raises(
        BadInput, match=r"^keep must be one of rounds, local_steps, cohort, lr, clip, noise_multiplier,"
    ):
        plan(of.system, of.federation, keep=("epsilon",), **options)


def test_all_uploads_may_count_as_overheard() -> None:
    few, all_ = (planned("nbafl", **BOUNDED["nbafl"], all_overheard=flag) for flag in (False, True))
    assert all_.system.exposures == all_.system.rounds == all_.options["exposures"]  # type: ignore[attr-defined]
    assert few.system.exposures == 1  # type: ignore[attr-defined]
    assert all_.certificate.observers["server"].epsilon == pytest.approx(8.0, rel=1e-5)
    assert few.certificate.observers["server"].epsilon > 8.0
    assert all_.best.bound > few.best.bound
