"""`dpfl bench`: every contender on every workload, in turns."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import torch

from dpfl.bench import loop, rounds
from dpfl.bench.timing import medians
from dpfl.bench.workloads import WORKLOADS, DrawnWorkload, Workload, draw
from dpfl.errors import BadInput, choose
from dpfl.precision import Precision, products

PEERS = ("pfl", "flower", "opacus")
Times = dict[str, float]
Contender = Callable[[], object]


def installed_peers() -> tuple[str, ...]:
    """Return the peers whose libraries are there."""
    return tuple(name for name in PEERS if _module(name) is not None)


def peers_of(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the peers that were asked for, or all that are installed for None."""
    if names is None:
        return installed_peers()
    for name in names:
        choose("peers", name, dict.fromkeys(PEERS))
        if _module(name) is None:
            raise BadInput(
                f"peers must be installed to be timed, was {name!r}; install it with `pip install dpfl[bench]`"
            )
    return tuple(names)


def bench(
    name: str,
    *,
    peers: Sequence[str],
    device: str = "cpu",
    seconds: float = 3.0,
    reference: bool = True,
    precision: Precision = "float32",
) -> Times:
    """Time a workload; return milliseconds a round: dpfl_ms, floor_ms, loop_ms, and so on.

    seconds: how long each contender is timed, three rounds at least.
    """
    workload = choose("workload", name, WORKLOADS)
    target = torch.device(device)
    if target.type == "cuda" and workload.name == "W2":
        workload = replace(workload, clients=350, cohort=350)  # more than fit into a GPU at once
    with ExitStack() as resources:
        contenders = _contenders(workload, target, peers, reference, resources)
        with products(precision):
            taken = medians(contenders, seconds=seconds, device=target)
    size = _gemm_size(target)
    floor = workload.flops_a_round / (2 * size**3 / taken.pop("gemm"))
    opacus = [taken.pop(key) for key in list(taken) if key.startswith("opacus ")]
    times = {"dpfl_ms": taken.pop("dpfl"), "floor_ms": floor, "loop_ms": taken.pop("loop")}
    times |= {f"{key}_ms": value for key, value in taken.items()}
    return times | ({"opacus_ms": min(opacus)} if opacus else {})  # its best mode


def _contenders(
    workload: Workload, device: torch.device, peers: Sequence[str], reference: bool, resources: ExitStack
) -> Mapping[str, Contender]:
    def problem() -> DrawnWorkload:
        return draw(workload, device)

    size = _gemm_size(device)
    factor = torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0))
    contenders: dict[str, Contender] = {"gemm": lambda: factor @ factor, "dpfl": rounds.stacked(problem())}
    contenders["exact"] = rounds.exactly_noised(problem())
    contenders["loop"] = loop.prepare(problem())
    if workload.name == "W3":
        contenders["plain"] = rounds.without_privacy(problem())
    if reference:
        contenders["reference"] = rounds.reference(problem())
    for name in peers:
        peer = _module(name)
        if peer is None or workload.name not in peer.WORKLOADS:
            continue
        if name == "opacus":
            contenders |= {f"opacus {mode}": peer.prepare(problem(), mode) for mode in peer.MODES}
            continue
        contenders[name] = peer.prepare(problem())
        if hasattr(contenders[name], "close"):
            resources.callback(getattr(contenders[name], "close"))  # noqa: B009 (a contender is any callable)
    return contenders


def _gemm_size(device: torch.device) -> int:
    """Return the side of the square matrices whose product is taken for the fastest arithmetic there is."""
    return 8192 if device.type == "cuda" else 2048


def _module(name: str) -> ModuleType | None:
    try:
        return import_module(f"dpfl.bench.peers.{name}")
    except ImportError:
        return None
