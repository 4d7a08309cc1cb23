"""Process groups: one rank's view of a group, and the state that all objects of this project on a group share.

The project uses group ranks; only calls of torch get global ranks.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zeroshard_comm._torch_private import backends_of, supports_coalescing, timeout_of
from zeroshard_comm.errors import PeerLostError, unconnected
from zeroshard_comm.traffic import Traffic

_T = TypeVar("_T")

_TAG_SHIFT, _TAG_OFFSETS = 12, 1 << 16

_TAG_NOTHING = 0x5A530005
"""Tag of receives for which no message is ever sent."""

ABORT = "ZEROSHARD_ABORT"
"""Environment variable. If it is ``0``, losing a rank does not abort operations of a device's backend."""


class GroupConnections(ABC):
    """The interface of :class:`zeroshard_comm.ring.Connections`. ``channel`` is the group for messages."""

    channel: RankGroup

    @abstractmethod
    def combine(
        self, numbers: torch.Tensor, tag: int, operation: str, traffic: Traffic, lost: PeerLostError | None = None
    ) -> torch.Tensor:
        """Return the bitwise OR over all ranks. Collective."""

    @abstractmethod
    def tell(self, number: int, error: tuple[str, str]) -> None:
        """Send this rank's number of the next :meth:`combine` now, and write an error for :meth:`told`."""

    @abstractmethod
    def told(self) -> dict[int, list[str]]:
        """Return the errors that ranks have told for the last :meth:`combine`, by rank."""

    @abstractmethod
    def close(self) -> None:
        """Close this rank's connections, so that no rank waits for it."""


@dataclass
class GroupContext:
    """State that all users of one process group share. All ranks change it in the same order.

    Attributes:
        connections: zeroshard's own connections; None until all ranks have agreed once.
        closed: why this rank closed zeroshard's own connections; empty if it did not.
        optimizers: the number of optimizers that were built on the group.
        busy, doing: the lock that a thread holds while it communicates, and the operation for which it does.
    """

    connections: GroupConnections | None = None
    closed: str = ""
    optimizers: int = 0
    _private: dict[tuple[str, str], RankGroup] = field(default_factory=dict)
    _shared: dict[type[object], Any] = field(default_factory=dict)
    _tags: int = 0
    busy: threading.Lock = field(default_factory=threading.Lock)
    doing: str = ""

    def shared(self, kind: type[_T]) -> _T:
        """Return the object of a class that all users of the process group share. The first call makes it."""
        found: _T = self._shared.setdefault(kind, kind())
        return found

    def number_optimizer(self) -> int:
        """Count one more optimizer, and return its number. The first one is 1."""
        self.optimizers += 1
        return self.optimizers

    def allocate_tags(self) -> int:
        """Return an offset for the tags ``0x5A530...``. Offsets are unique on this group for 65,535 calls.

        Messages with the same tag between two ranks match in order, so an object that sends in an order of its own
        needs its own tags. All ranks allocate in the same order, and should compare their offsets before they use them.
        """
        self._tags = self._tags % (_TAG_OFFSETS - 1) + 1
        return self._tags << _TAG_SHIFT


_contexts: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupContext] = weakref.WeakKeyDictionary()
"""The context of each process group. A group keeps its context as long as it lives."""


