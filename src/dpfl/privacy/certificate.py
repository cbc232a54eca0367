"""The certificate: what was promised, what was really spent, against whom, and what is not promised at all.

It is computed from the books alone, at the end of a run and whenever somebody asks again.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

from dpfl import run_folder
from dpfl.errors import BadInput
from dpfl.privacy.accounting import Mechanism, tight_each
from dpfl.privacy.books import BookedRun, Books
from dpfl.privacy.budget import Observer, Promise, cautions

_PROTECTED = {
    ("record", "replace"): "one record of one client (replaced by any other)",
    ("record", "add-remove"): "one record of one client (added or removed)",
    ("client", "replace"): "all records of one client (replaced by any others)",
    ("client", "add-remove"): "all records of one client (added or removed)",
}

_WIDTH = 120
_BASES = {"server": "the clipping performed", "uplink": "the same, overheard", "released": "the same, no collusion"}


@dataclass(frozen=True)
class Observed:
    """The privacy spent against one observer, for the client that spent most, and what the number rests on."""

    epsilon: float | None  # None: no finite ε holds
    delta: float | None
    basis: str  # "proved" by the clipping performed, or "none" where nothing is promised
    claimed_epsilon: float | None = None  # with the paper's own sensitivity, where it differs from the proved one
    claimed_basis: str | None = None  # then "claimed"
    slack: float | None = None  # promised minus spent, for the client that has least of it; None: not promised to it


@dataclass(frozen=True)
class Spending:
    """One client's line."""

    client: int
    replies: int
    claimed_epsilon: float
    delta: float
    server_epsilon: float | None  # None: no finite ε holds, here and below
    released_epsilon: float | None
    uplink_epsilon: float | None = None  # only where somebody may listen


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A statement about one training; `certify` makes it and `text` prints it."""

    system: str
    clients: int
    rounds: int
    calibration: str | None
    unit: str | None
    neighbours: str | None
    claimed: dict[str, float] | None  # epsilon and delta: the largest ε any client was promised
    against: tuple[Observer, ...]  # to whom that is promised
    exposures: int | None  # uploads of a client that the uplink shows
    observers: dict[str, Observed]
    uncounted: tuple[str, ...]
    cautions: tuple[str, ...]
    noise_source: str | None  # "operating system", or "seed": then it can be repeated and subtracted
    config: str | None  # hash of the run's config
    versions: dict[str, str]
    spending: tuple[Spending, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as plain data for JSON."""
        return {"version": run_folder.CERTIFICATE_VERSION} | asdict(self)

    def __str__(self) -> str:
        return text(self.to_dict())


def certify(books: Books, run: BookedRun) -> Certificate:
    """Read the books of a run and state what they show."""
    facts = run.facts
    common: dict[str, Any] = {
        "system": facts["system"], "clients": len(facts["sizes"]), "rounds": books.rounds(run),
        "config": facts["config"], "versions": facts["versions"],
    }  # fmt: skip
    if facts["promise"] is None:
        return Certificate(
            **common, calibration=None, unit=None, neighbours=None, claimed=None, against=(), exposures=None,
            uncounted=("every upload, as it is",), cautions=(), observers={"server": Observed(None, None, "none")},
            noise_source=None, spending=(),
        )  # fmt: skip
    promise = Promise.from_plain(facts["promise"])
    views = _views(books, run, promise)
    spent = {observer: _priced(observer, view, promise) for observer, view in views.items()}
    spent["released"] = [min(pair) for pair in zip(spent["released"], spent["server"], strict=True)]
    replies = books.replies(run)
    most = max(promise.budgets, key=lambda budget: budget.epsilon)
    return Certificate(
        **common,
        calibration=promise.calibration,
        unit=promise.unit,
        neighbours=promise.neighbours,
        claimed={"epsilon": most.epsilon, "delta": most.delta},
        against=promise.against,
        exposures=promise.exposures,
        observers={observer: _observed(observer, views[observer], spent[observer], promise) for observer in views},
        uncounted=promise.uncounted,
        cautions=cautions(promise, facts["sizes"]),
        noise_source="seed" if facts["seeded"] else "operating system",
        spending=tuple(
            Spending(
                client, replies.get(client, 0), budget.epsilon, budget.delta,
                **{f"{observer}_epsilon": finite(epsilons[client]) for observer, epsilons in spent.items()},
            )
            for client, budget in enumerate(promise.budgets)
        ),
    )  # fmt: skip


View = Sequence[Mapping[Mechanism, int]]  # what one observer saw of each client


