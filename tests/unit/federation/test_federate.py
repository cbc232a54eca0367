import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch

from dpfl.errors import BadInput, Caution
from dpfl.federation import Dataset, Records, federate, from_arrays, load
from dpfl.federation.facts import require_usable
from grids import each

needs_data = pytest.mark.skipif(
    not os.environ.get("DPFL_DATA"), reason="DPFL_DATA is not set: the real data sets are not here"
)


def numbered(rows: Any = 200, classes: Any = 5) -> Any:
    """A data set in which the feature of a record is its number."""
    return from_arrays(torch.arange(float(rows))[:, None], torch.arange(rows) % classes)


def numbers(records: Any) -> Any:
    return records.x[:, 0].long().tolist()


def parts(federation: Any) -> Any:
    clients = [number for client in federation.clients for number in numbers(client)]
    return clients, numbers(federation.validation), numbers(federation.test)


@each("partition", ["iid", "classes:2", "sorted", "dirichlet:1"])
def test_the_parts_are_disjoint_and_lose_nothing(partition: Any) -> None:
    clients, validation, test = parts(federate(numbered(), clients=4, partition=partition, seed=0))
    assert (len(validation), len(test)) == (16, 40)
    assert sorted(clients + validation + test) == list(range(200))


def test_a_test_split_that_came_with_the_data_is_kept() -> None:
    dataset = from_arrays(torch.arange(100.0)[:, None], torch.arange(100) % 2, test=([[-1.0]], [1]))
    clients, validation, test = parts(federate(dataset, clients=3, validation_share=0.25, seed=0))
    assert test == [-1]
    assert len(validation) == 25
    assert sorted(clients + validation) == list(range(100))


def test_targets_stay_with_their_features() -> None:
    federation = federate(numbered(), clients=4, partition="classes:2", share=0.5, seed=0)
    for records in (*federation.clients, federation.validation, federation.test):
        assert (records.x[:, 0].long() % 5).tolist() == records.y.tolist()


def test_the_same_seed_gives_the_same_federation_and_another_seed_another() -> Any:
    def drawn(seed: Any) -> Any:
        return parts(federate(numbered(), clients=4, share=0.5, seed=seed))

    assert drawn(1) == drawn(1)
    assert all(one != other for one, other in zip(drawn(1), drawn(2), strict=True))
    assert drawn(None) != drawn(None)


def test_the_splits_do_not_depend_on_how_the_rest_is_shared_out() -> None:
    iid, by_class = (federate(numbered(), clients=n, partition=p, seed=1) for n, p in [(4, "iid"), (9, "classes:2")])
    assert parts(iid)[1:] == parts(by_class)[1:]


def test_a_named_data_set_can_be_shared_out_again_by_its_recipe() -> None:
    federation = federate("digits", clients=4, sizes=[10, 20], partition="classes:2", share=0.5, seed=3)
    again = federate(**federation.recipe)
    assert federation.recipe == again.recipe
    for one, other in zip(federation.clients, again.clients, strict=True):
        assert torch.equal(one.x, other.x)
    assert federate(numbered(), clients=4).recipe is None


def test_sizes_and_share_are_passed_on() -> None:
    federation = federate(numbered(), clients=4, sizes=[10, 20], share=0.5, seed=0)
    assert federation.sizes == (5, 5, 10, 10)


def people(rows: Any = 300, count: Any = 30) -> Any:
    """Records of `count` people; the feature is the person."""
    owners = torch.arange(rows) % count
    dataset = from_arrays(owners[:, None].float(), torch.arange(rows) % 3)
    return dataclasses.replace(dataset, groups=owners)


@pytest.mark.parametrize("partition", ["writer", "writer-groups", "iid"])
def test_nobody_is_both_public_and_a_client(partition: Any) -> None:
    clients, validation, test = map(set, parts(federate(people(), clients=20, partition=partition, seed=0)))
    assert not clients & validation
    assert not clients & test
    assert not validation & test
    assert (len(test), len(validation)) == (6, 2)  # a fifth of 30 people, a tenth of the other 24


def test_each_client_is_one_person_under_the_writer_partition() -> None:
    federation = federate(people(), clients=22, partition="writer", seed=0)
    assert federation.sizes == (10,) * 22
    assert all(len(set(numbers(client))) == 1 for client in federation.clients)


def test_nobody_is_at_two_clients_under_groups_of_writers() -> None:
    federation = federate(people(), clients=4, partition="writer-groups", seed=0)
    persons = [set(numbers(client)) for client in federation.clients]
    assert [len(one) for one in persons] == [6, 6, 5, 5]  # 22 of 30 are neither public nor for the test
    assert sum(map(len, persons)) == len(set().union(*persons))
    assert federation.sizes == (60, 60, 50, 50)
    again = federate(people(), clients=4, partition="writer-groups", seed=0)
    other = federate(people(), clients=4, partition="writer-groups", seed=1)
    assert persons == [set(numbers(client)) for client in again.clients]
    assert persons != [set(numbers(client)) for client in other.clients]


