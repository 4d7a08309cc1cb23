"""Hooks under faults: every rank gets a clear error within the timeout, none hangs, and a slow rank changes nothing."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import copy
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import Layers
from support.ddp_training import (
    HOOKS,
    MANY_BUCKETS,
    SHORT,
    Twins,
    register,
    short_group,
    steps_in_backward,
    train_twice_more,
)
from support.training import assert_bitwise_equal, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import Coordinator, DisagreementError, PeerLostError
from zeroshard_integrations.ddp import reduce_to_owner_hook, register_reduce_to_owner
from zeroshard_testing import Faults

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)


@pytest.mark.by_default("3-0")
@pytest.mark.ranks(3, 4, backend="gloo", timeout=120)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 4))])
def test_random_delays_of_one_rank_change_nothing(seed: int, faults: Faults) -> None:
    # 50 iterations under each of 4 seeds: 200 runs of a whole iteration, each message of one rank late by chance.
    twins = Twins("hook_with_zero_step_interleaved")
    for number in range(50):
        slow = (seed + number) % dist.get_world_size()
        for operation in ("send", "recv"):
            faults.delay(slow, f"{operation}#{1 + (7 * number + seed) % 9}", (0.0, 0.01), seed=number)
        twins.iterate(number)
    twins.check("after 50 iterations")


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_a_rank_that_dies_in_backward(rank: int, hook: str, faults: Faults) -> None:
    twins = Twins(hook, process_group=short_group())
    twins.iterate(0)
    twins.iterate(1)
    faults.kill(1, "send#2")
    twins.optimizer.zero_grad()
    with pytest.raises(PeerLostError, match=rf"rank {rank} lost rank"):
        train_twice_more(twins)


# What was interrupted leaves messages without another end.
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
@EVERY_HOOK
def test_no_rank_waits_for_one_that_is_interrupted_in_backward(rank: int, hook: str, faults: Faults) -> None:
    twins = Twins(hook, process_group=dist.new_group(timeout=timedelta(minutes=10)))
    twins.iterate(0)
    twins.iterate(1)
    faults.raise_(0, "send", KeyboardInterrupt())
    twins.optimizer.zero_grad()
    with pytest.raises(PeerLostError if rank else KeyboardInterrupt):
        twins.backward(twins.ddp, 2)
    with pytest.raises(RuntimeError, match="load a checkpoint and build the optimizer again, on a new process group"):
        twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_backward_that_raises_on_one_rank(rank: int, hook: str) -> None:
    twins = Twins(hook, model=Layers, process_group=short_group(), ddp={"bucket_cap_mb": 0.001})
    twins.iterate(0)
    twins.iterate(1)
    twins.ddp.module.fails = True
    twins.optimizer.zero_grad()
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            twins.backward(twins.ddp, 2)
        # What is under way cannot be called back: nothing of it is stepped, and DDP itself refuses to go on.
        with pytest.raises(RuntimeError, match="the last backward did not come to its end on rank 1"):
            twins.optimizer.step()
        twins.ddp.module.fails = False
        twins.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            twins.backward(twins.ddp, 3)
    else:
        with pytest.raises(PeerLostError, match=r"rank 0 lost rank 1 during backward\(\)"):
            twins.backward(twins.ddp, 2)
        with pytest.raises(PeerLostError, match="build the optimizer again"):
            twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_a_rank_that_skips_step(rank: int) -> None:
    twins = Twins("reduce_to_owner_hook", process_group=short_group())
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    if rank == 0:
        with pytest.raises(
            PeerLostError, match=r"^rank 1 did not call step\(\) within|^rank 0 lost rank 1 during step\(\)"
        ):
            twins.optimizer.step()
    else:
        twins.optimizer.zero_grad()
        with pytest.raises(PeerLostError, match=r"rank 0 did not call backward\(\) within"):
            twins.backward(twins.ddp, 2)


@pytest.mark.by_default("3-killed")
@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("lost", ["killed", pytest.param("late", marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_lost_before_norms_are_exchanged(
    rank: int, lost: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins("reduce_to_owner_hook", process_group=short_group())
    twins.iterate(0)
    twins.iterate(1)

    combine = Coordinator.combine_disjoint

    def combine_late(*arguments: Any) -> torch.Tensor:
        if lost == "killed":
            faults.kill(1, "send#1")
            dist.isend(torch.zeros(1), 0)
        else:
            time.sleep(2 * SHORT.total_seconds())
        return combine(*arguments)

    if rank == 1:
        monkeypatch.setattr(Coordinator, "combine_disjoint", combine_late)
    twins.optimizer.zero_grad()
    with pytest.raises(PeerLostError, match=r"the end of backward\(\)"):
        twins.backward(twins.ddp, 2)
    with pytest.raises(PeerLostError, match="build the optimizer again"):
        twins.optimizer.step()


@pytest.mark.by_default(
    "3-lr-reduce_to_owner_hook | 3-frozen-hook_with_zero_step | 3-accumulated-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("problem", ["lr", "frozen", "accumulated"])
def test_ranks_that_differ(rank: int, hook: str, problem: str) -> None:
    if problem == "accumulated" and hook != "reduce_to_owner_hook":
        pytest.skip("a hook that steps during backward has reduced everything by then")
    twins = Twins(hook)
    twins.iterate(0)
    twins.iterate(1)
    twins.optimizer.zero_grad()
    if problem == "lr" and rank == 1:
        twins.optimizer.param_groups[0]["lr"] = 0.5
    if problem == "frozen" and rank == 1:
        extra = next(twins.ddp.parameters())
        extra.data = extra.data.clone()
        twins.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))

    def iterate() -> None:
        twins.backward(twins.ddp, 2)
        if problem == "accumulated" and rank == 1:
            with twins.ddp.no_sync():
                twins.backward(twins.ddp, 3)
        twins.optimizer.step()

    expected = {
        "lr": (DisagreementError, "lr of group 0 is '0.01' on rank 0 and '0.5' on rank 1"),
        "frozen": (RuntimeError, "the members of param_groups are not those"),
        "accumulated": (RuntimeError, "has not been reduced"),
    }[problem]
    with pytest.raises(expected[0], match=expected[1]):
        iterate()
    if problem == "lr":
        # Replicas are equal, and training can go on.
        twins.optimizer.param_groups[0]["lr"] = 0.01
        twins.optimizer.zero_grad()
        iterate()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_models_and_hooks_that_do_not_fit(rank: int, hook: str) -> None:
    model = small_model()
    ddp = DistributedDataParallel(model)
    without_overlap = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    params = list(model.parameters())[:-1]
    partly = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, overlap_with_ddp=steps_in_backward(hook))
    if hook == "reduce_to_owner_hook":
        # Without the model, this shows in its first backward.
        ddp.register_comm_hook(partly, reduce_to_owner_hook)
        with pytest.raises(ValueError, match="that the optimizer does not have"):
            ddp(torch.ones(2, 40)).sum().backward()
        return
    with pytest.raises(ValueError, match="built with overlap_with_ddp=True"):
        register(hook, ddp, without_overlap)
    with pytest.raises(ValueError, match=r"reduces '4\.weight', which the optimizer does not have"):
        register(hook, ddp, partly)
    alone = [dist.new_group([0]), dist.new_group([1])]
    other = ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, process_group=alone[rank], lr=0.1, overlap_with_ddp=True
    )
    with pytest.raises(ValueError, match=r"works on the ranks \[0, 1\], and the optimizer works on"):
        register(hook, ddp, other)


@pytest.mark.ranks(2, backend="gloo")
def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, lr=0.1)
    ddp = DistributedDataParallel(model)
    register("reduce_to_owner_hook", ddp, optimizer)
    with pytest.raises(ValueError, match=r"'0\.weight' has sparse gradients"):
        ddp(torch.zeros(2, dtype=torch.long)).sum().backward()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_different_bucket_sizes(rank: int, hook: str) -> None:
    model = small_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS, find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=steps_in_backward(hook))
    if rank == 1:
        # Half of the parameters: DDP itself would have noticed; a framework of one's own might not.
        ddp = DistributedDataParallel(model, bucket_cap_mb=100, find_unused_parameters=True)
    else:
        DistributedDataParallel(model, bucket_cap_mb=100, find_unused_parameters=True)
    register(hook, ddp, optimizer)
    with pytest.raises(DisagreementError, match="bucket 0 is"):
        ddp(torch.ones(2, 40)).sum().backward()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_no_thread_is_left(hook: str) -> None:
    before = threading.active_count()
    twins = Twins(hook)
    for number in range(3):
        twins.iterate(number)
        # Not between iterations either.
        assert threading.active_count() == before


# An error breaks off the backward on every rank: what it had announced is never sent.
@pytest.mark.by_default(
    "2-True-reduce_to_owner_hook | 2-True-hook_with_zero_step_interleaved | 2-False-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
@EVERY_HOOK
@pytest.mark.parametrize("together", [True, False])
def test_two_models_with_one_optimizer(hook: str, together: bool) -> None:
    models = [small_model(), small_model()]
    params = [param for model in models for param in model.parameters()]
    optimizer = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, overlap_with_ddp=steps_in_backward(hook))
    ddps = [DistributedDataParallel(model) for model in models]
    for ddp in ddps:
        register(hook, ddp, optimizer)
    first = ddps[0](torch.ones(2, 40)).sum()
    if not together:
        first.backward()
        optimizer.zero_grad()
    last = ddps[1](torch.ones(2, 40)).sum() + (first if together else 0.0)
    with pytest.raises((RuntimeError, ValueError), match="two models"):
        last.backward()


@pytest.mark.ranks(2, backend="gloo")
def test_local_gradients_before_the_first_reduction() -> None:
    model = small_model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    register_reduce_to_owner(ddp, optimizer)
    with ddp.no_sync():
        ddp(torch.ones(2, 40)).sum().backward()
    with pytest.raises(RuntimeError, match="has not been reduced"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="has not been reduced"):
        optimizer.step()


# An error breaks off the backward on every rank: what it had announced is never sent.
@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
def test_hooks_that_would_come_too_late_and_results_of_the_wrong_size() -> None:
    def short(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer()[:1])
        return done

    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=True)
    with pytest.raises(ValueError, match="a step pre-hook would be called after the step"):
        optimizer.register_step_pre_hook(lambda *_: None)
    ddp = DistributedDataParallel(model)
    register("hook_with_zero_step", ddp, optimizer, short)
    with pytest.raises(ValueError, match="has returned 1 elements for a bucket of"):
        ddp(torch.ones(2, 40)).sum().backward()


class FailingBehind(torch.autograd.Function):
    """Raises behind all gradients of parameters, on one rank."""

    raises = False

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if FailingBehind.raises:
            raise ZeroDivisionError("in backward")
        return gradient


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("clips", [False, True])
def test_an_exception_behind_the_last_bucket_is_told_to_all(
    rank: int, clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins("reduce_to_owner_hook")
    twins.iterate(0)
    twins.optimizer.zero_grad()
    monkeypatch.setattr(FailingBehind, "raises", rank == 0)
    inputs = torch.ones(8, 40, dtype=torch.float64, requires_grad=True)
    loss = twins.ddp(FailingBehind.apply(inputs)).sum()
    if rank == 0:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        twins.optimizer.zero_grad()
    else:
        loss.backward()
    with pytest.raises(RuntimeError, match="the last backward did not come to its end on rank 0"):
        twins.optimizer.clip_grad_norm_(1.0) if clips else twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_another_call_in_place_of_the_end_of_a_backward(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins("reduce_to_owner_hook")
    twins.iterate(0)
    twins.optimizer.zero_grad()
    monkeypatch.setattr(FailingBehind, "raises", rank == 0)
    inputs = torch.ones(8, 40, dtype=torch.float64, requires_grad=True)
    loss = twins.ddp(FailingBehind.apply(inputs)).sum()
    if rank == 0:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    # gloo would abort both processes if it were given the words of the one for those of the other.
    with pytest.raises(DisagreementError, match=r"the end of backward\(\)"):
        twins.optimizer.consolidate_state_dict() if rank == 0 else loss.backward()


@pytest.mark.by_default("2-reduce_to_owner_hook")
@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", [HOOKS[0], *(pytest.param(hook, marks=pytest.mark.exhaustive) for hook in HOOKS[1:])])
def test_two_models_in_one_backward_have_messages_of_their_own(rank: int, hook: str) -> None:
    # Layers of one size, and more of them than receives are posted for at a time.
    def large() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(5)))

    torch.manual_seed(0)
    made = [large(), large()]
    plain = [DistributedDataParallel(copy.deepcopy(model)) for model in made]
    sharded = [DistributedDataParallel(model) for model in made]
    optimizers = []
    for ddp in sharded:
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=steps_in_backward(hook)
        )
        register(hook, ddp, optimizer)
        optimizers.append(optimizer)
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
