"""One ledger for people: runs that share it, and whoever hopes that it counts numbers of clients only."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dpfl
from dpfl.federation import Dataset
from dpfl.privacy.books import Books, Grant
from dpfl.privacy.certificate import recertify
from dpfl.privacy.gaussian_dp import epsilon_of, mu_of
from dpfl.privacy.people import fingerprints_of
from dpfl.privacy.statement import state

UDP = dpfl.UDP(rounds=1, epsilon=1.0, lr=0.5)


def ledger(path: Path, *grants: Grant) -> Path:
    books = Books(path / "all.sqlite")
    for grant in grants:
        books.grant(grant)
    books.close()
    return path / "all.sqlite"


def granted(epsilon: float, **kind: Any) -> Grant:
    return Grant(
        None, dpfl.Budget(epsilon, 1e-3), **{"unit": "record", "neighbours": "replace", "currency": "plain"} | kind
    )


def digits(data_seed: int | None = 1, **settings: Any) -> dpfl.Federation:
    return dpfl.federate("digits", clients=4, data_seed=data_seed, **settings)


def spent(path: Path) -> list[dict[str, Any]]:
    books = Books(path, create=False)
    try:
        return state(books)["clients"]
    finally:
        books.close()


def uploads(system: dpfl.System[Any], **how: Any) -> Tensor:
    seen: list[Tensor] = []
    dpfl.train(
        system, digits(), "softmax", on_uploads=lambda _, sent: seen.append(sent[0].double()), draws="client", **how
    )
    return seen[0]


def test_a_seed_that_was_used_on_a_ledger_is_refused(tmp_path: Path) -> None:
    """Under one seed two runs draw one noise, and the difference of their uploads is that of exact gradients."""
    halved = dpfl.UDP(rounds=1, epsilon=1.0, lr=0.25)
    wide, narrow = (uploads(system, seed=7) for system in (UDP, halved))
    # The twin, without a ledger: at half the rate signal and noise are half as large, to the last float.
    assert torch.allclose(wide, 2 * narrow, rtol=1e-4, atol=1e-6) or not torch.equal(wide, narrow)
    shared = ledger(tmp_path)
    uploads(UDP, seed=7, ledger=shared)
    with pytest.raises(dpfl.BadInput, match=r"seed must be one that the ledger .* has not seen"):
        uploads(UDP, seed=7, ledger=shared)
    assert spent(shared)[0]["runs"] == 1


def test_a_ledger_with_grants_takes_no_simulation(tmp_path: Path) -> None:
    shared = ledger(tmp_path, granted(8.0))
    for how in ({"seed": 3}, {"seed": 3, "sampler": "exact"}, {"sampler": "fast"}):
        with pytest.raises(dpfl.BadInput, match="seed must be left out with the ledger"):
            dpfl.train(UDP, digits(), "softmax", ledger=shared, **how)
    dpfl.train(UDP, digits(), "softmax", ledger=shared)


@pytest.mark.parametrize("other", [2, None])
def test_people_do_not_move_between_clients_nor_into_the_public(tmp_path: Path, other: int | None) -> None:
    """A record that changes its client is charged to somebody else's account; one that becomes public has lost all."""
    first, second = digits(), digits(other)
    homes = {record: client for client, part in enumerate(first.clients) for record in known(part)}
    moved = Counter(
        "public" if place < 0 else "moved"
        for place, part in ((-1, second.validation), *enumerate(second.clients))
        for record in known(part)
        if record in homes and homes[record] != place
    )
    assert moved["public"] > 50  # the twin: what nothing would stop
    assert moved["moved"] > 500
    shared = ledger(tmp_path)
    dpfl.train(UDP, first, "softmax", ledger=shared)
    with pytest.raises(dpfl.BadInput, match="records must stay where they were") as caught:
        dpfl.train(UDP, second, "softmax", ledger=shared)
    assert "became public" in str(caught.value)
    assert "changed clients" in str(caught.value)
    dpfl.train(UDP, digits(), "softmax", ledger=shared)  # as before
    books = Books(shared)
    books.add_people()
    books.close()
    dpfl.train(UDP, second, "softmax", ledger=shared)  # as their owner said
    assert [line["runs"] for line in spent(shared)] == [1] * 4


def known(records: dpfl.Records) -> list[bytes]:
    return fingerprints_of(b"key", records.x.numpy(), records.y.numpy())


def test_people_are_known_whatever_was_made_of_their_features(tmp_path: Path) -> None:
    """A preprocessing that is fitted on other public records makes other numbers of the same people."""

    def fit(public: Tensor) -> Any:
        centre = public.mean(dim=0)
        return lambda x: x - centre

    raw = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    people = Dataset(
        "people", dpfl.Records(raw, (raw[:, 0] > 0).long()), dpfl.Records(raw[:5], torch.tensor([0, 1, 0, 1, 0])), 2,
        "made up", fit=fit,
    )  # fmt: skip
    shared = ledger(tmp_path)
    first, second = (dpfl.federate(people, clients=2, data_seed=seed) for seed in (1, 2))
    assert not set(map(tuple, first.clients[0].x.tolist())) & set(map(tuple, second.clients[1].x.tolist()))
    dpfl.train(UDP, first, "softmax", ledger=shared)
    with pytest.raises(dpfl.BadInput, match="records must stay where they were"):
        dpfl.train(UDP, second, "softmax", ledger=shared)


