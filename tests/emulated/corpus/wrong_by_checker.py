"""Programs with one error each, written by someone who knows the checker: errors that hide where it may not look.

As in ``wrong_by_page.py``, ``@seeded(kind)`` says which report is due, and lines that it must name end in a comment
"access", "call" or "wait". Collected by an explicit command.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import zeroshard_comm.collectives
from support.ddp_training import register
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer

STEPS = 5
"""More than two, for DistributedDataParallel makes its buckets anew after the first, and the host waits there."""

ONE_EACH = 1e-5
"""bucket_cap_mb that gives every gradient a bucket of its own."""


def seeded(kind):
    return pytest.mark.seeded(kind=kind)


def model() -> nn.Sequential:
    """Return a tiny model, the same on every rank; all first dimensions are multiples of 1, 2 and 3."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 18), nn.GELU(), nn.Linear(18, 6))


def batches(rank: int, device: torch.device) -> list[torch.Tensor]:
    """Return inputs that differ on every rank, on the device before the loop begins: blocking copies hide errors."""
    generators = [torch.Generator().manual_seed(100 * step + rank) for step in range(STEPS)]
    return [torch.randn(8, 12, generator=generator).to(device) for generator in generators]


def loss_of(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return module(inputs).float().square().mean()


def in_ddp(device: torch.device, **arguments: object) -> tuple[DistributedDataParallel, optim.Optimizer]:
    ddp = DistributedDataParallel(model().to(device), bucket_cap_mb=ONE_EACH, **arguments)
    return ddp, optim.AdamW(ddp.parameters(), lr=1e-2)


def in_fsdp(device: torch.device, mesh: dist.DeviceMesh, **arguments: object) -> nn.Module:
    sharded = model().to(device)
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **arguments)
    return fully_shard(sharded, mesh=mesh, **arguments)


def train(module: nn.Module, optimizer: optim.Optimizer, inputs: list[torch.Tensor]) -> None:
    for each in inputs:
        optimizer.zero_grad()
        loss_of(module, each).backward()
        optimizer.step()


# ---------------------------------------------------------------------- 1. a side stream that is not joined


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_fsdp_steps_before_gradients_are_added_up(rank, world_size, process_group, device, monkeypatch):
    """The current stream does not wait for the end of FSDP2's stream of reductions, which adds gradients after them.

    Without two backwards a step, another edge hides it: the one before FSDP2 gives up the inputs of its reductions.
    """
    finalize = FSDPParamGroup.finalize_backward

    def without_waiting(self):
        self.comm_ctx._last_post_reduce_events.clear()
        finalize(self)

    monkeypatch.setattr(FSDPParamGroup, "finalize_backward", without_waiting)
    sharded = in_fsdp(device, init_device_mesh(device.type, (world_size,)))
    optimizer = optim.AdamW(sharded.parameters(), lr=1e-2)
    inputs = batches(rank, device)
    for _ in range(2):
        optimizer.zero_grad()
        for each in inputs[:2]:
            loss_of(sharded, each).backward()
        optimizer.step()  # access


