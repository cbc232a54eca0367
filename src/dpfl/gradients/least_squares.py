"""Linear regression without its records: two moments of a client's data give its gradient at every model.

The mean squared error of w over records [X 1] has the gradient 2·([X 1]ᵀ[X 1]·w − [X 1]ᵀy)/n. Both products are taken
once for all rounds, in double precision; a step then costs p² operations for each client, whatever n is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfl.federation import Records
from dpfl.models import Model
from dpfl.models.losses import squared_error

_MOST = 128
_AT_ONCE = 2**24  # numbers that are turned into double precision at a time


def is_least_squares(model: Model, x: Tensor, y: Tensor) -> bool:
    """Tell, with a few public records, whether the model is a linear regression over all numbers of a record."""
    shapes = [tuple(p.shape) for p in model.module.parameters()]
    features = x[0].numel()
    plain = model.loss is squared_error and not model.ridge and shapes in ([(1, features)], [(1, features), (1,)])
    plain = plain and features < _MOST  # the square of that is kept for every client
    if not plain or any(True for _ in model.module.buffers()):
        return False
    layers = [layer for layer in model.module.modules() if type(layer) not in (nn.Sequential, nn.Flatten)]
    if [type(layer) for layer in layers] != [nn.Linear]:
        return False
    x, y = x[:8], y[:8]
    here = model.vector() + torch.linspace(-1, 1, model.dim, dtype=x.dtype, device=x.device)
    moments = Moments(model, [Records(x, y)])
    ours = moments.sums(here, torch.zeros(1, dtype=torch.long, device=x.device))[0] / len(x)
    return torch.allclose(ours, model.gradient(here, x, y).double(), rtol=1e-3, atol=1e-4)


class Moments:
    """The moments of every client's records."""

    def __init__(self, model: Model, records: Sequence[Records]) -> None:
        """Take 2·([X 1]ᵀ[X 1] | −[X 1]ᵀy) of each client, [N, p, p + 1], of clients of one size together."""
        dim = model.dim
        biased = dim > records[0].x[0].numel()
        self.moments = records[0].x.new_empty(len(records), dim, dim + 1, dtype=torch.float64)
        of_size: dict[int, list[int]] = {}
        for client, its in enumerate(records):
            of_size.setdefault(len(its), []).append(client)
        for size, alike in of_size.items():
            several = max(1, _AT_ONCE // (size * dim))
            for start in range(0, len(alike), several):
                some = alike[start : start + several]
                x = torch.stack([records[client].x for client in some]).double().view(len(some), size, -1)
                y = torch.stack([records[client].y for client in some]).double().view(len(some), size, 1)
                if biased:
                    x = torch.cat([x, torch.ones_like(y)], dim=2)
                self.moments[some] = 2 * (x.mT @ torch.cat([x, -y], dim=2))

    def sums(self, parameters: Tensor, clients: Tensor) -> Tensor:
        """Return the sum of each client's gradients [k, p] at one model [p], or at one for each, in double precision.

        clients: their numbers, [k]. With several models for each of them, parameters and sums are [k·m, p].
        """
        moments = self.moments.index_select(0, clients)
        ahead = functional.pad(parameters.double(), (0, 1), value=1.0)  # one row times (w | 1) is 2·(XᵀX·w − Xᵀy)
        if parameters.ndim == 1:
            sums = moments.view(-1, len(ahead)) @ ahead
            return sums.view(len(moments), -1)
        sums = torch.bmm(ahead.view(len(moments), -1, ahead.shape[1]), moments.mT)
        return sums.view_as(parameters)
