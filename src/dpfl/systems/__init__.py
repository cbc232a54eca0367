"""Systems: one file a paper, and the baselines. `SYSTEMS` finds them by name."""

from typing import Any

from dpfl.systems.fedavg import FedAvg
from dpfl.systems.fedprox import FedProx
from dpfl.systems.fedsgd import FedSGD
from dpfl.systems.system import Feedback, Problem, S, State, System
from dpfl.systems.udp import UDP

SYSTEMS: dict[str, type[System[Any]]] = {system.name: system for system in (FedAvg, FedSGD, FedProx, UDP)}

__all__ = ["SYSTEMS", "UDP", "FedAvg", "FedProx", "FedSGD", "Feedback", "Problem", "S", "State", "System"]
