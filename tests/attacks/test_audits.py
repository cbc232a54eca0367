"""Audits: canaries in real trainings, and lower bounds on ε that no certificate may lie below.

A bound that is compared with a certificate from above is wrong with probability 1e-3 at most; those that show how
strong the attacks are hold with 95 % for all of them together. `pytest tests/attacks/test_audits.py -s` prints them.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from attacks.bounds import Bits, Scores, counted_bound, gaussian_bound, tail_bound
from attacks.canaries import Seen, as_if, eavesdropped, likelihood_ratios, watch
from dpfl.privacy.accounting import Mechanism
from dpfl.privacy.books import Books
from dpfl.privacy.budget import Observer
from dpfl.privacy.gaussian_dp import epsilon_of, mu_of
from dpfl.systems import ALIDPFL, PEDPFL, UDP, DPFedAvg, DPSGDFedAvg, FedSGDDPC, Lei, NbAFL, PrivateSystem
from grids import each


@dataclass(frozen=True)
class Audit:
    """Who is watched by whom, and how."""

    system: PrivateSystem[Any]
    observer: Observer = "server"
    canaries: dict[str, Any] = field(default_factory=dict)

    def scores(self, seen: Seen) -> tuple[Scores, Bits]:
        """Return the observer's score of every canary."""
        if self.observer == "server":
            return likelihood_ratios(seen)
        return eavesdropped(seen, self.system.exposures if isinstance(self.system, NbAFL) else 0)


REMOVED = {"away": 0.0}  # a record that is there or not
WHOLE = {"clients": 800, "canaries": 800}  # clients of one record each, for the data of a whole client
GAUSSIAN = {
    "udp": Audit(UDP(rounds=4, epsilon=3.0)),
    "udp, released models": Audit(UDP(rounds=4, epsilon=3.0), "released"),
    "lei": Audit(Lei(rounds=12, epsilon=3.0)),
    "pe-dpfl": Audit(PEDPFL(rounds=4, epsilon=3.0), canaries={"canaries": 2400, "clients": 3}),
    "dpsgd-fedavg, all records": Audit(DPSGDFedAvg(rounds=4, epsilon=3.0, sampling_rate=1.0), canaries=REMOVED),
    "dp-fedavg": Audit(DPFedAvg(rounds=2, local_steps=2, epsilon=3.0), canaries=WHOLE),
    "nbafl, uplink": Audit(NbAFL(rounds=8, epsilon=3.0, lr=1.0), "uplink"),
    "nbafl, server": Audit(NbAFL(rounds=8, epsilon=3.0, lr=1.0)),
}
OTHERS = {
    "dp-fedavg, laplace": Audit(
        DPFedAvg(rounds=2, local_steps=2, epsilon=2.0, mechanism="laplace"), canaries=WHOLE | {"seed": 6}
    ),
    "fedsgd-dpc, laplace": Audit(FedSGDDPC(rounds=2, epsilon=2.0, mechanism="laplace")),
    "fedsgd-dpc, sampled": Audit(FedSGDDPC(rounds=6, epsilon=3.0, sampling_rate=0.25), canaries=REMOVED),
    "dpsgd-fedavg, sampled": Audit(DPSGDFedAvg(rounds=4, epsilon=3.0), canaries=REMOVED),
    "ali-dpfl": Audit(ALIDPFL(rounds=5, epsilon=3.0), canaries=REMOVED),
}


TOGETHER = 0.05 / (len(GAUSSIAN) + len(OTHERS))  # how often a bound that is printed may be wrong


def certified(audit: Audit, seen: Seen) -> tuple[float, float]:
    assert seen.run is not None
    shown = seen.run.certificate.observers[audit.observer]
    assert shown.epsilon is not None
    assert shown.delta is not None
    return shown.epsilon, shown.delta


@each("name", list(GAUSSIAN))
def test_gaussian_noise_tells_what_is_certified_and_no_more(name: str) -> None:
    audit = GAUSSIAN[name]
    seen = watch(audit.system, **audit.canaries)
    (epsilon, delta), (scores, up) = certified(audit, seen), audit.scores(seen)
    assert gaussian_bound(scores, up, delta, 1e-3) <= epsilon
    assert counted_bound(scores, up, delta, 1e-3) <= epsilon
    shown = gaussian_bound(scores, up, delta, TOGETHER)
    assert shown <= epsilon
    print(f"{name}: {shown:.2f} of {epsilon:.2f}")
    assert shown >= 0.7 * epsilon


@each("name", list(OTHERS))
def test_other_laws_tell_no_more_than_is_certified(name: str) -> None:
    audit = OTHERS[name]
    seen = watch(audit.system, **audit.canaries)
    (epsilon, delta), (scores, up) = certified(audit, seen), audit.scores(seen)
    guessed = partial(tail_bound, scores, up, partial(as_if, seen), delta)
    assert guessed(1e-3) <= epsilon
    assert counted_bound(scores, up, delta, 1e-3) <= epsilon
    shown = guessed(TOGETHER)
    assert shown <= epsilon
    print(f"{name}: {shown:.2f} of {epsilon:.2f}")
    assert shown >= 0.5 * epsilon


# Wrong twins: what is amiss is found.


def test_noise_half_as_large_as_certified_is_caught() -> None:
    """Hold the same scores against the certificate of twice the noise: μ is half as large there.

    Counting alone, without a law, is too weak for it with this many canaries: 0.64, where 1.29 would be certified.
    """
    audit = GAUSSIAN["udp"]
    seen = watch(audit.system)
    epsilon, delta = certified(audit, seen)
    promised = float(epsilon_of(mu_of(epsilon, delta) / 2, delta))
    assert gaussian_bound(*audit.scores(seen), delta, 1e-3) > promised


def test_a_ledger_that_forgets_a_round_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Books.spent

    def one_round_less(self: Books, *runs: Any) -> dict[int, Counter[Mechanism]]:
        """Price one round of two."""
        cheaper = math.sqrt(2)
        return {
            client: Counter({replace(one, multiplier=cheaper * one.multiplier): n for one, n in seen.items()})
            for client, seen in right(self, *runs).items()
        }

    monkeypatch.setattr(Books, "spent", one_round_less)
    audit = Audit(UDP(rounds=2, epsilon=3.0))
    seen = watch(audit.system)
    epsilon, delta = certified(audit, seen)
    assert epsilon < 2.2
    assert gaussian_bound(*audit.scores(seen), delta, 1e-3) > epsilon


def correlation_of_noise(seen: Seen) -> float:
    """Return how noise of two rounds goes together, in standard deviations, where no record of the client's has any."""
    first, second = (
        np.concatenate([uploads[client][seen.places[1 - client]].double().numpy() for client in (0, 1)])
        for uploads in seen.uploads[:2]
    )
    return float(np.corrcoef(first, second)[0, 1]) * math.sqrt(len(first))


def test_noise_that_is_used_twice_is_caught() -> None:
    system = UDP(rounds=2, epsilon=3.0)
    assert abs(correlation_of_noise(watch(system))) < 3.3
    twin = watch(system, asked=lambda request: replace(request, charge=1))  # the stream is named by the charge
    assert correlation_of_noise(twin) > 30
