"""The papers' claims need the papers' data."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _real_data() -> None:
    if "DPFL_DATA" not in os.environ:
        pytest.skip("needs MNIST and the loans: set DPFL_DATA to the folder that has them")
