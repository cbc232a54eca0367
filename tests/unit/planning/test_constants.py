"""Constants by name and by letter, their notes, and their file: what is written is read back, the rest is refused."""

import math
import re
import unicodedata
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfl.errors import BadInput
from dpfl.planning import read as read_from_package
from dpfl.planning.constants import ALIASES, SYMBOLS, Constants, Note, read
from grids import each

NAMES = (
    "strong_convexity", "smoothness", "polyak_lojasiewicz", "gradient_bound", "lipschitz", "record_spread",
    "divergence", "dissimilarity", "heterogeneity", "initial_distance", "initial_gap",
)  # fmt: skip
LETTERS = [
    ("mu", "strong_convexity"), ("μ", "strong_convexity"), ("lambda", "smoothness"), ("λ", "smoothness"),
    ("L", "smoothness"), ("rho", "smoothness"), ("ρ", "smoothness"), ("l", "polyak_lojasiewicz"),
    ("G", "gradient_bound"), ("beta", "lipschitz"), ("β", "lipschitz"), ("Lambda", "record_spread"),
    ("Λ", "record_spread"), ("B", "dissimilarity"), ("Gamma", "heterogeneity"), ("Γ", "heterogeneity"),
    ("Y0", "initial_distance"), ("Y₀", "initial_distance"), ("Theta", "initial_gap"), ("Θ", "initial_gap"),
]  # fmt: skip
AWKWARD = (
    0.1,
    1 / 3,
    1e-300,
    5e-324,
    1.7976931348623157e308,
    math.pi,
    2.0**53 + 1,
    1e16,
    1e-5,
    0.0,
    123456789.123456789,
)
ALL = Constants(
    **dict(zip(NAMES, AWKWARD, strict=True)),
    source='12 public records of "own" \\ data, model softmax',
    notes={
        "smoothness": Note("largest curvature\nat 3 models\tor so", 1 / 7, 2 / 3),
        "divergence": Note('mean over "clients" (ε̄) \\ # no comment', low=1e-9),
        "initial_gap": Note("[not a table] = 3 — “quoted” 'too'", high=1e300),
    },
)


