"""Whose records these are: what a shared ledger remembers of them, so that it counts people and not numbers of clients.

A ledger keeps a keyed hash of every record, by the client that held it or as public. In a later run a record that is
known must be where it was: at another client it would be charged to somebody else's account, and one that becomes
public after it was private was never protected. Records that are new may come in anywhere. Nothing is recognised that
changed in a single bit, such as a record that was corrected or scaled anew. Noise is remembered by its key: under one
key two runs draw the same noise, and their difference is the exact difference of what it hides.

The key of the hashes is the ledger's own: without it they tell nothing, and a run's folder holds neither.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfl.errors import BadInput

PUBLIC = -1  # where records lie that are nobody's: the public validation and the test split

TABLES = """
CREATE TABLE populations (id INTEGER PRIMARY KEY, opened TEXT NOT NULL);
CREATE TABLE people (
    population INTEGER NOT NULL, record BLOB NOT NULL, place INTEGER NOT NULL,  -- a client, or -1: public
    run INTEGER NOT NULL REFERENCES runs,  -- that brought it
    PRIMARY KEY (population, record, place)
) WITHOUT ROWID;
CREATE TABLE noise_keys (fingerprint BLOB PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs) WITHOUT ROWID;
CREATE TABLE notes (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"""


@dataclass(frozen=True)
class Fingerprints:
    """What tells the people and the noise of a run from all others, under one ledger's key."""

    clients: Sequence[Sequence[bytes]]  # of each client's records
    public: Sequence[bytes]
    noise: bytes  # of the key that all noise of the run is drawn under

    def places(self) -> set[tuple[bytes, int]]:
        """Return where every record lies."""
        at_clients = {(record, client) for client, records in enumerate(self.clients) for record in records}
        return at_clients | {(record, PUBLIC) for record in self.public}


def fingerprints_of(key: bytes, features: NDArray[Any], targets: NDArray[Any]) -> list[bytes]:
    """Return the keyed hash of each record but of those that count as zero, which look alike and lose nothing."""
    # Adding zero makes one of both zeros, which differ in their bits and in nothing else.
    numbers = math.prod(features.shape[1:])  # said, since of no records it could not be worked out
    rows = zip(np.ascontiguousarray(features).reshape(len(features), numbers) + 0, targets + 0, strict=True)
    return [fingerprint(key, row.tobytes() + target.tobytes()) for row, target in rows if not np.isnan(row).any()]


def fingerprint(key: bytes, content: bytes) -> bytes:
    """Return the hash of some content under a ledger's key."""
    return blake2b(content, key=key, digest_size=16).digest()


def require_at_home(known: Mapping[bytes, set[int]], places: set[tuple[bytes, int]], where: str) -> None:
    """Refuse records that a ledger knows from elsewhere.

    known: where each record lay in earlier runs.
    """
    moved: Counter[str] = Counter()
    for record, place in places:
        before = known.get(record)
        if before is not None and place not in before:
            kind = "became public" if place == PUBLIC else "were public" if before == {PUBLIC} else "changed clients"
            moved[kind] += 1
    if moved:
        told = ", ".join(f"{count:,} {kind}" for kind, count in sorted(moved.items()))
        raise BadInput(
            f"records must stay where they were in earlier runs of the ledger {where}, which counts what each client's"
            f" people have lost, but {told}; share the data out as before (data_seed), or let the owner say that these"
            f" are other people, with `dpfl ledger FILE --new-people`"
        )
