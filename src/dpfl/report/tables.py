"""Tables of text: aligned for a terminal, or in Markdown. The first row is the heading."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with their columns one below the other.

    >>> print(aligned([["name", "loss"], ["udp", "1.1"]]))
    name   loss
    udp    1.1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in Markdown.

    >>> print(markdown([["name", "loss"], ["udp", "1.1"]]), end="")
    | name | loss |
    | --- | --- |
    | udp | 1.1 |
    """
    heading, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (heading, ["---"] * len(heading), *others))