def test_people_are_known_by_what_their_features_were_made_of(tmp_path: Path) -> None:
    raw = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    labels = (raw[:, 0] > 0).long()
    shared = ledger(tmp_path)
    public = dpfl.Records(raw[:6], labels[:6])
    plain = Dataset("people", dpfl.Records(raw, labels), public, 2, "made up")
    made = Dataset(
        "people, squared", dpfl.Records(raw**2, labels), dpfl.Records(raw[:6] ** 2, labels[:6]), 2, "made up",
        raw=(plain.pool, plain.test),
    )  # fmt: skip
    dpfl.train(UDP, dpfl.federate(plain, clients=2, data_seed=1), "softmax", ledger=shared)
    with pytest.raises(dpfl.BadInput, match="records must stay where they were"):
        dpfl.train(UDP, dpfl.federate(made, clients=2, data_seed=2), "softmax", ledger=shared)
    dpfl.train(UDP, dpfl.federate(made, clients=2, data_seed=1), "softmax", ledger=shared)


def test_an_answer_that_nobody_paid_for_passes_no_grant(tmp_path: Path) -> None:
    asking = dpfl.UDP(rounds=2, epsilon=1.0, calibration="paper", discount=0.9)
    with pytest.raises(dpfl.BadInput, match="calibration must be one that counts everything"):
        dpfl.train(asking, digits(), "softmax", ledger=ledger(tmp_path, granted(100.0)))
    free = ledger(tmp_path / "..")
    run = dpfl.train(asking, digits(), "softmax", ledger=free)
    assert run.certificate.together is not None
    assert run.certificate.together.epsilon is None
    assert {line["why"] for line in spent(free)} == {"something left it without noise"}


def test_what_was_promised_in_other_terms_is_in_the_one_total(tmp_path: Path) -> None:
    shared = ledger(tmp_path)
    for system in (
        dpfl.UDP(rounds=1, epsilon=1.0),  # a record replaced
        dpfl.DPSGDFedAvg(rounds=1, epsilon=1.0, delta=1e-3, sampling_rate=1.0),  # added or removed: half of that
        dpfl.DPFedAvg(rounds=1, epsilon=1.0, delta=1e-3),  # all of a client's
    ):
        run = dpfl.train(system, digits(), "softmax", ledger=shared)
    assert run.certificate.together is not None
    mu = float(mu_of(1.0, 1e-3))
    together = float(epsilon_of(mu * (1 + 2**2 + 1) ** 0.5, 1e-3))
    assert run.certificate.together.epsilon == pytest.approx(together, rel=1e-4)
    assert [line["spent"]["epsilon"] for line in spent(shared)] == pytest.approx([together] * 4, rel=1e-4)
    # The twin: three lines of ε = 1 that nobody added up.
    assert {round(line.server_epsilon or 0, 3) for line in run.certificate.spending} == {1.0}


def test_a_grant_counts_every_kind_of_promise(tmp_path: Path) -> None:
    shared = ledger(tmp_path, granted(2.0))
    dpfl.train(UDP, digits(), "softmax", ledger=shared)
    added = dpfl.DPSGDFedAvg(rounds=1, epsilon=1.2, delta=1e-3, sampling_rate=1.0)
    with pytest.raises(dpfl.BudgetRefused, match="leaves ε = 0"):
        dpfl.train(added, digits(), "softmax", ledger=shared)


def test_noise_that_adapts_counts_for_the_whole_of_its_promise(tmp_path: Path) -> None:
    shared = ledger(tmp_path)
    ends_early = dpfl.UDP(rounds=10, epsilon=2.0, discount=0.5, least_gain=100.0)
    run = dpfl.train(ends_early, digits(), "softmax", ledger=shared)
    assert run.rounds < 10
    assert run.certificate.observers["server"].epsilon == 2.0
    assert spent(shared)[0]["spent"]["epsilon"] == pytest.approx(2.0, rel=1e-6)


def test_a_folder_that_was_used_again_certifies_everything_that_its_ledger_holds(tmp_path: Path) -> None:
    for _ in range(3):
        run = dpfl.train(dpfl.UDP(rounds=2, epsilon=8.0), digits(), "softmax", out=tmp_path / "run", force=True)
    assert run.certificate.observers["server"].epsilon == pytest.approx(8.0)
    assert run.certificate.together is not None
    assert run.certificate.together.runs == 3
    assert run.certificate.together.epsilon == pytest.approx(16.95, abs=0.02)
    again = dpfl.train(UDP, digits(None), "softmax", out=tmp_path / "run", force=True)
    assert again.certificate.together is not None
    assert again.certificate.together.epsilon is None  # shared out anew: nobody knows who is who
    simulated = dpfl.train(UDP, digits(), "softmax", out=tmp_path / "other", seed=1)
    assert simulated.certificate.together is None
    assert "nobody's records were protected here" in str(simulated.certificate)


