"""Flower: its simulation runtime, with one Ray worker for each core that torch may use.

The simulation is started once, in a thread, and its server app plays a round whenever it is asked to, so that no round
pays for the start. A cohort's clients are all the nodes there are: Flower looks for messages at every node it knows.
Models travel as one array. Records and code do not travel with a message; each worker loads them once.
"""

import functools
import json
import logging
import os
import queue
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # read when flwr is imported; a benchmark has nothing to tell anybody
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # what Ray's warning asks for

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from dpfl.bench.workloads import DrawnWorkload
from dpfl.models import build
from dpfl.orders import ClientClip, Gaussian, Order, RecordClip
from dpfl.streams import Streams

WORKLOADS = frozenset({"W1", "W2", "W4"})


def prepare(problem: DrawnWorkload) -> "Simulation":
    """Start a simulation and return it: called, it plays one round and returns the model after it."""
    return Simulation(problem)


class Simulation:
    """A running simulation, which has to be closed."""

    def __init__(self, problem: DrawnWorkload) -> None:
        """Start the workers and let them load their data: a first round is played."""
        self._problem = problem
        self._asked: queue.Queue[bool] = queue.Queue()
        self._answers: queue.Queue[Tensor | Exception] = queue.Queue()
        self._folder = tempfile.TemporaryDirectory()
        self._thread = threading.Thread(target=self._simulate, args=(_save(problem, self._folder.name),))
        self._thread.start()
        try:
            self()
        except Exception:
            self.close()
            raise

    def __call__(self) -> Tensor:
        """Play one round and return the model after it."""
        self._asked.put(True)
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the simulation and its workers; without it they outlive the program's last line."""
        self._asked.put(False)
        self._thread.join()
        self._folder.cleanup()

    def _simulate(self, path: str) -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        cores, gpus = torch.get_num_threads(), int(self._problem.device.type == "cuda")
        backend: dict[str, Any] = {
            "init_args": {"num_cpus": cores, "num_gpus": gpus, "log_to_driver": False, "logging_level": "ERROR"},
            "client_resources": {"num_cpus": 1, "num_gpus": gpus / cores},
        }
        server, client = ServerApp(), ClientApp()
        server.main()(self._serve)
        client.train()(functools.partial(_train, path))
        try:
            run_simulation(server, client, num_supernodes=len(self._problem.cohort), backend_config=backend)
        except Exception as problem:
            self._answers.put(problem)

    def _serve(self, grid: Grid, context: Context) -> None:
        nodes, broadcast = len(self._problem.cohort), self._problem.broadcast
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_train_nodes=nodes,
            min_available_nodes=nodes,
            train_metrics_aggr_fn=lambda replies, _: MetricRecord({"clients": len(replies)}),
        )
        while self._asked.get():
            result = strategy.start(grid, ArrayRecord([broadcast.cpu().numpy()]), num_rounds=1, timeout=600)
            trained = result.train_metrics_clientapp.get(1)
            if trained is None or trained["clients"] != nodes:  # FedAvg is content with those that are left
                raise RuntimeError(f"flower did not train all of the {nodes} clients; its log above says why")
            (model,) = result.arrays.to_numpy_ndarrays()
            self._answers.put(torch.from_numpy(model).to(broadcast.device))


def _save(problem: DrawnWorkload, folder: str) -> str:
    """Write what a worker needs to train any client of the cohort."""
    x = torch.stack([problem.records[i].x for i in problem.cohort])
    y = torch.stack([problem.records[i].y for i in problem.cohort])
    path, workload = f"{folder}/cohort.safetensors", problem.workload
    model = {"name": workload.model, "shape": workload.shape, "classes": workload.classes}
    facts = {"order": workload.order.to_json(), "model": json.dumps(model), "device": str(problem.device)}
    save_file({"x": x.cpu(), "y": y.cpu()}, path, facts)
    return path


@functools.cache
def _worker(path: str) -> Callable[[Tensor, int], Tensor]:
    """Return how this process trains a client of the cohort, ready to do so."""
    torch.set_num_threads(1)  # its share: there is a worker for every core
    with safe_open(path, "pt") as file:
        facts = file.metadata()
        x, y = (file.get_tensor(name).to(facts["device"]) for name in ("x", "y"))
    order, model = Order.from_json(facts["order"]), json.loads(facts["model"])
    assert isinstance(order.clip, ClientClip | RecordClip)
    assert isinstance(order.noise, Gaussian)
    rng = Streams(0).public.generator("model")  # every message brings the parameters
    learner = build(model["name"], shape=tuple(model["shape"]), classes=model["classes"], rng=rng)
    module, loss = learner.module.to(facts["device"]), learner.loss
    clip_norm, noise_std = order.clip.clip_norm, order.noise.std
    parameters = list(module.train().parameters())
    optimiser = torch.optim.SGD(parameters, lr=order.learning_rates[0])
    source = torch.Generator(x.device)
    source.seed()  # torch would begin alike in every worker

    def train(broadcast: Tensor, client: int) -> Tensor:
        broadcast = broadcast.to(x.device)
        vector_to_parameters(broadcast.clone(), parameters)  # the parameters become views of it
        for _ in range(order.steps):
            optimiser.zero_grad()
            torch.autograd.backward(loss(module(x[client]), y[client]).mean())
            optimiser.step()
        update = parameters_to_vector(parameters).detach() - broadcast
        update *= (clip_norm / torch.linalg.vector_norm(update)).clamp(max=1.0)
        update += noise_std * torch.randn(len(update), device=x.device, generator=source)
        return broadcast + update

    return train


def _train(path: str, message: Message, context: Context) -> Message:
    (broadcast,) = message.content.array_records["arrays"].to_numpy_ndarrays()
    client = int(context.node_config["partition-id"])
    model = _worker(path)(torch.from_numpy(broadcast), client).cpu().numpy()
    weight = MetricRecord({"num-examples": 1})  # all weigh the same
    return Message(RecordDict({"arrays": ArrayRecord([model]), "weight": weight}), reply_to=message)
