import itertools
from typing import Any

import numpy as np
import pytest
import torch

from dpfl.errors import BadInput
from dpfl.federation.partitions import (
    Partition,
    classes,
    client_sizes,
    dirichlet,
    iid,
    keep_share,
    parse_partition,
    share_out,
    sorted_cut,
    writer,
    writer_groups,
)
from dpfl.streams import Streams
from grids import each

TEN_DIGITS = torch.arange(1000) % 10


def rng(seed: Any = 0) -> Any:
    return Streams(seed).public.generator("partition")


def lists(rows: Any) -> Any:
    return [piece.tolist() for piece in rows]


def labels_of(rows: Any, labels: Any) -> Any:
    return [sorted(set(labels[piece].tolist())) for piece in rows]


@each(
    ("text", "parsed"),
    [
        ("iid", Partition("iid")),
        ("sorted", Partition("sorted")),
        ("writer", Partition("writer")),
        ("writer-groups", Partition("writer-groups")),
        ("classes:4", Partition("classes", 4)),
        ("dirichlet:0.05", Partition("dirichlet", 0.05)),
    ],
)
def test_partitions_are_read_and_written_the_same_way(text: Any, parsed: Any) -> None:
    assert parse_partition(text) == parsed
    assert str(parsed) == text


@each(
    ("text", "sentence"),
    [
        ("dirichlt:1", "partition must be one of .*, was 'dirichlt'; did you mean 'dirichlet'?"),
        ("", "partition must be one of"),
        (None, "partition must be one of"),
        ("iid:3", "partition 'iid' takes no number, was 'iid:3'; write 'iid'"),
        ("dirichlet", "must be written dirichlet:ALPHA with ALPHA above 0, was 'dirichlet'; write for"),
        ("dirichlet:0", "ALPHA above 0, was 'dirichlet:0'"),
        ("dirichlet:-1", "ALPHA above 0"),
        ("dirichlet:nan", "ALPHA above 0"),
        ("dirichlet:inf", "ALPHA above 0"),
        ("classes:0", "must be written classes:C with C a whole number of at least 1, was 'classes:0'"),
        ("classes:1.5", "C a whole number"),
        ("classes:inf", "C a whole number"),
        ("classes:two", "C a whole number of at least 1, was 'classes:two'; write for example 'classes:2'"),
    ],
)
def test_other_partitions_are_refused(text: Any, sentence: Any) -> None:
    with pytest.raises(BadInput, match=sentence):
        parse_partition(text)


def test_sizes_name_groups_of_clients() -> None:
    assert client_sizes(10, 4, None).tolist() == [3, 3, 2, 2]
    assert client_sizes(10, 3, 2).tolist() == [2, 2, 2]
    assert client_sizes(40_000, 50, (400, 600, 800, 1000, 1200))[::10].tolist() == [400, 600, 800, 1000, 1200]


@each(
    ("clients", "sizes", "sentence"),
    [
        (11, None, "clients must be at most the 10 records there are to share out, was 11; lower it"),
        (0, None, "clients must be a whole number of at least 1, was 0"),
        (True, None, "clients must be a whole number"),
        (2, 6, "sizes must add up to at most the 10 records .*, added up to 12 over 2 clients; lower sizes"),
        (2, 0, "sizes must be a whole number of at least 1, was 0; leave it out"),
        (2, 2.0, "sizes must be a whole number of at least 1, was 2.0"),
        (3, (1, 2), r"divide the 3 clients into equal groups, was \(1, 2\); change clients or how many"),
        (3, (), "sizes must be one number, or several"),
    ],
)
def test_sizes_that_cannot_be_had_are_refused(clients: Any, sizes: Any, sentence: Any) -> None:
    with pytest.raises(BadInput, match=sentence):
        client_sizes(10, clients, sizes)


def test_sorted_by_hand() -> None:
    targets = torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0])
    assert lists(sorted_cut(targets, 2, rng())) == [[1, 3, 2], [4, 0]]


def test_sorted_with_sizes_spans_the_whole_range() -> None:
    targets = torch.arange(1000.0)
    low, high = sorted_cut(targets, 2, rng(), sizes=50)
    assert len(low) == len(high) == 50
    assert low.max() < high.min()
    # The chance that 100 of 1,000 all fall outside the top fifth is below 1e-9.
    assert high.max() >= 800


