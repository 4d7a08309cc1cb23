"""Collectives of the emulated process group: gloo's bits, the order of streams, and errors where ranks differ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from zeroshard_testing import DifferentCollectivesError, RaceError
from zeroshard_testing.emulated.mover import live_movers
from zeroshard_testing.emulated.runtime import findings

pytestmark = pytest.mark.exhaustive

CPU = torch.device("cpu")
ON_1_TO_3 = pytest.mark.ranks(1, 2, 3, backend="emulated")
ON_2 = pytest.mark.ranks(2, backend="emulated")
DTYPES = [torch.bool, torch.complex64, torch.bfloat16, torch.int16, torch.float8_e4m3fn]
ON_3 = pytest.mark.ranks(3, backend="emulated")
RACE = pytest.mark.xfail(raises=RaceError, strict=True, reason="it has a race")
DIFFERENCE = pytest.mark.xfail(raises=DifferentCollectivesError, strict=True, reason="ranks differ")
ASYNC_OR_NOT = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
HERE = Path(__file__).name


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()


def line(mark: str) -> str:
    """Return the place in this file of the line that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    return f"{HERE}:{next(number for number, text in enumerate(lines, 1) if text.endswith(f'  # {mark}'))}"


class Place:
    """A device on which a program runs its collectives, one after another."""

    def __init__(self, device: torch.device, is_async: bool) -> None:
        self.device, self.is_async = device, is_async
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def drawn(self, *shape: int, seed: int = 0, rank: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + (self.rank if rank is None else rank))
        return torch.randn(shape, generator=generator).to(self.device)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=self.device)

    def run(self, collective: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        work = collective(*arguments, **named, async_op=self.is_async)
        assert (work is not None) == self.is_async
        if work is not None:
            work.wait()


Program = Callable[[Place], Iterable[torch.Tensor]]


def assert_gloos_bits(program: Program, device: torch.device, is_async: bool = False) -> None:
    """Run a program on the device, and on CPU tensors in the same process group, and compare."""
    found, expected = list(program(Place(device, is_async))), list(program(Place(CPU, is_async)))
    assert len(found) == len(expected) > 0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours.device, theirs.device) == (device, CPU)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), number
        assert bits(ours) == bits(theirs), number


# ------------------------------------------------------------------------------------------------ the data, as gloo's


def reduce_scatter_single(*arguments: Any, **named: Any) -> Any:
    # Its older name is deprecated where there is this one.
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(*arguments, **named)


def all_gather_single(*arguments: Any, **named: Any) -> Any:
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(*arguments, **named)


def all_reduce(on: Place) -> Iterable[torch.Tensor]:
    tensors = [on.drawn(*shape) for shape in [(), (0,), (1,), (1001,), (7, 12)]]
    tensors += [on.drawn(11, 13).t(), on.drawn(20)[3:15]]
    for tensor in tensors:
        on.run(dist.all_reduce, tensor)
    return tensors


def reduce(on: Place) -> Iterable[torch.Tensor]:
    tensor = on.drawn(1001)
    on.run(dist.reduce, tensor, on.size - 1)
    # What it leaves elsewhere nobody may count on.
    return [tensor if on.rank == on.size - 1 else on.zeros(1)]


def broadcast(on: Place) -> Iterable[torch.Tensor]:
    tensors = [on.drawn(5, 3, seed=root) for root in range(on.size)]
    for root, tensor in enumerate(tensors):
        on.run(dist.broadcast, tensor, root)
    return tensors


def all_gather(on: Place) -> Iterable[torch.Tensor]:
    outputs = [on.zeros(4, 3) for _ in range(on.size)]
    on.run(dist.all_gather, outputs, on.drawn(4, 3))
    return outputs


def all_gather_into_tensor(on: Place) -> Iterable[torch.Tensor]:
    output = on.zeros(4 * on.size, 3)
    on.run(all_gather_single, output, on.drawn(4, 3))
    in_place = on.zeros(on.size * 6)
    mine = in_place[6 * on.rank : 6 * on.rank + 6]
    mine.copy_(on.drawn(6))
    on.run(all_gather_single, in_place, mine)
    return [output, in_place]


def reduce_scatter(on: Place) -> Iterable[torch.Tensor]:
    output = on.zeros(101)
    on.run(dist.reduce_scatter, output, [on.drawn(101, seed=place) for place in range(on.size)])
    return [output]


