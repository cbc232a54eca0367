"""Four real hospitals: the UCI heart disease data as the federation that it is, embedded.

A. Janosi, W. Steinbrunn, M. Pfisterer and R. Detrano, 1988, doi:10.24432/C52P4X, CC BY 4.0 (NOTICE). Prepared and split
as FLamby's Fed-Heart-Disease does, so that numbers can be compared, but for one thing: FLamby scales every hospital's
values by that hospital's own means and deviations, which is a release of them; here public ranges scale all alike.
"""

import csv
from importlib.resources import files

import numpy as np
import torch

from dpfl.federation.records import Records
from dpfl.federation.sites import Site

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SOURCE = "UCI heart disease, four hospitals, 740 patients without missing values (CC BY 4.0)"

# (value − middle) / spread, from what is known of healthy adults and no patient.
_NUMBERS = {
    "age": (50, 10), "sex": (0, 1), "trestbps": (130, 20), "chol": (200, 80), "fbs": (0, 1), "thalach": (140, 25),
    "exang": (0, 1), "oldpeak": (0, 1),
}  # fmt: skip
_CATEGORIES = {"cp": (2, 3, 4), "restecg": (1, 2)}  # but for the first, which is all zeros
_TRAINING, _SEED = 0.66, 43  # FLamby's


def hospitals() -> tuple[Site, ...]:
    """Return the four hospitals, each with its records for training and for testing.

    >>> [(site.name, len(site.records), len(site.test)) for site in hospitals()]
    [('cleveland', 199, 104), ('hungarian', 172, 89), ('switzerland', 30, 16), ('va', 85, 45)]
    """
    from sklearn.model_selection import train_test_split  # slow to import

    found = []
    for name in HOSPITALS:
        patients = _patients(name)
        sick = patients.y.numpy()
        rows = train_test_split(
            np.arange(len(patients)), train_size=_TRAINING, test_size=1 - _TRAINING, random_state=_SEED,
            stratify=sick if min(np.bincount(sick, minlength=2)) > 2 else None,
        )  # fmt: skip
        training, testing = (patients.take(torch.from_numpy(part)) for part in rows)
        found.append(Site(name, training, testing))
    return tuple(found)


def _patients(hospital: str) -> Records:
    """Read the patients of whom everything is known but slope, ca and thal, which half of the hospitals lack."""
    text = (files("dpfl.federation") / "hospitals" / f"{hospital}.csv").read_text(encoding="utf-8")
    columns = (*_NUMBERS, *_CATEGORIES)
    features, sick = [], []
    for row in csv.DictReader(text.splitlines()):
        if any(row[column] == "?" for column in columns):
            continue
        scaled = [(float(row[column]) - middle) / spread for column, (middle, spread) in _NUMBERS.items()]
        indicators = [float(float(row[column]) == code) for column, codes in _CATEGORIES.items() for code in codes]
        features.append([*scaled, *indicators])
        sick.append(row["target"] != "0")
    return Records(torch.tensor(features), torch.tensor(sick).long())
