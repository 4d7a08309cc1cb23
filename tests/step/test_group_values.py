"""What an optimizer class writes into param groups, of which some ranks own no tensor: step counts and the like."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.combinations import FLAG, each_of
from support.ddp_training import HOOKS, batch, register, steps_in_backward
from support.training import assert_bitwise_equal, cutting, set_gradients, small_model, train, twins
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import run_on_ranks

EVERY_PARTITION = pytest.mark.parametrize("partition", ["whole", "split", "level"])


class Counting(optim.Optimizer):
    """Counts steps in its groups, as optimizers of apex and Transformer Engine do, and skips groups without tensors."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            group["device_step"] = group.get("device_step", torch.zeros((), dtype=torch.int32)) + 1
            group["history"] = [*group.get("history", []), {"lr": group["lr"] / group["step"]}]
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["step"])


def group_each(module: nn.Module) -> list[dict[str, Any]]:
    """A group for each tensor, so that at two ranks and more each rank has groups of which it owns nothing."""
    return [{"params": [param]} for param in module.parameters()]


def without_members(groups: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


@pytest.mark.ranks(2, backend="gloo")
@each_of("hook", ["none", *HOOKS], partition=["whole", "split", "level"], as_bucket_view=FLAG)
def test_every_rank_has_the_values_of_a_plain_optimizer(
    rank: int, hook: str, partition: str, as_bucket_view: bool
) -> None:
    model, reference = (module.double() for module in twins())
    ddp, plain_ddp = DistributedDataParallel(model), DistributedDataParallel(reference)
    sharded = ZeroRedundancyOptimizer(
        group_each(model),
        Counting,
        partition=cutting(partition),
        overlap_with_ddp=steps_in_backward(hook),
        parameters_as_bucket_view=as_bucket_view,
    )
    plain = Counting(group_each(reference))
    if hook != "none":
        register(hook, ddp, sharded)
    for step in range(3):
        for wrapped, optimizer in ((ddp, sharded), (plain_ddp, plain)):
            optimizer.zero_grad()
            wrapped(batch(step)).square().mean().backward()
            optimizer.step()
            # A value of the loop's own is not taken for the class's.
            optimizer.param_groups[step]["lr"] = 0.05
        assert_bitwise_equal(model, reference, f"after step {step}")
        assert without_members(sharded.param_groups) == without_members(plain.param_groups)
    sharded.consolidate_state_dict(to=1)
    if rank == 1:
        assert sharded.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


@pytest.mark.ranks(3, backend="gloo")
@EVERY_PARTITION
def test_steps_are_counted_with_master_weights(partition: str) -> None:
    model = small_model().bfloat16()
    sharded = ZeroRedundancyOptimizer(group_each(model), Counting, partition=cutting(partition), master_weights=True)
    train(model, sharded, range(2))
    assert [group["step"] for group in sharded.param_groups] == [2] * len(sharded.param_groups)


def save(file: Path, partition: str) -> None:
    model = small_model()
    sharded = ZeroRedundancyOptimizer(group_each(model), Counting, partition=cutting(partition))
    train(model, sharded, range(3))
    sharded.consolidate_state_dict()
    if sharded.rank == 0:
        torch.save([model.state_dict(), sharded.state_dict()], file)


def resume(file: Path, partition: str, from_rank: int | None) -> list[dict[str, Any]]:
    """Go on from a file, beside the plain optimizer, which goes on from its own state."""
    model, reference = twins()
    plain = Counting(group_each(reference))
    train(reference, plain, range(3))
    sharded = ZeroRedundancyOptimizer(group_each(model), Counting, partition=cutting(partition))
    states = torch.load(file)
    model.load_state_dict(states[0])
    sharded.load_state_dict(states[1] if from_rank in (None, sharded.rank) else {}, from_rank=from_rank)
    loaded = without_members(sharded.param_groups)
    assert loaded == without_members(plain.param_groups)
    train(model, sharded, range(3, 5))
    train(reference, plain, range(3, 5))
    assert_bitwise_equal(model, reference, "after the load")
    # What each rank lists can be loaded there, too.
    sharded.load_state_dict(sharded.state_dict())
    assert without_members(sharded.param_groups) == without_members(plain.param_groups)
    return loaded


@EVERY_PARTITION
def test_a_file_is_loaded_at_any_number_of_ranks(tmp_path: Path, partition: str) -> None:
    run_on_ranks(save, 3, tmp_path / "file", partition)
    for world_size, from_rank in ((1, None), (2, 0), (4, None)):
        loaded = run_on_ranks(resume, world_size, tmp_path / "file", partition, from_rank)
        assert [group["step"] for group in loaded[-1]] == [3] * 9


@pytest.mark.ranks(3, backend="gloo")
def test_values_of_one_of_several_classes_are_saved_and_loaded(rank: int) -> None:
    (model, reference), (resumed, _) = twins(), twins()
    first, *others = group_each(reference)
    plain = [optim.AdamW([first]), Counting(others)]

    def built(module: nn.Module) -> ZeroRedundancyOptimizer:
        first, *others = group_each(module)
        return ZeroRedundancyOptimizer([{**first, "optimizer_class": optim.AdamW}, *others], Counting)

    def check(module: nn.Module, optimizer: ZeroRedundancyOptimizer, steps: range) -> None:
        for step in steps:
            train(module, optimizer, [step])
            set_gradients(reference.parameters(), step)
            for each in plain:
                each.step()
        assert_bitwise_equal(module, reference, f"after {steps}")
        assert without_members(optimizer.param_groups[1:]) == without_members(plain[1].param_groups)

    sharded, loaded = built(model), built(resumed)
    check(model, sharded, range(3))
    sharded.consolidate_state_dict(to=0)
    resumed.load_state_dict(model.state_dict())
    loaded.load_state_dict(sharded.state_dict() if rank == 0 else {}, from_rank=0)
    check(resumed, loaded, range(3, 5))


class CountingEverywhere(Counting):
    """Writes into all groups, with or without tensors; an object that cannot be sent among the values."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["size"] = sum(param.numel() for param in group["params"])
            group["odd"] = object


@pytest.mark.ranks(3, backend="gloo")
def test_what_a_class_writes_without_a_tensor_gives_way_to_the_owners_value() -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(group_each(model), CountingEverywhere)
    plain = CountingEverywhere(group_each(reference))
    for step in range(2):
        train(model, sharded, range(step, step + 1))
        train(reference, plain, range(step, step + 1))
        assert without_members(sharded.param_groups) == without_members(plain.param_groups)


@pytest.mark.ranks(3, backend="gloo")
def test_ranks_without_a_tensor_take_the_value_of_the_lowest_rank_that_has_one(rank: int) -> None:
    class OfRanks(Counting):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                if group["params"]:
                    group["written by"] = rank

    # Given a class that writes another value on each rank, of a group on rank 0 and one on ranks 2 and 1,
    first, *others = (nn.Parameter(torch.ones(4)) for _ in range(3))
    groups = [{"params": [first]}, {"params": others}]
    sharded = ZeroRedundancyOptimizer(groups, OfRanks, partition=lambda *_: [(0,), (2,), (1,)])
    # when it steps,
    set_gradients([first, *others], 0)
    sharded.step()
    # then rank 0 has the value of rank 1 for the second group, and owners have their own.
    assert [group["written by"] for group in sharded.param_groups] == [0, max(rank, 1)]


@pytest.mark.ranks(2, backend="gloo")
def test_a_failed_step_leaves_what_the_loop_has_written(rank: int) -> None:
    class Failing(Counting):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.param_groups[0]["lr"] == 1.0 and rank == 1:
                raise ZeroDivisionError("no")
            super().step()

    model = small_model()
    sharded = ZeroRedundancyOptimizer(group_each(model), Failing)
    train(model, sharded, range(1))
    for group in sharded.param_groups:
        group["lr"] = 1.0
    with pytest.raises(ZeroDivisionError, match="rank 1: no"):
        train(model, sharded, range(1))
    assert [group["lr"] for group in sharded.param_groups] == [1.0] * 9


@pytest.mark.ranks(2, backend="gloo")
def test_nothing_is_sent_where_each_rank_owns_a_tensor_of_each_group() -> None:
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), Counting)
    train(model, sharded, range(2))
    before = sharded.traffic.of("control").calls
    train(model, sharded, range(2, 3))
    counting = sharded.traffic.of("control").calls - before
    other = ZeroRedundancyOptimizer(copy.deepcopy(model).parameters(), optim.SGD)
    set_gradients(other.param_groups[0]["params"], 0)
    other.step()
    before = other.traffic.of("control").calls
    other.step()
    assert counting == other.traffic.of("control").calls - before


class First(optim.SGD):
    """Looks at the first tensor of each group, as bitsandbytes' and other classes do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            torch.empty(1, device=group["params"][0].device)
        super().step()


class FirstInConstructor(optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.devices = [group["params"][0].device for group in self.param_groups]


@pytest.mark.ranks(2, backend="gloo")
def test_a_class_that_needs_a_tensor_of_each_group_is_told_which_group_has_none(rank: int) -> None:
    model = small_model()
    told = r"param group \d is empty on rank \d: other ranks own its tensors"
    sharded = ZeroRedundancyOptimizer(group_each(model), First, lr=0.1)
    with pytest.raises(IndexError, match=told):
        train(model, sharded, range(1))
    with pytest.raises(IndexError, match=told):
        ZeroRedundancyOptimizer(group_each(model), FirstInConstructor, lr=0.1)
    members = list(model.parameters())
    added = ZeroRedundancyOptimizer(members[:4], FirstInConstructor, lr=0.1)
    with pytest.raises(IndexError, match=told):
        added.add_param_group({"params": members[4:5]})
    assert len(added.param_groups) == 1


@pytest.mark.ranks(2, backend="gloo")
def test_an_index_error_of_another_cause_stays_as_it_is() -> None:
    class Wrong(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            [][0]

    model = small_model()
    with pytest.raises(IndexError, match=r"^list index out of range$"):
        train(model, ZeroRedundancyOptimizer(model.parameters(), Wrong, lr=0.1), range(1))


class Warming(optim.SGD):
    """Removes a key of its groups, and lets a tensor in them grow."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            if group["params"]:
                group.pop("warm", None)
                group["seen"] = torch.cat([group.get("seen", torch.zeros(0)), torch.ones(1)])
                group["count"] = np.int64(len(group["seen"]))


@pytest.mark.ranks(2, backend="gloo")
def test_keys_may_go_tensors_may_grow_and_numbers_may_be_of_numpy() -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    groups = [{"params": [param], "warm": True} for param in params]
    sharded = ZeroRedundancyOptimizer(groups, Warming, lr=0.1, coupled="allow")
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        sharded.step()
    for group in sharded.param_groups:
        assert "warm" not in group
        assert (len(group["seen"]), group["count"]) == (3, 3)