def reduce_scatter_tensor(on: Place) -> Iterable[torch.Tensor]:
    output = on.zeros(7, 11)
    on.run(reduce_scatter_single, output, on.drawn(7 * on.size, 11))
    return [output]


def gather(on: Place) -> Iterable[torch.Tensor]:
    outputs = [on.zeros(4, 3) for _ in range(on.size)] if on.rank == 0 else None
    on.run(dist.gather, on.drawn(4, 3), outputs, dst=0)
    return outputs or [on.zeros(1)]


def scatter(on: Place) -> Iterable[torch.Tensor]:
    root = on.size - 1
    output = on.zeros(4, 3)
    inputs = [on.drawn(4, 3, seed=place) for place in range(on.size)] if on.rank == root else None
    on.run(dist.scatter, output, inputs, src=root)
    return [output]


def all_to_all_single(on: Place) -> Iterable[torch.Tensor]:
    output = on.zeros(2 * on.size, 3)
    on.run(dist.all_to_all_single, output, on.drawn(2 * on.size, 3))
    return [output]


def uneven_all_to_all_single(on: Place) -> Iterable[torch.Tensor]:
    # From rank i to rank j, i + 2 * j rows of two.
    given, taken = ([on.rank + 2 * one for one in range(on.size)], [one + 2 * on.rank for one in range(on.size)])
    output = on.zeros(sum(taken), 2)
    on.run(dist.all_to_all_single, output, on.drawn(sum(given), 2), taken, given)
    return [output]


def messages(on: Place) -> Iterable[torch.Tensor]:
    if on.size == 1:
        return [on.zeros(1)]
    following, previous = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    tensors = [on.zeros(5), on.zeros(2, 3)]
    works = [dist.isend(on.drawn(5), following), dist.irecv(tensors[0], previous)]
    for work in works:
        work.wait()
    # In turn: each of the two waits.
    if on.rank % 2 == 0 and on.rank + 1 < on.size:
        dist.send(on.drawn(2, 3, seed=1), on.rank + 1)
    elif on.rank % 2:
        dist.recv(tensors[1], on.rank - 1)
    return tensors


def batched_messages(on: Place) -> Iterable[torch.Tensor]:
    if on.size == 1:
        return [on.zeros(1)]
    following, previous = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    tensors = [on.zeros(5), on.zeros(7)]
    # In one order where both neighbours are the same rank.
    operations = [
        dist.P2POp(dist.irecv, tensors[0], previous),
        dist.P2POp(dist.irecv, tensors[1], following),
        dist.P2POp(dist.isend, on.drawn(5), following),
        dist.P2POp(dist.isend, on.drawn(7, seed=1), previous),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return tensors


COLLECTIVES: list[Program] = [
    *(all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor),
    *(gather, scatter, all_to_all_single, uneven_all_to_all_single, messages, batched_messages),
]


@ON_1_TO_3
@ASYNC_OR_NOT
@pytest.mark.parametrize("program", COLLECTIVES, ids=lambda program: program.__name__)
def test_collectives_give_the_bits_of_gloo(device, program, is_async):
    assert_gloos_bits(program, device, is_async)


@ON_1_TO_3
@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_reductions_give_the_bits_of_gloo(device, name):
    def program(on: Place) -> Iterable[torch.Tensor]:
        # An average is a sum of what was multiplied before, as NCCL's is.
        averages_itself = name == "AVG" and on.device.type == "cpu"
        operation = getattr(dist.ReduceOp, "SUM" if averages_itself else name)
        factor = 1 / on.size if averages_itself else 1
        reduced, scattered, part = on.drawn(1001) * factor, on.zeros(101), on.zeros(77)
        on.run(dist.all_reduce, reduced, operation)
        on.run(reduce_scatter_single, scattered, on.drawn(101 * on.size) * factor, operation)
        on.run(dist.reduce_scatter, part, [on.drawn(77, seed=place) * factor for place in range(on.size)], operation)
        return [reduced, scattered, part]

    assert_gloos_bits(program, device)


@ON_1_TO_3
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8])
def test_sums_of_every_dtype_give_the_bits_of_gloo(device, dtype):
    def program(on: Place) -> Iterable[torch.Tensor]:
        tensor = (10 * on.drawn(101).abs()).to(dtype)
        on.run(dist.all_reduce, tensor)
        return [tensor]

    assert_gloos_bits(program, device)


