"""Ranks that skip, or fail as expected, alone."""

import os
import time
import unittest

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


@says(r"rank 1 skipped alone: not today")
def test_skipped(rank):
    if rank:
        pytest.skip("not today")


@says(r"rank 1 skipped alone: not today")
def test_skipped_while_another_waits(rank):
    if rank:
        pytest.skip("not today")
    dist.barrier()


@pytest.mark.ranks(3, timeout=30)
@says(r"ranks 1, 2 skipped alone: not today")
def test_skipped_on_two_of_three(rank):
    if rank:
        pytest.skip("not today")


@says(r"rank 1 skipped alone: .*not today")
def test_skipped_by_unittest(rank):
    if rank:
        raise unittest.SkipTest("not today")


@says(r"rank 1 skipped alone: .*not_to_be_found")
def test_skipped_for_want_of_a_module(rank):
    pytest.importorskip("not_to_be_found" if rank else "torch")


@pytest.mark.skipif(os.environ.get("RANK") == "1", reason="not on rank 1")
@says(r"rank 1 skipped alone: not on rank 1")
def test_skipped_by_a_mark(rank):
    pass


@pytest.fixture
def skips_in_setup(rank):
    if rank:
        pytest.skip("not today")


@says(r"rank 1 skipped alone: not today")
def test_skipped_in_setup(skips_in_setup):
    pass


class TestSkippedInSetupMethod:
    def setup_method(self):
        if dist.get_rank():
            pytest.skip("not today")

    @says(r"rank 1 skipped alone: not today")
    def test_skipped_in_setup_method(self):
        pass


@says(r"rank 0 failed: assert 0 == 1")
def test_skipped_while_another_fails(rank):
    if rank:
        pytest.skip("not today")
    assert rank == 1


@says(r"rank 1 expected a failure alone: .*known")
def test_expected_a_failure(rank):
    if rank:
        pytest.xfail("known")


@pytest.mark.xfail(os.environ.get("RANK") == "1", reason="known")
@says(r"rank 0 failed: assert 0 > 1")
def test_expected_a_failure_where_both_fail(rank):
    assert rank > 1


@says(r"rank [01] (skipped|expected a failure) alone")
def test_skipped_and_expected_a_failure(rank):
    if rank:
        pytest.xfail("known")
    pytest.skip("not today")


@pytest.mark.xfail(raises=ValueError)
@says(r"rank 1 failed: KeyError: 'one'")
def test_raised_another_exception_on_one(rank):
    raise KeyError("one") if rank else ValueError("zero")


@pytest.mark.xfail(strict=True)
@pytest.mark.ranks(2, timeout=3)
@says(r"rank 1 timed out: no outcome after 3 s")
def test_expected_a_failure_where_one_has_no_end(rank):
    assert rank
    time.sleep(60)


@pytest.mark.xfail(raises=ValueError, strict=True)
@says(r"rank 1 failed: KeyError: 'one'")
def test_raised_another_exception_on_one_strictly(rank):
    raise KeyError("one") if rank else ValueError("zero")


@pytest.mark.xfail(raises=ValueError, strict=True)
@says(r"rank 1 failed: KeyError: 'one'")
def test_raised_another_exception_later(rank):
    if rank:
        time.sleep(1)
    raise KeyError("one") if rank else ValueError("zero")


@pytest.mark.xfail(raises=OSError, strict=True)
@says(r"ranks 0, 1 failed: LookupError: other")
def test_raised_another_exception(rank):
    raise LookupError("other")


@pytest.mark.xfail(raises=ValueError)
@says(r"rank 1 was killed by SIGKILL before it reported")
def test_expected_an_exception_and_died(rank):
    if rank:
        os.kill(os.getpid(), 9)
    raise ValueError("zero")


@pytest.mark.xfail(strict=True)
@says(r"rank 0 .*")
def test_passed_on_one_where_all_must_fail(rank):
    assert rank == 0


@pytest.mark.xfail(strict=True, reason="known")
@says(r"(ranks 0, 1 )?.*(XPASS\(strict\)|known)")
def test_passed_where_all_must_fail(rank):
    pass


@pytest.mark.xfail(strict=True, raises=ValueError)
@says(r"rank 0 .*")
def test_passed_on_one_where_all_must_raise(rank):
    if rank:
        raise ValueError("one")


@pytest.mark.skipif(os.environ.get("RANK") == "0", reason="not on rank 0")
@says(r"rank 1 failed: assert 1 == 0")
def test_skipped_by_a_mark_while_another_fails(rank):
    assert rank == 0


@pytest.mark.parametrize(
    "x", [pytest.param(2, marks=pytest.mark.skipif("os.environ.get('RANK') == '1'", reason="on 1"))]
)
@says(r"rank 1 skipped alone: on 1")
def test_skipped_a_parameter(x, rank):
    pass


@pytest.mark.xfail
@says(r"rank 1 was killed by SIGKILL before it reported")
def test_died_where_a_failure_is_expected(rank):
    if rank:
        os.kill(os.getpid(), 9)


@pytest.mark.xfail
@pytest.mark.ranks(2, timeout=1)
@says(r"rank 1 timed out: no outcome after 1 s")
def test_timed_out_where_a_failure_is_expected(rank):
    if rank:
        time.sleep(60)


@pytest.mark.xfail
@says(r"rank 0 stuck in all_reduce")
def test_stuck_where_a_failure_is_expected(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(4))


@says(r"rank 0 expected a failure alone: known")
def test_called_xfail_while_another_waits(rank):
    if rank == 0:
        pytest.xfail("known")
    dist.all_reduce(torch.ones(4))


@pytest.mark.ranks(2, timeout=1)
@says(r"rank 0 expected a failure alone: known")
def test_called_xfail_while_another_hangs(rank):
    if rank == 0:
        pytest.xfail("known")
    time.sleep(60)


def test_healthy_after_skips(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6
