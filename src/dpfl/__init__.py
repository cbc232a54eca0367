"""dpfl: differentially private federated learning with a certificate of the privacy really spent.

    import dpfl

    hospitals = dpfl.federate("digits", clients=20, seed=1)
    system = dpfl.UDP(epsilon=8, delta=1e-3)
    run = dpfl.train(system, hospitals, "softmax", seed=1)
    print(run.accuracy)
    print(run.certificate)

Names are loaded when they are first used, so that `import dpfl` alone costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dpfl.errors import BadInput as BadInput
    from dpfl.errors import BudgetRefused as BudgetRefused
    from dpfl.errors import Caution as Caution
    from dpfl.federation import Federation as Federation
    from dpfl.federation import federate as federate
    from dpfl.federation import from_arrays as from_arrays
    from dpfl.federation import from_torch as from_torch
    from dpfl.orders import Order as Order
    from dpfl.planning import Plan as Plan
    from dpfl.planning import plan as plan
    from dpfl.repetitions import Repetitions as Repetitions
    from dpfl.repetitions import repeat as repeat
    from dpfl.systems import ALIDPFL as ALIDPFL
    from dpfl.systems import PEDPFL as PEDPFL
    from dpfl.systems import UDP as UDP
    from dpfl.systems import AdapDPFL as AdapDPFL
    from dpfl.systems import DPFedAvg as DPFedAvg
    from dpfl.systems import DPSGDFedAvg as DPSGDFedAvg
    from dpfl.systems import FedAvg as FedAvg
    from dpfl.systems import FedProx as FedProx
    from dpfl.systems import FedSGD as FedSGD
    from dpfl.systems import FedSGDDPC as FedSGDDPC
    from dpfl.systems import Lei as Lei
    from dpfl.systems import NbAFL as NbAFL
    from dpfl.training import Run as Run
    from dpfl.training import train as train

_HOMES = {
    "BadInput": "errors", "BudgetRefused": "errors", "Caution": "errors",
    "Federation": "federation", "federate": "federation", "from_arrays": "federation", "from_torch": "federation",
    "Order": "orders",
    "Plan": "planning", "plan": "planning",
    "Repetitions": "repetitions", "repeat": "repetitions",
    "ALIDPFL": "systems", "AdapDPFL": "systems", "DPFedAvg": "systems", "DPSGDFedAvg": "systems", "FedAvg": "systems",
    "FedProx": "systems", "FedSGD": "systems", "FedSGDDPC": "systems", "Lei": "systems", "NbAFL": "systems",
    "PEDPFL": "systems", "UDP": "systems",
    "Run": "training", "train": "training",
}  # fmt: skip

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "systems":
        return import_module("dpfl.systems")
    if name not in _HOMES:
        raise AttributeError(f"dpfl has no {name!r}")
    return getattr(import_module(f"dpfl.{_HOMES[name]}"), name)
