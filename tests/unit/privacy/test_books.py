"""The books keep what they were told, add it up as one would by hand, and refuse a file they cannot trust."""

import hashlib
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfl.errors import BadInput
from dpfl.privacy import books as module
from dpfl.privacy.accounting import Mechanism
from dpfl.privacy.books import BookedRun, Books, Grant, Release
from dpfl.privacy.budget import Budget
from grids import each

PLAIN, SAMPLED, LAPLACE = (
    Release(Mechanism("gaussian", 2.0), 1, noise_std=0.2, sensitivity=0.1),
    Release(Mechanism("gaussian", 1.1, 0.015), 5),
    Release(Mechanism("laplace", 4.0), 1),
)
FACTS = {"promise": {"unit": "record"}, "sizes": [10, 20], "system": "udp", "seeded": False}


def gaussian(multiplier: float) -> Release:
    return Release(Mechanism("gaussian", multiplier), 1)


def upload(noise_std: float, sensitivity: float, *, rate: float = 1.0) -> Release:
    """Return a release whose upload is a sum with this noise on it."""
    return Release(Mechanism("gaussian", noise_std / sensitivity, rate), 1, noise_std, sensitivity)


def charge(books: Books, run: BookedRun, round: int, releases: dict[int, Release | None]) -> dict[int, int]:
    """Charge one round; return the charges' numbers."""
    with books.transaction():
        numbers = {i: None if release is None else books.add_release(release) for i, release in releases.items()}
        return books.add_charges(run, round, numbers)


def play(
    books: Books, run: BookedRun, round: int, uploads: dict[int, tuple[float, Release | None]], noise_std: float = 0.0
) -> None:
    """Charge a round and send out the model in which each upload has its weight."""
    numbers = charge(books, run, round, {client: release for client, (_, release) in uploads.items()})
    books.add_broadcast(run, round, {numbers[client]: weight for client, (weight, _) in uploads.items()}, noise_std)


def mu_squared(seen: dict[Mechanism, int]) -> float:
    return math.fsum(count * one.mu_squared for one, count in seen.items())


