"""A model as its layers: one backward pass gives the clipped sum of its records' gradients, for one client or many.

The module runs as it is, over the records of k clients one after the other, but its layers (`layers`) take the
parameters that are handed in and note what went through them. Differentiating the loss by the layers' *outputs* gives
δ of every record, and never the gradient of a batch that nobody asked for. Norms come from δ and what was noted, then
each client's clipped sum: about the price of plain training.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap

from dpfl.errors import BadInput
from dpfl.gradients.clipping import sum_of_clipped
from dpfl.gradients.layers import Kind, Pass, kind_of
from dpfl.gradients.pooling import pool_well
from dpfl.gradients.record_gradients import Formed, Products, RecordGradients
from dpfl.models import Model
from dpfl.orders import Norm, RecordClip


@dataclass(frozen=True)
class _Seen:
    """What went through a layer."""

    name: str
    layer: nn.Module
    kind: Kind
    kept: Tensor
    outputs: Tensor
    version: int  # of the outputs as the layer made them: it grows when they are changed in place
    of_records: bool  # whether it sees the numbers of the records themselves


class Layered:
    """A copy of the model's module whose layers' parameters come from outside. Each thread needs one of its own."""

    def __init__(self, model: Model) -> None:
        """Make the copy; `layered` below tells whether it may be trusted."""
        self.model = model
        self.module = _copy(model.module)
        self._parameters: dict[str, Tensor] = {}
        self._seen: list[_Seen] = []
        self._records: Tensor | None = None  # what ran through last
        self._recall: dict[str, dict[str, Tensor]] = {}  # what layers that see them made of them
        self._apart = self._measured = False  # what will be asked for: `layers.Pass`
        self._mean = False  # whether the loss gives only the mean of a batch
        self.random = False  # whether layers draw random numbers, as dropout does
        self._passed = self._formed = 0  # numbers that go through all layers for a record, and that measuring forms
        self.layers = dict(_trained_layers(self.module))
        for name, layer in self.layers.items():
            layer.forward = partial(self._run, name, layer)
            for parameter in layer.parameters():
                parameter.data.fill_(torch.nan)  # whoever used it past the layer would be found out
        for layer in self.module.modules():
            if isinstance(getattr(layer, "inplace", None), bool):
                setattr(layer, "inplace", False)  # noqa: B010 (what a layer put out must stay as it was)
        pool_well(self.module)
        self.module.train()

    def measure(self, seen: list[tuple[_Seen, Tensor]]) -> None:
        """Note how much memory a record takes: what is kept and put out, with what follows it and its derivative."""
        rows = len(seen[0][1])
        self._passed = sum(one.kept.numel() + 3 * one.outputs.numel() for one, _ in seen) // rows
        self._formed = sum(one.kind.formed(one.layer, one.kept) for one, _ in seen)
        if self.model.ridge:
            self._passed += self.model.dim

    def owned(self) -> set[str]:
        """Return the names of the parameters whose gradients are known."""
        return {_named(name, part) for name, layer in self.layers.items() for part, _ in layer.named_parameters()}

    def forget(self) -> None:
        """Let go of the records that ran through last."""
        self._records, self._recall = None, {}

    def footprint(self, *, formed: bool) -> int:
        """Return about how many numbers are held for each record, or also formed when its gradient is measured."""
        return self._passed + self._formed * formed

    def sums(
        self,
        parameters: Tensor,
        x: Tensor,
        y: Tensor,
        counts: Tensor | None,
        bound: tuple[Tensor, Norm] | None,
        clients: int,
        *,
        powers: Callable[[], Tensor] | None = None,
        careful: bool = False,
    ) -> Tensor:
        """Return Σ_r counts[r]·(clipped) gradient of record r for each client, [clients, d].

        parameters: [d], the model of all clients, or [clients, d], one for each.
        x, y: R records [R, ...], R/clients of each client.
        counts: [R], how much each record counts: zero for one that only fills a gap. None where all count once.
        bound: the clip norm of each record [R] and the norm it is meant in; None to clip nothing.
        powers: return Σ|x| or Σx² of each record in that norm [R], where they are known.
        careful: leave out gradients that are not finite, or those of gaps where none are clipped. Else one of them
            makes the sum not finite.
        """
        counts = None if counts is None else counts.to(parameters.dtype)
        # What is not clipped record by record is the derivative of one number: the losses, as they count.
        weighed = bound is None and not careful and not self.model.ridge
        gradients = self.gradients(
            parameters, x, y, counts if weighed else None,
            powers=powers, apart=bound is not None or clients > 1, measured=bound is not None,
        )  # fmt: skip
        if weighed:
            counts = None
        elif bound is None and counts is not None:  # a gap's gradient may be anything, and zero times that no zero
            gradients = {name: part.without(counts == 0) for name, part in gradients.items()}
        if bound is not None:
            clip_norms, norm = bound
            lengths = _lengths(gradients, norm, exact=careful)
            if careful:
                broken = ~torch.isfinite(lengths)
                gradients = {name: part.without(broken) for name, part in gradients.items()}
                lengths = lengths.masked_fill(broken, 0)
            scales = (clip_norms / lengths).clamp(max=1)  # NaN stays NaN
            if not careful:  # what could not be measured shall not pass for nothing: zero times infinity is NaN
                scales = scales + 0 * lengths
            scales = scales.to(parameters.dtype)
            counts = scales if counts is None else scales * counts
        total: dict[str, Tensor] = {}
        for name, part in gradients.items():
            total |= {_named(name, key): value for key, value in part.weighted_sum(counts, clients).items()}
        ordered = [total[name].reshape(clients, -1) for name in self.model.split(parameters)]
        return torch.cat(ordered, dim=1)

    def record_lengths(self, parameters: Tensor, x: Tensor, y: Tensor, norm: Norm) -> Tensor:
        """Return the norm of each record's gradient [R], before any clip."""
        return _lengths(self.gradients(parameters, x, y), norm, exact=True)

    def gradients(
        self,
        parameters: Tensor,
        x: Tensor,
        y: Tensor,
        counts: Tensor | None = None,
        *,
        powers: Callable[[], Tensor] | None = None,
        apart: bool = True,
        measured: bool = True,
    ) -> dict[str, RecordGradients]:
        """Run and differentiate: the gradients of the records in each layer, or what they count for."""
        seen = self.run(parameters, x, y, counts, apart=apart, measured=measured)
        with torch.no_grad():
            parts = {
                one.name: one.kind.gradients(
                    one.layer, one.kept.detach(), delta, biased=_named(one.name, "bias") in self._parameters
                )
                for one, delta in seen
            }
            for one, _ in seen:
                part = parts[one.name]
                if powers is not None and one.of_records and isinstance(part, Products) and part.inputs.shape[1] == 1:
                    part.input_powers = powers()
            return self._with_ridge(parts, parameters, len(x)) if self.model.ridge else parts

    def run(
        self,
        parameters: Tensor,
        x: Tensor,
        y: Tensor,
        counts: Tensor | None = None,
        *,
        apart: bool = True,
        measured: bool = True,
    ) -> list[tuple[_Seen, Tensor]]:
        """Return what went through each layer, with the derivatives of the records' losses by its outputs.

        counts: [R], what each loss is multiplied by.
        """
        self._parameters, self._seen = self.model.split(parameters.detach()), []
        self._apart, self._measured = apart, measured
        if x is not self._records:
            self._records, self._recall = x, {}
        with torch.enable_grad():
            # Row r of a derivative by a layer's outputs is record r's own: records do not mix.
            losses = self.losses(self.module(x), y)
            total = losses.sum() if counts is None else losses @ counts.to(losses.dtype)
        deltas = torch.autograd.grad(
            total, [one.outputs for one in self._seen], allow_unused=True, materialize_grads=True
        )
        seen, self._seen = list(zip(self._seen, deltas, strict=True)), []
        return seen

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return one value a record; a loss that gives a mean is asked for each record alone."""
        if not self._mean:
            losses = self.model.loss(outputs, y)
            if losses.ndim:
                return losses
            self._mean = True
        alone: Tensor = vmap(self.model.loss)(outputs[:, None], y[:, None])
        return alone

    def _run(self, name: str, layer: nn.Module, x: Tensor) -> Tensor:
        """Run a layer under the parameters that were handed in."""
        kind = kind_of(layer)
        assert kind is not None
        parts = {part: self._parameters[_named(name, part)] for part, _ in layer.named_parameters()}
        recall = self._recall.setdefault(name, {}) if x is self._records else None
        of_records = _are_the_same(x, self._records)
        kept, outputs = kind.run(layer, x, parts, Pass(self._apart, self._measured, recall))
        if not outputs.requires_grad:
            outputs.requires_grad_()
        self._seen.append(_Seen(name, layer, kind, kept, outputs, outputs._version, of_records))
        return outputs

    def _with_ridge(
        self, parts: dict[str, RecordGradients], parameters: Tensor, records: int
    ) -> dict[str, RecordGradients]:
        """Add the penalty's gradient κ·w to every record's, which must be formed for that."""
        split = self.model.split(parameters.expand(records, -1) if parameters.ndim == 1 else
                                 parameters.repeat_interleave(records // len(parameters), dim=0))  # fmt: skip
        return {
            name: Formed({key: g + self.model.ridge * split[_named(name, key)] for key, g in part.form().items()})
            for name, part in parts.items()
        }


class NotLayered(Exception):
    """Why a model cannot be trained by its layers, in words."""


def layered(model: Model, x: Tensor, y: Tensor) -> Layered | None:
    """Return the model as its layers, if a few public records show that it can be trained so; else None."""
    try:
        return read_layers(model, x, y)
    except NotLayered:
        return None


def read_layers(model: Model, x: Tensor, y: Tensor) -> Layered:
    """Return the model as its layers, if a few public records show that it can be trained so; raise NotLayered if not.

    That every parameter is that of a known layer is not enough: one may be used elsewhere too, a layer's output be
    changed in place, or a row be less than a record. So each layer must be used once, for one row a record that stays
    as it is; and clipped sums must be those of records taken one by one, under one model and under two at once.
    Whatever else a module does, the answer is no.
    """
    x, y = x[:8], y[:8]
    try:
        copied = Layered(model)
    except Exception as problem:  # what a module holds may be of any kind, and refuse to be copied in any way
        raise NotLayered(f"{model.name} cannot be copied") from problem
    names = {name for name, p in model.module.named_parameters(remove_duplicate=False) if p.requires_grad}
    if copied.owned() != names:
        raise NotLayered(f"{_owners(model.module, names - copied.owned())} not among the layers that are known")
    if len(x) < 2:
        raise NotLayered("there are fewer than two public records to try its layers with")
    here = model.vector()
    wave = torch.arange(len(here), dtype=here.dtype, device=here.device)
    here = here + 0.1 * torch.cos(wave)  # away from the start: a layer of zeros would hide what happens before it
    there = here + 0.01 * torch.sin(wave)
    try:
        copied.module.train()
        before = _random_states(x.device)
        seen = copied.run(here, x, y)
        copied.random = not all(map(torch.equal, before, _random_states(x.device)))
        rows = {(len(one.kept), len(one.outputs), one.outputs._version - one.version) for one, _ in seen}
        if sorted(one.name for one, _ in seen) != sorted(copied.layers) or rows != {(len(x), len(x), 0)}:
            raise NotLayered(f"a layer of {model.name} does not see each record once, as one row")
        copied.measure(seen)
        model.module.train()
        for layer in (*copied.module.modules(), *model.module.modules()):
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.eval()  # all else is compared as it is in training
        agree = _agrees(copied, [here], x, y) and _agrees(copied, [here, there], x, y)
    except (RuntimeError, IndexError, KeyError, ValueError, TypeError, AttributeError, BadInput) as problem:
        raise NotLayered(f"{model.name} cannot be run layer by layer") from problem
    copied.module.train()
    if not agree:
        raise NotLayered(f"sums of gradients by the layers of {model.name} are not those of its records")
    return copied


def _owners(module: nn.Module, names: set[str]) -> str:
    """Name the layers that own these parameters: "LSTM and Bilinear are"."""
    owners = {type(module.get_submodule(name.rpartition(".")[0])).__name__ for name in names}
    return f"{' and '.join(sorted(owners))} {'is' if len(owners) == 1 else 'are'}" if owners else "some parameter is"


def _random_states(device: torch.device) -> list[Tensor]:
    """Return where torch's own generators stand: layers that draw move them."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _copy(module: nn.Module) -> nn.Module:
    """Copy a module without the activations that it may have kept, which cannot be copied."""
    kept = [value for layer in module.modules() for value in vars(layer).values() if isinstance(value, Tensor)]
    return copy.deepcopy(module, {id(value): None for value in kept if not value.is_leaf})


