"""Records the waits of each thread of this process for other ranks, and its collectives and messages.

In worker processes only, it wraps the methods of process groups that issue operations or wait. Each wait is an entry in
a dictionary, which another thread can read because Python's global lock makes the update atomic; each message is an
entry under a lock of its group. Operations of C++, such as the reductions of DistributedDataParallel and functional
collectives, are not recorded here: torch's sequence numbers count them, and its flight recorder describes them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import weakref
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

# Type checkers do not see that torch exports these.
from torch.distributed import Store, Work  # type: ignore[attr-defined]

from zeroshard_testing._torch_private import (
    FUTURE,
    GROUP_CONSTRUCTOR,
    GROUP_METHODS,
    Recorded,
    complex_arguments,
    group_constructor,
    process_groups,
    reduce_op_name,
    sequence_number,
    timeout_of,
)
from zeroshard_testing.faults import Faults
from zeroshard_testing.rank_state import Awaited, Operation, group_key

ANY_SOURCE = -1
"""The peer of a receive from any rank."""

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_MESSAGE_ARGUMENTS = ("tensors", "dstRank", "srcRank", "tag")
_KEPT = 512
_MESSAGES_KEPT = 64
# Seconds to wait for a thread that is issuing a message, which may block until the peer opens a connection.
_ISSUING_TIMEOUT = 1.0


def described(tensors: object, originals: Mapping[tuple[int, ...], torch.Tensor] | None = None) -> str:
    """Return tensors as text for reports. Views are replaced by the originals, by address and shape."""
    if isinstance(tensors, torch.Tensor):
        one = originals.get((tensors.data_ptr(), *tensors.shape), tensors) if originals else tensors
        text = f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}"
        if one.layout is not torch.strided:
            return f"{str(one.layout).removeprefix('torch.')}_{text}"
        return text if one.is_contiguous() else f"{text} with strides {list(one.stride())}"
    return ", ".join(described(one, originals) for one in tensors) if isinstance(tensors, (list, tuple)) else ""


@dataclass(frozen=True)
class Issued:
    """The operation of a work object: a message (``"send"`` or ``"recv"``), or a ``"collective"`` by its number.

    The peer of a message is a rank of the group, or `ANY_SOURCE`; its number counts earlier messages of its kind.
    """

    kind: str
    group: weakref.ref[dist.ProcessGroup]
    peer: int = ANY_SOURCE
    tag: int = 0
    number: int = 0


@dataclass
class Messages:
    """The messages of one kind, peer and tag in a group: their number, and the latest as text."""

    count: int = 0
    latest: deque[str] = field(default_factory=lambda: deque(maxlen=_MESSAGES_KEPT))


@dataclass
class GroupRecord:
    """The operations that Python issued in one process group, and whether they raised.

    Messages are keyed by kind, peer and tag, the latest collectives by number. Some collectives take two of the group's
    sequence numbers: ``numbers`` counts the numbers of all collectives, ``surplus`` is torch's count minus that. The
    checksum covers all collectives, in order. Of an unlisted group, which torch does not know by rank, only messages
    are compared.
    """

    messages: dict[tuple[str, int, int], Messages] = field(default_factory=lambda: defaultdict(Messages))
    failed_messages: bool = False
    collectives: dict[int, Operation] = field(default_factory=dict)
    failed_collectives: set[int] = field(default_factory=set)
    numbers: int = 0
    surplus: int = 0
    checksum: int = 0
    unlisted: bool = False
    _issuing: threading.RLock = field(default_factory=threading.RLock)

    def count(self, number: int, operation: Operation, latest: int) -> None:
        """Count an issued collective, given its number and the latest sequence number of the group."""
        self.collectives[number] = operation
        if operation.name == "monitored_barrier":
            # The flight recorder counts two on every rank; the sequence number of rank 0 two for each other rank.
            self.surplus += latest - number - 1
            latest = number + 1
        self.numbers += latest - number + 1
        strides = [strides for _, strides in operation.layouts]
        text = f"{operation.name} {operation.amounts} {strides} {operation.root} {operation.reduce_op}"
        self.checksum = zlib.crc32(text.encode(), self.checksum)

    def latest_collectives(self, recorded: Iterable[Recorded]) -> dict[int, Operation]:
        """Return the latest collectives by number: as Python issued them, else as the flight recorder has them."""
        found = dict(self.collectives)
        for one in recorded:
            known = self.collectives.get(one.number)
            found[one.number] = replace(known, pending=one.operation.pending) if known else one.operation
        return found

    @contextmanager
    def no_message_half_counted(self) -> Iterator[None]:
        """Block messages of other threads, because torch numbers a message before it is counted here."""
        held = self._issuing.acquire(timeout=_ISSUING_TIMEOUT)
        try:
            yield
        finally:
            if held:
                self._issuing.release()


@dataclass(frozen=True)
class Wait:
    """The wait of one thread: the object whose method it is in, the arguments, and the operation, if known.

    The serial number is unique in the process. The wait times out at ``until`` on the monotonic clock; None if that is
    unknown.
    """

    serial: int
    owner: Any
    arguments: Sequence[Any]
    issued: Issued | None
    until: float | None


class WaitRecorder:
    """Records the waits of this process's threads, the operations of works, groups in the making, and operations.

    A worker has one, which `record_waits` makes. Threads enter and leave only their own waits.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        # The serial numbers of waits and collectives.
        self._serials = itertools.count()
        self.current: dict[int, Wait | None] = {}
        """The wait of each thread, by `threading.get_ident`."""
        self.making: dict[int, tuple[Awaited, float | None]] = {}
        """The group that each thread is making, by `threading.get_ident`, with its timeout as in `Wait.until`."""
        self.issuing: dict[int, dist.ProcessGroup | None] = {}
        """The group in which each thread is issuing a collective, by `threading.get_ident`."""
        self.callbacks: set[object] = set()
        """A mark for each unfinished callback of a future, which may issue operations in a thread of C++."""
        self.begun: Counter[str] = Counter()
        """How often each place in each group was taken in a test, see `RankState.begun`. Ranks leave it one by one."""
        self._made: Counter[str] = Counter()
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupRecord] = weakref.WeakKeyDictionary()
        self._works: weakref.WeakKeyDictionary[Any, Issued] = weakref.WeakKeyDictionary()

    def of_group(self, group: dist.ProcessGroup) -> GroupRecord:
        """Return the record of a group."""
        found = self._groups.get(group)
        return found or self._groups.setdefault(group, GroupRecord(unlisted=group not in process_groups()))

    def unlisted(self) -> list[dist.ProcessGroup]:
        """Return the groups with messages that torch does not list."""
        # List the references first, because another thread may make a group during the loop.
        groups = [group for reference in self._groups.keyrefs() if (group := reference()) is not None]
        return [group for group in groups if (record := self._groups.get(group)) and record.unlisted]

    def begin_test(self) -> None:
        """Forget the groups of the last test, and groups that torch does not list, because names are used again."""
        # A group that a thread is still making belongs to the last test, and so do callbacks.
        self.begun, self._made, self.callbacks = Counter(), Counter(), set()
        for group in self.unlisted():
            self._groups.pop(group, None)

    def make_group(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401 - what torch returns
        """Make a group, which is recorded from the start of the call. Only members have a place in it."""
        __tracebackhide__ = True
        given = inspect.signature(call).bind(*arguments, **named).arguments
        # The call for the default group does not name its members.
        key = group_key(given["group_name"], given["global_ranks_in_group"] or range(given["group_size"]))
        made, me = self._made, threading.get_ident()
        self.begun[f"{key} {given['group_rank']}"] += 1
        self.making[me] = Awaited("group", key, number=made[key]), _end_of(None, None, given.values())
        try:
            group = call(*arguments, **named)
        finally:
            del self.making[me]
        # A failed attempt may have met no other rank, so it does not count.
        made[key] += 1
        return group

    def collectives_in(self, group: dist.ProcessGroup) -> int:
        """Return the number of collectives of a group, from C++ too; raise if the backend does not count."""
        record = self.of_group(group)
        if record.unlisted:
            return 0
        with record.no_message_half_counted():
            # The group counts collectives and messages together.
            return sequence_number(group) - record.surplus - sum(one.count for one in record.messages.values())

    def collective(
        self, title: str, place: int, call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - what torch returns
        """Issue a collective, whose tensors are the argument at a position, not counting the group."""
        __tracebackhide__ = True
        if self._faults.armed and (instead := self._faults._reach(title)) is not None:
            return instead
        values = [*arguments[1:], *named.values()]
        tensors = described(values[place]) if 0 <= place < len(values) else ""
        # The tensor may be a view of complex numbers as real ones.
        if ("[2]" in tensors or " 2]" in tensors) and (originals := complex_arguments(sys._getframe(2))):
            tensors = described(values[place], originals)
        root = max((getattr(value, "rootRank", -1) for value in values), default=-1) if title in _ROOTED else -1
        reduce_op = next(filter(None, map(reduce_op_name, values)), "")
        operation = Operation(title, tensors, root=root, reduce_op=reduce_op, serial=next(self._serials))
        return self._issue(arguments[0], operation, lambda: call(*arguments, **named))

    def message(self, kind: str, call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401 - what torch returns
        """Issue a message, and record it with its work."""
        __tracebackhide__ = True
        if self._faults.armed and (instead := self._faults._reach(kind)) is not None:
            return instead
        group, *values = arguments
        with self.of_group(group).no_message_half_counted():
            work = call(*arguments, **named)
            tensors, *values = [*values, *(named[name] for name in _MESSAGE_ARGUMENTS if name in named)]
            *peers, tag = map(int, values)
            peer = peers[0] if peers else ANY_SOURCE
            messages = self.of_group(group).messages[kind, peer, tag]
            if work is not None:
                self._works[work] = Issued(kind, weakref.ref(group), peer, tag, messages.count)
            messages.count += 1
            messages.latest.append(described(tensors))
        return work

    def _issue(self, group: dist.ProcessGroup, operation: Operation, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what torch returns
        """Issue a collective, which is recorded during and after the call."""
        __tracebackhide__ = True
        record = self.of_group(group)
        if record.unlisted:
            return call()
        try:
            number = self.collectives_in(group) + 1
        except (RuntimeError, AttributeError):
            # The backend does not count.
            return call()
        # Pending during the call: with torch's debug level DETAIL, ranks wait for each other there.
        record.collectives[number] = replace(operation, pending=True)
        record.collectives.pop(number - _KEPT, None)
        me = threading.get_ident()
        outer = self.issuing.get(me)
        self.issuing[me] = group
        try:
            work = call()
        except BaseException:
            if self.collectives_in(group) < number:
                # torch refused the collective, so it was not issued.
                record.collectives.pop(number, None)
            else:
                record.failed_collectives.add(number)
                record.count(number, operation, self.collectives_in(group))
            raise
        finally:
            self.issuing[me] = outer
        record.count(number, operation, self.collectives_in(group))
        if work is not None:
            self._works[work] = Issued("collective", weakref.ref(group), number=number)
        return work

    def wait(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever the wrapped method returns
        """Call a method that waits, and record the wait during the call."""
        __tracebackhide__ = True
        owner, *others = arguments
        issued = self._works.get(owner) if isinstance(owner, Work) else None
        me = threading.get_ident()
        outer = self.current.get(me)
        until = _end_of(owner, issued, [*others, *named.values()])
        self.current[me] = Wait(next(self._serials), owner, others, issued, until)
        try:
            return call(*arguments, **named)
        except BaseException:
            self._note_failure(issued)
            raise
        finally:
            self.current[me] = outer

    def callback(self, call: Callable[..., Any], future: Any, run: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - a future
        """Add a callback to a future, and record it until it has ended."""
        callbacks, mark = self.callbacks, object()

        def recorded(done: Any) -> Any:  # noqa: ANN401 - as the callback
            __tracebackhide__ = True
            try:
                return run(done)
            finally:
                callbacks.discard(mark)

        callbacks.add(mark)
        return call(future, recorded)

    def _note_failure(self, issued: Issued | None) -> None:
        if issued is None or (group := issued.group()) is None:
            return
        if issued.kind == "collective":
            self.of_group(group).failed_collectives.add(issued.number)
        else:
            self.of_group(group).failed_messages = True


def record_waits(faults: Faults) -> WaitRecorder:
    """Wrap torch's methods, once in a process, and return the record of the wrappers.

    Faults strike before an operation is issued.
    """
    recorder = WaitRecorder(faults)
    barrier = (dist.ProcessGroup, "monitored_barrier")
    for owner, name in ((Work, "wait"), (FUTURE, "wait"), (Store, "wait"), (Store, "get"), barrier):
        _wrap(owner, name, recorder.wait)
    for name in ("then", "add_done_callback"):
        _wrap(FUTURE, name, lambda call, args, kwargs: recorder.callback(call, *args, **kwargs))
    for name in ("send", "recv", "recv_anysource"):
        _wrap(dist.ProcessGroup, name, partial(recorder.message, name.removesuffix("_anysource")))
    for name, (title, place) in GROUP_METHODS.items():
        _wrap(dist.ProcessGroup, name, partial(recorder.collective, title, place))
    # If torch lacks it, the header of the run says that deadlocks are not proven.
    with suppress(LookupError):
        group_constructor()
        _wrap(dist.distributed_c10d, GROUP_CONSTRUCTOR, recorder.make_group)
    return recorder


def _wrap(owner: object, name: str, record: Callable[..., Any]) -> None:
    """Replace a function, if there is one of this name, with a wrapper that records calls."""
    function = getattr(owner, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped function
        __tracebackhide__ = True
        return record(function, args, kwargs)

    setattr(owner, name, wrapper)


def _end_of(owner: object, issued: Issued | None, arguments: Iterable[Any]) -> float | None:
    for value in arguments:
        # Zero means no timeout of its own.
        if isinstance(value, timedelta) and value:
            return monotonic() + value.total_seconds()
    if isinstance(owner, Store):
        seconds: float = owner.timeout.total_seconds()  # type: ignore[attr-defined]  # missing in torch's stubs
        return monotonic() + seconds
    group = None if issued is None or issued.kind == "collective" else issued.group()
    group = owner if isinstance(owner, dist.ProcessGroup) else group
    return None if group is None else monotonic() + timeout_of(group)
