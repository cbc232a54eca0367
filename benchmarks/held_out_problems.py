"""Four federations without a public record, on which plans are measured (`held_out_plans.py`).

Tables are read as sites' own files are, by a schema: public ranges and vocabularies, nothing found in any record. The
ranges below are round numbers from what the sources say of their columns, such as what Lending Club lends.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dpfl
from dpfl.federation import Federation, Records
from dpfl.federation.datasets import load
from dpfl.federation.records import Dataset
from dpfl.federation.schema import ZEROS, Schema, schema_of
from dpfl.federation.site_files import encode
from dpfl.federation.tabular import ADULT_CATEGORIES, ADULT_NUMERIC, LOAN_NUMERIC

_AGES = (25, 30, 35, 40, 45, 50, 55)  # where one site's patrons end and the next one's begin
_ADULT_RANGES = {
    "age": (17, 90), "education-num": (1, 16), "capital-gain": (0, 20_000), "capital-loss": (0, 4_000),
    "hours-per-week": (0, 80),
}  # fmt: skip
# Low, high and, where values may be missing, what stands for them.
_LOAN_RANGES: dict[str, tuple[float, ...]] = {
    "loan_amnt": (500, 35_000), "funded_amnt": (500, 35_000), "funded_amnt_inv": (0, 35_000), "term": (36, 60),
    "annual_inc": (0, 200_000, 60_000), "dti": (0, 30), "delinq_2yrs": (0, 5, 0), "inq_last_6mths": (0, 8, 0),
    "mths_since_last_delinq": (0, 120, 120), "open_acc": (0, 40, 10), "pub_rec": (0, 3, 0), "revol_bal": (0, 100_000),
    "revol_util": (0, 1, 0.5), "total_acc": (0, 90, 20), "pub_rec_bankruptcies": (0, 2, 0),
    "years_employed": (0, 10, 5), "years_of_credit": (0, 50, 15),
}  # fmt: skip
_RATES = (5, 25)  # percent a year; the target is scaled by it to [−1, 1]


@dataclass(frozen=True)
class Problem:
    """A federation, and the δ that is usual for so many records.

    trainings: with how many seeds each point of the grid is trained, each of its best ones again, and the best of those
        in the end: with more where records are few, since luck is great there and trainings are short.
    """

    name: str
    title: str
    delta: float
    load: Callable[[], Federation]
    trainings: tuple[int, int, int] = (3, 12, 8)


def heart() -> Federation:
    """Return patients at four hospitals."""
    return dpfl.federate("heart")


def adult() -> Federation:
    """Return eight sites whose people are of one age group each: does somebody earn more than 50,000 dollars?"""
    schema = _adult_schema()
    dataset = load("adult")
    clients, tests = (_by_age(records) for records in (dataset.pool, dataset.test))
    return dpfl.from_clients(clients, test=tests, schema=schema, name="adult by age")


def digits() -> Federation:
    """Return ten clients who hold all images of one digit each."""
    return dpfl.federate("digits", clients=10, partition="classes:1", validation_share=0, seed=1)


def loans() -> Federation:
    """Return a hundred lenders, each with loans of much the same interest rate, which is to be foretold."""
    dataset = load("lending-club")
    pool, test = _loan_records(dataset.pool), _loan_records(dataset.test)
    return dpfl.federate(
        Dataset("loans", pool, test, None, dataset.source), clients=100, partition="sorted", validation_share=0, seed=1
    )


def loans_in_percent() -> Federation:
    """Return the same lenders with targets in percent, and features fitted to a tenth that is then taken away.

    Nobody who knows public facts alone knows this scale, so it is no part of the measure.
    """
    federation = dpfl.federate("lending-club", clients=100, partition="sorted", seed=1)
    nobody = federation.validation.take(torch.arange(0))
    return replace(federation, validation=nobody, recipe=None)


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("heart", "heart, 4 hospitals", 1e-3, heart, trainings=(24, 96, 64)),
        Problem("adult", "Adult, 8 sites by age", 1e-5, adult),
        Problem("digits", "digits, 10 clients by class", 1e-4, digits, trainings=(3, 24, 32)),
        Problem("loans", "loans, 100 lenders by rate", 1e-5, loans),
        Problem("loans-in-percent", "loans in percent, 100 lenders by rate", 1e-5, loans_in_percent),
    )
}
USUAL = ("heart", "adult", "digits", "loans")


def _adult_schema() -> Schema:
    columns: dict[str, Any] = {
        name: {"kind": "number", "low": low, "high": high} for name, (low, high) in _ADULT_RANGES.items()
    }
    for name, values in ADULT_CATEGORIES.items():
        columns[name] = {"kind": "category", "values": values.split(), "missing": ZEROS}
    return schema_of({"target": "income", "columns": columns | {"income": {"kind": "class", "values": ["0", "1"]}}})


def _by_age(records: Records) -> list[dict[str, NDArray[Any]]]:
    """Return a table for each age group."""
    numbers = records.x.numpy()
    table: dict[str, NDArray[Any]] = {name: numbers[:, at] for at, name in enumerate(ADULT_NUMERIC)}
    for at, (name, values) in enumerate(ADULT_CATEGORIES.items(), start=len(ADULT_NUMERIC)):
        written = np.array([*values.split(), "?"])  # the code of what is unknown, −1, is the last
        table[name] = written[numbers[:, at].astype(int)]
    table["income"] = records.y.numpy()
    group = np.digitize(table["age"], _AGES)
    return [{name: column[group == at] for name, column in table.items()} for at in range(len(_AGES) + 1)]


def _loan_records(records: Records) -> Records:
    columns: dict[str, Any] = {
        name: dict(zip(("low", "high", "missing"), numbers, strict=False), kind="number")
        for name, numbers in _LOAN_RANGES.items()
    }
    columns["int_rate"] = {"kind": "number", "low": _RATES[0], "high": _RATES[1]}
    names = (*LOAN_NUMERIC.split(), "years_employed", "years_of_credit")
    table = dict(zip(names, records.x.numpy().T, strict=True)) | {"int_rate": records.y.numpy()}
    return encode(table, schema_of({"target": "int_rate", "columns": columns}), "loans").records
