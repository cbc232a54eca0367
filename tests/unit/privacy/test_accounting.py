"""What releases cost: on cases that can be worked out by hand, at the extremes, and where the answer is no."""

import math
import re
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from dpfl.errors import BadInput
from dpfl.privacy import accounting, renyi
from dpfl.privacy.accounting import Mechanism, least_noise, most_steps, tight, tight_each
from dpfl.privacy.budget import Budget
from dpfl.privacy.gaussian_dp import epsilon_of, mu_of, mu_of_pure
from grids import each

plain = Mechanism("gaussian", 2.0)
sampled = Mechanism("gaussian", 1.0, 0.01)
fixed = Mechanism("gaussian", 1.0, 0.01, "fixed")
laplace = Mechanism("laplace", 2.0)
sampled_laplace = Mechanism("laplace", 0.5, 0.1)


def amplified(epsilon: float, rate: float) -> float:
    """Return ln(1 + q(e^ε − 1)): what one release costs at δ, if with its record in the batch it costs ε at δ/q."""
    return math.log1p(rate * math.expm1(epsilon))


# One release


@each(("noise", "rate", "delta"), [(1.0, 0.01, 1e-5), (0.7, 0.1, 1e-3), (3.0, 0.5, 1e-6), (20.0, 0.9, 1e-4)])
def test_one_sampled_gaussian_release_by_its_closed_form(noise: float, rate: float, delta: float) -> None:
    exact = amplified(float(epsilon_of(1 / noise, delta / rate)), rate)
    found = tight({Mechanism("gaussian", noise, rate): 1}, delta)
    assert exact * (1 - 1e-7) <= found <= exact * (1 + 1e-4)


def test_one_sampled_gaussian_release_once_in_digits() -> None:
    # At δ/q = 1e-3 noise of 1 costs ε = 3.13867; ln(1 + 0.01·(e^3.13867 − 1)) = 0.19945.
    assert tight({sampled: 1}, 1e-5) == pytest.approx(0.19945, abs=1e-5)


@each("noise", [0.1, 0.5, 2.0, 30.0])
def test_one_plain_laplace_release_by_its_closed_form(noise: float) -> None:
    # δ(ε) = 1 − e^((ε − 1/b)/2), so ε = 1/b + 2·ln(1 − δ)
    exact = 1 / noise + 2 * math.log1p(-1e-3)
    found = tight({Mechanism("laplace", noise): 1}, 1e-3)
    assert exact <= found <= exact * (1 + 1e-2)
    assert found <= 1 / noise


@each(("noise", "rate"), [(0.3, 0.01), (1.0, 0.1), (2.0, 0.5)])
def test_one_sampled_laplace_release_by_its_closed_form(noise: float, rate: float) -> None:
    exact = amplified(1 / noise + 2 * math.log1p(-1e-3 / rate), rate)
    found = tight({Mechanism("laplace", noise, rate): 1}, 1e-3)
    assert exact <= found <= exact * (1 + 1e-2)


# Several releases


def test_plain_gaussian_releases_are_one_with_less_noise() -> None:
    once = tight({Mechanism("gaussian", 0.5): 1}, 1e-5)
    assert tight({plain: 16}, 1e-5) == pytest.approx(once, rel=1e-12)
    # 1/3² + 1/1.5² + 1/1.5² = 1
    three = {Mechanism("gaussian", 3.0): 1, Mechanism("gaussian", 1.5): 2}
    assert tight(three, 1e-5) == pytest.approx(tight({Mechanism("gaussian", 1.0): 1}, 1e-5), rel=1e-12)


def test_a_plain_gaussian_beside_sampled_noise_is_one_release_too() -> None:
    # 16 of noise 2 are one of noise ½, whichever way they are spelled beside something that needs a distribution.
    many = tight({plain: 16, sampled: 10}, 1e-5)
    assert many == pytest.approx(tight({Mechanism("gaussian", 0.5): 1, sampled: 10}, 1e-5), rel=1e-9)
    assert tight({plain: 16}, 1e-5) < many < tight({plain: 16}, 1e-5) + tight({sampled: 10}, 1e-5)