def test_two_digits_for_each_of_ten_clients() -> None:
    rows = classes(TEN_DIGITS, 10, 2, rng())
    held = labels_of(rows, TEN_DIGITS)
    assert all(len(mine) == 2 for mine in held)
    assert sorted(itertools.chain(*held)) == sorted([*range(10)] * 2)
    assert [len(piece) for piece in rows] == [100] * 10


def test_four_digits_with_unbalanced_sizes() -> None:
    labels = torch.arange(40_000) % 10
    rows = classes(labels, 50, 4, rng(), sizes=(400, 600, 800, 1000, 1200))
    assert [len(piece) for piece in rows] == [size for size in (400, 600, 800, 1000, 1200) for _ in range(10)]
    counts = [np.bincount(labels[piece].numpy(), minlength=10) for piece in rows]
    assert all(sorted(mine)[6:] == [len(piece) // 4] * 4 for mine, piece in zip(counts, rows, strict=True))


def test_few_clients_leave_classes_out() -> None:
    rows = classes(TEN_DIGITS, 2, 3, rng())
    held = labels_of(rows, TEN_DIGITS)
    assert len(set(held[0]) | set(held[1])) == 6
    assert [len(piece) for piece in rows] == [300, 300]


def test_class_pairs_are_not_the_same_every_time() -> None:
    held = labels_of(classes(torch.arange(10_000) % 10, 50, 2, rng()), torch.arange(10_000) % 10)
    assert len({tuple(mine) for mine in held}) > 15


@each(
    ("clients", "per_client", "sizes", "sentence"),
    [
        (
            2,
            11,
            None,
            "partition 'classes:11' must ask for at most as many classes as there are records of, was 11; lower it",
        ),
        (600, 2, None, "clients must leave enough records of every class .*'classes:2', did not; lower it"),
        (10, 2, 1, "sizes must be at least 2 for a client to hold 2 classes, was 1; raise sizes"),
        (3, 1, 101, "sizes must leave enough records of every class .*'classes:1', did not; lower it"),
        (10, 2, 101, "sizes must add up to"),
    ],
)
def test_classes_that_cannot_be_had_are_refused(clients: Any, per_client: Any, sizes: Any, sentence: Any) -> None:
    with pytest.raises(BadInput, match=sentence):
        classes(TEN_DIGITS, clients, per_client, rng(), sizes=sizes)


def test_dirichlet_with_the_setting_of_ali_dpfl() -> None:
    labels = torch.arange(54_000) % 10
    rows = dirichlet(labels, 10, 0.05, rng(), min_records=10)
    sizes = [len(piece) for piece in rows]
    assert sum(sizes) == 54_000
    assert min(sizes) >= 10
    # Dir(0.05) over ten clients gives nearly all of a class to one or two of them.
    largest = max(np.bincount(labels[piece].numpy(), minlength=10).max() for piece in rows)
    assert largest > 3_000


def test_dirichlet_with_a_large_alpha_is_nearly_even() -> None:
    labels = torch.arange(10_000) % 10
    for piece in dirichlet(labels, 10, 1e5, rng()):
        assert np.bincount(labels[piece].numpy()) == pytest.approx([100] * 10, abs=5)


def test_dirichlet_shares_have_the_variance_of_the_law() -> Any:
    """Shares of Dir(a) over N clients have variance (N-1) / (N^2 (N a + 1)); another alpha must not pass."""
    labels = torch.arange(200_000) % 400  # 400 independent draws of a share
    (mine, *_) = dirichlet(labels, 5, 1.0, rng(), min_records=1)
    shares = np.bincount(labels[mine].numpy(), minlength=400) / 500

    def variance(alpha: Any) -> Any:
        return 4 / (25 * (5 * alpha + 1))

    # A variance estimated from 400 draws of Beta(1, 4) is off by 8 % (one deviation): 30 % is a false alarm of 3e-4.
    assert shares.var() == pytest.approx(variance(1.0), rel=0.3)
    assert shares.var() != pytest.approx(variance(2.0), rel=0.3)
    assert shares.var() != pytest.approx(variance(0.5), rel=0.3)


@each(
    ("clients", "alpha", "least", "sentence"),
    [
        (1001, 1.0, 1, "clients must be at most the 1,000 records"),
        (200, 1.0, 10, "min_records must be at most 5 for 200 clients to share 1000 records, was 10; lower it"),
        (2, 1.0, 0, "min_records must be a whole number of at least 1, was 0"),
        (90, 0.01, 10, "each of 90 clients at least min_records=10 records, did not in 1,000 draws; raise ALPHA"),
    ],
)
def test_dirichlet_draws_that_cannot_be_had_are_refused(clients: Any, alpha: Any, least: Any, sentence: Any) -> None:
    with pytest.raises(BadInput, match=sentence):
        dirichlet(TEN_DIGITS, clients, alpha, rng(), min_records=least)


def test_each_writer_is_one_client() -> None:
    groups = torch.tensor([7, 3, 7, 9, 3, 7])
    assert sorted(lists(writer(groups, 3, rng()))) == [[0, 2, 5], [1, 4], [3]]
    chosen = {tuple(piece) for seed in range(20) for piece in lists(writer(groups, 1, rng(seed)))}
    assert chosen == {(0, 2, 5), (1, 4), (3,)}


def test_whole_writers_are_shared_out_among_clients() -> None:
    groups = torch.tensor([7, 3, 7, 9, 3, 7, 1, 9])
    wrote = {7: {0, 2, 5}, 3: {1, 4}, 9: {3, 7}, 1: {6}}
    seen = set()
    for seed in range(30):
        held = [set(piece) for piece in lists(writer_groups(groups, 2, rng(seed)))]
        owners = [{name for name, rows in wrote.items() if rows <= mine} for mine in held]
        assert [len(mine) for mine in owners] == [2, 2]
        assert all(
            set().union(*(wrote[name] for name in mine)) == rows for mine, rows in zip(owners, held, strict=True)
        )
        seen.add(frozenset(owners[0]))
    assert len(seen) == 6  # any two writers can meet


def test_a_share_is_kept_at_random() -> None:
    rows = [torch.arange(100), torch.arange(100, 103)]
    large, small = keep_share(rows, 0.1, rng())
    assert (len(large), len(small)) == (10, 1)
    assert set(large.tolist()) <= set(range(100))
    assert large.tolist() != list(range(10))
    assert keep_share(rows, 1.0, rng()) is rows


@each("share", [0, -0.5, 1.5, float("nan"), "0.5"])
def test_other_shares_are_refused(share: Any) -> None:
    with pytest.raises(BadInput, match=r"share must be above 0 and at most 1, was .*; use 1 to keep everything"):
        keep_share([torch.arange(3)], share, rng())


@each(
    ("text", "options", "sentence"),
    [
        ("dirichlet:1", {"sizes": 5}, "sizes must be left out with partition 'dirichlet:1', which .*, was 5"),
        ("writer-groups", {"sizes": 3}, r"sizes must be left out with partition 'writer-groups', .* was 3"),
        (
            "writer-groups",
            {},
            "partition 'writer-groups' needs data that knows who wrote each record, such as 'femnist'",
        ),
        ("writer-groups", {"groups": TEN_DIGITS}, "clients must be at most the 10 writers .*, was 12; lower it or"),
        ("writer", {"sizes": (1, 2)}, r"sizes must be left out with partition 'writer', .* was \(1, 2\)"),
        ("dirichlet:1", {"regression": True}, "partition must be 'iid' or 'sorted' for regression"),
        ("classes:2", {"regression": True}, "whose targets are no class labels, was 'classes:2'; use one"),
        ("writer", {}, "partition 'writer' needs data that knows who wrote each record, such as 'femnist'"),
        ("writer", {"groups": TEN_DIGITS}, "clients must be at most the 10 writers .*, was 12; lower it or"),
    ],
)
def test_partitions_that_do_not_suit_the_data_are_refused(text: Any, options: Any, sentence: Any) -> None:
    with pytest.raises(BadInput, match=sentence):
        share_out(parse_partition(text), TEN_DIGITS, 12, rng(), **options)


def test_iid_is_a_random_share_of_everything() -> None:
    first, again, other = (lists(iid(100, 3, rng(seed))) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert sorted(itertools.chain(*first)) == list(range(100))
    assert [len(piece) for piece in first] == [34, 33, 33]