def test_an_extract_names_nobody(tmp_path: Path) -> None:
    """Whoever has a run's folder cannot find out by trying whose records it was on."""
    shared = ledger(tmp_path)
    dpfl.train(UDP, digits(), "softmax", ledger=shared, out=tmp_path / "run")
    key = Books(shared).key
    (record, *_) = fingerprints_of(key, digits().clients[0].x.numpy(), digits().clients[0].y.numpy())
    assert record in shared.read_bytes()  # the twin: the ledger itself, which its owner keeps
    for path in (tmp_path / "run").iterdir():
        content = path.read_bytes()
        assert record not in content
        assert key not in content
        assert str(shared).encode() not in content


def test_a_grant_counts_what_was_charged_with_the_sizes_of_its_run(tmp_path: Path) -> None:
    """A client that brings fewer records is not forgiven what its many lost: n of them lie between two clients."""
    shared = ledger(tmp_path, granted(100.0, unit="client"))
    many, few = digits(sizes=20), digits(sizes=20, share=0.2)
    dpfl.train(dpfl.UDP(rounds=1, epsilon=0.2, delta=1e-3), many, "softmax", ledger=shared)
    lost = spent(shared)[0]["spent"]["epsilon"]
    assert lost > 3
    books = Books(shared)
    books.grant(granted(1.01 * lost, unit="client"))
    books.close()
    with pytest.raises(dpfl.BudgetRefused, match="leaves ε"):
        dpfl.train(dpfl.UDP(rounds=1, epsilon=0.5), few, "softmax", ledger=shared)


def test_who_is_gone_is_still_counted_while_a_run_on_them_goes_on(tmp_path: Path) -> None:
    shared = ledger(tmp_path, granted(3.0))
    system = dpfl.UDP(rounds=2, epsilon=2.0)
    fresh: list[dpfl.Run] = []

    def meanwhile(metrics: dpfl.RoundMetrics) -> None:
        if metrics["round"] == 1 and not fresh:
            books = Books(shared)
            books.add_people()
            books.close()
            fresh.append(dpfl.train(system, digits(), "softmax", ledger=shared))

    dpfl.train(system, digits(), "softmax", ledger=shared, on_round=meanwhile)
    assert len(fresh) == 1  # others, who have a grant of their own
    books = Books(shared)
    try:
        for people in (1, 2):
            (run,) = books.runs_of(people)
            assert books.replies(run) == dict.fromkeys(range(4), 2)
    finally:
        books.close()


def test_a_run_that_was_opened_counts_for_all_that_it_may_let_out(tmp_path: Path) -> None:
    shared = ledger(tmp_path)
    system = dpfl.UDP(rounds=2, epsilon=3.0)
    inner: list[dpfl.Run] = []

    def meanwhile(session: Any) -> None:
        session.ledger.run  # noqa: B018 (opened, and nobody charged yet)
        inner.append(dpfl.train(system, digits(), "softmax", ledger=shared, out=tmp_path / "inner"))

    dpfl.train(system, digits(), "softmax", ledger=shared, on_open=meanwhile)
    total = inner[0].certificate.together
    assert total is not None
    assert total.epsilon is not None
    assert total.epsilon >= float(epsilon_of(2**0.5 * mu_of(3.0, 1e-3), 1e-3))
    assert recertify(tmp_path / "inner", shared)[1]  # which knows more by now, and finds no fault in it


def test_a_grant_that_comes_later_forgives_nothing(tmp_path: Path) -> None:
    shared = ledger(tmp_path)

    class EndedError(Exception):
        pass

    def end(metrics: dpfl.RoundMetrics) -> None:
        raise EndedError

    with pytest.raises(EndedError):
        dpfl.train(dpfl.UDP(rounds=20, epsilon=8.0), digits(), "softmax", ledger=shared, on_round=end)
    books = Books(shared)
    books.grant(granted(3.0))
    books.close()
    assert spent(shared)[0]["spent"]["epsilon"] == pytest.approx(8.0)


def test_a_pure_promise_does_not_make_a_gaussian_one_infinite(tmp_path: Path) -> None:
    shared = ledger(tmp_path)
    for system in (dpfl.FedSGDDPC(rounds=1, epsilon=0.5, mechanism="laplace"), dpfl.UDP(rounds=1, epsilon=1.0)):
        run = dpfl.train(system, digits(), "softmax", ledger=shared)
    assert run.certificate.together is not None
    assert run.certificate.together.epsilon is not None
    assert 1.0 < run.certificate.together.epsilon <= 1.5  # the sum
    assert run.certificate.together.delta == 1e-3
