"""Half-precision parameters with float32 masters at their owners: as a plain loop with copies in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import FLAG, VIEWS, each_of
from support.ddp_training import HOOKS, register, steps_in_backward
from support.master_weights import HalfModel, PlainMasters, sharded_over, train, trained
from support.training import (
    DENSE_OPTIMIZERS,
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    cutting,
    set_gradients,
    small_model,
)
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from zeroshard import AveragedParameters, ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_integrations.ddp import hook_with_zero_step, register_reduce_to_owner
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@each_of("name", ["Adafactor", "SGD", "AdamW", "SGD-momentum"], partition=["whole", "split"], as_bucket_view=FLAG)
def test_equals_copies_in_one_process(rank: int, name: str, partition: str, as_bucket_view: bool) -> None:
    if name == "Adafactor" and partition == "split":
        pytest.skip("Adafactor looks at whole tensors, which are not cut for it")
    optimizer_class, settings = DENSE_OPTIMIZERS[name]
    model = HalfModel()
    reference = copy.deepcopy(model)
    sharded = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class,
        parameters_as_bucket_view=as_bucket_view,
        partition=cutting(partition),
        master_weights=True,
        **settings,
    )
    plain = PlainMasters(reference.parameters(), optimizer_class, **settings)
    for step in range(4):
        train(model, sharded, [step], none=3)
        train(reference, plain, [step], none=3)
        assert_bitwise_equal(model, reference, f"after step {step}")
        assert_replicas_equal(model.parameters())
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        ours, expected = sharded.state_dict(), plain.state_dict()
        for index, param in enumerate(model.parameters()):
            if param.dtype == torch.float32:
                expected["state"][index].pop("master_param")
        # Those that were never stepped are listed as empty.
        for state_dict in (ours, expected):
            state_dict["state"] = {key: entries for key, entries in state_dict["state"].items() if entries}
        assert_same_state(ours, expected)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_bytes_of_a_rank_are_those_of_its_shards(rank: int) -> None:
    model = HalfModel()
    sharded = sharded_over(model, partition=cutting("split"))
    train(model, sharded, range(2))
    local = sharded._engine.local
    state = [local.state_of(shard) for shard in local.shards.values()]
    nbytes = sum(value.nbytes for entries in state for value in entries.values() if value.dim() > 0)
    owned = [(shard.numel, sharded.plan.tensors[shard.tensor].dtype.itemsize) for shard in sharded.plan.of_rank(rank)]
    # Two moments of 4 bytes for each element, and a master for those in half precision.
    assert nbytes == sum(numel * (12 if itemsize == 2 else 8) for numel, itemsize in owned)
    # Parameters travel in their own dtypes.
    assert sharded.traffic.of("broadcast").bytes_sent == 2 * sum(numel * itemsize for numel, itemsize in owned)


class Training:
    """DistributedDataParallel over a model in half precision with masters: sharded, or by hand."""

    def __init__(self, hook: str, *, is_sharded: bool, partition: str = "whole", views: bool = False) -> None:
        model = HalfModel()
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.02)
        self.optimizer: Any = PlainMasters(model.parameters(), optim.AdamW, lr=1e-2)
        if is_sharded:
            overlaps = steps_in_backward(hook)
            settings: dict[str, Any] = {"partition": cutting(partition), "parameters_as_bucket_view": views}
            self.optimizer = sharded_over(model, overlap_with_ddp=overlaps, **settings)
            if hook != "none":
                register(hook, self.ddp, self.optimizer)

    def iterate(self, step: int, *, max_norm: float | None = None) -> None:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        self.ddp.zero_grad()
        self.ddp(torch.randn(8, 40, generator=generator)).float().square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), max_norm)
        self.optimizer.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("hook", ["none", *HOOKS], partition=["whole", "split"])
def test_equals_copies_in_one_process_with_a_hook(hook: str, partition: str) -> None:
    ours, plain = (Training(hook, is_sharded=is_sharded, partition=partition) for is_sharded in (True, False))
    for step in range(4):
        for each in (ours, plain):
            each.iterate(step)
        assert_bitwise_equal(ours.ddp.module, plain.ddp.module, f"after step {step}")
        assert_replicas_equal(ours.ddp.parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_gradients_are_clipped_with_a_hook() -> None:
    ours, plain = (Training("reduce_to_owner_hook", is_sharded=is_sharded) for is_sharded in (True, False))
    for step in range(3):
        for each in (ours, plain):
            each.iterate(step, max_norm=0.1)
        assert_bitwise_equal(ours.ddp.module, plain.ddp.module, f"after step {step}")
    # The gradient at its owner is scaled, and not the copy of it that a step makes.
    ours.ddp.zero_grad()
    ours.ddp(torch.ones(8, 40)).float().square().mean().backward()
    norm = float(ours.optimizer.clip_grad_norm_(1e-3))
    assert norm > 1e-3
    assert float(ours.optimizer.clip_grad_norm_(1.0)) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("hook", ["none", "reduce_to_owner_hook"])
def test_an_infinity_on_one_rank_skips_the_step_on_all(rank: int, hook: str) -> None:
    model = HalfModel(torch.float16)
    ddp = DistributedDataParallel(model)
    optimizer = sharded_over(model)
    if hook != "none":
        register(hook, ddp, optimizer)
    # torch.amp.GradScaler refuses gradients in float16, sharded or not.
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
    twin = copy.deepcopy(model)
    plain_ddp, plain = DistributedDataParallel(twin), PlainMasters(twin.parameters(), optim.AdamW, lr=1e-2)
    for step in range(4):
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(2 * step + rank))
        if step == 2 and rank == 1:
            inputs[0, 0] = torch.inf
        optimizer.zero_grad()
        scaler.scale(ddp(inputs).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0**10 if step < 2 else 2.0**9)
        twin.zero_grad()
        (plain_ddp(inputs).float().square().mean() * (2.0**10 if step <= 2 else 2.0**9)).backward()
        if step != 2:
            for param in twin.parameters():
                param.grad.div_(2.0**10 if step < 2 else 2.0**9)
            plain.step()
        assert_bitwise_equal(model, twin, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_values_that_were_written_to_parameters_are_taken_over(as_bucket_view: bool) -> None:
    model, sharded, reference, plain = trained(2, parameters_as_bucket_view=as_bucket_view)
    # A write of the same values keeps what is not in them; other values are taken.
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    with torch.no_grad():
        model[0].weight[0] = reference[0].weight[0] = 0.5
    train(model, sharded, range(2, 4))
    train(reference, plain, range(2, 4))
    assert_bitwise_equal(model, reference, "after parameters were written to")
    with torch.no_grad():
        rebound = model[0].weight.detach().clone()
        rebound[1] = reference[0].weight[1] = 0.5
        model[0].weight.data = rebound
    train(model, sharded, range(4, 6))
    train(reference, plain, range(4, 6))
    assert_bitwise_equal(model, reference, "after .data was rebound")


def write(training: Training, change: Callable[[torch.Tensor], object]) -> None:
    """Write to parameters through ``.data``, as many loops do."""
    for param in training.ddp.parameters():
        change(param.data)


def pretrained(values: torch.Tensor) -> None:
    """Set the values of a checkpoint."""
    generator = torch.Generator().manual_seed(values.numel())
    values.copy_(torch.randn(values.shape, generator=generator) / 10)


def clipped(values: torch.Tensor) -> None:
    """Clip weights, as in a Wasserstein GAN."""
    values.clamp_(-0.1, 0.1)


def normalized(values: torch.Tensor) -> None:
    """Bring rows to norm 1."""
    if values.dim() == 2:
        values.div_(values.norm(dim=1, keepdim=True))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of(
    "hook",
    ["none", *HOOKS],
    after_a_step=[clipped, normalized],
    partition=["whole", "split", "level"],
    as_bucket_view=FLAG,
)
def test_writes_through_data_reach_the_masters(
    after_a_step: Callable[[torch.Tensor], object], hook: str, partition: str, as_bucket_view: bool
) -> None:
    sides = [Training(hook, is_sharded=each, partition=partition, views=as_bucket_view) for each in (True, False)]
    ours, plain = sides
    for each in sides:
        write(each, pretrained)
    for step in range(4):
        for each in sides:
            each.iterate(step)
        assert_bitwise_equal(ours.ddp.module, plain.ddp.module, f"after step {step}")
        for each in sides:
            write(each, after_a_step)
        assert_bitwise_equal(ours.ddp.module, plain.ddp.module, f"after the write that follows step {step}")
    assert_replicas_equal(ours.ddp.parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_model_that_was_converted_is_refused() -> None:
    model = HalfModel()
    sharded = sharded_over(model)
    train(model, sharded, range(1))
    model.float()
    set_gradients(model.parameters(), 1)
    with pytest.raises(ValueError, match="has changed its dtype, device or memory format"):
        sharded.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_ranks_that_differ_are_told_so(rank: int) -> None:
    with pytest.raises(DisagreementError, match="master_weights"):
        sharded_over(HalfModel(), master_weights=rank == 0)


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="DistributedDataParallel's mixed precision makes a stream, for which this torch needs CUDA's driver",
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("steps_early", [False, True], ids=["reduce_to_owner_hook", "hook_with_zero_step"])
def test_mixed_precision_of_ddp_is_refused_with_a_hook(steps_early: bool) -> None:
    model = small_model()
    ddp = DistributedDataParallel(model, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    optimizer = sharded_over(model, overlap_with_ddp=steps_early)
    register = partial(hook_with_zero_step, allreduce_hook) if steps_early else register_reduce_to_owner
    with pytest.raises(ValueError, match=r"mixed_precision=...\) has its own communication hook"):
        register(ddp, optimizer)
    # It is as it was, and steps without a hook.
    train(model, optimizer, range(1))


@pytest.mark.ranks(2, backend=["gloo-cuda", "nccl"])
def test_mixed_precision_of_ddp_without_a_hook() -> None:
    def run(*, is_sharded: bool) -> nn.Module:
        model = small_model().cuda()
        precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        ddp = DistributedDataParallel(model, mixed_precision=precision)
        made = sharded_over(model, master_weights=False) if is_sharded else optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            made.zero_grad()
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            ddp(torch.randn(8, 40, generator=generator).cuda()).float().square().mean().backward()
            made.step()
        return model

    assert_bitwise_equal(run(is_sharded=True), run(is_sharded=False), "after three steps")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_what_a_closure_writes_to_parameters_is_taken_over() -> None:
    model, sharded, reference, plain = trained(1)

    def closure() -> None:
        set_gradients(model.parameters(), 1)
        with torch.no_grad():
            model[0].weight.fill_(0.5)

    sharded.step(closure)
    set_gradients(reference.parameters(), 1)
    with torch.no_grad():
        reference[0].weight.fill_(0.5)
    plain.step()
    assert_bitwise_equal(model, reference, "after a closure")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_checks_of_every_step_know_of_masters_and_averages(rank: int) -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        model = HalfModel()
        sharded = sharded_over(model)
        average = AveragedParameters(sharded)
        for step in range(3):
            sharded.step(lambda step=step: set_gradients(model.parameters(), step))
            average.update()
        sharded.consolidate_state_dict()
        sharded.load_state_dict(sharded.state_dict() if rank == 0 else {}, from_rank=0)
        train(model, sharded, range(3, 5))
        with average.applied():
            assert_replicas_equal(model.parameters())
        train(model, sharded, range(5, 6))
    finally:
        dist.set_debug_level(before)
