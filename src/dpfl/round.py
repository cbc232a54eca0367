"""One round, door by door. Data moves forward through it; nothing reaches back."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from dpfl.federation import Records
from dpfl.models import Model
from dpfl.orders import Order
from dpfl.privacy.ledger import Charged, Ledger
from dpfl.server.aggregation import aggregate
from dpfl.server.evaluation import Score, evaluate
from dpfl.systems import Feedback, S, System


class Clients(Protocol):
    """Whoever performs paid orders: the plain loop, a whole cohort at once, or real machines."""

    def perform(self, charged: Mapping[int, Charged], broadcast: Tensor, round: int) -> dict[int, Tensor]:
        """Return each client's upload [d]."""


@dataclass(frozen=True)
class Outcome:
    """What one round did, for the log: public or already released."""

    orders: dict[int, Order]  # those that were paid for
    refused: tuple[int, ...]  # clients whose budget could not pay
    validation: Score


def play(
    system: System[S], state: S, *, ledger: Ledger, clients: Clients, model: Model, validation: Records
) -> tuple[S, Outcome]:
    """Play the next round of `state` and return where the training stands after it."""
    orders = system.orders(state)  # who takes part, and what they are asked to do
    charged = ledger.charge(orders)  # each budget pays first, or its client sits this round out
    uploads = clients.perform(charged, state.model, state.round + 1)  # batch → gradient → clip → noise → upload
    weights = system.weights(state, sorted(uploads))
    moved = aggregate(state.model, uploads, weights)  # the weighted sum moves the model
    ledger.broadcast(weights)  # what readers of the model will see of each upload
    score = evaluate(model, moved, validation)  # on public data only
    after = replace(state, model=moved, round=state.round + 1)
    after = system.adapt(after, Feedback(score.loss))  # the next round may be ordered differently
    paid = {client: receipt.order for client, receipt in charged.items()}
    return after, Outcome(paid, tuple(sorted(orders.keys() - charged.keys())), score)
