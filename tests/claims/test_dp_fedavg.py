"""DP-FedAvg on the Lending Club loans: the smaller ε, the more local steps are right.

As in the paper: linear regression with 11 parameters, Laplace noise, C = 150, 120 steps in all, a tenth of the clients
a round. With 1,000 clients instead of 5,000, and so √5 times the noise, its ε = 1 is our 2.2.
"""

from claims.trainings import Training, clearly_less, outcomes


def dp_fedavg(epsilon: float, local_steps: int) -> Training:
    options = {
        "calibration": "paper", "mechanism": "laplace", "epsilon": epsilon, "clip": 150.0, "lr": 0.1,
        "rounds": 120 // local_steps, "local_steps": local_steps, "cohort": 100,
    }  # fmt: skip
    return Training("dp-fedavg", options, "lending-club", {"clients": 1000, "partition": "sorted"})


def test_the_smaller_the_budget_the_more_local_steps_are_right() -> None:
    strict_one, strict_many, loose_one, loose_many = outcomes(
        [dp_fedavg(2.0, 1), dp_fedavg(2.0, 12), dp_fedavg(300.0, 1), dp_fedavg(300.0, 12)]
    )
    assert clearly_less(strict_many.loss, strict_one.loss)
    assert clearly_less(loose_one.loss, loose_many.loss)
