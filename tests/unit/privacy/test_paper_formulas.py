"""The papers' noise formulas on numbers small enough to work out by hand, and where each of them changes its mind."""

import math

import mpmath
import pytest

from dpfl.errors import BadInput
from dpfl.privacy.accounting import Mechanism
from dpfl.privacy.budget import Budget
from dpfl.privacy.paper_formulas import (
    ALI_ORDERS,
    C2,
    ali_epsilon,
    ali_renyi,
    ali_total_steps,
    dp_fedavg_laplace_scale,
    dp_fedavg_noise_std,
    fedsgd_dpc_laplace_scale,
    fedsgd_dpc_noise_std,
    nbafl_cautions,
    nbafl_downlink_noise_std,
    nbafl_uplink_noise_std,
    open_constant,
    open_constant_cautions,
    udp_cautions,
    udp_log_moment,
    udp_log_moment_bound,
    udp_noise_std,
    udp_recomputed_noise_std,
)
from grids import each

# UDP: σ = Δ·√(2qT·ln(1/δ))/ε, and (25) from what is left of ε²/(2qΔ²·ln(1/δ)).


def test_equation_10_of_udp() -> None:
    # Δ = 3, q = 1/2, T = 8 and δ = e⁻²: 2·½·8·2 = 16 under the root; ε = 2.
    std = udp_noise_std(sensitivity=3.0, cohort_rate=0.5, rounds=8, epsilon=2.0, delta=math.exp(-2))
    assert std == pytest.approx(3 * 4 / 2, rel=1e-12)


UDP = {"sensitivity": 0.02, "cohort_rate": 0.6, "epsilon": 4.0, "delta": 1e-3}


def test_before_the_first_round_equation_25_is_equation_10() -> None:
    first = udp_recomputed_noise_std(rounds=50, done=0, earlier_stds=[], **UDP)
    assert first == pytest.approx(udp_noise_std(rounds=50, **UDP), rel=1e-12)


def test_with_the_rounds_unchanged_the_noise_does_not_change() -> None:
    stds: list[float] = []
    for done in range(50):
        stds.append(udp_recomputed_noise_std(rounds=50, done=done, earlier_stds=stds, **UDP))
    assert stds == pytest.approx([udp_noise_std(rounds=50, **UDP)] * 50, rel=1e-9)


def test_after_a_cut_the_rest_gets_less_noise_and_the_budget_is_spent_exactly() -> None:
    stds: list[float] = []
    rounds = [50] * 10 + [46] * 20 + [40] * 10  # discounted twice: after 10 rounds and after 30
    for done, now in enumerate(rounds):
        stds.append(udp_recomputed_noise_std(rounds=now, done=done, earlier_stds=stds, **UDP))
    # The paper's currency: Σ 1/σ² = ε²/(2qΔ²·ln(1/δ)) = 16/(2·0.6·0.0004·ln 1000).
    assert math.fsum(1 / std**2 for std in stds) == pytest.approx(16 / (0.00048 * math.log(1000)), rel=1e-12)
    assert stds[9] > stds[10] > stds[30]
    assert stds[10:30] == pytest.approx([stds[10]] * 20, rel=1e-9)


def test_equation_25_after_a_cut_by_hand() -> None:
    # ε²/(2qΔ²·ln(1/δ)) = 16/(2·1·1·2) = 4; two rounds at σ = 1 used 2; of now T = 10 rounds 8 are left: √(8/2).
    std = udp_recomputed_noise_std(
        sensitivity=1.0, cohort_rate=1.0, rounds=10, done=2, earlier_stds=[1.0, 1.0], epsilon=4.0, delta=math.exp(-2)
    )
    assert std == pytest.approx(2.0, rel=1e-12)


# UDP's moments: ν₀ = N(0, σ²), ν₁ = qN(Δ, σ²) + (1−q)N(0, σ²), in units of σ.


def direct_log_moment(rate: float, ratio: float, power: int) -> float:
    """Integrate ν₀·(ν₁/ν₀)^power as it stands, in many digits."""

    def integrand(z: mpmath.mpf) -> mpmath.mpf:
        return mpmath.npdf(z) * (1 - rate + rate * mpmath.exp(z * ratio - ratio**2 / 2)) ** power

    with mpmath.workdps(30):
        return float(mpmath.log(mpmath.quad(integrand, [-30, -10, 0, 10, 30])))


