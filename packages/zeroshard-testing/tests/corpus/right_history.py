"""Ranks of one test have run the same tests before, whatever the number of ranks."""

import random

import pytest
import torch
import torch.distributed as dist

history = []


def assert_same_history(name, world_size):
    history.append(name)
    text = "".join(history).encode()
    digest = torch.tensor([len(history), len(text), sum(i * c for i, c in enumerate(text)) % (1 << 40)])
    found = [torch.empty_like(digest) for _ in range(world_size)]
    dist.all_gather(found, digest)
    assert all(torch.equal(one, digest) for one in found)


@pytest.mark.ranks(2, 4)
def test_two_and_four(world_size):
    assert_same_history("a", world_size)


@pytest.mark.ranks(4, 2)
def test_four_and_two(world_size):
    assert_same_history("b", world_size)


@pytest.mark.ranks(1, 2, 3, 4)
def test_one_to_four(world_size):
    assert_same_history("c", world_size)


@pytest.mark.ranks(2)
def test_two(world_size):
    assert_same_history("d", world_size)


@pytest.mark.ranks(4)
def test_four(world_size):
    assert_same_history("e", world_size)


cache = {}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("turn", [1, 2])
def test_a_cache_that_its_first_use_fills_by_a_collective(world_size, turn):
    if "ready" not in cache:
        dist.barrier()
        cache["ready"] = True


@pytest.mark.ranks(2, 4)
def test_seeds_that_imports_do_not_change(world_size):
    found = torch.tensor([random.random(), torch.rand(()).item()], dtype=torch.float64)
    most, least = found.clone(), found.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    assert torch.equal(most, least)


random.seed(77)
torch.manual_seed(random.randrange(1000))


@pytest.mark.ranks(2, 4)
@pytest.mark.may_skip("needs numpy")
def test_seeds_of_numpy_that_imports_do_not_change(world_size):
    numpy = pytest.importorskip("numpy", reason="needs numpy")
    found = torch.tensor([numpy.random.random()])
    most, least = found.clone(), found.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    assert torch.equal(most, least)
