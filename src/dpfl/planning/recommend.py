"""Which system for this problem? All are planned at the same true ε against whoever is not trusted, and ranked.

What ε is for is the same for all, too: one record, replaced or added or removed, or all records of a client.

Where nobody is trusted, ε is against the server, which sees every upload; where the server is trusted, against those
who read the models it sends out. NbAFL promises nothing against a server unless every upload counts as overheard.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dpfl import config as configs
from dpfl.config import Config
from dpfl.errors import BadInput, require_one_of, suggestion
from dpfl.federation import Federation
from dpfl.options import option_names
from dpfl.planning.bounds import round_noise
from dpfl.planning.by_bound import Plan, plan_by_bound
from dpfl.planning.by_pilot import plan_by_pilot
from dpfl.planning.task import NUMBERS, PLANNERS, Task, counted
from dpfl.privacy.budget import Observer
from dpfl.privacy.currency import CommonNeighbours, Unpriced, common, kind_of
from dpfl.rehearsal import Rehearsal, at_true_epsilon
from dpfl.report.together import CURRENCIES, NOTHING
from dpfl.settings import Settings
from dpfl.streams import Streams
from dpfl.systems import ALIDPFL, SYSTEMS, PrivateSystem
from dpfl.training import federation_of

Method = Literal["bound", "pilot"]
OnTrial = Callable[[str], None]

_RATES = (0.25, 1.0, 4.0)  # times a system's usual learning rate: a pilot tries these where no rate is given
_NOISES = (0.5, 1.0, 2.0)  # times ALI-DPFL's usual noise, likewise
_SECONDS = 60.0  # for each system's pilot, where no limit is given


@dataclass(frozen=True)
class RankedSystem:
    """How one system would do."""

    system: str
    plan: Plan | None  # None where it cannot be planned for this problem
    loss: float  # a pilot's mean, or the bound; infinite where there is none
    error: float | None  # the standard error of a pilot's mean
    why: tuple[str, ...]
    true_epsilon: float | None = None  # in the currency of the ranking
    neighbours: CommonNeighbours | None = None  # that currency; None where it has no price in it

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "system": self.system,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "standard_error": self.error,
            "neighbours": self.neighbours,
            "true_epsilon": self.true_epsilon,
            "together": 0.0,  # nobody's records were looked at
            "plan": None if self.plan is None else self.plan.to_dict(),
            "why": list(self.why),
        }


@dataclass(frozen=True)
class Recommendation:
    """The systems from best to worst."""

    epsilon: float
    against: Observer
    neighbours: CommonNeighbours
    method: Method
    ranked: tuple[RankedSystem, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what `dpfl plan --recommend --json` prints."""
        best = self.ranked[0]
        chosen = {} if best.plan is None else best.plan.to_dict()
        return {
            "recommended": best.system,
            **{key: chosen.get(key) for key in (*NUMBERS, "bound", "curve", "constants", "why")},
            "epsilon": self.epsilon,
            "against": self.against,
            "neighbours": self.neighbours,
            "together": 0.0,
            "method": self.method,
            "ranking": [one.to_dict() for one in self.ranked],
        }

    def __str__(self) -> str:
        seen = {"server": "the server", "released": "readers of the models"}[self.against]
        guessed = any(one.plan is not None and (one.plan.expected or {}).get("made_up") for one in self.ranked)
        on = "made-up tasks of this shape" if guessed else "public records"
        measure = f"loss in a pilot on {on}" if self.method == "pilot" else "bound on the loss"
        what = CURRENCIES[self.neighbours]
        lines = [f"ranked by their {measure}, each at a true ε of {self.epsilon:g} against {seen}, {what}", ""]
        for place, one in enumerate((one for one in self.ranked if one.plan is not None), 1):
            error = f" ± {one.error:.2g}" if one.error is not None else ""
            score = f"{one.loss:.4g}{error}" if math.isfinite(one.loss) else "–"
            lines += [f"{place}. {one.system:<11} {score}", *(f"   - {sentence}" for sentence in one.why)]
        left_out = [one for one in self.ranked if one.plan is None]
        if left_out:
            lines += ["", "not ranked", *(f"- {one.system}: {' '.join(one.why)}" for one in left_out)]
        return "\n".join([*lines, "", NOTHING])


