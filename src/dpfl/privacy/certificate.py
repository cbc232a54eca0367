"""The certificate: what was promised, what was really spent, against whom, and what is not promised at all."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from typing import Any

import numpy as np

from dpfl.privacy.ledger import Ledger

_PROTECTED = {
    ("record", "replace"): "one record of one client (replaced by any other)",
    ("record", "add-remove"): "one record of one client (added or removed)",
    ("client", "replace"): "all records of one client (replaced by any others)",
    ("client", "add-remove"): "all records of one client (added or removed)",
}


@dataclass(frozen=True)
class Observed:
    """The privacy spent against one observer, and whether its sensitivity is proved or only claimed."""

    epsilon: float | None  # None: no finite ε holds
    delta: float | None
    basis: str  # "proved", "claimed", or "none" where nothing is promised


@dataclass(frozen=True)
class Spending:
    """One client's line."""

    client: int
    replies: int
    claimed_epsilon: float
    delta: float
    server_epsilon: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A statement about one finished training; `certify` makes it and `text` prints it."""

    system: str
    clients: int
    rounds: int
    calibration: str | None
    unit: str | None
    neighbours: str | None
    claimed: dict[str, float] | None  # epsilon and delta: the largest ε any client was promised
    observers: dict[str, Observed]
    uncounted: tuple[str, ...]
    noise_source: str | None  # "operating system", or "seed": then it can be repeated and subtracted
    config: str | None  # hash of the run's config
    versions: dict[str, str]
    spending: tuple[Spending, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return text(self.to_dict())


def certify(
    ledger: Ledger, *, system: str, rounds: int, seeded: bool, config: str | None, versions: dict[str, str]
) -> Certificate:
    """Read the books and state what they show."""
    promise = ledger.promise
    common: dict[str, Any] = {
        "system": system, "clients": len(ledger.sizes), "rounds": rounds, "config": config, "versions": versions,
    }  # fmt: skip
    if promise is None:
        return Certificate(
            **common, calibration=None, unit=None, neighbours=None, claimed=None, uncounted=("every upload, as it is",),
            observers={"server": Observed(None, None, "none")}, noise_source=None, spending=(),
        )  # fmt: skip
    spent = ledger.epsilon()
    worst, most = int(np.argmax(spent)), max(promise.budgets, key=lambda budget: budget.epsilon)
    return Certificate(
        **common,
        calibration=promise.calibration,
        unit=promise.unit,
        neighbours=promise.neighbours,
        claimed={"epsilon": most.epsilon, "delta": most.delta},
        # The server sees each upload and who sent it, and drew the cohort itself: nothing is amplified against it.
        observers={"server": Observed(float(spent[worst]), promise.budgets[worst].delta, "proved")},
        uncounted=promise.uncounted,
        noise_source="seed" if seeded else "operating system",
        spending=tuple(
            Spending(client, int(replies), budget.epsilon, budget.delta, float(epsilon))
            for client, (replies, budget, epsilon) in enumerate(
                zip(ledger.replies, promise.budgets, spent, strict=True)
            )
        ),
    )


def text(certificate: dict[str, Any]) -> str:
    """Print a certificate (its plain data) on one screen, in words."""
    calibration = f"{certificate['calibration']} calibration, " if certificate["calibration"] else ""
    title = f"{certificate['system']}, {calibration}{certificate['clients']} clients, {certificate['rounds']} rounds"
    lines = [_line("Privacy certificate", title)]
    if certificate["config"]:
        lines.append(_line("config", certificate["config"]))
    if certificate["claimed"] is None:
        return "\n".join([
            *lines,
            _line("protects", "nothing: uploads carry no noise, and no finite ε holds against the server"),
            _line("left uncounted", "; ".join(certificate["uncounted"])),
        ])  # fmt: skip
    spending = certificate["spending"]
    lines += [
        _line("protects", _PROTECTED[certificate["unit"], certificate["neighbours"]]),
        _line("against the server", "which sees every upload and knows who sent it"),
        _line(
            "  promised",
            f"ε = {_range(spending, 'claimed_epsilon', '{:g}'.format)}, δ = {_range(spending, 'delta', '{:g}'.format)}",
        ),
        _line("  really spent", f"ε ≤ {_range(spending, 'server_epsilon', _up)}, at that δ   {_verdict(spending)}"),
        _line("  follows from", "the clipping that the clients performed, by exact Gaussian-DP accounting"),
        _line("left uncounted", "; ".join(certificate["uncounted"]) or "nothing"),
        _line("not promised", "anything about who took part, or how many records a client holds;"),
        _line("", "anything about people whose records sit at several clients"),
    ]
    if certificate["noise_source"] == "seed":
        lines.append(_line("a simulation", "the noise came from a seed: whoever knows the seed can subtract it"))
    return "\n".join(lines)


def _verdict(spending: Sequence[dict[str, Any]]) -> str:
    over = [line for line in spending if line["server_epsilon"] > line["claimed_epsilon"]]
    if not over:
        return "within the promise"
    worst = max(over, key=lambda line: line["server_epsilon"] / line["claimed_epsilon"])
    percent = 100 * (worst["server_epsilon"] / worst["claimed_epsilon"] - 1)
    shown = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    return f"{shown} % MORE than promised, for {len(over)} of {len(spending)} clients"


def _range(spending: Sequence[dict[str, Any]], key: str, show: Callable[[float], str]) -> str:
    """Print one number where all clients agree, and from the least to the most where each has its own."""
    low, high = (show(pick(line[key] for line in spending)) for pick in (min, max))
    return high if low == high else f"{low} to {high}"


def _up(epsilon: float) -> str:
    """Print an upper bound so that the printed number still is one.

    >>> _up(7.9999999), _up(0.64600309), _up(30.31744)
    ('8', '0.6461', '30.32')
    """
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(epsilon))):g}"


def _line(label: str, content: str) -> str:
    return f"{label:<20} {content}".rstrip()
