"""A model as its layers: one backward pass gives the clipped sum of its records' gradients, for one client or many.

The graph that was read of the module (`graph`) runs over the records of k clients one after the other, but its layers
(`layers`) take the parameters that are handed in and note what went through them. Differentiating the loss by the
layers' *outputs* gives δ of every record, and never the gradient of a batch that nobody asked for. Norms come from δ
and what was noted, then each client's clipped sum: about the price of plain training.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.func import grad_and_value
from torch.nn import functional

from dpfl.gradients.clipping import scales_of, sum_of_clipped
from dpfl.gradients.graph import NotLayered, own_name, read_graph
from dpfl.gradients.layers import Kind, Pass, kind_of, known_rows
from dpfl.gradients.pooling import pool_well
from dpfl.gradients.record_gradients import Formed, Products, RecordGradients
from dpfl.models import Model
from dpfl.models.losses import Loss, fresh, keeps_apart, without_strangers
from dpfl.models.mapping import mapped
from dpfl.orders import Norm, RecordClip


@dataclass(frozen=True)
class _Seen:
    """What went through a layer."""

    name: str
    layer: nn.Module
    kind: Kind
    kept: Tensor
    outputs: Tensor
    of_records: bool  # whether it sees the numbers of the records themselves


class Layered:
    """The graph of a model, whose layers' parameters come from outside. Each thread needs one of its own."""

    def __init__(self, model: Model, x: Tensor) -> None:
        """Read the graph for records of the shape of these; raise NotLayered where it is not known.

        Whether it computes what the model does is told by `read_layers` below.
        """
        self.model = model
        _require_known_owners(model.module)
        self._graph = read_graph(model.fresh(), x)  # as it was read; what runs is a copy
        self.random = False  # whether layers draw random numbers, as dropout does
        self._passed = self._formed = 0  # numbers that go through all layers for a record, and that measuring forms
        self._begin()
        if self.owned() != {name for name, p in model.module.named_parameters() if p.requires_grad}:
            raise NotLayered(f"a layer of {model.name} is never used, or shares its parameters")

    def _begin(self) -> None:
        self.module: fx.GraphModule = copy.deepcopy(self._graph)
        self._parameters: dict[str, Tensor] = {}
        self._slopes: dict[
            object, Callable[..., tuple[Tensor, Tensor]] | None
        ] = {}  # of losses, by what they are given
        self._seen: list[_Seen] = []
        self._records: Tensor | None = None  # what ran through last
        self._recall: dict[str, dict[str, Tensor]] = {}  # what layers that see them made of them
        self._pass = Pass(apart=False, measured=False, forgiving=False, recall=None)
        self.layers = {own_name(name): layer for name, layer in _trained_layers(self.module)}
        for name, layer in self.layers.items():
            layer.forward = partial(self._run, name, layer)
        for layer in self.module.modules():
            if type(layer) is nn.Embedding and "forward" not in vars(layer):
                setattr(layer, "forward", partial(self._look_up, layer))  # noqa: B010 (mypy takes it for a method)
        pool_well(self.module)
        self.module.train()

    def another(self) -> "Layered":
        """Return one for another thread, of the same graph."""
        other = copy.copy(self)
        other._begin()
        return other

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
        self._records, self._recall, self._seen = None, {}, []

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
        forgiving: bool = True,
        lengths: list[Tensor] | None = None,
    ) -> Tensor:
        """Return Σ_r counts[r]·(clipped) gradient of record r for each client, [clients, d].

        parameters: [d], the model of all clients, or [clients, d], one for each.
        x, y: R records [R, ...], R/clients of each client.
        counts: [R], how much each record counts: zero for one that only fills a gap. None where all count once.
        bound: the clip norm of each record [R] and the norm it is meant in; None to clip nothing.
        powers: return Σ|x| or Σx² of each record in that norm [R], where they are known.
        careful: leave out gradients that are not finite, or those of gaps where none are clipped, and clip in double
            precision what single precision cannot. Else one of either kind makes the sum not finite.
        forgiving: whether a record that cannot be computed has a gradient that is no number, and is no error.
        lengths: where the norms of the records before the clip [R] are put, for who wants to know them.
        """
        counts = None if counts is None else counts.to(parameters.dtype)
        # What is not clipped record by record is the derivative of one number: the losses, as they count.
        weighed = bound is None and not careful and not self.model.ridge
        gradients = self.gradients(
            parameters, x, y, counts if weighed else None,
            powers=powers, apart=bound is not None or clients > 1, measured=bound is not None, forgiving=forgiving,
        )  # fmt: skip
        if bound is not None:
            total, found = self._clipped(gradients, parameters, x, counts, bound, clients, careful)
            if lengths is not None:
                lengths.append(found)
            return total
        if weighed:
            counts = None
        elif counts is not None:  # a gap's gradient may be anything, and zero times that no zero
            gradients = {name: part.without(counts == 0) for name, part in gradients.items()}
        return self._weighted(gradients, parameters, counts, clients)

    def _clipped(
        self,
        gradients: dict[str, RecordGradients],
        parameters: Tensor,
        x: Tensor,
        counts: Tensor | None,
        bound: tuple[Tensor, Norm],
        clients: int,
        careful: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of clipped gradients, and how long these were.

        With care, all that can be scaled is, as without, and the others apart: so what one record needs changes no bit
        of what others contribute.
        """
        dtype, (clip_norms, norm), room = parameters.dtype, bound, _room(parameters.dtype, x)
        lengths = _lengths(gradients, norm)
        scales = _scales(lengths, clip_norms, room, torch.finfo(dtype).max ** 0.45)
        if not careful:
            return self._weighted(gradients, parameters, _times(scales.to(dtype), counts), clients), lengths
        broken = torch.isnan(scales)
        told = {name: part.without(broken) for name, part in gradients.items()}
        total = self._weighted(told, parameters, _times(scales.masked_fill(broken, 0).to(dtype), counts), clients)
        rest = {name: part.without(~broken).doubled() for name, part in gradients.items()}
        others = _lengths(rest, norm)
        scales = _scales(others, clip_norms, room, torch.finfo(torch.float64).max ** 0.45)
        hopeless = torch.isnan(scales)
        rest = {name: part.without(hopeless) for name, part in rest.items()}
        scales = scales.masked_fill(hopeless | ~broken, 0)
        total = (total.double() + self._weighted(rest, parameters, _times(scales, counts), clients)).to(dtype)
        return total, torch.where(broken, others.masked_fill(hopeless, torch.nan), lengths)

    def _weighted(
        self, gradients: dict[str, RecordGradients], parameters: Tensor, counts: Tensor | None, clients: int
    ) -> Tensor:
        """Return each client's sum of its records' gradients as they count, [clients, d]."""
        total: dict[str, Tensor] = {}
        for name, part in gradients.items():
            total |= {_named(name, key): value for key, value in part.weighted_sum(counts, clients).items()}
        ordered = [total[name].reshape(clients, -1) for name in self.model.split(parameters)]
        return torch.cat(ordered, dim=1)

    def record_lengths(self, parameters: Tensor, x: Tensor, y: Tensor, norm: Norm) -> Tensor:
        """Return the norm of each record's gradient [R], before any clip."""
        return _lengths(self.gradients(parameters, x, y, doubled=True), norm)

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
        forgiving: bool = True,
        doubled: bool = False,
    ) -> dict[str, RecordGradients]:
        """Run and differentiate: the gradients of the records in each layer, or what they count for.

        doubled: whether they are formed, measured and summed in double precision.
        """
        seen = self.run(parameters, x, y, counts, apart=apart, measured=measured, forgiving=forgiving)
        with torch.no_grad():
            parts = {
                one.name: one.kind.gradients(
                    one.layer, one.kept.detach(), delta, biased=_named(one.name, "bias") in self._parameters
                )
                for one, delta in seen
            }
            if doubled:
                parts = {name: part.doubled() for name, part in parts.items()}
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
        forgiving: bool = True,
    ) -> list[tuple[_Seen, Tensor]]:
        """Return what went through each layer, with the derivatives of the records' losses by its outputs.

        counts: [R], what each loss is multiplied by.
        """
        self._parameters, self._seen = self.model.split(parameters.detach()), []
        self._pass = Pass(apart, measured, forgiving, None)
        if x is not self._records:
            self._records, self._recall = x, {}
        with torch.enable_grad():
            # Row r of a derivative by a layer's outputs is record r's own: records do not mix.
            losses = self.losses(self.module.forward(x), y, forgiving=forgiving)
            total = losses.sum() if counts is None else losses @ counts.to(losses.dtype)
        deltas = torch.autograd.grad(
            total, [one.outputs for one in self._seen], allow_unused=True, materialize_grads=True
        )
        seen, self._seen = list(zip(self._seen, deltas, strict=True)), []
        return seen

    def losses(self, outputs: Tensor, y: Tensor, *, forgiving: bool = False) -> Tensor:
        """Return one value a record; a loss that is not known to keep records apart is shown each by itself."""
        loss = self.model.loss
        if forgiving:
            outputs, y = without_strangers(loss, outputs, y)
        if keeps_apart(loss, outputs, y):
            return loss(outputs, y)
        return self._losses_alone(outputs.clone(), y.clone(), forgiving)

    def _losses_alone(self, outputs: Tensor, y: Tensor, forgiving: bool) -> Tensor:
        """Show the loss each record by itself; one that fails on a record alone has a loss that is no number.

        Its derivatives are taken there too: what it does without one is no business of a graph that it is not in.
        """
        here = outputs.detach()
        slopes, values = self._slopes_at_once(here, y) or self._slopes_one_by_one(here, y, forgiving)
        # Of the same value, and of the same slope at every output.
        return values + ((outputs - here) * slopes).reshape(len(y), -1).sum(dim=1)

    def _slopes_at_once(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Map the loss of one record over all, where it is known to keep to one; None where it is not, or fails."""
        what = (outputs.device, outputs.dtype, outputs.shape[1:], y.dtype, y.shape[1:])
        if what not in self._slopes:
            example = outputs.new_zeros(outputs.shape[1:]), y.new_zeros(y.shape[1:])
            self._slopes[what] = mapped(grad_and_value(_of_one(self.model.loss)), (0, 0), *example)
        read = self._slopes[what]
        try:
            found: tuple[Tensor, Tensor] | None = None if read is None else read(outputs, y)
        except Exception:  # whatever comes of a private value
            return None
        return found

    def _slopes_one_by_one(self, outputs: Tensor, y: Tensor, forgiving: bool) -> tuple[Tensor, Tensor]:
        slopes, values = [], []
        for one, its in zip(outputs, y, strict=True):
            try:
                slope, value = grad_and_value(_of_one(self.model.loss))(one.clone(), its.clone())
            except Exception:  # whatever its code makes of a private value
                if not forgiving:
                    raise
                slope, value = torch.full_like(one, torch.nan), one.new_full((), torch.nan)
            slopes.append(slope)
            values.append(value)
        return torch.stack(slopes), torch.stack(values)

    def _run(self, name: str, layer: nn.Module, x: Tensor) -> Tensor:
        """Run a layer under the parameters that were handed in."""
        kind = kind_of(layer)
        assert kind is not None
        parts = {part: self._parameters[_named(name, part)] for part, _ in layer.named_parameters()}
        recall = self._recall.setdefault(name, {}) if x is self._records else None
        of_records = _are_the_same(x, self._records)
        kept, outputs = kind.run(layer, x, parts, self._pass._replace(recall=recall))
        if not outputs.requires_grad:
            outputs.requires_grad_()
        self._seen.append(_Seen(name, layer, kind, kept, outputs, of_records))
        return outputs

    def _look_up(self, layer: nn.Embedding, x: Tensor) -> Tensor:
        """Run a table that is not trained."""
        if not self._pass.forgiving:
            return functional.embedding(x, layer.weight)
        indices, absent = known_rows(x, len(layer.weight))
        return functional.embedding(indices, layer.weight).masked_fill(absent, torch.nan)

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


def _of_one(loss: Loss) -> Loss:
    """Return the loss of one record, which remembers none that it has seen."""
    alone = fresh(loss)
    return lambda outputs, y: alone(outputs[None].clone(), y[None].clone()).mean()


def layered(model: Model, x: Tensor, y: Tensor) -> Layered | None:
    """Return the model as its layers, if it can be trained so; else None."""
    try:
        return read_layers(model, x, y)
    except NotLayered:
        return None


def read_layers(model: Model, x: Tensor, y: Tensor) -> Layered:
    """Return the model as its layers; raise NotLayered if it cannot be trained so.

    That records stay apart is known from the graph. Whether sums by its layers are those that the module and its loss
    would give, record by record, is tried with a few public or made-up records: a matter of arithmetic and of code that
    behaves otherwise while it is read, and not of privacy.
    """
    x, y = x[:4], y[:4]
    read = Layered(model, x)
    here = model.vector()
    wave = torch.arange(len(here), dtype=here.dtype, device=here.device)
    here = here + 0.1 * torch.cos(wave)  # away from the start: a layer of zeros would hide what happens before it
    there = here + 0.01 * torch.sin(wave)
    try:
        read.module.train()
        before = _random_states(x.device)
        seen = read.run(here, x, y, forgiving=False)
        read.random = not all(map(torch.equal, before, _random_states(x.device)))
        read.measure(seen)
        model.module.train()
        for layer in (*read.module.modules(), *model.module.modules()):
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.eval()  # all else is compared as it is in training
        agree = _agrees(read, [here], x, y) and (len(x) < 2 or _agrees(read, [here, there], x, y))
    except Exception as problem:  # whatever the loss, or the module itself, makes of these
        raise NotLayered(f"{model.name} cannot be run layer by layer") from problem
    read.module.train()
    if not agree:
        raise NotLayered(f"sums of gradients by the layers of {model.name} are not those of its records")
    read.forget()
    return read


def _require_known_owners(module: nn.Module) -> None:
    """Refuse trained parameters that belong to no known layer, or to several."""
    known = {_named(name, part) for name, layer in _trained_layers(module) for part, _ in layer.named_parameters()}
    names = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    owners = {type(module.get_submodule(name.rpartition(".")[0])).__name__ for name in names - known}
    if owners:
        verb = "is" if len(owners) == 1 else "are"
        raise NotLayered(f"{' and '.join(sorted(owners))} {verb} not among the layers that are known")


def _random_states(device: torch.device) -> list[Tensor]:
    """Return where torch's own generators stand: layers that draw move them."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _agrees(read: Layered, models: list[Tensor], x: Tensor, y: Tensor) -> bool:
    """Tell whether sums over clients with these models are those of their records taken one by one."""
    size = len(x) // len(models)
    shares = [slice(size * i, size * (i + 1)) for i in range(len(models))]
    alone = [
        torch.stack([read.model.gradient(model, x[i : i + 1], y[i : i + 1]) for i in range(share.start, share.stop)])
        for model, share in zip(models, shares, strict=True)
    ]
    middle = torch.cat([gradients.norm(dim=1) for gradients in alone]).median().item() or 1.0
    rows = size * len(models)
    counts, norms = models[0].new_ones(rows), torch.full((rows,), middle, device=models[0].device)
    parameters = models[0] if len(models) == 1 else torch.stack(models)
    for bound in (None, (norms, 1), (norms, 2)):
        ours = read.sums(parameters, x[:rows], y[:rows], counts, bound, len(models))
        theirs = torch.stack([
            gradients.sum(dim=0) if bound is None else sum_of_clipped([gradients], middle, bound[1])
            for gradients in alone
        ])  # fmt: skip
        scale = theirs.abs().amax().item() if bound is None else middle
        if not torch.allclose(ours.double(), theirs.double(), rtol=1e-3, atol=1e-5 * scale):
            return False
    return True


def sum_of_clipped_layered(read: Layered, parameters: Tensor, x: Tensor, y: Tensor, bound: RecordClip) -> Tensor:
    """Clip the gradient of each record [B, ...] and return the sum [d]."""
    counts = torch.ones(len(x), dtype=parameters.dtype, device=parameters.device)
    norms = torch.full((len(x),), bound.clip_norm, dtype=torch.float64, device=parameters.device)
    return read.sums(parameters, x, y, counts, (norms, bound.norm), 1, careful=True)[0].to(parameters.dtype)


def _lengths(gradients: dict[str, RecordGradients], norm: Norm) -> Tensor:
    """Return the norm of each record's gradient over all layers [R], in double precision."""
    total = torch.stack([powers for part in gradients.values() for powers in part.powers(norm)])
    summed = total.double().sum(dim=0)
    return summed if norm == 1 else summed.sqrt()


def _times(scales: Tensor, counts: Tensor | None) -> Tensor:
    return scales if counts is None else scales * counts


def _scales(lengths: Tensor, clip_norms: Tensor, room: float, far: float) -> Tensor:
    """Return what the gradients of records are multiplied by [R], in double precision; NaN where that is not known.

    room: how much longer than it was measured a gradient may be when it has been scaled and summed.
    far: lengths from here on, or bounds from its reciprocal down, are so far from each other and from one that scales,
        or what is scaled, would lose their last bits.
    """
    unknown = ~(lengths < far) | (clip_norms < 1 / far)
    return scales_of(lengths, clip_norms / (1 + room)).masked_fill(unknown, torch.nan)


def _room(dtype: torch.dtype, x: Tensor) -> float:
    """Return by what share a clipped gradient may exceed its bound by rounding, for which scales leave room.

    In units u of half a last bit: a sum of squares errs by 70 at most (`record_gradients`), and a norm, its root, by
    35; where two are multiplied, by 70, or in L1 by at most 110. A scale, a scaled derivative and a product add three.
    So 128 u, 2⁻¹⁷ in single precision, hold for every kind of layer.

    In TF32 a product takes 11 significant bits of either factor, so that each is off by at most 2⁻¹¹ of itself, and the
    product by (1 + 2⁻¹¹)² − 1 < 1.001·2⁻¹⁰. Norms are no products. A gradient that was formed as a product, by whatever
    kernel, is measured as it came out, so that only the product with its scale is rounded so; one that is not formed is
    the product of two vectors that were measured as they are, one of them scaled. Either way it happens once.
    """
    tf32 = x.is_cuda and dtype == torch.float32 and _multiplies_in_tf32()
    return 64 * torch.finfo(dtype).eps + (1.01 * 2.0**-10 if tf32 else 0)


def _multiplies_in_tf32() -> bool:
    return bool(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)


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