def test_two_laplace_releases_by_integration() -> None:
    # The loss of Lap(b) is 1/b with probability ½, −1/b with e^(−1/b)/2, and has the density e^((l − 1/b)/2)/4 between.
    # At b = 1 two of them exceed ε = 1.9 by Σ and ∫ of (1 − e^(1.9 − l)): worked out below piece by piece.
    epsilon = 1.9
    both = 0.25 * (1 - math.exp(epsilon - 2))
    # one at its top, the other at l > 0.9: 2·½·∫ e^((l−1)/2)/4·(1 − e^(ε−1−l)) dl from 0.9 to 1
    one = 0.5 * ((1 - math.exp(-0.05)) - (math.exp(-0.05) - math.exp(-0.1)))
    # neither: the sum s from 1.9 to 2 has the density (2 − s)·e^((s−2)/2)/16
    steps = 2000
    neither = math.fsum(
        (2 - s) * math.exp((s - 2) / 2) / 16 * (1 - math.exp(epsilon - s)) * 0.1 / steps
        for s in (1.9 + 0.1 * (i + 0.5) / steps for i in range(steps))
    )
    found = tight({Mechanism("laplace", 1.0): 2}, both + one + neither)
    assert epsilon * (1 - 1e-6) <= found <= epsilon * (1 + 2e-3)


def test_many_different_mechanisms_cost_more_than_each_and_less_than_their_sum() -> None:
    spent = {plain: 1, sampled: 5, laplace: 1, sampled_laplace: 2}
    alone = [tight({mechanism: count}, 1e-5) for mechanism, count in spent.items()]
    assert max(alone) < tight(spent, 1e-5) < sum(alone)


def test_nothing_costs_nothing() -> None:
    assert tight({}, 1e-5) == tight({}, 0.0) == 0.0
    assert tight({plain: 0, sampled: 0, laplace: 0}, 1e-5) == 0.0
    assert tight({plain: 0}, 0.0) == 0.0
    assert tight({plain: 0, laplace: 3}, 0.0) == pytest.approx(1.5)


# δ = 0 and tiny δ


def test_at_delta_0_laplace_noise_adds_up_and_gaussian_noise_has_no_price() -> None:
    assert tight({laplace: 3, Mechanism("laplace", 4.0): 2}, 0.0) == pytest.approx(2.0, rel=1e-15)
    assert tight({sampled_laplace: 2}, 0.0) == pytest.approx(2 * amplified(2.0, 0.1), rel=1e-15)
    for gaussian in (plain, sampled, fixed):
        assert tight({gaussian: 1}, 0.0) == math.inf
        assert tight({laplace: 3, gaussian: 1}, 0.0) == math.inf


@pytest.mark.parametrize("delta", [1e-30, 1e-200])
def test_below_what_a_fourier_transform_can_tell_renyi_takes_over(delta: float) -> None:
    for spent in ({sampled: 100}, {sampled: 100, plain: 2}, {fixed: 100}):
        assert tight(spent, delta) == renyi.epsilon(spent, delta) < math.inf
    # Plain noise keeps its closed form, and Laplace noise never costs more than its pure price.
    assert tight({plain: 4}, delta) == float(epsilon_of(1.0, delta)) < renyi.epsilon({plain: 4}, delta)
    assert tight({laplace: 10}, delta) == 5.0 < renyi.epsilon({laplace: 10}, delta)


@each("spent", [{sampled: 10}, {plain: 1}, {laplace: 10}, {fixed: 10}, {sampled_laplace: 50}])
def test_epsilon_grows_as_delta_shrinks_across_every_change_of_method(spent: accounting.Spent) -> None:
    deltas = [0.1, 1e-3, 1e-6, 1e-11, 1.1e-12, 0.9e-12, 1.1e-14, 0.9e-14, 1e-30, 1e-200]
    found = [tight(spent, delta) for delta in deltas]
    assert found == sorted(found)
    assert math.isfinite(found[-1])


