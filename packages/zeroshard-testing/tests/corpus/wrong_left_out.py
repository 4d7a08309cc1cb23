"""A rank leaves out a collective that others issue, whether they wait for it or not."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import ones
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_store

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


@says(r"rank 0 stuck in all_reduce \(collective #1 of the default group, float32\[4, 3\]\): rank 1 never joins, it has")
def test_returned_early(rank):
    if rank == 0:
        dist.all_reduce(ones(4, 3))


@says(r"rank 0 stuck in broadcast \(collective #1 of the default group, float32\[4\]\): rank 1 never joins, it has ")
def test_returned_before_a_broadcast(rank):
    if rank == 0:
        dist.broadcast(ones(4), 0)


@says(r"rank 0 stuck in barrier \(collective #2 of the default group.*\): rank 1 never joins, it has ended")
def test_returned_before_a_barrier(rank):
    dist.all_reduce(ones(2))
    if rank == 0:
        dist.barrier()


@says(r"rank 0 stuck in gather \(collective #1 .*\): rank 1 never joins, it has ended")
def test_returned_before_a_gather(rank):
    if rank == 0:
        dist.gather(ones(2), [ones(2), ones(2)], dst=0)


@says(r"rank 0 stuck in all_gather \(collective #1 .*\): rank 1 never joins, it has ended")
def test_returned_before_an_all_gather(rank):
    if rank == 0:
        dist.all_gather([ones(2), ones(2)], ones(2))


@says(r"rank 0 stuck in all_to_all_single \(collective #1 .*\): rank 1 never joins, it has ended")
def test_returned_before_an_all_to_all(rank):
    if rank == 0:
        dist.all_to_all_single(ones(2), ones(2))


@says(r"rank 0 stuck in reduce_scatter_tensor \(collective #1 .*\): rank 1 never joins, it has ended")
def test_returned_before_a_reduce_scatter(rank):
    if rank == 0:
        dist.reduce_scatter_tensor(ones(2), ones(4))


@says(r"rank 1 stuck in scatter \(collective #1 .*\): rank 0 never joins, it has ended")
def test_returned_before_a_scatter(rank):
    if rank == 1:
        dist.scatter(ones(2), src=0)


@says(r"rank 0 stuck in reduce \(collective #1 .*\): rank 1 never joins, it has ended")
def test_returned_before_a_reduce(rank):
    if rank == 0:
        dist.reduce(ones(2), dst=0)


@pytest.mark.ranks(4, timeout=30)
@says(r"ranks 0, 1, 3 stuck in all_reduce \(collective #2 .*\): rank 2 never joins, it has ended")
def test_one_of_four_missing(rank):
    dist.barrier()
    if rank != 2:
        dist.all_reduce(ones(2))


@says(r"rank 1 returned without broadcast \(collective #2 of the default group, float32\[4\]\), which rank 0 has")
def test_returned_before_what_no_rank_waits_for(rank):
    dist.barrier()
    if rank == 0:
        dist.broadcast(ones(4), 0, async_op=True)


@says(r"rank 1 returned without all_reduce \(collective #1 .*\), which rank 0 has issued")
def test_all_reduce_that_no_rank_waits_for(rank):
    if rank == 0:
        dist.all_reduce(ones(4), async_op=True)


@says(r"rank 0 returned without all_gather \(collective #1 .*\), which rank 1 has issued")
def test_all_gather_that_no_rank_waits_for(rank):
    if rank == 1:
        dist.all_gather([ones(2), ones(2)], ones(2), async_op=True)


@says(r"rank 1 returned without barrier \(collective #1 .*\), which rank 0 has issued")
def test_barrier_that_no_rank_waits_for(rank):
    if rank == 0:
        dist.barrier(async_op=True)


@says(r"rank 1 returned without all_to_all_single \(collective #1 .*\), which rank 0 has issued")
def test_all_to_all_that_no_rank_waits_for(rank):
    if rank == 0:
        dist.all_to_all_single(ones(2), ones(2), async_op=True)


@says(r"rank 0 returned without reduce \(collective #1 .*\), which rank 1 has issued")
def test_root_returned_before_a_reduce(rank):
    if rank == 1:
        dist.reduce(ones(2), dst=0, async_op=True)


@says(r"rank 1 returned without all_reduce \(collective #1 .*\), which rank 0 has issued")
def test_functional_collective_that_no_rank_waits_for(rank):
    if rank == 0:
        functional.all_reduce(ones(4), "sum", dist.group.WORLD)


@says(r"rank 1 returned without all_reduce\w* \(collective #1 .*\), which rank 0 has issued")
def test_coalesced_collectives_that_no_rank_waits_for(rank):
    if rank == 0:
        with _coalescing_manager(async_ops=True):
            dist.all_reduce(ones(2))
            dist.all_reduce(ones(3))


@pytest.mark.may_skip("collectives of objects need numpy")
@says(r"rank 1 (returned without broadcast|stuck in broadcast)|rank 0 stuck in broadcast")
def test_objects_that_a_rank_does_not_take(rank):
    pytest.importorskip("numpy", reason="collectives of objects need numpy")
    if rank == 0:
        dist.broadcast_object_list([1], src=0)


@says(r"rank 1 returned without all_reduce \(collective #2 .*\), which rank 0 has issued")
def test_one_turn_too_few(rank):
    works = [dist.all_reduce(ones(2), async_op=True) for _ in range(3 - 2 * rank)]
    works[0].wait()


@pytest.mark.ranks(3, timeout=30)
@says(r"rank 1 returned without broadcast \(collective #1 of the group of ranks 0, 1, .*\), which rank 0 has issued")
def test_left_out_in_a_subgroup(rank):
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.broadcast(ones(4), 0, group=group, async_op=True)


@says(r"rank 1 returned without (broadcast|collective #1)")
def test_left_out_before_the_group_was_destroyed(rank):
    if rank == 0:
        dist.broadcast(ones(4), 0, async_op=True)
    time.sleep(0.1)
    dist.destroy_process_group()


@says(r"rank 1 returned without (broadcast|collective #1)")
def test_left_out_before_the_group_was_made_anew(rank):
    if rank == 0:
        dist.broadcast(ones(4), 0, async_op=True)
    time.sleep(0.1)
    store = _get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("anew", store), rank=rank, world_size=2)
    dist.all_reduce(ones(2))


@says(r"rank 1 returned without broadcast")
def test_left_out_after_the_group_was_made_anew(rank):
    store = _get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("anew", store), rank=rank, world_size=2)
    dist.all_reduce(ones(2))
    if rank == 0:
        dist.broadcast(ones(4), 0, async_op=True)


@says(r"rank 1 returned without broadcast")
def test_left_out_beside_an_error_that_was_handled(rank):
    with pytest.raises(RuntimeError):
        _get_default_store().wait(["missing"], timedelta(seconds=0.1))
    if rank == 0:
        dist.broadcast(ones(4), 0, async_op=True)


@says(r"rank 1 returned without broadcast")
def test_left_out_before_an_error_that_was_swallowed(rank):
    if rank == 0:
        dist.broadcast(ones(4), 0, async_op=True)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    with contextlib.suppress(RuntimeError):
        dist.recv(ones(1), 1 - rank, group=group)


@says(r"rank 1 returned without broadcast")
def test_left_out_after_a_wait_that_failed(rank):
    group = dist.new_group([0, 1])
    with contextlib.suppress(RuntimeError):
        dist.irecv(ones(1), 1 - rank, group=group).wait(timedelta(seconds=0.1))
    if rank == 0:
        dist.broadcast(ones(4), 0, async_op=True)


@says(r"rank 1 returned without broadcast")
def test_left_out_in_a_group_with_a_short_timeout(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    if rank == 0:
        dist.broadcast(ones(4), 0, group=group, async_op=True)


@says(r"rank 1 returned without broadcast")
def test_left_out_in_a_group_with_a_very_short_timeout(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    if rank == 0:
        dist.broadcast(ones(4), 0, group=group, async_op=True)


@says(r"rank 1 returned without broadcast")
def test_left_out_beside_a_group_that_gave_up(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(ones(2), group=group)
        dist.broadcast(ones(4), 0, async_op=True)


@says(r"rank 1 returned without broadcast")
def test_left_out_under_an_error_of_torch_that_was_caught(rank):
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather([ones(3), ones(2)], ones(2))
    if rank == 0:
        dist.broadcast(ones(4), 0, async_op=True)


@says(r"rank 1 returned without broadcast|rank 0 stuck in broadcast")
def test_left_out_where_an_exception_was_swallowed(rank):
    with contextlib.suppress(ValueError):
        if rank:
            raise ValueError("before the collective")
        dist.broadcast(ones(4), 0, async_op=True)


@pytest.mark.ranks(2, init=False, timeout=30)
@says(r"ranks 0, 1 passed, but each of 2 ranks made a default group of only itself")
def test_a_world_for_each_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(ones(2))
    dist.destroy_process_group()


@pytest.mark.ranks(2, init=False, timeout=30)
@pytest.mark.unchecked("all groups, if the test makes its own default group without some ranks")
def test_a_world_for_one_rank(rank):
    if rank:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_healthy_after_left_out_collectives(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6
