"""Checkpoints that are saved at some number of ranks and loaded at another."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.checkpointing import loaded, matrices, saved
from support.combinations import FLAG, each_of
from support.consolidated import from_rank
from support.training import (
    DENSE_OPTIMIZERS,
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    cutting,
    small_model,
    train,
    train_all,
    twins,
)
from support.two_classes import separate, sharded, small_gpt, step_all
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from zeroshard import ZeroRedundancyOptimizer, split_state_dict

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
CHAIN = ((0,), (0, 1, 2, 3), (2, 3), (1, 2, 3), (3,), (0, 1), (0, 1, 2))
"""World sizes 1, 4, 2, 3, 1, 2, 3: growing and shrinking, on ranks that differ from one run to the next."""


PARTITIONS_IN_TURN: dict[str, tuple[str, ...]] = {
    "AdamW-fused": ("whole", "split"),
    "Adam-amsgrad": ("whole", "split", "split"),
    "ASGD": ("split",),
    "Adafactor": ("whole",),
}


@pytest.mark.ranks(4, backend=EVERYWHERE)
@each_of("name", PARTITIONS_IN_TURN, as_bucket_view=FLAG)
def test_one_run_is_resumed_at_many_world_sizes(rank: int, name: str, as_bucket_view: bool) -> None:
    partitions = PARTITIONS_IN_TURN[name]
    optimizer_class, settings = DENSE_OPTIMIZERS[name]
    reference = small_model()
    plain = optimizer_class(reference.parameters(), **settings)
    groups = [dist.new_group(list(ranks)) for ranks in CHAIN]
    saved: dict[str, Any] | None = None
    for stage, (ranks, group) in enumerate(zip(CHAIN, groups, strict=True)):
        steps = range(2 * stage, 2 * stage + 2)
        model = copy.deepcopy(reference)
        train_all([(reference, plain)], steps)
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
            train_all([(model, sharded)], steps)
            assert_bitwise_equal(model, reference, f"at {len(ranks)} ranks, stage {stage}")
            sharded.consolidate_state_dict(to=len(ranks) - 1)
            saved = sharded.state_dict() if rank == last else None
        saved = from_rank(saved, last)
        assert saved is not None
        assert_same_state(saved, plain.state_dict())


SIZES = (1, 2, 3, 4)
RUNS: dict[str, tuple[type[optim.Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "Muon": (optim.Muon, {}, ("whole",)),
    "AdamW": (optim.AdamW, {}, ("whole", "split")),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}, ("whole", "split")),
    "Adafactor": (optim.Adafactor, {}, ("whole",)),
}


# All pairs of sizes take long.
@pytest.mark.by_default("4-Muon-flat")
@pytest.mark.ranks(4, backend=EVERYWHERE)
@each_of("name", RUNS, flat=[True, False])
def test_saved_at_any_number_of_ranks_and_loaded_at_any_other(
    rank: int, name: str, flat: bool, ranks_tmp_path: Path
) -> None:
    optimizer_class, settings, partitions = RUNS[name]
    make: Callable[[], nn.Module] = matrices if optimizer_class is optim.Muon else small_model
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    reference = make()
    plain = optimizer_class(reference.parameters(), **settings)
    train(reference, plain, range(3))
    at_save = copy.deepcopy(reference)
    if rank == 0:
        saved(reference, plain, ranks_tmp_path / "plain", groups[1], flat=flat)
    train(reference, plain, range(3, 8))

    def sharded(model: nn.Module, size: int, partition: str) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class, groups[size], partition=cutting(partition), **settings
        )

    for size, partition in itertools.product(SIZES, partitions):
        if rank < size:
            model = make()
            optimizer = sharded(model, size, partition)
            train(model, optimizer, range(3))
            saved(model, optimizer, ranks_tmp_path / f"{partition}{size}", groups[size], flat=flat)
    dist.barrier()
    sources = ["plain", *[f"{partition}{size}" for size, partition in itertools.product(SIZES, partitions)]]
    for number, source in enumerate(sources):
        for size in SIZES:
            # Every pair of sizes, and every pair of partitions.
            partition = partitions[(number + size) % len(partitions)]
            if rank < size:
                model = make()
                optimizer = sharded(model, size, partition)
                loaded(model, optimizer, ranks_tmp_path / source, groups[size], flat=flat)
                assert_bitwise_equal(model, at_save, f"loaded from {source} at {size} ranks")
                train(model, optimizer, range(3, 8))
                assert_bitwise_equal(model, reference, f"from {source} at {size} ranks, {partition}")
        if rank == 0:
            model = make()
            unsharded = optimizer_class(model.parameters(), **settings)
            loaded(model, unsharded, ranks_tmp_path / source, groups[1], flat=flat)
            train(model, unsharded, range(3, 8))
            assert_bitwise_equal(model, reference, f"from {source}, unsharded")


@pytest.mark.ranks(3, backend=EVERYWHERE)
@each_of("way", ["consolidated", "nested", "flat"], partition=["whole", "level"])
def test_saved_at_three_ranks_and_resumed_at_two_and_by_separate_optimizers(
    rank: int, partition: str, way: str, ranks_tmp_path: Path
) -> None:
    path, options = ranks_tmp_path / "saved", StateDictOptions(flatten_optimizer_state_dict=way == "flat")
    two, one = dist.new_group([0, 1]), dist.new_group([0])
    model, reference = twins(small_gpt)
    optimizer, plain = sharded(model, partition=partition), separate(reference)

    def steps(of: nn.Module, optimizers: list[Any], begin: int) -> None:
        for step in range(begin, begin + 3):
            optimizers[0].param_groups[0]["momentum"] = 0.85 + 0.02 * step
            step_all(of, optimizers, step)

    steps(model, [optimizer], 0)
    steps(reference, plain, 0)
    if way == "consolidated":
        optimizer.consolidate_state_dict(to=2)
        if rank == 2:
            torch.save(optimizer.state_dict(), path)
    else:
        dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=path)
    dist.barrier()

    def resume(of: nn.Module, optimizers: list[Any], group: dist.ProcessGroup) -> None:
        if way != "consolidated":
            found = get_optimizer_state_dict(of, optimizers, options=options)
            dcp.load(found, checkpoint_id=path, process_group=group)
            set_optimizer_state_dict(of, optimizers, found, options=options)
            return
        state_dict = torch.load(path, weights_only=True)
        parts = [state_dict] if len(optimizers) == 1 else split_state_dict(state_dict, [0, 1, 1])
        for each, part in zip(optimizers, parts, strict=True):
            each.load_state_dict(part)

    resumed, alone = (copy.deepcopy(model) for _ in range(2))
    steps(reference, plain, 3)
    if rank < 2:
        smaller = sharded(resumed, process_group=two, partition=partition)
        resume(resumed, [smaller], two)
        steps(resumed, [smaller], 3)
        assert_bitwise_equal(resumed, reference, "resumed at two ranks")
        smaller.consolidate_state_dict(to=0)
    if rank == 0:
        for part, each in zip(split_state_dict(smaller.state_dict(), [0, 1, 1]), plain, strict=True):
            assert_same_state(part, each.state_dict())
        others = separate(alone)
        resume(alone, others, one)
        steps(alone, others, 3)
        assert_bitwise_equal(alone, reference, "resumed by separate optimizers")
