"""A page for each paper: what it is, what reproduced and what did not, and all of its tables and plots."""

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dpfl.errors import BadInput
from dpfl.experiments.claims import LOOKS, Look, Verdict, in_words, whole
from dpfl.experiments.experiment import Experiment
from dpfl.experiments.reading import names
from dpfl.experiments.results import Results, Verdicts, heading
from dpfl.experiments.words import markdown, table
from dpfl.options import read_toml

_HOME = Path(str(files("dpfl.experiments")))
_FATES: dict[Verdict, str] = {"held": "held", "failed": "failed", "open": "stayed open", "not tried": "not decided yet"}
_PROTECTED = {
    ("record", "replace"): "one record, replaced by any other",
    ("record", "add-remove"): "one record, added or removed",
    ("client", "replace"): "all records of one client, replaced by any others",
    ("client", "add-remove"): "all records of one client, added or removed",
}
_INDEX = """# Five papers, what each promises, what holds

Each paper's experiments were carried out as its authors did, as far as that is known (*the paper's reading*), and
where we would do it another way, that way too (*our reading*). A formula for noise can promise an ε that is not true;
so all is asked once more with noise for which the promised ε *is* true. Where there are two readings that is done in
our settings: what differs between the columns is then not the noise alone, and a claim that fails there may fail by our
settings. A claim is an inequality in the paper's own words. It *held* or *failed* by more than two standard errors of
what was measured (more where repetitions are few: Student's t), and is *open* in between; where what is not trained yet
could decide, it is *not decided yet*. The page of each paper has all claims with the words they come from, says under
which reading each was tried, and what would decide those that failed. Claims about the same trainings count once.

All pages are written by `dpfl reproduce all --scale paper --out docs/results --pages` from the finished cells in
`cells/`; each table names the command that repeats it. All of it is simulation: nobody's records were protected here.

"""


def write_page(paper: str, results: Sequence[Results], left: Sequence[Experiment], folder: Path) -> Path:
    """Write PAPER.md into the folder, beside the plots that it shows; of those that are `left` nothing is trained."""
    about = _about(paper)
    for one in results:
        for verdicts in one.verdicts():
            if verdicts.failed_under and verdicts.claim.quote and not verdicts.claim.decides:
                raise BadInput(
                    f"decides of the claim {verdicts.claim.says!r} of experiment {one.experiment.name!r} must say what"
                    " would decide it, was left out, and it failed; name what is not known"
                )
    parts = (f"# {about['title']}", about["source"], about["verdict"].strip(), what_is_private(results), tally(results))
    head = "".join(f"{part}\n\n" for part in parts)[:-1]
    path = folder / f"{paper}.md"
    sections = [markdown(one, one.draw(folder)) for one in results]
    if left:
        missed = "; ".join(f"{one.shows} (`dpfl reproduce {one.name} --scale paper`)" for one in left)
        sections.append(f"## Not tried yet\n\n{missed}.\n")
    path.write_text("\n".join([head, *sections]), encoding="utf-8")
    return path


def tally(results: Sequence[Results]) -> str:
    """Count a paper's claims, those about the same trainings once: what the worst of them is counts."""
    together: dict[object, list[Verdicts]] = {}
    for one in results:
        if not one.experiment.own:
            for verdicts in one.verdicts():
                together.setdefault(verdicts.about, []).append(verdicts)
    if not together:
        return "None of this is a claim of a paper."
    counts = []
    for look in LOOKS:
        judged = [[one.by[look].verdict for one in claims if look in one.by] for claims in together.values()]
        fates = Counter(whole(verdicts) for verdicts in judged if verdicts)
        if fates:
            some = [f"{count} {_FATES[fate]}" for fate in _FATES if (count := fates[fate])]
            counts.append(f"{heading(look, [one for one in results if not one.experiment.own])} {', '.join(some)}")
    said = "1 claim is" if len(together) == 1 else f"{len(together)} claims are"
    return f"{said} tested here: {'; '.join(counts)}."


