"""Comparisons: claims that are truly worth the same, what may be compared, and searches that public data decides."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

import dpfl
from dpfl.comparison import Contender, compare, contenders
from dpfl.errors import BadInput
from dpfl.privacy import paper_formulas
from dpfl.rehearsal import at_true_epsilon, rehearse
from dpfl.report.comparison import in_markdown, text
from dpfl.streams import Streams
from dpfl.systems import ALIDPFL, UDP, DPFedAvg, DPSGDFedAvg, FedAvg, FedSGDDPC, Lei, NbAFL, PrivateSystem
from grids import each

SIZES = (30, 40, 50, 60)


@pytest.fixture(scope="module", autouse=True)
def _divergences_are_found_once() -> Iterator[None]:
    """Remember the paper's Rényi divergences: a claim is searched for with the same ones hundreds of times."""
    with mock.patch.object(paper_formulas, "ali_renyi", cache(paper_formulas.ali_renyi)):
        yield


def true_epsilon(system: PrivateSystem, seed: int = 1) -> float:
    return rehearse(system, SIZES, Streams(seed)).observers["server"].epsilon


@each(
    "system",
    [
        UDP(rounds=7, calibration="paper"),
        UDP(rounds=7, cohort=2, calibration="paper"),
        UDP(rounds=7, discount=0.9, calibration="paper"),
        NbAFL(rounds=6, exposures=2),
        NbAFL(rounds=6, exposures=2, cohort=3),
        NbAFL(rounds=6, exposures=2, calibration="paper"),
        DPFedAvg(rounds=5, cohort=3, calibration="paper"),
        DPFedAvg(rounds=4, mechanism="laplace", calibration="paper"),
        FedSGDDPC(rounds=5, calibration="paper"),
    ],
    ids=lambda system: f"{system.name}-{system.calibration}",
)
@each("target", [0.5, 8.0])
def test_a_claim_is_found_that_is_truly_worth_the_target(system: PrivateSystem, target: float) -> None:
    fair = at_true_epsilon(system, SIZES, target, Streams(1))
    assert target * (1 - 1e-3) <= true_epsilon(fair) <= target * (1 + 1e-9)
    assert replace(fair, epsilon=system.epsilon) == system  # nothing else has changed


def test_steps_are_whole_so_a_claim_in_steps_stays_below_the_target() -> None:
    system = ALIDPFL(sampling_rate=0.2, noise_multiplier=1.5, rounds=500, delta=1e-3, calibration="paper")
    fair = at_true_epsilon(system, SIZES, 2.0, Streams(1))
    assert 2.0 * 0.97 <= true_epsilon(fair) <= 2.0
    assert fair.epsilon > 2.0  # type: ignore[operator]  # the paper's Rényi count is loose: a larger claim is worth no more


@pytest.mark.parametrize("system", [UDP(), UDP(discount=0.9), DPSGDFedAvg(), FedSGDDPC(), DPFedAvg(), Lei()])
def test_a_promise_that_is_true_already_stays_as_it_is(system: PrivateSystem) -> None:
    assert at_true_epsilon(system, SIZES, 8.0, Streams(1)) is system


def test_of_a_promise_to_eavesdroppers_readers_are_told_less() -> None:
    system = NbAFL(rounds=6, exposures=2, cohort=3)
    assert at_true_epsilon(system, SIZES, 8.0, Streams(1), observer="uplink") is system
    assert rehearse(system, SIZES, Streams(1)).observers["released"].epsilon < 7.5
    fair = at_true_epsilon(system, SIZES, 8.0, Streams(1), observer="released")
    assert rehearse(fair, SIZES, Streams(1)).observers["released"].epsilon == pytest.approx(8.0, rel=1e-3)
    assert fair.epsilon > 8.0  # type: ignore[operator]


def test_an_epsilon_that_no_claim_can_reach_is_refused() -> None:
    system = DPSGDFedAvg(sampling_rate=0.2, noise_multiplier=1.5, rounds=2, calibration="paper")  # two steps at most
    with pytest.raises(BadInput, match=r"^epsilon must be one that dpsgd-fedavg can really spend, was 50"):
        at_true_epsilon(system, SIZES, 50.0, Streams(1))


