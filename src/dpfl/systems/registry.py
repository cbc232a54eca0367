"""Which systems there are: dpfl's own, and those of other packages, which name them in the entry points `dpfl.systems`.

Names are known at once and classes are loaded when they are asked for: a list of names costs nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from dpfl.errors import BadInput

if TYPE_CHECKING:
    from dpfl.systems.system import System

GROUP = "dpfl.systems"

OWN = {  # the class of each; it stands in the file of its system's name
    "fedavg": "FedAvg",
    "fedsgd": "FedSGD",
    "fedprox": "FedProx",
    "dp-fedavg": "DPFedAvg",
    "udp": "UDP",
    "nbafl": "NbAFL",
    "ali-dpfl": "ALIDPFL",
    "fedsgd-dpc": "FedSGDDPC",
    "dpsgd-fedavg": "DPSGDFedAvg",
    "pe-dpfl": "PEDPFL",
    "adap-dpfl": "AdapDPFL",
    "lei": "Lei",
}


def home(name: str) -> str:
    """Return the file of one of dpfl's own systems.

    >>> home("ali-dpfl")
    'ali_dpfl'
    """
    return name.replace("-", "_")


class Registry(Mapping[str, "type[System[Any]]"]):
    """All systems by name, dpfl's own first."""

    @cached_property
    def others(self) -> dict[str, EntryPoint]:
        """Return what other packages bring, not loaded yet; names that are not theirs alone are refused."""
        entries = tuple(entry_points(group=GROUP))
        times = Counter(entry.name for entry in entries)
        for entry in entries:
            if entry.name in OWN:
                raise BadInput(
                    f"system {entry.name!r} of package {package(entry)!r} must have a name of its own, but dpfl has a"
                    " system of that name; rename it, or uninstall the package"
                )
            if times[entry.name] > 1:
                packages = sorted(repr(package(other)) for other in entries if other.name == entry.name)
                raise BadInput(
                    f"system {entry.name!r} must be of one package, but is of {' and '.join(packages)}; uninstall all"
                    " but one"
                )
        return {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> "type[System[Any]]":
        if name in self.others:
            return _load(self.others[name])
        own = OWN[name]
        kind: type[System[Any]] = getattr(import_module(f"dpfl.systems.{home(name)}"), own)
        return kind

    def __contains__(self, name: object) -> bool:
        return name in OWN or name in self.others

    def __iter__(self) -> Iterator[str]:
        return iter((*OWN, *self.others))

    def __len__(self) -> int:
        return len(OWN) + len(self.others)


SYSTEMS = Registry()


def package(entry: EntryPoint) -> str:
    """Return the name of the package that an entry point came with."""
    return entry.dist.name if entry.dist is not None else entry.module


def _load(entry: EntryPoint) -> "type[System[Any]]":
    from dpfl.systems.system import System

    whose = f"system {entry.name!r} of package {package(entry)!r}"
    try:
        kind = entry.load()
    except Exception as problem:  # whatever another's code does
        raise BadInput(
            f"{whose} must be loadable from {entry.value!r}, but that ended in {type(problem).__name__}: {problem};"
            " mend or uninstall the package"
        ) from problem
    if not (isinstance(kind, type) and issubclass(kind, System)):
        raise BadInput(
            f"{whose} must be a subclass of dpfl.systems.System, was {kind!r}; let its entry point name the class"
        )
    name = getattr(kind, "name", None)
    if name != entry.name:
        raise BadInput(
            f"{whose} must have the class attribute name = {entry.name!r}, was {name!r}; set it, or rename the entry"
            " point"
        )
    return kind
