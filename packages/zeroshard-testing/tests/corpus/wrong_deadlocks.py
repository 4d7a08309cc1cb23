"""Ranks wait for one another for ever."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import ones
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


@says(r"rank 0 stuck in all_reduce \(collective #1 of the group of ranks 0, 1, .*\): rank 1 never joins, it waits")
def test_crossed_groups(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    dist.all_reduce(ones(2), group=groups[rank])
    dist.all_reduce(ones(2), group=groups[1 - rank])


def crossed(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    works = [dist.all_reduce(ones(2), group=group, async_op=True) for group in (groups[::-1] if rank else groups)]
    for work in works:
        work.wait()


@pytest.mark.ranks(2, timeout=30, checks="order")
@says(
    r"ranks 0, 1 passed, but rank 0 issues all_reduce #1 of group '1' before all_reduce #1 of group '2', and rank 1 a"
)
def test_crossed_groups_that_gloo_completes(rank):
    crossed(rank)


@pytest.mark.unchecked("the order of collectives of different groups, unless `order` is turned on")
def test_crossed_groups_that_gloo_completes_unasked(rank):
    crossed(rank)


@pytest.mark.ranks(3, timeout=30)
@says(r"rank \d stuck in \w+ \(collective #1 of the group of ranks .*\): rank \d never joins, it waits")
def test_circle_of_groups(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    first, second = [(0, 2), (1, 0), (2, 1)][rank]
    dist.barrier(group=pairs[first])
    dist.barrier(group=pairs[second])


@says(r"rank 0 stuck (waiting for message 1 from rank 1|in all_reduce)")
def test_message_behind_a_collective(rank):
    if rank:
        dist.all_reduce(ones(2))
        dist.send(ones(2), 0)
    else:
        dist.recv(ones(2), 1)
        dist.all_reduce(ones(2))


@says(r"rank 0 (stuck waiting for the other ranks of a new process group: rank 1 has ended|failed: )")
def test_group_made_by_one(rank):
    if rank == 0:
        dist.new_group([0, 1])


@says(r"ranks? .*stuck: group '1' is the group of ranks 0, 1 on rank 0, and the group of rank 1 on rank 1: every")
def test_groups_made_in_another_order(rank):
    sizes = [[0, 1], [rank]]
    for ranks in reversed(sizes) if rank else sizes:
        dist.new_group(ranks)
    dist.barrier()


@says(r"ranks? .*stuck: group '1' is the group of ranks 0, 1 on rank 0, and the group of rank 1 on rank 1: every")
def test_one_more_group_on_one_rank(rank):
    if rank:
        dist.new_group([1])
    dist.new_group([0, 1])


@pytest.mark.ranks(4, timeout=3)
@says(
    r"ranks? .*(stuck:|after 3 s;) group '1' is the group of ranks 0, 1 on rank 0, and the group of ranks 0, 1, 2, 3 "
)
def test_group_that_its_members_alone_make(rank):
    if rank < 2:
        dist.new_group([0, 1])
    dist.all_reduce(ones(2), group=dist.new_group([0, 1, 2, 3]))


@pytest.mark.ranks(4, timeout=3)
@says(r"(?s)ranks? .*group '1' is the group of ranks 0, 1 on rank 0, and the group of ranks 2, 3 on rank 2: every")
def test_groups_of_others_made_in_another_order(rank):
    pairs = [[0, 1], [2, 3]]
    for ranks in pairs if rank < 2 else reversed(pairs):
        dist.new_group(ranks)


@pytest.mark.ranks(4, timeout=3)
@says(r"(?s)ranks? .*group '1' is the group of ranks 0, 1 on rank 0, and the group of ranks 2, 3 on rank 2: every")
def test_collectives_of_groups_made_in_another_order(rank):
    pairs = [[0, 1], [2, 3]]
    mine, _ = [dist.new_group(ranks) for ranks in (pairs if rank < 2 else reversed(pairs))]
    dist.all_reduce(ones(2), group=mine)


@pytest.mark.ranks(3, timeout=30)
@says(r"ranks 0, 2 stuck in monitored_barrier \(collective #1 of the default group\): rank 1 never joins, it has ended")
def test_monitored_barrier_without_one_rank(rank):
    if rank != 1:
        dist.monitored_barrier()


@pytest.mark.ranks(3, timeout=30)
@says(
    r"ranks 0, 2 stuck: rank 0 is in all_reduce of float32\[1\], rank 1 in monitored_barrier, as collective #3 of the"
)
def test_one_monitored_barrier_too_many(rank):
    dist.monitored_barrier()
    if rank == 1:
        dist.monitored_barrier()
    dist.all_reduce(ones(1))


@says(r"rank 0 (stuck|failed: )")
def test_default_group_made_anew_by_one(rank):
    store = _get_default_store()
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", store=dist.PrefixStore("anew", store), rank=rank, world_size=2)


@says(
    r"rank (0 stuck in barrier|1 returned without barrier \(collective #1 of the default group\), which rank 0 has is)"
)
def test_group_destroyed_by_one(rank):
    if rank:
        dist.destroy_process_group()
    else:
        dist.barrier()


@says(r"rank 0 stuck waiting for a key of a store: rank 1 has ended")
def test_key_that_no_rank_sets(rank):
    if rank == 0:
        _get_default_store().get("missing")


@says(r"rank 0 stuck waiting for a key of a store: rank 1 has ended")
def test_keys_that_no_rank_sets(rank):
    if rank == 0:
        _get_default_store().wait(["missing", "too"])


@says(r"rank 0 stuck waiting for a key of a store")
def test_key_of_a_file_store_that_no_rank_sets(rank, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    if rank == 0:
        store.wait(["missing"], timedelta(seconds=100))


@says(r"rank [01] stuck")
def test_key_that_is_set_behind_a_barrier(rank):
    if rank:
        dist.barrier()
        _get_default_store().set("late", "1")
    else:
        _get_default_store().get("late")
        dist.barrier()


@says(r"rank 0 stuck in all_reduce \(collective #1 .*\): rank 1 never joins, it has ended")
def test_stuck_in_a_pool(rank):
    if rank == 0:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(dist.all_reduce, ones(2)).result()


@says(r"rank 0 stuck in all_reduce \(collective #1 .*\): rank 1 never joins, it has ended")
def test_stuck_in_a_thread_that_is_joined(rank):
    if rank == 0:
        thread = threading.Thread(target=dist.all_reduce, args=[ones(2)])
        thread.start()
        thread.join()


@says(r"rank 0 (returned without all_reduce|stuck in all_reduce)|rank 1 (left|stuck|returned)")
def test_left_a_thread_in_a_collective(rank):
    if rank:
        threading.Thread(target=dist.all_reduce, args=[ones(2)], daemon=True).start()
        time.sleep(0.3)


@says(r"rank 0 stuck in all_reduce \(collective #1 .*\): rank 1 never joins, it has ended")
def test_stuck_in_a_wait_for_its_own_work(rank):
    if rank == 0:
        work = dist.all_reduce(ones(2), async_op=True)
        time.sleep(0.1)
        work.wait()


@says(r"rank 0 stuck in all_reduce \(collective #1 .*\): rank 1 never joins, it has ended")
def test_stuck_in_a_future(rank):
    if rank == 0:
        dist.all_reduce(ones(2), async_op=True).get_future().wait()


@says(r"rank 0 stuck in \w+ \(collective #\d+ of the default group, .*\): rank 1 never joins, it has ended")
def test_a_backward_too_many(rank):
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    for _ in range(2 - rank):
        model(ones(2, 3)).sum().backward()


@says(r"rank 0 stuck in \w+ \(collective #1 of the default group, .*\): rank 1 never joins, it has ended")
def test_a_model_on_one_rank(rank):
    if rank == 0:
        DistributedDataParallel(torch.nn.Linear(3, 3))


@says(r"rank \d (failed: RuntimeError: Expected to have finished reduction|stuck in )")
def test_a_parameter_that_one_rank_does_not_use(rank):
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    layers.forward = lambda x: layers[0](x) if rank else layers[1](layers[0](x))
    model = DistributedDataParallel(layers)
    for _ in range(2):
        model(ones(2, 3)).sum().backward()


@pytest.mark.ranks(2, timeout=5)
@says(r"rank 0 (stuck|failed: RuntimeError)")
def test_under_detailed_checks_of_torch(rank):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(ones(2), group=group)


@pytest.mark.ranks(4, timeout=30)
@says(r"ranks? \d.* stuck in \w+ \(collective #1 ")
def test_two_pairs_that_wait_for_one_another(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank in (0, 3):
        dist.barrier()
    dist.barrier(group=pairs[rank // 2])
    if rank in (1, 2):
        dist.barrier()


@says(r"rank 0 stuck in all_reduce .*: rank 1 never joins, it waits for something else")
def test_one_in_a_collective_the_other_waits_for_a_message(rank):
    if rank:
        dist.recv(ones(2), 0)
    dist.all_reduce(ones(2))


def test_healthy_after_deadlocks(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6


@pytest.mark.ranks(4)
def test_healthy_after_deadlocks_of_four(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 12
