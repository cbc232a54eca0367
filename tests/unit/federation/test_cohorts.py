"""Who takes part. The statistical tests have fixed seeds and a false-alarm rate of at most 1e-3 each."""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, chi2

from dpfl.errors import BadInput
from dpfl.federation import Everyone, PoissonCohort, RandomK, RoundRobin, Schedule
from dpfl.streams import Streams
from grids import each

N, K, ROUNDS, FALSE_ALARM = 20, 5, 3000, 1e-3


class Favourite:
    """A wrong twin of RandomK: client 0 is half as likely again to be chosen as the others."""

    clients = N

    def draw(self, round: Any, rng: Any) -> Any:
        weights = np.ones(N)
        weights[0] = 1.5
        return tuple(sorted(rng.choice(N, K, replace=False, p=weights / weights.sum()).tolist()))


class Neighbours:
    """A wrong twin of RandomK: each client as often as it should be, but always together with the next."""

    clients = N

    def draw(self, round: Any, rng: Any) -> Any:
        first = rng.integers(N)
        return tuple(sorted(((first + np.arange(K)) % N).tolist()))


class Frozen:
    """A wrong twin of RandomK: the first round's cohort comes again in the next."""

    clients = N

    def draw(self, round: Any, rng: Any) -> Any:
        return RandomK(N, K).draw(round, Streams(round // 2).public.generator("cohort"))


def drawn(rule: Any, seed: Any = 0) -> Any:
    """Return a table [rounds, clients] of who took part."""
    schedule = Schedule(rule, Streams(seed).public)
    table = np.zeros((ROUNDS, rule.clients), bool)
    for row in range(ROUNDS):
        table[row, list(schedule.cohort(row + 1))] = True
    return table


def equally_often(table: Any, rate: Any, fixed_size: Any) -> Any:
    """Test inclusion counts: under a fixed size they are negatively correlated, which N / (N - 1) corrects."""
    deviations = table.sum(axis=0) - ROUNDS * rate
    spread = ROUNDS * rate * (1 - rate) * (N / (N - 1) if fixed_size else 1)
    return (deviations**2).sum() / spread < chi2.isf(FALSE_ALARM, N - 1 if fixed_size else N)


def independent_pair(table: Any, probability: Any) -> Any:
    together = int((table[:, 0] & table[:, 1]).sum())
    return binomtest(together, ROUNDS, probability).pvalue > FALSE_ALARM


def fresh_each_round(table: Any, probability: Any) -> Any:
    twice = int((table[0::2, 0] & table[1::2, 0]).sum())
    return binomtest(twice, ROUNDS // 2, probability).pvalue > FALSE_ALARM


def binomial_sizes(table: Any, rate: Any) -> Any:
    variance = ((table.sum(axis=1) - N * rate) ** 2).sum() / (N * rate * (1 - rate))
    return chi2.isf(1 - FALSE_ALARM / 2, ROUNDS) < variance < chi2.isf(FALSE_ALARM / 2, ROUNDS)


def test_random_k_takes_every_set_equally_often_and_wrong_twins_are_told_apart() -> None:
    rate, pair = K / N, K * (K - 1) / (N * (N - 1))
    table = drawn(RandomK(N, K))
    assert set(table.sum(axis=1)) == {K}
    assert equally_often(table, rate, fixed_size=True)
    assert independent_pair(table, pair)
    assert fresh_each_round(table, rate**2)
    assert not equally_often(drawn(Favourite()), rate, fixed_size=True)
    assert not independent_pair(drawn(Neighbours()), pair)
    assert not fresh_each_round(drawn(Frozen())[1:-1], rate**2)


def test_poisson_clients_decide_alone_and_wrong_twins_are_told_apart() -> None:
    table = drawn(PoissonCohort(N, 0.25))
    assert equally_often(table, 0.25, fixed_size=False)
    assert independent_pair(table, 0.25**2)
    assert binomial_sizes(table, 0.25)
    assert not equally_often(drawn(PoissonCohort(N, 0.27)), 0.25, fixed_size=False)
    assert not binomial_sizes(drawn(RandomK(N, K)), 0.25)


def test_a_poisson_round_may_have_nobody() -> None:
    schedule = Schedule(PoissonCohort(2, 0.05), Streams(0).public)
    assert () in {schedule.cohort(round) for round in range(1, 20)}


def test_everyone_is_everyone() -> None:
    assert Schedule(Everyone(4), Streams(0).public).cohort(9) == (0, 1, 2, 3)


@each(("clients", "cohort"), [(10, 5), (10, 1), (10, 10), (6, 3)])
def test_round_robin_has_asked_everyone_once_after_n_over_k_rounds(clients: Any, cohort: Any) -> None:
    schedule = Schedule(RoundRobin(clients, cohort), Streams(0).public)
    turns = clients // cohort
    assert schedule.replies(1, turns).tolist() == [1] * clients
    assert schedule.replies(turns + 1, 3 * turns).tolist() == [2] * clients


def test_round_robin_that_does_not_divide_wraps_around_and_stays_fair() -> None:
    schedule = Schedule(RoundRobin(7, 3), Streams(0).public)
    assert [schedule.cohort(round) for round in (1, 2, 3, 4)] == [(0, 1, 2), (3, 4, 5), (0, 1, 6), (2, 3, 4)]
    for last in range(1, 30):
        replies = schedule.replies(1, last)
        assert replies.max() == -(-last * 3 // 7)  # the count that noise is calibrated for
        assert replies.max() - replies.min() <= 1


@each("rule", [Everyone(6), RandomK(6, 2), RoundRobin(6, 4), PoissonCohort(6, 0.3)])
def test_replies_count_the_cohorts_that_will_be_drawn(rule: Any) -> None:
    schedule = Schedule(rule, Streams(3).public)
    counted = [0] * 6
    for client in itertools.chain.from_iterable(schedule.cohort(round) for round in range(4, 31)):
        counted[client] += 1
    assert schedule.replies(4, 30).tolist() == counted
    assert schedule.replies(5, 4).tolist() == [0] * 6


def test_a_schedule_is_the_same_whenever_it_is_asked() -> None:
    schedule = Schedule(RandomK(50, 10), Streams(1).public)
    late = schedule.cohort(40)
    assert [schedule.cohort(round) for round in range(1, 41)][-1] == late
    assert Schedule(RandomK(50, 10), Streams(1).public).cohort(40) == late
    assert Schedule(RandomK(50, 10), Streams(2).public).cohort(40) != late
    unseeded = Schedule(RandomK(50, 10), Streams(None).public)
    assert unseeded.cohort(1) == unseeded.cohort(1)


@each("rule", [RandomK, RoundRobin])
@each(
    ("cohort", "sentence"),
    [
        (6, "^cohort must be at most the 5 clients there are, was 6; lower it"),
        (0, "^cohort must be a whole number of at least 1, was 0"),
        (2.0, "^cohort must be a whole number of at least 1, was 2.0"),
    ],
)
def test_other_cohorts_are_refused(rule: Any, cohort: Any, sentence: Any) -> None:
    with pytest.raises(BadInput, match=sentence):
        rule(5, cohort)


@each("rate", [0, -0.1, 1.1, float("nan")])
def test_other_rates_are_refused(rate: Any) -> None:
    with pytest.raises(BadInput, match=r"^rate must be above 0 and at most 1, was .*; use cohort / clients"):
        PoissonCohort(5, rate)


def test_there_must_be_clients_and_rounds_count_from_one() -> None:
    with pytest.raises(BadInput, match=r"^clients must be a whole number of at least 1"):
        Everyone(0)
    with pytest.raises(BadInput, match=r"^round must be .* at least 1, was 0; rounds count from 1"):
        Schedule(Everyone(1), Streams(0).public).cohort(0)
