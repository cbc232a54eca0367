"""Portraits of classes: a model that knows what tells digits apart draws them, one that is noise does not."""

import base64
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpfl import config as configs
from dpfl.errors import BadInput
from dpfl.experiments.cells import Cell, perform, restored
from dpfl.experiments.portraits import distinctness, portraits, portrayed
from dpfl.federation import Records
from dpfl.report.experiment import draw_portraits


def images_of_classes(spread: float = 0.05) -> Records:
    """Return 8×8 images of four classes, each brighter in a quarter of its own."""
    rng = torch.Generator().manual_seed(1)
    labels = torch.arange(4).repeat(50)
    images = spread * torch.randn(200, 1, 8, 8, generator=rng)
    for at, label in enumerate(labels):
        images[at, 0, 2 * label : 2 * label + 2] += 1.0
    return Records(images, labels)


def knowing(public: Records) -> nn.Module:
    """Return the linear model whose weights are the classes' own means."""
    layer = nn.Linear(64, 4)
    with torch.no_grad():
        layer.weight.copy_(means_of(public).flatten(1))
        layer.bias.zero_()
    return nn.Sequential(nn.Flatten(), layer)


def noise() -> nn.Module:
    layer = nn.Linear(64, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(4, 64, generator=torch.Generator().manual_seed(2)))
    return nn.Sequential(nn.Flatten(), layer)


def means_of(public: Records) -> Tensor:
    return torch.stack([public.x[public.y == label].mean(0) for label in range(4)])


def test_a_model_that_knows_its_classes_draws_them_and_noise_does_not() -> None:
    public = images_of_classes()
    start, means = public.x.mean(0), means_of(public)
    known, unknown = (distinctness(portraits(one, start, 4), start, means) for one in (knowing(public), noise()))
    assert known > 0.99
    assert abs(unknown) < 0.3


def test_every_portrait_is_surer_of_its_class() -> None:
    public = images_of_classes()
    model, start = noise(), public.x.mean(0)
    before = torch.log_softmax(model(start[None]), dim=-1)[0]
    assert bool((torch.log_softmax(model(portraits(model, start, 4)), dim=-1).diagonal() > before).all())


def test_classes_that_are_mixed_up_are_not_distinct() -> None:
    public = images_of_classes()
    start, means = public.x.mean(0), means_of(public)
    drawn = portraits(knowing(public), start, 4)
    assert distinctness(drawn.roll(1, dims=0), start, means) < 0


def test_an_image_that_nothing_changed_counts_as_not_distinct() -> None:
    public = images_of_classes()
    start, means = public.x.mean(0), means_of(public)
    assert distinctness(start.expand(4, 1, 8, 8), start, means) == 0.0


def test_what_is_kept_is_a_number_a_model_and_the_first_one_s_pictures(tmp_path: Path) -> None:
    public = images_of_classes()
    found = portrayed([knowing(public), noise()], public, 4)
    assert found["distinctness"][0] > found["distinctness"][1]
    assert found["portraits"]["shape"] == [4, 8, 8]
    assert len(base64.b64decode(found["portraits"]["grey"])) == 4 * 8 * 8
    draw_portraits({"known": found["portraits"], "again": found["portraits"]}, tmp_path / "digits.png")
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_grey_image_has_no_portrait() -> None:
    coloured = Records(torch.zeros(4, 3, 8, 8), torch.arange(4))
    with pytest.raises(BadInput, match="data must be grey images of classes"):
        portrayed([noise()], coloured, 4)
    with pytest.raises(BadInput, match="data must be grey images of classes"):
        portrayed([noise()], images_of_classes(), None)


def test_a_cell_that_draws_is_another_cell_and_trains_alone() -> None:
    table = {"system": "udp", "data": "digits", "clients": 4, "rounds": 2, "epsilon": 4.0, "delta": 1e-3}
    config = configs.parse(table | {"lr": 1.0})
    config = replace(config, settings=replace(config.settings, seed=None, data_seed=None))
    plain = Cell(config=config, repetitions=2, seed=1)
    drawing = replace(plain, portraits=True)
    assert plain.together
    assert not drawing.together
    assert plain.key != drawing.key
    assert (drawing.key_of_0_1, drawing.course) == (None, None)
    (record,) = perform([drawing], "cpu")
    assert len(restored(record, "distinctness", None) or []) == 2
    assert record["portraits"]["shape"] == [10, 8, 8]
