"""Checkpoints: from any kind of optimizer to any other, at any world size; all of one, or nothing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import (
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    consolidate_torchs,
    cutting,
    set_gradients,
    twins,
)
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
PARTITIONS = ["whole", "split"]
CLASSES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW-fused": (optim.AdamW, {"fused": True}),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "ASGD": (optim.ASGD, {}),
}


def step_all(pairs: list[tuple[nn.Module, optim.Optimizer]], steps: range) -> None:
    for step in steps:
        for module, optimizer in pairs:
            set_gradients(module.parameters(), step)
            optimizer.step()


def everywhere(state_dict: dict[str, Any] | None, source: int) -> dict[str, Any]:
    """Bring a checkpoint to all ranks of the test, as a shared file would."""
    box = [state_dict]
    dist.broadcast_object_list(box, src=source)
    assert box[0] is not None
    return box[0]


@pytest.mark.by_default("4-AdamW-fused-whole-whole | 4-SGD-split-split | 4-ASGD-whole-whole")
@pytest.mark.ranks(4, backend=EVERYWHERE)
@pytest.mark.parametrize("saved_as", PARTITIONS)
@pytest.mark.parametrize("loaded_as", PARTITIONS)
@pytest.mark.parametrize("name", CLASSES)
def test_from_two_ranks_to_three(rank: int, saved_as: str, loaded_as: str, name: str) -> None:
    optimizer_class, settings = CLASSES[name]
    two, three = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    model, reference = twins()
    plain = optimizer_class(reference.parameters(), **settings)
    step_all([(reference, plain)], range(2))
    saved = None
    if rank < 2:
        first = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class, process_group=two, partition=cutting(saved_as), **settings
        )
        step_all([(model, first)], range(2))
        first.consolidate_state_dict(to=1)
        if rank == 1:
            saved = first.state_dict()
            assert_same_state(saved, plain.state_dict())
    saved = everywhere(saved, 1)
    if rank > 0:
        resumed = copy.deepcopy(reference)
        second = ZeroRedundancyOptimizer(
            resumed.parameters(),
            optimizer_class,
            process_group=three,
            partition=cutting(loaded_as),
            parameters_as_bucket_view=True,
            **settings,
        )
        second.load_state_dict(saved)
        step_all([(resumed, second), (reference, plain)], range(2, 4))
        assert_bitwise_equal(resumed, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_to_and_from_torchs_class_and_the_plain_optimizer(rank: int) -> None:
    model, reference = twins()
    theirs = TorchZero(model.parameters(), optim.Adam, lr=0.01)
    plain = optim.Adam(reference.parameters(), lr=0.01)
    step_all([(model, theirs), (reference, plain)], range(2))
    consolidate_torchs(theirs, to=0)
    saved = everywhere(theirs.state_dict() if rank == 0 else None, 0)
    ours = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.5)
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 0.01, "loaded hyperparameters win"
    step_all([(model, ours), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming from torch's class")
    ours.consolidate_state_dict(to=0)
    saved = everywhere(ours.state_dict() if rank == 0 else None, 0)
    again = TorchZero(model.parameters(), optim.Adam, lr=0.01)
    again.load_state_dict(copy.deepcopy(saved))
    plain_again = optim.Adam(reference.parameters())
    plain_again.load_state_dict(saved)
    step_all([(model, again), (reference, plain_again)], range(4, 6))
    assert_bitwise_equal(model, reference, "after resuming with torch's class")


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 24, 3))


def rebind(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "memory format": lambda model: model.to(memory_format=torch.channels_last),
    "dtype": lambda model: model.double(),
    "storage": rebind,
    "frozen": lambda model: next(model.parameters()).requires_grad_(False),
}


@pytest.mark.by_default(
    "2-memory format-params-whole | 2-dtype-views-split | 2-storage-params-whole | 2-frozen-views-split"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_model_that_is_converted_between_building_and_loading(
    partition: str, as_bucket_view: bool, name: str
) -> None:
    model, reference = twins(convolutions)
    plain = optim.Adam(reference.parameters())
    step_all([(reference, plain)], range(2))
    saved = copy.deepcopy(plain.state_dict())
    model.load_state_dict(reference.state_dict())
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    for module in (model, reference):
        CONVERSIONS[name](module)
    if as_bucket_view and name in ("memory format", "dtype"):
        with pytest.raises(RuntimeError, match="is a view of a flat buffer"):
            sharded.load_state_dict(saved)
        return
    plain = optim.Adam(reference.parameters())
    for optimizer in (sharded, plain):
        optimizer.load_state_dict(saved)
    step_all([(model, sharded), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_state_of_frozen_tensors_is_loaded_and_kept(rank: int, partition: str) -> None:
    model, reference = twins()
    plain = optim.Adam(reference.parameters())
    step_all([(reference, plain)], range(2))
    model.load_state_dict(reference.state_dict())
    for module in (model, reference):
        module[0].requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    sharded.load_state_dict(plain.state_dict())
    step_all([(model, sharded), (reference, plain)], range(2, 3))
    if rank == 0:
        # Nobody else's concern, though the plan is made anew here.
        rebind(model)
    step_all([(model, sharded), (reference, plain)], range(3, 4))
    for module in (model, reference):
        module[0].requires_grad_(True)
    step_all([(model, sharded), (reference, plain)], range(4, 6))
    assert_bitwise_equal(model, reference, "after unfreezing")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_model_that_is_converted_on_one_rank_before_loading(rank: int) -> None:
    model, reference = twins(convolutions)
    plain = optim.Adam(reference.parameters())
    step_all([(reference, plain)], range(1))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting("split"))
    if rank == 1:
        model.double()
    with pytest.raises(DisagreementError, match=r"load_state_dict.*dtype torch.float32 here, torch.float64 there"):
        sharded.load_state_dict(plain.state_dict())
    model.float().load_state_dict(reference.state_dict())
    sharded.load_state_dict(plain.state_dict())
    step_all([(model, sharded), (reference, plain)], range(1, 3))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_argument_is_left_alone_and_nothing_of_it_is_kept(partition: str) -> None:
    model, reference = twins()
    plain = optim.Adam(reference.parameters(), lr=torch.tensor(0.01), foreach=False)
    step_all([(reference, plain)], range(2))
    given = copy.deepcopy(plain.state_dict())
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    sharded.load_state_dict(given)
    step_all([(model, sharded)], range(2, 4))
    sharded.param_groups[0]["lr"].fill_(1.0)
    assert_same_state(given, plain.state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_hooks_see_the_state_and_may_change_it(rank: int) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    step_all([(model, sharded)], range(1))
    seen: list[int] = []
    sharded.register_state_dict_post_hook(lambda optimizer, state_dict: seen.append(len(state_dict["state"])))
    sharded.register_state_dict_post_hook(lambda optimizer, state_dict: {**state_dict, "epoch": 3})
    sharded.consolidate_state_dict(to=0)
    saved = everywhere(sharded.state_dict() if rank == 0 else None, 0)
    assert saved["epoch"] == 3
    assert seen == ([9] if rank == 0 else [])
    epochs: list[int] = []
    sharded.register_load_state_dict_pre_hook(lambda optimizer, state_dict: epochs.append(state_dict.pop("epoch")))
    sharded.register_load_state_dict_post_hook(lambda optimizer: epochs.append(-1))
    sharded.load_state_dict(saved)
    assert epochs == [3, -1]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_checkpoint_survives_a_file_that_is_read_without_pickle(rank: int) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.named_parameters(), optim.AdamW, lr=0.1)
    plain = optim.AdamW(reference.named_parameters(), lr=0.1)
    step_all([(model, sharded), (reference, plain)], range(2))
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        file = io.BytesIO()
        torch.save(sharded.state_dict(), file)
        file.seek(0)
        assert_same_state(torch.load(file, weights_only=True), plain.state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_state_in_channels_last(rank: int, partition: str) -> None:
    def convolutions() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3)).to(memory_format=torch.channels_last)

    model, reference = twins(convolutions)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    plain = optim.Adam(reference.parameters())
    step_all([(model, sharded), (reference, plain)], range(2))
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())
        assert (
            sharded.state_dict()["state"][0]["exp_avg"].stride() == plain.state_dict()["state"][0]["exp_avg"].stride()
        )
    # A checkpoint may come from a model in another memory format.
    saved = copy.deepcopy(plain.state_dict())
    for entries in saved["state"].values():
        entries["exp_avg"] = entries["exp_avg"].contiguous()
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    resumed.load_state_dict(saved)
    step_all([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_tensors_that_were_never_stepped(rank: int) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    plain = optim.Adam(reference.parameters())
    for module, optimizer in ((model, sharded), (reference, plain)):
        set_gradients(module.parameters(), 0, none={3})
        optimizer.step()
    fresh = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    with pytest.raises(ValueError, match=r"state_dict\['state'\]\[3\] = \{\}"):
        fresh.load_state_dict(plain.state_dict())
    sharded.consolidate_state_dict(to=0)
    saved = everywhere(sharded.state_dict() if rank == 0 else None, 0)
    assert saved["state"][3] == {}
    plain.load_state_dict(saved)
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    resumed.load_state_dict(saved)
    step_all([(model, resumed), (reference, plain)], range(1, 3))
    assert_bitwise_equal(model, reference, "after resuming")


SWITCHED_OFF: dict[str, tuple[type[optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "momentum of SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.0}),
    "momentum of RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}, {"momentum": 0, "centered": False}),
    "amsgrad": (optim.Adam, {"amsgrad": True}, {"amsgrad": False}),
}


@pytest.mark.by_default("2-momentum of SGD-whole | 2-momentum of RMSprop-split | 2-amsgrad-whole")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_state_that_outlives_its_setting(rank: int, partition: str, name: str) -> None:
    optimizer_class, settings, off = SWITCHED_OFF[name]
    on = {key: settings[key] for key in off}
    model, reference = twins()
    plain = optimizer_class(reference.parameters(), **settings)
    step_all([(reference, plain)], range(2))
    model.load_state_dict(reference.state_dict())
    plain.param_groups[0].update(off)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.1, partition=cutting(partition))
    sharded.load_state_dict(plain.state_dict())
    step_all([(model, sharded), (reference, plain)], range(2, 4))
    plain.param_groups[0].update(on)
    sharded.param_groups[0].update(on)
    step_all([(model, sharded), (reference, plain)], range(4, 6))
    assert_bitwise_equal(model, reference, "after switching off and on again")
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())
    key = {"amsgrad": "max_exp_avg_sq"}.get(name, "momentum_buffer")
    bad = copy.deepcopy(plain.state_dict())
    bad["param_groups"][0].update(off)
    bad["state"][2][key] = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"'{key}' has shape \(3,\), expected \(64,\)"):
        sharded.load_state_dict(bad)


class RefusesTheProbe(optim.Adam):
    """Works on the model's tensors only: those of two elements fail in a way that no optimizer of torch's does."""

    elementwise = True
    failure: type[Exception] = Exception

    def step(self, closure: Any = None) -> Any:
        if any(param.numel() == 2 for group in self.param_groups for param in group["params"]):
            raise self.failure("tiny")
        return super().step(closure)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("failure", [AssertionError, IndexError, NotImplementedError, OSError])
def test_a_class_that_works_on_large_tensors_only(rank: int, failure: type[Exception]) -> None:
    stubborn = type("Stubborn", (RefusesTheProbe,), {"failure": failure})
    model, reference = twins()
    plain = stubborn(reference.parameters())
    sharded = ZeroRedundancyOptimizer(model.parameters(), stubborn)
    step_all([(model, sharded), (reference, plain)], range(2))
    resumed = ZeroRedundancyOptimizer(model.parameters(), stubborn)
    resumed.load_state_dict(plain.state_dict())
    step_all([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


class NestedState(optim.SGD):
    """Keeps tensors inside lists and dicts, and numbers, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("factors", [torch.zeros(2), {"row": torch.zeros(3, 2)}])
                    state["factors"][1]["row"] += 1
                    state["calls"] = state.get("calls", 0) + 1
        return super().step(closure)


