"""The two ways dpfl says no: the input cannot be used, or the privacy budget cannot pay.

Each message is one sentence that names the field, says what it must be and what it was, and ends in a way out.
The command line turns them into exit codes 2 (before anything is written) and 3 (finished rounds are kept).
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


class BadInput(ValueError):
    """Something the user gave cannot be used as it is."""


class BudgetRefused(RuntimeError):
    """A ledger would be overdrawn; the release it was asked for has not happened."""


class Caution(UserWarning):
    """Something will be done as it was asked, and means less than it seems to."""


def choose(field: str, name: str, known: Mapping[str, T]) -> T:
    """Look `name` up in `known`, or say what it could have been.

    >>> choose("system", "upd", {"udp": 1, "fedavg": 2})
    Traceback (most recent call last):
    ...
    dpfl.errors.BadInput: system must be one of fedavg, udp, was 'upd'; did you mean 'udp'?
    """
    if name in known:
        return known[name]
    raise BadInput(f"{field} must be one of {', '.join(sorted(known))}, was {name!r}{suggestion(name, known)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Name the nearest known spelling: '; did you mean ...?', or nothing when none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def require_positive(field: str, value: float, way_out: str) -> None:
    """Refuse a number that is not finite and above zero (NaN included)."""
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise BadInput(f"{field} must be a finite number above 0, was {value!r}; {way_out}")


def require_not_negative(field: str, value: float, way_out: str) -> None:
    """Refuse a number that is not finite or below zero (NaN included)."""
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
        raise BadInput(f"{field} must be a finite number of at least 0, was {value!r}; {way_out}")


def require_fraction(field: str, value: float, way_out: str) -> None:
    """Refuse what is not at least 0 and below 1 (NaN included)."""
    if not (isinstance(value, (int, float)) and 0 <= value < 1):
        raise BadInput(f"{field} must be at least 0 and below 1, was {value!r}; {way_out}")


def require_count(field: str, value: int, way_out: str, *, at_least: int = 1) -> None:
    """Refuse anything but a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise BadInput(f"{field} must be a whole number of at least {at_least}, was {value!r}; {way_out}")


def require_one_of(field: str, value: object, known: tuple[object, ...]) -> None:
    """Refuse what is not among the known values."""
    if value not in known:
        raise BadInput(f"{field} must be one of {', '.join(map(str, known))}, was {value!r}; choose one")


def require_package(package: str, purpose: str, *, module: str | None = None) -> ModuleType:
    """Import a package (or a module that needs it) which only the extra of its name brings.

    >>> require_package("no_such_package", "a frame")
    Traceback (most recent call last):
    ...
    dpfl.errors.BadInput: no_such_package must be installed for a frame, and is not; pip install dpfl[no_such_package]
    """
    if find_spec(package) is None:
        raise BadInput(f"{package} must be installed for {purpose}, and is not; pip install dpfl[{package}]")
    return import_module(module or package)


def require_readable(field: str, where: str, version: object, newest: int) -> None:
    """Refuse what a newer dpfl wrote, in a version of its format that this one cannot know.

    >>> require_readable("ledger", "'all.sqlite'", 2, newest=1)
    Traceback (most recent call last):
    ...
    dpfl.errors.BadInput: ledger must be of version 1 or older, but 'all.sqlite' is of version 2, from a newer dpfl; \
update dpfl
    """
    if isinstance(version, bool) or not isinstance(version, int) or version > newest:
        raise BadInput(
            f"{field} must be of version {newest} or older, but {where} is of version {version!r}, from a newer dpfl;"
            " update dpfl"
        )
