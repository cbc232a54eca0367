"""Tests that run beside each other share the cores."""

import os

import torch

# A worker that spreads its work over all cores waits for the others that do the same. What a test says itself holds.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # in the commands that tests start
