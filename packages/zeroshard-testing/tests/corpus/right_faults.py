"""Faults that a test asks for and survives."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import ones

pytestmark = pytest.mark.ranks(2)


def test_a_death(faults):
    faults.kill(rank=1, at="all_reduce#3")
    for _ in range(2):
        dist.all_reduce(ones(2))
    with pytest.raises(RuntimeError, match="onnection"):
        dist.all_reduce(ones(2))


def test_new_workers_after_a_death(rank):
    dist.barrier()


def test_a_rank_that_stops(faults):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    faults.stop(rank=1, at="all_reduce")
    with pytest.raises(RuntimeError):
        dist.all_reduce(ones(2), group=group)


def test_a_rank_that_stops_for_a_while(faults):
    faults.stop(rank=1, at="all_reduce", seconds=0.4)
    began = time.monotonic()
    dist.all_reduce(ones(2))
    assert time.monotonic() - began > 0.3


def test_delays(rank, faults):
    faults.delay(rank=1, at="send#*", seconds=(0.05, 0.1), seed=3)
    for _ in range(3):
        if rank:
            dist.send(ones(2), 0)
        else:
            dist.recv(ones(2), 1)


def test_an_exception(rank, faults):
    faults.raise_(rank=1, at="barrier", error=OSError("disk full"))
    if rank:
        with pytest.raises(OSError, match="disk full"):
            dist.barrier()
    dist.barrier()


def test_an_exception_in_a_thread(rank, faults):
    faults.raise_(rank=0, at="send#2", error=OSError("cable pulled"))
    seen = []

    def work():
        try:
            for _ in range(2):
                dist.send(ones(1), 1)
        except OSError as error:
            seen.append(str(error))

    if rank == 0:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == ["cable pulled"]
    else:
        dist.recv(ones(1), 0)


@pytest.mark.ranks(2, checks="no:collectives no:messages")
def test_an_operation_that_is_dropped_where_none_is_looked_for(faults):
    faults.drop(rank=1, at="broadcast")
    dist.broadcast(ones(2), 0, async_op=True)


def test_an_operation_that_all_drop(faults):
    faults.drop(rank=0, at="all_reduce")
    faults.drop(rank=1, at="all_reduce")
    x = ones(2)
    dist.all_reduce(x)
    assert x.sum() == 2
    dist.all_reduce(x)
    assert x.sum() == 4


@pytest.mark.parametrize("place", ["allreduce", "all_reduce#0", "all_reduce#x", "nothing"])
def test_a_place_that_is_none(faults, place):
    with pytest.raises(ValueError, match="names no operation"):
        faults.kill(rank=0, at=place)


@pytest.fixture
def lagging(faults):
    faults.delay(rank=0, at="barrier", seconds=0.1)


def test_a_fault_of_a_fixture(lagging):
    dist.barrier()


@pytest.mark.ranks(3)
def test_a_death_of_one_of_three(rank, faults):
    group = dist.new_group([0, 1])
    faults.kill(rank=2, at="barrier")
    if rank == 2:
        dist.barrier()
    x = ones(1)
    dist.all_reduce(x, group=group)
    assert x == 2
