"""A paper's claims as inequalities between places of a table, judged by the standard errors of what was measured.

A claim names two places (rows or columns that it leaves out are gone through one by one), or a number, and says that
the first is less than the second, in the words of the paper that it quotes. It held where the difference is more than
two standard errors, failed where it is that far on the other side, and is open in between. Of few repetitions a
standard error is known badly, so that more of them are asked for: Student's t, as sure as two errors are of a normal
law. Where a tie is enough (`or_equal`), it held where the means say so: no error widens what counts as held. Of
several pairs all count that are asked for, trained or not.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from scipy import special

from dpfl.options import fit

Verdict = Literal["held", "open", "failed", "not tried"]
Look = Literal["paper", "ours", "true"]  # under the paper's reading, under ours, and where the promised ε is true
LOOKS: tuple[Look, ...] = ("paper", "ours", "true")
_ERRORS = 2.0  # standard errors that a difference must exceed, where they are known exactly


@dataclass(frozen=True)
class Estimate:
    """A mean over repetitions (infinite where one diverged) and its standard error: 0 for a single value."""

    mean: float
    error: float = 0.0
    values: tuple[float, ...] = ()
    span: tuple[float, float] | None = None  # from where to where the true value may lie, if no error tells

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate the mean of what these repetitions are a sample of."""
        count, mean = len(values), math.fsum(values) / len(values)
        if count == 1 or not math.isfinite(mean):
            return cls(mean, 0.0, tuple(values))
        spread = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        return cls(mean, math.sqrt(spread / count), tuple(values))


@dataclass(frozen=True)
class Place:
    """One side of a claim; None stands for every row or column. A column may be "best" or "worst" of its row."""

    row: str | None = None
    column: str | None = None
    number: float | None = None  # instead of a place
    paper: bool = False  # what the paper prints there, not what was measured


@dataclass(frozen=True)
class Claim:
    """What a paper says, and the inequality that it comes to."""

    says: str
    less: Place
    than: Place
    quote: str = ""  # the paper's own words
    where: str = ""  # the section, table or figure they stand in
    decides: str = ""  # what would decide it, should it fail
    or_equal: bool = False  # whether no difference is enough
    within: float = 0.0  # by how much the first may exceed the second
    most: bool = False  # whether it is to hold in most pairs, not in all
    of: Literal["value", "best_at"] = "value"  # best_at: the column where a row is best, or clearly no worse than there
    along: Literal["rows", "columns"] | None = None  # from each to the next, where it is a trend
    looks: tuple[Look, ...] = LOOKS  # where what it speaks of is the case


Side = tuple[str, str] | float  # a row and a column, or a number
Get = Callable[[str, str], Estimate | None]  # what was measured at a row and a column; None: nothing


@dataclass(frozen=True)
class Judgement:
    """How a claim fared."""

    says: str
    verdict: Verdict
    held: int = 0  # pairs in which it held
    failed: int = 0
    pairs: int = 0  # that it is about
    compared: tuple[tuple[Side, Side], ...] = ()  # those of which both sides are trained

    def __str__(self) -> str:
        return in_words(self.verdict, [self])


def in_words(verdict: Verdict, judgements: Sequence[Judgement]) -> str:
    """Return a verdict on a claim, or on several that stand for one, with the places that it rests on."""
    pairs, held, failed = (
        sum(counts) for counts in zip(*((j.pairs, j.held, j.failed) for j in judgements), strict=True)
    )
    left = pairs - sum(len(one.compared) for one in judgements)
    several = f"{len(judgements)} claims: " if len(judgements) > 1 else ""
    count = f" ({several}in {held} of {pairs}, failed in {failed}{f', {left} not tried' if left else ''})"
    if verdict == "not tried":
        return f"not decided yet{count}" if left < pairs else "not tried"
    return verdict + (count if pairs > 1 else "")