MOMENTS = [(0.9, 0.5, 1), (0.9, 0.5, 4), (0.1, 2.0, 3), (1.0, 1.0, 2), (0.6, 0.02, 5)]


@each(("rate", "ratio", "moment"), MOMENTS)
def test_udp_s_moment_is_the_integral_as_it_stands(rate: float, ratio: float, moment: int) -> None:
    found = udp_log_moment(cohort_rate=rate, ratio=ratio, moment=moment)
    assert found == pytest.approx(direct_log_moment(rate, ratio, moment + 1), rel=1e-9, abs=1e-12)
    swapped = udp_log_moment(cohort_rate=rate, ratio=ratio, moment=moment, swapped=True)
    assert swapped == pytest.approx(direct_log_moment(rate, ratio, -moment), rel=1e-9, abs=1e-12)
    # The two differ by more than the tolerance: an integral of the wrong power would be found out.
    assert direct_log_moment(rate, ratio, moment) != pytest.approx(found, rel=1e-3)


@each(("rate", "ratio", "moment"), [(0.9, 0.01, 100), (0.1, 0.5, 100), (0.9, 5.0, 100), (0.5, 5.0, 1)])
def test_udp_s_moment_is_its_binomial_sum_where_no_float_holds_it(rate: float, ratio: float, moment: int) -> None:
    # Equation 14's third line; ALI-DPFL's equation 15 is the same sum, divided by α − 1 = λ.
    summed = moment * ali_renyi(sampling_rate=rate, noise_multiplier=1 / ratio, order=moment + 1)
    assert udp_log_moment(cohort_rate=rate, ratio=ratio, moment=moment) == pytest.approx(summed, rel=1e-9, abs=1e-12)


def test_udp_s_bound_on_the_moment_by_hand() -> None:
    # q = 1/2, λ = 3, Δ/σ = 2: ½·3·4·4/2 = 12.
    assert udp_log_moment_bound(cohort_rate=0.5, ratio=2.0, moment=3) == pytest.approx(12.0, rel=1e-12)


def test_udp_s_bound_holds_where_its_derivation_does_and_not_beyond() -> None:
    small, large = 0.01, 5.0  # λΔ²/(2σ²) is to be small: 0.005 and 1,250 at λ = 100
    for rate in (0.1, 0.9):
        near = {"cohort_rate": rate, "ratio": small, "moment": 100}
        assert udp_log_moment(**near) < udp_log_moment_bound(**near)
        far = {"cohort_rate": rate, "ratio": large, "moment": 100}
        assert udp_log_moment(**far) > udp_log_moment_bound(**far)


@each(("rate", "ratio", "moment"), MOMENTS)
def test_lemma_1_of_udp(rate: float, ratio: float, moment: int) -> None:
    setting = {"cohort_rate": rate, "ratio": ratio, "moment": moment}
    assert udp_log_moment(**setting, swapped=True) <= udp_log_moment(**setting) + 1e-12