@ON_1_TO_3
@pytest.mark.parametrize("name", ["BAND", "BOR", "BXOR"])
def test_bits_are_reduced_as_gloo_does(device, name):
    def program(on: Place) -> Iterable[torch.Tensor]:
        tensor = torch.arange(20, device=on.device) * (3 + on.rank)
        on.run(dist.all_reduce, tensor, getattr(dist.ReduceOp, name))
        return [tensor]

    assert_gloos_bits(program, device)


@ON_1_TO_3
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_only_moves_does_so_in_every_dtype(device, rank, world_size, dtype):
    values = [torch.arange(6).add(10 * one).to(dtype) for one in range(world_size)]
    gathered = [torch.zeros(6, dtype=dtype, device=device) for _ in range(world_size)]
    dist.all_gather(gathered, values[rank].to(device))
    assert [bits(one) for one in gathered] == [bits(one) for one in values]
    tensor = values[rank].to(device)
    dist.broadcast(tensor, world_size - 1)
    assert bits(tensor) == bits(values[-1])


@ON_1_TO_3
@ASYNC_OR_NOT
def test_lists_of_tensors_of_different_sizes(device, rank, world_size, is_async):
    on, others = Place(device, is_async), range(world_size)
    gathered = [on.zeros(2 * one) for one in others]
    on.run(dist.all_gather, gathered, on.drawn(2 * rank))
    assert [bits(one) for one in gathered] == [bits(on.drawn(2 * one, rank=one)) for one in others]

    part, whole = on.zeros(rank + 1), [on.drawn(one + 1) for one in others]
    on.run(dist.reduce_scatter, part, whole)
    expected = torch.zeros(rank + 1)
    for one in others:
        expected += on.drawn(rank + 1, rank=one).cpu()
    assert torch.allclose(part.cpu(), expected, atol=1e-6)

    # From rank i to rank j, i + 2 * j numbers.
    given = [on.drawn(rank + 2 * one, seed=one) for one in others]
    taken = [on.zeros(one + 2 * rank) for one in others]
    on.run(dist.all_to_all, taken, given)
    expected = [on.drawn(one + 2 * rank, seed=rank, rank=one) for one in others]
    assert [bits(one) for one in taken] == [bits(one) for one in expected]


@ON_1_TO_3
def test_objects_travel(rank, world_size):
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": one} for one in range(world_size)]
    sent = [f"of rank {rank}"]
    dist.broadcast_object_list(sent, src=world_size - 1)
    assert sent == [f"of rank {world_size - 1}"]


@pytest.mark.ranks(2, backend="emulated")
def test_futures_hold_the_tensors_on_every_rank(rank, device):
    x = torch.full((3,), rank + 1.0, device=device)
    for issue in (dist.broadcast, dist.reduce):
        (value,) = issue(x, 0, async_op=True).get_future().wait()
        assert value is x or value.data_ptr() == x.data_ptr()


@pytest.mark.ranks(2, backend="emulated")
def test_a_call_of_a_batch_has_no_future_and_a_batch_holds_no_other(device):
    group = dist.group.WORLD._get_backend(device)
    group._start_coalescing()
    with pytest.raises(RuntimeError, match="begins within another one"):
        group._start_coalescing()
    work = group.allreduce([torch.ones(3, device=device)])
    with pytest.raises(RuntimeError, match="a call of a batch has no future of its own"):
        work.get_future()
    group._end_coalescing().wait()
    with pytest.raises(RuntimeError, match="ends that has not begun"):
        group._end_coalescing()


