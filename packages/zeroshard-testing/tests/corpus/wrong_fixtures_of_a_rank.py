"""Rank fixtures with a scope, parameters or autouse, and rank fixtures that are methods, which fail."""

import pytest
import torch
import torch.distributed as dist
from zeroshard_testing import rank_fixture

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


@rank_fixture(params=["a", "b"])
def of_parameters(request, rank):
    if rank:
        raise OSError(f"cannot set up {request.param}")


@says(r"rank 1 failed: OSError: cannot set up [ab]")
def test_parameters(of_parameters):
    pass


class TestAutouse:
    @rank_fixture(autouse=True)
    def double_precision(self, rank):
        torch.set_default_dtype(torch.float64)

    @says(r"ranks 0, 1 failed: assert torch.float64 == torch.float32")
    def test_denied_a_default_dtype(self):
        assert torch.ones(1).dtype == torch.float32


class TestMethod:
    @rank_fixture
    def raises_in_teardown(self, rank):
        yield
        assert rank == 0

    @says(r"rank 1 failed: assert 1 == 0")
    def test_raised_in_teardown(self, raises_in_teardown):
        pass


class TestScope:
    @rank_fixture(scope="class")
    def of_the_class(self):
        yield
        assert dist.get_rank() == 0

    @says(r"rank 1 failed: assert 1 == 0")
    def test_raised_in_teardown(self, of_the_class):
        pass


@rank_fixture(name="renamed")
def under_another_name(rank):
    raise OSError(f"cannot set up on {rank}")


@says(r"rank [01] failed: OSError: cannot set up on [01]")
def test_name(renamed):
    pass


def test_healthy_after_rank_fixtures(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6
