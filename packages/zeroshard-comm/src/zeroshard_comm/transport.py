"""Chooses how data travels, by what the backend can do with tensors of a device.

A transport makes the reducers and broadcasters of one optimizer's buckets; parameters that are in no bucket travel by a
broadcaster of :func:`choose_broadcaster`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from zeroshard_core import Run

from zeroshard_comm.agreement import Coordinator
from zeroshard_comm.broadcasters import MessageBroadcaster
from zeroshard_comm.collectives import CollectiveBroadcaster, CollectiveReducer
from zeroshard_comm.interfaces import GradientReducer, ParameterBroadcaster, Segment
from zeroshard_comm.message_reducer import WINDOW_BYTES, MessageReducer, ReceiveWindow
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.same_host import (
    WORTH_READING,
    SameHostBroadcaster,
    SameHostReducer,
    all_read,
    probe_peer_memory,
    scratch_memory,
)

TAG_BUCKETS = 0x5A530032

WORTH_OVERLAPPING = 16 * 1024 * 1024
"""Fewer bytes in all are added up after the last bucket, and parameters sent together: overlap would cost more."""


@dataclass(frozen=True)
class Transport:
    """Makes the reducers and broadcasters of one optimizer's buckets.

    Attributes:
        reducer: makes the reducer that sends the gradients of a bucket to their owners, by its ranges of elements and
            who owns them, in bucket order; and the bucket, 1-D, or any tensor of its dtype and device.
        broadcaster: makes the broadcaster of some segments; it is asked only if ``shares_buckets``.
        tags: offset to the tags of its messages, which must be the same on all ranks; 0 if it sends none.
        uses_thread: whether another thread finishes reductions; else all is done in one order on all ranks.
        shares_buckets: whether each bucket's parameters are sent separately, or all together, as without buckets.
    """

    reducer: Callable[[Sequence[Run], torch.Tensor], GradientReducer]
    broadcaster: Callable[[Sequence[Segment]], ParameterBroadcaster]
    tags: int = 0
    uses_thread: bool = False
    shares_buckets: bool = True


def choose_transport(coordinator: Coordinator, device: torch.device, nbytes: int) -> Transport:
    """Choose the fastest transport for buckets on a device. Collective.

    Args:
        coordinator: the channel, and the group.
        device: where parameters and buckets are.
        nbytes: of all parameters.

    Raises:
        RuntimeError: if the group has no backend for the device.
        ValueError: if a group of our own cannot be made.
    """
    ranks, traffic = coordinator.ranks, coordinator.traffic
    if _is_worth_reading(coordinator, device, nbytes):
        scratch = scratch_memory()
        return Transport(
            lambda runs, bucket: SameHostReducer(coordinator, runs, bucket.dtype, scratch),
            lambda segments: SameHostBroadcaster(coordinator, segments),
            shares_buckets=False,
        )
    if not ranks.sends_tagged(device):
        group = choose_private_group(ranks, device)
        return Transport(
            lambda runs, bucket: CollectiveReducer(group, traffic, runs, bucket),
            lambda segments: CollectiveBroadcaster(group, segments, traffic),
        )
    channel, tags = coordinator.channel, ranks.context.allocate_tags()
    window = ReceiveWindow(channel, WINDOW_BYTES, tags)
    overlaps = nbytes >= WORTH_OVERLAPPING
    return Transport(
        lambda runs, bucket: MessageReducer(channel, runs, bucket.dtype, window, traffic),
        lambda segments: MessageBroadcaster(channel, segments, traffic, tag=TAG_BUCKETS + tags),
        tags=tags,
        uses_thread=overlaps,
        shares_buckets=overlaps,
    )


def choose_broadcaster(
    coordinator: Coordinator, segments: Sequence[Segment], device: torch.device
) -> ParameterBroadcaster:
    """Choose the fastest broadcaster of tensors on ``device``, for the thread that calls a step. Collective.

    Args:
        coordinator: the channel, and the group.
        segments: the same on all ranks, as for :class:`~zeroshard_comm.ParameterBroadcaster`.
        device: where they are. Peers may read the segments until the ranks agree once more.

    Raises:
        RuntimeError: if the group has no backend for this device type.
    """
    ranks = coordinator.ranks
    if not ranks.sends_tagged(device):
        check_backend(ranks, device)
        return CollectiveBroadcaster(ranks, segments, coordinator.traffic)
    if _is_worth_reading(coordinator, device, sum(segment.nbytes for segment in segments)):
        return SameHostBroadcaster(coordinator, segments)
    # No collectives: after one has failed, gloo delivers nothing any more, even between live ranks.
    return MessageBroadcaster(coordinator.channel, segments, coordinator.traffic)


def _is_worth_reading(coordinator: Coordinator, device: torch.device, nbytes: int) -> bool:
    if device.type != "cpu":
        return False
    probe_peer_memory(coordinator)
    return all_read(coordinator.ranks) and nbytes >= WORTH_READING


def choose_private_group(ranks: RankGroup, device: torch.device) -> RankGroup:
    """Return a group of the same ranks and backend on which collectives of ours keep their order. Collective.

    That is the group itself if its backend runs collectives in the order of issue, as those that issue several as one
    do: all of ours are issued by the thread that runs backward, or that steps. Two groups under way on one device
    could wait for each other, would cost memory, and would not have the options of the first. Otherwise one is made,
    once per process group. A single rank, or a backend that moves no data, needs none.

    Args:
        ranks: the group.
        device: where the buffers are.

    Raises:
        RuntimeError: if the group has no backend for this device type.
        ValueError: if such a group cannot be made.
    """
    check_backend(ranks, device)
    if ranks.moves_data() and ranks.world_size > 1 and not ranks.coalesces(device):
        return ranks.private_group(ranks.backend(device.type), "buckets")
    return ranks


def check_backend(ranks: RankGroup, device: torch.device) -> None:
    """Raise RuntimeError if a group cannot move tensors on a device."""
    if ranks.moves_data() and not ranks.backend(device.type):
        raise RuntimeError(
            f"rank {ranks.rank}: the process group has no backend for tensors on {device.type!r}; initialise it with "
            f"one, e.g. init_process_group('cpu:gloo,cuda:nccl')"
        )
