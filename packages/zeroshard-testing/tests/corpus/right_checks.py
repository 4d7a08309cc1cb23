"""Checks that are turned off by name."""

import pytest
import torch
import torch.distributed as dist
from torch import float64, ones
from torch.nn.parallel import DistributedDataParallel

says = pytest.mark.says


@pytest.mark.ranks(2, checks="no:collectives")
def test_a_collective_that_is_left_out(rank):
    if rank == 0:
        dist.broadcast(ones(2), 0, async_op=True)


@pytest.mark.ranks(2, checks=["no:collectives"])
def test_a_list_of_checks(rank):
    dist.broadcast(ones(2 + rank), 0)


@pytest.mark.ranks(2, checks="no:messages")
def test_a_message_that_is_not_received(rank):
    if rank == 0:
        dist.isend(ones(2), 1)


@pytest.mark.ranks(2, checks="no:messages no:deadlock")
def test_a_message_of_another_dtype(rank):
    if rank:
        dist.recv(ones(1, dtype=float64), 0)
    else:
        dist.send(ones(2), 1)


@pytest.mark.ranks(2, checks="no:faults")
def test_a_fault_that_does_not_strike(faults):
    faults.kill(rank=1, at="all_reduce")


@pytest.mark.ranks(4, checks="order")
def test_groups_in_one_order(rank):
    rows, columns = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=columns[rank % 2])
    for _ in range(3):
        work = dist.all_reduce(ones(2), group=rows[rank // 2], async_op=True)
        model(ones(1, 2)).sum().backward()
        dist.barrier()
        work.wait()


@pytest.mark.ranks(2, init=False, checks="no:collectives")
def test_a_world_for_each_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.ranks(2, checks="no:deadlock", timeout=30)
def test_without_proofs_of_deadlocks(rank):
    dist.barrier()
