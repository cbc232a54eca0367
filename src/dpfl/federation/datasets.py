"""The data sets that dpfl knows by name, each as a pool to share out and a test split for reporting.

Images are float32 in [0, 1], with ink at 1, laid out [n, channels, height, width]. No file is unpickled.
"""

import gzip
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpfl.errors import choose
from dpfl.federation.features import scattered
from dpfl.federation.files import fetch
from dpfl.federation.records import Dataset, Records
from dpfl.federation.tabular import adult, lending_club, take_every_fifth

CIFAR_BATCHES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))


def load(name: str) -> Dataset:
    """Load a data set by name; an unknown name is answered with the nearest known one.

    `NAME+scattering` is the same data as features that a linear model does well on; see `features`.

    >>> digits = load("digits")
    >>> len(digits.pool), len(digits.test), digits.classes
    (1438, 359, 10)
    """
    plain, plus, features = name.partition("+")
    if not plus:
        return choose("data", name, LOADERS)()
    choose("features", features, {"scattering": None})
    choose("data", plain, LOADERS)
    return scattered(plain, load)


def digits() -> Dataset:
    """Return scikit-learn's embedded 8x8 digits; they have no official test split, so every fifth is test."""
    from sklearn.datasets import load_digits  # slow to import

    found = load_digits()
    x = torch.from_numpy(found.images.astype(np.float32)[:, None] / 16)
    pool, test = take_every_fifth(Records(x, _labels(found.target)))
    return Dataset("digits", pool, test, 10, f"scikit-learn's digits, {_counts(pool, test)}")


def mnist() -> Dataset:
    """Return MNIST with its official test split."""
    return _idx_set("mnist", "MNIST")


def fashion_mnist() -> Dataset:
    """Return Fashion-MNIST with its official test split."""
    return _idx_set("fashion-mnist", "Fashion-MNIST")


def femnist(max_kind: int = 0) -> Dataset:
    """Return handwriting by its writers: LEAF's FEMNIST, 62 classes, with its 90/10 split inside each writer.

    Kind 0 are the writers all of whose images are there; 1 adds writers that LEAF's sampling cut, and 2 those
    of whom only the test part is there.
    """
    (path,) = fetch("femnist")
    with np.load(path, allow_pickle=False) as stored:
        rows = stored["writer_kind"][stored["writer"]] <= max_kind
        x = _images(255 - stored["x"][rows][:, None])  # LEAF stores ink as 0
        writers = int((stored["writer_kind"] <= max_kind).sum())
        y, writer = _labels(stored["y"][rows]), _labels(stored["writer"][rows])
        is_test = torch.from_numpy(stored["is_test"][rows] == 1)
    records = Records(x, y)
    pool, test = records.take(~is_test), records.take(is_test)
    source = f"FEMNIST, {writers} writers, {_counts(pool, test)}, {path}"
    return Dataset("femnist", pool, test, 62, source, groups=writer[~is_test])


def cifar10() -> Dataset:
    """Return CIFAR-10: the full set where its archive is found, else a balanced subset; see `source`."""
    (path,) = fetch("cifar10")
    read = {".gz": _cifar_archive, ".bin": _cifar_batches, ".npz": _cifar_subset}[path.suffix]
    pool, test = read(path)
    which = "CIFAR-10, balanced subset" if read is _cifar_subset else "CIFAR-10, full set"
    return Dataset("cifar10", pool, test, 10, f"{which}, {_counts(pool, test)}, {path}")


LOADERS: dict[str, Callable[[], Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "femnist": femnist,
    "cifar10": cifar10,
    "adult": adult,
    "lending-club": lending_club,
}


def _idx_set(name: str, title: str) -> Dataset:
    paths = fetch(name)
    x, y, test_x, test_y = (_read_idx(path) for path in paths)
    pool = Records(_images(x[:, None]), _labels(y))
    test = Records(_images(test_x[:, None]), _labels(test_y))
    return Dataset(name, pool, test, 10, f"{title}, {_counts(pool, test)}, {paths[0].parent}")


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Read MNIST's format: the number of axes in byte 3, their lengths big-endian, then the bytes."""
    raw = gzip.decompress(path.read_bytes())
    axes = raw[3]
    lengths = np.frombuffer(raw, ">i4", count=axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(lengths)


def _cifar_archive(path: Path) -> tuple[Records, Records]:
    """Read the archive's binary batches: one label byte and 3072 channel-first bytes for each record."""
    batches = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:  # one pass: going back in a compressed archive would unpack it again
            content = archive.extractfile(member)
            if content is not None and member.name.endswith(".bin"):
                rows = np.frombuffer(content.read(), np.uint8).reshape(-1, 3073)
                batches[Path(member.name).name] = rows

    return _cifar_split(np.concatenate([batches[name] for name in (*CIFAR_BATCHES, "test_batch.bin")]))


def _cifar_batches(path: Path) -> tuple[Records, Records]:
    """Read the archive's six batches where they stand in one file, one after the other."""
    return _cifar_split(np.fromfile(path, np.uint8).reshape(-1, 3073))


def _cifar_split(rows: NDArray[np.uint8]) -> tuple[Records, Records]:
    images, labels = _images(rows[:, 1:].reshape(-1, 3, 32, 32)), _labels(rows[:, 0])
    end = len(rows) * len(CIFAR_BATCHES) // (len(CIFAR_BATCHES) + 1)  # the last batch is for testing
    return Records(images[:end], labels[:end]), Records(images[end:], labels[end:])


def _cifar_subset(path: Path) -> tuple[Records, Records]:
    with np.load(path, allow_pickle=False) as stored:
        pool, test = (
            Records(_images(stored[f"x_{part}"].transpose(0, 3, 1, 2)), _labels(stored[f"y_{part}"]))
            for part in ("train", "test")
        )
    return pool, test


def _images(raw: NDArray[np.uint8]) -> torch.Tensor:
    scaled = np.ascontiguousarray(raw, dtype=np.float32)
    scaled /= 255
    return torch.from_numpy(scaled)


def _labels(raw: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(raw.astype(np.int64))


def _counts(pool: Records, test: Records) -> str:
    return f"{len(pool):,} + {len(test):,} records"
