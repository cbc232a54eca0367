"""What was promised: a budget for each client, and to whom and about what it is a promise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dpfl.errors import BadInput, require_positive
from dpfl.orders import Neighbours, Unit

Calibration = Literal["tight", "paper"]


@dataclass(frozen=True)
class Budget:
    """The (ε, δ) that a client grants for the whole training.

    >>> Budget(epsilon=0, delta=1e-5)
    Traceback (most recent call last):
    ...
    dpfl.errors.BadInput: epsilon must be a finite number above 0, was 0; grant some, such as 8, or run fedavg
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        require_positive("epsilon", self.epsilon, "grant some, such as 8, or run fedavg")
        if not 0 < self.delta < 1:
            raise BadInput(
                f"delta must lie strictly between 0 and 1, was {self.delta!r};"
                " choose well below one in the number of records of a client, such as 1e-5"
            )


PerClient = float | Sequence[float]  # one number for all clients, or one for each


def require_budgets(epsilon: PerClient, delta: PerClient) -> None:
    """Check every number of a budget before it is known how many clients there are."""
    for one in _each(epsilon):
        Budget(one, 0.5)
    for one in _each(delta):
        Budget(1.0, one)


def budgets(epsilon: PerClient, delta: PerClient, clients: int) -> tuple[Budget, ...]:
    """Give every client its budget."""
    columns = []
    for field, value in (("epsilon", epsilon), ("delta", delta)):
        column = _each(value) * (clients if isinstance(value, (int, float)) else 1)
        if len(column) != clients:
            raise BadInput(
                f"{field} must be one number or one for each of the {clients} clients, was {len(column)} numbers;"
                f" give {clients} or a single one"
            )
        columns.append(column)
    return tuple(Budget(*pair) for pair in zip(*columns, strict=True))


def _each(value: PerClient) -> tuple[float, ...]:
    return (float(value),) if isinstance(value, (int, float)) else tuple(map(float, value))


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a system promises its clients before training, in the terms that make (ε, δ) a statement."""

    budgets: tuple[Budget, ...]  # one a client
    unit: Unit
    neighbours: Neighbours
    calibration: Calibration
    uncounted: tuple[str, ...] = ()  # private values that leave a client without noise, by name
