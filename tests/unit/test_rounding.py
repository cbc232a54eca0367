"""A bound that is printed still is one."""

import pytest

from dpfl.rounding import rounded_up


@pytest.mark.parametrize(
    "epsilon", [0.64600309, 1.0004999, 1.00049, 7.9999999, 8.0, 8.0000001, 9.99951, 99.996, 30.31744, 123456.7, 1e-9]
)
def test_a_printed_epsilon_is_never_below_the_true_one(epsilon: float) -> None:
    assert epsilon <= float(rounded_up(epsilon)) <= epsilon * 1.0011
