"""Public records in the clients' place, shared out as the clients' are: what plans are tried on.

A plan that was made by looking at clients' records would be a release of them. So probes and pilots see the public
validation split alone, or any other federation that is handed to them as public, synthetic or paid for.
"""

from dataclasses import dataclass

import torch
from numpy.random import Generator

from dpfl.errors import BadInput
from dpfl.federation import Federation, Partition, Records, parse_partition
from dpfl.federation.partitions import OF_PEOPLE, share_out

_LEAST = 20  # public records below which nothing can be learned from them
_EACH = 4  # public records for each client in whose place they stand, where there are enough


@dataclass(frozen=True)
class StandIn:
    """Clients made of public records, and more public records to judge the outcome by."""

    clients: tuple[Records, ...]
    held_out: Records
    source: str  # what it was made of, in words


def has_public(federation: Federation) -> bool:
    """Tell whether enough records are public to plan with."""
    return len(federation.validation) >= _LEAST


def stand_in(federation: Federation, *, hold_out: float, rng: Generator) -> StandIn:
    """Share the public split out as the federation's clients share theirs, but for the part that is held out.

    There may be fewer stand-ins than clients, where the public records do not go round.
    """
    public = federation.validation
    if not has_public(federation):
        raise BadInput(
            f"validation_share must leave at least {_LEAST} public records to plan with, left {len(public)}: clients'"
            " own must not be looked at; raise it, or give --constants"
        )
    order = torch.from_numpy(rng.permutation(len(public)))
    cut = round(hold_out * len(public))
    held_out, rest = public.take(order[:cut]), public.take(order[cut:])
    how = parse_partition(str((federation.recipe or {}).get("partition", "iid")))
    pieces, how = _share(how, rest, min(len(federation.clients), len(rest) // _EACH), federation.classes is None, rng)
    source = f"{len(rest)} public records of {federation.name} in {len(pieces)} clients ({how})"
    return StandIn(tuple(rest.take(rows) for rows in pieces), held_out, source)


def _share(
    how: Partition, records: Records, clients: int, regression: bool, rng: Generator
) -> tuple[list[torch.Tensor], Partition]:
    """Share out in the given way among as many clients as it allows; at random where it allows none."""
    most = clients
    while clients > 1 and how.kind not in OF_PEOPLE:  # who wrote a public record is not kept
        try:
            pieces = share_out(how, records.y, clients, rng, min_records=1, regression=regression)
            return [rows for rows in pieces if len(rows)], how
        except BadInput:
            clients //= 2
    iid = parse_partition("iid")
    return share_out(iid, records.y, max(2, min(most, len(records) // 10)), rng, regression=regression), iid
