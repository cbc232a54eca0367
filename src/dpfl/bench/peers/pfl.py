"""Apple's pfl: one central iteration of its federated averaging, simulated in one process.

Clients are clipped one by one and their noise is added once, to the sum and of the same law: pfl's own advice for fast
simulation of local noise. The iteration is what `FederatedAveraging.run` does in each, without its callbacks and
without the evaluation that it makes in the first.
"""

import itertools
import os
import warnings
from collections.abc import Callable

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from torch import Tensor, nn

from dpfl.bench.workloads import DrawnWorkload
from dpfl.orders import Gaussian

WORKLOADS = frozenset({"W1", "W2", "W4"})


class _Trained(nn.Module):
    """The model's module with the two functions that pfl asks of one."""

    def __init__(self, problem: DrawnWorkload) -> None:
        super().__init__()
        self.module, self._loss = problem.model.module, problem.model.loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(self.module(x), y).mean()

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        return {}  # nothing is evaluated


def prepare(problem: DrawnWorkload) -> Callable[[], Tensor]:
    """Return a function that plays one round and returns the model after it."""
    order = problem.workload.order
    clip, noise = order.clip, order.noise
    assert clip is not None
    assert isinstance(noise, Gaussian)
    os.environ["PFL_PYTORCH_DEVICE"] = str(problem.device)  # else pfl takes a GPU wherever there is one
    trained = _Trained(problem).train()
    model = PyTorchModel(trained, torch.optim.SGD, torch.optim.SGD(trained.parameters(), lr=1.0))
    clients = {i: PyTorchTensorDataset((problem.records[i].x, problem.records[i].y)) for i in problem.cohort}
    federation = FederatedDataset(clients.__getitem__, itertools.cycle(problem.cohort).__next__)
    privacy = GaussianMechanism(clip.clip_norm, noise.std / clip.clip_norm).approximate_as_central_mechanism()
    backend = SimulatedBackend(federation, federation, [privacy])
    algorithm = FederatedAveraging()
    context = CentralContext(
        current_central_iteration=1,
        do_evaluation=False,
        cohort_size=len(problem.cohort),
        population=Population.TRAIN,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=2,
            evaluation_frequency=2,
            train_cohort_size=len(problem.cohort),
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(  # an epoch is one step on all records
            local_num_epochs=order.steps, local_learning_rate=order.learning_rates[0], local_batch_size=None
        ),
        seed=1,
    )

    def play() -> Tensor:
        problem.model.load(problem.broadcast)
        with warnings.catch_warnings():
            # pfl copies what it adds noise to with torch.tensor, which torch would have it clone.
            warnings.filterwarnings("ignore", message="To copy construct from a tensor", category=UserWarning)
            sums, metrics = backend.gather_results(model, algorithm, central_context=context)
        algorithm.process_aggregated_statistics(context, metrics, model, sums)
        return problem.model.vector()

    return play