@ON_1_TO_3
@ASYNC_OR_NOT
def test_coalesced_collectives_are_one(device, rank, world_size, device_costs, is_async):
    on = Place(device, False)
    tensors = [on.drawn(number + 1) for number in range(5)]
    gathered, scattered = [on.zeros(3 * world_size) for _ in range(2)], [on.zeros(3) for _ in range(2)]
    inputs = [on.drawn(3, seed=one) for one in range(2)]
    wholes = [on.drawn(3 * world_size, seed=one) for one in range(2)]
    with device_costs() as costs:
        with dist._coalescing_manager(device=device, async_ops=is_async) as batch:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if is_async:
            batch.wait()
        with dist._coalescing_manager(device=device, async_ops=is_async) as batch:
            for output, part in zip(gathered, inputs, strict=True):
                all_gather_single(output, part)
        if is_async:
            batch.wait()
        with dist._coalescing_manager(device=device, async_ops=is_async) as batch:
            for output, whole in zip(scattered, wholes, strict=True):
                reduce_scatter_single(output, whole)
        if is_async:
            batch.wait()
    assert costs.kernels == 3
    assert costs.collectives == {"all_reduce": 5, "all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert costs.host_waits == []

    def one_by_one(on: Place) -> Iterable[torch.Tensor]:
        reduced = [on.drawn(number + 1) for number in range(5)]
        outputs = [on.zeros(3 * world_size) for _ in range(2)]
        parts = [on.zeros(3) for _ in range(2)]
        for tensor in reduced:
            dist.all_reduce(tensor)
        for seed in range(2):
            all_gather_single(outputs[seed], on.drawn(3, seed=seed))
            reduce_scatter_single(parts[seed], on.drawn(3 * world_size, seed=seed))
        return [*reduced, *outputs, *parts]

    found = [*tensors, *gathered, *scattered]
    assert [bits(one) for one in found] == [bits(one) for one in one_by_one(Place(CPU, False))]


@ON_1_TO_3
def test_a_long_batch_of_different_tensors(device, world_size):
    tensors = [torch.full((number % 7 + 1,), 1.0, device=device) for number in range(60)]
    with dist._coalescing_manager(device=device, async_ops=True) as batch:
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
    batch.wait()
    assert {value for tensor in tensors for value in tensor.tolist()} == {float(world_size)}


# -------------------------------------------------------------------------------------------------- what orders what


@ON_2
def test_neither_a_collective_nor_its_wait_blocks_the_host(rank, device, host_never_waits):
    x = torch.ones(4, device=device)
    if rank == 0:
        with host_never_waits():
            work = dist.all_reduce(x, async_op=True)
            work.wait()
        # Rank 1 issues its own only now: had anything above waited for that, nobody could go on.
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(x, async_op=True).wait()
    assert x.tolist() == [2] * 4


@pytest.mark.ranks(1, 2, backend="emulated", checks="no:races", reason="it looks at what has been found")
def test_a_wait_orders_the_current_stream_and_no_other(device):
    side = torch.Stream(device)
    x = torch.ones(4, device=device)
    work = dist.all_reduce(x, async_op=True)
    with side:
        work.wait()
        x.sum()
    assert findings() == []
    x.sum()
    (found,) = findings()
    assert (found.kind, found.later.title, found.earlier.title) == ("race", "aten::sum", "collective all_reduce")
    work.wait()
    x.sum()
    assert len(findings()) == 1


@ON_1_TO_3
def test_collectives_of_a_group_follow_one_another(device, world_size):
    x = torch.ones(4, device=device)
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    # The last comes after the others.
    works[-1].wait()
    assert x.tolist() == [world_size**3] * 4


@ON_2
def test_a_collective_without_async_runs_on_the_current_stream(device):
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    x = torch.ones(4, device=device)
    side.wait_stream(current)
    with side:
        dist.all_reduce(x)
        x.add_(1)
    current.wait_stream(side)
    assert x.tolist() == [3] * 4


@ON_2
def test_a_collective_comes_after_the_stream_that_issues_it(device, rank):
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x = torch.full((4,), 1.0 + rank, device=device)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    x.record_stream(torch.accelerator.current_stream())
    assert x.tolist() == [3] * 4


@ON_1_TO_3
def test_memory_of_a_collective_is_kept_until_it_has_ended(device):
    for wait in (True, False):
        x = torch.ones(1000, device=device)
        work = dist.all_reduce(x, async_op=True)
        del x
        if wait:
            work.wait()
        del work
        torch.ones(1000, device=device)


@ON_2
def test_a_work_that_is_polled_is_completed_in_the_end(device):
    x = torch.ones(4, device=device)
    work = dist.all_reduce(x, async_op=True)
    polls = 0
    while not work.is_completed():
        polls += 1
    assert polls >= 1
    assert work.is_success()
    # The host has waited for it, and so has all that it launches now.
    assert x.tolist() == [2] * 4


@ON_2
def test_futures_order_the_stream_that_waits_for_them(device, host_never_waits):
    x, y = torch.ones(4, device=device), torch.ones(4, device=device)
    with host_never_waits():
        future = dist.all_reduce(x, async_op=True).get_future()
        (found,) = future.wait()
        found.mul_(2)
        halved = dist.all_reduce(y, async_op=True).get_future().then(lambda done: done.value()[0].div_(2))
        found = halved.wait()
        found.add_(1)
    assert x.tolist() == [4] * 4
    assert y.tolist() == [2] * 4


@ON_2
def test_all_futures_of_several_collectives(device):
    tensors = [torch.full((3,), float(number), device=device) for number in range(3)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    torch.futures.wait_all(futures)
    assert [tensor.tolist() for tensor in tensors] == [[2.0 * number] * 3 for number in range(3)]


@ON_2
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_current_stream_is_as_before_after_a_barrier(device, number):
    x = torch.ones(4, device=device)
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(number)
        dist.barrier(device_ids=[0])
        assert torch.accelerator.current_stream() == side
    # The host has waited for the side stream's work.
    assert x.tolist() == [1 + number] * 4


# ---------------------------------------------------------------------------------------------------------- groups


@ON_3
def test_collectives_of_a_subgroup_are_its_members_own(device, rank):
    pair = dist.new_group([0, 1], backend=None)
    alone = [dist.new_group([one]) for one in range(3)]
    x = torch.full((4,), float(rank + 1), device=device)
    if rank < 2:
        work = dist.all_reduce(x, group=pair, async_op=True)
        work.wait()
    assert x.tolist() == [[3] * 4, [3] * 4, [3] * 4][rank]
    dist.all_reduce(x, group=alone[rank])
    dist.all_reduce(x)
    assert x.tolist() == [9] * 4
    y = torch.full((2,), float(rank), device=device)
    if rank < 2:
        # Roots are ranks of the default group.
        dist.broadcast(y, 1, group=pair)
        gathered = [torch.zeros(2, device=device) for _ in range(2)]
        dist.all_gather(gathered, torch.full((2,), float(rank), device=device), group=pair)
        assert [one.tolist() for one in gathered] == [[0, 0], [1, 1]]
        reduced = torch.ones(3) * rank
        dist.all_reduce(reduced, group=pair)
        assert reduced.tolist() == [1] * 3
    assert y.tolist() == [[1, 1], [1, 1], [2, 2]][rank]


@ON_3
def test_a_group_in_another_order_of_ranks(device, rank):
    group = dist.new_group([2, 1], sort_ranks=False) if _knows_sort_ranks() else dist.new_group([1, 2])
    if rank:
        gathered = torch.zeros(2, device=device)
        all_gather_single(gathered, torch.full((1,), float(rank), device=device), group=group)
        assert gathered.tolist() == [float(one) for one in dist.get_process_group_ranks(group)]


def _knows_sort_ranks() -> bool:
    return "sort_ranks" in dist.new_group.__code__.co_varnames


@ON_1_TO_3
@pytest.mark.parametrize("program", COLLECTIVES[:-2], ids=lambda program: program.__name__)
def test_a_group_of_one(device, program, rank, world_size):
    group = [dist.new_group([one]) for one in range(world_size)][rank]

    class Alone(Place):
        def __init__(self) -> None:
            super().__init__(device, True)
            self.size = 1

        def run(self, collective, *arguments, **named):
            # Roots are given as ranks of the default group.
            arguments = tuple(rank if type(one) is int else one for one in arguments)
            named = dict.fromkeys(named, rank)
            super().run(collective, *arguments, group=group, **named)

    alone = Alone()
    alone.rank = 0
    before = [bits(one) for one in program(alone)]
    assert before == [bits(one) for one in program(alone)]


@ON_2
def test_groups_end_and_are_made_again(device, rank, world_size):
    for _ in range(3):
        group = dist.new_group([0, 1])
        x = torch.ones(2, device=device)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2, 2]
        dist.destroy_process_group(group)


@pytest.mark.ranks(1, backend="emulated", timeout=20)
def test_a_group_that_a_new_thread_collects_blocks_nobody(device, monkeypatch):
    dist.new_group([0])
    old = live_movers()[-1]
    start = threading.Thread._bootstrap_inner

    def collects_garbage(thread: threading.Thread) -> None:
        old.close()
        start(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", collects_garbage)
    group = dist.new_group([0])
    x = torch.ones(2, device=device)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [1, 1]


# -------------------------------------------------------------------------------------------------------- races


@pytest.mark.ranks(1, 2, backend="emulated")
@RACE
def test_a_buffer_that_is_read_before_the_wait(device):
    x = torch.ones(4, device=device)
    work = dist.all_reduce(x, async_op=True)
    x + 1
    work.wait()


@pytest.mark.ranks(1, 2, backend="emulated")
@RACE
def test_an_output_that_is_read_before_the_wait(device, world_size):
    output = torch.zeros(4 * world_size, device=device)
    work = all_gather_single(output, torch.ones(4, device=device), async_op=True)
    output.sum()
    work.wait()


@pytest.mark.ranks(1, 2, backend="emulated")
@RACE
def test_an_input_that_is_written_while_a_collective_reads_it(device, world_size):
    x, output = torch.ones(4, device=device), torch.zeros(4 * world_size, device=device)
    work = all_gather_single(output, x, async_op=True)
    x.zero_()
    work.wait()


@ON_2
@RACE
def test_a_root_that_writes_while_it_broadcasts(device, rank):
    x = torch.ones(4, device=device)
    work = dist.broadcast(x, 0, async_op=True)
    # On the other rank it is the output.
    x.zero_()
    work.wait()


@ON_2
@RACE
def test_a_message_that_is_written_while_it_is_sent(device, rank):
    x = torch.ones(4, device=device)
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    x.zero_()
    work.wait()


@pytest.mark.ranks(1, 2, backend="emulated")
@RACE
def test_two_groups_that_use_one_buffer(device):
    other = dist.new_group()
    x = torch.ones(4, device=device)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, group=other, async_op=True)]
    for work in works:
        work.wait()


