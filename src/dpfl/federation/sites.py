"""Clients that exist already: hospitals, banks or machines with records and names of their own.

Nothing is shared out here, and nothing is fitted to what records say: values are taken as they are, or as a schema of
public ranges reads them (`schema`). A part of each site's records is held out to test on, by their positions alone;
what is reported about it is not private. Records that the server may look at exist only where a public set is given.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpfl.errors import BadInput, Caution
from dpfl.federation.facts import classes_of, marked, require_finite, require_known, sound
from dpfl.federation.own import as_records
from dpfl.federation.records import Federation, Records
from dpfl.federation.schema import Schema, read_schema
from dpfl.federation.site_files import encode, read_site, site_files
from dpfl.settings import DataSettings
from dpfl.streams import Root, Streams

_SCHEMA = "schema.toml"  # where it is looked for in a folder of sites
_LONGEST = 60  # characters of a name that tables can hold
_SPLIT = 0  # the seed of what is held out where none is given: a site's split should be the same in every run


@dataclass(frozen=True)
class Site:
    """One client with its records, and those that it keeps for testing."""

    name: str
    records: Records
    test: Records


def from_clients(
    clients: Mapping[str, Any] | Sequence[Any],
    *,
    validation: Any = None,
    test: Any = None,
    classes: int | None = None,
    schema: Schema | str | Path | None = None,
    names: Sequence[str] | None = None,
    test_share: float = 0.2,
    data_seed: int | None = None,
    name: str = "own sites",
) -> Federation:
    """Make a federation of clients that exist already.

    clients: what each holds, by its name, or in a list (and `names`): a pair of arrays or tensors (features, targets),
        a map-style torch data set, `Records`, or, with a `schema`, a table: a pandas or polars frame, or a dict of
        columns.
    validation: public records in one of these forms, for plans and for decisions during training; none if left out.
    test: what to report on: one such set that is public, or, as `clients` is, one for each client. If left out,
        `test_share` of each client's own records, by their positions; 0 for none.
    classes: how many there are; a schema says it too, or public labels show it. Labels of clients decide nothing.
    schema: how tables are read, or the file that says it.
    data_seed: of what is held out; the same for everybody if left out.

    >>> federation = from_clients({"north": ([[0.0], [1.0], [2.0]], [0, 1, 1]), "south": ([[3.0]], [1])}, classes=2)
    >>> federation.names, federation.sizes, len(federation.test)
    (('north', 'south'), (2, 1), 1)
    """
    held = _named(clients, names, "clients")
    read = read_schema(Path(schema)) if isinstance(schema, str | Path) else schema
    records = {client: _read(data, read, f"clients ({client})") for client, data in held.items()}
    public = None if validation is None else _read(validation, read, "validation")
    streams = Streams(_SPLIT if data_seed is None else data_seed).public
    shared_test: Records | None = None
    if test is None:
        sites = [_cut(client, own, test_share, streams, at) for at, (client, own) in enumerate(records.items())]
    elif _is_one_each(test, clients):
        tests = _named(test, tuple(records), "test")
        if missing := [client for client in records if client not in tests]:
            raise BadInput(f"test must have records of each client, but has none of {missing[0]!r}; add them")
        sites = [Site(client, own, _read(tests[client], read, f"test ({client})")) for client, own in records.items()]
    else:
        shared_test = _read(test, read, "test")
        sites = [Site(client, own, own.take(torch.arange(0))) for client, own in records.items()]
    known = classes if classes is not None or read is None else read.classes
    return gather(sites, name=name, source=f"{name}, {len(sites)} clients", classes=known, validation=public,
                  test=shared_test)  # fmt: skip


def of_files(how: DataSettings) -> Federation:
    """Read the sites' files by their schema; each file's name is its client's."""
    assert isinstance(how.sites, tuple)
    places = site_files(how.sites)
    folders = {path.parent for path in places.values()}
    beside = [folder / _SCHEMA for folder in sorted(folders) if (folder / _SCHEMA).is_file()]
    if how.schema is None and not beside:
        raise BadInput(
            f"schema must say what the columns of the sites' files mean and in which public ranges, but there is no"
            f" {_SCHEMA} beside them; give --schema FILE, or let `dpfl schema {places[min(places)]}` draft one"
        )
    schema = read_schema(beside[0] if how.schema is None else Path(how.schema))
    streams = Streams(_SPLIT if how.data_seed is None else how.data_seed).public
    sites = []
    for at, (client, path) in enumerate(places.items()):
        read = read_site(path, schema)
        _tell(str(path), len(read.records), read.bad)
        sites.append(_cut(client, read.records, how.test_share, streams, at))
    public = None if how.public is None else _public(Path(how.public), places, schema)
    total = sum(len(site.records) + len(site.test) for site in sites)
    where = ", ".join(how.sites)
    return gather(
        sites, name="sites", source=f"{len(sites)} sites, {total:,} records, {where}", classes=schema.classes,
        validation=public, recipe=how,
    )  # fmt: skip


