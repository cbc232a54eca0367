"""One round, door by door. Data moves forward through it; nothing reaches back.

`play` is the only round there is: trainings, rehearsals, pilots and repetitions differ in their session's clients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor

from dpfl.clients.beside import weighed
from dpfl.clients.uploads import Request, Separate, Summed, Uploads
from dpfl.errors import BadInput, BudgetRefused
from dpfl.orders import Gaussian, Order
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
    answered: tuple[int, ...] = ()  # clients whose uploads arrived
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
    return Request(
        session.run, state.round + 1, session.ledger.charged, paid, refused, state.model.clone(), counted,
        session.separate, questions_in(session.needs),
    )  # fmt: skip


def combine(session: Session[S], state: S, request: Request, uploads: Uploads) -> tuple[S, Outcome]:
    """Move the model by what was uploaded, and let the system decide what changes for the next round."""
    system, answered = session.system, sorted(uploads.clients)
    _require_performed(request, uploads, state.model)
    if session.on_uploads is not None and isinstance(uploads, Separate):
        session.on_uploads(request.round, {client: upload.clone() for client, upload in uploads.by_client.items()})
    total = aggregate(state.model, uploads, request.weights)
    downlink = system.downlink(state, answered)
    if downlink is not None:  # noise of the server's own, against readers of the model
        total = _add_downlink_noise(session, request, total, downlink)
    # From here on everything is made of what readers may know, so that it costs them and nobody else anything.
    counted = {client: request.weights[client] for client in answered}
    session.ledger.broadcast(counted, noise_std=downlink.std if downlink else 0.0)
    model, memory = system.optimiser.step(state.model, total, state.server, round=request.round, rounds=state.rounds)
    needs = session.needs
    score = session.public.score(model, request.round) if "public loss" in needs else None
    feedback = Feedback(
        answered=answered,
        total=total,
        public_loss=score.loss if score else None,
        uploads=uploads.by_client if isinstance(uploads, Separate) else {},
        counts=_counts(request, uploads) if "counts" in needs else None,
        answers=session.clients.answer(questions_in(needs), state.model, uploads, model),
    )
    spent = state.spent.union(request.refused).difference(request.charged)
    after = replace(state, model=model, round=request.round, server=memory, spent=spent)
    adapted = system.adapt(after, feedback)  # the next round may be different
    if adapted.round != after.round or adapted.model is not after.model:
        raise BadInput(
            f"adapt of {system.name} must leave the round and the model as they are, but changed them: noise was paid"
            " for this round, and readers' privacy is that of the sum; let the server's optimiser move the model"
        )
    paid = {client: receipt.order for client, receipt in request.charged.items()}
    return adapted, Outcome(paid, request.refused, tuple(answered), score)


def _counts(request: Request, uploads: Uploads) -> float | None:
    """Return the noised counts beside the uploads, weighed as these are; None in a round in which nobody counted."""
    counts = uploads.counts if isinstance(uploads, Summed) else weighed(request, uploads.counts)
    if counts is None and any(paid.order.count_noise is not None for paid in request.charged.values()):
        raise BadInput(
            "clients must return the noised counts that they were ordered to tell, but returned none; hand in clients"
            " that perform the whole order"
        )
    return counts


def _require_performed(request: Request, uploads: Uploads, model: Tensor) -> None:
    """Refuse uploads that nobody paid for, or that are not what was asked for."""
    strangers = sorted(set(uploads.clients) - request.charged.keys())
    if strangers:
        raise BadInput(
            f"clients must upload what was charged and nothing else, but {strangers} uploaded in round {request.round};"
            " hand in clients that perform the request"
        )
    if request.separate and not isinstance(uploads, Separate):
        raise BadInput("clients must return uploads one by one where they are asked to, but returned their sum")
    parts = uploads.by_client.values() if isinstance(uploads, Separate) else (uploads.total,)
    if not all(part.shape == model.shape for part in parts):
        raise BadInput(f"uploads must have the shape of the model, {list(model.shape)}, but one of them has not")


def _add_downlink_noise(session: Session[S], request: Request, total: Tensor, noise: Gaussian) -> Tensor:
    secret = session.streams.secret
    source = (secret.generator if session.streams.fast else secret.keystream)(
        "downlink", run=request.run, round=request.charge
    )
    moves = (request.weights[client] * paid.upload_sensitivity for client, paid in request.charged.items())
    least = min(filter(None, moves), default=noise.std)
    noised = add_noise(total, Gaussian, noise.std, source, relative_size=noise.std / least)
    return noised.to(total.dtype)


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
            ahead = state.round + 1
            model = session.system.optimiser.sent_out(state.model, state.server, round=ahead, rounds=state.rounds)
            state = replace(state, model=model, round=ahead, spent=state.spent | refused)
            outcome = Outcome({}, tuple(sorted(refused)))
        played = played or bool(outcome.orders)
        yield state, outcome
