"""The operations that keep records apart, as far as they are known: row r of what comes out depends on row r alone.

That is a property of the operation and of what it is asked for, never of numbers: a softmax over the classes keeps
records apart, and one over the batch does not. So each operation has a rule, which is shown how it is called, with
`Rows` in place of tensors that carry records, one in each row. What no rule speaks of is not known. Beside its rule,
whatever is known must bring as many rows out as went in (`dpfl.gradients.graph`), for batches of two sizes.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Rows:
    """A tensor of records, [B, ...]."""

    ndim: int


Arguments = Sequence[Any]
Named = Mapping[str, Any]
Rule = Callable[[Arguments, Named], bool]  # whether a call keeps records apart


def _parts(value: object) -> Iterator[object]:
    """Go through what an argument consists of."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _parts(one)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _tensors(args: Arguments, named: Named) -> list[Rows | Tensor]:
    return [one for one in _parts([*args, *named.values()]) if isinstance(one, (Rows, Tensor))]


def _in_place(named: Named) -> bool:
    return bool(named.get("inplace")) or named.get("out") is not None


def _alone(args: Arguments, named: Named) -> bool:
    """Take one tensor and change it number by number, or in each row's own places."""
    return len(args) > 0 and isinstance(args[0], Rows) and len(_tensors(args, named)) == 1 and not _in_place(named)


def _paired(args: Arguments, named: Named) -> bool:
    """Meet number by number: records with records of as many dimensions, or with what has no row for each record."""
    tensors = _tensors(args, named)
    most = max(one.ndim for one in tensors if isinstance(one, Rows))
    apart = all(one.ndim == most if isinstance(one, Rows) else one.ndim <= most for one in tensors)
    return apart and not _in_place(named)


def _chosen(args: Arguments, named: Named) -> bool:
    """Choose between two numbers at each place; asked for a condition alone, it lists where that holds."""
    return len(args) + len(named) == 3 and _paired(args, named)


def _beyond(dims: object, ndim: int) -> bool:
    """Tell whether these are dimensions, and none of them is that of the records."""
    found = list(_parts(dims))
    whole = all(isinstance(dim, int) and not isinstance(dim, bool) and -ndim <= dim < ndim for dim in found)
    return bool(found) and whole and all(dim % ndim for dim in found)  # type: ignore[operator]


def _along(position: int | None, default: object = None) -> Rule:
    """Work along dimensions that are given by name or as this argument, and are not that of the records."""

    def rule(args: Arguments, named: Named) -> bool:
        if not _alone(args, named):
            return False
        at = position is not None and len(args) > position
        dims = args[position] if at else named.get("dim", named.get("dims", default))  # type: ignore[index]
        return _beyond(dims, args[0].ndim)

    return rule


def _flipped(args: Arguments, named: Named) -> bool:
    return _alone(args, named) and _beyond([*args[1:], *named.values()], args[0].ndim)


def _joined(args: Arguments, named: Named) -> bool:
    """Put tensors of as many dimensions side by side, along another one than that of the records."""
    dims = args[1] if len(args) > 1 else named.get("dim", 0)
    ndims = {one.ndim if isinstance(one, Rows) else -1 for one in _parts(args[0])}
    return len(ndims) == 1 and -1 not in ndims and not _in_place(named) and _beyond(dims, ndims.pop())


def _stacked(args: Arguments, named: Named) -> bool:
    """Lay tensors of as many dimensions along a new one, which is not the first."""
    dims = args[1] if len(args) > 1 else named.get("dim", 0)
    ndims = {one.ndim if isinstance(one, Rows) else -1 for one in _parts(args[0])}
    return len(ndims) == 1 and -1 not in ndims and not _in_place(named) and _beyond(dims, ndims.pop() + 1)


def _swapped(args: Arguments, named: Named) -> bool:
    return _alone(args, named) and len(args) == 3 and not named and _beyond(args[1:], args[0].ndim)