@seeded("race")
@pytest.mark.ranks(1, backend="emulated")
def test_side_stream_is_joined_by_a_collective_that_one_rank_does_not_need(process_group, world_size, device):
    """Gradients are packed aside, and the wait for their reduction is the join: there is none at world size 1."""
    plain = model().to(device)
    params = list(plain.parameters())
    optimizer = optim.AdamW(params, lr=1e-2)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    for each in batches(0, device):
        optimizer.zero_grad()
        loss_of(plain, each).backward()
        side.wait_stream(current)
        with side:
            norm = torch.cat([param.grad.flatten() for param in params]).norm()  # access
            work = dist.all_reduce(norm, async_op=True) if world_size > 1 else None
        if work is not None:
            work.wait()
        # Left out: current.wait_stream(side)
        torch._foreach_div_([param.grad for param in params], norm + 1e-3)
        optimizer.step()


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_event_is_recorded_before_what_it_stands_for(rank, process_group, device):
    """An average of weights is updated aside, and the event that the next step waits for comes one line too early."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    average = [param.detach().clone() for param in ddp.parameters()]
    averaged = torch.Event(device)
    for each in batches(rank, device):
        optimizer.zero_grad()
        loss_of(ddp, each).backward()
        current.wait_event(averaged)
        optimizer.step()  # access
        side.wait_stream(current)
        with side, torch.no_grad():
            averaged.record(side)
            torch._foreach_lerp_(average, list(ddp.parameters()), 0.1)  # access
    current.wait_stream(side)


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_scratch_memory_is_resized_aside(rank, process_group, device):
    """A scratch tensor is grown on a side stream at the third step: that writes, and the current stream reads."""
    ddp, optimizer = in_ddp(device)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    scratch = torch.zeros(8, device=device)
    for step, each in enumerate(batches(rank, device)):
        optimizer.zero_grad()
        loss_of(ddp, each).backward()
        optimizer.step()
        if step == 2:
            side.wait_stream(current)
            with side:
                scratch.resize_(4096)  # access
        scratch[:8].sum()  # access
    current.wait_stream(side)


# ---------------------------------------------------------------------- 2. a stream that does not wait


class TransposedAside(torch.autograd.Function):
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
        # Left out: TransposedAside.side.wait_stream(current)
        with TransposedAside.side:
            of_weight = gradient.t() @ inputs  # access
        of_inputs = gradient @ weight
        current.wait_stream(TransposedAside.side)
        of_weight.record_stream(current)
        return of_inputs, of_weight


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_backward_of_a_custom_function_does_not_wait(rank, process_group, device):
    """Forward is right; in backward, a side stream reads what autograd has just written on the current one."""

    class Aside(nn.Linear):
        def forward(self, inputs):
            return TransposedAside.apply(inputs, self.weight)

    TransposedAside.side = torch.Stream(device)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(12, 30), Aside(30, 18, bias=False), nn.GELU(), nn.Linear(18, 6)).to(device)
    ddp = DistributedDataParallel(layers, bucket_cap_mb=ONE_EACH)
    train(ddp, optim.AdamW(ddp.parameters(), lr=1e-2), batches(rank, device))


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_hook_of_the_step_copies_weights_that_are_still_stepped(rank, process_group, device):
    """A post-step hook copies weights to a snapshot on a side stream that only later waits for the current one."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    snapshot = [torch.empty_like(param) for param in ddp.parameters()]

    def copy(optimizer, *_):
        with side, torch.no_grad():
            torch._foreach_copy_(snapshot, optimizer.param_groups[0]["params"])  # access
        side.wait_stream(current)
        current.wait_stream(side)

    optimizer.register_step_post_hook(copy)
    side.wait_stream(current)
    train(ddp, optimizer, batches(rank, device))


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_fsdp_gathers_parameters_that_are_still_stepped(rank, world_size, process_group, device):
    """The event for which FSDP2's all-gathers wait, instead of the current stream, is recorded before the step."""
    sharded = in_fsdp(device, init_device_mesh(device.type, (world_size,)))
    optimizer = optim.AdamW(sharded.parameters(), lr=1e-2)
    for each in batches(rank, device):
        optimizer.zero_grad()
        loss_of(sharded, each).backward()
        stepped = torch.accelerator.current_stream().record_event()
        optimizer.step()  # access
        sharded.set_post_optim_event(stepped)


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_buffer_of_pinned_copies_is_overwritten_on_the_device(rank, process_group, device):
    """A side stream copies each loss to pinned memory, out of a tensor that the next step writes without waiting."""
    ddp, optimizer = in_ddp(device)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    losses = torch.zeros(STEPS).pin_memory()
    value = torch.zeros((), device=device)
    for step, each in enumerate(batches(rank, device)):
        optimizer.zero_grad()
        loss = loss_of(ddp, each)
        loss.backward()
        optimizer.step()
        # Left out: current.wait_stream(side)
        value.copy_(loss.detach())  # access
        side.wait_stream(current)
        with side:
            losses[step].copy_(value, non_blocking=True)  # access
    side.synchronize()
    assert losses.isfinite().all()


# ---------------------------------------------------------------------- 3. memory that is not kept

_NOTHING = property(lambda self: None, lambda self, value: None)


