"""One round, door by door. Data moves forward through it; nothing reaches back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from dpfl.federation import Records
from dpfl.models import Model
from dpfl.orders import Order, Question
from dpfl.privacy.budget import unpaid
from dpfl.privacy.ledger import Charged, Ledger
from dpfl.privacy.mechanisms import add_noise
from dpfl.server.aggregation import aggregate
from dpfl.server.evaluation import Score, evaluate
from dpfl.streams import Streams
from dpfl.systems import Feedback, S, System


class Clients(Protocol):
    """Whoever performs paid orders: the plain loop, a whole cohort at once, or real machines."""

    def perform(
        self, charged: Mapping[int, Charged], broadcast: Tensor, round: int, *, apart: bool
    ) -> Mapping[int, Tensor]:
        """Return each client's upload [d]; where not apart, their weighted sum may be all there is."""

    def answer(
        self, questions: Sequence[Question], before: Tensor, uploads: Mapping[int, Tensor], after: Tensor
    ) -> dict[Question, dict[int, float]]:
        """Return what clients tell about the models before and after a round, without noise."""


OnUploads = Callable[[int, Mapping[int, Tensor]], None]  # called with a round's number and its uploads


@dataclass(frozen=True)
class Outcome:
    """What one round did, for the log: public or already released."""

    orders: dict[int, Order]  # those that were paid for
    refused: tuple[int, ...]  # clients whose budget could not pay
    validation: Score | None  # None where there is no public data


def play(
    system: System[S],
    state: S,
    *,
    ledger: Ledger,
    clients: Clients,
    model: Model,
    validation: Records,
    streams: Streams,
    on_uploads: OnUploads | None = None,
) -> tuple[S, Outcome]:
    """Play the next round of `state` and return where the training stands after it."""
    asked = unpaid(ledger.promise, system.questions)  # of paper calibrations alone, and named in the certificate
    apart = system.reads_uploads or "curvature" in asked or on_uploads is not None
    orders = system.orders(state)  # who takes part, and what they are asked to do
    charged = ledger.charge(orders)  # each budget pays first, or its client sits this round out
    uploads = clients.perform(charged, state.model, state.round + 1, apart=apart)  # batch → gradient → clip → noise
    if on_uploads is not None:  # an audit or a log that looks at every client
        on_uploads(state.round + 1, uploads)
    weights = system.weights(state, sorted(uploads))
    moved = aggregate(state.model, uploads, weights)  # the weighted sum moves the model
    downlink = system.downlink(state, sorted(uploads))
    if downlink is not None:  # noise of the server's own, against readers of the model
        moved = add_noise(moved, downlink, streams.generator("downlink", round=state.round + 1))
    ledger.broadcast(weights, noise_std=downlink.std if downlink else 0.0)  # what readers will see of each upload
    score = evaluate(model, moved, validation)  # on public data only
    answers = clients.answer(asked, state.model, uploads, moved)
    after = replace(state, model=moved, round=state.round + 1)
    after = system.adapt(after, Feedback(score.loss if score else None, uploads, answers))  # the next may be different
    paid = {client: receipt.order for client, receipt in charged.items()}
    return after, Outcome(paid, tuple(sorted(orders.keys() - charged.keys())), score)


def sit_out(system: System[S], state: S, *, ledger: Ledger, model: Model, validation: Records) -> tuple[S, Outcome]:
    """Pass over a round whose whole cohort could not pay: the model stays as it is."""
    ledger.pass_over()
    refused = tuple(sorted(system.orders(state)))
    return replace(state, round=state.round + 1), Outcome({}, refused, evaluate(model, state.model, validation))


def look(questions: Sequence[Question], *, clients: Clients, model: Model, validation: Records) -> Feedback:
    """Return what the server knows before the first round; the questions must be such as `unpaid` lets pass."""
    start = model.weights()
    score = evaluate(model, start, validation)
    return Feedback(score.loss if score else None, {}, clients.answer(questions, start, {}, start))
