"""Programs with one error each, written from docs/emulated.md alone: the backend ``emulated`` must report every one.

``@seeded(kind)`` says which report is due. Lines that a report must name end in a comment "access", "call" or "wait";
there are none if both accesses lie in a library. Collected by an explicit command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import zeroshard_comm.collectives
from support.ddp_training import register, steps_in_backward
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.grads.stream import SideStream

STEPS = 6
"""More than two, for DistributedDataParallel makes its buckets anew after the first, and the host waits there."""

ONE_EACH = 1e-5
"""bucket_cap_mb that gives every gradient a bucket of its own."""


def seeded(kind):
    return pytest.mark.seeded(kind=kind)


def model() -> nn.Sequential:
    """Return a tiny model, the same on every rank; all first dimensions are multiples of 1, 2 and 3."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 18), nn.GELU(), nn.Linear(18, 6))


def batch(step: int, rank: int) -> torch.Tensor:
    """Return inputs on the CPU that differ on every rank."""
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def batches(rank: int, device: torch.device) -> list[torch.Tensor]:
    """Return one batch for each step, on the device before the loop begins: blocking copies would hide errors in it."""
    return [batch(step, rank).to(device) for step in range(STEPS)]


def pinned(rank: int) -> list[torch.Tensor]:
    return [batch(step, rank).pin_memory() for step in range(STEPS)]


def images_of(rank: int) -> list[torch.Tensor]:
    """Return batches in uint8."""
    return [batch(step, rank).abs().mul(64).clamp(max=255).to(torch.uint8) for step in range(STEPS)]


def in_ddp(device: torch.device, **arguments: object) -> tuple[DistributedDataParallel, optim.Optimizer]:
    """Return a model in many small buckets, and its optimizer."""
    ddp = DistributedDataParallel(model().to(device), bucket_cap_mb=ONE_EACH, **arguments)
    return ddp, optim.AdamW(ddp.parameters(), lr=1e-2)


# ---------------------------------------------------------------------- 1. a side stream that is not joined


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_prefetched_batch_is_used_without_waiting_for_the_copy(rank, process_group, device):
    """The current stream does not wait for the prefetcher's stream, which copies the batch."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    hosts = [image.pin_memory() for image in images_of(rank)]
    following = None

    def preload(step):
        nonlocal following
        with side:
            following = hosts[step].to(device, non_blocking=True)  # access

    preload(0)
    for step in range(STEPS):
        # Left out: current.wait_stream(side)
        images = following
        images.record_stream(current)
        if step + 1 < STEPS:
            preload(step + 1)
        inputs = images.float().div_(64)  # access
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_compressing_hook_completes_its_future_on_the_wrong_stream(rank, process_group, world_size, device):
    """Gradients are decompressed on a side stream, and the future is completed on the current one, not joined."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    side = torch.Stream(device)

    def compress_on_side(_, bucket):
        gradients = bucket.buffer()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            half = gradients.to(torch.bfloat16).div_(world_size)
            work = dist.all_reduce(half, group=process_group, async_op=True)
            work.wait()
            gradients.copy_(half)  # access
        # Left out: torch.accelerator.current_stream().wait_stream(side)
        done = torch.futures.Future(devices=[device])
        done.set_result(gradients)
        return done

    ddp.register_comm_hook(None, compress_on_side)
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_fsdp_average_of_weights_is_not_joined_before_the_next_step(rank, world_size, process_group, device):
    """An average reads the sharded weights on a side stream while the next step of the optimizer writes them."""
    sharded = model().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = optim.AdamW(sharded.parameters(), lr=1e-2)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    average = [param.detach().to_local().clone() for param in sharded.parameters()]
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        sharded(inputs).square().mean().backward()
        # Left out: current.wait_stream(side)
        optimizer.step()
        side.wait_stream(current)
        with side, torch.no_grad():
            for mean, param in zip(average, sharded.parameters(), strict=True):
                mean.lerp_(param.to_local(), 0.1)  # access
    current.wait_stream(side)


