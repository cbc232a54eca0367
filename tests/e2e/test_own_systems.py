"""A system in a package of the user's own: every command finds it by its entry point, or says what is wrong with it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import dpfl
from dpfl.experiments import experiment
from dpfl.systems import SYSTEMS
from e2e.command_line import dpfl as run_here

PROGRAM = '''
from dataclasses import dataclass
from typing import ClassVar

import dpfl
from dpfl.systems import UDP, FedSGD, Problem


@dataclass(frozen=True, kw_only=True)
class Halved(FedSGD):
    """Plain steps of half the length."""

    name: ClassVar[str] = "halved"
    factor: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Quiet(UDP):
    """UDP under another name, and for fewer rounds."""

    name: ClassVar[str] = "quiet"
    rounds: int = 3
    calm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Renamed(FedSGD):
    name: ClassVar[str] = "another"


def factory():
    return Halved
'''


def install(folder: Path, entries: dict[str, str], package: str = "their-package") -> None:
    """Put a package where Python looks for it, as pip would leave it."""
    (folder / "their_systems.py").write_text(PROGRAM)
    about = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = their_systems:{value}" for name, value in entries.items()]
    (about / "entry_points.txt").write_text("\n".join(["[dpfl.systems]", *lines, ""]))


def command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `dpfl ARGS` where packages are looked for anew, in the folder `packages` too."""
    with mock.patch.object(sys, "path", [str(cwd / "packages"), *sys.path]):
        _forget()
        try:
            return run_here(*args, cwd=cwd)
        finally:
            _forget()


def _forget() -> None:
    sys.modules.pop("their_systems", None)
    vars(SYSTEMS).pop("others", None)
    experiment._options_of_systems.cache_clear()


def started(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `dpfl ARGS` in a process of its own, with the packages of the folder `packages`."""
    paths = [str(cwd / "packages"), str(Path(dpfl.__file__).parents[1])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "dpfl", *args],
        cwd=cwd, env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def answer(*args: str, cwd: Path) -> dict:
    done = command(*args, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "packages").mkdir()
    return tmp_path


def test_every_command_finds_it(folder: Path) -> None:
    install(folder / "packages", {"halved": "Halved", "quiet": "Quiet"})
    few = ["--clients", "3", "--share", "0.3", "--rounds", "2"]
    assert answer("run", "halved", *few, "--set", "factor=0.25", "--out", "r", cwd=folder)["system"] == "halved"
    assert 'system = "halved"' in (folder / "r/config.toml").read_text()
    done = started("run", "r/config.toml", "--out", "again", "--json", cwd=folder)
    assert json.loads(done.stdout)["system"] == "halved"

    compared = answer("compare", "quiet", "udp", *few, "--epsilon", "4", "--seeds", "1", cwd=folder)
    assert [row["system"] for row in compared["systems"]] == ["quiet", "udp"]
    assert compared["systems"][0]["true_epsilon"] == pytest.approx(4.0, rel=1e-3)

    listed = {row["name"]: row for row in answer("list", "systems", cwd=folder)["systems"]}
    assert listed["quiet"] == listed["quiet"] | {
        "private": True, "package": "their-package", "about": "UDP under another name, and for fewer rounds.",
    }  # fmt: skip
    assert listed["quiet"]["options"]["calm"] == 1.0
    assert listed["udp"]["package"] == "dpfl"

    assert {"halved", "quiet."} <= set(started("run", "--help", cwd=folder).stdout.split())
    assert "did you mean 'halved'?" in command("run", "halfed", cwd=folder).stderr


def test_planners_and_experiments_find_it(folder: Path) -> None:
    install(folder / "packages", {"halved": "Halved", "quiet": "Quiet"})
    (folder / "mine.toml").write_text(
        'title = "mine"\nmeasure = "loss"\n[base]\nclients = 3\nshare = 0.3\nrounds = 2\ncalm = 0.5\n'
        '[[rows]]\nlabel = "quiet"\nsystem = "quiet"\n[[rows]]\nlabel = "halved"\nsystem = "halved"\n'
        '[[columns]]\nlabel = "large"\nlr = 1.0\n'
    )
    table = answer("reproduce", "mine.toml", "--processes", "1", "--out", "e", cwd=folder)
    assert [row["row"] for row in table["rows"]] == ["quiet", "halved"]
    limits = ["--method", "pilot", "--max-rounds", "3", "--time-limit", "4", "--clients", "3"]
    assert answer("plan", "quiet", *limits, "--out", "p", cwd=folder)["system"] == "quiet"
    assert answer("plan", "quiet", "--recommend", *limits, cwd=folder)["recommended"] == "quiet"


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (
            {"udp": "Halved"},
            "system 'udp' of package 'their-package' must have a name of its own, but dpfl has a system of that name;"
            " rename it, or uninstall the package",
        ),
        (
            {"wrong": "factory"},
            "system 'wrong' of package 'their-package' must be a subclass of dpfl.systems.System, was <function",
        ),
        (
            {"wrong": "Problem"},
            "system 'wrong' of package 'their-package' must be a subclass of dpfl.systems.System, was <class",
        ),
        (
            {"wrong": "Renamed"},
            "system 'wrong' of package 'their-package' must have the class attribute name = 'wrong', was 'another'",
        ),
        (
            {"wrong": "dpfl.systems.System"},
            "system 'wrong' of package 'their-package' must have the class attribute name = 'wrong', was None; set it",
        ),
        (
            {"wrong": "Missing"},
            "system 'wrong' of package 'their-package' must be loadable from 'their_systems:Missing', but that ended in"
            " AttributeError",
        ),
    ],
)
def test_what_is_no_system_is_refused_with_its_package(entries: dict, sentence: str, folder: Path) -> None:
    install(folder / "packages", entries)
    done = command("run", *entries, "--out", "r", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"dpfl: {sentence}")
    assert not (folder / "r").exists()


def test_a_name_that_two_packages_take_is_refused(folder: Path) -> None:
    for package in ("one-package", "other-package"):
        install(folder / "packages", {"halved": "Halved"}, package)
    said = command("run", "halved", cwd=folder).stderr
    assert said == (
        "dpfl: system 'halved' must be of one package, but is of 'one-package' and 'other-package'; uninstall all but"
        " one\n"
    )


def test_a_package_that_is_broken_leaves_other_systems_alone(folder: Path) -> None:
    install(folder / "packages", {"wrong": "Missing"})
    answer("run", "fedsgd", "--clients", "3", "--rounds", "1", cwd=folder)
    assert started("--help", cwd=folder).returncode == 0


def test_names_are_known_without_loading_anything() -> None:
    program = (
        "import sys, dpfl; from dpfl.systems import SYSTEMS; print(*SYSTEMS, 'udp' in SYSTEMS, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-3:] == ["lei", "True", "False"]
    alone = "import sys, dpfl, dpfl.cli; print('importlib.metadata' in sys.modules and 'dpfl.systems' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
