"""A session: everything that one training is played with, opened once and never changed.

The same session with other clients is everything else: clients that compute nothing (a rehearsal), that hold public
records (a pilot), that train many times at once (repetitions), or that are machines elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic

from torch import Tensor

from dpfl.clients.uploads import Clients, Separate
from dpfl.errors import BadInput
from dpfl.federation import Schedule
from dpfl.models import Model
from dpfl.orders import CURVATURES, UNPAID, Need
from dpfl.privacy.budget import unpaid
from dpfl.privacy.ledger import Ledger
from dpfl.server.evaluation import Public
from dpfl.streams import Streams
from dpfl.systems import Feedback, Problem, S, System, questions_in

OnUploads = Callable[[int, "dict[int, Tensor]"], None]  # called with a round's number and its uploads

_NEEDS: dict[Need, str] = {
    "uploads": "each client's upload by itself",
    "counts": "how many records were not clipped",
    "model": "how the model moves",
    "public loss": "the loss on public data",
    "loss": "the loss on clients' data",
    "curvature": "the curvature on clients' data",
    "curvature from the sum": "the curvature on clients' data after the round",
    "length": "how long is what clients clip",
}


@dataclass(frozen=True)
class Session(Generic[S]):
    """One training, before its first round and ever after."""

    system: System[S]  # what to order
    problem: Problem  # public facts
    model: Model  # parameters ↔ vector
    clients: Clients  # who performs paid orders
    ledger: Ledger  # what was promised and spent
    streams: Streams  # public root, secret keys
    public: Public  # what models are judged by between rounds, if anything
    on_uploads: OnUploads | None = None  # an audit or a log that looks at every client
    simulated: str = "simulation"  # what names the noise under a seed; sessions that share both share all draws

    def __post_init__(self) -> None:
        system = self.system
        promise = self.ledger.promise or system.promise(self.problem.sizes)  # of public records nothing is promised
        unpaid(promise, questions_in(self.needs))
        wanted = {*self.needs, *(() if self.on_uploads is None else ("uploads",))}
        for need, words in _NEEDS.items():
            if need in wanted and need not in self.clients.serves:
                raise BadInput(
                    f"clients must be able to give {words}, which"
                    f" {system.name if need in self.needs else 'on_uploads'} needs, but these cannot"
                    f" ({self.clients.engine.name}); choose other clients or another system"
                )
        if system.averaged and (system.until_spent or self.needs):
            raise BadInput(
                f"averaged must be 0 for {system.name} here, whose last round is not known in advance, was"
                f" {system.averaged:g}; leave it out"
            )

    @cached_property
    def needs(self) -> frozenset[Need]:
        """Return what the system looks at, asked once: what was checked is what is served."""
        return self.system.needs

    @property
    def separate(self) -> bool:
        """Tell whether somebody looks at uploads one by one: the system, a question or a log."""
        return bool({"uploads", *CURVATURES} & self.needs) or self.on_uploads is not None

    @property
    def run(self) -> str:
        """Return what names the run's noise: its name in the ledger, but for simulations, which are to be repeated."""
        return self.simulated if self.streams.seeded else self.ledger.run.name

    def begin(self, model: Tensor | None = None) -> S:
        """Return where the training stands before its first round.

        model: what it starts from; the model's own parameters if left out.
        """
        start = self.model.vector() if model is None else model
        needs = self.needs
        score = self.public.score(start, 0) if "public loss" in needs else None
        answers = self.clients.answer(questions_in(needs), start, Separate({}), start)
        feedback = Feedback(public_loss=score.loss if score else None, answers=answers)
        return self.system.begin(self.problem, start, feedback)


def follows_training(system: System[Any]) -> bool:
    """Tell whether what clients are ordered may depend on what they released before."""
    return bool(system.needs)


def follows_uploads(system: System[Any]) -> bool:
    """Tell whether what is sent out may depend on uploads in other ways than through their noised sum."""
    return bool({"uploads", "counts", *UNPAID} & system.needs)


def problem_of(system: System[S], sizes: Sequence[int], dim: int, streams: Streams) -> Problem:
    """Return the public facts of a training."""
    return Problem(tuple(sizes), dim, Schedule(system.cohorts(len(sizes)), streams.public))
