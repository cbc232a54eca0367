"""Orders are plain data: they survive JSON, refuse nonsense, and know their sensitivity by hand-worked numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpfl.errors import BadInput
from dpfl.orders import (
    ClientClip,
    Full,
    Gaussian,
    Laplace,
    ModelClip,
    Order,
    Poisson,
    RecordClip,
    Shuffled,
    count_sensitivity,
    sensitivity,
)
from grids import each

ORDERS = [
    Order(steps=1, learning_rate=0.1),
    Order(steps=1, learning_rate=2.0, clip=RecordClip(1.0), noise=Gaussian(0.125)),
    Order(steps=3, learning_rate=(0.3, 0.2, 0.1), clip=ClientClip(150.0, 1), noise=Laplace(1 / 3)),
    Order(steps=5, learning_rate=0.002, clip=ModelClip(20.0), noise=Gaussian(1e-300), proximal=0.1),
    Order(steps=2, learning_rate=0.5, batch=Poisson(0.015), clip=RecordClip(4.0), noise=Gaussian(4.4), noise_on="step"),
    Order(steps=12, learning_rate=0.002, batch=Shuffled(128), clip=ModelClip(20.0), noise=Gaussian(0.01)),
    Order(steps=2, learning_rate=0.5, clip=RecordClip(4.0), noise=Gaussian(4.4), count_noise=Gaussian(40.0)),
    Order(steps=2, learning_rate=0.5, batch=Poisson(0.1), clip=RecordClip(0.1), noise_on="step", fixed_divisor=64.0),
]


COUNTED = Order(
    steps=1, learning_rate=0.5, clip=RecordClip(3.0, norm=1), noise=Gaussian(1.0), count_noise=Gaussian(2.0)
)


@each("order", ORDERS)
def test_json_loses_nothing(order: Order) -> None:
    assert Order.from_json(order.to_json()) == order
    assert Order.from_json(order.to_json()).to_json() == order.to_json()


def test_an_order_without_a_divisor_of_its_own_is_written_as_it_always_was() -> None:
    # Noise is named by this text: one word more and a seed would mean other noise.
    assert ["fixed_divisor" in one.to_json() for one in ORDERS] == [one.fixed_divisor is not None for one in ORDERS]


OLD_ORDERS = [
    Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(0.01)),
    Order(
        steps=2, learning_rate=(0.5, 0.25), batch=Poisson(0.1), clip=RecordClip(2.0), noise=Gaussian(4.0),
        noise_on="step",
    ),
    Order(steps=3, learning_rate=0.1, clip=ClientClip(1.0, norm=1), noise=Laplace(0.25)),
    Order(steps=5, learning_rate=0.2, clip=ModelClip(3.0), noise=Gaussian(1.5), proximal=0.1),
    Order(steps=1, learning_rate=1.0),
]  # fmt: skip


def test_orders_that_release_0_1_wrote_are_read() -> None:
    path = Path(__file__).parents[1] / "data" / "formats" / "0.1" / "orders.jsonl"
    assert [Order.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()] == OLD_ORDERS


def test_an_order_without_a_count_is_written_as_before_there_were_any() -> None:
    assert "count_noise" not in json.loads(ORDERS[0].to_json())
    assert json.loads(COUNTED.to_json())["count_noise"] == {"kind": "Gaussian", "std": 2.0}


def test_an_order_names_its_version_and_a_newer_one_is_refused() -> None:
    plain = json.loads(ORDERS[0].to_json())
    assert plain["version"] == 1
    with pytest.raises(BadInput, match=r"order must be of version 1 or older, but .* is of version 2, .* update dpfl"):
        Order.from_json(json.dumps(plain | {"version": 2, "momentum": 0.9}))


@each(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"steps": 1}',
        '{"steps": 1, "learning_rate": 0.1, "clip": {"kind": "Nothing"}}',
        '{"steps": 1, "learning_rate": 0.1, "sensitivity": 0.0001}',  # nobody passes a sensitivity in
        '{"steps": 1, "learning_rate": 0.1, "noise": {"kind": "Gaussian", "std": 1, "seed": 7}}',
    ],
)
def test_anything_but_an_order_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="order must be"):
        Order.from_json(text)


@each(
    ("make", "field"),
    [
        (lambda: Order(steps=0, learning_rate=0.1), "steps"),
        (lambda: Order(steps=True, learning_rate=0.1), "steps"),
        (lambda: Order(steps=1, learning_rate=0.0), "lr"),
        (lambda: Order(steps=1, learning_rate=math.nan), "lr"),
        (lambda: Order(steps=3, learning_rate=(0.1, 0.2)), "lr"),
        (lambda: Order(steps=1, learning_rate=0.1, proximal=-1.0), "proximal"),
        (lambda: Order(steps=1, learning_rate=0.1, noise_on="both"), "noise_on"),
        (lambda: Order(steps=1, learning_rate=0.1, count_noise=Gaussian(1.0)), "count_noise"),
        (lambda: Order(steps=1, learning_rate=0.1, clip=ClientClip(1.0), count_noise=Gaussian(1.0)), "count_noise"),
        (lambda: Order(steps=1, learning_rate=0.1, clip=ModelClip(1.0), count_noise=Gaussian(1.0)), "count_noise"),
        (lambda: replace(COUNTED, noise=Laplace(1.0)), "count_noise must come beside one value with Gaussian noise"),
        (lambda: replace(COUNTED, steps=2, noise_on="step"), "for 2 of Gaussian noise"),
        (lambda: Order(steps=1, learning_rate=0.1, clip=RecordClip(1.0), fixed_divisor=0.0), "divisor"),
        (lambda: Order(steps=1, learning_rate=0.1, clip=RecordClip(1.0), fixed_divisor=math.inf), "divisor"),
        (lambda: Order(steps=1, learning_rate=0.1, clip=ClientClip(1.0), fixed_divisor=64.0), "divisor"),
        (lambda: Order(steps=1, learning_rate=0.1, fixed_divisor=64.0), "divisor"),
        (lambda: RecordClip(0.0), "clip"),
        (lambda: RecordClip(math.inf), "clip"),
        (lambda: ClientClip(1.0, 3), "norm"),
        (lambda: Poisson(0.0), "sampling_rate"),
        (lambda: Poisson(1.1), "sampling_rate"),
        (lambda: Gaussian(0.0), "noise_std"),
        (lambda: Laplace(-1.0), "scale"),
    ],
)
def test_nonsense_names_its_field(make: object, field: str) -> None:
    with pytest.raises(BadInput, match=field):
        make()  # type: ignore[operator]


@each(
    ("unit", "neighbours", "expected"),
    [
        ("record", "replace", 1.0),
        ("record", "add-remove", 0.5),
        ("client", "replace", 10.0),
        ("client", "add-remove", 5.0),
    ],
)
def test_a_record_counts_a_half_either_way(unit: Any, neighbours: Any, expected: float) -> None:
    for order in (COUNTED, replace(COUNTED, steps=4), replace(COUNTED, batch=Poisson(0.2))):
        assert count_sensitivity(order, records=10, unit=unit, neighbours=neighbours) == expected
        assert sensitivity(order, records=10, unit=unit, neighbours=neighbours, norm=2) == sensitivity(
            replace(order, count_noise=None), records=10, unit=unit, neighbours=neighbours, norm=2
        )
    with pytest.raises(BadInput, match="unit must be one of record, client"):
        count_sensitivity(COUNTED, records=10, unit="person", neighbours=neighbours)


# The table of sensitivity facts, worked by hand for η = 0.5, C = 3, n = 10, E = 4 (and q = 0.2, proximal μ = 0.4).
RECORD, CLIENT = {"unit": "record"}, {"unit": "client"}
REPLACE, ADD_REMOVE = {"neighbours": "replace"}, {"neighbours": "add-remove"}


@each(
    ("order", "relation", "expected"),
    [
        # Each record clipped, one step, noise on the upload: 2ηC/n, halved for add/remove; the client: 2ηC.
        ({"steps": 1, "clip": RecordClip(3.0)}, RECORD | REPLACE, 2 * 0.5 * 3 / 10),
        ({"steps": 1, "clip": RecordClip(3.0)}, RECORD | ADD_REMOVE, 0.5 * 3 / 10),
        ({"steps": 1, "clip": RecordClip(3.0)}, CLIENT | REPLACE, 2 * 0.5 * 3),
        ({"steps": 1, "clip": RecordClip(3.0)}, CLIENT | ADD_REMOVE, 0.5 * 3),
        # Four steps: 2ηC/n + 2ηC(E−1), because every record may differ once the models do.
        ({"steps": 4, "clip": RecordClip(3.0)}, RECORD | REPLACE, 0.3 + 3 * 3.0),
        ({"steps": 4, "clip": RecordClip(3.0)}, RECORD | ADD_REMOVE, 0.15 + 3 * 0.5 * (2 * 3 + 3 / 10)),
        ({"steps": 4, "clip": RecordClip(3.0)}, CLIENT | REPLACE, 4 * 3.0),
        # A schedule replaces ηE by Σ η_k.
        ({"steps": 2, "learning_rate": (0.5, 0.1), "clip": RecordClip(3.0)}, RECORD | REPLACE, 0.3 + 2 * 0.1 * 3),
        ({"steps": 2, "learning_rate": (0.5, 0.1), "clip": ClientClip(3.0)}, RECORD | REPLACE, 2 * 0.6 * 3),
        # The proximal pull shrinks the distance by 1 − ημ = 0.8 in each later step.
        ({"steps": 2, "clip": ClientClip(3.0), "proximal": 0.4}, CLIENT | REPLACE, 0.8 * 3 + 3),
        # Noise on every step: on the sum, 2C or C for a record and n times that for the client.
        ({"steps": 4, "clip": RecordClip(3.0), "noise_on": "step"}, RECORD | REPLACE, 2 * 3),
        ({"steps": 4, "clip": RecordClip(3.0), "noise_on": "step"}, CLIENT | REPLACE, 2 * 3 * 10),
        (
            {"steps": 4, "clip": RecordClip(3.0), "noise_on": "step", "batch": Poisson(0.2)},
            RECORD | ADD_REMOVE,
            3,
        ),
        # A divisor of one's own, 4: that of what is noised does not change on the sum, and does on the upload.
        (
            {"steps": 4, "clip": RecordClip(3.0), "noise_on": "step", "batch": Poisson(0.2), "fixed_divisor": 4.0},
            RECORD | ADD_REMOVE,
            3,
        ),
        ({"steps": 1, "clip": RecordClip(3.0), "fixed_divisor": 4.0}, RECORD | REPLACE, 2 * 0.5 * 3 / 4),
        ({"steps": 1, "clip": RecordClip(3.0), "fixed_divisor": 4.0}, CLIENT | REPLACE, 2 * 0.5 * 3 * 10 / 4),
        ({"steps": 2, "clip": RecordClip(3.0), "fixed_divisor": 4.0}, RECORD | REPLACE, 0.75 + 0.5 * 6 * 10 / 4),
        # The client's gradient clipped: 2ηCE whichever unit; a removed client sends nothing.
        ({"steps": 4, "clip": ClientClip(3.0)}, RECORD | REPLACE, 2 * 0.5 * 3 * 4),
        ({"steps": 4, "clip": ClientClip(3.0)}, RECORD | ADD_REMOVE, 2 * 0.5 * 3 * 4),
        ({"steps": 4, "clip": ClientClip(3.0)}, CLIENT | REPLACE, 2 * 0.5 * 3 * 4),
        ({"steps": 4, "clip": ClientClip(3.0)}, CLIENT | ADD_REMOVE, 0.5 * 3 * 4),
        # The parameters clipped: 2C, not 2C/n.
        ({"steps": 4, "clip": ModelClip(3.0)}, RECORD | REPLACE, 2 * 3),
    ],
)
def test_sensitivity_by_hand(order: dict, relation: dict, expected: float) -> None:
    built = Order(**({"learning_rate": 0.5} | order))
    assert sensitivity(built, records=10, norm=2, **relation) == pytest.approx(expected, rel=1e-12)


def test_the_l1_clip_bounds_both_norms() -> None:
    order = Order(steps=1, learning_rate=0.5, clip=RecordClip(3.0, 1))
    bounds = {norm: sensitivity(order, records=10, unit="record", neighbours="replace", norm=norm) for norm in (1, 2)}
    assert bounds[1] == bounds[2] == pytest.approx(0.3)


@each(
    ("order", "norm", "reason"),
    [
        (Order(steps=1, learning_rate=0.1), 2, "clip must be set"),
        (Order(steps=1, learning_rate=0.1, clip=RecordClip(1.0)), 1, "L1"),
        (Order(steps=1, learning_rate=0.1, clip=ClientClip(1.0)), 1, "Laplace"),
        (Order(steps=1, learning_rate=0.1, clip=ModelClip(1.0), noise_on="step"), 2, "no bound is proved"),
    ],
)
def test_what_has_no_proof_is_refused_with_a_reason(order: Order, norm: int, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        sensitivity(order, records=10, unit="record", neighbours="replace", norm=norm)


def test_releases_and_rates() -> None:
    assert Order(steps=4, learning_rate=0.1, noise_on="step").releases == 4
    assert Order(steps=4, learning_rate=0.1).releases == 1
    assert Order(steps=2, learning_rate=0.1).learning_rates == (0.1, 0.1)
    assert Order(steps=1, learning_rate=0.1).batch == Full()


# η = 0.5, n = 10 and q = 0.2: a mean over all records divides by 10, over a batch by the expected 2.
@each(
    ("order", "expected"),
    [
        # Noise on the upload is in the upload as it is, whatever came before it.
        ({"steps": 1, "clip": RecordClip(3.0)}, 1.0),
        ({"steps": 4, "clip": ClientClip(3.0), "batch": Poisson(0.2)}, 1.0),
        ({"steps": 4, "clip": ModelClip(3.0)}, 1.0),
        # On the sum of a single step it is divided and multiplied as the sum is.
        ({"steps": 1, "clip": RecordClip(3.0), "noise_on": "step"}, 0.5 / 10),
        ({"steps": 1, "clip": RecordClip(3.0), "noise_on": "step", "batch": Poisson(0.2)}, 0.5 / 2),
        ({"steps": 1, "clip": RecordClip(3.0), "noise_on": "step", "learning_rate": (0.7,)}, 0.7 / 10),
        ({"steps": 1, "clip": RecordClip(3.0), "noise_on": "step", "fixed_divisor": 64.0}, 0.5 / 64),
        # A client's gradient is a mean already.
        ({"steps": 1, "clip": ClientClip(3.0), "noise_on": "step"}, 0.5),
        ({"steps": 1, "clip": ClientClip(3.0), "noise_on": "step", "batch": Poisson(0.2)}, 0.5),
        # The second step trains on the noise of the first: it is no longer there as it was.
        ({"steps": 2, "clip": RecordClip(3.0), "noise_on": "step"}, None),
        ({"steps": 4, "clip": ClientClip(3.0), "noise_on": "step", "batch": Poisson(0.2)}, None),
    ],
)
def test_what_the_noise_is_in_the_upload_by_hand(order: dict, expected: float | None) -> None:
    found = Order(**({"learning_rate": 0.5} | order)).noise_in_upload(10)
    assert found == (expected if expected is None else pytest.approx(expected, rel=1e-12))


@each("clip", [RecordClip(3.0), ClientClip(3.0)])
@each("batch", [Full(), Poisson(0.2)])
@each("unit", ["record", "client"])
def test_noise_and_sensitivity_of_one_step_reach_the_upload_alike(clip: object, batch: object, unit: str) -> None:
    # Noise before or after the division: the same bound, once it is expressed in the upload.
    inside, outside = (
        Order(steps=1, learning_rate=0.5, clip=clip, batch=batch, noise_on=place) for place in ("step", "upload")
    )
    for neighbours in ("replace", "add-remove"):
        question = {"records": 10, "unit": unit, "neighbours": neighbours, "norm": 2}
        in_upload = sensitivity(inside, **question) * inside.noise_in_upload(10)
        assert in_upload == pytest.approx(sensitivity(outside, **question), rel=1e-12)


@each(
    ("wrong", "field"),
    [
        ({"unit": "user"}, "unit"),
        ({"neighbours": "swap"}, "neighbours"),
        ({"norm": 3}, "norm"),
        ({"records": 0}, "records"),
    ],
)
def test_a_misspelt_question_gets_no_answer(wrong: dict, field: str) -> None:
    question = {"records": 10, "unit": "record", "neighbours": "replace", "norm": 2}
    with pytest.raises(BadInput, match=f"{field} must be"):
        sensitivity(Order(steps=1, learning_rate=0.1, clip=RecordClip(1.0)), **(question | wrong))
