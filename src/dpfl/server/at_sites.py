"""Evaluation at the sites: how good a model is on the records that each of them kept for testing.

What is reported here carries no noise: it is for simulations, and for whoever may see every site's records. The
certificate says so.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dpfl.federation import Federation, Records
from dpfl.federation.facts import sound
from dpfl.models import Model
from dpfl.models.architectures import cross_entropy
from dpfl.privacy.certificate import Certificate, Spending
from dpfl.server.evaluation import evaluate

_BINS = 10


@dataclass(frozen=True)
class SiteResult:
    """One client with a name: what it spent, and how good the model is on its own test records; None: it has none."""

    name: str
    records: int  # that it trained with
    tested: int  # that it kept for testing
    accuracy: float | None
    accuracy_noise: float | None  # its standard deviation, where the site paid for it; None: as it is, and not private
    loss: float | None
    calibration_error: float | None  # how far confidence is from accuracy; None where outputs are no probabilities
    epsilon_granted: float | None
    epsilon_spent: float | None  # against whom it was promised; None: no finite ε holds
    delta: float | None


def results_of(
    federation: Federation, model: Model, parameters: Tensor, certificate: Certificate
) -> tuple[SiteResult, ...]:
    """Return a line for each client that has a name."""
    spending: dict[int, Spending] = {line.client: line for line in certificate.spending}
    against = "server" if "server" in certificate.against else "uplink"
    found = []
    for client, name in enumerate(federation.names):
        tests = sound(federation.site_tests[client]).to(parameters.device) if federation.site_tests else None
        score = None if tests is None else evaluate(model, parameters, tests)
        spent = spending.get(client)
        found.append(
            SiteResult(
                name=name,
                records=federation.sizes[client],
                tested=0 if tests is None else len(tests),
                accuracy=None if score is None else score.accuracy,
                accuracy_noise=None,
                loss=None if score is None or not math.isfinite(score.loss) else score.loss,
                calibration_error=None if tests is None else calibration_error(model, parameters, tests),
                epsilon_granted=None if spent is None else spent.claimed_epsilon,
                epsilon_spent=None if spent is None else getattr(spent, f"{against}_epsilon"),
                delta=None if spent is None else spent.delta,
            )
        )
    return tuple(found)


@torch.no_grad()
def calibration_error(model: Model, parameters: Tensor, records: Records) -> float | None:
    """Return the expected calibration error: over ten bins of confidence, how far that is from accuracy on average.

    None where outputs are no probabilities of classes, or there are no records.
    """
    if model.loss not in (cross_entropy, functional.cross_entropy) or len(records) == 0:
        return None
    model.module.eval()
    outputs = model.outputs(model.split(parameters), records.x)
    if outputs.ndim != 2 or not torch.isfinite(outputs).all():
        return None
    confidence, chosen = functional.softmax(outputs.double(), dim=1).max(dim=1)
    right = (chosen == records.y).double()
    bins = (confidence * _BINS).long().clamp(max=_BINS - 1)
    gaps = torch.zeros(_BINS, dtype=torch.double, device=bins.device).index_add_(0, bins, confidence - right)
    return float(gaps.abs().sum() / len(records))