@pytest.fixture
def books() -> Iterator[Books]:
    with closing(Books()) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a ledger file with two runs, some charges and a grant."""
    file = tmp_path / "ledger.sqlite"
    with closing(Books(file)) as made:
        for _ in range(2):
            run = made.open_run(FACTS)
            for round in range(1, 4):
                play(made, run, round, {0: (0.5, PLAIN), 1: (0.5, PLAIN)})
        made.grant(Grant(None, Budget(8.0, 1e-3), "record", "replace", "plain"))
    return file


# What is written is what is read.


def test_a_file_that_is_closed_and_opened_again_tells_the_same(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"

    def told(books: Books) -> list[Any]:
        runs = books.runs()
        return [
            runs, books.grants(), books.last_charge(), [books.rounds(run) for run in runs],
            [books.replies(run) for run in runs], books.replies(*runs), books.unprotected(*runs), books.spent(*runs),
            [books.spent(run) for run in runs], [books.overheard(run, 1) for run in runs],
            [books.released(run) for run in runs], books.charges_of_others(runs[0], 0), books.run(runs[1].name),
        ]  # fmt: skip

    with closing(Books(file)) as written:
        first, second = written.open_run(FACTS), written.open_run({"promise": None})
        play(written, first, 1, {0: (0.25, PLAIN), 1: (0.75, upload(0.4, 0.1))}, noise_std=0.5)
        charge(written, first, 2, {1: SAMPLED})
        charge(written, second, 1, {0: LAPLACE, 5: None})
        written.grant(Grant(None, Budget(8.0, 1e-3), "record", "replace", "plain"))
        written.grant(Grant(3, Budget(1.0, 0.0), "client", "add-remove", "renyi"))
        before = told(written)
    with closing(Books(file, create=False)) as read:
        assert told(read) == before


def test_by_hand_what_two_runs_wrote(books: Books) -> None:
    first, second = books.open_run(FACTS), books.open_run({"promise": None})
    charge(books, first, 1, {0: PLAIN, 1: PLAIN})
    charge(books, first, 2, {1: SAMPLED})
    charge(books, second, 1, {0: LAPLACE, 5: None})
    assert [(run.name, run.facts) for run in books.runs()] == [
        (first.name, FACTS | {"population": 1}), (second.name, {"promise": None, "population": 1})
    ]  # fmt: skip
    assert first.name != second.name
    assert books.run(second.name) == second
    assert (books.rounds(first), books.rounds(second)) == (2, 1)
    assert books.replies(first) == {0: 1, 1: 2}
    assert books.replies(first, second) == {0: 2, 1: 2, 5: 1}
    assert (books.unprotected(first), books.unprotected(second)) == (set(), {5})
    assert books.spent(first) == {0: {PLAIN.mechanism: 1}, 1: {PLAIN.mechanism: 1, SAMPLED.mechanism: 5}}
    assert books.spent(first, second)[0] == {PLAIN.mechanism: 1, LAPLACE.mechanism: 1}
    assert books.last_charge() == 5
    # Of the runs beside the first, everything; beside the second, only what came after charge 1.
    assert books.charges_of_others(first, 0) == [(second.id, 0, LAPLACE), (second.id, 5, None)]
    assert [client for _, client, _ in books.charges_of_others(second, 1)] == [1, 1]


def test_an_unknown_run_is_refused_in_a_sentence(path: Path) -> None:
    with closing(Books(path)) as books, pytest.raises(BadInput, match="must hold the run 'nobody'"):
        books.run("nobody")


def test_a_broadcast_counts_as_a_round_though_nobody_was_charged(books: Books) -> None:
    run = books.open_run(FACTS)
    assert books.rounds(run) == 0
    books.add_broadcast(run, 3, {}, 0.0)
    assert books.rounds(run) == 3


# What is not finished is not there.


def test_a_transaction_that_fails_leaves_nothing_behind(books: Books) -> None:
    run = books.open_run(FACTS)

    def interrupted() -> None:
        with books.transaction():
            books.add_charges(run, 1, {0: books.add_release(PLAIN)})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert books.replies(run) == books.spent(run) == {}
    assert charge(books, run, 1, {0: PLAIN}) == {0: 1}  # and the next one goes through
    assert books.replies(run) == {0: 1}


def test_nobody_sees_a_charge_before_it_is_on_disk_and_everybody_after(path: Path) -> None:
    with closing(Books(path)) as writer, closing(Books(path)) as reader:
        run = writer.open_run(FACTS)
        with writer.transaction():
            writer.add_charges(run, 1, {0: writer.add_release(PLAIN)})
            assert reader.replies(run) == {}
        assert reader.replies(run) == {0: 1}


def test_a_charge_for_what_was_never_described_is_refused(books: Books) -> None:
    run = books.open_run(FACTS)

    def dangling() -> None:
        with books.transaction():
            books.add_charges(run, 1, {0: 99})

    with pytest.raises(BadInput, match="FOREIGN KEY"):
        dangling()
    assert books.replies(run) == {}


def test_a_commit_waits_for_the_disk_and_the_file_is_whole_in_itself(path: Path) -> None:
    # What a power failure would show cannot be shown here, so the two switches are looked at.
    with closing(Books(path)) as books:
        assert books._one("PRAGMA synchronous") == (3,)  # EXTRA
        assert books._one("PRAGMA journal_mode") == ("delete",)
    assert [file.name for file in path.parent.iterdir()] == ["ledger.sqlite"]


# What uploads tell.


def test_plain_gaussian_releases_are_one(books: Books) -> None:
    # Multipliers 2, 2 and 1 and five releases at 5: μ² = 1/4 + 1/4 + 1 + 5/25 = 1.7.
    run = books.open_run(FACTS)
    for round, release in enumerate([gaussian(2.0), gaussian(2.0), gaussian(1.0), Release(gaussian(5.0).mechanism, 5)]):
        charge(books, run, round, {0: release})
    ((one, count),) = books.spent(run)[0].items()
    assert (one.noise, one.plain, count) == ("gaussian", True, 1)
    assert one.mu_squared == pytest.approx(1.7)


def test_a_sum_beyond_all_numbers_stays_beyond_all_numbers(books: Books) -> None:
    run = books.open_run(FACTS)
    for round in (1, 2):
        charge(books, run, round, {0: gaussian(1e-200)})
    assert mu_squared(books.spent(run)[0]) == math.inf


# What released models tell.


def released(books: Books, run: BookedRun) -> dict[int, float]:
    """Return what each client let out through models, in μ²."""
    found = books.released(run)
    assert found is not None
    return {client: mu_squared(seen) for client, seen in found.items()}


def almost(expected: dict[int, float]) -> Any:
    """Allow for the rounding to six digits."""
    return pytest.approx(expected, rel=5e-6)


def test_everybodys_noise_protects_everybody(books: Books) -> None:
    # ¼·4 = 1 and ¾·2 = 1.5 of noise make a variance of 3.25; the clients move the model by ¼·1 and ¾·2.
    run = books.open_run(FACTS)
    play(books, run, 1, {0: (0.25, upload(4.0, 1.0)), 1: (0.75, upload(2.0, 2.0))})
    assert released(books, run) == almost({0: 0.25**2 / 3.25, 1: 1.5**2 / 3.25})


def test_three_clients_and_the_servers_noise(books: Books) -> None:
    # Variance (½·2)² + (¼·4)² + (¼·8)² + 3² = 1 + 1 + 4 + 9 = 15.
    run = books.open_run(FACTS)
    uploads = {0: (0.5, upload(2.0, 1.0)), 1: (0.25, upload(4.0, 1.0)), 2: (0.25, upload(8.0, 2.0))}
    play(books, run, 1, uploads, noise_std=3.0)
    assert released(books, run) == almost({0: 0.25 / 15, 1: 0.0625 / 15, 2: 0.25 / 15})


def test_rounds_add_up_and_a_client_that_missed_one_gave_nothing_in_it(books: Books) -> None:
    # Round 1: variance 1 + 1 = 2, each moves it by ½. Round 2: client 0 alone, variance 4, moves it by 1.
    run = books.open_run(FACTS)
    play(books, run, 1, {0: (0.5, upload(2.0, 1.0)), 1: (0.5, upload(2.0, 1.0))})
    play(books, run, 2, {0: (1.0, upload(2.0, 1.0))})
    assert released(books, run) == almost({0: 1 / 8 + 1 / 4, 1: 1 / 8})


def test_an_upload_that_was_charged_and_never_sent_out_is_in_no_model(books: Books) -> None:
    run = books.open_run(FACTS)
    play(books, run, 1, {0: (1.0, upload(2.0, 1.0))})
    charge(books, run, 2, {0: upload(2.0, 1.0), 1: LAPLACE})  # the run ended here
    assert released(books, run) == almost({0: 1 / 4})


def test_a_weight_of_nothing_lets_nothing_out_and_adds_no_noise(books: Books) -> None:
    run = books.open_run(FACTS)
    play(books, run, 1, {0: (1.0, upload(2.0, 1.0)), 1: (0.0, upload(2.0, 1.0))})
    assert released(books, run) == almost({0: 1 / 4})


def test_another_runs_noise_is_in_another_model(books: Books) -> None:
    first, second = books.open_run(FACTS), books.open_run(FACTS)
    play(books, first, 1, {0: (1.0, upload(2.0, 1.0))})
    play(books, second, 1, {0: (1.0, upload(4.0, 1.0)), 1: (1.0, upload(4.0, 1.0))})
    assert released(books, first) == almost({0: 1 / 4})
    assert released(books, second) == almost({0: 1 / 32, 1: 1 / 32})


def test_a_sampled_upload_is_sampled_in_the_model_too(books: Books) -> None:
    # ½·6 = 3 and ½·8 = 4 of noise make 5; moved by ½·2 and ½·1 at its own rate.
    run = books.open_run(FACTS)
    for round in (1, 2, 3):
        play(books, run, round, {0: (0.5, upload(6.0, 2.0, rate=0.1)), 1: (0.5, upload(8.0, 1.0, rate=0.2))})
    found = books.released(run)
    assert found is not None
    for client, multiplier, rate in ((0, 5.0, 0.1), (1, 10.0, 0.2)):
        ((one, count),) = found[client].items()  # one kind, three times
        assert (one.sampling_rate, count) == (rate, 3)
        assert one.multiplier == pytest.approx(multiplier, rel=5e-6)


def test_what_models_tell_is_rounded_to_the_safe_side(books: Books) -> None:
    run = books.open_run(FACTS)
    for round, std in enumerate([1.0000001, 1.23456789, 3.3333333333, 9.9999999]):
        play(books, run, round, {round: (1.0, upload(std, 1.0))})
        assert mu_squared(books.released(run)[round]) >= 1 / std**2


@pytest.mark.parametrize("upload_", [LAPLACE, SAMPLED, None], ids=["laplace", "several noised steps", "no noise"])
def test_where_an_upload_is_no_sum_with_gaussian_noise_only_uploads_tell(upload_: Release | None, books: Books) -> None:
    run = books.open_run(FACTS)
    play(books, run, 1, {0: (0.5, upload(2.0, 1.0)), 1: (0.5, upload_)})
    assert books.released(run) is None


def test_a_run_that_sent_nothing_out_released_nothing(books: Books) -> None:
    run = books.open_run(FACTS)
    charge(books, run, 1, {0: PLAIN})
    assert books.released(run) == {}


# What an eavesdropper hears and reads.


def overheard(books: Books, run: BookedRun, exposures: int) -> dict[int, float]:
    return {client: mu_squared(seen) for client, seen in books.overheard(run, exposures).items()}


def test_what_is_not_heard_is_read(books: Books) -> None:
    # Two halves with noise 2 each make a variance of 2: a model tells ¼/2 = 1/8 of what an upload tells as ¼.
    run = books.open_run(FACTS)
    for round in range(5):
        play(books, run, round, {0: (0.5, upload(2.0, 1.0)), 1: (0.5, upload(2.0, 1.0))})
    for exposures in (1, 2, 5, 100):
        heard = min(exposures, 5)
        expected = heard / 4 + (5 - heard) / 8
        assert overheard(books, run, exposures) == almost({0: expected, 1: expected})


def test_heard_are_those_that_bring_most_beyond_the_model(books: Books) -> None:
    # Alone, the model tells all of an upload: hearing the dearest brings nothing. Among others it is the cheaper one.
    run = books.open_run(FACTS)
    play(books, run, 1, {0: (1.0, upload(1.0, 1.0))})
    play(books, run, 2, {0: (0.5, upload(2.0, 1.0)), 1: (0.5, upload(4.0, 1.0))})
    assert overheard(books, run, 1) == almost({0: 1 + 1 / 4, 1: 1 / 16})
    assert overheard(books, run, 2) == almost({0: 1 + 1 / 4, 1: 1 / 16})


def test_an_upload_that_was_lost_may_have_been_heard(books: Books) -> None:
    run = books.open_run(FACTS)
    for round in (1, 2):
        play(books, run, round, {0: (0.5, upload(2.0, 1.0)), 1: (0.5, upload(2.0, 1.0))})
    charge(books, run, 3, {0: upload(2.0, 1.0)})  # and in no model: hearing it brings ¼, any other ¼ − 1/8
    assert overheard(books, run, 1) == almost({0: 1 / 4 + 2 / 8, 1: 1 / 4 + 1 / 8})


def test_where_nothing_was_sent_out_the_dearest_uploads_count(books: Books) -> None:
    # Client 0 used multipliers 4, 1, 2, 2: μ² is 1 in one upload, 1 + 1/4 in two, 1 + 1/4 + 1/4 in three.
    run = books.open_run(FACTS)
    for round, multiplier in enumerate([4.0, 1.0, 2.0, 2.0]):
        charge(books, run, round, {0: gaussian(multiplier), 1: gaussian(8.0)})
    heard = [overheard(books, run, count) for count in (1, 2, 3, 4, 100)]
    assert [one[0] for one in heard] == pytest.approx([1.0, 1.25, 1.5, 1.5625, 1.5625])
    assert heard[1][1] == pytest.approx(2 / 64)


@each("seed", range(8))
def test_no_choice_of_uploads_is_dearer(seed: int, books: Books) -> None:
    """Try every choice, with noise, weights and cohorts that change by round, and uploads that are lost."""
    rng = np.random.default_rng(seed)
    run = books.open_run(FACTS)
    prices: dict[int, list[tuple[float, float]]] = {client: [] for client in range(4)}  # of (upload, model)
    for round in range(6):
        cohort = rng.choice(4, size=rng.integers(1, 5), replace=False).tolist()
        own = rng.uniform() * rng.integers(2)
        stds, moves = 10 ** rng.uniform(-1, 1, 4), 10 ** rng.uniform(-1, 0, 4)
        weights = {client: float(rng.uniform()) * float(rng.integers(4) > 0) for client in cohort}
        lost = int(rng.integers(0, 8))
        numbers = charge(books, run, round, {client: upload(stds[client], moves[client]) for client in cohort})
        there = {client: weight for client, weight in weights.items() if client != lost}
        books.add_broadcast(run, round, {numbers[client]: weight for client, weight in there.items()}, own)
        variance = own**2 + sum((weight * stds[client]) ** 2 for client, weight in there.items())
        for client in cohort:
            moved = there.get(client, 0.0) * moves[client]
            prices[client].append(((moves[client] / stds[client]) ** 2, moved**2 / variance if moved else 0.0))
    for exposures in (1, 2, 3):
        dearest = {
            client: max(
                sum(one[place not in heard] for place, one in enumerate(paid))
                for heard in combinations(range(len(paid)), min(exposures, len(paid)))
            )
            for client, paid in prices.items()
            if paid
        }
        assert overheard(books, run, exposures) == almost(dearest)


@pytest.mark.parametrize("other", [LAPLACE, SAMPLED, None], ids=["laplace", "several noised steps", "no noise"])
def test_where_models_tell_what_uploads_tell_everything_is_heard(other: Release | None, books: Books) -> None:
    run = books.open_run(FACTS)
    for round in (1, 2):
        play(books, run, round, {0: (0.5, upload(2.0, 1.0)), 1: (0.5, other)})
    assert books.overheard(run, 1) == books.spent(run)


def test_where_a_client_mixed_its_noise_everything_of_it_is_heard(books: Books) -> None:
    # Which of two kinds is dearer depends on δ and on the rest, so none is left out; client 1 mixed nothing.
    run = books.open_run(FACTS)
    for round, rate in enumerate((1.0, 0.1, 0.1)):
        play(books, run, round, {0: (0.5, upload(2.0, 1.0, rate=rate)), 1: (0.5, upload(2.0, 1.0))})
    heard = books.overheard(run, 1)
    assert heard[0] == books.spent(run)[0]
    assert mu_squared(heard[1]) == pytest.approx(1 / 4 + 2 / 8, rel=5e-6)


def test_prices_beyond_all_numbers_stay_beyond_all_numbers_when_heard(books: Books) -> None:
    run = books.open_run(FACTS)
    for round in (1, 2):
        play(books, run, round, {0: (1.0, upload(1e-200, 1.0))})
    assert mu_squared(books.overheard(run, 1)[0]) == math.inf


# Grants.


def test_a_clients_own_grant_beats_everybodys_and_the_newest_beats_the_older(books: Books) -> None:
    assert books.grants_of([0]) == {0: None}
    own = Grant(1, Budget(1.0, 1e-5), "record", "replace", "plain")
    everybodys, newer = (Grant(None, Budget(epsilon, 1e-5), "record", "replace", "plain") for epsilon in (5.0, 7.0))
    books.grant(own)
    assert books.grants_of([0, 1]) == {0: None, 1: own}
    books.grant(everybodys)
    assert books.grants_of([0, 1]) == {0: everybodys, 1: own}
    books.grant(newer)
    assert books.grants_of([0, 1]) == {0: newer, 1: own}
    lower = Grant(1, Budget(0.5, 1e-5), "record", "replace", "plain")
    books.grant(lower)
    assert books.grants_of([0, 1]) == {0: newer, 1: lower}
    assert books.grants() == [own, everybodys, newer, lower]


@each(
    ("field", "value"),
    [("client", -1), ("client", 0.5), ("unit", "user"), ("neighbours", "swap"), ("currency", "dollars")],
)
def test_a_grant_that_means_nothing_is_refused(field: str, value: Any) -> None:
    usual = {"client": 0, "budget": Budget(1.0, 1e-5), "unit": "record", "neighbours": "replace", "currency": "plain"}
    with pytest.raises(BadInput, match=f"{field} must be"):
        Grant(**usual | {field: value})


# Files that are refused, and left as they are.


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def set_pragma(file: Path, pragma: str) -> None:
    with closing(sqlite3.connect(file)) as sql:
        sql.execute(f"PRAGMA {pragma}")


def make_other(file: Path) -> None:
    file.unlink()
    with closing(sqlite3.connect(file)) as sql:
        sql.execute("CREATE TABLE runs (id INTEGER)")


REFUSED = {
    "a text": (lambda file: file.write_text("client,epsilon\n0,8.0\n" * 100), "damaged or no ledger"),
    "half a header": (lambda file: rewrite(file, lambda old: old[:50]), "damaged or no ledger"),
    "half a file": (lambda file: rewrite(file, lambda old: old[: len(old) // 2]), "damaged or no ledger"),
    "the first page alone": (lambda file: rewrite(file, lambda old: old[:4096]), "damaged or no ledger"),
    "a page of zeros": (lambda file: rewrite(file, lambda old: old[:-4096] + bytes(4096)), "damaged or no ledger"),
    "another program's database": (make_other, "another database"),
    "another program's mark": (lambda file: set_pragma(file, "application_id = 7"), "another database"),
    "a newer version": (lambda file: set_pragma(file, "user_version = 99"), "version 99, from a newer dpfl"),
}


def state_of(folder: Path) -> dict[str, str]:
    """Return a digest of every file in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(("damage", "words"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("create", [True, False])
def test_a_file_that_cannot_be_trusted_is_refused_and_left_as_it_was(
    damage: Callable[[Path], object], words: str, create: bool, path: Path
) -> None:
    damage(path)
    before = state_of(path.parent)
    with pytest.raises(BadInput, match=words) as refusal:
        Books(path, create=create)
    assert str(refusal.value).startswith("ledger must")
    assert "\n" not in str(refusal.value)
    assert repr(str(path)) in str(refusal.value)
    assert state_of(path.parent) == before


def test_a_flipped_bit_in_the_head_of_any_page_is_found(path: Path) -> None:
    whole = path.read_bytes()
    assert len(whole) > 5 * 4096
    for start in range(0, len(whole), 4096):
        path.write_bytes(whole[:start] + bytes([whole[start] ^ 0x10]) + whole[start + 1 :])
        before = state_of(path.parent)
        with pytest.raises(BadInput, match="damaged or no ledger"):
            Books(path)
        assert state_of(path.parent) == before
    path.write_bytes(whole)
    Books(path).close()


def test_a_run_whose_facts_cannot_be_read_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("UPDATE runs SET facts = '{' WHERE id = 2")
    before = state_of(path.parent)
    with closing(Books(path)) as books, pytest.raises(BadInput, match="damaged or no ledger"):
        books.runs()
    assert state_of(path.parent) == before


@pytest.mark.parametrize("name", ["nowhere.sqlite", "no-such-folder/ledger.sqlite"])
def test_a_file_that_does_not_exist_is_refused_where_none_may_be_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="ledger must be a file that exists"):
        Books(tmp_path / name, create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("create", [True, False])
def test_a_folder_is_no_ledger(create: bool, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="ledger must be a file"):
        Books(tmp_path, create=create)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_no_folder_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="ledger must be a file that can be used"):
        Books(tmp_path / "no-such-folder" / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_may_become_a_ledger_only_where_one_may_be_made(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    file.touch()
    with pytest.raises(BadInput, match="ledger must be"):
        Books(file, create=False)
    assert file.stat().st_size == 0
    with closing(Books(file)) as made:
        assert made.runs() == []


# A file that somebody else is using.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.2)


@pytest.fixture
def somebody(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


@pytest.mark.usefixtures("impatient")
def test_a_locked_file_is_refused_and_left_as_it_was(path: Path, somebody: sqlite3.Connection) -> None:
    somebody.execute("BEGIN EXCLUSIVE")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(BadInput, match=r"ledger must be free, but .* has been locked by another process"):
        Books(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    somebody.execute("ROLLBACK")
    Books(path).close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "busy",
    [
        ["BEGIN IMMEDIATE"],  # writing: a charge cannot begin
        ["BEGIN", "SELECT * FROM charges"],  # reading until the end of its transaction: a charge cannot be committed
    ],
    ids=["writer", "reader"],
)
def test_nothing_is_charged_while_somebody_else_is_busy_and_everything_is_afterwards(
    busy: list[str], path: Path, somebody: sqlite3.Connection
) -> None:
    with closing(Books(path)) as books:
        run = books.open_run(FACTS)
        for statement in busy:
            somebody.execute(statement).fetchall()
        with pytest.raises(BadInput, match="ledger must be free"):
            charge(books, run, 1, {0: PLAIN})
        somebody.execute("ROLLBACK")
        assert books.replies(run) == {}
        charge(books, run, 1, {0: PLAIN})
        assert books.replies(run) == {0: 1}


def test_a_full_disk_charged_nothing_and_says_so(path: Path) -> None:
    with closing(Books(path)) as books:
        run = books.open_run(FACTS)
        (size,) = books._one("PRAGMA page_count")
        books._one(f"PRAGMA max_page_count = {size}")
        with pytest.raises(BadInput, match=r"ledger must be a file that can be used, but .* full"):
            charge(books, run, 1, dict.fromkeys(range(5000), PLAIN))
        assert books.replies(run) == {}
        books._one("PRAGMA max_page_count = 100000")
        charge(books, run, 1, dict.fromkeys(range(5000), PLAIN))
        assert len(books.replies(run)) == 5000


@pytest.mark.usefixtures("impatient")
def test_whoever_decides_what_to_charge_is_alone_from_the_beginning(path: Path) -> None:
    """Else two runs could both read that a budget suffices, and both write."""
    with closing(Books(path)) as one, closing(Books(path)) as other:
        with one.transaction(), pytest.raises(BadInput, match="ledger must be free"):
            other.open_run(FACTS)
        other.open_run(FACTS)


def test_one_waits_until_the_other_has_written(path: Path) -> None:
    with (
        closing(Books(path)) as books,
        closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other,
    ):
        run = books.open_run(FACTS)
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, other.execute, ["COMMIT"])
        timer.start()
        charge(books, run, 1, {0: PLAIN})
        timer.join()
        assert books.replies(run) == {0: 1}


# A file that may not be written.


@contextmanager
def unwritable(place: Path) -> Iterator[None]:
    """Take the right to write away for a while."""
    usual = place.stat().st_mode
    place.chmod(usual & ~0o222)
    try:
        if os.access(place, os.W_OK):
            pytest.skip("this user may write everywhere")  # as an administrator does
        yield
    finally:
        place.chmod(usual)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_may_not_be_written_is_refused_and_left_as_it_was(what: str, path: Path) -> None:
    before = state_of(path.parent)
    with unwritable(path if what == "file" else path.parent), closing(Books(path)) as books:
        assert len(books.runs()) == 2  # reading is no problem
        with pytest.raises(BadInput, match="ledger must be a file that can be used"):
            books.open_run(FACTS)
    assert state_of(path.parent) == before


def test_no_file_is_made_in_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    with unwritable(tmp_path), pytest.raises(BadInput, match="ledger must be a file that can be used"):
        Books(tmp_path / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []
