"""The certificate says what was promised, what was really spent, and never flatters."""

import math

import numpy as np
import pytest

from dpfl.federation import Schedule
from dpfl.orders import Gaussian, Order, RecordClip
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.certificate import Certificate, _up, certify, text
from dpfl.privacy.gaussian_dp import epsilon_of
from dpfl.privacy.ledger import Ledger
from dpfl.streams import Streams
from dpfl.systems import UDP, FedAvg, Problem, System


def certificate_of(system: System, sizes: tuple[int, ...] = (10, 20, 30), *, seeded: bool = False) -> Certificate:
    """Play the books of a whole training without training anything."""
    schedule = Schedule(system.cohorts(len(sizes)), Streams(0))
    ledger = Ledger(system.promise(len(sizes)), sizes)
    state = system.begin(Problem(sizes, 4, schedule), np.zeros(4))  # type: ignore[arg-type]
    orders = system.orders(state)
    for _ in range(system.rounds):
        ledger.charge(orders)
    return certify(
        ledger, system=system.name, rounds=system.rounds, seeded=seeded, config="0123456789ab", versions={"dpfl": "0.1"}
    )


def spent_line(certificate: Certificate) -> str:
    return next(line for line in str(certificate).splitlines() if "really spent" in line)


def test_a_tight_run_stays_within_the_promise() -> None:
    certificate = certificate_of(UDP(epsilon=8.0, delta=1e-3, rounds=30))
    server = certificate.observers["server"]
    assert server.basis == "proved"
    assert server.delta == 1e-3
    assert 8.0 * (1 - 1e-3) <= server.epsilon <= 8.0
    assert certificate.claimed == {"epsilon": 8.0, "delta": 1e-3}
    assert spent_line(certificate).endswith("ε ≤ 8, at that δ   within the promise")
    assert [(line.client, line.replies) for line in certificate.spending] == [(0, 30), (1, 30), (2, 30)]
    assert all(line.server_epsilon <= 8.0 for line in certificate.spending)


def test_the_papers_calibration_shows_what_it_was_really_worth() -> None:
    # UDP's formula at a claimed ε = 20, δ = 1e-3 and all clients in every round: really 30.32, or 52 % more.
    certificate = certificate_of(UDP(epsilon=20.0, delta=1e-3, rounds=50, calibration="paper"))
    assert certificate.observers["server"].epsilon == pytest.approx(30.32, abs=0.005)
    assert "ε ≤ 30.32, at that δ   52 % MORE than promised, for 3 of 3 clients" in spent_line(certificate)
    assert "ε = 20, δ = 0.001" in str(certificate)
    assert "paper calibration" in str(certificate)
    assert [line.claimed_epsilon for line in certificate.spending] == [20.0] * 3


def test_each_clients_line_is_at_its_own_budget() -> None:
    epsilon, delta = (1.0, 20.0, 4.0), (1e-3, 1e-5, 1e-2)
    certificate = certificate_of(UDP(epsilon=epsilon, delta=delta, rounds=7, calibration="paper"))
    for line, claimed, its_delta in zip(certificate.spending, epsilon, delta, strict=True):
        # σ = Δ·√(2R·ln(1/δ))/ε, so μ = √R·Δ/σ = ε/√(2·ln(1/δ)).
        true = float(epsilon_of(claimed / math.sqrt(2 * math.log(1 / its_delta)), its_delta))
        assert (line.claimed_epsilon, line.delta) == (claimed, its_delta)
        assert line.server_epsilon == pytest.approx(true, rel=1e-9)
    # Only client 1 spent more than it was promised; the largest claim and its δ stand in the headline.
    assert [line.server_epsilon > line.claimed_epsilon for line in certificate.spending] == [False, True, False]
    assert certificate.claimed == {"epsilon": 20.0, "delta": 1e-5}
    assert certificate.observers["server"].delta == 1e-5
    assert "MORE than promised, for 1 of 3 clients" in spent_line(certificate)


def test_a_client_that_overspent_a_small_budget_is_not_hidden_by_a_large_one() -> None:
    # Client 0 was promised 1 and spent over 4; client 1 was promised 50 and spent as much.
    promise = Promise(
        budgets=(Budget(1.0, 1e-5), Budget(50.0, 1e-5)), unit="record", neighbours="replace", calibration="paper"
    )
    ledger = Ledger(promise, (10, 10))
    order = Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(0.1))  # Δ = 0.1, so μ = 1: ε = 4.378
    ledger.charge({0: order, 1: order})
    certificate = certify(ledger, system="udp", rounds=1, seeded=False, config=None, versions={})
    assert "338 % MORE than promised, for 1 of 2 clients" in spent_line(certificate)


