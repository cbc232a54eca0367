"""NbAFL: the paper's noise on both ways, the least noise of the clients that keeps the promise, and its refusals."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm as normal

from dpfl.errors import BadInput, BudgetRefused
from dpfl.federation import Everyone, RandomK, Schedule
from dpfl.orders import Full, Gaussian, ModelClip, RecordClip, Shuffled
from dpfl.privacy.certificate import Certificate, certify
from dpfl.privacy.ledger import Ledger
from dpfl.streams import Streams
from dpfl.systems import Feedback, NbAFL, Problem
from dpfl.systems.nbafl import NbAFLState
from grids import each


def begin(system: NbAFL, sizes: tuple[int, ...], seed: int = 0) -> NbAFLState:
    schedule = Schedule(system.cohorts(len(sizes)), Streams(seed).public)
    return system.begin(Problem(sizes, 3, schedule), torch.zeros(3), Feedback())


def rounds_of(system: NbAFL, sizes: tuple[int, ...], seed: int = 0) -> Iterator[NbAFLState]:
    state = begin(system, sizes, seed)
    while state.round < state.rounds:
        yield state
        state = replace(state, round=state.round + 1)


def certified(system: NbAFL, sizes: tuple[int, ...], seed: int = 0) -> Certificate:
    """Charge a whole training, in which nobody may be refused."""
    ledger = Ledger(system.promise(sizes), sizes, system=system.name)
    for state in rounds_of(system, sizes, seed):
        orders, downlink = system.orders(state), system.downlink(state, state.cohort)
        assert sorted(ledger.charge(orders)) == sorted(orders)
        ledger.broadcast(system.weights(state, sorted(orders)), noise_std=downlink.std if downlink else 0.0)
    return certify(ledger.books, ledger.run)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the μ at which one Gaussian release is exactly (ε, δ)."""

    def excess(mu: float) -> float:
        return normal.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * normal.cdf(-epsilon / mu - mu / 2) - delta

    return brentq(excess, 1e-3, 50, xtol=1e-14)


def spent_share(certificate: Certificate, observer: str) -> list[float]:
    """Return how much of each budget an observer has seen."""
    return [getattr(line, f"{observer}_epsilon") / line.claimed_epsilon for line in certificate.spending]


# The paper's noise.


@each("clients", [4, 9, 16])
@each("exposures", [1, 2, 3])
def test_theorem_1_asks_the_server_for_noise_beyond_l_times_the_root_of_n(clients: int, exposures: int) -> None:
    turn = exposures * math.isqrt(clients)
    sizes = tuple(range(20, 20 + clients))
    for rounds in (exposures, turn - 1, turn, turn + 1, 3 * turn):
        if rounds < exposures:
            continue
        system = NbAFL(calibration="paper", rounds=rounds, exposures=exposures, epsilon=5.0, delta=1e-2, clip=3.0)
        state = begin(system, sizes)
        c = math.sqrt(2 * math.log(125))
        expected = 2 * c * 3 * math.sqrt(max(0, rounds**2 - exposures**2 * clients)) / (20 * clients * 5)
        assert state.uplink_stds == pytest.approx([c * exposures * (2 * 3 / 20) / 5] * clients)
        assert state.downlink_std == pytest.approx(expected)
        assert (state.downlink_std == 0) == (rounds <= turn)
        assert (system.downlink(state, state.cohort) is None) == (rounds <= turn)


@each("epsilon", [1.0, 10.0, 60.0])
@each("cohort", [1, 3, 9])
@each("exposures", [1, 2])
def test_lemma_4_asks_the_server_for_noise_beyond_epsilon_by_gamma(epsilon: float, cohort: int, exposures: int) -> None:
    clients, c = 10, math.sqrt(2 * math.log(125))
    rate = cohort / clients
    gamma = -math.log(1 - rate + rate * math.exp(-epsilon / (exposures * math.sqrt(cohort))))
    turn = math.floor(epsilon / gamma)
    for rounds in (turn, turn + 1, turn + 20):
        system = NbAFL(
            calibration="paper", rounds=rounds, exposures=exposures, epsilon=epsilon, delta=1e-2, clip=3.0,
            cohort=cohort,
        )  # fmt: skip
        state = begin(system, (20,) * clients)
        expected = 0.0
        if rounds > turn:
            b = -rounds / epsilon * math.log(1 - 1 / rate + math.exp(-epsilon / rounds) / rate)
            expected = 2 * c * 3 * math.sqrt(rounds**2 / b**2 - exposures**2 * cohort) / (20 * cohort * epsilon)
            assert expected > 0
        assert state.downlink_std == pytest.approx(expected, rel=1e-6)
        assert (state.downlink_std == 0) == (rounds == turn)


