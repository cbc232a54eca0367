"""The building keeps its plan: imports point one way, and what must be made in one place is made only there."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import dpfl
from dpfl.privacy import paper_formulas
from grids import each

ROOT = Path(dpfl.__file__).parent
SOURCES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in ROOT.rglob("*.py")}

# {orders, settings} ← {privacy, federation, models} ← gradients ← clients ← server ← systems ← {session, config}
# ← round ← rehearsal ← training ← comparison ← planning ← cli; a room may import from lower floors and from itself. A
# report reads files and plain data, so it stands below what computes them: what is printed may ask it for the words.
FLOORS = {
    "errors": -1,  # the foundations
    "rounding": -1,
    "averages": -1,
    "run_folder": 0,
    "report": 1,
    "streams": 2,
    "options": 1,
    "precision": 1,
    "orders": 1,
    "settings": 2,
    "federation": 3,
    "privacy": 3,
    "models": 3,
    "gradients": 4,
    "clients": 5,
    "server": 6,
    "systems": 7,
    "session": 8,
    "config": 8,
    "round": 9,
    "paid_evaluation": 9,
    "rehearsal": 10,
    "checkpoint": 10,
    "training": 11,
    "comparison": 12,
    "repetitions": 12,
    "loggers": 12,
    "bench": 13,
    "planning": 13,
    "experiments": 14,
    "catalogue": 15,
    "cli": 16,
    "__main__": 17,
}


def room(module: str) -> str:
    return module.split("/")[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> set[str]:
    """Return the rooms of dpfl that a file imports, wherever in the file it does."""
    rooms = set()
    for node in ast.walk(tree(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: say where an import comes from"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("dpfl.")}
    return rooms - {"__version__"}


@each("module", sorted(SOURCES.keys() - {"__init__"}))
def test_imports_point_one_way(module: str) -> None:
    here = room(module)
    assert here in FLOORS, f"give {here} a floor"
    for other in imported(SOURCES[module]) - {here}:
        assert FLOORS[other] < FLOORS[here], f"{module} imports {other}, which stands above or beside it"


@each("module", sorted(module for module in SOURCES if room(module) == "report"))
def test_reports_import_nothing_that_computes(module: str) -> None:
    assert imported(SOURCES[module]) <= {"errors", "rounding", "run_folder", "report"}


def test_the_privacy_room_computes_and_leaves_the_layout_to_reports() -> None:
    for module, path in SOURCES.items():
        tree = ast.parse(path.read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if room(module) == "privacy":
            assert "text" not in functions
            assert "textwrap" not in {package for package, _ in imports(tree)}


def test_systems_never_touch_records_and_clients_know_no_system() -> None:
    for module in SOURCES:
        names = {node.id for node in ast.walk(tree(SOURCES[module])) if isinstance(node, ast.Name)}
        if room(module) == "systems":
            assert "Records" not in names
        if room(module) == "clients":
            assert "systems" not in imported(SOURCES[module])


@cache
def calls(path: Path) -> list[str]:
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            found.append(ast.unparse(node.func))
    return found


@each(
    ("call", "homes"),
    [
        ("Charged", ["privacy/ledger"]),  # no receipt, no upload
        ("Generator", ["streams"]),  # randomness is an argument
        ("rng.standard_normal", ["planning/made_up", "privacy/mechanisms"]),  # noise, and records that are nobody's
        ("rng.laplace", ["privacy/mechanisms"]),
        ("sqlite3.connect", ["privacy/books"]),  # nobody else writes to a ledger
        ("udp_noise_std", ["systems/udp"]),  # a paper's formula serves its own paper only
    ],
)
def test_made_in_one_place_only(call: str, homes: list[str]) -> None:
    assert sorted(module for module, path in SOURCES.items() if call in calls(path)) == homes


def test_randomness_from_the_operating_system_makes_roots_and_what_hides_books() -> None:
    users = [module for module, path in SOURCES.items() if "os.urandom" in calls(path)]
    assert sorted(users) == ["privacy/books", "privacy/chain", "streams"]


FORMULAS = sorted(
    name
    for name, _ in inspect.getmembers(paper_formulas, inspect.isfunction)
    if not name.startswith("_") and name.endswith(("_noise_std", "_scale"))
)


@cache
def words(path: Path) -> set[str]:
    """Return every name that a file uses, imports (under any other name too) or reaches through a module."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found


