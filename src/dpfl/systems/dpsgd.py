"""DP-SGD clients, which three systems order: Poisson batches, each record clipped, noise on the sum of every step."""

from collections.abc import Sequence
from functools import lru_cache

from dpfl.errors import BadInput, require_positive
from dpfl.orders import Full, Gaussian, Order, Poisson, RecordClip
from dpfl.privacy.accounting import Mechanism, most_steps, tight
from dpfl.privacy.budget import Budget, Calibration
from dpfl.privacy.ledger import release_of
from dpfl.privacy.paper_formulas import ali_total_steps


def dpsgd_order(
    *,
    steps: int,
    lr: float,
    sampling_rate: float,
    clip: float,
    noise_multiplier: float,
    proximal: float = 0.0,
    divisor: float | None = None,
) -> Order:
    """Order DP-SGD: noise of `noise_multiplier`·C on the sum of the clipped gradients, in every step.

    divisor: of that sum; None for the expected batch size. The noise is on the sum, so it changes no price.
    """
    return Order(
        steps=steps, learning_rate=lr, batch=Full() if sampling_rate == 1 else Poisson(sampling_rate),
        clip=RecordClip(clip),
        noise=Gaussian(noise_multiplier * clip), noise_on="step", proximal=proximal, fixed_divisor=divisor,
    )  # fmt: skip


def require_divisor(divisor: float | None) -> None:
    """Refuse a divisor that is no positive number, under the name of the option that it was given for."""
    if divisor is not None:
        require_positive("divisor", divisor, "leave it out for the expected batch size")


def affordable_steps(order: Order, budgets: Sequence[Budget], calibration: Calibration) -> tuple[int, ...]:
    """Return for each budget how many steps of this kind fit: exactly, or by the paper's Rényi formula (R_c)."""
    # As the ledger will price it; the number of records does not matter where one is added or removed.
    mechanism = release_of(order, 1, unit="record", neighbours="add-remove").mechanism
    found = {budget: _affordable(mechanism, budget, calibration) for budget in set(budgets)}
    if not any(found.values()):
        raise BadInput(
            f"noise_multiplier must be large enough for one step within ε = {max(one.epsilon for one in budgets):g},"
            f" was {mechanism.multiplier:g}; raise it, or epsilon"
        )
    return tuple(found[budget] for budget in budgets)


@lru_cache(maxsize=256)
def _affordable(mechanism: Mechanism, budget: Budget, calibration: Calibration) -> int:
    if calibration == "tight":
        return most_steps(tight, mechanism, budget)
    return ali_total_steps(
        sampling_rate=mechanism.sampling_rate, noise_multiplier=mechanism.multiplier, epsilon=budget.epsilon,
        delta=budget.delta,
    )  # fmt: skip
