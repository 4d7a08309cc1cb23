"""The collectives of each process group: what Python issues, as it is issued, and what C++ did, when that is asked for.

The methods of process groups that issue collectives are wrapped, in worker processes only. What C++ issues, such as the
reductions of DistributedDataParallel and functional collectives, does not pass here: torch's sequence numbers tell that
there was something, and its flight recorder what.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from zeroshard_testing._torch_private import GROUP_METHODS, Recorded, reduce_op_name
from zeroshard_testing.faults import Faults
from zeroshard_testing.rank_state import Operation
from zeroshard_testing.wait_recorder import GroupRecord, Issued, WaitRecorder, described

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_KEPT = 512


def record_collectives(waits: WaitRecorder, faults: Faults) -> None:
    """Wrap torch's collective methods, once in a process. The wrappers ask for faults before each collective."""
    for name, (title, place) in GROUP_METHODS.items():
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, _recording(waits, faults, method, title, place))


def latest_collectives(record: GroupRecord, recorded: Iterable[Recorded]) -> dict[int, Operation]:
    """Return the latest collectives of a group by number: as Python issued them, else as the flight recorder shows."""
    found = dict(record.collectives)
    for one in recorded:
        known = record.collectives.get(one.number)
        if known is None:
            found[one.number] = one.operation
        else:
            found[one.number] = replace(known, pending=one.operation.pending)
    return found


def _recording(
    waits: WaitRecorder, faults: Faults, method: Callable[..., Any], title: str, place: int
) -> Callable[..., Any]:
    @functools.wraps(method)
    def issue(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped method
        __tracebackhide__ = True
        if faults.armed and (instead := faults._reach(title)) is not None:
            return instead
        values = [*args, *kwargs.values()]
        tensors = described(values[place]) if 0 <= place < len(values) else ""
        root = max((getattr(value, "rootRank", -1) for value in values), default=-1) if title in _ROOTED else -1
        reduce_op = next(filter(None, map(reduce_op_name, values)), "")
        operation = Operation(title, tensors, root=root, reduce_op=reduce_op)
        return _issue(waits, self, operation, lambda: method(self, *args, **kwargs))

    return issue


def _issue(waits: WaitRecorder, group: dist.ProcessGroup, operation: Operation, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what torch returns
    """Issue a collective, on record while and after it is issued."""
    __tracebackhide__ = True
    record = waits.of_group(group)
    if record.unlisted:
        return call()
    try:
        number = waits.collectives_in(group) + 1
    except (RuntimeError, AttributeError):
        # The backend does not count.
        return call()
    # Pending while it is issued: torch's debug level DETAIL lets ranks wait for one another there.
    record.collectives[number] = replace(operation, pending=True)
    record.collectives.pop(number - _KEPT, None)
    try:
        work = call()
    except BaseException:
        if waits.collectives_in(group) < number:
            # It was refused, and so was not issued.
            record.collectives.pop(number, None)
        else:
            record.failed_collectives.add(number)
            _count(waits, group, number, operation)
        raise
    _count(waits, group, number, operation)
    waits.note_work(work, Issued("collective", weakref.ref(group), number=number))
    return work


def _count(waits: WaitRecorder, group: dist.ProcessGroup, number: int, operation: Operation) -> None:
    record = waits.of_group(group)
    record.collectives[number] = operation
    record.numbers += waits.collectives_in(group) - number + 1
    text = f"{operation.name} {operation.amounts} {operation.root} {operation.reduce_op}"
    record.checksum = zlib.crc32(text.encode(), record.checksum)
