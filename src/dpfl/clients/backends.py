"""The clients that come with dpfl, by name."""

from collections.abc import Callable

from dpfl.clients.draws import DrawnBy
from dpfl.clients.reference import ReferenceClients
from dpfl.clients.stacked import StackedClients
from dpfl.clients.uploads import Clients
from dpfl.errors import BadInput
from dpfl.federation import Records
from dpfl.gradients.capabilities import Capabilities, capabilities_of
from dpfl.models import Model
from dpfl.streams import Streams, layer_randomness

MakeClients = Callable[[Model, tuple[Records, ...], Streams], Clients]


def make_clients(
    backend: str,
    model: Model,
    records: tuple[Records, ...],
    streams: Streams,
    *,
    public: Records,
    drawn_by: DrawnBy | None = None,
) -> ReferenceClients | StackedClients:
    """Make the clients of a federation: a whole cohort at once ("stacked"), or one after the other ("reference").

    public: records that the model is tried with, on the model's device.
    drawn_by: who draws; None for a cohort where it trains at once, and each client where it does not.
    """
    with layer_randomness(streams.public.generator("probe"), public.x.device):
        if len(public):  # of nothing nothing can be asked
            model.check(public.x, public.y)
        reference = backend == "reference"
        known = Capabilities.none(model, public) if reference else capabilities_of(model, public)
    if known.layers is None and drawn_by == "cohort":
        why = "the reference client" if reference else f"this model ({known.why_not})"
        raise BadInput(
            f"draws must be 'client' with {why}, was 'cohort': one client trains after the other, and draws for itself;"
            " leave it out"
        )
    if reference:
        return ReferenceClients(model, records, streams, vectorised=known.vectorised)
    return StackedClients(model, records, streams, capabilities=known, drawn_by=drawn_by or "cohort")