def test_a_cohort_of_all_is_theorem_1() -> None:
    options = {"calibration": "paper", "rounds": 9, "epsilon": 5.0}
    noise = {begin(NbAFL(cohort=cohort, **options), (20,) * 5).downlink_std for cohort in (None, 5)}
    assert len(noise) == 1


def test_the_published_noise_counts_on_the_smallest_client() -> None:
    options = {"calibration": "paper", "rounds": 20}
    for smaller in ((10, 90, 50), (90, 50, 10)):
        few, many = begin(NbAFL(**options), smaller), begin(NbAFL(**options), (40, 40, 40))
        assert few.downlink_std == pytest.approx(4 * many.downlink_std)
        assert few.uplink_stds == pytest.approx([4 * std for std in many.uplink_stds])


def test_published_noise_of_unequal_weights_is_what_theorem_1_asks_for() -> None:
    # σ_D² + Σp_i²σ_U² = (c·T·Δs_D/ε)² with Δs_D = 2C·max p_i/m; for equal clients that is Theorem 1, to the bit.
    sizes, c = (10, 20, 70), math.sqrt(2 * math.log(125))
    options = {"calibration": "paper", "epsilon": 5.0, "delta": 0.01, "clip": 3.0}
    for rounds, exposures in ((3, 1), (9, 1), (9, 4), (9, 9)):
        state = begin(NbAFL(weighing="records", rounds=rounds, exposures=exposures, **options), sizes)
        uplink = c * exposures * (2 * 3 / 10) / 5
        needed = (c * rounds * 2 * 3 * 0.7 / 10 / 5) ** 2 - (0.1**2 + 0.2**2 + 0.7**2) * uplink**2
        assert state.uplink_stds == pytest.approx([uplink] * 3)
        assert state.downlink_std == pytest.approx(math.sqrt(max(0.0, needed)))
        alike = [begin(NbAFL(weighing=how, rounds=rounds, **options), (7,) * 6) for how in ("equal", "records")]
        assert alike[0].downlink_std == alike[1].downlink_std


def test_each_client_gets_published_noise_by_its_own_budget() -> None:
    system = NbAFL(calibration="paper", rounds=5, epsilon=(1.0, 2.0, 4.0), delta=(0.01, 1e-3, 1e-5))
    expected = [math.sqrt(2 * math.log(1.25 / d)) * 0.2 / e for e, d in ((1.0, 0.01), (2.0, 1e-3), (4.0, 1e-5))]
    assert begin(system, (10, 20, 30)).uplink_stds == pytest.approx(expected)


def lemma_4(rounds: int, epsilon: float, delta: float) -> float:
    """Return σ_D for 3 of 10 clients with 20 records or more, C = 1 and L = 1."""
    rate = 0.3
    if rounds <= epsilon / -math.log(1 - rate + rate * math.exp(-epsilon / math.sqrt(3))):
        return 0.0
    b = -rounds / epsilon * math.log(1 - 1 / rate + math.exp(-epsilon / rounds) / rate)
    return 2 * math.sqrt(2 * math.log(1.25 / delta)) * math.sqrt(rounds**2 / b**2 - 3) / (20 * 3 * epsilon)


@each("rounds", [10, 20, 30, 60])
def test_published_downlink_noise_serves_every_client(rounds: int) -> None:
    # The client that adds most noise (ε = 10 at δ = 1e-9) is not the one that needs most from the server (ε = 5 at
    # δ = 0.1), for whom the noise of the others is amplified less.
    budgets = [(10.0, 1e-9)] * 5 + [(5.0, 0.1)] * 5
    system = NbAFL(
        calibration="paper", rounds=rounds, cohort=3, epsilon=tuple(e for e, _ in budgets),
        delta=tuple(d for _, d in budgets),
    )  # fmt: skip
    needed = max(lemma_4(rounds, *budget) for budget in budgets)
    assert begin(system, (20,) * 10).downlink_std >= needed * (1 - 1e-6)