# Little and much noise


@each("spent", [plain, sampled, fixed, laplace, sampled_laplace])
def test_with_enough_noise_delta_alone_covers_it(spent: Mechanism) -> None:
    huge = Mechanism(spent.noise, 1e6, spent.sampling_rate, spent.sampling)
    assert tight({huge: 3}, 1e-5) == 0.0
    assert 0.0 <= tight({huge: 1000}, 1e-13) < 0.1


def test_with_hardly_any_gaussian_noise_a_release_costs_half_its_square() -> None:
    # μ²/2 + μ·Φ⁻¹(1 − δ) for large μ; 1/z = 1000 and δ = 1e-5: 500 000 + 4 265
    assert tight({Mechanism("gaussian", 1e-3): 1}, 1e-5) == pytest.approx(504_265, rel=1e-4)
    # In every other batch it is to be met at δ = 2e-5 only: 500 000 + 4 107 − ln 2.
    assert tight({Mechanism("gaussian", 1e-3, 0.5): 1}, 1e-5) == pytest.approx(504_107, rel=1e-4)


def test_with_hardly_any_laplace_noise_a_release_costs_its_pure_price() -> None:
    assert tight({Mechanism("laplace", 0.02): 1}, 1e-5) == pytest.approx(50.0, rel=1e-4)
    assert tight({Mechanism("laplace", 0.02, 0.5): 1}, 1e-5) == pytest.approx(50 + math.log(0.5), rel=1e-4)


# What a mechanism knows of itself


def test_the_pure_price_of_a_release() -> None:
    assert plain.pure == math.inf
    assert laplace.pure == 0.5
    assert sampled_laplace.pure == pytest.approx(math.log(1 + 0.1 * (math.exp(2) - 1)), rel=1e-15)
    assert Mechanism("laplace", 1e-3, 0.5).pure == 1000.0  # e^1000 is no number; without amplification it is safe


def test_the_gaussian_that_covers_a_release() -> None:
    assert plain.mu_squared == 0.25
    assert sampled.mu_squared == fixed.mu_squared == math.inf
    assert laplace.mu_squared == pytest.approx(mu_of_pure(0.5) ** 2, rel=1e-15)
    assert sampled_laplace.mu_squared == pytest.approx(mu_of_pure(sampled_laplace.pure) ** 2, rel=1e-15)


def test_batches_of_all_records_are_not_sampled_whatever_their_kind() -> None:
    assert Mechanism("gaussian", 2.0, 1.0, "fixed").plain
    assert tight({Mechanism("gaussian", 2.0, 1.0, "fixed"): 3}, 1e-5) == tight({plain: 3}, 1e-5)
    assert Mechanism("laplace", 2.0, 1.0, "fixed").pure == 0.5


def test_batches_of_fixed_size_have_a_bound_of_their_own() -> None:
    assert tight({fixed: 20}, 1e-5) == renyi.epsilon({fixed: 20}, 1e-5) > tight({sampled: 20}, 1e-5)
    assert tight({fixed: 20, plain: 1}, 1e-5) == renyi.epsilon({fixed: 20, plain: 1}, 1e-5)


# Many clients at once


def test_many_clients_at_once_are_each_of_them_alone() -> None:
    spent = [{plain: 3}, {sampled: 7}, {}, {plain: 3}, {laplace: 2}, {fixed: 4}, {sampled: 7, plain: 1}, {plain: 0}]
    deltas = [1e-5, 1e-5, 1e-5, 0.0, 0.0, 1e-6, 1e-30, 1e-5]
    together = tight_each(spent, deltas)
    assert together == pytest.approx([tight(one, delta) for one, delta in zip(spent, deltas, strict=True)], rel=1e-12)


def test_those_who_spent_alike_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counting(spent: accounting.Spent, delta: float) -> float:
        asked.append((dict(spent), delta))
        return float(len(asked))

    monkeypatch.setattr(accounting, "tight", counting)
    one, other = {sampled: 7, laplace: 1}, {laplace: 1, sampled: 7}
    found = tight_each([one, other, one, {sampled: 8}, one], [1e-5, 1e-5, 1e-6, 1e-5, 1e-5])
    assert len(asked) == 3
    assert found[0] == found[1] == found[4]
    assert len({found[0], found[2], found[3]}) == 3


