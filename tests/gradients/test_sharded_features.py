"""Sharded gradients with what else a training has: half precision, checkpoints, GradScaler, averages, classes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ddp_training import assert_close
from support.sharded_training import SMALL_MB
from support.training import assert_bitwise_equal, assert_same_state, cutting
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zeroshard import AveragedParameters, ZeroRedundancyOptimizer, shard_gradients
from zeroshard_testing import assert_replicas_equal

PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split", "level"])


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(12, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6)
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * number + rank)).to(dtype)
    loss: torch.Tensor = model(x).square().mean()
    return loss


def mean_gradients(model: nn.Module, world_size: int, number: int, scale: float = 1.0) -> None:
    """Set the gradients of a model to the mean over all ranks, as one process computes it."""
    grads = []
    for rank in range(world_size):
        model.zero_grad()
        (loss_of(model, rank, number) * scale).backward()
        grads.append([param.grad for param in model.parameters()])
    for param, *of_ranks in zip(model.parameters(), *grads, strict=True):
        halves = [grad / world_size for grad in of_ranks]
        param.grad = sum(halves[1:], halves[0])


def sharded(
    model: nn.Module,
    partition: str = "split",
    group: dist.ProcessGroup | None = None,
    optimizer_class: type[optim.Optimizer] = optim.AdamW,
    **settings: Any,
) -> ZeroRedundancyOptimizer:
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(),
        optimizer_class,
        lr=0.02,
        partition=cutting(partition),
        process_group=group,
        **settings,
    )
    shard_gradients(model, optimizer, bucket_mb=SMALL_MB)
    return optimizer


def train(model: nn.Module, optimizer: ZeroRedundancyOptimizer, rank: int, numbers: range) -> None:
    for number in numbers:
        loss_of(model, rank, number).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------- half precision


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize(
    ("partition", "views"), [("whole", False), ("level", False), ("split", True)], ids=["whole", "level", "split views"]
)
def test_master_weights_step_in_full_precision(rank: int, world_size: int, partition: str, views: bool) -> None:
    model, plain = make_model(torch.bfloat16), make_model(torch.bfloat16)
    optimizer = sharded(model, partition, master_weights=True, parameters_as_bucket_view=views)
    masters = [nn.Parameter(param.detach().float()) for param in plain.parameters()]
    reference = optim.AdamW(masters, lr=0.02)
    for number in range(4):
        train(model, optimizer, rank, range(number, number + 1))
        assert_replicas_equal(model.parameters())
        mean_gradients(plain, world_size, number)
        for master, param in zip(masters, plain.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        reference.step()
        with torch.no_grad():
            for master, param in zip(masters, plain.parameters(), strict=True):
                param.copy_(master)
        if world_size == 2:
            assert_bitwise_equal(model, plain, f"after step {number}")


@pytest.mark.ranks(2, backend="gloo")
def test_a_scaler_skips_the_same_steps_everywhere(rank: int, world_size: int) -> None:
    model, plain = make_model(), make_model()
    optimizer, reference = sharded(model), optim.AdamW(plain.parameters(), lr=0.02)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for number in range(5):
        factor = float("inf") if number == 2 else 1.0
        # One rank alone has the infinity.
        scalers[0].scale(loss_of(model, rank, number) * (factor if rank == 1 else 1.0)).backward()
        mean_gradients(plain, world_size, number, scalers[1].get_scale() * factor)
        scalers[1].scale(torch.zeros(()))
        for scaler, each, of in zip(scalers, (optimizer, reference), (model, plain), strict=True):
            scaler.unscale_(each)
            nn.utils.clip_grad_norm_(of.parameters(), 0.05)
            scaler.step(each)
            scaler.update()
            each.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_close(model, plain, 1e-12, f"after step {number}")
        assert_replicas_equal(model.parameters())


# ---------------------------------------------------------------------- checkpoints


def straight(numbers: int) -> tuple[nn.Module, optim.Optimizer]:
    """Train one process with the batches of rank 0, and return what it has."""
    model = make_model()
    optimizer = optim.AdamW(model.named_parameters(), lr=0.02)
    for number in range(numbers):
        mean_gradients(model, 1, number)
        optimizer.step()
    return model, optimizer


SIZES = (2, 3, 1, 2)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize(("begin", "partition"), [("sharded", "whole"), ("sharded", "level"), ("plain", "split")])
def test_one_run_is_resumed_at_many_sizes_and_by_a_plain_optimizer(rank: int, partition: str, begin: str) -> None:
    groups = [dist.new_group(list(range(size))) for size in SIZES]
    saved: list[Any] = [None]
    if begin == "plain":
        model, plain = straight(2)
        saved = [(copy.deepcopy(model.state_dict()), copy.deepcopy(plain.state_dict()))]
    for stage, (size, group) in enumerate(zip(SIZES, groups, strict=True), int(begin == "plain")):
        if rank < size:
            model = make_model()
            optimizer = sharded(model, partition, group)
            if saved[0] is not None:
                model.load_state_dict(saved[0][0])
                optimizer.load_state_dict(saved[0][1])
            # All ranks have the batches of rank 0, so that each size trains alike.
            train(model, optimizer, 0, range(2 * stage, 2 * stage + 2))
            reference, plain = straight(2 * stage + 2)
            assert_close(model, reference, 1e-12, f"at {size} ranks, stage {stage}")
            optimizer.consolidate_state_dict()
            if rank == 0:
                saved = [(copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))]
        dist.broadcast_object_list(saved)
    model, numbers = make_model(), 2 * (len(SIZES) + int(begin == "plain"))
    plain = optim.AdamW(model.named_parameters(), lr=0.02)
    model.load_state_dict(saved[0][0])
    plain.load_state_dict(saved[0][1])
    mean_gradients(model, 1, numbers)
    plain.step()
    assert_close(model, straight(numbers + 1)[0], 1e-12, "of a plain optimizer")


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize(
    ("partition", "waits"), [("whole", False), ("split", True)], ids=["after zero_grad()", "before step()"]
)
def test_a_distributed_checkpoint_is_loaded_at_other_sizes(
    rank: int, partition: str, waits: bool, ranks_tmp_path: Path
) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    if rank < 2:
        model = make_model()
        optimizer = sharded(model, partition, groups[2])
        train(model, optimizer, 0, range(2))
        if waits:
            # A gradient that waits is no part of a checkpoint.
            loss_of(model, 0, 7).backward()
        states = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=ranks_tmp_path / "saved", process_group=groups[2])
        optimizer.zero_grad()
        train(model, optimizer, 0, range(2, 4))
        assert_close(model, straight(4)[0], 1e-12, "after saving")
    dist.barrier()
    for size, group in groups.items():
        if rank < size:
            model = make_model()
            optimizer = sharded(model, partition, group)
            states = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
            dcp.load(states, checkpoint_id=ranks_tmp_path / "saved", process_group=group)
            set_state_dict(model, optimizer, model_state_dict=states["m"], optim_state_dict=states["o"])
            train(model, optimizer, 0, range(2, 4))
            assert_close(model, straight(4)[0], 1e-12, f"saved at 2 ranks, loaded at {size}")
        dist.barrier()


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_a_consolidation_between_backward_and_step_changes_nothing(rank: int, world_size: int, partition: str) -> None:
    model, plain = make_model(), make_model()
    optimizer, reference = sharded(model, partition), optim.AdamW(plain.named_parameters(), lr=0.02)
    for number in range(3):
        loss_of(model, rank, number).backward()
        optimizer.consolidate_state_dict()
        before = copy.deepcopy(optimizer.state_dict()) if rank == 0 else None
        expected = copy.deepcopy(reference.state_dict())
        if before is not None:
            assert_same_state(before, expected)
        optimizer.step()
        optimizer.zero_grad()
        mean_gradients(plain, world_size, number)
        reference.step()
        assert_bitwise_equal(model, plain, f"after step {number}")


# ---------------------------------------------------------------------- averages and classes


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_averaged_parameters_are_those_of_one_process(rank: int, world_size: int, partition: str) -> None:
    model, plain = make_model(), make_model()
    optimizer, reference = sharded(model, partition), optim.AdamW(plain.parameters(), lr=0.02)
    average = AveragedParameters(optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(3):
        train(model, optimizer, rank, range(number, number + 1))
        mean_gradients(plain, world_size, number)
        reference.step()
        average.update()
        averaged.update_parameters(plain)
        with average.applied():
            assert_bitwise_equal(model, averaged.module, f"the average after step {number}")
            with torch.no_grad():
                loss_of(model, rank, number)
        assert_bitwise_equal(model, plain, f"after step {number}")


@pytest.mark.ranks(2, backend="gloo")
def test_several_classes_step_groups_of_their_own(rank: int, world_size: int) -> None:
    model, plain = make_model(), make_model()

    def groups_of(of: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        params = list(of.parameters())
        return [param for param in params if param.ndim == 2], [param for param in params if param.ndim != 2]

    (matrices, rest), (plain_matrices, plain_rest) = groups_of(model), groups_of(plain)
    groups = [{"params": matrices, "optimizer_class": optim.Muon, "lr": 0.02}, {"params": rest}]
    optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, lr=0.01, partition=cutting("level"))
    shard_gradients(model, optimizer, bucket_mb=SMALL_MB)
    references = optim.Muon(plain_matrices, lr=0.02), optim.AdamW(plain_rest, lr=0.01)
    schedulers = [optim.lr_scheduler.StepLR(each, 1) for each in (optimizer, *references)]
    for number in range(3):
        train(model, optimizer, rank, range(number, number + 1))
        mean_gradients(plain, world_size, number)
        for reference in references:
            reference.step()
        for scheduler in schedulers:
            scheduler.step()
        assert_bitwise_equal(model, plain, f"after step {number}")


class Outputs(nn.Module):
    """Returns a parameter itself, and an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
        return self.scale, iter([inputs @ self.weight, inputs])


@pytest.mark.ranks(2, backend="gloo")
def test_outputs_are_left_as_they_are() -> None:
    model = Outputs()
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, lr=0.1)
    sharding = shard_gradients(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        scale, results = model(torch.ones(1, 4))
        (scale * next(results).sum()).backward()
        optimizer.step()
    sharding.remove()
    del sharding, optimizer
    scale, results = model(torch.ones(1, 4))
    (scale * next(results).sum()).backward()
    assert type(model.scale.grad) is torch.Tensor
