"""A certificate's words: ours and the field's, from plain data, on one screen."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpfl.report.certificate import text

OLD = Path(__file__).parents[2] / "data" / "formats" / "0.1" / "run" / "certificate.json"


def certificate(**changes: Any) -> dict[str, Any]:
    """Return the plain data of a certificate of UDP, changed; version 0.1 wrote it."""
    return json.loads(OLD.read_text(encoding="utf-8")) | changes


def overheard(exposures: int, against: tuple[str, ...]) -> dict[str, Any]:
    """Return a certificate with a listener on the line, to whom so many uploads of a client are shown."""
    plain = certificate(exposures=exposures, against=against)
    plain["observers"] = {"server": plain["observers"]["server"], "uplink": plain["observers"]["released"]}
    plain["spending"] = [line | {"uplink_epsilon": line["released_epsilon"]} for line in plain["spending"]]
    return plain


def test_the_whole_screen() -> None:
    title, *lines = text(certificate()).splitlines()
    assert title.split("  ") == [
        "Privacy certificate", "udp, tight calibration, 4 clients, 3 rounds", *[""] * 13, "config a737ee72ce77",
    ]  # fmt: skip
    assert lines == [
        "protects             one record of one client (replaced by any other: replace-one adjacency)",
        "trust model          nobody but the client itself: it adds the noise to what it uploads (local DP)",
        "against                         promised           really spent                 from",
        "  the server (local DP)         ε = 8, δ = 0.001   ε ≤ 8   within the promise   the clipping performed",
        "  released models (central DP)  –                  ε ≤ 3.302                    the same, no collusion",
        "left uncounted       nothing",
        "not promised         anything about who took part, how many records a client holds, or people whose records",
        "                     sit at several clients; anything against whoever reads a client's own machine",
        "a simulation         nobody's records were protected here: whoever knows the seed can subtract the noise",
    ]


@pytest.mark.parametrize(
    ("unit", "neighbours", "words"),
    [
        ("record", "replace", "one record of one client (replaced by any other: replace-one adjacency)"),
        ("record", "add-remove", "one record of one client (added or removed: add-or-remove adjacency)"),
        (
            "client",
            "replace",
            "all records of one client (replaced by any others: client level, replace-one adjacency)",
        ),
        ("client", "add-remove", "all records of one client (added or removed: client level, add-or-remove adjacency)"),
    ],
)
def test_what_is_protected_names_the_adjacency(unit: str, neighbours: str, words: str) -> None:
    lines = text(certificate(unit=unit, neighbours=neighbours)).splitlines()
    assert f"protects             {words}" in lines


@pytest.mark.parametrize(
    ("against", "words"),
    [
        (["server"], "nobody but the client itself: it adds the noise to what it uploads (local DP)"),
        (["server", "released"], "nobody but the client itself: it adds the noise to what it uploads (local DP)"),
        (["uplink"], "the server, with every upload; not eavesdroppers"),
        (
            ["uplink", "released"],
            "the server, with every upload; not eavesdroppers, nor readers of the models (central DP)",
        ),
    ],
)
def test_the_trust_model_says_who_has_to_be_believed(against: list[str], words: str) -> None:
    assert f"trust model          {words}" in text(certificate(against=against)).splitlines()


@pytest.mark.parametrize(("exposures", "words"), [(1, "1 upload "), (25, "25 uploads ")])
def test_an_eavesdropper_is_named_with_what_it_overhears(exposures: int, words: str) -> None:
    (row,) = [line for line in text(overheard(exposures, ("uplink",))).splitlines() if "eavesdropper, " in line]
    assert row.startswith(f"  an eavesdropper, {words}")
    assert row.endswith("within the promise   the same, overheard")


def test_what_is_too_wide_goes_on_below_in_its_own_column() -> None:
    plain = certificate()
    plain["spending"][0] |= {"claimed_epsilon": 1.234, "delta": 1.001e-05, "server_epsilon": 1.2345}
    head, first, second, readers = text(plain).splitlines()[3:7]
    assert first.index("ε = ") == second.index("δ = ") == head.index("promised") == readers.index("–")
    assert first.index("ε ≤ ") == readers.index("ε ≤ ") == head.index("really spent")
    assert second.index("0.041 % MORE than promised, for 1 of 4 clients") == head.index("really spent") + 2