def what_is_private(results: Sequence[Results]) -> str:
    """Say that all of it is a simulation, and whom each ε is for: a comparison with a paper keeps to its neighbours."""
    systems: dict[tuple[str, str], set[str]] = {}
    for reading in (reading for one in results for reading in one.readings):
        for kind, its in reading.protected.items():
            systems.setdefault(kind, set()).update(its)
    simulation = "All of this together is a simulation, which runs on seeds: nobody's records were protected here."
    if not systems:
        return simulation
    words = (
        f"{_PROTECTED[kind]} ({', '.join(f'`{name}`' for name in sorted(systems[kind]))})" for kind in sorted(systems)
    )
    return f"{simulation} Each ε is that of one training, and for the neighbours of its paper: {'; '.join(words)}."


def write_index(results: Sequence[Results], folder: Path) -> Path:
    """Write README.md, the page about all papers: what each promises, its main claims and what holds."""
    by_name = {one.experiment.name: one for one in results}
    sections = []
    for paper in dict.fromkeys(one.experiment.paper for one in sorted(results, key=lambda one: one.experiment.own)):
        about, its = _about(paper), [one for one in results if one.experiment.paper == paper]
        looks: tuple[Look, ...] = ("paper", "true")
        lines = [["claim", *(heading(look, its) for look in looks), "in plain words"]]
        for main in about.get("main", []):
            named = [main, *main.get("also", [])]
            judged = [(by_name.get(one["experiment"]), _main_claim(paper, one, by_name)) for one in named]
            known = [(where, verdicts) for where, verdicts in judged if where is not None and verdicts is not None]
            if known:
                lines.append([main["claim"], *(_of(known, look) for look in looks), main["plain"]])
        parts = [f"## [{about['title']}]({paper}.md)", about["promises"].strip()]
        if about["plot"] in by_name:
            parts.append(f"![{by_name[about['plot']].experiment.title}]({about['plot']}.png)")
        if len(lines) > 1:
            parts.append(table(lines).strip())
        sections.append("\n\n".join([*parts, f"[All of it]({paper}.md). {tally(its)}"]))
    path = folder / "README.md"
    path.write_text(_INDEX + "\n\n".join(sections) + "\n", encoding="utf-8")
    return path


def _main_claim(paper: str, main: Mapping[str, Any], by_name: Mapping[str, Results]) -> Verdicts | None:
    """Return the verdicts of a claim that a paper's table of main claims names; None where nothing is trained yet."""
    if main["experiment"] not in names():
        raise BadInput(
            f"experiment of a main claim of {paper!r} must be one of its experiments, was {main['experiment']!r}; mend"
            " its paper.toml"
        )
    if main["experiment"] not in by_name:
        return None
    found = {one.claim.says: one for one in by_name[main["experiment"]].verdicts()}
    if main["says"] not in found:
        raise BadInput(
            f"says of a main claim of {paper!r} must be what a claim of {main['experiment']!r} says, was"
            f" {main['says']!r}; choose one of {sorted(found)}"
        )
    return found[main["says"]]


def _of(known: Sequence[tuple[Results, Verdicts]], look: Look) -> str:
    """Return how a claim fared, or several that stand for one together."""
    judged = [(results.repetitions_at(look), verdicts.by[look]) for results, verdicts in known if look in verdicts.by]
    if not judged:
        return "–"
    judgements = [judgement for _, judgement in judged]
    words = in_words(whole([one.verdict for one in judgements]), judgements)
    counts = sorted({times for times, judgement in judged if times > 1 and judgement.compared})
    return f"{words}; {' or '.join(map(str, counts))} repetitions" if counts else words


def _about(paper: str) -> dict[str, Any]:
    about = read_toml("paper", _HOME / paper / "paper.toml")
    for key in ("title", "source", "verdict", "promises", "plot"):
        if not isinstance(about.get(key), str):
            raise BadInput(f"{key} of paper {paper!r} must be a text, was {about.get(key)!r}; mend its paper.toml")
    return about
