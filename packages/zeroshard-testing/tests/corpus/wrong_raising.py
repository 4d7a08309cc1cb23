"""A rank raises."""

import functools
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from helpers_beside import check_zero
from zeroshard_testing import assert_matches_single_process, assert_replicas_equal

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("no")


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


class Stop(BaseException):
    pass


class RaisesWhenDeleted:
    def __del__(self):
        raise ValueError("in __del__")


def train_wrong(rank, world_size):
    return [torch.full((2,), float(world_size))]


@says(r"rank 1 failed: assert 1 == 0")
def test_raised_on_one(rank):
    assert rank == 0


@says(r"ranks 0, 1 failed: ValueError: alike")
def test_raised_on_all(rank):
    raise ValueError("alike")


@pytest.mark.may_skip("needs one processor for several processes")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs one processor for several processes")
@says(r"ranks 0, 1 failed: ValueError: alike")
def test_raised_on_one_later_for_want_of_a_processor(rank):
    if rank:
        # Four others compute on the same one: 0.15 s of it take 0.75 s, longer than a waiting rank is given.
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        computes = "import time\nend = time.monotonic() + 25\nwhile time.monotonic() < end: pass"
        others = [subprocess.Popen([sys.executable, "-c", computes]) for _ in range(4)]
        dist.barrier()
        begin = time.process_time()
        while time.process_time() < begin + 0.15:
            pass
        for other in others:
            other.kill()
            other.wait()
    else:
        dist.barrier()
    raise ValueError("alike")


@says(r"ranks 1, 2 failed: ValueError: alike")
@pytest.mark.ranks(3)
def test_raised_on_two_of_three(rank):
    if rank:
        raise ValueError("alike")


@says(r"rank 1 failed: assert 1 == 0")
def test_raised_while_others_wait(rank):
    assert rank == 0
    dist.all_reduce(torch.ones(2))


@says(r"rank [01] failed: (ValueError: zero|KeyError: 'one')")
def test_raised_different_things(rank):
    raise KeyError("one") if rank else ValueError("zero")


@says(r"rank 1 failed: assert \[1, 2, 1\] == \[1, 2, 0\]")
def test_compared_lists(rank):
    assert [1, 2, rank] == [1, 2, 0]


@says(r"rank 1 failed: AssertionError: of rank 1")
def test_asserted_with_a_message(rank):
    assert rank == 0, f"of rank {rank}"


@says(r"rank 1 failed: assert 1 == 0")
def test_asserted_in_a_helper(rank):
    check_zero(rank)


@says(r"rank 1 failed: assert 1 == 0 ± ")
def test_compared_with_approx(rank):
    assert rank == pytest.approx(0)


@says(r"rank 1 failed: AssertionError: Tensor-likes are not")
def test_compared_tensors(rank):
    torch.testing.assert_close(torch.ones(2) * rank, torch.zeros(2))


@says(r"ranks? [01](, 1)? failed: AssertionError: .*'weight'")
def test_compared_replicas(rank):
    assert_replicas_equal({"weight": torch.full((2,), float(rank))})


@pytest.mark.ranks(1)
@says(r"rank 0 failed.*call it in an ordinary test")
def test_compared_with_a_single_process_on_a_rank(rank):
    assert_matches_single_process(train_wrong)


@says(r"rank 1 failed: RuntimeError: outer")
def test_raised_from_another_exception(rank):
    if rank:
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise RuntimeError("outer") from error


@says(r"rank 1 failed: .*UnpicklableError: all the same")
def test_raised_what_cannot_be_pickled(rank):
    if rank:
        raise UnpicklableError("all the same")


@says(r"rank 1 failed: .*UnprintableError")
def test_raised_what_cannot_be_printed(rank):
    if rank:
        raise UnprintableError


@says(r"rank 1 failed: .*LocalError: here")
def test_raised_a_local_class(rank):
    class LocalError(Exception):
        pass

    if rank:
        raise LocalError("here")


@says(r"rank 1 failed: .*Stop: now")
def test_raised_what_is_no_exception(rank):
    if rank:
        raise Stop("now")


