"""The embedded hospitals are FLamby's: the same patients in the same split, scaled by public ranges alone."""

import hashlib
import warnings

import numpy as np
import pytest
import torch

import dpfl
from dpfl.errors import BadInput
from dpfl.federation import heart


def test_the_hospitals_hold_the_patients_of_flambys_split() -> None:
    federation = dpfl.federate("heart")
    assert federation.names == ("cleveland", "hungarian", "switzerland", "va")
    assert federation.sizes == (199, 172, 30, 85)
    assert [len(own) for own in federation.site_tests] == [104, 89, 16, 45]
    assert (federation.shape, federation.classes, len(federation.validation)) == ((13,), 2, 0)
    sick = [int(site.records.y.sum() + site.test.y.sum()) for site in heart.hospitals()]
    assert sick == [139, 98, 45, 101]  # of 303, 261, 46 and 130


def test_the_split_is_the_same_with_every_release_of_scikit_learn() -> None:
    ages = np.concatenate([site.records.x[:, 0].numpy() * 10 + 50 for site in heart.hospitals()]).round().astype(int)
    assert hashlib.sha256(ages.astype("<i8").tobytes()).hexdigest()[:16] == "fc72dfb1cbde2a90"


def test_values_are_scaled_by_public_numbers_and_by_no_patients() -> None:
    first = heart._patients("cleveland")  # 63, male, typical angina, 145, 233, 1, hypertrophy, 150, no, 2.3
    expected = [1.3, 1, 0.75, 33 / 80, 1, 0.4, 0, 2.3, 0, 0, 0, 0, 1]
    torch.testing.assert_close(first.x[0], torch.tensor(expected))


def test_test_records_are_those_of_all_hospitals_and_train_nothing() -> None:
    federation = dpfl.federate("heart")
    torch.testing.assert_close(federation.test.x, torch.cat([own.x for own in federation.site_tests]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = dpfl.train(dpfl.FedSGD(rounds=2, lr=0.1), federation, seed=1)
    assert [site.records + site.tested for site in run.sites] == [303, 261, 46, 130]


def test_no_other_number_of_clients_and_no_classes_are_taken() -> None:
    assert dpfl.federate("heart", clients=4).sizes == (199, 172, 30, 85)
    with pytest.raises(BadInput, match=r"^clients must be as many as there are sites, 4, was 5; leave it out$"):
        dpfl.federate("heart", clients=5)
    with pytest.raises(BadInput, match=r"^classes must be left out for 'heart', which says it, was 3; leave it out$"):
        dpfl.federate("heart", classes=3)
