"""What published noise formulas are really worth: each paper's σ, granted its own sensitivity, priced exactly.

Sources: UDP, equation (10), and NbAFL, Theorem 1 with σ = cΔL/ε and c = √(2·ln(1.25/δ)). The true ε are those that
exact Gaussian-DP accounting gives, printed to two decimals (one for the two largest); tolerance: the last digit.
"""

import math

import pytest

from dpfl.privacy.claims import udp_noise_std
from dpfl.privacy.gaussian_dp import epsilon_of

UDP = {1: "0.65", 4: "3.44", 8: "8.35", 12: "14.49", 20: "30.32"}  # at q = 1, δ = 1e-3
NBAFL = {1: "0.51", 5: "4.43", 10: "11.92", 50: "165.9", 100: "591.7"}  # one exposure, δ = 0.01
NBAFL_25 = {50: "11.92", 60: "15.66", 100: "34.83"}  # L = 25 exposures, each noised for all of them


def printed_like(number: float, printed: str) -> str:
    return f"{number:.{len(printed.split('.')[1])}f}"


@pytest.mark.parametrize(("claimed", "true"), UDP.items())
@pytest.mark.parametrize("rounds", [1, 200])
def test_udp(claimed: float, true: str, rounds: int) -> None:
    std = udp_noise_std(sensitivity=0.5, cohort_rate=1.0, rounds=rounds, epsilon=claimed, delta=1e-3)
    spent = float(epsilon_of(math.sqrt(rounds) * 0.5 / std, 1e-3))
    assert printed_like(spent, true) == true


@pytest.mark.parametrize(
    ("claimed", "exposures", "true"),
    [(claimed, 1, true) for claimed, true in NBAFL.items()]
    + [(claimed, 25, true) for claimed, true in NBAFL_25.items()],
)
def test_nbafl(claimed: float, exposures: int, true: str) -> None:
    std = math.sqrt(2 * math.log(1.25 / 0.01)) * exposures / claimed  # of a value of sensitivity 1
    spent = float(epsilon_of(math.sqrt(exposures) / std, 0.01))
    assert printed_like(spent, true) == true
