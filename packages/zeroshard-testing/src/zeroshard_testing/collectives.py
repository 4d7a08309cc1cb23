"""What collectives this process issues from Python, as they are issued: for comparison between ranks, and on record.

The methods of process groups that issue collectives are wrapped, in worker processes only. What C++ issues, such as the
reductions of DistributedDataParallel, does not pass here; the flight recorder knows of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zeroshard_testing.faults import Faults, reach
from zeroshard_testing.journal import JournalWriter
from zeroshard_testing.rank_state import Operation, group_key, next_digest
from zeroshard_testing.waits import Waits

_ALIKE = {"allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce"}
"""Methods whose tensors must be alike on all ranks, with the names by which users know them."""

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ROOTS_KEPT = 256

_NAMES = {
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}


class Collectives:
    """A running digest of the collectives of each process group. `watch_collectives` makes the one of a worker.

    Args:
        journal: Where each collective is put on record.
        waits: Knows how many messages a group has issued besides.
    """

    def __init__(self, journal: JournalWriter, waits: Waits) -> None:
        self._journal = journal
        self._waits = waits
        self._keys: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, int]] = weakref.WeakKeyDictionary()
        self._digests: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

    def digest(self, group: dist.ProcessGroup) -> int:
        """Return a number that is the same on ranks which have issued alike in a group; see `comparable`."""
        return self._digests.get(group, 0)

    def root(self, group: dist.ProcessGroup, number: int) -> int:
        """Return the root of one of a group's latest collectives, -1 where it has none or it is not known."""
        return self._roots.get(group, {}).get(number, -1)

    def issued(self, group: dist.ProcessGroup) -> int:
        """Return how many collectives were issued in a group, from C++ too.

        Raises:
            RuntimeError: If the backend does not count.
        """
        number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # missing in torch's stubs
        # The group numbers collectives and messages alike.
        return number - self._waits.issued(group)

    def take_back(self, group: dist.ProcessGroup, number: int, digest: int) -> None:
        """Strike a collective off the record that was refused, and so was not issued.

        Args:
            group: The process group.
            number: What `issue` returned.
            digest: The group's digest before.
        """
        if number and self.issued(group) < number:
            self._digests[group] = digest
            self._journal.take_back()

    def issue(self, group: dist.ProcessGroup, operation: Operation) -> int:
        """Put a collective on record that is about to be issued, and return its number, 0 if that is not known."""
        key = self._keys.get(group)
        try:
            if key is None:
                key = self._keys[group] = group_key(group.group_name, dist.get_process_group_ranks(group))
            number = self.issued(group) + 1
        except (RuntimeError, KeyError, ValueError):
            # A group that torch does not know by rank, or whose backend does not count.
            return 0
        if operation.root >= 0:
            roots = self._roots.setdefault(group, {})
            roots[number] = operation.root
            roots.pop(number - _ROOTS_KEPT, None)
        # Without the number: messages that another thread issues meanwhile make it uncertain, and the order counts.
        text = f"{operation.name} {operation.amounts} {operation.root}"
        self._digests[group] = next_digest(self._digests.get(group, 0), text)
        self._journal.write(key, number, operation)
        return number


def watch_collectives(journal: JournalWriter, waits: Waits, faults: Faults) -> Collectives:
    """Wrap torch's collective methods; call once in a process.

    Args:
        journal: Where each collective is put on record.
        waits: Knows how many messages a group has issued besides.
        faults: Asked before each collective.

    Returns:
        The record that the wrappers keep.
    """
    collectives = Collectives(journal, waits)
    for name, title in {**_ALIKE, **_NAMES}.items():
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, _recording(collectives, faults, method, title, name in _ALIKE))
    return collectives


def _recording(
    collectives: Collectives, faults: Faults, method: Callable[..., Any], title: str, alike: bool
) -> Callable[..., Any]:
    def issue(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped method
        __tracebackhide__ = True
        if faults.armed and (instead := reach(faults, title)) is not None:
            return instead
        tensors = next(iter((*args, *kwargs.values())), None) if alike else None
        root = max((getattr(value, "rootRank", -1) for value in (*args, *kwargs.values())), default=-1)
        before = collectives.digest(self)
        number = collectives.issue(self, Operation(title, _described(tensors), root=root if title in _ROOTED else -1))
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            collectives.take_back(self, number, before)
            raise

    issue.__doc__ = method.__doc__
    return issue


def _described(tensors: object) -> str:
    if isinstance(tensors, torch.Tensor):
        return f"{str(tensors.dtype).removeprefix('torch.')}{list(tensors.shape)}"
    return ", ".join(map(_described, tensors)) if isinstance(tensors, (list, tuple)) else ""