def whole(verdicts: Sequence[Verdict], *, most: bool = False) -> Verdict:
    """Return the verdict of several: held if all held (or most of them), failed if one failed (or most), else open.

    What is not tried counts: where it could still decide, nothing is decided.

    >>> whole(["held", "open"]), whole(["held", "failed", "held"]), whole(["held", "failed", "held"], most=True)
    ('open', 'failed', 'held')
    >>> whole(["held", "not tried"]), whole(["failed", "not tried"]), whole(["held", "held", "not tried"], most=True)
    ('not tried', 'failed', 'held')
    """
    held, failed, left = (verdicts.count(one) for one in ("held", "failed", "not tried"))
    enough = len(verdicts) // 2 + 1 if most else len(verdicts)
    if held >= enough > 0:
        return "held"
    if failed >= (enough if most else 1):
        return "failed"
    undecided = max(held, failed) + left >= enough if most else left
    return "not tried" if undecided or not verdicts else "open"


def read_claim(table: Mapping[str, Any], rows: Sequence[str], columns: Sequence[str], refuse: Any) -> Claim:
    """Read one entry of `[[claims]]`."""
    options = dict(table)
    if "says" not in options:
        raise refuse("claims", "tables that say what is claimed (says = …)", table)
    sides: dict[str, Place] = {}
    for side in sorted(("less", "than"), key=lambda side: options.get(side) == "paper"):  # what stands opposite first
        place = options.pop(side, {})
        if place == "paper":
            sides[side] = replace(next(iter(sides.values())), paper=True)
            continue
        if isinstance(place, (int, float)):
            sides[side] = Place(number=float(place))
            continue
        for key, labels in (("row", rows), ("column", [*columns, "best", "worst"])):
            named = place.get(key)
            if named is not None and _text(named) not in labels:
                raise refuse(f"claims.{side}.{key}", f"one of {', '.join(labels)}", named)
        unknown = set(place) - {"row", "column"}
        if unknown:
            raise refuse(f"claims.{side}", 'a number, "paper", or a table with row and column', place)
        row, column = (None if place.get(key) is None else _text(place[key]) for key in ("row", "column"))
        sides[side] = Place(row, column)
    unknown = set(options) - {field.name for field in fields(Claim)}
    if unknown:
        raise refuse("claims", f"tables of {', '.join(field.name for field in fields(Claim))}", sorted(unknown))
    for key in ("says", "quote", "where", "decides"):
        fit(f"claims.{key}", options.get(key, ""), str)
    options["looks"] = tuple(options.get("looks", LOOKS))
    if not options["looks"] or not set(options["looks"]) <= set(LOOKS):
        raise refuse("claims.looks", f"a list of some of {', '.join(LOOKS)}", table["looks"])
    claim = Claim(less=sides["less"], than=sides["than"], **options)
    if claim.along not in (None, "rows", "columns") or claim.of not in ("value", "best_at"):
        raise refuse("claims", "along rows or columns, of value or best_at", table)
    return claim


def _text(label: Any) -> str:
    return f"{label:g}" if isinstance(label, float) else str(label)


def judge(
    claim: Claim,
    get: Get,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    lower_is_better: bool,
    where: Mapping[str, float],
    printed: Get = lambda row, column: None,
) -> Judgement:
    """Evaluate a claim on what was measured.

    where: the number that stands for each column. printed: what the paper prints.
    """

    def at(row: str, column: str) -> Estimate | None:
        if column not in ("best", "worst"):
            return get(row, column)
        chosen = _extreme(row, get, columns, lowest=(column == "best") == lower_is_better)
        return None if chosen is None else get(row, chosen)

    def best_at(row: str, _: str) -> Estimate | None:
        return _best_at(row, get, columns, where, lower_is_better=lower_is_better)

    def read(place: Place, side: Side) -> Estimate | None:
        if isinstance(side, float):
            return Estimate(side)
        return (printed if place.paper else best_at if claim.of == "best_at" else at)(*side)

    def is_here(place: Place, side: Side) -> bool:
        """Tell whether there is such a place: a smaller scale leaves some out, and so may the other reading."""
        if isinstance(side, float):
            return True
        row, column = side
        here = row in rows and column in (*columns, "best", "worst", *([""] if claim.of == "best_at" else []))
        return here and (not place.paper or printed(row, column) is not None)

    verdicts: list[Verdict] = []
    compared = []
    for less, than in _pairs(claim, rows, columns):
        if is_here(claim.less, less) and is_here(claim.than, than):
            first, second = read(claim.less, less), read(claim.than, than)
            if first is None or second is None:
                verdicts.append("not tried")
                continue
            verdicts.append(_verdict(first, second, claim))
            compared.append((less, than))
    held, failed = verdicts.count("held"), verdicts.count("failed")
    return Judgement(
        claim.says, whole(verdicts, most=claim.most), held, failed, len(verdicts), tuple(compared)
    )  # fmt: skip


