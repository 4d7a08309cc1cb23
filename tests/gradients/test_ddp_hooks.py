"""DDP with the communication hooks trains as DDP with the plain optimizer does, from the first iteration on."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import each_of
from support.ddp_by_collectives import BOTH_WAYS, PARTITIONS_BOTH_WAYS, STEPPING, VIEWS_BOTH_WAYS
from support.ddp_models import Branches, Counting, TwoKinds
from support.ddp_training import (
    EVERY_HOOK,
    HOOKS,
    HOOKS_AND_PARTITIONS,
    PARTITIONS,
    VIEWS,
    Twins,
    batch,
    each_hook_with,
    train,
    with_hook,
)
from support.training import DENSE_OPTIMIZERS, EVERYWHERE, assert_bitwise_equal
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from zeroshard_comm import transport

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.by_default(
    "2-whole-views-reduce_to_owner_hook-messages | 2-whole-views-hook_with_zero_step_interleaved-messages | "
    "3-split-copies-hook_with_zero_step-messages | 2-whole-views-reduce_to_owner_hook-collectives | "
    "2-whole-views-hook_with_zero_step_interleaved-collectives | 3-split-copies-hook_with_zero_step-collectives"
)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@BOTH_WAYS
@EVERY_HOOK
@VIEWS
@PARTITIONS
def test_parameters_are_those_of_the_plain_optimizer(
    twins_by: type[Twins], hook: str, partition: str, views: bool
) -> None:
    train(twins_by(hook, partition=partition, ddp={"gradient_as_bucket_view": views}))


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@HOOKS_AND_PARTITIONS
def test_gradients_of_a_small_model_are_added_up_without_a_thread(
    hook: str, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "WORTH_OVERLAPPING", 1 << 40)
    twins = Twins(hook, model=Branches, partition=partition, ddp={"find_unused_parameters": True})
    train(twins, lambda ddp, inputs: ddp(inputs, 1).square().mean(), last=6)
    assert not twins.optimizer.follow_backward(STEPPING[hook]).buckets.transport.uses_thread


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@PARTITIONS_BOTH_WAYS
def test_parameters_in_flat_buffers_are_trained_alike(twins_by: type[Twins], hook: str, partition: str) -> None:
    train(twins_by(hook, partition=partition, parameters_as_bucket_view=True), last=4)


@pytest.mark.ranks(1, 3, backend=EVERYWHERE)
@BOTH_WAYS
@EVERY_HOOK
def test_one_rank_and_more_ranks_than_tensors_train_alike(twins_by: type[Twins], hook: str) -> None:
    train(twins_by(hook, model=lambda: nn.Sequential(nn.Linear(40, 2))), last=4)


@pytest.mark.by_default(
    "4-reduce_to_owner_hook-messages | 4-hook_with_zero_step-messages | 4-hook_with_zero_step_interleaved-collectives"
)
@pytest.mark.ranks(4, backend=EVERYWHERE)
@BOTH_WAYS
@EVERY_HOOK
def test_subgroups_train_each_for_itself(rank: int, twins_by: type[Twins], hook: str) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    train(twins_by(hook, process_group=halves[rank % 2]), last=4)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS_BOTH_WAYS
def test_a_static_graph_is_trained_alike(twins_by: type[Twins], hook: str, views: bool) -> None:
    static = {"static_graph": True, "gradient_as_bucket_view": views}
    train(twins_by(hook, ddp=static), last=6)
    # In the first backward of a static graph DDP announces every bucket as the first, and none as the last.
    train(twins_by(hook, model=TwoKinds, ddp=static), last=4)
    # Not all parameters take part.
    train(twins_by(hook, model=Branches, ddp=static), lambda ddp, inputs: ddp(inputs, 1).square().mean(), last=4)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_buckets_of_two_dtypes_are_reduced(hook: str) -> None:
    train(Twins(hook, model=TwoKinds), last=6)


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@PARTITIONS_BOTH_WAYS
def test_bytes_sent_are_those_of_ddp(twins_by: type[Twins], hook: str, world_size: int, partition: str) -> None:
    model = lambda: nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))  # noqa: E731 - one for both
    twins = twins_by(hook, model=model, partition=partition, ddp={"bucket_cap_mb": 1}, exact=False)
    loss = lambda ddp, inputs: ddp(inputs.repeat(1, 5)).square().mean()  # noqa: E731 - one for both
    for number in range(1, 4):
        twins.iterate(number, loss)
    before = twins.optimizer.traffic.total().bytes_sent
    twins.iterate(4, loss)
    sent = twins.optimizer.traffic.total().bytes_sent - before
    parameters = sum(param.nbytes for param in twins.ddp.parameters())
    everyone = torch.tensor([sent])
    dist.all_reduce(everyone)
    # 2P(N - 1)/N a rank; on top notes, statuses and the ends of packed messages.
    assert 2 * parameters * (world_size - 1) <= everyone.item() <= 1.01 * 2 * parameters * (world_size - 1)


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@HOOKS_AND_PARTITIONS
def test_groups_and_schedulers_set_learning_rates(hook: str, partition: str) -> None:
    def groups(model: nn.Module) -> Any:
        params = list(model.parameters())
        return [
            {"params": params[:2], "lr": 0.02},
            {"params": params[2:5], "weight_decay": 0.3},
            {"params": params[5:]},
        ]

    twins = Twins(hook, groups=groups, partition=partition)
    schedulers = [optim.lr_scheduler.ExponentialLR(side[1], 0.5) for side in twins.sides]
    cycles = [optim.lr_scheduler.OneCycleLR(side[1], 0.1, total_steps=20) for side in twins.sides]
    for number in range(1, 7):
        twins.iterate(number)
        for scheduler in schedulers if number % 2 else cycles:
            scheduler.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@HOOKS_AND_PARTITIONS
def test_checkpoints_are_those_of_the_plain_optimizer(rank: int, hook: str, partition: str) -> None:
    twins = Twins(hook, partition=partition)
    train(twins, last=2)
    twins.optimizer.consolidate_state_dict(to=0)
    saved = [twins.optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    theirs = copy.deepcopy(twins.plain.state_dict())
    # So that it matters whether a state is loaded.
    twins.iterate(20)
    # Into the plain optimizer, and from the plain optimizer into ours.
    twins.plain.load_state_dict(saved[0])
    twins.optimizer.load_state_dict(theirs)
    for number in range(3, 6):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_nan_spreads_as_without_sharding(hook: str) -> None:
    twins = Twins(hook)
    train(twins, last=2)
    twins.iterate(3, lambda ddp, inputs: ddp(inputs * (float("nan") if dist.get_rank() else 1.0)).square().mean())
    twins.check("after the NaN")
    assert all(param.isnan().any() for param in twins.ddp.parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@BOTH_WAYS
@EVERY_HOOK
def test_a_model_is_converted_between_steps(twins_by: type[Twins], hook: str) -> None:
    twins = twins_by(hook)
    train(twins, last=2)
    for param in twins.ddp.parameters():
        param.data = param.data.clone()
    for number in range(3, 6):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_hook_with("when", "after the backward", "before the forward", "before the backward")
def test_data_that_is_rebound_is_copied_back_into_flat_buffers(hook: str, when: str) -> None:
    twins = Twins(hook, parameters_as_bucket_view=True)
    train(twins, last=2)

    def rebind(ddp: nn.Module, now: str) -> None:
        if when == now:
            for param in ddp.parameters():
                param.data = param.data * 0.5

    def loss(ddp: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        rebind(ddp, "before the forward")
        found = ddp(inputs).square().mean()
        # The graph has saved what the parameters had, and their gradients are those of it.
        rebind(ddp, "before the backward")
        return found

    for number in range(3, 6):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number, loss)
            rebind(ddp, "after the backward")
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("hook", "partition", "arguments"),
    [
        ("reduce_to_owner_hook", "whole", {}),
        ("hook_with_zero_step", "split", {"gradient_as_bucket_view": False}),
        ("hook_with_zero_step_interleaved", "level", {"static_graph": True}),
    ],
    ids=str,
)
def test_a_forward_between_a_backward_and_its_step_changes_nothing(
    hook: str, partition: str, arguments: dict[str, Any]
) -> None:
    twins = Twins(hook, partition=partition, ddp=arguments, exact=partition == "whole")
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            ddp(batch(number + 10))
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend="gloo")
@BOTH_WAYS
@EVERY_HOOK
def test_no_thread_is_left(twins_by: type[Twins], hook: str) -> None:
    before = threading.active_count()
    twins = twins_by(hook)
    for number in range(3):
        twins.iterate(number)
        # Not between iterations either.
        assert threading.active_count() == before


@pytest.mark.by_default("2-reduce_to_owner_hook")
@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_two_models_in_one_backward_have_messages_of_their_own(rank: int, hook: str) -> None:
    # Layers of one size, and more of them than receives are posted for at a time.
    def large() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(5)))

    torch.manual_seed(0)
    made = [large(), large()]
    plain = [DistributedDataParallel(copy.deepcopy(model)) for model in made]
    sharded = [DistributedDataParallel(model) for model in made]
    optimizers = [with_hook(hook, ddp) for ddp in sharded]
    plain_optimizers = [optim.SGD(ddp.parameters(), lr=0.1) for ddp in plain]
    for number in range(3):
        inputs = torch.randn(4, 1024, generator=torch.Generator().manual_seed(10 * number + rank))
        for (first, second), steppers in ((sharded, optimizers), (plain, plain_optimizers)):
            for stepper in steppers:
                stepper.zero_grad()
            second(first(inputs)).sum().backward()
            for stepper in steppers:
                stepper.step()
        for ours, theirs in zip(sharded, plain, strict=True):
            assert_bitwise_equal(ours.module, theirs.module, f"after iteration {number}")


# ---------------------------------------------------------------------- optimizers


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("name", DENSE_OPTIMIZERS, hook=HOOKS)
def test_every_optimizer_trains_alike(hook: str, name: str) -> None:
    optimizer, settings = DENSE_OPTIMIZERS[name]
    train(Twins(hook, optimizer=optimizer, settings=settings), last=4)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_an_optimizer_that_looks_at_whole_matrices_trains_alike(hook: str) -> None:
    def matrices() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(40, 64, bias=False), nn.Linear(64, 7, bias=False), nn.Linear(7, 3, bias=False))

    train(Twins(hook, model=matrices, optimizer=optim.Muon), last=4)


class Wrapping(optim.Optimizer):
    """Steps another optimizer over the same param groups, as Lookahead and SAM do, and counts in itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.base = optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.base.param_groups = self.param_groups
        self.steps = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps[0] += 1
        if self.steps[0] % 2:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad = param.grad * 1.5
        self.base.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_an_optimizer_that_wraps_another_trains_alike(hook: str) -> None:
    train(Twins(hook, optimizer=Wrapping), last=6)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS_BOTH_WAYS
