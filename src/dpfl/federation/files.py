"""The files of the real data sets: where to look for them, what they must hash to, where they can be had.

A file is looked up in the directory `$DPFL_DATA`, then in the user's cache, then downloaded into the cache
from its public home. Every file is checked before it is read, wherever it came from, so a run is always on
the data it names.
"""

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpfl.errors import BadInput

TIMEOUT_SECONDS = 30.0  # without an answer from the server, not for the whole file


@dataclass(frozen=True)
class File:
    """One file: its path below the data directory or the cache, its checksum, and its public home."""

    path: str
    checksum: str  # "algorithm:hexadecimal"
    home: str | None = None  # None: no public home serves these very bytes


def _idx(folder: str, home: str, sums: dict[str, str]) -> tuple[tuple[File, ...], ...]:
    return tuple((File(f"{folder}/{file}", f"sha256:{sum}", home + file),) for file, sum in sums.items())


UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"

# For each data set the files that it needs, and for each of them the alternatives, best first.
FILES: dict[str, tuple[tuple[File, ...], ...]] = {
    "mnist": _idx(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion-mnist": _idx(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    "femnist": (
        (
            File(
                "femnist/femnist_leaf_subset.npz",
                "sha256:54ddf3b9aace56fe25427a2b2ec6ccc4694d1ed9447cbdc0e27853024c52e24b",
            ),
        ),
    ),
    "cifar10": (
        (
            File(
                "cifar10/cifar-10-binary.tar.gz",
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            ),
            File(  # the same batches one after the other, as examples/full_cifar10.py makes them
                "cifar10/cifar-10-batches.bin",
                "sha256:013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522",
            ),
            File(
                "cifar10/cifar10_balanced_20k_5k.npz",
                "sha256:bdaef057a4f070aa96d0ffc8e53f1657a9aca14c8ee1fa4911f73d5823f01d95",
            ),
        ),
    ),
    "adult": (  # UCI serves the plain files
        (
            File(
                "adult/adult.data.gz",
                "sha256:c7a2b4716a97f930123e0baf879188d701e798172631a654fc703d4b082907f3",
            ),
            File("adult/adult.data", "md5:5d7c39d7b8804f071cdd1f2a7c460872", UCI + "adult.data"),
        ),
        (
            File(
                "adult/adult.test.gz",
                "sha256:8a2c1bffa6e7ce5abfa43881ae5e87c4311ebc2b3cd526c9c40a43f19f06f799",
            ),
            File("adult/adult.test", "md5:35238206dfdf7f1fe215bbb874adecdc", UCI + "adult.test"),
        ),
    ),
    "lending-club": (
        (
            File(
                "lending-club/loans_2007_2011.csv.gz",
                "sha256:166783dd4a0bb765845fc7f5ad5cd016877ba27a24e2818c8f949db489666eb3",
            ),
        ),
    ),
}


def fetch(name: str) -> list[Path]:
    """Return a checked path for each file that the data set `name` needs, in the order of its table."""
    return [find(name, alternatives) for alternatives in FILES[name]]


def whereabouts(name: str) -> str:
    """Say where the files of a data set are, by their names alone: nothing is read, checked or downloaded.

    >>> whereabouts("digits")
    'embedded'
    """
    if name not in FILES:
        return "embedded"
    directories = [directory for directory in (_data_directory(), _cache_directory()) if directory is not None]
    here = (
        any(os.path.isfile(directory / file.path) for file in alternatives for directory in directories)
        for alternatives in FILES[name]
    )
    if all(here):
        return "here"
    served = all(any(file.home for file in alternatives) for alternatives in FILES[name])
    return "to be downloaded" if served else "missing"


def find(name: str, alternatives: Sequence[File]) -> Path:
    """Return a checked path of the first alternative to be found; download one when none is.

    Raises BadInput when there is none to be had, when a file does not have its checksum, or when `$DPFL_DATA`
    is set to something that is no readable directory.
    """
    data, cache = _data_directory(), _cache_directory()
    for file in alternatives:
        for directory in (data, cache):
            if directory is not None and os.path.isfile(path := directory / file.path):
                _check(path, file.checksum)
                return path
    wanted = " or ".join(file.path for file in alternatives)
    failure = "no public home serves it"
    served = next((file for file in alternatives if file.home), None)
    if served is not None:
        try:
            return _download(served, cache)
        except (OSError, http.client.HTTPException) as problem:
            failure = f"the download from {served.home} failed ({problem})"
    looked = "DPFL_DATA is not set" if data is None else f"it is not in DPFL_DATA ({data})"
    raise BadInput(
        f"data {name!r} needs the file {wanted}, but {looked}, it is not in the cache ({cache}) and "
        f"{failure}; set DPFL_DATA to a directory that has it, or use data 'digits', which needs no files"
    )


def _data_directory() -> Path | None:
    value = os.environ.get("DPFL_DATA")
    if not value:
        return None
    if not (os.path.isdir(value) and os.access(value, os.R_OK | os.X_OK)):
        raise BadInput(f"DPFL_DATA must be a directory that can be read, was {value!r}; correct it or unset it")
    return Path(value)


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dpfl"


def _digest(path: Path, checksum: str) -> str:
    algorithm = checksum.partition(":")[0]
    with path.open("rb") as stream:
        # md5 only tells a damaged file from a whole one here, which strict (FIPS) builds allow when told so.
        found = hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{found.hexdigest()}"


def _check(path: Path, checksum: str) -> None:
    try:
        found = _digest(path, checksum)
    except OSError as problem:
        raise BadInput(f"the file {path} must be readable, was not ({problem}); correct its permissions") from problem
    if found != checksum:
        raise BadInput(f"the file {path} must have {checksum}, has {found}; remove it and fetch it again")


def _download(file: File, cache: Path) -> Path:
    """Download into the cache; the file takes its name only when it is whole and has its checksum."""
    assert file.home is not None
    target = cache / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    part = Path(name)
    try:
        with (
            os.fdopen(handle, "wb") as stream,
            urllib.request.urlopen(file.home, timeout=TIMEOUT_SECONDS) as answer,
        ):
            shutil.copyfileobj(answer, stream)
        found = _digest(part, file.checksum)
        if found != file.checksum:
            raise BadInput(
                f"the file from {file.home} must have {file.checksum}, had {found} and was not kept; "
                f"try again, or put a good copy at {target}"
            )
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target
