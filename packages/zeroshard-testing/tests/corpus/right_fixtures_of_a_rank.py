"""Rank fixtures with scope, parameters, autouse and names, and as methods."""

import os

import pytest
import torch.distributed as dist
from torch import ones
from zeroshard_testing import rank_fixture

two = pytest.mark.ranks(2)


@rank_fixture(autouse=True)
def marks_its_process(rank):
    os.environ["ON_RANK"] = str(rank)
    yield
    del os.environ["ON_RANK"]


@two
def test_autouse(rank):
    assert os.environ["ON_RANK"] == str(rank)


def test_autouse_is_for_marked_tests():
    assert "ON_RANK" not in os.environ


@rank_fixture()
def with_parentheses(rank):
    return rank


@two
def test_parentheses(with_parentheses, rank):
    assert with_parentheses == rank


@rank_fixture(params=[1, 2], ids=["one", "two"])
def size(request, rank):
    return ones(request.param)


@two
def test_parameters(size, request):
    dist.all_reduce(size)
    assert ("one" in request.node.name) == (len(size) == 1)


@rank_fixture(scope="module")
def of_the_module():
    return []


@two
@pytest.mark.parametrize("turn", [1, 2])
def test_module_scope(of_the_module, turn):
    of_the_module.append(turn)
    assert len(set(of_the_module)) == len(of_the_module)


@rank_fixture(name="renamed")
def under_another_name(rank):
    return f"renamed on {rank}"


@two
def test_name(renamed, rank):
    assert renamed == f"renamed on {rank}"


class TestMethods:
    prepared = 7

    @rank_fixture
    def method(self, rank):
        yield self.prepared + rank
        self.prepared = 0

    @rank_fixture(scope="class")
    def of_the_class(self):
        return []

    @two
    @pytest.mark.parametrize("turn", [1, 2])
    def test_method(self, method, rank, turn):
        assert method == 7 + rank

    @two
    def test_class_scope(self, of_the_class):
        assert of_the_class == []


@two
class TestAutouse:
    @rank_fixture(autouse=True)
    def prepare(self, rank):
        self.rank = rank

    def test_method(self, rank):
        assert self.rank == rank
