"""`dpfl compare` as a user meets it."""

import json
from pathlib import Path

from e2e.command_line import dpfl

FEW = ("--clients", "3", "--set", "rounds=2", "--set", "share=0.3")


def test_a_table_a_plot_and_every_run_are_kept(tmp_path: Path) -> None:
    done = dpfl("compare", "udp", "nbafl", "fedavg", "--epsilon", "4", "--seeds", "2", *FEW, "--out", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    heading, udp, nbafl, fedavg, *_ = done.stdout.splitlines()
    assert heading.split("  ")[-1].strip() == "loss"
    assert udp.startswith("udp")
    assert udp.count("±") == nbafl.count("±") == fedavg.count("±") == 3
    assert "∞" in fedavg
    folder = tmp_path / "c"
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "comparison.md").read_text().count("\n") == 5
    assert len(list(folder.glob("*/seed-*/certificate.json"))) == 6
    assert dpfl("certificate", "c/udp/seed-1", cwd=tmp_path).returncode == 0
    systems = json.loads((folder / "comparison.json").read_text())["systems"]
    assert [one["true_epsilon"] and round(one["true_epsilon"], 2) for one in systems] == [4.0, 4.0, None]
    again = dpfl("compare", "udp", *FEW, "--out", "c", cwd=tmp_path)
    assert again.returncode == 2
    assert "out must be a new folder" in again.stderr


def test_json_is_one_document(tmp_path: Path) -> None:
    done = dpfl("compare", "udp", "--seeds", "1", *FEW, "--json", cwd=tmp_path)
    plain = json.loads(done.stdout)
    assert plain.keys() == {"epsilon", "delta", "seeds", "settings", "systems", "out"}
    assert plain["systems"][0].keys() == {
        "label", "system", "calibration", "unit", "neighbours", "claimed", "true_epsilon", "uncounted", "searched",
        "rounds", "accuracy", "loss", "seconds", "runs",
    }  # fmt: skip
    assert (tmp_path / plain["out"] / "comparison.json").is_file()


def test_what_cannot_be_compared_ends_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('system = "udp"\npartition = "classes:2"\n')
    done = dpfl("compare", "udp", "other.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dpfl: partition must be the same in all that is compared")
    assert not (tmp_path / "runs").exists()
    run = dpfl("run", "searching.toml", cwd=tmp_path)
    assert run.returncode == 2
    (tmp_path / "searching.toml").write_text('system = "udp"\nsearch.rounds = [2, 3]\n')
    run = dpfl("run", "searching.toml", cwd=tmp_path)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "only `dpfl compare` tries several values" in run.stderr
