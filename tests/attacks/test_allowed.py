"""ε that depends on what happened: a certificate says what was allowed, or it would be a release of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

import dpfl
from dpfl.privacy.accounting import tight
from dpfl.privacy.books import Books
from dpfl.privacy.certificate import recertify

DATA = dpfl.federate("digits", clients=4, seed=1)


def test_a_controller_cannot_be_read_off_the_certificate(tmp_path: Path) -> None:
    """ALI-DPFL's steps follow the training, and with them the ε of what happened."""
    shown, happened = set(), set()
    for seed in (1, 2, 3, 4):
        out = tmp_path / str(seed)
        run = dpfl.train(dpfl.ALIDPFL(rounds=5, epsilon=3.0), DATA, "softmax", seed=seed, out=out)
        shown.add(run.certificate.observers["server"].epsilon)
        books = Books(out / "ledger.sqlite", create=False)
        happened.add(max(tight(spent, 1e-3) for spent in books.spent(*books.runs()).values()))
        books.close()
    (only,) = shown
    assert len(happened) > 1  # the twin
    assert max(happened) < only <= 3.0


class StoppedError(Exception):
    pass


def stopped(system: dpfl.System[Any], out: Path, at: int) -> dict[str, Any]:
    def look(metrics: dpfl.RoundMetrics) -> None:
        if metrics["round"] == at:
            raise StoppedError

    with pytest.raises(StoppedError):
        dpfl.train(system, DATA, "softmax", out=out, on_round=look)
    return json.loads((out / "certificate.json").read_text())


@pytest.mark.parametrize(
    "system",
    [
        dpfl.UDP(rounds=6, epsilon=2.0),
        dpfl.UDP(rounds=6, epsilon=2.0, calibration="paper"),
        dpfl.FedSGDDPC(rounds=6, epsilon=2.0, mechanism="laplace"),
        dpfl.NbAFL(rounds=6, epsilon=2.0),
        dpfl.DPFedAvg(rounds=6, epsilon=2.0, cohort=2),
        dpfl.Lei(rounds=8, epsilon=2.0),
    ],
    ids=lambda system: f"{system.name}-{system.calibration}",
)
def test_whoever_stops_after_a_look_gains_nothing(system: dpfl.System[Any], tmp_path: Path) -> None:
    whole = dpfl.train(system, DATA, "softmax", seed=1).certificate
    for at in (2, 4):
        certificate = stopped(system, tmp_path / str(at), at)
        assert certificate["rounds"] == at
        assert certificate["allowed_more"]
        for observer in whole.against:
            shown = certificate["observers"][observer]["epsilon"]
            assert shown >= whole.observers[observer].epsilon * (1 - 1e-9)
            assert shown <= max(2.0, whole.observers[observer].epsilon * (1 + 1e-9))  # what the filter holds, at most
        assert recertify(tmp_path / str(at))[1]  # and its ledger says so too


def test_given_noise_that_was_stopped_counts_for_all_that_the_filter_lets_pass(tmp_path: Path) -> None:
    system = dpfl.DPSGDFedAvg(rounds=6, epsilon=2.0, noise_multiplier=4.0)
    whole = dpfl.train(system, DATA, "softmax", seed=1).certificate.observers["server"].epsilon
    assert whole is not None
    assert whole < 1.5
    assert whole < stopped(system, tmp_path, 3)["observers"]["server"]["epsilon"] <= 2.0


def test_what_was_allowed_is_what_later_runs_are_added_to(tmp_path: Path) -> None:
    """Two runs that were stopped after one round of a hundred each, and a third."""
    for _ in range(2):
        stopped_run = dpfl.UDP(rounds=100, epsilon=2.0)
        with pytest.raises(StoppedError):
            dpfl.train(stopped_run, DATA, "softmax", out=tmp_path / "r", force=True, on_round=_stop)
    run = dpfl.train(dpfl.UDP(rounds=1, epsilon=2.0), DATA, "softmax", out=tmp_path / "r", force=True)
    assert run.certificate.together is not None
    assert run.certificate.together.epsilon == pytest.approx(3.932, abs=0.001)


def _stop(metrics: dpfl.RoundMetrics) -> None:
    raise StoppedError
