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

__version__ = "0.2.0"

if TYPE_CHECKING:
    from dpfl.clients.uploads import Clients as Clients
    from dpfl.clients.uploads import Engine as Engine
    from dpfl.clients.uploads import Request as Request
    from dpfl.clients.uploads import Separate as Separate
    from dpfl.clients.uploads import Summed as Summed
    from dpfl.comparison import Comparison as Comparison
    from dpfl.comparison import Contender as Contender
    from dpfl.comparison import compare as compare
    from dpfl.comparison import contenders as contenders
    from dpfl.errors import BadInput as BadInput
    from dpfl.errors import BudgetRefused as BudgetRefused
    from dpfl.errors import Caution as Caution
    from dpfl.federation import Federation as Federation
    from dpfl.federation import Records as Records
    from dpfl.federation import federate as federate
    from dpfl.federation import from_arrays as from_arrays
    from dpfl.federation import from_clients as from_clients
    from dpfl.federation import from_torch as from_torch
    from dpfl.models import Model as Model
    from dpfl.orders import ClientClip as ClientClip
    from dpfl.orders import Full as Full
    from dpfl.orders import Gaussian as Gaussian
    from dpfl.orders import Laplace as Laplace
    from dpfl.orders import ModelClip as ModelClip
    from dpfl.orders import Order as Order
    from dpfl.orders import Poisson as Poisson
    from dpfl.orders import RecordClip as RecordClip
    from dpfl.orders import sensitivity as sensitivity
    from dpfl.planning import Plan as Plan
    from dpfl.planning import plan as plan
    from dpfl.privacy.budget import Budget as Budget
    from dpfl.privacy.budget import Promise as Promise
    from dpfl.privacy.calibration import gaussian_noise_stds as gaussian_noise_stds
    from dpfl.privacy.calibration import noise_multipliers as noise_multipliers
    from dpfl.privacy.certificate import Certificate as Certificate
    from dpfl.privacy.solve import account as account
    from dpfl.repetitions import Repetitions as Repetitions
    from dpfl.repetitions import repeat as repeat
    from dpfl.session import Session as Session
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
    from dpfl.systems import Feedback as Feedback
    from dpfl.systems import Lei as Lei
    from dpfl.systems import NbAFL as NbAFL
    from dpfl.systems import PrivateSystem as PrivateSystem
    from dpfl.systems import Problem as Problem
    from dpfl.systems import State as State
    from dpfl.systems import System as System
    from dpfl.systems import planned_replies as planned_replies
    from dpfl.training import RoundMetrics as RoundMetrics
    from dpfl.training import Run as Run
    from dpfl.training import train as train

_ROOMS = {
    "errors": "BadInput BudgetRefused Caution",
    "federation": "Federation Records federate from_arrays from_clients from_torch",
    "models": "Model",
    "orders": "ClientClip Full Gaussian Laplace ModelClip Order Poisson RecordClip Shuffled sensitivity",
    "privacy.budget": "Budget Promise",
    "privacy.calibration": "gaussian_noise_stds noise_multipliers",
    "privacy.certificate": "Certificate",
    "privacy.solve": "account",
    "clients.uploads": "Clients Engine Request Separate Summed",
    "session": "Session",
    "systems": "ALIDPFL AdapDPFL DPFedAvg DPSGDFedAvg FedAvg FedProx FedSGD FedSGDDPC Feedback Lei NbAFL PEDPFL "
    "PrivateSystem Problem State System UDP planned_replies",
    "training": "RoundMetrics Run train",
    "repetitions": "Repetitions repeat",
    "comparison": "Comparison Contender compare contenders",
    "planning": "Plan plan",
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in ("systems", "loggers"):
        return import_module(f"dpfl.{name}")
    if name not in _HOMES:
        raise AttributeError(f"dpfl has no {name!r}")
    return getattr(import_module(f"dpfl.{_HOMES[name]}"), name)