@says(r"rank 1 .*KeyboardInterrupt")
def test_raised_an_interrupt(rank):
    if rank:
        raise KeyboardInterrupt


@says(r"rank 1 .*GeneratorExit")
def test_raised_the_exit_of_a_generator(rank):
    if rank:
        raise GeneratorExit


@says(r"rank 1 failed: RecursionError: ")
def test_raised_by_endless_recursion(rank):
    def deeper():
        return deeper() + 1

    if rank:
        deeper()


@says(r"rank 1 failed: (Failed: )?not good")
def test_called_fail(rank):
    if rank:
        pytest.fail("not good")


@says(r"rank 1 failed: (Failed: )?not good")
def test_called_fail_without_a_traceback(rank):
    if rank:
        pytest.fail("not good", pytrace=False)


@says(r"rank 1 .*enough")
def test_called_exit_of_pytest(rank):
    if rank:
        pytest.exit("enough")


@says(r"rank 1 failed: (Failed: )?DID NOT RAISE")
def test_did_not_raise_what_it_should(rank):
    with pytest.raises(ValueError):
        int("x" if rank == 0 else "1")


@says(r"rank 1 failed: AssertionError: Regex pattern did not match|rank 1 failed: .*[Rr]egex")
def test_raised_with_another_text(rank):
    with pytest.raises(ValueError, match="rank 0"):
        raise ValueError(f"rank {rank}")


@says(r"rank 1 failed: (Failed: )?DID NOT WARN")
def test_did_not_warn(rank):
    with pytest.warns(UserWarning):
        if rank == 0:
            warnings.warn("careful", stacklevel=1)


@pytest.mark.filterwarnings("error:careful")
@says(r"rank 1 failed: UserWarning: careful")
def test_warned_where_it_is_an_error(rank):
    if rank:
        warnings.warn("careful", stacklevel=1)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@says(r"rank 1 failed: .*PytestUnhandledThreadExceptionWarning")
def test_raised_in_a_thread(rank):
    if rank:
        thread = threading.Thread(target=int, args=["x"])
        thread.start()
        thread.join()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@says(r"rank 1 failed: .*PytestUnraisableExceptionWarning")
def test_raised_where_nothing_can_be_raised(rank):
    if rank:
        RaisesWhenDeleted()
    gc.collect()


@says(r"rank 1 failed: ValueError: invalid literal")
def test_raised_in_a_pool(rank):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int, "x" if rank else "1").result()


@says(r"rank 1 failed: ValueError: ")
def test_raised_with_a_lone_surrogate(rank):
    if rank:
        raise ValueError("\ud800")


@says(r"rank 1 failed: ValueError: .*end")
def test_raised_with_control_characters(rank):
    if rank:
        raise ValueError("\x00\x1b[31m end")


@says(r"rank 1 failed: ValueError: xxxx")
def test_raised_with_a_very_long_text(rank):
    if rank:
        raise ValueError("x" * 1_000_000)


@says(r"rank 1 failed: ValueError")
def test_raised_without_a_text(rank):
    if rank:
        raise ValueError


@says(r"rank 1 failed: TypeError: .*argument")
def test_called_with_too_few_arguments(rank):
    if rank:
        functools.partial(train_wrong, 1)()


@says(r"rank 1 failed: ModuleNotFoundError: No module named 'not_to_be_found'")
def test_imported_what_is_missing(rank):
    if rank:
        __import__("not_to_be_found")


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="subtests came with pytest 9")
@pytest.mark.may_skip("subtests came with pytest 9")
@says(r"rank 1 failed: .*(assert 1 == 0|subtest)")
def test_failed_a_subtest(rank, subtests):
    with subtests.test("a part"):
        assert rank == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
@pytest.mark.may_skip("exception groups came with Python 3.11")
@says(r"rank 1 failed: ExceptionGroup: both")
def test_raised_a_group_of_exceptions(rank):
    if rank:
        raise ExceptionGroup("both", [ValueError(1), KeyError(2)])  # noqa: F821 - of Python 3.11


def test_healthy_after_ranks_that_raised(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6
