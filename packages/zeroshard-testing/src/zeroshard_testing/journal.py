"""The latest collectives of a rank in a file that outlives it: written by the worker, read by the controller.

A rank that gloo aborts cannot be asked any more, and what it was in is what explains the abort.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import IO

from zeroshard_testing.rank_state import GroupState, Operation, RankState, group_label, group_members

_SLOT = 256
_SLOTS = 32
SIZE = _SLOT * _SLOTS
"""Bytes of the file."""


class JournalWriter:
    """Writes entries round and round into memory that the file backs, without a system call each.

    Args:
        descriptor: Of a file of `SIZE` bytes.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)
        self._next = 0
        self.run = -1
        """Number of the test that entries belong to; the main thread sets it."""

    def write(self, key: str, number: int, operation: Operation) -> None:
        """Keep one collective, in place of the oldest."""
        text = f"{self.run}|{key}|{number}|{operation.name}|{operation.root}|{operation.tensors}".encode()[:_SLOT]
        start = self._next * _SLOT
        self._next = (self._next + 1) % _SLOTS
        self._memory[start : start + _SLOT] = text.ljust(_SLOT, b"\0")

    def take_back(self) -> None:
        """Strike the latest entry off."""
        self._next = (self._next - 1) % _SLOTS
        start = self._next * _SLOT
        self._memory[start : start + _SLOT] = bytes(_SLOT)


def read_journal(file: IO[bytes], run: int, world_size: int) -> RankState:
    """Return what a rank has issued in one test.

    Args:
        file: The journal.
        run: Number of the test.
        world_size: Number of ranks of the default group.
    """
    found: dict[str, dict[int, Operation]] = {}
    memory = os.pread(file.fileno(), SIZE, 0) if hasattr(os, "pread") else _read_from_start(file)
    for start in range(0, len(memory), _SLOT):
        parts = memory[start : start + _SLOT].rstrip(b"\0").decode(errors="replace").split("|")
        # An entry that was cut off, or half written when the rank died, tells nothing.
        if len(parts) == 6 and parts[0] == str(run) and parts[2].isdigit():
            operation = Operation(parts[3], parts[5], root=int(parts[4]))
            found.setdefault(parts[1], {})[int(parts[2])] = operation
    return RankState(groups=_groups(found, world_size))


def _groups(found: Mapping[str, Mapping[int, Operation]], world_size: int) -> dict[str, GroupState]:
    return {
        key: GroupState(group_label(key, world_size), group_members(key), max(operations), operations)
        for key, operations in found.items()
    }


def _read_from_start(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(SIZE)
