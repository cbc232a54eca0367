"""Tests that run beside each other share the cores; and what guarantees rest on is watched while its own tests run."""

import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest
import torch

# A worker that spreads its work over all cores waits for the others that do the same. What a test says itself holds.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # in the commands that tests start

# To watch every line doubles what a test takes, so that only these are watched, where `make test` asks for it.
HERE = Path(__file__).parent
OWN_TESTS = "unit/privacy unit/systems unit/test_orders.py unit/clients/test_draws.py e2e/test_certificate.py"
WATCHED = [HERE / name for name in OWN_TESTS.split()]
_watch = coverage.Coverage(data_suffix=True) if "WATCH" in os.environ else None

if _watch is not None:
    _watch.start()
    import dpfl.orders
    import dpfl.privacy.calibration
    import dpfl.privacy.certificate
    import dpfl.privacy.ledger
    import dpfl.privacy.mechanisms
    import dpfl.privacy.paper_formulas
    import dpfl.privacy.solve
    import dpfl.privacy.statement  # noqa: F401 (what a file does when it is imported counts too)

    _watch.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Watch the lines that a test runs, if it is one of those."""
    if _watch is None or not any(item.path.is_relative_to(place) for place in WATCHED):
        return (yield)
    _watch.start()
    try:
        return (yield)
    finally:
        _watch.stop()


def pytest_sessionfinish() -> None:
    """Keep what was watched, a file for each worker."""
    if _watch is not None:
        _watch.save()