# How many steps, how much noise


@each(("noise", "epsilon", "steps"), [(10.0, 0.3, 3), (10.0, 0.7, 7), (100.0, 0.29, 29), (3.0, 1.0, 3), (2.5, 1.0, 2)])
def test_pure_steps_are_counted_as_typed(noise: float, epsilon: float, steps: int) -> None:
    # 0.29·100 is 28.999999999999996 in floating point, and 3·0.1 is more than 0.3: neither may cost a step.
    assert most_steps(tight, Mechanism("laplace", noise), Budget(epsilon, 0.0)) == steps


def test_sampled_pure_steps_by_hand() -> None:
    # Each costs ln(1 + 0.1(e² − 1)) = 0.4940: four cost 1.976 and five 2.470.
    assert most_steps(tight, sampled_laplace, Budget(2.0, 0.0)) == 4


def test_plain_gaussian_steps_by_the_closed_form() -> None:
    # n steps of noise z cost μ² = n/z², so n = ⌊z²μ²⌋ fit.
    worth = float(mu_of(2.0, 1e-5)) ** 2
    assert most_steps(tight, Mechanism("gaussian", 30.0), Budget(2.0, 1e-5)) == math.floor(900 * worth)


def test_where_not_even_one_step_fits_there_are_none() -> None:
    assert most_steps(tight, Mechanism("gaussian", 0.5), Budget(0.1, 1e-5)) == 0
    assert most_steps(tight, Mechanism("laplace", 0.5), Budget(0.1, 0.0)) == 0
    assert most_steps(tight, sampled, Budget(1e-4, 1e-5)) == 0
    assert most_steps(tight, plain, Budget(1000.0, 0.0)) == 0


def test_pure_noise_is_exact_and_never_too_little() -> None:
    assert least_noise(tight, laplace, 3, Budget(0.3, 0.0)) == 10.0
    found = least_noise(tight, laplace, 1, Budget(3.0, 0.0))
    assert 1 / 3 <= found <= math.nextafter(1 / 3, 1)
    # 7/3 lies above the floating-point number next to it, which would be too little noise.
    assert least_noise(tight, laplace, 7, Budget(3.0, 0.0)) >= 7 / 3


def test_sampled_pure_noise_by_the_closed_form() -> None:
    # 10 steps of ln(1 + 0.1(e^(1/b) − 1)) make 2: b = 1/ln(1 + 10(e^0.2 − 1)).
    exact = 1 / math.log1p(10 * math.expm1(0.2))
    found = least_noise(tight, sampled_laplace, 10, Budget(2.0, 0.0))
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-4)


@each("epsilon", [1e-3, 1.0, 1e3])
def test_plain_gaussian_noise_by_the_closed_form(epsilon: float) -> None:
    exact = 3 / float(mu_of(epsilon, 1e-6))
    found = least_noise(tight, plain, 9, Budget(epsilon, 1e-6))
    assert exact * (1 - 1e-7) <= found <= exact * (1 + 1e-4)


def test_the_multiplier_of_the_mechanism_asked_about_does_not_matter() -> None:
    budget = Budget(1.0, 1e-5)
    far = least_noise(tight, Mechanism("gaussian", 1e-6, 0.1), 10, budget)
    assert far == least_noise(tight, Mechanism("gaussian", 1e6, 0.1), 10, budget)


# No


def refusal_of(action: object, *arguments: object) -> str:
    with pytest.raises(BadInput) as refusal:
        action(*arguments)  # type: ignore[operator]
    message = str(refusal.value)
    # One sentence: the field, what it must be, what it was, and a way out after the semicolon.
    assert re.fullmatch(r"[a-z_-]+ must .+, was .+; .+[^.]", message), message
    return message


