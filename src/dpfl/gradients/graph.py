"""The graph of a model: what it does to a batch, operation by operation, read before any private record is touched.

That records do not mix cannot be tried out: a module may mix only what nobody tries it with. So a module is traced, and
its graph taken if it consists of operations alone that are known to keep records apart (`operations`), layers that are
trained are used once each, and batches of two sizes come out of every operation as so many rows of one shape. From then
on the graph runs and the module's own code does not: what was read is what sees the records.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module

from dpfl.gradients.layers import KINDS, kind_of
from dpfl.gradients.operations import (
    CONTAINERS,
    FUNCTIONS,
    LAYERS,
    METHODS,
    RESHAPING,
    RESHAPING_LAYERS,
    Rows,
    counts,
    rows_as,
)

_BATCHES = (2, 3)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (Tensor, nn.Parameter)
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


class NotLayered(Exception):
    """Why a model cannot be trained by its layers, in words."""


def read_graph(module: nn.Module, x: Tensor) -> fx.GraphModule:
    """Return what a module does to records of the shape and type of these; raise NotLayered where it is not known.

    The module must be a copy that nobody else has; it becomes the only one in a sequence, "0".
    """
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        raise NotLayered("hooks on all of torch's modules see every layer")
    root = nn.Sequential(module).train()
    check = _Check(root, x)
    for layer in root.modules():
        if isinstance(getattr(layer, "inplace", None), bool):
            setattr(layer, "inplace", False)  # noqa: B010 (what a layer put out must stay as it was)
    try:
        graph = _Reader(check).trace(root)
        check.all_of(graph)
    except NotLayered:
        raise
    except Exception as problem:  # whatever a module does while its code runs with nothing in hand
        said = str(problem).splitlines()[:1] or [type(problem).__name__]
        raise NotLayered(f"the code of {type(module).__name__} cannot be read as a graph ({said[0]})") from problem
    read = fx.GraphModule(root, graph)
    _pool_first(read)
    read.recompile()
    return read


def own_name(target: str) -> str:
    """Return what the module itself calls a layer of its graph."""
    return target.partition(".")[2]


class _Reader(fx.Tracer):
    """A tracer that looks into every module but torch's own layers, and knows the shapes of records on its way."""

    def __init__(self, check: "_Check") -> None:
        super().__init__()
        self.check = check

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Let parameters stand for themselves where a layer is run to find a shape."""
        return attr_val if self.check.runs else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for a tensor while the module's code runs."""
        return _Shaped(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Stop at torch's layers, known or not, that run as torch wrote them."""
        own = type(m).__module__.startswith("torch.nn.modules") and not isinstance(m, CONTAINERS)
        return own and type(m).__call__ is nn.Module.__call__


class _Shaped(fx.Proxy):
    """What stands for a tensor: all that is the same for every batch is told, and how many records there are is not."""

    tracer: _Reader

    @property
    def shape(self) -> Any:
        """Return the lengths of all dimensions, of which the first is to be asked for when the graph runs."""
        value = self._value()
        if self.node not in self.tracer.check.carries:
            return value.shape
        return (self.tracer.create_proxy("call_method", "size", (self, 0), {}), *value.shape[1:])

    @property
    def ndim(self) -> int:
        """Return the number of dimensions."""
        return len(self._value().shape)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type."""
        return self._value().dtype

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return self._value().device

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the length of one dimension, or of all."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        """Refuse: Python takes nothing but a number here."""
        raise NotLayered("len() of records is a number of its own for every batch; ask for shape[0]")

    def _value(self) -> Tensor:
        value = self.tracer.check.value_of(self.node)
        if not isinstance(value, Tensor):
            raise NotLayered(f"{self.node.target} is asked for the shape of what is no tensor")
        return value


def _is_tampered_with(layer: nn.Module) -> bool:
    """Tell whether a layer has hooks, code of its own in place of its class's, or tensors that bring some."""
    hooked = any(getattr(layer, name) for name in _HOOKS) or any(map(callable, vars(layer).values()))
    return hooked or any(type(one) not in _PLAIN for one in (*layer.parameters(), *layer.buffers()))


class _Other:
    """A number that depends on the size of the batch, where a rule is asked."""


class _Check:
    """One walk through a graph, as far as it is known, with batches of two sizes."""

    def __init__(self, root: nn.Module, x: Tensor) -> None:
        self.root = root
        self.shape = x.shape[1:]
        self.batches = tuple(x.new_zeros(size, *self.shape) for size in _BATCHES)
        self.values: dict[fx.Node, tuple[Any, ...]] = {}
        self.carries: set[fx.Node] = set()  # nodes in whose tensors each row is a record's
        self.used: list[nn.Module] = []
        self.runs = False

    def all_of(self, graph: fx.Graph) -> None:
        """Check every node, and write numbers and shapes into the graph that were worked out from the batch."""
        nodes = list(graph.nodes)
        for node in nodes:
            self.visit(node)
        for node in reversed(nodes):
            if not node.users and (self._is_number(node) or node.op == "get_attr"):
                graph.erase_node(node)

    def value_of(self, node: fx.Node) -> object:
        """Return what a node gives for the smaller batch; all before it must be known."""
        if node.op == "get_attr":  # whose shape may be asked for, whatever it is
            return self._attribute(node)
        for one in node.graph.nodes:
            self.visit(one)
        return self.values[node][0]

    @torch.no_grad()
    def visit(self, node: fx.Node) -> None:
        """Check one node, once."""
        if node in self.values:
            return
        if node.op == "placeholder":
            self.values[node] = self.batches
            self.carries.add(node)
        elif node.op == "output":
            self._require(node.args[0] in self.carries, "what comes out is not one tensor of a row a record")
        elif node.op != "get_attr":
            self._call(node)
        elif node.users:
            value = self._attribute(node)
            name = own_name(str(node.target))
            self._require(type(value) in _PLAIN, f"{name} is a {type(value).__name__}, which may be any code")
            self._require(not value.requires_grad, f"{name} is trained, and used outside of a layer")  # type: ignore[attr-defined]
            self.values[node] = (value,) * len(_BATCHES)

    def _attribute(self, node: fx.Node) -> object:
        value: object = self.root
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value

    def _call(self, node: fx.Node) -> None:
        self._settle(node)
        if self._counts(node):
            self.values[node] = self._results(node)
            return
        carried = any(one in self.carries for one in node.all_input_nodes)
        reshapes = self._reshapes(node)
        if not reshapes:
            known = self._is_known_layer(node) if node.op == "call_module" else self._is_known(node, carried)
            self._require(known, f"{self._title(node)} is not known to keep records apart as it is called")
        sized = not carried and any(map(self._is_number, node.all_input_nodes))
        self._require(not sized, f"{self._title(node)} makes a constant of the number of records")
        self.values[node] = self._results(node)
        if carried:
            self._require_rows(node)
            self.carries.add(node)
        if reshapes:
            self._keep_rows(node)

    def _counts(self, node: fx.Node) -> bool:
        """Tell whether a node is about lengths of dimensions; these are worked out now, and by nobody later."""
        if node.op == "call_module":
            return False
        return counts(node.target, self._shown(node.args))

    def _settle(self, node: fx.Node) -> None:
        """Write numbers into a call that are the same for every batch."""
        fixed = {
            one: self.values[one][0]
            for one in node.all_input_nodes
            if self._is_number(one) and len(set(self.values[one])) == 1
        }
        node.args = fx.map_arg(node.args, lambda one: fixed.get(one, one))
        node.kwargs = fx.map_arg(node.kwargs, lambda one: fixed.get(one, one))

    def _is_number(self, node: fx.Node) -> bool:
        return isinstance(self.values.get(node, (None,))[0], (int, float, torch.Size))

    def _reshapes(self, node: fx.Node) -> bool:
        what = type(self._layer(node)) if node.op == "call_module" else node.target
        if what not in RESHAPING and what not in RESHAPING_LAYERS:
            return False
        return bool(node.args) and node.args[0] in self.carries

    def _keep_rows(self, node: fx.Node) -> None:
        """Put in the place of a reshaping one that leaves every record its row, whatever the size of the batch."""
        shape, before = self.values[node][0].shape[1:], self.values[node.args[0]]  # type: ignore[index]
        self._require(before[0].dtype == self.values[node][0].dtype, f"{self._title(node)} changes the type")
        node.op, node.target = "call_function", rows_as
        node.args, node.kwargs = (node.args[0], tuple(shape)), {}

    def _is_known(self, node: fx.Node, carried: bool) -> bool:
        rule = (FUNCTIONS if node.op == "call_function" else METHODS).get(node.target)
        if rule is None or not carried:
            return rule is not None
        args, named = self._shown(node.args), self._shown(node.kwargs)
        if any(isinstance(self._show(one), _Other) for one in node.all_input_nodes):
            return False
        return rule(args, named)

    def _is_known_layer(self, node: fx.Node) -> bool:
        layer = self._layer(node)
        title = type(layer).__name__
        self._require(not _is_tampered_with(layer), f"{title} {own_name(str(node.target))!r} carries hooks or code")
        one = self._show(node.args[0]) if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(one, Rows):
            raise NotLayered(f"{title} is called with other things than one tensor of records")
        if type(layer) in KINDS and any(True for p in layer.parameters() if p.requires_grad):
            self._require(not any(layer is other for other in self.used), f"a {title} is used twice")
            self.used.append(layer)
            return kind_of(layer) is not None
        if type(layer) is nn.Embedding:
            return kind_of(layer) is not None
        rule = LAYERS.get(type(layer))
        return rule is not None and rule(layer, one)

    def _require_rows(self, node: fx.Node) -> None:
        """Require rows as many as records, each of one shape."""
        found = [value if isinstance(value, tuple) else (value,) for value in self.values[node]]
        for parts in zip(*found, strict=True):
            pairs = zip(parts, _BATCHES, strict=True)
            rows = all(isinstance(one, Tensor) and one.shape[:1] == (size,) for one, size in pairs)
            alike = rows and len({one.shape[1:] for one in parts}) == 1
            self._require(alike, f"{self._title(node)} does not keep one row for each record")

    def _layer(self, node: fx.Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))

    def _title(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return type(self._layer(node)).__name__
        return str(getattr(node.target, "__name__", node.target))

    def _results(self, node: fx.Node) -> tuple[Any, ...]:
        """Run a node that is known on either batch."""
        self.runs = True
        try:
            return tuple(self._run(node, place) for place in range(len(_BATCHES)))
        except Exception as problem:
            raise NotLayered(f"{self._title(node)} cannot be run on records of shape {[*self.shape]}") from problem
        finally:
            self.runs = False

    def _run(self, node: fx.Node, place: int) -> Any:
        args = fx.map_arg(node.args, lambda one: self.values[one][place])
        named = fx.map_arg(node.kwargs, lambda one: self.values[one][place])
        if node.op == "call_module":
            return self._layer(node).forward(*args, **named)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **named)
        target: Any = node.target
        return target(*args, **named)

    def _shown(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self._show)

    def _show(self, node: Any) -> Any:
        """Return a node as rules see it."""
        value = self.values[node][0]
        if node not in self.carries:
            return _Other() if self._is_number(node) else value
        return tuple(Rows(one.ndim) for one in value) if isinstance(value, tuple) else Rows(value.ndim)

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise NotLayered(otherwise)


