"""What each thread of this process waits for from other ranks, and how many messages it has sent to whom.

torch tells, through its flight recorder, which collectives a rank has issued; it does not tell which thread waits for
what, nor anything of point-to-point messages on gloo. So the methods that issue messages and those that wait are
wrapped, in worker processes only: an entry in a dictionary for each wait, a count for each message. Python's global
lock makes both atomic, and what a thread waits for can be read from another thread.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

# torch exports these unseen by type checkers.
from torch.distributed import Store, Work  # type: ignore[attr-defined]

from zeroshard_testing.faults import Faults, reach

ANY_SOURCE = -1
"""The peer of a receive that takes a message from whoever sends."""


@dataclass(frozen=True)
class Message:
    """A point-to-point message that this process has issued.

    Attributes:
        kind: ``"send"`` or ``"recv"``.
        group: The process group.
        peer: The other end's rank in the group, or `ANY_SOURCE`.
        tag: The message's tag.
        number: How many of the same kind, group, peer and tag were issued before.
    """

    kind: str
    group: weakref.ref[dist.ProcessGroup]
    peer: int
    tag: int
    number: int


@dataclass(frozen=True)
class Wait:
    """One thread's wait, from when it began.

    Attributes:
        serial: Tells this wait from every other of the process.
        kind: ``"work"`` for a collective or a future, ``"message"`` for a point-to-point message, ``"store"`` for a
            key, ``"other"`` for what nothing is known of.
        message: The message that is waited for, None for other kinds.
        until: When the wait gives up by its own timeout, on the monotonic clock; None if that is unknown here.
        store: The store, for a wait of that kind.
        keys: The keys that are waited for there.
    """

    serial: int
    kind: str
    message: Message | None = None
    until: float | None = None
    store: Any = None
    keys: tuple[str, ...] = ()


class Waits:
    """The waits of this process's threads and the messages it has issued. Threads enter and leave their own waits only.

    There is one of it in a worker; `watch_waits` makes it.
    """

    def __init__(self) -> None:
        self._serials = itertools.count()
        self._current: dict[int, Wait] = {}
        self._counts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, int, int]]] = (
            weakref.WeakKeyDictionary()
        )
        self._messages: weakref.WeakKeyDictionary[Any, Message] = weakref.WeakKeyDictionary()
        self.failures = 0
        """How many waits for operations of a group have ended with an exception."""

    def of_threads(self) -> dict[int, Wait]:
        """Return what each waiting thread waits for, by `threading.get_ident`."""
        return dict(self._current)

    def messages(self, group: dist.ProcessGroup) -> Counter[tuple[str, int, int]]:
        """Return how many messages were issued in a group, by kind, peer and tag."""
        return Counter(self._counts.get(group, ()))

    def issued(self, group: dist.ProcessGroup) -> int:
        """Return how many messages were issued in a group."""
        counts = self._counts.get(group)
        return 0 if counts is None else sum(counts.values())

    def issue(self, kind: str, group: dist.ProcessGroup, peer: int, tag: int, work: object) -> None:
        """Note a message that has just been issued, and the work that stands for it."""
        counts = self._counts.setdefault(group, Counter())
        if work is not None:
            self._messages[work] = Message(kind, weakref.ref(group), peer, tag, counts[kind, peer, tag])
        counts[kind, peer, tag] += 1

    def wait(self, call: Callable[..., Any], owner: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever the wrapped method returns
        """Call a method that waits, with the wait on record for as long."""
        __tracebackhide__ = True
        message = self._messages.get(owner) if isinstance(owner, Work) else None
        kind = "other"
        if isinstance(owner, Store):
            kind = "store"
        elif isinstance(owner, (Work, torch._C.Future)):
            kind = "work" if message is None else "message"
        keys: tuple[str, ...] = ()
        if kind == "store" and arguments:
            keys = (arguments[0],) if isinstance(arguments[0], str) else tuple(arguments[0])
        store = owner if kind == "store" else None
        me = threading.get_ident()
        outer = self._current.get(me)
        until = _end_of(owner, message, arguments, named)
        self._current[me] = Wait(next(self._serials), kind, message, until, store, keys)
        try:
            return call(owner, *arguments, **named)
        except BaseException:
            if isinstance(owner, (Work, dist.ProcessGroup)):
                self.failures += 1
            raise
        finally:
            if outer is None:
                self._current.pop(me, None)
            else:
                self._current[me] = outer


def watch_waits(faults: Faults) -> Waits:
    """Wrap torch's waiting and sending methods; call once in a process.

    Args:
        faults: Asked before each message.

    Returns:
        The record that the wrappers keep.
    """
    waits = Waits()
    waiting = (
        (Work, ["wait"]),
        (torch._C.Future, ["wait"]),
        (Store, ["wait", "get"]),
        (dist.ProcessGroup, ["monitored_barrier"]),
    )
    for owner, names in waiting:
        for name in names:
            setattr(owner, name, _waiting(waits, getattr(owner, name)))
    for name, kind, takes_peer in (("send", "send", True), ("recv", "recv", True), ("recv_anysource", "recv", False)):
        method = getattr(dist.ProcessGroup, name)
        setattr(dist.ProcessGroup, name, _issuing(waits, faults, method, kind, takes_peer))
    return waits


def _waiting(waits: Waits, method: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped method
        __tracebackhide__ = True
        return waits.wait(method, self, args, kwargs)

    wait.__doc__ = method.__doc__
    return wait


def _issuing(
    waits: Waits, faults: Faults, method: Callable[..., Any], kind: str, takes_peer: bool
) -> Callable[..., Any]:
    def issue(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped method
        __tracebackhide__ = True
        if faults.armed and (instead := reach(faults, kind)) is not None:
            return instead
        work = method(self, *args, **kwargs)
        numbers = [*args[1:], *(kwargs[name] for name in ("dstRank", "srcRank", "tag") if name in kwargs)]
        peer, tag = numbers if takes_peer else (ANY_SOURCE, *numbers)
        waits.issue(kind, self, int(peer), int(tag), work)
        return work

    issue.__doc__ = method.__doc__
    return issue


def _end_of(owner: object, message: Message | None, arguments: tuple[Any, ...], named: dict[str, Any]) -> float | None:
    for value in (*arguments, *named.values()):
        # Zero means none of its own.
        if isinstance(value, timedelta) and value:
            return monotonic() + value.total_seconds()
    if isinstance(owner, Store):
        seconds: float = owner.timeout.total_seconds()  # type: ignore[attr-defined]  # missing in torch's stubs
        return monotonic() + seconds
    group = None if message is None else message.group()
    return None if group is None else monotonic() + group_timeout(group)


def group_timeout(group: dist.ProcessGroup) -> float:
    """Return after how many seconds an operation of a group gives up, infinity where the backend does not tell."""
    try:
        seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):
        return float("inf")
    return seconds
