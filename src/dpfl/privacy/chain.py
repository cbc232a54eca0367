"""A chain of hashes over everything that books hold, so that whoever has its head notices a file that was changed.

Whatever is written is a link: the hash of the link before it and of the rows it stands for. Rows that were edited no
longer fit their link; a file that was rolled back or shortened no longer holds the head that a certificate names. What
nobody can notice from the file alone is that it was put back to an earlier state, or written anew as a whole: whoever
keeps a certificate, or its head, can.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

TABLE = """
CREATE TABLE links (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, item INTEGER NOT NULL, round INTEGER,  -- the rows it stands for
    salt BLOB NOT NULL, digest BLOB NOT NULL, previous BLOB NOT NULL, hash BLOB NOT NULL
)"""

SHOWN = 32  # digits of a hash that are printed
_START = bytes(32)
_OF_RUN = "item = ? AND kind IN ('run', 'people', 'charges', 'broadcast')"
_TOLD_KINDS = ("run", "charges", "broadcast")  # by an extract, which knows nobody
_TOLD = f"item = ? AND kind IN {_TOLD_KINDS}"

Rows = Iterable[tuple[Any, ...]]


class Entry(NamedTuple):
    """What a link stands for: an item by its number, or what happened in a round of a run."""

    kind: str
    item: int
    round: int | None = None


def add(sql: sqlite3.Connection, entry: Entry, rows: Rows) -> None:
    """Chain rows that were just written, inside their transaction."""
    salt = os.urandom(16)  # without which nobody finds out by trying what a link of an extract stands for
    previous, digest = head(sql) or _START, _digest(rows, salt)
    values = (*entry, salt, digest, previous, _hash(previous, entry, digest))
    sql.execute(
        "INSERT INTO links (kind, item, round, salt, digest, previous, hash) VALUES (?, ?, ?, ?, ?, ?, ?)", values
    )


def add_all(sql: sqlite3.Connection) -> None:
    """Chain everything in a file that knew no chain."""
    for entry, rows in list(_contents(sql)):
        add(sql, entry, rows)


def head(sql: sqlite3.Connection, run: int | None = None) -> bytes | None:
    """Return the hash of the last link (of a run), which covers all that was written before it."""
    where, which = ("TRUE", ()) if run is None else (_OF_RUN, (run,))
    found = sql.execute(f"SELECT hash FROM links WHERE {where} ORDER BY id DESC LIMIT 1", which).fetchone()
    return None if found is None else found[0]


def people_of(sql: sqlite3.Connection, run: int) -> Rows:
    """Return what a run made known: its noise, and the records that no earlier run had."""
    noise = "SELECT NULL, hex(fingerprint), NULL FROM noise_keys WHERE run = ?"
    people = "SELECT population, hex(record), place FROM people WHERE run = ? ORDER BY 1, 2, 3"
    return sql.execute(noise, (run,)).fetchall() + sql.execute(people, (run,)).fetchall()


def holds(sql: sqlite3.Connection, head: str) -> bool:
    """Tell whether a hash, or its beginning as it is printed, is one of the chain's."""
    found = sql.execute("SELECT 1 FROM links WHERE substr(hex(hash), 1, ?) = ?", (len(head), head.upper()))
    return len(head) >= SHOWN and found.fetchone() is not None


def links_of(sql: sqlite3.Connection, run: int) -> list[tuple[Any, ...]]:
    """Return the rows of all links from the first to the last of a run; those of others without their salt."""
    bounds = f"(SELECT MIN(id) FROM links WHERE {_OF_RUN}) AND (SELECT MAX(id) FROM links WHERE {_OF_RUN})"
    own = f"{_TOLD} OR kind = 'release' AND item IN (SELECT release FROM charges WHERE run = ?)"
    return sql.execute(
        f"SELECT id, kind, item, round, CASE WHEN {own} THEN salt ELSE x'' END, digest, previous, hash FROM links"
        f" WHERE id BETWEEN {bounds} ORDER BY id", (run,) * 4,
    ).fetchall()  # fmt: skip


