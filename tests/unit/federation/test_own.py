import traceback
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from dpfl.errors import BadInput
from dpfl.federation import federate, from_arrays, from_torch
from grids import each

X = np.arange(12.0).reshape(6, 2)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def test_whole_number_targets_are_classes_and_floats_are_for_regression() -> None:
    labelled, measured = from_arrays(X, LABELS), from_arrays(X, LABELS / 2)
    assert (labelled.classes, measured.classes) == (None, None)  # nobody knows yet which labels are public
    three = from_arrays(X, LABELS, test=(X, LABELS))
    shared, valued = (federate(data, clients=1, seed=0, validation_share=0.5) for data in (three, measured))
    assert (shared.classes, valued.classes) == (3, None)
    assert (labelled.pool.y.dtype, measured.pool.y.dtype) == (torch.int64, torch.float32)
    assert labelled.pool.x.dtype == torch.float32
    assert len(labelled.test) == 0
    assert labelled.source == "own arrays, 6 + 0 records"


@each("dtype", [np.uint8, np.int16, np.int32, np.bool_])
def test_labels_of_any_whole_type_are_taken(dtype: Any) -> None:
    assert from_arrays(X, (LABELS > 0).astype(dtype)).pool.y.tolist() == [0, 1, 1, 0, 1, 1]


def test_tensors_read_only_arrays_and_lists_are_taken() -> None:
    frozen = X.copy()
    frozen.flags.writeable = False
    for x in (torch.from_numpy(X).requires_grad_(), frozen, X.tolist(), X[::-1][::-1]):
        assert torch.equal(from_arrays(x, LABELS).pool.x, torch.from_numpy(X).float())


def test_later_changes_to_the_array_stay_outside() -> None:
    mine = X.astype(np.float32)
    dataset = from_arrays(mine, LABELS)
    mine[:] = -1
    assert float(dataset.pool.x[0, 1]) == 1.0


def test_a_test_part_is_kept_as_it_is() -> None:
    dataset = from_arrays(X[:4], LABELS[:4], test=(X[4:], LABELS[4:]))
    assert dataset.test.y.tolist() == [1, 2]


@each(
    ("x", "y", "options", "sentence"),
    [
        (X, LABELS[:5], {}, "data must have one target for each record, had 6 records and 5 targets"),
        (X[:0], LABELS[:0], {}, "data must have at least one record, had none"),
        (X[:, 0], LABELS, {}, r"shape \[n, ...\] and targets of shape \[n\], had \[6\] and \[6\]; reshape"),
        (X, LABELS[:, None], {}, r"had \[6, 2\] and \[6, 1\]; reshape"),
        (X, LABELS, {"classes": 0}, "classes must be a whole number of at least 1, was 0; leave it out to count"),
        (X, LABELS / 2, {"classes": 3}, "classes must be left out for floating-point targets, was 3"),
        (X.astype(str), LABELS, {}, "data features must be an array of numbers"),
        (X * 1j, LABELS, {}, "data features must be real numbers"),
        ([[1.0], [1.0, 2.0]], [0, 1], {}, "data features must be an array of numbers"),
        (X, LABELS, {"test": (X[:, :1], LABELS)}, r"test part\) must look like the rest, .*\[2\].*had \[1\]"),
        (X, LABELS, {"test": (X, LABELS / 2)}, "targets of type torch.int64, had .* torch.float32"),
        (X, LABELS, {"test": (X, LABELS[:1])}, r"data \(its test part\) must have one target"),
    ],
)
def test_bad_arrays_are_refused_in_one_sentence(x: Any, y: Any, options: Any, sentence: Any) -> None:
    with pytest.raises(BadInput, match=sentence):
        from_arrays(x, y, **options)


def test_labels_without_records_are_fine_when_their_number_is_said() -> None:
    assert from_arrays(X, LABELS * 2, classes=7).classes == 7
    assert federate((X, LABELS * 2), clients=2, classes=7).classes == 7


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_decide_nothing_before_it_is_known_whose_they_are(value: float) -> None:
    x = X.copy()
    x[2, 1] = value
    assert len(from_arrays(x, LABELS - 1).pool) == 6
    with pytest.raises(
        BadInput, match=r"^data 'own arrays' \(test split\) features .* in 1 of 6 rows, first in row 2; "
    ):
        federate(from_arrays(X, LABELS, test=(x, LABELS)), clients=2)


class Quoting:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("could not convert 'Ada Lovelace'")


def test_what_no_array_can_be_made_of_is_not_quoted() -> None:
    with pytest.raises(BadInput) as refusal:
        from_arrays(Quoting(), LABELS)
    assert "Ada" not in "".join(traceback.format_exception(refusal.value))
    assert "was 'Quoting' (RuntimeError); convert" in str(refusal.value)


def test_a_torch_data_set_is_stacked() -> None:
    source = TensorDataset(torch.from_numpy(X), torch.from_numpy(LABELS))
    dataset = from_torch(source, test=[(np.zeros(2), 1), (np.ones(2), 0)], name="mine")
    assert torch.equal(dataset.pool.x, torch.from_numpy(X).float())
    assert dataset.pool.y.tolist() == LABELS.tolist()
    assert dataset.test.y.tolist() == [1, 0]
    assert dataset.source == "mine, 6 + 2 records"


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


@each(
    ("source", "sentence"),
    [
        (Endless(), "data must be a map-style data set, .* was 'Endless'"),
        ([], "data must have at least one record"),
        ([torch.zeros(2)], "data must have features of shape"),
        ([(torch.zeros(2), 0)] * 3 + [(torch.zeros(3), 1)] * 3, "that all have one shape"),
        ([(1, 2, 3)], r"data must yield \(features, target\) pairs"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 1)], "that all have one shape, did not; add a transform"),
        ([("a", 0)], "data must yield|must be an array of numbers"),
    ],
)
def test_a_torch_data_set_that_cannot_be_stacked_is_refused(source: Any, sentence: Any) -> None:
    with pytest.raises(BadInput, match=sentence):
        from_torch(source)


def test_one_odd_item_of_a_torch_data_set_is_marked() -> None:
    odd = from_torch([(torch.zeros(2), 0), (torch.zeros(2), 1), (torch.zeros(3), 1)])
    assert (odd.pool.x.isnan().all(dim=1).tolist(), odd.pool.y.tolist()) == ([False, False, True], [0, 1, -1])
    odd = from_torch([(torch.zeros(2), 0.5), (torch.zeros(2), 1.5), (torch.zeros(2), None)])
    assert odd.pool.y.isnan().tolist() == [False, False, True]


def test_a_test_set_says_what_items_look_like() -> None:
    odd = from_torch([(torch.zeros(3), 0.5)] * 5 + [(torch.zeros(2), 1)], test=[(torch.zeros(2), 0)])
    assert odd.pool.x.isnan().all(dim=1).tolist() == [True] * 5 + [False]
    assert (odd.pool.y.tolist(), odd.test.y.tolist()) == ([-1] * 5 + [1], [0])


def test_federate_takes_pairs_of_arrays_and_torch_data_sets() -> None:
    x, y = torch.rand(100, 3), torch.arange(100) % 4
    for data in ((x, y), TensorDataset(x, y), [*zip(x, y, strict=True)], from_arrays(x, y)):
        federation = federate(data, clients=5, seed=0)
        assert (sum(federation.sizes), len(federation.validation), len(federation.test)) == (72, 8, 20)


@each("data", [7, None, Endless()])
def test_federate_says_what_data_can_be(data: Any) -> None:
    with pytest.raises(BadInput, match=r"^data must be a "):
        federate(data, clients=2)