@seeded("race")
@pytest.mark.ranks(1, backend="emulated")
def test_zeroshard_does_not_join_the_stream_that_steps(rank, process_group, device, monkeypatch):
    """hook_with_zero_step_interleaved writes parameters on its side stream, and backward ends without a join."""
    monkeypatch.setattr(SideStream, "join", lambda self: None)
    ddp, optimizer = zeroshard_in_ddp(device, "hook_with_zero_step_interleaved")
    train(ddp, optimizer, batches(rank, device))


# ---------------------------------------------------------------------- 2. a stream that does not wait


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_double_buffer_is_refilled_while_it_is_read(rank, process_group, device):
    """The stream that refills a buffer does not wait for the iteration that still computes with it."""
    ddp, optimizer = in_ddp(device)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    hosts = pinned(rank)
    buffers = [hosts[0].to(device), torch.empty(8, 12, device=device)]
    for step in range(STEPS):
        current.wait_stream(side)
        inputs = buffers[step % 2]
        if step + 1 < STEPS:
            # Left out: side.wait_stream(current)
            with side:
                buffers[(step + 1) % 2].copy_(hosts[step + 1], non_blocking=True)  # access
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_compressing_hook_reads_a_bucket_that_backward_still_fills(rank, process_group, world_size, device):
    """The side stream of a compressing hook does not wait for the stream on which backward writes the bucket."""
    ddp, optimizer = in_ddp(device)
    side = torch.Stream(device)

    def compress_on_side(_, bucket):
        gradients = bucket.buffer()
        # Left out: side.wait_stream(torch.accelerator.current_stream())
        with side:
            half = gradients.to(torch.bfloat16).div_(world_size)  # access
            work = dist.all_reduce(half, group=process_group, async_op=True)
            work.wait()
            gradients.copy_(half)
            done = torch.futures.Future(devices=[device])
            done.set_result(gradients)
        return done

    ddp.register_comm_hook(None, compress_on_side)
    train(ddp, optimizer, batches(rank, device))


@seeded("race")
@pytest.mark.ranks(1, backend="emulated")
def test_zeroshard_steps_before_backward_has_written_the_gradients(rank, process_group, device, monkeypatch):
    """The interleaved hook steps a bucket on its side stream, which does not wait for the current one."""

    @contextlib.contextmanager
    def without_waiting(self: SideStream) -> Iterator[None]:
        with self._stream:
            yield

    monkeypatch.setattr(SideStream, "after_current", without_waiting)
    ddp, optimizer = zeroshard_in_ddp(device, "hook_with_zero_step_interleaved")
    train(ddp, optimizer, batches(rank, device))


# ---------------------------------------------------------------------- 3. a missing record_stream


@seeded("freed in use")
@pytest.mark.ranks(2, backend="emulated")
def test_prefetched_batch_is_freed_while_the_current_stream_converts_it(rank, process_group, device):
    """A batch that was allocated on the prefetcher's stream is used on the current one, and freed without a record."""
    ddp, optimizer = in_ddp(device)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    hosts = [image.pin_memory() for image in images_of(rank)]
    following = None

    def preload(step):
        nonlocal following
        with side:
            following = hosts[step].to(device, non_blocking=True)

    preload(0)
    for step in range(STEPS):
        current.wait_stream(side)
        images, following = following, None
        # Left out: images.record_stream(current)
        inputs = images.float().div_(64)  # access
        if step + 1 < STEPS:
            preload(step + 1)
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()


@seeded("freed in use")
@pytest.mark.ranks(2, backend="emulated")
def test_statistics_of_gradients_read_a_tensor_that_is_gone(rank, process_group, device):
    """A hook's temporary of the current stream is added up on a side stream, and freed when the hook returns."""
    ddp, optimizer = in_ddp(device)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    total = torch.zeros((), device=device)

    def reduce_and_watch(_, bucket):
        magnitudes = bucket.buffer().abs()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            total.add_(magnitudes.sum())  # access
        # Left out: magnitudes.record_stream(side)
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, reduce_and_watch)
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
        current.wait_stream(side)