def written(tmp_path: Path, text: str | bytes, name: str = "constants.toml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def assert_one_sentence(refusal: pytest.ExceptionInfo[BadInput], *parts: str) -> None:
    """Assert that it says what must be, what was and what to do, in one line, with these words in it."""
    text = str(refusal.value)
    assert "\n" not in text
    assert not text.endswith(".")
    assert " must " in text
    assert "; " in text, f"no way out: {text}"
    for part in parts:
        assert part in text


# What is known, and what is not.


def test_nothing_is_known_of_a_new_problem() -> None:
    assert Constants().missing == NAMES
    assert Constants().source == "given"
    assert Constants().notes == {}
    assert Constants().to_dict() == {"source": "given"}
    assert tuple(SYMBOLS) == NAMES


@each("name", NAMES)
def test_what_is_missing_is_what_is_none(name: str) -> None:
    assert replace(ALL, **{name: None}).missing == (name,)
    assert Constants(**{name: 0.0}).missing == tuple(other for other in NAMES if other != name)


def test_all_known() -> None:
    assert ALL.missing == ()


def test_constants_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ALL.smoothness = 3.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Constants(1.0)  # type: ignore[call-arg]


def test_what_is_needed_comes_in_the_order_that_was_asked_for() -> None:
    known = Constants(strong_convexity=1, smoothness=2.5, initial_gap=0.0)
    assert known.need("smoothness", "initial_gap", "strong_convexity") == (2.5, 0.0, 1.0)
    assert all(type(one) is float for one in known.need("strong_convexity", "smoothness"))
    assert known.need() == ()


@each("name", NAMES)
def test_what_is_needed_and_missing_is_named(name: str) -> None:
    others = [other for other in NAMES if other != name]
    with pytest.raises(BadInput) as refusal:
        replace(ALL, **{name: None}).need(*others, name)
    assert_one_sentence(
        refusal, f"{name} ({SYMBOLS[name]}) must be known", "was left out", "add it", "validation_share"
    )
    assert not any(re.search(rf"\b{other}\b", str(refusal.value)) for other in others)


# By name and by letter.


@each(("letter", "name"), LETTERS)
def test_letters_of_the_papers_are_understood(letter: str, name: str, tmp_path: Path) -> None:
    found = Constants().overridden({letter: 2.5})
    assert found.need(name) == (2.5,)
    assert len(found.missing) == len(NAMES) - 1
    assert found == Constants().overridden({name: 2.5})
    assert read(written(tmp_path, f'"{letter}" = 2.5')).need(name) == (2.5,)


def test_no_letter_means_anything_else() -> None:
    assert dict(LETTERS) == {key: name for key, name in ALIASES.items() if key in dict(LETTERS)}
    assert not set(ALIASES) & set(NAMES)


@each("name", NAMES)
def test_every_letter_that_is_shown_can_be_written(name: str) -> None:
    for letter in SYMBOLS[name].split(", "):
        for form in ("NFC", "NFD"):  # an editor may write a letter and its bar as one sign or as two
            assert Constants().overridden({unicodedata.normalize(form, letter): 2.5}).need(name) == (2.5,)


@each("name", NAMES)
def test_names_are_understood(name: str, tmp_path: Path) -> None:
    assert Constants().overridden({name: 3}).need(name) == (3.0,)
    assert read(written(tmp_path, f"{name} = 3")).need(name) == (3.0,)
    assert read(written(tmp_path, f"[{name}]\nvalue = 3")).need(name) == (3.0,)


def test_an_override_leaves_the_rest_and_the_original_alone() -> None:
    before = ALL.to_dict()
    changed = ALL.overridden({"mu": 7, "Y0": {"value": 8.0, "low": 1, "high": 9.5, "how": "by hand"}})
    assert (changed.strong_convexity, changed.initial_distance) == (7.0, 8.0)
    assert changed.notes["strong_convexity"] == Note("given")
    assert changed.notes["initial_distance"] == Note("by hand", 1.0, 9.5)
    rest = {name: entry for name, entry in before.items() if name not in ("strong_convexity", "initial_distance")}
    assert {name: changed.to_dict()[name] for name in rest} == rest
    assert ALL.to_dict() == before
    assert changed.source == ALL.source


def test_an_override_forgets_how_the_old_value_was_found() -> None:
    assert ALL.notes["smoothness"].low is not None
    assert ALL.overridden({"L": 4.0}).notes["smoothness"] == Note("given")
    assert ALL.overridden({"L": 4.0}, "paid for").notes["smoothness"] == Note("paid for")
    assert ALL.overridden({}) == ALL


def test_one_set_of_constants_can_override_another() -> None:
    known = Constants(smoothness=3.0, notes={"smoothness": Note("by hand", 2.0, 4.0)})
    entries = {name: entry for name, entry in known.to_dict().items() if name != "source"}
    both = ALL.overridden(entries)
    assert both == replace(ALL, smoothness=3.0, notes=ALL.notes | {"smoothness": Note("by hand", 2.0, 4.0)})  # type: ignore[operator]


# The file.


def test_the_file_gives_everything_back_exactly(tmp_path: Path) -> None:
    found = read(written(tmp_path, ALL.to_toml()))
    filled = {name: ALL.notes.get(name, Note("given")) for name in NAMES}
    assert found == replace(ALL, notes=filled)
    for name in NAMES:
        assert getattr(found, name).hex() == getattr(ALL, name).hex()
    assert found.to_toml() == ALL.to_toml()
    assert read_from_package is read


@each("name", NAMES)
def test_what_is_not_known_is_not_written(name: str, tmp_path: Path) -> None:
    some = replace(ALL, **{name: None})
    assert read(written(tmp_path, some.to_toml())).missing == (name,)
    assert read(written(tmp_path, Constants(**{name: 2.0}).to_toml())).to_dict() == {
        "source": "given",
        name: {"value": 2.0, "low": None, "high": None, "how": "given"},
    }


def test_the_file_shows_the_letters() -> None:
    text = ALL.to_toml()
    for name, symbol in SYMBOLS.items():
        assert f"[{name}]  # {symbol}\n" in text


def test_whole_numbers_can_be_written(tmp_path: Path) -> None:
    assert read(written(tmp_path, Constants(smoothness=4, initial_gap=0).to_toml())).need(
        "smoothness", "initial_gap"
    ) == (4.0, 0.0)


def test_numbers_of_numpy_can_be_written(tmp_path: Path) -> None:
    text = Constants(smoothness=np.linalg.eigvalsh(np.diag([1.0, 4.0]))[-1]).to_toml()
    assert read(written(tmp_path, text)).smoothness == 4.0


@each("text", ["", "a\x00b", "\x1b[0m", "\x7f", "\r\n", '"""', "\\", "é\u2028ü", "🙂"])
def test_any_source_can_be_written(text: str, tmp_path: Path) -> None:
    constants = Constants(smoothness=1.0, source=text, notes={"smoothness": Note(text)})
    assert read(written(tmp_path, constants.to_toml())) == constants


def test_numbers_tables_and_letters_in_one_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        source = "a sister hospital"
        L = 4
        initial_gap = 1e-3
        [mu]
        value = 0.5
        low = 0.25
        [divergence]
        value = 2
        high = 3
        how = "asked around"
        """,
    )
    found = read(path)
    assert found.source == "a sister hospital"
    assert found.need("smoothness", "initial_gap", "strong_convexity", "divergence") == (4.0, 1e-3, 0.5, 2.0)
    assert found.notes == {
        "smoothness": Note("given in constants.toml"),
        "initial_gap": Note("given in constants.toml"),
        "strong_convexity": Note("given in constants.toml", low=0.25),
        "divergence": Note("asked around", high=3.0),
    }


def test_a_file_that_says_nothing_of_its_source(tmp_path: Path) -> None:
    assert read(written(tmp_path, "", "mine.toml")) == Constants(source="given in mine.toml")


# Files that cannot be used.

BAD = [
    ("smoothness = 'four'", "smoothness (λ, L, ρ)", "was 'four'"),
    ("mu = ''", "strong_convexity (μ)", "was ''"),
    ("G = true", "gradient_bound (G)", "was True"),
    ("G = false", "gradient_bound (G)", "was False"),
    ("divergence = nan", "divergence (ε̄)", "was nan"),
    ("Theta = inf", "initial_gap (Θ)", "was inf"),
    ("Theta = -inf", "initial_gap (Θ)", "was -inf"),
    ("B = [1, 2]", "dissimilarity (B)", "was [1, 2]"),
    ("B = 2024-01-01", "dissimilarity (B)", "was "),
    ("[B]\nvalue = '3'", "dissimilarity (B)", "was '3'"),
    ("[B]\nhigh = 3", "dissimilarity (B)", "was None"),
    ("[B]\nvalue = 3\nhigh = 'much'", "dissimilarity (B)", "was 'much'"),
    ("[B]\nvalue = 3\nlow = nan", "dissimilarity (B)", "was nan"),
    ("[B]\nvalue = 3\nlow = true", "dissimilarity (B)", "was True"),
    (f"L = 1{'0' * 400}", "smoothness (λ, L, ρ)", "was 1000"),
]


@each(("text", "field", "was"), BAD)
def test_what_is_no_number_is_refused(text: str, field: str, was: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refusal:
        read(written(tmp_path, text))
    assert_one_sentence(refusal, f"{field} must be a finite number", was, "; correct it")


@each("value", ["4", True, math.nan, math.inf, None, [1.0], object, 1j])
def test_what_is_no_number_is_refused_without_a_file_too(value: Any) -> None:
    with pytest.raises(BadInput) as refusal:
        Constants().overridden({"smoothness": value})
    assert_one_sentence(refusal, "smoothness (λ, L, ρ) must be a finite number", f"was {value!r}")


@each(
    ("key", "near"),
    [
        ("smothness", "smoothness"), ("Smoothness", "smoothness"), ("strong_convexty", "strong_convexity"),
        ("gradient-bound", "gradient_bound"), ("initial_gab", "initial_gap"),
    ],
)  # fmt: skip
def test_an_unknown_name_gets_the_nearest_one(key: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refusal:
        read(written(tmp_path, f"L = 2\n{key} = 3"))
    known = ", ".join(f"{name} ({symbol})" for name, symbol in SYMBOLS.items())
    assert_one_sentence(refusal, f"constants must be among {known}", f"was {key!r}", f"; did you mean {near!r}?")


def test_an_unknown_name_that_is_near_to_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"constants must be among .*initial_gap \(Θ\), was 'zzz'; use one of these"):
        read(written(tmp_path, "zzz = 3"))
    with pytest.raises(BadInput, match="was 'M'"):  # letters are as the papers write them
        read(written(tmp_path, "M = 3"))
    with pytest.raises(BadInput, match="was 'source'"):
        Constants().overridden({"source": "here"})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(BadInput) as refusal:
        read(path)
    assert_one_sentence(refusal, "constants must be a readable file", f"was {str(path)!r}", "No such file", "check")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refusal:
        read(tmp_path)
    assert_one_sentence(refusal, "constants must be a readable file", f"was {str(tmp_path)!r}", "; check the path")


@each("text", ["smoothness 4", "[smoothness", "L = 1\nL = 2", b"L = 1 # \xff\xfe", "μ = 3", "= 3"])
def test_a_file_that_is_not_toml(text: str | bytes, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadInput) as refusal:
        read(path)
    assert_one_sentence(refusal, f"constants must be TOML, but {str(path)!r} is not", "; mend it")


def test_a_constant_is_given_once(tmp_path: Path) -> None:
    (tmp_path / "twice.toml").write_text("smoothness = 2.0\nrho = 3.0\n")
    with pytest.raises(BadInput, match=r"smoothness \(λ, L, ρ\) must be given once, was given again as 'rho'"):
        read(tmp_path / "twice.toml")


def test_a_misspelt_part_of_a_constant_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "misspelt.toml").write_text("[smoothness]\nvalue = 2.0\nhigher = 3.0\n")
    with pytest.raises(BadInput, match=r"smoothness must have value, low, high and how at most, had 'higher'"):
        read(tmp_path / "misspelt.toml")
