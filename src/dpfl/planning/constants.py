"""The constants that bounds are made of: what they mean, how they were found, and their TOML file.

A constants file holds one table a constant, or a plain number: `smoothness = 4.2`. The papers' letters are understood
too (`lambda`, `L` and `rho` are the smoothness).
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dpfl.errors import BadInput, suggestion
from dpfl.options import read_toml


@dataclass(frozen=True)
class Note:
    """How a constant was found, and between which values it lay (over models along the probe, or over clients)."""

    how: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What is known of a problem; None where nothing is."""

    strong_convexity: float | None = None  # μ: the least curvature of the loss
    smoothness: float | None = None  # λ, L, ρ: the largest curvature
    polyak_lojasiewicz: float | None = None  # l: ‖∇F‖² ≥ 2l·(F − F*)
    gradient_bound: float | None = None  # G: no client's gradient is longer, as clipped
    lipschitz: float | None = None  # β: no client's gradient is longer, before any clip
    record_spread: float | None = None  # Λ: how far a record's gradient lies from its client's, root mean square
    divergence: float | None = None  # ε̄: mean of ‖∇F_i − ∇F‖² over the clients
    dissimilarity: float | None = None  # B: root mean square of ‖∇F_i‖ over ‖∇F‖
    heterogeneity: float | None = None  # Γ: F* less the mean of the clients' own least losses
    initial_distance: float | None = None  # Y₀, Δ₁: ‖w₀ − w*‖²
    initial_gap: float | None = None  # Θ: F(w₀) − F*
    source: str = "given"  # the data they were estimated on
    notes: Mapping[str, Note] = field(default_factory=dict)

    def need(self, *names: str) -> tuple[float, ...]:
        """Return these constants, or say which one is missing."""
        for name in names:
            if getattr(self, name) is None:
                raise BadInput(
                    f"{name} ({SYMBOLS[name]}) must be known for this bound, was left out; add it to the constants, or"
                    " let it be estimated on public data (validation_share above 0)"
                )
        return tuple(float(getattr(self, name)) for name in names)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of those that are not known."""
        return tuple(name for name in SYMBOLS if getattr(self, name) is None)

    def overridden(self, given: Mapping[str, Any], how: str = "given") -> "Constants":
        """Return the same with some set by name or by the paper's letter."""
        values: dict[str, Any] = {}
        notes = dict(self.notes)
        for key, entry in given.items():
            name = ALIASES.get(key, key)
            if name not in SYMBOLS:
                known = ", ".join(f"{name} ({symbol})" for name, symbol in SYMBOLS.items())
                near = suggestion(key, SYMBOLS) or "; use one of these, or its letter"
                raise BadInput(f"constants must be among {known}, was {key!r}{near}")
            if name in values:
                raise BadInput(
                    f"{name} ({SYMBOLS[name]}) must be given once, was given again as {key!r}; leave one out"
                )
            table = entry if isinstance(entry, Mapping) else {"value": entry}
            for part in set(table) - {"value", "low", "high", "how"}:
                raise BadInput(f"{name} must have value, low, high and how at most, had {part!r}; correct or remove it")
            values[name] = _number(name, table.get("value"))
            low, high = (None if table.get(end) is None else _number(name, table[end]) for end in ("low", "high"))
            notes[name] = Note(str(table.get("how", how)), low, high)
        return replace(self, **values, notes=notes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: for every known constant its value, spread and how it was found."""
        plain: dict[str, Any] = {"source": self.source}
        for name in SYMBOLS:
            if (value := getattr(self, name)) is not None:
                note = self.notes.get(name, Note("given"))
                plain[name] = {"value": value, "low": note.low, "high": note.high, "how": note.how}
        return plain

    def to_toml(self) -> str:
        """Write them down; `read` gives them back."""
        plain = self.to_dict()
        text = f"source = {_text(plain.pop('source'))}\n"
        for name, entry in plain.items():
            text += f"\n[{name}]  # {SYMBOLS[name]}\n"
            for key, value in entry.items():
                if value is not None:
                    text += f"{key} = {_text(value) if isinstance(value, str) else repr(float(value))}\n"
        return text


SYMBOLS = {
    "strong_convexity": "μ", "smoothness": "λ, L, ρ", "polyak_lojasiewicz": "l", "gradient_bound": "G",
    "lipschitz": "β", "record_spread": "Λ", "divergence": "ε̄", "dissimilarity": "B", "heterogeneity": "Γ",
    "initial_distance": "Y₀, Δ₁", "initial_gap": "Θ",
}  # fmt: skip

ALIASES = {
    "mu": "strong_convexity", "μ": "strong_convexity", "lambda": "smoothness", "λ": "smoothness", "L": "smoothness",
    "rho": "smoothness", "ρ": "smoothness", "l": "polyak_lojasiewicz", "G": "gradient_bound", "beta": "lipschitz",
    "β": "lipschitz", "Lambda": "record_spread", "Λ": "record_spread", "B": "dissimilarity",
    "Gamma": "heterogeneity", "Γ": "heterogeneity", "Y0": "initial_distance", "Y₀": "initial_distance",
    "ε̄": "divergence", "Δ₁": "initial_distance", "Theta": "initial_gap", "Θ": "initial_gap",
}  # fmt: skip

assert list(SYMBOLS) == [one.name for one in fields(Constants) if one.name not in ("source", "notes")]


def read(path: Path) -> Constants:
    """Read a constants file; what it leaves out stays unknown."""
    table = read_toml("constants", path)
    source = str(table.pop("source", f"given in {path.name}"))
    return Constants(source=source).overridden(table, f"given in {path.name}")


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise BadInput(f"{name} ({SYMBOLS[name]}) must be a finite number, was {value!r}; correct it")
    return float(value)
