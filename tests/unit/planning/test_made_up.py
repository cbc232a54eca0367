"""Made-up tasks: of the federation's shape, from public facts alone, and as unlike each other as they say they are."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from dpfl.errors import BadInput
from dpfl.federation import Federation, Records
from dpfl.planning.made_up import FAMILY, Kind, made_up
from dpfl.planning.public_proxy import StandIn
from dpfl.streams import Streams
from grids import each

EASY = {skew: Kind("easy", 0.03, skew, positive=False) for skew in (None, 0.3)}
HARD = {skew: Kind("hard", 0.25, skew, positive=False) for skew in (None, 0.3)}


def federation(
    sizes: Sequence[int] = (90, 60, 30),
    *,
    shape: tuple[int, ...] = (13,),
    classes: int | None = 2,
    fill: float = math.nan,
    words: bool = False,
    recipe: dict[str, Any] | None = None,
    at_sites: bool = False,
) -> Federation:
    """Return clients of these sizes who hold nothing that may be looked at, and no public records."""

    def held(size: int) -> Records:
        x = torch.zeros(size, *shape, dtype=torch.long) if words else torch.full((size, *shape), fill)
        y = torch.full((size,), fill) if classes is None else torch.full((size,), -7, dtype=torch.long)
        return Records(x, y)

    tests = tuple(held(5) for _ in sizes) if at_sites else ()
    return Federation(
        "own", tuple(map(held, sizes)), held(0), held(20), classes, "nobody's", recipe, site_tests=tests
    )  # fmt: skip


def tasks(of: Federation, *, seed: int = 1, family: Sequence[Kind] = FAMILY) -> tuple[StandIn, ...]:
    return made_up(of, streams=Streams(seed), family=family)


def one(kind: Kind, **of: Any) -> StandIn:
    (found,) = tasks(federation(**of), family=(kind,))
    return found


def pooled(found: StandIn) -> Records:
    return Records(torch.cat([one.x for one in found.clients]), torch.cat([one.y for one in found.clients]))


def same(mine: Sequence[StandIn], theirs: Sequence[StandIn]) -> bool:
    pairs = [
        pair
        for one, other in zip(mine, theirs, strict=True)
        for pair in zip((*one.clients, one.held_out), (*other.clients, other.held_out), strict=False)
    ]
    return [len(a.clients) for a in mine] == [len(b.clients) for b in theirs] and all(
        torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in pairs
    )


# Of the federation's shape.


@each("classes", [2, 3, 10, None])
@each("shape", [(13,), (1, 8, 8), (1,)])
def test_records_are_those_of_the_federation_in_shape_and_kind(shape: tuple[int, ...], classes: int | None) -> None:
    found = tasks(federation((300, 200, 100), shape=shape, classes=classes))
    assert len(found) == len(FAMILY) > 1
    for task in found:
        assert [len(one) for one in task.clients] == [300, 200, 100]
        assert len(task.held_out) >= 300
        for records in (*task.clients, task.held_out):
            assert records.x.shape == (len(records), *shape)
            assert records.x.dtype == torch.float32
            assert records.x.isfinite().all()
            assert records.y.shape == (len(records),)
            assert records.y.dtype == (torch.float32 if classes is None else torch.int64)
        assert task.source.startswith("made-up records in 3 clients")
    assert len({task.source for task in found}) == len(found)


@each("classes", [2, 3, 10])
def test_all_classes_are_there_and_no_others(classes: int) -> None:
    for task in tasks(federation((200,) * 6, classes=classes)):
        assert set(pooled(task).y.tolist()) == set(task.held_out.y.tolist()) == set(range(classes))


@each("shape", [(13,), (300,)])
def test_targets_of_a_regression_lie_about_the_public_range(shape: tuple[int, ...]) -> None:
    for seed in range(1, 6):
        for task in tasks(federation((200,) * 6, classes=None, shape=shape), seed=seed):
            for y in (pooled(task).y, task.held_out.y):
                assert y.abs().quantile(0.95) <= 1.5
                assert y.abs().max() <= 2.5
                assert y.std() > 0.1


def test_sizes_are_in_proportion_where_they_are_too_many() -> None:
    sizes = (20_000, 10_000, 5_000, 20)
    for task in tasks(federation(sizes)):
        held = [len(one) for one in task.clients]
        assert 1000 < sum(held) < 5000
        assert held[0] == pytest.approx(2 * held[1], abs=2)
        assert held[1] == pytest.approx(2 * held[2], abs=2)
        assert 1 <= held[3] <= 20
    for task in tasks(federation((7,) * 5000)):  # so many clients that each would have less than a record
        assert 100 <= len(task.clients) < 5000
        assert all(1 <= len(one) <= 7 for one in task.clients)
    for task in tasks(federation((2, 1, 50))):  # nobody gets more than its own
        assert [len(one) for one in task.clients] == [2, 1, 50]


# As they say they are.


def unlike(task: StandIn, classes: int) -> float:
    """Return how far clients' class shares are from those of all, in total variation, on average."""
    shares = np.stack([np.bincount(one.y.numpy(), minlength=classes) / len(one) for one in task.clients])
    everywhere = np.bincount(pooled(task).y.numpy(), minlength=classes) / len(pooled(task))
    return float(np.abs(shares - everywhere).sum(axis=1).mean() / 2)