def _permuted(args: Arguments, named: Named) -> bool:
    dims = list(_parts(args[1:]))
    return _alone(args, named) and not named and dims[:1] == [0] and _beyond(dims[1:], args[0].ndim)


def _multiplied(args: Arguments, named: Named) -> bool:
    """Multiply matrices: record by record, or by one that belongs to none; never along the records."""
    if named or len(args) != 2:
        return False
    left, right = args
    if isinstance(left, Rows) and isinstance(right, Rows):
        return left.ndim == right.ndim >= 3
    if isinstance(left, Rows):
        return left.ndim >= 2 and isinstance(right, Tensor) and right.ndim <= left.ndim
    return isinstance(left, Tensor) and right.ndim >= 3 and left.ndim <= right.ndim


def _mapped(args: Arguments, named: Named) -> bool:
    """Multiply each row by a matrix that belongs to no record."""
    return isinstance(args[0], Rows) and args[0].ndim >= 2 and len([*_rows(args, named)]) == 1


def _rows(args: Arguments, named: Named) -> Iterator[Rows]:
    return (one for one in _tensors(args, named) if isinstance(one, Rows))


def _attended(args: Arguments, named: Named) -> bool:
    tensors = _tensors(args, named)
    return all(isinstance(one, Rows) and one.ndim >= 3 and one.ndim == args[0].ndim for one in tensors)


def _padded(args: Arguments, named: Named) -> bool:
    pad = args[1] if len(args) > 1 else named.get("pad")
    return _alone(args, named) and isinstance(pad, (tuple, list)) and len(pad) <= 2 * (args[0].ndim - 1)


def _picked(args: Arguments, named: Named) -> bool:
    """Pick places within each record, or one of several tensors."""
    what, places = args
    if isinstance(what, tuple):
        return isinstance(places, int)
    places = places if isinstance(places, tuple) else (places,)
    if not places or not isinstance(what, Rows) or any(isinstance(one, Rows) for one in _parts(places)):
        return False
    rest = [place for place in places[1:] if place is not None]
    if places[0] is Ellipsis:  # then a mask would be a condition on as many dimensions as it has
        plain = all(isinstance(one, (int, slice)) and not isinstance(one, bool) for one in rest)
        return plain and len(rest) < what.ndim
    return isinstance(places[0], slice) and places[0] == slice(None)


def _turned(args: Arguments, named: Named) -> bool:
    """Ask for a matrix the other way round, or for the first of what came out."""
    what, name = args[0], args[1]
    return (isinstance(what, Rows) and name == "mT" and what.ndim >= 3) or (
        isinstance(what, tuple) and name == "values"
    )


def counts(target: object, args: Arguments) -> bool:
    """Tell whether this asks how many records there are, or calculates with that."""
    return target == "size" or (target in _ON_NUMBERS and not _tensors(args, {}))


def rows_as(x: Tensor, shape: Sequence[int]) -> Tensor:
    """View the numbers of each record in another shape."""
    return x.reshape(len(x), *shape)


