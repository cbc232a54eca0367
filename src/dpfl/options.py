"""Options that check themselves: the fields of a dataclass, held to their annotations whoever sets them.

A config file, the command line and Python all end here, so that they accept the same values (a whole number for a
float, a list for a tuple, NumPy's numbers for plain ones) and refuse the same ones, with the same sentence.
"""

import re
import tomllib
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from dpfl.errors import BadInput, choose, suggestion

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def option_names(kind: "type[DataclassInstance]") -> tuple[str, ...]:
    """Return the names of a dataclass's fields, as they stand in a config."""
    return tuple(field.name for field in fields(kind))


def deciding(options: "DataclassInstance") -> dict[str, Any]:
    """Return the fields that say something: not None, nor added by a later release and as it was before there were any.

    What is named by these keeps its name when an option is added: one with `metadata` that holds `added`, a release,
    and `before`, the value that means as before, where that is not the default.
    """
    values = ((field, getattr(options, field.name)) for field in fields(options))
    return {
        field.name: value
        for field, value in values
        if value is not None
        and not ("added" in field.metadata and value == field.metadata.get("before", field.default))
    }


def fit_fields(options: "DataclassInstance") -> None:
    """Bring every field of a (frozen) dataclass into the form its annotation asks for; call it in `__post_init__`."""
    hints = _hints(type(options))
    for field in fields(options):
        object.__setattr__(options, field.name, fit(field.name, getattr(options, field.name), hints[field.name]))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def fit(name: str, value: Any, hint: Any) -> Any:
    """Return `value` in the form of `hint`, or refuse it by name.

    >>> fit("epsilon", [4, 8], float | tuple[float, ...])
    (4.0, 8.0)
    >>> fit("rounds", 1.5, int)
    Traceback (most recent call last):
    ...
    dpfl.errors.BadInput: rounds must be a whole number, was 1.5; correct it
    >>> fit("clip", "medain", float | Literal["median"])
    Traceback (most recent call last):
    ...
    dpfl.errors.BadInput: clip must be a number or 'median', was 'medain'; did you mean 'median'?
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    for kind in kinds:
        number = isinstance(value, Real) and not isinstance(value, bool)
        if kind is int and number and isinstance(value, Integral):
            return int(value)
        if kind is float and number:
            return float(value)
        if (kind is str and isinstance(value, str)) or (kind is NoneType and value is None):
            return value
        if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            return tuple(fit(name, entry, get_args(kind)[0]) for entry in value)
        if (
            get_origin(kind) is Literal
            and isinstance(value, str)
            and (value in words or set(kinds) <= {kind, NoneType})
        ):
            return choose(name, value, {option: option for option in words})
    way_out = suggestion(value, words) if isinstance(value, str) else ""
    raise BadInput(f"{name} must be {_words(hint)}, was {value!r}{way_out or '; correct it'}")


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_words(kind) for kind in get_args(hint) if kind is not NoneType)
    if get_origin(hint) is tuple:
        return f"a list of which each is {_words(get_args(hint)[0])}"
    if get_origin(hint) is Literal and len(get_args(hint)) == 1:
        return repr(*get_args(hint))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    return {int: "a whole number", float: "a number", str: "a word"}[hint]


def literal(text: str) -> Any:
    """Read the value of `key=value` as TOML would, or as a plain word.

    >>> literal("0.5"), literal(".5"), literal("[1, 2]"), literal("dirichlet:0.1")
    (0.5, 0.5, [1, 2], 'dirichlet:0.1')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # TOML wants digits on both sides of a point; people do not.
        return float(text) if re.fullmatch(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?", text) else text


def read_toml(field: str, path: Path) -> dict[str, Any]:
    """Read a TOML file, or say what is wrong with it under the name of the field that it was given for."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise BadInput(
            f"{field} must be a readable file, was {str(path)!r} ({problem.strerror}); check the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise BadInput(f"{field} must be TOML, but {str(path)!r} is not: {problem}; mend it") from None
