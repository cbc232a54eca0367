"""A statement of account adds up what a client has spent in all runs, and keeps apart what does not add up."""

import json
import math
from typing import Any

import pytest

from dpfl.orders import Gaussian, Laplace, Order, Poisson, RecordClip
from dpfl.privacy.books import Books, Grant
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.gaussian_dp import epsilon_of
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import state
from dpfl.report.statement import text

DELTA = 1e-5
SAME = "as before"  # how data are shared out


def noised(mu: float, **changes: Any) -> Order:
    """Order one step of this Gaussian-DP parameter: Δ = 2ηC/n = 0.1 for η = 0.5, C = 1 and ten records replaced."""
    usual = {"steps": 1, "learning_rate": 0.5, "clip": RecordClip(1.0), "noise": Gaussian(0.1 / mu)}
    return Order(**usual | changes)


def charged(books: Books, *rounds: dict[int, Order], clients: int = 3, delta: float = DELTA, **terms: Any) -> Ledger:
    """Charge a run, round by round, to books that other runs share."""
    usual = {"unit": "record", "neighbours": "replace", "calibration": "paper"}
    promise = Promise(budgets=(Budget(8.0, delta),) * clients, **usual | terms)
    return _played(
        Ledger(promise, (10,) * clients, books=books, system="udp", config="0123456789ab", sharing=SAME), *rounds
    )


def charged_without_noise(books: Books, *rounds: dict[int, Order], clients: int = 3) -> Ledger:
    return _played(Ledger(None, (10,) * clients, books=books, system="fedavg", sharing=SAME), *rounds)


def _played(ledger: Ledger, *rounds: dict[int, Order]) -> Ledger:
    for orders in rounds:
        ledger.charge(orders)
    return ledger


def lines(books: Books) -> list[dict[str, Any]]:
    """Return the clients' lines, as JSON gives them back."""
    return json.loads(json.dumps(state(books), allow_nan=False))["clients"]


def rows(books: Books) -> list[str]:
    """Return the printed rows of clients, below the head of the table."""
    printed = text(state(books)).splitlines()
    return printed[next(at for at, line in enumerate(printed) if line.startswith("client")) + 1 :]


def test_two_runs_of_a_client_add_up_in_gaussian_dp() -> None:
    # 0.6² + 0.8² = 1: together μ = 1, which is ε = 4.377; the ε of the runs are 2.445 and 3.387.
    books = Books()
    charged(books, {0: noised(0.6)})
    charged(books, {0: noised(0.8), 1: noised(0.8)})
    both, second = lines(books)
    assert both["spent"] == {"epsilon": pytest.approx(4.37718, abs=1e-5), "delta": DELTA}
    assert both["spent"]["epsilon"] < float(epsilon_of(0.6, DELTA) + epsilon_of(0.8, DELTA)) - 1
    assert second["spent"]["epsilon"] == pytest.approx(float(epsilon_of(0.8, DELTA)), rel=1e-8)
    assert [(line["client"], line["runs"], line["uploads"]) for line in (both, second)] == [(0, 2, 2), (1, 1, 1)]


def test_every_upload_of_every_round_counts() -> None:
    # 4·0.3² + 0.8² = 1: four rounds of the first run and one of the second.
    books = Books()
    charged(books, *[{0: noised(0.3)}] * 4)
    charged(books, {0: noised(0.8)})
    (line,) = lines(books)
    assert line["spent"]["epsilon"] == pytest.approx(4.37718, abs=1e-5)
    assert (line["runs"], line["uploads"]) == (2, 5)


def test_laplace_noise_adds_up_in_epsilon() -> None:
    # Δ₁ = 0.1: scales of 0.2 and 0.4 cost 1/2 and 1/4.
    books = Books()
    for scale in (0.2, 0.4):
        charged(books, {0: noised(1.0, clip=RecordClip(1.0, 1), noise=Laplace(scale))}, delta=0.0)
    (line,) = lines(books)
    assert line["spent"] == {"epsilon": pytest.approx(0.75), "delta": 0.0}


def test_the_smallest_delta_that_was_promised_is_the_one_that_counts() -> None:
    books = Books()
    for delta in (1e-3, 1e-9, 1e-5):
        charged(books, {0: noised(1 / math.sqrt(3))}, delta=delta)
    (line,) = lines(books)
    assert line["spent"] == {"epsilon": pytest.approx(float(epsilon_of(1.0, 1e-9)), rel=1e-8), "delta": 1e-9}


def test_promises_of_different_kinds_are_added_in_the_strongest() -> None:
    books = Books()
    charged(books, {0: noised(0.6)})
    charged(books, {0: noised(0.064)}, unit="client")  # ten records: Δ is ten times as large, μ = 0.64
    charged(books, {0: noised(0.48)}, neighbours="add-remove")  # half of Δ, μ = 0.24, so 0.48 for one that is replaced
    (line,) = lines(books)
    assert (line["unit"], line["neighbours"]) == ("record", "replace")
    assert line["spent"]["epsilon"] == pytest.approx(4.37718, abs=1e-5)  # 0.36 + 0.4096 + 0.2304 = 1
    assert rows(books)[0].endswith("record, replaced")


