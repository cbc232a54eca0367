"""Clipping by hand. Whatever comes in, broken values included, goes out finite and within the bound."""

import math

import pytest
import torch
from torch import Tensor

from dpfl.gradients.clipping import clip, sum_of_clipped
from grids import each

NAN, INF = math.nan, math.inf


def rows(*entries: tuple[float, ...]) -> Tensor:
    return torch.tensor(entries)


def test_l2_by_hand() -> None:
    assert clip(torch.tensor([3.0, 4.0]), 2.5, 2).tolist() == [1.5, 2.0]  # from length 5
    assert clip(torch.tensor([-6.0, 8.0]), 2.5, 2).tolist() == [-1.5, 2.0]  # from length 10
    assert clip(torch.tensor([0.75, 1.0]), 2.5, 2).tolist() == [0.75, 1.0]  # of length 1.25


def test_l1_by_hand() -> None:
    assert clip(torch.tensor([3.0, -5.0]), 2.0, 1).tolist() == [0.75, -1.25]  # from length 8
    assert clip(torch.tensor([1.0, 0.5]), 2.0, 1).tolist() == [1.0, 0.5]  # of length 1.5


def test_the_sum_of_clipped_rows_by_hand() -> None:
    # Lengths 5, 10 and 1.25 become 2.5, 2.5 and 1.25: (1.5, 2) + (−1.5, 2) + (0.75, 1).
    gradients = rows((3.0, 4.0), (-6.0, 8.0), (0.75, 1.0))
    assert sum_of_clipped([gradients], 2.5, 2).tolist() == pytest.approx([0.75, 5.0])
    # In L1 lengths 7, 14 and 1.75 become 3.5, 3.5 and 1.75: (1.5, 2) + (−1.5, 2) + (0.75, 1) again.
    assert sum_of_clipped([gradients], 3.5, 1).tolist() == pytest.approx([0.75, 5.0])


def test_a_row_is_measured_over_all_its_blocks() -> None:
    # The row (2, 1, 2) has length 3, although its blocks (2,) and (1, 2) are shorter than 2.5 each.
    blocks = [rows((2.0,)), rows((1.0, 2.0))]
    assert sum_of_clipped(blocks, 1.5, 2).tolist() == pytest.approx([1.0, 0.5, 1.0])
    assert sum_of_clipped(blocks, 2.5, 1).tolist() == pytest.approx([1.0, 0.5, 1.0])


@each("norm", [1, 2])
@each("cut", [(6,), (1, 5), (2, 3, 1), (1,) * 6])
def test_however_the_rows_are_cut_the_sum_is_that_of_rows_clipped_one_by_one(norm: int, cut: tuple[int, ...]) -> None:
    gradients = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([clip(row, 1.5, norm) for row in gradients]).sum(0)
    assert not torch.allclose(expected, gradients.sum(0))  # something was clipped
    blocks = list(torch.split(gradients, list(cut), dim=1))
    torch.testing.assert_close(sum_of_clipped(blocks, 1.5, norm), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm", [1, 2])
def test_zero_stays_zero(norm: int) -> None:
    assert clip(torch.zeros(3), 0.5, norm).tolist() == [0.0] * 3
    assert sum_of_clipped([torch.zeros(2, 3)], 0.5, norm).tolist() == [0.0] * 3


@each("norm", [1, 2])
@each("dtype", [torch.float32, torch.float64])
def test_a_shorter_vector_stays_as_it_is_to_the_last_bit(norm: int, dtype: torch.dtype) -> None:
    short = torch.linspace(-1, 1, 12, dtype=dtype) / 1000
    changed = [tenths / 10 for tenths in range(1, 500) if not torch.equal(clip(short, tenths / 10, norm), short)]
    assert changed == []


@pytest.mark.parametrize("norm", [1, 2])
def test_a_vector_on_the_bound_stays(norm: int) -> None:
    assert clip(torch.tensor([2.0, 0.0]), 2.0, norm).tolist() == [2.0, 0.0]


@each("norm", [1, 2])
@each("broken", [NAN, INF, -INF])
def test_a_row_with_a_broken_entry_counts_as_zero_and_its_neighbours_do_not(norm: int, broken: float) -> None:
    assert clip(torch.tensor([broken, 0.5]), 4.0, norm).tolist() == [0.0, 0.0]
    gradients = rows((0.25, 0.5), (broken, 0.5), (broken, broken), (1.0, 0.5))
    assert sum_of_clipped([gradients], 4.0, norm).tolist() == [1.25, 1.0]
    assert sum_of_clipped([gradients[:, :1], gradients[:, 1:]], 4.0, norm).tolist() == [1.25, 1.0]
    assert sum_of_clipped([gradients[1:3]], 4.0, norm).tolist() == [0.0, 0.0]  # nobody is left


@each("norm", [1, 2])
@each(
    ("size", "dtype"), [(1e30, torch.float32), (3e38, torch.float32), (1e200, torch.float64), (1.7e308, torch.float64)]
)
def test_a_row_whose_norm_overflows_ends_finite_and_within_the_bound(
    norm: int, size: float, dtype: torch.dtype
) -> None:
    huge = torch.full((1, 1000), size, dtype=dtype)
    for clipped in (clip(huge[0], 1.0, norm), sum_of_clipped([huge], 1.0, norm), sum_of_clipped([huge] * 2, 1.0, norm)):
        assert torch.isfinite(clipped).all()
        assert torch.linalg.vector_norm(clipped.double(), ord=norm).item() <= 1 + 1e-5


def test_the_input_is_not_changed() -> None:
    gradients = rows((3.0, 4.0), (INF, 0.0))
    before = gradients.clone()
    clip(gradients[0], 1.0, 2)
    sum_of_clipped([gradients], 1.0, 2)
    assert torch.equal(gradients, before)


@each("norm", [1, 2])
@each("width", [203_530, 1_000_000])
def test_a_long_vector_is_measured_well_enough_in_single_precision(norm: int, width: int) -> None:
    for size in (0.3, 0.7, 0.9):
        long = torch.full((width,), size)
        for clipped in (clip(long, 1.0, norm), sum_of_clipped([long[None]], 1.0, norm)):
            assert torch.linalg.vector_norm(clipped.double(), ord=norm).item() <= 1 + 1e-5
