"""Words that every rank tells every other, by memory and by messages."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from zeroshard_comm import Control, Noticeboard, PeerLostError, RankGroup
from zeroshard_comm.cross_memory import SWITCH, machine
from zeroshard_testing import Faults

TAG = 0x77
BY = pytest.mark.parametrize("by", ["memory", "messages"])


def board(by: str, monkeypatch: pytest.MonkeyPatch, seconds: float = 20) -> Noticeboard:
    """Make one on a group of its own."""
    if by == "messages":
        monkeypatch.setenv(SWITCH, "0")
    elif not machine():
        pytest.skip("ranks cannot read each other's memory here")
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    return Noticeboard(Control(RankGroup.of(group)), TAG, "a test")


@pytest.mark.ranks(1, 2, 4, backend="gloo")
@BY
def test_words_come_in_order(rank: int, world_size: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = board(by, monkeypatch)
    assert made.by_memory is (by == "memory" and world_size > 1)
    for number in range(300):
        if (number + rank) % 50 == 0:
            time.sleep(0.002)
        assert not made.is_posted
        made.post(1000 * number + rank)
        assert made.is_posted
        assert made.read() == [1000 * number + other for other in range(world_size)]
    made.post(2**32 - 1 - rank)
    assert made.read() == [2**32 - 1 - other for other in range(world_size)]
    made.settle()


@pytest.mark.ranks(2, backend="gloo")
@BY
def test_two_boards_of_one_group_do_not_meet(rank: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = board(by, monkeypatch)
    second = Noticeboard(first._control, TAG + 1, "another test")
    for number in range(50):
        order = (first, second) if (number + rank) % 2 else (second, first)
        for made in order:
            made.post(number + (made is second))
        assert [made.read() for made in (first, second)] == [[number] * 2, [number + 1] * 2]
    first.settle()


@pytest.mark.ranks(2, backend="gloo")
@BY
def test_a_rank_that_does_not_come_is_named(rank: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = board(by, monkeypatch, seconds=1)
    if rank == 1:
        time.sleep(2)
        return
    made.post(7)
    with pytest.raises(PeerLostError, match="rank 0 lost rank 1 during a test"):
        made.read()


@pytest.mark.ranks(3, backend="gloo")
@BY
def test_a_rank_that_dies_is_named(rank: int, faults: Faults, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = board(by, monkeypatch, seconds=5)
    made.post(0)
    made.read()
    # Not settled: the rank that sees the death first must not take its word away from the other one.
    dist.barrier()
    faults.kill(rank=2, at="send")
    if rank == 2:
        dist.send(torch.zeros(1), 0, tag=5)
    made.post(1)
    with pytest.raises(PeerLostError, match="lost rank 2 during a test"):
        made.read()