@dataclass(frozen=True)
class RankGroup:
    """A process group as one of its ranks sees it.

    Attributes:
        group: torch's process group.
        rank: this process's rank in the group (group rank).
        world_size: number of ranks in the group.
        wait: replaces the timeout of the group, unless it is None.
    """

    group: dist.ProcessGroup
    rank: int
    world_size: int
    wait: timedelta | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> RankGroup:
        """Return this rank's view of ``group``, or of the default group if that is None.

        Raises:
            RuntimeError: if torch.distributed is not initialized, or this process is not in the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialized: call torch.distributed.init_process_group() first "
                "(a script started by torchrun needs only init_process_group('gloo') or ('nccl'))"
            )
        found = group if group is not None else dist.group.WORLD
        # For a process outside of the group, torch returns rank -1, and a marker in place of the group.
        if found is None or not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
            raise RuntimeError(f"global rank {dist.get_rank()} is not a member of the process group that was passed")
        return cls(found, dist.get_rank(found), dist.get_world_size(found))

    @cached_property
    def context(self) -> GroupContext:
        """The state that all users of this process group share as long as it lives."""
        return _contexts.setdefault(self.group, GroupContext())

    def private_group(self, backend: str, purpose: str) -> RankGroup:
        """Return a group of the same ranks with the same timeout, for the caller's operations only.

        The first call for a backend and a purpose makes the group, as a collective of only these ranks.

        Args:
            backend: the backend of the new group, such as ``"nccl"``.
            purpose: the use of the group; each purpose has a group of its own.

        Raises:
            PeerLostError: if not all ranks connect.
            ValueError: if torch would need ranks outside of the group to make it.
        """
        made = self.context._private
        if (backend, purpose) not in made:
            members, default = dist.get_process_group_ranks(self.group), dist.group.WORLD
            # NCCL would split the default group.
            if backend == "nccl" and default is not None and default.bound_device_id and len(members) < default.size():
                raise ValueError(
                    f"zeroshard cannot make a private group for ranks {members}, because the default process group is "
                    f"bound to a device: leave out device_id in init_process_group(), or use the default group"
                )
            try:
                group = dist.new_group(members, timeout=self.timeout, backend=backend, use_local_synchronization=True)
            except RuntimeError as failure:
                raise unconnected(failure, self.rank, self.world_size) from failure
            made[backend, purpose] = RankGroup.of(group)
        return made[backend, purpose]

    def close(self, error: BaseException) -> None:
        """Close zeroshard's own connections of this rank, so that no other rank waits for this one.

        Every exchange of zeroshard on the process group then raises, on every rank. The user's group stays open. If the
        error is a PeerLostError, this also aborts this rank's operations on backends other than gloo, once: they, and
        user code that reads their results, would wait for the lost rank until the backend's own timeout.

        Args:
            error: the reason, which later errors of this rank quote.
        """
        context = self.context
        if context.closed:
            return
        context.closed = str(error) or type(error).__name__
        if context.connections is not None:
            context.connections.close()
        for ranks in context._private.values():
            if ranks.sends_tagged(torch.device("cpu")):
                close_connections(ranks.group)
        if isinstance(error, PeerLostError) and os.environ.get(ABORT) != "0":
            for backend in backends_of(self.group):
                if not isinstance(backend, dist.ProcessGroupGloo):
                    with suppress(RuntimeError):
                        backend.abort()

    @cached_property
    def timeout(self) -> timedelta | None:
        """The timeout of the group's operations; None if no backend reports one."""
        return self.wait or timeout_of(self.group)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, starting after this one, so that not all ranks send to the same peer first."""
        return tuple((self.rank + step) % self.world_size for step in range(1, self.world_size))

    @property
    def global_rank(self) -> int:
        """This process's rank in the default group."""
        return dist.get_global_rank(self.group, self.rank)

    def backend(self, device_type: str) -> str:
        """Return the name of the backend for tensors of a device type, e.g. ``"gloo"``; ``""`` if there is none."""
        by_device = dict(item.partition(":")[::2] for item in dist.get_backend_config(self.group).split(","))
        if device_type in by_device:
            return by_device[device_type]
        # The config of a group that was made for one backend is only the name of the backend.
        named = str(dist.get_backend(self.group))
        return named if named == "fake" or not by_device else ""

    def moves_data(self) -> bool:
        """Return True if collectives of this group communicate; torch's ``fake`` backend does not."""
        return "fake" not in dist.get_backend_config(self.group) and str(dist.get_backend(self.group)) != "fake"

    def coalesces(self, device: torch.device) -> bool:
        """Return True if several collectives of tensors on ``device`` can be issued as one group."""
        return self.moves_data() and supports_coalescing(self.group, device)

    def sends_tagged(self, device: torch.device) -> bool:
        """Return True if tensors on ``device`` can be sent with tags, which only gloo supports, for CPU tensors."""
        return device.type == "cpu" and self.backend("cpu") == "gloo"


def close_connections(gloo: Any) -> None:  # noqa: ANN401 - torch's stubs lack methods of gloo's class
    """Close this rank's connections of a gloo group, as if the process had ended."""
    for peer in range(gloo.size()):
        if peer != gloo.rank():
            # torch has no call that closes them: abort() and shutdown() do nothing, and a dropped group stays open
            # while a message on it is in flight. But gloo closes all connections of a group when a wait times out.
            # If they are closed already, this raises at once.
            with suppress(RuntimeError):
                room = torch.empty(1, dtype=torch.uint8, device="cpu")
                gloo.recv([room], peer, _TAG_NOTHING).wait(timedelta(milliseconds=1))
