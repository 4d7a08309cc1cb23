"""A rank's process ends before the test does."""

import ctypes
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


def kill(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


@says(r"rank 1 was killed by SIGKILL before it reported")
def test_killed(rank):
    if rank:
        kill()
    dist.all_reduce(torch.ones(2))


@says(r"rank 0 was killed by SIGKILL before it reported")
def test_killed_the_first(rank):
    if rank == 0:
        kill()
    dist.all_reduce(torch.ones(2))


@says(r"rank 1 was killed by SIGKILL before it reported")
def test_killed_while_another_sleeps(rank):
    if rank:
        kill()
    time.sleep(20)


@says(r"ranks 0, 1 w(as|ere) killed by SIGKILL before")
def test_killed_all(rank):
    pids = torch.zeros(2, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    if rank == 0:
        # By one of them, so that neither ends long before the other.
        os.kill(int(pids[1]), signal.SIGKILL)
        kill()
    time.sleep(20)


@says(r"ranks 0, 1 w(as|ere) killed by SIGALRM before")
def test_killed_all_one_of_them_while_the_harness_asks_for_its_stack(rank):
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        dist.send(torch.ones(1), 1)
        # With the interpreter's lock held, so that no thread answers.
        ctypes.PyDLL(None).sleep(20)
    dist.recv(torch.ones(1), 0)
    kill(signal.SIGALRM)


@pytest.mark.ranks(4)
@says(r"rank 2 was killed by SIGKILL before it reported")
def test_killed_one_of_four(rank):
    dist.barrier()
    if rank == 2:
        kill()
    dist.barrier()


@says(r"rank 1 was killed by SIGKILL before it reported")
def test_killed_by_another_rank(rank):
    pids = torch.zeros(2, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    if rank == 0:
        os.kill(int(pids[1]), signal.SIGKILL)
    time.sleep(20)


@says(r"rank 1 was killed by SIGTERM")
def test_terminated(rank):
    if rank:
        kill(signal.SIGTERM)
        time.sleep(20)


@says(r"rank 1 was killed by SIGSEGV")
def test_segmentation_fault(rank):
    if rank:
        ctypes.string_at(0)


@says(r"rank 1 was killed by SIGABRT")
def test_aborted(rank):
    if rank:
        os.abort()


@says(r"rank 1 was killed by SIGILL")
def test_illegal_instruction(rank):
    if rank:
        kill(signal.SIGILL)


@says(r"rank 1 was killed by SIGALRM")
def test_alarm(rank):
    if rank:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(20)


@says(r"rank 1 exited with status 0 before it reported")
def test_exited_at_once(rank):
    if rank:
        os._exit(0)


@says(r"rank 1 exited with status 7 before it reported")
def test_exited_with_a_status(rank):
    if rank:
        os._exit(7)


@says(r"rank 1 called sys.exit\(0\)")
def test_exited_politely(rank):
    if rank:
        sys.exit(0)


@says(r"rank 1 called sys.exit\('for this reason'\)")
def test_exited_with_a_reason(rank):
    if rank:
        sys.exit("for this reason")


@says(r"rank 1 called sys.exit\(None\)")
def test_raised_an_exit(rank):
    if rank:
        raise SystemExit


@says(r"rank 1 (exited with status 0|closed its control channel)")
def test_became_another_program(rank):
    if rank:
        os.execv(sys.executable, [sys.executable, "-c", "pass"])


@says(r"rank 1 (exited|was killed|closed its control channel|failed)")
def test_closed_all_files(rank):
    if rank:
        os.closerange(3, 256)


@says(r"rank 1 failed: ValueError: the parent speaks")
def test_forked_a_copy_that_returns(rank):
    if rank and os.fork():
        time.sleep(0.5)
        raise ValueError("the parent speaks")


@says(r"rank 1 failed: ValueError: the parent speaks")
def test_forked_a_copy_that_raises(rank):
    if rank:
        if os.fork():
            time.sleep(0.5)
            raise ValueError("the parent speaks")
        raise ValueError("the copy speaks")


@says(r"rank 1 was killed by SIGKILL before it reported")
def test_killed_after_its_fault_was_caught(rank):
    with pytest.raises(ValueError):
        raise ValueError
    if rank:
        kill()


def test_healthy_after_deaths(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6


@pytest.fixture
def dies_in_setup(rank):
    if rank:
        kill()


@says(r"rank 1 was killed by SIGKILL before it reported")
def test_killed_in_setup(dies_in_setup):
    pass


@pytest.fixture
def dies_in_teardown(rank):
    yield
    if rank:
        kill()


@says(r"rank 1 was killed by SIGKILL before it reported")
def test_killed_in_teardown(dies_in_teardown):
    pass


@pytest.mark.ranks(4)
def test_healthy_after_deaths_in_fixtures(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 12
