"""What was promised: a budget for each client, and to whom and about what it is a promise."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dpfl.errors import BadInput, require_count, require_positive
from dpfl.orders import UNPAID, Neighbours, Question, Unit

Calibration = Literal["tight", "paper"]

# The server sees every upload and who sent it. The uplink shows an eavesdropper a few uploads of a client, and all that
# readers see. Released are the broadcast models, to readers who collude with no client. Each sees more than the next.
Observer = Literal["server", "uplink", "released"]


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
        if not (isinstance(self.delta, (int, float)) and 0 <= self.delta < 1):
            raise BadInput(
                f"delta must be at least 0 (pure privacy, for Laplace noise) and below 1, was {self.delta!r};"
                " choose well below one in the number of records of a client, such as 1e-5"
            )


PerClient = float | Sequence[float]  # one number for all clients, or one for each


def require_budgets(epsilon: PerClient, delta: PerClient, *, pure: bool) -> None:
    """Check every number of a budget before it is known how many clients there are; `pure` lets δ be 0."""
    for one in _each(epsilon):
        Budget(one, 0.5)
    for one in _each(delta):
        Budget(1.0, one)
        if one == 0 and not pure:
            raise BadInput("delta must be above 0 with Gaussian noise, was 0; choose 1e-5, say")


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
    noise: Literal["fixed", "adaptive"] = "fixed"  # in advance, or chosen along the way (a dearer filter if sampled)
    against: tuple[Observer, ...] = ("server",)  # to whom it is a promise; the certificate covers the others too
    exposures: int | None = None  # uploads of a client that an eavesdropper sees at most; None: nobody listens
    claimed_sensitivity: float | tuple[float, ...] = 1.0  # the paper's, as a share of the proved one; or one a client
    uncounted: tuple[str, ...] = ()  # private values that leave a client without noise, by name
    cautions: tuple[str, ...] = ()  # where the paper's claim is known not to hold

    def __post_init__(self) -> None:
        if self.uncounted and self.calibration == "tight":
            raise BadInput(
                f"uncounted must be empty in tight calibration, which leaves nothing out, was {self.uncounted!r}; use"
                " public data or what was already noised, or pay for it"
            )
        for share in _each(self.claimed_sensitivity):
            require_positive("claimed_sensitivity", share, "use 1 where the paper's is the proved one")
        if isinstance(self.claimed_sensitivity, tuple) and len(self.claimed_sensitivity) != len(self.budgets):
            raise BadInput(
                f"claimed_sensitivity must be one number or one for each of the {len(self.budgets)} clients, was"
                f" {len(self.claimed_sensitivity)} numbers; give {len(self.budgets)} or a single one"
            )
        if self.exposures is not None:
            require_count("exposures", self.exposures, "leave it out where nobody listens")
        if "uplink" in self.against and self.exposures is None:
            raise BadInput("exposures must be given where the promise is against the uplink, was None; give a number")
        if not {"server", "uplink"} & set(self.against):
            raise BadInput(
                f"against must name the server or the uplink, whose view a client's own ledger can limit, was"
                f" {self.against!r}; add one"
            )

    @property
    def claimed_shares(self) -> tuple[float, ...] | None:
        """Return what the paper takes for each client's sensitivity, as a share; None where it is the proved one."""
        claimed = self.claimed_sensitivity
        shares = claimed if isinstance(claimed, tuple) else (claimed,) * len(self.budgets)
        return None if all(share == 1 for share in shares) else shares

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {"budgets": [[budget.epsilon, budget.delta] for budget in self.budgets]}

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> "Promise":
        """Read what `to_plain` wrote."""
        listed = [field for field, value in plain.items() if isinstance(value, (list, tuple)) and field != "budgets"]
        return Promise(
            **plain
            | {
                "budgets": tuple(Budget(*pair) for pair in plain["budgets"]),
            }
            | {field: tuple(plain[field]) for field in listed}
        )


def unpaid(promise: Promise | None, questions: Sequence[Question]) -> Sequence[Question]:
    """Let questions pass that the promise names as uncounted, and no others."""
    for question in questions:
        if promise is None or UNPAID[question] not in promise.uncounted:
            raise BadInput(
                f"a system must name what it asks clients for without noise, but did not name {UNPAID[question]!r};"
                " add it to the uncounted releases of its promise"
            )
    return questions


def called(client: int, names: Sequence[str]) -> str:
    """Return what a client is called in a sentence."""
    return names[client] if names else f"client {client}"


def cautions(promise: Promise, sizes: Sequence[int], names: Sequence[str] = ()) -> tuple[str, ...]:
    """Say where a promise holds and yet means little, beginning with what the system itself has to say."""
    loose = [i for i, (budget, n) in enumerate(zip(promise.budgets, sizes, strict=True)) if budget.delta >= 1 / n]
    if not loose:
        return promise.cautions
    first = loose[0]
    others = "" if len(loose) == 1 else f" and {len(loose) - 1} other{'s' if len(loose) > 2 else ''}"
    return (
        *promise.cautions,
        f"delta should be well below one in a client's number of records, was {promise.budgets[first].delta:g} for"
        f" {sizes[first]} records of {called(first, names)}{others}: publishing a record at random would keep such a"
        " promise",
    )
