"""Rounding for the screen: a bound that is printed still is one."""

from decimal import ROUND_CEILING, Context


def rounded_up(epsilon: float | None) -> str:
    """Print an upper bound so that the printed number still is one, sums of decimal fractions forgiven.

    >>> rounded_up(7.9999999), rounded_up(0.64600309), rounded_up(30.31744), rounded_up(None)
    ('8', '0.6461', '30.32', '∞')
    """
    if epsilon is None:
        return "∞"
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(epsilon * (1 - 1e-9)))):g}"
