"""dpfl as a library: the six lines of the README, your own data and model, and how training ends early."""

import json
import math
import re
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dpfl
from dpfl.config import Settings
from dpfl.errors import Caution
from dpfl.orders import Gaussian, Order, RecordClip
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.gaussian_dp import epsilon_of, mu_of
from dpfl.systems import SYSTEMS, State, System
from grids import each

README = Path(__file__).parents[2] / "README.md"


def test_the_lines_in_the_readme_run_and_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```python\n(import dpfl\n.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    exec(compile(block[1], str(README), "exec"), {})
    assert "within the promise" in capsys.readouterr().out


def blobs(count: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three clouds of points in five dimensions, easy to tell apart."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    return (rng.normal(size=(count, 5)) + 4 * np.eye(5)[labels]).astype(np.float32), labels


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.GroupNorm(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@each("loss", [functional.cross_entropy, nn.CrossEntropyLoss(reduction="none")])
@each("wrap", [tuple, lambda pair: TensorDataset(*map(torch.as_tensor, pair))])
def test_your_own_data_module_and_loss(wrap: Callable, loss: Callable, tmp_path: Path) -> None:
    own = dpfl.federate(wrap(blobs()), clients=6, seed=1)
    module = Small()
    run = dpfl.train(dpfl.FedAvg(rounds=15), own, module, loss=loss, seed=1, out=tmp_path / "r")
    assert run.accuracy is not None
    assert run.accuracy > 0.9
    assert run.model is module  # trained in place
    assert "repeat this run from there" in (tmp_path / "r/config.toml").read_text()


def test_regression_has_a_loss_and_no_accuracy() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    own = dpfl.federate((x, x @ np.array([1.0, -2.0, 0.5], np.float32) + 1), clients=4, seed=1)
    run = dpfl.train(dpfl.FedSGD(rounds=60, lr=0.1), own, seed=1)  # 0.8 a round on the squared error: 1.5e-6 by then
    assert run.accuracy is None
    assert run.loss == pytest.approx(0, abs=1e-3)


def test_private_training_learns_and_a_larger_budget_learns_more() -> None:
    digits = dpfl.federate("digits", clients=20, seed=1)
    accuracy = {
        epsilon: dpfl.train(dpfl.UDP(epsilon=epsilon, delta=1e-3), digits, seed=1).accuracy for epsilon in (0.2, 8.0)
    }
    assert accuracy[8.0] > 0.8
    assert accuracy[0.2] < 0.6


def test_clients_with_their_own_budgets_spend_no_more_than_theirs() -> None:
    digits = dpfl.federate("digits", clients=4, seed=1)
    system = dpfl.UDP(epsilon=(1.0, 2.0, 4.0, 8.0), delta=(1e-3, 1e-4, 1e-5, 1e-6), rounds=5, cohort=3)
    run = dpfl.train(system, digits, seed=1)
    for line, budget in zip(run.certificate.spending, system.promise((1,) * 4).budgets, strict=True):
        assert line.replies > 0
        assert 0.999 * budget.epsilon <= line.server_epsilon <= budget.epsilon


def test_readers_of_the_models_see_the_noise_of_all_clients() -> None:
    # Clients of any size have equal p_iσ_i and p_iΔ_i under UDP: a √8-th of the server's μ is left for readers.
    digits = dpfl.federate("digits", clients=8, partition="dirichlet:0.5", seed=1)
    assert len(set(digits.sizes)) > 1
    observers = dpfl.train(dpfl.UDP(epsilon=8.0, delta=1e-3, rounds=3), digits, seed=1).certificate.observers
    assert observers["server"].epsilon == pytest.approx(8.0, rel=1e-6)
    worth = float(epsilon_of(mu_of(8.0, 1e-3) / math.sqrt(8), 1e-3))
    assert observers["released"].epsilon == pytest.approx(worth, rel=1e-5)


@pytest.mark.parametrize(
    ("system", "words"),
    [
        (dpfl.UDP(rounds=1, delta=0.1), r"delta should be well below one in .* was 0\.1 for \d+ records of client 0"),
        (dpfl.UDP(rounds=1, epsilon=20, calibration="paper"), r"UDP's equation \(10\) .* was 20 at δ = 0\.001"),
    ],
)
def test_a_promise_that_means_little_is_cautioned_and_kept(system: dpfl.UDP, words: str) -> None:
    digits = dpfl.federate("digits", clients=3, seed=1)
    with pytest.warns(Caution, match=words):
        run = dpfl.train(system, digits, seed=1)
    (said,) = run.certificate.cautions
    assert re.search(words, said)


@dataclass(frozen=True, kw_only=True)
class Spendthrift(System[State]):
    """Promises far less than it orders: only the ledger stands between it and the clients' records."""

    name: ClassVar[str] = "spendthrift"
    rounds: int = 10
    lr: float = 1.0
    granted: tuple[float, ...] = (1.0, 1.0, 1.0)

    def promise(self, sizes: Sequence[int]) -> Promise:
        budgets = tuple(Budget(epsilon, 1e-3) for epsilon in self.granted)
        return Promise(budgets=budgets, unit="record", neighbours="replace", calibration="tight")

    def orders(self, state: State) -> dict[int, Order]:
        order = Order(steps=1, learning_rate=self.lr, clip=RecordClip(1.0), noise=Gaussian(0.02))
        return dict.fromkeys(state.cohort, order)


def test_the_ledger_ends_a_training_that_would_overdraw(tmp_path: Path) -> None:
    digits = dpfl.federate("digits", clients=3, seed=1)
    with pytest.raises(dpfl.BudgetRefused, match="spent"):
        dpfl.train(Spendthrift(), digits, seed=1, out=tmp_path / "r")
    certificate = json.loads((tmp_path / "r/certificate.json").read_text())  # what was spent is certified all the same
    assert 0 < certificate["rounds"] < 10
    assert certificate["observers"]["server"]["epsilon"] <= 1.0
    assert len((tmp_path / "r/metrics.jsonl").read_text().splitlines()) == certificate["rounds"]
    assert (tmp_path / "r/model.safetensors").exists()


def test_a_client_whose_budget_is_gone_stops_and_the_others_go_on() -> None:
    digits = dpfl.federate("digits", clients=3, seed=1)
    run = dpfl.train(Spendthrift(granted=(1.0, 50.0, 50.0)), digits, seed=1)
    assert run.rounds == 10
    first, *others = run.certificate.spending
    assert 0 < first.replies < 10
    assert [line.replies for line in others] == [10, 10]
    assert run.history[-1]["refused"] == [0]
    assert run.history[-1]["cohort"] == 2


def test_an_interrupted_training_keeps_its_rounds(tmp_path: Path) -> None:
    def stop(metrics: dict) -> None:
        if metrics["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dpfl.train(dpfl.UDP(), dpfl.federate("digits", clients=3, seed=1), seed=1, out=tmp_path / "r", on_round=stop)
    assert len((tmp_path / "r/metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "r/certificate.json").read_text())["rounds"] == 2


def test_a_diverging_training_ends_with_a_certificate_and_no_number(tmp_path: Path) -> None:
    digits = dpfl.federate("digits", clients=3, seed=1)
    run = dpfl.train(dpfl.FedSGD(rounds=40, lr=1e38), digits, "mlp", seed=1, out=tmp_path / "r")
    assert run.loss is None
    json.loads((tmp_path / "r/metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)


def test_evaluating_less_often_changes_only_what_is_looked_at() -> None:
    digits = dpfl.federate("digits", clients=3, seed=1)
    skipped = [True, False, True, False, False]
    watching = dpfl.UDP(rounds=5, discount=0.9)  # which must see the validation loss in every round
    for system in (dpfl.UDP(rounds=5), watching, dpfl.ALIDPFL(rounds=5)):
        often, seldom = (dpfl.train(system, digits, seed=1, evaluate_every=every) for every in (1, 2))
        assert seldom.loss == often.loss
        lines, fewer = ([dict(line) for line in run.history] for run in (often, seldom))
        for key, looked in (("loss", False), ("validation_loss", "public loss" in system.needs)):
            wanted = [line[key] if looked or not skip else None for line, skip in zip(lines, skipped, strict=True)]
            assert [line[key] for line in fewer] == wanted


@each(
    ("make", "words"),
    [
        (lambda: dpfl.federate((np.full((30, 2), np.nan), np.zeros(30)), clients=2), "NaN"),
        (lambda: train_own(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))), "GroupNorm"),
        (lambda: train_own(nn.Linear(4, 3)), r"model must take records of shape \[5\]"),
        (lambda: train_own(nn.Linear(5, 3), loss=None), "loss must be given"),
        (lambda: train_own("softmax"), "loss must come with a module"),
        (lambda: train_own(nn.Linear(5, 3), device="abacus"), "device must be"),
        (lambda: train_own(nn.Linear(5, 3), loss=nn.CrossEntropyLoss(reduction="sum")), "loss must be a mean"),
        (lambda: train_own(nn.Linear(5, 3), evaluate_every=0), "evaluate_every"),
    ],
)
def test_bad_input_from_python(make: Callable[[], object], words: str, tmp_path: Path) -> None:
    with pytest.raises(dpfl.BadInput, match=words):
        make()


def train_own(model: object, *, loss: object = functional.cross_entropy, **options: object) -> object:
    return dpfl.train(dpfl.UDP(), dpfl.federate(blobs(), clients=3, seed=1), model, loss=loss, **options)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(README.parent / "examples/own_model.py"))
    printed = capsys.readouterr().out
    assert "within the promise" in printed
    assert "bank 0: promised ε = 2, spent ε ≤ 2.0000" in printed


def test_the_docs_name_every_config_key() -> None:
    words = (README.parent / "docs/commands.md").read_text(encoding="utf-8").split("## Config keys")[1]
    for part in (Settings, *SYSTEMS.values()):
        for field in fields(part):
            assert f"`{field.name}`" in words


def test_every_public_name_is_there() -> None:
    assert {name for name in dpfl.__all__ if not hasattr(dpfl, name)} == set()
    with pytest.raises(AttributeError, match="no 'nothing'"):
        _ = dpfl.nothing
