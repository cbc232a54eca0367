"""The books: what every client was charged, in one SQLite file that outlives the process.

A charge is on disk before the upload it pays for exists, and nothing is ever changed or removed: a chain of hashes
(`chain`) runs through everything that is written. One file can hold many runs, so that it answers how much a client has
spent, ever; its owner can grant each client a limit over all of them. The file is a rollback-journal database, whole in
itself whenever nobody is writing. One that is not ours, damaged, locked or of a newer version is refused in a sentence
and left as it was.
"""

import json
import math
import os
import sqlite3
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from dpfl.errors import BadInput, require_count, require_one_of, require_readable
from dpfl.orders import NEIGHBOURS, UNITS, Neighbours, Unit
from dpfl.privacy import chain, people
from dpfl.privacy.accounting import Mechanism
from dpfl.privacy.budget import Budget
from dpfl.privacy.chain import Entry
from dpfl.privacy.filters import Currency
from dpfl.privacy.people import Fingerprints

_APPLICATION = 0x6470666C  # "dpfl"
_VERSION = 2  # of the tables below and of what `runs.facts` says; 1 had no chain and knew no people
_NO_NOISE = 1e-300  # costs infinitely much, where a sum of costs has overflowed
_PATIENCE = 10.0  # seconds to wait while somebody else writes
FAST = "a fast sampler"  # where noise comes from that is drawn in floating point, without a seed

_TABLES = """
CREATE TABLE runs (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, opened TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE releases (
    id INTEGER PRIMARY KEY, noise TEXT NOT NULL, multiplier REAL NOT NULL, sampling_rate REAL NOT NULL,
    count INTEGER NOT NULL, noise_std REAL, sensitivity REAL  -- these two as they are in the upload
);
CREATE TABLE charges (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs, round INTEGER NOT NULL, client INTEGER NOT NULL,
    release INTEGER REFERENCES releases  -- NULL: uploaded without noise
);
CREATE TABLE broadcasts (
    run INTEGER NOT NULL REFERENCES runs, round INTEGER NOT NULL, noise_std REAL NOT NULL, PRIMARY KEY (run, round)
);
CREATE TABLE aggregates (charge INTEGER PRIMARY KEY REFERENCES charges, weight REAL NOT NULL);
CREATE TABLE grants (
    id INTEGER PRIMARY KEY, client INTEGER,  -- NULL: every client
    epsilon REAL NOT NULL, delta REAL NOT NULL, unit TEXT NOT NULL, neighbours TEXT NOT NULL, currency TEXT NOT NULL,
    granted TEXT NOT NULL
)"""
_SINCE_VERSION_2 = f"{people.TABLES};{chain.TABLE}"


@dataclass(frozen=True)
class Release:
    """What one order lets out: a mechanism, how often, and how noise and sensitivity look in the upload."""

    mechanism: Mechanism
    count: int
    noise_std: float | None = None  # None where the upload is not its plain sum with Gaussian noise
    sensitivity: float | None = None


@dataclass(frozen=True)
class Grant:
    """What a client may spend in all runs of one file together."""

    client: int | None  # None: every client that has no grant of its own
    budget: Budget
    unit: Unit
    neighbours: Neighbours
    currency: Currency

    def __post_init__(self) -> None:
        if self.client is not None:
            require_count("client", self.client, "clients count from 0", at_least=0)
            if self.client >= 2**31:
                raise BadInput(f"client must be below 2³¹, was {self.client}; clients count from 0")
        require_one_of("unit", self.unit, UNITS)
        require_one_of("neighbours", self.neighbours, NEIGHBOURS)
        require_one_of("currency", self.currency, get_args(Currency))


@dataclass(frozen=True)
class BookedRun:
    """A training that was charged to the books."""

    id: int
    name: str
    opened: str
    facts: dict[str, Any]


