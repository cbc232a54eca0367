"""Many trainings as one program are what each would be alone."""

import math

import pytest
import torch
from torch import nn

import dpfl
from dpfl.errors import BadInput
from dpfl.federation import Federation
from dpfl.models.architectures import cross_entropy
from dpfl.repetitions import repeat
from dpfl.training import train

FEATURES, CLASSES = 5, 3


def federation(clients: int = 4) -> Federation:
    source = torch.Generator().manual_seed(0)
    sizes = [4 + i % 3 for i in range(clients)]
    x = [torch.randn(n, FEATURES, generator=source) for n in (*sizes, 20, 20)]
    y = [torch.randint(0, CLASSES, (n,), generator=source) for n in (*sizes, 20, 20)]
    from dpfl.federation import Records

    *parts, validation, test = (Records(*pair) for pair in zip(x, y, strict=True))
    return Federation("toy", tuple(parts), validation, test, CLASSES, "random numbers")


def softmax() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


@pytest.mark.parametrize("steps", [1, 3])
def test_without_chance_every_repetition_is_the_training(steps: int) -> None:
    system = dpfl.FedAvg(rounds=3, local_steps=steps, lr=0.3)
    (found,) = repeat(system, federation(), softmax(), loss=cross_entropy, repetitions=3, seed=1)
    alone = train(system, federation(), softmax(), loss=cross_entropy, seed=1)
    assert found.losses == pytest.approx([alone.loss] * 3, rel=1e-5)
    assert found.accuracies == [alone.accuracy] * 3
    assert found.loss[1] == pytest.approx(0.0, abs=1e-7)
    assert found.epsilon is None


PRIVATE = {
    "udp": dpfl.UDP(rounds=4, epsilon=30.0, lr=0.5),
    "nbafl": dpfl.NbAFL(rounds=4, epsilon=30.0),
    "dp-fedavg, Laplace": dpfl.DPFedAvg(rounds=4, epsilon=50.0, mechanism="laplace", cohort=2, local_steps=2),
    "fedsgd-dpc, sampled": dpfl.FedSGDDPC(rounds=3, epsilon=30.0, sampling_rate=0.5),
    "pe-dpfl": dpfl.PEDPFL(rounds=3, epsilon=30.0),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_every_repetition_has_noise_of_its_own_and_the_certificate_of_one_training(name: str) -> None:
    system = PRIVATE[name]
    (found,) = repeat(system, federation(), "softmax", repetitions=4, seed=1)
    assert len(set(found.losses)) == 4
    alone = train(system, federation(), "softmax", seed=1)
    assert found.certificate.to_dict()["observers"] == alone.certificate.to_dict()["observers"]
    again, other = (repeat(system, federation(), "softmax", repetitions=4, seed=seed)[0] for seed in (1, 2))
    assert again.losses == found.losses
    assert other.losses != found.losses


def test_the_noise_of_repetitions_is_that_of_trainings() -> None:
    # The spread of the losses after one round, where noise is all there is to tell trainings apart.
    system = dpfl.UDP(rounds=1, epsilon=1.0, lr=1.0)
    (found,) = repeat(system, federation(), softmax(), loss=cross_entropy, repetitions=400, seed=1)
    alone = [train(system, federation(), softmax(), loss=cross_entropy, seed=s).loss for s in range(40)]
    together, apart = torch.tensor(found.losses), torch.tensor(alone)
    error = math.sqrt(together.var() / 400 + apart.var() / 40)
    assert abs(together.mean() - apart.mean()) < 4 * error
    assert 0.6 < together.std() / apart.std() < 1.7


def test_budgets_are_a_dimension_too() -> None:
    found = repeat(dpfl.UDP(rounds=3, lr=0.5), federation(), "softmax", repetitions=3, epsilons=[1.0, 1000.0], seed=1)
    assert [one.epsilon for one in found] == [1.0, 1000.0]
    spent = [one.certificate.to_dict()["observers"]["server"]["epsilon"] for one in found]
    assert spent[0] <= 1.0 < spent[1] <= 1000.0
    assert found[0].loss[0] > found[1].loss[0]
    assert found[1].accuracy is not None


def test_models_with_random_layers_train_one_after_the_other() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    (found,) = repeat(
        dpfl.FedAvg(rounds=2, local_steps=1, lr=0.3), federation(), module, loss=cross_entropy, repetitions=3, seed=1
    )
    assert len(set(found.losses)) == 3


@pytest.mark.parametrize(
    ("system", "options", "words"),
    [
        (dpfl.ALIDPFL(), {}, ["system", "ali-dpfl"]),
        (dpfl.UDP(discount=0.5), {}, ["system", "udp"]),
        (dpfl.FedAvg(), {"epsilons": [1.0]}, ["epsilons", "fedavg"]),
        (dpfl.FedAvg(), {"repetitions": 0}, ["repetitions", "0"]),
    ],
)
def test_bad_input_is_one_sentence(system: object, options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(BadInput) as problem:
        repeat(system, federation(), "softmax", **options)
    assert all(word in str(problem.value) for word in words)


def test_a_curve_is_looked_at_as_often_as_asked_and_at_the_end() -> None:
    system = dpfl.FedAvg(rounds=5, lr=0.3)
    (found,) = repeat(system, federation(), softmax(), loss=cross_entropy, repetitions=2, seed=1, evaluate_every=2)
    alone = train(system, federation(), softmax(), loss=cross_entropy, seed=1)
    assert [look.round for look in found.history] == [2, 4, 5]
    assert [look.losses[0] for look in found.history] == pytest.approx(
        [alone.history[at]["loss"] for at in (1, 3, 4)], rel=1e-5
    )
    assert found.losses == found.history[-1].losses
    assert found.validation_losses == pytest.approx([alone.history[-1]["validation_loss"]] * 2, rel=1e-5)


def test_budgets_that_end_at_different_rounds_are_each_trained_to_their_own_end() -> None:
    system = dpfl.DPSGDFedAvg(rounds=50, noise_multiplier=4.0, delta=1e-3)
    few, many = repeat(system, federation(), "softmax", repetitions=2, epsilons=(0.5, 1.0), seed=1)
    assert 0 < few.history[-1].round < many.history[-1].round
    assert few.certificate.rounds == few.history[-1].round
