"""What is to be planned: a system for a federation, the numbers that are given, and how far the others may go."""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from dpfl.config import Config
from dpfl.errors import BadInput, require_count, require_one_of
from dpfl.federation import Federation
from dpfl.models import Model, build, default_model
from dpfl.planning import ali_dpfl, dp_fedavg, fedsgd_dpc, nbafl, udp
from dpfl.planning.bounds import Facts, Planner
from dpfl.planning.estimate_constants import Estimator
from dpfl.streams import Streams
from dpfl.systems import ALIDPFL, NbAFL, PrivateSystem
from dpfl.systems.system import local_training

PLANNERS: dict[str, Planner] = {
    "dp-fedavg": dp_fedavg.PLANNER,
    "udp": udp.PLANNER,
    "nbafl": nbafl.PLANNER,
    "ali-dpfl": ali_dpfl.PLANNER,
    "fedsgd-dpc": fedsgd_dpc.PLANNER,
}
NUMBERS = ("rounds", "local_steps", "cohort")
SCALES = ("lr", "clip", "noise_multiplier")  # which a pilot plans too
PLANNED = (*NUMBERS, *SCALES, "averaged")
_FACTORS = {"lr": (1 / 16, 1 / 4, 1.0, 4.0, 16.0), "clip": (1 / 4, 1.0, 4.0), "noise_multiplier": (1 / 2, 1.0, 2.0)}
_AVERAGED = (0.5, 0.0)  # the mean of the later models is rarely worse than the last one, which has all its noise
_MOST_LOCAL_STEPS = 100
NAMES = {"rounds": "rounds", "local_steps": "local steps a round", "cohort": "clients a round"}


@dataclass(frozen=True)
class Point:
    """The bound (or a pilot's mean loss) at some numbers; None where it says nothing."""

    rounds: int
    local_steps: int
    cohort: int
    bound: float | None