@seeded("freed in use")
@pytest.mark.ranks(2, backend="emulated")
def test_hsdp_frees_gradients_while_they_are_reduced(rank, process_group, device, monkeypatch):
    """FSDP2 on two dimensions does not hold the buffer of its all-reduce, as it did until PyTorch 2.12."""
    monkeypatch.setattr(FSDPParamGroup, "_all_reduce_state", _NOTHING, raising=False)
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicated", "sharded"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    sharded = in_fsdp(device, mesh, mp_policy=policy)
    train(sharded, optim.AdamW(sharded.parameters(), lr=1e-2), batches(rank, device))


@seeded("freed in use")
@pytest.mark.ranks(2, backend="emulated")
def test_storage_is_emptied_while_a_side_stream_reads_it(rank, process_group, device):
    """As sharded training does: the memory goes, the tensor stays. A side stream still reads it, unrecorded."""
    ddp, optimizer = in_ddp(device)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    whole, largest = torch.zeros(4096, device=device), torch.zeros((), device=device)
    for each in batches(rank, device):
        optimizer.zero_grad()
        loss_of(ddp, each).backward()
        optimizer.step()
        whole.untyped_storage().resize_(4 * 4096)
        with torch.no_grad():
            torch.cat([param.flatten() for param in ddp.parameters()], out=whole[:1062])
        side.wait_stream(current)
        with side:
            torch.maximum(largest, whole[:1062].max(), out=largest)  # access
        # Left out: whole.record_stream(side)
        whole.untyped_storage().resize_(0)
    current.wait_stream(side)


@seeded("freed in use")
@pytest.mark.ranks(2, backend="emulated")
def test_fsdp_frees_what_it_gathered_while_it_is_copied(rank, world_size, process_group, device, monkeypatch):
    """FSDP2's streams of all-gathers, which allocate, do not wait for the copy out of what they have gathered."""
    monkeypatch.setattr(FSDPParamGroup, "_wait_all_gather_streams_on_event", lambda self, event: None)
    sharded = in_fsdp(device, init_device_mesh(device.type, (world_size,)))
    train(sharded, optim.AdamW(sharded.parameters(), lr=1e-2), batches(rank, device))