def test_preprocessing_is_fitted_on_the_validation_split_alone() -> Any:
    seen = []

    def centre(public: Any) -> Any:
        seen.append(public)
        return lambda x: x - public.mean()

    raw = federate(numbered(), clients=4, seed=0)
    federation = federate(dataclasses.replace(numbered(), fit=centre), clients=4, seed=0)
    (public,) = seen
    assert torch.equal(public, raw.validation.x)
    for before, after in zip(
        (*raw.clients, raw.validation, raw.test),
        (*federation.clients, federation.validation, federation.test),
        strict=True,
    ):
        assert torch.equal(after.x, before.x - public.mean())


def test_preprocessing_that_leaves_nan_is_reported() -> Any:
    def divide_by_zero(public: Any) -> Any:
        return lambda x: x / x

    with pytest.warns(
        Caution, match=r"'own arrays' has 144 private records, of which .*: 1 with NaN or infinity; mend"
    ):
        federate(dataclasses.replace(numbered(), fit=divide_by_zero), clients=4, seed=0)
    public = federate(numbered(), clients=4, seed=0).validation.x[0]

    def divide_by_public(_: Any) -> Any:
        return lambda x: x / (x != public)

    with pytest.raises(BadInput, match=r"^data 'own arrays' \(validation split\) features must be finite, .* 1 of 16"):
        federate(dataclasses.replace(numbered(), fit=divide_by_public), clients=4, seed=0)


def test_a_preprocessing_that_fails_on_public_records_says_so_itself() -> None:
    def fail(x: Any) -> Any:
        raise ArithmeticError("by itself")

    with pytest.raises(ArithmeticError, match="by itself"):
        federate(dataclasses.replace(numbered(), fit=lambda public: fail), clients=4, seed=0)


def test_a_preprocessing_must_treat_each_record_by_itself() -> None:
    mixing = dataclasses.replace(numbered(), fit=lambda public: lambda x: x - x.mean(dim=0))
    with pytest.raises(BadInput, match=r"^fit must return a preprocessing that treats each record by itself, but it"):
        federate(mixing, clients=4, seed=0)


@each(
    ("prepare", "made"),
    [
        (lambda x: x[x[:, 0] > 100], r"\[0, 1\] of torch.float32"),
        (lambda x: x[0, 0], r"\[\] of torch.float32"),
        (lambda x: x.tolist(), "'list'"),
        (lambda x: x.double() if (x > 90).any() else x, r"\[1, 1\] of torch.float\d\d"),
    ],
)
def test_a_preprocessing_must_make_one_row_of_each_public_record(prepare: Any, made: str) -> None:
    with pytest.raises(BadInput, match=rf"^fit must return .* \[1, ...\], but of a public one it made {made}; let it"):
        federate(dataclasses.replace(numbered(), fit=lambda public: prepare), clients=4, seed=0)


def test_a_preprocessing_may_make_whole_numbers() -> None:
    def round_off(public: Any) -> Any:
        return lambda x: x.long() if (x != private).all() else x

    private = federate(numbered(), clients=4, seed=0).clients[2].x[3]
    with pytest.warns(Caution, match="1 with NaN or infinity"):
        federation = federate(dataclasses.replace(numbered(), fit=round_off), clients=4, seed=0)
    assert federation.clients[2].x[3].item() == torch.iinfo(torch.int64).min
    assert sum(int((own.x < 0).sum()) for own in federation.clients) == 1
    with pytest.raises(BadInput, match="1 of 144 clients' records are not; drop or fill them"):
        require_usable(federation)


def test_rows_are_named_as_the_caller_has_them() -> None:
    public = int(federate(numbered(), clients=4, seed=0).validation.x[3])
    data = numbered()
    data.pool.x[public] = torch.nan
    with pytest.raises(
        BadInput, match=rf"\(validation split\) features .* in 1 of 16 rows, first in row {public}; drop"
    ):
        federate(data, clients=4, seed=0)


def test_bad_values_in_a_hand_made_data_set_are_reported() -> None:
    y = torch.tensor([0.0, torch.inf, 1.0])
    broken = Dataset("mine", Records(torch.rand(3, 1), y), Records(torch.rand(1, 1), y[1:2]), None, "by hand")
    with pytest.raises(BadInput, match=r"^data 'mine' \(test split\) targets must be finite, .* first in row 0"):
        federate(broken, clients=1)


def test_public_labels_say_how_many_classes_there_are() -> None:
    assert federate(numbered(), clients=4, seed=0).classes == 5
    assert federate(numbered(), clients=4, seed=0, classes=9).classes == 9
    with pytest.raises(
        BadInput, match=r"^classes must be given where the public .* 2 labels from 0 to 2; give classes=C"
    ):
        federate(from_arrays(torch.rand(9, 1), torch.arange(9) % 2 * 2, test=([[0.0]] * 2, [0, 2])), clients=1)
    with pytest.raises(BadInput, match=r"^data 'own arrays' \(test split\) must have labels 0..1 for 2 classes, had"):
        federate(from_arrays(torch.rand(9, 1), torch.arange(9) % 2, test=([[0.0]], [2]), classes=2), clients=1)
    with pytest.raises(BadInput, match=r"^classes must be as data 'digits' says, 10, was 3; leave it out"):
        federate("digits", clients=2, classes=3)
    with pytest.raises(BadInput, match=r"^classes must be left out for floating-point targets, was 3"):
        federate((torch.rand(9, 1), torch.rand(9)), clients=2, classes=3)


