"""What leaks beside ε: private values in print, in a run's folder and in errors; a certificate that was edited."""

import contextlib
import io
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl import cli, training
from dpfl.errors import Caution
from dpfl.report.certificate import text
from e2e.command_line import dpfl as command

PLANTED = 0.37214  # in every private record, and nowhere else
DIGITS = "0.3721"


def federation() -> dpfl.Federation:
    made = dpfl.federate("digits", clients=3, seed=1)
    planted = [dpfl.Records(torch.full_like(records.x, PLANTED), records.y) for records in made.clients]
    return replace(made, clients=tuple(planted), recipe=None)


def test_nothing_that_is_printed_shows_a_record(tmp_path: Path) -> None:
    people = federation()
    seen: list[dpfl.Session] = []
    run = dpfl.train(
        dpfl.UDP(rounds=2, epsilon=1.0), people, "softmax", out=tmp_path / "run", on_open=seen.append, seed=1
    )
    (session,) = seen
    shown = [people, people.clients, people.clients[0], run.certificate, session.problem, session.clients, session]
    for thing in shown:
        assert DIGITS not in repr(thing)
        assert DIGITS not in str(thing)
    assert repr(people) == "Federation('digits', 3 clients of 431 to 432 records, 144 public, 359 to test on)"
    # The twin: torch prints what a record holds.
    assert DIGITS in repr(people.clients[0].x)
    for path in (tmp_path / "run").iterdir():
        assert DIGITS.encode() not in path.read_bytes()


def test_a_certificate_that_was_edited_is_not_reported(tmp_path: Path) -> None:
    out = tmp_path / "run"
    dpfl.train(dpfl.UDP(rounds=2, epsilon=8.0), dpfl.federate("digits", clients=3, seed=1), "softmax", out=out, seed=1)
    assert command("report", "run", cwd=tmp_path).returncode == 0
    assert "Computed anew from the ledger." in (out / "report.html").read_text()
    path = out / "certificate.json"
    edited = json.loads(path.read_text())
    edited["observers"]["server"]["epsilon"] = 0.1
    for line in edited["spending"]:
        line["server_epsilon"] = 0.1
    path.write_text(json.dumps(edited))
    assert "ε ≤ 0.1 " in text(edited)  # the twin: the file as it is, printed
    refused = command("report", "run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "certificate.json must agree with the ledger" in refused.stderr
    (out / "ledger.sqlite").unlink()
    assert command("report", "run", cwd=tmp_path).returncode == 0
    assert "Not checked" in (out / "report.html").read_text()


LABEL = 812390417  # of one private record
NAME = "Lovelace"
MARKS = (DIGITS, str(LABEL), NAME)


def planted(*_: Any, data: str, **how: Any) -> dpfl.Federation:
    """Share digits out as they are asked for; what is in no public split is planted, and one record is broken."""
    public = {record.numpy().tobytes() for record in dpfl.federate(data, **how).validation.x}
    digits = dpfl.federation.load(data)
    private = torch.tensor([record.numpy().tobytes() not in public for record in digits.pool.x])
    x, y = digits.pool.x.clone(), digits.pool.y.clone()
    x[private], y[private.nonzero()[0]] = PLANTED, LABEL
    return dpfl.federate(replace(digits, pool=dpfl.Records(x, y)), **how)


def shows_nothing(*texts: str) -> None:
    for shown in texts:
        assert not [mark for mark in MARKS if mark in shown]


COMMANDS = [
    "run udp --clients 4 --rounds 2 --seed 1 --out first",
    "run udp --clients 4 --rounds 2 --seed 1 --out second --json",
    "run fedsgd-dpc --clients 4 --rounds 2 --data-seed 1 --out third",
    "report first",
    "certificate first",
    "plan udp --clients 4 --seed 1 --time-limit 2 --json",
    "plan fedsgd-dpc --clients 4 --seed 1 --method bound",
    "run udp --clients 4 --seed 1 --partition classes:99",
    "run udp --clients 4 --seed 1 --partition classes:2 --sizes 350",
    "run udp --clients 30 --seed 1 --partition dirichlet:0.001",
    "run fedavg --clients 4 --rounds 1 --seed 1",
]


def test_commands_print_and_write_nothing_of_a_record(tmp_path: Path) -> None:
    codes = {}
    with mock.patch.object(training, "federate", planted):
        for line in COMMANDS:
            done = command(*line.split(), cwd=tmp_path)
            shows_nothing(done.stdout, done.stderr)
            codes[line] = done.returncode
            if "run" in line and done.returncode == 0:
                assert "private records, of which these count as zero in training: 1 with a label" in done.stderr
    assert list(codes.values()) == [0] * 7 + [2] * 4, codes
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"environment.json", "metrics.jsonl", "report.html", "config.toml"} <= {path.name for path in written}
    for path in written:
        shows_nothing(path.read_bytes().decode("latin-1"))
        assert b"count as zero in training" not in path.read_bytes()  # the caution is the owner's alone
    assert "public_root" not in (tmp_path / "first" / "environment.json").read_text()  # it follows from the seed
    assert "public_root" in (tmp_path / "third" / "environment.json").read_text()


