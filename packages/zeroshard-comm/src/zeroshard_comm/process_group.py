"""A process group as one of its ranks sees it, and the state that all users of this project on it share.

Rank arithmetic in one place: group ranks inside, global ranks only at torch's own door.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from zeroshard_comm._torch_private import backends_of, supports_coalescing, timeout_of
from zeroshard_comm.errors import PeerLostError, unconnected

if TYPE_CHECKING:
    from zeroshard_comm.ring import Connections

_T = TypeVar("_T")

_TAG_SHIFT, _TAG_OFFSETS = 12, 1 << 16

ABORT = "ZEROSHARD_ABORT"
"""Environment variable; ``0`` leaves the operations of a device's backend alone when a rank has been lost."""

_TAG_NOTHING = 0x5A530005
"""Of messages that are never sent."""


@dataclass
class GroupContext:
    """State that all users of one process group share; all ranks change it in the same order. See `RankGroup.context`.

    Attributes:
        connections: our own, once all ranks have agreed for the first time.
        closed: why this rank has closed its connections in our own groups, if it has.
        optimizers: how many were built on the group.
        busy, doing: held by the thread that is in an agreement, and what it agrees on.
    """

    connections: Connections | None = None
    closed: str = ""
    optimizers: int = 0
    _private: dict[tuple[str, str], RankGroup] = field(default_factory=dict)
    _shared: dict[type[object], Any] = field(default_factory=dict)
    _tags: int = 0
    busy: threading.Lock = field(default_factory=threading.Lock)
    doing: str = ""

    def shared(self, kind: type[_T]) -> _T:
        """Return the object of a class that all users of the process group share; it is made at its first use."""
        found: _T = self._shared.setdefault(kind, kind())
        return found

    def number_optimizer(self) -> int:
        """Return the number of a further optimizer, from 1."""
        self.optimizers += 1
        return self.optimizers

    def allocate_tags(self) -> int:
        """Return an offset to tags that nothing else has been given on this group, in 65,535 calls.

        Messages with one tag between two ranks match in order, so a user with its own order needs its own tags. All
        tags of this project are ``0x5A530...``. All ranks allocate in the same order, and should compare what they were
        given before they use it.
        """
        self._tags = self._tags % (_TAG_OFFSETS - 1) + 1
        return self._tags << _TAG_SHIFT

    def close(self, error: BaseException) -> None:
        """Close this rank's connections in our own groups, so that no rank waits for it there though it lives on.

        Every exchange of ours on the process group then raises, on every rank. The user's group is unchanged. Call
        :meth:`RankGroup.close`.

        Args:
            error: what has happened: another rank was lost, or this one was interrupted.
        """
        if not self.closed:
            self.closed = str(error) or type(error).__name__
            if self.connections is not None:
                self.connections.close()
            for ranks in self._private.values():
                if ranks.sends_tagged(torch.device("cpu")):
                    ranks.close_connections()


_contexts: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupContext] = weakref.WeakKeyDictionary()
"""The one place where a context is found by its group, by all that come later: the group is all that they have in
common, and must not get a second one while it lives."""


