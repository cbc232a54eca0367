"""A comparison as a table for a paper: LaTeX for the package booktabs, every name escaped."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dpfl.report.comparison import currency, rows, sorted_out, standing_apart

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "ε": r"$\varepsilon$", "δ": r"$\delta$", "±": r"$\pm$", "∞": r"$\infty$", "–": "--", "\n": " ",
}  # fmt: skip
_LAYOUT = "llrrrrr"


def table(comparison: Mapping[str, Any]) -> str:
    """Return the table with its caption: first the systems that have a price in the currency, then those without."""
    priced, apart = sorted_out(comparison)
    heading, *ranked = rows(priced)
    _, *others = rows(apart)
    title = rf"\multicolumn{{{len(_LAYOUT)}}}{{@{{}}l@{{}}}}{{\emph{{{escaped(standing_apart(comparison))}}}}} \\"
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{_caption(comparison)}}}",
        r"\medskip",
        r"\setlength{\tabcolsep}{4pt}",  # within a column of text, as wide as `article` has it
        rf"\begin{{tabular}}{{@{{}}{_LAYOUT}@{{}}}}",
        r"\toprule",
        _line(heading),
        *([r"\midrule", *map(_line, ranked)] if ranked else []),
        *([r"\midrule", title, *map(_line, others)] if others else []),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _caption(comparison: Mapping[str, Any]) -> str:
    """Say what is a mean of what, and what the true ε is for."""
    seeds, (priced, _) = comparison["seeds"], sorted_out(comparison)
    means = "One training each" if seeds == 1 else f"Mean ± standard error over {seeds} seeds"
    return escaped(f"{means}; {currency(comparison)}." if priced else f"{means}.")


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(_cell, cells)) + r" \\"


def _cell(text: str) -> str:
    """Typeset a cell; a mean and its error are one formula."""
    with_error = re.fullmatch(r"(-?[\d.]+) ± ([\d.]+)", text)
    return rf"${with_error[1]} \pm {with_error[2]}$" if with_error else escaped(text)


def escaped(text: str) -> str:
    r"""Return text that LaTeX prints as it is.

    >>> print(escaped("my_udp & 5 %"))
    my\_udp \& 5 \%
    """
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