@each(
    ("rounds", "done", "earlier", "message"),
    [
        (10, 10, [1.0], "was 10 after 10 rounds that used 25.0% of it; stop here"),
        (9, 10, [1.0], "was 9 after 10 rounds that used 25.0% of it; stop here"),
        (20, 4, [1.0] * 4, "was 20 after 4 rounds that used 100.0% of it; stop here"),
        (20, 8, [1.0] * 8, "was 20 after 8 rounds that used 200.0% of it; stop here"),
    ],
)
def test_equation_25_has_no_answer_where_nothing_is_left(
    rounds: int, done: int, earlier: list[float], message: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        udp_recomputed_noise_std(
            sensitivity=1.0, cohort_rate=1.0, rounds=rounds, done=done, earlier_stds=earlier, epsilon=4.0,
            delta=math.exp(-2),
        )  # fmt: skip
    assert str(refusal.value) == f"rounds must leave some of the budget for later, {message}"


def test_udp_is_cautioned_for_the_budget_that_its_formula_breaks_worst() -> None:
    assert udp_cautions([Budget(1.0, 1e-3), Budget(4.0, 1e-3)]) == ()
    (caution,) = udp_cautions([Budget(4.0, 1e-3), Budget(20.0, 1e-3), Budget(8.0, 1e-3)])
    assert "was 20 at δ = 0.001, where its noise is really worth ε ≤ 30.32" in caution
    assert caution.startswith("epsilon should be small enough for UDP's equation (10) to hold")
    assert caution.endswith("calibrate tightly to keep the promise")


def test_udp_breaks_its_promise_somewhere_near_7() -> None:
    assert udp_cautions([Budget(6.9, 1e-3)]) == ()
    assert udp_cautions([Budget(7.5, 1e-3)]) != ()


# NbAFL: σ_U = c·L·(2C/m)/ε; σ_D by Theorem 1 for everyone and by Lemma 4 for K of N.

DELTA = 1.25 / math.e**2  # makes c = √(2·ln(1.25/δ)) = 2


def test_the_uplink_noise_of_nbafl() -> None:
    # c·L·2C/m/ε = 2·5·(2·3/100)/4
    std = nbafl_uplink_noise_std(clip=3.0, fewest_records=100, exposures=5, epsilon=4.0, delta=DELTA)
    assert std == pytest.approx(0.15, rel=1e-12)


def downlink(**changes: float) -> float:
    setting = {
        "clip": 3.0, "fewest_records": 100, "clients": 16, "cohort": 16, "exposures": 1, "rounds": 5, "epsilon": 4.0,
        "delta": DELTA,
    }  # fmt: skip
    return nbafl_downlink_noise_std(**(setting | changes))


def test_theorem_1() -> None:
    # 2·c·C·√(T² − L²N)/(m·N·ε) = 2·2·3·√(25 − 16)/(100·16·4)
    assert downlink() == pytest.approx(36 / 6400, rel=1e-12)


@each(("rounds", "exposures"), [(1, 1), (4, 1), (8, 2), (100, 25)])
def test_theorem_1_adds_nothing_up_to_l_times_the_root_of_n_rounds(rounds: int, exposures: int) -> None:
    assert downlink(rounds=rounds, exposures=exposures) == 0.0
    assert downlink(rounds=exposures * 4 + 1, exposures=exposures) > 0.0


def lemma_4(*, n: int, k: int, exposures: int, rounds: float, epsilon: float, c: float, clip: float, m: int) -> float:
    """Work out equations (21) and (22) of NbAFL as they are printed, with 40 digits."""
    with mpmath.workdps(40):
        epsilon = mpmath.mpf(epsilon)
        rate = mpmath.mpf(k) / n
        gamma = -mpmath.log(1 - rate + rate * mpmath.exp(-epsilon / (exposures * mpmath.sqrt(k))))
        if rounds <= epsilon / gamma:
            return 0.0
        b = -(rounds / epsilon) * mpmath.log(1 - 1 / rate + 1 / rate * mpmath.exp(-epsilon / rounds))
        return float(2 * c * clip * mpmath.sqrt((rounds / b) ** 2 - exposures**2 * k) / (m * k * epsilon))


@each(
    ("n", "k", "exposures", "rounds", "epsilon"),
    [
        (50, 20, 1, 25, 10.0),
        (50, 20, 1, 25, 1.0),
        (50, 49, 2, 100, 60.0),
        (50, 10, 1, 200, 0.1),
        (1000, 30, 3, 5000, 8.0),
        (16, 4, 1, 1, 4.0),
    ],
)
def test_lemma_4(n: int, k: int, exposures: int, rounds: int, epsilon: float) -> None:
    found = downlink(clients=n, cohort=k, exposures=exposures, rounds=rounds, epsilon=epsilon)
    expected = lemma_4(n=n, k=k, exposures=exposures, rounds=rounds, epsilon=epsilon, c=2.0, clip=3.0, m=100)
    assert found == pytest.approx(expected, rel=1e-9, abs=0)


def test_lemma_4_once_with_a_pocket_calculator() -> None:
    # N = 4, K = 2, L = 1, ε/T = ln(4/3): 1 − 2 + 2·¾ = ½, b = ln 2/ln(4/3) = 2.409421, and T = 10 gives ε = 2.876821.
    # √(T²/b² − L²K) = √(17.225613 − 2) = 3.902001; times 2·c·C = 12, over m·K·ε = 575.3641.
    found = downlink(clients=4, cohort=2, rounds=10, epsilon=10 * math.log(4 / 3))
    assert found == pytest.approx(12 * 3.902001 / 575.3641, rel=1e-6)


def threshold(n: int, k: int, exposures: int, epsilon: float) -> float:
    return epsilon / -math.log(1 - k / n + k / n * math.exp(-epsilon / (exposures * math.sqrt(k))))


@each("epsilon", [0.1, 5.0, 60.0])
def test_lemma_4_begins_at_its_threshold_and_from_zero(epsilon: float) -> None:
    start = threshold(50, 20, 25, epsilon)
    setting = {"clients": 50, "cohort": 20, "exposures": 25, "epsilon": epsilon}
    assert downlink(rounds=math.floor(start), **setting) == 0.0
    assert downlink(rounds=math.floor(start) + 1, **setting) > 0.0
    # Continuous there: b(T)·L√K = T at T = ε/γ, so a hair beyond it the noise is a hair (T need not be whole here).
    scale = 12 / (100 * 20 * epsilon) * 25 * math.sqrt(20)
    assert 0.0 < downlink(rounds=start * (1 + 1e-9), **setting) < 1e-3 * scale


def test_below_its_threshold_the_logarithm_is_not_taken() -> None:
    # 1 − N/K + (N/K)·e^(−ε/T) = 1 − 2.5 + 2.5·e⁻⁶⁰ is negative.
    assert downlink(clients=50, cohort=20, exposures=25, rounds=1, epsilon=60.0) == 0.0


def test_lemma_4_turns_into_theorem_1_as_the_cohort_becomes_everyone() -> None:
    everyone = downlink(clients=1_000_000, cohort=1_000_000, rounds=5000, epsilon=4.0)
    almost = downlink(clients=1_000_000, cohort=999_999, rounds=5000, epsilon=4.0)
    assert almost == pytest.approx(everyone, rel=1e-5)


def test_nbafl_is_cautioned_from_epsilon_1_on() -> None:
    assert nbafl_cautions([Budget(0.5, 0.01), Budget(0.99, 0.01)]) == ()
    (caution,) = nbafl_cautions([Budget(1.0, 0.01), Budget(60.0, 0.01), Budget(50.0, 0.01)])
    assert "proved only there, was 60; calibrate tightly" in caution
    assert nbafl_cautions([Budget(1.0, 0.01)]) != ()


# DP-FedAvg and FedSGD-DPC: T_l answers, Ξ = η̃·E·ξ, and c₂ = √2.


def test_the_constant_that_the_papers_leave_open_is_the_root_of_two() -> None:
    assert math.isclose(C2**2, 2.0, rel_tol=1e-15)


def test_dp_fedavg_with_laplace_noise() -> None:
    # T_l·η̃·E·ξ₁/ε = 10·0.1·5·150/3
    scale = dp_fedavg_laplace_scale(replies=10, largest_lr=0.1, local_steps=5, clip=150.0, epsilon=3.0)
    assert scale == pytest.approx(250.0, rel=1e-12)


def test_dp_fedavg_with_gaussian_noise() -> None:
    # √2·√(T_l·ln(1/δ))/ε·η̃·E·ξ₂ with T_l = 4 and δ = e⁻²: √2·√8 = 4; ·0.1·5·3/10
    std = dp_fedavg_noise_std(replies=4, largest_lr=0.1, local_steps=5, clip=3.0, epsilon=10.0, delta=math.exp(-2))
    assert std == pytest.approx(0.6, rel=1e-12)


def test_fedsgd_dpc_with_laplace_noise() -> None:
    # 2·(bT/N)·ξ₁/(d_i·ε_i) with bT/N = 5·22/50 = 2.2, no whole number: 2·2.2·300/(600·5)
    scale = fedsgd_dpc_laplace_scale(replies=2.2, clip=300.0, records=600, epsilon=5.0)
    assert scale == pytest.approx(0.44, rel=1e-12)


def test_fedsgd_dpc_with_gaussian_noise() -> None:
    # σ² = c₂²·ξ₂²·(bT/N)·ln(1/δ)/(d²·ε²) = 2·100·4·2/(400·¼) = 16
    std = fedsgd_dpc_noise_std(replies=4, clip=10.0, records=20, epsilon=0.5, delta=math.exp(-2))
    assert std**2 == pytest.approx(16.0, rel=1e-12)


def test_c2_is_a_factor_of_both_papers_noise() -> None:
    options = {"replies": 4, "epsilon": 0.5, "delta": 1e-3, "clip": 3.0}
    fedavg = {"largest_lr": 0.1, "local_steps": 5, **options}
    assert dp_fedavg_noise_std(**fedavg) == dp_fedavg_noise_std(**fedavg, constant=C2)
    assert dp_fedavg_noise_std(**fedavg, constant=3 * C2) == pytest.approx(3 * dp_fedavg_noise_std(**fedavg))
    fedsgd = {"records": 20, **options}
    assert fedsgd_dpc_noise_std(**fedsgd) == fedsgd_dpc_noise_std(**fedsgd, constant=C2)
    assert fedsgd_dpc_noise_std(**fedsgd, constant=3 * C2) == pytest.approx(3 * fedsgd_dpc_noise_std(**fedsgd))


@each("sampling_rate", [1.0, 0.01])
def test_c2_is_what_was_chosen_and_the_root_of_two_where_nothing_was(sampling_rate: float) -> None:
    options = {"replies": 2.2, "budget": Budget(1.0, 1e-5), "sampling_rate": sampling_rate}
    assert open_constant(None, **options) == C2
    assert open_constant(5.0, **options) == 5.0


@each(
    ("sampling_rate", "replies", "epsilon", "delta"),
    [(1.0, 1, 0.5, 1e-5), (1.0, 2.2, 1, 1e-3), (0.01, 100, 0.1, 1e-5), (0.01, 12.1, 1, 1e-5), (0.3, 40, 8, 1e-3)],
)
def test_an_accountants_c2_is_the_least_that_keeps_the_promise(
    sampling_rate: float, replies: float, epsilon: float, delta: float
) -> None:
    budget = Budget(epsilon, delta)
    c2 = open_constant("accountant", replies=replies, budget=budget, sampling_rate=sampling_rate)
    # On the sum of a sample: σ = z·C with z = c₂·q·√(R_i·ln(1/δ))/ε.
    multiplier = c2 * sampling_rate * math.sqrt(replies * math.log(1 / delta)) / epsilon

    def spent(multiplier: float) -> float:
        return ali_epsilon({Mechanism("gaussian", multiplier, sampling_rate): replies}, delta)

    assert spent(multiplier * (1 + 1e-9)) <= epsilon < spent(multiplier * (1 - 1e-4))


def test_an_accountants_c2_in_closed_form() -> None:
    # Plain noise has ε = αT/(2z²) + ln(1/δ)/(α − 1), least over real α at T/(2z²) + √(2T·ln(1/δ))/z: with 1/z = x it is
    # x²T/2 + x√(2T·ln(1/δ)) = ε. At T = 2, ε = 3 and δ = e⁻² that is x² + 2√2·x = 3, x = √5 − √2, and α = 1 + √2/x is
    # no whole number: what whole orders lose is below one part in a hundred.
    x = math.sqrt(5) - math.sqrt(2)
    c2 = open_constant("accountant", replies=2, budget=Budget(3.0, math.exp(-2)))
    assert 1 / x <= c2 * math.sqrt(2 * 2) / 3 <= 1.01 / x


def test_an_accountant_that_no_noise_satisfies_says_so() -> None:
    with pytest.raises(
        BadInput, match=r"^epsilon must be above 0.0451 for an accountant of orders up to 256 .*was 0.04;"
    ):
        open_constant("accountant", replies=1, budget=Budget(0.04, 1e-5))
    assert open_constant("accountant", replies=1, budget=Budget(0.046, 1e-5)) > 1


def test_the_open_constant_is_cautioned_unless_an_accountant_found_it() -> None:
    assert open_constant_cautions("accountant") == ()
    assert (
        "only that a constant c₂ exists, was left out, which makes it dpfl's own √2" in open_constant_cautions(None)[0]
    )
    assert "exists, was 3.5: another" in open_constant_cautions(3.5)[0]


# ALI-DPFL: the Rényi curve of the sampled Gaussian at whole orders, turned into ε by the classical conversion.


def test_the_curve_of_ali_at_order_2() -> None:
    # (1−q)² + 2q(1−q) + q²·e^(1/σ²) = 1 + q²(e^(1/σ²) − 1)
    curve = ali_renyi(sampling_rate=0.1, noise_multiplier=1.0, order=2)
    assert curve == pytest.approx(math.log(1 + 0.01 * (math.e - 1)), rel=1e-12)


def test_the_curve_of_ali_at_order_3() -> None:
    # The exponents (k² − k)/(2σ²) at σ = ½ are 0, 0, 4 and 12; half of the logarithm.
    terms = 0.8**3 + 3 * 0.8**2 * 0.2 + 3 * 0.8 * 0.2**2 * math.exp(4) + 0.2**3 * math.exp(12)
    assert ali_renyi(sampling_rate=0.2, noise_multiplier=0.5, order=3) == pytest.approx(math.log(terms) / 2, rel=1e-12)


@each(("noise", "order"), [(1.0, 2), (0.3, 256), (40.0, 17)])
def test_without_sampling_the_curve_is_the_gaussian_one(noise: float, order: int) -> None:
    assert ali_renyi(sampling_rate=1.0, noise_multiplier=noise, order=order) == pytest.approx(order / (2 * noise**2))


def test_epsilon_of_ali_is_the_best_of_its_whole_orders() -> None:
    # Plain noise of σ = 5 once, δ = e⁻⁸: α/50 + 8/(α − 1) is least at α = 21, where it is 0.42 + 0.4.
    assert ali_epsilon({Mechanism("gaussian", 5.0): 1}, math.exp(-8)) == pytest.approx(0.82, rel=1e-12)
    # Twice that noise four times over is the same, and different mechanisms add up before an order is chosen.
    assert ali_epsilon({Mechanism("gaussian", 10.0): 4}, math.exp(-8)) == pytest.approx(0.82, rel=1e-12)
    both = {Mechanism("gaussian", 10.0): 2, Mechanism("gaussian", 10.0 / math.sqrt(2)): 1}
    assert ali_epsilon(both, math.exp(-8)) == pytest.approx(0.82, rel=1e-12)


def test_ali_stops_at_order_256() -> None:
    assert (ALI_ORDERS[0], ALI_ORDERS[-1]) == (2, 256)
    # With almost no cost an even larger order would be better: 256/(2·10⁸) + 8/255.
    assert ali_epsilon({Mechanism("gaussian", 1e4): 1}, math.exp(-8)) == pytest.approx(1.28e-6 + 8 / 255, rel=1e-9)
    # And with a very large one even order 2 is too many: 2/(2·0.01) + 8.
    assert ali_epsilon({Mechanism("gaussian", 0.1): 1}, math.exp(-8)) == pytest.approx(108.0, rel=1e-12)


def test_the_total_steps_of_ali_end_on_the_side_that_fits() -> None:
    # Plain noise of σ = 10, δ = e⁻⁸, n steps: n·α/200 + 8/(α − 1). Four cost 0.42 + 0.4 = 0.82 at α = 21, five
    # 0.475 + 0.4444 = 0.9194 at α = 19.
    setting = {"sampling_rate": 1.0, "noise_multiplier": 10.0, "delta": math.exp(-8)}
    assert ali_total_steps(epsilon=0.821, **setting) == 4
    assert ali_total_steps(epsilon=0.819, **setting) == 3
    assert ali_total_steps(epsilon=0.9195, **setting) == 5
    assert ali_total_steps(epsilon=0.9193, **setting) == 4


def test_the_papers_count_laplace_noise_linearly_and_gaussian_never_purely() -> None:
    assert ali_epsilon({Mechanism("laplace", 10.0): 4, Mechanism("laplace", 5.0): 1}, 0.0) == pytest.approx(0.6)
    assert ali_epsilon({Mechanism("laplace", 10.0): 4}, 1e-5) == pytest.approx(0.4)
    assert ali_epsilon({Mechanism("gaussian", 10.0): 1}, 0.0) == math.inf
    assert ali_epsilon({Mechanism("gaussian", 1e-200): 1}, 1e-5) == math.inf
