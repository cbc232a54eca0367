"""A comparison as rows for other tools: one a training, one a system, or one a round of every training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpfl.privacy.certificate import Certificate
from dpfl.report.frames import rounds

if TYPE_CHECKING:
    from dpfl.comparison.fair_runs import Result

_MEANS = ("rounds", "accuracy", "loss", "seconds")
_OF_A_MEAN = {"": "mean", "_standard_error": "standard_error"}


def trainings(results: "Sequence[Result]") -> list[dict[str, Any]]:
    """Return one row a training: whose, with which seed, what it promises, what is true, and how good it became."""
    return [
        {
            **_whose(result),
            "seed": seed,
            **_promised(one.run.certificate),
            "neighbours": None if one.epsilon is None else result.neighbours,
            "true_epsilon": one.epsilon,
            **{name: getattr(one.run, name) for name in _MEANS},
        }
        for result in results
        for seed, one in enumerate(result.fair, start=1)
    ]


def summary(results: "Sequence[Result]") -> list[dict[str, Any]]:
    """Return one row a system: its mean over the seeds, and the standard error of that."""
    rows = []
    for result in results:
        plain = result.to_dict()
        rows.append({
            **_whose(result),
            "seeds": len(result.fair),
            **_promised(result.runs[0].certificate),
            "neighbours": plain["neighbours"],
            "true_epsilon": plain["true_epsilon"],
            **{f"{name}{suffix}": plain[name][key] for name in _MEANS for suffix, key in _OF_A_MEAN.items()},
        })  # fmt: skip
    return rows


def histories(results: "Sequence[Result]") -> list[dict[str, Any]]:
    """Return one row a round of every training."""
    return [
        {**_whose(result), "seed": seed, **line}
        for result in results
        for seed, run in enumerate(result.runs, start=1)
        for line in rounds(run.history)
    ]


def _whose(result: "Result") -> dict[str, Any]:
    searched = ", ".join(f"{key} = {value}" for key, value in result.searched.items())
    return {"label": result.label, "system": result.config.system.name, "searched": searched or None}


def _promised(certificate: Certificate) -> dict[str, Any]:
    """Return what a training promises, and the ε against the server in the sense of that promise."""
    claimed = certificate.claimed or {}
    return {
        "promised_unit": certificate.unit,
        "promised_neighbours": certificate.neighbours,
        "claimed_epsilon": claimed.get("epsilon"),
        "delta": claimed.get("delta"),
        "certified_epsilon": certificate.observers["server"].epsilon,
    }
