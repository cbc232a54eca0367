"""One round, door by door. Data moves forward through it; nothing reaches back.

`play` is the only round there is: trainings, rehearsals, pilots and repetitions differ in their session's clients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from dpfl.clients.uploads import Request, Separate, Uploads
from dpfl.errors import BadInput, BudgetRefused
from dpfl.orders import Order
from dpfl.privacy.mechanisms import add_noise
from dpfl.server.aggregation import aggregate
from dpfl.server.evaluation import Score
from dpfl.session import Session
from dpfl.systems import Feedback, S, questions_in


@dataclass(frozen=True)
class Outcome:
    """What one round did, for the log: public or already released."""

    orders: dict[int, Order]  # those that were paid for
    refused: tuple[int, ...]  # clients whose budget could not pay
    public: Score | None = None  # of the model that is sent out, where the system looks at it


def play(session: Session[S], state: S) -> tuple[S, Outcome]:
    """Play the next round of `state` and return where the training stands after it."""
    request = ask(session, state)
    uploads = session.clients.perform(request)  # batch → gradient → clip → noise, wherever the records are
    return combine(session, state, request, uploads)


def ask(session: Session[S], state: S) -> Request:
    """Decide who is asked for what, and let each budget pay for it first, or its client sits this round out."""
    orders = session.system.orders(state)
    charged = session.ledger.charge(orders)
    weights = session.system.weights(state, sorted(charged))
    refused = tuple(sorted(orders.keys() - charged.keys()))
    # Whoever performs can read what was paid for, and change nothing of it.
    paid, counted = MappingProxyType(charged), MappingProxyType(weights)
    return Request(session.run, state.round + 1, paid, refused, state.model, counted, session.separate)


def combine(session: Session[S], state: S, request: Request, uploads: Uploads) -> tuple[S, Outcome]:
    """Move the model by what was uploaded, and let the system decide what changes for the next round."""
    system, answered = session.system, sorted(uploads.clients)
    if not request.charged.keys() >= set(answered):
        strangers = sorted(set(answered) - request.charged.keys())
        raise BadInput(
            f"clients must upload what was charged and nothing else, but {strangers} uploaded in round {request.round};"
            " hand in clients that perform the request"
        )
    if session.on_uploads is not None and isinstance(uploads, Separate):
        session.on_uploads(request.round, {client: upload.clone() for client, upload in uploads.by_client.items()})
    total = aggregate(state.model, uploads, request.weights)
    downlink = system.downlink(state, answered)
    if downlink is not None:  # noise of the server's own, against readers of the model
        total = add_noise(total, downlink, session.streams.secret.generator("downlink", round=request.round))
    # From here on everything is made of what readers may know, so that it costs them and nobody else anything.
    counted = {client: request.weights[client] for client in answered}
    session.ledger.broadcast(counted, noise_std=downlink.std if downlink else 0.0)
    model, memory = system.optimiser.step(state.model, total, state.server, round=request.round, rounds=state.rounds)
    needs = system.needs
    score = session.public.score(model, request.round) if "public loss" in needs else None
    feedback = Feedback(
        answered=answered,
        total=total,
        public_loss=score.loss if score else None,
        uploads=uploads.by_client if isinstance(uploads, Separate) else {},
        answers=session.clients.answer(questions_in(needs), state.model, uploads, model),
    )
    spent = state.spent.union(request.refused).difference(request.charged)
    after = replace(state, model=model, round=request.round, server=memory, spent=spent)
    paid = {client: receipt.order for client, receipt in request.charged.items()}
    return system.adapt(after, feedback), Outcome(paid, request.refused, score)  # the next round may be different


def walk(session: Session[S], state: S) -> Iterator[tuple[S, Outcome]]:
    """Play round after round; one whose whole cohort cannot pay is passed over, and the model stays as it is.

    Raises BudgetRefused where nobody is left to go on with, but for systems that train until budgets are spent.
    """
    played = state.round > 0
    while state.round < state.rounds:
        try:
            state, outcome = play(session, state)
        except BudgetRefused:
            refused = session.system.orders(state).keys()
            if len(state.spent | refused) == len(session.problem.sizes):
                if session.system.until_spent and played:
                    return
                raise
            session.ledger.pass_over()
            state = replace(state, round=state.round + 1, spent=state.spent | refused)
            outcome = Outcome({}, tuple(sorted(refused)))
        played = played or bool(outcome.orders)
        yield state, outcome
