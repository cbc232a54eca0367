"""`dpfl reproduce` as a user meets it."""

import json
import signal
import time
from pathlib import Path

import pytest

from e2e.command_line import dpfl, started
from grids import each

MINE = """
title = "rounds on digits"
measure = "accuracy"
repetitions = 2
down = "ε"
across = "R"
rows = [{ label = "8", epsilon = 8.0 }, { label = "none", system = "fedavg" }]
columns = [{ rounds = 2 }, { rounds = 6 }]

[base]
system = "udp"
calibration = "paper"
delta = 1e-3
clients = 3
share = 0.3
lr = 1.0

[printed]
cells = [[40.0, nan], [nan, nan]]

[[claims]]
says = "more rounds are better"
less = { column = 2 }
than = { column = 6 }
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINE, encoding="utf-8")
    return path


def test_a_table_with_ours_the_paper_s_and_that_at_true_epsilon(mine: Path, tmp_path: Path) -> None:
    done = dpfl("reproduce", "mine.toml", "--processes", "1", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 6  # a line a cell: two columns, by the formula, at true ε, and without privacy
    for part in ("| 8 | ours |", "|  | paper | 40 |", "|  | true ε | 8.353 |", "|  | at true ε |", "| none | ours |"):
        assert part in done.stdout
    assert "| more rounds are better |" in done.stdout
    assert "`dpfl reproduce mine`, seed 1, " in done.stdout
    assert "a simulation, which runs on seeds: nobody's records were protected here" in done.stdout
    assert "for the neighbours of its paper: one record, replaced by any other (`udp`)" in done.stdout
    assert (tmp_path / "r" / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r" / "mine.md").read_text().startswith("## rounds on digits")

    again = dpfl("reproduce", "mine.toml", "--out", "r", cwd=tmp_path)
    assert again.stderr == ""  # nothing is trained twice
    assert again.stdout == done.stdout


def test_json_is_one_document(mine: Path, tmp_path: Path) -> None:
    done = dpfl("reproduce", "mine.toml", "--processes", "1", "--json", cwd=tmp_path)
    plain = json.loads(done.stdout)
    assert plain["name"] == "mine"
    assert {"ours", "paper", "true_epsilon", "at_true_epsilon"} <= plain["rows"][0].keys()
    assert [row["paper"] for row in plain["rows"]] == [40.0, None, None, None]
    assert (tmp_path / "runs" / "reproduce-smoke" / "mine.json").is_file()


def test_the_list_shows_what_each_would_cost(tmp_path: Path) -> None:
    done = dpfl("reproduce", "--list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ali-dpfl-table-2-short" in done.stdout
    assert "Table II: small R_s" in done.stdout
    listed = json.loads(dpfl("reproduce", "nbafl", "--list", "--scale", "paper", "--json", cwd=tmp_path).stdout)
    assert len(listed["experiments"]) == 10
    assert all(one["seconds"] > 0 and one["cells"] > 0 for one in listed["experiments"])


def test_four_hospitals_stand_beside_flamby_s_figures(tmp_path: Path) -> None:
    done = dpfl("reproduce", "four-hospitals", "--processes", "1", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 5  # a line a cell: ε = 1 and 10 in either currency, and one without privacy
    assert "Mean of the sites' test accuracies in %, mean of 2 repetitions ± standard error." in done.stdout
    assert done.stdout.count("|  | paper | 70.15 ± 1.96 | 69.81 ± 1.92 |\n|  | true ε | 1 | 10 |") == 2
    for private in ("one record, added or removed (`dpsgd-fedavg`)", "one record, replaced by any other (`udp`)"):
        assert private in done.stdout
    assert len(list((tmp_path / "r").glob("four-hospitals-*.png"))) == 3


@each(
    ("args", "says"),
    [
        (("nbafl-fig-22",), "name must be one of"),
        (("nbafl-fig-2", "--scale", "huge"), "scale must be one of smoke, paper, was 'huge'"),
        (("nbafl-fig-2", "--device", "tpu"), "device must be one of cpu, cuda, was 'tpu'"),
        (("nbafl-fig-2", "--processes", "0"), "processes must be at least 1, was 0"),
        (("nbafl-fig-2", "--repetitions", "0"), "repetitions must be a whole number of at least 1, was 0"),
        (("--scale", "paper"), "name must be an experiment, a paper or all, was left out"),
        (("nowhere.toml",), "name must be a readable file, was 'nowhere.toml'"),
        (("nbafl", "--pages"), "out must hold finished cells of experiments for pages"),
    ],
)
def test_wrong_input_gets_one_sentence(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    done = dpfl("reproduce", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # dead, but nobody's child
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see which processes there are")
@each("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_sweep_ends_its_cells_are_kept_and_its_processes_gone(tmp_path: Path, how: signal.Signals) -> None:
    slow = MINE.replace("column = 6", "column = 100000").replace("rounds = 6", "rounds = 100000")
    slow = slow.replace('{ label = "8", epsilon = 8.0 }, ', "").replace("[40.0, nan], ", "")  # a short and a long cell
    (tmp_path / "mine.toml").write_text(slow, encoding="utf-8")
    cells = tmp_path / "r" / "cells" / "mine.jsonl"
    with started("reproduce", "mine.toml", "--processes", "2", "--out", "r", cwd=tmp_path) as process:
        until = time.monotonic() + 120
        while not cells.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        helpers = _children(process.pid)
        process.send_signal(how)
        _, said = process.communicate(timeout=60)
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert "cells are kept, the same command goes on with the rest" in said
    assert len(helpers) >= 2
    until = time.monotonic() + 30
    while any(map(_runs, helpers)):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert all(json.loads(line)["loss"] for line in cells.read_text().splitlines())
