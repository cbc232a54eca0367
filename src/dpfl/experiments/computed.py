"""What an experiment computes and trains nothing for: UDP's moments (its Fig. 2), FedSGD-DPC's closed form (Table I).

UDP: q, η, C and |D_i| are those of the config, by which Δ = 2ηC/|D_i| follows as for a training. A table's constants
say the noise (`noise_std`) and the moment λ (`moment`). FedSGD-DPC: N, R and ε are those of the config; a table's
constant `c1_by_c2` is C₁/C₂ at ε = 1, which grows as ε².
"""

from collections.abc import Callable, Mapping
from typing import TypedDict

from dpfl.config import Config
from dpfl.errors import BadInput
from dpfl.federation import count_of
from dpfl.planning.fedsgd_dpc import whole_cohort
from dpfl.privacy.paper_formulas import udp_log_moment, udp_log_moment_bound
from dpfl.systems.fedsgd_dpc import FedSGDDPC
from dpfl.systems.udp import UDP

_CONSTANTS = {"noise_std", "moment"}


class _Setting(TypedDict):
    """What the formulas ask for: q, Δ/σ and λ."""

    cohort_rate: float
    ratio: float
    moment: int


def moment(config: Config, constants: Mapping[str, float]) -> float:
    """Return ln D(ν₁, ν₀), integrated numerically."""
    return udp_log_moment(**_setting(config, constants))


def swapped_moment(config: Config, constants: Mapping[str, float]) -> float:
    """Return ln D(ν₀, ν₁), which Lemma 1 leaves aside as the smaller one."""
    return udp_log_moment(**_setting(config, constants), swapped=True)


def moment_bound(config: Config, constants: Mapping[str, float]) -> float:
    """Return the paper's bound on ln D(ν₁, ν₀)."""
    return udp_log_moment_bound(**_setting(config, constants))


def moment_gap(config: Config, constants: Mapping[str, float]) -> float:
    """Return how far the paper's bound lies above ln D(ν₁, ν₀)."""
    return moment_bound(config, constants) - moment(config, constants)


def closed_cohort(config: Config, constants: Mapping[str, float]) -> float:
    """Return FedSGD-DPC's K* for the config's R, by the closed form and rounded up as in its Table I."""
    system = config.system
    if not isinstance(system, FedSGDDPC) or system.mechanism != "laplace" or not isinstance(system.epsilon, float):
        raise BadInput(
            "system must be 'fedsgd-dpc' with Laplace noise and one number for epsilon, where its closed form is"
            f' computed, was {system.name!r}; ask its planner instead (measure = "planned_cohort")'
        )
    if constants.keys() != {"c1_by_c2"} or constants["c1_by_c2"] <= 0:
        raise BadInput(
            "constants must be c1_by_c2 above 0 where the closed form is computed, were"
            f" {dict(constants)}; write such as {{ c1_by_c2 = 457.0 }}"
        )
    ratio = constants["c1_by_c2"] * system.epsilon**2
    return float(whole_cohort(c1=ratio, c2=1.0, rounds=system.rounds, clients=count_of(config.settings)))


COMPUTED: Mapping[str, Callable[[Config, Mapping[str, float]], float]] = {
    "moment": moment, "swapped_moment": swapped_moment, "moment_bound": moment_bound, "moment_gap": moment_gap,
    "closed_cohort": closed_cohort,
}  # fmt: skip


def compute(measure: str, config: Config, constants: Mapping[str, float]) -> float:
    """Return a measure that needs no training."""
    return COMPUTED[measure](config, constants)


def _setting(config: Config, constants: Mapping[str, float]) -> _Setting:
    system, settings = config.system, config.settings
    if not isinstance(system, UDP) or isinstance(system.clip, str) or not isinstance(settings.sizes, int):
        raise BadInput(
            "system must be 'udp', with one number for sizes and one for clip, where its moments are computed, was"
            f' {system.name!r} with sizes = {settings.sizes!r}; train instead (measure = "loss")'
        )
    if constants.keys() != _CONSTANTS or constants["moment"] < 1 or constants["noise_std"] <= 0:
        raise BadInput(
            "constants must be noise_std above 0 and moment from 1 on where moments are computed, were"
            f" {dict(constants)}; write such as {{ noise_std = 0.01, moment = 10 }}"
        )
    return {
        "cohort_rate": system.cohort_rate(count_of(settings)),
        "ratio": system.reach(system.clip, 0, settings.sizes) / constants["noise_std"],
        "moment": int(constants["moment"]),
    }
