"""Reading the memory of another process of the same host, where the kernel allows it (Linux, ``process_vm_readv``).

The kernel decides who may read whom, by the rules of ``ptrace``: the same user, and restrictions of containers and of
the ``yama`` module. So ranks try it, see :mod:`zeroshard_comm.same_host`, instead of reading settings.
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
"""Environment variable; ``0`` on any rank of a group keeps all of them from reading."""

_MOST_PARTS, _MOST_BYTES = 1024, 1 << 30
"""In one call of the kernel, which copies at most 1,024 parts and 2 GiB."""


class _IOVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _libc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
    if library is None or not hasattr(library, "process_vm_readv"):
        return None
    vector = ctypes.POINTER(_IOVec)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = [
        ctypes.c_int,
        *(vector, ctypes.c_ulong, vector, ctypes.c_ulong),
        ctypes.c_ulong,
    ]
    return library


class ProcessMemory:
    """Places in the memory of another process that are copied here repeatedly, in as few calls as possible.

    The process has its number in this one's namespace, and a part an address here, one there, and a number of bytes.
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
        """Copy everything; other threads run meanwhile.

        Raises:
            OSError: if that process is gone, has no such memory, or may not be read.
        """
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
    """Return a number that is equal for two processes that may be able to read each other, and 0 if this one cannot.

    Made of the boot of the machine and of the namespaces of processes and networks: processes with network namespaces
    of their own count as separate machines.
    """
    if _libc() is None or os.environ.get(SWITCH, "") == "0":
        return 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")]
    except OSError:
        return 0
    return zlib.crc32("\n".join([boot, *spaces]).encode()) or 1
