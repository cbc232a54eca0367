"""Models: the papers' own by name, and any `nn.Module` with a loss."""

from dpfl.models.architectures import ARCHITECTURES, build, default_model
from dpfl.models.losses import Loss
from dpfl.models.model import Model

__all__ = ["ARCHITECTURES", "Loss", "Model", "build", "default_model"]