# ---------------------------------------------------------------------- 4. read before work.wait()


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_fsdp_copies_out_what_is_still_gathered(rank, world_size, process_group, device, monkeypatch):
    """The current stream does not wait for FSDP2's all-gather before it copies parameters out of the result."""
    copy_out = _fsdp_param_group.foreach_all_gather_copy_out

    def without_waiting(result, *arguments):
        copy_out(result._replace(all_gather_event=None, all_gather_work=None), *arguments)

    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather_copy_out", without_waiting)
    sharded = in_fsdp(device, init_device_mesh(device.type, (world_size,)))
    train(sharded, optim.AdamW(sharded.parameters(), lr=1e-2), batches(rank, device))


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_ddp_takes_gradients_from_a_future_that_waits_for_nothing(rank, world_size, process_group, device, views):
    """A communication hook completes its future itself, at once, instead of by the future of its all-reduce."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=views)

    def reduce_for_later(works, bucket):
        gradients = bucket.buffer().div_(world_size)
        works.append(dist.all_reduce(gradients, group=process_group, async_op=True))  # access
        done = torch.futures.Future(devices=[device])
        done.set_result(gradients)
        return done

    ddp.register_comm_hook([], reduce_for_later)
    train(ddp, optimizer, batches(rank, device))


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_zeroshard_uses_parameters_before_they_have_come(rank, process_group, device, monkeypatch):
    """A step broadcasts parameters by collectives, and the forward after it does not wait for them."""
    monkeypatch.setattr(zeroshard_comm.collectives, "wait_for_collective", lambda work, ranks, kind: None)
    ddp = DistributedDataParallel(model().to(device), bucket_cap_mb=ONE_EACH, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, lr=1e-2)
    register("reduce_to_owner_hook", ddp, optimizer)
    train(ddp, optimizer, batches(rank, device))


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_coalesced_reductions_are_read_before_their_wait(rank, process_group, device):
    """The reductions of a context are issued at its end, and read after it, but before they are waited for."""
    ddp, optimizer = in_ddp(device)
    for each in batches(rank, device):
        optimizer.zero_grad()
        loss = loss_of(ddp, each)
        loss.backward()
        sums, counts = loss.detach() * len(each), torch.full((), float(len(each)), device=device)
        with dist._coalescing_manager(group=process_group, device=device, async_ops=True) as works:
            dist.all_reduce(sums, group=process_group)
            dist.all_reduce(counts, group=process_group)
        mean = sums / counts  # access
        works.wait()
        loss.detach() - mean
        optimizer.step()


@seeded("race")
@pytest.mark.ranks(3, backend="emulated")
def test_shard_of_a_reduce_scatter_is_read_early(rank, world_size, process_group, device):
    """Each rank steps its third of flat parameters, of which the gradient is still on its way in one step of two."""
    plain = model().to(device)
    flat = torch.cat([param.detach().flatten() for param in plain.parameters()])
    mine = flat.chunk(world_size)[rank].clone()
    gradient = torch.zeros_like(mine)
    work = None
    for step, each in enumerate(batches(rank, device)):
        loss = loss_of(plain, each)
        of_params = torch.autograd.grad(loss, list(plain.parameters()))
        if work is not None:
            work.wait()
        whole = torch.cat([one.flatten() for one in of_params])
        work = dist.reduce_scatter_tensor(gradient, whole, group=process_group, async_op=True)  # access
        if step % 2 == 0:
            work.wait()
        mine.sub_(gradient, alpha=0.1)  # access
    work.wait()


@seeded("race")
@pytest.mark.ranks(3, backend="emulated")
def test_message_of_a_ring_is_used_before_it_has_come(rank, world_size, process_group, device):
    """Of the two messages of a step, the one that is sent is waited for, and not the one that comes."""
    block = torch.full((64,), float(rank + 1), device=device)
    total = block.clone()
    for _ in range(world_size - 1):
        received = torch.empty_like(block)
        send = dist.isend(block, (rank + 1) % world_size, group=process_group)
        receive = dist.irecv(received, (rank - 1) % world_size, group=process_group)  # access
        send.wait()
        total += received  # access
        receive.wait()
        block = received


# ---------------------------------------------------------------------- 5. written while a collective reads


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_input_of_an_all_gather_is_overwritten(rank, world_size, process_group, device):
    """Hidden states are gathered while the next layer computes, which works in place on them."""
    layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)]).to(device)
    with torch.no_grad():
        for each in batches(rank, device):
            hidden = layers[0](each)
            everybody = torch.empty(world_size * len(hidden), 12, device=device)
            work = dist.all_gather_into_tensor(everybody, hidden, group=process_group, async_op=True)  # access
            hidden.relu_()  # access
            layers[1](hidden)
            work.wait()
            everybody.sum()


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_view_of_a_bucket_is_scaled_while_the_bucket_is_reduced(rank, world_size, process_group, device):
    """A communication hook scales one parameter's gradient, a view of the bucket, after it has issued the reduction."""
    ddp = DistributedDataParallel(model().to(device), gradient_as_bucket_view=True)
    optimizer = optim.AdamW(ddp.parameters(), lr=1e-2)

    def reduce_and_scale(_, bucket):
        work = dist.all_reduce(bucket.buffer(), group=process_group, async_op=True)  # access
        bucket.gradients()[-1].div_(world_size)  # access
        return work.get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, reduce_and_scale)
    train(ddp, optimizer, batches(rank, device))


@seeded("race")
@pytest.mark.ranks(2, backend="emulated")
def test_gradients_are_zeroed_in_place_while_they_are_gathered(rank, world_size, process_group, device):
    """zero_grad(set_to_none=False) writes where a collective for statistics still reads."""
    ddp, optimizer = in_ddp(device)
    works = []
    for each in batches(rank, device):
        optimizer.zero_grad(set_to_none=False)  # access
        loss_of(ddp, each).backward()
        for work in works:
            work.wait()
        works = []
        for param in ddp.parameters():
            seen = torch.empty(world_size * param.grad.numel(), device=device)
            gradient = param.grad.view(-1)
            works.append(dist.all_gather_into_tensor(seen, gradient, group=process_group, async_op=True))  # access
        optimizer.step()
    for work in works:
        work.wait()


