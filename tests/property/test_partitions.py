"""Whatever is asked for: no record goes to two clients, none is lost unless asked, and promises on sizes hold."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpfl.errors import BadInput
from dpfl.federation.partitions import classes, dirichlet, iid, keep_share, sorted_cut, writer, writer_groups
from dpfl.streams import Streams

seeds = st.integers(0, 2**32)
label_lists = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(torch.tensor)
client_counts = st.integers(1, 20)
unhurried = settings(deadline=None)  # a busy machine is no failure


def rng(seed: Any) -> Any:
    return Streams(seed).public.generator("partition")


def joined(rows: Any) -> Any:
    return np.concatenate([piece.numpy() for piece in rows]).tolist()


def check_disjoint(rows: Any, clients: Any, records: Any) -> None:
    assert len(rows) == clients
    every = joined(rows)
    assert len(set(every)) == len(every)
    assert set(every) <= set(range(records))


def check_complete(rows: Any, clients: Any, records: Any) -> None:
    check_disjoint(rows, clients, records)
    assert len(joined(rows)) == records


@unhurried
@given(records=st.integers(1, 200), clients=client_counts, seed=seeds)
def test_iid_shares_out_everything_evenly(records: Any, clients: Any, seed: Any) -> None:
    assume(clients <= records)
    rows = iid(records, clients, rng(seed))
    check_complete(rows, clients, records)
    sizes = [len(piece) for piece in rows]
    assert max(sizes) - min(sizes) <= 1


@unhurried
@given(targets=label_lists, clients=client_counts, seed=seeds)
def test_sorted_pieces_are_in_order(targets: Any, clients: Any, seed: Any) -> None:
    assume(clients <= len(targets))
    rows = sorted_cut(targets.float(), clients, rng(seed))
    check_complete(rows, clients, len(targets))
    assert targets[joined(rows)].tolist() == sorted(targets.tolist())
    sizes = [len(piece) for piece in rows]
    assert max(sizes) - min(sizes) <= 1


@unhurried
@given(
    labels=label_lists,
    groups=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    each=st.integers(1, 4),
    seed=seeds,
)
def test_sizes_are_met_exactly(labels: Any, groups: Any, each: Any, seed: Any) -> None:
    clients = each * len(groups)
    wanted = [size for size in groups for _ in range(each)]
    assume(sum(wanted) <= len(labels) and clients <= len(labels))
    for rows in (
        iid(len(labels), clients, rng(seed), sizes=tuple(groups)),
        sorted_cut(labels, clients, rng(seed), sizes=tuple(groups)),
    ):
        check_disjoint(rows, clients, len(labels))
        assert [len(piece) for piece in rows] == wanted


@unhurried
@given(
    labels=label_lists,
    clients=client_counts,
    per_client=st.integers(1, 6),
    sizes=st.none() | st.integers(1, 12),
    seed=seeds,
)
def test_every_client_holds_exactly_its_number_of_classes(
    labels: Any, clients: Any, per_client: Any, sizes: Any, seed: Any
) -> None:
    try:
        rows = classes(labels, clients, per_client, rng(seed), sizes=sizes)
    except BadInput:
        # Refusals are checked sentence by sentence in the unit tests; here: never without a shortage.
        smallest = int(np.bincount(labels.numpy())[np.unique(labels.numpy())].min())
        most_takers = -(-clients * per_client // len(np.unique(labels.numpy())))
        largest_part = 1 if sizes is None else -(-sizes // per_client)
        too_many = per_client > len(np.unique(labels.numpy())) or clients * (sizes or 1) > len(labels)
        assert too_many or (sizes or per_client) < per_client or most_takers * largest_part > smallest
        return
    check_disjoint(rows, clients, len(labels))
    assert {len(np.unique(labels[piece].numpy())) for piece in rows} == {per_client}
    if sizes is not None:
        assert {len(piece) for piece in rows} == {sizes}
    elif clients * per_client >= len(np.unique(labels.numpy())):
        check_complete(rows, clients, len(labels))


@unhurried
@given(
    labels=label_lists,
    clients=st.integers(1, 6),
    alpha=st.floats(0.01, 100),
    least=st.integers(1, 3),
    seed=seeds,
)
def test_dirichlet_shares_out_everything_and_leaves_nobody_short(
    labels: Any, clients: Any, alpha: Any, least: Any, seed: Any
) -> None:
    if clients * least > len(labels):
        with pytest.raises(BadInput, match=r"^(clients|min_records) must be at most"):
            dirichlet(labels, clients, alpha, rng(seed), min_records=least)
        return
    try:
        rows = dirichlet(labels, clients, alpha, rng(seed), min_records=least)
    except BadInput:
        return  # so little data that no draw of many gave everyone enough
    check_complete(rows, clients, len(labels))
    assert min(len(piece) for piece in rows) >= least


@unhurried
@given(groups=label_lists, seed=seeds, data=st.data())
def test_a_writer_is_whole(groups: Any, seed: Any, data: Any) -> None:
    names = np.unique(groups.numpy())
    clients = data.draw(st.integers(1, len(names)))
    rows = writer(groups, clients, rng(seed))
    check_disjoint(rows, clients, len(groups))
    owners = [np.unique(groups[piece].numpy()).tolist() for piece in rows]
    assert all(len(mine) == 1 for mine in owners)
    assert all(len(piece) == int((groups == mine[0]).sum()) for piece, mine in zip(rows, owners, strict=True))


@unhurried
@given(groups=label_lists, seed=seeds, data=st.data())
def test_groups_of_writers_are_whole_writers_and_all_of_them(groups: Any, seed: Any, data: Any) -> None:
    names = np.unique(groups.numpy())
    clients = data.draw(st.integers(1, len(names)))
    rows = writer_groups(groups, clients, rng(seed))
    check_complete(rows, clients, len(groups))
    owners = [np.unique(groups[piece].numpy()).tolist() for piece in rows]
    assert sorted(name for mine in owners for name in mine) == names.tolist()  # nobody is at two clients
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    again = writer_groups(groups, clients, rng(seed))
    assert [piece.tolist() for piece in rows] == [piece.tolist() for piece in again]


@unhurried
@given(
    records=st.integers(1, 200),
    clients=client_counts,
    share=st.floats(0, 1, exclude_min=True),
    seed=seeds,
)
def test_a_share_is_part_of_what_was_there(records: Any, clients: Any, share: Any, seed: Any) -> None:
    assume(clients <= records)
    before = iid(records, clients, rng(seed))
    after = keep_share(before, share, rng(seed + 1))
    check_disjoint(after, clients, records)
    for had, keeps in zip(before, after, strict=True):
        assert set(keeps.tolist()) <= set(had.tolist())
        assert len(keeps) == max(1, round(share * len(had)))