class UnmovableState(optim.SGD):
    """Keeps an object that cannot travel without pickle."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["object"] = object()
        return super().step(closure)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_nested_state_travels_and_unmovable_state_is_refused_by_name(rank: int) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.named_parameters(), NestedState, lr=0.1)
    plain = NestedState(reference.named_parameters(), lr=0.1)
    step_all([(model, sharded), (reference, plain)], range(2))
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        ours, theirs = sharded.state_dict()["state"], plain.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[i]["factors"][1]["row"], theirs[i]["factors"][1]["row"].cpu()) for i in theirs)
        assert all(ours[i]["calls"] == 2 for i in theirs)
    stubborn = ZeroRedundancyOptimizer(model.named_parameters(), UnmovableState, lr=0.1)
    for act in (lambda: step_all([(model, stubborn)], range(1)), stubborn.consolidate_state_dict):
        with pytest.raises(ValueError, match=r"'object' of '.*' is a object, which cannot be moved without pickle"):
            act()


def pop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(state_dict: dict[str, Any]) -> None:
        holder: Any = state_dict
        for key in path[:-1]:
            holder = holder[key]
        holder.pop(path[-1])

    return change


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(state_dict: dict[str, Any]) -> None:
        holder: Any = state_dict
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value

    return change


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no state at all": (pop("state"), "expects a dict"),
    "a tensor's state missing": (pop("state", 2), "parameter 2 'param.2': missing entry"),
    "an entry missing": (pop("state", 2, "exp_avg"), "parameter 2 'param.2': missing entry 'exp_avg'"),
    "state of an unknown parameter": (put({}, "state", 77), "extra entry: state for parameter 77"),
    "an unknown entry": (put(torch.zeros(3), "state", 2, "foo"), "extra entry 'foo'"),
    "another shape": (put(torch.zeros(3), "state", 2, "exp_avg"), r"'exp_avg' has shape \(3,\), expected \(64,\)"),
    "a number for a tensor": (put(torch.tensor(1.0), "state", 2, "exp_avg"), r"shape \(\), expected \(64,\)"),
    "text for a tensor": (put("x", "state", 2, "exp_avg"), "is a str, expected a tensor"),
    "a tensor for a number": (put(torch.zeros(5), "state", 2, "step"), "expected a single number"),
    "another layout": (put(torch.eye(64, 40).to_sparse(), "state", 0, "exp_avg"), "sparse_coo tensor"),
    "emptied by torch's class": (put(None, "state", 1), "its state is None"),
    "a parameter missing": (pop("param_groups", 0, "params", 8), "doesn't match the size"),
    "a group missing": (pop("param_groups", 0), "different number of parameter groups"),
}


@pytest.mark.by_default(
    "2-no state at all-whole | 2-a tensor's state missing-split | 2-an entry missing-whole | "
    "2-state of an unknown parameter-split | 2-an unknown entry-whole | 2-another shape-split | "
    "2-a number for a tensor-whole | 2-text for a tensor-split | 2-a tensor for a number-whole | "
    "2-another layout-split | 2-emptied by torch's class-whole | 2-a parameter missing-split | "
    "2-a group missing-whole"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", ["whole", "split"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_changes_nothing(rank: int, partition: str, name: str) -> None:
    damage, words = DAMAGE[name]
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    plain = optim.Adam(reference.parameters())
    step_all([(model, sharded), (reference, plain)], range(2))
    good, bad = copy.deepcopy(plain.state_dict()), copy.deepcopy(plain.state_dict())
    damage(bad)
    with pytest.raises((TypeError, ValueError), match=words):
        sharded.load_state_dict(bad)
    with pytest.raises((TypeError, ValueError), match=f"rank 1: .*{words}"):
        sharded.load_state_dict(bad if rank == 1 else good)
    step_all([(model, sharded), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after the refused checkpoints")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_different_checkpoints_on_different_ranks(rank: int) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    plain = optim.Adam(reference.parameters())
    # As if rank 1 had read the file of a later step.
    step_all([(reference, plain)], range(1 + rank))
    with pytest.raises(DisagreementError, match="different checkpoints"):
        sharded.load_state_dict(plain.state_dict())
