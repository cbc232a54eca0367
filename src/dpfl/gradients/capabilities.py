"""By which ways a model can be trained fast, as a few public records tell: an answer about private ones would leak."""

from dataclasses import dataclass

from dpfl.federation import Records
from dpfl.gradients.layered import Layered, layered
from dpfl.gradients.least_squares import is_least_squares
from dpfl.models import Model
from dpfl.precision import products


@dataclass(frozen=True)
class Capabilities:
    """What is known about a model."""

    layers: Layered | None  # the model as its layers; None where it has others than known ones
    least_squares: bool  # whether it is a linear regression
    vectorised: bool  # whether torch gives the gradients of many records at once; not asked where layers are known

    def __str__(self) -> str:
        if self.layers is not None:
            return "from layers"
        return "at once" if self.vectorised else "one by one"

    @staticmethod
    def none(model: Model, public: Records) -> "Capabilities":
        """Take no way but the reference client's."""
        return Capabilities(None, False, model.vectorises(public.x, public.y))


def capabilities_of(model: Model, public: Records) -> Capabilities:
    """Find out with some public records."""
    with products("float32"):  # results are compared
        layers = layered(model, public.x, public.y)
        if layers is None:
            return Capabilities.none(model, public)
        return Capabilities(layers, is_least_squares(model, public.x, public.y), True)
