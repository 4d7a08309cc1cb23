"""Reading the memory of another process of the same machine, where the kernel allows it (Linux, ``process_vm_readv``).

Over loopback a byte is copied into the kernel by one process and out of it by the other, by threads that must be woken.
A read across processes is one copy, made by whoever needs the bytes: 6 GB/s on the machine of docs/benchmarks.md.

Who may read whom is for the kernel to say, by the rules of ``ptrace``: the same user, and what a container or the
``yama`` module adds to that. So it is tried, see :mod:`zeroshard_comm.wire`, and not concluded from settings.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

SWITCH = "ZEROSHARD_CROSS_MEMORY"
"""Environment variable; ``0`` on any rank keeps that rank from reading, and from being read."""

_MOST_PARTS, _MOST_BYTES = 1024, 1 << 30

_CANNOT = "this system has no process_vm_readv"


@dataclass(frozen=True, eq=False)
class Readable:
    """Who can read whose memory in a group.

    Attributes:
        processes: by peer, the process that this rank reads from.
        readers: peers that read from this rank.
        all_read: whether every rank reads from every other; the same on all ranks.
        answers: what is on its way, by peer and tag; only messages change it.
    """

    processes: Mapping[int, int] = field(default_factory=dict)
    readers: frozenset[int] = frozenset()
    all_read: bool = False
    answers: dict[tuple[int, int], Any] = field(default_factory=dict)


class _IOVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "process_vm_readv"):
        return None
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_IOVec),
        ctypes.c_ulong,
        ctypes.POINTER(_IOVec),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    return library


def machine() -> int:
    """Return a number that is equal for two processes that may be able to read each other, and 0 if this one cannot.

    Made of the boot of the machine and of the namespaces of processes and networks: processes that were given networks
    of their own are to be seen as machines of their own.
    """
    if _libc() is None or os.environ.get(SWITCH, "") == "0":
        return 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")]
    except OSError:
        return 0
    return zlib.crc32("\n".join([boot, *spaces]).encode()) or 1


def read_into(buffer: torch.Tensor, process: int, address: int) -> None:
    """Fill a buffer from the memory of another process; other threads run meanwhile.

    Args:
        buffer: contiguous, in CPU memory.
        process: its number, in this process's namespace.
        address: of as many bytes there.

    Raises:
        OSError: if that process is gone, has no such memory, or may not be read.
    """
    library = _libc()
    if library is None:
        raise OSError(_CANNOT)
    start, left = buffer.data_ptr(), buffer.nbytes
    while left:
        here, there = _IOVec(start, left), _IOVec(address, left)
        # The kernel makes at most 2 GiB in one call.
        done = library.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if done <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"reading memory of process {process}: {os.strerror(number)}")
        start, address, left = start + done, address + done, left - done


class ProcessMemory:
    """Places in the memory of another process that are copied here again and again, in as few calls as can be.

    Args:
        process: its number, in this process's namespace.
        parts: addresses here and there, and numbers of bytes.
    """

    def __init__(self, process: int, parts: Sequence[tuple[int, int, int]]) -> None:
        self._process = process
        self._calls: list[tuple[ctypes.Array[_IOVec], ctypes.Array[_IOVec], int]] = []
        batch: list[tuple[int, int, int]] = []
        for here, there, nbytes in parts:
            # The kernel copies at most 1,024 parts, and 2 GiB, in one call.
            for start in range(0, nbytes, _MOST_BYTES):
                size = min(_MOST_BYTES, nbytes - start)
                if len(batch) == _MOST_PARTS or sum(part[2] for part in batch) + size > _MOST_BYTES:
                    self._add(batch)
                    batch = []
                batch.append((here + start, there + start, size))
        if batch:
            self._add(batch)

    def read(self) -> None:
        """Copy everything; other threads run meanwhile.

        Raises:
            OSError: if that process is gone, has no such memory, or may not be read.
        """
        library = _libc()
        if library is None:
            raise OSError(_CANNOT)
        for here, there, nbytes in self._calls:
            done = library.process_vm_readv(self._process, here, len(here), there, len(there), 0)
            if done != nbytes:
                number = ctypes.get_errno() if done < 0 else errno.EFAULT
                raise OSError(number, f"reading memory of process {self._process}: {os.strerror(number)}")

    def _add(self, parts: Sequence[tuple[int, int, int]]) -> None:
        here, there = ((_IOVec * len(parts))(*[_IOVec(part[side], part[2]) for part in parts]) for side in (0, 1))
        self._calls.append((here, there, sum(part[2] for part in parts)))


class Peephole:
    """Eight bytes in the memory of another process, to be looked at again and again.

    Args:
        process: its number, in this process's namespace.
        address: of the bytes there, a multiple of 8.

    Raises:
        OSError: if this system cannot read across processes.
    """

    def __init__(self, process: int, address: int) -> None:
        library = _libc()
        if library is None:
            raise OSError(_CANNOT)
        self._process = process
        self._found = ctypes.c_uint64()
        self._here, self._there = _IOVec(ctypes.addressof(self._found), 8), _IOVec(address, 8)
        arguments = ctypes.byref(self._here), 1, ctypes.byref(self._there), 1, 0
        self._read = partial(library.process_vm_readv, process, *arguments)

    def look(self) -> int:
        """Return what is there, as an unsigned number.

        Raises:
            OSError: if that process is gone, has no such memory, or may not be read.
        """
        if self._read() != ctypes.sizeof(self._found):
            number = ctypes.get_errno()
            raise OSError(number, f"reading memory of process {self._process}: {os.strerror(number)}")
        return self._found.value
