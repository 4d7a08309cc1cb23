"""Checkpoints of every optimizer, along a chain of world sizes, and with what people do around a load."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import HOOKS, Twins
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
    twins,
    two_groups,
)
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import lr_scheduler
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
VIEWS = pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])
Trained = tuple[nn.Module, optim.Optimizer]


def train(pairs: Iterable[Trained], steps: range) -> None:
    pairs = list(pairs)
    for step in steps:
        for module, optimizer in pairs:
            set_gradients(module.parameters(), step)
            optimizer.step()


def from_rank(value: Any, source: int) -> Any:
    """Bring a checkpoint to all ranks of the test, as a shared file would."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def saved_everywhere(sharded: ZeroRedundancyOptimizer, to: int = 0) -> dict[str, Any]:
    sharded.consolidate_state_dict(to=to)
    saved: dict[str, Any] = from_rank(sharded.state_dict() if sharded.rank == to else None, to)
    return saved


@pytest.mark.by_default(
    "2-ASGD-whole | 2-Adafactor-whole | 2-Adam-whole | 2-AdamW-whole | 2-AdamW-fused-whole | 2-NAdam-whole | "
    "2-RMSprop-whole | 2-SGD-whole | 2-Adadelta-split | 2-Adagrad-split | 2-Adam-amsgrad-split | "
    "2-AdamW-foreach-split | 2-Adamax-split | 2-RAdam-split | 2-Rprop-split | 2-SGD-momentum-split"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("name", "partition"),
    [*((name, "whole") for name in DENSE_OPTIMIZERS), *((name, "split") for name in ELEMENTWISE_OPTIMIZERS)],
)
def test_every_optimizer_saves_what_the_plain_one_saves_and_goes_on_from_it(
    rank: int, name: str, partition: str
) -> None:
    optimizer_class, settings = DENSE_OPTIMIZERS[name]
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, partition=cutting(partition), **settings)
    plain = optimizer_class(reference.parameters(), **settings)
    train([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded, to=1)
    assert_same_state(saved, plain.state_dict())
    fresh = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class, partition=cutting(partition), parameters_as_bucket_view=True, **settings
    )
    fresh.load_state_dict(saved)
    back = optimizer_class(reference.parameters(), **settings)
    back.load_state_dict(saved)
    train([(model, fresh), (reference, back)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")
    assert_same_state(saved_everywhere(fresh), back.state_dict())


CHAIN = ((0,), (0, 1, 2, 3), (2, 3), (1, 2, 3), (3,), (0, 1), (0, 1, 2))
"""World sizes 1, 4, 2, 3, 1, 2, 3: growing and shrinking, on ranks that differ from one run to the next."""


@pytest.mark.by_default(
    "4-AdamW-partitions0-params | 4-Adam-amsgrad-partitions1-views | 4-Adafactor-partitions2-params"
)
@pytest.mark.ranks(4, backend=EVERYWHERE)
@VIEWS
@pytest.mark.parametrize(
    ("name", "partitions"),
    [
        ("AdamW", ("whole", "split")),
        ("Adam-amsgrad", ("whole", "split", "split")),
        ("Adafactor", ("whole",)),
    ],
)
def test_one_run_that_is_resumed_at_many_world_sizes(
    rank: int, name: str, partitions: tuple[str, ...], as_bucket_view: bool
) -> None:
    optimizer_class, settings = DENSE_OPTIMIZERS[name]
    reference = small_model()
    plain = optimizer_class(reference.parameters(), **settings)
    groups = [dist.new_group(list(ranks)) for ranks in CHAIN]
    saved: dict[str, Any] | None = None
    for stage, (ranks, group) in enumerate(zip(CHAIN, groups, strict=True)):
        steps = range(2 * stage, 2 * stage + 2)
        model = copy.deepcopy(reference)
        train([(reference, plain)], steps)
        last = ranks[-1]
        if rank in ranks:
            sharded = ZeroRedundancyOptimizer(
                model.parameters(),
                optimizer_class,
                process_group=group,
                partition=cutting(partitions[stage % len(partitions)]),
                parameters_as_bucket_view=as_bucket_view,
                **settings,
            )
            if saved is not None:
                sharded.load_state_dict(saved)
            train([(model, sharded)], steps)
            assert_bitwise_equal(model, reference, f"at {len(ranks)} ranks, stage {stage}")
            sharded.consolidate_state_dict(to=len(ranks) - 1)
            saved = sharded.state_dict() if rank == last else None
        saved = from_rank(saved, last)
        assert saved is not None
        assert_same_state(saved, plain.state_dict())


@pytest.mark.ranks(3, backend=EVERYWHERE)
@PARTITIONS
def test_groups_of_named_parameters(partition: str) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(two_groups(model), optim.AdamW, partition=cutting(partition))
    plain = optim.AdamW(two_groups(reference))
    train([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded)
    assert_same_state(saved, plain.state_dict())
    resumed = ZeroRedundancyOptimizer(two_groups(model), optim.AdamW, partition=cutting(partition), lr=1.0)
    resumed.load_state_dict(saved)
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in resumed.param_groups] == [
        (g["lr"], g["weight_decay"], g["betas"]) for g in plain.param_groups
    ]
    train([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.by_default("2-params-whole | 2-views-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_loading_over_state_that_is_there_already(partition: str, as_bucket_view: bool) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    plain = optim.Adam(reference.parameters())
    early = copy.deepcopy((reference.state_dict(), plain.state_dict()))
    train([(model, sharded), (reference, plain)], range(2))
    late = copy.deepcopy((reference.state_dict(), plain.state_dict()))
    for weights, state in (early, late, early):
        for module, optimizer in ((model, sharded), (reference, plain)):
            module.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
        train([(model, sharded), (reference, plain)], range(5, 7))
        assert_bitwise_equal(model, reference, "after going back and forth")
    assert_same_state(saved_everywhere(sharded), plain.state_dict())


@pytest.mark.by_default("2-False-False | 2-True-True")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("fused_before", [False, True])
@pytest.mark.parametrize("fused_after", [False, True])
def test_loaded_hyperparameters_win_and_steps_fit_them(fused_before: bool, fused_after: bool) -> None:
    model, reference = twins()
    before = optim.AdamW(reference.parameters(), lr=0.02, amsgrad=True, fused=fused_before)
    train([(reference, before)], range(2))
    model.load_state_dict(reference.state_dict())
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.5, fused=fused_after)
    after = optim.AdamW(reference.parameters(), lr=0.5, fused=fused_after)
    for optimizer in (sharded, after):
        optimizer.load_state_dict(before.state_dict())
    assert {k: v for k, v in sharded.param_groups[0].items() if k != "params"} == {
        k: v for k, v in after.param_groups[0].items() if k != "params"
    }
    [on] = {entries["step"].device for entries in after.state.values()}
    for entries in sharded.state.values():
        assert (entries["step"].dtype, entries["step"].device) == (torch.float32, on)
        assert "max_exp_avg_sq" in entries
    train([(model, sharded), (reference, after)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


SCHEDULES: dict[str, Callable[[optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
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
            scheduler.step()

    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1)
    plain = optim.AdamW(reference.parameters(), lr=0.1)
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
def test_mixed_dtypes(partition: str) -> None:
    def mixed() -> nn.Module:
        model = small_model()
        model[2].to(torch.bfloat16)
        model[3].double()
        return model

    model, reference = twins(mixed)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=cutting(partition))
    plain = optim.AdamW(reference.parameters())
    train([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded)
    assert_same_state(saved, plain.state_dict())
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=cutting(partition))
    resumed.load_state_dict(saved)
    train([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_frozen_tensors_have_no_state_and_get_some_after_they_are_unfrozen(partition: str) -> None:
    model, reference = twins()
    for module in (model, reference):
        list(module.parameters())[4].requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    plain = optim.Adam(reference.parameters())
    train([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded)
    assert saved["state"][4] == {}
    stepped = {index: entries for index, entries in saved["state"].items() if index != 4}
    assert_same_state({**saved, "state": stepped}, plain.state_dict())
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    resumed.load_state_dict(saved)
    for module in (model, reference):
        list(module.parameters())[4].requires_grad_(True)
    train([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after unfreezing")
    assert_same_state(saved_everywhere(resumed), plain.state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_a_checkpoint_of_a_partly_frozen_model_is_loaded_into_one_that_is_not(partition: str) -> None:
    model, reference = twins()
    model[0].requires_grad_(False)
    reference[0].requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    plain = optim.Adam(reference.parameters())
    train([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded)
    model[0].requires_grad_(True)
    reference[0].requires_grad_(True)
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    resumed.load_state_dict(saved)
    # Into the plain optimizer as well.
    plain = optim.Adam(reference.parameters())
    plain.load_state_dict(saved)
    train([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after unfreezing and resuming")
    assert_same_state(saved_everywhere(resumed), plain.state_dict())


@pytest.mark.by_default("2-params-whole | 2-views-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_state_of_a_frozen_tensor_is_loaded_and_stays_with_its_owner(partition: str, as_bucket_view: bool) -> None:
    model, reference = twins()
    plain = optim.Adam(reference.parameters())
    train([(reference, plain)], range(2))
    model.load_state_dict(reference.state_dict())
    model[:3].requires_grad_(False)
    reference[:3].requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    owners = sharded.plan.owners
    sharded.load_state_dict(copy.deepcopy(plain.state_dict()))
    train([(model, sharded), (reference, plain)], range(2, 4))
    assert_same_state(saved_everywhere(sharded), plain.state_dict())
    for module in (model, reference):
        module.requires_grad_(True)
    train([(model, sharded), (reference, plain)], range(4, 6))
    assert_bitwise_equal(model, reference, "after unfreezing")
    assert_same_state(saved_everywhere(sharded), plain.state_dict())
    assert sharded.plan.owners == owners


class Lists(optim.SGD):
    """Keeps tensors in lists and dicts, and moves parameters by them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("history", [])
                    state.setdefault("sums", {"all": torch.zeros_like(param), "calls": 0})
                    state["history"].append(param.grad.norm())
                    state["sums"]["all"] += param.grad
                    state["sums"]["calls"] += 1
                    with torch.no_grad():
                        param.add_(state["sums"]["all"] * state["history"][0], alpha=-1e-3 * state["sums"]["calls"])
        return super().step(closure)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_nested_state_is_loaded_and_not_shared_with_the_argument() -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), Lists, lr=0.1)
    plain = Lists(reference.parameters(), lr=0.1)
    train([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded)
    untouched = copy.deepcopy(saved)
    resumed = ZeroRedundancyOptimizer(model.parameters(), Lists, lr=0.1)
    resumed.load_state_dict(saved)
    train([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")
    for index, entries in untouched["state"].items():
        assert len(saved["state"][index]["history"]) == len(entries["history"]) == 2
        assert torch.equal(saved["state"][index]["sums"]["all"], entries["sums"]["all"])
        assert saved["state"][index]["sums"]["calls"] == 2


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_state_under_a_name_of_its_own_is_kept(partition: str) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    plain = optim.Adam(reference.parameters())
    train([(model, sharded), (reference, plain)], range(2))
    given = copy.deepcopy(plain.state_dict())
    given["state"]["history"] = {"epochs": 3}
    sharded.load_state_dict(given)
    plain.load_state_dict(given)
    assert sharded.optim.state["history"] == plain.state["history"] == {"epochs": 3}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_a_file_that_is_read_without_pickle(partition: str) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=cutting(partition))
    plain = optim.AdamW(reference.parameters())
    train([(model, sharded), (reference, plain)], range(2))
    file = io.BytesIO()
    torch.save(saved_everywhere(sharded), file)
    file.seek(0)
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=cutting(partition))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_a_checkpoint_of_torchs_class(partition: str) -> None:
    model, reference = twins()
    theirs = TorchZero(model.parameters(), optim.AdamW, lr=0.01)
    plain = optim.AdamW(reference.parameters(), lr=0.01)
    train([(model, theirs), (reference, plain)], range(2))
    consolidate_torchs(theirs, to=1)
    saved = from_rank(theirs.state_dict() if dist.get_rank() == 1 else None, 1)
    ours = ZeroRedundancyOptimizer(
        model.parameters(), optim.AdamW, partition=cutting(partition), parameters_as_bucket_view=True
    )
    ours.load_state_dict(saved)
    train([(model, ours), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_consolidated_state_is_there_until_the_next_step(rank: int) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    train([(model, sharded)], range(1))
    sharded.consolidate_state_dict()
    if rank == 0:
        before = copy.deepcopy(sharded.state_dict())
        assert_same_state(sharded.state_dict(), before)
    train([(model, sharded)], range(1, 3))
    sharded.consolidate_state_dict(to=1)
    if rank == 1:
        assert sharded.state_dict()["state"][0]["step"] == 3


@pytest.mark.ranks(4, backend=EVERYWHERE)
def test_distributed_checkpoints_reader_on_more_ranks_than_tensors(rank: int) -> None:
    # torch steps an optimizer that looks untrained, which would hang on one rank alone.
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    train([(model, sharded)], range(1))
    assert set(get_optimizer_state_dict(model, sharded)["state"]) == {"weight", "bias"}
    sharded.consolidate_state_dict(to=2)
    assert set(get_optimizer_state_dict(model, sharded)["state"]) == {"weight", "bias"}
    train([(model, sharded)], range(1, 2))
    assert_replicas_equal(model.parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("hook", HOOKS)
def test_distributed_checkpoints_reader_of_an_optimizer_that_keeps_no_state(hook: str) -> None:
    # torch steps an optimizer that looks untrained, which a hook refuses, and leaves the learning rate 0.
    pair = Twins(hook, optimizer=optim.SGD)
    pair.optimizer.init_state()
    for seed in range(3):
        assert get_optimizer_state_dict(pair.ddp, pair.optimizer)["state"] == {}
        pair.iterate(seed)
        pair.optimizer.zero_grad()
    pair.check("after 3 iterations")


@pytest.mark.ranks(3, backend=EVERYWHERE)
@pytest.mark.parametrize("change", ["another dtype", "an entry more", "an entry less"])
def test_parts_of_a_tensor_that_do_not_fit_together(rank: int, change: str) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting("split"))
    train([(model, sharded)], range(1))
    if rank == 1:
        for entries in sharded.optim.state.values():
            if change == "another dtype":
                entries["exp_avg"] = entries["exp_avg"].double()
            elif change == "an entry more":
                entries["extra"] = 1
            else:
                del entries["exp_avg"]
    key, here, there = {
        "another dtype": ("exp_avg", 0, 1),
        "an entry more": ("extra", 1, 0),
        "an entry less": ("exp_avg", 0, 1),
    }[change]
    with pytest.raises(
        ValueError, match=f"tensor . '.*' has the state entry '{key}' on rank {here}, but not on rank {there}, .*dtype"
    ):
        sharded.consolidate_state_dict()
    assert_replicas_equal(model.parameters())
