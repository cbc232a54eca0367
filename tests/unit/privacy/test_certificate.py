"""The certificate says what was promised, what was really spent against whom, and never flatters."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dpfl.federation import Schedule
from dpfl.orders import Gaussian, Laplace, ModelClip, Order, Poisson, RecordClip
from dpfl.privacy.accounting import Mechanism, tight
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.certificate import Certificate, certify, disagreements
from dpfl.privacy.gaussian_dp import epsilon_of, mu_of
from dpfl.privacy.ledger import Ledger
from dpfl.report.certificate import text
from dpfl.rounding import rounded_up
from dpfl.streams import Streams
from dpfl.systems import UDP, FedAvg, Feedback, Problem, System
from grids import each

DELTA = 1e-5


def certificate_of(system: System, sizes: tuple[int, ...] = (10, 20, 30), *, seeded: bool = False) -> Certificate:
    """Play the books of a whole training without training anything."""
    schedule = Schedule(system.cohorts(len(sizes)), Streams(0).public)
    ledger = Ledger(
        system.promise(sizes), sizes, system=system.name, config="0123456789ab", seeded=seeded,
        versions={"dpfl": "0.1"},
    )  # fmt: skip
    state = system.begin(Problem(sizes, 4, schedule), np.zeros(4), Feedback())
    while state.round < state.rounds:
        paid = ledger.charge(system.orders(state))
        ledger.broadcast(system.weights(state, sorted(paid)))
        state = replace(state, round=state.round + 1)
    return certify(ledger.books, ledger.run)


def begun(*budgets: Budget, sizes: tuple[int, ...] | None = None, **terms: Any) -> Ledger:
    """Begin the books of clients with ten records each."""
    usual = {"unit": "record", "neighbours": "replace", "calibration": "paper"}
    promise = Promise(budgets=budgets, **usual | terms)
    return Ledger(promise, sizes or (10,) * len(budgets), system="made up", config=None, seeded=False, versions={})


def noised(multiplier: float, **changes: Any) -> Order:
    """Order one step whose noise is so many sensitivities: Δ = 2ηC/n = 0.1 for η = 0.5, C = 1 and ten records."""
    usual = {"steps": 1, "learning_rate": 0.5, "clip": RecordClip(1.0), "noise": Gaussian(0.1 * multiplier)}
    return Order(**usual | changes)


def played(ledger: Ledger, orders: Mapping[int, Order], *, rounds: int = 1, noise_std: float = 0.0) -> Certificate:
    """Charge the same orders in every round, and weigh all uploads alike."""
    for _ in range(rounds):
        ledger.charge(orders)
        ledger.broadcast(dict.fromkeys(orders, 1 / len(orders)), noise_std=noise_std)
    return certify(ledger.books, ledger.run)


def worth(mu: float, delta: float = DELTA) -> Any:
    """Return the ε of a Gaussian-DP parameter, up to the six digits that the books keep of a weight."""
    return pytest.approx(float(epsilon_of(mu, delta)), rel=1e-5)


def row(certificate: Certificate, observer: str) -> str:
    """Return the printed line of one observer, and the one that it goes on in where it is long."""
    lines = str(certificate).splitlines()
    first = next(place for place, line in enumerate(lines) if line.strip().startswith(observer))
    goes_on = lines[first].strip() and lines[first + 1].startswith(" " * 20) and " ≤ " not in lines[first + 1]
    return "\n".join(lines[first : first + 2]) if goes_on else lines[first]


# Against the server.


def test_a_tight_run_stays_within_the_promise() -> None:
    certificate = certificate_of(UDP(epsilon=8.0, delta=1e-3, rounds=30))
    server = certificate.observers["server"]
    assert server.basis == "proved"
    assert server.delta == 1e-3
    assert 8.0 * (1 - 1e-3) <= server.epsilon <= 8.0
    assert certificate.claimed == {"epsilon": 8.0, "delta": 1e-3}
    assert "ε = 8, δ = 0.001   ε ≤ 8   within the promise   the clipping performed" in row(certificate, "the server")
    assert [(line.client, line.replies) for line in certificate.spending] == [(0, 30), (1, 30), (2, 30)]
    assert all(line.server_epsilon <= 8.0 for line in certificate.spending)
    assert (certificate.clients, certificate.rounds) == (3, 30)


def test_the_papers_calibration_shows_what_it_was_really_worth() -> None:
    # UDP's formula at a claimed ε = 20, δ = 1e-3 and all clients in every round: really 30.32, or 52 % more.
    certificate = certificate_of(UDP(epsilon=20.0, delta=1e-3, rounds=50, calibration="paper"))
    assert certificate.observers["server"].epsilon == pytest.approx(30.32, abs=0.005)
    assert "ε = 20, δ = 0.001   ε ≤ 30.32   52 % MORE than promised " in row(certificate, "the server")
    assert "paper calibration" in str(certificate)
    assert [line.claimed_epsilon for line in certificate.spending] == [20.0] * 3


def test_each_clients_line_is_at_its_own_budget() -> None:
    epsilon, delta = (1.0, 20.0, 4.0), (1e-3, 1e-5, 1e-2)
    certificate = certificate_of(UDP(epsilon=epsilon, delta=delta, rounds=7, calibration="paper"))
    for line, claimed, its_delta in zip(certificate.spending, epsilon, delta, strict=True):
        # σ = Δ·√(2R·ln(1/δ))/ε, so μ = √R·Δ/σ = ε/√(2·ln(1/δ)).
        true = float(epsilon_of(claimed / math.sqrt(2 * math.log(1 / its_delta)), its_delta))
        assert (line.claimed_epsilon, line.delta) == (claimed, its_delta)
        assert line.server_epsilon == pytest.approx(true, rel=1e-8)
    # Only client 1 spent more than it was promised; the largest claim and its δ stand in the headline.
    assert [line.server_epsilon > line.claimed_epsilon for line in certificate.spending] == [False, True, False]
    assert certificate.claimed == {"epsilon": 20.0, "delta": 1e-5}
    assert certificate.observers["server"].epsilon == certificate.spending[1].server_epsilon
    assert certificate.observers["server"].delta == 1e-5
    assert "MORE than promised, for 1 of 3 clients" in row(certificate, "the server")


def test_a_client_that_overspent_a_small_budget_is_not_hidden_by_a_large_one() -> None:
    # Both spent ε = 4.378 (μ = 1). Client 0 was promised 1: 338 % more; client 1 was promised 50.
    certificate = played(begun(Budget(1.0, DELTA), Budget(50.0, DELTA)), {0: noised(1.0), 1: noised(1.0)})
    for part in ("ε = 1 to 50,", "δ = 1e-05", "ε ≤ 4.378", "338 % MORE than promised, for 1 of 2 clients"):
        assert part in row(certificate, "the server")


@each(
    ("granted", "verdict"),
    [
        ((4.0, 4.0), "9.4 % MORE than promised "),  # all of them: 4.378/4
        ((4.0, 5.0), "9.4 % MORE than promised, for 1 of 2 clients"),
        ((4.0, 2.0), "119 % MORE than promised "),  # the worst of them: 4.378/2
        ((5.0, 5.0), "within the promise"),
    ],
)
def test_a_verdict_says_how_much_and_for_how_many(granted: tuple[float, float], verdict: str) -> None:
    certificate = played(begun(*(Budget(one, DELTA) for one in granted)), {0: noised(1.0), 1: noised(1.0)})
    assert verdict in row(certificate, "the server")


def test_a_small_overspending_is_not_printed_as_none() -> None:
    # Promised 8 and spent 8.016: 0.2 % more. "0 % MORE" would contradict itself.
    certificate = played(begun(Budget(8.0, 1e-3)), {0: noised(1 / float(mu_of(8.016, 1e-3)))})
    assert "ε ≤ 8.016   0.2 % MORE than promised" in row(certificate, "the server")


def test_a_cohort_is_charged_for_the_rounds_it_answered_and_nothing_is_amplified() -> None:
    # Client 0 answers all four rounds, client 1 three, client 2 one, client 3 none; each release has μ = 1/2.
    ledger = begun(*[Budget(8.0, DELTA)] * 4)
    for cohort in ((0, 1), (0, 2), (0, 1), (0, 1)):
        ledger.charge(dict.fromkeys(cohort, noised(2.0)))
        ledger.broadcast(dict.fromkeys(cohort, 1 / 2))
    certificate = certify(ledger.books, ledger.run)
    assert [line.replies for line in certificate.spending] == [4, 3, 1, 0]
    for line, replies in zip(certificate.spending, (4, 3, 1, 0), strict=True):
        mu = math.sqrt(replies) / 2
        assert line.server_epsilon == worth(mu)
        # Two uploads a round, halved: the noise is √(2/4) of one, the record counts 1/2. Never a half for "2 of 4".
        assert line.released_epsilon == worth(mu / math.sqrt(2))


def test_the_papers_amplification_by_cohorts_is_not_believed() -> None:
    # UDP divides by q = K/N where a client answers about qR rounds: μ = √replies·ε/√(2qR·ln(1/δ)).
    system = UDP(epsilon=4.0, delta=1e-3, rounds=20, cohort=1, calibration="paper")
    for line in certificate_of(system).spending:
        mu = math.sqrt(line.replies) * 4 / math.sqrt(2 * (1 / 3) * 20 * math.log(1e3))
        assert line.server_epsilon == worth(mu, 1e-3)


# Against readers of the released models.


@pytest.mark.parametrize("rounds", [1, 40])
def test_the_noise_of_equal_clients_averages_out_for_readers(rounds: int) -> None:
    # μ = 20/√(2·ln(1000)) = 5.381 for the server, and a √50-th of it for readers: 0.761, or ε = 2.245.
    certificate = certificate_of(UDP(epsilon=20.0, delta=1e-3, rounds=rounds, calibration="paper"), (64,) * 50)
    assert certificate.observers["server"].epsilon == pytest.approx(30.32, abs=0.005)
    assert certificate.observers["released"].epsilon == worth(20 / math.sqrt(2 * math.log(1e3)) / math.sqrt(50), 1e-3)
    assert "ε ≤ 2.245" in row(certificate, "released models")
    assert {round_to(line.released_epsilon) for line in certificate.spending} == {2.245}
    # A promise to the server is no promise to readers, and no verdict stands there.
    assert certificate.against == ("server",)
    assert "promise" not in row(certificate, "released models")


def round_to(number: float | None) -> float:
    return round(number or 0.0, 3)


def test_readers_learn_as_little_about_udps_small_clients_as_about_its_large_ones() -> None:
    # σ_i is made for 2ηC/n_i and weighed by n_i: all p_iσ_i are equal, and so are all p_iΔ_i.
    certificate = certificate_of(UDP(epsilon=20.0, delta=1e-3, rounds=5, calibration="paper"), (10, 100, 1000, 30))
    mu = 20 / math.sqrt(2 * math.log(1e3)) / 2
    assert [line.released_epsilon for line in certificate.spending] == [worth(mu, 1e-3)] * 4


def test_a_client_with_most_of_the_weight_gets_hardly_any_help() -> None:
    # Weights 0.91 and nine of 0.01, all with μ = 1: the variance is 0.91² + 9·0.01² = 0.829.
    ledger = begun(*[Budget(8.0, DELTA)] * 10)
    ledger.charge(dict.fromkeys(range(10), noised(1.0)))
    ledger.broadcast({0: 0.91} | dict.fromkeys(range(1, 10), 0.01))
    certificate = certify(ledger.books, ledger.run)
    large, *small = (line.released_epsilon for line in certificate.spending)
    assert large == worth(0.91 / math.sqrt(0.829))  # μ = 0.9995
    assert small == [worth(0.01 / math.sqrt(0.829))] * 9  # μ = 0.011
    assert certificate.observers["released"].epsilon == large  # the headline is for the one that spent most


def test_the_servers_own_noise_counts_for_readers_only() -> None:
    # Two halves of noise 3√2 (in units of Δ) make 3; the server adds 4: √(9 + 16) = 5, against half a record: 10.
    ledger = begun(Budget(8.0, DELTA), Budget(8.0, DELTA))
    order = noised(3 * math.sqrt(2))
    certificate = played(ledger, {0: order, 1: order}, rounds=100, noise_std=4 * 0.1)
    assert certificate.observers["server"].epsilon == worth(10 / math.sqrt(18))
    assert certificate.observers["released"].epsilon == worth(1.0)  # √100/10


def test_noise_inside_one_step_counts_as_it_is_in_the_upload() -> None:
    # The sum of ten clipped records moves by 2C = 2; noise of 4 on it makes μ = 1/2, in the upload as on the sum.
    inside = noised(1.0, noise=Gaussian(4.0), noise_on="step")
    certificate = played(begun(*[Budget(8.0, DELTA)] * 4), dict.fromkeys(range(4), inside))
    assert certificate.observers["server"].epsilon == worth(1 / 2)
    assert certificate.observers["released"].epsilon == worth(1 / 4)


def test_every_noised_step_is_a_release_of_its_own() -> None:
    # Noise of 4 on a sum that moves by 2 makes μ = 1/2 a step, and 1 after the four of two rounds.
    steps = noised(1.0, steps=2, noise=Gaussian(4.0), noise_on="step")
    certificate = played(begun(Budget(8.0, DELTA)), {0: steps}, rounds=2)
    assert certificate.observers["server"].epsilon == worth(1.0)
    assert certificate.spending[0].replies == 2


@pytest.mark.parametrize(
    "order",
    [
        noised(1.0, steps=3, noise=Gaussian(4.0), noise_on="step"),  # later steps train on the noise of earlier ones
        noised(1.0, clip=RecordClip(1.0, 1), noise=Laplace(0.5)),  # sums of Laplace noise are no Laplace noise
    ],
)
def test_where_noise_does_not_simply_average_readers_are_taken_for_the_server(order: Order) -> None:
    certificate = played(begun(*[Budget(8.0, DELTA)] * 4), dict.fromkeys(range(4), order))
    observers = certificate.observers
    assert observers["released"].epsilon == observers["server"].epsilon > 0
    assert row(certificate, "released models").endswith("no more than the server sees")


def test_a_round_that_was_never_sent_out_shows_readers_nothing() -> None:
    ledger = begun(Budget(8.0, DELTA), Budget(8.0, DELTA))
    played(ledger, {0: noised(2.0), 1: noised(2.0)}, rounds=2)
    ledger.charge({0: noised(2.0), 1: noised(2.0)})  # and then the process was killed
    certificate = certify(ledger.books, ledger.run)
    assert certificate.rounds == 3
    assert certificate.observers["server"].epsilon == worth(math.sqrt(3) / 2)
    assert certificate.observers["released"].epsilon == worth(math.sqrt(2) / 2 / math.sqrt(2))


def test_an_upload_that_was_left_out_of_the_model_shows_readers_nothing() -> None:
    ledger = begun(*[Budget(8.0, DELTA)] * 3)
    ledger.charge(dict.fromkeys(range(3), noised(1.0)))
    ledger.broadcast({0: 1.0, 1: 0.0})  # client 1 weighs nothing, client 2 came too late
    certificate = certify(ledger.books, ledger.run)
    assert [line.released_epsilon for line in certificate.spending] == [worth(1.0), 0.0, 0.0]
    assert [line.server_epsilon for line in certificate.spending] == [worth(1.0)] * 3


@each("seed", range(5))
def test_readers_never_learn_more_than_the_server(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ledger = begun(*[Budget(8.0, DELTA)] * 4)
    for _ in range(6):
        cohort = rng.choice(4, size=rng.integers(1, 5), replace=False).tolist()
        ledger.charge({client: noised(rng.uniform(1, 30)) for client in cohort})
        ledger.broadcast(dict(zip(cohort, rng.dirichlet([0.3] * len(cohort)), strict=True)), noise_std=rng.uniform())
    for line in certify(ledger.books, ledger.run).spending:
        assert line.released_epsilon <= line.server_epsilon


def test_readers_of_a_single_clients_models_learn_what_the_server_learns_and_no_more() -> None:
    (line,) = played(begun(Budget(8.0, DELTA)), {0: noised(1.0)}).spending
    assert line.released_epsilon == worth(1.0)
    assert line.released_epsilon <= line.server_epsilon


# Against an eavesdropper.


def test_an_eavesdropper_is_shown_only_where_a_promise_names_one() -> None:
    assert set(certificate_of(UDP(rounds=2)).observers) == {"server", "released"}
    assert set(played(begun(Budget(8.0, DELTA), exposures=2), {0: noised(1.0)}).observers) == {
        "server", "uplink", "released",
    }  # fmt: skip


def test_an_eavesdropper_overhears_the_dearest_uploads_and_reads_the_other_models() -> None:
    # Two alike weigh a half each: a model tells half of what an upload tells.
    ledger = begun(Budget(8.0, DELTA), Budget(8.0, DELTA), exposures=2)
    for multiplier in (8.0, 2.0, 16.0, 4.0, 8.0):
        ledger.charge(dict.fromkeys(range(2), noised(multiplier)))
        ledger.broadcast({0: 1 / 2, 1: 1 / 2})
    certificate = certify(ledger.books, ledger.run)
    assert certificate.exposures == 2
    # The two with least noise, 1/4 + 1/16, and half of 1/64 + 1/256 + 1/64. The server sees all of it.
    assert certificate.observers["uplink"].epsilon == worth(math.sqrt(5 / 16 + 9 / 256 / 2))
    assert certificate.spending[0].uplink_epsilon == certificate.observers["uplink"].epsilon
    assert certificate.observers["server"].epsilon == worth(math.sqrt(89 / 256))
    assert certificate.observers["released"].epsilon == worth(math.sqrt(89 / 256 / 2))
    assert "ε ≤" in row(certificate, "an eavesdropper, 2 uploads")


def test_alone_an_eavesdropper_reads_what_he_does_not_hear() -> None:
    certificate = played(begun(Budget(8.0, DELTA), exposures=1), {0: noised(2.0)}, rounds=4)
    assert certificate.observers["uplink"].epsilon == worth(1.0)
    assert row(certificate, "an eavesdropper, 1 upload").endswith("no more than the server sees")


@pytest.mark.parametrize(
    "terms", [{"uncounted": ("the loss of every model on each client's records",)}, {"follows": True}]
)
def test_where_readers_count_as_the_server_so_does_an_eavesdropper(terms: dict[str, Any]) -> None:
    follows = terms.pop("follows", False)
    ledger = begun(*[Budget(8.0, DELTA)] * 4, exposures=1, **terms)
    made = Ledger(ledger.promise, ledger.sizes, system="made up", follows_uploads=follows)
    observers = played(made, dict.fromkeys(range(4), noised(2.0)), rounds=4).observers
    assert observers["uplink"].epsilon == observers["released"].epsilon == observers["server"].epsilon == worth(1.0)


def test_an_eavesdropper_on_more_uploads_than_there_were_sees_what_the_server_sees() -> None:
    certificate = played(begun(Budget(8.0, DELTA), exposures=9), {0: noised(2.0)}, rounds=4)
    assert certificate.observers["uplink"].epsilon == certificate.observers["server"].epsilon == worth(1.0)
    assert row(certificate, "an eavesdropper, 9 uploads").endswith("no more than the server sees")


@pytest.mark.parametrize("rate", [0.2, 0.11])
def test_where_uploads_cannot_be_ranked_an_eavesdropper_may_have_heard_any(rate: float) -> None:
    # Two steps with a little less noise against twelve with a little more: which upload is dearer, noise does not tell.
    ledger = begun(Budget(8.0, DELTA), neighbours="add-remove", exposures=1)
    for its_rate, steps, std in ((rate, 2, 1.0), (0.1, 12, 1.01)):
        ledger.charge({0: noised(1.0, steps=steps, noise=Gaussian(std), noise_on="step", batch=Poisson(its_rate))})
    dearer = tight({Mechanism("gaussian", 1.01, 0.1): 12}, DELTA)
    assert certify(ledger.books, ledger.run).observers["uplink"].epsilon >= dearer


def test_the_verdict_stands_with_the_observer_it_was_promised_against() -> None:
    # Nine releases of μ = 1 among a hundred: one that is heard and eight that are read make μ² = 1.08, or ε = 4.577 of
    # the 5 promised, and all nine far more.
    ledger = begun(*[Budget(5.0, DELTA)] * 100, exposures=1, against=("uplink",), calibration="tight")
    certificate = played(ledger, dict.fromkeys(range(100), noised(1.0)), rounds=9)
    observers = certificate.observers
    assert certificate.against == ("uplink",)
    assert "ε = 5, δ = 1e-05   ε ≤ 4.577   within the promise" in row(certificate, "an eavesdropper, 1 upload ")
    assert observers["uplink"].slack == pytest.approx(5 - float(epsilon_of(math.sqrt(1.08), DELTA)), abs=1e-4)
    assert observers["server"].epsilon == worth(3.0)
    assert observers["server"].slack is observers["released"].slack is None
    for observer in ("the server", "released models"):
        assert "promise" not in row(certificate, observer)
        assert " –  " in row(certificate, observer)


def test_a_promise_against_several_has_a_verdict_for_each() -> None:
    ledger = begun(Budget(3.0, DELTA), Budget(3.0, DELTA), against=("server", "released"))
    certificate = played(ledger, {0: noised(1.0), 1: noised(1.0)})
    assert "46 % MORE than promised" in row(certificate, "the server")  # 4.378/3
    assert "within the promise" in row(certificate, "released models")  # μ = 1/√2


# What the numbers rest on.


@pytest.mark.parametrize("share", [1 / 2, 1 / 40])
def test_the_proved_sensitivity_is_the_headline_and_the_claimed_one_stands_beside_it(share: float) -> None:
    certificate = played(begun(Budget(8.0, DELTA), claimed_sensitivity=share), {0: noised(1.0)})
    server = certificate.observers["server"]
    assert (server.basis, server.claimed_basis) == ("proved", "claimed")
    assert server.epsilon == worth(1.0)
    assert server.claimed_epsilon == worth(share)
    assert certificate.spending[0].server_epsilon == server.epsilon
    lines = str(certificate).splitlines()
    beside = lines[lines.index(row(certificate, "the server")) + 1]
    assert f"ε ≤ {rounded_up(server.claimed_epsilon)} " in beside
    assert beside.endswith("the paper's sensitivity, claimed")


def test_nbafls_sensitivity_is_worth_nothing_like_it_claims() -> None:
    # Clipped parameters move by 2C = 2, the paper says 2C/m; noise of 4 on each of two uploads is really μ = √2/2.
    order = noised(1.0, clip=ModelClip(1.0), noise=Gaussian(4.0), steps=5)
    ledger = begun(*[Budget(8.0, DELTA)] * 2, sizes=(50, 100), claimed_sensitivity=1 / 50)
    server = played(ledger, {0: order, 1: order}, rounds=2).observers["server"]
    assert server.epsilon == worth(math.sqrt(2) / 2)
    assert server.claimed_epsilon == worth(math.sqrt(2) / 2 / 50)


def test_a_claim_can_be_another_for_each_client() -> None:
    # Both move by 2C = 2 under noise of 4, μ = ½; that is 1/5 and 1/100 of it to whoever divides by their records.
    order = noised(1.0, clip=ModelClip(1.0), noise=Gaussian(4.0), steps=5)
    ledger = begun(*[Budget(8.0, DELTA)] * 2, sizes=(5, 100), claimed_sensitivity=(1 / 5, 1 / 100))
    server = played(ledger, {0: order, 1: order}).observers["server"]
    assert (server.epsilon, server.claimed_epsilon) == (worth(0.5), worth(0.5 / 5))


def test_where_paper_and_proof_agree_nothing_is_claimed_apart() -> None:
    certificate = certificate_of(UDP(rounds=2, calibration="paper"))
    for seen in certificate.observers.values():
        assert (seen.basis, seen.claimed_epsilon, seen.claimed_basis) == ("proved", None, None)
    assert "claimed, not proved" not in str(certificate)


def test_the_slack_is_that_of_the_client_which_has_least() -> None:
    # Both spent 4.37718 (μ = 1): client 0 has 5.62 left, client 1 only 0.12.
    certificate = played(begun(Budget(10.0, DELTA), Budget(4.5, DELTA)), {0: noised(1.0), 1: noised(1.0)})
    assert certificate.observers["server"].slack == pytest.approx(4.5 - 4.37718, abs=1e-5)
    assert certificate.observers["released"].slack is None  # nothing was promised there


def test_an_overdrawn_promise_has_negative_slack() -> None:
    certificate = played(begun(Budget(10.0, DELTA), Budget(4.0, DELTA)), {0: noised(1.0), 1: noised(1.0)})
    assert certificate.observers["server"].slack == pytest.approx(4.0 - 4.37718, abs=1e-5)


def test_noise_chosen_along_the_way_costs_the_whole_budget() -> None:
    # What happened to be spent (μ = 1/2 of one release) is no bound: other noise might have been chosen.
    ledger = begun(Budget(8.0, DELTA), Budget(3.0, DELTA), calibration="tight", noise="adaptive")
    certificate = played(ledger, {0: noised(2.0)})
    assert [line.server_epsilon for line in certificate.spending] == [8.0, 3.0]  # client 1 might still have been asked
    assert certificate.observers["server"].epsilon == 8.0
    assert certificate.observers["released"].epsilon <= 8.0
    assert "within the promise" in row(certificate, "the server")


@pytest.mark.parametrize("against", [("uplink",), ("uplink", "released")])
def test_a_filter_for_eavesdroppers_bounds_what_readers_see_and_not_what_the_server_sees(
    against: tuple[str, ...],
) -> None:
    # Each of 50 uploads fits the budget of one, and what 50 models tell of it is little. All of them have μ = √50.
    ledger = begun(*[Budget(8.0, DELTA)] * 100, calibration="tight", noise="adaptive", against=against, exposures=1)
    certificate = played(ledger, dict.fromkeys(range(100), noised(1.0)), rounds=50)
    assert certificate.observers["uplink"].epsilon == certificate.observers["released"].epsilon == 8.0
    assert certificate.observers["server"].epsilon >= float(epsilon_of(math.sqrt(50), DELTA)) * (1 - 1e-5)


# Other noise.


def test_laplace_noise_is_purely_private_and_adds_up() -> None:
    # Δ₁ = 0.1 and a scale of 0.8: ε = 1/8 a round, and a half after four.
    order = noised(1.0, clip=RecordClip(1.0, 1), noise=Laplace(0.8))
    certificate = played(begun(Budget(0.6, 0.0), calibration="tight"), {0: order}, rounds=4)
    server = certificate.observers["server"]
    assert (server.epsilon, server.delta, server.slack) == (pytest.approx(0.5), 0.0, pytest.approx(0.1))
    assert server.epsilon >= 0.5
    assert "ε = 0.6, δ = 0   ε ≤ 0.5" in row(certificate, "the server")
    assert "within the promise" in row(certificate, "the server")
    assert certificate.cautions == ()


def test_sampled_batches_are_amplified_where_a_record_is_added_or_removed() -> None:
    # ALI-DPFL's setting: noise of 1.1·C on the sum of a Poisson batch, 79 steps, really 0.77 at δ = 1e-5.
    sampled = noised(1.0, noise=Gaussian(1.1), noise_on="step", batch=Poisson(0.015))
    ledger = begun(Budget(1.55, DELTA), neighbours="add-remove", calibration="tight")
    for _ in range(79):
        ledger.charge({0: sampled})
    certificate = certify(ledger.books, ledger.run)
    assert certificate.observers["server"].epsilon == pytest.approx(0.77, abs=0.005)
    assert certificate.observers["released"].epsilon == 0.0  # nothing was sent out
    assert "(added or removed: add-or-remove adjacency)" in str(certificate)


@pytest.mark.parametrize("std", [1e-160, 1e-200])  # where sums and squares leave the range of numbers
def test_what_cannot_be_bounded_is_infinite_in_words_and_null_in_json(std: float) -> None:
    ledger = begun(Budget(8.0, DELTA), Budget(8.0, DELTA))
    certificate = played(ledger, {0: noised(1.0, noise=Gaussian(std))})
    plain = json.loads(json.dumps(certificate.to_dict(), allow_nan=False))
    assert plain["observers"]["server"]["epsilon"] is None
    assert plain["observers"]["server"]["slack"] is None
    assert "ε ≤ 0 to ∞   MORE than any promise" in row(certificate, "the server")
    assert str(certificate) == text(plain)


def test_a_single_upload_without_bound_is_not_hidden_by_the_clients_that_took_part_properly() -> None:
    ledger = begun(*[Budget(8.0, DELTA)] * 3)
    certificate = played(ledger, {0: noised(1.0), 1: noised(1.0, noise=Gaussian(1e-160)), 2: noised(1.0)})
    assert certificate.observers["server"].epsilon is None
    assert [line.server_epsilon is None for line in certificate.spending] == [False, True, False]


# What it says besides.


def test_without_privacy_it_says_that_nothing_is_protected() -> None:
    certificate = certificate_of(FedAvg(rounds=3))
    assert certificate.observers["server"].epsilon is None
    assert certificate.observers["server"].basis == "none"
    assert certificate.claimed is None
    assert certificate.spending == ()
    assert certificate.uncounted
    assert certificate.rounds == 3
    assert "nothing: uploads carry no noise, and no finite ε holds" in str(certificate)
    assert "promised" not in str(certificate)


def test_it_names_the_unit_of_privacy_and_the_observers() -> None:
    certificate = certificate_of(UDP(rounds=3))
    assert (certificate.unit, certificate.neighbours) == ("record", "replace")
    assert "one record of one client (replaced by any other: replace-one adjacency)" in str(certificate)
    assert row(certificate, "the server")
    assert row(certificate, "released models").endswith("no collusion")


@each("unit", ["record", "client"])
@each("neighbours", ["replace", "add-remove"])
def test_every_unit_has_its_words(unit: str, neighbours: str) -> None:
    ledger = begun(Budget(1.0, DELTA), unit=unit, neighbours=neighbours)
    printed = str(certify(ledger.books, ledger.run))
    assert ("one record" in printed) == (unit == "record")
    assert ("added or removed" in printed) == (neighbours == "add-remove")


def test_uncounted_releases_are_listed_by_name() -> None:
    ledger = begun(Budget(1.0, DELTA), uncounted=("the median of gradient norms", "the test loss"))
    certificate = certify(ledger.books, ledger.run)
    assert certificate.uncounted == ("the median of gradient norms", "the test loss")
    assert "the median of gradient norms; the test loss" in str(certificate)
    assert certificate_of(UDP(rounds=2)).uncounted == ()


def test_what_is_not_promised_is_said() -> None:
    said = " ".join(str(certificate_of(UDP(rounds=2))).split())
    for words in (
        "not promised anything about who took part",
        "how many records a client holds",
        "people whose records sit at several clients",
        "whoever reads a client's own machine",
    ):
        assert words in said


def test_seeded_noise_is_said() -> None:
    seeded, unseeded = (certificate_of(UDP(rounds=2), seeded=seeded) for seeded in (True, False))
    assert seeded.noise_source == "seed"
    assert "nobody's records were protected here: whoever knows the seed can subtract" in str(seeded)
    assert unseeded.noise_source == "operating system"
    assert "seed" not in str(unseeded)


def test_a_delta_of_one_in_the_number_of_records_is_cautioned_with_the_reason() -> None:
    # δ = 1/100 is less than one in 99 records, but as much as one in 100 and more than one in 101.
    certificate = certificate_of(UDP(rounds=2, delta=0.01), (99, 100, 90, 101))
    (caution,) = certificate.cautions
    assert "was 0.01 for 100 records of client 1 and " in caution
    assert "publishing a record at random would keep such a promise" in caution
    assert caution.split()[0] in str(certificate)
    assert "caution" in str(certificate)


def test_a_small_delta_is_not_cautioned() -> None:
    certificate = certificate_of(UDP(rounds=2, delta=0.01), (98, 99))
    assert certificate.cautions == ()
    assert "caution" not in str(certificate)


@each("calibration", ["tight", "paper"])
@each(("epsilon", "holds"), [(6.8, True), (7.2, False), (20.0, False)])
def test_udps_formula_is_cautioned_where_it_breaks_its_own_promise(
    epsilon: float, holds: bool, calibration: str
) -> None:
    # At δ = 1e-3 equation (10) is safe up to ε = 6.97 and unsafe above.
    certificate = certificate_of(UDP(rounds=2, epsilon=epsilon, delta=1e-3, calibration=calibration))
    assert bool(certificate.cautions) == (calibration == "paper" and not holds)
    assert ("equation (10)" in str(certificate)) == bool(certificate.cautions)


def test_plain_data_prints_the_same_text() -> None:
    certificate = certificate_of(UDP(rounds=2))
    assert text(json.loads(json.dumps(certificate.to_dict()))) == str(certificate)


HETEROGENEOUS = {"epsilon": (1.234, 20.12, 7.654), "delta": (1.234e-5, 1.001e-5, 1.234e-2)}


def of_everything() -> Certificate:
    """Return a certificate with all observers promised, every basis shown, and much left uncounted."""
    ledger = begun(
        Budget(1.234, 1.234e-5), Budget(20.12, 1.001e-1), sizes=(5, 70), claimed_sensitivity=0.01, exposures=25,
        against=("server", "uplink", "released"),
        uncounted=("the median of gradient norms", "the test loss", "exact local gradients", "realised batch sizes"),
    )  # fmt: skip
    return played(ledger, {0: noised(0.01), 1: noised(3.0)}, rounds=2)


KINDS: dict[str, Callable[[], Certificate]] = {
    "tight": lambda: certificate_of(UDP(rounds=2), seeded=True),
    "paper": lambda: certificate_of(UDP(rounds=2, epsilon=20.0, calibration="paper"), seeded=True),
    "own budgets": lambda: certificate_of(UDP(rounds=2, **HETEROGENEOUS), seeded=True),
    "own budgets, paper": lambda: certificate_of(UDP(rounds=2, **HETEROGENEOUS, calibration="paper"), seeded=True),
    "long numbers": lambda: certificate_of(
        UDP(rounds=99, epsilon=(0.123456789, 20.0, 4.0), delta=(1.23456789e-5, 1e-5, 0.2), calibration="paper")
    ),
    "without privacy": lambda: certificate_of(FedAvg(rounds=2), seeded=True),
    "everything": of_everything,
}


@each("kind", KINDS)
def test_it_fits_on_one_screen(kind: str) -> None:
    lines = str(KINDS[kind]()).splitlines()
    assert 3 <= len(lines) <= 24
    assert max(len(line) for line in lines) <= 120


# A stored certificate against one computed anew.


def stored(certificate: Certificate) -> Any:
    return json.loads(json.dumps(certificate.to_dict()))


def some() -> Certificate:
    return certificate_of(UDP(epsilon=(20.0, 4.0, 8.0), delta=1e-3, rounds=3, calibration="paper"), seeded=True)


def leaves(plain: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where every value of plain data sits."""
    if isinstance(plain, (dict, list)) and plain:
        for key in plain if isinstance(plain, dict) else range(len(plain)):
            yield from leaves(plain[key], (*place, key))
    else:
        yield place