def test_a_command_that_breaks_down_shows_no_locals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_down(*_: Any, **how: Any) -> dpfl.Federation:
        record = torch.full((3,), PLANTED)
        raise ArithmeticError(f"of {len(record)} numbers")

    def printed() -> str:
        err = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.chdir(tmp_path):
            try:
                cli.main()
            except ArithmeticError as problem:  # what Python does with it
                sys.excepthook(type(problem), problem, problem.__traceback__)
        return err.getvalue()

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["dpfl", "run", "udp", "--out", "r"])
    monkeypatch.setattr(training, "federate", broken_down)
    shown = printed()
    assert "of 3 numbers" in shown
    shows_nothing(shown)
    monkeypatch.setattr(cli.app, "pretty_exceptions_show_locals", True)  # the twin, as older typers have it
    assert DIGITS in printed()


class Refusing(list[Any]):
    """A data set one record of which cannot be read, and says so."""

    def __getitem__(self, number: Any) -> Any:
        if number == 3:
            raise ValueError(f"{NAME} has {PLANTED} and {LABEL}")
        return super().__getitem__(number)


class Quoting:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ValueError(f"{NAME} has {PLANTED} and {LABEL}")


ITEMS = [(torch.full((2,), PLANTED), number % 2) for number in range(12)]
X, Y = torch.full((12, 2), PLANTED), torch.arange(12) % 2


def broken_data() -> dpfl.Federation:
    made = dpfl.federate((X, Y), clients=2, classes=2, seed=1)
    return replace(made, clients=tuple(dpfl.Records(own.x * torch.nan, own.y) for own in made.clients))


REFUSED: dict[str, Callable[[], Any]] = {
    "arrays": lambda: dpfl.from_arrays(Quoting(), Y),
    "half of the items": lambda: dpfl.from_torch([*ITEMS[:2], *[(NAME, LABEL)] * 2]),
    "a pair of arrays of other lengths": lambda: dpfl.from_arrays(X, torch.full((3,), LABEL)),
    "targets of other shape": lambda: dpfl.from_arrays(X, torch.full((12, 2), LABEL)),
    "too many clients": lambda: dpfl.federate((X, Y), clients=99, classes=2, seed=1),
    "too few of a class": lambda: dpfl.federate((X, Y), clients=4, classes=2, seed=1, partition="classes:3"),
    "no privacy": lambda: dpfl.train(dpfl.FedAvg(rounds=1), broken_data()),
    "a model for images": lambda: dpfl.train(
        dpfl.UDP(rounds=1), dpfl.federate((X, Y), clients=2, classes=2, seed=1), "udp-cnn"
    ),
    "a model of another shape": lambda: dpfl.train(
        dpfl.UDP(rounds=1), dpfl.federate((X, Y), clients=2, classes=2, seed=1), nn.Linear(5, 2),
        loss=nn.functional.cross_entropy,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_that_is_raised_quotes_a_record(what: str) -> None:
    with pytest.raises(dpfl.BadInput) as caught:
        REFUSED[what]()
    shows_nothing(*(line for problem in chained(caught.value) for line in traceback.format_exception(problem)))


def chained(problem: BaseException | None) -> Iterator[BaseException]:
    """Return an exception with whatever it came from, shown or not."""
    if problem is not None:
        yield problem
        yield from chained(problem.__cause__)
        yield from chained(problem.__context__)


def test_a_record_that_cannot_be_read_or_prepared_is_not_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(public: Tensor) -> Callable[[Tensor], Tensor]:
        def scale(x: Tensor) -> Tensor:
            if (x > 1e5).any():
                raise ValueError(f"{NAME} has {x.max()}")
            return x

        return scale

    x = X.clone()
    x[3] = LABEL
    read, prepared = dpfl.from_torch(Refusing(ITEMS), test=ITEMS[:4]), dpfl.from_arrays(x, Y, test=(X[:4], Y[:4]))
    for data in (read, replace(prepared, fit=prepare)):
        with pytest.warns(Caution) as said:
            dpfl.federate(data, clients=2, seed=1)
        shows_nothing(*(str(one.message) for one in said))
    shows_nothing(*capsys.readouterr())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_errors_name_places_and_no_values(bad: float) -> None:
    x = torch.full((10, 3), PLANTED)
    x[4, 1] = bad
    with pytest.raises(dpfl.BadInput) as caught:
        dpfl.federate(dpfl.from_arrays(x, torch.arange(10) % 2, test=(x, torch.arange(10) % 2)), clients=2)
    assert DIGITS not in str(caught.value)
