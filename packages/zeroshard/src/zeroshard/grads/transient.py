"""Lends memory to the buckets in flight: two at a time. The memory is reused, and is freed after backward."""

from __future__ import annotations

import threading
from collections import deque

import torch

IN_FLIGHT = 2
"""The number of buckets whose memory is in use at one time."""


class TransientBuffers:
    """Lends memory to buckets, at most :data:`IN_FLIGHT` at a time.

    The thread that runs backward calls :meth:`enter`, then :meth:`lend` unless a bucket has memory of its own; the
    thread that finishes reductions calls :meth:`leave` for each :meth:`enter`, when the bucket is no longer read.
    If both are the same thread, ``waits`` is False, and the caller must leave before it enters too often. A bucket
    with a cut tensor takes all places: it is sent in both directions at once, and a second one would save no time.
    """

    def __init__(self, device: torch.device, *, waits: bool) -> None:
        self._device = device
        self._room = threading.Semaphore(IN_FLIGHT) if waits else None
        self._taken = deque[int]()
        """The places of each bucket in flight, in order."""
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self._read: torch.Event | None = None
        accelerator = torch.accelerator.current_accelerator()
        self._has_streams = accelerator is not None and accelerator.type == device.type

    def enter(self, *, is_cut: bool) -> None:
        """Wait for room; on an accelerator, order the current stream after the last use of memory that is free."""
        if self._room is not None:
            places = IN_FLIGHT if is_cut else 1
            for _ in range(places):
                self._room.acquire()
            self._taken.append(places)
        if self._read is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._read)

    def lend(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory, and the 1-D bucket in it."""
        nbytes = numel * dtype.itemsize
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None or memory.numel() < nbytes:
            del memory
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return memory, memory[:nbytes].view(dtype)

    def leave(self, memory: torch.Tensor | None) -> None:
        """Take memory back, which work queued on the current stream still reads; None if the bucket had its own."""
        if self._has_streams:
            self._read = torch.accelerator.current_stream(self._device).record_event()
        if memory is not None:
            with self._lock:
                self._free.append(memory)
        if self._room is not None:
            self._room.release(self._taken.popleft() if self._taken else IN_FLIGHT)

    def clear(self) -> None:
        """Free all memory, at the end of a backward."""
        self._free.clear()
        self._read = None
