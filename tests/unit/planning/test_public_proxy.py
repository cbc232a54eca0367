"""Stand-ins for clients: of public records alone, shared out as the clients' are, and apart from what is held out."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dpfl.errors import BadInput
from dpfl.federation import Federation, Records, federate, from_arrays
from dpfl.planning.public_proxy import StandIn, stand_in
from dpfl.streams import Streams
from grids import each


def numbered(labels: Any) -> Records:
    """Return records with these targets, each with a number of its own as its feature."""
    y = torch.as_tensor(np.asarray(labels))
    return Records(torch.arange(len(y), dtype=torch.float32)[:, None], y)


def federation(
    labels: Any, *, clients: int = 8, partition: str | None = "iid", classes: int | None = 10, name: str = "own"
) -> Federation:
    """Return a federation with these public labels; its clients hold nothing that may be looked at."""
    public = numbered(labels)
    private = Records(torch.full((50, 1), math.nan), torch.full((50,), -(10**9), dtype=public.y.dtype))
    recipe = None if partition is None else {"partition": partition, "clients": clients}
    return Federation(name, (private,) * clients, public, public.take(torch.arange(0)), classes, "made up", recipe)


def made(of: Federation, *, hold_out: float = 0.0, seed: int = 0) -> StandIn:
    return stand_in(of, hold_out=hold_out, rng=Streams(seed).public.generator("stand-in"))


def numbers(*records: Records) -> list[int]:
    return sorted(int(number) for one in records for number in one.x[:, 0])


def assert_same(one: StandIn, other: StandIn) -> None:
    assert one.source == other.source
    assert len(one.clients) == len(other.clients)
    for mine, theirs in zip((*one.clients, one.held_out), (*other.clients, other.held_out), strict=True):
        assert torch.equal(mine.x, theirs.x)
        assert torch.equal(mine.y, theirs.y)


TEN = np.arange(200) % 10
PARTITIONS = ["iid", "classes:2", "dirichlet:0.5", "sorted", "writer", "writer-groups"]


# Only public records.


@each("partition", [*PARTITIONS, None])
@each("fill", [0.0, 1e30, math.inf])
def test_what_clients_hold_changes_nothing(partition: str | None, fill: float) -> None:
    unseen = federation(TEN, partition=partition)
    other = Records(torch.full((50, 1), fill), torch.zeros(50, dtype=torch.int64))
    seen = replace(unseen, clients=(other,) * 8, test=Records(other.x * 2, other.y))
    assert_same(made(unseen, hold_out=0.3), made(seen, hold_out=0.3))


@each("partition", PARTITIONS)
def test_stand_ins_are_made_of_public_records_with_their_own_targets(partition: str) -> None:
    public = made(federation(TEN, partition=partition), hold_out=0.25)
    for one in (*public.clients, public.held_out):
        assert len(one)
        assert torch.equal(one.y, one.x[:, 0].long() % 10)
        assert torch.isfinite(one.x).all()


def test_not_even_how_much_clients_hold_is_looked_at() -> None:
    one = federation(TEN)
    lone = replace(one, clients=tuple(Records(torch.zeros(1, 1), torch.zeros(1)) for _ in range(8)))
    assert_same(made(one), made(lone))


# Held out.


@each("partition", PARTITIONS)
@each("hold_out", [0.0, 0.2, 0.5])
def test_no_record_is_used_twice(partition: str, hold_out: float) -> None:
    public = made(federation(TEN, partition=partition), hold_out=hold_out)
    used = numbers(*public.clients, public.held_out)
    assert len(used) == len(set(used))
    assert set(used) <= set(range(200))
    assert len(public.held_out) == 200 * hold_out
    if partition != "classes:2":  # a class that nobody took stays out
        assert used == list(range(200))


def test_held_out_records_are_drawn_at_random() -> None:
    held = numbers(made(federation(np.arange(200) % 10), hold_out=0.5).held_out)
    assert held != list(range(100))
    assert 80 < np.mean(held) < 120


def test_the_generator_decides() -> None:
    of = federation(TEN, partition="dirichlet:0.5")
    assert_same(made(of, hold_out=0.3, seed=1), made(of, hold_out=0.3, seed=1))
    assert numbers(made(of, hold_out=0.3, seed=1).held_out) != numbers(made(of, hold_out=0.3, seed=2).held_out)


# As the clients share theirs.


def test_at_random() -> None:
    public = made(federation(TEN))
    assert [len(one) for one in public.clients] == [25] * 8
    assert public.source == "200 public records of own in 8 clients (iid)"
    assert min(len(one.y.unique()) for one in public.clients) > 4


def test_by_classes() -> None:
    public = made(federation(TEN, partition="classes:2"))
    assert [len(one.y.unique()) for one in public.clients] == [2] * 8
    assert public.source == "200 public records of own in 8 clients (classes:2)"


def test_by_a_dirichlet_draw() -> None:
    public = made(federation(np.arange(400) % 10, partition="dirichlet:0.5"))
    assert public.source == "400 public records of own in 8 clients (dirichlet:0.5)"
    shares = np.array([np.bincount(one.y.numpy(), minlength=10) for one in public.clients]) / 40
    assert shares.max() > 0.35  # of a class, at one of eight clients
    assert len(public.clients) == 8


def test_small_stand_ins_are_stand_ins_too() -> None:
    public = made(federation(np.arange(60) % 10, partition="dirichlet:0.5", clients=8))
    assert public.source == "60 public records of own in 8 clients (dirichlet:0.5)"  # seven or eight records each


def test_sorted() -> None:
    public = made(federation(TEN, partition="sorted"))
    assert public.source == "200 public records of own in 8 clients (sorted)"
    spans = sorted((int(one.y.min()), int(one.y.max())) for one in public.clients)
    assert all(last[1] <= first[0] for last, first in itertools.pairwise(spans))
    assert all(last - first <= 2 for first, last in spans)


def test_sorted_regression() -> None:
    public = made(federation(np.linspace(0.0, 1.0, 100)[::-1].copy(), partition="sorted", classes=None, clients=4))
    assert public.source == "100 public records of own in 4 clients (sorted)"
    assert sorted(round(float(one.y.mean()), 2) for one in public.clients) == pytest.approx([0.12, 0.37, 0.63, 0.88])


@each("partition", ["writer", "writer-groups"])
def test_who_wrote_public_records_is_not_known_so_they_are_shared_out_at_random(partition: str) -> None:
    public = made(federation(TEN, partition=partition))
    assert public.source == f"200 public records of own in {len(public.clients)} clients (iid)"


@each("partition", PARTITIONS)
def test_the_source_counts_what_was_shared_out(partition: str) -> None:
    public = made(federation(TEN, partition=partition, name="faces"), hold_out=0.25)
    assert public.source.startswith("150 public records of faces in ")
    assert f" in {len(public.clients)} clients (" in public.source


# Fewer of them, where records do not go round.


@each("partition", ["iid", "classes:2", "sorted", "dirichlet:0.5"])
def test_fewer_public_records_than_clients(partition: str) -> None:
    public = made(federation(np.arange(40) % 4, clients=100, partition=partition, classes=4))
    assert 2 <= len(public.clients) <= 10  # four records each
    assert public.source == f"40 public records of own in {len(public.clients)} clients ({partition})"
    assert all(len(one) for one in public.clients)
    if partition in ("iid", "sorted"):
        assert [len(one) for one in public.clients] == [4] * 10


@each("partition", PARTITIONS)
@each("clients", [1, 2, 3, 10, 1000])
def test_there_are_never_more_stand_ins_than_clients(partition: str, clients: int) -> None:
    # Two are the fewest that can differ.
    public = made(federation(np.arange(600) % 10, clients=clients, partition=partition))
    assert 2 <= len(public.clients) <= max(2, clients)


def test_as_many_as_a_partition_allows() -> None:
    # Of the rare class there are three records: eight clients, or four, cannot all hold one.
    labels = np.append(np.zeros(57, dtype=int), [1, 1, 1])
    public = made(federation(labels, partition="classes:2", classes=2))
    assert public.source == "60 public records of own in 2 clients (classes:2)"
    assert [len(one.y.unique()) for one in public.clients] == [2, 2]


@pytest.mark.parametrize("partition", ["classes:2", "classes:9"])
def test_at_random_where_a_partition_allows_none(partition: str) -> None:
    public = made(federation(np.zeros(60, dtype=int), partition=partition))
    assert public.source == f"60 public records of own in {len(public.clients)} clients (iid)"
    assert numbers(*public.clients) == list(range(60))
    assert len(public.clients) >= 2


# Too few.


@each("left", [0, 1, 19])
def test_too_few_public_records_are_refused(left: int) -> None:
    with pytest.raises(BadInput) as refusal:
        made(federation(np.arange(left) % 2))
    text = str(refusal.value)
    assert text.startswith(f"validation_share must leave at least 20 public records to plan with, left {left}")
    assert "clients' own must not be looked at" in text
    assert text.endswith("; raise it, or give --constants")
    assert "\n" not in text


@each("hold_out", [0.0, 0.5])
@each("partition", PARTITIONS)
def test_the_fewest_public_records_that_are_enough(partition: str, hold_out: float) -> None:
    public = made(federation(np.arange(20) % 2, partition=partition, classes=2), hold_out=hold_out)
    assert len(public.held_out) == 20 * hold_out
    assert len(public.clients) >= 2
    assert all(len(one) for one in public.clients)


# Federations as they are made.


def test_a_federation_of_known_data() -> None:
    of = federate("digits", clients=10, partition="classes:2", seed=1)
    public = made(of)
    assert public.source == f"{len(of.validation)} public records of digits in 10 clients (classes:2)"
    assert [len(one.y.unique()) for one in public.clients] == [2] * 10
    rows = {tuple(row) for row in of.validation.x.flatten(1).tolist()}
    assert all(tuple(row) in rows for one in public.clients for row in one.x.flatten(1).tolist())


@pytest.mark.parametrize("regression", [True, False])
def test_a_federation_of_ones_own_arrays(regression: bool) -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((500, 3)), rng.integers(0, 3, 500)
    of = federate(from_arrays(x, labels.astype(float) if regression else labels, name="mine"), clients=5, seed=1)
    assert of.recipe is None
    public = made(of, hold_out=0.25)
    assert public.source == f"{round(len(of.validation) * 0.75)} public records of mine in 5 clients (iid)"
    assert public.held_out.y.dtype == of.validation.y.dtype