def test_there_are_formulas_to_watch() -> None:
    assert {"udp_noise_std", "nbafl_uplink_noise_std", "dp_fedavg_laplace_scale", "fedsgd_dpc_noise_std"} <= set(
        FORMULAS
    )


@each("formula", FORMULAS)
def test_a_papers_noise_serves_its_own_paper_only(formula: str) -> None:
    users = {module for module, path in SOURCES.items() if formula in words(path)} - {"privacy/paper_formulas"}
    (home,) = (home for home in ("udp", "nbafl", "dp_fedavg", "fedsgd_dpc") if formula.startswith(f"{home}_"))
    assert users <= {f"systems/{home}"}, f"{formula} proves nothing, and belongs to {home} alone"


def imports(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the outermost package of every import, with its statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0], node


def runs_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what a file does when it is imported: everything but the insides of its functions."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from runs_on_import(node)


def test_the_accounting_library_is_loaded_in_one_place_and_only_when_it_is_asked() -> None:
    # Training with plain Gaussian noise works on machines without it.
    users = {}
    for module, path in SOURCES.items():
        whole = tree(path)
        users[module] = [node for package, node in imports(whole) if package == "dp_accounting"]
        assert not set(users[module]) & set(runs_on_import(whole)), f"{module} loads dp-accounting when it is imported"
    assert [module for module, nodes in users.items() if nodes] == ["privacy/accounting"]


def test_the_database_is_known_to_the_books_only() -> None:
    users = [module for module, path in SOURCES.items() if "sqlite3" in {package for package, _ in imports(tree(path))}]
    assert sorted(users) == ["privacy/books", "privacy/chain"]


def loaded_by(program: str) -> set[str]:
    """Return the packages, and the rooms of dpfl, that a fresh Python has loaded after a program."""
    command = [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {".".join(name.split(".")[: 2 if name.startswith("dpfl.") else 1]) for name in done.stdout.split()}


def test_accounting_needs_no_tensors_and_no_accounting_library() -> None:
    # A client's owner can read a ledger, and check a certificate, on a machine that trains nothing.
    asked = ("accounting", "books", "budget", "calibration", "certificate", "filters", "ledger",
             "paper_formulas", "renyi", "solve", "statement")  # fmt: skip
    loaded = loaded_by("; ".join(f"import dpfl.privacy.{name}" for name in asked))
    assert {"dpfl", "numpy", "sqlite3"} <= loaded
    assert not loaded & {"torch", "sklearn", "dp_accounting", "typer", "matplotlib", "jinja2", "dpfl.report"}


def test_words_need_nothing_but_python() -> None:
    loaded = loaded_by("; ".join(f"import dpfl.report.{name}" for name in ("account", "certificate", "statement")))
    assert "dpfl.report" in loaded
    assert not loaded & {"numpy", "torch", "typer", "matplotlib", "jinja2", "dpfl.privacy"}


def test_the_glossary_names_files_and_rooms_that_are_there() -> None:
    glossary = (ROOT.parents[1] / "docs" / "glossary.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", glossary)
    assert len(set(named)) > 15
    for path in named:
        assert (ROOT / path).exists() or (ROOT.parents[1] / path).exists(), f"the glossary sends its reader to {path}"


def test_no_global_randomness_and_nothing_that_executes_what_it_loads() -> None:
    forbidden = ("torch.manual_seed", "np.random.", "numpy.random.", "random.seed", "torch.load", "pickle.")
    for module, path in SOURCES.items():
        for call in calls(path):
            assert not call.startswith(forbidden), f"{module} calls {call}"