def broken(sql: sqlite3.Connection, *, extract: bool) -> str | None:
    """Say what does not fit the chain, or None where everything does.

    extract: whether the file holds one run of a longer chain, in which the rows of others are not there.
    """
    own = _own(sql) if extract else None
    links = [(row[0], Entry(*row[1:4]), *row[4:]) for row in sql.execute("SELECT * FROM links ORDER BY id")]
    salts = {entry: salt for _, entry, salt, *_ in links}
    there = {entry: _digest(rows, salts.get(entry, b"")) for entry, rows in _contents(sql)}
    before: tuple[int, bytes] | None = None if extract else (0, _START)
    for number, entry, _, digest, previous, hash in links:
        if before is not None and (number - 1, previous) != before:
            return f"what was written before its entry {number:,} is gone or was changed"
        if hash != _hash(previous, entry, digest):
            return f"its entry {number:,} was changed"
        of_another = own is not None and not own(entry)
        if there.pop(entry, digest if of_another else None) != digest:
            where = "" if entry.round is None else f" of round {entry.round}"
            return f"what its entry {number:,} stands for (the {entry.kind}{where}) is gone or was changed"
        before = number, hash
    if there:
        return f"something in it (the {next(iter(there)).kind}) was written past the chain"
    return None


def _own(sql: sqlite3.Connection) -> Callable[[Entry], bool]:
    """Return what tells an extract's own entries, which must be there, from those that only lie between them."""
    runs = {run for (run,) in sql.execute("SELECT id FROM runs")}
    releases = {release for (release,) in sql.execute("SELECT DISTINCT release FROM charges")}

    def own(entry: Entry) -> bool:
        return entry.item in runs if entry.kind in _TOLD_KINDS else entry.kind == "release" and entry.item in releases

    return own


def key_of(sql: sqlite3.Connection) -> Rows:
    """Return what stands for the key of a ledger."""
    return [
        (_digest([(key.hex(),)], b"").hex(),) for (key,) in sql.execute("SELECT value FROM notes WHERE name = 'key'")
    ]


def _contents(sql: sqlite3.Connection) -> Iterator[tuple[Entry, Rows]]:
    """Return all rows by the entry that they belong to, each table read once."""
    if key := key_of(sql):
        yield Entry("key", 1), key
    for kind in ("population", "run", "release", "grant"):
        for row in sql.execute(f"SELECT * FROM {kind}s ORDER BY id"):
            yield Entry(kind, row[0]), (row,)
    for (run,) in sql.execute("SELECT run FROM noise_keys ORDER BY run").fetchall():
        yield Entry("people", run), people_of(sql, run)
    charges = sql.execute("SELECT run, round, id, client, release FROM charges ORDER BY id")
    for (run, round), rows in groupby(charges, lambda row: row[:2]):
        yield Entry("charges", run, round), tuple(row[2:] for row in rows)
    sent = sql.execute(
        "SELECT b.run, b.round, b.noise_std, a.charge, a.weight FROM broadcasts b"
        " LEFT JOIN charges c USING (run, round)"
        " LEFT JOIN aggregates a ON a.charge = c.id ORDER BY 1, 2, 4"
    )
    for (run, round, noise_std), rows in groupby(sent, lambda row: row[:3]):
        yield Entry("broadcast", run, round), ((noise_std,), *(row[3:] for row in rows if row[3] is not None))
    orphans = sql.execute(
        "SELECT DISTINCT c.run, c.round FROM aggregates a LEFT JOIN charges c ON c.id = a.charge"
        " LEFT JOIN broadcasts b USING (run, round) WHERE b.run IS NULL"
    )
    for run, round in orphans:
        yield Entry("aggregate", run, round), ()


def _digest(rows: Rows, salt: bytes) -> bytes:
    return hashlib.blake2b(json.dumps(list(rows)).encode(), digest_size=32, salt=salt).digest()


def _hash(previous: bytes, entry: Entry, digest: bytes) -> bytes:
    return hashlib.blake2b(previous + digest + json.dumps(entry).encode(), digest_size=32).digest()
