"""Opacus: DP-SGD at one client after the other, by each of its ways to a record's gradient.

It is driven through the parts that its `PrivacyEngine` puts together: the engine would divide by a whole number of
records and sample with the inverse of one, which is not quite the order. Batches are drawn here too, by one mask over
tensors, because Opacus' data loader collects a batch record by record.
"""

import copy
import warnings
from collections.abc import Callable

import torch
from opacus.grad_sample import prepare_module
from opacus.optimizers import get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dpfl.bench.workloads import DrawnWorkload
from dpfl.orders import Gaussian, Poisson, RecordClip

WORKLOADS = frozenset({"W3"})
MODES = ("hooks", "ghost", "functorch")


def prepare(problem: DrawnWorkload, mode: str) -> Callable[[], Tensor]:
    """Return a function that plays one round in a `grad_sample_mode` and returns the model after it."""
    order, device = problem.workload.order, problem.device
    clip, noise, batch = order.clip, order.noise, order.batch
    assert isinstance(clip, RecordClip)
    assert isinstance(noise, Gaussian)
    assert isinstance(batch, Poisson)
    source = torch.Generator(device).manual_seed(0)
    ghost = mode == "ghost"
    bound = {"max_grad_norm": clip.clip_norm} if ghost else {}  # the other modes clip in the optimiser
    # A copy, because Opacus leaves hooks on what it is given.
    module = prepare_module(copy.deepcopy(problem.model.module).train(), mode, **bound)
    parameters = list(module.parameters())
    optimiser = get_optimizer_class(clipping="flat", distributed=False, grad_sample_mode=mode)(
        torch.optim.SGD(parameters, lr=order.learning_rates[0]),
        noise_multiplier=noise.std / clip.clip_norm,
        max_grad_norm=clip.clip_norm,
        expected_batch_size=order.divisor(problem.workload.records),
        generator=source,
    )

    def train(client: int) -> Tensor:
        vector_to_parameters(problem.broadcast.clone(), parameters)  # the parameters become views of it
        records = problem.records[client]
        for _ in range(order.steps):
            drawn = records.take(torch.rand(len(records), device=device, generator=source) < batch.sampling_rate)
            losses = problem.model.loss(module(drawn.x), drawn.y)
            if ghost:  # a first pass for the norms, a second for the gradient of the losses that they weigh
                DPTensorFastGradientClipping(module, optimiser, losses).backward()
            else:
                torch.autograd.backward(losses.mean())
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return parameters_to_vector(parameters).detach() - problem.broadcast

    def play() -> Tensor:
        with warnings.catch_warnings():
            # The first layer's input needs no gradient. That is as it should be, and Opacus' hook is told every time.
            warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
            total = torch.zeros_like(problem.broadcast)
            for client in problem.cohort:
                total += train(client)
        return problem.broadcast + total / len(problem.cohort)

    return play
