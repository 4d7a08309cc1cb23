"""A rank that returns early, skips a call or makes another one: the others raise within the timeout and name it."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.combinations import each_of
from support.ddp_by_collectives import BOTH_WAYS
from support.ddp_training import HOOKS, Twins
from support.ending_ranks import WAYS
from support.groups import group_of
from support.sharded_model import Plain
from support.sharded_parameters import BatchNorm
from support.sharded_training import SMALL_MB, Training
from support.training import set_gradients, small_model
from torch import optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError, PeerLostError


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_a_rank_that_skips_a_step_ends_the_others_within_the_timeout(rank: int) -> None:
    group = group_of(seconds=2)
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    set_gradients(model.parameters(), 0)
    sharded.step()
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"^rank 1 did not call step\(\) within 2 s: call it on every rank"):
            sharded.step()
    dist.barrier()


SKIPPED = r"^rank 1 did not call consolidate_state_dict\(to=0\) within 2 s: call it on every rank, outside of `if rank"


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_a_rank_that_skips_a_consolidation_is_named(rank: int) -> None:
    group = group_of(seconds=2)
    sharded = ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, process_group=group)
    if rank == 0:
        with pytest.raises(PeerLostError, match=SKIPPED):
            sharded.consolidate_state_dict()
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_meetings_keep_the_timeout_of_a_group_without_a_backend_for_the_cpu(rank: int) -> None:
    group = dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=2))
    model = small_model().requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=SKIPPED):
            sharded.consolidate_state_dict()
        assert time.monotonic() - started < 10
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_a_call_beside_a_step_is_told_from_it(rank: int) -> None:
    group = group_of(seconds=2)
    sharded = ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, process_group=group)
    with pytest.raises(
        DisagreementError, match=r"rank 0 called step\(\) .* rank 1 called consolidate_state_dict\(to=0\)"
    ):
        sharded.step() if rank == 0 else sharded.consolidate_state_dict()
    sharded.step()


@pytest.mark.by_default("1-3")
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 3), (3, 6)])
def test_a_rank_that_ends_after_its_last_step_costs_the_others_nothing(first: int, last: int) -> None:
    program = [sys.executable, "-m", "support.ending_ranks", str(first), str(last)]
    ended = subprocess.run(program, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    expected = [f"{' '.join(map(str, way))} 4 4 True" for way in WAYS[first:last]]
    assert ended.stdout.splitlines() == expected, ended.stderr


# By collectives, rank 1 reduces the next backward where rank 0 shares its step.
@pytest.mark.by_default("2-messages")
@pytest.mark.ranks(2, backend="gloo", checks="no:collectives")
@BOTH_WAYS
def test_a_rank_that_skips_the_step_of_a_hook_is_named(rank: int, twins_by: type[Twins]) -> None:
    twins = twins_by("reduce_to_owner_hook", process_group=group_of(seconds=3))
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    if rank == 0:
        told = r"^rank 1 did not call step\(\) within|^rank 0 lost rank 1 during step\(\)"
        with pytest.raises(PeerLostError, match=told):
            twins.optimizer.step()
    else:
        twins.optimizer.zero_grad()
        told = r"rank 0 did not call backward\(\) within|rank 1 lost another rank during backward\(\)"
        with pytest.raises(PeerLostError, match=told):
            twins.backward(twins.ddp, 2)


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@each_of("hook", HOOKS, frees=["nothing", "the last layer"], bucket_cap_mb=[0.05, 25], views=[True, False])
def test_one_rank_that_forgets_zero_grad_is_told_on_all(
    rank: int, hook: str, frees: str, bucket_cap_mb: float, views: bool
) -> None:
    twins = Twins(hook, ddp={"gradient_as_bucket_view": views, "bucket_cap_mb": bucket_cap_mb})
    for number in range(4):
        twins.iterate(number)
    if rank != 1:
        twins.optimizer.zero_grad()
    elif frees == "the last layer":
        for param in [*twins.ddp.parameters()][-2:]:
            param.grad = None
    says = r"tensor \d '\d.(weight|bias)' still has the gradient of the last step: call optimizer.zero_grad"
    if hook != "reduce_to_owner_hook" or rank == 1:
        with pytest.raises(RuntimeError, match=says):
            twins.backward(twins.ddp, 4)
    else:
        twins.backward(twins.ddp, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            twins.optimizer.step()
    for number in (5, 6, 7):
        twins.iterate(number)
        twins.check(f"after a zero_grad(), in iteration {number}")


# ---------------------------------------------------------------------- sharded gradients


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.usefixtures("reads")
def test_a_rank_that_returns_early_from_a_loop_that_shards_gradients_is_named(rank: int) -> None:
    training = Training(Plain, bucket_mb=SMALL_MB, group=group_of(seconds=3))
    training.iterate()
    if rank != 1:
        with pytest.raises(PeerLostError, match=r"^rank 1 did not call"):
            training.iterate_sharded()
    dist.barrier()


@pytest.mark.ranks(3, backend="gloo")
def test_a_rank_that_returns_early_from_a_loop_that_broadcasts_buffers_is_told(rank: int) -> None:
    training = Training(BatchNorm, bucket_mb=SMALL_MB, group=group_of(seconds=3))
    training.iterate()
    # Ranks wait for each other in the broadcast, before they agree to begin.
    if rank != 1:
        with pytest.raises(PeerLostError, match=r"did not call backward\(\) within 3 s|lost .* during"):
            training.iterate_sharded()
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.usefixtures("reads")
def test_a_rank_that_skips_step_beside_sharded_gradients_is_told(rank: int) -> None:
    training = Training(Plain, bucket_mb=SMALL_MB, group=group_of(seconds=3))
    training.iterate()
    training.on_this_rank().loss().backward()
    with pytest.raises(DisagreementError, match=r"^rank 0 called step\(\) .*; rank 1 called backward\(\)"):
        training.optimizer.step() if rank == 0 else training.iterate_sharded()
