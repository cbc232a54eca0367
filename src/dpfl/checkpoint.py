"""A state on disk: plain data and tensors in one safetensors file, from which it is read back bit for bit.

Public facts (the problem) are not in it: they follow from the data and the public root. No code is in it either, so a
file from somebody else can at worst be refused.
"""

import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpfl.errors import BadInput, require_readable
from dpfl.systems import S, State

VERSION = 1
_LONG = 64  # numbers from which on a tuple is a tensor: one for each of a million clients is no text

_Tensors = dict[str, Tensor]


def save(state: State, path: Path) -> None:
    """Write a state to a new file."""
    tensors: _Tensors = {}
    plain = {
        field.name: _plain(getattr(state, field.name), field.name, tensors)
        for field in fields(state)
        if field.name != "problem"
    }
    about = {"version": VERSION, "kind": type(state).__name__, "state": plain}
    save_file(tensors, path, metadata={"dpfl": json.dumps(about, allow_nan=False)})


def load(path: Path, like: S) -> S:
    """Read a state back.

    like: one of the same training, as it begins: the kind of state, the problem and the device are taken from it.
    """
    try:
        with safe_open(path, framework="pt", device=str(like.model.device)) as file:
            about = json.loads((file.metadata() or {})["dpfl"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        raise BadInput(f"state must be a file that dpfl wrote, but {str(path)!r} is not ({problem})") from None
    require_readable("state", repr(str(path)), about["version"], VERSION)
    kind = type(like)
    if about["kind"] != kind.__name__:
        raise BadInput(f"state must be a {kind.__name__}, but {str(path)!r} holds a {about['kind']}; give another file")
    hints = get_type_hints(kind)
    return kind(
        problem=like.problem,
        **{name: _rich(value, hints[name], tensors) for name, value in about["state"].items()},
    )


def _plain(value: Any, name: str, tensors: _Tensors) -> Any:
    """Return a value as JSON; tensors, and long tuples of numbers, go beside it under its name."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone().contiguous()  # what is shared in memory is written twice
        return {"tensor": name}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, tuple):
        for kind, dtype in ((float, torch.float64), (int, torch.int64)):
            if len(value) >= _LONG and all(type(number) is kind for number in value):
                tensors[name] = torch.tensor(value, dtype=dtype)
                return {"numbers": name}
        return [_plain(part, f"{name}.{place}", tensors) for place, part in enumerate(value)]
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"fields": {key: _plain(part, f"{name}.{key}", tensors) for key, part in parts.items()}}
    raise BadInput(
        f"a state must be plain data and tensors, but its {name} is a {type(value).__name__}; keep numbers, texts,"
        " tuples, tensors or dataclasses of them"
    )


def _rich(value: Any, hint: Any, tensors: _Tensors) -> Any:
    """Return what `_plain` wrote; the annotation tells which dataclass it was."""
    if isinstance(value, list):
        inner = get_args(hint)[0] if get_args(hint) else Any
        return tuple(_rich(part, inner, tensors) for part in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "numbers":
        return tuple(tensors[content].tolist())
    if kind == "float":
        return float(content)
    if kind == "set":
        return frozenset(content)
    made = next(option for option in (hint, *get_args(hint)) if is_dataclass(option))
    hints = get_type_hints(made)
    return made(**{name: _rich(part, hints[name], tensors) for name, part in content.items()})  # type: ignore[operator]
