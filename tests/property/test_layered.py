"""For any chain of known layers, batch and clip: one backward pass gives the sum of gradients clipped one by one."""

from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from dpfl.federation import Records
from dpfl.gradients.clipping import sum_of_clipped
from dpfl.gradients.layered import Layered, layered, sum_of_clipped_layered
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy
from dpfl.orders import RecordClip

unhurried = settings(deadline=None, max_examples=50, derandomize=True)  # a busy machine is no failure
norms = st.sampled_from([1, 2])
bounds = st.floats(1e-3, 1e3)
seeds = st.integers(0, 2**16)
any_floats = st.floats(width=32)  # NaN, infinities, and values whose squares overflow
FEATURES, CLASSES, ROUNDING = 4, 3, 1e-5

kinds = st.sampled_from(["linear", "linear", "convolution", "layer norm", "group norm"])
layers = st.tuples(kinds, st.integers(1, 6), st.booleans(), st.sampled_from([nn.ReLU, nn.Tanh, nn.Identity]))


@st.composite
def models(draw: Any) -> Any:
    """Return some layers of some kinds and widths, each with or without a bias."""
    module: list[nn.Module] = [nn.Flatten()]
    width = FEATURES
    with torch.random.fork_rng():
        torch.manual_seed(draw(seeds))
        for kind, wide, bias, activation in draw(st.lists(layers, max_size=3)):
            if kind == "linear":
                module += [nn.Linear(width, wide, bias=bias)]
                width = wide
            elif kind == "convolution":
                module += [nn.Unflatten(1, (1, width)), nn.Conv1d(1, 2, 3, padding=1, bias=bias), nn.Flatten()]
                width *= 2
            elif width > 1:  # a single number less its mean is rounding and nothing else
                module += [nn.GroupNorm(1, width) if kind == "group norm" else nn.LayerNorm(width, bias=bias)]
            module += [activation()]
        module.append(nn.Linear(width, CLASSES, bias=draw(st.booleans())))
    return Model(nn.Sequential(*module), cross_entropy, ridge=draw(st.sampled_from([0.0, 0.0, 0.1])))


def batches(entries: Any, min_size: Any = 1) -> Any:
    row = st.tuples(st.lists(entries, min_size=FEATURES, max_size=FEATURES), st.integers(0, CLASSES - 1))
    return st.lists(row, min_size=min_size, max_size=6).map(
        lambda rows: Records(torch.tensor([x for x, _ in rows]), torch.tensor([y for _, y in rows]))
    )


healthy = st.floats(-50, 50, width=32).map(lambda number: round(number, 3))  # 0, or not too small to be measured


def clipped(model: Any, batch: Any, clip: Any) -> Any:
    return sum_of_clipped_layered(Layered(model, batch.x), model.vector(), batch.x, batch.y, clip)


def quickly(model: Any, batch: Any, clip: Any) -> Any:
    clip_norms = torch.full((len(batch),), clip.clip_norm)
    return Layered(model, batch.x).sums(model.vector(), batch.x, batch.y, None, (clip_norms, clip.norm), 1)[0]


def one_by_one(model: Any, batch: Any) -> Any:
    return model.record_gradients(model.vector(), batch.x, batch.y, vectorised=False)[0]


def length(vector: Any, norm: Any) -> Any:
    return torch.linalg.vector_norm(vector.double(), ord=norm).item()


def sum_of_lengths(gradients: Any, bound: Any, norm: Any) -> Any:
    """Return what all records put into the sum, of which much may cancel."""
    return float(torch.linalg.vector_norm(gradients.double(), ord=norm, dim=1).clamp(max=bound).sum())


def in_double(model: Any, batch: Any) -> Any:
    """Normalising a flat record divides by almost nothing: in single precision no two ways would agree."""
    model.module.double()
    return Records(batch.x.double(), batch.y)


@unhurried
@given(model=models(), batch=batches(healthy), bound=bounds, norm=norms)
def test_the_sum_is_that_of_gradients_clipped_one_by_one(model: Any, batch: Any, bound: Any, norm: Any) -> None:
    batch = in_double(model, batch)
    alone = one_by_one(model, batch)
    expected, whole = sum_of_clipped([alone], bound, norm), sum_of_lengths(alone, bound, norm)
    for ours in (clipped, quickly):
        assert length(ours(model, batch, RecordClip(bound, norm)) - expected, 2) <= ROUNDING * whole + 1e-30


@unhurried
@given(model=models(), batch=batches(healthy, 2))
def test_every_such_model_is_known(model: Any, batch: Any) -> None:
    batch = in_double(model, batch)
    assume(torch.linalg.vector_norm(one_by_one(model, batch), dim=1).min() > 1e-2)  # of nothing, nothing can be told
    assert layered(model, batch.x, batch.y) is not None


@unhurried
@given(model=models(), batch=batches(any_floats), bound=bounds, norm=norms)
def test_whatever_comes_in_goes_out_finite_and_within_the_bound(model: Any, batch: Any, bound: Any, norm: Any) -> None:
    total = clipped(model, batch, RecordClip(bound, norm))
    assert torch.isfinite(total).all()
    assert length(total, norm) <= len(batch) * bound * (1 + ROUNDING)


@unhurried
@given(model=models(), batch=batches(any_floats), bound=bounds, norm=norms)
def test_in_haste_a_sum_is_within_the_bound_or_not_finite(model: Any, batch: Any, bound: Any, norm: Any) -> None:
    total = quickly(model, batch, RecordClip(bound, norm))
    assert not torch.isfinite(total).all() or length(total, norm) <= len(batch) * bound * (1 + ROUNDING)


@unhurried
@given(model=models(), batch=batches(any_floats, 2), bound=bounds, norm=norms, data=st.data())
def test_replacing_one_record_moves_the_sum_by_twice_the_clip_at_most(
    model: Any, batch: Any, bound: Any, norm: Any, data: Any
) -> None:
    i = data.draw(st.integers(0, len(batch) - 1))
    stranger = data.draw(batches(any_floats))
    x, y = batch.x.clone(), batch.y.clone()
    x[i], y[i] = stranger.x[0], stranger.y[0]
    clip = RecordClip(bound, norm)
    moved = clipped(model, Records(x, y), clip).double() - clipped(model, batch, clip).double()
    # The sum of the others is rounded with the record and without it.
    assert length(moved, norm) <= 2 * bound * (1 + ROUNDING) + len(batch) * bound * ROUNDING


@unhurried
@given(model=models(), batch=batches(healthy, 2), bound=bounds, norm=norms)
def test_a_record_counts_the_same_in_any_company(model: Any, batch: Any, bound: Any, norm: Any) -> None:
    batch = in_double(model, batch)
    clip = RecordClip(bound, norm)
    alone = [clipped(model, Records(batch.x[i : i + 1], batch.y[i : i + 1]), clip) for i in range(len(batch))]
    whole = sum_of_lengths(one_by_one(model, batch), bound, norm)
    assert length(clipped(model, batch, clip) - sum(alone), 2) <= ROUNDING * whole + 1e-30
