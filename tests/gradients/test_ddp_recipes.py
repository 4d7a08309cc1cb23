"""The recipes of the page about gradients say of sharded gradients what a plain run says of whole ones."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import PARTITIONS
from support.example_scripts import script
from support.training import cutting
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner


def backward(rank: int, partition: str | None, poison: float = 1.0) -> tuple[nn.Module, Any]:
    """One backward of a small model, with whole gradients (None) or sharded ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if partition is not None:
        optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, partition=cutting(partition))
        register_reduce_to_owner(ddp, optimizer)
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))
    # Only the last bias is poisoned, and only on rank 1.
    model[2].bias.register_hook(lambda grad: grad * (poison if rank == 1 else 1.0))
    ddp(inputs).square().mean().backward()
    return model, optimizer


@pytest.mark.ranks(2)
@PARTITIONS
def test_norms_and_largest_values_are_those_of_whole_gradients(rank: int, partition: str) -> None:
    plain, _ = backward(rank, None)
    sharded, optimizer = backward(rank, partition)
    assert script("gradients").gradient_norms(sharded) == pytest.approx(
        script("gradients").gradient_norms(plain), rel=1e-5
    )
    assert script("gradients").nonfinite_gradients(sharded) == []
    expected = {name: param.grad.abs().max().item() for name, param in plain.named_parameters()}
    assert script("gradients").largest_gradients(sharded) == pytest.approx(expected, rel=1e-6)
    optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_every_rank_names_the_gradient_that_is_not_finite(rank: int, poison: float) -> None:
    sharded, _ = backward(rank, "whole", poison)
    assert script("gradients").nonfinite_gradients(sharded) == ["2.bias"]


@pytest.mark.ranks(2)
def test_the_example_logs_norms_traffic_and_bytes_of_state(rank: int) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    made: list[str] = []

    def logger(name: str) -> Any:
        made.append(name)
        return lambda metrics, step: logged.append((metrics, step))

    unmade = {"init_process_group": lambda _: None, "destroy_process_group": lambda: None}
    with (
        mock.patch.object(script("gradients"), "logger", logger),
        mock.patch.multiple(dist, **unmade),
        mock.patch.object(sys, "argv", ["gradients.py", "tensorboard"]),
    ):
        script("gradients").main()
    assert made == (["tensorboard"] if rank == 0 else [])
    assert [step for _, step in logged] == (list(range(20)) if rank == 0 else [])
    if logged:
        first, last = logged[0][0], logged[-1][0]
        # The larger weight, of 100 x 300 elements, and the other three together: each rank keeps two values for each.
        assert last["zeroshard/state_bytes"] in {2 * 4 * 30_000 + 4, 2 * 4 * 3_310 + 3 * 4}
        assert last["zeroshard/reduce_bytes_sent"] == 20 * first["zeroshard/reduce_bytes_sent"]
        assert {"grad_norm", "grad_norm/0.weight", "zeroshard/broadcast_seconds_waited"} <= last.keys()


def test_tensorboard_takes_what_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    monkeypatch.chdir(tmp_path)
    script("gradients").logger("tensorboard")({"grad_norm": 0.5}, 3)
    [folder] = (tmp_path / "runs").iterdir()
    read = events.EventAccumulator(str(folder)).Reload()
    assert [(each.step, each.value) for each in read.Scalars("grad_norm")] == [(3, 0.5)]