def recommend(
    given: Mapping[str, Any],
    *,
    systems: Sequence[str] = (),
    trusted: str = "nobody",
    neighbours: str = "replace",
    method: str = "pilot",
    most_rounds: int = 300,
    time_limit: float | None = None,
    on_trial: OnTrial | None = None,
) -> Recommendation:
    """Plan each system for the same problem and rank them.

    given: settings and options, set in every system that knows the key; `epsilon` is the true one that all may spend.
    neighbours: what ε is for: a record replaced ("replace"), or added or removed ("add-remove"), or all records of a
        client replaced ("client").
    time_limit: for all pilots together, in seconds.
    """
    require_one_of("trusted", trusted, ("nobody", "server"))
    require_one_of("method", method, ("bound", "pilot"))
    currency = common(neighbours)
    how: Method = "bound" if method == "bound" else "pilot"
    names = tuple(systems) or _candidates(how)
    tables = _configs(names, given)
    target = _target(tables)
    settings = next(iter(tables.values())).settings
    federation, streams = federation_of(settings), Streams(settings.seed)
    against: Observer = "server" if trusted == "nobody" else "released"
    seconds = _SECONDS if time_limit is None else time_limit / len(tables)
    verdicts = []
    for name, config in tables.items():
        told = None if on_trial is None else (lambda text, name=name: on_trial(f"{name}: {text}"))
        judge = _Judge(
            federation, streams, against, currency, how, target, most_rounds, seconds, frozenset(given), told
        )  # fmt: skip
        verdicts.append(judge.verdict(name, config))
    ranked = sorted(verdicts, key=lambda one: one.loss)
    return Recommendation(target, against, currency, how, tuple(_compared(ranked)))


def _candidates(method: Method) -> tuple[str, ...]:
    """Return what is ranked where nothing is named: systems with a bound, and by pilots those of other packages too."""
    others = [name for name in SYSTEMS.others if issubclass(SYSTEMS[name], PrivateSystem)] if method == "pilot" else []
    return (*PLANNERS, *others)


def _configs(names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Config]:
    settings = set(option_names(Settings))
    found, known = {}, set(settings)
    for name in names:
        kind = SYSTEMS.get(name)
        own = set(option_names(kind)) if kind else set()
        known |= own
        table = {"system": name} | {key: value for key, value in given.items() if key in settings | own}
        found[name] = configs.parse(table)
        if not isinstance(found[name].system, PrivateSystem):
            raise BadInput(
                f"system must be one that spends a privacy budget to be recommended, was {name!r}; leave it out"
            )
    for key in given:
        if key not in known:
            way_out = suggestion(key, known) or "; leave it out"
            raise BadInput(
                f"{key} must be a setting or an option of a system that is ranked, which none knows{way_out}"
            )
    return found


