"""Loggers: what trainings make public, read back by TensorBoard and MLflow themselves."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import dpfl
from dpfl import loggers
from dpfl.errors import BadInput
from dpfl.loggers import Logger
from dpfl.session import Session


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test without the package, which is not imported to find out: MLflow calls home when it is."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"no {package} here; pip install dpfl[{package}]")


SIZES = (311, 407, 503)  # numbers that are nowhere else


def hospitals() -> dpfl.Federation:
    return dpfl.federate("digits", clients=3, sizes=SIZES, test_share=0.15, validation_share=0.05, seed=1)


def follow(log: Logger, **settings: Any) -> dpfl.Run:
    """Train as the documentation says."""
    system = dpfl.UDP(epsilon=8, delta=1e-3, rounds=4)
    with log:
        run = dpfl.train(system, hospitals(), on_open=log.open, on_round=log, seed=1, **settings)
        log.certify(run.certificate)
    return run


class Notes(Logger):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.ended: list[bool] = []

    def settings(self, values: dict[str, str]) -> None:
        self.said |= values

    def numbers(self, values: dict[str, float], round: int) -> None:
        self.lines.append((round, values))

    def words(self, name: str, text: str) -> None:
        self.said[name] = text

    def close(self, *, failed: bool = False) -> None:
        self.ended.append(failed)


def test_a_round_is_its_metrics_and_what_nobody_looked_at_is_left_out() -> None:
    log = Notes()
    run = follow(log, evaluate_every=2)
    *rounds, (last, spent) = log.lines
    assert [at for at, _ in rounds] == [1, 2, 3, 4]
    unseen = {"noise_std", "local_steps", "cohort", "refused"}
    seen = unseen | {"loss", "accuracy", "validation_loss", "validation_accuracy"}
    assert [set(numbers) for _, numbers in rounds] == [unseen, seen, unseen, seen]
    assert rounds[-1][1]["accuracy"] == run.accuracy
    assert rounds[-1][1]["refused"] == 0.0  # how many, not who
    assert (last, spent["epsilon/server"]) == (4, run.certificate.observers["server"].epsilon)
    assert log.said["certificate"] == str(run.certificate)
    assert (log.said["system"], log.said["epsilon"], log.said["clients"]) == ("udp", "8.0", "3")
    assert log.ended == [False]


def leaks(log: Notes) -> list[str]:
    """Return where a number of some client's records, or the seed of the noise, was passed on."""
    told = [*log.said.items(), *((name, str(value)) for _, numbers in log.lines for name, value in numbers.items())]
    size = re.compile(rf"(?<![\d.])({'|'.join(map(str, SIZES))})(?!\d)")
    return [name for name, text in told if "seed" in name or size.search(text)]


class Leaky(Notes):
    """The deliberately wrong twin: it takes all that a session knows for public."""

    def open(self, session: Session[Any]) -> None:
        super().open(session)
        self.settings({"sizes": str(session.problem.sizes)})


def test_nothing_of_the_clients_is_passed_on_but_the_metrics() -> None:
    log, twin = Notes(), Leaky()
    follow(log)
    follow(twin)
    assert leaks(log) == []
    assert leaks(twin) == ["sizes"]
    options = {"system", "clients", "model", *vars(dpfl.UDP())}
    assert set(log.said) - {"certificate"} <= options


def test_what_is_not_finite_or_promised_is_left_out() -> None:
    log = Notes()
    with log:
        run = dpfl.train(dpfl.FedAvg(rounds=1), hospitals(), on_round=log, seed=1)
        log.certify(run.certificate)
    assert log.lines[-1] == (1, {})
    assert "noise_std" not in log.lines[0][1]


def test_a_training_that_ends_in_an_error_is_said_to_have_failed() -> None:
    log = Notes()
    with pytest.raises(KeyError), log:
        raise KeyError
    assert log.ended == [True]


def test_a_logger_follows_one_training() -> None:
    log = Notes()
    follow(log)
    with pytest.raises(BadInput, match=r"^on_open must be the logger of one training, .*; make a new one$"):
        follow(log)


@needs("tensorboard")
def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = follow(loggers.tensorboard(tmp_path / "events"), evaluate_every=2)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    accuracies = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert accuracies == [(at, pytest.approx(run.history[at - 1]["accuracy"])) for at in (2, 4)]
    assert [event.step for event in events.Scalars("noise_std")] == [1, 2, 3, 4]
    assert events.Scalars("epsilon/server")[0].value == pytest.approx(8)
    (settings,), (certificate,) = (events.Tensors(f"{name}/text_summary") for name in ("settings", "certificate"))
    assert b"| epsilon | 8.0 |" in settings.tensor_proto.string_val[0]
    assert b"    protects " in certificate.tensor_proto.string_val[0]


KILLED = """
import os, sys
from dpfl import loggers

log = loggers.tensorboard(sys.argv[1])
for round in range(1, 31):
    log({"round": round, "loss": 1.0, "refused": []})
os._exit(9)
"""


@needs("tensorboard")
def test_tensorboard_keeps_the_rounds_of_a_training_that_is_killed(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=120)
    assert done.returncode == 9
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("refused")] == list(range(1, 31))


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return where MLflow keeps runs: in files, which need no database; it wants to be told that this is meant."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "mlruns").as_uri()


@needs("mlflow")
def test_mlflow_reads_what_was_logged(tracking: str) -> None:
    from mlflow import MlflowClient

    run = follow(loggers.mlflow("hospitals", run_name="first", tracking_uri=tracking), evaluate_every=2)
    client = MlflowClient(tracking)
    home = client.get_experiment_by_name("hospitals").experiment_id
    (kept,) = client.search_runs([home])
    assert (kept.info.status, kept.info.run_name) == ("FINISHED", "first")
    assert kept.data.params["epsilon"] == "8.0"
    assert kept.data.metrics["accuracy"] == run.accuracy
    assert kept.data.metrics["epsilon/server"] == run.certificate.observers["server"].epsilon
    history = client.get_metric_history(kept.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(at, run.history[at - 1]["loss"]) for at in (2, 4)]
    assert [file.path for file in client.list_artifacts(kept.info.run_id)] == ["certificate.txt"]

    second = loggers.mlflow("hospitals", tracking_uri=tracking)
    second.numbers({}, 1)  # where nothing was promised
    with pytest.raises(KeyError), second:
        raise KeyError
    assert sorted(one.info.status for one in client.search_runs([home])) == ["FAILED", "FINISHED"]


@pytest.mark.parametrize(
    ("make", "package"), [(lambda: loggers.tensorboard("x"), "tensorboard"), (loggers.mlflow, "mlflow")]
)
def test_what_is_not_installed_is_named(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfl.errors.find_spec", lambda _: None)
    with pytest.raises(BadInput, match=rf"^{package} must be installed for .*; pip install dpfl\[{package}\]$"):
        make()
