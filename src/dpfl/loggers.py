"""Loggers: what a training makes public, round by round, for TensorBoard and MLflow.

    with dpfl.loggers.tensorboard("logs/udp") as log:
        run = dpfl.train(system, hospitals, on_open=log.open, on_round=log)
        log.certify(run.certificate)

`on_round=log` alone logs the rounds. Nothing leaves but what a run folder shows anyway: the options of the system, each
round's metrics, and the certificate. Each package is an extra of dpfl, and is imported when its logger is made.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dpfl.errors import BadInput, require_package
from dpfl.privacy.certificate import Certificate
from dpfl.report.frames import rounds
from dpfl.report.tables import markdown
from dpfl.session import Session
from dpfl.training import RoundMetrics


class Logger(ABC):
    """Follows one training: `train` calls it before the first round and after each, and its `with` block closes it."""

    _opened = False

    def open(self, session: Session[Any]) -> None:
        """Log what is going to be trained; for `on_open`."""
        if self._opened:
            raise BadInput("on_open must be the logger of one training, was one that follows another; make a new one")
        self._opened = True
        system = session.system
        facts = {"system": system.name, "clients": len(session.problem.sizes), "model": session.model.name}
        options = {name: value for name, value in asdict(system).items() if value is not None}
        self.settings({name: str(value) for name, value in (facts | options).items()})

    def __call__(self, metrics: RoundMetrics) -> None:
        """Log a round; for `on_round`. What nobody looked at after this round is left out."""
        (numbers,) = rounds([metrics])
        at = numbers.pop("round")
        self.numbers({name: float(value) for name, value in numbers.items() if value is not None}, at)

    def certify(self, certificate: Certificate) -> None:
        """Log what was really spent against each observer, where it is finite, and the certificate in words."""
        spent = {f"epsilon/{observer}": seen.epsilon for observer, seen in certificate.observers.items()}
        self.numbers({name: epsilon for name, epsilon in spent.items() if epsilon is not None}, certificate.rounds)
        self.words("certificate", str(certificate))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, problem: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close(failed=problem is not None)

    @abstractmethod
    def settings(self, values: dict[str, str]) -> None:
        """Keep what a training is described by."""

    @abstractmethod
    def numbers(self, values: dict[str, float], round: int) -> None:
        """Keep what was measured after a round."""

    @abstractmethod
    def words(self, name: str, text: str) -> None:
        """Keep a text."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Say that nothing follows; failed: because an error ended the training."""


def tensorboard(folder: str | Path) -> Logger:
    """Return a logger that writes TensorBoard's event files into a folder; it needs `pip install dpfl[tensorboard]`."""
    return _TensorBoard(Path(folder))


def mlflow(experiment: str = "dpfl", *, run_name: str | None = None, tracking_uri: str | None = None) -> Logger:
    """Return a logger that makes a run of an MLflow experiment; it needs `pip install dpfl[mlflow]`.

    tracking_uri: of the server or the database; what MLflow itself is set to if left out.
    """
    return _MLflow(experiment, run_name, tracking_uri)


class _TensorBoard(Logger):
    def __init__(self, folder: Path) -> None:
        torchs = require_package("tensorboard", "this logger", module="torch.utils.tensorboard")
        self._writer = torchs.SummaryWriter(str(folder))

    def settings(self, values: dict[str, str]) -> None:
        self._writer.add_text("settings", markdown([["", ""], *values.items()]))

    def numbers(self, values: dict[str, float], round: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()  # a training that is killed keeps its rounds

    def words(self, name: str, text: str) -> None:
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class _MLflow(Logger):
    def __init__(self, experiment: str, run_name: str | None, tracking_uri: str | None) -> None:
        self._package = require_package("mlflow", "this logger")
        self._client = self._package.MlflowClient(tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        home = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._run = self._client.create_run(home, run_name=run_name).info.run_id

    def settings(self, values: dict[str, str]) -> None:
        entries = [self._package.entities.Param(name, value) for name, value in values.items()]
        self._client.log_batch(self._run, params=entries)

    def numbers(self, values: dict[str, float], round: int) -> None:
        now = int(1000 * time.time())
        entries = [self._package.entities.Metric(name, value, now, round) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=entries)

    def words(self, name: str, text: str) -> None:
        self._client.log_text(self._run, text, f"{name}.txt")

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
