"""A rank that is late is waited for, and changes nothing."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from support.ddp_by_collectives import CollectiveTwins
from support.ddp_training import EVERY_HOOK, Twins
from support.pairs import go_on, trained
from support.sharded_model import Plain
from support.sharded_training import SMALL_MB, Training
from zeroshard_testing import Faults, assert_replicas_equal


@pytest.mark.ranks(3, backend="gloo")
def test_a_late_rank_is_waited_for(rank: int) -> None:
    pair, optimizers = trained()
    for step in range(3):
        time.sleep(0.3 * (rank == step))
        go_on(pair, optimizers, range(step, step + 1))
    assert_replicas_equal(pair[0].parameters())


@pytest.mark.ranks(4, backend="gloo")
def test_a_rank_that_is_late_at_random_places_changes_nothing(faults: Faults) -> None:
    faults.delay(rank=2, at="send#*", seconds=(0.0, 0.02), seed=1)
    pair, optimizers = trained()
    go_on(pair, optimizers, range(2, 5))
    assert_replicas_equal(pair[0].parameters())


def delay_one_rank(faults: Faults, number: int, seed: int = 0) -> None:
    """Let one message of one rank be late in an iteration."""
    for operation in ("send", "recv"):
        slow = (seed + number) % dist.get_world_size()
        faults.delay(slow, f"{operation}#{1 + (7 * number + seed) % 9}", (0.0, 0.01), seed=number)


@pytest.mark.by_default("3-0")
@pytest.mark.ranks(3, 4, backend="gloo", timeout=120)
@pytest.mark.parametrize("seed", range(4))
def test_random_delays_of_one_rank_change_nothing(seed: int, faults: Faults) -> None:
    # 50 iterations under each of 4 seeds: 200 runs of a whole iteration, each message of one rank late by chance.
    twins = Twins("hook_with_zero_step_interleaved")
    for number in range(50):
        delay_one_rank(faults, number, seed)
        twins.iterate(number)
    twins.check("after 50 iterations")


@pytest.mark.by_default("3-hook_with_zero_step_interleaved")
@pytest.mark.ranks(3, backend="gloo", timeout=120)
@EVERY_HOOK
def test_random_delays_of_one_rank_change_nothing_in_collectives(hook: str, faults: Faults) -> None:
    twins = CollectiveTwins(hook)
    for number in range(12):
        for operation, calls in {"reduce": 4, "broadcast": 3}.items():
            faults.delay(number % 3, f"{operation}#{1 + number % calls}", (0.0, 0.01), seed=number)
        twins.iterate(number)
    twins.check("after 12 iterations")


# ---------------------------------------------------------------------- sharded gradients


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.usefixtures("reads")
def test_a_rank_that_is_late_in_backward_is_waited_for(rank: int) -> None:
    training = Training(Plain, bucket_mb=SMALL_MB)
    # Each rank in turn.
    training.model.b.weight.register_hook(lambda _: time.sleep(0.2 * (rank == training.number)))
    for _ in range(3):
        training.iterate()


@pytest.mark.by_default("3-0")
@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("seed", range(4))
def test_random_delays_of_one_rank_change_nothing_in_sharded_gradients(seed: int, faults: Faults) -> None:
    training = Training(Plain, bucket_mb=SMALL_MB)
    for number in range(20):
        delay_one_rank(faults, number, seed)
        training.iterate()
