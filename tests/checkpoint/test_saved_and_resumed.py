"""Consolidated checkpoints: as the plain optimizer saves them, and training goes on from them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import FLAG, LAYOUTS, PARTITIONS, each_of
from support.consolidated import from_rank, saved_everywhere
from support.training import (
    DENSE_OPTIMIZERS,
    ELEMENTWISE_OPTIMIZERS,
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    consolidate_torchs,
    cutting,
    set_gradients,
    small_model,
    train_all,
    twin_optimizers,
    twins,
    two_groups,
)
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import lr_scheduler
from zeroshard import ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("name", DENSE_OPTIMIZERS, partition=["whole", "split"])
def test_every_optimizer_saves_what_the_plain_one_saves_and_goes_on_from_it(
    rank: int, name: str, partition: str
) -> None:
    if partition == "split" and name not in ELEMENTWISE_OPTIMIZERS:
        pytest.skip(f"{name} looks at whole tensors, which are not cut for it")
    optimizer_class, settings = DENSE_OPTIMIZERS[name]
    model, reference = twins()
    sharded, plain = twin_optimizers((model, reference), optimizer_class, partition, **settings)
    train_all([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded, to=1)
    assert_same_state(saved, plain.state_dict())
    fresh = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class, partition=cutting(partition), parameters_as_bucket_view=True, **settings
    )
    fresh.load_state_dict(saved)
    back = optimizer_class(reference.parameters(), **settings)
    back.load_state_dict(saved)
    train_all([(model, fresh), (reference, back)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")
    assert_same_state(saved_everywhere(fresh), back.state_dict())


@pytest.mark.ranks(3, backend=EVERYWHERE)
@PARTITIONS
def test_groups_of_named_parameters_are_resumed(partition: str) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(two_groups(model), optim.AdamW, partition=cutting(partition))
    plain = optim.AdamW(two_groups(reference))
    train_all([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded)
    assert_same_state(saved, plain.state_dict())
    resumed = ZeroRedundancyOptimizer(two_groups(model), optim.AdamW, partition=cutting(partition), lr=1.0)
    resumed.load_state_dict(saved)
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in resumed.param_groups] == [
        (g["lr"], g["weight_decay"], g["betas"]) for g in plain.param_groups
    ]
    train_all([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@LAYOUTS
def test_a_load_replaces_state_that_is_there_already(partition: str, as_bucket_view: bool) -> None:
    model, reference = twins()
    sharded, plain = twin_optimizers((model, reference), optim.Adam, partition, as_bucket_view)
    early = copy.deepcopy((reference.state_dict(), plain.state_dict()))
    train_all([(model, sharded), (reference, plain)], range(2))
    late = copy.deepcopy((reference.state_dict(), plain.state_dict()))
    for weights, state in (early, late, early):
        for module, optimizer in ((model, sharded), (reference, plain)):
            module.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
        train_all([(model, sharded), (reference, plain)], range(5, 7))
        assert_bitwise_equal(model, reference, "after going back and forth")
    assert_same_state(saved_everywhere(sharded), plain.state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("fused_before", FLAG, ids=["to fused", "from fused"])
def test_loaded_hyperparameters_win_and_steps_fit_them(fused_before: bool) -> None:
    model, reference = twins()
    before = optim.AdamW(reference.parameters(), lr=0.02, amsgrad=True, fused=fused_before)
    train_all([(reference, before)], range(2))
    model.load_state_dict(reference.state_dict())
    sharded, after = twin_optimizers((model, reference), optim.AdamW, lr=0.5, fused=not fused_before)
    for optimizer in (sharded, after):
        optimizer.load_state_dict(before.state_dict())
    assert {k: v for k, v in sharded.param_groups[0].items() if k != "params"} == {
        k: v for k, v in after.param_groups[0].items() if k != "params"
    }
    [on] = {entries["step"].device for entries in after.state.values()}
    for entries in sharded.state.values():
        assert (entries["step"].dtype, entries["step"].device) == (torch.float32, on)
        assert "max_exp_avg_sq" in entries
    train_all([(model, sharded), (reference, after)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


SCHEDULES: dict[str, Callable[[optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_go_on_after_a_load(name: str) -> None:
    schedule = SCHEDULES[name]
    model, reference = twins()

    def run(module: nn.Module, optimizer: optim.Optimizer, scheduler: lr_scheduler.LRScheduler, steps: range) -> None:
        for step in steps:
            set_gradients(module.parameters(), step)
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))

    sharded, plain = twin_optimizers((model, reference), optim.AdamW, lr=0.1)
    schedulers = schedule(sharded), schedule(plain)
    run(model, sharded, schedulers[0], range(4))
    run(reference, plain, schedulers[1], range(4))
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.7)
    scheduler = schedule(resumed)
    resumed.load_state_dict(saved_everywhere(sharded))
    scheduler.load_state_dict(schedulers[0].state_dict())
    run(model, resumed, scheduler, range(4, 7))
    run(reference, plain, schedulers[1], range(4, 7))
    assert resumed.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_state_of_mixed_dtypes_is_resumed(partition: str) -> None:
    def mixed() -> nn.Module:
        model = small_model()
        model[2].to(torch.bfloat16)
        model[3].double()
        return model

    model, reference = twins(mixed)
    sharded, plain = twin_optimizers((model, reference), optim.AdamW, partition)
    train_all([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded)
    assert_same_state(saved, plain.state_dict())
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=cutting(partition))
    resumed.load_state_dict(saved)
    train_all([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_a_file_can_be_read_without_pickle(partition: str) -> None:
    model, reference = twins()
    sharded, plain = twin_optimizers((model, reference), optim.AdamW, partition)
    train_all([(model, sharded), (reference, plain)], range(2))
    file = io.BytesIO()
    torch.save(saved_everywhere(sharded), file)
    file.seek(0)
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=cutting(partition))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train_all([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@LAYOUTS
def test_a_checkpoint_goes_to_and_from_torchs_class_and_the_plain_optimizer(
    rank: int, partition: str, as_bucket_view: bool
) -> None:
    model, reference = twins()
    theirs = TorchZero(model.parameters(), optim.Adam, lr=0.01)
    plain = optim.Adam(reference.parameters(), lr=0.01)
    train_all([(model, theirs), (reference, plain)], range(2))
    consolidate_torchs(theirs, to=0)
    saved = from_rank(theirs.state_dict() if rank == 0 else None, 0)
    how: dict[str, Any] = {"partition": cutting(partition), "parameters_as_bucket_view": as_bucket_view}
    ours = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.5, **how)
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 0.01, "loaded hyperparameters win"
    train_all([(model, ours), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming from torch's class")
    saved = saved_everywhere(ours)
    again = TorchZero(model.parameters(), optim.Adam, lr=0.01)
    again.load_state_dict(copy.deepcopy(saved))
    plain_again = optim.Adam(reference.parameters())
    plain_again.load_state_dict(saved)
    train_all([(model, again), (reference, plain_again)], range(4, 6))
    assert_bitwise_equal(model, reference, "after resuming with torch's class")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_the_argument_is_left_alone_and_nothing_of_it_is_kept(partition: str) -> None:
    model, reference = twins()
    plain = optim.Adam(reference.parameters(), lr=torch.tensor(0.01), foreach=False)
    train_all([(reference, plain)], range(2))
    given = copy.deepcopy(plain.state_dict())
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    sharded.load_state_dict(given)
    train_all([(model, sharded)], range(2, 4))
    sharded.param_groups[0]["lr"].fill_(1.0)
    assert_same_state(given, plain.state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_hooks_see_the_state_and_may_change_it(rank: int) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    train_all([(model, sharded)], range(1))
    seen: list[int] = []
    sharded.register_state_dict_post_hook(lambda optimizer, state_dict: seen.append(len(state_dict["state"])))
    sharded.register_state_dict_post_hook(lambda optimizer, state_dict: {**state_dict, "epoch": 3})
    sharded.consolidate_state_dict(to=0)
    saved = from_rank(sharded.state_dict() if rank == 0 else None, 0)
    assert saved["epoch"] == 3
    assert seen == ([9] if rank == 0 else [])
    epochs: list[int] = []
    sharded.register_load_state_dict_pre_hook(lambda optimizer, state_dict: epochs.append(state_dict.pop("epoch")))
    sharded.register_load_state_dict_post_hook(lambda optimizer: epochs.append(-1))
    sharded.load_state_dict(saved)
    assert epochs == [3, -1]


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_state_in_channels_last_is_resumed(rank: int, partition: str) -> None:
    def convolutions() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3)).to(memory_format=torch.channels_last)

    model, reference = twins(convolutions)
    sharded, plain = twin_optimizers((model, reference), optim.Adam, partition)
    train_all([(model, sharded), (reference, plain)], range(2))
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
    train_all([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_tensors_that_were_never_stepped_have_empty_state(rank: int) -> None:
    model, reference = twins()
    sharded, plain = twin_optimizers((model, reference), optim.Adam)
    for module, optimizer in ((model, sharded), (reference, plain)):
        set_gradients(module.parameters(), 0, none={3})
        optimizer.step()
    fresh = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    with pytest.raises(ValueError, match=r"state_dict\['state'\]\[3\] = \{\}"):
        fresh.load_state_dict(plain.state_dict())
    sharded.consolidate_state_dict(to=0)
    saved = from_rank(sharded.state_dict() if rank == 0 else None, 0)
    assert saved["state"][3] == {}
    plain.load_state_dict(saved)
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    resumed.load_state_dict(saved)
    train_all([(model, resumed), (reference, plain)], range(1, 3))
    assert_bitwise_equal(model, reference, "after resuming")


SWITCHED_OFF: dict[str, tuple[type[optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "momentum of SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.0}),
    "momentum of RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}, {"momentum": 0, "centered": False}),
    "amsgrad": (optim.Adam, {"amsgrad": True}, {"amsgrad": False}),
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("name", SWITCHED_OFF, partition=["whole", "split"])
def test_state_outlives_its_setting(rank: int, partition: str, name: str) -> None:
    optimizer_class, settings, off = SWITCHED_OFF[name]
    on = {key: settings[key] for key in off}
    model, reference = twins()
    plain = optimizer_class(reference.parameters(), **settings)
    train_all([(reference, plain)], range(2))
    model.load_state_dict(reference.state_dict())
    plain.param_groups[0].update(off)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.1, partition=cutting(partition))
    sharded.load_state_dict(plain.state_dict())
    train_all([(model, sharded), (reference, plain)], range(2, 4))
    plain.param_groups[0].update(on)
    sharded.param_groups[0].update(on)
    train_all([(model, sharded), (reference, plain)], range(4, 6))
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
def test_a_class_that_works_on_large_tensors_alone_is_resumed(rank: int, failure: type[Exception]) -> None:
    stubborn = type("Stubborn", (RefusesTheProbe,), {"failure": failure})
    model, reference = twins()
    plain = stubborn(reference.parameters())
    sharded = ZeroRedundancyOptimizer(model.parameters(), stubborn)
    train_all([(model, sharded), (reference, plain)], range(2))
    resumed = ZeroRedundancyOptimizer(model.parameters(), stubborn)
    resumed.load_state_dict(plain.state_dict())
    train_all([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")
