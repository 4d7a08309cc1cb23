"""A rank that dies in backward: the others raise an error that names a lost rank, and nobody waits."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ddp_by_collectives import BOTH_WAYS, CollectiveTwins
from support.ddp_training import EVERY_HOOK, Twins
from support.groups import group_of
from support.sharded_model import Plain
from support.sharded_training import SMALL_MB, Training
from zeroshard_comm import Coordinator, PeerLostError
from zeroshard_comm.message_exchange import MessageReduceWork
from zeroshard_testing import Faults


@pytest.mark.ranks(3, backend="gloo")
@BOTH_WAYS
@EVERY_HOOK
def test_a_rank_that_dies_in_backward_is_an_error_on_the_others(
    rank: int, twins_by: type[Twins], hook: str, faults: Faults
) -> None:
    twins = twins_by(hook, process_group=group_of(seconds=3))
    twins.iterate(0)
    twins.iterate(1)
    faults.kill(1, "reduce#2" if twins_by is CollectiveTwins else "send#2")
    twins.optimizer.zero_grad()

    def train_twice_more() -> None:
        for number in range(2, 4):
            twins.backward(twins.ddp, number)
            twins.optimizer.step()
            twins.optimizer.zero_grad()

    named = r"lost (rank|another)|could not finish" if twins_by is CollectiveTwins else "lost rank"
    with pytest.raises(PeerLostError, match=rf"rank {rank} ({named})"):
        train_twice_more()


@pytest.mark.ranks(3, backend="gloo")
def test_a_rank_that_dies_in_a_backward_that_shards_gradients_is_an_error_on_the_others(
    rank: int, faults: Faults
) -> None:
    training = Training(Plain, bucket_mb=SMALL_MB, group=group_of(seconds=3))
    training.iterate()
    training.iterate()
    faults.kill(1, "send#2")
    with pytest.raises(PeerLostError, match=rf"rank {rank} lost rank"):
        training.iterate_sharded()


@pytest.mark.by_default("3-killed")
@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("lost", ["killed", "late"])
def test_a_rank_that_is_lost_before_norms_are_exchanged_is_an_error_on_the_others(
    rank: int, lost: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(process_group=group_of(seconds=3))
    twins.iterate(0)
    twins.iterate(1)

    combine = Coordinator.combine_disjoint

    def combine_late(*arguments: Any) -> torch.Tensor:
        if lost == "killed":
            faults.kill(1, "send#1")
            dist.isend(torch.zeros(1), 0)
        else:
            # Twice the timeout.
            time.sleep(6)
        return combine(*arguments)

    if rank == 1:
        monkeypatch.setattr(Coordinator, "combine_disjoint", combine_late)
    twins.optimizer.zero_grad()
    with pytest.raises(PeerLostError, match=r"the end of backward\(\)"):
        twins.backward(twins.ddp, 2)
    with pytest.raises(PeerLostError, match="build the optimizer again"):
        twins.optimizer.step()


# What is not sent leaves messages without another end.
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
def test_no_thread_waits_for_a_bucket_that_could_not_be_sent(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(Plain, bucket_mb=SMALL_MB)
    training.iterate()
    if rank == 1:
        # As when the other rank is gone after it has sent all of its values. The two threads may raise either error.
        monkeypatch.setattr(MessageReduceWork, "close", mock.Mock(side_effect=PeerLostError("cable pulled")))
    with pytest.raises(PeerLostError, match=r"cable pulled|lost rank"):
        training.iterate_sharded()
    with pytest.raises(PeerLostError, match="build the optimizer again"):
        training.optimizer.step()
