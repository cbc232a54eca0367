"""How long does it take to find every client's noise when all clients have budgets of their own? Target: 10,000 in 2 s.

python benchmarks/calibration.py [--clients 10000]
"""

import argparse
import time

import numpy as np

from dpfl.privacy.budget import Budget
from dpfl.privacy.calibration import gaussian_noise_stds


def main() -> None:
    """Calibrate plain Gaussian noise for random (ε_i, δ_i, n_i) and numbers of replies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    clients = parser.parse_args().clients
    rng = np.random.default_rng(0)
    budgets = [
        Budget(*pair) for pair in zip(rng.uniform(0.1, 20, clients), 10 ** rng.uniform(-9, -2, clients), strict=True)
    ]
    sensitivities, replies = 1 / rng.integers(10, 1000, clients), rng.integers(1, 300, clients)
    started = time.perf_counter()
    stds = gaussian_noise_stds(sensitivities.tolist(), replies.tolist(), budgets)
    seconds = time.perf_counter() - started
    print(f"{clients} distinct budgets: {seconds:.2f} s, noise from {min(stds):.3g} to {max(stds):.3g}")


if __name__ == "__main__":
    main()