@pytest.mark.ranks(1, 2, backend="emulated")
@RACE
def test_a_batch_that_is_not_waited_for(device):
    tensors = [torch.ones(4, device=device) for _ in range(3)]
    with dist._coalescing_manager(device=device, async_ops=True) as batch:
        for tensor in tensors:
            dist.all_reduce(tensor)
    tensors[1].sum()
    batch.wait()


@pytest.mark.ranks(1, 2, backend="emulated")
@RACE
def test_a_wait_on_another_stream(device):
    x = torch.ones(4, device=device)
    work = dist.all_reduce(x, async_op=True)
    with torch.Stream(device):
        work.wait()
    x.sum()


@pytest.mark.ranks(1, 2, backend="emulated")
@RACE
def test_a_value_of_a_future_that_nothing_waits_for(device):
    x = torch.ones(4, device=device)
    (found,) = dist.all_reduce(x, async_op=True).get_future().value()
    found.sum()


# --------------------------------------------------------------------------------------------- ranks that differ


def ones(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda rank, device: dist.all_reduce(ones(device, 4 + rank)), id="sizes"),
        pytest.param(lambda rank, device: dist.all_reduce(ones(device, 4)[: 3 + rank]), id="parts"),
        pytest.param(
            lambda rank, device: dist.all_reduce(ones(device, 4, dtype=[torch.float32, torch.int32][rank])), id="dtypes"
        ),
        pytest.param(
            lambda rank, device: dist.all_reduce(ones(device, 4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank]),
            id="operations",
        ),
        pytest.param(lambda rank, device: dist.broadcast(ones(device, 4), rank), id="roots"),
        pytest.param(lambda rank, device: dist.reduce(ones(device, 4), rank), id="roots of reduce"),
        pytest.param(
            lambda rank, device: [dist.broadcast, dist.reduce][rank](ones(device, 4), 0), id="other collectives"
        ),
        pytest.param(
            lambda rank, device: dist.all_gather([ones(device, 4) for _ in range(2)], ones(device, 4 + rank)),
            id="lists that do not fit",
        ),
        pytest.param(
            lambda rank, device: dist.all_to_all_single(ones(device, 3), ones(device, 3), [1, 2], [1, 2]),
            id="parts that do not fit",
        ),
        pytest.param(lambda rank, device: rank or dist.all_reduce(ones(device, 4)), id="left out"),
        pytest.param(lambda rank, device: rank or dist.barrier(device_ids=[0]), id="left out barrier"),
    ],
)
@ON_2
@DIFFERENCE
def test_ranks_that_differ_in(device, rank, program):
    dist.all_reduce(ones(device, 1))
    program(rank, device)


