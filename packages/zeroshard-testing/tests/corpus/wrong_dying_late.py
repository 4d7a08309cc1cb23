"""A rank reports and dies while others still run."""

import ctypes
import os
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


def later(seconds, function, *args):
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()


@says(r"rank 1 exited with status 3 after it had reported 'passed'")
def test_exited(rank):
    if rank:
        later(0.3, os._exit, 3)
    else:
        time.sleep(20)


@says(r"rank 1 exited with status 0 after it had reported 'passed'")
def test_exited_as_if_all_were_well(rank):
    if rank:
        later(0.3, os._exit, 0)
    else:
        time.sleep(20)


@says(r"rank 0 was killed by SIGKILL after it had reported 'passed'")
def test_killed(rank):
    if rank == 0:
        later(0.3, os.kill, os.getpid(), signal.SIGKILL)
    else:
        time.sleep(20)


@says(r"rank 1 was killed by SIGKILL after it had reported 'passed'")
def test_killed_by_a_child(rank):
    if rank:
        subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -9 {os.getpid()}"])
    else:
        time.sleep(20)


@says(r"rank 1 was killed by SIGABRT after it had reported 'passed'")
def test_aborted(rank):
    if rank:
        later(0.3, os.abort)
    else:
        time.sleep(20)


@says(r"rank 1 was killed by SIGSEGV after it had reported 'passed'")
def test_segmentation_fault_in_a_thread(rank):
    if rank:
        later(0.3, ctypes.string_at, 0)
    else:
        time.sleep(20)


@says(r"rank 1 was killed by SIGALRM after it had reported 'passed'")
def test_alarm(rank):
    if rank:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(20)


@pytest.mark.ranks(3)
@says(r"rank 1 exited with status 3 after it had reported 'skipped'")
def test_exited_after_a_skip(rank):
    if rank == 1:
        later(0.3, os._exit, 3)
    else:
        time.sleep(20)
    pytest.skip("all of them")


def test_healthy_after_late_deaths(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6