@pytest.mark.parametrize(
    "system",
    [
        UDP(rounds=4, epsilon=(1.0, 2.0, 4.0, 8.0)),
        UDP(rounds=4, cohort=2, epsilon=2.0, calibration="paper"),
        NbAFL(rounds=4, exposures=2, cohort=3),
        DPFedAvg(rounds=4, mechanism="laplace", cohort=3),
        DPSGDFedAvg(rounds=3, local_steps=2),
        Lei(rounds=6, noise_fall=0.0),
    ],
    ids=lambda system: system.name,
)
def test_a_rehearsal_certifies_what_the_training_will_spend(system: PrivateSystem) -> None:
    source = torch.Generator().manual_seed(0)
    sizes = (21, 21, 20, 20)
    data = (torch.randn(100, 3, generator=source), torch.randint(0, 2, (100,), generator=source))
    federation = dpfl.federate(data, clients=4, seed=1, validation_share=0.02)
    assert sum(federation.sizes) == 78
    real = dpfl.train(system, federation, "softmax", seed=1).certificate
    rehearsed = rehearse(system, federation.sizes, Streams(1))
    assert len(sizes) == len(rehearsed.spending)
    for said, true in zip(rehearsed.spending, real.spending, strict=True):
        assert said.replies == true.replies
        assert said.server_epsilon == pytest.approx(true.server_epsilon, rel=1e-6)
        assert said.released_epsilon == pytest.approx(true.released_epsilon, rel=1e-6)


def test_a_rehearsal_of_a_controller_is_of_the_most_it_may_spend() -> None:
    plain, discounted = (UDP(rounds=9, discount=discount, calibration="paper") for discount in (None, 0.5))
    assert true_epsilon(discounted) == pytest.approx(true_epsilon(plain), rel=1e-9)
    ali = ALIDPFL(sampling_rate=0.2, noise_multiplier=1.5, rounds=3, epsilon=2.0, calibration="paper")
    steps = rehearse(ali, SIZES, Streams(1))
    assert steps.rounds <= 3
    one_by_one = replace(ali, rounds=10_000)  # τ = 1 until R_c is used up
    assert steps.observers["server"].epsilon == pytest.approx(true_epsilon(one_by_one), rel=1e-9)


def test_what_is_given_goes_to_all_that_know_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('system = "udp"\nlr = 1.0\nsearch.rounds = [2, 3]\n')
    found = contenders(["fedavg", str(tmp_path / "mine.toml"), "udp", "udp"], {"clip": 0.5, "clients": 4})
    assert [one.label for one in found] == ["fedavg", "mine", "udp", "udp-2"]
    assert found[0].config.system == FedAvg()
    assert found[1].config.system == UDP(lr=1.0, clip=0.5)
    assert {one.config.settings.clients for one in found} == {4}
    assert [(choice, config.system.rounds) for choice, config in found[1].candidates()] == [
        ({"rounds": 2}, 2),
        ({"rounds": 3}, 3),
    ]
    assert found[0].candidates() == [({}, found[0].config)]


