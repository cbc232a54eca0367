"""ε that depends on what happened: a certificate says what was allowed, or it would be a release of its own."""

import json
from dataclasses import replace
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


def stopped(system: dpfl.System[Any], out: Path, at: int, seed: int | None = None) -> dict[str, Any]:
    def look(metrics: dpfl.RoundMetrics) -> None:
        if metrics["round"] == at:
            raise StoppedError

    with pytest.raises(StoppedError):
        dpfl.train(system, DATA, "softmax", out=out, on_round=look, seed=seed)
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


@pytest.mark.parametrize("calibration", ["tight", "paper"])
def test_who_was_not_asked_before_the_stop_could_have_been(calibration: str, tmp_path: Path) -> None:
    system = dpfl.UDP(rounds=6, epsilon=2.0, cohort=1, calibration=calibration)
    whole = dpfl.train(system, DATA, "softmax", seed=1).certificate
    certificate = stopped(system, tmp_path, 1, seed=1)  # under which the same clients would have been asked
    shown = [line["server_epsilon"] for line in certificate["spending"]]
    assert max(shown) >= max(line.server_epsilon or 0 for line in whole.spending) * (1 - 1e-9) > 0


class Grows(dpfl.UDP):
    """Half the noise in every round that follows, by a formula of somebody's own."""

    name = "grows"

    def adapt(self, state: Any, feedback: dpfl.Feedback) -> Any:
        return replace(state, noise_stds=tuple(std / 2 for std in state.noise_stds))


def test_rounds_that_were_not_played_may_be_dearer_than_those_that_were(tmp_path: Path) -> None:
    system = Grows(rounds=5, epsilon=2.0, calibration="paper")
    whole = dpfl.train(system, DATA, "softmax", seed=1).certificate.observers["server"].epsilon
    assert whole is not None
    assert stopped(system, tmp_path, 1)["observers"]["server"]["epsilon"] == pytest.approx(whole)


class Reads(dpfl.DPSGDFedAvg):
    """Stop when the model has moved enough, and name no need of that."""

    name = "reads"

    def orders(self, state: Any) -> dict[int, dpfl.Order]:
        asked = super().orders(state)
        return asked if float(state.model.abs().sum()) % 1 < 0.5 else dict(list(asked.items())[:1])


def test_a_system_of_somebody_elses_counts_for_all_that_its_filters_let_pass() -> None:
    system = Reads(rounds=3, epsilon=2.0, noise_multiplier=8.0)
    shown = {
        tuple(line.server_epsilon for line in dpfl.train(system, DATA, "softmax", seed=seed).certificate.spending)
        for seed in (1, 2, 3)
    }
    assert len(shown) == 1


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
