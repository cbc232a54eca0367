import hashlib
import io
import os
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpfl.errors import BadInput
from dpfl.federation import files, load
from dpfl.federation.datasets import femnist
from dpfl.federation.files import File
from dpfl.federation.tabular import _adult_records, fit_adult, fit_lending_club
from grids import each

DATA = os.environ.get("DPFL_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="DPFL_DATA is not set: the real data sets are not here")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"^data must be one of adult, cifar10, .*, was 'minst'; did you mean"):
        load("minst")


def test_digits_hold_out_every_fifth_record() -> None:
    from sklearn.datasets import load_digits

    digits, raw = load("digits"), load_digits()
    assert digits.pool.x.shape == (1438, 1, 8, 8)
    assert digits.test.y.tolist() == raw.target[4::5].tolist()
    assert torch.equal(digits.pool.x[4, 0], torch.from_numpy(raw.images[5] / 16).float())
    assert float(digits.pool.x.max()) == 1.0


@needs_data
@each(
    ("name", "pool", "test", "shape", "classes"),
    [
        ("mnist", 60_000, 10_000, (1, 28, 28), 10),
        ("fashion-mnist", 60_000, 10_000, (1, 28, 28), 10),
        ("femnist", 36_790, 4_193, (1, 28, 28), 62),
        ("adult", 32_561, 16_281, (12,), 2),
        ("lending-club", 34_028, 8_507, (17,), None),
    ],
)
def test_real_data_has_its_shape(name: Any, pool: Any, test: Any, shape: Any, classes: Any) -> None:
    dataset = load(name)
    assert (dataset.pool.x.shape, dataset.test.x.shape) == ((pool, *shape), (test, *shape))
    assert (len(dataset.pool.y), len(dataset.test.y)) == (pool, test)
    assert dataset.classes == classes
    assert dataset.pool.x.dtype == torch.float32
    assert dataset.pool.x.is_contiguous()
    assert f"{pool:,} + {test:,} records" in dataset.source
    if len(shape) == 3:
        assert (float(dataset.pool.x.min()), float(dataset.pool.x.max())) == (0.0, 1.0)
        assert set(dataset.pool.y.tolist()) == set(range(classes))


@needs_data
def test_cifar_subset_is_channel_first() -> None:
    if any(Path(DATA, "cifar10", name).exists() for name in ("cifar-10-binary.tar.gz", "cifar-10-batches.bin")):
        pytest.skip("the full set is there, so the subset is not used")
    cifar = load("cifar10")
    assert cifar.pool.x.shape == (20_000, 3, 32, 32)
    assert cifar.pool.x.is_contiguous()
    assert "balanced subset, 20,000 + 5,000 records" in cifar.source
    # The well-known channel means of CIFAR-10; a wrong axis order would make the three equal.
    assert cifar.pool.x.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0.491, 0.482, 0.447], abs=0.005)


def test_cifar_full_set_is_read_from_its_archive_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        for name, label in [("data_batch_2", 2), ("test_batch", 9), ("data_batch_1", 1)] + [
            (f"data_batch_{i}", i) for i in (5, 4, 3)
        ]:
            record = bytes([label]) + bytes([10] * 1024 + [20] * 1024 + [30] * 1024)
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = 2 * len(record)
            tar.addfile(member, io.BytesIO(2 * record))
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setenv("DPFL_DATA", str(tmp_path))
    full, *others = files.FILES["cifar10"][0]
    alternatives = (File(full.path, f"md5:{md5}", full.home), *others)
    monkeypatch.setitem(files.FILES, "cifar10", (alternatives,))
    cifar = load("cifar10")
    assert cifar.pool.y.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert cifar.test.y.tolist() == [9, 9]
    assert (cifar.pool.x[0, :, 31, 31] * 255).tolist() == pytest.approx([10, 20, 30])
    assert "full set, 10 + 2 records" in cifar.source