@ON_2
@DIFFERENCE
def test_another_order_on_a_rank(device, rank):
    first, second = ones(device, 4), ones(device, 5)
    works = [dist.all_reduce(one, async_op=True) for one in ([first, second] if rank == 0 else [second, first])]
    for work in works:
        work.wait()


@ON_2
@DIFFERENCE
def test_another_order_across_groups(device, rank):
    groups = [dist.group.WORLD, dist.new_group()]
    works = [dist.all_reduce(ones(device, 4), group=one, async_op=True) for one in (groups if rank else groups[::-1])]
    for work in works:
        work.wait()


@ON_2
def test_the_order_of_cpu_tensors_across_groups_is_free(rank):
    groups = [dist.group.WORLD, dist.new_group()]
    works = [dist.all_reduce(torch.ones(4), group=one, async_op=True) for one in (groups if rank else groups[::-1])]
    for work in works:
        work.wait()


@ON_3
@DIFFERENCE
def test_a_rank_of_three_that_leaves_one_out(device, rank):
    if rank != 1:
        dist.all_reduce(ones(device, 4))


@ON_3
def test_subgroups_need_no_common_order_with_groups_of_other_ranks(device, rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    x = ones(device, 4)
    for members, pair in zip([(0, 1), (1, 2), (0, 2)], pairs, strict=True):
        if rank in members:
            dist.all_reduce(x, group=pair)
    dist.all_reduce(x)
    assert x.tolist() == [13] * 4


@ON_2
def test_a_difference_names_the_call_of_each_rank_and_its_place(device, rank):
    x = ones(device, 4)
    dist.all_reduce(x)
    works = []
    if rank == 0:
        works.append(dist.all_reduce(x, async_op=True))  # of rank 0
    else:
        works.append(dist.broadcast(x, 0, async_op=True))  # of rank 1
    with pytest.raises(dist.DistBackendError) as error:
        x.tolist()
    text = str(error.value)
    assert "ranks differ in collective number 2 of the default group" in text
    assert f"rank 0 issues all_reduce of float32[4] by SUM ({line('of rank 0')} in test_a_difference" in text
    assert f"rank 1 issues broadcast of float32[4] from rank 0 ({line('of rank 1')} in test_a_difference" in text
    with pytest.raises(dist.DistBackendError, match="ranks differ in collective number 2"):
        works[0].wait()


@ON_2
def test_an_order_across_groups_names_the_calls_of_both_ranks(device, rank):
    other = dist.new_group()
    x, y = ones(device, 4), ones(device, 4)
    if rank == 0:
        dist.all_reduce(x, async_op=True)  # first of rank 0
        dist.all_reduce(y, group=other, async_op=True)
    else:
        dist.all_reduce(y, group=other, async_op=True)  # first of rank 1
        dist.all_reduce(x, async_op=True)
    # Each group finds it, and says the same.
    for tensor in (x, y):
        with pytest.raises(RuntimeError) as error:
            tensor.tolist()
        text = str(error.value)
        assert "ranks 0 and 1 issue collectives of two groups in different orders" in text
        assert "rank 0 first issues all_reduce of float32[4] by SUM" in text
        assert all(line(place) in text for place in ("first of rank 0", "first of rank 1"))


@ON_2
def test_a_message_of_another_size_names_both_ends(device, rank):
    x = ones(device, 4 + rank)
    if rank == 0:
        dist.send(x, 1)  # sent
    else:
        dist.recv(x, 0)  # received
        with pytest.raises(RuntimeError) as error:
            x.tolist()
        text = str(error.value)
        assert f"rank 0 sends float32[4] ({line('sent')}" in text
        assert f"rank 1 receives it as float32[5] ({line('received')}" in text
    # The sender is told by what it needs the other rank for.
    y = ones(device, 1)
    work = dist.all_reduce(y, async_op=True)
    with pytest.raises(RuntimeError, match=r"rank 1 receives it as float32\[5\]"):
        y.tolist()
    del work


@ON_2
def test_a_message_that_nobody_sends_is_an_error_after_the_time_limit(device, rank):
    group = dist.new_group(timeout=timedelta(seconds=1))
    x = ones(device, 4)
    if rank == 0:
        dist.irecv(x, 1, group=group)  # in vain
        with pytest.raises(RuntimeError) as error:
            x.tolist()
        assert f"recv of float32[4] from rank 1 ({line('in vain')}" in str(error.value)
        assert "Timed out" in str(error.value)
    else:
        dist.all_reduce(x, group=group, async_op=True)
        with pytest.raises(RuntimeError, match="lacks a rank: rank 0 has"):
            x.tolist()
