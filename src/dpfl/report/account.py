"""The answers of three accountants, as a small table."""

from collections.abc import Mapping
from typing import Any

from dpfl.rounding import rounded_up

_WORDS = {
    "tight": "exact, or privacy-loss distributions",
    "rdp": "Rényi DP (dp-accounting)",
    "paper": "as the papers count",
}


def text(question: str, found: Mapping[str, Any]) -> str:
    """Print what each found for the question: epsilon, steps or noise_multiplier."""
    sign = {"epsilon": "ε ≤", "steps": "steps ≤", "noise_multiplier": "noise ≥"}[question]
    rows = [
        f"{name:<6} {sign} {'–' if number is None else number if question == 'steps' else rounded_up(number)!s:<10}"
        f" {_WORDS[name] if number is not None else 'no formula, or no finite answer'}"
        for name, number in found.items()
    ]
    if question == "steps" and found["tight"] == 0:
        rows.append("not even one step fits; add noise, or raise epsilon or delta")
    return "\n".join(rows)
