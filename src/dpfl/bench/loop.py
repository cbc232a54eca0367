"""A good plain PyTorch loop over the clients: what one would write without a framework.

It trains client after client with torch's own modules and autograd, clips and noises what a client sends as a whole,
and adds it up. W3's is not private at all: no clip and no noise, only the training.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from dpfl.bench.workloads import DrawnWorkload
from dpfl.orders import Gaussian, Poisson


def prepare(problem: DrawnWorkload) -> Callable[[], Tensor]:
    """Return a function that plays one round and returns the model after it."""
    order, device = problem.workload.order, problem.device
    module, loss = problem.model.module, problem.model.loss
    module.train()
    parameters = list(module.parameters())
    optimiser = torch.optim.SGD(parameters, lr=order.learning_rates[0])
    source = torch.Generator(device).manual_seed(0)
    sampled = isinstance(order.batch, Poisson)

    def train(client: int) -> Tensor:
        problem.model.load(problem.broadcast)
        records = problem.records[client]
        for _ in range(order.steps):
            batch = records
            if isinstance(order.batch, Poisson):
                drawn = torch.rand(len(records), device=device, generator=source) < order.batch.sampling_rate
                batch = records.take(drawn)
            optimiser.zero_grad()
            torch.autograd.backward(loss(module(batch.x), batch.y).mean())
            optimiser.step()
        return parameters_to_vector(parameters).detach() - problem.broadcast

    def play() -> Tensor:
        total = torch.zeros_like(problem.broadcast)
        for client in problem.cohort:
            update = train(client)
            if not sampled and isinstance(order.noise, Gaussian):
                update *= (1.0 / torch.linalg.vector_norm(update)).clamp(max=1.0)
                update += order.noise.std * torch.randn(len(update), device=device, generator=source)
            total += update
        return problem.broadcast + total / len(problem.cohort)

    return play
