"""A page for each paper: what it is, what reproduced and what did not, and all of its tables and plots."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dpfl.errors import BadInput
from dpfl.experiments.experiment import Experiment
from dpfl.experiments.results import Results
from dpfl.options import read_toml

_HOME = Path(str(files("dpfl.experiments")))
_TALLY = "Of the "
_PROTECTED = {
    ("record", "replace"): "one record, replaced by any other",
    ("record", "add-remove"): "one record, added or removed",
    ("client", "replace"): "all records of one client, replaced by any others",
    ("client", "add-remove"): "all records of one client, added or removed",
}
_INDEX = """# Results

The papers' tables and figures, trained again, beside what they become when the promised ε is true. A claim is an
inequality in the experiment's TOML file; it *held* or *failed* by more than two standard errors, and is *open* in
between. Each page is written by `dpfl reproduce … --pages` from the finished cells in `cells/`; each table names the
command that repeats it.

"""


def write_page(paper: str, results: Sequence[Results], left: Sequence[Experiment], folder: Path) -> Path:
    """Write PAPER.md into the folder, beside the plots that it shows; `left` are not finished and only named."""
    about = _about(paper)
    for key in ("title", "source", "verdict"):
        if not isinstance(about.get(key), str):
            raise BadInput(f"{key} of paper {paper!r} must be a text, was {about.get(key)!r}; mend its paper.toml")
    counts = {"held": 0, "open": 0, "failed": 0}
    for one in results:
        for judgement in one.judgements(at_true=False):
            if judgement.verdict in counts:
                counts[judgement.verdict] += 1
    by = "by the paper's own formula" if any(one.by_formula for one in results) else "at true ε"
    tally = (
        f"{_TALLY}{sum(counts.values())} claims that are tested here, {counts['held']} held,"
        f" {counts['failed']} failed and {counts['open']} stayed open, {by}."
    )
    parts = (f"# {about['title']}", about["source"], about["verdict"].strip(), what_is_private(results), tally)
    head = "".join(f"{part}\n\n" for part in parts)[:-1]
    path = folder / f"{paper}.md"
    sections = [one.markdown(one.draw(folder)) for one in results]
    if left:
        missed = "; ".join(f"{one.shows} (`dpfl reproduce {one.name} --scale paper`)" for one in left)
        sections.append(f"## Not here yet\n\n{missed}.\n")
    path.write_text("\n".join([head, *sections]), encoding="utf-8")
    return path


def what_is_private(results: Sequence[Results]) -> str:
    """Say that all of it is a simulation, and whom each ε is for: a comparison with a paper keeps to its neighbours."""
    systems: dict[tuple[str, str], set[str]] = {}
    for one in results:
        for kind, names in one.protected.items():
            systems.setdefault(kind, set()).update(names)
    simulation = "All of this together is a simulation, which runs on seeds: nobody's records were protected here."
    if not systems:
        return simulation
    words = (
        f"{_PROTECTED[kind]} ({', '.join(f'`{name}`' for name in sorted(systems[kind]))})" for kind in sorted(systems)
    )
    return f"{simulation} Each ε is that of one training, and for the neighbours of its paper: {'; '.join(words)}."


def write_index(folder: Path) -> Path:
    """Write README.md: every page that the folder holds, with what it says of itself."""
    lines = []
    for about in sorted(_HOME.glob("*/paper.toml")):
        page = folder / f"{about.parent.name}.md"
        if page.is_file():
            tally = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(_TALLY))
            lines.append(f"- [{_about(about.parent.name)['title']}]({page.name}). {tally}\n")
    path = folder / "README.md"
    path.write_text(_INDEX + "".join(lines), encoding="utf-8")
    return path


def _about(paper: str) -> dict[str, Any]:
    return read_toml("paper", _HOME / paper / "paper.toml")
