"""`make demo`: what its recipe prints, and what the README says that it prints."""

import re
import shlex
from pathlib import Path

import pytest

from e2e.command_line import dpfl

ROOT = Path(__file__).parents[2]
QUICK = ["--rounds", "3", "--lr", "1"]  # instead of a plan, which has tests of its own


def commands() -> list[list[str]]:
    """Return the words of each `dpfl` in the recipe."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    found = [shlex.split(line.removeprefix("\t$(BIN)/dpfl")) for line in recipe[1].splitlines()]
    assert [words[0] for words in found] == ["run", "certificate", "report"]
    return found


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what each command of the recipe prints on stdout; the second time it replaces what was there."""
    home = tmp_path_factory.mktemp("demo")
    for _ in range(2):
        outputs = []
        for words in commands():
            assert words[0] != "run" or "--plan" in words
            done = dpfl(*[word for word in words if word != "--plan"], *(QUICK if words[0] == "run" else []), cwd=home)
            assert done.returncode == 0, done.stderr
            outputs.append(done.stdout)
    assert (home / "runs" / "demo" / "report.html").is_file()
    assert (home / "runs" / "demo" / "curve.png").is_file()
    return outputs


def test_it_tells_how_good_the_model_is_at_each_hospital(printed: list[str]) -> None:
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        assert re.search(rf"^  {name} +\d+ +\d+ +\d+\.\d %", printed[0], re.MULTILINE)
    assert "mean over sites" in printed[0]


def test_no_page_of_text_is_printed_twice(printed: list[str]) -> None:
    every = "".join(printed)
    assert every.count("Privacy certificate") == every.count("not promised") == 1
    assert printed[1].startswith("certificate computed anew from the ledger, and as the run wrote it")
    assert (printed[1].count("\n"), printed[2].count("\n")) == (2, 1)


def but_for_numbers(text: str) -> list[str]:
    """Return the lines of a text without its numbers, what follows from them, and hashes."""
    return [
        re.sub(r"config \w+|worst at \w+|[\d.]+", "#", " ".join(line.split()))
        for line in text.splitlines()
        if line.strip()
    ]


def test_the_readme_shows_what_it_prints(printed: list[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme[readme.index("`make demo` prints") :].split("```\n")[1]
    shown = shown[shown.index("clients train") :]  # below the plan
    assert but_for_numbers(shown) == but_for_numbers("".join(printed))