def test_a_total_of_records_says_little_about_clients() -> None:
    """A grant about clients: all ten records are replaced one by one, each by one that goes and one that comes."""
    books = Books()
    charged(books, {0: noised(0.06)})
    charged(books, {0: noised(0.08)}, neighbours="add-remove")
    books.grant(grant(None, 20.0, DELTA, unit="client"))
    (line,) = lines(books)
    assert (line["unit"], line["neighbours"]) == ("client", "replace")
    assert line["spent"]["epsilon"] == pytest.approx(4.37718, abs=1e-5)


def test_each_client_has_its_total_in_the_kind_of_its_own_grant() -> None:
    books = Books()
    charged(books, {0: noised(0.06), 1: noised(0.6)})
    books.grant(grant(None, 20.0, DELTA))
    books.grant(grant(0, 20.0, DELTA, unit="client"))
    first, second = lines(books)
    assert [(line["unit"], line["granted"]["epsilon"]) for line in (first, second)] == [
        ("client", 20.0),
        ("record", 20.0),
    ]
    # Ten records, each of μ = 0.06, are worth what one of μ = 0.6 is.
    assert first["spent"]["epsilon"] == pytest.approx(second["spent"]["epsilon"], rel=1e-8)


def test_what_filters_of_their_own_hold_is_added_as_it_is() -> None:
    books = Books()
    charged(books, {0: noised(0.6)})
    order = noised(1.0, batch=Poisson(0.5), noise=Gaussian(1.0))
    charged(books, {0: order}, calibration="tight", noise="adaptive", neighbours="add-remove")
    (line,) = lines(books)
    apart = float(epsilon_of(0.6, DELTA))
    pair = {"epsilon": 16.0, "delta": DELTA * (1 + math.exp(8.0))}  # ε = 8 for one that comes or goes
    assert line["spent"]["epsilon"] == pytest.approx(apart + pair["epsilon"])
    assert line["spent"]["delta"] == pytest.approx(DELTA + pair["delta"])


def test_noise_that_adapts_counts_for_all_that_its_filter_holds() -> None:
    books = Books()
    charged(books, {0: noised(0.1)}, calibration="tight", noise="adaptive")
    (line,) = lines(books)
    assert line["spent"]["epsilon"] == pytest.approx(8.0, rel=1e-6)


def test_nothing_is_certified_where_it_is_not_known_whose_records_they_were() -> None:
    books = Books()
    for sharing in ("one way", "another"):
        promise = Promise(budgets=(Budget(8.0, DELTA),), unit="record", neighbours="replace", calibration="paper")
        _played(Ledger(promise, (10,), books=books, sharing=sharing), {0: noised(0.5)})
    (line,) = lines(books)
    assert line["spent"] is None
    assert "everything: it is not known whether it held the same people's records in all runs" in rows(books)[0]


def test_new_people_have_lost_nothing() -> None:
    books = Books()
    charged(books, {0: noised(0.6)})
    books.add_people()
    assert lines(books) == []
    assert "nobody of now has been charged yet" in text(state(books))
    charged(books, {0: noised(0.5)})
    (line,) = lines(books)
    assert line["spent"]["epsilon"] == pytest.approx(float(epsilon_of(0.5, DELTA)), rel=1e-8)
    assert "on other people" in text(state(books))


def grant(client: int | None, epsilon: float, delta: float = 1e-6, **terms: str) -> Grant:
    usual = {"unit": "record", "neighbours": "replace", "currency": "plain"}
    return Grant(client, Budget(epsilon, delta), **usual | terms)


def test_what_was_granted_stands_beside_what_was_spent_at_the_delta_of_the_grant() -> None:
    books = Books()
    for one in (grant(None, 9.0), grant(1, 5.0, 1e-7), grant(None, 20.0)):  # a later grant replaces an earlier one
        books.grant(one)
    charged(books, {0: noised(0.5), 1: noised(0.5)})
    first, second = lines(books)
    assert first["granted"] == {"epsilon": 20.0, "delta": 1e-6}
    assert second["granted"] == {"epsilon": 5.0, "delta": 1e-7}
    for line, delta in ((first, 1e-6), (second, 1e-7)):
        assert line["spent"] == {"epsilon": pytest.approx(float(epsilon_of(0.5, delta)), rel=1e-8), "delta": delta}
    assert [one["epsilon"] for one in state(books)["grants"]] == [9.0, 5.0, 20.0]
    printed = text(state(books))
    assert "granted to every client: ε = 20, δ = 1e-06 over all runs (record, replace; plain)" in printed
    assert "granted to client 1: ε = 5, δ = 1e-07" in printed
    assert any("ε = 5, δ = 1e-07" in row and row.split()[0] == "1" for row in rows(books))


def test_without_a_grant_nothing_is_said_to_be_granted() -> None:
    books = Books()
    charged(books, {0: noised(0.5)})
    assert lines(books)[0]["granted"] is None
    assert " –  " in rows(books)[0]


