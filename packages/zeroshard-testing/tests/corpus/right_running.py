"""Functions that ordinary tests run on ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from zeroshard_testing import assert_matches_single_process, raises_on, run_on_ranks


def total(start, step=1):
    x = torch.tensor([start + step * dist.get_rank()])
    dist.all_reduce(x)
    return x


def train(rank, world_size):
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2, dtype=torch.float64))
    data = torch.randn(8, 3, dtype=torch.float64)
    model(data[rank::world_size]).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_function():
    assert [x.item() for x in run_on_ranks(total, 2, 3)] == [7, 7]


def test_keywords():
    assert [x.item() for x in run_on_ranks(total, 3, 0, step=2)] == [6, 6, 6]


def test_values_of_each_rank():
    assert run_on_ranks(dist.get_rank, 4) == [0, 1, 2, 3]


@pytest.mark.may_skip("could not import 'cloudpickle'")
def test_a_local_function():
    pytest.importorskip("cloudpickle")
    offset = 5
    assert run_on_ranks(lambda: {"rank": dist.get_rank() + offset}, 2) == [{"rank": 5}, {"rank": 6}]


def test_nothing_returned():
    assert run_on_ranks(dist.barrier, 2) == [None, None]


def test_saved_on_four_and_loaded_on_two(tmp_path):
    run_on_ranks(save, 4, str(tmp_path))
    assert run_on_ranks(load, 2, str(tmp_path)) == [6.0, 6.0]


def save(folder):
    torch.save(torch.tensor(float(dist.get_rank())), f"{folder}/{dist.get_rank()}")


def load(folder):
    parts = range(dist.get_rank(), 4, dist.get_world_size())
    x = sum(torch.load(f"{folder}/{part}", weights_only=True) for part in parts)
    dist.all_reduce(x)
    return x.item()


def test_an_exception_on_a_rank():
    with pytest.raises(Exception, match="rank 1 failed: ValueError: of rank 1"):
        run_on_ranks(raise_on_one, 2)


def raise_on_one():
    if dist.get_rank():
        raise ValueError("of rank 1")


def test_a_death_of_a_rank():
    with pytest.raises(Exception, match="rank 1 exited with status 3"):
        run_on_ranks(exit_on_one, 2)
    assert run_on_ranks(dist.get_rank, 2) == [0, 1]


def exit_on_one():
    if dist.get_rank():
        os._exit(3)


def test_another_backend():
    assert run_on_ranks(dist.get_world_size, 8, backend="fake") in ([8], [8] * 8)


def test_a_single_process():
    assert_matches_single_process(train, ranks=(2, 4), atol=1e-14)


@pytest.mark.ranks(2)
def test_raised_on_one(rank):
    with raises_on(ValueError, ranks=1, match="of rank 1"):
        if rank:
            raise ValueError("of rank 1")


@pytest.mark.ranks(3)
def test_raised_on_several(rank):
    with raises_on((KeyError, ValueError), ranks=[0, 2]):
        if rank != 1:
            raise KeyError(rank)


@pytest.mark.ranks(2)
def test_raised_on_all(rank):
    with raises_on(ranks=range(2)):
        raise OSError
    dist.barrier()


@pytest.mark.ranks(2)
def test_raised_on_one_while_the_other_goes_on(rank):
    with raises_on(ValueError, ranks=0):
        if rank == 0:
            raise ValueError
        assert rank == 1
    dist.all_reduce(torch.ones(1))