def test_without_privacy_it_says_that_nothing_is_protected() -> None:
    certificate = certificate_of(FedAvg(rounds=3))
    assert certificate.observers["server"].epsilon is None
    assert certificate.observers["server"].basis == "none"
    assert certificate.claimed is None
    assert certificate.spending == ()
    assert certificate.uncounted
    assert "nothing: uploads carry no noise, and no finite ε holds" in str(certificate)
    assert "promised" not in str(certificate)


def test_it_names_the_unit_of_privacy_and_the_observer() -> None:
    certificate = certificate_of(UDP(rounds=3))
    assert (certificate.unit, certificate.neighbours) == ("record", "replace")
    assert "one record of one client (replaced by any other)" in str(certificate)
    assert "against the server" in str(certificate)


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("neighbours", ["replace", "add-remove"])
def test_every_unit_has_its_words(unit: str, neighbours: str) -> None:
    promise = Promise(budgets=(Budget(1.0, 1e-5),), unit=unit, neighbours=neighbours, calibration="tight")  # type: ignore[arg-type]
    printed = str(certify(Ledger(promise, (10,)), system="x", rounds=0, seeded=False, config=None, versions={}))
    assert ("one record" in printed) == (unit == "record")
    assert ("added or removed" in printed) == (neighbours == "add-remove")


def test_uncounted_releases_are_listed_by_name() -> None:
    promise = Promise(
        budgets=(Budget(1.0, 1e-5),), unit="record", neighbours="replace", calibration="paper",
        uncounted=("the median of gradient norms", "the test loss"),
    )  # fmt: skip
    certificate = certify(Ledger(promise, (10,)), system="x", rounds=0, seeded=False, config=None, versions={})
    assert "the median of gradient norms; the test loss" in str(certificate)
    assert certificate_of(UDP(rounds=2)).uncounted == ()


def test_seeded_noise_is_said() -> None:
    seeded, unseeded = (certificate_of(UDP(rounds=2), seeded=seeded) for seeded in (True, False))
    assert seeded.noise_source == "seed"
    assert "whoever knows the seed can subtract it" in str(seeded)
    assert unseeded.noise_source == "operating system"
    assert "seed" not in str(unseeded)


@pytest.mark.parametrize(
    "epsilon", [0.64600309, 1.0004999, 1.00049, 7.9999999, 8.0, 8.0000001, 9.99951, 99.996, 30.31744]
)
def test_a_printed_epsilon_is_never_below_the_true_one(epsilon: float) -> None:
    assert epsilon <= float(_up(epsilon)) <= epsilon * 1.0011


def test_a_small_overspending_is_not_printed_as_none() -> None:
    # Promised 8 and spent 8.016: 0.2 % more. "0 % MORE" would contradict itself.
    promise = Promise(budgets=(Budget(8.0, 1e-3),), unit="record", neighbours="replace", calibration="paper")
    ledger = Ledger(promise, (10,))
    worth = Ledger(
        Promise(budgets=(Budget(8.016, 1e-3),), unit="record", neighbours="replace", calibration="tight"), (10,)
    )
    std = 0.1 / math.sqrt(worth._limit[0])
    ledger.charge({0: Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(std))})
    certificate = certify(ledger, system="udp", rounds=1, seeded=False, config=None, versions={})
    assert "ε ≤ 8.016" in spent_line(certificate)
    assert " 0 % MORE" not in spent_line(certificate)


def test_plain_data_prints_the_same_text() -> None:
    certificate = certificate_of(UDP(rounds=2))
    assert text(certificate.to_dict()) == str(certificate)


@pytest.mark.parametrize(
    "system",
    [
        UDP(rounds=2),
        UDP(rounds=2, epsilon=20.0, calibration="paper"),
        UDP(rounds=2, epsilon=(0.123456789, 20.0, 4.0), delta=(1.23456789e-5, 1e-5, 1e-2), calibration="paper"),
        FedAvg(rounds=2),
    ],
)
def test_it_fits_on_one_screen(system: System) -> None:
    lines = str(certificate_of(system, seeded=True)).splitlines()
    assert 3 <= len(lines) <= 24
    assert max(len(line) for line in lines) <= 120
