"""Resident memory of this process, from what Linux counts: how far it grows while a model is built and trained."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, TypeVar

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_SETTLED_AFTER = 2

T = TypeVar("T")
B = TypeVar("B")


class Peaks(TypedDict):
    """Bytes above what was resident before the model was built.

    Attributes:
        overall: at the highest, from then on.
        settled: at the highest in the later iterations, when everything has been made that is made once.
    """

    overall: int
    settled: int


def peaks_of(build: Callable[[], T], iterate: Callable[[T, B], object], batches: list[B]) -> Peaks:
    """Build something, iterate over batches with it, and return how much memory that took at the highest.

    Args:
        build: makes it.
        iterate: called with it and each batch.
        batches: more than two.
    """
    gc.collect()
    before = resident("VmRSS")
    _reset()
    built = build()
    for batch in batches[:_SETTLED_AFTER]:
        iterate(built, batch)
    early = resident("VmHWM")
    _reset()
    for batch in batches[_SETTLED_AFTER:]:
        iterate(built, batch)
    late = resident("VmHWM")
    return {"overall": max(early, late) - before, "settled": late - before}


def growth_of(operation: Callable[[], object]) -> int:
    """Run an operation, and return how many bytes beyond those before it are resident at the highest."""
    gc.collect()
    before = resident("VmRSS")
    _reset()
    operation()
    return resident("VmHWM") - before


def return_freed_memory() -> None:
    """Make processes that are started from now on give back what they free, so that what is resident is in use."""
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1048576")


def resident(field: str, status: str | None = None) -> int:
    r"""Return a size of this process in bytes: ``VmRSS`` (now) or ``VmHWM`` (the highest since the last reset).

    >>> resident("VmHWM", "Name: python\nVmHWM:     12 kB\n")
    12288

    Args:
        field: name of the line.
        status: what the kernel says; read from it by default.

    Raises:
        ValueError: if there is no such line.
    """
    for line in (status or _STATUS.read_text(encoding="ascii", errors="replace")).splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"the kernel does not tell {field}")


def _reset() -> None:
    _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