@each(
    ("arguments", "message"),
    [
        (("cauchy", 1.0), "mechanism must be one of gaussian, laplace, was 'cauchy'; choose one"),
        (("gaussian", 1.0, 0.5, "shuffled"), "sampling must be one of poisson, fixed, was 'shuffled'; choose one"),
        (("gaussian", 0.0), "noise_multiplier must be a finite number above 0, was 0.0"),
        (("gaussian", -1.0), "noise_multiplier must be a finite number above 0, was -1.0"),
        (("laplace", math.nan), "noise_multiplier must be a finite number above 0, was nan"),
        (("laplace", math.inf), "noise_multiplier must be a finite number above 0, was inf"),
        (("gaussian", 1.0, 0.0), "sampling_rate must lie in (0, 1], was 0.0; use 1 for all records"),
        (("gaussian", 1.0, 1.5), "sampling_rate must lie in (0, 1], was 1.5"),
        (("gaussian", 1.0, math.nan), "sampling_rate must lie in (0, 1], was nan"),
        (("gaussian", 1.0, "all"), "sampling_rate must lie in (0, 1], was 'all'"),
        (("laplace", 1.0, 0.5, "fixed"), "sampling must be 'poisson' with laplace noise, was 'fixed'"),
    ],
)
def test_a_mechanism_that_cannot_be_is_refused(arguments: tuple[object, ...], message: str) -> None:
    assert refusal_of(Mechanism, *arguments).startswith(message)


def test_noise_for_gaussian_releases_needs_a_delta() -> None:
    message = refusal_of(least_noise, tight, plain, 1, Budget(1.0, 0.0))
    assert message == "delta must be above 0 with gaussian noise, was 0; choose 1e-5, say, or laplace noise"


def test_an_epsilon_that_no_noise_can_meet_is_refused() -> None:
    message = refusal_of(least_noise, tight, plain, 10**6, Budget(1e-12, 1e-30))
    assert message.startswith("epsilon must be large enough for 1000000 steps, was 1e-12: no noise up to 1e+13")


def test_an_epsilon_that_asks_for_no_noise_is_refused() -> None:
    message = refusal_of(least_noise, tight, plain, 1, Budget(1e30, 1e-5))
    assert message.startswith("epsilon must be small enough to ask for noise, was 1e+30")


def test_more_steps_than_anybody_takes_are_refused() -> None:
    message = refusal_of(most_steps, tight, Mechanism("gaussian", 1e6), Budget(8.0, 1e-5))
    assert message.startswith("noise_multiplier must be small enough for the budget to matter, was 1e+06: more than")
    assert message.endswith("steps fit; lower it")
    refusal_of(most_steps, tight, Mechanism("laplace", 1e10), Budget(8.0, 0.0))
    assert most_steps(tight, Mechanism("laplace", 1e9), Budget(8.0, 0.0)) == 8_000_000_000


@pytest.fixture
def without_dp_accounting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    accounting._loss_distribution.cache_clear()
    accounting._by_loss_distribution.cache_clear()
    renyi.curve.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    yield
    accounting._loss_distribution.cache_clear()
    accounting._by_loss_distribution.cache_clear()
    renyi.curve.cache_clear()


@pytest.mark.usefixtures("without_dp_accounting")
def test_without_dp_accounting_only_what_needs_it_is_refused() -> None:
    assert tight({plain: 4}, 1e-5) == pytest.approx(4.377, abs=1e-3)
    assert tight({laplace: 4, sampled_laplace: 1}, 0.0) == pytest.approx(2 + amplified(2.0, 0.1))
    for spent in ({sampled: 1}, {fixed: 1}, {laplace: 1}, {sampled_laplace: 1}, {plain: 1, sampled: 1}):
        message = refusal_of(tight, spent, 1e-5)
        assert message.startswith("dp-accounting must be installed to price sampled batches")
        assert message.endswith("pip install dp-accounting, or order plain Gaussian noise")
    refusal_of(renyi.epsilon, {plain: 1}, 1e-5)


