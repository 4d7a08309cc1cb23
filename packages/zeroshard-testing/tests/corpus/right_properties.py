"""Properties of hypothesis, whose examples all ranks draw alike."""

import unittest

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.ranks(2)
says = pytest.mark.says
alike = settings(derandomize=True, database=None, deadline=None, max_examples=20)


@alike
@given(values=st.lists(st.integers(1, 9), min_size=1))
def test_takes_fixtures_of_a_rank(rank, world_size, device, values):
    total = torch.tensor(values, device=device)
    dist.all_reduce(total)
    assert total.tolist() == [world_size * value for value in values]


@given(value=st.integers(1, 9))
@alike
def test_has_settings_below(rank, value):
    dist.barrier()


@alike
@example(value=7)
@given(value=st.integers(1, 9))
def test_leaves_examples_out(rank, value):
    assume(value != 7)
    dist.barrier()
    assert value != 7


class TestMethods:
    @alike
    @given(data=st.data())
    def test_draws_in_its_body(self, rank, data):
        total = torch.ones(data.draw(st.integers(1, 9)))
        dist.all_reduce(total)
        assert total[0] == 2


@alike
@given(value=st.integers(1, 9))
@says("not today")
def test_skipped(rank, value):
    raise unittest.SkipTest("not today")


@pytest.mark.xfail(raises=ValueError, strict=True, reason="known")
@alike
@given(value=st.integers(1, 9))
@says("known")
def test_raised_as_expected(rank, value):
    raise ValueError(value)
