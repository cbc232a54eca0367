"""NbAFL in paper calibration on MNIST: better with ε and with N, in a setting that separates them.

The paper prints neither L, m, C nor the local optimiser. With m = 128 records a client, all L = R = 25 uploads exposed,
C = 10 and five local steps at rate 0.5 its ε = 50 and 100 differ; with a thousand records a client nothing does. What
the claims need is noise that matters: σ_U = cL·2C/(mε) is 0.24 at ε = 50, beside parameters of about 0.03.
"""

import pytest

from claims.trainings import Outcomes, Training, clearly_less, outcomes


def nbafl(epsilon: float, clients: int) -> Training:
    options = {
        "calibration": "paper", "epsilon": epsilon, "delta": 0.01, "clip": 10.0, "lr": 0.5, "local_steps": 5,
        "rounds": 25, "exposures": 25, "proximal": 0.1,
    }  # fmt: skip
    # Two seeds cannot tell what differs by a tenth from one to the other.
    return Training("nbafl", options, "mnist", {"clients": clients, "sizes": 128}, "mlp", seeds=(1, 2, 3, 4, 5))


@pytest.fixture(scope="module")
def trained() -> list[Outcomes]:
    return outcomes([nbafl(50.0, 50), nbafl(100.0, 50), nbafl(50.0, 100)])


def test_a_larger_budget_gives_a_better_model(trained: list[Outcomes]) -> None:
    strict, loose, _ = trained
    assert clearly_less(loose.loss, strict.loss)
    assert clearly_less(strict.accuracy, loose.accuracy)


def test_more_clients_give_a_better_model(trained: list[Outcomes]) -> None:
    few, _, many = trained
    assert clearly_less(many.loss, few.loss)
    assert clearly_less(few.accuracy, many.accuracy)