def _pairs(claim: Claim, rows: Sequence[str], columns: Sequence[str]) -> Iterator[tuple[Side, Side]]:
    """Go through the pairs of places that a claim is about."""
    if claim.along is not None:  # each line less than the one after it
        by_rows = claim.along == "rows"
        lines, across = (rows, columns) if by_rows else (columns, rows)
        named = claim.less.column if by_rows else claim.less.row
        if named is not None or claim.of == "best_at":
            across = [named or ""]
        for earlier, later in itertools.pairwise(lines):
            for other in across:
                yield ((earlier, other), (later, other)) if by_rows else ((other, earlier), (other, later))
        return
    free_rows = rows if claim.less.row is None and claim.than.row is None else [""]
    free_columns = columns if claim.less.column is None and claim.than.column is None else [""]
    for row in free_rows:
        for column in [""] if claim.of == "best_at" else free_columns:

            def side(place: Place, row: str = row, column: str = column) -> Side:
                return (place.row or row, place.column or column) if place.number is None else place.number

            yield side(claim.less), side(claim.than)


def _verdict(less: Estimate, than: Estimate, claim: Claim) -> Verdict:
    if math.isinf(less.mean) and math.isinf(than.mean):
        return "open"
    margin = than.mean + claim.within - less.mean
    if claim.or_equal and margin >= 0:
        return "held"
    if less.span is not None or than.span is not None:
        (low, high), (from_, to) = (one.span or (one.mean, one.mean) for one in (less, than))
        return "held" if high < from_ + claim.within else "failed" if low > to + claim.within else "open"
    error = _sure(less, than)
    return "held" if margin > error else "failed" if margin < -error else "open"


def _sure(first: Estimate, second: Estimate) -> float:
    """Return by how much two means must differ: so many errors of the difference as Student's t says (Welch).

    >>> few, many = (Estimate(0.0, 1.0, (0.0,) * count) for count in (2, 200))
    >>> round(_sure(few, few), 2), round(_sure(many, many), 2), _sure(Estimate(0.0, 1.0), Estimate(3.0))
    (6.4, 2.84, 2.0)
    """
    squares = [(one.error**2, len(one.values) - 1) for one in (first, second) if one.error > 0]
    total = math.fsum(square for square, _ in squares)
    # An error that is given, and not measured on repetitions, is taken as known.
    unsure = math.fsum(square**2 / freedom for square, freedom in squares if freedom > 0)
    if unsure == 0 or total == 0:
        return _ERRORS * math.sqrt(total)
    return float(special.stdtrit(total**2 / unsure, special.ndtr(_ERRORS))) * math.sqrt(total)


def _extreme(row: str, get: Get, columns: Sequence[str], *, lowest: bool) -> str | None:
    measured = {column: found.mean for column in columns if (found := get(row, column)) is not None}
    if not measured or len(measured) < len(columns):  # what is not tried could be it
        return None
    return (min if lowest else max)(measured, key=lambda column: measured[column])


def _best_at(
    row: str, get: Get, columns: Sequence[str], where: Mapping[str, float], *, lower_is_better: bool
) -> Estimate | None:
    """Return where a row is best, and from where to where it may be: no column there is clearly worse than the best."""
    found = {column: got for column in columns if (got := get(row, column)) is not None}
    if not found or len(found) < len(columns):  # what is not tried could be best
        return None
    best = (min if lower_is_better else max)(found, key=lambda column: found[column].mean)

    def is_worse(one: Estimate) -> bool:
        behind = abs(one.mean - found[best].mean)
        return behind > _sure(one, found[best])

    perhaps = [where[column] for column, one in found.items() if column == best or not is_worse(one)]
    return Estimate(where[best], span=(min(perhaps), max(perhaps)))
