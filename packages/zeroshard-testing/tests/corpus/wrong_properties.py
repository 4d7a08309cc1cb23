"""Properties of hypothesis that fail: told with the assertion, and not with what the other ranks wait for."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says
alike = settings(derandomize=True, database=None, deadline=None)


@alike
@given(size=st.integers(1, 1000))
@says(r"rank 1 failed: AssertionError: larger than 50")
def test_fails_on_one_rank_after_a_collective(rank, size):
    dist.all_reduce(torch.ones(size))
    assert rank == 0 or size <= 50, "larger than 50"


@alike
@given(size=st.integers(1, 1000))
@says(r"rank 1 failed: AssertionError: larger than 50")
def test_fails_on_one_rank_before_a_collective(rank, size):
    assert rank == 0 or size <= 50, "larger than 50"
    dist.all_reduce(torch.ones(size))


@alike
@example(size=7)
@given(size=st.integers(1, 1000))
@says(r"ranks 0, 1 failed: ValueError: 7")
def test_fails_on_all_ranks(rank, size):
    dist.barrier()
    if size == 7:
        raise ValueError(size)


@alike
@given(size=st.integers(1, 9))
@says(r"ranks 0, 1 failed: hypothesis.errors.FailedHealthCheck: .*function-scoped fixture 'process_group'")
def test_takes_what_is_each_tests_own(process_group, size):
    dist.barrier(group=process_group)


def test_healthy_after_properties(rank):
    dist.barrier()
