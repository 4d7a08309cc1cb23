"""What each thread of this process waits for from other ranks, and which messages it has issued to whom.

torch tells, through its flight recorder, which collectives a rank has issued; it does not tell which thread waits for
what, nor anything of point-to-point messages on gloo. So the methods that issue messages and those that wait are
wrapped, in worker processes only: an entry in a dictionary for each wait, which Python's global lock makes atomic, so
that another thread can read it, and one for each message, under a lock of its group.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

# torch exports these unseen by type checkers.
from torch.distributed import Store, Work  # type: ignore[attr-defined]

from zeroshard_testing._torch_private import FUTURE, process_groups, sequence_number, timeout_of
from zeroshard_testing.faults import Faults
from zeroshard_testing.rank_state import Operation

ANY_SOURCE = -1
"""The peer of a receive that takes a message from any rank."""

_MESSAGES_KEPT = 64
# Seconds to wait for a thread that is just issuing a message, which may block until the peer opens a connection.
_ISSUING_TIMEOUT = 1.0


def described(tensors: object) -> str:
    """Return tensors as reports show them."""
    if isinstance(tensors, torch.Tensor):
        return f"{str(tensors.dtype).removeprefix('torch.')}{list(tensors.shape)}"
    return ", ".join(map(described, tensors)) if isinstance(tensors, (list, tuple)) else ""


@dataclass(frozen=True)
class Issued:
    """What a work object stands for: a message (``"send"`` or ``"recv"``), or a ``"collective"`` by its number.

    A message's peer is a rank of the group, or `ANY_SOURCE`; its number says how many alike were issued before.
    """

    kind: str
    group: weakref.ref[dist.ProcessGroup]
    peer: int = ANY_SOURCE
    tag: int = 0
    number: int = 0


@dataclass
class Messages:
    """The messages of one kind, peer and tag in a group: how many there were, and the latest of them in words."""

    count: int = 0
    latest: deque[str] = field(default_factory=lambda: deque(maxlen=_MESSAGES_KEPT))


@dataclass
class GroupRecord:
    """What was issued in one process group from Python, and what of it has ended with an exception.

    Messages are by kind, peer and tag, the latest collectives by number. Some collectives take two of the group's
    sequence numbers: ``numbers`` is how many all of them took. The checksum is of all of them, in order. Of an unlisted
    group, which torch does not know by rank, only messages are looked at.
    """

    messages: dict[tuple[str, int, int], Messages] = field(default_factory=lambda: defaultdict(Messages))
    failed_messages: bool = False
    collectives: dict[int, Operation] = field(default_factory=dict)
    failed_collectives: set[int] = field(default_factory=set)
    numbers: int = 0
    checksum: int = 0
    unlisted: bool = False
    _issuing: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def no_message_half_counted(self) -> Iterator[None]:
        """Keep other threads from issuing messages: torch has numbered one before it is counted here."""
        held = self._issuing.acquire(timeout=_ISSUING_TIMEOUT)
        try:
            yield
        finally:
            if held:
                self._issuing.release()


@dataclass(frozen=True)
class Wait:
    """One thread's wait: the object whose method it is in, with the arguments, and what that stands for, if known.

    The serial number tells it from every other wait of the process. It gives up at ``until`` on the monotonic clock,
    None if that is unknown here.
    """

    serial: int
    owner: Any
    arguments: tuple[Any, ...]
    issued: Issued | None
    until: float | None


class WaitRecorder:
    """The waits of this process's threads, what works stand for, and what was issued in each group.

    There is one of it in a worker; `record_waits` makes it. Threads enter and leave their own waits only.
    """

    def __init__(self) -> None:
        self._serials = itertools.count()
        self.current: dict[int, Wait | None] = {}
        """What each thread waits for, by `threading.get_ident`."""
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupRecord] = weakref.WeakKeyDictionary()
        self._works: weakref.WeakKeyDictionary[Any, Issued] = weakref.WeakKeyDictionary()

    def of_group(self, group: dist.ProcessGroup) -> GroupRecord:
        """Return the record of a group."""
        found = self._groups.get(group)
        return found or self._groups.setdefault(group, GroupRecord(unlisted=group not in process_groups()))

    def unlisted(self) -> list[dist.ProcessGroup]:
        """Return the groups with messages that torch does not list."""
        return [group for group, record in list(self._groups.items()) if record.unlisted]

    def forget_unlisted(self) -> None:
        """Forget the messages of groups that torch does not list: an earlier test's may have the same names."""
        for group in self.unlisted():
            self._groups.pop(group, None)

    def collectives_in(self, group: dist.ProcessGroup) -> int:
        """Return how many collectives were issued in a group, from C++ too; raises if the backend does not count."""
        record = self.of_group(group)
        if record.unlisted:
            return 0
        with record.no_message_half_counted():
            # The group numbers collectives and messages alike.
            return sequence_number(group) - sum(messages.count for messages in record.messages.values())

    def note_message(
        self, work: object, kind: str, group: dist.ProcessGroup, peer: int, tag: int, tensors: object
    ) -> None:
        """Note a message that has just been issued, and the work that stands for it."""
        messages = self.of_group(group).messages[kind, peer, tag]
        self.note_work(work, Issued(kind, weakref.ref(group), peer, tag, messages.count))
        messages.count += 1
        messages.latest.append(described(tensors))

    def note_work(self, work: object, issued: Issued) -> None:
        """Note what a work stands for, where there is one."""
        if work is not None:
            self._works[work] = issued

    def wait(self, call: Callable[..., Any], owner: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever the wrapped method returns
        """Call a method that waits, with the wait on record for as long."""
        __tracebackhide__ = True
        issued = self._works.get(owner) if isinstance(owner, Work) else self._monitored(owner)
        me = threading.get_ident()
        outer = self.current.get(me)
        until = _end_of(owner, issued, arguments, named)
        self.current[me] = Wait(next(self._serials), owner, arguments, issued, until)
        try:
            return call(owner, *arguments, **named)
        except BaseException:
            self._note_failure(issued)
            raise
        finally:
            self.current[me] = outer

    def _monitored(self, owner: object) -> Issued | None:
        """Return the collective that a process group is about to wait in by itself: a monitored barrier."""
        if not isinstance(owner, dist.ProcessGroup):
            return None
        try:
            return Issued("collective", weakref.ref(owner), number=self.collectives_in(owner) + 1)
        except (RuntimeError, AttributeError):
            return None

    def _note_failure(self, issued: Issued | None) -> None:
        if issued is None or (group := issued.group()) is None:
            return
        if issued.kind == "collective":
            self.of_group(group).failed_collectives.add(issued.number)
        else:
            self.of_group(group).failed_messages = True


def record_waits(faults: Faults) -> WaitRecorder:
    """Wrap torch's waiting and sending methods, once in a process, and return the record that the wrappers keep."""
    recorder = WaitRecorder()
    barrier = (dist.ProcessGroup, "monitored_barrier")
    for owner, name in ((Work, "wait"), (FUTURE, "wait"), (Store, "wait"), (Store, "get"), barrier):
        setattr(owner, name, _waiting(recorder, getattr(owner, name)))
    for name in ("send", "recv", "recv_anysource"):
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, _issuing(recorder, faults, method, name.removesuffix("_anysource")))
    return recorder


