"""Paid evaluation: a test record shows in its own site's noised count, by one part in n, and nowhere else."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

import dpfl
from dpfl.errors import BadInput
from dpfl.federation import Federation, Records
from dpfl.models import Model
from dpfl.models.losses import squared_error
from dpfl.paid_evaluation import counting_system, noise_of, to_be_counted
from dpfl.privacy.calibration import gaussian_noise_stds
from dpfl.server.at_sites import SiteResult
from dpfl.streams import Streams

FEW = {"rounds": 2, "epsilon": 2.0, "lr": 0.5}


def hospitals() -> Federation:
    return dpfl.federate("heart")


def with_other_record(federation: Federation, client: int, row: int, features: float = 1e30) -> Federation:
    """Replace one test record of one site by something hostile, with the other label."""
    tests = list(federation.site_tests)
    x, y = tests[client].x.clone(), tests[client].y.clone()
    x[row], y[row] = features, 1 - y[row]
    tests[client] = Records(x, y)
    test = Records(torch.cat([own.x for own in tests]), torch.cat([own.y for own in tests]))
    return replace(federation, site_tests=tuple(tests), test=test)


class Mixing(nn.Module):
    """Looks at the whole batch: its largest record decides what all are taken for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(13, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * torch.sign(1e6 - x.abs().max())
        return out


@pytest.mark.parametrize("hostile", [1e30, math.nan, -math.inf, 0.0])
def test_one_test_record_moves_one_mark_of_one_site(hostile: float) -> None:
    module = Mixing()
    model = Model(module, functional.cross_entropy, classify=lambda outputs: outputs.argmax(-1))
    here = hospitals()
    there = with_other_record(here, 1, 7, hostile)
    ours, theirs = (to_be_counted(model, model.vector(), one)[0].clients for one in (here, there))
    moved = [int((one.y != other.y).sum()) for one, other in zip(ours, theirs, strict=True)]
    assert moved[0] + moved[2] + moved[3] == 0
    assert moved[1] <= 1
    assert all(abs(float(one.y.sum() - other.y.sum())) <= 0.5 for one, other in zip(ours, theirs, strict=True))
    # The deliberately wrong twin shows all records to the model at once.
    if hostile == 1e30:
        sides = [model.outputs(model.split(model.vector()), one.site_tests[1].x).argmax(-1) for one in (here, there)]
        assert int((sides[0] != sides[1]).sum()) > 10


def evaluated(federation: Federation, seed: int, system: dpfl.System | None = None) -> tuple[SiteResult, ...]:
    run = dpfl.train(system or dpfl.FedSGDDPC(**FEW), federation, seed=seed, paid_evaluation=0.5)
    assert (run.accuracy, run.loss) == (None, None)
    assert all((site.loss, site.calibration_error) == (None, None) for site in run.sites)
    assert all(line["loss"] is None and line["accuracy"] is None for line in run.history)
    assert run.certificate.held_out is None
    assert run.evaluation is not None
    return run.sites


def test_under_the_same_noise_a_neighbour_changes_its_own_sites_count_by_one_part_in_n() -> None:
    # An accuracy near ½ is far from where it is cut off at 0 and 1; the site's noise is small enough for that.
    ours, theirs = (evaluated(one, seed=3) for one in (hospitals(), with_other_record(hospitals(), 0, 5)))
    for site, other in zip(ours[1:], theirs[1:], strict=True):
        assert site == other
    assert abs(ours[0].accuracy - theirs[0].accuracy) <= 1 / ours[0].tested + 1e-5
    assert replace(ours[0], accuracy=None) == replace(theirs[0], accuracy=None)


@pytest.mark.parametrize(("neighbours", "sensitivity"), [("replace", 1.0), ("add-remove", 0.5)])
def test_the_noise_is_what_the_budget_asks_for(neighbours: str, sensitivity: float) -> None:
    sizes = (104, 16)
    stds = noise_of(counting_system(0.5, (1e-3, 1e-5), neighbours), sizes, Streams(1))
    for std, n, delta in zip(stds, sizes, (1e-3, 1e-5), strict=True):
        (expected,) = gaussian_noise_stds([sensitivity / n], [1], [dpfl.Budget(0.5, delta)])
        assert std == pytest.approx(expected, rel=1e-4)


def _keep(kept: dict[int, Tensor], _: int, found: dict[int, Tensor]) -> None:
    kept.update(found)


def test_the_noise_that_is_stated_is_the_noise_that_is_drawn() -> None:
    """False alarm 1e-3; the deliberately wrong twins state a quarter more or less."""
    model = Model(nn.Linear(13, 2), functional.cross_entropy, classify=lambda outputs: outputs.argmax(-1))
    system = counting_system(0.5, (1e-3,) * 4, "replace")
    drawn: list[float] = []
    for seed in range(60):
        counted, counting = to_be_counted(model, model.vector(), hospitals())
        uploads: dict[int, Tensor] = {}
        keep = partial(_keep, uploads)
        dpfl.train(system, counted, counting, loss=squared_error, seed=seed, on_uploads=keep)
        stds = noise_of(system, counted.sizes, Streams(1))
        exact = [2 * float(own.y.mean()) for own in counted.clients]
        drawn += [(float(uploads[client][0]) - exact[client]) / stds[client] for client in range(4)]
    spread = float(np.sum(np.square(drawn)))
    low, high = stats.chi2.ppf([5e-4, 1 - 5e-4], len(drawn))
    assert low < spread < high
    assert not low < spread / 1.25**2 < high
    assert not low < spread * 1.25**2 < high


def test_what_was_paid_stands_in_the_ledger_beside_the_training(tmp_path: Path) -> None:
    run = dpfl.train(dpfl.UDP(epsilon=2.0, rounds=2), hospitals(), paid_evaluation=0.5, out=tmp_path / "r")
    assert run.evaluation.observers["server"].epsilon == pytest.approx(0.5, rel=1e-6)
    assert 2.0 < run.evaluation.together.epsilon < 2.5
    assert run.evaluation.together.runs == 2
    shared = tmp_path / "r/ledger.sqlite"
    again = dpfl.train(dpfl.UDP(epsilon=2.0, rounds=2), hospitals(), paid_evaluation=0.5, ledger=shared)
    assert again.evaluation.together.runs == 4
    # Records that were tested on without noise are nobody's secret any more: they cannot be private afterwards.
    with pytest.raises(BadInput, match="became public"):
        dpfl.train(dpfl.UDP(epsilon=2.0, rounds=2), hospitals(), ledger=shared)


def test_where_nothing_can_be_counted_a_sentence_says_so() -> None:
    with pytest.raises(
        BadInput, match=r"^paid_evaluation must be for clients that keep records for testing, but these"
    ):
        dpfl.train(dpfl.UDP(rounds=1), dpfl.federate("digits", clients=2, seed=1), paid_evaluation=0.5)
    x, y = torch.rand(20, 2), torch.rand(20)
    with pytest.raises(BadInput, match=r"^paid_evaluation must be for classes, .* numbers here; leave it out$"):
        dpfl.train(dpfl.UDP(rounds=1), dpfl.from_clients([(x, y)]), paid_evaluation=0.5)
    with pytest.raises(BadInput, match=r"^paid_evaluation must be a finite number above 0, was -1.0; spend 0.5, say"):
        dpfl.train(dpfl.UDP(rounds=1), hospitals(), paid_evaluation=-1)
