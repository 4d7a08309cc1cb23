"""Programs without errors, written by someone who knows the checker: what it might take for one.

As in ``right_by_page.py``, lines that end in a comment "edge" order streams or keep memory, and without any one of them
the program must fail. Collected by an explicit command.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
"""More than two, for DistributedDataParallel makes its buckets anew after the first, and the host waits there."""

ONE_EACH = 1e-5
"""bucket_cap_mb that gives every gradient a bucket of its own."""


def model() -> nn.Sequential:
    """Return a tiny model, the same on every rank; all first dimensions are multiples of 1, 2 and 3."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 18), nn.GELU(), nn.Linear(18, 6))


def batch(step: int, rank: int) -> torch.Tensor:
    """Return inputs on the CPU that differ on every rank."""
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def batches(rank: int, device: torch.device) -> list[torch.Tensor]:
    """Return one batch for each step, on the device before the loop begins: blocking copies would hide edges in it."""
    return [batch(step, rank).to(device) for step in range(STEPS)]


def loss_of(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return module(inputs).float().square().mean()


def in_ddp(device: torch.device, **arguments: object) -> tuple[DistributedDataParallel, optim.Optimizer]:
    ddp = DistributedDataParallel(model().to(device), **{"bucket_cap_mb": ONE_EACH, **arguments})
    return ddp, optim.AdamW(ddp.parameters(), lr=1e-2)


def check(params: list[torch.Tensor], world_size: int, *, clip: float | None = None, **tolerances: float) -> None:
    """Hold parameters against those that one process trains on the CPU with the batches of all ranks."""
    reference = model()
    optimizer = optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss_of(reference, batch(step, rank)) for rank in range(world_size)).div(world_size).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()
    for ours, theirs in zip(params, reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), **(tolerances or {"rtol": 1e-4, "atol": 1e-6}))


# ---------------------------------------------------------------------- streams and events


@pytest.mark.ranks(1, backend="emulated")
def test_pool_of_streams_and_events_that_are_recorded_again(device):
    """Three streams take turns with chunks, and one event for each is recorded anew in every round."""
    current = torch.accelerator.current_stream()
    streams = [torch.Stream(device) for _ in range(3)]
    done, filled = [torch.Event(device) for _ in streams], torch.Event(device)
    chunks = torch.zeros(3, 64, device=device)
    total = torch.zeros(64, device=device)
    for step in range(STEPS):
        chunks.fill_(float(step))
        filled.record(current)
        for number, (stream, event) in enumerate(zip(streams, done, strict=True)):
            stream.wait_event(filled)  # edge
            with stream:
                chunks[number].mul_(number + 1)
            event.record(stream)
        for number, event in enumerate(done):
            current.wait_event(event)  # edge
            total += chunks[number]
    assert total.tolist() == [sum(range(STEPS)) * 6.0] * 64


@pytest.mark.ranks(1, backend="emulated")
def test_streams_are_joined_twice_and_in_a_diamond(device):
    """Two streams branch off and meet in a third; joining them once more does no harm."""
    current = torch.accelerator.current_stream()
    left, right, below = (torch.Stream(device) for _ in range(3))
    total = torch.zeros(64, device=device)
    for step in range(STEPS):
        x = torch.full((64,), float(step), device=device)
        left.wait_stream(current)  # edge
        right.wait_stream(current)  # edge
        with left:
            doubled = x * 2
        with right:
            tripled = x * 3
        below.wait_stream(left)  # edge
        below.wait_stream(right)  # edge
        with below:
            both = doubled + tripled
        current.wait_stream(below)  # edge
        current.wait_stream(left)
        current.wait_stream(right)
        total += both
    assert total.tolist() == [sum(range(STEPS)) * 5.0] * 64


@pytest.mark.ranks(1, backend="emulated")
def test_memory_is_used_again_after_a_join(device):
    """A scratch tensor of each step is used aside and freed without a record: its allocation waits for the join."""
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    total = torch.zeros((), device=device)
    for step in range(STEPS):
        current.wait_stream(side)  # edge
        scratch = torch.full((256,), float(step), device=device)
        side.wait_stream(current)  # edge
        with side:
            total.add_(scratch.sum())
        del scratch
    side.synchronize()
    assert total.item() == 256.0 * sum(range(STEPS))


@pytest.mark.ranks(1, backend="emulated")
def test_host_polls_an_event_until_it_has_come(device):
    """After event.query() has been true, the host may read pinned memory and write what the side stream has read."""
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    values, here = torch.zeros(64, device=device), torch.zeros(64).pin_memory()
    for step in range(STEPS):
        values.fill_(float(step))
        side.wait_stream(current)  # edge
        with side:
            here.copy_(values, non_blocking=True)
            copied = side.record_event()
        polled = 0
        while not copied.query():
            polled += 1
            time.sleep(0)
        # The host knows that the copy is over: what it launches now comes after it.
        assert here.tolist() == [float(step)] * 64
    assert polled


