"""What many trainings on the same people cost together, in words."""

from collections.abc import Mapping
from typing import Any

from dpfl.rounding import rounded_up

# What common neighbours are, in words.
CURRENCIES = {
    "replace": "for one record, replaced by any other",
    "add-remove": "for one record, added or removed",
    "client": "for all records of one client, replaced by any others",
}

NOTHING = "all of this together: ε = 0, since of clients nothing was looked at but how many records each holds"
_SIMULATION = "all of this together: a simulation, which runs on seeds: nobody's records were protected here"


def simulated(if_real: Mapping[str, Any], neighbours: str) -> str:
    """Say that nobody was protected, and what the same trainings would cost with noise that nobody can repeat."""
    if not if_real["trainings"]:
        return _SIMULATION
    uncounted = if_real["not_counted"]
    besides = f" (without {uncounted} that have no price)" if uncounted else ""
    return (
        f"{_SIMULATION}\nwere they real, the {if_real['trainings']} trainings would cost each client's people"
        f" ε ≤ {rounded_up(if_real['epsilon'])} ({neighbours}) at δ = {if_real['delta']:g}{besides}"
    )
