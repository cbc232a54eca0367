"""A claim holds by more than two standard errors (Student's t), fails by more than two, and is open in between."""

import math
import random
from collections.abc import Mapping

import pytest

from dpfl.experiments.claims import Claim, Estimate, Judgement, Place, judge
from grids import each

ROWS, COLUMNS = ["a", "b"], ["1", "2", "4"]
WHERE = {"1": 1.0, "2": 2.0, "4": 4.0}


def judged(claim: Claim, table: Mapping[tuple[str, str], Estimate], *, lower_is_better: bool = True) -> Judgement:
    return judge(
        claim, lambda row, column: table.get((row, column)), ROWS, COLUMNS, lower_is_better=lower_is_better, where=WHERE
    )


def one_pair(less: Estimate, than: Estimate, **options: object) -> str:
    claim = Claim("", Place("a", "1"), Place("b", "1"), **options)
    return judged(claim, {("a", "1"): less, ("b", "1"): than}).verdict


def test_the_standard_error_is_that_of_the_mean() -> None:
    found = Estimate.of([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.error == pytest.approx(math.sqrt(5 / 3 / 4))
    assert Estimate.of([7.0]) == Estimate(7.0, 0.0, (7.0,))


@each(
    ("less", "than", "verdict"),
    [
        (Estimate(1.0, 0.3), Estimate(2.0, 0.3), "held"),  # a difference of 1, two errors are 0.85
        (Estimate(1.0, 0.3), Estimate(1.8, 0.3), "open"),  # 0.8
        (Estimate(1.8, 0.3), Estimate(1.0, 0.3), "open"),
        (Estimate(2.0, 0.3), Estimate(1.0, 0.3), "failed"),
        (Estimate(1.0), Estimate(1.0), "open"),
        (Estimate(1.0, 0.3), Estimate(math.inf), "held"),  # the other one diverged
        (Estimate(math.inf), Estimate(1.0, 0.3), "failed"),
        (Estimate(math.inf), Estimate(math.inf), "open"),
    ],
)
def test_two_standard_errors_decide(less: Estimate, than: Estimate, verdict: str) -> None:
    assert one_pair(less, than) == verdict


def test_few_repetitions_need_more_errors() -> None:
    """Two means of two repetitions each are 4.5 errors apart, or nothing is told; of twenty each hardly more than 2."""

    def apart(errors: float, repetitions: int) -> str:
        values = (0.0,) * repetitions
        return one_pair(Estimate(0.0, 1.0, values), Estimate(errors * math.sqrt(2), 1.0, values))

    assert [apart(errors, 2) for errors in (2.1, 4.4, 4.6)] == ["open", "open", "held"]
    assert [apart(errors, 20) for errors in (1.9, 2.1)] == ["open", "held"]
    # A single value is exact, and so is what a paper prints: only the other side is unsure.
    assert one_pair(Estimate(0.0), Estimate(4.0, 1.0, (0.0,) * 3)) == "open"
    assert one_pair(Estimate(0.0), Estimate(4.6, 1.0, (0.0,) * 3)) == "held"


@each("repetitions", [2, 3, 5])
def test_where_nothing_differs_verdicts_are_rare(repetitions: int) -> None:
    """At two plain errors, two repetitions would find a difference in 18 % of the cases where there is none."""
    source, told = random.Random(repetitions), 0
    for _ in range(4000):
        one, other = ([source.gauss(0, 1) for _ in range(repetitions)] for _ in range(2))
        told += one_pair(Estimate.of(one), Estimate.of(other)) != "open"
    assert told / 4000 < 0.055  # 4.6 %, and Welch's approximation stays below


def test_no_worse_is_enough_where_the_claim_says_so() -> None:
    assert one_pair(Estimate(1.0, 0.1), Estimate(1.0, 0.1), or_equal=True) == "held"
    assert one_pair(Estimate(0.9, 0.1), Estimate(1.0, 0.1), or_equal=True) == "held"
    assert one_pair(Estimate(1.1, 0.1), Estimate(1.0, 0.1), or_equal=True) == "open"  # no error widens what held
    assert one_pair(Estimate(1.4, 0.1), Estimate(1.0, 0.1), or_equal=True) == "failed"


def test_close_means_within_so_much() -> None:
    assert one_pair(Estimate(1.4, 0.01), Estimate(1.0, 0.01), within=0.5) == "held"
    assert one_pair(Estimate(1.6, 0.01), Estimate(1.0, 0.01), within=0.5) == "failed"


TABLE = {
    ("a", "1"): Estimate(5.0), ("a", "2"): Estimate(3.0), ("a", "4"): Estimate(4.0),
    ("b", "1"): Estimate(6.0), ("b", "2"): Estimate(2.0), ("b", "4"): Estimate(1.0),
}  # fmt: skip


def test_what_is_left_out_is_gone_through() -> None:
    every = judged(Claim("", Place(row="a"), Place(row="b")), TABLE)
    assert (every.verdict, every.held, every.failed, every.pairs) == ("failed", 1, 2, 3)
    assert str(every) == "failed (in 1 of 3, failed in 2)"
    most = judged(Claim("", Place(row="b"), Place(row="a"), most=True), TABLE)
    assert (most.verdict, most.held) == ("held", 2)
    by_column = judged(Claim("", Place(column="2"), Place(column="1")), TABLE)
    assert (by_column.verdict, by_column.pairs) == ("held", 2)


def test_rows_that_a_smaller_scale_leaves_out_decide_nothing() -> None:
    for column in ("1", "best", "worst"):
        assert judged(Claim("", Place("c", column), Place("a", "1")), TABLE).verdict == "not tried"


def test_the_best_column_is_the_row_s_own() -> None:
    interior = Claim("", Place("a", "best"), Place("a", "4"))
    assert judged(interior, TABLE).verdict == "held"  # 3 at column 2
    assert judged(Claim("", Place("b", "best"), Place("b", "4")), TABLE).verdict == "open"  # it is column 4
    assert judged(Claim("", Place("a", "best"), Place("a", "worst")), TABLE).verdict == "held"
    # Where more is better the best of row a is 5, at column 1.
    assert judged(Claim("", Place("a", "2"), Place("a", "best")), TABLE, lower_is_better=False).verdict == "held"


def test_a_number_can_stand_on_either_side() -> None:
    assert judged(Claim("", Place(number=2.5), Place("a", "2")), TABLE).verdict == "held"
    assert judged(Claim("", Place("a", "2"), Place(number=2.5)), TABLE).verdict == "failed"


def test_a_trend_goes_from_each_to_the_next() -> None:
    falling = Claim("", Place(row="b"), Place(), along="columns")
    found = judged(falling, TABLE)
    assert (found.pairs, found.held, found.failed) == (2, 0, 2)  # 6, 2, 1 is not rising
    rows = judged(Claim("", Place(column="1"), Place(), along="rows"), TABLE)
    assert (rows.verdict, rows.pairs) == ("held", 1)  # 5 < 6


def test_where_a_row_is_best_is_a_number_of_its_own() -> None:
    claim = Claim("", Place(row="a"), Place(row="b"), of="best_at")
    assert judged(claim, TABLE).verdict == "held"  # 2 < 4
    assert judged(claim, TABLE, lower_is_better=False).verdict == "open"  # both at 1


def test_where_a_row_is_best_is_uncertain_if_one_repetition_decides_it() -> None:
    # Without its third repetition row a would be best at column 1: that one is not clearly worse than column 2.
    shaky = {
        **{key: Estimate.of([value.mean] * 3) for key, value in TABLE.items()},
        ("a", "1"): Estimate.of([3.0, 3.0, 5.0]),
        ("a", "2"): Estimate.of([3.5, 3.5, 3.5]),
        ("b", "4"): Estimate.of([9.0, 9.0, 9.0]),
    }
    claim = Claim("", Place(number=1.5), Place(row="a"), of="best_at")
    assert judged(claim, shaky).verdict == "open"
    assert judged(Claim("", Place(number=0.5), Place(row="a"), of="best_at"), shaky).verdict == "held"
    assert judged(Claim("", Place(row="a"), Place(number=0.5), of="best_at"), shaky).verdict == "failed"
    assert judged(Claim("", Place(row="a"), Place(number=1.5), of="best_at"), shaky).verdict == "open"
    sure = shaky | {("a", "1"): Estimate.of([9.0, 9.0, 9.0])}
    assert judged(claim, sure).verdict == "held"


def test_what_a_scale_leaves_out_is_not_judged() -> None:
    part = {key: value for key, value in TABLE.items() if key[0] == "a"}
    found = judge(
        Claim("", Place("a", "1"), Place("b", "1")), lambda row, column: part.get((row, column)), ["a"], COLUMNS,
        lower_is_better=True, where=WHERE,
    )  # fmt: skip
    assert found.verdict == "not tried"


def test_the_best_of_a_row_is_not_known_before_all_of_it_is_tried() -> None:
    half = {place: found for place, found in TABLE.items() if place != ("a", "4")}
    for claim in (
        Claim("", Place(number=1.5), Place(row="a"), of="best_at"),
        Claim("", Place("a", "best"), Place("a", "1")),
    ):
        assert judged(claim, TABLE).verdict != "not tried"
        assert judged(claim, half).verdict == "not tried"


def test_what_is_not_tried_counts_among_what_is_asked() -> None:
    most, every = (Claim("", Place(row="b"), Place(row="a"), most=most) for most in (True, False))
    part = {place: found for place, found in TABLE.items() if place != ("a", "4")}  # held at 2, failed at 1
    found = judged(most, part)
    assert (found.verdict, found.held, found.pairs, len(found.compared)) == ("not tried", 1, 3, 2)
    assert str(found) == "not decided yet (in 1 of 3, failed in 1, 1 not tried)"
    assert judged(every, part).verdict == "failed"  # whatever the third says
    one_left = {place: found for place, found in TABLE.items() if place != ("a", "1")}  # held at 2 and 4
    assert judged(most, one_left).verdict == "held"
    assert judged(every, one_left).verdict == "not tried"
    assert str(judged(every, {})) == "not tried"


def test_what_a_paper_does_not_print_is_not_asked() -> None:
    claim = Claim("", Place(row="a"), Place(row="a", paper=True))
    found = judge(
        claim, lambda row, column: TABLE.get((row, column)), ROWS, COLUMNS, lower_is_better=True, where=WHERE,
        printed=lambda row, column: Estimate(9.0) if column == "1" else None,
    )  # fmt: skip
    assert (found.verdict, found.pairs) == ("held", 1)
