"""Your own records and your own model: five banks, two of them cautious, train one classifier together.

Run it with `python examples/own_model.py`; it takes a few seconds.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import dpfl

# Any arrays will do: features [n, ...] and whole-number labels [n] (floating-point targets make it a regression).
rng = np.random.default_rng(0)
labels = rng.integers(2, size=4000)
features = rng.normal(size=(4000, 6)) + np.outer(2 * labels - 1, [0.8, -0.6, 0.4, 0.0, 0.0, 0.0])

# Part of them becomes the public validation split and the test split; the rest is shared out among the banks.
banks = dpfl.federate((features, labels), clients=5, sizes=(300, 400, 500, 600, 700), seed=0)

# Any module without BatchNorm, and any loss that is a mean over records. Its first parameters are yours to choose.
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

# Each bank names its own budget for the whole training: (ε, δ) for every single record.
system = dpfl.UDP(epsilon=(2, 2, 8, 8, 8), delta=1e-4, rounds=60, lr=1.0, clip=1.0)

run = dpfl.train(system, banks, model, loss=functional.cross_entropy, seed=0)

print(f"accuracy {100 * run.accuracy:.1f} %\n")
print(run.certificate, "\n")
for line in run.certificate.spending:
    print(f"bank {line.client}: promised ε = {line.claimed_epsilon:g}, spent ε ≤ {line.server_epsilon:.4f}")
