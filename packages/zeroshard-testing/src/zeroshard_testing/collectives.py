"""The collectives of each process group: what Python issues, as it is issued, and what C++ did, when that is asked for.

The methods of process groups that issue collectives are wrapped, in worker processes only. What C++ issues, such as the
reductions of DistributedDataParallel and functional collectives, does not pass here: torch's sequence numbers tell that
there was something, and its flight recorder what.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from zeroshard_testing._torch_private import GROUP_METHODS, Recorded, reduce_op_name, sequence_number
from zeroshard_testing.faults import Faults, reach
from zeroshard_testing.journal import JournalWriter
from zeroshard_testing.rank_state import Operation, group_key
from zeroshard_testing.wait_recorder import WaitRecorder, described

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_KEPT = 512


@dataclass
class _Record:
    """What Python has issued in one group.

    Attributes:
        key: The group's key.
        latest: The latest collectives by number.
        numbers: How many of the group's sequence numbers they took; some collectives take two.
        checksum: Of all of them, in order.
    """

    key: str
    latest: dict[int, Operation] = field(default_factory=dict)
    numbers: int = 0
    checksum: int = 0


class Collectives:
    """The collectives of this process. `record_collectives` makes the one of a worker.

    Args:
        journal: Where each collective is put on record for the time after this process.
        waits: Knows how many messages a group has issued besides, and is told which collective a work stands for.
    """

    def __init__(self, journal: JournalWriter, waits: WaitRecorder) -> None:
        self._journal = journal
        self._waits = waits
        self._records: weakref.WeakKeyDictionary[dist.ProcessGroup, _Record] = weakref.WeakKeyDictionary()

    def issued(self, group: dist.ProcessGroup) -> int:
        """Return how many collectives were issued in a group, from C++ too.

        Raises:
            RuntimeError: If the backend does not count.
        """
        # The group numbers collectives and messages alike.
        return sequence_number(group) - self._waits.messages_in(group)

    def checksum(self, group: dist.ProcessGroup) -> int | None:
        """Return a number that is the same on ranks which have issued alike; None if C++ has issued something."""
        record = self._records.get(group)
        if record is None:
            return 0 if self.issued(group) == 0 else None
        return record.checksum if record.numbers == self.issued(group) else None

    def operations(self, group: dist.ProcessGroup, recorded: Sequence[Recorded]) -> dict[int, Operation]:
        """Return the latest collectives of a group by number: as Python issued them, or as C++ did.

        Args:
            group: The process group.
            recorded: What the flight recorder shows.
        """
        record = self._records.get(group)
        from_python = {} if record is None else record.latest
        found = dict(from_python)
        for one in recorded:
            if one.group == group.group_name:
                known = from_python.get(one.number)
                found[one.number] = (
                    Operation(one.name, one.tensors, one.pending, from_python=False)
                    if known is None
                    else Operation(known.name, known.tensors, one.pending, known.root, known.reduce_op)
                )
        return found

    def issue(self, group: dist.ProcessGroup, operation: Operation, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what torch returns
        """Issue a collective, on record while and after it is issued."""
        __tracebackhide__ = True
        try:
            number = self.issued(group) + 1
            record = self._records.get(group)
            if record is None:
                key = group_key(group.group_name, dist.get_process_group_ranks(group))
                record = self._records[group] = _Record(key)
        except (RuntimeError, KeyError, ValueError, AttributeError):
            # A group that torch does not know by rank, or whose backend does not count.
            return call()
        # Pending while it is issued: torch's debug level DETAIL lets ranks wait for one another there.
        record.latest[number] = replace(operation, pending=True)
        record.latest.pop(number - _KEPT, None)
        self._journal.write(record.key, number, operation)
        try:
            work = call()
        except BaseException:
            if self.issued(group) < number:
                # It was refused, and so was not issued.
                record.latest.pop(number, None)
                self._journal.take_back()
            else:
                self._waits.of_group(group).failed_collectives.add(number)
                self._count(group, record, number, operation)
            raise
        self._count(group, record, number, operation)
        self._waits.note_collective(group, number, work)
        return work

    def _count(self, group: dist.ProcessGroup, record: _Record, number: int, operation: Operation) -> None:
        record.latest[number] = operation
        record.numbers += self.issued(group) - number + 1
        text = f"{operation.name} {operation.amounts} {operation.root} {operation.reduce_op}"
        record.checksum = zlib.crc32(text.encode(), record.checksum)


def record_collectives(journal: JournalWriter, waits: WaitRecorder, faults: Faults) -> Collectives:
    """Wrap torch's collective methods; call once in a process.

    Args:
        journal: Where each collective is put on record for the time after this process.
        waits: Knows how many messages a group has issued besides.
        faults: Asked before each collective.

    Returns:
        The record that the wrappers keep.
    """
    collectives = Collectives(journal, waits)
    for name, (title, place) in GROUP_METHODS.items():
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, _recording(collectives, faults, method, title, place))
    return collectives


def _recording(
    collectives: Collectives, faults: Faults, method: Callable[..., Any], title: str, place: int
) -> Callable[..., Any]:
    def issue(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped method
        __tracebackhide__ = True
        if faults.armed and (instead := reach(faults, title)) is not None:
            return instead
        values = [*args, *kwargs.values()]
        tensors = described(values[place]) if 0 <= place < len(values) else ""
        root, reduce_op = -1, ""
        for value in values:
            root = max(root, getattr(value, "rootRank", -1))
            reduce_op = reduce_op or reduce_op_name(value)
        operation = Operation(title, tensors, root=root if title in _ROOTED else -1, reduce_op=reduce_op)
        return collectives.issue(self, operation, lambda: method(self, *args, **kwargs))

    issue.__doc__ = method.__doc__
    return issue
