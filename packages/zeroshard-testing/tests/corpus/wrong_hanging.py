"""A rank hangs where nothing can be proven, and the test's timeout decides."""

import ctypes
import os
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=1)
says = pytest.mark.says


@says(r"rank 1 timed out: no outcome after 1 s")
def test_hung_outside_a_collective(rank):
    def stands_here():
        time.sleep(60)

    if rank:
        stands_here()


@says(r"ranks? 0(, 1)? timed out: no outcome after 1 s")
def test_hung_on_all_ranks(rank):
    time.sleep(60)


@says(r"rank 1 timed out: no outcome after 1 s")
def test_hung_in_a_loop(rank):
    while rank:
        pass


@says(r"rank 1 timed out: no outcome after 1 s")
def test_hung_with_pythons_lock_held(rank):
    if rank:
        ctypes.PyDLL(None).sleep(60)


@says(r"rank 1 timed out: no outcome after 1 s")
def test_hung_on_a_lock_of_its_own(rank):
    lock = threading.Lock()
    lock.acquire()
    if rank:
        lock.acquire()


@says(r"rank 1 timed out: no outcome after 1 s")
def test_hung_waiting_for_a_process(rank):
    if rank:
        with subprocess.Popen(["sleep", "5"]) as process:
            process.wait()


@says(r"rank [01] timed out: no outcome after 1 s")
def test_hung_while_another_waits(rank):
    if rank:
        time.sleep(60)
    dist.all_reduce(torch.ones(2))


@says(r"rank 1 timed out: no outcome after 1 s")
def test_stopped_by_a_signal(rank):
    if rank:
        os.kill(os.getpid(), signal.SIGSTOP)


@says(r"rank 1 timed out: no outcome after 1 s")
def test_hung_with_all_signals_blocked(rank):
    if rank:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(60)


@pytest.fixture
def hangs_in_setup(rank):
    if rank:
        time.sleep(60)


@says(r"rank 1 timed out: no outcome after 1 s")
def test_hung_in_setup(hangs_in_setup):
    pass


@pytest.fixture
def hangs_in_teardown(rank):
    yield
    if rank:
        time.sleep(60)


@says(r"rank 1 timed out: no outcome after 1 s")
def test_hung_in_teardown(hangs_in_teardown):
    pass


def test_healthy_after_timeouts(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6