def test_private_records_that_cannot_be_used_are_marked_and_stay() -> None:
    x, y = torch.rand(100, 3), torch.arange(100) % 2
    data = from_arrays(x.clone(), y.clone(), test=(x[:4].clone(), y[:4].clone()))
    plain = federate(data, clients=2, seed=0)
    private = torch.cat([own.x for own in plain.clients])
    rows = [row for row in range(100) if (private == x[row]).all(dim=1).any()]
    x[rows[0], 1], y[rows[1]], y[rows[2]] = torch.nan, 2, -1
    with pytest.warns(
        Caution, match=r"90 private .*: 1 with NaN or infinity, 2 with a label outside 0..1 \(give classes"
    ):
        marked = federate(dataclasses.replace(data, pool=from_arrays(x, y).pool), clients=2, seed=0)
    assert marked.sizes == plain.sizes
    lost = torch.cat([own.x for own in marked.clients]).isnan()
    assert (int(lost.any(dim=1).sum()), int(lost.all(dim=1).sum())) == (3, 3)
    assert {label for own in marked.clients for label in own.y.tolist()} == {0, 1}


def test_integer_features_are_marked_by_what_no_table_has() -> None:
    x, y = torch.arange(60).view(20, 3), torch.arange(20) % 2
    y[3] = 7
    tokens = Dataset("words", Records(x, y), Records(x[:2], torch.tensor([0, 1])), 2, "by hand")
    with pytest.warns(Caution, match="1 with a label outside"):
        federation = federate(tokens, clients=1, validation_share=0)
    assert int((federation.clients[0].x == torch.iinfo(torch.int64).min).all(dim=1).sum()) == 1


@each(
    ("options", "sentence"),
    [
        ({"clients": 0}, "^clients must be a whole number of at least 1, was 0"),
        ({"clients": 500}, "^clients must be at most the 144 records there are to share out, was 500"),
        (
            {"validation_share": -0.1},
            r"^validation_share must be at least 0 \(for no public data\) and below 1, was -0.1;",
        ),
        (
            {"validation_share": 1.0},
            r"^validation_share must be at least 0 \(for no public data\) and below 1, was 1.0",
        ),
        ({"test_share": float("nan")}, "^test_share must be above 0 and below 1, was nan"),
        ({"share": 0}, "^share must be above 0"),
        ({"sizes": 100}, "^sizes must add up to at most the 144 records"),
        ({"partition": "writer"}, "^partition 'writer' needs data that knows who wrote"),
        ({"partition": "dirichlet:0.1", "min_records": 100}, "^min_records must be at most 36"),
        ({"seed": -1}, "^seed must be a whole number"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(options: Any, sentence: Any) -> None:
    with pytest.raises(BadInput, match=sentence) as refusal:
        federate(numbered(), **{"clients": 4, **options})
    assert "\n" not in str(refusal.value)


def test_data_too_small_to_split_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^validation_share must split at least 2 records, there was 1; use more"):
        federate(numbered(2, classes=2), clients=1)
    with pytest.raises(BadInput, match=r"^test_share must split at least 2 groups, there was 1"):
        federate(people(count=1), clients=1)


def test_a_tiny_pool_still_gives_everyone_something() -> None:
    federation = federate(numbered(5), clients=3, classes=5, seed=0)
    assert (federation.sizes, len(federation.validation), len(federation.test)) == ((1, 1, 1), 1, 1)


@needs_data
def test_mnist_in_the_setting_of_udp() -> None:
    federation = federate("mnist", clients=50, partition="classes:4", sizes=(400, 600, 800, 1000, 1200), seed=0)
    assert federation.sizes[::10] == (400, 600, 800, 1000, 1200)
    assert {len(np.unique(client.y.numpy())) for client in federation.clients} == {4}
    assert (federation.shape, federation.classes) == ((1, 28, 28), 10)


@needs_data
def test_mnist_in_the_setting_of_ali_dpfl() -> None:
    federation = federate("mnist", clients=10, partition="dirichlet:0.05", seed=0)
    assert sum(federation.sizes) == 54_000
    assert min(federation.sizes) >= 10


@needs_data
def test_femnist_writers_are_public_or_clients() -> None:
    dataset = load("femnist")
    federation = federate(dataset, clients=224, partition="writer", seed=0)
    sizes = np.bincount(dataset.groups.numpy())
    assert len(federation.validation) + sum(federation.sizes) == len(dataset.pool)
    assert set(federation.sizes) <= set(sizes.tolist())


@needs_data
def test_adult_is_ready_to_train_on() -> None:
    federation = federate("adult", clients=20, seed=0)
    assert federation.shape == (88,)
    assert federation.test.x.dtype == torch.float32
    assert federation.test.x.isfinite().all()
