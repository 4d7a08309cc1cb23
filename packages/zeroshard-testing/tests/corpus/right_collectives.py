"""Collectives of every kind that fit together."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import ones
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

pytestmark = pytest.mark.ranks(2)


@pytest.mark.ranks(1, 2, 3, 4)
def test_sum(rank, world_size, process_group, device):
    x = torch.full((4,), float(rank), device=device)
    dist.all_reduce(x, group=process_group)
    assert x[0] == sum(range(world_size))


@pytest.mark.parametrize(
    ("op", "expected"), [(ReduceOp.SUM, 3), (ReduceOp.MAX, 2), (ReduceOp.MIN, 1), (ReduceOp.PRODUCT, 2)]
)
def test_reductions(rank, op, expected):
    x = torch.tensor([rank + 1])
    dist.all_reduce(x, op)
    assert x == expected


@pytest.mark.may_skip("this gloo has no average")
def test_average(rank):
    x = torch.tensor([float(rank)])
    try:
        dist.all_reduce(x, ReduceOp.AVG)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"this gloo has no average: {error}")
    assert x == 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64])
def test_dtypes(rank, dtype):
    x = ones(3, dtype=dtype)
    dist.all_reduce(x)
    assert x.sum() == 6


def test_bools(rank):
    x = torch.tensor([rank == 1])
    dist.all_reduce(x, ReduceOp.MAX)
    assert x.item()


def test_complex_numbers(rank):
    x = ones(2) * 1j
    dist.all_reduce(x)
    assert x[0] == 2j


def test_complex_numbers_in_every_way(rank):
    parts = ones(4, 3, dtype=torch.complex64)
    part = parts[1:3]
    dist.broadcast(part, 0)
    dist.all_reduce(tensor=torch.view_as_real(part))
    dist.all_gather([torch.empty_like(part), torch.empty_like(part)], part)
    dist.all_gather_into_tensor(parts, part.clone())
    dist.scatter(part, None if rank else [ones(2, 3, dtype=torch.complex64) * scale for scale in (1, 2)], 0)
    assert part[0, 0] == 1 + rank
    with torch.inference_mode():
        dist.all_reduce(parts)


def test_complex_numbers_that_python_or_cpp_issues(rank):
    x = ones(2, dtype=torch.complex64)
    if rank:
        x = functional.all_reduce(x, "sum", dist.group.WORLD)
    else:
        dist.all_reduce(x)
    assert x[0] == 2


def test_empty_tensors(rank):
    dist.all_reduce(ones(0))
    dist.broadcast(ones(0, 3), 0)


def test_scalars(rank):
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    assert x == 1


def test_strided_tensors(rank):
    x = ones(4, 4).t()[::2]
    dist.all_reduce(x.contiguous())
    y = ones(3, 2).t()
    dist.broadcast(y, 0)
    assert y.sum() == 6


def test_broadcast(rank):
    x = torch.full((3,), float(rank))
    dist.broadcast(x, src=1)
    assert x.sum() == 3


def test_broadcasts_of_different_roots(rank, world_size):
    for root in range(world_size):
        x = torch.full((3,), float(rank))
        dist.broadcast(x, src=root)
        assert x[0] == root


def test_reduce(rank):
    x = ones(3)
    dist.reduce(x, dst=1)
    assert rank == 0 or x.sum() == 6


def test_all_gather(rank):
    parts = [torch.empty(2), torch.empty(2)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [part[0] for part in parts] == [0, 1]


def test_all_gather_into_a_tensor(rank):
    found = torch.empty(4)
    dist.all_gather_into_tensor(found, torch.full((2,), float(rank)))
    assert found.tolist() == [0, 0, 1, 1]


def test_gather_and_scatter(rank):
    parts = [torch.empty(2), torch.empty(2)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), parts, dst=0)
    x = torch.empty(2)
    dist.scatter(x, parts, src=0)
    assert x[0] == rank


def test_reduce_scatter(rank):
    x = torch.empty(2)
    dist.reduce_scatter(x, [ones(2), ones(2) * 2])
    assert x[0] == 2 * (rank + 1)


def test_reduce_scatter_of_uneven_parts(rank):
    x = torch.zeros(2 + rank)
    dist.reduce_scatter(x, [ones(2), ones(3)])
    assert x.tolist() == [2] * (2 + rank)


def test_reduce_scatter_of_a_tensor(rank):
    x = torch.empty(2)
    dist.reduce_scatter_tensor(x, torch.arange(4.0))
    assert x.tolist() == ([4, 6] if rank else [0, 2])


@pytest.mark.may_skip("gloo has all_to_all of lists since torch 2.12")
def test_all_to_all(rank):
    if torch.__version__ < "2.12":
        pytest.skip("gloo has all_to_all of lists since torch 2.12")
    found = [torch.empty(1), torch.empty(1)]
    dist.all_to_all(found, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
    assert [x.item() for x in found] == [rank, 10 + rank]


def test_all_to_all_of_uneven_parts(rank):
    found = torch.empty(2 + 2 * rank)
    dist.all_to_all_single(found, ones(3), [1 + rank] * 2, [1, 2])
    assert found.sum() == 2 + 2 * rank


def test_all_to_all_of_nothing_to_one_rank(rank):
    sizes = [[0, 3], [1, 0]]
    out, into = sizes[rank], [sizes[0][rank], sizes[1][rank]]
    found = torch.empty(sum(into))
    dist.all_to_all_single(found, ones(sum(out)), into, out)
    assert found.sum() == sum(into)


def test_shapes_that_may_differ(rank):
    dist.broadcast(ones(2, 3) if rank else ones(6), src=0)
    dist.all_reduce(ones(3, 2) if rank else ones(2, 3))


def test_collectives_that_all_have_issued_and_none_waited_for(rank):
    dist.all_reduce(ones(4), async_op=True)
    dist.broadcast(ones(4), 0, async_op=True)
    dist.barrier(async_op=True)


def test_functional_collectives_that_none_waited_for(rank):
    functional.all_reduce(ones(4), "sum", dist.group.WORLD)


def test_collectives_that_one_rank_waits_for(rank):
    work = dist.all_reduce(ones(4), async_op=True)
    if rank:
        work.wait()


def test_works_waited_for_in_reverse(rank):
    works = [dist.all_reduce(ones(4), async_op=True) for _ in range(5)]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()


def test_coalesced(rank):
    x, y = ones(2), ones(3)
    with _coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    assert x.sum() + y.sum() == 10


def test_coalesced_works(rank):
    x = ones(2)
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(ones(3))
    manager.wait()
    assert x.sum() == 4


def test_coalesced_lists(rank):
    tensors = [ones(2), ones(3)]
    dist.all_reduce_coalesced(tensors)
    assert tensors[1].sum() == 6


def test_functional_collectives(rank):
    group = dist.group.WORLD
    assert functional.all_reduce(ones(2), "sum", group).sum() == 4
    assert functional.all_gather_tensor(ones(2), 0, group).shape == (4,)
    assert functional.reduce_scatter_tensor(ones(2), "sum", 0, group).sum() == 2
    assert functional.broadcast(ones(2) * rank, 1, group).sum() == 2
    assert functional.all_to_all_single(ones(2) * rank, None, None, group).tolist() == [0, 1]
    assert functional.all_reduce_coalesced([ones(2), ones(3)], "sum", group)[1].sum() == 6


def test_differentiable_collectives(rank):
    x = ones(2, requires_grad=True)
    differentiable.all_reduce(x).sum().backward()
    assert x.grad.sum() == 4


@pytest.mark.may_skip("collectives of objects need numpy")
def test_objects_of_different_sizes(rank):
    pytest.importorskip("numpy", reason="collectives of objects need numpy")
    dist.broadcast_object_list([None], src=0)
    found = [None, None]
    dist.all_gather_object(found, "x" * (1 + 1000 * rank))
    assert len(found[1]) == 1001


@pytest.mark.may_skip("collectives of objects need numpy")
def test_objects(rank):
    pytest.importorskip("numpy", reason="collectives of objects need numpy")
    found = [None, None] if rank == 0 else None
    dist.gather_object({"rank": rank}, found)
    assert rank or found == [{"rank": 0}, {"rank": 1}]
    taken = [None]
    dist.scatter_object_list(taken, ["a", "b"] if rank == 0 else None, src=0)
    assert taken == ["ab"[rank]]


@pytest.mark.ranks(2, 3)
def test_a_barrier_that_all_pass(rank):
    dist.monitored_barrier()
    dist.barrier()
    dist.monitored_barrier(wait_all_ranks=True)
    dist.all_reduce(ones(1))


def test_strides_that_all_ranks_have(rank):
    x = torch.arange(16.0).reshape(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(x)
    assert x.flatten().tolist() == [2.0 * number for number in range(16)]
    dist.broadcast(ones(2, 3).t(), 0)


def test_strides_of_lists_and_of_other_shapes(rank):
    lists = [list(torch.zeros(3, 2).unbind(1)), [torch.zeros(3), torch.zeros(3)]]
    dist.all_gather(lists[rank], torch.full((3,), float(rank)))
    assert [one.tolist() for one in lists[rank]] == [[0.0] * 3, [1.0] * 3]
    x = torch.zeros(2, 3) if rank else torch.arange(6.0).view(2, 3).t()
    dist.broadcast(x, 0)
    assert rank == 0 or x.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_sparse_tensors_of_other_numbers_of_elements(rank):
    x = (torch.eye(2) if rank else ones(2, 2)).to_sparse()
    dist.all_reduce(x)
    assert x.to_dense().sum() == 6


def test_more_collectives_than_are_kept_on_record(rank):
    for _ in range(600):
        dist.all_reduce(ones(1))


def test_collectives_issued_by_another_function_on_each_rank(rank):
    x = ones(2)
    if rank:
        dist.distributed_c10d._get_default_group().allreduce([x]).wait()
    else:
        dist.all_reduce(x)
    assert x.sum() == 4
