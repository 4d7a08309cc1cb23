"""What the hooks do where everything moves by collectives, as on NCCL."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_by_collectives import STEPPING, CollectiveTwins
from support.ddp_training import (
    EVERY_HOOK,
    HOOKS_AND_PARTITIONS,
    PARTITIONS,
    batch,
    register,
    steps_in_backward,
    train,
    with_hook,
)
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.state import group_values, metadata
from zeroshard_comm import Message, RankGroup, Traffic, agreement, collectives, rounds
from zeroshard_integrations.ddp import register_reduce_to_owner


def large() -> nn.Module:
    """Stretches that are reduced in place, and small ones that are packed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 1000), nn.Linear(1000, 300), nn.LayerNorm(300))


@pytest.mark.ranks(2, backend="gloo")
@HOOKS_AND_PARTITIONS
def test_large_tensors_are_reduced_in_place_and_small_ones_packed(hook: str, partition: str) -> None:
    train(CollectiveTwins(hook, model=large, partition=partition, ddp={"bucket_cap_mb": 1}), last=4)


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_HOOK
def test_buckets_and_parameters_travel_in_chunks(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "STAGING_BYTES", 10_000)
    train(CollectiveTwins(hook, partition="split"), last=4)
    train(CollectiveTwins(hook, partition="split", parameters_as_bucket_view=True), last=4)


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_gradients_that_wait_for_a_step_stay_when_parameters_are_laid_out_again(partition: str) -> None:
    twins = CollectiveTwins(partition=partition)
    train(twins, last=2)
    for number in range(3, 6):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            for param in ddp.parameters():
                param.data = param.data.clone()
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend="gloo")
def test_two_optimizers_share_one_group_of_their_own() -> None:
    first, second = CollectiveTwins("hook_with_zero_step_interleaved"), CollectiveTwins()
    for number in range(3):
        for twins in (first, second):
            twins.iterate(number)
    first.check("in the first")
    second.check("in the second")
    # The default group, one for control messages and one for buckets.
    assert len(dist.distributed_c10d._world.pg_map) == 3


# ---------------------------------------------------------------------- one rank of a large world


@pytest.mark.ranks(64, backend="fake", fake_rank=5)
@HOOKS_AND_PARTITIONS
def test_one_rank_of_a_large_world_trains_through_the_hooks(hook: str, partition: str) -> None:
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(40))).double()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.05)
    optimizer = with_hook(hook, ddp, optim.AdamW, partition=partition)
    start = [param.detach().clone() for param in model.parameters()]
    for number in range(4):
        optimizer.zero_grad()
        ddp(batch(number)).square().mean().backward()
        optimizer.step()
    owned = {shard.tensor for shard in optimizer.plan.of_rank(5)}
    for index, (param, before) in enumerate(zip(model.parameters(), start, strict=True)):
        # What others would send never arrives.
        assert torch.equal(param, before) == (index not in owned)
    # As the plan predicts: what others own is reduced, and what this rank owns is shared, with 63 others.
    volume = optimizer.traffic.total()
    shares = sum(shard.numel for shard in optimizer.plan.of_rank(5))
    everything = sum(param.numel() for param in model.parameters())
    # Four steps in float64.
    predicted = 4 * 8 * (everything - shares + 63 * shares)
    assert predicted <= volume.bytes_sent <= 1.2 * predicted


@pytest.mark.ranks(4, backend="fake")
def test_parameters_of_several_devices_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"'1\.weight' is on meta, and tensor 0 '0\.weight' on cpu"):
        optimizer.follow_backward(STEPPING["reduce_to_owner_hook"])


class StubConnections:
    """Lets agreements of any number of ranks travel in rounds, to peers that are not there."""

    def __init__(self, first: RankGroup) -> None:
        self.channel = first

    def combine(self, numbers: torch.Tensor, tag: int, operation: str, traffic: Traffic, lost: Any = None) -> Any:
        return rounds.combine_in_rounds(self.channel, numbers, tag, operation, traffic, lost)


@pytest.mark.by_default(
    "8-reduce_to_owner_hook | 64-hook_with_zero_step | 512-hook_with_zero_step_interleaved | 1024-reduce_to_owner_hook"
)
@pytest.mark.ranks(8, 64, 512, 1024, backend="fake")
@EVERY_HOOK
def test_messages_between_hosts_grow_with_the_logarithm_of_the_ranks(
    world_size: int, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued: Counter[str] = Counter()

    def stub(ranks: RankGroup, peer: int, buffer: torch.Tensor, tag: int, operation: str) -> Message:
        issued[operation] += 1
        return Message(ranks, peer, None, buffer)

    monkeypatch.setattr(RankGroup, "moves_data", lambda _: True)
    monkeypatch.setattr(RankGroup, "private_group", lambda ranks, *_: ranks)
    monkeypatch.setattr(agreement, "Connections", StubConnections)
    # What others say of their state comes once.
    for module in (metadata, group_values):
        monkeypatch.setattr(module, "all_gather_text", lambda _, mine, __: [mine] * world_size)
    monkeypatch.setattr(rounds, "send", stub)
    monkeypatch.setattr(rounds, "receive", lambda ranks, peer, room, *rest: stub(ranks, peer, room.zero_(), *rest))
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(10))).double()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.05)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, overlap_with_ddp=steps_in_backward(hook))
    if hook == "reduce_to_owner_hook":
        # On an accelerator norms are one all-reduce there; on gloo they travel as one more agreement.
        register_reduce_to_owner(ddp, optimizer, norms=False)
    else:
        register(hook, ddp, optimizer)
    for number in range(4):
        issued.clear()
        optimizer.zero_grad()
        ddp(batch(number)).square().mean().backward()
        optimizer.step()
    # Two messages a round. A hook that steps after the last bucket agrees in the backward and in its step, twice each.
    agreements = 4 if hook == "hook_with_zero_step" else 3
    assert 0 < sum(issued.values()) <= 2 * agreements * math.ceil(math.log2(world_size)), issued