@dataclass(frozen=True)
class RankGroup:
    """A process group as one of its ranks sees it.

    Attributes:
        group: torch's process group.
        rank: this process's rank in the group (group rank).
        world_size: number of ranks in the group.
        wait: how long operations may take, if it is not the timeout of the group.
    """

    group: dist.ProcessGroup
    rank: int
    world_size: int
    wait: timedelta | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> RankGroup:
        """Describe ``group``, or the default group.

        Raises:
            RuntimeError: if torch.distributed is not initialised, or this process is not in the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() first "
                "(a script started by torchrun needs only init_process_group('gloo') or ('nccl'))"
            )
        found = group if group is not None else dist.group.WORLD
        # torch answers -1 for a process that is outside, and hands such a process a marker in place of the group.
        if found is None or not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
            raise RuntimeError(f"global rank {dist.get_rank()} is not a member of the process group it was given")
        return cls(found, dist.get_rank(found), dist.get_world_size(found))

    @cached_property
    def context(self) -> GroupContext:
        """State that all users of this process group share, for as long as it lives."""
        return _contexts.setdefault(self.group, GroupContext())

    def private_group(self, backend: str, purpose: str) -> RankGroup:
        """Return a group of the same ranks, with the same timeout, on which nothing else is issued.

        It is made once for each purpose, by a collective among only these ranks.

        Args:
            backend: of the new group, such as ``"nccl"``.
            purpose: what it is for; groups for different purposes never meet.

        Raises:
            PeerLostError: if not all ranks connect.
            ValueError: if torch would need ranks outside of the group for it.
        """
        made = self.context._private
        if (backend, purpose) not in made:
            try:
                found = self._new_group(dist.get_process_group_ranks(self.group), backend, backend)
            except RuntimeError as failure:
                raise unconnected(failure, self.rank, self.world_size) from failure
            made[backend, purpose] = found
        return made[backend, purpose]

    def close(self, error: BaseException) -> None:
        """Close this rank's connections in our own groups, see :meth:`GroupContext.close`.

        If a rank was lost, what this rank has issued on devices is aborted too, once, except by gloo: it waits for the
        lost rank, and any read of a result in the user's code would wait for it, until the backend's own timeout.

        Args:
            error: what has happened.
        """
        if self.context.closed:
            return
        self.context.close(error)
        if isinstance(error, PeerLostError) and os.environ.get(ABORT) != "0":
            for backend in backends_of(self.group):
                if not isinstance(backend, dist.ProcessGroupGloo):
                    with suppress(RuntimeError):
                        backend.abort()

    def close_connections(self) -> None:
        """Close this rank's connections of a gloo group, as if it had ended."""
        for peer in self.peers:
            # torch has no call for that: abort() and shutdown() do nothing, and a group that is dropped stays open
            # while any message on it is under way. But gloo closes all connections of a group when a wait ends by its
            # timeout. Where they are closed already, this raises at once.
            with suppress(RuntimeError):
                room = torch.empty(1, dtype=torch.uint8, device="cpu")
                work = dist.irecv(room, group=self.group, group_src=peer, tag=_TAG_NOTHING)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    def subgroup(self, size: int) -> RankGroup:
        """Cut the group into groups of ``size`` consecutive group ranks, and make the one that this rank is in.

        A collective among only the ranks of that group. It has the same backends and timeout.

        Args:
            size: divides the number of ranks. If it is that number, this group itself is returned.

        Raises:
            ValueError: if torch would need ranks outside of the group for it.
        """
        if size == self.world_size:
            return self
        first = self.rank // size * size
        members = dist.get_process_group_ranks(self.group)[first : first + size]
        return self._new_group(members, dist.get_backend_config(self.group), self.backend("cuda"))

    def _new_group(self, members: list[int], backend: str, for_cuda: str) -> RankGroup:
        """Make a group of global ranks, all of which call this; raise where NCCL would split the default group."""
        default = dist.group.WORLD
        if for_cuda == "nccl" and default is not None and default.bound_device_id and len(members) < default.size():
            raise ValueError(
                f"a group of its own for the ranks {members} cannot be made while the default process group is bound "
                f"to a device: leave out device_id in init_process_group(), or use the default group"
            )
        return RankGroup.of(
            dist.new_group(members, timeout=self.timeout, backend=backend, use_local_synchronization=True)
        )

    @cached_property
    def timeout(self) -> timedelta | None:
        """The timeout of the group's operations; None if its backends do not tell."""
        return self.wait or timeout_of(self.group)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, starting after this one, so that not all ranks turn to the same peer first."""
        return tuple((self.rank + step) % self.world_size for step in range(1, self.world_size))

    @property
    def global_rank(self) -> int:
        """This process's rank in the default group."""
        return dist.get_global_rank(self.group, self.rank)

    def backend(self, device_type: str) -> str:
        """Name the backend that serves tensors of a device type, e.g. ``"gloo"``; ``""`` if none does."""
        by_device = dict(item.partition(":")[::2] for item in dist.get_backend_config(self.group).split(","))
        if device_type in by_device:
            return by_device[device_type]
        # A group made for one backend by name returns only that name.
        named = str(dist.get_backend(self.group))
        return named if named == "fake" or not by_device else ""

    def moves_data(self) -> bool:
        """Tell whether collectives of this group really communicate; torch's ``fake`` backend does not."""
        return "fake" not in dist.get_backend_config(self.group) and str(dist.get_backend(self.group)) != "fake"

    def coalesces(self, device: torch.device) -> bool:
        """Tell whether several collectives of tensors on ``device`` can be issued as one group."""
        return self.moves_data() and supports_coalescing(self.group, device)

    def sends_tagged(self, device: torch.device) -> bool:
        """Tell whether tensors on ``device`` can be sent point to point with tags: gloo can, for CPU tensors."""
        return device.type == "cpu" and self.backend("cpu") == "gloo"
