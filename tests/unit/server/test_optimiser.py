"""The server's optimiser by hand, on one coordinate, and for models of several repetitions at once."""

import math

import pytest
import torch

import dpfl
from dpfl.errors import BadInput
from dpfl.server.optimiser import Memory, ServerOptimiser
from grids import each


def walked(optimiser: ServerOptimiser, totals: list[float]) -> list[float]:
    model, memory, models = torch.zeros(2, dtype=torch.float64), None, []
    for round, total in enumerate(totals, start=1):
        model, memory = optimiser.step(
            model, torch.full((2,), total, dtype=torch.float64), memory, round=round, rounds=len(totals)
        )
        models.append(float(model[0]))
    return models


def test_plain_averaging_adds_and_remembers_nothing() -> None:
    model, memory = ServerOptimiser().step(torch.ones(2), torch.full((2,), 0.5), None, round=1, rounds=2)
    assert model.tolist() == [1.5, 1.5]
    assert memory is None
    assert ServerOptimiser(lr=1.0).plain
    assert not ServerOptimiser(lr=0.5).plain


def test_momentum_and_rate_by_hand() -> None:
    # v: 1, 1.5, 0.75; w ← w + 0.1·v.
    assert walked(ServerOptimiser(lr=0.1, momentum=0.5), [1.0, 1.0, 0.0]) == pytest.approx([0.1, 0.25, 0.325])


def test_adam_and_yogi_by_hand() -> None:
    # Reddi et al. (2021), Algorithm 2: m = 0.5m + 0.5Δ, v as below from τ² = 0.01, w ← w + 0.1·m/(√v + 0.1).
    def by_hand(yogi: bool) -> list[float]:
        w, m, v, models = 0.0, 0.0, 0.01, []
        for change in (1.0, 0.2):
            m = 0.5 * m + 0.5 * change
            v = v - 0.1 * change**2 * math.copysign(1.0, v - change**2) if yogi else 0.9 * v + 0.1 * change**2
            w += 0.1 * m / (math.sqrt(v) + 0.1)
            models.append(w)
        return models

    for kind in ("adam", "yogi"):
        optimiser = ServerOptimiser(kind=kind, lr=0.1, momentum=0.5, second_momentum=0.9, adaptivity=0.1)
        assert walked(optimiser, [1.0, 0.2]) == pytest.approx(by_hand(kind == "yogi"), rel=1e-12)
    assert by_hand(True) != pytest.approx(by_hand(False), rel=1e-3)


def test_the_mean_of_the_last_models_ends_a_training_and_starts_nothing() -> None:
    assert walked(ServerOptimiser(averaged=0.5), [1.0, 1.0, 1.0, 3.0]) == pytest.approx([1.0, 2.0, 3.0, 4.5])
    memory = Memory(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.tensor([7.0]))
    model, after = ServerOptimiser(averaged=0.5).step(torch.tensor([5.0]), torch.ones(1), memory, round=3, rounds=4)
    assert model.tolist() == [8.0]  # from the latest, whatever was sent out
    assert after is not None
    assert after.latest.tolist() == [8.0]


@each("kind", ["sgd", "adam", "yogi"])
def test_models_of_several_repetitions_move_each_by_itself(kind: str) -> None:
    optimiser = ServerOptimiser(kind=kind, momentum=0.9, averaged=0.5)
    source = torch.Generator().manual_seed(1)
    start, totals = torch.randn(3, 4, generator=source), torch.randn(5, 3, 4, generator=source)

    def end(model: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
        memory = None
        for round, total in enumerate(moves, start=1):
            model, memory = optimiser.step(model, total, memory, round=round, rounds=5)
        return model

    together = end(start, totals)
    for row in range(3):
        torch.testing.assert_close(together[row], end(start[row], totals[:, row]))


@each("kind", ["sgd", "adam", "yogi"])
def test_every_system_takes_every_server_at_the_same_price(kind: str) -> None:
    digits = dpfl.federate("digits", clients=3, sizes=40, seed=1)
    for plain in (dpfl.UDP(rounds=3), dpfl.NbAFL(rounds=3), dpfl.DPFedAvg(rounds=3), dpfl.FedAvg(rounds=3)):
        changed = type(plain)(rounds=3, server_optimiser=kind, server_momentum=0.5, averaged=0.4)
        one, other = (dpfl.train(system, digits, seed=1) for system in (plain, changed))
        assert one.loss != other.loss
        assert one.certificate.observers == other.certificate.observers


def test_a_server_learns_where_averaging_stalls() -> None:
    """Steps too short for plain averaging: a larger rate of the server's makes up for it."""
    digits = dpfl.federate("digits", clients=5, seed=1)
    slow = dpfl.FedSGD(rounds=20, lr=0.01)
    fast = dpfl.FedSGD(rounds=20, lr=0.01, server_lr=100.0)
    adam = dpfl.FedSGD(rounds=20, lr=0.01, server_optimiser="adam", server_lr=0.1)
    losses = [dpfl.train(system, digits, seed=1).loss for system in (slow, fast, adam)]
    assert losses[1] < 0.5 * losses[0]
    assert losses[2] < 0.5 * losses[0]


def test_the_model_that_is_scored_is_the_model_that_is_sent_out() -> None:
    digits = dpfl.federate("digits", clients=3, seed=1)
    for options in ({"server_momentum": 0.9}, {"averaged": 0.5}, {"server_optimiser": "adam"}):
        run = dpfl.train(dpfl.DPSGDFedAvg(rounds=4, epsilon=20.0, **options), digits, seed=1)
        with torch.no_grad():
            outputs = run.model(digits.validation.x)
        loss = torch.nn.functional.cross_entropy(outputs, digits.validation.y).item()
        assert run.history[-1]["validation_loss"] == pytest.approx(loss, rel=1e-5)


@each(
    ("options", "field"),
    [
        ({"server_lr": 0.0}, "server_lr"), ({"server_momentum": 1.0}, "server_momentum"),
        ({"server_second_momentum": -0.1}, "server_second_momentum"), ({"server_adaptivity": 0.0}, "server_adaptivity"),
        ({"server_optimiser": "adagrad"}, "server_optimiser"), ({"averaged": 1.0}, "averaged"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(BadInput, match=f"^{field} must"):
        dpfl.UDP(**options)


def test_nothing_is_averaged_where_the_last_round_is_not_known() -> None:
    digits = dpfl.federate("digits", clients=3, seed=1)
    for system in (dpfl.Lei(averaged=0.5), dpfl.UDP(discount=0.9, averaged=0.5)):
        with pytest.raises(BadInput, match=r"averaged must be 0 for .* whose last round is not known"):
            dpfl.train(system, digits, seed=1)


def test_bounds_know_plain_averaging_only() -> None:
    digits = dpfl.federate("digits", clients=3, seed=1)
    with pytest.raises(BadInput, match=r"server_optimiser must be plain averaging for the bound of udp, .* pilot"):
        dpfl.plan(dpfl.UDP(server_momentum=0.5), digits, method="bound")
