"""Chooses how data is sent, by the capabilities of the backend for tensors of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from zeroshard_core import Run

from zeroshard_comm.agreement import Coordinator
from zeroshard_comm.collectives import CollectiveBroadcaster, CollectiveReducer
from zeroshard_comm.interfaces import GradientReducer, ParameterBroadcaster, Segment
from zeroshard_comm.message_exchange import WINDOW_BYTES, MessageBroadcaster, MessageReducer, ReceiveWindow
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.same_host import (
    WORTH_READING,
    SameHostBroadcaster,
    SameHostReducer,
    all_read,
    probe_peer_memory,
    scratch_memory,
)

WORTH_OVERLAPPING = 16 * 1024 * 1024
"""With fewer bytes in total, gradients are added after the last bucket, and parameters are sent together."""


@dataclass(frozen=True)
class Transport:
    """Makes the reducers and broadcasters of one optimizer's buckets.

    Parameters that are in no bucket are sent by a broadcaster from :func:`choose_broadcaster`.

    Attributes:
        reducer: makes the reducer of a bucket, from its ranges of elements with their owners, in bucket order, and the
            1-D bucket, or any tensor with its dtype and device.
        broadcaster: makes the broadcaster of segments; called only if ``broadcasts_buckets``.
        tags: offset of the tags of its messages, which must be the same on all ranks; 0 if it sends no messages.
        uses_thread: whether another thread finishes reductions. If not, all ranks do everything in the same order.
        is_read_by_peers: whether other ranks read a bucket in place. Its memory may then be reused only after this
            rank has finished a later reduction, or all ranks have agreed; see :class:`BucketReduceWork`.
        broadcasts_buckets: whether each bucket's parameters are sent separately. If not, all are sent together.
    """

    reducer: Callable[[Sequence[Run], torch.Tensor], GradientReducer]
    broadcaster: Callable[[Sequence[Segment]], ParameterBroadcaster]
    tags: int = 0
    uses_thread: bool = False
    is_read_by_peers: bool = False
    broadcasts_buckets: bool = True


def choose_transport(coordinator: Coordinator, device: torch.device, nbytes: int) -> Transport:
    """Choose the fastest transport for buckets on a device. Collective.

    Args:
        coordinator: agrees on the process group.
        device: the device of parameters and buckets; the same type on all ranks.
        nbytes: size of all parameters, in bytes; equal on all ranks.

    Raises:
        RuntimeError: if the group has no backend for the device.
        ValueError: if a private group is needed and cannot be made.
    """
    ranks, traffic = coordinator.ranks, coordinator.traffic
    if _is_worth_reading(coordinator, device, nbytes):
        scratch = scratch_memory()
        return Transport(
            lambda runs, bucket: SameHostReducer(coordinator, runs, bucket.dtype, scratch),
            lambda segments: SameHostBroadcaster(coordinator, segments),
            is_read_by_peers=True,
            broadcasts_buckets=False,
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
        lambda segments: MessageBroadcaster(channel, segments, traffic, tags),
        tags=tags,
        uses_thread=overlaps,
        broadcasts_buckets=overlaps,
    )


def choose_broadcaster(
    coordinator: Coordinator, segments: Sequence[Segment], device: torch.device
) -> ParameterBroadcaster:
    """Choose the fastest broadcaster of segments, for the thread that calls a step. Collective.

    Args:
        coordinator: agrees on the process group.
        segments: as for :class:`ParameterBroadcaster`. Peers may read them until the ranks agree once more.
        device: the device of the segments; the same type on all ranks.

    Raises:
        RuntimeError: if the group has no backend for this device type.
    """
    ranks = coordinator.ranks
    if not ranks.sends_tagged(device):
        _check_backend(ranks, device)
        return CollectiveBroadcaster(ranks, segments, coordinator.traffic)
    if _is_worth_reading(coordinator, device, sum(segment.nbytes for segment in segments)):
        return SameHostBroadcaster(coordinator, segments)
    # Not collectives: after one has failed, gloo delivers nothing, even between live ranks.
    return MessageBroadcaster(coordinator.channel, segments, coordinator.traffic)


def _is_worth_reading(coordinator: Coordinator, device: torch.device, nbytes: int) -> bool:
    """Return True if ranks should read each other's memory. Collective, because the first call tests a read."""
    if device.type != "cpu":
        return False
    probe_peer_memory(coordinator)
    return all_read(coordinator.ranks) and nbytes >= WORTH_READING


def choose_private_group(ranks: RankGroup, device: torch.device) -> RankGroup:
    """Return a group of the same ranks and backend on which zeroshard's collectives keep their order. Collective.

    This is ``ranks`` itself if its backend runs collectives in the order of issue, as backends that coalesce them do: a
    second group on one device could wait for the first, would cost memory, and would lack its options. It is also
    ``ranks`` for a single rank or a backend that moves no data. Otherwise, a group is made once per process group.

    Args:
        ranks: the process group.
        device: the device of the tensors of these collectives.

    Raises:
        RuntimeError: if the group has no backend for this device type.
        ValueError: if a private group cannot be made.
    """
    _check_backend(ranks, device)
    if ranks.moves_data() and ranks.world_size > 1 and not ranks.coalesces(device):
        return ranks.private_group(ranks.backend(device.type), "buckets")
    return ranks


def _check_backend(ranks: RankGroup, device: torch.device) -> None:
    if ranks.moves_data() and not ranks.backend(device.type):
        raise RuntimeError(
            f"rank {ranks.rank}: the process group has no backend for tensors on {device.type!r}; initialize it with "
            f"one, e.g. init_process_group('cpu:gloo,cuda:nccl')"
        )