def test_dp_accounting_is_not_even_imported_for_plain_noise() -> None:
    program = """
import sys
from dpfl.privacy.accounting import Mechanism, least_noise, most_steps, tight, tight_each
from dpfl.privacy.budget import Budget
from dpfl.privacy.calibration import noise_multipliers
gaussian, laplace = Mechanism("gaussian", 2.0), Mechanism("laplace", 2.0)
tight({gaussian: 4}, 1e-5), tight({laplace: 4}, 0.0), tight_each([{gaussian: 1}, {laplace: 1}], [1e-5, 0.0])
most_steps(tight, gaussian, Budget(8.0, 1e-5)), least_noise(tight, laplace, 3, Budget(8.0, 0.0))
noise_multipliers("gaussian", [3], [Budget(8.0, 1e-5)]), noise_multipliers("laplace", [3], [Budget(8.0, 0.0)])
assert not [name for name in sys.modules if name.startswith("dp_accounting")]
tight({Mechanism("gaussian", 2.0, 0.5): 4}, 1e-5)
assert "dp_accounting" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Where double precision would flatter.


@each(
    ("mechanism", "steps", "delta", "true"),
    [
        # Sampled almost always: as plain noise, whose closed form is 6.5531.
        (Mechanism("gaussian", 316.0, 1 - 1e-9), 100_000, 1e-10, 6.5530),
        # By Fourier transforms that are tilted to hold small numbers; without a margin they would say 10.281 and 36.91.
        (Mechanism("gaussian", 1.0, 0.01), 10_000, 1.1e-12, 10.325),
        (Mechanism("gaussian", 1.0, 0.01), 100_000, 1.1e-12, 37.47),
    ],
)
def test_rounding_that_grows_with_the_steps_is_paid_for(
    mechanism: Mechanism, steps: int, delta: float, true: float
) -> None:
    assert true <= tight({mechanism: steps}, delta) < 1.06 * true


def test_a_divergence_too_small_for_double_precision_still_costs() -> None:
    # ε = ln(1 + 1e-4·(e^1e-4 − 1)) ≈ 1e-8 a release: at so small a δ, little can be saved on it.
    tiny = Mechanism("laplace", 1e4, 1e-4)
    assert tight({tiny: 1}, 1e-13) == pytest.approx(1e-8, rel=1e-3)
    assert (renyi.curve(tiny, renyi.ORDERS) > 0).all()
    assert 0 < renyi.epsilon({tiny: 10**6}, 1e-13) < 0.03  # ln(1/δ)/1023, which no noise can lower at these orders


@each(
    ("mechanism", "steps", "most"),
    [
        (Mechanism("laplace", 4.0), 20_000, 5000.0),  # an ε beyond 700, whose power overflows
        (Mechanism("laplace", 1e-3, 0.5), 3, 3000.0),
        (Mechanism("gaussian", 1e-6, 0.5), 3, 1.6e12),  # as unsampled: 3/2·10¹²
    ],
)
def test_losses_beyond_all_powers_are_priced_by_what_holds_without_them(
    mechanism: Mechanism, steps: int, most: float
) -> None:
    assert 100 < tight({mechanism: steps}, 1e-5) <= most


def test_a_large_batch_of_fixed_size_costs_no_more_than_all_records() -> None:
    fixed, everything = Mechanism("gaussian", 3.0, 0.8, "fixed"), Mechanism("gaussian", 3.0)
    assert tight({fixed: 10}, 1e-5) == tight({everything: 10}, 1e-5)


def test_very_many_steps_are_priced_by_renyi_dp() -> None:
    one = Mechanism("gaussian", 1.1, 0.015)
    assert tight({one: 10**7}, 1e-5) == renyi.epsilon({one: 10**7}, 1e-5)


def test_numbers_from_numpy_are_numbers() -> None:
    assert most_steps(tight, Mechanism("laplace", np.float64(10.0)), Budget(np.float64(0.3), 0.0)) == 3
    assert least_noise(tight, Mechanism("laplace", 1.0), 3, Budget(np.float64(0.3), 0.0)) == 10.0
