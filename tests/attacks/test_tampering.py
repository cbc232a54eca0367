"""Books that were changed after they were written: what their chain of hashes notices, and what it cannot."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import dpfl
from dpfl.privacy.books import Books
from dpfl.privacy.certificate import recertify
from e2e.command_line import dpfl as command

EDITS = {
    "a charge is taken back": "DELETE FROM aggregates WHERE charge = 2; DELETE FROM charges WHERE id = 2",
    "a charge is another's": "UPDATE charges SET client = 1 WHERE id = 1",
    "noise was larger": "UPDATE releases SET multiplier = multiplier * 2",
    "a run is forgotten": "DELETE FROM aggregates; DELETE FROM broadcasts; DELETE FROM charges; DELETE FROM people;"
    " DELETE FROM noise_keys; DELETE FROM runs",
    "a grant is raised": "UPDATE grants SET epsilon = 100",
    "the server's noise": "UPDATE broadcasts SET noise_std = 10",
    "weights": "UPDATE aggregates SET weight = weight / 10",
    "facts": """UPDATE runs SET facts = replace(facts, '"seeded": false', '"seeded": true')""",
    "people are forgotten": "DELETE FROM people WHERE place = 0",
    "a seed may be used again": "DELETE FROM noise_keys",
    "other people": "INSERT INTO populations VALUES (NULL, '2026-01-01')",
    "a grant past the chain": "INSERT INTO grants SELECT NULL, client, 50, delta, unit, neighbours, currency, granted"
    " FROM grants",
    "the last links": "DELETE FROM links WHERE id > 3",
    "the key by which people are known": "UPDATE notes SET value = zeroblob(32) WHERE name = 'key'",
    "an older version": "PRAGMA user_version = 1",
    "a link": "UPDATE links SET digest = zeroblob(32) WHERE id = 3",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with a grant and two runs, the state after the first, and both folders."""
    folder = tmp_path_factory.mktemp("written")
    assert command("ledger", "all.sqlite", "--new", "--grant", "8", "--delta", "1e-3", cwd=folder).returncode == 0
    for name in ("one", "two"):
        dpfl.train(
            dpfl.UDP(rounds=2, epsilon=1.0), dpfl.federate("digits", clients=3, data_seed=1), "softmax",
            ledger=folder / "all.sqlite", out=folder / name,
        )  # fmt: skip
        shutil.copy(folder / "all.sqlite", folder / f"after-{name}.sqlite")
    return folder


