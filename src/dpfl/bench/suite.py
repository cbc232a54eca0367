"""All that `dpfl bench` can time, by name."""

from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

from dpfl.bench.benchmark import bench, peers_of
from dpfl.bench.growth import growth
from dpfl.bench.repeated import repetitions
from dpfl.bench.tricks import tricks
from dpfl.bench.workloads import WORKLOADS
from dpfl.errors import choose, require_one_of
from dpfl.precision import Precision
from dpfl.training import as_device

OTHERS: dict[str, Callable[..., dict[str, Any]]] = {"repetitions": repetitions, "growth": growth, "tricks": tricks}


def run(
    names: Sequence[str],
    *,
    peers: Sequence[str] | None,
    device: str,
    seconds: float,
    reference: bool,
    precision: str,
    on_start: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Time what is named, or all workloads; return the results by name."""
    wanted = [*dict.fromkeys(names)] or list(WORKLOADS)
    for name in wanted:
        choose("what to bench", name, dict.fromkeys([*WORKLOADS, *OTHERS]))
    as_device(device)
    require_one_of("precision", precision, get_args(Precision))
    others = peers_of(peers)
    results: dict[str, dict[str, Any]] = {}
    for name in wanted:
        on_start(f"timing {name}")
        if name in OTHERS:
            results[name] = OTHERS[name](device=device, seconds=seconds)
        else:
            results[name] = bench(
                name,
                peers=others,
                device=device,
                seconds=seconds,
                reference=reference,
                precision=cast(Precision, precision),
            )
    return results