@seeded("freed in use")
@pytest.mark.ranks(2, backend="emulated")
def test_zeroshard_does_not_keep_the_gradients_that_it_carries(rank, process_group, device, monkeypatch):
    """reduce_to_owner_hook adds gradients of an earlier backward on its side stream, and drops them unrecorded."""
    monkeypatch.setattr(SideStream, "keep", lambda self, tensor: None)
    # Without parameters, and the last in backward: autograd allocates memory after the last bucket.
    ddp, optimizer = zeroshard_in_ddp(device, "reduce_to_owner_hook", before=nn.GELU())
    inputs = batches(rank, device)
    for step in range(0, STEPS, 2):
        optimizer.zero_grad()
        for micro in range(2):
            ddp(inputs[step + micro].requires_grad_()).square().mean().backward()
        optimizer.step()


# ---------------------------------------------------------------------- 4. a buffer read before work.wait()


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_metric_of_the_last_step_is_read_without_waiting(rank, process_group, device):
    """A loss that is averaged asynchronously is read a step late, and never waited for."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    metrics = dist.new_group()
    running = torch.zeros((), device=device)
    pending = None
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        loss = ddp(inputs).square().mean()
        loss.backward()
        optimizer.step()
        if pending is not None:
            _work, value = pending
            # Left out: _work.wait()
            running.add_(value)  # access
        value = loss.detach().clone()
        pending = dist.all_reduce(value, group=metrics, async_op=True), value  # access
    pending[0].wait()


@seeded("race")
@pytest.mark.ranks(3, backend="emulated")
def test_the_last_of_many_reductions_is_not_waited_for(rank, world_size, process_group, device):
    """Gradients of two micro-batches are reduced one by one, and the loop of waits leaves out the last."""
    plain = model().to(device)
    optimizer = optim.AdamW(plain.parameters(), lr=1e-2)
    inputs = batches(rank, device)
    for step in range(0, STEPS, 2):
        optimizer.zero_grad()
        for micro in range(2):
            (plain(inputs[step + micro]).square().mean() / 2 / world_size).backward()
        works = []
        for param in plain.parameters():
            works.append(dist.all_reduce(param.grad, group=process_group, async_op=True))  # access
        for work in works[:-1]:
            work.wait()
        optimizer.step()


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_zeroshard_uses_gradients_before_they_are_reduced(rank, process_group, device, monkeypatch):
    """An optimizer steps with gradients without waiting for their reduction."""
    monkeypatch.setattr(zeroshard_comm.collectives, "wait_for_collective", lambda work, ranks, kind: None)
    ddp, optimizer = zeroshard_in_ddp(device, "reduce_to_owner_hook")
    train(ddp, optimizer, batches(rank, device))


# ---------------------------------------------------------------------- 5. a buffer written while a collective reads it


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_average_of_weights_changes_while_it_is_sent(rank, process_group, device):
    """Rank 0 sends its average of the weights asynchronously, and updates it in the next step without waiting."""
    ddp, optimizer = in_ddp(device)
    mirror = dist.new_group()
    average = torch.cat([param.detach().flatten() for param in ddp.parameters()])
    work = None
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
        weights = torch.cat([param.detach().flatten() for param in ddp.parameters()])
        # Left out: work.wait(), if there is one
        average.lerp_(weights, 0.1)  # access
        work = dist.broadcast(average, src=0, group=mirror, async_op=True)  # access
    work.wait()


@seeded("race")
@pytest.mark.ranks(2, 3, backend="emulated")
def test_flat_gradients_are_refilled_while_they_are_reduced(rank, world_size, process_group, device):
    """Micro-batches share one flat buffer; the wait comes after the next one was packed into it, not before."""
    plain = model().to(device)
    params = list(plain.parameters())
    numel = sum(param.numel() for param in params)
    flat = torch.empty(numel, device=device)
    mine = torch.empty(numel // world_size, device=device)
    total = torch.zeros(numel // world_size, device=device)
    work = None
    for inputs in batches(rank, device):
        gradients = torch.autograd.grad(plain(inputs).square().mean(), params)
        torch.cat([gradient.flatten() for gradient in gradients], out=flat)  # access
        if work is not None:
            work.wait()
            total += mine
        work = dist.reduce_scatter_tensor(mine, flat, group=process_group, async_op=True)  # access
    work.wait()
    total += mine


# ---------------------------------------------------------------------- 6. collectives in another order on a rank


@seeded("different collectives")
@pytest.mark.ranks(2, backend="emulated")
def test_one_rank_reduces_its_metric_before_backward(rank, process_group, device):
    """Rank 1 averages the loss in a second group before backward, rank 0 after it."""
    ddp, optimizer = in_ddp(device)
    metrics = dist.new_group()
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        loss = ddp(inputs).square().mean()
        metric = loss.detach().clone()
        if rank == 1:
            dist.all_reduce(metric, group=metrics)  # call
        loss.backward()
        if rank == 0:
            dist.all_reduce(metric, group=metrics)
        optimizer.step()


@seeded("different collectives")
@pytest.mark.ranks(2, 3, backend="emulated")
def test_two_groups_are_used_in_another_order(rank, world_size, process_group, device):
    """Norms of matrices are added up in one group and those of vectors in another; rank 1 takes the second first."""
    ddp, optimizer = in_ddp(device)
    matrices, vectors = dist.new_group(), dist.new_group()
    inputs = batches(rank, device)
    for step in range(0, STEPS, 2):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(inputs[step]).square().mean().backward()
        ddp(inputs[step + 1]).square().mean().backward()
        squares = {dims: [p.grad.square().sum() for p in ddp.parameters() if p.dim() == dims] for dims in (1, 2)}
        pairs = [(matrices, torch.stack(squares[2]).sum()), (vectors, torch.stack(squares[1]).sum())]
        works = []
        for group, square in reversed(pairs) if rank == 1 else pairs:
            works.append(dist.all_reduce(square, group=group, async_op=True))  # call
        for work in works:
            work.wait()
        optimizer.step()


@seeded("different collectives")
@pytest.mark.ranks(3, backend="emulated")
def test_gradients_are_reduced_in_the_order_of_a_rank(rank, process_group, device):
    """One rank reduces the gradients of its layers from the first to the last, the others the other way round."""
    plain = model().to(device)
    optimizer = optim.AdamW(plain.parameters(), lr=1e-2)
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        params = list(plain.parameters())
        for param in params if rank == 2 else reversed(params):
            dist.all_reduce(param.grad, group=process_group)  # call
        optimizer.step()


# ---------------------------------------------------------------------- 7. one missing


@seeded("different collectives")
@pytest.mark.ranks(2, backend="emulated")
def test_only_rank_0_averages_the_loss_for_its_log(rank, process_group, device):
    """Rank 0 reduces the loss every second step to log it; rank 1 goes on to its next backward."""
    ddp, optimizer = in_ddp(device)
    for step, inputs in enumerate(batches(rank, device)):
        optimizer.zero_grad()
        loss = ddp(inputs).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 2 == 1:
            value = loss.detach().clone()
            dist.all_reduce(value, group=process_group)  # call


@seeded("different collectives")
@pytest.mark.ranks(2, backend="emulated")
def test_a_rank_runs_out_of_batches(rank, process_group, device):
    """Rank 1 has one batch fewer, so rank 0's last backward waits for gradients that never come."""
    ddp, optimizer = in_ddp(device)
    train(ddp, optimizer, batches(rank, device)[: STEPS - rank])