# ---------------------------------------------------------------------- collectives


@pytest.mark.ranks(2, 3, backend="emulated")
def test_host_polls_a_work_until_it_is_completed(rank, world_size, process_group, device):
    """After work.is_completed() has been true, no wait is needed."""
    total = torch.zeros(16, device=device)
    for step in range(STEPS):
        value = torch.full((16,), float(rank + step), device=device)
        work = dist.all_reduce(value, group=process_group, async_op=True)
        while not work.is_completed():
            time.sleep(0)
        total += value
    assert total.tolist() == [float(sum(rank + step for rank in range(world_size) for step in range(STEPS)))] * 16


@pytest.mark.ranks(2, backend="emulated")
def test_chain_of_continuations(rank, world_size, process_group, device):
    """Each continuation runs on a stream of its own, after what it continues; the last one is waited for."""
    mean, total = torch.zeros(16, device=device), torch.zeros(16, device=device)
    shifted = torch.zeros(16, device=device)
    for step in range(STEPS):
        value = torch.full((16,), float(rank + step), device=device)
        future = dist.all_reduce(value, group=process_group, async_op=True).get_future()
        divided = future.then(lambda done: torch.div(done.value()[0], world_size, out=mean))
        last = divided.then(lambda done: torch.add(done.value(), 1, out=shifted))
        last.wait()  # edge
        total += shifted
    assert total.tolist() == [sum(step + (world_size - 1) / 2 + 1 for step in range(STEPS))] * 16


@pytest.mark.ranks(4, backend="emulated")
def test_groups_that_only_some_ranks_use(rank, process_group, device):
    """Pairs of ranks and three of four have groups of their own; ranks use none, one or two of them, in one order."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    three = dist.new_group([1, 2, 3])
    total = torch.zeros(8, device=device)
    for step in range(STEPS):
        value = torch.full((8,), float(rank), device=device)
        work = dist.all_reduce(value, group=pairs[rank // 2], async_op=True)
        # Rank 0 has nothing to do here, and is early for the next collective of all.
        of_three = torch.full((8,), float(step), device=device)
        second = dist.all_reduce(of_three, group=three, async_op=True) if rank else None
        work.wait()  # edge
        if second is not None:
            second.wait()  # edge
        every = value + of_three
        dist.all_reduce(every, group=process_group)
        total += every
    expected = sum(2 * (0 + 1) + 2 * (2 + 3) + step + 3 * 3 * step for step in range(STEPS))
    assert total.tolist() == [float(expected)] * 8


@pytest.mark.ranks(3, backend="emulated")
def test_ranks_make_different_numbers_of_groups(rank, process_group, device):
    """With use_local_synchronization, a group is made by its members alone, so that each rank has made other ones."""
    mine = dist.new_group([rank], use_local_synchronization=True)
    pair = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    value = torch.full((8,), float(rank), device=device)
    alone = dist.all_reduce(value, group=mine, async_op=True)
    alone.wait()  # edge
    value += 1
    if pair is not None:
        together = dist.all_reduce(value, group=pair, async_op=True)
        together.wait()  # edge
        value += 1
    dist.all_reduce(value, group=process_group)
    assert value.tolist() == [2 * (1.0 + 3.0 + 1.0) + 2.0] * 8


@pytest.mark.ranks(2, 3, backend="emulated")
def test_work_that_nobody_waits_for_until_another_one(rank, world_size, process_group, device):
    """Collectives of a group run in order on one stream: a wait for the last is one for all before it."""
    values = [torch.full((8,), float(rank + step), device=device) for step in range(STEPS)]
    for value in values[:-1]:
        dist.all_reduce(value, group=process_group, async_op=True)
    work = dist.all_reduce(values[-1], group=process_group, async_op=True)
    work.wait()  # edge
    total = torch.stack(values).sum(0)
    assert total.tolist() == [float(sum(rank + step for rank in range(world_size) for step in range(STEPS)))] * 8


# ---------------------------------------------------------------------- training


@pytest.mark.ranks(2, backend="emulated")
def test_ddp_with_a_scaler_and_clipped_gradients(rank, world_size, process_group, device):
    """Each norm is added up on a side stream, while the step goes on."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
    largest = torch.zeros((), device=device)
    for each in batches(rank, device):
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, each)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        side.wait_stream(current)  # edge
        with side:
            torch.maximum(largest, norm, out=largest)
        norm.record_stream(side)  # edge
        scaler.step(optimizer)
        scaler.update()
    current.wait_stream(side)  # edge
    assert largest.item() > 0.1
    check(list(ddp.parameters()), world_size, clip=0.1)


