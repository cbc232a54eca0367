"""The papers' noise formulas, to the letter, so that their experiments can be repeated.

They are not equivalent to the guarantee they claim: nothing but `paper` calibration may call them, and the certificate
of a run says what they were really worth.
"""

import math


def udp_noise_std(*, sensitivity: float, cohort_rate: float, rounds: int, epsilon: float, delta: float) -> float:
    """Return σ_i = Δ_i·√(2qT·ln(1/δ_i))/ε_i (UDP, equation 10), with q = K/U and T rounds.

    The factor q is an amplification by client sampling that does not hold against the server which drew the cohort, and
    the bound on ln(1/δ) is taken from the wrong side: at q = 1 and δ = 1e-3 a claimed ε of 20 is really 30.32.
    """
    return sensitivity * math.sqrt(2 * cohort_rate * rounds * math.log(1 / delta)) / epsilon
