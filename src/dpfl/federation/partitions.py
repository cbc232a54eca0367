"""How a pool of records is shared out among clients.

Each partition is a pure function that returns, for each client, the positions of its records; no record goes
to two clients. Without `sizes` the whole pool is shared out; with them a client gets exactly that many:

    None            share out everything
    800             every client gets 800
    (400, 600)      the first half of the clients get 400 each, the second half 600
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from dpfl.errors import BadInput, choose, require_count

Rows = NDArray[np.int64]
Sizes = int | Sequence[int] | None

DIRICHLET_TRIES = 1000
FORMS = {
    "iid": "iid",
    "dirichlet": "dirichlet:ALPHA",
    "classes": "classes:C",
    "sorted": "sorted",
    "writer": "writer",
    "writer-groups": "writer-groups",
}
OF_PEOPLE = ("writer", "writer-groups")  # which need data that knows whose each record is


@dataclass(frozen=True)
class Partition:
    """A partition by name, with the number that it takes, if any."""

    kind: str
    number: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.number:g}" if ":" in FORMS[self.kind] else self.kind


def parse_partition(text: str) -> Partition:
    """Read `iid`, `dirichlet:ALPHA`, `classes:C`, `sorted`, `writer` or `writer-groups`.

    >>> parse_partition("dirichlet:0.05")
    Partition(kind='dirichlet', number=0.05)
    >>> parse_partition("dirichlet:0")
    Traceback (most recent call last):
    ...
    dpfl.errors.BadInput: partition must be written dirichlet:ALPHA with ALPHA above 0, was 'dirichlet:0'; ...
    """
    kind, colon, written = str(text).strip().partition(":")
    form = choose("partition", kind, FORMS)
    if form == kind:
        if colon:
            raise BadInput(f"partition {kind!r} takes no number, was {text!r}; write {kind!r}")
        return Partition(kind)
    try:
        number = float(written)
    except ValueError:
        number = math.nan
    if kind == "dirichlet" and not (math.isfinite(number) and number > 0):
        raise BadInput(
            f"partition must be written {form} with ALPHA above 0, was {text!r}; write for example 'dirichlet:0.5'"
        )
    if kind == "classes" and not (number >= 1 and number.is_integer()):
        raise BadInput(
            f"partition must be written {form} with C a whole number of at least 1, was {text!r}; "
            f"write for example 'classes:2'"
        )
    return Partition(kind, number)


def share_out(
    partition: Partition,
    targets: Tensor,
    clients: int,
    rng: Generator,
    *,
    sizes: Sizes = None,
    min_records: int = 10,
    regression: bool = False,
    groups: Tensor | None = None,
) -> list[Tensor]:
    """Share records with these targets out by `partition`, or say in one sentence why that cannot be done."""
    if sizes is not None and partition.kind in ("dirichlet", *OF_PEOPLE):
        raise BadInput(
            f"sizes must be left out with partition '{partition}', which decides itself how much each client "
            f"holds, was {sizes!r}; leave it out, or use 'iid', 'classes:C' or 'sorted'"
        )
    if regression and partition.kind in ("dirichlet", "classes"):
        raise BadInput(
            f"partition must be 'iid' or 'sorted' for regression, whose targets are no class labels, "
            f"was '{partition}'; use one of those"
        )
    match partition.kind:
        case "dirichlet":
            return dirichlet(targets, clients, partition.number, rng, min_records=min_records)
        case "classes":
            return classes(targets, clients, int(partition.number), rng, sizes=sizes)
        case "sorted":
            pieces = sorted_cut(targets, clients, rng, sizes=sizes)
            # Numbers must not follow the targets: clients that are asked in turn would come from one end to the other.
            blocks = np.split(np.arange(clients), len(sizes) if isinstance(sizes, Sequence) else 1)
            return [pieces[at] for block in blocks for at in rng.permutation(block)]
        case "writer":
            return writer(groups, clients, rng)
        case "writer-groups":
            return writer_groups(groups, clients, rng)
        case _:
            return iid(len(targets), clients, rng, sizes=sizes)


def iid(records: int, clients: int, rng: Generator, *, sizes: Sizes = None) -> list[Tensor]:
    """Share records out at random; without `sizes`, as evenly as can be."""
    wanted = client_sizes(records, clients, sizes)
    return _cut(rng.permutation(records), wanted)


def sorted_cut(targets: Tensor, clients: int, rng: Generator, *, sizes: Sizes = None) -> list[Tensor]:
    """Sort records by target and cut them into contiguous pieces, the lowest targets to client 0.

    Where `sizes` leave records over, a random part of the pool is sorted: cutting from one end would lose the
    highest targets altogether.
    """
    wanted = client_sizes(len(targets), clients, sizes)
    kept = np.sort(rng.permutation(len(targets))[: wanted.sum()])
    order = np.argsort(targets.numpy()[kept], kind="stable")
    return _cut(kept[order], wanted)


def dirichlet(labels: Tensor, clients: int, alpha: float, rng: Generator, *, min_records: int = 10) -> list[Tensor]:
    """Share the records of each class out by its own draw from Dir(alpha) over the clients.

    Small `alpha` leaves some clients with next to nothing, so the whole draw is repeated until each has
    `min_records`.
    """
    require_count("min_records", min_records, "use 1 to allow clients of any size")
    _require_clients(clients, len(labels))
    if clients * min_records > len(labels):
        raise BadInput(
            f"min_records must be at most {len(labels) // clients} for {clients} clients to share "
            f"{len(labels)} records, was {min_records}; lower it or clients"
        )
    held = _rows_by_class(labels)
    totals = np.array([len(rows) for rows in held])[:, None]  # [C, 1]
    for _ in range(DIRICHLET_TRIES):
        shares = rng.dirichlet(np.full(clients, alpha), size=len(held))  # [C, N]
        ends = np.rint(shares.cumsum(axis=1)[:, :-1] * totals).astype(np.int64)  # [C, N-1]
        counts = np.diff(ends, axis=1, prepend=0, append=totals)  # [C, N]
        if counts.sum(axis=0).min() >= min_records:
            return _deal_out([rng.permutation(rows) for rows in held], counts.T)
    raise BadInput(
        f"partition 'dirichlet:{alpha:g}' must give each of {clients} clients at least "
        f"min_records={min_records} records, did not in {DIRICHLET_TRIES:,} draws; raise ALPHA, or lower "
        f"clients or min_records"
    )


def classes(labels: Tensor, clients: int, per_client: int, rng: Generator, *, sizes: Sizes = None) -> list[Tensor]:
    """Give every client records of exactly `per_client` classes.

    Without `sizes` each class is shared out evenly among the clients who took it (a class that nobody took
    stays out); with them a client holds equally many records, but for one, of each of its classes.
    """
    held = [rng.permutation(rows) for rows in _rows_by_class(labels)]
    if per_client > len(held):
        raise BadInput(
            f"partition 'classes:{per_client}' must ask for at most as many classes as there are records of, was "
            f"{per_client}; lower it"
        )
    totals = client_sizes(len(labels), clients, sizes)
    if sizes is not None and totals.min() < per_client:
        raise BadInput(
            f"sizes must be at least {per_client} for a client to hold {per_client} classes, was {sizes!r}; "
            f"raise sizes or lower the number of classes"
        )
    takes = _take_classes(clients, len(held), per_client, rng)
    wanted = np.zeros(takes.shape, np.int64)
    if sizes is None:
        for k, rows in enumerate(held):
            wanted[takes[:, k], k] = _even(len(rows), int(takes[:, k].sum()))
    else:
        for client, total in enumerate(totals):
            wanted[client, takes[client]] = _even(int(total), per_client)
    needed = np.maximum(takes, wanted).sum(axis=0)  # at least one record for each client who took the class
    if any(need > len(rows) for rows, need in zip(held, needed, strict=True)):
        field = "clients" if sizes is None else "sizes"
        raise BadInput(
            f"{field} must leave enough records of every class for partition 'classes:{per_client}', did not; lower it"
        )
    return _deal_out(held, wanted)


def writer(groups: Tensor | None, clients: int, rng: Generator) -> list[Tensor]:
    """Make one client of each of `clients` writers (or other groups) chosen at random."""
    pieces = _by_writer(groups, clients, "writer")
    return [torch.from_numpy(pieces[i]) for i in rng.choice(len(pieces), clients, replace=False)]


def writer_groups(groups: Tensor | None, clients: int, rng: Generator) -> list[Tensor]:
    """Share all writers out at random, each to one client with all of its records and, but for one, as many to each.

    A client holds as many records as its writers wrote.
    """
    pieces = _by_writer(groups, clients, "writer-groups")
    held = np.split(rng.permutation(len(pieces)), _even(len(pieces), clients).cumsum()[:-1])
    return [torch.from_numpy(np.concatenate([pieces[i] for i in mine])) for mine in held]


def keep_share(rows: list[Tensor], share: float, rng: Generator) -> list[Tensor]:
    """Let each client keep a random share of its records, and at least one."""
    if not (isinstance(share, (int, float)) and 0 < share <= 1):
        raise BadInput(f"share must be above 0 and at most 1, was {share!r}; use 1 to keep everything")
    if share == 1:
        return rows
    kept = []
    for mine in rows:
        count = max(1, round(share * len(mine)))
        kept.append(mine[torch.from_numpy(rng.permutation(len(mine))[:count])])
    return kept


def client_sizes(records: int, clients: int, sizes: Sizes) -> Rows:
    """Say how many records each client gets; `sizes` is explained at the top of this file.

    >>> client_sizes(100, 4, (10, 30)).tolist()
    [10, 10, 30, 30]
    """
    _require_clients(clients, records)
    if sizes is None:
        return _even(records, clients)
    pattern = list(sizes) if isinstance(sizes, Sequence) else [sizes]
    for size in pattern:
        require_count("sizes", size, "leave it out to share out everything")
    if not pattern or clients % len(pattern):
        raise BadInput(
            f"sizes must be one number, or several that divide the {clients} clients into equal groups, "
            f"was {sizes!r}; change clients or how many sizes there are"
        )
    wanted = np.repeat(np.array(pattern, np.int64), clients // len(pattern))
    if wanted.sum() > records:
        raise BadInput(
            f"sizes must add up to at most the {records:,} records there are to share out, added up to "
            f"{wanted.sum():,} over {clients} clients; lower sizes, clients or validation_share"
        )
    return wanted


def _require_clients(clients: int, records: int) -> None:
    require_count("clients", clients, "give at least one")
    if clients > records:
        raise BadInput(
            f"clients must be at most the {records:,} records there are to share out, was {clients:,}; "
            f"lower it, or use more data"
        )


def _even(total: int, parts: int) -> Rows:
    counts = np.full(parts, total // max(parts, 1), np.int64)
    counts[: total - counts.sum()] += 1
    return counts


def _take_classes(clients: int, count: int, per_client: int, rng: Generator) -> NDArray[np.bool_]:
    """Let each client take the classes that were taken least so far, ties at random.

    So every class is taken equally often, but for one, and none is left when the clients can take them all.
    The answer is a table [clients, classes].
    """
    takes = np.zeros((clients, count), np.bool_)
    taken = np.zeros(count, np.int64)
    for client in range(clients):
        mine = np.lexsort((rng.permutation(count), taken))[:per_client]
        takes[client, mine] = True
        taken[mine] += 1
    return takes


def _by_writer(groups: Tensor | None, clients: int, partition: str) -> list[Rows]:
    """Return the rows of each writer, where there is one at least for each client."""
    if groups is None:
        raise BadInput(
            f"partition {partition!r} needs data that knows who wrote each record, such as 'femnist', and this "
            "does not; use another partition"
        )
    rows = _rows_by_class(groups)
    require_count("clients", clients, "give at least one")
    if clients > len(rows):
        raise BadInput(
            f"clients must be at most the {len(rows)} writers there are to share out, was {clients}; "
            f"lower it or validation_share"
        )
    return rows


def _rows_by_class(labels: Tensor) -> list[Rows]:
    order = np.argsort(labels.numpy(), kind="stable")
    starts = np.unique(labels.numpy()[order], return_index=True)[1]
    return np.split(order, starts[1:])


def _cut(order: Rows, wanted: Rows) -> list[Tensor]:
    return [torch.from_numpy(piece) for piece in np.split(order, wanted.cumsum())[:-1]]


def _deal_out(held: list[Rows], wanted: Rows) -> list[Tensor]:
    """Deal each class's rows `held` [C] out by the table `wanted` [clients, C]."""
    by_class = [np.split(rows, column.cumsum())[:-1] for rows, column in zip(held, wanted.T, strict=True)]
    return [torch.from_numpy(np.concatenate(mine)) for mine in zip(*by_class, strict=True)]