def _public(path: Path, sites: Mapping[str, Path], schema: Schema) -> Records:
    """Read a public file, which must be sound and nobody's own."""
    if path.exists() and any(path.samefile(own) for own in sites.values()):
        raise BadInput(
            f"public must be a file apart from the sites', but {str(path)!r} is one of theirs, whose records are"
            " private; move it elsewhere, or name the sites' files one by one"
        )
    read = read_site(path, schema)
    if read.bad:
        told = ", ".join(f"{count:,} {reason}" for reason, count in read.bad.items())
        raise BadInput(
            f"public must be a file whose rows can all be used, but {str(path)!r} has {told}; mend or remove them"
        )
    return read.records


def gather(
    sites: Sequence[Site],
    *,
    name: str,
    source: str,
    classes: int | None,
    validation: Records | None = None,
    test: Records | None = None,
    recipe: DataSettings | None = None,
) -> Federation:
    """Make a federation of sites; public records must be sound, and private ones that are not count as zero.

    test: public records to report on, in place of the sites' own. recipe: the settings that say all this.
    """
    for site in sites:
        _require_name(site.name)
    public = {part: records for part, records in (("validation", validation), ("test", test)) if records is not None}
    first = next(iter(public.values()), sites[0].records)
    for site in sites:
        for own in (site.records, site.test):
            _require_alike(own, first, f"client {site.name!r}")
    for part, records in public.items():
        _require_alike(records, first, part)
        require_finite(records, torch.arange(len(records)), part)
    known = _classes(classes, first, list(public.values()))
    for part, records in public.items():
        require_known(records, known, part)
    clients, tests = [], []
    for site in sites:
        if len(site.records) == 0:
            raise BadInput(f"client {site.name!r} must have at least one record to train on, had none; leave it out")
        (own, unusable), (test_own, unscored) = marked(site.records, known), marked(site.test, known)
        if (unusable or unscored) and recipe is None:  # of files the rows were told already
            train = (
                f"of {len(own):,} records these count as zero in training: {', '.join(unusable)}; " if unusable else ""
            )
            score = (
                f"of {len(test_own):,} kept for testing nobody can score {', '.join(unscored)}; " if unscored else ""
            )
            warnings.warn(
                f"client {site.name!r}: {train}{score}mend them where they are kept (said here and written nowhere)",
                Caution, stacklevel=3,
            )  # fmt: skip
        clients.append(own)
        tests.append(test_own)
    if recipe is not None and recipe.clients not in (None, len(sites)):
        raise BadInput(f"clients must be as many as there are sites, {len(sites)}, was {recipe.clients}; leave it out")
    scored = [sound(own) for own in tests]
    kept = test is None and any(map(len, tests))
    pooled = Records(torch.cat([own.x for own in scored]), torch.cat([own.y for own in scored]))
    return Federation(
        name=name, clients=tuple(clients), validation=first.take(torch.arange(0)) if validation is None else validation,
        test=pooled if test is None else test, classes=known, source=source,
        recipe=None if recipe is None else asdict(replace(recipe, clients=len(sites))),
        names=tuple(site.name for site in sites), site_tests=tuple(tests) if kept else (),
    )  # fmt: skip


