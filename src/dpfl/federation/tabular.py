"""The two data sets that come as tables, Adult and Lending Club: which columns are kept, and how encoded.

Encodings that need no statistics (codes of public category lists, dates as years) are done at loading.
Everything learned from values (means, medians, quantiles, PCA) waits for `Dataset.fit`, which sees public
records only.
"""

import csv
import gzip
import io
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfl.errors import BadInput
from dpfl.federation.files import fetch
from dpfl.federation.records import Dataset, Records, Separate

ADULT_COLUMNS = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
)

# Left out: fnlwgt, the weight of a record in the census sample and nothing about the person; education, which
# education-num repeats one to one.
ADULT_NUMERIC = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")

# As listed in adult.names, the public description: no record has to be looked at to know them.
ADULT_CATEGORIES: dict[str, str] = {
    "workclass": ("Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked"),
    "marital-status": (
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse"
    ),
    "occupation": (
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
        "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv "
        "Armed-Forces"
    ),
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "native-country": (
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan "
        "Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal "
        "Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua "
        "Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands"
    ),
}
UNKNOWN = -1  # the code of '?', which becomes all zeros

# The numbers known when a loan is made. Left out: tax_liens, delinq_amnt and acc_now_delinq (zero but for a
# few loans, which standardising would blow up), installment, grade and sub_grade (they encode the rate),
# mths_since_last_record (missing for 91 % of the loans; the paper drops what is missing for more than 70 %),
# and everything learned later. pub_rec_bankruptcies stands among the later columns of the file but is read
# from the credit report at application.
LOAN_NUMERIC = (
    "loan_amnt funded_amnt funded_amnt_inv term annual_inc dti delinq_2yrs inq_last_6mths "
    "mths_since_last_delinq open_acc pub_rec revol_bal revol_util total_acc pub_rec_bankruptcies"
)
LOAN_COMPONENTS = 10


def take_every_fifth(records: Records) -> tuple[Records, Records]:
    """Split off rows 4, 9, 14, ... as a test split: fixed, for data that comes without an official one."""
    held_out = torch.arange(len(records)) % 5 == 4
    return records.take(~held_out), records.take(held_out)


def adult() -> Dataset:
    """Return UCI Adult (census income): is a person's income above 50,000 dollars a year?"""
    train, test = fetch("adult")
    pool, held_out = _adult_records(_text(train)), _adult_records(_text(test))
    source = f"UCI Adult, {len(pool):,} + {len(held_out):,} records, {train.parent}"
    return Dataset("adult", pool, held_out, 2, source, fit=fit_adult)


def lending_club() -> Dataset:
    """Return Lending Club loans of 2007-2011 with their interest rate in percent; every fifth is test."""
    (path,) = fetch("lending-club")
    pool, test = take_every_fifth(_loan_records(_text(path)))
    source = f"Lending Club 2007-2011, {len(pool):,} + {len(test):,} records, {path}"
    return Dataset("lending-club", pool, test, None, source, fit=fit_lending_club)


def fit_adult(public: Tensor) -> Separate:
    """Learn to standardise the numbers; each category becomes a column of its own, and '?' becomes none."""
    from sklearn.preprocessing import StandardScaler  # slow to import

    count = len(ADULT_NUMERIC)
    scaler = StandardScaler().fit(public[:, :count].double().numpy())

    def encode(x: Tensor) -> Tensor:
        numbers = torch.from_numpy(scaler.transform(x[:, :count].double().numpy())).float()
        codes = zip(x[:, count:].unbind(1), ADULT_CATEGORIES.values(), strict=True)
        indicators = [(code[:, None] == torch.arange(len(names.split()))).float() for code, names in codes]
        return torch.cat([numbers, *indicators], dim=1)

    return Separate(encode)


def fit_lending_club(public: Tensor) -> Separate:
    """Learn medians for missing values, 1-99 % limits, scales and principal components from public loans."""
    from sklearn.decomposition import PCA  # slow to import
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    if len(public) < LOAN_COMPONENTS:
        raise BadInput(
            f"validation_share must leave at least {LOAN_COMPONENTS} public records to fit the preprocessing "
            f"of 'lending-club' on, left {len(public)}; raise it"
        )
    values = public.double().numpy()
    imputer = SimpleImputer(strategy="median", keep_empty_features=True)
    low, high = np.quantile(imputer.fit_transform(values), [0.01, 0.99], axis=0)
    winsorise = FunctionTransformer(np.clip, kw_args={"a_min": low, "a_max": high})
    pipeline = make_pipeline(imputer, winsorise, StandardScaler(), PCA(LOAN_COMPONENTS, svd_solver="full"))
    pipeline.fit(values)

    def reduce(x: Tensor) -> Tensor:
        return torch.from_numpy(pipeline.transform(x.double().numpy())).float()

    return Separate(reduce)


def _text(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def _adult_records(text: str) -> Records:
    rows = [line.rstrip(".").split(", ") for line in text.splitlines() if line.count(",") == 14]
    columns = dict(zip(ADULT_COLUMNS.split(), zip(*rows, strict=True), strict=True))
    features = [np.array(columns[name], np.float32) for name in ADULT_NUMERIC]
    for name, categories in ADULT_CATEGORIES.items():
        codes = {category: code for code, category in enumerate(categories.split())}
        features.append(np.array([codes.get(value, UNKNOWN) for value in columns[name]], np.float32))
    above = np.array(columns["income"]) == ">50K"
    return Records(torch.from_numpy(np.column_stack(features)), torch.from_numpy(above.astype(np.int64)))


def _loan_records(text: str) -> Records:
    header, *rows = csv.reader(io.StringIO(text))
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    features = [_numbers(columns[name]) for name in LOAN_NUMERIC.split()]
    features.append(np.array([_years_employed(value) for value in columns["emp_length"]]))
    features.append(_years(columns["issue_d"]) - _years(columns["earliest_cr_line"]))  # of credit history
    x = np.column_stack(features).astype(np.float32)
    rate_in_percent = (100 * _numbers(columns["int_rate"])).astype(np.float32)
    return Records(torch.from_numpy(x), torch.from_numpy(rate_in_percent))


def _numbers(values: tuple[str, ...]) -> NDArray[np.float64]:
    return np.array([float(value) if value else np.nan for value in values])


def _years(dates: tuple[str, ...]) -> NDArray[np.float64]:
    """Turn ISO dates into years, to the month."""
    return np.array([int(date[:4]) + (int(date[5:7]) - 1) / 12 if date else np.nan for date in dates])


def _years_employed(text: str) -> float:
    """Read '< 1 year', '1 year', ..., '10+ years', or 'n/a'."""
    if text == "n/a":
        return np.nan
    return 0.0 if text.startswith("<") else float(text.split()[0].rstrip("+"))
