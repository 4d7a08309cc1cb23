"""Runs reductions in parallel with backward: in a thread or in a fixed order, and on an accelerator's side stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from zeroshard_comm import BucketReduceWork


class SideStream:
    """Runs work on an accelerator in parallel with the current stream; the host never waits.

    On a device without streams everything runs immediately, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        accelerator = torch.accelerator.current_accelerator()
        has_streams = accelerator is not None and accelerator.type == device.type
        self._stream = torch.Stream(device) if has_streams else None

    def as_current(self) -> AbstractContextManager[object]:
        """Return a context in which this stream is the current one."""
        return nullcontext() if self._stream is None else self._stream

    def after_current(self) -> AbstractContextManager[object]:
        """Order this stream after the work queued on the current one, and return :meth:`as_current`."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        return self.as_current()

    def join(self) -> None:
        """Order the current stream after the work queued on this one."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until this stream has finished the work queued so far, even if the tensor is gone."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


class ReductionQueue:
    """Finishes reductions in the order in which they began: in a worker thread, or when others are added.

    The thread runs only while there are reductions to finish, so it never waits for one, and never outlives a backward.
    If one raises, the queue still finishes the others; each decides what it can still do. Without a thread, all ranks
    finish reductions in the same order, regardless of what has arrived; on an accelerator they run on a side stream.
    """

    def __init__(self, rank: int, device: torch.device, *, uses_thread: bool) -> None:
        # The next reduction needs the memory of earlier packed messages.
        self._open = 2 if uses_thread else None
        self._name, self._uses_thread, self._side = f"zeroshard rank {rank}", uses_thread, SideStream(device)
        self._begun: deque[tuple[Callable[[], None], BucketReduceWork | None]] = deque()
        self._finished: deque[BucketReduceWork] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def add(self, finish: Callable[[], None], work: BucketReduceWork | None, *, leave: int | None = None) -> None:
        """Add a reduction that has begun. ``finish`` finishes it; ``work``, if any, is closed some time after that.

        Without a thread, ``leave`` is the number of reductions to leave unfinished now; None leaves all. If no thread
        can be started, this raises a RuntimeError, and ``finish`` will not be called.
        """
        with self._lock:
            if self._uses_thread and self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._begun.append((finish, work))
        if not self._uses_thread and leave is not None:
            self.finish(leave)

    @contextmanager
    def beside(self, tensor: torch.Tensor) -> Iterator[None]:
        """Queue the block's work on a tensor on the stream that finishes reductions, in parallel with backward."""
        with self._side.after_current():
            self._side.keep(tensor)
            yield

    def drain(self) -> None:
        """Wait for all reductions, or order the current stream after them; raise the first error of a reduction."""
        try:
            thread = self._thread
            if thread is not None:
                thread.join()
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self.finish(0)
            self._close(leave=0)
        finally:
            # Even after an error, the next use of a bucket must be ordered after the work queued here.
            self._side.join()
            self._begun.clear()
            self._finished.clear()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until the work queued here has finished with it."""
        self._side.keep(tensor)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._begun:
                    self._thread = None
                    return
            try:
                self._finish_one()
            except BaseException as error:  # noqa: BLE001 - any error is raised by drain()
                self._failure = self._failure or error

    def finish(self, leave: int) -> None:
        """Finish reductions until only ``leave`` are unfinished. Call it only without a thread."""
        # Their inputs were ready when they began, see `beside`.
        with self._side.as_current():
            while len(self._begun) > leave:
                self._finish_one()

    def _finish_one(self) -> None:
        finish, work = self._begun.popleft()
        finish()
        if work is not None:
            self._finished.append(work)
            if self._open is not None:
                self._close(leave=self._open)

    def _close(self, *, leave: int) -> None:
        while len(self._finished) > leave:
            self._finished.popleft().close()
