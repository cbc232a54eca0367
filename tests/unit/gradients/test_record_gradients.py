"""Norms and weighted sums of records' gradients, against gradients that are formed."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpfl.gradients.record_gradients import (
    Formed,
    Lookups,
    Products,
    RecordGradients,
    powers,
    silenced,
    sum_rows,
    weigh,
)
from dpfl.orders import Norm
from grids import each


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


# Powers.


def test_powers_by_hand() -> None:
    rows = torch.tensor([[3.0, -4.0], [0.0, 0.5], [0.0, 0.0]])
    for same in (rows, rows.double()):
        assert powers(same, 1).tolist() == [7.0, 0.5, 0.0]
        assert powers(same, 2).tolist() == pytest.approx([25.0, 0.25, 0.0], abs=1e-30)
        assert powers(same, 2).dtype == same.dtype


WIDTHS = [10, 100, 784, 1000, 1023, 1024, 1025, 1500, 2048, 3072, 10_000, 10_240, 65_536, 100_000, 102_400]


@each("norm", [1, 2])
@each("width", WIDTHS)
def test_equal_numbers_are_added_well_enough_in_single_precision(width: int, norm: Norm) -> None:
    # Equal numbers are the worst case of a sum that adds one after the other: every addition errs to the same side. A
    # norm that is too short makes the clip as much too generous, so it must not be short by more than 5e-6.
    for size in (0.1, 0.3, 0.7, 0.9, 1.1, 3.3):
        rows = torch.full((3, width), size)
        true = width * float(rows[0, 0].double() ** norm)
        for found in (powers(rows, norm), powers(rows.double(), norm)):
            assert found.min().item() >= true * (1 - 5e-6 * norm)
            assert found.max().item() <= true * (1 + 5e-6 * norm)
        assert powers(rows.double(), norm).tolist() == pytest.approx([true] * 3, rel=1e-12)


@pytest.mark.parametrize("width", [2048, 4096])
def test_rows_that_do_not_lie_side_by_side_are_added_as_well(width: int) -> None:
    rows = random(width, 3).float().T  # not contiguous
    torch.testing.assert_close(powers(rows, 2).double(), powers(rows.double(), 2), rtol=5e-6, atol=0.0)
    every_other = random(3, 2 * width).float()[:, ::2]
    expected = powers(every_other.double(), 2)
    torch.testing.assert_close(powers(every_other, 2).double(), expected, rtol=5e-6, atol=0.0)


def test_a_square_that_cannot_be_held_is_not_taken_for_a_norm() -> None:
    rows = torch.tensor([[1e30, 1e30], [math.inf, 0.0], [math.nan, 1.0], [1e11, 0.0], [1.0, 1.0]])
    exact, found = powers(rows.double(), 2), powers(rows, 2).double()
    assert exact[[0, 3, 4]].tolist() == pytest.approx([2e60, 1e22, 2.0])
    assert torch.isfinite(found)[[0, 1, 2, 4]].tolist() == [False, False, False, True]
    near = torch.isfinite(found)  # a merely large one may be told or not, but not wrongly
    torch.testing.assert_close(found[near], exact[near], rtol=1e-5, atol=0.0)


def test_a_tiny_square_is_never_shorter_than_it_is() -> None:
    rows = torch.tensor([[1e-18], [1e-22], [1e-25], [1e-38], [0.0]])
    exact = powers(rows.double(), 2)
    assert exact[:2].tolist() == pytest.approx([1e-36, 1e-44], rel=1e-5)
    found = powers(rows, 2)
    assert (found >= exact).all()
    assert (found <= exact + 1.01e-35).all()


# The kinds.


def linear(positions: int, *, biased: bool = True) -> Products:
    return Products(random(6, positions, 4), random(6, positions, 3), biased=biased)


def table() -> Lookups:
    indices = torch.tensor([[0, 0, 1], [2, 2, 2], [4, 3, 2], [1, 1, 0], [0, 0, 0], [3, 4, 3]])
    return Lookups(indices, random(6, 3, 2), 5)


def few() -> Formed:
    return Formed({"weight": random(6, 2, 3), "bias": random(6, 2)})


KINDS: dict[str, Callable[[], RecordGradients]] = {
    "one position": lambda: linear(1),
    "several positions": lambda: linear(5),
    "one position, no bias": lambda: linear(1, biased=False),
    "several positions, no bias": lambda: linear(5, biased=False),
    "table": table,
    "formed": few,
}


def total(powers: list[Tensor]) -> Tensor:
    return torch.stack(powers).sum(dim=0)


def flat(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts.values()], dim=1)


def test_products_form_outer_products_by_hand() -> None:
    # δ = (1, −2) at a = (3, 4), and δ = (0, 1) at a = (1, 0): the weights' gradient is (3, 4; −6 + 1, −8).
    one = Products(torch.tensor([[[3.0, 4.0], [1.0, 0.0]]]), torch.tensor([[[1.0, -2.0], [0.0, 1.0]]]), biased=True)
    assert one.form()["weight"].tolist() == [[[3.0, 4.0], [-5.0, -8.0]]]
    assert one.form()["bias"].tolist() == [[1.0, -1.0]]
    assert "bias" not in Products(one.inputs, one.deltas, biased=False).form()


def test_lookups_form_tables_by_hand() -> None:
    one = Lookups(torch.tensor([[1, 0, 1]]), torch.tensor([[[3.0], [5.0], [1.0]]]), 3)
    assert one.form()["weight"].tolist() == [[[5.0], [4.0], [0.0]]]
    assert total(one.powers(1)).tolist() == [9.0]  # 5 + |3 + 1|, not 5 + 3 + 1 counted twice over
    assert total(one.powers(2)).tolist() == [41.0]


@each("name", KINDS)
@each("norm", [1, 2])
def test_powers_are_those_of_the_formed_gradients(name: str, norm: Norm) -> None:
    one = KINDS[name]()
    expected = flat(one.form()).abs().pow(norm).sum(dim=1)
    torch.testing.assert_close(total(one.powers(norm)), expected, rtol=1e-12, atol=1e-30)


@each("norm", [1, 2])
@each("biased", [True, False])
def test_a_product_of_tiny_numbers_is_never_shorter_than_it_is(norm: Norm, biased: bool) -> None:
    sizes = torch.tensor([1e-8, 1e-12, 1e-18, 1e-25, 1e-30, 1e-40])
    inputs, deltas = torch.cartesian_prod(sizes, sizes).T[:, :, None, None]
    one = Products(inputs, deltas, biased=biased)
    exact, found = (total(some.powers(norm)).double() for some in (one.doubled(), one))
    assert (found >= exact * (1 - 1e-6)).all()
    assert (found <= exact * (1 + 1e-6) + 1e-34).all()


@each("name", KINDS)
@each("clients", [1, 2, 3, 6])
@each("measured", [True, False])
@each("weighted", [True, False])
def test_weighted_sums_are_those_of_the_formed_gradients(
    name: str, clients: int, measured: bool, weighted: bool
) -> None:
    one = KINDS[name]()
    weights = torch.linspace(-1, 2, 6, dtype=torch.float64) if weighted else None
    if measured:
        one.powers(2)
    for part, gradient in one.form().items():
        scaled = gradient if weights is None else gradient * weights.view(-1, *[1] * (gradient.ndim - 1))
        expected = scaled.reshape(clients, -1, *gradient.shape[1:]).sum(dim=1)
        torch.testing.assert_close(one.weighted_sum(weights, clients)[part], expected, rtol=1e-12, atol=1e-12)


@each("name", KINDS)
@each("broken", [math.nan, math.inf])
def test_rows_without_are_zero_whatever_they_were(name: str, broken: float) -> None:
    one = KINDS[name]()
    whole = {part: value.clone() for part, value in one.form().items()}
    held = [one.inputs, one.deltas] if isinstance(one, Products) else [one.deltas] if isinstance(one, Lookups) else []
    for value in [*held, *(one.gradients.values() if isinstance(one, Formed) else [])]:
        value[2], value[5] = broken, broken
    one.powers(2)  # what was formed to be measured must be forgotten
    rest = one.without(torch.tensor([False, False, True, False, False, True]))
    for part, value in rest.form().items():
        assert value[[2, 5]].abs().sum() == 0
        torch.testing.assert_close(value[[0, 1, 3, 4]], whole[part][[0, 1, 3, 4]])
    assert total(rest.powers(1))[[2, 5]].tolist() == pytest.approx([0.0, 0.0], abs=1e-299)
    for part, added in rest.weighted_sum(torch.ones(6, dtype=torch.float64), 1).items():
        torch.testing.assert_close(added[0], whole[part][[0, 1, 3, 4]].sum(dim=0))


# Parts.


def test_weigh_multiplies_rows() -> None:
    rows = torch.ones(2, 2, 1)
    assert weigh(rows, torch.tensor([2.0, 3.0])).tolist() == [[[2.0], [2.0]], [[3.0], [3.0]]]
    assert weigh(rows, None) is rows


def test_sum_rows_keeps_clients_apart() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert sum_rows(rows, None, 2).tolist() == [[3.0], [12.0]]
    assert sum_rows(rows, torch.tensor([1.0, 0.0, 2.0, 1.0]), 2).tolist() == [[1.0], [16.0]]


def test_silenced_rows_are_zero_although_they_were_not_finite() -> None:
    rows = torch.tensor([[math.nan, 1.0], [2.0, math.inf]])
    assert silenced(rows, torch.tensor([True, False])).tolist() == [[0.0, 0.0], [2.0, math.inf]]
    assert math.isnan(rows[0, 0])  # the input is not changed
