"""Faults that never strike, or that the test does not survive."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import ones

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


@says(r"rank 1 left faults unreached: kill at all_reduce#3")
def test_never_struck(faults):
    faults.kill(rank=1, at="all_reduce#3")
    dist.all_reduce(ones(2))


@says(r"rank 0 left faults unreached: delay at barrier#1")
def test_never_delayed(faults):
    faults.delay(rank=0, at="barrier", seconds=1)
    dist.all_reduce(ones(2))


@says(r"rank 1 left faults unreached: raise_ at recv#\*")
def test_never_raised(faults):
    faults.raise_(rank=1, at="recv#*", error=OSError("never"))
    dist.all_reduce(ones(2))


@says(r"rank 1 left faults unreached: drop at broadcast#2")
def test_one_of_two_never_struck(faults):
    faults.delay(rank=1, at="broadcast#1", seconds=0.01)
    faults.drop(rank=1, at="broadcast#2")
    dist.broadcast(ones(2), 0)


@says(r"rank 1 left faults unreached: stop at send#1")
def test_never_stopped(faults):
    faults.stop(rank=1, at="send")


@says(r"rank 0 stuck in all_reduce \(collective #2 .*\): rank 1 never joins, it has ended")
def test_dropped(faults):
    faults.drop(rank=1, at="all_reduce#2")
    for _ in range(2):
        dist.all_reduce(ones(2))


@says(r"rank 1 returned without broadcast \(collective #1 .*\), which rank 0 has issued")
def test_dropped_what_no_rank_waits_for(faults):
    faults.drop(rank=1, at="broadcast")
    dist.broadcast(ones(2), 0, async_op=True)


@says(r"rank 1 stuck waiting for message 1 from rank 0")
def test_dropped_a_message(rank, faults):
    faults.drop(rank=0, at="send")
    if rank:
        dist.recv(ones(2), 0)
    else:
        dist.send(ones(2), 1)


@says(r"rank 1 failed: OSError: disk full")
def test_raised(faults):
    faults.raise_(rank=1, at="barrier", error=OSError("disk full"))
    dist.barrier()


@says(r"rank 0 failed: (RuntimeError|.*Error)")
def test_did_not_survive_a_death(faults):
    faults.kill(rank=1, at="all_reduce")
    dist.all_reduce(ones(2))


@says(r"rank 0 failed: (Failed: )?DID NOT RAISE")
def test_survived_too_well(rank, faults):
    faults.kill(rank=1, at="all_reduce#2")
    dist.all_reduce(ones(2))
    if rank == 0:
        with pytest.raises(ValueError):
            pass
    time.sleep(0.1)
    dist.all_reduce(ones(2))


@says(r"rank 0 failed: RuntimeError")
def test_did_not_survive_a_rank_that_stops(faults):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    faults.stop(rank=1, at="all_reduce")
    dist.all_reduce(ones(2), group=group)


@says(r"ranks 0, 1 failed: ValueError: 'allreduce' names no operation")
def test_struck_what_does_not_exist(faults):
    faults.kill(rank=0, at="allreduce")


@pytest.fixture
def killed_in_teardown(faults):
    yield
    faults.kill(rank=1, at="all_reduce")
    dist.all_reduce(ones(2))


@says(r"rank 0 failed: (RuntimeError|.*Error)")
def test_did_not_survive_a_death_in_teardown(killed_in_teardown):
    pass


def test_healthy_after_faults(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6


@says(r"ranks 0, 1 failed: ValueError: kill: rank 5 is not one of the 2 ranks")
def test_on_a_rank_that_is_not_there(faults):
    faults.kill(rank=5, at="all_reduce")
    dist.all_reduce(ones(2))
