"""What many trainings on the same people cost together, in words."""

from collections.abc import Mapping
from typing import Any

from dpfl.rounding import rounded_up

SIMULATION = "all of this together: a simulation, which runs on seeds: nobody's records were protected here"


def if_real(real: Mapping[str, Any], neighbours: str) -> str:
    """Say what the same trainings would cost with noise that nobody can repeat."""
    return (
        f"were they real, the {real['trainings']} trainings would cost each client's people"
        f" ε ≤ {rounded_up(real['epsilon'])} ({neighbours}) at δ = {real['delta']:g}"
    )
