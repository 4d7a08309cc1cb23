"""Ranks issue collectives that do not belong together."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import complex64, float32, float64, int32, int64, ones
from torch.distributed import ReduceOp
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.ranks(2, timeout=30)
says = pytest.mark.says


@says(r"rank 0 stuck: rank 0 is in all_reduce of float32\[4\].*, rank 1 in broadcast of .*, as collective #2")
def test_all_reduce_and_broadcast(rank):
    dist.barrier()
    if rank:
        dist.broadcast(ones(4), 0)
    else:
        dist.all_reduce(ones(4))


@says(r"rank 0 stuck: rank 0 is in all_reduce of float32\[4\].*, rank 1 in all_gather of float32\[4\]")
def test_all_reduce_and_all_gather(rank):
    if rank:
        dist.all_gather([ones(4), ones(4)], ones(4))
    else:
        dist.all_reduce(ones(4))


@says(r"rank 0 stuck: rank 0 is in barrier.*, rank 1 in gather of float32\[4\] with root 1, as collective #1")
def test_barrier_and_gather(rank):
    if rank:
        dist.gather(ones(4), [ones(4), ones(4)], dst=1)
    else:
        dist.barrier()


@says(r"ranks? .*rank 0 .*(all_reduce|broadcast).*rank 1 .*(all_reduce|broadcast)")
def test_two_in_another_order(rank):
    calls = [lambda: dist.all_reduce(ones(4), async_op=True), lambda: dist.broadcast(ones(4), 0, async_op=True)]
    for call in reversed(calls) if rank else calls:
        call()


@says(r"ranks? .*rank 0 .*float32\[2\].*rank 1 .*float32\[3\]")
def test_two_of_a_kind_in_another_order(rank):
    for size in (3, 2) if rank else (2, 3):
        dist.broadcast(ones(size), 0, async_op=True)


# Gloo aborts, some time after both are in it.
@says(r"rank \d (was killed by SIGABRT|stuck): rank 0 is in all_reduce of float32\[4\].*, rank 1 in .*float32\[5\]")
def test_shapes_of_an_all_reduce(rank):
    dist.all_reduce(ones(4 + rank))


# Gloo lets the rank with fewer elements go on.
@says(
    r"rank 1 (stuck|was killed by SIGABRT): rank 0 is in all_reduce of float32\[2\], rank 1 in .*float32\[3\], as coll"
)
def test_small_shapes_of_an_all_reduce(rank):
    dist.all_reduce(ones(2 + rank))


@says(
    r"rank 1 (stuck|was killed by SIGABRT): rank 0 is in all_reduce of float32\[0\], rank 1 in .*float32\[2\], as coll"
)
def test_nothing_and_something_in_an_all_reduce(rank):
    dist.all_reduce(ones(2 * rank))


@says(
    r"rank \d (stuck|was killed by SIGABRT): rank 0 is in all_reduce of float32\[3\], rank 1 in .*float32\[4\], as coll"
)
def test_shapes_of_a_functional_all_reduce(rank):
    functional.all_reduce(ones(3 + rank), "sum", dist.group.WORLD).sum().item()


@pytest.mark.ranks(4, timeout=30)
@says(
    # gloo lets some ranks of the ring go, others than in the next run.
    r"ranks? .*(stuck|SIGABRT): rank [0-2] is in all_reduce of float32\[2\], rank 3 in all_reduce of float32\[3\], as"
)
def test_shapes_of_an_all_reduce_on_one_of_four(rank):
    dist.all_reduce(ones(2 + (rank == 3)))


@says(
    r"ranks? .*rank 0 is in all_reduce of float32\[1, 4, 2, 2\], rank 1 in all_reduce .* with strides \[16, 1, 8, 4\]"
)
def test_memory_formats(rank):
    x = torch.arange(16.0).reshape(1, 4, 2, 2)
    dist.all_reduce(x.contiguous(memory_format=torch.channels_last) if rank else x)


@says(r"ranks? .*rank 0 is in broadcast of float32\[3, 2\] with root 0, rank 1 in broadcast .* with strides \[1, 3\]")
def test_strides(rank):
    dist.broadcast(torch.zeros(2, 3).t() if rank else ones(3, 2), 0)


@says(r"ranks? .*rank 0 is in all_reduce of float32\[2, 2\], rank 1 in all_reduce of sparse_coo_float32\[2, 2\]")
def test_sparse_and_dense(rank):
    dist.all_reduce(ones(2, 2).to_sparse() if rank else ones(2, 2))


@pytest.mark.may_skip("collectives of objects need numpy")
@says(
    r"(?s)ranks? .*rank 0 is in broadcast of int64\[2\] with root 0, rank 1 in broadcast of int64\[3\] with root 0, as"
)
def test_lists_of_objects_of_other_lengths(rank):
    pytest.importorskip("numpy", reason="collectives of objects need numpy")
    # The size of a third object is whatever the memory holds.
    dist.broadcast_object_list(["an object"] * (2 + rank))


@says(
    r"(ranks 0, 1 passed, but|rank [01] stuck:) "
    r"rank 0 is in broadcast of float32\[4\].*, rank 1 in broadcast of float32\[5\]"
)
def test_shapes_of_a_broadcast(rank):
    dist.broadcast(ones(4 + rank), 0)


@says(r"ranks? .*rank 0 .*all_gather.* of float32\[2\].*, rank 1 .*all_gather.* of float32\[3\]")
def test_shapes_of_an_all_gather(rank):
    size = 2 + rank
    dist.all_gather_into_tensor(ones(2 * size), ones(size))


@says(
    r"rank \d (stuck|was killed by SIGABRT): rank 0 is in reduce of float32\[2\] .*, rank 1 in reduce of float32\[3\]"
)
def test_shapes_of_a_reduce(rank):
    dist.reduce(ones(2 + rank), 0)


@says(r"rank \d (stuck|was .* SIGABRT): rank 0 is in all_gather of float32\[0\], .*, rank 1 in .*float32\[2\]")
def test_nothing_and_something_in_an_all_gather(rank):
    dist.all_gather([ones(2 * rank), ones(2 * rank)], ones(2 * rank))


@says(r"rank \d (stuck|was .* SIGABRT): rank 0 is in all_gather of float32\[2\], .*, rank 1 in .*float32\[4\]")
def test_shapes_of_an_all_gather_into_a_list(rank):
    size = 2 + 2 * rank
    dist.all_gather([ones(size), ones(size)], ones(size))


@says(
    r"rank \d (stuck|was killed by SIGABRT): rank 0 is in gather of float32\[2\] .*, rank 1 in gather of float32\[4\]"
)
def test_shapes_of_a_gather(rank):
    dist.gather(ones(2 + 2 * rank), None if rank else [ones(2), ones(2)], dst=0)


@says(
    r"rank \d (stuck|was killed by SIGABRT): rank 0 is in scatter of float32\[4\] .*, rank 1 in scatter of float32\[2\]"
)
def test_shapes_of_a_scatter(rank):
    dist.scatter(ones(4 - 2 * rank), None if rank else [ones(4), ones(4)], src=0)


@says(
    r"rank \d (stuck|was killed by SIGABRT): rank 0 is in reduce_scatter of float32\[1\], float32\[1\], rank 1 in red"
)
def test_shapes_of_a_reduce_scatter(rank):
    size = 1 + rank
    dist.reduce_scatter(ones(size), [ones(size), ones(size)])


@says(r"rank \d (stuck|was .* SIGABRT): rank 0 is in all_gather\w* of float32\[2\], rank 1 in .*float32\[4\]")
def test_shapes_of_a_distributed_tensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    local = DTensor.from_local(ones(2 + 2 * rank), mesh, [Shard(0)], run_check=False)
    local.redistribute(mesh, [Replicate()]).to_local().sum().item()


@says(r"rank \d (stuck|was .* SIGABRT): rank 0 is in all_reduce of float32\[1\], rank 1 in .*float32\[8\]")
def test_join_on_one_rank(rank):
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    with nullcontext() if rank else Join([model]):
        for _ in range(2):
            model(ones(2, 3)).sum().backward()


@says(r"rank \d (was killed by SIGABRT|stuck): rank 0 is in all_reduce of float32\[4\].*, rank 1 in .*float64\[4\]")
def test_dtypes_of_an_all_reduce(rank):
    dist.all_reduce(ones(4, dtype=float64 if rank else float32))


@says(r"ranks? .*rank 0 is in all_reduce of float32\[4\].*, rank 1 in all_reduce of int32\[4\]")
def test_dtypes_of_an_all_reduce_of_one_size(rank):
    dist.all_reduce(ones(4, dtype=int32 if rank else float32))


@says(r"ranks? .*rank 0 is in broadcast of float32\[4\].*, rank 1 in broadcast of int32\[4\]")
def test_dtypes_of_a_broadcast(rank):
    dist.broadcast(ones(4, dtype=int32 if rank else float32), 0)


@says(
    r"(ranks 0, 1 passed, but|rank [01] stuck:) "
    r"rank 0 is in broadcast of complex64\[4\] .*, rank 1 in broadcast of float32\[4, 2\]"
)
def test_complex_and_real_numbers_in_a_broadcast(rank):
    dist.broadcast(ones(4, 2) if rank else ones(4, dtype=complex64), 0)


@says(
    r"(ranks 0, 1 passed, but|rank [01] stuck:) "
    r"rank 0 is in all_reduce of complex64\[4\], rank 1 in all_reduce of float32\[8\]"
)
def test_complex_and_real_numbers_in_an_all_reduce(rank):
    with torch.inference_mode():
        dist.all_reduce(ones(8) if rank else ones(4, dtype=complex64))


@says(
    r"(ranks 0, 1 passed, but|rank [01] stuck:) "
    r"rank 0 is in all_gather of complex64\[1\], .*, rank 1 in all_gather of float32\[2\],"
)
def test_complex_and_real_numbers_in_an_all_gather(rank):
    x = ones(2) if rank else ones(1, dtype=complex64)
    dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x)


@says(r"ranks? .*rank 0 is in reduce of float32\[4\].*, rank 1 in reduce of int32\[4\]")
def test_dtypes_of_a_reduce(rank):
    dist.reduce(ones(4, dtype=int32 if rank else float32), 0)


@says(r"ranks? .*rank 0 is in all_gather of float32\[2\].*, rank 1 in all_gather of int32\[2\]")
def test_dtypes_of_an_all_gather(rank):
    dtype = int32 if rank else float32
    dist.all_gather([ones(2, dtype=dtype), ones(2, dtype=dtype)], ones(2, dtype=dtype))


@says(r"ranks? .*rank 0 is in all_gather_into_tensor of float32\[2\].*, rank 1 in all_gather_into_tensor of int32")
def test_dtypes_of_an_all_gather_into_a_tensor(rank):
    dtype = int32 if rank else float32
    dist.all_gather_into_tensor(ones(4, dtype=dtype), ones(2, dtype=dtype))


@says(r"ranks? .*rank 0 is in gather of float32\[2\].*, rank 1 in gather of int32\[2\]")
def test_dtypes_of_a_gather(rank):
    dtype = int32 if rank else float32
    dist.gather(ones(2, dtype=dtype), None if rank else [ones(2), ones(2)], dst=0)


@says(r"ranks? .*rank 0 is in scatter of float32.*, rank 1 in scatter of int32")
def test_dtypes_of_a_scatter(rank):
    dtype = int32 if rank else float32
    dist.scatter(ones(2, dtype=dtype), None if rank else [ones(2), ones(2)], src=0)


@says(r"ranks? .*rank 0 is in reduce_scatter_tensor of float32\[\d\].*, rank 1 in reduce_scatter_tensor of int32\[\d\]")
def test_dtypes_of_a_reduce_scatter(rank):
    dtype = int32 if rank else float32
    dist.reduce_scatter_tensor(ones(2, dtype=dtype), ones(4, dtype=dtype))


@says(r"ranks? .*rank 0 is in all_to_all of float32.*, rank 1 in all_to_all of int32")
@pytest.mark.may_skip("gloo has all_to_all of lists since torch 2.12")
def test_dtypes_of_an_all_to_all(rank):
    if torch.__version__ < "2.12":
        pytest.skip("gloo has all_to_all of lists since torch 2.12")
    parts = [ones(2, dtype=int32 if rank else float32) for _ in range(4)]
    dist.all_to_all(parts[:2], parts[2:])


@says(r"ranks? .*rank 0 is in all_to_all_single of float32\[2\].*, rank 1 in all_to_all_single of int32\[2\]")
def test_dtypes_of_an_all_to_all_of_one_tensor(rank):
    dtype = int32 if rank else float32
    dist.all_to_all_single(ones(2, dtype=dtype), ones(2, dtype=dtype))


@says(r"ranks? .*rank 0 is in all_gather_into_tensor of float64\[1\].*, rank 1 in all_gather_into_tensor of int64")
def test_dtypes_of_a_gathered_scalar(rank):
    dtype = int64 if rank else float64
    dist.all_gather_into_tensor(ones(2, dtype=dtype), ones(1, dtype=dtype))


@says(r"rank 0 stuck: rank 0 is in broadcast of float32\[4\] with root 0, rank 1 in broadcast of .* with root 1")
def test_roots_of_a_broadcast(rank):
    dist.barrier()
    dist.broadcast(ones(4), src=rank)


@says(r"ranks? .*rank 0 is in reduce of float32\[4\].* with root 0.*, rank 1 in reduce of .* with root 1")
def test_roots_of_a_reduce(rank):
    dist.reduce(ones(4), dst=rank)


@says(r"ranks? .*rank 0 is in gather of float32\[4\].* with root 0.*, rank 1 in gather of .* with root 1")
def test_roots_of_a_gather(rank):
    dist.gather(ones(4), [ones(4), ones(4)], dst=rank)


@says(r"ranks? .*rank 0 is in scatter of .* with root 0.*, rank 1 in scatter of .* with root 1")
def test_roots_of_a_scatter(rank):
    dist.scatter(ones(4), [ones(4), ones(4)], src=rank)


@says(r"ranks? .*rank 0 is in all_reduce of float32\[4\]( by SUM)?.*, rank 1 in all_reduce of float32\[4\].* by MAX")
def test_sum_and_max(rank):
    dist.all_reduce(ones(4), ReduceOp.MAX if rank else ReduceOp.SUM)


@says(r"ranks? .*rank 0 is in all_reduce of float32\[4\] by AVG, rank 1 in all_reduce of float32\[4\](, as| by SUM)")
def test_average_and_sum(rank):
    dist.all_reduce(ones(4), ReduceOp.SUM if rank else ReduceOp.AVG)


@says(r"ranks? .*rank 0 is in all_reduce of float32\[4\] by MIN, rank 1 in all_reduce of float32\[4\] by PRODUCT")
def test_minimum_and_product(rank):
    dist.all_reduce(ones(4), ReduceOp.PRODUCT if rank else ReduceOp.MIN, async_op=True).wait()


@says(r"ranks? .*rank 0 is in reduce of float32\[4\]( by SUM)?.*, rank 1 in reduce of float32\[4\].* by MAX")
def test_sum_and_max_of_a_reduce(rank):
    dist.reduce(ones(4), 0, ReduceOp.MAX if rank else ReduceOp.SUM)


@says(r"ranks? .*rank 0 is in reduce_scatter_tensor of ( by SUM)?.*, rank 1 in reduce_scatter_tensor of .* by MAX")
def test_sum_and_max_of_a_reduce_scatter(rank):
    dist.reduce_scatter_tensor(ones(2), ones(4), ReduceOp.MAX if rank else ReduceOp.SUM)


@pytest.mark.unchecked("functional collectives), root, reduce operation and strides")
def test_sum_and_max_of_a_functional_all_reduce(rank):
    functional.all_reduce(ones(4), "max" if rank else "sum", dist.group.WORLD) + 1


@says(r"ranks? .*rank 0 is in all_reduce of float32\[4\].*, rank 1 in all_gather\w* of float32\[4\]")
def test_functional_collectives_of_other_kinds(rank):
    if rank:
        functional.all_gather_tensor(ones(4), 0, dist.group.WORLD) + 1
    else:
        functional.all_reduce(ones(4), "sum", dist.group.WORLD) + 1


@says(r"ranks? .*rank 0 is in all_reduce of float32\[4\].*, rank 1 in all_gather\w* of float32\[4\]")
def test_functional_collectives_of_other_kinds_that_no_rank_waits_for(rank):
    if rank:
        functional.all_gather_tensor(ones(4), 0, dist.group.WORLD)
    else:
        functional.all_reduce(ones(4), "sum", dist.group.WORLD)


@says(r"ranks? .*rank 0 is in all_reduce_coalesced of float32\[2\], float32\[3\].*, rank 1 in all_reduce_coalesced of")
def test_coalesced_tensors_of_other_sizes(rank):
    dist.all_reduce_coalesced([ones(2), ones(3 + rank)])


@says(r"ranks? .*rank 0 is in all_to_all_single.*, rank 1 in all_to_all_single|rank \d (failed|was killed by SIGABRT)")
def test_a_wide_and_a_narrow_all_to_all(rank):
    sizes = [1, 2 + rank]
    dist.all_to_all_single(ones(3 + rank), ones(3 + rank), sizes, sizes)


@pytest.mark.ranks(4, timeout=30)
@says(r"ranks? .*rank 0 is in all_reduce of float32\[2\].*, rank 3 in broadcast of float32\[2\]")
def test_one_of_four_in_another(rank):
    if rank == 3:
        dist.broadcast(ones(2), 0)
    else:
        dist.all_reduce(ones(2))


@says(r"ranks? .*rank 0 is in all_reduce of float32\[2\].*, rank 1 in broadcast of .*of the group of ranks 0, 1")
def test_in_a_group_of_their_own(rank):
    group = dist.new_group([0, 1])
    dist.all_reduce(ones(2))
    if rank:
        dist.broadcast(ones(2), 0, group=group, async_op=True)
    else:
        dist.all_reduce(ones(2), group=group, async_op=True)


@pytest.mark.may_skip("collectives of objects need numpy")
@says(r"ranks? .*rank 0 is in .*, rank 1 in |rank \d failed: ")
def test_objects_in_other_collectives(rank):
    pytest.importorskip("numpy", reason="collectives of objects need numpy")
    if rank:
        dist.broadcast_object_list([None], src=0)
    else:
        dist.all_gather_object([None, None], "x")


@says(r"ranks? .*rank 0 is in broadcast of float32\[2\].*, rank 1 in broadcast of int32\[2\]")
def test_what_passed_is_looked_at_all_the_same(rank):
    x = torch.zeros(2, dtype=int32 if rank else float32)
    dist.broadcast(x, 0)
    assert not x.any()


def test_healthy_after_mismatches(rank):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.sum() == 6


@says(
    r"(ranks 0, 1 passed, but|rank [01] stuck:) "
    r"rank 0 is in all_reduce of float32\[1\] by MAX.*, rank 1 in all_reduce of float32\[1\]"
)
def test_in_a_group_that_one_rank_destroys(rank):
    group = dist.new_group([0, 1])
    dist.all_reduce(ones(1), group=group, op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)
    if rank == 0:
        dist.destroy_process_group(group)


@says(r"rank 1 returned without all_reduce")
def test_left_out_of_groups_that_are_destroyed_in_another_order(rank):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.all_reduce(ones(1), group=group)
    if rank == 0:
        dist.all_reduce(ones(1), group=groups[0], async_op=True)
    for group in groups if rank else groups[::-1]:
        dist.destroy_process_group(group)
