"""From a data set to a federation: two public splits, and the rest shared out among the clients.

The order is the point: the validation split is cut off first, the preprocessing is fitted on it alone, and
only then are the remaining records dealt to clients, so nothing that is learned from private records leaves a
client uncounted. Dealing records out by their labels, or until every client has enough of them, is the act of a
simulator who owns all of them: where clients are real their records are where they are.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from dpfl.errors import BadInput, Caution, require_count
from dpfl.federation import sites
from dpfl.federation.datasets import load
from dpfl.federation.facts import classes_of, marked, prepared, require_finite, require_known
from dpfl.federation.heart import HOSPITALS, SOURCE, hospitals
from dpfl.federation.own import Array, from_arrays, from_torch
from dpfl.federation.partitions import keep_share, parse_partition, share_out
from dpfl.federation.records import Dataset, Federation, Records
from dpfl.federation.site_files import site_files
from dpfl.settings import DataSettings, read, takes
from dpfl.streams import Streams


@takes(DataSettings)
def federate(
    data: "str | Dataset | tuple[Array, Array] | torch.utils.data.Dataset[Any]",
    *,
    clients: int | None = None,
    classes: int | None = None,
    seed: int | None = None,
    **settings: Any,
) -> Federation:
    """Share a data set out among `clients`, apart from a public validation split and a test split.

    Where clients exist already, as in "heart" or with `sites`, every record stays where it is (`sites`).

    `data` is a name that `load` knows, a `Dataset`, a pair of arrays (features, targets) or a map-style torch
    data set. `validation_share` may be 0 where no decision during training needs public data and no preprocessing is
    fitted. Where records belong to people (`Dataset.groups`), the public splits are made of whole people, so that
    nobody is both public and a client. `classes` is how many there are, for data that does not say so; if left out the
    labels of the two public splits are counted, and those of private records decide nothing. `seed` is short for
    `data_seed`.

    Public records with values that cannot be used are refused. A private one stays with its client and counts as zero;
    its owner hears of it in a `Caution`, which is written nowhere.

    >>> federation = federate("digits", clients=4, seed=1)
    >>> federation.sizes, len(federation.validation), len(federation.test)
    ((324, 324, 323, 323), 144, 359)
    """
    if seed is not None:
        if (other := settings.get("data_seed")) not in (None, seed):
            raise BadInput(f"seed must be as data_seed, for which it is short, was {seed!r} and {other!r}; give one")
        settings["data_seed"] = seed
    name = data if isinstance(data, str) else type(data).__name__
    how = read(DataSettings, {"data": name, "clients": clients, **settings}, by="federate")
    if how.has_sites:
        if classes is not None:
            raise BadInput(f"classes must be left out for {how.data!r}, which says it, was {classes!r}; leave it out")
        return sites.of_files(how) if how.sites is not None else FEDERATIONS[how.data](how)
    partition = parse_partition(how.partition)
    assert how.clients is not None  # where data is shared out there is a usual number
    require_count("clients", how.clients, "give at least one")
    _require_fraction("validation_share", how.validation_share, zero="for no public data")
    _require_fraction("test_share", how.test_share)
    streams = Streams(how.data_seed).public
    dataset = as_dataset(data, classes)

    pool, test = dataset.pool, dataset.test
    held_out, private = torch.arange(len(test)), torch.arange(len(pool))
    if len(test) == 0:
        held_out, private = _cut_off(private, dataset.groups, "test_share", how.test_share, streams.generator("test"))
        test = pool.take(held_out)
    public = private[:0]
    if how.validation_share > 0:
        public, private = _cut_off(
            private, dataset.groups, "validation_share", how.validation_share, streams.generator("validation")
        )

    raw, raw_test = dataset.raw or (pool, test)
    if len(raw_test) == 0:
        raw_test = raw.take(held_out)
    if dataset.fit is not None:
        if how.validation_share == 0:
            raise BadInput(
                f"validation_share must be above 0 for {dataset.name!r}, whose preprocessing is fitted on public data,"
                " was 0; use for example 0.1"
            )
        features, test_features = prepared(dataset.fit(pool.x[public]), pool.x, public, test.x)
        pool, test = Records(features, pool.y), Records(test_features, test.y)
    known = _judged(dataset, {"test": (test, held_out), "validation": (pool.take(public), public)})
    pool, unusable = marked(pool, known)  # all of them private: the public ones are sound
    if unusable:
        warnings.warn(
            f"data {dataset.name!r} has {len(private):,} private records, of which these count as zero in training:"
            f" {', '.join(unusable)}; mend them where they are kept (said here and written nowhere)",
            Caution, stacklevel=2,
        )  # fmt: skip

    shared = share_out(
        partition,
        pool.y[private],
        how.clients,
        streams.generator("partition"),
        sizes=how.sizes,
        min_records=how.min_records,
        regression=known is None,
        groups=None if dataset.groups is None else dataset.groups[private],
    )
    kept = keep_share(shared, how.share, streams.generator("share"))

    def untouched() -> tuple[Records, ...]:
        return *(raw.take(private[rows]) for rows in kept), raw.take(public), raw_test

    return Federation(
        name=dataset.name,
        clients=tuple(pool.take(private[rows]) for rows in kept),
        validation=pool.take(public),
        test=test,
        classes=known,
        source=dataset.source,
        recipe=asdict(how) if isinstance(data, str) else None,
        untouched=None if dataset.fit is None and dataset.raw is None else untouched,
    )


def of_hospitals(how: DataSettings) -> Federation:
    """Return patients of four real hospitals, embedded: has somebody a heart disease?"""
    return sites.gather(hospitals(), name="heart", source=SOURCE, classes=2, recipe=how)


FEDERATIONS: dict[str, Callable[[DataSettings], Federation]] = {"heart": of_hospitals}


def count_of(how: DataSettings) -> int:
    """Return how many clients there are."""
    return how.clients or len(names_of(how))


def names_of(how: DataSettings) -> tuple[str, ...]:
    """Return what the clients are called, in their order, where they have names."""
    if not how.has_sites:
        return ()
    return tuple(site_files(how.sites)) if isinstance(how.sites, tuple) else HOSPITALS


def as_dataset(data: Any, classes: int | None = None) -> Dataset:
    """Make a `Dataset` of whatever `federate` accepts, with so many classes if that is said here."""
    if isinstance(data, str):
        data = load(data)
    if isinstance(data, Dataset):
        if data.classes is None or classes is None:
            return replace(data, classes=data.classes or classes)
        if data.classes != classes:
            raise BadInput(f"classes must be as data {data.name!r} says, {data.classes}, was {classes!r}; leave it out")
        return data
    if isinstance(data, tuple) and len(data) == 2:
        return from_arrays(*data, classes=classes)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return from_torch(data, classes=classes)
    raise BadInput(
        f"data must be a name, a Dataset, a pair of arrays or a map-style torch data set, was "
        f"{type(data).__name__!r}; make one with from_arrays"
    )


def _judged(dataset: Dataset, splits: dict[str, tuple[Records, Tensor]]) -> int | None:
    """Return how many classes public records show or are said to be of, and refuse those that cannot be used.

    splits: each with the rows in which the caller has its records.
    """
    for name, (records, rows) in splits.items():
        require_finite(records, rows, f"data {dataset.name!r} ({name} split)")
    classes = classes_of(dataset.classes, [records.y for records, _ in splits.values()])
    for name, (records, _) in splits.items():
        require_known(records, classes, f"data {dataset.name!r} ({name} split)")
    return classes


def _cut_off(rows: Tensor, groups: Tensor | None, field: str, share: float, rng: Generator) -> tuple[Tensor, Tensor]:
    """Split a random share off `rows`, whole groups where there are groups; both sides keep at least one."""
    owners = rows.numpy() if groups is None else groups[rows].numpy()
    names = np.unique(owners)
    if len(names) < 2:
        unit = "records" if groups is None else "groups"
        raise BadInput(f"{field} must split at least 2 {unit}, there was {len(names)}; use more data")
    count = min(max(1, round(share * len(names))), len(names) - 1)
    taken = torch.from_numpy(np.isin(owners, rng.permutation(names)[:count]))
    return rows[taken], rows[~taken]


def _require_fraction(field: str, value: float, *, zero: str | None = None) -> None:
    """Refuse what is no part of the data; `zero` says what none of it would be for, where that is allowed."""
    if not (isinstance(value, (int, float)) and (0 < value < 1 or (zero and value == 0))):
        least = f"at least 0 ({zero})" if zero else "above 0"
        raise BadInput(f"{field} must be {least} and below 1, was {value!r}; use for example 0.1")
