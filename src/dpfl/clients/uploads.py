"""What is asked of the clients in a round, what they give back, and who they may be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dpfl.orders import Need, Question
from dpfl.privacy.ledger import Charged


@dataclass(frozen=True)
class Request:
    """One round, as the clients are asked for it: nothing in it has not been paid for."""

    run: str  # as the ledger knows it; with the charge and an order it names the streams of a client's noise
    round: int  # of the training
    charge: int  # which time clients were charged: a round that is played again is paid again, and has other noise
    charged: Mapping[int, Charged]  # the paid orders, by client
    refused: tuple[int, ...]  # clients whose budget could not pay
    broadcast: Tensor  # the model [d] that they start from
    weights: Mapping[int, float]  # how much each upload counts
    separate: bool = False  # whether somebody looks at uploads one by one
    questions: tuple[Question, ...] = ()  # that follow; lengths are known while training only


@dataclass(frozen=True)
class Summed:
    """Uploads of which only the weighted sum was formed: who is in it is known, what each sent is not."""

    total: Tensor  # Σ_i weights[i]·upload_i, [d]
    clients: tuple[int, ...]
    counts: float | None = None  # Σ_i weights[i]·count_i/(records in i's batch), noised; None: nobody counted
    lengths: Mapping[int, float] = field(default_factory=dict)  # of what each clipped, without noise, if that was asked


@dataclass(frozen=True)
class Separate:
    """Uploads one by one, as they came."""

    by_client: Mapping[int, Tensor]  # [d] each
    counts: Mapping[int, float] = field(default_factory=dict)  # beside them, noised, where orders asked for it
    lengths: Mapping[int, float] = field(default_factory=dict)  # of what each clipped, without noise, if that was asked

    @property
    def clients(self) -> tuple[int, ...]:
        """Return who uploaded."""
        return tuple(self.by_client)


Uploads = Summed | Separate


@dataclass(frozen=True)
class Engine:
    """How clients train, for people to read: in the first line of a run, its environment and its report."""

    name: str
    why: str = ""
    cost: float | None = None  # a private step beside a plain one, as measured where the engine is a fall-back
    way_out: str = ""  # from that cost

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


class Clients(Protocol):
    """Whoever performs paid orders: the plain loop, a whole cohort at once, a rehearsal, or real machines."""

    @property
    def serves(self) -> frozenset[Need]:
        """Return which needs of a system these clients can serve."""

    @property
    def engine(self) -> Engine:
        """Return how they train."""

    def perform(self, request: Request) -> Uploads:
        """Do what was ordered and paid for, now; uploads one by one where the request asks for them."""

    def answer(
        self, questions: Sequence[Question], before: Tensor, uploads: Uploads, after: Tensor
    ) -> dict[Question, dict[int, float]]:
        """Return what clients tell about the models before and after a round, without noise."""
