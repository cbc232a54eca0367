"""The results of an experiment: the paper's table with ours beside it, at true ε too, and what became of its claims.

An experiment that is read in two ways has two tables, and each claim a verdict for either. What is not trained yet is
left open, and said so.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfl import run_folder
from dpfl.experiments.cells import Cell, restored
from dpfl.experiments.claims import LOOKS, Claim, Estimate, Judgement, Look, Side, judge
from dpfl.experiments.experiment import MEASURES, Experiment, Line
from dpfl.experiments.store import Store
from dpfl.report.experiment import draw, draw_portraits

LOWER_IS_BETTER = {"loss": True, "accuracy": False, "best_accuracy": False, "site_accuracy": False}


def heading(look: Look, results: Sequence["Results"]) -> str:
    """Return what a look at these results is called: where there are two readings, what is true is asked of ours."""
    two = any(one.our_reading is not None for one in results)
    if all(one.experiment.own for one in results):  # which are in no paper
        first = "the first way" if two else "by the paper's formula"
        return {"paper": first, "ours": "the second way", "true": f"at true ε{', the second way' if two else ''}"}[look]
    true = f"at true ε{', in our settings' if two else ''}"
    return {"paper": "under the paper's reading", "ours": "under our reading", "true": true}[look]


@dataclass(frozen=True)
class Entry:
    """What was found at one row and column: by the paper's formula, and at true ε; None where nothing is trained."""

    ours: Estimate | None
    at_true: Estimate | None
    chosen: dict[str, Any]  # by a search, for `ours`
    privacy: dict[str, Any] | None  # of `ours`
    at_true_privacy: dict[str, Any] | None
    paper: Estimate | None
    training: tuple[str, int | None]  # of `ours`: the cell, and the round at which it was looked at
    true_training: tuple[str, int | None]


@dataclass(frozen=True)
class Verdicts:
    """How one claim fared, and which trainings it is about."""

    claim: Claim
    by: Mapping[Look, Judgement]
    about: frozenset[object]  # the same for claims about the same trainings: they are one claim

    @property
    def failed_under(self) -> list[Look]:
        """Return where it failed."""
        return [look for look, judgement in self.by.items() if judgement.verdict == "failed"]


