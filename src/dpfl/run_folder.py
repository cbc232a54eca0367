"""The run folder: everything one training leaves behind, and nothing else is ever overwritten.

ledger.sqlite       what every client was charged, before it uploaded; a run that replaces another adds to it
extract.sqlite      in its place, where the run was charged to a ledger of many: this run's part of that
config.toml         complete: running it again with its seed repeats the run bit for bit
metrics.jsonl       one line a round, on disk as soon as the round is over
model.safetensors   the trained parameters by name
certificate.json    the privacy that was really spent
sites.json          what each client with a name has spent, and how well the model does on its own test records
evaluation.json     the privacy that sites paid to be evaluated, where they did
environment.json    versions, machine, data files, time; the version of the folder itself
"""

import json
from pathlib import Path
from typing import Any

from dpfl.errors import BadInput, require_readable

CONFIG, METRICS, MODEL, CERTIFICATE, ENVIRONMENT = (
    "config.toml", "metrics.jsonl", "model.safetensors", "certificate.json", "environment.json",
)  # fmt: skip
SITES, EVALUATION = "sites.json", "evaluation.json"
LEDGER, EXTRACT = "ledger.sqlite", "extract.sqlite"
VERSION = 1  # of the folder as a whole: which files it holds and what they say; it stands in environment.json
CERTIFICATE_VERSION = 2  # of a certificate's plain data; 1 knew neither what was allowed nor other runs
REPORT_FILES = ("report.html", "curve.png")
PLAN, PLAN_PLOT, CONSTANTS = "plan.json", "plan.png", "constants.toml"


def claim(path: Path, *, force: bool) -> None:
    """Check that a run may be written to `path`, without writing anything yet."""
    if not path.exists():
        return
    if not path.is_dir():
        raise BadInput(f"out must be a folder, but {str(path)!r} is a file; choose another name")
    if not any(path.iterdir()):
        return
    if not force:
        raise BadInput(
            f"out must be a new folder, but {str(path)!r} exists; choose another, or --force to replace the run in it"
        )
    if not any((path / name).is_file() for name in (CONFIG, LEDGER)):  # one that was killed early has only a ledger
        raise BadInput(
            f"out may be replaced only where it holds a run, but {str(path)!r} has no {CONFIG}; choose another folder"
        )


def make(path: Path) -> None:
    """Make the folder itself, where there is none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _unwritable(path, problem) from None


def create(path: Path, config: str) -> None:
    """Write the config; an old run in the folder gives way, but not its ledger: what is spent is spent."""
    make(path)
    try:
        for name in (CONFIG, METRICS, MODEL, CERTIFICATE, SITES, EVALUATION, ENVIRONMENT, EXTRACT, *REPORT_FILES,
                     PLAN, PLAN_PLOT, CONSTANTS):  # fmt: skip
            (path / name).unlink(missing_ok=True)
        (path / CONFIG).write_text(config, encoding="utf-8")
    except OSError as problem:
        raise _unwritable(path, problem) from None


def _unwritable(path: Path, problem: OSError) -> BadInput:
    return BadInput(f"out must be a folder that can be written, was {str(path)!r} ({problem.strerror}); choose another")


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Add one round to the metrics; closing the file puts the line on disk before the next round begins."""
    with (path / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics, allow_nan=False) + "\n")


def write_json(path: Path, name: str, content: dict[str, Any]) -> None:
    """Write one JSON file of the folder, whole or not at all."""
    if name == ENVIRONMENT:
        content = {"folder_version": VERSION} | content
    scratch = path / f"{name}.part"
    scratch.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    scratch.replace(path / name)


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Read one JSON file of a finished run; what a newer dpfl wrote is refused."""
    content = _decode(_read(path, name), path / name)
    # Release 0.1 named no versions.
    if name == ENVIRONMENT:
        require_readable("run", repr(str(path)), content.get("folder_version", 1), VERSION)
    if name == CERTIFICATE:
        require_readable("certificate", repr(str(path / name)), content.get("version", 1), CERTIFICATE_VERSION)
    return content


def ledger_of(path: Path) -> tuple[Path, str]:
    """Return the ledger that a run was charged to, and the run's name in it."""
    environment = read_json(path, ENVIRONMENT)
    if not all(isinstance(environment.get(key), str) for key in ("ledger", "run")):
        raise BadInput(f"run must have been charged to a ledger, but {str(path)!r} names none; repeat the run")
    return path / environment["ledger"], environment["run"]  # an absolute path stands for itself


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rounds that a run has finished."""
    return [_decode(line, path / METRICS) for line in _read(path, METRICS).splitlines()]


def read_config(path: Path) -> str:
    """Read the config as it was written."""
    return _read(path, CONFIG)


def _read(path: Path, name: str) -> str:
    try:
        return (path / name).read_text(encoding="utf-8")
    except OSError as problem:
        raise BadInput(
            f"run must be the folder of a run, but {str(path / name)!r} cannot be read ({problem.strerror});"
            " give the folder that `dpfl run` printed"
        ) from None


def _decode(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}, no table")
    except ValueError as problem:
        raise BadInput(f"run must be whole, but {str(path)!r} is damaged ({problem}); repeat the run") from None
    return content