def _target(tables: Mapping[str, Config]) -> float:
    promised = {config.system.epsilon for config in tables.values() if isinstance(config.system, PrivateSystem)}
    if len(promised) > 1 or any(isinstance(value, tuple) for value in promised):
        raise BadInput("epsilon must be one number for all systems and clients to rank them by; give --epsilon")
    return float(promised.pop())  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Judge:
    """Plans one system after the other under the same conditions."""

    federation: Federation
    streams: Streams  # of the cohorts that all are rehearsed with
    against: Observer
    neighbours: CommonNeighbours
    method: Method
    target: float
    most_rounds: int
    seconds: float
    given: frozenset[str]
    on_trial: OnTrial | None

    def verdict(self, name: str, config: Config) -> RankedSystem:
        try:
            task = self._fair(self._task(config))
            found = self._plan(task, 0.7 * self.seconds)
            if not 0.98 <= self._spent(found) / self.target <= 1:  # the numbers moved what is seen
                again = self._fair(replace(task, config=replace(task.config, system=found.system)))
                if again.system != found.system:
                    task = replace(again, fixed=frozenset(NUMBERS))
                    found = self._plan(task, 0.3 * self.seconds, settled=True)
            true = self._spent(found)
        except Unpriced as refusal:
            return RankedSystem(name, None, math.inf, None, (f"It has no price here: {refusal}.",))
        except BadInput as refusal:
            return RankedSystem(name, None, math.inf, None, (f"It cannot be planned for this problem: {refusal}.",))
        if found.method == "bound":
            loss, error = found.in_loss if found.in_loss is not None else math.inf, None
        else:
            loss, error = found.tried[0]["loss"], found.tried[0]["standard_error"]
            loss = math.inf if loss is None else loss
        return RankedSystem(name, found, loss, error, tuple(self._reasons(task, found)), true, self.neighbours)

    def _spent(self, found: Plan) -> float:
        """Return the ε that the planned training costs, in the currency of the ranking."""
        rehearsal = Rehearsal(found.system, self.federation.sizes, self.streams)
        return rehearsal.price(self.neighbours, self.against)

    def _task(self, config: Config) -> Task:
        """Leave rounds and local steps to the plan; all clients take part in each round, unless a cohort was given.

        Rounds are a limit here: ALI-DPFL, which spreads its steps over them, is given all that are allowed.
        """
        system = config.system
        if isinstance(system, ALIDPFL):
            system = replace(system, rounds=self.most_rounds)
        fixed = (self.given & set(NUMBERS)) - {"rounds"} | {"cohort"}
        return Task(
            replace(config, system=system), self.federation, fixed, self.most_rounds,
            all_overheard=self.against == "server",
        )  # fmt: skip

    def _fair(self, task: Task) -> Task:
        """Let the claim be the one at which its true ε is the target."""
        system = replace(task.at({}), epsilon=self.target)
        fair = at_true_epsilon(
            system, self.federation.sizes, self.target, self.streams, neighbours=self.neighbours,
            observer=self.against, tolerance=1e-3,
        )  # fmt: skip
        return replace(task, config=replace(task.config, system=fair))

    def _plan(self, task: Task, seconds: float, *, settled: bool = False) -> Plan:
        """Plan within the time; `settled`: only the claim is new, and the rest stays as it was chosen."""
        if self.method == "bound":
            return plan_by_bound(task)
        system = task.system
        chooses = task.chooses
        search: dict[str, list[float]] = {}
        if not settled and "lr" not in self.given and system.lr is not None:
            search["lr"] = [factor * system.lr for factor in _RATES]
        if isinstance(system, ALIDPFL):  # it adapts its steps itself; its noise is what decides how many it can pay for
            chooses = ()
            if not settled and "noise_multiplier" not in self.given:
                search["noise_multiplier"] = [factor * system.noise_multiplier for factor in _NOISES]
        return plan_by_pilot(task, chooses=chooses, search=search, time_limit=seconds, on_trial=self.on_trial)

    def _reasons(self, task: Task, found: Plan) -> list[str]:
        system, certificate = found.system, found.certificate
        facts = task.facts(task.model())
        std = math.sqrt(round_noise(system, facts) / facts.dim)
        best = found.best
        where = f"{counted(best.rounds, 'round')} of {counted(best.local_steps, 'local step')} at"
        where += f" {counted(best.cohort, 'client')}"
        rate = f", learning rate {system.lr:g}" if system.lr is not None else ""
        rate += f", noise {system.noise_multiplier:g}·C" if isinstance(system, ALIDPFL) else ""
        sentences = [f"It is planned with {where}{rate}; each round adds noise of {std:.3g} to every parameter."]
        if certificate.unit == "client" and self.neighbours != "client":
            sentences.append("It protects whole clients, which is more than the records that others protect, and dear.")
        if (certificate.unit, certificate.neighbours) != kind_of(self.neighbours):
            own = "client" if certificate.unit == "client" else str(certificate.neighbours)
            sentences.append(f"Its own promise is then ε = {system.epsilon:.4g}, {CURRENCIES[own]}.")
        if task.all_overheard and certificate.exposures is not None:
            sentences.append("All its uploads count as overheard, because the server is not trusted.")
        return sentences


def _compared(ranked: Sequence[RankedSystem]) -> list[RankedSystem]:
    """Tell how far behind the best each one is."""
    best = ranked[0]
    if not math.isfinite(best.loss):
        reasons = " ".join(sentence for one in ranked for sentence in one.why)
        raise BadInput(f"no system can be planned for this problem: {reasons}")
    compared = [best]
    for one in ranked[1:]:
        if not math.isfinite(one.loss):
            behind = "" if one.plan is None else "It diverged wherever it was tried."
        elif one.error is not None and best.error is not None and (
            one.loss - best.loss <= 2 * math.hypot(one.error, best.error)
        ):  # fmt: skip
            behind = f"It cannot be told from {best.system}: the difference is within two standard errors."
        else:
            behind = f"Its loss is {one.loss / best.loss - 1:.0%} above that of {best.system}."
        compared.append(replace(one, why=(behind, *one.why) if behind else one.why))
    return compared
