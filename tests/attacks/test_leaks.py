"""What leaks beside ε: private values in print, in a run's folder and in errors; a certificate that was edited."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dpfl
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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_errors_name_places_and_no_values(bad: float) -> None:
    x = torch.full((10, 3), PLANTED)
    x[4, 1] = bad
    with pytest.raises(dpfl.BadInput) as caught:
        dpfl.federate(dpfl.from_arrays(x, torch.arange(10) % 2, test=(x, torch.arange(10) % 2)), clients=2)
    assert DIGITS not in str(caught.value)