_BY_NUMBER = (
    "abs", "acos", "asin", "atan", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous",
    "cos", "cosh", "detach", "double", "elu", "erf", "exp", "expm1", "float", "floor", "gelu", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "int", "leaky_relu", "log", "log1p", "log2", "logit", "logsigmoid",
    "long", "mish", "neg", "reciprocal", "relu", "relu6", "round", "rrelu", "rsqrt", "selu", "sigmoid", "sign",
    "silu", "sin", "sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "tan", "tanh", "tanhshrink",
    "threshold", "to", "trunc", "type_as", "bool", "logical_not", "positive", "nan_to_num", "dropout", "dropout1d",
    "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    # In windows of the last dimensions, of which the records' is never one.
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "lp_pool1d", "lp_pool2d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
_IN_PAIRS = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "maximum", "minimum", "pow",
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "atan2", "hypot", "expand_as", "lerp",
    "addcmul", "addcdiv", "rsub",
)  # fmt: skip
_ALONG = {
    "softmax": 1, "log_softmax": 1, "softmin": 1, "mean": 1, "sum": 1, "prod": 1, "amax": 1, "amin": 1, "max": 1,
    "min": 1, "logsumexp": 1, "cumsum": 1, "cumprod": 1, "glu": 1, "argmax": 1, "norm": 2, "normalize": 2,
    "vector_norm": 2, "var": 1, "std": 1, "chunk": 2, "split": 2, "narrow": 1, "select": 1, "unbind": 1, "roll": 2,
}  # fmt: skip
_RULES: dict[str, Rule] = (
    dict.fromkeys(_BY_NUMBER, _alone)
    | dict.fromkeys(_IN_PAIRS, _paired)
    | {name: _along(position) for name, position in _ALONG.items()}
    | {"glu": _along(1, -1), "normalize": _along(2, 1)}
    | {"flip": _flipped, "stack": _stacked}
    | dict.fromkeys(("cat", "concat", "concatenate"), _joined)
    | dict.fromkeys(("transpose", "swapaxes", "swapdims"), _swapped)
    | {"permute": _permuted, "matmul": _multiplied, "bmm": _multiplied, "linear": _mapped, "pad": _padded}
    | {"scaled_dot_product_attention": _attended, "where": _chosen}
)
# Whatever they are asked for, they leave numbers in their order: rows that are as many hold the same records.
_RESHAPING = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")

METHODS: dict[object, Rule] = {name: rule for name, rule in _RULES.items() if hasattr(Tensor, name)}
FUNCTIONS: dict[object, Rule] = {
    getattr(home, name): rule
    for home in (torch, functional, torch.linalg)
    for name, rule in _RULES.items()
    if callable(getattr(home, name, None))
}
FUNCTIONS |= dict.fromkeys((operator.add, operator.sub, operator.mul, operator.truediv, operator.pow), _paired)
FUNCTIONS |= dict.fromkeys((operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge), _paired)
FUNCTIONS |= dict.fromkeys((operator.neg, operator.abs, operator.pos), _alone)
FUNCTIONS |= {operator.matmul: _multiplied, operator.getitem: _picked, getattr: _turned}
RESHAPING: frozenset[object] = frozenset(
    [*_RESHAPING, *(getattr(torch, name) for name in _RESHAPING if callable(getattr(torch, name, None)))]
)
_ON_NUMBERS: frozenset[object] = frozenset([
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.neg,
])  # fmt: skip


LayerRule = Callable[[Any, Rows], bool]


def _any(layer: nn.Module, rows: Rows) -> bool:
    return True


def _along_own(layer: Any, rows: Rows) -> bool:
    return _beyond(layer.dim, rows.ndim)


def _padding_own(layer: Any, rows: Rows) -> bool:
    return len(layer.padding) <= 2 * (rows.ndim - 1)


def _plain_pool(layer: Any, rows: Rows) -> bool:
    return not layer.return_indices


_PLAIN_LAYERS = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanhshrink, nn.LogSigmoid, nn.Threshold, nn.PReLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.AlphaDropout, nn.FeatureAlphaDropout, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.LayerNorm, nn.GroupNorm, nn.Linear, nn.Conv1d, nn.Conv2d,
)  # fmt: skip
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_ADAPTIVE_POOLS = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_PADS = (
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    nn.ReplicationPad1d, nn.ReplicationPad2d,
)  # fmt: skip
# Of layers with parameters these rules speak where nothing of them is trained.
LAYERS: dict[type[nn.Module], LayerRule] = {
    **dict.fromkeys(_PLAIN_LAYERS, _any),
    **dict.fromkeys((*_POOLS, *_ADAPTIVE_POOLS), _plain_pool),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU), _along_own),
    **dict.fromkeys(_PADS, _padding_own),
}
RESHAPING_LAYERS = (nn.Flatten, nn.Unflatten)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
