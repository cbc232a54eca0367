"""Systems: one file a paper, and the baselines. `SYSTEMS` finds them by name."""

from typing import Any

from dpfl.systems.adap_dpfl import AdapDPFL
from dpfl.systems.ali_dpfl import ALIDPFL
from dpfl.systems.dp_fedavg import DPFedAvg
from dpfl.systems.dpsgd_fedavg import DPSGDFedAvg
from dpfl.systems.fedavg import FedAvg
from dpfl.systems.fedprox import FedProx
from dpfl.systems.fedsgd import FedSGD
from dpfl.systems.fedsgd_dpc import FedSGDDPC
from dpfl.systems.lei import Lei
from dpfl.systems.nbafl import NbAFL
from dpfl.systems.pe_dpfl import PEDPFL
from dpfl.systems.system import Feedback, PrivateSystem, Problem, S, State, System, questions_in
from dpfl.systems.udp import UDP

SYSTEMS: dict[str, type[System[Any]]] = {
    system.name: system
    for system in (
        FedAvg, FedSGD, FedProx, DPFedAvg, UDP, NbAFL, ALIDPFL, FedSGDDPC, DPSGDFedAvg, PEDPFL, AdapDPFL, Lei
    )
}  # fmt: skip

__all__ = [
    "ALIDPFL", "PEDPFL", "SYSTEMS", "UDP", "AdapDPFL", "DPFedAvg", "DPSGDFedAvg", "FedAvg", "FedProx", "FedSGD",
    "FedSGDDPC", "Feedback", "Lei", "NbAFL", "PrivateSystem", "Problem", "S", "State", "System",
    "questions_in",
]  # fmt: skip