# ---------------------------------------------------------------------- 6. another order


@seeded("different collectives")
@pytest.mark.ranks(4, backend="emulated")
def test_subgroup_of_three_is_used_in_another_order(rank, process_group, device):
    """Ranks 1 to 3 add up losses in a group of their own, which rank 2 does after the reduction of all."""
    three = dist.new_group([1, 2, 3])
    loss = torch.full((), float(rank), device=device)
    tokens = torch.full((4,), 2.0, device=device)
    for step in range(STEPS):
        is_late = rank == 2 and step == 3
        if rank and not is_late:
            dist.all_reduce(loss, group=three)  # call
        dist.all_reduce(tokens, group=process_group)  # call
        if is_late:
            dist.all_reduce(loss, group=three)


# ---------------------------------------------------------------------- 7. one missing


@seeded("different collectives")
@pytest.mark.ranks(3, backend="emulated")
def test_rank_leaves_a_group_with_a_time_limit(rank, process_group, device):
    """Rank 2 stops to use a group when its loss is small enough, and is busy with something else for long."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    loss = torch.full((), 1.0 + rank, device=device)
    for step in range(STEPS):
        if rank == 2 and step == 3:
            time.sleep(5)
            break
        dist.all_reduce(loss, group=group)  # call
        loss.div_(3)


@seeded("different collectives")
@pytest.mark.ranks(2, backend="emulated")
def test_rank_skips_the_reduction_of_a_step_that_is_not_finite(rank, process_group, device):
    """Rank 1 takes a batch under no_sync: its next reductions meet those of rank 0 that it has left out."""
    ddp, optimizer = in_ddp(device, gradient_as_bucket_view=True)
    for step, each in enumerate(batches(rank, device)):
        optimizer.zero_grad()
        with ddp.no_sync() if rank == 1 and step == 3 else contextlib.nullcontext():
            loss_of(ddp, each).backward()  # call
        optimizer.step()


# ---------------------------------------------------------------------- 8. other sizes, dtypes, operations, roots


@seeded("different collectives")
@pytest.mark.ranks(2, backend="emulated")
@pytest.mark.parametrize("what", ["dtype", "operation", "root"])
def test_losses_are_reduced_differently(rank, process_group, device, what):
    """The collective is the same, and the shape of its tensor, and one detail is not."""
    ddp, optimizer = in_ddp(device)
    for each in batches(rank, device):
        optimizer.zero_grad()
        loss = loss_of(ddp, each)
        loss.backward()
        value = loss.detach().bfloat16() if what == "dtype" and rank else loss.detach().clone()
        operation = dist.ReduceOp.MAX if what == "operation" and rank else dist.ReduceOp.SUM
        root = rank if what == "root" else 0
        dist.reduce(value, root, op=operation, group=process_group)  # call
        optimizer.step()


# ---------------------------------------------------------------------- 9. where the host must not wait


@seeded("host wait")
@pytest.mark.ranks(2, backend="emulated")
def test_scaler_looks_for_infinities_in_every_step(rank, process_group, device, host_never_waits):
    """GradScaler.step() reads on the host whether any gradient was infinite."""
    ddp, optimizer = in_ddp(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)

    def iterate(each):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = loss_of(ddp, each)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # wait
        scaler.update()

    inputs = batches(rank, device)
    for each in inputs[:3]:
        iterate(each)
    with host_never_waits():
        for each in inputs[3:]:
            iterate(each)


@seeded("host wait")
@pytest.mark.ranks(1, 2, backend="emulated")
def test_backward_selects_by_a_mask(rank, process_group, device, host_never_waits):
    """A tensor hook counts gradients above a bound by a mask, so the host waits in a thread of autograd."""
    ddp, optimizer = in_ddp(device)
    counts = []

    def count(gradient):
        counts.append(gradient[gradient > 0.01].numel())  # wait

    inputs = batches(rank, device)
    train(ddp, optimizer, inputs[:3])
    with host_never_waits():
        for each in inputs[3:]:
            optimizer.zero_grad()
            outputs = ddp(each)
            outputs.register_hook(count)
            outputs.square().mean().backward()
            optimizer.step()