def changed(plain: Any, place: tuple[Any, ...], change: Any) -> Any:
    """Return a copy in which one value is `change` of itself."""
    other = copy.deepcopy(plain)
    holder = other
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = change(holder[place[-1]])
    return other


def test_a_certificate_agrees_with_itself_through_json() -> None:
    for made in KINDS.values():
        certificate = made()
        assert disagreements(stored(certificate), certificate.to_dict()) == []


def test_any_changed_value_is_found_and_named() -> None:
    plain, recomputed = stored(some()), some().to_dict()
    places = list(leaves(plain))
    assert len(places) > 40
    for place in places:
        (found,) = disagreements(changed(plain, place, lambda value: [value, "changed"]), recomputed)
        assert str(place[0]) in found


def test_rounding_is_forgiven_and_nothing_larger() -> None:
    plain, recomputed = stored(some()), some().to_dict()
    places = [place for place in leaves(plain) if isinstance(_at(plain, place), float)]
    assert len(places) > 10
    for place in places:
        assert disagreements(changed(plain, place, lambda value: value * (1 + 1e-9)), recomputed) == []
        for factor in (1 - 1e-3, 1 + 1e-3):
            (found,) = disagreements(changed(plain, place, lambda value, by=factor: value * by), recomputed)
            assert str(place[-1]) in found