def test_what_the_published_noise_is_worth() -> None:
    # σ_U = c·L·Δ/ε for L = 1 at ε = 10, δ = 0.01 is really worth 11.92, granted the paper's sensitivity of 2C/m; the
    # clip proves m times that. With σ_D²·N² = (R² − N)·σ_U² a model tells 1/R² of what an upload does: 5/36 more.
    certificate = certified(NbAFL(calibration="paper", rounds=6, epsilon=10.0, delta=0.01), (25, 30, 40))
    uplink = certificate.observers["uplink"]
    assert (certificate.unit, certificate.neighbours) == ("record", "replace")
    assert certificate.against == ("uplink", "released")
    assert certificate.exposures == 1
    mu = 10 / math.sqrt(2 * math.log(125)) * math.sqrt(1 + 5 / 36)
    assert gaussian_mu(uplink.claimed_epsilon, 0.01) == pytest.approx(mu, rel=1e-5)
    assert uplink.claimed_epsilon == pytest.approx(13.13, abs=5e-3)
    mu *= 25
    at = uplink.epsilon / mu
    log_delta = normal.logcdf(-at + mu / 2) + math.log1p(
        -math.exp(uplink.epsilon + normal.logcdf(-at - mu / 2) - normal.logcdf(-at + mu / 2))
    )
    assert log_delta == pytest.approx(math.log(0.01), rel=1e-3)
    assert uplink.slack < -1000


def test_a_large_epsilon_is_cautioned_in_the_published_calibration_alone() -> None:
    for epsilon, calibration, expected in [
        (0.9, "paper", 0), (1.0, "paper", 1), ((0.5, 8.0), "paper", 1), (8.0, "tight", 0),
    ]:  # fmt: skip
        said = NbAFL(epsilon=epsilon, calibration=calibration).promise((10, 10)).cautions
        assert len(said) == expected
        if expected:
            assert "which is proved only there" in said[0]


def test_the_promise() -> None:
    paper, tight = (NbAFL(calibration=one, exposures=3).promise((20, 10, 30)) for one in ("paper", "tight"))
    for promise in (paper, tight):
        assert (promise.unit, promise.neighbours, promise.noise) == ("record", "replace", "fixed")
        assert (promise.against, promise.exposures) == (("uplink", "released"), 3)
        assert promise.uncounted == ()
    assert paper.claimed_sensitivity == pytest.approx(1 / 10)
    assert tight.claimed_sensitivity == 1


# Exact noise.

MIXED = (10, 25, 40, 80)
BUDGETS = {"epsilon": (0.5, 2.0, 8.0, 30.0), "delta": (1e-2, 1e-3, 1e-5, 1e-3)}


SETTINGS: list[tuple[dict, tuple[int, ...]]] = [
    ({}, (10,) * 4),
    ({}, MIXED),
    (BUDGETS, (10,) * 4),
    (BUDGETS, MIXED),
    (BUDGETS, MIXED[::-1]),
    ({"clipping": "model"}, MIXED),
    ({"local_steps": 3}, MIXED),
    ({"cohort": 2}, (10,) * 5),
    ({"cohort": 1}, (10,) * 3),
    ({"cohort": 3}, (10, 20, 40, 80, 300)),
    ({"cohort": 2}, (10, 10, 1000, 1000, 1000)),  # the noise of the one depends on who else takes part
    ({"cohort": 2, "epsilon": (1.0, 2.0, 4.0, 8.0, 8.0), "delta": (1e-2, 1e-3, 1e-5, 1e-3, 1e-4)}, (10,) * 5),
]


WEIGHED: list[tuple[dict, tuple[int, ...]]] = [
    ({"weighing": "records"}, MIXED),
    ({"weighing": "records"} | BUDGETS, MIXED[::-1]),
    ({"weighing": "records", "clipping": "model"}, MIXED),
    ({"weighing": "records", "cohort": 2}, (10, 20, 40, 80, 300)),
    ({"lr_schedule": "inverse-sqrt"}, MIXED),
    ({"lr_schedule": "inverse:2", "clipping": "model", "local_epochs": 2, "batch_size": 8}, MIXED),
    ({"lr_schedule": "step:3:0.5", "weighing": "records", "cohort": 3}, (10, 20, 40, 80, 300)),
    ({"lr_schedule": "inverse:4", "local_steps": 3}, (10,) * 4),
]


