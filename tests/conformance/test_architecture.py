"""The building keeps its plan: imports point one way, and what must be made in one place is made only there."""

import ast
from pathlib import Path

import pytest

import dpfl

ROOT = Path(dpfl.__file__).parent
SOURCES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in ROOT.rglob("*.py")}

# orders ← {privacy, federation, models} ← {clients, server, systems} ← {round, config} ← training ← cli; a room may
# import from lower floors and from itself. A report reads files and prints a certificate.
FLOORS = {
    "errors": 0,
    "streams": 1,
    "options": 1,
    "orders": 1,
    "run_folder": 1,
    "federation": 2,
    "privacy": 2,
    "models": 2,
    "clients": 3,
    "server": 3,
    "systems": 3,
    "report": 3,
    "round": 4,
    "config": 4,
    "training": 5,
    "cli": 6,
    "__main__": 7,
}


def room(module: str) -> str:
    return module.split("/")[0]


def imported(path: Path) -> set[str]:
    """Return the rooms of dpfl that a file imports, wherever in the file it does."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: say where an import comes from"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("dpfl.")}
    return rooms - {"__version__"}


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - {"__init__"}))
def test_imports_point_one_way(module: str) -> None:
    here = room(module)
    assert here in FLOORS, f"give {here} a floor"
    for other in imported(SOURCES[module]) - {here}:
        assert FLOORS[other] < FLOORS[here], f"{module} imports {other}, which stands above or beside it"


def test_reports_import_no_training_code() -> None:
    assert imported(SOURCES["report/__init__"]) <= {"errors", "run_folder", "privacy", "report"}


def test_systems_never_touch_records_and_clients_know_no_system() -> None:
    for module in SOURCES:
        names = {node.id for node in ast.walk(ast.parse(SOURCES[module].read_text())) if isinstance(node, ast.Name)}
        if room(module) == "systems":
            assert "Records" not in names
        if room(module) == "clients":
            assert "systems" not in imported(SOURCES[module])


def calls(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            found.append(ast.unparse(node.func))
    return found


@pytest.mark.parametrize(
    ("call", "home"),
    [
        ("Charged", "privacy/ledger"),  # no receipt, no upload
        ("Generator", "streams"),  # randomness is an argument
        ("os.urandom", "streams"),
        ("rng.standard_normal", "privacy/mechanisms"),  # noise is made in one place
        ("rng.laplace", "privacy/mechanisms"),
        ("udp_noise_std", "systems/udp"),  # a paper's formula serves its own paper only
    ],
)
def test_made_in_one_place_only(call: str, home: str) -> None:
    assert [module for module, path in SOURCES.items() if call in calls(path)] == [home]


def test_no_global_randomness_and_nothing_that_executes_what_it_loads() -> None:
    forbidden = ("torch.manual_seed", "np.random.", "numpy.random.", "random.seed", "torch.load", "pickle.")
    for module, path in SOURCES.items():
        for call in calls(path):
            assert not call.startswith(forbidden), f"{module} calls {call}"