@seeded("different collectives")
@pytest.mark.ranks(2, backend="emulated")
def test_only_rank_0_gathers_the_shards_of_fsdp(rank, world_size, process_group, device):
    """Rank 0 alone collects whole parameters to save them, which every rank must take part in."""
    sharded = model().to(device)
    fully_shard(sharded, mesh=init_device_mesh(device.type, (world_size,)))
    optimizer = optim.AdamW(sharded.parameters(), lr=1e-2)
    train(sharded, optimizer, batches(rank, device))
    if rank == 0:
        saved = {}
        for name, param in sharded.named_parameters():
            saved[name] = param.full_tensor()  # call
        assert all(value.isfinite().all() for value in saved.values())


# ---------------------------------------------------------------------- 8. other sizes


@seeded("different collectives")
@pytest.mark.ranks(2, 3, backend="emulated")
def test_ranks_expect_a_broadcast_of_their_own_size(rank, process_group, device):
    """Rank 0 broadcasts the positions of hard examples, and every rank has counted its own."""
    ddp, optimizer = in_ddp(device)
    for inputs in batches(rank, device):
        optimizer.zero_grad()
        losses = ddp(inputs).square().mean(1)
        chosen = losses.detach().argsort(descending=True)[: 4 + rank].clone()
        dist.broadcast(chosen, src=0, group=process_group)  # call
        losses[chosen].mean().backward()
        optimizer.step()