def test_what_was_promised_to_clients_covers_each_of_their_records() -> None:
    books = Books()
    charged(books, {0: noised(0.05)}, unit="client")
    books.grant(grant(None, 1.0, 1e-9))
    (line,) = lines(books)
    assert line["granted"] == {"epsilon": 1.0, "delta": 1e-9}
    assert line["spent"] == {"epsilon": pytest.approx(float(epsilon_of(0.5, 1e-9)), rel=1e-8), "delta": 1e-9}


def test_an_upload_without_noise_has_spent_everything() -> None:
    books = Books()
    charged(books, {0: noised(0.5), 1: noised(4.0)})
    charged_without_noise(books, {0: Order(steps=1, learning_rate=0.5)}, {2: Order(steps=1, learning_rate=0.5)})
    exposed = [line for line in lines(books) if line["spent"] is None]
    assert [line["client"] for line in exposed] == [0, 2]
    assert [line["granted"] for line in exposed] == [None] * 2
    # They come first, whatever the others spent.
    assert ["everything: something left it without noise" in row for row in rows(books)] == [True, True, False]
    assert [row.split()[0] for row in rows(books)] == ["0", "2", "1"]


def test_an_answer_without_noise_has_told_everything() -> None:
    books = Books()
    charged(books, {0: noised(0.5)}, uncounted=("the loss of every model",))
    assert lines(books)[0]["spent"] is None


def test_what_has_no_finite_price_is_infinite_in_words_and_null_in_json() -> None:
    books = Books()
    charged(books, {0: noised(1.0), 1: noised(1.0, noise=Gaussian(1e-160))})
    assert [line["spent"]["epsilon"] for line in lines(books)] == [pytest.approx(4.37718, abs=1e-5), None]
    assert "ε ≤ ∞, δ = 1e-05" in rows(books)[0]  # and it comes first


def test_a_printed_epsilon_is_rounded_up() -> None:
    books = Books()
    charged(books, {0: noised(1.0)})
    assert "ε ≤ 4.378, δ = 1e-05" in rows(books)[0]  # 4.37718


def test_a_screen_holds_the_twenty_that_spent_most() -> None:
    books = Books()
    charged(books, {client: noised(0.1 + 0.01 * (client * 7 % 25)) for client in range(25)}, clients=25)
    shown = rows(books)
    assert len(shown) == 21
    assert shown[-1].strip() == "… and 5 that spent less; --json has all of them"
    # Client i spent by its rank 7i mod 25: the largest rank comes first, and ranks 0 to 4 are left out.
    assert [int(row.split()[0]) * 7 % 25 for row in shown[:-1]] == list(range(24, 4, -1))
    assert [line["client"] for line in lines(books)] == list(range(25))


def test_twenty_clients_need_no_more_words() -> None:
    books = Books()
    charged(books, {client: noised(0.5) for client in range(20)}, clients=20)
    assert len(rows(books)) == 20
    assert "spent less" not in text(state(books))


def test_runs_are_listed_with_what_they_were() -> None:
    books = Books()
    charged(books, {0: noised(0.5)}, {0: noised(0.5)}, calibration="tight")
    charged_without_noise(books, {0: Order(steps=1, learning_rate=0.5)})
    first, second = state(books)["runs"]
    assert (first["system"], first["calibration"], first["rounds"], first["config"]) == (
        "udp", "tight", 2, "0123456789ab",
    )  # fmt: skip
    assert (second["system"], second["calibration"], second["rounds"]) == ("fedavg", None, 1)
    assert first["run"] != second["run"]
    printed = text(state(books)).splitlines()
    assert printed[0].endswith(": 2 runs")
    assert printed[1].endswith(f"{first['run']}  udp, tight calibration, 2 rounds")
    assert "fedavg, no privacy, 1 round" in printed[2]


def test_of_many_runs_the_newest_are_listed() -> None:
    books = Books()
    names = [charged(books, {0: noised(0.1)}).run.name for _ in range(23)]
    printed = text(state(books))
    assert [name in printed for name in names] == [False] * 3 + [True] * 20
    assert [run["run"] for run in state(books)["runs"]] == names
    assert lines(books)[0]["runs"] == 23


def test_books_in_which_nobody_was_charged() -> None:
    books = Books()
    nothing = {"ledger": None, "head": None, "extract": False, "people": 1, "simulations": 0}
    assert state(books) == nothing | {"runs": [], "grants": [], "clients": []}
    assert text(state(books)).endswith("nobody has been charged yet")
    assert charged(books).run.name  # a run that ended before its first round
    assert lines(books) == []
    assert ": 1 run\n" in text(state(books))


def test_it_fits_on_a_screen_across() -> None:
    books = Books()
    books.grant(grant(None, 1234.5, 1.234e-10))
    charged(books, {client: noised(20.0) for client in range(25)}, clients=25)
    assert max(len(line) for line in text(state(books)).splitlines()) <= 120
