"""Functions of one record, mapped over many: only where every operation is known to keep to its own record.

`torch.func.vmap` is not one record at a time: a lookup in a table that a record brought reads the next record's rows
where an index is too large, and an autograd function may bring code that is handed the whole batch. So a function is
read first, with a record that has a shape and no numbers, down to the operations that torch itself consists of. Code
that asks for a number cannot be read so. If all operations are known, what was read is mapped in the function's place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

_NAMES = """
    _prelu_kernel _prelu_kernel_backward _safe_softmax _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    _log_softmax _log_softmax_backward_data _softmax
    _softmax_backward_data _to_copy _unsafe_view addmm addmv alias amax amin arange argmax argmin avg_pool2d
    avg_pool2d_backward baddbmm bernoulli bmm cat clone constant_pad_nd convolution convolution_backward cumsum
    detach diagonal div dot embedding embedding_dense_backward empty empty_like expand flip full full_like
    gather linalg_vector_norm logsumexp max max_pool2d_with_indices max_pool2d_with_indices_backward mean min mm
    mv native_dropout native_dropout_backward native_group_norm native_group_norm_backward native_layer_norm
    native_layer_norm_backward new_empty new_full new_ones new_zeros nll_loss_backward nll_loss_forward ones
    ones_like permute prod repeat roll scalar_tensor scatter select select_backward slice slice_backward split
    split_with_sizes squeeze stack std sum t transpose tril triu unbind unsqueeze upsample_nearest2d var
    var_mean view zeros zeros_like
"""
_KNOWN = frozenset(_NAMES.split())


def mapped(function: Callable[..., Any], in_dims: tuple[int | None, ...], *examples: Any) -> Callable[..., Any] | None:
    """Return a function mapped over records, or None where it is not known to keep to one.

    in_dims: zero for what each record has its own of, and None for what all share.
    examples: arguments for one record, of which no number is looked at.
    """
    try:
        read = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    except Exception:  # whatever code makes of numbers that are not there
        return None
    shared = sum(len(example) for example, dim in zip(examples, in_dims, strict=True) if dim is None)
    if not _keeps_to_one(read, shared):
        return None
    return vmap(read, in_dims=in_dims, randomness="different")


def _keeps_to_one(read: fx.GraphModule, shared: int) -> bool:
    """Tell whether all operations are known, and none looks things up in what records have brought."""
    given = [node for node in read.graph.nodes if node.op == "placeholder"]
    carries = set(given[shared:])
    for node in read.graph.nodes:
        if any(one in carries for one in node.all_input_nodes):
            carries.add(node)
        if node.op == "get_attr" and type(getattr(read, str(node.target), None)) not in (Tensor, nn.Parameter):
            return False
        if node.op == "call_function" and not _is_known(node, carries):
            return False
        if node.op in ("call_module", "call_method"):
            return False
    return True


def _is_known(node: fx.Node, carries: set[fx.Node]) -> bool:
    what: Any = node.target
    if not isinstance(what, torch._ops.OpOverload):
        return getattr(what, "__name__", "") == "getitem" and isinstance(node.args[1], int)
    name = what._schema.name.removeprefix("aten::")
    if what.namespace != "aten":
        return False
    if what._schema.is_mutable:
        if not _is_own(node.args[0]):
            return False
        name = name.removesuffix("_")
    if name == "embedding" and node.args[0] in carries:
        return False
    return name in _KNOWN or torch.Tag.pointwise in what.tags


def _is_own(node: Any) -> bool:
    """Tell whether a tensor was made on the way, and is no view of what was there before."""
    while isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload):
        if not any(one.alias_info for one in node.target._schema.returns):
            return True
        node = node.args[0]
    return False
