"""``train()`` and ``eval()`` of the local optimizer: schedule-free optimizers give what they give in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.combinations import FLAG, each_of
from support.ddp_training import HOOKS, Twins
from support.stand_ins import ScheduleFree
from support.training import (
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    cutting,
    set_gradients,
    small_model,
    twins,
)
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal, raises_on

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


class ByData(ScheduleFree):
    """Writes to ``.data``, which autograd does not see."""

    @torch.no_grad()
    def move(self, group: dict[str, Any], weight: float) -> None:
        for param in group["params"]:
            if self.state[param]:
                param.data.lerp_(self.state[param]["z"], weight)


class OfItself(ByData):
    """Remembers in itself whether it is in training."""

    is_in_training = False

    def entered(self, training: bool) -> Iterable[dict[str, Any]]:
        is_new, self.is_in_training = training != self.is_in_training, training
        return self.param_groups if is_new else []

    def is_training(self) -> bool:
        return self.is_in_training


class SkipsEmptyGroups(ScheduleFree):
    """Writes nothing to a group that has no parameters, and asks another what is written there."""

    def entered(self, training: bool) -> Iterable[dict[str, Any]]:
        for group in self.param_groups:
            if group["params"] and group["train_mode"] != training:
                group["train_mode"] = training
                yield group


def real(name: str) -> Callable[[], type[optim.Optimizer]]:
    """Return what finds a class of the package schedulefree, declared elementwise, or skips the test."""

    def find() -> type[optim.Optimizer]:
        package: Any = pytest.importorskip("schedulefree")
        return type(name, (getattr(package, name),), {"elementwise": True})

    return find


CLASSES: dict[str, tuple[Callable[[], type[optim.Optimizer]], dict[str, Any]]] = {
    "stand-in": (lambda: ScheduleFree, {}),
    "by-data": (lambda: ByData, {}),
    "of-itself": (lambda: OfItself, {}),
    "AdamWScheduleFree": (real("AdamWScheduleFree"), {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 3}),
    "AdamWScheduleFree-loop": (real("AdamWScheduleFree"), {"lr": 0.01, "foreach": False}),
    "SGDScheduleFree": (real("SGDScheduleFree"), {"lr": 0.1, "weight_decay": 0.1}),
}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """One of a single small tensor, of which most ranks own nothing; and all others."""
    first, *others = reversed(list(model.parameters()))
    return [{"params": [first]}, {"params": others}]


@pytest.mark.ranks(3, backend=EVERYWHERE)
@each_of("name", CLASSES, partition=["whole", "split"], as_bucket_view=FLAG)
def test_schedule_free_optimizers_equal_one_process(name: str, partition: str, as_bucket_view: bool) -> None:
    kind, settings = CLASSES[name][0](), CLASSES[name][1]
    model, twin = twins()
    sharded: Any = ZeroRedundancyOptimizer(
        two_groups(model),
        kind,
        parameters_as_bucket_view=as_bucket_view,
        partition=cutting(partition),
        **settings,
    )
    plain: Any = kind(two_groups(twin), **settings)

    def iterate(seed: int) -> None:
        for trained, optimizer in ((model, sharded), (twin, plain)):
            optimizer.train()
            set_gradients(trained.parameters(), seed, none=[0] if seed == 0 else [])
            # As where gradients are accumulated.
            optimizer.train()
            optimizer.step()
        assert_bitwise_equal(model, twin, f"after step {seed}")

    for seed in range(4):
        iterate(seed)
        if seed % 2:
            before = [param.clone() for param in model.parameters()]
            for optimizer in (sharded, plain):
                optimizer.eval()
            assert_bitwise_equal(model, twin, f"in evaluation after step {seed}")
            assert not any(map(torch.equal, before, model.parameters()))
    sharded.consolidate_state_dict()
    if sharded.rank == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())
    saved = plain.state_dict()
    for optimizer in (sharded, plain):
        optimizer.load_state_dict(saved)
    iterate(10)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of(
    "name", ["stand-in", "by-data", "AdamWScheduleFree", "SGDScheduleFree"], hook=HOOKS, partition=["whole", "split"]
)
def test_schedule_free_optimizers_equal_one_process_with_a_hook(name: str, hook: str, partition: str) -> None:
    pair = Twins(hook, optimizer=CLASSES[name][0](), groups=two_groups, partition=partition)
    for seed in range(4):
        for _, optimizer in pair.sides:
            optimizer.train()  # type: ignore[attr-defined]
        pair.iterate(seed)
        pair.check(f"after step {seed}")
        for _, optimizer in pair.sides:
            optimizer.eval()  # type: ignore[attr-defined]
        pair.check(f"in evaluation after step {seed}")


def in_training(kind: type[optim.Optimizer] = ScheduleFree) -> tuple[nn.Module, Any]:
    model = small_model()
    optimizer: Any = ZeroRedundancyOptimizer(two_groups(model), kind)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Any) -> None:
    """Two steps: after one the average is the parameters themselves."""
    optimizer.train()
    for seed in range(2):
        set_gradients(model.parameters(), seed)
        optimizer.step()


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_groups_say_on_every_rank_what_the_owners_optimizer_has_written(rank: int) -> None:
    _, optimizer = in_training(SkipsEmptyGroups)
    for mode, method in ((True, optimizer.train), (False, optimizer.eval), (True, optimizer.train)):
        method()
        for groups in (optimizer.param_groups, optimizer.optim.param_groups):
            assert [group["train_mode"] for group in groups] == [mode, mode]
    for to in range(3):
        optimizer.consolidate_state_dict(to)
        if rank == to:
            assert [group["train_mode"] for group in optimizer.state_dict()["param_groups"]] == [True, True]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_parameters_that_were_frozen_since_they_have_state_are_exchanged_too() -> None:
    model, twin = twins()
    sharded: Any = ZeroRedundancyOptimizer(two_groups(model), ScheduleFree)
    plain = ScheduleFree(two_groups(twin))
    for trained, optimizer in ((model, sharded), (twin, plain)):
        train(trained, optimizer)
        optimizer.zero_grad()
        trained[0].requires_grad_(False)  # type: ignore[index]
        optimizer.eval()
    assert_bitwise_equal(model, twin, "in evaluation")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_hyperparameters_that_the_user_has_changed_reach_the_local_optimizer_first() -> None:
    model, twin = twins()
    sharded: Any = ZeroRedundancyOptimizer(two_groups(model), ScheduleFree)
    plain = ScheduleFree(two_groups(twin))
    for trained, optimizer in ((model, sharded), (twin, plain)):
        for seed in range(2):
            optimizer.train()
            set_gradients(trained.parameters(), seed)
            optimizer.step()
            optimizer.param_groups[1]["beta"] = 0.5 + seed / 4
            optimizer.eval()
    assert_bitwise_equal(model, twin, "in evaluation")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_what_changes_nothing_sends_no_parameters() -> None:
    model, optimizer = in_training()
    versions = [param._version for param in model.parameters()]
    broadcast = optimizer.traffic.of("broadcast")
    optimizer.train()
    assert [param._version for param in model.parameters()] == versions
    assert optimizer.traffic.of("broadcast") == broadcast
    optimizer.eval()
    # On every rank, so that autograd notices that a graph has saved the old values.
    assert all(param._version > version for param, version in zip(model.parameters(), versions, strict=True))


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_an_error_on_one_rank_is_one_on_every_rank_and_the_next_call_may_succeed(rank: int) -> None:
    model, optimizer = in_training()
    local = optimizer.optim
    if rank == 1:

        def fail(*_: Any) -> None:
            raise ZeroDivisionError("on rank 1")

        local.move = fail
    with raises_on(ZeroDivisionError, ranks=(0, 1), match="on rank 1"):
        optimizer.eval()
    assert_replicas_equal(model.parameters())
    vars(local).pop("move", None)
    optimizer.train()
    set_gradients(model.parameters(), 1)
    optimizer.step()
    assert_replicas_equal(model.parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_ranks_that_call_different_methods_are_told_so(rank: int) -> None:
    model, optimizer = in_training()
    with raises_on(DisagreementError, ranks=(0, 1), match=r"train\(\)|eval\(\)"):
        (optimizer.eval if rank == 0 else optimizer.train)()
    assert_replicas_equal(model.parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_changed_member_is_an_error_on_every_rank(rank: int) -> None:
    _, optimizer = in_training()
    if rank == 1:
        optimizer.param_groups[0]["params"] = []
    with raises_on(RuntimeError, ranks=(0, 1), match="members of param_groups"):
        optimizer.eval()


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_rank_that_has_run_out_of_data_cannot_take_part(rank: int) -> None:
    ddp = DistributedDataParallel(small_model())
    optimizer: Any = ZeroRedundancyOptimizer(ddp.parameters(), ScheduleFree)
    optimizer.train()
    with raises_on(RuntimeError, ranks=(0, 1), match=r"train\(\), eval\(\)"), Join([ddp, optimizer]):
        for _ in range(1 + rank):
            optimizer.zero_grad()
            ddp(torch.ones(4, 40)).square().mean().backward()
            optimizer.step()
        if rank == 1:
            optimizer.eval()


@pytest.mark.ranks(1, 2, backend=EVERYWHERE)
def test_an_optimizer_without_the_methods_does_not_pretend_to_have_them() -> None:
    optimizer = ZeroRedundancyOptimizer(small_model().parameters(), optim.AdamW)
    for name in ("train", "eval"):
        assert not hasattr(optimizer, name)
        with pytest.raises(AttributeError, match=f"AdamW.*{name}"):
            getattr(optimizer, name)