@each("classes", [2, 5, 10])
def test_clients_differ_in_their_classes_where_they_are_said_to(classes: int) -> None:
    # A share of 200 records is off by √(1/4/200) = 4 % at most, so alike clients are at 10 % with ten classes.
    alike, skewed = (unlike(one(EASY[skew], sizes=(200,) * 8, classes=classes), classes) for skew in (None, 0.3))
    assert alike < 0.12
    assert skewed > max(0.2, 2 * alike)
    for kind, task in zip(FAMILY, tasks(federation((200,) * 8, classes=classes)), strict=True):
        assert (unlike(task, classes) > 0.15) == (kind.skew is not None), kind.name


def test_clients_of_a_regression_differ_in_their_targets() -> None:
    spread = {
        skew: np.std([float(client.y.mean()) for client in one(EASY[skew], sizes=(200,) * 8, classes=None).clients])
        for skew in (None, 0.3)
    }
    assert spread[0.3] > 3 * spread[None]


def error(task: StandIn) -> float:
    """Return the error of a model that nobody protects, on records that are held out."""
    records = pooled(task)
    with threadpool_limits(1):  # so few records that threads would wait for each other
        learned = LogisticRegression(max_iter=60).fit(records.x.flatten(1).numpy(), records.y.numpy())
    return 1 - float(learned.score(task.held_out.x.flatten(1).numpy(), task.held_out.y.numpy()))


@pytest.mark.filterwarnings("ignore:lbfgs failed to converge")
@each(("classes", "skew"), [(2, None), (2, 0.3), (10, None), (10, 0.3)])
def test_what_is_easy_is_easier_than_what_is_hard(classes: int, skew: float | None) -> None:
    easy, hard = (one(kinds[skew], sizes=(300,) * 4, classes=classes) for kinds in (EASY, HARD))
    most = 1 - float(torch.bincount(easy.held_out.y).max()) / len(easy.held_out)  # of who always says the same
    assert error(easy) < 0.5 * most
    assert error(easy) < 0.6 * error(hard)
    for kind, task in zip(FAMILY, tasks(federation((300,) * 4, classes=classes)), strict=True):
        usual = 1 - float(torch.bincount(task.held_out.y).max()) / len(task.held_out)
        assert error(task) < usual, kind.name  # there is something to learn


def explained(task: StandIn) -> float:
    """Return which part of a regression's target least squares explain on records that are held out."""
    records, held = pooled(task), task.held_out
    x, y = (np.c_[np.ones(len(one)), one.x.flatten(1).numpy()] for one in (records, held)), held.y.numpy()
    mine, theirs = x
    slope, *_ = np.linalg.lstsq(mine, records.y.numpy(), rcond=None)
    return float(1 - np.mean((theirs @ slope - y) ** 2) / np.var(y))


def test_a_hard_regression_explains_less_than_an_easy_one() -> None:
    easy, hard = (one(kinds[None], sizes=(300,) * 4, classes=None) for kinds in (EASY, HARD))
    assert explained(hard) + 0.2 < explained(easy)
    assert explained(easy) > 0.4


def test_positive_features_are_shares() -> None:
    around, shares = (one(Kind("easy", 0.03, None, positive=yes)) for yes in (False, True))
    assert pooled(around).x.min() < -0.3
    assert 0.0 <= pooled(shares).x.min() < pooled(shares).x.max() <= 1.0
    assert {kind.positive for kind in FAMILY} == {False, True}


# From public facts alone.


@each("classes", [2, None])
def test_what_clients_hold_changes_nothing(classes: int | None) -> None:
    mine = tasks(federation(classes=classes))
    for other in (federation(classes=classes, fill=1e30), federation(classes=classes, fill=0.0, at_sites=True)):
        assert same(mine, tasks(other))


def test_other_public_facts_are_other_tasks() -> None:
    mine = tasks(federation())
    assert same(mine, tasks(federation()))
    for other in (
        tasks(federation((60, 90, 30))), tasks(federation(shape=(12,))), tasks(federation(classes=3)),
        tasks(federation(), seed=2),
    ):  # fmt: skip
        assert not same(mine, other)


def test_a_task_does_not_depend_on_how_many_there_are() -> None:
    assert same(tasks(federation())[:2], tasks(federation(), family=FAMILY[:2]))


@each("at_sites", [False, True])
def test_words_cannot_be_made_up(at_sites: bool) -> None:
    with pytest.raises(BadInput, match=r"^validation_share must leave public records .* where features are whole num"):
        tasks(federation(words=True, at_sites=at_sites))