def _pool_first(read: fx.GraphModule) -> None:
    """Pool before ReLU where that follows: the largest of some numbers, or zero, is zero or the largest of them.

    So are the derivatives, and there are fewer numbers.
    """
    graph = read.graph
    for pool in list(graph.nodes):
        plain = _layer_type(read, pool) in (nn.MaxPool1d, nn.MaxPool2d) or pool.target in _MAX_POOLS
        plain = plain and not pool.kwargs.get("return_indices")
        bent = pool.args[0] if plain and pool.args else None
        if not isinstance(bent, fx.Node) or len(bent.users) > 1 or not _is_relu(read, bent):
            continue
        pool.replace_input_with(bent, bent.args[0])
        with graph.inserting_after(pool):
            after = graph.call_function(torch.relu, (pool,))
        pool.replace_all_uses_with(after, delete_user_cb=lambda user, after=after: user is not after)
        graph.erase_node(bent)


_MAX_POOLS: tuple[Callable[..., Any], ...] = (
    torch.max_pool1d, torch.max_pool2d, nn.functional.max_pool1d, nn.functional.max_pool2d,
)  # fmt: skip
_RELUS: tuple[object, ...] = (torch.relu, nn.functional.relu, "relu")


def _is_relu(read: fx.GraphModule, node: fx.Node) -> bool:
    return _layer_type(read, node) is nn.ReLU or node.target in _RELUS


def _layer_type(read: fx.GraphModule, node: fx.Node) -> type[nn.Module] | None:
    return type(read.get_submodule(str(node.target))) if node.op == "call_module" else None
