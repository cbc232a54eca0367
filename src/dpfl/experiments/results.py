"""The results of an experiment: the paper's table with ours beside it, at true ε too, and what became of its claims."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfl import run_folder
from dpfl.experiments.cells import restored
from dpfl.experiments.claims import Estimate, Judgement, judge
from dpfl.experiments.experiment import MEASURES, Experiment, Line
from dpfl.experiments.store import Store
from dpfl.report.experiment import draw
from dpfl.rounding import rounded_up

_NO_NOISE = 1e6  # an ε from which on noise is as good as none: how a table writes "without noise"
LOWER_IS_BETTER = {"loss": True, "accuracy": False}


@dataclass(frozen=True)
class Entry:
    """What was found at one row and column: by the paper's formula, and at true ε."""

    ours: Estimate | None
    at_true: Estimate | None
    chosen: dict[str, Any]  # by a search, for `ours`
    privacy: dict[str, Any] | None  # of `ours`
    at_true_privacy: dict[str, Any] | None
    paper: float | None


class Results:
    """An experiment, all of whose cells are finished."""

    def __init__(self, experiment: Experiment, store: Store, *, seed: int) -> None:
        self.experiment, self.seed = experiment, seed
        self.dates: set[str] = set()
        self.devices: set[str] = set()
        self.protected: dict[tuple[str, str], set[str]] = {}  # unit and neighbours, and the systems that promise them
        self._seconds: dict[str, float] = {}  # of each cell, which several places may share
        self.places = {
            (row.label, column.label): self._place(store, row, column, (down, across))
            for down, row in enumerate(experiment.rows)
            for across, column in enumerate(experiment.columns)
        }

    def _place(self, store: Store, row: Line, column: Line, at: tuple[int, int]) -> Entry:
        cells = self.experiment.printed.cells
        paper = cells[at[0]][at[1]] if cells else math.nan
        ours, chosen, privacy = self._found(store, row, column, at_true=False)
        at_true, _, true_privacy = self._found(store, row, column, at_true=True)
        return Entry(ours, at_true, chosen, privacy, true_privacy, None if math.isnan(paper) else paper)

    def _found(
        self, store: Store, row: Line, column: Line, *, at_true: bool
    ) -> tuple[Estimate | None, dict[str, Any], dict[str, Any] | None]:
        """Return what one place measured; of several candidates that which did best on the public split."""
        candidates: list[tuple[float, int, dict[str, Any], dict[str, Any]]] = []
        for choice, cell in self.experiment.cells(row, column, at_true=at_true, seed=self.seed):
            record = store[cell]
            self.dates.add(record["date"])
            self.devices.add(record["device"])
            self._seconds[cell.key] = record["seconds"]
            if privacy := record.get("privacy"):
                kind = privacy["unit"], privacy["neighbours"]
                self.protected.setdefault(kind, set()).add(cell.config.system.name)
            losses = record.get("validation_loss") or [None]
            public = math.inf if None in losses else statistics.fmean(losses)
            candidates.append((public, len(candidates), choice, record))
        _, _, choice, record = min(candidates)
        values = restored(record, self.experiment.measure_of(row), column.at_round)
        return None if values is None else Estimate.of(values), choice, record.get("privacy")

    @property
    def by_formula(self) -> bool:
        """Tell whether anything here rests on a paper's formula, and not on exact accounting alone."""
        return any(place.ours != place.at_true for place in self.places.values())

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
            paper = self.places[row, column].paper
            return None if paper is None else Estimate(paper)

        where = {column.label: math.nan if column.x is None else column.x for column in experiment.columns}
        lower = LOWER_IS_BETTER.get(experiment.measure, True)
        return [
            judge(claim, get, rows, columns, lower_is_better=lower, where=where, printed=printed)
            for claim in experiment.claims
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return what `dpfl reproduce --json` prints."""
        one = self.experiment
        papers, true = self.judgements(at_true=False), self.judgements(at_true=True)
        return {
            "name": one.name,
            "title": one.title,
            "shows": one.shows,
            "scale": one.scale,
            "measure": MEASURES[one.measure],
            "down": one.down,
            "across": one.across,
            "log": one.log,
            "repetitions": max(len(place.ours.values) for place in self.places.values() if place.ours is not None),
            "differs": list(one.differs),
            "rows": [self._row(row, column) for row in one.rows for column in one.columns],
            "claims": [
                {"says": first.says, "ours": str(first), "at_true_epsilon": str(second)}
                for first, second in zip(papers, true, strict=True)
            ],
            "summary": self._summary(),
            "command": self.command,
            "seed": self.seed,
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
            "paper": place.paper,
            "claimed_epsilon": privacy and privacy["claimed"],
            "true_epsilon": privacy and privacy["true"],
            "epsilon_with_papers_sensitivity": privacy and privacy["with_papers_sensitivity"],
            "unit": privacy and privacy["unit"],
            **_plain("at_true_epsilon", place.at_true),
            "its_true_epsilon": true and true["true"],
            "chosen": place.chosen,
        }

    def _summary(self) -> list[dict[str, Any]]:
        """Return each row's best and worst beside the paper's, where the paper prints those."""
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

    def markdown(self, image: str | None = None) -> str:
        """Return the experiment as a piece of Markdown: what it is, the plot, the table and the claims."""
        plain = self.to_dict()
        title = f"{plain['shows']}: {plain['title']}" if plain["shows"] else plain["title"]
        parts = [f"## {title}\n"]
        if image:
            parts.append(f"![{title}]({image})\n")
        parts.append(_caption(plain))
        if plain["summary"]:
            parts.append(_markdown(_summary_table(plain)))
        parts.append(_markdown(self._table()))
        if plain["claims"]:
            heading, keys = ["claim", "by the paper's formula", "at true ε"], ["says", "ours", "at_true_epsilon"]
            if not self.by_formula:
                heading, keys = ["claim", "at true ε"], ["says", "at_true_epsilon"]
            parts.append(_markdown([heading, *([one[key] for key in keys] for one in plain["claims"])]))
        if plain["differs"]:
            parts.append("What differs from the paper: " + "; ".join(plain["differs"]) + ".\n")
        return "\n".join(parts)

    def _table(self) -> list[list[str]]:
        """Return the table as text: for each row what we found, what the paper prints, and the same at true ε."""
        experiment = self.experiment
        columns = [column.label for column in experiment.columns]
        lines = [
            [experiment.down or "", "", *(f"{experiment.across} = {c}" if i == 0 else c for i, c in enumerate(columns))]
        ]
        for row in experiment.rows:
            places = [self.places[row.label, column] for column in columns]
            lines.append([row.label, "ours", *(_shown(place.ours) for place in places)])
            if any(place.chosen for place in places):
                words = (", ".join(f"{key} = {value}" for key, value in place.chosen.items()) for place in places)
                lines.append(["", "chosen", *words])
            if any(place.paper is not None for place in places):
                lines.append(["", "paper", *("" if place.paper is None else f"{place.paper:g}" for place in places)])
            if any(place.privacy for place in places):
                lines.append(["", "true ε", *(_epsilon(place.privacy) for place in places)])
                if any(place.privacy and place.privacy["with_papers_sensitivity"] for place in places):
                    believed = (_epsilon(place.privacy, "with_papers_sensitivity") for place in places)
                    lines.append(["", "true ε, granting its sensitivity", *believed])
                if any(place.privacy and place.privacy["calibration"] == "paper" for place in places):
                    lines.append(["", "at true ε", *(_shown(place.at_true) for place in places)])
                    lines.append(["", "its true ε", *(_epsilon(place.at_true_privacy) for place in places)])
            elif any(place.at_true != place.ours for place in places):
                lines.append(["", "with true noise", *(_shown(place.at_true) for place in places)])
        return lines

    def save(self, folder: Path) -> None:
        """Write NAME.json, NAME.md and NAME.png."""
        name = self.experiment.name
        self.draw(folder)
        run_folder.write_json(folder, f"{name}.json", self.to_dict())
        (folder / f"{name}.md").write_text(self.markdown(f"{name}.png"), encoding="utf-8")

    def draw(self, folder: Path) -> str:
        """Plot it as NAME.png and return that name."""
        run_folder.make(folder)
        image = f"{self.experiment.name}.png"
        draw(self.to_dict(), folder / image)
        return image


def _plain(key: str, estimate: Estimate | None) -> dict[str, Any]:
    mean = None if estimate is None else _finite(estimate.mean)
    return {key: mean, f"{key}_standard_error": None if mean is None or estimate is None else estimate.error}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _epsilon(privacy: dict[str, Any] | None, key: str = "true") -> str:
    if privacy is None:
        return "–"
    return "∞" if privacy["claimed"] >= _NO_NOISE else rounded_up(privacy[key])


def _shown(estimate: Estimate | None) -> str:
    """Print a mean with its standard error, to the digits that the error leaves.

    >>> _shown(Estimate(27.4031, 0.123)), _shown(Estimate(0.46631)), _shown(Estimate(float("inf")))
    ('27.40 ± 0.12', '0.4663', 'diverged')
    """
    if estimate is None:
        return "–"
    if not math.isfinite(estimate.mean):
        return "diverged"
    if estimate.error == 0:
        return f"{estimate.mean:.4g}" if abs(estimate.mean) < 1e4 else f"{estimate.mean:.3g}"
    digits = min(4, max(0, 1 - math.floor(math.log10(estimate.error))))
    if abs(estimate.mean) >= 1e5:
        return f"{estimate.mean:.2e} ± {estimate.error:.1e}"
    return f"{estimate.mean:.{digits}f} ± {estimate.error:.{digits}f}"


def _caption(plain: dict[str, Any]) -> str:
    dates = " to ".join(sorted({plain["dates"][0], plain["dates"][-1]}))
    measured = f"{plain['measure'][0].upper()}{plain['measure'][1:]}"
    repeated = f", mean of {plain['repetitions']} repetitions ± standard error" if plain["repetitions"] > 1 else ""
    where = f"{dates}, on {' and '.join(plain['devices'])} ({plain['seconds']:,.0f} s of trainings)"
    return f"{measured}{repeated}. `{plain['command']}`, seed {plain['seed']}, {where}.\n"


def _summary_table(plain: dict[str, Any]) -> list[list[str]]:
    def number(value: float | None) -> str:
        return "diverged" if value is None else f"{value:.4g}"

    heading = [
        plain["down"], f"best {plain['across']}: ours", "paper", "at true ε", "best: ours", "paper", "at true ε",
        "worst: ours", "paper", "at true ε",
    ]  # fmt: skip
    rows = [
        [
            line["row"],
            *(text for key in ("best_at", "best", "worst") for text in (
                line["ours"][key] if key == "best_at" else number(line["ours"][key]),
                "" if line["paper"][key] is None else f"{line['paper'][key]:g}",
                line["at_true"][key] if key == "best_at" else number(line["at_true"][key]),
            )),
        ]
        for line in plain["summary"]
    ]  # fmt: skip
    return [heading, *rows]


def _markdown(lines: list[list[str]]) -> str:
    heading, *rows = lines
    return "".join(f"| {' | '.join(row)} |\n" for row in [heading, ["---"] * len(heading), *rows])
