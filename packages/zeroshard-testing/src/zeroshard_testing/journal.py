"""The latest collectives of a rank in a file that outlives it: written by the worker, read by the controller.

A rank that gloo aborts cannot be asked any more, and what it was in is what explains the abort.
"""

from __future__ import annotations

import mmap
from typing import IO

from zeroshard_testing.rank_state import GroupState, Operation, RankState, group_label, group_members

_SLOT = 256
SIZE = 32 * _SLOT
"""Bytes of the file."""


class JournalWriter:
    """Writes entries round and round into memory that a file of `SIZE` bytes backs, without a system call each."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)
        self._next = 0
        self.run = -1
        """Number of the test that entries belong to; the main thread sets it."""

    def write(self, key: str, number: int, operation: Operation) -> None:
        """Keep one collective, in place of the oldest."""
        text = f"{self.run}|{key}|{number}|{operation.name}|{operation.root}|{operation.tensors}".encode()[:_SLOT]
        self._memory[self._next : self._next + _SLOT] = text.ljust(_SLOT, b"\0")
        self._next = (self._next + _SLOT) % SIZE

    def take_back(self) -> None:
        """Strike the latest entry off."""
        self._next = (self._next - _SLOT) % SIZE
        self._memory[self._next : self._next + _SLOT] = bytes(_SLOT)


def read_journal(file: IO[bytes], run: int, world_size: int) -> RankState:
    """Return what a rank has issued in one test; the file is not buffered, and the rank may still write to it."""
    found: dict[str, dict[int, Operation]] = {}
    file.seek(0)
    memory = file.read(SIZE)
    for start in range(0, len(memory), _SLOT):
        parts = memory[start : start + _SLOT].rstrip(b"\0").decode(errors="replace").split("|")
        # An entry that was cut off, or half written when the rank died, tells nothing.
        if len(parts) == 6 and parts[0] == str(run) and parts[2].isdigit():
            operation = Operation(parts[3], parts[5], root=int(parts[4]))
            found.setdefault(parts[1], {})[int(parts[2])] = operation
    groups = {
        key: GroupState(group_label(key, world_size), group_members(key), max(operations), operations)
        for key, operations in found.items()
    }
    return RankState(groups=groups)