def test_cifar_full_set_is_read_from_its_batches_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cifar10" / "cifar-10-batches.bin"
    path.parent.mkdir()
    path.write_bytes(b"".join(bytes([label]) + bytes([10] * 1024 + [20] * 1024 + [30] * 1024) for label in range(1, 7)))
    monkeypatch.setenv("DPFL_DATA", str(tmp_path))
    full, batches, subset = files.FILES["cifar10"][0]
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(files.FILES, "cifar10", ((full, File(batches.path, f"sha256:{sha256}"), subset),))
    cifar = load("cifar10")
    assert cifar.pool.y.tolist() == [1, 2, 3, 4, 5]
    assert cifar.test.y.tolist() == [6]
    assert (cifar.pool.x[0, :, 31, 31] * 255).tolist() == pytest.approx([10, 20, 30])
    assert "full set, 5 + 1 records" in cifar.source


@needs_data
def test_femnist_has_ink_at_one_and_knows_its_writers() -> None:
    dataset = femnist()
    assert float(dataset.pool.x.mean()) < 0.5  # most of a page is paper
    assert dataset.groups.shape == dataset.pool.y.shape
    assert len(np.unique(dataset.groups.numpy())) == 249
    assert len(np.unique(femnist(max_kind=1).groups.numpy())) == 300


@needs_data
def test_adult_counts_are_those_of_its_description() -> None:
    adult = load("adult")
    assert int(adult.pool.y.sum()) == 7_841
    assert int(adult.test.y.sum()) == 3_846
    encoded = adult.fit(adult.pool.x)(adult.pool.x)
    assert encoded.shape == (32_561, 88)  # 5 numbers and 8 + 7 + 14 + 6 + 5 + 2 + 41 categories
    assert encoded[:, :5].mean(dim=0).abs().max() < 1e-4
    # '?' is the only unknown category, and only in three attributes: 1,836 + 1,843 + 583 of them.
    assert int((7 * len(encoded) - encoded[:, 5:].sum()).round()) == 1_836 + 1_843 + 583


ADULT_LINES = """|1x3 Cross validator
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, \
United-States, <=50K.
25, ?, 226802, 11th, 7, Divorced, ?, Own-child, Black, Female, 0, 0, 20, ?, >50K.

"""


def test_adult_encoding_by_hand() -> None:
    records = _adult_records(ADULT_LINES)
    assert records.y.tolist() == [0, 1]
    assert records.x[0].tolist() == [39, 13, 2174, 0, 40, 5, 2, 8, 3, 0, 1, 0]
    encode = fit_adult(records.x)
    numbers, indicators = encode(records.x).split([5, 83], dim=1)
    assert numbers.tolist() == [[1, 1, 1, 0, 1], [-1, -1, -1, 0, -1]]  # capital-loss is constant
    assert indicators.sum(dim=1).tolist() == [7, 4]
    assert indicators[0].nonzero().flatten().tolist() == [5, 8 + 2, 15 + 8, 29 + 3, 35, 40 + 1, 42]


def loans(rows: Any, seed: Any = 0) -> Any:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(rows, 17)).astype(np.float32))


def test_lending_club_preprocessing_knows_only_what_it_was_fitted_on() -> None:
    public, private = loans(200), loans(50, seed=1)
    private[3, 2] = torch.nan
    private[4, 5] = 1e9
    reduce = fit_lending_club(public)
    alone, together = reduce(private[3:5]), reduce(private)[3:5]
    assert torch.equal(alone, together)  # other private records make no difference
    assert together.shape == (2, 10)
    assert together.isfinite().all()
    assert together.abs().max() < 20  # the wild value was pulled in to the public 99 %
    fitted = reduce(public)
    assert fitted.mean(dim=0).abs().max() < 1e-5
    covariance = fitted.T @ fitted / len(fitted)
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-4  # principal components


def test_lending_club_preprocessing_survives_a_column_that_is_never_public() -> None:
    public = loans(30)
    public[:, 8] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_lending_club(public)(loans(5)).isfinite().all()


def test_lending_club_preprocessing_needs_ten_public_records() -> None:
    with pytest.raises(BadInput, match=r"validation_share must leave at least 10 public records .* left 9"):
        fit_lending_club(loans(9))
