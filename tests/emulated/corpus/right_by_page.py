"""Programs without errors, written from docs/emulated.md alone: the backend ``emulated`` must report none of them.

Each asserts its numbers against the same computation on the CPU, without streams and ranks. Lines that end in a comment
"edge" order streams or keep memory: without any one of them, the program must fail. Collected by an explicit command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import HOOKS, Twins
from support.training import small_model
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
"""More than two, for DistributedDataParallel makes its buckets anew after the first, and the host waits there."""

ONE_EACH = 1e-5
"""bucket_cap_mb that gives every gradient a bucket of its own."""


# ---------------------------------------------------------------------- what they train, and what it must give


def model() -> nn.Sequential:
    """Return a tiny model, the same on every rank; all first dimensions are multiples of 1, 2 and 3."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 18), nn.GELU(), nn.Linear(18, 6)).double()


def normed_model() -> nn.Sequential:
    """Return a model with buffers, which DistributedDataParallel broadcasts."""
    return nn.Sequential(*model()[:2], nn.BatchNorm1d(30), *model()[2:]).double()


def batch(step: int, rank: int) -> torch.Tensor:
    """Return inputs on the CPU that differ on every rank."""
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def batches(rank: int, device: torch.device) -> list[torch.Tensor]:
    """Return one batch for each step, on the device before the loop begins: blocking copies would hide edges in it."""
    return [batch(step, rank).to(device) for step in range(STEPS)]


def pinned(rank: int) -> list[torch.Tensor]:
    return [batch(step, rank).pin_memory() for step in range(STEPS)]


def loss_of(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return module(inputs).square().mean()


def adamw(module: nn.Module) -> optim.Optimizer:
    return optim.AdamW(module.parameters(), lr=1e-2)


class Reference:
    """The same training in one process, on the CPU.

    Attributes:
        module: what was trained.
        losses: by step and rank.
        seen: by step, the parameters after it.
    """

    def __init__(
        self,
        world_size: int,
        make: Callable[[], nn.Module] = model,
        *,
        loss: Callable[[nn.Module, torch.Tensor, int, int], torch.Tensor] = lambda module, x, *_: loss_of(module, x),
        optimizer: Callable[[nn.Module], optim.Optimizer] = adamw,
        accumulated: int = 1,
    ) -> None:
        self.module = make()
        self.losses: list[list[float]] = []
        self.seen: list[list[torch.Tensor]] = []
        stepping = optimizer(self.module)
        for step in range(STEPS):
            losses = [loss(self.module, batch(step, rank), step, rank) for rank in range(world_size)]
            sum(losses).div(world_size).backward()
            self.losses.append([each.item() for each in losses])
            if (step + 1) % accumulated == 0:
                stepping.step()
                stepping.zero_grad()
            self.seen.append([param.detach().clone() for param in self.module.parameters()])

    def check(self, module: nn.Module, **tolerances: float) -> None:
        tolerances = tolerances or {"rtol": 1e-7, "atol": 1e-9}
        for ours, theirs in zip(module.parameters(), self.module.parameters(), strict=True):
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), check_dtype=False, **tolerances)


def in_ddp(
    device: torch.device, make: Callable[[], nn.Module] = model, **arguments: object
) -> tuple[DistributedDataParallel, optim.Optimizer]:
    """Return a model in many small buckets, and its optimizer."""
    ddp = DistributedDataParallel(make().to(device), bucket_cap_mb=ONE_EACH, **arguments)
    return ddp, adamw(ddp)


def train(module: nn.Module, optimizer: optim.Optimizer, inputs: list[torch.Tensor]) -> None:
    for each in inputs:
        optimizer.zero_grad()
        loss_of(module, each).backward()
        optimizer.step()


# ---------------------------------------------------------------------- DistributedDataParallel


@pytest.mark.ranks(1, 2, 3, backend="emulated")
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("make", [model, normed_model], ids=["plain", "buffers"])
def test_ddp(rank, world_size, process_group, device, views, make):
    ddp, optimizer = in_ddp(device, make, gradient_as_bucket_view=views)
    train(ddp, optimizer, batches(rank, device))
    Reference(world_size, make).check(ddp.module)


