"""The ledger as a user meets it: runs that are killed, runs that share a file, and what `dpfl ledger` says of them."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dpfl.privacy.accounting import Mechanism, tight
from dpfl.privacy.books import Books, Grant
from dpfl.privacy.budget import Budget
from dpfl.privacy.filters import worth_of
from dpfl.privacy.gaussian_dp import epsilon_of, mu_of
from e2e import command_line

QUICK = ["udp", "--clients", "4", "--rounds", "3", "--delta", "1e-3"]


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        return json.loads(self.out)  # one document and nothing else, or this fails


Command = Callable[..., Said]


@pytest.fixture
def dpfl(tmp_path: Path) -> Command:
    """Run commands in one folder."""

    def call(*args: str) -> Said:
        done = command_line.dpfl(*args, cwd=tmp_path)
        return Said(done.returncode, done.stdout, done.stderr)

    return call


def files(folder: Path) -> dict[Path, bytes]:
    """Return everything below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Runs that are killed. The children are processes of their own: nothing but a file survives them.


def child(script: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


DIES_WHILE_CLIENTS_WORK = """
import os, signal, sys
import numpy as np
import dpfl
from dpfl.clients.reference import ReferenceClients

class Mortal(ReferenceClients):
    def perform(self, request):
        if request.round == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().perform(request)

records = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
own = dpfl.federate((records, (records[:, 0] > 0).astype(int)), clients=3, seed=1)
dpfl.train(dpfl.UDP(rounds=5, epsilon=3, delta=1e-3), own, "softmax", seed=1, out=sys.argv[1], clients=Mortal)
"""


def test_a_run_that_is_killed_while_its_clients_work_has_been_charged_for_it(tmp_path: Path, dpfl: Command) -> None:
    folder = tmp_path / "r"
    process = child(DIES_WHILE_CLIENTS_WORK, folder)
    _, said = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, said
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2  # rounds that were finished
    with closing(Books(folder / "ledger.sqlite", create=False)) as books:
        (run,) = books.runs()
        assert books.replies(run) == {0: 3, 1: 3, 2: 3}

    # Noise for five rounds of ε = 3 was paid three times; all five were allowed, and who ended it is not known.
    certificate = dpfl("certificate", "r", "--json").json
    assert certificate["rounds"] == 3
    assert certificate["observers"]["server"]["epsilon"] == pytest.approx(3.0, rel=1e-6)
    assert certificate["allowed_more"]
    assert [line["replies"] for line in certificate["spending"]] == [3, 3, 3]

    command = [str(Path(sys.executable).with_name("dpfl")), "certificate", str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0
    assert "3 clients, 3 rounds" in shown.stdout
    assert "computed anew from the ledger; its chain" in shown.stdout
    (caution,) = shown.stderr.splitlines()
    assert "the run ended before it wrote a certificate" in caution


CHARGES_AND_UPLOADS = """
import os, signal, sys
from pathlib import Path
from dpfl.orders import Gaussian, Order, RecordClip
from dpfl.privacy.books import Books
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.ledger import Ledger

promise = Promise(budgets=(Budget(50.0, 1e-3),) * 3, unit="record", neighbours="replace", calibration="tight")
ledger = Ledger(promise, (10, 20, 30), books=Books(Path(sys.argv[1])), system="udp")
for round in range(1, 10_000):
    order = Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(50.0 + round))  # always another
    if sys.argv[2] == "upload first" and round == 4:
        print("uploaded", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    ledger.charge(dict.fromkeys(range(3), order))
    print("uploaded", flush=True)
    ledger.broadcast(dict.fromkeys(range(3), 1 / 3))
"""


def killed(file: Path, how: str, *, after: float | None) -> int:
    """Let a child charge and upload until it is killed; return in how many rounds it said that it had uploaded."""
    with child(CHARGES_AND_UPLOADS, file, how) as process:
        first = process.stdout.readline()
        if after is not None:
            time.sleep(after)
            process.kill()
        said = first + process.stdout.read()  # not `communicate`, which skips what `readline` has read ahead
        problem = process.stderr.read()
    assert process.returncode == -signal.SIGKILL, problem
    return said.count("uploaded\n")


def require_charged(file: Path, uploads: int) -> None:
    """Require a whole ledger whose newest run was charged for every upload, and for at most one that was not made."""
    with closing(Books(file, create=False)) as books:
        *_, newest = books.runs()
        charged = books.rounds(newest)
        assert uploads <= charged <= uploads + 1
        assert books.replies(newest) == {0: charged, 1: charged, 2: charged}  # a round is charged as one
        assert books.unprotected(newest) == set()
        spent = books.spent(newest)[1]  # Δ = 1/20 under σ = 50 + round
        mu_squared = sum((0.05 / (50 + round)) ** 2 for round in range(1, charged + 1))
        assert sum(n * one.mu_squared for one, n in spent.items()) == pytest.approx(mu_squared)


def test_whenever_a_run_is_killed_every_upload_had_been_charged(tmp_path: Path) -> None:
    file, moments = tmp_path / "ledger.sqlite", random.Random(0)
    total = 0
    for _ in range(5):  # one file: each run finds what the last one left behind
        uploads = killed(file, "charge first", after=moments.uniform(0, 0.15))
        require_charged(file, uploads)
        total += uploads
    with closing(Books(file)) as books:
        assert len(books.runs()) == 5
        assert sum(books.replies(*books.runs()).values()) >= 3 * total


def test_a_run_that_uploads_before_it_is_charged_is_found_out(tmp_path: Path) -> None:
    uploads = killed(tmp_path / "ledger.sqlite", "upload first", after=None)
    assert uploads == 4
    with pytest.raises(AssertionError):
        require_charged(tmp_path / "ledger.sqlite", uploads)


# Runs that share one ledger.

FREE = ["--ledger", "free.sqlite", "--data-seed", "1"]
SHARED = ["--ledger", "shared.sqlite", "--data-seed", "1"]  # whose people stay where they are


def spent_of(dpfl: Command, where: str = "shared.sqlite") -> list[float]:
    return [line["spent"]["epsilon"] for line in dpfl("ledger", where, "--json").json["clients"]]


def test_two_runs_that_would_overdraw_a_grant_together(tmp_path: Path, dpfl: Command) -> None:
    made = dpfl("ledger", "shared.sqlite", "--new", "--grant", "4", "--delta", "1e-3")
    assert made.code == 0
    assert "granted to every client: ε = 4, δ = 0.001 over all runs (record, replace; plain)" in made.out
    assert "nobody has been charged yet" in made.out

    first = dpfl("run", *QUICK, "--epsilon", "3", *SHARED, "--out", "first", "--json").json
    assert first["certificate"]["observers"]["server"]["epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert not (tmp_path / "first/ledger.sqlite").exists()  # it was charged to the shared one
    assert dpfl("certificate", "first", "--ledger", "shared.sqlite", "--json").json == first["certificate"]

    # In Gaussian DP two runs of ε = 3 cost 4.63 together, which is less than 6 and more than 4.
    before = files(tmp_path)
    second = dpfl("run", *QUICK, "--epsilon", "3", *SHARED, "--out", "second", "--json")
    assert (second.code, second.out) == (3, "")
    (sentence,) = second.err.splitlines()
    assert "grant of client 0" in sentence
    assert "second" not in sentence  # no round of it is anywhere
    assert files(tmp_path) == before
    assert spent_of(dpfl) == pytest.approx([3.0] * 4, rel=1e-3)

    # The sentence says what is left, and that much fits.
    left = re.search(r"leaves ε = ([\d.]+)", sentence)
    assert left is not None
    assert dpfl("run", *QUICK, "--epsilon", left[1], *SHARED, "--out", "third").code == 0
    assert all(3.9 < spent <= 4.0 for spent in spent_of(dpfl))


def test_a_run_that_spends_more_than_it_says_is_stopped_by_the_grant(tmp_path: Path, dpfl: Command) -> None:
    # By the paper's formula ε = 20 is really 30.32, so that ten rounds cannot all be paid with 20.
    dpfl("ledger", "shared.sqlite", "--new", "--grant", "20", "--delta", "1e-3")
    paper = ["--epsilon", "20", "--calibration", "paper", "--rounds", "10"]
    stopped = dpfl("run", *QUICK, *paper, *SHARED, "--out", "r", "--json")
    assert (stopped.code, stopped.out) == (3, "")
    caution, sentence = stopped.err.splitlines()
    assert caution.startswith("dpfl: caution: ")  # the paper's formula comes with one
    assert "'shared.sqlite' grants" in sentence
    assert "the rounds before it are in r" in sentence
    rounds = len((tmp_path / "r/metrics.jsonl").read_text().splitlines())
    assert 0 < rounds < 10
    assert dpfl("certificate", "r", "--json").json["rounds"] == rounds
    assert all(15 < spent <= 20 for spent in spent_of(dpfl))


UNCOUNTED = ["--calibration", "paper", "--set", "discount=0.9"]  # by CRD, which asks for the loss
REFUSED = {
    "no file": (None, ["--ledger", "nowhere.sqlite"], "'nowhere.sqlite' does not"),
    "no ledger": (None, ["--ledger", "notes.txt"], "'notes.txt' is damaged or no ledger"),
    "a client without a grant": (["--grant", "5", "--client", "0"], SHARED, "client 1 must have a grant"),
    "a simulation": (["--grant", "5"], [*SHARED, "--seed", "1"], "seed must be left out"),
    "fast noise": (["--grant", "5"], [*SHARED, "--sampler", "fast"], "leave seed (and --sampler fast) out"),
    "something uncounted": (["--grant", "5"], [*SHARED, *UNCOUNTED], "calibration must be one that counts everything"),
}


@pytest.mark.parametrize(("grant", "ledger", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_run_that_its_ledger_cannot_limit_is_refused_and_nothing_is_written(
    grant: list[str] | None, ledger: list[str], words: str, tmp_path: Path, dpfl: Command
) -> None:
    (tmp_path / "notes.txt").write_text("client 0 has spent a lot\n" * 100)
    if grant is not None:
        assert dpfl("ledger", "shared.sqlite", "--new", *grant, "--delta", "1e-3").code == 0
    before = files(tmp_path)
    refused = dpfl("run", *QUICK, "--epsilon", "3", *ledger, "--out", "r", "--json")
    assert (refused.code, refused.out) == (2, "")
    (sentence,) = refused.err.splitlines()
    assert sentence.startswith("dpfl: ")
    assert words in sentence
    assert files(tmp_path) == before
    assert not (tmp_path / "r").exists()


def test_a_run_without_noise_is_refused_by_a_limited_ledger_and_written_into_another(
    tmp_path: Path, dpfl: Command
) -> None:
    dpfl("ledger", "shared.sqlite", "--new", "--grant", "5", "--delta", "1e-3")
    dpfl("ledger", "free.sqlite", "--new")
    before = files(tmp_path)
    refused = dpfl("run", "fedavg", "--clients", "4", "--rounds", "1", *SHARED, "--out", "r")
    assert refused.code == 2
    (sentence,) = refused.err.splitlines()
    assert "system must be a private one with the ledger 'shared.sqlite'" in sentence
    assert files(tmp_path) == before

    assert dpfl("run", "fedavg", "--clients", "4", "--rounds", "1", *FREE, "--out", "r").code == 0
    assert "everything: something left it without noise" in dpfl("ledger", "free.sqlite").out
    dpfl("ledger", "free.sqlite", "--grant", "5", "--delta", "1e-3")  # too late
    too_late = dpfl("run", *QUICK, "--epsilon", "3", *FREE, "--out", "s")
    assert too_late.code == 2
    assert "client 0 has uploaded or answered without noise" in too_late.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["there.sqlite", "--new"], "'there.sqlite' does; leave --new out"),
        (["there.sqlite", "--grant", "0"], "epsilon must be a finite number above 0"),
        (["there.sqlite", "--grant", "3", "--delta", "1"], "delta must be"),
        (["there.sqlite", "--grant", "3", "--client", "-1"], "client must be a whole number"),
        (["there.sqlite", "--grant", "3", "--unit", "user"], "unit must be one of"),
        (["there.sqlite", "--grant", "3", "--currency", "euro"], "currency must be one of"),
        (["new.sqlite", "--new", "--grant", "much"], "epsilon must be"),
        (["nowhere.sqlite"], "'nowhere.sqlite' does not"),
        (["nowhere.sqlite", "--grant", "3"], "'nowhere.sqlite' does not"),
        (["folder"], "run must be the folder of a run"),
        (["notes.txt"], "'notes.txt' is damaged or no ledger"),
    ],
)
def test_a_wrong_question_is_one_sentence_and_nothing_is_written(
    args: list[str], words: str, tmp_path: Path, dpfl: Command
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("nothing\n" * 1000)
    assert dpfl("ledger", "there.sqlite", "--new").code == 0
    before = files(tmp_path)
    refused = dpfl("ledger", *args)
    assert (refused.code, refused.out) == (2, "")
    (sentence,) = refused.err.splitlines()
    assert words in sentence
    assert files(tmp_path) == before


def test_a_run_that_replaces_another_adds_to_its_ledger(tmp_path: Path, dpfl: Command) -> None:
    for seed in ("1", "2"):
        forced = ["--seed", seed, "--data-seed", "1", "--out", "r", "--force"]
        run = dpfl("run", *QUICK, "--epsilon", "3", *forced, "--json").json
    told = dpfl("ledger", "r", "--json").json
    assert [(one["system"], one["rounds"]) for one in told["runs"]] == [("udp", 3), ("udp", 3)]
    assert [(line["runs"], line["uploads"]) for line in told["clients"]] == [(2, 6)] * 4
    # Two runs of ε = 3, and the certificate of the second is about the second alone.
    both = tight({Mechanism("gaussian", float(1 / mu_of(3.0, 1e-3))): 2}, 1e-3)
    assert [line["spent"]["epsilon"] for line in told["clients"]] == pytest.approx([both] * 4, rel=1e-4)
    assert run["certificate"]["observers"]["server"]["epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert dpfl("certificate", "r", "--json").json == run["certificate"]


CHARGES_UNTIL_REFUSED = """
import sys
from pathlib import Path
from dpfl.errors import BudgetRefused
from dpfl.orders import Gaussian, Order, RecordClip
from dpfl.privacy.books import Books
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.ledger import Ledger

promise = Promise(budgets=(Budget(4.0, 1e-3),), unit="record", neighbours="replace", calibration="tight")
ledger = Ledger(promise, (10,), books=Books(Path(sys.argv[1]), create=False), system="udp")
order = Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(float(sys.argv[2])))
print("ready", flush=True)
sys.stdin.readline()
try:
    while True:
        ledger.charge({0: order})
        print("paid", flush=True)
except BudgetRefused:
    print("refused", flush=True)
"""


def test_two_processes_that_charge_at_once_never_overdraw_a_grant_together(tmp_path: Path) -> None:
    # A round costs a fortieth of what ε = 5 is worth. Each process may spend ε = 4, so it cannot spend all by itself.
    file, grant = tmp_path / "shared.sqlite", Budget(5.0, 1e-3)
    (worth,) = worth_of([grant])
    with closing(Books(file)) as books:
        books.grant(Grant(None, grant, "record", "replace", "plain"))
    std = 0.1 / (worth / 40.001) ** 0.5
    both = [child(CHARGES_UNTIL_REFUSED, file, std, stdin=subprocess.PIPE) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0] for process in both]
    paid = [words.count("paid\n") for words in said]
    assert all(words.endswith("refused\n") for words in said)
    assert min(paid) > 0
    assert sum(paid) == 40
    with closing(Books(file)) as books:
        assert sorted(books.replies(run)[0] for run in books.runs()) == sorted(paid)
        assert 4.99 < tight(books.spent(*books.runs())[0], 1e-3) <= 5.0


# What `dpfl ledger` says.


def test_a_run_folder_and_its_ledger_say_the_same(tmp_path: Path, dpfl: Command) -> None:
    run = dpfl("run", *QUICK, "--epsilon", "3", "--out", "r", "--json").json
    told = dpfl("ledger", "r", "--json").json
    assert dpfl("ledger", "r/ledger.sqlite", "--json").json == told
    (only,) = told["runs"]
    assert (only["system"], only["calibration"], only["rounds"]) == ("udp", "tight", 3)
    assert only["config"] == run["certificate"]["config"]
    assert told["grants"] == []
    for client, line in enumerate(told["clients"]):
        assert line["client"] == client
        assert (line["unit"], line["neighbours"], line["runs"], line["uploads"]) == ("record", "replace", 1, 3)
        assert line["spent"]["epsilon"] == pytest.approx(run["certificate"]["spending"][client]["server_epsilon"])
        assert line["granted"] is None

    shown = dpfl("ledger", "r")
    assert shown.err == ""
    assert dpfl("ledger", "r/ledger.sqlite").out == shown.out
    head, run_line, chain, empty, columns, *rows = shown.out.splitlines()
    assert head == "ledger r/ledger.sqlite: 1 run"
    assert run_line.endswith("udp, tight calibration, 3 rounds")
    assert chain == f"  head of its chain {told['head'][:32]}: whole, as it was written"
    assert (empty, columns.split()[0]) == ("", "client")
    assert [row.split()[:3] for row in rows] == [[str(client), "1", "3"] for client in range(4)]
    assert all("ε ≤ 3, δ = 0.001" in row for row in rows)

    # With a grant client 2 is shown at the δ of that grant, where the same noise costs less.
    granted = dpfl("ledger", "r", "--grant", "4", "--delta", "1e-2", "--client", "2", "--json").json["clients"]
    assert [line["granted"] for line in granted] == [None, None, {"epsilon": 4, "delta": 1e-2}, None]
    at_grant = float(epsilon_of(mu_of(3.0, 1e-3), 1e-2))
    assert granted[2]["spent"] == {"epsilon": pytest.approx(at_grant, rel=1e-3), "delta": 1e-2}
    assert granted[1]["spent"]["delta"] == 1e-3
    assert "granted to client 2: ε = 4, δ = 0.01 over all runs" in dpfl("ledger", "r").out


def test_a_screen_holds_the_twenty_clients_that_spent_most(tmp_path: Path, dpfl: Command) -> None:
    # 25 clients with budgets of 1, 2, … 25: those of 25 down to 6 are shown, and JSON has all of them.
    budgets = ", ".join(str(float(epsilon)) for epsilon in range(1, 26))
    many = ["udp", "--clients", "25", "--rounds", "1", "--delta", "1e-3", "--set", f"epsilon=[{budgets}]"]
    assert dpfl("run", *many, "--out", "r").code == 0
    told = dpfl("ledger", "r", "--json").json["clients"]
    assert [line["spent"]["epsilon"] for line in told] == pytest.approx([*range(1, 26)], rel=1e-3)
    *rows, last = dpfl("ledger", "r").out.splitlines()[5:]
    assert [int(row.split()[0]) for row in rows] == [*range(24, 4, -1)]
    assert "and 5 that spent less; --json has all of them" in last
