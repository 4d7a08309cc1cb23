"""What each thread of this process waits for from other ranks, and which messages it has issued to whom.

torch tells, through its flight recorder, which collectives a rank has issued; it does not tell which thread waits for
what, nor anything of point-to-point messages on gloo. So the methods that issue messages and those that wait are
wrapped, in worker processes only: an entry in a dictionary for each wait, one for each message. Python's global lock
makes both atomic, and what a thread waits for can be read from another thread.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

# torch exports these unseen by type checkers.
from torch.distributed import Store, Work  # type: ignore[attr-defined]

from zeroshard_testing._torch_private import sequence_number, timeout_of
from zeroshard_testing.faults import Faults, reach

ANY_SOURCE = -1
"""The peer of a receive that takes a message from any rank."""

_MESSAGES_KEPT = 64


def described(tensors: object) -> str:
    """Return tensors as reports show them.

    >>> described([torch.ones(4, 3)])
    'float32[4, 3]'
    """
    if isinstance(tensors, torch.Tensor):
        return f"{str(tensors.dtype).removeprefix('torch.')}{list(tensors.shape)}"
    return ", ".join(map(described, tensors)) if isinstance(tensors, (list, tuple)) else ""


@dataclass(frozen=True)
class Issued:
    """What a work object stands for.

    Attributes:
        kind: ``"send"``, ``"recv"`` or ``"collective"``.
        group: The process group.
        peer: The other end's rank in the group, or `ANY_SOURCE`; meaningless for a collective.
        tag: The message's tag.
        number: For a message, how many of the same kind, group, peer and tag were issued before; for a collective its
            number in the group.
    """

    kind: str
    group: weakref.ref[dist.ProcessGroup]
    peer: int = ANY_SOURCE
    tag: int = 0
    number: int = 0


@dataclass
class Messages:
    """The messages of one kind, group, peer and tag: how many there were, and the latest of them in words."""

    count: int = 0
    latest: deque[str] = field(default_factory=lambda: deque(maxlen=_MESSAGES_KEPT))


@dataclass
class GroupRecord:
    """What was issued in one process group from Python, and what of it has failed.

    Attributes:
        messages: By kind, peer and tag.
        failed_messages: Whether waiting for a message has ended with an exception.
        failed_collectives: Numbers of the collectives that ended with an exception.
    """

    messages: dict[tuple[str, int, int], Messages] = field(default_factory=lambda: defaultdict(Messages))
    failed_messages: bool = False
    failed_collectives: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Wait:
    """One thread's wait, from when it began.

    Attributes:
        serial: Tells this wait from every other of the process.
        kind: ``"collective"`` for a collective or a future, ``"message"`` for a point-to-point message, ``"store"`` for
            a key, ``"other"`` for what nothing is known of.
        issued: The message that is waited for, None for other kinds.
        until: When the wait gives up by its own timeout, on the monotonic clock; None if that is unknown here.
        store: The store, for a wait of that kind.
        keys: The keys that are waited for there.
    """

    serial: int
    kind: str
    issued: Issued | None = None
    until: float | None = None
    store: Any = None
    keys: tuple[str, ...] = ()


class WaitRecorder:
    """The waits of this process's threads and what works stand for. Threads enter and leave their own waits only.

    There is one of it in a worker; `record_waits` makes it.
    """

    def __init__(self) -> None:
        self._serials = itertools.count()
        self._current: dict[int, Wait] = {}
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupRecord] = weakref.WeakKeyDictionary()
        self._works: weakref.WeakKeyDictionary[Any, Issued] = weakref.WeakKeyDictionary()

    def of_threads(self) -> dict[int, Wait]:
        """Return what each waiting thread waits for, by `threading.get_ident`."""
        return dict(self._current)

    def of_group(self, group: dist.ProcessGroup) -> GroupRecord:
        """Return the record of a group."""
        record = self._groups.get(group)
        if record is None:
            record = self._groups[group] = GroupRecord()
        return record

    def messages_in(self, group: dist.ProcessGroup) -> int:
        """Return how many messages were issued in a group."""
        record = self._groups.get(group)
        return 0 if record is None else sum(messages.count for messages in record.messages.values())

    def issue(self, kind: str, group: dist.ProcessGroup, peer: int, tag: int, tensors: object, work: object) -> None:
        """Note a message that has just been issued, and the work that stands for it."""
        messages = self.of_group(group).messages[kind, peer, tag]
        if work is not None:
            self._works[work] = Issued(kind, weakref.ref(group), peer, tag, messages.count)
        messages.count += 1
        messages.latest.append(described(tensors))

    def note_collective(self, group: dist.ProcessGroup, number: int, work: object) -> None:
        """Note which collective a work stands for."""
        if work is not None:
            self._works[work] = Issued("collective", weakref.ref(group), number=number)

    def wait(self, call: Callable[..., Any], owner: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever the wrapped method returns
        """Call a method that waits, with the wait on record for as long."""
        __tracebackhide__ = True
        issued = self._works.get(owner) if isinstance(owner, Work) else self._monitored(owner)
        kind = "other"
        if isinstance(owner, Store):
            kind = "store"
        elif isinstance(owner, (Work, torch._C.Future)):
            kind = "collective" if issued is None or issued.kind == "collective" else "message"
        keys: tuple[str, ...] = ()
        if kind == "store" and arguments:
            keys = (arguments[0],) if isinstance(arguments[0], str) else tuple(arguments[0])
        store = owner if kind == "store" else None
        me = threading.get_ident()
        outer = self._current.get(me)
        until = _end_of(owner, issued, arguments, named)
        self._current[me] = Wait(next(self._serials), kind, issued, until, store, keys)
        try:
            return call(owner, *arguments, **named)
        except BaseException:
            self._note_failure(issued)
            raise
        finally:
            if outer is None:
                self._current.pop(me, None)
            else:
                self._current[me] = outer

    def _monitored(self, owner: object) -> Issued | None:
        """Return the collective that a process group is about to wait in by itself: a monitored barrier."""
        if not isinstance(owner, dist.ProcessGroup):
            return None
        try:
            number = sequence_number(owner) - self.messages_in(owner) + 1
        except (RuntimeError, AttributeError):
            return None
        return Issued("collective", weakref.ref(owner), number=number)

    def _note_failure(self, issued: Issued | None) -> None:
        group = None if issued is None else issued.group()
        if issued is None or group is None:
            return
        if issued.kind == "collective":
            self.of_group(group).failed_collectives.add(issued.number)
        else:
            self.of_group(group).failed_messages = True


def record_waits(faults: Faults) -> WaitRecorder:
    """Wrap torch's waiting and sending methods; call once in a process.

    Args:
        faults: Asked before each message.

    Returns:
        The record that the wrappers keep.
    """
    recorder = WaitRecorder()
    waiting = (
        (Work, ["wait"]),
        (torch._C.Future, ["wait"]),
        (Store, ["wait", "get"]),
        (dist.ProcessGroup, ["monitored_barrier"]),
    )
    for owner, names in waiting:
        for name in names:
            setattr(owner, name, _waiting(recorder, getattr(owner, name)))
    for name, kind, takes_peer in (("send", "send", True), ("recv", "recv", True), ("recv_anysource", "recv", False)):
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, _issuing(recorder, faults, method, kind, takes_peer))
    return recorder


def _waiting(recorder: WaitRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped method
        __tracebackhide__ = True
        return recorder.wait(method, self, args, kwargs)

    wait.__doc__ = method.__doc__
    return wait


def _issuing(
    recorder: WaitRecorder, faults: Faults, method: Callable[..., Any], kind: str, takes_peer: bool
) -> Callable[..., Any]:
    def issue(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped method
        __tracebackhide__ = True
        if faults.armed and (instead := reach(faults, kind)) is not None:
            return instead
        work = method(self, *args, **kwargs)
        numbers = [*args[1:], *(kwargs[name] for name in ("dstRank", "srcRank", "tag") if name in kwargs)]
        peer, tag = numbers if takes_peer else (ANY_SOURCE, *numbers)
        tensors = args[0] if args else kwargs.get("tensors")
        recorder.issue(kind, self, int(peer), int(tag), tensors, work)
        return work

    issue.__doc__ = method.__doc__
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