def _require_name(name: str) -> None:
    """Refuse names that a terminal or a table would not show as they are."""
    if not (name.isprintable() and name.strip() == name and 0 < len(name) <= _LONGEST):
        raise BadInput(
            f"names must be of 1 to {_LONGEST} printable characters, without spaces at the ends, was {name!r}; rename"
            " the site (a file's name is its site's)"
        )


def _named(given: Mapping[str, Any] | Sequence[Any], names: Sequence[str] | None, field: str) -> dict[str, Any]:
    """Return what each client has by its name; numbers are names where there are no others."""
    if isinstance(given, Mapping):
        named = {str(name): data for name, data in given.items()}
    else:
        called = [str(at) for at in range(len(given))] if names is None else [str(name) for name in names]
        if len(called) != len(given) or len(set(called)) != len(called):
            raise BadInput(
                f"names must be {len(given)} different ones, one for each of the {field}, were {len(called)} with"
                f" {len(set(called))} different; correct them"
            )
        named = dict(zip(called, given, strict=True))
    if not named:
        raise BadInput(f"{field} must be at least one, were none; name some")
    return named


def _is_one_each(test: Any, clients: Mapping[str, Any] | Sequence[Any]) -> bool:
    """Tell whether `test` holds something for each client: it has the form that `clients` has."""
    if isinstance(clients, Mapping):
        return isinstance(test, Mapping) and set(map(str, test)) <= set(map(str, clients))
    return isinstance(test, list) and len(test) == len(clients)


def _read(data: Any, schema: Schema | None, where: str) -> Records:
    if isinstance(data, Records):
        return data
    if not _is_table(data):
        return as_records(data, where)
    if schema is None:
        raise BadInput(
            f"schema must say what the columns of a table mean and in which public ranges, but {where} is one and there"
            " is none; give schema=, which `dpfl schema` drafts, or arrays"
        )
    read = encode(data, schema, where)
    _tell(where, len(read.records), read.bad)
    return read.records


def _tell(where: str, rows: int, bad: Mapping[str, int]) -> None:
    """Tell whoever holds the records how many of them count as zero, and why."""
    if bad:
        told = ", ".join(f"{count:,} {reason}" for reason, count in bad.items())
        warnings.warn(
            f"{where}: of {rows:,} rows these count as zero in training, as the schema says: {told}; mend them where"
            " they are kept (said here and written nowhere)", Caution, stacklevel=4,
        )  # fmt: skip


def _is_table(data: Any) -> bool:
    """Tell whether this is a pandas or polars frame, or a dict of columns."""
    return isinstance(data, Mapping) or (hasattr(data, "columns") and hasattr(data, "to_numpy"))


def _cut(name: str, records: Records, share: float, streams: Root, client: int) -> Site:
    """Hold a part of a site's records out for testing, by their positions: what they say decides nothing."""
    if not 0 <= share < 1:
        raise BadInput(f"test_share must be at least 0 (for none) and below 1, was {share!r}; use for example 0.2")
    count = min(round(share * len(records)), len(records) - 1)
    order = torch.from_numpy(streams.generator("test", client=client).permutation(len(records)))
    return Site(name, records.take(order[count:].sort().values), records.take(order[:count].sort().values))


def _require_alike(records: Records, first: Records, what: str) -> None:
    if records.x.shape[1:] != first.x.shape[1:] or records.y.dtype != first.y.dtype:
        raise BadInput(
            f"{what} must look like the rest, with features of shape {list(first.x.shape[1:])} and targets of type"
            f" {first.y.dtype}, had {list(records.x.shape[1:])} and {records.y.dtype}; prepare all in the same way"
        )


def _classes(given: int | None, first: Records, public: Sequence[Records]) -> int | None:
    """Return how many classes there are: as the caller or public records say, never the clients' labels."""
    if first.y.is_floating_point() or public:
        return classes_of(given, [records.y for records in public] or [first.y])
    if given is None:
        raise BadInput(
            "classes must be given where there are no public records to count them by, was None: labels of clients"
            " decide nothing; give classes=C, or float targets for regression"
        )
    return classes_of(given, [])
