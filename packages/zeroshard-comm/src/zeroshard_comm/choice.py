"""Chooses broadcasters and private groups by what the backend can do; ``transport`` chooses reducers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard_comm.agreement import Control
from zeroshard_comm.broadcasters import CollectiveBroadcaster, MessageBroadcaster
from zeroshard_comm.interfaces import ParameterBroadcaster, Segment
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.same_host import WORTH_READING, SameHostBroadcaster, all_read


def choose_broadcaster(control: Control, segments: Sequence[Segment], device: torch.device) -> ParameterBroadcaster:
    """Choose the fastest broadcaster that works for tensors on ``device``, for the thread that calls a step.

    Args:
        control: the channel, and the group.
        segments: the same on all ranks, as for :class:`~zeroshard_comm.ParameterBroadcaster`.
        device: where they are. Peers may read the segments until the ranks agree once more.

    Raises:
        RuntimeError: if the group has no backend for this device type.
    """
    ranks = control.ranks
    if not ranks.sends_tagged(device):
        check_backend(ranks, device)
        return CollectiveBroadcaster(ranks, segments, control.traffic)
    if all_read(ranks) and sum(segment.buffer.nbytes for segment in segments) >= WORTH_READING:
        return SameHostBroadcaster(control, segments)
    # No collectives: after one has failed, gloo delivers nothing any more, even between live ranks.
    return MessageBroadcaster(control.channel or ranks, segments, control.traffic)


def choose_private_group(ranks: RankGroup, device: torch.device) -> RankGroup:
    """Return a group of the same ranks and backend whose collectives never mix with others. Collective.

    It is made once per process group. A single rank, or a backend that moves no data, needs none.

    Args:
        ranks: the group.
        device: where the buffers are.

    Raises:
        RuntimeError: if the group has no backend for this device type.
        ValueError: if such a group cannot be made.
    """
    check_backend(ranks, device)
    if ranks.moves_data() and ranks.world_size > 1:
        return ranks.private_group(ranks.backend(device.type), "buckets")
    return ranks


def check_backend(ranks: RankGroup, device: torch.device) -> None:
    """Raise if a group cannot move tensors on a device.

    Raises:
        RuntimeError: if the group has no backend for this device type.
    """
    if ranks.moves_data() and not ranks.backend(device.type):
        raise RuntimeError(
            f"rank {ranks.rank}: the process group has no backend for tensors on {device.type!r}; initialise it with "
            f"one, e.g. init_process_group('cpu:gloo,cuda:nccl')"
        )
