"""What all ranks skip, or expect to fail."""

import os
import unittest

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)
says = pytest.mark.says


@says("not today")
def test_skipped(rank):
    pytest.skip("not today")


@says("not today on [01]")
def test_skipped_for_another_reason_on_each_rank(rank):
    pytest.skip(f"not today on {rank}")


@pytest.mark.skip(reason="never")
@says("never")
def test_skipped_by_a_mark(rank):
    raise AssertionError


@pytest.mark.skipif(True, reason="on this machine")
@says("on this machine")
def test_skipped_by_a_condition(rank):
    raise AssertionError


@pytest.mark.skipif("sys.platform != 'nowhere'", reason="by a text")
@says("by a text")
def test_skipped_by_a_text(rank):
    raise AssertionError


@pytest.mark.skipif("RANK" in os.environ, reason="on ranks")
@says("on ranks")
def test_skipped_on_ranks(rank):
    raise AssertionError


@unittest.skip("by unittest")
@says("by unittest")
def test_skipped_by_unittest(rank):
    raise AssertionError


@unittest.skipIf(True, "if so")
@says("if so")
def test_skipped_by_unittest_if_so(rank):
    raise AssertionError


@says("raised")
def test_skipped_by_an_exception_of_unittest(rank):
    raise unittest.SkipTest("raised")


@says(r"could not import 'not_to_be_found'")
def test_skipped_for_want_of_a_module(rank):
    pytest.importorskip("not_to_be_found")


@pytest.fixture
def skips():
    pytest.skip("in a fixture")


@says("in a fixture")
def test_skipped_in_a_fixture(skips, rank):
    raise AssertionError


@pytest.fixture
def needs_more_ranks(world_size):
    if world_size < 3:
        pytest.skip(f"needs 3 ranks, not {world_size}")


@says("needs 3 ranks, not 2")
def test_skipped_for_want_of_ranks(needs_more_ranks):
    raise AssertionError


@pytest.mark.skip(reason="the class")
class TestSkipped:
    @says("the class")
    def test_method(self, rank):
        raise AssertionError


class TestSkippedInSetup:
    def setup_method(self):
        pytest.skip("in setup_method")

    @says("in setup_method")
    def test_method(self, rank):
        raise AssertionError


@says("after a collective")
def test_skipped_after_a_collective(rank):
    dist.barrier()
    pytest.skip("after a collective")


@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.skip(reason="this one"))])
@says("this one")
def test_skipped_parameter(x, rank):
    raise AssertionError


@pytest.mark.xfail(reason="known")
@says("known")
def test_failed_as_expected(rank):
    raise AssertionError


@pytest.mark.xfail(reason="known", strict=True)
@says("known")
def test_failed_as_expected_strictly(rank):
    assert rank == 7


@pytest.mark.xfail(raises=ValueError, reason="known", strict=True)
@says("known")
def test_raised_as_expected(rank):
    raise ValueError(rank)


@pytest.mark.xfail(raises=(OSError, LookupError), reason="known", strict=True)
@says("known")
def test_raised_a_subclass_as_expected(rank):
    raise KeyError(rank) if rank else IndexError(rank)


@pytest.mark.xfail(reason="known", strict=True)
@says("known")
def test_failed_as_expected_while_another_waits(rank):
    assert rank
    dist.barrier()


@says("known")
def test_called_xfail(rank):
    pytest.xfail("known")


@pytest.mark.xfail(reason="crashes", run=False)
@says(r"\[NOTRUN\] crashes|.*crashes")
def test_not_run(rank):
    os._exit(3)


@pytest.mark.xfail(True, reason="known")
@says("known")
def test_expected_by_a_condition(rank):
    raise AssertionError


@pytest.mark.xfail(False, reason="no longer", strict=True)
def test_not_expected_by_a_condition(rank):
    assert rank < 2


@pytest.mark.xfail(reason="sometimes", strict=False)
def test_passed_against_expectation(rank):
    dist.barrier()


@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.xfail(reason="this one", strict=True))])
@says("this one")
def test_expected_of_a_parameter(x, rank):
    raise AssertionError


@pytest.mark.skipif(False, reason="not here")
def test_not_skipped(rank):
    dist.barrier()