class TwoHeads(nn.Module):
    """Uses one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model()
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double()

    def forward(self, inputs: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](self.body(inputs))


@pytest.mark.ranks(2, backend="emulated")
def test_ddp_finds_unused_parameters(rank, world_size, process_group, device):
    def loss(module, inputs, step, rank):
        return module(inputs, head=(step + rank) % 2).square().mean()

    ddp, optimizer = in_ddp(device, TwoHeads, find_unused_parameters=True)
    for step, inputs in enumerate(batches(rank, device)):
        optimizer.zero_grad()
        loss(ddp, inputs, step, rank).backward()
        optimizer.step()
    Reference(world_size, TwoHeads, loss=loss).check(ddp.module)


class Repeated(nn.Module):
    """Uses one layer twice, as static graphs allow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()
        self.again = nn.Linear(6, 6).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.again(self.again(self.layers(inputs)).tanh())


@pytest.mark.ranks(2, backend="emulated")
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_ddp_with_a_static_graph(rank, world_size, process_group, device, views):
    ddp, optimizer = in_ddp(device, Repeated, static_graph=True, gradient_as_bucket_view=views)
    train(ddp, optimizer, batches(rank, device))
    Reference(world_size, Repeated).check(ddp.module)


@pytest.mark.ranks(2, 3, backend="emulated")
def test_ddp_accumulates_and_averages_its_losses_a_step_late(rank, world_size, process_group, device):
    """Every second backward is local; each loss is averaged in a group of its own, and read in the next step."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    metrics = dist.new_group()
    total = torch.zeros((), dtype=torch.float64, device=device)
    work = value = None

    def add_the_last():
        work.wait()  # edge
        total.add_(value)

    for step, inputs in enumerate(batches(rank, device)):
        is_local = (step + 1) % 2 != 0
        with ddp.no_sync() if is_local else contextlib.nullcontext():
            loss = loss_of(ddp, inputs)
            loss.backward()
        if not is_local:
            optimizer.step()
            optimizer.zero_grad()
        if work is not None:
            add_the_last()
        value = loss.detach().clone()
        work = dist.all_reduce(value, group=metrics, async_op=True)
    add_the_last()
    reference = Reference(world_size, accumulated=2)
    reference.check(ddp.module)
    assert total.item() == pytest.approx(sum(map(sum, reference.losses)), rel=1e-9)


@pytest.mark.ranks(2, backend="emulated")
def test_ddp_accumulates_under_no_sync(rank, world_size, process_group, device):
    ddp, optimizer = in_ddp(device)
    inputs = batches(rank, device)
    for step in range(0, STEPS - 1, 2):
        with ddp.no_sync():
            loss_of(ddp, inputs[step]).backward()
        loss_of(ddp, inputs[step + 1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    Reference(world_size, accumulated=2).check(ddp.module)


def sgd(module: nn.Module) -> optim.Optimizer:
    return optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.ranks(2, backend="emulated")
def test_ddp_compresses_to_fp16(rank, world_size, process_group, device):
    ddp, _ = in_ddp(device, gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, fp16_compress_hook)
    train(ddp, sgd(ddp), batches(rank, device))
    Reference(world_size, optimizer=sgd).check(ddp.module, rtol=0, atol=1e-3)


@pytest.mark.ranks(2, 3, backend="emulated")
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_ddp_with_a_hook_that_compresses_on_a_side_stream(rank, world_size, process_group, device, views):
    ddp, _ = in_ddp(device, gradient_as_bucket_view=views)
    side = torch.Stream(device)

    def compress_on_side(_, bucket):
        gradients = bucket.buffer()
        side.wait_stream(torch.accelerator.current_stream())  # edge
        with side:
            narrow = gradients.to(torch.float32).div_(world_size)
            work = dist.all_reduce(narrow, group=process_group, async_op=True)
            work.wait()  # edge
            gradients.copy_(narrow)
            done = torch.futures.Future(devices=[device])
            done.set_result(gradients)
        return done

    ddp.register_comm_hook(None, compress_on_side)
    train(ddp, sgd(ddp), batches(rank, device))
    Reference(world_size, optimizer=sgd).check(ddp.module, rtol=0, atol=1e-6)


@pytest.mark.ranks(2, backend="emulated")
def test_ddp_with_statistics_of_gradients_on_a_side_stream(rank, world_size, process_group, device):
    """Each bucket's largest magnitude on this rank, taken while backward goes on, from a temporary of the hook."""
    ddp, optimizer = in_ddp(device)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    largest = torch.zeros((), dtype=torch.float64, device=device)

    def reduce_and_watch(_, bucket):
        gradients = bucket.buffer().div_(world_size)
        magnitudes = gradients.abs()
        side.wait_stream(torch.accelerator.current_stream())  # edge
        with side:
            torch.maximum(largest, magnitudes.max(), out=largest)
        magnitudes.record_stream(side)  # edge
        future = dist.all_reduce(gradients, group=process_group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, reduce_and_watch)
    train(ddp, optimizer, batches(rank, device))
    current.wait_stream(side)  # edge
    assert largest.item() > 0
    Reference(world_size).check(ddp.module)


