"""Reads the memory of another process of the same host, if the kernel allows it (Linux, ``process_vm_readv``).

The kernel applies the rules of ``ptrace``: both processes have the same user, and neither their containers nor the
``yama`` module forbid it. So ranks test whether they can read, instead of inspecting settings.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SWITCH = "ZEROSHARD_CROSS_MEMORY"
"""Environment variable. If it is ``0`` on any rank of a group, no rank reads another's memory."""

_MOST_PARTS, _MOST_BYTES = 1024, 1 << 30
"""Limits of one system call; the kernel copies at most 1,024 parts and 2 GiB."""


class _IOVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _libc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
    if library is None or not hasattr(library, "process_vm_readv"):
        return None
    number, vector = ctypes.c_ulong, ctypes.POINTER(_IOVec)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = [ctypes.c_int, vector, number, vector, number, number]
    return library


class ProcessMemory:
    """Copies parts of another process's memory to this one, repeatedly and in as few system calls as possible.

    ``process`` is its id in this process's namespace. A part is a local address, a remote address and a size in bytes.
    """

    def __init__(self, process: int, parts: Sequence[tuple[int, int, int]]) -> None:
        self._process = process
        batches: list[list[tuple[int, int, int]]] = [[]]
        total = 0
        for here, there, nbytes in parts:
            for start in range(0, nbytes, _MOST_BYTES):
                size = min(_MOST_BYTES, nbytes - start)
                if len(batches[-1]) == _MOST_PARTS or total + size > _MOST_BYTES:
                    batches.append([])
                    total = 0
                batches[-1].append((here + start, there + start, size))
                total += size
        self._calls = [(_vectors(batch, 0), _vectors(batch, 1), sum(part[2] for part in batch)) for batch in batches]

    def read(self) -> None:
        """Copy all parts. Raise OSError if the process is gone, has no such memory, or may not be read."""
        library = _libc()
        if library is None:
            raise OSError("this system has no process_vm_readv")
        for here, there, nbytes in self._calls:
            done = library.process_vm_readv(self._process, here, len(here), there, len(there), 0)
            if done != nbytes:
                number = ctypes.get_errno() if done < 0 else errno.EFAULT
                raise OSError(number, f"reading memory of process {self._process}: {os.strerror(number)}")


def _vectors(parts: Sequence[tuple[int, int, int]], side: int) -> ctypes.Array[_IOVec]:
    return (_IOVec * len(parts))(*[_IOVec(part[side], part[2]) for part in parts])


def machine() -> int:
    """Return a checksum of the machine and its namespaces, which peers compare; 0 if this process cannot read."""
    if _libc() is None or os.environ.get(SWITCH, "") == "0":
        return 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")]
    except OSError:
        return 0
    return zlib.crc32("\n".join([boot, *spaces]).encode()) or 1