@each(("options", "sizes"), SETTINGS + WEIGHED)
@each("exposures", [1, 2, 5])
def test_overheard_uploads_and_all_models_cost_the_budget_and_no_more(
    options: dict, sizes: tuple[int, ...], exposures: int
) -> None:
    certificate = certified(NbAFL(rounds=20, exposures=exposures, **options), sizes)
    shares = spent_share(certificate, "uplink")
    # With few clients a round it may not matter to anybody what some of them do, who then add a little more noise.
    assert min(shares) >= (1 - 1e-5 if "cohort" not in options else 0.99)
    assert 1 - 1e-5 <= max(shares) <= 1
    assert max(spent_share(certificate, "released")) < 1  # who reads alone hears less


@each(("options", "sizes"), SETTINGS + WEIGHED)
@each("exposures", [1, 3])
def test_less_noise_would_break_a_promise(options: dict, sizes: tuple[int, ...], exposures: int) -> None:
    system = NbAFL(rounds=30, exposures=exposures, **options)
    state = begin(system, sizes)
    less = replace(state, uplink_stds=tuple(0.999 * std for std in state.uplink_stds))
    ledger, refused = Ledger(system.promise(sizes), sizes), False
    for round in range(30):
        now = replace(less, round=round)
        try:
            paid = sorted(ledger.charge(system.orders(now)))
            downlink = system.downlink(now, paid)
            ledger.broadcast(system.weights(now, paid), noise_std=downlink.std if downlink else 0.0)
        except BudgetRefused:
            paid = []
        refused = refused or len(paid) < len(now.cohort)
    assert refused
    assert max(spent_share(certify(ledger.books, ledger.run), "uplink")) <= 1


@each("seed", range(3))
@each(
    ("options", "sizes"),
    [
        ({"cohort": 2}, (10, 10, 1000, 1000, 1000)),
        ({"cohort": 3}, (10, 20, 40, 80, 300)),
        ({"cohort": 2, "epsilon": (1.0, 2.0, 4.0, 8.0, 8.0), "delta": (1e-2, 1e-3, 1e-5, 1e-3, 1e-4)}, (10,) * 5),
        ({"cohort": 1, "clipping": "model"}, MIXED),
        ({"cohort": 3, "weighing": "records"}, (10, 20, 40, 80, 300)),
        # Where clipped gradients add up over steps, the smallest client's noise falls least, and everybody's with it.
        ({"cohort": 2, "lr_schedule": "inverse-sqrt", "local_steps": 3, "proximal": 0.4}, MIXED),
    ],
)
def test_whoever_is_drawn_the_promise_is_kept(options: dict, sizes: tuple[int, ...], seed: int) -> None:
    for rounds in (3, 20):
        certificate = certified(NbAFL(rounds=rounds, **options), sizes, seed)
        assert max(spent_share(certificate, "released")) <= 1
        assert max(spent_share(certificate, "uplink")) <= 1


@each(("options", "sizes"), SETTINGS)
def test_noise_of_the_servers_own_never_pays(options: dict, sizes: tuple[int, ...]) -> None:
    # Whatever variance the server would add, its cohort can add K times as much each: the models are as noisy, and what
    # is overheard is noisier. So with the server's help the noise in a model is never less than without.
    system = NbAFL(rounds=20, **options)
    state = begin(system, sizes)
    assert state.downlink_std == 0
    assert system.downlink(state, state.cohort) is None
    in_cohort = system.cohort or len(sizes)
    added = 0.3 * math.fsum(std**2 for std in state.uplink_stds) / len(sizes) / in_cohort  # σ_D²

    def dearest(variances: list[float], servers: float) -> float:
        """Let the server add noise and each client lack K times as much."""
        ledger = Ledger(replace(system.promise(sizes), calibration="paper"), sizes)
        for round in range(20):
            now = replace(state, round=round, uplink_stds=tuple(math.sqrt(one) for one in variances))
            ledger.charge(system.orders(now))
            ledger.broadcast(system.weights(now, now.cohort), noise_std=math.sqrt(servers))
        return max(spent_share(certify(ledger.books, ledger.run), "uplink"))

    clients = [std**2 for std in state.uplink_stds]
    least = min(clients)
    given = min(added * in_cohort, 0.5 * least)
    assert dearest([one - given for one in clients], given / in_cohort) > dearest(clients, 0.0)


