"""The search for the best whole numbers, against all of them: one valley, in one to three dimensions; its ladders."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl.planning.search import Numbers, around, ladder, least

unhurried = settings(deadline=None, derandomize=True, max_examples=100)  # a busy machine is no failure
Ranges = dict[str, tuple[int, int]]
NAMES = ("rounds", "local_steps", "cohort")
WIDTHS = {1: 300, 2: 30, 3: 12}


def all_of(ranges: Mapping[str, tuple[int, int]]) -> list[Numbers]:
    names = list(ranges)
    return [
        dict(zip(names, numbers, strict=True))
        for numbers in itertools.product(*(range(low, high + 1) for low, high in ranges.values()))
    ]


def assert_best(value: Callable[[Numbers], float], ranges: Ranges, *, slack: float = 1e-12) -> None:
    found = least(value, ranges)
    assert set(found) == set(ranges)
    assert all(low <= found[name] <= high for name, (low, high) in ranges.items())
    best = min(all_of(ranges), key=value)
    assert value(found) <= value(best) + slack * abs(value(best)), f"{best} is better than {found}"


@st.composite
def boxes(draw: st.DrawFn, most: int = 3) -> Ranges:
    names = NAMES[: draw(st.integers(1, most))]
    lows = {name: draw(st.integers(1, 20)) for name in names}
    return {name: (low, low + draw(st.integers(0, WIDTHS[len(names)]))) for name, low in lows.items()}


slopes = st.floats(0.05, 20.0)


# One valley.


@unhurried
@given(boxes(), st.data())
def test_slopes_down_to_one_place_and_up_from_it(ranges: Ranges, data: st.DataObject) -> None:
    # Steeper on one side than on the other, along each number alone; the lowest place may lie outside.
    low = {name: data.draw(st.floats(first - 5, last + 5)) for name, (first, last) in ranges.items()}
    left, right = ({name: data.draw(slopes) for name in ranges} for _ in range(2))
    power = data.draw(st.floats(0.5, 3.0))

    def value(numbers: Numbers) -> float:
        away = {name: numbers[name] - low[name] for name in ranges}
        return sum(((right if away[name] > 0 else left)[name] * abs(away[name])) ** power for name in ranges)

    assert_best(value, ranges)


@unhurried
@given(st.integers(1, 40), st.integers(0, 400), st.data())
def test_one_number_with_any_single_valley(first: int, width: int, data: st.DataObject) -> None:
    bottom = data.draw(st.integers(0, width))
    steps = data.draw(st.lists(st.sampled_from([1e-9, 1.0, 3.0, 1e6]), min_size=width, max_size=width))
    heights = [0.0] * (width + 1)
    for at in range(bottom, width):
        heights[at + 1] = heights[at] + steps[at]
    for at in range(bottom, 0, -1):
        heights[at - 1] = heights[at] + steps[at - 1]
    assert least(lambda numbers: heights[numbers["rounds"] - first], {"rounds": (first, first + width)}) == {
        "rounds": first + bottom
    }


@unhurried
@given(boxes(), st.data())
def test_too_few_against_too_many(ranges: Ranges, data: st.DataObject) -> None:
    # What bounds are made of: a falling and a rising part for each number, in very different units.
    falls, rises = ({name: 10.0 ** data.draw(st.floats(-4, 4)) for name in ranges} for _ in range(2))
    powers = {name: data.draw(st.sampled_from([1, 2])) for name in ranges}

    def value(numbers: Numbers) -> float:
        return sum(falls[name] / numbers[name] + rises[name] * numbers[name] ** powers[name] for name in ranges)

    assert_best(value, ranges)


@unhurried
@given(st.data())
def test_products_of_numbers(data: st.DataObject) -> None:
    # A bound like DP-FedAvg's: rounds and local steps are worth their product, and what each costs grows by itself.
    clients = data.draw(st.integers(2, 8))
    begin, drift, noise, missing = (10.0 ** data.draw(st.floats(*span)) for span in ((0, 4), (-4, 1), (-6, 0), (-4, 1)))
    ranges = {"rounds": (1, 60), "local_steps": (1, 16), "cohort": (1, clients)}

    def value(numbers: Numbers) -> float:
        rounds, local, cohort = (numbers[name] for name in NAMES)
        learned = begin / (rounds * local + 5) + drift * (local - 1) ** 2 / (rounds * local)
        return learned + noise * rounds * local**2 / cohort + missing * (clients - cohort) / cohort

    assert_best(value, ranges, slack=0.005)  # there may be several valleys, all but equally deep


@unhurried
@given(st.floats(6, 55), st.floats(6, 55), st.floats(-0.6, 0.6))
def test_a_valley_that_runs_across_two_numbers(first: float, second: float, lean: float) -> None:
    def value(numbers: Numbers) -> float:
        x, y = numbers["rounds"] - first, numbers["local_steps"] - second
        return x * x + y * y + 2 * lean * x * y

    assert_best(value, {"rounds": (1, 60), "local_steps": (1, 60)})


# At the edges.


@unhurried
@given(boxes())
def test_the_edges_can_be_best(ranges: Ranges) -> None:
    for sign, end in ((1, 0), (-1, 1)):
        found = least(lambda numbers, sign=sign: sign * sum(numbers.values()), ranges)  # type: ignore[misc]
        assert found == {name: ends[end] for name, ends in ranges.items()}


def test_nothing_to_choose() -> None:
    assert least(lambda numbers: float(len(numbers)), {}) == {}
    assert least(lambda numbers: math.inf, {"rounds": (7, 7)}) == {"rounds": 7}


@unhurried
@given(boxes(most=2), st.data())
def test_numbers_for_which_there_is_no_value_are_avoided(ranges: Ranges, data: st.DataObject) -> None:
    # Below a limit a bound says nothing; above, more is worse.
    limits = {name: data.draw(st.integers(*ends)) for name, ends in ranges.items()}

    def value(numbers: Numbers) -> float:
        return math.inf if any(numbers[name] < limits[name] for name in ranges) else float(sum(numbers.values()))

    assert least(value, ranges) == limits


@unhurried
@given(st.integers(2, 9), st.integers(1, 300))
def test_teeth_are_looked_at_beside(tooth: int, low: int) -> None:
    # Multiples of a number are better than all between them.
    def value(numbers: Numbers) -> float:
        return abs(numbers["rounds"] - low) + (0.0 if numbers["rounds"] % tooth == 0 else 1000.0)

    def beside(candidates: Sequence[Numbers]) -> list[Numbers]:
        multiples = ({"rounds": max(1, one["rounds"] // tooth + more) * tooth} for one in candidates for more in (0, 1))
        return [*candidates, *multiples]

    found = least(value, {"rounds": (1, 400)}, beside=beside)["rounds"]
    assert found % tooth == 0
    assert abs(found - low) == min(abs(number - low) for number in range(tooth, 400 + tooth, tooth))


def test_numbers_are_not_tried_too_often() -> None:
    asked: list[int] = []

    def value(numbers: Numbers) -> float:
        asked.append(numbers["rounds"])
        return (numbers["rounds"] - 7777) ** 2

    assert least(value, {"rounds": (1, 10_000)}) == {"rounds": 7777}
    assert len(set(asked)) < 100
    assert set(asked) <= set(range(1, 10_001))


# Ladders, and numbers around the best.


@unhurried
@given(st.integers(1, 1000), st.integers(0, 100_000), st.floats(1.01, 10.0))
def test_ladders(first: int, more: int, factor: float) -> None:
    last = first + more
    rungs = ladder(first, last, factor=factor)
    assert (rungs[0], rungs[-1]) == (first, last)
    assert all(type(rung) is int for rung in rungs)
    assert all(low < high for low, high in itertools.pairwise(rungs))
    assert all(high <= max(low + 1, factor * (low + 0.5) + 0.5) for low, high in itertools.pairwise(rungs))
    # No more of them than the factor asks for, once it asks for more than one at a time.
    slow = [low for low in rungs if low * (factor - 1) < 2]
    assert len(rungs) <= len(slow) + math.log(max(last / first, 1)) / math.log(factor) + 3


def test_a_ladder_doubles() -> None:
    assert ladder(3, 100) == [3, 6, 12, 24, 48, 96, 100]
    assert ladder(1, 1) == ladder(1, 1, factor=7.0) == [1]
    assert ladder(5, 6) == [5, 6]
    assert ladder(1, 6, factor=1.1) == [1, 2, 3, 4, 5, 6]


@unhurried
@given(st.integers(1, 1000), st.integers(0, 5000), st.data())
def test_around(first: int, width: int, data: st.DataObject) -> None:
    last = first + width
    best = data.draw(st.integers(first, last))
    near = around(best, first, last)
    assert best in near
    assert all(low < high for low, high in itertools.pairwise(near))
    assert first <= near[0]
    assert near[-1] <= last
    assert near[0] == max(first, math.ceil(best / 4))
    assert near[-1] == min(last, 4 * best)
    assert {max(first, math.ceil(best / 2)), min(last, 2 * best)} <= set(near)
    assert len(near) <= 5


@unhurried
@given(st.integers(1, 1000), st.lists(st.floats(0.01, 100.0), max_size=6))
def test_around_with_other_factors(best: int, factors: list[float]) -> None:
    near = around(best, 1, 2000, factors=factors)
    assert best in near
    assert set(near) <= set(range(1, 2001))
    assert len(near) <= len(factors) + 1
    for factor in factors:
        assert any(abs(number - min(max(factor * best, 1), 2000)) <= 1 for number in near)