def _waiting(recorder: WaitRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait(self: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped method
        __tracebackhide__ = True
        return recorder.wait(method, self, args, kwargs)

    return wait


def _issuing(recorder: WaitRecorder, faults: Faults, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def issue(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped method
        __tracebackhide__ = True
        if faults.armed and (instead := faults._reach(kind)) is not None:
            return instead
        with recorder.of_group(self).no_message_half_counted():
            work = method(self, *args, **kwargs)
            tensors = args[0] if args else kwargs.get("tensors")
            *peer, tag = [*args[1:], *(kwargs[name] for name in ("dstRank", "srcRank", "tag") if name in kwargs)]
            recorder.note_message(work, kind, self, int(peer[0]) if peer else ANY_SOURCE, int(tag), tensors)
        return work

    return issue


def _end_of(owner: object, issued: Issued | None, arguments: tuple[Any, ...], named: dict[str, Any]) -> float | None:
    for value in (*arguments, *named.values()):
        # Zero means none of its own.
        if isinstance(value, timedelta) and value:
            return monotonic() + value.total_seconds()
    if isinstance(owner, Store):
        seconds: float = owner.timeout.total_seconds()  # type: ignore[attr-defined]  # missing in torch's stubs
        return monotonic() + seconds
    group = None if issued is None or issued.kind == "collective" else issued.group()
    return None if group is None else monotonic() + timeout_of(group)