@seeded("different collectives")
@pytest.mark.ranks(2, backend="emulated")
def test_predictions_of_a_shorter_last_batch_are_gathered(rank, world_size, process_group, device):
    """The last batch of rank 1 is shorter, and its predictions are gathered as if it were not."""
    trained = model().to(device).eval()
    inputs = batches(rank, device)
    inputs[-1] = inputs[-1][: 8 - 3 * rank]
    with torch.no_grad():
        for each in inputs:
            predicted = trained(each)
            everybody = torch.empty(world_size * len(predicted), 6, device=device)
            dist.all_gather_into_tensor(everybody, predicted, group=process_group)  # call


# ---------------------------------------------------------------------- 9. where the host must not wait


@seeded("host wait")
@pytest.mark.ranks(2, backend="emulated")
def test_loop_logs_the_loss_of_every_step(rank, process_group, device, host_never_waits):
    """The loss is read by .item() in every step."""
    ddp, optimizer = in_ddp(device)
    inputs = batches(rank, device)
    train(ddp, optimizer, inputs[:3])
    history = []
    with host_never_waits():
        for each in inputs[3:]:
            optimizer.zero_grad()
            loss = ddp(each).square().mean()
            loss.backward()
            optimizer.step()
            history.append(loss.item())  # wait


@seeded("host wait")
@pytest.mark.ranks(2, backend="emulated")
def test_loop_skips_steps_that_are_not_finite(rank, process_group, device, host_never_waits):
    """A condition on a norm of the device makes the host wait for it."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    inputs = batches(rank, device)
    train(ddp, optimizer, inputs[:3])
    with host_never_waits():
        for each in inputs[3:]:
            optimizer.zero_grad()
            ddp(each).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            if norm.isfinite():  # wait
                optimizer.step()


@seeded("host wait")
@pytest.mark.ranks(2, backend="emulated")
def test_hook_lists_the_norms_of_its_bucket(rank, process_group, device, host_never_waits):
    """A communication hook calls .tolist() in the middle of backward."""
    ddp, optimizer = in_ddp(device)
    norms = []

    def reduce_and_list(_, bucket):
        norms.append(torch.stack([gradient.norm() for gradient in bucket.gradients()]).tolist())  # wait
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, reduce_and_list)
    inputs = batches(rank, device)
    train(ddp, optimizer, inputs[:3])
    with host_never_waits():
        train(ddp, optimizer, inputs[3:])


@seeded("host wait")
@pytest.mark.ranks(1, 2, backend="emulated")
def test_batches_are_copied_from_memory_that_is_not_pinned(rank, process_group, device, host_never_waits):
    """Batches are copied to the device by blocking copies."""
    ddp, optimizer = in_ddp(device)
    train(ddp, optimizer, batches(rank, device)[:3])
    with host_never_waits():
        for step in range(3, STEPS):
            inputs = batch(step, rank).to(device)  # wait
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()


# ---------------------------------------------------------------------- what they share


def train(module: nn.Module, optimizer: optim.Optimizer, inputs: list[torch.Tensor]) -> None:
    for each in inputs:
        optimizer.zero_grad()
        module(each).square().mean().backward()
        optimizer.step()


def zeroshard_in_ddp(
    device: torch.device, hook: str, *, before: nn.Module | None = None
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    layers = model().to(device) if before is None else nn.Sequential(before, *model()).to(device)
    ddp = DistributedDataParallel(layers, bucket_cap_mb=ONE_EACH, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optim.AdamW, overlap_with_ddp=steps_in_backward(hook), lr=1e-2
    )
    register(hook, ddp, optimizer)
    return ddp, optimizer