class Books:
    """An open file of charges; in memory where no path is given."""

    def __init__(self, path: Path | None = None, *, create: bool = True) -> None:
        """Open the file, or make it where there is none and `create` allows."""
        self.path = path
        if not create and (path is None or not path.exists()):
            raise BadInput(f"ledger must be a file that exists, but {str(path)!r} does not; give one that a run made")
        try:
            self._sql = sqlite3.connect(path or ":memory:", timeout=_PATIENCE, isolation_level=None)
        except sqlite3.Error as problem:
            raise self._refused(problem) from None
        try:
            # A file without tables is new, or was given up before anything was charged.
            if self._one("SELECT COUNT(*) FROM sqlite_master")[0] == 0 and create:
                with self.transaction():  # which makes what is missing
                    pass
            self._check()
            self._sql.execute("PRAGMA synchronous = EXTRA")  # a commit is on disk, and so is the end of its journal
            self._sql.execute("PRAGMA foreign_keys = ON")
        except (sqlite3.Error, BadInput) as problem:
            self.close()
            raise problem if isinstance(problem, BadInput) else self._refused(problem) from None

    def _renew(self) -> None:
        """Make the tables of a new file, or those that an older one lacks, now that something is written to it."""
        version = self._version
        if version == _VERSION:
            return
        for statement in (*(_TABLES.split(";") if version == 0 else ()), *_SINCE_VERSION_2.split(";")):
            self._sql.execute(statement)
        self._sql.execute("INSERT INTO notes VALUES ('key', ?)", (self.key,))
        chain.add_all(self._sql)
        self._sql.execute(f"PRAGMA application_id = {_APPLICATION}")
        self._sql.execute(f"PRAGMA user_version = {_VERSION}")

    @property
    def _version(self) -> int:
        return int(self._one("PRAGMA user_version")[0])

    def _check(self) -> None:
        if self._one("PRAGMA application_id")[0] != _APPLICATION:
            raise BadInput(
                f"ledger must be a ledger of dpfl, but {str(self.path)!r} is another database; choose another"
            )
        require_readable("ledger", repr(str(self.path)), self._version, _VERSION)
        if self._one("PRAGMA quick_check(1)")[0] != "ok":
            raise sqlite3.DatabaseError("its pages do not fit together")

    def _refused(self, problem: Exception) -> BadInput:
        where = "in memory" if self.path is None else repr(str(self.path))
        if "locked" in str(problem):
            return BadInput(
                f"ledger must be free, but {where} has been locked by another process for {_PATIENCE:.0f} s; wait for"
                " it to end, and try again"
            )
        if isinstance(problem, sqlite3.OperationalError):
            return BadInput(f"ledger must be a file that can be used, but {where} cannot ({problem}); choose another")
        return BadInput(
            f"ledger must be whole, but {where} is damaged or no ledger ({problem}); it was left as it is: restore a"
            " copy, and count what it cannot tell as spent"
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all of what follows or nothing of it; on return it is on disk. Nobody else writes meanwhile."""
        try:
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                self._renew()
                yield
                self._sql.execute("COMMIT")
            except BaseException:
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
                raise
        except sqlite3.Error as problem:
            raise self._refused(problem) from None

    def _one(self, query: str, *values: Any) -> Any:
        return self._sql.execute(query, values).fetchone()

    def close(self) -> None:
        """Let go of the file."""
        self._sql.close()

    # What is written.

    def open_run(self, facts: dict[str, Any], fingerprints: Fingerprints | None = None) -> BookedRun:
        """Begin a run; `facts` is plain data that says what was promised to whom.

        fingerprints: of its people and its noise, for a ledger that many runs share.
        """
        name, opened = uuid.uuid4().hex[:16], _now()
        with self.transaction():
            population = self.population
            facts = facts | {"population": population}
            if fingerprints is not None:
                self.require_known(fingerprints)  # again, now that nobody else writes
            number = self._insert("run", name, opened, json.dumps(facts))
            if fingerprints is not None:
                self._sql.execute("INSERT INTO noise_keys VALUES (?, ?)", (fingerprints.noise, number))
                self._sql.executemany(
                    f"INSERT OR IGNORE INTO people VALUES ({population}, ?, ?, {number})", fingerprints.places()
                )
                self._chain(Entry("people", number), chain.people_of(self._sql, number))
        return BookedRun(number, name, opened, facts)

    def add_release(self, release: Release) -> int:
        """Describe a release, for charges to point to."""
        one = release.mechanism
        in_upload = (None if value is None else float(value) for value in (release.noise_std, release.sensitivity))
        return self._insert(
            "release", one.noise, float(one.multiplier), float(one.sampling_rate), int(release.count), *in_upload
        )

    def add_charges(self, run: BookedRun, round: int, releases: Mapping[int, int | None]) -> dict[int, int]:
        """Charge each client for a release, inside a transaction; return the charges' numbers."""
        first = int(self._one("SELECT COALESCE(MAX(id), 0) + 1 FROM charges")[0])
        numbers = {client: first + place for place, client in enumerate(releases)}
        self._sql.executemany(
            "INSERT INTO charges VALUES (?, ?, ?, ?, ?)",
            ((numbers[client], run.id, round, client, release) for client, release in releases.items()),
        )
        if releases:
            rows = ((numbers[client], client, release) for client, release in releases.items())
            self._chain(Entry("charges", run.id, round), rows)
        return numbers

    def add_broadcast(self, run: BookedRun, round: int, weights: Mapping[int, float], noise_std: float) -> None:
        """Note with which weight each charged upload went into the model that was sent out, and the noise on it."""
        if not all(map(math.isfinite, (noise_std, *weights.values()))):
            raise BadInput(
                f"weights of uploads, and the noise on a model, must be finite numbers, but those of round {round} are"
                " not; mend the system"
            )
        rows = sorted((charge, float(weight) + 0.0) for charge, weight in weights.items())  # SQLite knows no −0
        with self.transaction():
            self._sql.execute("INSERT INTO broadcasts VALUES (?, ?, ?)", (run.id, round, float(noise_std)))
            self._sql.executemany("INSERT INTO aggregates VALUES (?, ?)", rows)
            self._chain(Entry("broadcast", run.id, round), [(float(noise_std),), *rows])

    def grant(self, grant: Grant) -> None:
        """Limit what a client may spend in all runs together; a later grant replaces an earlier one."""
        self.require_writable()
        budget, kind = grant.budget, (grant.unit, grant.neighbours, grant.currency)
        with self.transaction():
            self._insert("grant", grant.client, float(budget.epsilon), float(budget.delta), *kind, _now())

    def add_people(self) -> None:
        """Note that from now on the clients' records are other people's, who have lost nothing yet."""
        self.require_writable()
        with self.transaction():
            self._insert("population", _now())

    def _insert(self, kind: str, *values: Any) -> int:
        """Add a row to the table of this kind, and to the chain."""
        marks = ", ".join("?" * len(values))
        number = int(self._sql.execute(f"INSERT INTO {kind}s VALUES (NULL, {marks})", values).lastrowid or 0)
        self._chain(Entry(kind, number), [(number, *values)])
        return number

    def _chain(self, entry: Entry, rows: chain.Rows) -> None:
        if self.path is not None:  # nobody can reach what is in memory
            chain.add(self._sql, entry, rows)

    # What is read. Sums are taken by the database, so that a million charges need no memory here.

    def runs(self) -> list[BookedRun]:
        """Return every run, in the order in which they began."""
        rows = self._all("SELECT id, name, opened, facts FROM runs ORDER BY id")
        try:
            return [BookedRun(number, name, opened, json.loads(facts)) for number, name, opened, facts in rows]
        except ValueError as problem:
            raise self._refused(problem) from None

    def run(self, name: str) -> BookedRun:
        """Return one run by its name."""
        for run in self.runs():
            if run.name == name:
                return run
        raise BadInput(
            f"ledger must hold the run {name!r}, but {str(self.path)!r} does not; give the file it was charged to"
        )

    def runs_of(self, population: int) -> list[BookedRun]:
        """Return the runs that were on these people."""
        return [run for run in self.runs() if run.facts.get("population", 1) == population]

    def names(self) -> list[str]:
        """Return what the clients are called, by the newest run that knows; empty where none does."""
        known = (run.facts.get("names") for run in reversed(self.runs_of(self.population)))
        return next((names for names in known if names), [])

    def grants(self) -> list[Grant]:
        """Return the grants, in the order in which they were given."""
        rows = self._all("SELECT client, epsilon, delta, unit, neighbours, currency FROM grants ORDER BY id")
        return [Grant(client, Budget(epsilon, delta), *kind) for client, epsilon, delta, *kind in rows]

    def grants_of(self, clients: Iterable[int]) -> dict[int, Grant | None]:
        """Return what each client may spend: its own newest grant, or the newest for everybody."""
        newest = {grant.client: grant for grant in self.grants()}
        return {client: newest.get(client, newest.get(None)) for client in clients}

    def last_grant(self) -> int:
        """Return the number of the newest grant."""
        return int(self._one("SELECT COALESCE(MAX(id), 0) FROM grants")[0])

    def last_charge(self) -> int:
        """Return the number of the newest charge."""
        return int(self._one("SELECT COALESCE(MAX(id), 0) FROM charges")[0])

    def charges_of_others(self, run: BookedRun, after: int) -> list[tuple[int, int, Release | None]]:
        """Return (run, client, release) of the charges that other runs added after the charge of this number."""
        rows = self._all(
            "SELECT c.run, c.client, r.id, r.noise, r.multiplier, r.sampling_rate, r.count FROM charges c"
            " LEFT JOIN releases r ON r.id = c.release WHERE c.id > ? AND c.run != ?", after, run.id,
        )  # fmt: skip
        return [
            (other, client, Release(Mechanism(*kind), count) if number else None)
            for other, client, number, *kind, count in rows
        ]

    @cached_property
    def key(self) -> bytes:
        """Return the key under which records and noise are recognised; an older file gets one when it is written to."""
        known = self._one("SELECT value FROM notes WHERE name = 'key'") if self._version > 1 else None
        return os.urandom(32) if known is None else known[0]

    @property
    def population(self) -> int:
        """Return which people the clients hold records of now: 1, and one more whenever others took their place."""
        return 1 + int(self._one("SELECT COUNT(*) FROM populations")[0]) if self._version > 1 else 1

    def require_known(self, fingerprints: Fingerprints) -> None:
        """Refuse records that have moved since earlier runs, and noise that was drawn before."""
        if self._version == 1:
            return
        if used := self._one("SELECT r.name FROM noise_keys JOIN runs r ON r.id = run WHERE fingerprint = ?",
                             fingerprints.noise):  # fmt: skip
            raise BadInput(
                f"seed must be one that the ledger {str(self.path)!r} has not seen, but its run {used[0]} drew the same"
                " noise, which would cancel out; leave it out, or take another"
            )
        known: dict[bytes, set[int]] = defaultdict(set)
        for record, place in self._all("SELECT record, place FROM people WHERE population = ?", self.population):
            known[record].add(place)
        people.require_at_home(known, fingerprints.places(), repr(str(self.path)))

    def head(self, run: BookedRun | None = None) -> str | None:
        """Return what stands for everything up to the last entry (of a run); None where nothing is chained."""
        if self.path is None or self._version == 1:
            return None
        last = chain.head(self._sql, None if run is None else run.id)
        return None if last is None else last.hex()

    def require_whole(self, *heads: str) -> None:
        """Refuse books that do not fit their chain of hashes, or whose chain does not hold these heads."""
        where = repr(str(self.path))
        try:
            if self._version == 1:  # which had no chain; one that has was marked as such afterwards
                chained = bool(self._one("SELECT 1 FROM sqlite_master WHERE name = 'links'"))
                problem, strange = "its version is not that of its tables" if chained else None, list(heads)
            else:
                problem = chain.broken(self._sql, extract=self.is_extract)
                strange = [head for head in heads if not chain.holds(self._sql, head)]
        except (sqlite3.Error, ValueError) as error:
            raise self._refused(error) from None
        if problem is not None:
            raise BadInput(
                f"ledger must be as it was written, but in {where} {problem}; restore a copy, and count what it cannot"
                " tell as spent"
            )
        if strange:
            raise BadInput(
                f"ledger must hold what the certificate was issued on, but {where} does not have its head"
                f" {strange[0][:16]}…: it was rolled back, shortened, edited, or is another; restore the newest copy"
            )

    def require_writable(self) -> None:
        """Refuse to add to an extract."""
        if self.is_extract:
            raise BadInput(
                f"ledger must be one that can be charged, but {str(self.path)!r} is the extract of a single run; give"
                " the ledger that it was taken from"
            )

    @property
    def is_extract(self) -> bool:
        """Tell whether this holds one run alone of books that lie elsewhere."""
        return self._version > 1 and self._one("SELECT 1 FROM notes WHERE name = 'extract'") is not None

    def extract(self, run: BookedRun, path: Path) -> None:
        """Write one run, with its part of the chain, into a file of its own, which nothing can be charged to.

        It shows neither other runs nor what people are recognised by.
        """
        path.unlink(missing_ok=True)
        with closing(Books(path)) as other, other.transaction():
            sql = other._sql
            sql.execute("UPDATE notes SET name = 'extract', value = '' WHERE name = 'key'")
            sql.execute("DELETE FROM links")  # of a ledger's own beginning
            for table, where in (
                ("runs", "id = ?"),
                ("releases", "id IN (SELECT release FROM charges WHERE run = ?)"),
                ("charges", "run = ?"),
                ("broadcasts", "run = ?"),
                ("aggregates", "charge IN (SELECT id FROM charges WHERE run = ?)"),
            ):
                rows = self._all(f"SELECT * FROM {table} WHERE {where}", run.id)
                if rows:
                    sql.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
            sql.executemany("INSERT INTO links VALUES (?, ?, ?, ?, ?, ?, ?, ?)", chain.links_of(self._sql, run.id))

    def rounds(self, run: BookedRun) -> int:
        """Return the last round that was charged or sent out."""
        last = "SELECT MAX(round) FROM {} WHERE run = ?"
        return max(int(self._one(last.format(table), run.id)[0] or 0) for table in ("charges", "broadcasts"))

    def replies(self, *runs: BookedRun) -> dict[int, int]:
        """Return how many uploads each client was charged for."""
        return dict(self._all(f"SELECT client, COUNT(*) FROM charges WHERE run IN {_numbers(runs)} GROUP BY client"))

    def unprotected(self, *runs: BookedRun) -> set[int]:
        """Return the clients that uploaded without noise."""
        query = f"SELECT DISTINCT client FROM charges WHERE release IS NULL AND run IN {_numbers(runs)}"
        return {client for (client,) in self._all(query)}

    def spent(self, *runs: BookedRun) -> dict[int, Counter[Mechanism]]:
        """Return what each client let out, all plain Gaussian releases as one."""
        charged = f"FROM charges JOIN releases ON releases.id = charges.release WHERE run IN {_numbers(runs)}"
        return self._by_client(f"SELECT client, noise, sampling_rate, multiplier, count {charged}")

    def overheard(self, run: BookedRun, exposures: int) -> dict[int, Counter[Mechanism]]:
        """Return what each client let out to somebody who hears a few of its uploads and reads every model.

        An upload that is heard costs its own price, any other what the model tells of it: nothing where it was lost.
        Heard are those that cost most beyond the model's price. Where models tell as much as uploads, and of a client
        whose noise was not always plain Gaussian, so that no upload is dearer than another for certain, all count.
        """
        everything, told = self.spent(run), self._told(run)
        if told is None:
            return everything
        charged, of_run = "charges c JOIN releases r ON r.id = c.release", f"WHERE c.run = {run.id}"
        priced = f"""SELECT c.client AS client, r.count * (1 / r.multiplier) * (1 / r.multiplier) AS upload,
                            COALESCE((1 / t.multiplier) * (1 / t.multiplier), 0.0) AS model
                     FROM {charged} LEFT JOIN ({told}) t ON t.charge = c.id {of_run}"""
        # A difference of two infinite prices is NULL.
        placed = f"""SELECT client, upload, MIN(model, upload) AS model, ROW_NUMBER() OVER
                     (PARTITION BY client ORDER BY COALESCE(upload - model, 9e999) DESC) AS place FROM ({priced})"""
        other = f"SELECT client FROM {charged} {of_run} AND NOT (noise = 'gaussian' AND sampling_rate = 1)"
        rows = self._all(
            f"SELECT client, SUM(CASE WHEN place <= {int(exposures)} THEN upload ELSE model END) FROM ({placed})"
            f" WHERE client NOT IN ({other}) GROUP BY client"
        )
        return everything | {client: Counter({_plain(mu_squared): 1}) for client, mu_squared in rows}

    def released(self, run: BookedRun) -> dict[int, Counter[Mechanism]] | None:
        """Return what each client let out through the models that were sent out, or None where only uploads tell.

        A broadcast shows Σ p_j·(update_j + noise_j) + the server's noise: client i moves it by p_i·Δ_i, under
        Gaussian noise of variance Σ p_j²σ_j² + σ_D². That holds where each upload is a sum with Gaussian noise on it.
        """
        told = self._told(run)
        return None if told is None else self._by_client(told)

    def _told(self, run: BookedRun) -> str | None:
        """Ask for what a model tells of each charged upload in it: a table as `_by_client` sums it, with the charge."""
        joined = f"""FROM charges c JOIN aggregates a ON a.charge = c.id JOIN broadcasts b USING (run, round)
                     LEFT JOIN releases r ON r.id = c.release WHERE c.run = {run.id}"""
        if self._one(f"SELECT COUNT(*) {joined} AND r.noise_std IS NULL")[0]:
            return None
        total = f"""SELECT round, SUM(weight * r.noise_std * weight * r.noise_std) + MAX(b.noise_std * b.noise_std)
                           AS variance {joined} GROUP BY round"""
        # Multipliers are rounded down to six digits: rounds that differ by rounding alone are counted together.
        moved = f"""SELECT c.id AS charge, client, noise, sampling_rate, count, c.round AS round,
                           weight * r.sensitivity * weight * r.sensitivity AS squared {joined} AND weight != 0"""
        self._sql.create_function("multiplier", 2, told_multiplier, deterministic=True)
        return f"""SELECT charge, client, noise, sampling_rate, multiplier(variance, squared) AS multiplier, count
                   FROM ({moved}) JOIN ({total}) USING (round)"""

    def _by_client(self, charges: str) -> dict[int, Counter[Mechanism]]:
        """Sum a table of (client, noise, sampling_rate, multiplier, count)."""
        plain = "noise = 'gaussian' AND sampling_rate = 1"
        found: dict[int, Counter[Mechanism]] = defaultdict(Counter)
        for client, mu_squared in self._all(
            f"SELECT client, SUM(count * (1 / multiplier) * (1 / multiplier)) FROM ({charges}) WHERE {plain} GROUP BY 1"
        ):
            found[client][_plain(mu_squared)] += 1
        for client, noise, rate, multiplier, count in self._all(
            f"SELECT client, noise, sampling_rate, multiplier, SUM(count) FROM ({charges}) WHERE NOT ({plain})"
            " GROUP BY 1, 2, 3, 4"
        ):
            found[client][Mechanism(noise, multiplier, rate)] += count
        return dict(found)

    def _all(self, query: str, *values: Any) -> list[Any]:
        try:
            return self._sql.execute(query, values).fetchall()
        except sqlite3.Error as problem:
            raise self._refused(problem) from None


def _numbers(runs: Sequence[BookedRun]) -> str:
    return f"({', '.join(str(run.id) for run in runs)})"


def _plain(mu_squared: float) -> Mechanism:
    return Mechanism("gaussian", max(1 / math.sqrt(mu_squared), _NO_NOISE))


def told_multiplier(variance: float, squared: float) -> float:
    """Return the noise of a model in units of how far a client moves it, rounded down at the sixth digit."""
    return max(float(f"{math.sqrt(variance / squared) * (1 - 1e-6):.6e}"), _NO_NOISE)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
