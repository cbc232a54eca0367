"""Systems: one file a paper, and the baselines. `SYSTEMS` finds them by name, other packages' too.

Classes are loaded when they are first used, so that names alone cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpfl.systems.registry import OWN, SYSTEMS, home

if TYPE_CHECKING:
    from dpfl.systems.adap_dpfl import AdapDPFL as AdapDPFL
    from dpfl.systems.ali_dpfl import ALIDPFL as ALIDPFL
    from dpfl.systems.dp_fedavg import DPFedAvg as DPFedAvg
    from dpfl.systems.dpsgd_fedavg import DPSGDFedAvg as DPSGDFedAvg
    from dpfl.systems.fedavg import FedAvg as FedAvg
    from dpfl.systems.fedprox import FedProx as FedProx
    from dpfl.systems.fedsgd import FedSGD as FedSGD
    from dpfl.systems.fedsgd_dpc import FedSGDDPC as FedSGDDPC
    from dpfl.systems.lei import Lei as Lei
    from dpfl.systems.nbafl import NbAFL as NbAFL
    from dpfl.systems.pe_dpfl import PEDPFL as PEDPFL
    from dpfl.systems.system import Feedback as Feedback
    from dpfl.systems.system import PrivateSystem as PrivateSystem
    from dpfl.systems.system import Problem as Problem
    from dpfl.systems.system import S as S
    from dpfl.systems.system import State as State
    from dpfl.systems.system import System as System
    from dpfl.systems.system import planned_replies as planned_replies
    from dpfl.systems.system import questions_in as questions_in
    from dpfl.systems.udp import UDP as UDP

_HOMES = {kind: home(name) for name, kind in OWN.items()} | dict.fromkeys(
    ("Feedback", "PrivateSystem", "Problem", "S", "State", "System", "planned_replies", "questions_in"), "system"
)

__all__ = ["SYSTEMS", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"dpfl.systems has no {name!r}")
    return getattr(import_module(f"dpfl.systems.{_HOMES[name]}"), name)
