"""The uplink: who overhears a few uploads hears them at models that depend on the record already.

An eavesdropper reads every model, and a model has moved by the uploads that nobody overheard: he learns from both. The
twin is the price of the uploads alone, which is what an overheard client was once told.
"""

import math
from typing import Any

import pytest

from attacks.bounds import gaussian_bound
from attacks.canaries import Seen, eavesdropped, watch
from dpfl.orders import sensitivity
from dpfl.privacy.gaussian_dp import epsilon_of
from dpfl.systems import NbAFL
from grids import each

SYSTEMS: dict[str, NbAFL] = {
    "tight": NbAFL(rounds=8, exposures=1, epsilon=3.0, lr=1.0),
    "tight, two uploads": NbAFL(rounds=8, exposures=2, epsilon=3.0, lr=1.0),
    "weighed by records": NbAFL(rounds=8, epsilon=3.0, lr=1.0, weighing="records"),
    "with a rate that falls": NbAFL(rounds=8, epsilon=3.0, lr=1.0, lr_schedule="inverse-sqrt"),
}
SIZES = {"weighed by records": (400, 1200)}


def uploads_alone(seen: Seen, exposures: int, delta: float) -> float:
    """Price as many uploads, as if they had been computed at models that know nothing."""
    paid = seen.requests[0].charged[0]
    bound = sensitivity(paid.order, records=paid.records, unit="record", neighbours="replace", norm=2)
    return float(epsilon_of(math.sqrt(exposures * bound**2 / paid.order.noise_variance(paid.records)), delta))


@pytest.mark.filterwarnings("ignore::dpfl.Caution")
@each("name", list(SYSTEMS))
def test_an_eavesdropper_learns_what_is_certified_and_more_than_the_uploads_tell(name: str) -> None:
    system = SYSTEMS[name]
    seen = watch(system, sizes=SIZES.get(name))
    assert seen.run is not None
    shown: Any = seen.run.certificate.observers["uplink"]
    scores, up = eavesdropped(seen, system.exposures)
    least = gaussian_bound(scores, up, shown.delta, 0.05)
    twin = uploads_alone(seen, system.exposures, shown.delta)
    print(f"nbafl, {name}: {least:.2f} of {shown.epsilon:.2f}, where uploads alone are priced {twin:.2f}")
    assert least > twin
    assert gaussian_bound(scores, up, shown.delta, 1e-3) <= shown.epsilon
    assert least >= 0.7 * shown.epsilon