def _agrees(copied: Layered, models: list[Tensor], x: Tensor, y: Tensor) -> bool:
    """Tell whether sums over clients with these models are those of their records taken one by one."""
    size = len(x) // len(models)
    shares = [slice(size * i, size * (i + 1)) for i in range(len(models))]
    alone = [
        torch.stack([copied.model.gradient(model, x[i : i + 1], y[i : i + 1]) for i in range(share.start, share.stop)])
        for model, share in zip(models, shares, strict=True)
    ]
    middle = torch.cat([gradients.norm(dim=1) for gradients in alone]).median().item() or 1.0
    rows = size * len(models)
    counts, norms = models[0].new_ones(rows), torch.full((rows,), middle, device=models[0].device)
    parameters = models[0] if len(models) == 1 else torch.stack(models)
    for bound in (None, (norms, 1), (norms, 2)):
        ours = copied.sums(parameters, x[:rows], y[:rows], counts, bound, len(models))
        theirs = torch.stack([
            gradients.sum(dim=0) if bound is None else sum_of_clipped([gradients], middle, bound[1])
            for gradients in alone
        ])  # fmt: skip
        scale = theirs.abs().amax().item() if bound is None else middle
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * scale):
            return False
    return True


def sum_of_clipped_layered(copied: Layered, parameters: Tensor, x: Tensor, y: Tensor, bound: RecordClip) -> Tensor:
    """Clip the gradient of each record [B, ...] and return the sum [d]."""
    counts = torch.ones(len(x), dtype=parameters.dtype, device=parameters.device)
    norms = torch.full((len(x),), bound.clip_norm, dtype=torch.float64, device=parameters.device)
    return copied.sums(parameters, x, y, counts, (norms, bound.norm), 1, careful=True)[0]


def _lengths(gradients: dict[str, RecordGradients], norm: Norm, *, exact: bool) -> Tensor:
    """Return the norm of each record's gradient over all layers [R], in double precision."""
    total = torch.stack([powers for part in gradients.values() for powers in part.powers(norm, exact=exact)])
    summed = total.double().sum(dim=0)
    return summed if norm == 1 else summed.sqrt()


def _trained_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the layers of known kinds that are trained, whole; what is frozen stays in the module."""
    for name, layer in module.named_modules():
        parts = [p.requires_grad for p in layer.parameters(recurse=False)]
        if kind_of(layer) is not None and parts and all(parts):
            yield name, layer


def _are_the_same(x: Tensor, records: Tensor | None) -> bool:
    """Tell whether these are the records as they lie in memory, in whatever shape."""
    if records is None or len(x) != len(records) or not (x.is_contiguous() and records.is_contiguous()):
        return False
    return x.numel() == records.numel() and x.data_ptr() == records.data_ptr() and x.dtype == records.dtype


def _named(layer: str, part: str) -> str:
    """Return what the module calls a layer's parameter; a module that is itself a layer calls it by its part alone."""
    return f"{layer}.{part}" if layer else part
