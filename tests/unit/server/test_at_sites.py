"""Evaluation at the sites: whose test records, how sure a model is of them, and what each site spent."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import dpfl
from dpfl.federation import Records
from dpfl.models import Model
from dpfl.server.at_sites import calibration_error


def test_a_line_for_each_site_with_its_own_accuracy_and_budget() -> None:
    federation = dpfl.federate("heart")
    run = dpfl.train(dpfl.UDP(epsilon=(1, 2, 3, 4), rounds=5), federation, seed=1)
    assert [site.name for site in run.sites] == list(federation.names)
    assert [site.epsilon_granted for site in run.sites] == [1, 2, 3, 4]
    assert [site.epsilon_spent for site in run.sites] == pytest.approx([1, 2, 3, 4], rel=1e-6)
    pooled = sum(site.accuracy * site.tested for site in run.sites) / sum(site.tested for site in run.sites)
    assert pooled == pytest.approx(run.accuracy)
    assert run.to_dict()["sites"][3]["name"] == "va"
    assert "sites" not in dpfl.train(dpfl.UDP(rounds=1), dpfl.federate("digits", clients=2, seed=1), seed=1).to_dict()


def test_without_privacy_no_budget_is_spent_and_none_granted() -> None:
    site = dpfl.train(dpfl.FedSGD(rounds=2, lr=0.1), dpfl.federate("heart"), seed=1).sites[0]
    assert (site.epsilon_granted, site.epsilon_spent, site.delta) == (None, None, None)


class Sure(nn.Module):
    """Says the first class, with a probability that the record brings."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.logit(x) + self.shift, torch.zeros_like(x)], dim=1)


def test_calibration_is_how_far_confidence_is_from_accuracy() -> None:
    model = Model(Sure(), functional.cross_entropy, classify=lambda outputs: outputs.argmax(-1))
    right = Records(torch.full((10, 1), 0.75), torch.tensor([0] * 7 + [1] * 3))
    assert calibration_error(model, model.vector(), right) == pytest.approx(0.05, abs=1e-6)
    # Bins are judged apart: too sure in one and not sure enough in another do not make up for each other.
    x = torch.tensor([0.95] * 10 + [0.55] * 10)[:, None]
    both = Records(x, torch.tensor([0] * 5 + [1] * 5 + [0] * 10))
    assert calibration_error(model, model.vector(), both) == pytest.approx(0.45, abs=1e-6)


def test_what_gives_no_probabilities_has_no_calibration() -> None:
    federation = dpfl.federate("heart")
    run = dpfl.train(dpfl.UDP(rounds=2), federation, "svm", seed=1)
    assert run.sites[0].calibration_error is None
    assert run.sites[0].accuracy is not None