def test_all_heard_is_the_servers_view() -> None:
    system = NbAFL(rounds=6, exposures=6)
    for line in certified(system, MIXED).spending:
        assert line.uplink_epsilon == pytest.approx(line.server_epsilon, rel=1e-9)
        assert line.server_epsilon == pytest.approx(8.0, rel=1e-5)


def test_equal_clients_by_hand() -> None:
    # V = σ²/N: the unheard rounds cost 1/N of an upload each, so that σ² = (Δ/μ)²·(L + (R − L)/N).
    mu = gaussian_mu(8.0, 1e-3)
    for exposures, rounds, clients in ((1, 25, 4), (2, 30, 7), (5, 5, 3)):
        state = begin(NbAFL(rounds=rounds, exposures=exposures, lr=0.4, clip=0.7), (10,) * clients)
        expected = 2 * 0.4 * 0.7 / 10 / mu * math.sqrt(exposures + (rounds - exposures) / clients)
        assert state.uplink_stds == pytest.approx([expected] * clients, rel=3e-6)


def test_who_is_drawn_more_often_adds_more() -> None:
    for seed in range(3):
        state = begin(NbAFL(rounds=12, cohort=2), (10,) * 5, seed)
        replies = state.problem.schedule.replies(1, 12)
        busiest, idlest = int(replies.argmax()), int(replies.argmin())
        if replies[busiest] > replies[idlest] + 2:
            assert state.uplink_stds[busiest] > state.uplink_stds[idlest]


def test_clipped_parameters_prove_2c_and_clipped_records_2ηc_by_n() -> None:
    mu = gaussian_mu(3.0, 1e-3)
    options = {"rounds": 5, "exposures": 5, "epsilon": 3.0, "delta": 1e-3, "clip": 0.7, "lr": 0.4}
    mu /= math.sqrt(5)  # for each of the five that are heard
    model = begin(NbAFL(clipping="model", **options), MIXED)
    assert model.uplink_stds == pytest.approx([2 * 0.7 / mu] * 4, rel=3e-6)
    record = begin(NbAFL(**options), MIXED)
    assert record.uplink_stds == pytest.approx([2 * 0.4 * 0.7 / n / mu for n in MIXED], rel=3e-6)
    # After the first step every record may turn around, and the pull towards the broadcast model shrinks what was.
    many = begin(NbAFL(local_steps=2, proximal=0.5, **options), MIXED)
    expected = [((1 - 0.4 * 0.5) * 2 * 0.4 * 0.7 / n + 2 * 0.4 * 0.7) / mu for n in MIXED]
    assert many.uplink_stds == pytest.approx(expected, rel=3e-6)


# The orders.


def test_what_is_ordered_by_default() -> None:
    for options, clip, steps in [
        ({"calibration": "paper"}, ModelClip(1.0), 5),
        ({"calibration": "tight"}, RecordClip(1.0), 1),
        ({"calibration": "tight", "clipping": "model"}, ModelClip(1.0), 5),
        ({"calibration": "paper", "local_steps": 2}, ModelClip(1.0), 2),
    ]:
        system = NbAFL(proximal=0.3, lr=0.5, **options)
        state = begin(system, MIXED)
        for client, order in system.orders(state).items():
            assert (order.clip, order.steps, order.learning_rate, order.proximal) == (clip, steps, 0.5, 0.3)
            assert (order.batch, order.noise_on) == (Full(), "upload")
            assert order.noise == Gaussian(state.uplink_stds[client])


def test_everybody_weighs_alike() -> None:
    system = NbAFL()
    state = begin(system, MIXED)
    assert system.weights(state, [0, 1, 2, 3]) == dict.fromkeys(range(4), 0.25)
    # By 1/K even where some stay away, whose noise the server then adds: what the others were promised counts on both.
    assert system.weights(state, [1, 3]) == {1: 0.25, 3: 0.25}
    assert system.weights(state, []) == {}
    whole, half = system.downlink(state, [0, 1, 2, 3]), system.downlink(state, [1, 3])
    missing = (state.uplink_stds[0] ** 2 + state.uplink_stds[2] ** 2) / 16
    assert whole is None
    assert half is not None
    assert half.std**2 == pytest.approx(missing)