def test_rounding_is_forgiven_in_what_little_it_leaves_of_a_promise() -> None:
    # A tight run spends all but 1e-8 of its budget: what is left of it is mostly rounding.
    certificate = certificate_of(UDP(epsilon=8.0, delta=1e-3, rounds=3))
    plain = stored(certificate)
    plain["observers"]["server"]["epsilon"] *= 1 - 1e-9
    plain["observers"]["server"]["slack"] = 8.0 - plain["observers"]["server"]["epsilon"]
    assert disagreements(plain, certificate.to_dict()) == []


def _at(plain: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        plain = plain[key]
    return plain


def test_what_is_missing_or_added_is_found() -> None:
    plain, recomputed = stored(some()), some().to_dict()
    for key in ("system", "observers", "spending", "cautions", "noise_source"):
        (found,) = disagreements({name: value for name, value in plain.items() if name != key}, recomputed)
        assert found.startswith(key)
    (found,) = disagreements(plain | {"audited": True}, recomputed)
    assert found.startswith("audited")
    assert len(disagreements(changed(plain, ("spending",), lambda lines: lines[:-1]), recomputed)) == 1
    assert len(disagreements(changed(plain, ("uncounted",), lambda _: ["the test loss"]), recomputed)) == 1
    assert disagreements([], recomputed)
    assert disagreements(None, recomputed)


def test_every_difference_is_listed() -> None:
    plain = stored(some()) | {"system": "other", "clients": 99}
    plain["observers"]["server"]["epsilon"] = 1.0
    found = disagreements(plain, some().to_dict())
    assert [line.split(" is ")[0] for line in found] == ["system", "clients", "observers.server.epsilon"]
    assert "1.0 in the certificate" in found[2]
