"""Files at sites, as their owners meet them: from a folder to a model, a certificate and a report."""

import csv
import json
import re
import tomllib
from pathlib import Path

import pytest

import dpfl as dpfl_package
from dpfl.federation import heart
from e2e.command_line import Done, dpfl
from grids import each

HOSPITALS = Path(heart.__file__).parent / "hospitals"
FEW = ["--rounds", "3", "--epsilon", "2"]


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for path in HOSPITALS.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def run(cwd: Path, *words: str, system: str = "fedsgd-dpc") -> dict:
    done = dpfl("run", system, *FEW, *words, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sentence(done: Done, code: int = 2) -> str:
    assert (done.returncode, done.stdout) == (code, ""), done.stdout
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_folder_of_files_becomes_a_model_and_a_certificate_with_names(hospitals: Path, tmp_path: Path) -> None:
    result = run(tmp_path, "--sites", "hospitals", "--seed", "1", "--out", "r")
    assert [site["name"] for site in result["sites"]] == ["cleveland", "hungarian", "switzerland", "va"]
    assert [site["records"] + site["tested"] for site in result["sites"]] == [303, 294, 123, 200]  # no row is dropped
    assert {"name", "records", "accuracy", "loss", "epsilon_granted", "epsilon_spent"} <= set(result["sites"][0])
    assert all(site["epsilon_granted"] == 2 and 1.99 < site["epsilon_spent"] <= 2 for site in result["sites"])
    assert [line["name"] for line in result["certificate"]["spending"]] == [site["name"] for site in result["sites"]]
    assert result["certificate"]["held_out"] == "records that sites keep for testing"
    assert json.loads((tmp_path / "r/sites.json").read_text())["sites"] == result["sites"]
    written = tomllib.loads((tmp_path / "r/config.toml").read_text())
    assert (written["sites"], written["clients"], written["data"]) == (["hospitals"], 4, "sites")
    again = dpfl("run", "r/config.toml", "--out", "again", "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["history"] == result["history"]


def test_names_stand_in_every_table(hospitals: Path, tmp_path: Path) -> None:
    done = dpfl("run", "udp", *FEW, "--sites", "hospitals", "--out", "r", cwd=tmp_path)
    printed = {
        "run": done.stdout,
        "ledger": dpfl("ledger", "r", cwd=tmp_path).stdout,
        "certificate": dpfl("certificate", "r", cwd=tmp_path).stdout,
    }
    assert dpfl("report", "r", cwd=tmp_path).returncode == 0
    printed["report"] = (tmp_path / "r/report.html").read_text()
    for what, text in printed.items():
        for name in ("cleveland", "hungarian", "switzerland", "va"):
            assert name in text, (what, name)
    assert "worst at" in done.stdout
    assert "not private" in done.stdout
    assert "not protected        records that sites keep for testing" in printed["certificate"]


def test_a_site_may_have_a_budget_of_its_own_by_its_name(hospitals: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'system = "udp"\nrounds = 3\nepsilon = 2.0\n[sites]\nfiles = "hospitals"\n[sites.va]\nepsilon = 0.5\n'
        "[sites.cleveland]\nepsilon = 1\ndelta = 1e-5\n"
    )
    done = dpfl("run", "c.toml", "--json", "--out", "r", "--set", "delta=1e-4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sites = json.loads(done.stdout)["sites"]
    assert [site["epsilon_granted"] for site in sites] == [1, 2, 2, 0.5]
    assert [site["delta"] for site in sites] == [1e-5, 1e-4, 1e-4, 1e-4]
    # Files that are named on the command line keep the budgets of the config; so do the embedded hospitals.
    for words in (["--sites", str(hospitals / "va.csv"), "--sites", str(hospitals / "cleveland.csv")],):
        named = dpfl("run", "c.toml", *words, "--json", "--set", "delta=1e-4", cwd=tmp_path)
        assert [(site["name"], site["epsilon_granted"]) for site in json.loads(named.stdout)["sites"]] == [
            ("va", 0.5), ("cleveland", 1),
        ]  # fmt: skip
    (tmp_path / "heart.toml").write_text('system = "udp"\ndata = "heart"\nrounds = 2\n[sites.va]\nepsilon = 0.5\n')
    embedded = json.loads(dpfl("run", "heart.toml", "--json", cwd=tmp_path).stdout)["sites"]
    assert [site["epsilon_granted"] for site in embedded] == [8, 8, 8, 0.5]


@each(
    "table, said",
    [
        ("[sites.vaa]\nepsilon = 1", "sites.vaa must be the name of a site, but there are cleveland, .* mean 'va'"),
        ("[sites.va]\nepsilno = 1", "sites.va must be a table of epsilon, delta or both, was"),
        ("[sites.va]\ndelta = 1e-5", "delta must be one number for the sites that have none of their own .*, was None"),
        ("[sites.va]\nepsilon = -1", "epsilon must be a finite number above 0, was -1"),
    ],
)  # fmt: skip
def test_a_budget_of_nobody_is_refused(table: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'system = "udp"\ndata = "heart"\n{table}\n')
    assert re.search(said, sentence(dpfl("run", "c.toml", "--out", "r", cwd=tmp_path)))
    assert not (tmp_path / "r").exists()


def test_a_shared_ledger_knows_sites_by_name_and_limits_one_of_them(hospitals: Path, tmp_path: Path) -> None:
    assert dpfl("ledger", "all.sqlite", "--new", "--grant", "8", "--delta", "1e-3", cwd=tmp_path).returncode == 0
    words = ["--sites", "hospitals", "--ledger", "all.sqlite"]
    run(tmp_path, *words, system="udp")
    assert (
        dpfl("ledger", "all.sqlite", "--grant", "2.5", "--delta", "1e-3", "--client", "va", cwd=tmp_path).returncode
        == 0
    )
    state = json.loads(dpfl("ledger", "all.sqlite", "--json", cwd=tmp_path).stdout)
    assert [(line["name"], line["granted"]["epsilon"]) for line in state["clients"]][2:] == [
        ("switzerland", 8), ("va", 2.5),
    ]  # fmt: skip
    refused = sentence(dpfl("run", "udp", *FEW, *words, "--out", "r", cwd=tmp_path), code=3)
    assert "the grant of va in the ledger 'all.sqlite' leaves" in refused
    # Another file moves everybody's number: the people would be charged to somebody else's account.
    (hospitals / "aarhus.csv").write_bytes((hospitals / "va.csv").read_bytes())
    assert "changed clients" in sentence(dpfl("run", "udp", *FEW, *words, "--out", "r", cwd=tmp_path))


def test_public_records_are_apart_from_the_sites_and_judge_models(hospitals: Path, tmp_path: Path) -> None:
    sound = (hospitals / "va.csv").read_text()
    (hospitals / "va.csv").unlink()
    (tmp_path / "va.csv").write_text(sound + "old," + ",".join("1" * 13) + "\n")
    assert "public must be a file whose rows can all be used" in sentence(
        dpfl("run", "udp", "--sites", "hospitals", "--public", "va.csv", "--out", "r", cwd=tmp_path)
    )
    (tmp_path / "public.csv").write_text(sound)
    result = run(tmp_path, "--sites", "hospitals", "--public", "public.csv")
    assert len(result["sites"]) == 3
    assert result["history"][-1]["validation_accuracy"] is not None
    said = sentence(
        dpfl("run", "udp", "--sites", "hospitals", "--public", "hospitals/hungarian.csv", "--out", "r", cwd=tmp_path)
    )
    assert "public must be a file apart from the sites'" in said


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("no schema", "schema must say what the columns of the sites' files mean"),
        ("no target", "target"),
        ("other columns", "age"),
        ("duplicated header", "age"),
        ("no rows", "at least one"),
        ("empty", ""),
        ("one class", "class"),
        ("nothing usable", ""),
    ],
)
def test_a_file_that_cannot_be_used_is_said_in_a_sentence_and_nothing_is_written(
    spoil: str, said: str, hospitals: Path, tmp_path: Path
) -> None:
    path, schema = hospitals / "hungarian.csv", hospitals / "schema.toml"
    text = path.read_text()
    header, _, rows = text.partition("\n")
    match spoil:
        case "no schema":
            schema.unlink()
        case "no target":
            path.write_text(text.replace("target", "outcome", 1))
        case "other columns":
            path.write_text(text.replace("age", "years", 1))
        case "duplicated header":
            path.write_text(text.replace("sex", "age", 1))
        case "no rows":
            path.write_text(header + "\n")
        case "empty":
            path.write_text("")
        case "one class":
            schema.write_text(schema.read_text().replace('values = ["0", ["1", "2", "3", "4"]]', 'values = ["0"]'))
        case "nothing usable":
            path.write_text(header + "\n" + "".join("x," * 13 + "x\n" for _ in rows.splitlines()))
    line = sentence(dpfl("run", "udp", *FEW, "--sites", "hospitals", "--out", "r", cwd=tmp_path))
    assert said in line
    assert "hungarian" in line or "schema" in line
    assert not (tmp_path / "r").exists()


def test_marks_of_windows_change_nothing(hospitals: Path, tmp_path: Path) -> None:
    plain = run(tmp_path, "--sites", "hospitals", "--seed", "1")
    path = hospitals / "va.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert run(tmp_path, "--sites", "hospitals", "--seed", "1")["history"] == plain["history"]


def test_bad_rows_are_told_to_the_owner_and_kept_out_of_the_run_folder(hospitals: Path, tmp_path: Path) -> None:
    path = hospitals / "va.csv"
    with path.open("a", newline="") as file:
        csv.writer(file).writerow(["secret-name", *["1"] * 12, "0"])
    done = dpfl("run", "udp", *FEW, "--sites", "hospitals", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0
    assert "va.csv: of 201 rows these count as zero in training" in done.stderr
    everything = done.stdout + done.stderr
    everything += "".join(
        file.read_text() for file in (tmp_path / "r").iterdir() if file.suffix in (".json", ".toml", ".jsonl")
    )
    assert "secret-name" not in everything
    assert "count as zero" not in (tmp_path / "r/certificate.json").read_text()


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_python_takes_the_same_tables(package: str, hospitals: Path) -> None:
    frames = pytest.importorskip(package)
    as_text = {"dtype": str} if package == "pandas" else {"infer_schema_length": 0}
    tables = {path.stem: frames.read_csv(path, **as_text) for path in sorted(hospitals.glob("*.csv"))}
    from_frames = dpfl_package.from_clients(tables, schema=hospitals / "schema.toml")
    from_files = dpfl_package.federate("sites", sites=hospitals)
    assert from_frames.names == from_files.names
    for one, other in zip(from_frames.clients, from_files.clients, strict=True):
        assert one.x.equal(other.x)
        assert one.y.equal(other.y)
