"""A block raises on other ranks than `raises_on` says."""

import pytest
from zeroshard_testing import raises_on

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


@says(r"rank 0 failed: .*(DID NOT RAISE|did not raise)")
def test_raised_on_one_of_two(rank):
    with raises_on(ValueError, ranks=[0, 1]):
        if rank:
            raise ValueError("here")


@says(r"rank 1 failed: .*ValueError|rank 1 failed: .*raised")
def test_raised_on_one_too_many(rank):
    with raises_on(ValueError, ranks=0):
        raise ValueError("here")


@says(r"ranks? (0|1|0, 1) failed: .*(DID NOT RAISE|did not raise|ValueError|raised)")
def test_raised_on_the_other(rank):
    with raises_on(ValueError, ranks=0):
        if rank:
            raise ValueError("here")


@says(r"rank 1 failed: .*KeyError")
def test_raised_something_else(rank):
    with raises_on(ValueError, ranks=1):
        if rank:
            raise KeyError("here")


@says(r"rank 1 failed: .*([Rr]egex|match)")
def test_raised_with_another_text(rank):
    with raises_on(ValueError, ranks=1, match="there"):
        if rank:
            raise ValueError("here")


@says(r"ranks 0, 1 failed: .*(DID NOT RAISE|did not raise)")
def test_raised_nowhere(rank):
    with raises_on(ranks=[0, 1]):
        pass


def test_healthy_after_raises_on(rank):
    with raises_on(ValueError, ranks=1):
        if rank:
            raise ValueError("here")


@pytest.mark.parametrize("ranks", [2, [], [0, 2]])
@says(r"ranks 0, 1 failed: ValueError: raises_on: ranks must be some of the 2 ranks of the group")
def test_raised_on_a_rank_that_is_not_there(ranks):
    with raises_on(ValueError, ranks=ranks):
        pass
