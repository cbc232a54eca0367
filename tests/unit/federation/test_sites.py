"""Clients that exist already: what is taken, how it is split, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import dpfl
from dpfl.errors import BadInput, Caution
from dpfl.federation import Records
from grids import each


def site(n: int, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(2.0 * n).view(n, 2) + shift
    return x, torch.arange(n) % 2


@each("form", ["arrays", "lists", "numpy", "torch data set", "records"])
def test_every_form_of_a_clients_records_is_the_same_federation(form: str) -> None:
    x, y = site(10)
    data: Any = {
        "arrays": (x, y), "lists": (x.tolist(), y.tolist()), "numpy": (x.numpy(), y.numpy()),
        "torch data set": TensorDataset(x, y), "records": Records(x, y),
    }[form]  # fmt: skip
    federation = dpfl.from_clients({"north": data, "south": site(5)}, classes=2)
    assert (federation.names, federation.sizes) == (("north", "south"), (8, 4))
    assert [len(own) for own in federation.site_tests] == [2, 1]
    everything = torch.cat([federation.clients[0].x, federation.site_tests[0].x])
    torch.testing.assert_close(everything.sort(dim=0).values, x)


def test_what_is_held_out_follows_from_positions_and_not_from_records() -> None:
    first = dpfl.from_clients([site(10), site(10)], classes=2)
    second = dpfl.from_clients([site(10, shift=1000.0), site(10)], classes=2)
    torch.testing.assert_close(first.clients[0].x + 1000, second.clients[0].x)
    assert not torch.equal(first.clients[0].x, first.clients[1].x)  # each site's own draw
    again = dpfl.from_clients([site(10), site(10)], classes=2, data_seed=5)
    assert not torch.equal(first.clients[0].x, again.clients[0].x)
    whole = dpfl.from_clients([site(10)], classes=2, test_share=0.0)
    assert (whole.sizes, len(whole.test), whole.site_tests) == ((10,), 0, ())


def test_clients_may_bring_test_records_and_so_may_the_public() -> None:
    own = dpfl.from_clients({"a": site(4), "b": site(6)}, test={"a": site(2), "b": site(3)}, classes=2)
    assert (own.sizes, [len(part) for part in own.site_tests], len(own.test)) == ((4, 6), [2, 3], 5)
    listed = dpfl.from_clients([site(4), site(6)], names=["a", "b"], test=[site(2), site(3)], classes=2)
    assert ([len(part) for part in listed.site_tests], listed.names) == ([2, 3], ("a", "b"))
    public = dpfl.from_clients([site(4), site(6)], test=site(7))
    assert (public.sizes, public.site_tests, len(public.test), public.classes) == ((4, 6), (), 7, 2)


def test_public_records_count_the_classes_and_are_looked_at_before_training() -> None:
    federation = dpfl.from_clients([site(6)], validation=(torch.rand(9, 2), torch.arange(9) % 3))
    assert (federation.classes, len(federation.validation)) == (3, 9)
    assert federation.example is federation.validation


def test_where_nothing_is_public_models_are_tried_with_what_is_made_up() -> None:
    near = dpfl.from_clients([site(6)], classes=2).example
    far = dpfl.from_clients([site(6, shift=1e6)], classes=2).example
    torch.testing.assert_close(near.x, far.x, rtol=0, atol=0)
    torch.testing.assert_close(near.y, far.y, rtol=0, atol=0)
    assert near.y.dtype == torch.int64
    with pytest.raises(BadInput, match=r"^model must take records of shape \[2\], but Linear failed"):
        dpfl.train(dpfl.UDP(rounds=1), dpfl.from_clients([site(6)], classes=2), torch.nn.Linear(3, 2),
                   loss=torch.nn.functional.cross_entropy)  # fmt: skip


def test_regression_needs_no_classes() -> None:
    x, y = site(10)
    run = dpfl.train(dpfl.UDP(rounds=2, lr=0.01), dpfl.from_clients({"a": (x / 20, y.float())}), seed=1)
    assert run.sites[0].accuracy is None
    assert run.sites[0].loss is not None


def test_what_cannot_be_computed_counts_as_zero_and_is_told_to_its_owner_alone() -> None:
    x, y = site(10)
    x[3, 0] = np.nan
    with pytest.warns(Caution, match="client 'north': of 10 records .*: 1 with NaN or infinity; mend .* nowhere"):
        federation = dpfl.from_clients({"north": (x, y), "south": site(5)}, classes=2, test_share=0.0)
    assert federation.sizes == (10, 5)
    assert federation.clients[0].x[3].isnan().all()
    with pytest.warns(Caution, match="client 'north': of 10 kept for testing nobody can score 1 with NaN or infinity"):
        tested = dpfl.from_clients({"north": site(5)}, test={"north": (x, y)}, classes=2)
    assert ([len(own) for own in tested.site_tests], len(tested.test)) == ([10], 9)  # nobody can score that one


@each(
    "given, sentence",
    [
        ({"clients": []}, "clients must be at least one, were none; name some$"),
        ({"clients": [site(4)]}, "classes must be given where there are no public records .*; give classes=C,"),
        ({"clients": [site(4)], "names": ["a", "b"]}, "names must be 1 different ones, one for each of the"),
        ({"clients": [site(4)] * 2, "names": ["a", "a"]}, "names must be 2 different ones, .* 2 with 1 different"),
        ({"clients": {"a": site(4), "b": (torch.rand(4, 3), torch.ones(4).long())}, "classes": 2},
         r"client 'b' must look like the rest, with features of shape \[2\] .*, had \[3\] and"),
        ({"clients": {"a": site(4), "b": (torch.rand(4, 2), torch.rand(4))}, "classes": 2},
         r"client 'b' must look like the rest, .* targets of type torch.int64, had \[2\] and torch.float32"),
        ({"clients": {"evil\x1b[31m": site(4)}, "classes": 2}, r"names must be of 1 to 60 .*, was 'evil\\x1b\[31m'"),
        ({"clients": {"": site(4)}, "classes": 2}, "names must be of 1 to 60 printable characters, .*, was ''"),
        ({"clients": {"a": 3}, "classes": 2}, r"clients \(a\) must be a map-style data set, .*, was 'int'"),
        ({"clients": {"a": (torch.rand(0, 2), torch.ones(0).long())}, "classes": 2},
         r"clients \(a\) must have at least one"),
        ({"clients": {"a": {"age": [1.0]}}, "classes": 2},
         r"schema must say what the columns of a table mean .*clients \(a\)"),
        ({"clients": {"a": site(4)}, "classes": 2, "test_share": 1.0}, "test_share must be at least 0 .*, was 1.0"),
        ({"clients": {"a": site(4), "b": site(4)}, "test": {"a": site(2)}, "classes": 2},
         "test must have records of each client,"),
        ({"clients": {"a": site(4)}, "validation": (torch.full((3, 2), torch.nan), torch.arange(3))},
         "validation features must be finite, had NaN or infinity in 3 of 3 rows"),
        ({"clients": {"a": site(4)}, "validation": site(4), "classes": 1},
         "validation must have labels 0..0 for 1 classes"),
    ],
)  # fmt: skip
def test_what_is_no_federation_is_refused_in_a_sentence(given: dict, sentence: str) -> None:
    with pytest.raises(BadInput, match=f"^{sentence}"):
        dpfl.from_clients(**given)
