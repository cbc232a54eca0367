"""The four workloads: one round of each, as orders to clients whose records are drawn at random.

Time does not depend on what the numbers are, so no data set is needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl.federation import Records
from dpfl.models import Model, build
from dpfl.orders import ClientClip, Gaussian, Order, Poisson, RecordClip
from dpfl.streams import Streams


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One round: who takes part, with what, and what is ordered."""

    name: str
    title: str
    model: str  # an architecture's name
    shape: tuple[int, ...]  # of a record
    classes: int | None  # None for regression
    clients: int
    cohort: int  # clients a round
    records: int  # a client's
    order: Order
    flops: float  # of a record in a step: forward, and backward to parameters and inputs (none for the first layer)

    @property
    def flops_a_round(self) -> float:
        """Return the floating-point operations that plain training needs for a round."""
        sampled = self.order.batch.sampling_rate if isinstance(self.order.batch, Poisson) else 1.0
        return self.flops * self.records * sampled * self.order.steps * self.cohort


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="W1", title="MLP, one full-batch step, records clipped", model="mlp", shape=(1, 28, 28), classes=10,
            clients=50, cohort=50, records=800, flops=2 * (2 * 784 * 256 + 3 * 256 * 10),
            order=Order(steps=1, learning_rate=0.1, clip=RecordClip(1.0), noise=Gaussian(0.001)),
        ),
        Workload(
            name="W2", title="CNN, five full-batch steps, client gradients clipped", model="femnist-cnn",
            shape=(1, 28, 28), classes=62, clients=35, cohort=35, records=200,
            flops=2 * (2 * 784 * 49 * 32 + 3 * 196 * 288 * 64 + 3 * 3136 * 62),
            order=Order(steps=5, learning_rate=0.05, clip=ClientClip(1.0), noise=Gaussian(0.001)),
        ),
        Workload(
            name="W3", title="DP-SGD on a CNN, three Poisson batches, records clipped, steps noised", model="ali-cnn",
            shape=(1, 28, 28), classes=10, clients=10, cohort=10, records=6000,
            flops=2 * (2 * 196 * 64 * 16 + 3 * 25 * 256 * 32 + 3 * (512 * 32 + 32 * 10)),
            order=Order(
                steps=3, learning_rate=0.1, batch=Poisson(0.015), clip=RecordClip(1.0), noise=Gaussian(1.0),
                noise_on="step",
            ),
        ),
        Workload(
            name="W4", title="linear regression, one full-batch step, client gradients clipped", model="linear",
            shape=(10,), classes=None, clients=5000, cohort=500, records=80, flops=2 * 2 * 11,
            order=Order(steps=1, learning_rate=0.05, clip=ClientClip(1.0), noise=Gaussian(0.001)),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class DrawnWorkload:
    """A workload with its numbers drawn."""

    workload: Workload
    model: Model  # on the device, where the broadcast begins
    records: tuple[Records, ...]  # of every client, on the device
    cohort: tuple[int, ...]  # who takes part
    broadcast: Tensor  # [d]

    @property
    def device(self) -> torch.device:
        """Return where everything lies."""
        return self.broadcast.device


def draw(workload: Workload, device: torch.device | str = "cpu", *, seed: int = 0) -> DrawnWorkload:
    """Draw a workload's records and its first model."""
    streams = Streams(seed)
    source = torch.Generator().manual_seed(seed)
    model = build(workload.model, shape=workload.shape, classes=workload.classes, rng=streams.public.generator("model"))
    model.module.to(device)
    total = workload.clients * workload.records
    x = torch.randn(total, *workload.shape, generator=source).to(device)
    if workload.classes is None:
        y = torch.randn(total, generator=source).to(device)
    else:
        y = torch.randint(0, workload.classes, (total,), generator=source).to(device)
    pieces = zip(torch.split(x, workload.records), torch.split(y, workload.records), strict=True)
    cohort = tuple(sorted(int(i) for i in torch.randperm(workload.clients, generator=source)[: workload.cohort]))
    return DrawnWorkload(workload, model, tuple(Records(*piece) for piece in pieces), cohort, model.vector())