def test_an_optimizer_counts_in_its_param_groups(twins_by: type[Twins], hook: str, partition: str) -> None:
    counting = type("Counting", (Counting,), {"elementwise": True})
    twins = twins_by(hook, optimizer=counting, partition=partition)
    train(twins, last=6)
    assert [group["k"] for group in twins.optimizer.param_groups] == [6]


# ---------------------------------------------------------------------- hooks that reduce by themselves


def bfloat16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook, which DDP refuses on gloo by its name."""
    return bf16_compress_hook(state, bucket)


def wrapped(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Puts another buffer into the bucket before it calls the inner hook."""
    return fp16_compress_wrapper(allreduce_hook)(state, bucket)


def in_place(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As allreduce_hook, by another name."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def doubled(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Returns another tensor than that of the bucket."""
    work = dist.all_reduce(bucket.buffer().clone(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 2)


def power_sgd_state() -> object:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)


INNER: dict[str, dict[str, Any]] = {
    "fp16": {"inner": fp16_compress_hook},
    "bf16": {"inner": bfloat16},
    "wrapper": {"inner": wrapped},
    "in place": {"inner": in_place},
    "doubled": {"inner": doubled},
    "PowerSGD": {"inner": powerSGD_hook.powerSGD_hook, "inner_state": power_sgd_state, "exact": False},
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@BOTH_WAYS
@each_of("name", INNER, hook=HOOKS[1:], views=[True, False])
def test_inner_hooks_reduce_for_us_as_for_ddp(twins_by: type[Twins], hook: str, name: str, views: bool) -> None:
    # One bucket for PowerSGD: with several of them, its callbacks issue collectives in any order, and gloo aborts.
    ddp = {"gradient_as_bucket_view": views, **({"bucket_cap_mb": 25} if name == "PowerSGD" else {})}
    train(twins_by(hook, **INNER[name], ddp=ddp), last=8)