def _views(books: Books, run: BookedRun, promise: Promise) -> dict[Observer, View]:
    """Return who saw what. The server drew the cohorts itself, and readers may know them: nothing is amplified."""

    def complete(seen: Mapping[int, Counter[Mechanism]]) -> View:
        return [seen.get(client, Counter()) for client in range(len(promise.budgets))]

    uploads = books.spent(run)
    views: dict[Observer, View] = {"server": complete(uploads)}
    if promise.exposures is not None:
        views["uplink"] = complete(books.spent(run, exposures=promise.exposures))
    # Where models tell less than uploads only by an argument that does not hold here, they tell no more.
    released = books.released(run)
    views["released"] = complete(uploads if released is None else released)
    return views


def _priced(observer: Observer, view: View, promise: Promise) -> list[float]:
    """Return each client's ε. Noise that was chosen along the way is covered by its filter: the whole budget."""
    held = "server" in promise.against or (observer == "uplink" and "uplink" in promise.against)
    if promise.noise == "adaptive" and promise.calibration == "tight" and held:
        return [budget.epsilon if seen else 0.0 for budget, seen in zip(promise.budgets, view, strict=True)]
    return tight_each(view, [budget.delta for budget in promise.budgets])


def _observed(observer: Observer, view: View, spent: Sequence[float], promise: Promise) -> Observed:
    worst = max(range(len(spent)), key=lambda client: spent[client])
    shown = Observed(finite(spent[worst]), promise.budgets[worst].delta, "proved")
    if observer in promise.against:
        slack = min(budget.epsilon - epsilon for budget, epsilon in zip(promise.budgets, spent, strict=True))
        shown = replace(shown, slack=finite(slack))
    if promise.claimed_sensitivity == 1:
        return shown
    share = promise.claimed_sensitivity
    believed = [Counter({replace(m, multiplier=m.multiplier / share): n for m, n in seen.items()}) for seen in view]
    return replace(shown, claimed_epsilon=finite(max(_priced(observer, believed, promise))), claimed_basis="claimed")


def finite(number: float) -> float | None:
    """Return the number for JSON, which knows no infinity."""
    return number if math.isfinite(number) else None


def recertify(folder: Path) -> tuple[Certificate, bool]:
    """Compute the certificate of a run folder anew from its ledger; say too whether the run wrote one to compare with.

    Raises BadInput where the two do not agree.
    """
    path, name = run_folder.ledger_of(folder)
    with closing(Books(path, create=False)) as books:
        certificate = certify(books, books.run(name))
    if not (folder / run_folder.CERTIFICATE).exists():
        return certificate, False
    stored = {"version": 1} | run_folder.read_json(folder, run_folder.CERTIFICATE)  # release 0.1 named no version
    different = disagreements(stored, certificate.to_dict())
    if different:
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise BadInput(
            f"{run_folder.CERTIFICATE} must agree with the ledger, but {different[0]}{more}; believe the ledger"
        )
    return certificate, True


def disagreements(stored: Any, recomputed: Any, place: str = "") -> list[str]:
    """Say where a stored certificate and one computed anew differ by more than rounding."""
    if isinstance(stored, dict) and isinstance(recomputed, dict):
        keys = [*stored, *(key for key in recomputed if key not in stored)]
        parts = ((stored.get(key), recomputed.get(key), f"{place}.{key}".lstrip(".")) for key in keys)
        return [line for part in parts for line in disagreements(*part)]
    if isinstance(stored, (list, tuple)) and isinstance(recomputed, (list, tuple)) and len(stored) == len(recomputed):
        pairs = enumerate(zip(stored, recomputed, strict=True))
        return [line for index, pair in pairs for line in disagreements(*pair, f"{place}[{index}]")]
    if stored == recomputed:
        return []
    if isinstance(stored, float) and isinstance(recomputed, float):
        close = 1e-6 if place.endswith("slack") else 0.0  # a difference, which rounding can change by all of itself
        if math.isclose(stored, recomputed, rel_tol=1e-6, abs_tol=close):
            return []
    return [f"{place} is {stored!r} in the certificate and {recomputed!r} by the ledger"]


def text(certificate: dict[str, Any]) -> str:
    """Print a certificate (its plain data) on one screen, in words."""
    calibration = f"{certificate['calibration']} calibration, " if certificate["calibration"] else ""
    title = f"{certificate['system']}, {calibration}{certificate['clients']} clients, {certificate['rounds']} rounds"
    config = f"config {certificate['config']}" if certificate["config"] else ""
    lines = [_line("Privacy certificate", f"{title:<70} {config}")]
    if certificate["claimed"] is None:
        return "\n".join([
            *lines,
            _line("protects", "nothing: uploads carry no noise, and no finite ε holds against the server"),
            _line("left uncounted", "; ".join(certificate["uncounted"])),
        ])  # fmt: skip
    lines += [
        _line("protects", _PROTECTED[certificate["unit"], certificate["neighbours"]]),
        *_table(certificate),
        _line("left uncounted", "; ".join(certificate["uncounted"]) or "nothing"),
        _line("not promised", "anything about who took part, how many records a client holds, or people whose records"),
        _line("", "sit at several clients; anything against whoever reads a client's own machine"),
    ]
    if certificate["noise_source"] == "seed":
        lines.append(_line("a simulation", "the noise came from a seed: whoever knows the seed can subtract it"))
    return "\n".join(lines + [_line("caution", caution) for caution in certificate["cautions"]])


