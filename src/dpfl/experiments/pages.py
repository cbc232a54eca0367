"""A page for each paper: what it is, what reproduced and what did not, and all of its tables and plots."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from dpfl.errors import BadInput
from dpfl.experiments.experiment import Experiment
from dpfl.experiments.results import Results
from dpfl.options import read_toml


def write_page(paper: str, results: Sequence[Results], left: Sequence[Experiment], folder: Path) -> Path:
    """Write PAPER.md into the folder, beside the plots that it shows; `left` are not finished and only named."""
    about = read_toml("paper", Path(str(files("dpfl.experiments"))) / paper / "paper.toml")
    for key in ("title", "source", "verdict"):
        if not isinstance(about.get(key), str):
            raise BadInput(f"{key} of paper {paper!r} must be a text, was {about.get(key)!r}; mend its paper.toml")
    counts = {"held": 0, "open": 0, "failed": 0}
    for one in results:
        for judgement in one.judgements(at_true=False):
            if judgement.verdict in counts:
                counts[judgement.verdict] += 1
    tally = (
        f"Of the paper's {sum(counts.values())} claims that are tested here, {counts['held']} held,"
        f" {counts['failed']} failed and {counts['open']} stayed open, by its own formula."
    )
    head = f"# {about['title']}\n\n{about['source']}\n\n{about['verdict'].strip()}\n\n{tally}\n"
    path = folder / f"{paper}.md"
    sections = [one.markdown(f"{one.experiment.name}.png") for one in results]
    if left:
        missed = "; ".join(f"{one.shows} (`dpfl reproduce {one.name} --scale paper`)" for one in left)
        sections.append(f"## Not here yet\n\n{missed}.\n")
    path.write_text("\n".join([head, *sections]), encoding="utf-8")
    return path
