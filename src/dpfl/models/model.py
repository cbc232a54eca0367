"""A model as dpfl sees it: a flat vector of trainable parameters and the loss of a record under them.

Every room but this one speaks of `parameters`, one vector [d]. Buffers (positional encodings and the like) stay with
the module and are never uploaded; a module that learns statistics of other records' data into buffers is refused.

A module's code may do anything to what it is given and to itself. So it is never given records or parameters, but
copies of them, and it is never the module itself that runs, but a copy that shares nothing with it and is forgotten
after one call: what one record leaves behind, in numbers or in attributes, meets no other.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from dpfl.errors import BadInput
from dpfl.models.losses import Loss, fresh, without_strangers
from dpfl.models.mapping import mapped


class Model:
    """An `nn.Module` with its loss, addressed by a flat vector of parameters."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        *,
        classify: Callable[[Tensor], Tensor] | None = None,
        ridge: float = 0.0,
        name: str | None = None,
    ) -> None:
        """Wrap `module`.

        loss: maps (outputs [B, ...], targets [B]) to one value a record, or to their mean.
        classify: maps outputs to class labels; None for regression.
        ridge: κ of a penalty κ/2·‖w‖² that is part of every record's loss, and so is clipped with it.
        name: what the config calls it; the module's class when left out.
        """
        self.name = name or type(module).__name__
        _refuse_shared_statistics(module)
        self.module, self.loss, self.classify, self.ridge = module, loss, classify, ridge
        self._read: dict[object, Callable[..., dict[str, Tensor]] | None] = {}
        self._shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        if not self._shapes:
            raise BadInput("model must have trainable parameters, had none; set requires_grad on those to train")
        _refuse_half_precision(module)
        self.dim = sum(shape.numel() for shape in self._shapes.values())

    def vector(self) -> Tensor:
        """Return a copy of the module's trainable parameters as one vector [d]."""
        return torch.cat([p.detach().flatten() for p in self.module.parameters() if p.requires_grad])

    def load(self, vector: Tensor) -> None:
        """Write the vector [d] into the module."""
        with torch.no_grad():
            for name, value in self.split(vector).items():
                self.module.get_parameter(name).copy_(value)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """View the vector [d] as the module's named parameters, or vectors [k, d] as k sets of them."""
        pieces = torch.split(vector, [shape.numel() for shape in self._shapes.values()], dim=-1)
        named = zip(self._shapes.items(), pieces, strict=True)
        return {name: piece.view(*vector.shape[:-1], *shape) for (name, shape), piece in named}

    def fresh(self) -> nn.Module:
        """Return a copy of the module that shares nothing with it, not even what is frozen.

        Activations that it kept from earlier calls cannot be copied, and are left out.
        """
        kept = (value for layer in self.module.modules() for value in vars(layer).values() if isinstance(value, Tensor))
        memo: dict[int, object] = {id(value): None for value in kept if not value.is_leaf}
        try:
            made = copy.deepcopy(self.module, memo)
            _refuse_originals(self.module, made)
        except Exception as problem:  # whatever it holds
            raise BadInput(
                "model must be a module that can be copied, so that nothing of one record is left to meet the next, but"
                f" {type(self.module).__name__} cannot ({problem}); keep locks, files and threads out of it"
            ) from None
        return made

    def outputs(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """Run the module under copies of the given named parameters on a batch [B, ...]."""
        result: Tensor = functional_call(self.fresh(), _copies(parameters), (x.clone(),))
        return result

    def mean_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, the penalty included."""
        return self.objective(parameters, self.outputs(parameters, x), y)

    def objective(self, parameters: dict[str, Tensor], outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss for outputs that are already computed."""
        return self._with_penalty(parameters, fresh(self.loss)(outputs, y.clone()).mean())

    def _with_penalty(self, parameters: dict[str, Tensor], value: Tensor) -> Tensor:
        if self.ridge:
            value = value + self.ridge / 2 * sum((p.square().sum() for p in parameters.values()), torch.zeros(()))
        return value

    def check(self, x: Tensor, y: Tensor) -> None:
        """Refuse a module or loss that cannot take these records [B, ...], before anything is spent on them."""
        x, y = x[:2], y[:2]
        parameters = self.split(self.vector())
        buffers, tried = dict(self.module.named_buffers()), self.fresh().train()
        try:
            self.objective(parameters, functional_call(tried, _copies(parameters), (x.clone(),)), y)
            changed = [name for name, buffer in tried.named_buffers() if not torch.equal(buffer, buffers[name])]
            self.module.eval()
            together = self.mean_loss(parameters, x, y)
            alone = torch.stack([self.mean_loss(parameters, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]).mean()
        except (RuntimeError, TypeError, ValueError, IndexError) as problem:
            raise BadInput(
                f"model must take records of shape {list(x.shape[1:])}, but {type(self.module).__name__} failed:"
                f" {str(problem).splitlines()[0]}; choose a model that fits the data"
            ) from None
        if changed:
            raise BadInput(
                f"model must forget the records it has seen, but its buffer {changed[0]!r} changes with them, past any"
                " clip and noise; remove it, or keep it as it is while training"
            )
        if not torch.isfinite(alone):
            raise BadInput(
                f"loss must be finite on the first records, was {alone.item()}; check its scale and the labels"
            )
        if not torch.allclose(together, alone, rtol=1e-3, atol=1e-6):
            raise BadInput(
                f"loss must be a mean over records or one value each, but two records cost {together.item():.4g}"
                f" together and {alone.item():.4g} on average alone; use reduction='mean' or 'none', match the shapes"
                " of outputs and targets, and do not mix records in the model"
            )

    def vectorises(self, x: Tensor, y: Tensor) -> bool:
        """Tell whether per-record gradients can be computed for many records at once (`mapping`)."""
        self.module.train()
        try:
            self._at_once(self.vector(), x[:2], y[:2])
        except Exception:  # control flow on values, unknown operations: then one record after the other
            return False
        return True

    def record_gradients(self, vector: Tensor, x: Tensor, y: Tensor, *, vectorised: bool) -> list[Tensor]:
        """Return the gradient of each record's loss as blocks [B, d_k] that lie side by side in [B, d].

        One of a record that cannot be computed is zero, and that of no other changes with it. Blocks are left apart
        because joining them would copy the largest tensor of the whole round.
        """
        self.fresh()  # or say, before anything is tried, that it cannot be copied
        if vectorised:
            return self._at_once_or_in_pieces(vector, x, y)
        return [torch.cat([self._alone(vector, x[i : i + 1], y[i : i + 1]) for i in range(len(x))])]

    def _at_once(self, vector: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        """Map the gradient of one record over all, where that is known to keep to one."""
        gradients = self._mapped(vector, x, y)(self.split(vector), x, y)
        return [gradients[name].flatten(1) for name in self._shapes]

    def _mapped(self, vector: Tensor, x: Tensor, y: Tensor) -> Callable[..., dict[str, Tensor]]:
        """Return the gradients of records, read once for their shape; raise where they cannot be mapped."""
        module = self.fresh()
        what = (module.training, *((str(one.device), one.dtype, one.shape[1:]) for one in (vector[None], x, y)))
        if what not in self._read:
            loss = fresh(self.loss)

            def record_loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
                outputs = functional_call(module, _copies(parameters), (x[None].clone(),))
                shown = without_strangers(self.loss, outputs, y[None].clone())
                return self._with_penalty(parameters, loss(*shown).mean())

            examples = self.split(vector), x.new_zeros(x.shape[1:]), y.new_zeros(y.shape[1:])
            self._read[what] = mapped(grad(record_loss), (None, 0, 0), *examples)
        found = self._read[what]
        if found is None:
            raise RuntimeError("what the model does is not known to keep to one record")
        return found

    def _at_once_or_in_pieces(self, vector: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        """Halve the records until those that cannot be computed at once are alone."""
        try:
            return self._at_once(vector, x, y)
        except Exception:  # what the module's code makes of a private value
            if len(x) == 1:
                sizes = [shape.numel() for shape in self._shapes.values()]
                return list(torch.split(self._alone(vector, x, y), sizes, dim=1))
            middle = len(x) // 2
            halves = [self._at_once_or_in_pieces(vector, x[some], y[some]) for some in _halves(middle)]
            return [torch.cat(blocks) for blocks in zip(*halves, strict=True)]

    def _alone(self, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient [1, d] of one record, or zero where there is none."""
        try:
            return self.gradient(vector, x, y)[None]
        except Exception:  # as above
            return torch.zeros_like(vector)[None]

    def gradient(self, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the batch's mean loss, [d]."""
        leaves = {name: p.detach().requires_grad_() for name, p in self.split(vector).items()}
        pieces = torch.autograd.grad(
            self.mean_loss(leaves, x, y), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        return torch.cat([piece.flatten() for piece in pieces])


def _copies(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a module may write into: some layers change their weights as they look at a record."""
    return {name: parameter.clone() for name, parameter in parameters.items()}


def _refuse_originals(module: nn.Module, made: nn.Module) -> None:
    """Refuse a copy that is in part the module itself, as a `__deepcopy__` of its own may return it."""
    originals = {id(part) for part in _parts(module)}
    memories = {part.untyped_storage().data_ptr() for part in _parts(module) if isinstance(part, Tensor)} - {0}
    for part in _parts(made):
        same = isinstance(part, Tensor) and part.untyped_storage().data_ptr() in memories
        if id(part) in originals or same:
            raise ValueError(f"its copy shares a {type(part).__name__} with it")


def _parts(module: nn.Module) -> Iterator[object]:
    """Go through what a module can write into: layers, parameters, buffers, and what else says how it is copied."""
    yield from module.modules()
    yield from module.parameters()
    yield from module.buffers()
    for layer in module.modules():
        held = (value for value in vars(layer).values() if hasattr(type(value), "__deepcopy__"))
        yield from (value for value in held if not (isinstance(value, Tensor) and not value.is_leaf))


def _halves(middle: int) -> tuple[slice, slice]:
    return slice(None, middle), slice(middle, None)


def _refuse_half_precision(module: nn.Module) -> None:
    """Refuse parameters of few bits: rounding moves them by more than one record may."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise BadInput(
                f"model must have parameters of type float32 or float64, but {name!r} is {parameter.dtype}: rounding"
                " would move it by more than a record may; convert it with module.float()"
            )


def _refuse_shared_statistics(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if batch_norm or getattr(layer, "track_running_stats", False):
            layer_name = repr(name) if name else "itself"
            raise BadInput(
                f"model must not mix records, but layer {layer_name} is a {type(layer).__name__}, whose statistics"
                " carry every record of the batch past any clip; use nn.GroupNorm (or nn.LayerNorm) in its place"
            )