def _table(certificate: dict[str, Any]) -> list[str]:
    """Print a row for each observer; one that would be too long goes on in the next line."""
    spending, observers = certificate["spending"], certificate["observers"]
    budget = [f"ε = {_range(spending, 'claimed_epsilon', '{:g}'.format)},",
              f"δ = {_range(spending, 'delta', '{:g}'.format)}"]  # fmt: skip
    names = {"server": "the server", "uplink": f"{certificate['exposures']} uploads", "released": "released models"}
    rows = [("against", ["promised"], ["really spent"], "from")]
    for observer, seen in observers.items():
        spent = [f"ε ≤ {_range(spending, f'{observer}_epsilon', rounded_up)}"]
        is_promised = observer in certificate["against"]
        alike = observer != "server" and seen["epsilon"] == observers["server"]["epsilon"]
        basis = "no more than the server sees" if alike else _BASES[observer]
        verdict = [f"  {_verdict(spending, observer)}"] if is_promised else []
        rows.append((f"  {names[observer]}", budget if is_promised else ["–"], spent + verdict, basis))
        if seen["claimed_basis"] is not None:
            believed = f"ε ≤ {rounded_up(seen['claimed_epsilon'])}"
            rows.append(("", [""], [believed], "the paper's sensitivity, claimed"))
    short = [(name, [" ".join(promised)], [" ".join(spent)], basis) for name, promised, spent, basis in rows]
    lines = _aligned(short)
    return lines if max(map(len, lines)) <= _WIDTH else _aligned(rows)


def _aligned(rows: Sequence[tuple[str, list[str], list[str], str]]) -> list[str]:
    """Print rows in columns, what follows in a cell below its first line and as long as it likes."""
    second, third = (max(len(row[column][0]) for row in rows) + 3 for column in (1, 2))
    lines = []
    for name, promised, spent, basis in rows:
        lines.append(_line(name, f"{promised[0]:<{second}}{spent[0]:<{third}}{basis}"))
        if len(promised) > 1 or len(spent) > 1:
            lines.append(_line("", f"{' '.join(promised[1:]):<{second}}{' '.join(spent[1:])}"))
    return lines


def _verdict(spending: Sequence[dict[str, Any]], observer: str) -> str:
    """Say whether every client got what it was promised, and otherwise by how much the worst did not."""
    key = f"{observer}_epsilon"
    ratios = [math.inf if line[key] is None else line[key] / line["claimed_epsilon"] for line in spending]
    over = [ratio for ratio in ratios if ratio > 1 + 1e-9]
    if not over:
        return "within the promise"
    if math.isinf(max(over)):
        return "MORE than any promise"
    percent = 100 * (max(over) - 1)
    shown = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    whom = "" if len(over) == len(spending) else f", for {len(over)} of {len(spending)} clients"
    return f"{shown} % MORE than promised{whom}"


def _range(spending: Sequence[dict[str, Any]], key: str, show: Callable[[float | None], str]) -> str:
    """Print one number where all clients agree, and from the least to the most where each has its own."""
    low, high = (show(pick((line[key] for line in spending), key=_or_infinite)) for pick in (min, max))
    return high if low == high else f"{low} to {high}"


def _or_infinite(number: float | None) -> float:
    return math.inf if number is None else number


def rounded_up(epsilon: float | None) -> str:
    """Print an upper bound so that the printed number still is one, sums of decimal fractions forgiven.

    >>> rounded_up(7.9999999), rounded_up(0.64600309), rounded_up(30.31744), rounded_up(None)
    ('8', '0.6461', '30.32', '∞')
    """
    if epsilon is None:
        return "∞"
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(epsilon * (1 - 1e-9)))):g}"


def _line(label: str, content: str) -> str:
    """Print a label and its content, folded under it where it is long."""
    wrapped: Iterable[str] = textwrap.wrap(content, 98) if len(content) > 98 and "   " not in content else [content]
    return "\n".join(f"{label if i == 0 else '':<20} {part}".rstrip() for i, part in enumerate(wrapped or [""]))
