"""An experiment: one table or figure of a paper, as a TOML file says it.

A file holds a run's config (`[base]`), what changes down the rows and across the columns, what the paper printed there
and what it claims. Every place of the table is a training with all its repetitions; `[at_true]` says what changes
when the same ε is to be true: the calibration, and whatever the paper's own settings were tuned to.

That is the paper's reading: its experiment as its author ran it, as far as that is known. Where we would do it another
way, the file says so in `[ours]`: a second experiment over the same rows and columns, held to the same claims. What
is true is then asked of ours alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from dpfl import config as configs
from dpfl.config import Config
from dpfl.experiments.cells import PLANNED, Ask, Cell
from dpfl.experiments.claims import Claim
from dpfl.experiments.computed import COMPUTED
from dpfl.options import option_names
from dpfl.settings import Settings
from dpfl.systems import SYSTEMS, PrivateSystem

Scale = Literal["smoke", "paper"]
MEASURES = {
    "loss": "mean loss on the test split",
    "accuracy": "accuracy on the test split in %",
    "best_accuracy": "accuracy on the test split in % after the round that is best on it",
    "site_accuracy": "mean of the sites' test accuracies in %",
    "rounds": "rounds that were used",
    "local_steps": "local steps in the round",
    "distinctness": "how much what the model takes for each class looks like it (correlation)",
    "planned_rounds": "rounds that the bound chooses",
    "planned_cohort": "clients a round that the bound chooses",
    "closed_cohort": "clients a round by the closed form, rounded up",
    "bound": "the bound",
    "moment": "logarithm of the divergence, integrated numerically",
    "swapped_moment": "logarithm of the divergence the other way round",
    "moment_bound": "logarithm of the paper's bound on the divergence",
    "moment_gap": "how far the logarithm of the bound lies above that of the divergence",
}


@dataclass(frozen=True)
class Line:
    """A row or a column: its label, and what it changes in the config."""

    label: str
    x: float | None  # where a column stands on an axis, if it is a number
    changes: Mapping[str, Any]
    measure: str | None = None  # where it is not the experiment's
    search: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # the best of these, by the public split
    at_true: Mapping[str, Any] = field(default_factory=dict)
    at_round: int | None = None  # of a column: read off the training's history here
    by_column: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # of a row: what it changes in each column


@dataclass(frozen=True)
class Printed:
    """What the paper prints; NaN where it prints nothing."""

    cells: tuple[tuple[float, ...], ...] = ()  # by row and column
    errors: tuple[tuple[float, ...], ...] = ()  # their standard errors, where they are known
    best_at: tuple[float, ...] = ()  # by row: the column with the best value,
    best: tuple[float, ...] = ()  # that value,
    worst: tuple[float, ...] = ()  # and the worst one


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure, at one scale."""

    name: str
    paper: str  # the folder it stands in
    scale: Scale
    title: str
    shows: str  # "Table III and Fig. 5"
    measure: str
    repetitions: int
    own_repetitions: bool = True  # False where others were asked for
    down: str  # what the rows are
    across: str  # what the columns are
    own: bool  # whether it is no experiment of the paper's, but a panel of ours
    reading: str  # how it was carried out, where there are two ways
    differs: tuple[str, ...]  # from the paper
    fresh_data: bool  # whether each repetition shares the data out anew
    log: bool  # whether a plot of it wants a logarithmic axis
    log_across: bool  # and one for what the columns are
    order: int  # among the paper's, on its page
    base: Mapping[str, Any]
    last: Mapping[str, Any]  # what the smoke scale sets, whatever rows and columns say
    at_true: Mapping[str, Any]
    plan: Mapping[str, Any]  # for measures that are planned or computed: form, constants, max_rounds
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    printed: Printed
    claims: tuple[Claim, ...]
    ours: "Experiment | None" = None  # the same as we read it, where that differs from what the paper did

    @property
    def readings(self) -> "tuple[Experiment, ...]":
        """Return the experiment as the paper did it, and as we would where that differs."""
        return (self,) if self.ours is None else (self, self.ours)

    @property
    def sides(self) -> tuple[bool, ...]:
        """Return whether to train by the paper's formula (False), at true ε (True), or first the one, then the other.

        Two readings share one answer to what is true: that of ours. A formula that is computed has none.
        """
        computed = all(self.measure_of(row) in COMPUTED for row in self.rows)
        return (False, True) if self.ours is None and not computed else (False,)

    def measure_of(self, row: Line) -> str:
        """Return what is measured in a row."""
        return row.measure or self.measure

    def cells(self, row: Line, column: Line, *, at_true: bool, seed: int) -> list[tuple[dict[str, Any], Cell]]:
        """Return what has to be trained for one place: one cell, or one for each candidate of a search."""
        searched = row.search or column.search
        candidates: list[dict[str, Any]] = [{}]
        for key, values in searched.items():
            candidates = [choice | {key: value} for choice in candidates for value in values]
        place = self.columns.index(column)
        both = {key: values[place] for key, values in row.by_column.items()}
        table = dict(self.base) | dict(row.changes) | dict(column.changes) | both | dict(self.last)
        return [(choice, self._cell(table | choice, row, column, at_true=at_true, seed=seed)) for choice in candidates]

    def _cell(self, table: dict[str, Any], row: Line, column: Line, *, at_true: bool, seed: int) -> Cell:
        config = _config(table)
        if at_true and isinstance(config.system, PrivateSystem) and config.system.calibration == "paper":
            changes = {"calibration": "tight"} | dict(self.at_true) | dict(row.at_true) | dict(column.at_true)
            config = _config(table | changes | dict(self.last))
        measure = self.measure_of(row)
        ask = None
        constants = tuple(sorted((dict(self.plan.get("constants", {})) | _constants(row, column)).items()))
        if measure in PLANNED:
            form = "general" if at_true else str(self.plan.get("form", "paper"))
            ask = Ask(PLANNED[measure], form, constants, int(self.plan.get("max_rounds", 1000)))
        elif measure in COMPUTED:
            ask = Ask(measure, "", constants, 0)
        every = math.gcd(*(at for at in (line.at_round for line in self.columns) if at is not None)) or None
        if measure == "best_accuracy":
            every = 1
        return Cell(
            config=config, repetitions=1 if ask else self.repetitions, seed=seed, fresh_data=self.fresh_data,
            evaluate_every=every, ask=ask, portraits=measure == "distinctness",
            by_site=measure == "site_accuracy",
        )  # fmt: skip


def _constants(row: Line, column: Line) -> dict[str, Any]:
    return dict(row.changes.get("constants", {})) | dict(column.changes.get("constants", {}))


@cache  # systems do not change while dpfl runs
def _options_of_systems() -> frozenset[str]:
    return frozenset().union(*map(option_names, SYSTEMS.values()))


def _config(table: Mapping[str, Any]) -> Config:
    """Make the config of a cell. What only other systems know is left out: rows may be different systems."""
    kind = SYSTEMS.get(str(table.get("system")))
    own = {"system", *option_names(Settings), *(option_names(kind) if kind else ())}
    foreign = (_options_of_systems() - own) | {"constants"}
    parsed = configs.parse({key: value for key, value in table.items() if key not in foreign})
    return replace(parsed, settings=replace(parsed.settings, seed=None, data_seed=None))