@pytest.mark.ranks(1, 2, backend="emulated")
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize("narrow", [True, False], ids=["bf16", "fp32"])
def test_fsdp_that_waits_for_an_event_of_the_step(rank, world_size, process_group, device, reshard, narrow):
    """The next all-gathers wait for the event, not for what the current stream is given after the step."""
    sharded = model().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    arguments = {"mesh": mesh, "reshard_after_forward": reshard, **({"mp_policy": policy} if narrow else {})}
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **arguments)
    fully_shard(sharded, **arguments)
    optimizer = optim.AdamW(sharded.parameters(), lr=1e-2)
    for each in batches(rank, device):
        optimizer.zero_grad()
        loss_of(sharded, each).backward()
        nn.utils.clip_grad_norm_(sharded.parameters(), 0.1)
        optimizer.step()
        sharded.set_post_optim_event(torch.accelerator.current_stream().record_event())
        torch.ones(1000, device=device).sum()
    whole = [param.full_tensor() for param in sharded.parameters()]
    check(whole, world_size, clip=0.1, **({"rtol": 0, "atol": 0.1} if narrow else {}))


@pytest.mark.ranks(4, backend="emulated")
def test_fsdp_on_two_dimensions(rank, process_group, device):
    """Gradients are reduced within pairs of ranks, and then between them, on a stream each."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicated", "sharded"))
    sharded = model().to(device)
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = optim.AdamW(sharded.parameters(), lr=1e-2)
    for each in batches(rank, device):
        optimizer.zero_grad()
        loss_of(sharded, each).backward()
        optimizer.step()
    check([param.full_tensor() for param in sharded.parameters()], 4)


class Growing(nn.Module):
    """Uses its layers in another order than that of its parameters, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[1](self.layers[0](inputs))
        return self.layers[4](self.layers[3](self.layers[2](hidden)))


@pytest.mark.ranks(2, 3, backend="emulated")
@pytest.mark.parametrize("cap", [1e-5, 1e-3, 2e-3], ids=["many", "uneven", "few"])
def test_ddp_makes_uneven_buckets_anew(rank, world_size, process_group, device, cap):
    """Buckets after the first step are others than before; a hook counts them aside, from the views of the bucket."""
    ddp = DistributedDataParallel(Growing().to(device), bucket_cap_mb=cap, gradient_as_bucket_view=True)
    optimizer = optim.AdamW(ddp.parameters(), lr=1e-2)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    seen = torch.zeros((), device=device)

    def reduce_and_count(_, bucket):
        buffer = bucket.buffer().div_(world_size)
        here = torch.accelerator.current_stream()
        side.wait_stream(here)  # edge
        with side:
            for gradient in bucket.gradients():
                seen.add_(gradient.isfinite().sum())
        # The reduction writes what is counted.
        here.wait_stream(side)  # edge
        return dist.all_reduce(buffer, group=process_group, async_op=True).get_future().then(_first)

    ddp.register_comm_hook(None, reduce_and_count)
    for each in batches(rank, device):
        optimizer.zero_grad()
        loss_of(ddp, each).backward()
        optimizer.step()
    current.wait_stream(side)
    assert seen.item() == STEPS * sum(param.numel() for param in ddp.parameters())
    check(list(ddp.parameters()), world_size)


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


class Sideways(torch.autograd.Function):
    """A linear layer whose backward computes the gradient of its weight on a side stream."""

    side: torch.Stream

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        current = torch.accelerator.current_stream()
        Sideways.side.wait_stream(current)  # edge
        with Sideways.side:
            of_weight = gradient.t() @ inputs
        of_inputs = gradient @ weight
        current.wait_stream(Sideways.side)  # edge
        of_weight.record_stream(current)
        return of_inputs, of_weight


@pytest.mark.ranks(2, backend="emulated")
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_backward_of_a_custom_function_on_a_side_stream(rank, world_size, process_group, device, set_to_none):
    """Gradients of a custom function come from a side stream, and are accumulated, or written over, on the current."""

    class Aside(nn.Linear):
        def forward(self, inputs):
            return Sideways.apply(inputs, self.weight) + self.bias

    Sideways.side = torch.Stream(device)
    layers = model()
    aside = Aside(30, 18)
    aside.load_state_dict(layers[2].state_dict())
    layers[2] = aside
    ddp = DistributedDataParallel(layers.to(device), bucket_cap_mb=ONE_EACH)
    optimizer = optim.AdamW(ddp.parameters(), lr=1e-2)
    for each in batches(rank, device):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(ddp, each).backward()
        optimizer.step()
    check(list(ddp.parameters()), world_size)