@pytest.fixture
def books(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path


def edit(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.executescript(script)


@pytest.mark.parametrize("script", EDITS.values(), ids=EDITS.keys())
def test_books_that_were_edited_are_refused(books: Path, script: str) -> None:
    path = books / "all.sqlite"
    with closing(Books(path, create=False)) as whole:
        whole.require_whole()
    edit(path, script)
    with closing(Books(path, create=False)) as changed, pytest.raises(dpfl.BadInput, match="as it was written, but"):
        changed.require_whole()
    with pytest.raises(dpfl.BadInput, match="as it was written, but"):
        recertify(books / "two", path)
    with pytest.raises(dpfl.BadInput, match="as it was written, but"):  # nor is anything charged to it
        dpfl.train(
            dpfl.UDP(rounds=1, epsilon=1.0), dpfl.federate("digits", clients=3, data_seed=1), "softmax", ledger=path
        )


def test_a_chain_without_hashes_would_not_have_noticed(books: Path) -> None:
    """The twin: as the database itself sees it, everything is in order."""
    path = books / "all.sqlite"
    edit(path, EDITS["noise was larger"])
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert file.execute("PRAGMA foreign_key_check").fetchall() == []


def test_books_that_were_put_back_no_longer_hold_the_head(books: Path) -> None:
    head = json.loads((books / "two" / "certificate.json").read_text())["head"]
    rolled_back = books / "after-one.sqlite"
    with closing(Books(rolled_back, create=False)) as earlier:
        earlier.require_whole()  # it is whole in itself, which is all that it can tell
        with pytest.raises(dpfl.BadInput, match="it was rolled back, shortened, edited, or is another"):
            earlier.require_whole(head)
    done = command("certificate", "two", "--ledger", "after-one.sqlite", cwd=books)
    assert (done.returncode, "does not have its head" in done.stderr) == (2, True)
    done = command("ledger", "after-one.sqlite", "--head", head[:32], cwd=books)
    assert (done.returncode, "does not have its head" in done.stderr) == (2, True)
    done = command("ledger", "all.sqlite", "--head", head[:32], cwd=books)
    assert done.returncode == 0, done.stderr
    assert "with one kept elsewhere" in command("certificate", "two", cwd=books).stdout  # what it cannot notice


FOLDER_EDITS: dict[str, Callable[[dict], None]] = {
    "a smaller ε": lambda stored: stored["observers"]["server"].update(epsilon=0.1),
    "another head": lambda stored: stored.update(head="00" * 32),
    "no head": lambda stored: stored.update(head=None),
    "nothing uncounted": lambda stored: stored.update(neighbours="add-remove"),
}


@pytest.mark.parametrize("change", FOLDER_EDITS.values(), ids=FOLDER_EDITS.keys())
def test_a_certificate_that_was_edited_is_refused(books: Path, change: Callable[[dict], None]) -> None:
    path = books / "two" / "certificate.json"
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    with pytest.raises(dpfl.BadInput, match=r"believe the ledger|does not have its head"):
        recertify(books / "two")


def test_a_folder_is_checked_where_its_ledger_is_not(books: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.move(books / "two", elsewhere / "run")
    assert command("certificate", "run", cwd=elsewhere).returncode == 0
    assert command("report", "run", cwd=elsewhere).returncode == 0
    assert "Computed anew from the ledger." in (elsewhere / "run" / "report.html").read_text()
    edit(elsewhere / "run" / "extract.sqlite", "UPDATE releases SET multiplier = multiplier * 2")
    refused = command("certificate", "run", cwd=elsewhere)
    assert (refused.returncode, "as it was written, but" in refused.stderr) == (2, True)


def test_nothing_is_charged_or_granted_to_an_extract(books: Path) -> None:
    done = command("ledger", "two", "--grant", "50", cwd=books)
    assert (done.returncode, "the extract of a single run" in done.stderr) == (2, True)
    again = ["run", "udp", "--clients", "3", "--rounds", "1", "--ledger", "two/extract.sqlite", "--out", "three"]
    done = command(*again, cwd=books)
    assert (done.returncode, "the extract of a single run" in done.stderr) == (2, True)


def test_charges_cannot_be_cut_out_of_an_extract(books: Path) -> None:
    """Its own entries must be there, whatever was made of their salts; what it does not hold is not told."""
    path = books / "two" / "extract.sqlite"
    edit(path, "UPDATE links SET salt = x''; DELETE FROM aggregates; DELETE FROM broadcasts; DELETE FROM charges")
    refused = command("certificate", "two", cwd=books)
    assert (refused.returncode, "as it was written, but" in refused.stderr) == (2, True)


def test_what_an_extract_cannot_know_is_not_said_to_be_checked(books: Path) -> None:
    path = books / "two" / "certificate.json"
    stored = json.loads(path.read_text())
    assert stored["together"]["runs"] == 2
    stored["together"] |= {"epsilon": 0.1, "runs": 1}
    path.write_text(json.dumps(stored))
    said = command("certificate", "two", cwd=books)
    assert said.returncode == 0
    assert "not told here: the ledger that it was charged to may hold others" in said.stdout
    assert "0.1," not in said.stdout
    refused = command("certificate", "two", "--ledger", "all.sqlite", cwd=books)
    assert (refused.returncode, "believe the ledger" in refused.stderr) == (2, True)


@pytest.mark.parametrize(("name", "key"), [("certificate.json", "head"), ("environment.json", "ledger")])
def test_nonsense_is_one_sentence(books: Path, name: str, key: str) -> None:
    path = books / "two" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 5}))
    refused = command("certificate", "two", cwd=books)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