@pytest.mark.ranks(1, 2, backend="emulated")
def test_ddp_with_a_prefetcher(rank, world_size, process_group, device):
    """Batches are allocated and copied on a side stream, which never waits for the current one."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    hosts = pinned(rank)
    following = None

    def preload(step):
        nonlocal following
        with side:
            following = hosts[step].to(device, non_blocking=True)

    preload(0)
    for step in range(STEPS):
        current.wait_stream(side)  # edge
        inputs, following = following, None
        inputs.record_stream(current)  # edge
        if step + 1 < STEPS:
            preload(step + 1)
        optimizer.zero_grad()
        loss_of(ddp, inputs).backward()
        optimizer.step()
    Reference(world_size).check(ddp.module)


@pytest.mark.ranks(2, backend="emulated")
def test_ddp_with_a_double_buffer(rank, world_size, process_group, device):
    """One buffer is filled on a side stream while the other one is computed with."""
    ddp, optimizer = in_ddp(device)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    hosts = pinned(rank)
    buffers = [hosts[0].to(device), torch.empty(8, 12, dtype=torch.float64, device=device)]
    for step in range(STEPS):
        current.wait_stream(side)  # edge
        inputs = buffers[step % 2]
        if step + 1 < STEPS:
            side.wait_stream(current)  # edge
            with side:
                buffers[(step + 1) % 2].copy_(hosts[step + 1], non_blocking=True)
        optimizer.zero_grad()
        loss_of(ddp, inputs).backward()
        optimizer.step()
    Reference(world_size).check(ddp.module)


@pytest.mark.ranks(2, backend="emulated")
def test_ddp_copies_its_losses_to_pinned_memory(rank, world_size, process_group, device):
    """Losses go to the host on a side stream, and the host waits once, at the end."""
    ddp, optimizer = in_ddp(device)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    losses = torch.zeros(STEPS, dtype=torch.float64).pin_memory()
    for step, inputs in enumerate(batches(rank, device)):
        optimizer.zero_grad()
        loss = loss_of(ddp, inputs)
        loss.backward()
        optimizer.step()
        value = loss.detach().clone()
        side.wait_stream(current)  # edge
        with side:
            losses[step].copy_(value, non_blocking=True)
        value.record_stream(side)  # edge
    torch.accelerator.synchronize()
    reference = Reference(world_size)
    assert losses.tolist() == pytest.approx([each[rank] for each in reference.losses], rel=1e-9)
    reference.check(ddp.module)


@pytest.mark.ranks(2, backend="emulated")
def test_ddp_never_makes_the_host_wait(rank, world_size, process_group, device, host_never_waits):
    """After the first steps, batches and losses go through pinned memory, and an event is waited for at the end."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    current = torch.accelerator.current_stream()
    hosts, losses = pinned(rank), torch.zeros(STEPS, dtype=torch.float64).pin_memory()

    def iterate(step):
        inputs = hosts[step].to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = loss_of(ddp, inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
        optimizer.step()
        losses[step].copy_(loss.detach(), non_blocking=True)

    for step in range(3):
        iterate(step)
    with host_never_waits():
        for step in range(3, STEPS):
            iterate(step)
        event = torch.Event(device)
        event.record(current)
    event.synchronize()
    reference = Reference(world_size)
    assert losses.tolist() == pytest.approx([each[rank] for each in reference.losses], rel=1e-9)
    reference.check(ddp.module)


@pytest.mark.ranks(2, backend="emulated")
def test_ddp_under_autocast(rank, world_size, process_group, device):
    def loss(module, inputs, *_):
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
            return module(inputs.float()).float().square().mean()

    ddp, _ = in_ddp(device, lambda: model().float())
    optimizer = sgd(ddp)
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        loss(ddp, inputs).backward()
        optimizer.step()
    Reference(world_size, lambda: model().float(), loss=loss, optimizer=sgd).check(ddp.module, rtol=0, atol=1e-2)


# ---------------------------------------------------------------------- fully_shard


def in_fsdp(device: torch.device, world_size: int) -> nn.Sequential:
    sharded = model().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(sharded, mesh=mesh)


def check_shards(shards: list[torch.Tensor], whole: list[torch.Tensor], rank: int, world_size: int) -> None:
    for ours, theirs in zip(shards, whole, strict=True):
        expected = theirs.detach().chunk(world_size)[rank]
        torch.testing.assert_close(ours.detach().cpu(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.ranks(1, 2, 3, backend="emulated")
def test_fsdp(rank, world_size, process_group, device):
    sharded = in_fsdp(device, world_size)
    train(sharded, adamw(sharded), batches(rank, device))
    shards = [param.to_local() for param in sharded.parameters()]
    check_shards(shards, [*Reference(world_size).module.parameters()], rank, world_size)


@pytest.mark.ranks(2, backend="emulated")
def test_fsdp_with_an_average_of_weights_on_a_side_stream(rank, world_size, process_group, device):
    """The average reads the weights during the next forward and backward, and is joined before they are stepped."""
    sharded = in_fsdp(device, world_size)
    optimizer = adamw(sharded)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    average = [param.detach().to_local().clone() for param in sharded.parameters()]
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        loss_of(sharded, inputs).backward()
        current.wait_stream(side)  # edge
        optimizer.step()
        side.wait_stream(current)  # edge
        with side, torch.no_grad():
            for mean, param in zip(average, sharded.parameters(), strict=True):
                mean.lerp_(param.to_local(), 0.1)
    current.wait_stream(side)  # edge
    expected = [param.detach().clone() for param in model().parameters()]
    for seen in Reference(world_size).seen:
        for mean, param in zip(expected, seen, strict=True):
            mean.lerp_(param, 0.1)
    check_shards(average, expected, rank, world_size)


# ---------------------------------------------------------------------- zeroshard


@pytest.mark.ranks(1, 2, 3, backend="emulated")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_zeroshard(process_group, device, hook, partition):
    twins = Twins(hook, model=lambda: small_model().to(device), partition=partition, exact=False)
    for number in range(STEPS):
        twins.iterate(number, lambda ddp, inputs: ddp(inputs.to(device)).square().mean())
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend="emulated")
@pytest.mark.parametrize("hook", HOOKS[1:])
def test_zeroshard_with_a_hook_that_returns_a_tensor_of_its_own(world_size, process_group, device, hook):
    def reduce_into_a_copy(_, bucket):
        reduced = bucket.buffer() / world_size
        dist.all_reduce(reduced, group=process_group)
        done = torch.futures.Future(devices=[device])
        done.set_result(reduced)
        return done

    twins = Twins(
        hook,
        model=lambda: small_model().to(device),
        inner=reduce_into_a_copy,
        ddp={"bucket_cap_mb": ONE_EACH},
        exact=False,
    )
    for number in range(STEPS):
        twins.iterate(number, lambda ddp, inputs: ddp(inputs.to(device)).square().mean())
    twins.check("at the end")


# ---------------------------------------------------------------------- collectives and streams alone


@pytest.mark.ranks(2, 3, backend="emulated")
def test_two_groups_in_one_order(rank, world_size, process_group, device):
    losses, tokens = dist.new_group(), dist.new_group()
    total = torch.zeros(4, device=device)
    for step in range(STEPS):
        loss = torch.full((4,), float(rank + step), device=device)
        count = torch.full((4,), float(rank + 1), device=device)
        first = dist.all_reduce(loss, group=losses, async_op=True)
        second = dist.all_reduce(count, group=tokens, async_op=True)
        first.wait()  # edge
        second.wait()  # edge
        total.add_(loss / count)
    ranks = range(world_size)
    expected = sum(sum(rank + step for rank in ranks) / sum(rank + 1 for rank in ranks) for step in range(STEPS))
    assert total.tolist() == pytest.approx([expected] * 4, rel=1e-5)


@pytest.mark.ranks(2, 3, backend="emulated")
def test_ring_of_sends_and_receives(rank, world_size, process_group, device):
    block = torch.full((64,), float(rank + 1), device=device)
    total = block.clone()
    for _ in range(world_size - 1):
        received = torch.empty_like(block)
        operations = [
            dist.P2POp(dist.isend, block, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()  # edge
        total += received
        block = received
    assert total.tolist() == [sum(range(1, world_size + 1))] * 64


@pytest.mark.ranks(2, backend="emulated")
def test_continuation_of_a_future(rank, world_size, process_group, device):
    mean, total = torch.zeros(16, device=device), torch.zeros(16, device=device)
    for step in range(STEPS):
        value = torch.full((16,), float(rank + step), device=device)
        work = dist.all_reduce(value, group=process_group, async_op=True)
        future = work.get_future().then(lambda done: torch.div(done.value()[0], world_size, out=mean))
        future.wait()  # edge
        total += mean
    assert total.tolist() == [sum(step + (world_size - 1) / 2 for step in range(STEPS))] * 16


@pytest.mark.ranks(3, backend="emulated")
def test_uneven_predictions_are_gathered(rank, world_size, process_group, device):
    """The lengths go over gloo, from host to host, so no edge is hidden."""
    mine = torch.arange(4 + rank, device=device, dtype=torch.float32) + 10 * rank
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=process_group)
    everybody = [torch.empty(int(length), device=device) for length in lengths]
    work = dist.all_gather(everybody, mine, group=process_group, async_op=True)
    work.wait()  # edge
    together = torch.cat(everybody)
    assert together.tolist() == [float(10 * other + i) for other in range(world_size) for i in range(4 + other)]


@pytest.mark.ranks(2, 3, backend="emulated")
def test_flat_gradients_of_micro_batches_are_reduced_while_the_next_is_computed(
    rank, world_size, process_group, device
):
    plain = model().to(device)
    params = list(plain.parameters())
    numel = sum(param.numel() for param in params)
    flat = torch.empty(numel, dtype=torch.float64, device=device)
    mine = torch.empty(numel // world_size, dtype=torch.float64, device=device)
    total = torch.zeros_like(mine)
    work = None
    for inputs in batches(rank, device):
        gradients = torch.autograd.grad(loss_of(plain, inputs), params)
        if work is not None:
            work.wait()  # edge
            total += mine
        torch.cat([gradient.flatten() for gradient in gradients], out=flat)
        work = dist.reduce_scatter_tensor(mine, flat, group=process_group, async_op=True)
    work.wait()  # edge
    total += mine
    reference = model()
    sum(loss_of(reference, batch(step, other)) for step in range(STEPS) for other in range(world_size)).backward()
    whole = torch.cat([param.grad.flatten() for param in reference.parameters()])
    torch.testing.assert_close(total.cpu(), whole.chunk(world_size)[rank], rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(1, backend="emulated")
def test_events_between_three_streams(process_group, device):
    """A pipeline: each stream waits for the event of the one before, and the current one for the last."""
    current = torch.accelerator.current_stream()
    first, second = torch.Stream(device), torch.Stream(device)
    total = torch.zeros(100, device=device)
    for step in range(STEPS):
        x = torch.full((100,), float(step), device=device)
        made, doubled, squared = torch.Event(device), torch.Event(device), torch.Event(device)
        made.record(current)
        first.wait_event(made)  # edge
        with first:
            x.mul_(2)
        doubled.record(first)
        second.wait_event(doubled)  # edge
        with second:
            x.square_()
        squared.record(second)
        current.wait_event(squared)  # edge
        total += x
    assert total.tolist() == [sum((2.0 * step) ** 2 for step in range(STEPS))] * 100


class TwoTowers(nn.Module):
    """Computes one of two towers on a stream of its own, if it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = model(), model()
        self.side: torch.Stream | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.side is None:
            return self.here(inputs) * self.there(inputs).tanh()
        current = torch.accelerator.current_stream()
        self.side.wait_stream(current)  # edge
        with self.side:
            there = self.there(inputs).tanh()
        here = self.here(inputs)
        current.wait_stream(self.side)  # edge
        return here * there


@pytest.mark.ranks(1, backend="emulated")
def test_two_towers_on_two_streams(rank, process_group, device):
    """Backward runs each tower on the stream of its forward, and autograd orders them."""
    towers = TwoTowers().to(device)
    towers.side = torch.Stream(device)
    train(towers, adamw(towers), batches(rank, device))
    Reference(1, TwoTowers).check(towers)
