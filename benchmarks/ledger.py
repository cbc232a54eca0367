"""What does it cost to charge every upload before it exists? Target: a million charges in 60 s and 200 MB.

Each round charges every client for an order of its own (its noise follows from its own budget and number of records),
commits the charges to disk and notes how the uploads were weighed. Then everything is added up, as a certificate does:
what each client has spent by its uploads, and what it let out through the models.

python benchmarks/ledger.py [--rounds 1000] [--clients 1000] [--fresh-noise] [--folder /some/disk]
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from dpfl.orders import Gaussian, Order, RecordClip, sensitivity
from dpfl.privacy.books import Books
from dpfl.privacy.budget import Budget, Promise
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.privacy.ledger import Ledger

T = TypeVar("T")


def main() -> None:
    """Charge, add up, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--fresh-noise", action="store_true", help="change every client's noise in every round")
    parser.add_argument("--folder", help="where to put the file while it is measured; a disk is slower than a tmpfs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder, "ledger.sqlite"), options.rounds, options.clients, fresh_noise=options.fresh_noise)


def measure(path: Path, rounds: int, clients: int, *, fresh_noise: bool) -> None:
    """Play the books of a training without training anything."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(50, 1000, clients).tolist()
    budgets = [Budget(epsilon, 1e-5) for epsilon in rng.uniform(1, 10, clients).tolist()]
    promise = Promise(budgets=tuple(budgets), unit="record", neighbours="replace", calibration="tight")
    bounds = [sensitivity(order_of(1.0), records=n, unit="record", neighbours="replace", norm=2) for n in sizes]
    stds = gaussian_noise_stds(bounds, [rounds] * clients, budgets)
    weights = {client: size / sum(sizes) for client, size in enumerate(sizes)}

    ledger = Ledger(promise, sizes, books=Books(path), system="benchmark")
    orders = {client: order_of(std) for client, std in enumerate(stds)}
    seconds = 0.0
    for _ in range(rounds):
        if fresh_noise:  # a little more than planned, so that no budget ends before the training does
            more = rng.uniform(1, 1.1, clients).tolist()
            orders = {client: order_of(stds[client] * more[client]) for client in range(clients)}
        started = time.perf_counter()
        paid = ledger.charge(orders)
        ledger.broadcast(weights)
        seconds += time.perf_counter() - started
        assert len(paid) == clients
    charging = peak_megabytes()
    spent_seconds, spent = timed(lambda: ledger.books.spent(ledger.run))
    released_seconds, released = timed(lambda: ledger.books.released(ledger.run))
    assert released is not None
    assert len(spent) == len(released) == clients

    noise = "fresh noise in every round" if fresh_noise else "noise of its own for every client"
    print(f"{rounds} rounds × {clients} clients, {noise}")
    print(f"charged in    {seconds:8.1f} s   ({1e6 * seconds / rounds / clients:.1f} µs a charge)")
    print(f"file          {path.stat().st_size / 1e6:8.1f} MB")
    print(f"peak memory   {charging:8.1f} MB  ({peak_megabytes():.1f} MB with the sums below)")
    print(f"spent()       {spent_seconds:8.1f} s")
    print(f"released()    {released_seconds:8.1f} s")


def order_of(std: float) -> Order:
    """Order one clipped step with this noise on the upload."""
    return Order(steps=1, learning_rate=0.5, clip=RecordClip(1.0), noise=Gaussian(std))


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return how many seconds a call took, and its result."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def peak_megabytes() -> float:
    """Return the most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # Linux counts in kilobytes


if __name__ == "__main__":
    main()
