"""Rounds that are worked out by hand are played by every client that there is."""

from collections.abc import Callable
from typing import Any

import pytest

from golden import known


@pytest.fixture(params=[known.reference, known.stacked], ids=lambda make: make.__name__)
def clients_of(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return what makes the clients of a model, their records and streams."""
    make: Callable[..., Any] = request.param
    return make
