"""Frameworks wrap an optimizer: all that it does works through a wrapper, and whatever changes, changes for both.

The wrappers are stand-ins, see ``stand_ins.py``.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import each_of
from support.stand_ins import WRAPPERS, CopyingWrapper, DelegatingWrapper, ForwardingWrapper, ScheduleFree
from support.training import assert_bitwise_equal, assert_same_state, set_gradients, small_model, twin_optimizers, twins
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from zeroshard import StepMode, ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import hook_with_zero_step, reduce_to_owner_hook
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

Use = Callable[[Any, "Training"], None]


class Training:
    """A model that a sharded optimizer trains, and its twin with the plain one."""

    def __init__(self) -> None:
        self.model, self.twin = twins()
        self.sharded = ZeroRedundancyOptimizer(list(self.model.parameters())[:6], optim.Adam, lr=0.1)
        self.plain = optim.Adam(list(self.twin.parameters())[:6], lr=0.1)
        self.seed = 0

    def step(self, *optimizers: Any) -> None:
        """A step of the twin, and one with the same gradients by each of these."""
        for optimizer in optimizers:
            self.seed += 1
            set_gradients(self.model.parameters(), self.seed)
            set_gradients(self.twin.parameters(), self.seed)
            optimizer.step()
            self.plain.step()
            assert_bitwise_equal(self.model, self.twin, f"after step {self.seed}")


def add_a_group(wrapper: Any, training: Training) -> None:
    wrapper.add_param_group({"params": list(training.model.parameters())[6:], "lr": 0.2})
    training.plain.add_param_group({"params": list(training.twin.parameters())[6:], "lr": 0.2})


def set_the_groups(wrapper: Any, training: Training) -> None:
    for optimizer in (wrapper, training.plain):
        optimizer.param_groups = [{**group, "lr": 0.3} for group in optimizer.param_groups]


def set_the_state(wrapper: Any, training: Training) -> None:
    wrapper.state = {}
    training.plain.state.clear()


def consolidate(wrapper: Any, training: Training) -> None:
    wrapper.consolidate_state_dict()
    for optimizer in (wrapper, training.sharded) if training.sharded.rank == 0 else ():
        assert_same_state(optimizer.state_dict(), training.plain.state_dict())


def load(wrapper: Any, training: Training) -> None:
    other = Training()
    other.step(other.sharded)
    wrapper.load_state_dict(other.plain.state_dict())
    training.plain.load_state_dict(other.plain.state_dict())


def clip(wrapper: Any, training: Training) -> None:
    set_gradients(training.model.parameters(), 100)
    set_gradients(training.twin.parameters(), 100)
    norm = wrapper.clip_grad_norm_(0.5)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(list(training.twin.parameters())[:6], 0.5))
    for optimizer in (wrapper, training.plain):
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.grad is None for param in list(training.model.parameters())[:6])


def hook_steps(wrapper: Any, training: Training) -> None:
    calls: list[str] = []
    before = wrapper.register_step_pre_hook(lambda *_: calls.append("before"))
    after = wrapper.register_step_post_hook(lambda *_: calls.append("after"))
    training.step(wrapper, training.sharded)
    assert calls == ["before", "after"] * 2
    before.remove()
    after.remove()


def hook_state_dicts(wrapper: Any, training: Training) -> None:
    calls: list[str] = []
    handles = [
        wrapper.register_state_dict_pre_hook(lambda *_: calls.append("save")),
        wrapper.register_state_dict_post_hook(lambda *_: calls.append("saved")),
        wrapper.register_load_state_dict_pre_hook(lambda *_: calls.append("load")),
        wrapper.register_load_state_dict_post_hook(lambda *_: calls.append("loaded")),
    ]
    training.step(wrapper)
    for optimizer in (wrapper, training.sharded):
        calls.clear()
        optimizer.consolidate_state_dict()
        if training.sharded.rank == 0:
            optimizer.state_dict()
        optimizer.load_state_dict(training.plain.state_dict())
        assert calls == ["save", "saved"] * (training.sharded.rank == 0) + ["load", "loaded"]
    for handle in handles:
        handle.remove()


def look(wrapper: Any, training: Training) -> None:
    assert wrapper.plan is training.sharded.plan
    assert wrapper.optim is training.sharded.optim
    assert wrapper.traffic is training.sharded.traffic
    assert wrapper.buffers == training.sharded.buffers
    assert wrapper.join_device.type == "cpu"
    assert wrapper.join_process_group is training.sharded.process_group
    assert len(repr(wrapper)) > 0
    for name in ("train", "eval"):
        assert not hasattr(training.sharded, name)
        assert not hasattr(wrapper, name) or isinstance(wrapper, ForwardingWrapper)
        getattr(wrapper, name, list)()


USES: tuple[Use, ...] = (
    add_a_group,
    set_the_groups,
    set_the_state,
    consolidate,
    load,
    clip,
    hook_steps,
    hook_state_dicts,
    look,
)


@pytest.mark.ranks(3, backend="gloo")
@each_of("use", USES, kind=WRAPPERS)
def test_each_method_works_through_a_wrapper(kind: Any, use: Use) -> None:
    training = Training()
    training.step(training.sharded)
    wrapper = kind(training.sharded)
    training.step(wrapper)
    use(wrapper, training)
    # What it has changed is there for both of them, and for a wrapper that is made now.
    training.step(wrapper, training.sharded, kind(training.sharded), wrapper)
    assert wrapper.param_groups is training.sharded.param_groups
    wrapper.consolidate_state_dict()
    for optimizer in (wrapper, training.sharded) if training.sharded.rank == 0 else ():
        assert_same_state(optimizer.state_dict(), training.plain.state_dict())


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("use", [add_a_group, set_the_groups, load, consolidate])
def test_a_wrapper_may_be_all_that_is_left(use: Use) -> None:
    training = Training()
    wrapper: Any = CopyingWrapper(training.sharded)
    gone = weakref.ref(training.sharded)
    training.sharded = wrapper
    assert gone() is None
    training.step(wrapper)
    use(wrapper, training)
    training.step(wrapper)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_gradients_reach_their_owners_through_a_wrapper(kind: Any) -> None:
    model, twin = small_model(), small_model()
    ddp, plain_ddp = DistributedDataParallel(model), DistributedDataParallel(twin)
    optimizer, plain = twin_optimizers((ddp, plain_ddp), optim.Adam)
    wrapper = kind(optimizer)
    wrapper.follow_backward(StepMode.IN_STEP)
    assert wrapper.takes_buckets
    assert optimizer.takes_buckets
    ddp.register_comm_hook(wrapper, reduce_to_owner_hook)
    for seed, stepping in enumerate((wrapper, optimizer, wrapper)):
        for trained, stepped in ((ddp, stepping), (plain_ddp, plain)):
            stepped.zero_grad()
            torch.manual_seed(seed)
            trained(torch.randn(4, 40)).square().mean().backward()
        assert torch.equal(wrapper.clip_grad_norm_(1e6), nn.utils.clip_grad_norm_(plain_ddp.parameters(), 1e6))
        stepping.step()
        plain.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_hook_that_steps_may_be_made_with_a_wrapper_that_does_not_live(kind: Any) -> None:
    ddp = DistributedDataParallel(small_model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, kind(optimizer)))
    before = [param.clone() for param in ddp.parameters()]
    ddp(torch.ones(4, 40)).square().mean().backward()
    assert not any(map(torch.equal, before, ddp.parameters()))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", [CopyingWrapper, DelegatingWrapper])
def test_a_join_block_may_know_an_optimizer_by_a_wrapper(rank: int, kind: Any) -> None:
    ddp = DistributedDataParallel(small_model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
    wrapper = kind(optimizer)
    before = [param.clone() for param in ddp.parameters()]
    with Join([ddp, wrapper]):
        for number in range(2 + rank):
            wrapper.zero_grad()
            ddp(torch.ones(4, 40)).square().mean().backward()
            (wrapper, optimizer)[number % 2].step()
    assert not any(map(torch.equal, before, ddp.parameters()))
    assert_replicas_equal(ddp.parameters())


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_training_and_evaluation_are_entered_through_a_wrapper(kind: Any) -> None:
    model, twin = twins()
    sharded: Any = ZeroRedundancyOptimizer(model.parameters(), ScheduleFree)
    plain, wrapper = ScheduleFree(twin.parameters()), kind(sharded)
    for seed in range(3):
        for trained, optimizer in ((model, wrapper), (twin, plain)):
            optimizer.train()
            set_gradients(trained.parameters(), seed)
            optimizer.step()
    assert_bitwise_equal(model, twin, "in training")
    for optimizer in (wrapper, plain):
        optimizer.eval()
    assert_bitwise_equal(model, twin, "in evaluation")
    assert sharded.param_groups[0]["train_mode"] is False


@pytest.mark.ranks(2, backend="gloo")
def test_schedulers_may_be_made_with_a_wrapper() -> None:
    training = Training()
    wrapper: Any = CopyingWrapper(training.sharded)
    schedulers = [optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (wrapper, training.plain)]
    for _ in range(3):
        training.step(wrapper)
        for scheduler in schedulers:
            scheduler.step()
    assert training.sharded.param_groups[0]["lr"] == training.plain.param_groups[0]["lr"] == 0.1 / 8


@pytest.mark.ranks(2, backend="gloo")
def test_wrappers_and_all_they_wrap_are_freed_at_once() -> None:
    training = Training()
    wrapper: Any = CopyingWrapper(training.sharded)
    training.step(wrapper)
    seen = [weakref.ref(training.sharded), weakref.ref(wrapper), weakref.ref(wrapper._engine)]
    gc.collect()
    gc.disable()
    try:
        del training, wrapper
        assert [reference() for reference in seen] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.ranks(2, backend="gloo")
def test_torchs_class_knows_ours() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    training = Training()
    assert isinstance(training.sharded, TorchZero)
    assert isinstance(CopyingWrapper(training.sharded), TorchZero)
    assert not isinstance(training.plain, TorchZero)
    assert not issubclass(TorchZero, ZeroRedundancyOptimizer)


BUILD = """
import torch, torch.distributed as dist, zeroshard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
optimizer = zeroshard.ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1)
dist.destroy_process_group()
"""
IMPORT = """
import sys, warnings, zeroshard
assert 'torch.distributed.optim' not in sys.modules
warnings.resetwarnings()
warnings.simplefilter("error", UserWarning)
warnings.simplefilter("error", FutureWarning)
"""


def test_importing_and_building_one_neither_warns_nor_needs_torchs_class() -> None:
    cannot_be_imported = "sys.modules['torch.distributed.optim'] = None\n"
    subprocess.run([sys.executable, "-W", "error", "-c", IMPORT + cannot_be_imported + BUILD], check=True)