@dataclass(frozen=True)
class Task:
    """What is to be planned: a config, the numbers in it that are given, and how far the others may go."""

    config: Config
    federation: Federation
    fixed: frozenset[str] = frozenset()
    most_rounds: int = 300
    total_steps: int | None = None  # of dp-fedavg: then its rounds follow from its local steps
    all_overheard: bool = False  # of nbafl: whether all uploads count as overheard, as they are by the server
    estimator: Estimator = "general"  # of fedsgd-dpc: whether Y₀ and Γ are estimated as its authors do
    own_model: Model | None = None  # one that was handed over in Python; None: the one that the config names

    def __post_init__(self) -> None:
        if not isinstance(self.config.system, PrivateSystem):
            raise BadInput(
                f"system must be one that spends a privacy budget, was {self.config.system.name!r}, which adds no noise"
                f" to be planned; choose one of {', '.join(PLANNERS)}"
            )
        require_count("max_rounds", self.most_rounds, "allow at least one round")
        overheard = self.system.exposures if isinstance(self.system, NbAFL) and not self.all_overheard else 1
        if overheard > self.most_rounds:
            raise BadInput(
                f"max_rounds must be at least the {overheard} exposures, was {self.most_rounds}: nobody"
                " hears more uploads than there are rounds; raise it, or lower exposures"
            )
        require_one_of("estimator", self.estimator, get_args(Estimator))
        if self.estimator == "paper" and self.system.name != "fedsgd-dpc":
            raise BadInput(
                f"estimator must be 'general' for {self.system.name}, was 'paper': only fedsgd-dpc's paper says how"
                " constants are to be estimated; leave it out"
            )
        if self.total_steps is not None:
            require_count("total_steps", self.total_steps, "allow at least one step")
            if self.system.name != "dp-fedavg":
                raise BadInput(
                    f"total_steps must be left out for {self.system.name}, was {self.total_steps}: only dp-fedavg"
                    " shares a number of steps out among rounds; leave it out, or limit --max-rounds"
                )
            if "rounds" in self.fixed:
                raise BadInput(
                    f"rounds must be left out where total_steps is given, was {self.system.rounds}: they follow from"
                    " the local steps; leave one of the two out"
                )

    @property
    def system(self) -> PrivateSystem[Any]:
        """Return the system as it was given."""
        system = self.config.system
        assert isinstance(system, PrivateSystem)
        return system

    @property
    def clients(self) -> int:
        """Return how many clients there are."""
        return len(self.federation.clients)

    def model(self) -> Model:
        """Return the model that the run would begin with."""
        if self.own_model is not None:
            own = self.own_model
            module = copy.deepcopy(own.module)
            return Model(module, own.loss, classify=own.classify, ridge=own.ridge, name=own.name)
        settings = self.config.settings
        name = settings.model or default_model(self.federation.name, self.federation.classes)
        rng = Streams(settings.seed).public.generator("model")
        return build(name, shape=self.federation.shape, classes=self.federation.classes, rng=rng)

    def facts(self, model: Model) -> Facts:
        """Return what bounds take."""
        return Facts(self.federation.sizes, model.dim, Streams(self.config.settings.seed))

    def ranges(self, chooses: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return between which numbers each one may be chosen that is not given."""
        own = {one.name for one in fields(self.system)}
        limits = {
            "rounds": (1 if self.all_overheard else getattr(self.system, "exposures", 1), self.most_rounds),
            "local_steps": self._local_steps(),
            "cohort": (1, self.clients),
        }
        free = [name for name in chooses if name in limits and name in own and name not in self.fixed]
        if getattr(self.system, "local_epochs", None) is not None:  # which say how many steps there are
            free = [name for name in free if name != "local_steps"]
        if self.total_steps is not None:
            free = [name for name in free if name != "rounds"]
        return {name: limits[name] for name in free}

    def scales(self, chooses: Collection[str]) -> dict[str, tuple[float, ...]]:
        """Return the first values to try of what is no whole number, where it is to be chosen and not given."""
        found: dict[str, tuple[float, ...]] = {}
        for name in (*SCALES, "averaged"):
            usual = getattr(self.system, name, None)
            if name not in chooses or name in self.fixed or not isinstance(usual, float):
                continue
            found[name] = _AVERAGED if name == "averaged" else tuple(factor * usual for factor in _FACTORS[name])
        return found

    def usual(self, names: Collection[str]) -> dict[str, Any]:
        """Return the values that the system has anyway, of these options, within what is allowed."""
        values = {name: getattr(self.system, name) for name in names}
        if "cohort" in values:
            values["cohort"] = values["cohort"] or self.clients
        for name, (low, high) in self.ranges(tuple(names)).items():
            values[name] = min(max(values[name], low), high)
        return values

    def _local_steps(self) -> tuple[int, int]:
        """Return how few and how many steps a round may have: enough of them that the rounds allowed suffice."""
        if self.total_steps is None:
            return 1, _MOST_LOCAL_STEPS
        least = math.ceil(self.total_steps / self.most_rounds)
        return least, max(least, min(self.total_steps, _MOST_LOCAL_STEPS))

    def chosen(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that these numbers are to the system; all clients a round are no cohort at all."""
        chosen: dict[str, Any] = dict(numbers)
        if self.total_steps is not None:
            local = chosen.get("local_steps", self._steps_of(self.system))
            chosen.setdefault("rounds", max(1, round(self.total_steps / local)))
        if chosen.get("cohort") == self.clients:
            chosen["cohort"] = None
        if self.all_overheard and isinstance(self.system, NbAFL):
            chosen["exposures"] = chosen.get("rounds", self.system.rounds)
        return chosen

    def at(self, numbers: Mapping[str, Any]) -> PrivateSystem[Any]:
        """Return the system with these numbers."""
        return replace(self.system, **self.chosen(numbers))

    @property
    def chooses(self) -> tuple[str, ...]:
        """Return the numbers that a plan for this system decides: where its paper has no bound, its rounds."""
        return PLANNERS[self.system.name].chooses if self.system.name in PLANNERS else ("rounds",)

    def with_whole_turns(self, grid: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the grid with whole turns beside it: rounds after which everybody was asked equally often.

        Clients that are asked in turn need noise for the answers that they give, and one round more than a whole turn
        makes some of them give another.
        """
        if self.system.scheduling != "round-robin" or "rounds" not in self.ranges(("rounds",)):
            return list(grid)
        low, high = self.ranges(("rounds",))["rounds"]
        found = list(grid)
        for one in grid:
            turn = self.clients / (one.get("cohort", self.system.cohort) or self.clients)
            if turn > 1 and "rounds" in one:
                turns = max(1, round(one["rounds"] / turn))
                found.append({**one, "rounds": min(max(math.floor(turns * turn), low), high)})
        return [one for at, one in enumerate(found) if one not in found[:at]]

    def point(self, system: PrivateSystem[Any], bound: float | None) -> Point:
        """Return the numbers of a system with its bound; ALI-DPFL ends where no step is left to pay for."""
        local, rounds = self._steps_of(system), system.rounds
        if isinstance(system, ALIDPFL):
            paid = ali_dpfl.affordable(system, Facts(self.federation.sizes, 1, Streams(0)))
            rounds = min(rounds, math.ceil(paid / local))
        return Point(rounds, local, system.cohort or self.clients, bound)

    def _steps_of(self, system: PrivateSystem[Any]) -> int:
        """Return the local steps of a round, of the client with most where they follow from local epochs."""
        epochs = getattr(system, "local_epochs", None)
        if epochs is None:
            return getattr(system, "local_steps", 1)
        steps: int = local_training(1, epochs, getattr(system, "batch_size", None), max(self.federation.sizes))["steps"]
        return steps


def counted(number: int, what: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "round"), counted(20, "client")
    ('1 round', '20 clients')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"