def test_records_weigh_where_it_is_said() -> None:
    system = NbAFL(weighing="records")
    state = begin(system, MIXED)
    assert system.weights(state, [0, 1, 2, 3]) == {client: n / sum(MIXED) for client, n in enumerate(MIXED)}
    away = system.downlink(state, [1, 2])
    assert away is not None
    missing = sum((state.uplink_stds[client] * MIXED[client] / sum(MIXED)) ** 2 for client in (0, 3))
    assert system.weights(state, [1, 2]) == {1: 25 / sum(MIXED), 2: 40 / sum(MIXED)}
    assert away.std**2 == pytest.approx(missing)


def test_local_epochs_are_steps_on_shuffled_batches() -> None:
    for options, steps, batch in [
        ({"local_epochs": 3, "batch_size": 8}, (3, 9, 15, 30), Shuffled(8)),
        ({"local_steps": 4, "batch_size": 8}, (4,) * 4, Shuffled(8)),
        ({"local_epochs": 3}, (3,) * 4, Full()),
    ]:
        system = NbAFL(calibration="paper", **options)
        ordered = system.orders(begin(system, MIXED))
        assert tuple(order.steps for order in ordered.values()) == steps
        assert {order.batch for order in ordered.values()} == {batch}


def test_noise_falls_with_the_rate_where_gradients_are_clipped_and_nowhere_else() -> None:
    for clipping, expected in (("record", [1.0, 0.5, 1 / 3, 0.25]), ("model", [1.0] * 4)):
        system = NbAFL(rounds=4, lr_schedule="inverse", clipping=clipping)
        for state, share in zip(rounds_of(system, MIXED), expected, strict=True):
            for client, order in system.orders(state).items():
                assert order.learning_rate == pytest.approx(2.0 / (state.round + 1))
                assert isinstance(order.noise, Gaussian)
                assert order.noise.std == pytest.approx(share * state.uplink_stds[client])
            away = system.downlink(state, [1, 2, 3])
            assert away is not None
            assert away.std == pytest.approx(share * state.uplink_stds[0] / 4)


def test_all_clients_or_k_at_random() -> None:
    assert NbAFL().cohorts(5) == Everyone(5)
    assert NbAFL(cohort=2).cohorts(5) == RandomK(5, 2)


# Refusals.


@each(
    ("options", "field"),
    [
        ({"rounds": 0}, "rounds"),
        ({"rounds": 2.5}, "rounds"),
        ({"lr": 0.0}, "lr"),
        ({"lr": None}, "lr"),
        ({"cohort": 0}, "cohort"),
        ({"clip": 0.0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": (1.0, 0.0)}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": 2.5}, "local_steps"),
        ({"proximal": -0.1}, "proximal"),
        ({"proximal": math.inf}, "proximal"),
        ({"exposures": 0}, "exposures"),
        ({"exposures": 1.5}, "exposures"),
        ({"exposures": 6, "rounds": 5}, "exposures"),
        ({"clipping": "layer"}, "clipping"),
        ({"calibration": "paper", "clipping": "record"}, "clipping"),
        ({"calibration": "papper"}, "calibration"),
        ({"cohort": 2, "scheduling": "round-robin"}, "scheduling"),
        ({"cohort": 2, "scheduling": "poisson"}, "scheduling"),
        ({"scheduling": "alphabetical"}, "scheduling"),
        ({"weighing": "loss"}, "weighing"),
        ({"weighing": "records", "cohort": 2, "calibration": "paper"}, "weighing"),
        ({"local_epochs": 0}, "local_epochs"),
        ({"local_epochs": 2, "local_steps": 5}, "local_steps"),
        ({"batch_size": 0, "clipping": "model"}, "batch_size"),
        ({"batch_size": 8}, "batch_size"),
        ({"lr_schedule": "inverse:0"}, "lr_schedule"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field} must"):
        NbAFL(**options)


def test_refusals_say_why() -> None:
    for options, why in [
        ({"cohort": 2, "scheduling": "round-robin"}, "whose downlink noise counts on K clients at random"),
        ({"calibration": "paper", "clipping": "record"}, "whose noise is for clipped parameters, was 'record'"),
        ({"exposures": 6, "rounds": 5}, "at most the 5 rounds, was 6: nobody hears more uploads than there are"),
    ]:
        with pytest.raises(BadInput, match=why):
            NbAFL(**options)
    assert NbAFL(exposures=5, rounds=5).exposures == 5


def test_a_cohort_larger_than_the_federation_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^cohort must be at most the 3 clients there are, was 4"):
        NbAFL(cohort=4).cohorts(3)
