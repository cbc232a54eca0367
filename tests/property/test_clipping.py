"""For any vector, bound and norm: clipping never lengthens, keeps the direction and is done after one go."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpfl.gradients.clipping import clip, sum_of_clipped

unhurried = settings(deadline=None)  # a busy machine is no failure
norms = st.sampled_from([1, 2])
bounds = st.floats(1e-3, 1e4)
ROUNDING = 1e-5  # of float32


def vectors(entries: Any) -> Any:
    return st.lists(entries, min_size=1, max_size=6).map(torch.tensor)


healthy = vectors(st.floats(-1e6, 1e6, width=32))
any_floats = st.floats(width=32)  # NaN, infinities, and values whose squares overflow
matrices = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(any_floats, min_size=width, max_size=width), min_size=1, max_size=4)
)


def length(vector: Any, norm: Any) -> Any:
    return torch.linalg.vector_norm(vector.double(), ord=norm).item()


@unhurried
@given(vector=vectors(any_floats), bound=bounds, norm=norms)
def test_whatever_comes_in_goes_out_finite_and_within_the_bound(vector: Any, bound: Any, norm: Any) -> None:
    clipped = clip(vector, bound, norm)
    assert torch.isfinite(clipped).all()
    assert length(clipped, norm) <= bound * (1 + ROUNDING)


@unhurried
@given(matrix=matrices, bound=bounds, norm=norms, cut=st.integers(1, 4))
def test_a_sum_of_clipped_rows_is_as_long_as_its_rows_allow(matrix: Any, bound: Any, norm: Any, cut: Any) -> None:
    rows = torch.tensor(matrix)
    total = sum_of_clipped(list(torch.split(rows, cut, dim=1)), bound, norm)
    assert torch.isfinite(total).all()
    assert length(total, norm) <= len(rows) * bound * (1 + ROUNDING)


@unhurried
@given(vector=healthy, bound=bounds, norm=norms)
def test_no_vector_gets_longer(vector: Any, bound: Any, norm: Any) -> None:
    assert length(clip(vector, bound, norm), norm) <= length(vector, norm)


@unhurried
@given(vector=healthy, bound=bounds, norm=norms)
def test_all_entries_shrink_alike(vector: Any, bound: Any, norm: Any) -> None:
    scale = min(1.0, bound / max(length(vector, norm), bound))
    expected = (vector.double() * scale).tolist()
    assert clip(vector, bound, norm).double().tolist() == pytest.approx(expected, rel=ROUNDING, abs=1e-30)


@unhurried
@given(vector=healthy, bound=bounds, norm=norms)
def test_clipping_again_changes_nothing_but_rounding(vector: Any, bound: Any, norm: Any) -> None:
    once = clip(vector, bound, norm)
    torch.testing.assert_close(clip(once, bound, norm), once, rtol=ROUNDING, atol=1e-30)


@unhurried
@given(vector=healthy, factor=st.floats(1.5, 1e3), norm=norms)
def test_a_vector_beyond_the_bound_ends_on_it(vector: Any, factor: Any, norm: Any) -> None:
    assume(length(vector, norm) > 1e-3)
    bound = length(vector, norm) / factor
    assert length(clip(vector, bound, norm), norm) == pytest.approx(bound, rel=ROUNDING)
