"""Rows of a CSV file, one at a time, so that what is wrong with one of them is wrong with no other.

A row is what a program that writes CSV makes of a record: a line, or several where a text in quotes holds line breaks.
A quote that nothing closes in the way CSV asks for belongs to its own line alone; it would swallow all rows below it
otherwise, and how many there are is public.
"""

import gzip
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from dpfl.errors import BadInput

LONGEST = 2**20  # characters of a row; what is longer is none
MANY_FIELDS = "row has another number of fields than the header"
OPEN_QUOTE = "row has a quote that is not closed"
TOO_LONG = f"row is longer than {LONGEST:,} characters"
SEPARATORS = ",;\t"

Row = tuple[int, list[str] | str]  # its first line, and its fields or what is wrong with it


@contextmanager
def csv_table(path: Path, where: str) -> Iterator[tuple[list[str], Iterator[Row]]]:
    """Open a CSV file, packed or not, and give the names in its header and the rows below, as they are asked for."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.peek(4)
            if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start[:4]:
                raise BadInput(f"{where} must be UTF-8 text, but is UTF-16 or no text; save it as CSV in UTF-8")
            # A byte that is no UTF-8 spoils the value it stands in. Lines end at \n: nothing else begins a row.
            text = TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n")
            lines = _lines(text)
            names, separator = _header(next(lines, ""), where)
            yield names, _rows(lines, separator, len(names))
    except (EOFError, zlib.error, OSError) as problem:
        why = getattr(problem, "strerror", None) or "it ends too early, or is not what its name says"
        raise BadInput(f"{where} must be a readable file, but is not ({why}); check it") from None


def _header(line: str, where: str) -> tuple[list[str], str]:
    """Return the column names and what separates them, which is looked for in the header alone."""
    if not line:
        raise BadInput(f"{where} must begin with a line of column names, but begins with none; add it")
    if any("\udc80" <= character <= "\udcff" for character in line):
        raise BadInput(f"{where} must be UTF-8 text, but its first line is not (Latin-1, perhaps); save it as UTF-8")
    names: list[str] = []
    separator = ","
    for candidate in SEPARATORS:
        try:
            found = _fields(line, candidate) or []
        except _OpenQuote:
            continue
        if len(found) > len(names):
            names, separator = found, candidate
    if not names or "\r" in line or "\0" in line or len(line) > LONGEST:
        raise BadInput(f"{where} must begin with a line of column names, but none can be read there; mend it")
    return [name.strip() for name in names], separator


def _lines(file: TextIOWrapper) -> Iterator[str]:
    """Yield each line without its end; of one that is too long, no more than shows that."""
    while line := file.readline(LONGEST + 2):
        rest = line
        while len(rest) == LONGEST + 2 and not rest.endswith("\n"):
            rest = file.readline(LONGEST + 2)
        yield line.rstrip("\r\n")


def _rows(lines: Iterator[str], separator: str, width: int) -> Iterator[Row]:
    ahead: deque[str] = deque()
    number = 2  # below the header
    while (line := ahead.popleft() if ahead else next(lines, None)) is not None:
        more = 0
        if len(line) > LONGEST:
            yield number, TOO_LONG
        elif '"' not in line:
            fields = line.split(separator)
            yield number, fields if len(fields) == width else MANY_FIELDS
        else:
            quoted, more = _quoted(line, separator, ahead, lines)
            yield number, OPEN_QUOTE if quoted is None else quoted if len(quoted) == width else MANY_FIELDS
        for _ in range(more):
            ahead.popleft()
        number += 1 + more


def _quoted(line: str, separator: str, ahead: deque[str], lines: Iterator[str]) -> tuple[list[str] | None, int]:
    """Return the fields of a row with quotes, None where it is none, and how many more lines belong to it."""
    parts, length = [line], len(line)
    while True:
        try:
            fields = _fields("\n".join(parts), separator)
            return fields, 0 if fields is None else len(parts) - 1
        except _OpenQuote:
            closed = False
        while not closed:  # a text goes on to a line with a quote, which may close it
            if len(ahead) < len(parts):
                following = next(lines, None)
                if following is None:
                    return None, 0
                ahead.append(following)
            parts.append(ahead[len(parts) - 1])
            length += 1 + len(parts[-1])
            if length > LONGEST:
                return None, 0
            closed = '"' in parts[-1]


class _OpenQuote(Exception):
    """A text ends inside quotes."""


def _fields(text: str, separator: str) -> list[str] | None:
    """Return the fields of a row as CSV has them (RFC 4180); None where something follows a closing quote."""
    fields: list[str] = []
    at = 0
    while True:
        if text.startswith('"', at):
            end = at + 1
            while (end := text.find('"', end)) >= 0 and text.startswith('"', end + 1):
                end += 2
            if end < 0:
                raise _OpenQuote
            fields.append(text[at + 1 : end].replace('""', '"'))
            at = end + 1
            if at < len(text) and text[at] != separator:
                return None
        else:
            end = text.find(separator, at)
            fields.append(text[at : end if end >= 0 else len(text)])
            at = end if end >= 0 else len(text)
        if at == len(text):
            return fields
        at += 1
