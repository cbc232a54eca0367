"""Work spread over cores: all of it is done, in its order, and the process is afterwards as it was."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dpfl.clients.cores import Cores, one_core
from dpfl.gradients.layered import Layered
from dpfl.models import Model
from dpfl.models.architectures import squared_error


@pytest.fixture(autouse=True)
def two_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def cores() -> Cores:
    return Cores(Layered(Model(nn.Linear(2, 1), squared_error), torch.zeros(0, 2)))


def settings() -> tuple[int, float]:
    return torch.get_num_threads(), sys.getswitchinterval()


def test_results_come_in_the_order_of_the_work() -> None:
    second_is_done = threading.Event()

    def do(_: Layered, one: int) -> int:
        if one == 0:
            assert second_is_done.wait(10)  # the other core is at work meanwhile
        if one == 1:
            second_is_done.set()
        return one

    assert list(cores().spread(do, range(5))) == [0, 1, 2, 3, 4]


def test_each_core_has_a_copy_of_its_own_and_torch_one_thread() -> None:
    both = threading.Barrier(2, timeout=10)

    def do(layers: Layered, _: int) -> tuple[int, int]:
        both.wait()
        return id(layers), torch.get_num_threads()

    found = list(cores().spread(do, range(2)))
    assert len({layers for layers, _ in found}) == 2
    assert [threads for _, threads in found] == [1, 1]


def test_afterwards_all_is_as_it_was() -> None:
    before, spread = settings(), cores().spread(lambda _, one: one, range(3))
    assert next(spread) == 0
    assert settings() != before
    assert list(spread) == [1, 2]
    assert settings() == before


def test_work_that_fails_takes_nothing_with_it() -> None:
    def fail(_: Layered, one: int) -> int:
        if one % 2:
            raise ValueError(one)
        return one

    before, same = settings(), cores()
    for _ in range(3):  # more often than there are copies
        with pytest.raises(ValueError, match="1"):
            list(same.spread(fail, range(4)))
        assert settings() == before
    assert list(same.spread(lambda _, one: one, range(4))) == [0, 1, 2, 3]


def test_one_core_is_for_the_block_alone() -> None:
    with one_core():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
