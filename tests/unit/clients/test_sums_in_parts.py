"""Sums over more records than fit into memory: taken in parts, they are what they are at once."""

from collections.abc import Callable

import pytest
import torch

from dpfl.clients.local_steps import sums_of
from dpfl.federation import Records
from dpfl.gradients.layered import Layered, read_layers
from dpfl.gradients.record_gradients import powers
from dpfl.models import build
from dpfl.streams import Streams
from grids import each

EACH = 7  # records of a client


def problem(clients: int, models: int, name: str = "mlp") -> tuple[Layered, torch.Tensor, Records]:
    model = build(name, shape=(1, 8, 8), classes=3, rng=Streams(0).public.generator("model"))
    source = torch.Generator().manual_seed(0)
    x = torch.randn(clients * EACH, 1, 8, 8, generator=source)
    records = Records(x, torch.randint(0, 3, (len(x),), generator=source))
    wave = torch.arange(model.dim) + torch.arange(models)[:, None]
    parameters = model.vector() + 0.01 * torch.sin(wave)
    return read_layers(model, records.x, records.y), parameters if models > 1 else parameters[0], records


@each("clients, models", [(1, 1), (4, 1), (4, 4)])
@each("rows", [1, 3, 7, 15])
@each("clipped", [False, True])
@each("name", ["mlp", "femnist-cnn-small"])
def test_parts_add_up_to_the_whole(clients: int, models: int, rows: int, clipped: bool, name: str) -> None:
    layers, parameters, records = problem(clients, models, name)
    counts = (torch.arange(len(records)) % 3 > 0).float()  # some only fill a gap
    bound = (torch.linspace(0.1, 2.0, len(records), dtype=torch.float64), 2) if clipped else None
    asked: list[int] = []

    def measured() -> torch.Tensor:
        asked.append(1)
        return powers(records.x.flatten(1), 2)

    def found(rows: int, known: Callable[[], torch.Tensor] | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        lengths: list[torch.Tensor] = []
        total = sums_of(
            layers, parameters, records, counts, clients, rows, bound=bound, powers=known, lengths=lengths
        )  # fmt: skip
        return total, lengths

    whole, at_once = found(len(records), None)
    parts, in_parts = found(rows, measured if clipped else None)
    assert parts.shape == (clients, layers.model.dim)
    torch.testing.assert_close(parts.double(), whole.double(), rtol=1e-4, atol=1e-5)
    if clipped:
        torch.testing.assert_close(torch.cat(in_parts), torch.cat(at_once), rtol=1e-5, atol=1e-6)
        assert len(in_parts) >= len(records) / rows
    # The layer that sees the records of the MLP is told how long they are, each part its own.
    assert bool(asked) == (clipped and name == "mlp")


def test_no_pass_holds_more_records_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repetitions of one large client are many clients of many records, which no cut of a cohort tells apart."""
    layers, parameters, records = problem(4, 4)
    held: list[int] = []
    run = layers.sums

    def watched(*args: torch.Tensor, **named: object) -> torch.Tensor:
        held.append(len(args[1]))
        return run(*args, **named)

    monkeypatch.setattr(layers, "sums", watched)
    sums_of(layers, parameters, records, None, 4, 5)
    assert max(held) <= 5
    assert sum(held) == len(records)
