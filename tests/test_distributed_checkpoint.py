"""torch.distributed.checkpoint with the sharded optimizer: saved at some number of ranks, loaded at another."""

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
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from training import assert_bitwise_equal, cutting, set_gradients, small_model
from zeroshard import ZeroRedundancyOptimizer

SIZES = (1, 2, 3, 4)


def matrices() -> nn.Sequential:
    """Only matrices, as Muon takes nothing else."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(*shape, bias=False) for shape in ((40, 64), (64, 300), (300, 7), (7, 1))])


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model.parameters(), step)
        optimizer.step()


def saved(
    model: nn.Module, optimizer: optim.Optimizer, path: Path, group: dist.ProcessGroup | None, *, flat: bool
) -> None:
    states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path, process_group=group)


def loaded(
    model: nn.Module, optimizer: optim.Optimizer, path: Path, group: dist.ProcessGroup | None, *, flat: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    dcp.load(states, checkpoint_id=path, process_group=group)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=options,
    )


@pytest.mark.ranks(4, backend="gloo")
@pytest.mark.parametrize(
    ("optimizer_class", "settings", "partitions"),
    [
        (optim.AdamW, {}, ("whole", "split", "hybrid")),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, ("split", "hybrid", "whole")),
        (optim.Adafactor, {}, ("whole",)),
        (optim.Muon, {}, ("whole",)),
    ],
    ids=["AdamW", "SGD", "Adafactor", "Muon"],
)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_saved_at_any_number_of_ranks_and_loaded_at_any_other(
    rank: int,
    optimizer_class: type[optim.Optimizer],
    settings: dict[str, Any],
    partitions: tuple[str, ...],
    flat: bool,
    ranks_tmp_path: Path,
) -> None:
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
