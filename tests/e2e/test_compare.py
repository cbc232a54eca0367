"""`dpfl compare` as a user meets it."""

import json
from pathlib import Path

from e2e.command_line import dpfl

FEW = ("--clients", "3", "--set", "rounds=2", "--set", "share=0.3")


def test_a_table_a_plot_and_every_run_are_kept(tmp_path: Path) -> None:
    done = dpfl("compare", "udp", "nbafl", "fedavg", "--epsilon", "4", "--seeds", "2", *FEW, "--out", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ranked, apart, *_ = done.stdout.split("not comparable with these")
    currency, _, heading, udp, nbafl, *_ = ranked.splitlines()
    (fedavg,) = (line for line in apart.splitlines() if line.startswith("fedavg"))
    assert currency == "true ε at δ = 0.001 against the server, for one record, replaced by any other"
    assert heading.split("  ")[-1].strip() == "loss"
    assert udp.startswith("udp")
    assert udp.count("±") == nbafl.count("±") == fedavg.count("±") == 3
    assert "∞" in fedavg
    folder = tmp_path / "c"
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "comparison.csv").read_text().count("\n") == 1 + 3 * 2
    assert (folder / "comparison.tex").read_text().count("$ \\\\\n") == 3
    written = (folder / "comparison.md").read_text()
    assert written.count("\n|") == 4 + 3
    assert "nobody's records were protected here" in written
    assert "nobody's records were protected here" in done.stdout
    assert "were they real, the 4 trainings would cost each client's people ε ≤" in done.stdout
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
    assert plain.keys() == {
        "epsilon", "delta", "neighbours", "seeds", "together", "if_real", "settings", "systems", "out",
    }  # fmt: skip
    assert plain["systems"][0].keys() == {
        "label", "system", "calibration", "neighbours", "true_epsilon", "together", "apart", "claimed", "promise",
        "uncounted", "searched", "rounds", "accuracy", "loss", "seconds", "runs",
    }  # fmt: skip
    assert plain["together"] is plain["systems"][0]["together"] is None  # a simulation
    assert plain["if_real"].keys() == {"trainings", "epsilon", "delta", "not_counted"}
    other = json.loads(dpfl("compare", "fedsgd-dpc", "--seeds", "1", *FEW, "--neighbours", "add-remove", "--json",
                            cwd=tmp_path).stdout)  # fmt: skip
    assert other["neighbours"] == other["systems"][0]["neighbours"] == "add-remove"
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
