"""For any chain of linear layers, batch and clip: outer products give the sum of gradients clipped one by one."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from dpfl.clients.dense import is_dense, sum_of_clipped_dense
from dpfl.clients.reference import _sum_of_clipped
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy
from dpfl.orders import RecordClip

unhurried = settings(deadline=None, max_examples=60, derandomize=True)  # a busy machine is no failure
norms = st.sampled_from([1, 2])
bounds = st.floats(1e-3, 1e3)
seeds = st.integers(0, 2**16)
any_floats = st.floats(width=32)  # NaN, infinities, and values whose squares overflow
FEATURES, CLASSES, ROUNDING = 4, 3, 1e-5

layers = st.tuples(st.integers(1, 6), st.booleans(), st.sampled_from([nn.ReLU, nn.Tanh, nn.Identity]))


@st.composite
def models(draw):
    """Return some layers of some widths, each with or without a bias."""
    module, width = [nn.Flatten()], FEATURES
    with torch.random.fork_rng():
        torch.manual_seed(draw(seeds))
        for wide, bias, activation in draw(st.lists(layers, max_size=3)):
            module += [nn.Linear(width, wide, bias=bias), activation()]
            width = wide
        module.append(nn.Linear(width, CLASSES, bias=draw(st.booleans())))
    return Model(nn.Sequential(*module), cross_entropy)


def batches(entries, min_size=1):
    row = st.tuples(st.lists(entries, min_size=FEATURES, max_size=FEATURES), st.integers(0, CLASSES - 1))
    return st.lists(row, min_size=min_size, max_size=6).map(
        lambda rows: Records(torch.tensor([x for x, _ in rows]), torch.tensor([y for _, y in rows]))
    )


healthy = st.floats(-50, 50, width=32).map(lambda number: round(number, 3))  # 0, or not too small to be measured


def dense(model, batch, clip):
    return sum_of_clipped_dense(model, model.weights(), batch.x, batch.y, clip)


def length(vector, norm):
    return torch.linalg.vector_norm(vector.double(), ord=norm).item()


@unhurried
@given(model=models(), batch=batches(healthy), bound=bounds, norm=norms)
def test_the_sum_is_that_of_gradients_clipped_one_by_one(model, batch, bound, norm):
    clip = RecordClip(bound, norm)
    expected = _sum_of_clipped(clip, model, model.weights(), batch, True)
    whole = sum_of_gradient_lengths(model, batch, bound, norm)  # of which much may cancel in the sum
    assert length(dense(model, batch, clip) - expected, 2) <= ROUNDING * whole + 1e-30


def sum_of_gradient_lengths(model, batch, bound, norm):
    blocks = model.record_gradients(model.weights(), batch.x, batch.y, vectorised=True)
    lengths = torch.linalg.vector_norm(torch.cat(blocks, dim=1).double(), ord=norm, dim=1)
    return float(lengths.clamp(max=bound).sum())


@unhurried
@given(model=models(), batch=batches(healthy, 2))
def test_every_such_model_is_dense(model, batch):
    gradients = torch.cat(model.record_gradients(model.weights(), batch.x, batch.y, vectorised=True), dim=1)
    assume(torch.linalg.vector_norm(gradients, dim=1).min() > 1e-2)  # of nothing, nothing can be told
    assert is_dense(model, batch.x, batch.y)


@unhurried
@given(model=models(), batch=batches(any_floats), bound=bounds, norm=norms)
def test_whatever_comes_in_goes_out_finite_and_within_the_bound(model, batch, bound, norm):
    total = dense(model, batch, RecordClip(bound, norm))
    assert torch.isfinite(total).all()
    assert length(total, norm) <= len(batch) * bound * (1 + ROUNDING)


@unhurried
@given(model=models(), batch=batches(any_floats, 2), bound=bounds, norm=norms, data=st.data())
def test_replacing_one_record_moves_the_sum_by_twice_the_clip_at_most(model, batch, bound, norm, data):
    i = data.draw(st.integers(0, len(batch) - 1))
    stranger = data.draw(batches(any_floats))
    x, y = batch.x.clone(), batch.y.clone()
    x[i], y[i] = stranger.x[0], stranger.y[0]
    clip = RecordClip(bound, norm)
    moved = dense(model, Records(x, y), clip).double() - dense(model, batch, clip).double()
    # The sum of the others is rounded with the record and without it.
    assert length(moved, norm) <= 2 * bound * (1 + ROUNDING) + len(batch) * bound * ROUNDING


@unhurried
@given(model=models(), batch=batches(healthy, 2), bound=bounds, norm=norms)
def test_a_record_counts_the_same_in_any_company(model, batch, bound, norm):
    clip = RecordClip(bound, norm)
    alone = [dense(model, Records(batch.x[i : i + 1], batch.y[i : i + 1]), clip) for i in range(len(batch))]
    whole = sum_of_gradient_lengths(model, batch, bound, norm)
    assert length(dense(model, batch, clip) - sum(alone), 2) <= ROUNDING * whole + 1e-30