@pytest.mark.parametrize(
    ("text", "given", "sentence"),
    [
        (
            'system = "udp"\nclients = 5\n',
            {},
            "^clients must be the same in all that is compared, was 5 for mine and 20",
        ),
        ('system = "udp"\nmodel = "mlp"\n', {}, "^model must be the same in all"),
        ('system = "udp"\n', {"colour": 1}, "^colour must be a setting or an option of a system that is compared"),
        ('system = "udp"\nsearch.rouns = [1]\n', {}, "^search must name options of udp"),
        ('system = "udp"\nsearch.rounds = 3\n', {}, r"^search.rounds must be a list of values to try, was 3"),
        ('system = "udp"\nsearch.rounds = []\n', {}, r"^search.rounds must be a list of values to try"),
        ('system = "udp"\nsearch = 3\n', {}, "^search must name options of udp with a list of values each"),
        (
            'system = "udp"\nsearch.rounds = [2]\n',
            {"validation_share": 0},
            "^validation_share must be above 0 for a sea",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(text: str, given: dict, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(BadInput, match=sentence):
        contenders([str(tmp_path / "mine.toml"), "fedavg"], given)
    with pytest.raises(BadInput, match="at least one config or system"):
        contenders([], {})


def small(*names: str, **given: object) -> list[Contender]:
    return contenders(names, {"clients": 3, "share": 0.2, "rounds": 2, **given})


def test_without_a_target_all_must_promise_the_same() -> None:
    found = [*small("udp", epsilon=4.0), *small("fedsgd-dpc", epsilon=5.0)]
    with pytest.raises(BadInput, match=r"^epsilon must be the same for all that is compared, was .*'udp': 4.0"):
        compare(found, seeds=1)
    assert compare(found, seeds=1, epsilon=4.0).epsilon == 4.0
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(BadInput, match=r"^epsilon must be a finite number above 0"):
            compare(found, seeds=1, epsilon=wrong)
    with pytest.raises(BadInput, match=r"^seeds must be a whole number of at least 1"):
        compare(found, seeds=0)


def test_means_and_standard_errors_are_over_seeds() -> None:
    told = []
    whole = compare(small("udp", "fedavg"), seeds=3, epsilon=2.0, on_run=lambda label, seed: told.append((label, seed)))
    assert told == [(label, seed) for label in ("udp", "fedavg") for seed in (1, 2, 3)]
    private, plain = whole.to_dict()["systems"]
    losses = [run["loss"] for run in private["runs"]]
    assert len(set(losses)) == 3
    mean = sum(losses) / 3
    assert private["loss"]["mean"] == pytest.approx(mean)
    variance = sum((loss - mean) ** 2 for loss in losses) / 2
    assert private["loss"]["standard_error"] == pytest.approx(math.sqrt(variance / 3))
    assert private["true_epsilon"] == pytest.approx(2.0, rel=1e-6)
    assert plain["true_epsilon"] is None
    assert plain["claimed"] is None
    assert compare(small("fedavg"), seeds=1).to_dict()["systems"][0]["loss"]["standard_error"] is None


def test_a_misspelt_key_gets_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"which none knows; did you mean 'rounds'\?$"):
        contenders(["udp"], {"rouns": 3})


def test_what_is_printed_comes_from_what_is_kept(tmp_path: Path) -> None:
    whole = compare(small("udp", "fedavg"), seeds=2, epsilon=2.0, out=tmp_path / "c")
    kept = json.loads((tmp_path / "c/comparison.json").read_text())
    assert text(kept) == str(whole)
    assert (tmp_path / "c/comparison.md").read_text() == in_markdown(kept)
    assert "true ε at δ = 0.001 against the server, for one record, replaced by any other" in str(whole)
    assert "a simulation, which runs on seeds: nobody's records were protected here" in str(whole)


def test_what_has_no_price_in_the_currency_stands_apart_with_a_reason() -> None:
    found = small("udp", "adap-dpfl", "fedavg", epsilon=20.0)
    told = str(whole := compare(found, seeds=1))
    ranked, apart = told.split("not comparable with these: no price in that currency")
    assert "\nudp " in ranked
    assert "adap-dpfl" not in ranked
    assert "\nadap-dpfl " in apart
    assert "adap-dpfl: noise that is chosen along the way must be on all records" in apart
    assert "fedavg " in apart
    udp, adap, fedavg = whole.to_dict()["systems"]
    assert (udp["neighbours"], udp["apart"]) == ("replace", None)
    assert adap["neighbours"] is adap["true_epsilon"] is fedavg["neighbours"] is None
    assert adap["promise"] == {
        "unit": "record", "neighbours": "add-remove", "epsilon": 20.0, "delta": 1e-3, "true_epsilon": 20.0,
    }  # fmt: skip
    assert fedavg["promise"] is None
    assert str(compare(small("fedavg"), seeds=1)).startswith("not comparable: no price in one currency")
    alone = compare(found[1:2], seeds=1, neighbours="add-remove").to_dict()  # where its filter holds
    assert alone["systems"][0]["true_epsilon"] == 20.0
    assert alone["if_real"]["not_counted"] == 1


@each("neighbours", ["replace", "add-remove", "client"])
def test_all_rows_are_priced_in_the_currency_asked_for(neighbours: str) -> None:
    rows = compare(small("udp", "dp-fedavg"), seeds=1, epsilon=4.0, neighbours=neighbours).to_dict()["systems"]
    for row in rows:
        assert row["neighbours"] == neighbours
        assert row["true_epsilon"] == pytest.approx(4.0, rel=1e-3)
        assert row["true_epsilon"] <= 4.0
    udp, whole_clients = (row["claimed"]["epsilon"] for row in rows)
    assert whole_clients == pytest.approx(4.0)  # one record without a bound of its own costs as much as its client
    assert {"replace": udp == 4.0, "add-remove": udp > 8, "client": udp < 0.1}[neighbours]


def test_a_currency_that_there_is_not_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^neighbours must be one of replace, add-remove, client, was 'both'"):
        compare(small("udp"), seeds=1, neighbours="both")


def test_a_search_shows_the_candidate_with_the_least_public_loss(tmp_path: Path) -> None:
    (tmp_path / "optimal.toml").write_text('system = "udp"\nsearch.rounds = [1, 6]\nsearch.lr = [1e-6, 1.0]\n')
    found = contenders([str(tmp_path / "optimal.toml")], {"clients": 3, "epsilon": 1e4})
    (shown,) = compare(found, seeds=2).results
    assert shown.searched == {"rounds": 6, "lr": 1.0}  # almost without noise, more and longer steps are better
    assert {run.rounds for run in shown.runs} == {6}