class Results:
    """An experiment, or one of its readings, as far as its cells are finished."""

    def __init__(self, experiment: Experiment, store: Store, *, seed: int) -> None:
        self.experiment, self.seed = experiment, seed
        self.dates: set[str] = set()
        self.devices: set[str] = set()
        self.protected: dict[tuple[str, str], set[str]] = {}  # unit and neighbours, and the systems that promise them
        self.left = 0  # places that are not trained yet
        self.portraits: dict[str, dict[str, Any]] = {}  # by row, where models were asked what they take for each class
        self._seconds: dict[str, float] = {}  # of each cell, which several places may share
        self.places = {
            (row.label, column.label): self._place(store, row, column, (down, across))
            for down, row in enumerate(experiment.rows)
            for across, column in enumerate(experiment.columns)
        }
        self.our_reading = None if experiment.ours is None else Results(experiment.ours, store, seed=seed)

    def _place(self, store: Store, row: Line, column: Line, at: tuple[int, int]) -> Entry:
        ours, chosen, privacy, training = self._found(store, row, column, at_true=False)
        at_true, _, true_privacy, true_training = self._found(store, row, column, at_true=True)
        return Entry(ours, at_true, chosen, privacy, true_privacy, self._printed(*at), training, true_training)

    def _printed(self, down: int, across: int) -> Estimate | None:
        """Return what the paper prints at one place; without a standard error of its own it counts as exact."""
        cells, errors = self.experiment.printed.cells, self.experiment.printed.errors
        if not cells or math.isnan(cells[down][across]):
            return None
        error = errors[down][across] if errors else math.nan
        return Estimate(cells[down][across], 0.0 if math.isnan(error) else error)

    def _found(
        self, store: Store, row: Line, column: Line, *, at_true: bool
    ) -> tuple[Estimate | None, dict[str, Any], dict[str, Any] | None, tuple[str, int | None]]:
        """Return what one place measured; of several candidates that which did best on the public split."""
        if at_true not in self.experiment.sides:
            return None, {}, None, ("", None)
        cells = self.experiment.cells(row, column, at_true=at_true, seed=self.seed)
        if not all(cell in store for _, cell in cells):
            self.left += 1
            return None, {}, None, ("", None)
        candidates: list[tuple[float, int, dict[str, Any], dict[str, Any], Cell]] = []
        for choice, cell in cells:
            record = store[cell]
            self.dates.add(record["date"])
            self.devices.add(record["device"])
            self._seconds[cell.key] = record["seconds"]
            if privacy := record.get("privacy"):
                kind = privacy["unit"], privacy["neighbours"]
                self.protected.setdefault(kind, set()).add(cell.config.system.name)
            if "portraits" in record and not at_true:
                self.portraits.setdefault(row.label, record["portraits"])
            losses = record.get("validation_loss") or [None]
            public = math.inf if None in losses else statistics.fmean(losses)
            candidates.append((public, len(candidates), choice, record, cell))
        _, _, choice, record, best = min(candidates)
        training = replace(best, evaluate_every=None).key  # the same whenever somebody looks at it
        values = restored(record, self.experiment.measure_of(row), column.at_round)
        estimate = None if values is None else Estimate.of(values)
        return estimate, choice, record.get("privacy"), (training, column.at_round)

    @property
    def readings(self) -> "tuple[Results, ...]":
        """Return the results of the paper's reading, and of ours where there are two."""
        return (self,) if self.our_reading is None else (self, self.our_reading)

    def repetitions_at(self, look: Look) -> int:
        """Return how often each place was trained, under a reading."""
        places = self.readings[-1 if look != "paper" else 0].places.values()
        found = (place.at_true if look == "true" else place.ours for place in places)
        return max((len(one.values) for one in found if one is not None), default=0)

    @property
    def asked(self) -> int:
        """Return how many places there are to train."""
        return len(self.places) * len(self.experiment.sides)

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing is trained yet, under any reading."""
        return not any(reading.dates for reading in self.readings)

    @property
    def by_formula(self) -> bool:
        """Tell whether anything here rests on a paper's formula, and not on exact accounting alone."""
        return self.our_reading is not None or any(place.ours != place.at_true for place in self.places.values())

    @property
    def command(self) -> str:
        """Return how to repeat the experiment."""
        one = self.experiment
        options = " --scale paper" if one.scale == "paper" else ""
        options += "" if one.own_repetitions else f" --repetitions {one.repetitions}"
        return f"dpfl reproduce {one.name}{options}" + (" --device cuda" if self.devices - {"cpu"} else "")

    def judgements(self, *, at_true: bool) -> list[Judgement]:
        """Judge every claim, on what the paper's formula gave or on what true ε gave."""
        experiment = self.experiment
        rows, columns = [row.label for row in experiment.rows], [column.label for column in experiment.columns]

        def get(row: str, column: str) -> Estimate | None:
            place = self.places[row, column]
            return place.at_true if at_true else place.ours

        def printed(row: str, column: str) -> Estimate | None:
            place = self.places.get((row, column))  # a smaller scale leaves some out
            return None if place is None else place.paper

        where = {column.label: math.nan if column.x is None else column.x for column in experiment.columns}
        lower = LOWER_IS_BETTER.get(experiment.measure, True)
        return [
            judge(claim, get, rows, columns, lower_is_better=lower, where=where, printed=printed)
            for claim in experiment.claims
        ]

    def _places_at(self, row: str, column: str) -> list[Entry]:
        """Return one place, or all of a row that a claim takes the best or worst of."""
        whole = column in ("best", "worst", "")
        return [place for (r, c), place in self.places.items() if r == row and (whole or c == column)]

    def verdicts(self) -> list[Verdicts]:
        """Return how every claim fared, under each reading and at true ε."""
        true = self.readings[-1]
        by: dict[Look, list[Judgement]] = {}
        if True in true.experiment.sides:
            by["true"] = true.judgements(at_true=True)
        if self.our_reading is not None:
            by["ours"] = self.our_reading.judgements(at_true=False)
        if self.by_formula:
            by["paper"] = self.judgements(at_true=False)
        found = []
        for at, claim in enumerate(self.experiment.claims):
            its = {look: by[look][at] for look in LOOKS if look in by and look in claim.looks}
            about = (
                self._about(its, "paper") or (self.our_reading or self)._about(its, "ours") or true._about(its, "true")
            )
            found.append(Verdicts(claim, its, about or frozenset({(self.experiment.name, claim.says)})))
        return found

    def _about(self, by: Mapping[Look, Judgement], look: Look) -> frozenset[object]:
        """Return what trainings were compared: loss and accuracy of the same ones say the same of a claim."""
        measured = "quality" if self.experiment.measure in LOWER_IS_BETTER else self.experiment.measure

        def of(side: Side) -> object:
            if isinstance(side, float):
                return "a number"
            row, column = side
            at = self._places_at(row, column)
            trained = frozenset(place.true_training if look == "true" else place.training for place in at)
            return trained, column if column in ("best", "worst") else ""

        judgement = by.get(look)
        pairs = judgement.compared if judgement is not None else ()
        return frozenset((measured, frozenset(map(of, pair))) for pair in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Return what `dpfl reproduce --json` prints."""
        one = self.experiment
        return {
            "name": one.name,
            "title": one.title,
            "shows": one.shows,
            "own": one.own,
            "scale": one.scale,
            "measure": MEASURES[one.measure],
            "down": one.down,
            "across": one.across,
            "log": one.log,
            "log_across": one.log_across,
            **self._as_read(),
            "our_reading": None if self.our_reading is None else self.our_reading._as_read(),
            "claims": [_claim(verdicts) for verdicts in self.verdicts()],
            "summary": self._summary(),
            "seed": self.seed,
        }

    def _as_read(self) -> dict[str, Any]:
        """Return what belongs to one reading."""
        one = self.experiment
        counts = [len(place.ours.values) for place in self.places.values() if place.ours is not None]
        return {
            "reading": one.reading,
            "repetitions": max(counts, default=one.repetitions),
            "differs": list(one.differs),
            "rows": [self._row(row, column) for row in one.rows for column in one.columns],
            "left": self.left,
            "command": self.command,
            "dates": sorted(self.dates),
            "devices": sorted(self.devices),
            "seconds": round(sum(self._seconds.values()), 1),
        }

    def _row(self, row: Line, column: Line) -> dict[str, Any]:
        place = self.places[row.label, column.label]
        privacy, true = place.privacy, place.at_true_privacy
        return {
            "row": row.label,
            "column": column.label,
            "x": column.x,
            **_plain("ours", place.ours),
            **_plain("paper", place.paper),
            "claimed_epsilon": privacy and privacy["claimed"],
            "true_epsilon": privacy and privacy["true"],
            "epsilon_with_papers_sensitivity": privacy and privacy["with_papers_sensitivity"],
            "unit": privacy and privacy["unit"],
            **_plain("at_true_epsilon", place.at_true),
            "its_true_epsilon": true and true["true"],
            "chosen": place.chosen,
        }

    def _summary(self) -> list[dict[str, Any]]:
        """Return each row's best and worst beside the paper's, where the paper prints those and all of it is tried."""
        printed, experiment = self.experiment.printed, self.experiment
        if not printed.best:
            return []
        lower = LOWER_IS_BETTER[experiment.measure]
        lines = []
        for at, row in enumerate(experiment.rows):
            line: dict[str, Any] = {"row": row.label}
            for side in ("ours", "at_true"):
                found = {
                    column.label: estimate.mean
                    for column in experiment.columns
                    if (estimate := getattr(self.places[row.label, column.label], side)) is not None
                }
                if len(found) < len(experiment.columns):  # what is not tried could be best
                    line[side] = None
                    continue
                best, worst = (min, max) if lower else (max, min)
                line[side] = {
                    "best_at": best(found, key=lambda label: found[label]),
                    "best": _finite(best(found.values())),
                    "worst": _finite(worst(found.values())),
                }
            line["paper"] = {
                key: _finite(getattr(printed, key)[at]) if getattr(printed, key) else None
                for key in ("best_at", "best", "worst")
            }
            lines.append(line)
        return lines

    def save(self, folder: Path) -> None:
        """Write NAME.json and NAME.png."""
        self.draw(folder)
        run_folder.write_json(folder, f"{self.experiment.name}.json", self.to_dict())

    @property
    def drawn(self) -> dict[str, dict[str, Any]]:
        """Return what models take for each class, by row: in the paper's reading, else in ours."""
        return next((reading.portraits for reading in self.readings if reading.portraits), {})

    def draw(self, folder: Path) -> str:
        """Plot it as NAME.png, and what models take for each class as NAME-digits.png; return the first name."""
        run_folder.make(folder)
        image = f"{self.experiment.name}.png"
        draw(self.to_dict(), folder / image)
        if self.drawn:
            draw_portraits(self.drawn, folder / f"{self.experiment.name}-digits.png")
        return image


def _claim(verdicts: Verdicts) -> dict[str, Any]:
    claim, by = verdicts.claim, {look: str(judgement) for look, judgement in verdicts.by.items()}
    return {
        "says": claim.says, "quote": claim.quote, "where": claim.where, "ours": by.get("paper", by.get("true")),
        "our_reading": by.get("ours"), "at_true_epsilon": by.get("true"), "decides": claim.decides,
    }  # fmt: skip


def _plain(key: str, estimate: Estimate | None) -> dict[str, Any]:
    mean = None if estimate is None else _finite(estimate.mean)
    return {key: mean, f"{key}_standard_error": None if mean is None or estimate is None else estimate.error}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
