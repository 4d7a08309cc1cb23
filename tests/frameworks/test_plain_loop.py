"""A plain loop around DistributedDataParallel: every combination of what the frameworks are tried with in pairs."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.example_scripts import script
from support.training import assert_bitwise_equal, cutting
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_testing import assert_replicas_equal

STEPS, SEQUENCES = 20, 2
CLIPS = {
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 0.5),
    "value": lambda params: nn.utils.clip_grad_value_(params, 1e-3),
    "off": lambda _: None,
}
pytestmark = pytest.mark.ranks(2, backend="gloo")


def train(
    precision: torch.dtype, accumulation: int, clip: str, hook: bool, is_sharded: bool, partition: str = "whole"
) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return the model after some steps, and the losses of this rank; float64 is the model's, others are autocast."""
    examples = script("small_gpt")
    model, data = examples.SmallGPT(), examples.Windows(STEPS * accumulation * SEQUENCES * 2)
    model = model.double() if precision is torch.float64 else model
    ddp, losses = DistributedDataParallel(model), []
    if is_sharded:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=3e-3, partition=cutting(partition)
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if is_sharded and hook:
        register_reduce_to_owner(ddp, optimizer)
    rank, indices = dist.get_rank(), iter(range(len(data)))
    for step in range(STEPS * accumulation):
        rows = [data[next(indices)] for _ in range(2 * SEQUENCES)][rank::2]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        is_last = step % accumulation == accumulation - 1
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            with torch.autocast("cpu", precision, enabled=precision is torch.bfloat16):
                loss = ddp(**batch) / accumulation
            loss.backward()
        losses.append(loss.detach())
        if is_last:
            CLIPS[clip](model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    return model, losses


@pytest.mark.by_default("2-torch.bfloat16-4-norm-hook")
@pytest.mark.parametrize("hook", [True, False], ids=["hook", "no hook"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("accumulation", [4, 1])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32], ids=str)
def test_twenty_steps_equal_the_unsharded_ones(
    precision: torch.dtype, accumulation: int, clip: str, hook: bool
) -> None:
    ours, losses = train(precision, accumulation, clip, hook, is_sharded=True)
    theirs, expected = train(precision, accumulation, clip, hook, is_sharded=False)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert_bitwise_equal(ours, theirs, f"after {STEPS} steps")
    assert_replicas_equal(ours.parameters())


@pytest.mark.by_default("2-norm")
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_cut_tensors_differ_by_roundings_of_the_norm(clip: str) -> None:
    ours, _ = train(torch.float64, 1, clip, hook=True, is_sharded=True, partition="split")
    theirs, _ = train(torch.float64, 1, clip, hook=True, is_sharded=False)
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=0, atol=1e-12)
    assert_replicas_equal(ours.parameters())
