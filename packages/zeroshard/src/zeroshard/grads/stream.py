"""Work beside backward: a thread or a fixed order for reductions, and a stream of its own on an accelerator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from zeroshard_comm import BucketReduceWork


class SideStream:
    """Runs work on an accelerator in parallel to the current stream; the host never waits.

    On a device without streams everything runs at once, in order.

    Args:
        device: whose.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        accelerator = torch.accelerator.current_accelerator()
        has_streams = accelerator is not None and accelerator.type == device.type
        self._stream = torch.Stream(device) if has_streams else None

    def as_current(self) -> AbstractContextManager[object]:
        """In the block that follows this is the current stream."""
        return nullcontext() if self._stream is None else self._stream

    def after_current(self) -> AbstractContextManager[object]:
        """As :meth:`as_current`, after all that the current stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        return self.as_current()

    def join(self) -> None:
        """Order the current stream after everything that this one has been given."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until this stream has finished the work queued so far, even if the tensor is gone."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


class ReductionQueue:
    """Finishes reductions in the order in which they began: in a worker thread, or when others are added.

    The thread lives only while there are reductions to finish, so that it never waits for one, nor outlives a backward.
    After one has raised, the others are still finished: each decides itself whether it can do anything.

    Args:
        rank: of this process, for the thread's name.
        device: where buckets are.
        uses_thread: whether there is a thread. Else all ranks do the same in the same order, whatever has arrived, and
            on an accelerator everything is queued on a side stream.
    """

    def __init__(self, rank: int, device: torch.device, *, uses_thread: bool) -> None:
        self._name, self._uses_thread, self._side = f"zeroshard rank {rank}", uses_thread, SideStream(device)
        self._begun: deque[tuple[Callable[[], None], BucketReduceWork | None]] = deque()
        self._finished: deque[BucketReduceWork] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def add(self, finish: Callable[[], None], work: BucketReduceWork | None, *, leave: int | None = None) -> None:
        """Take in a reduction that has begun.

        Args:
            finish: called when it is its turn.
            work: closed some time after that, if there is any.
            leave: without a thread, finish all but so many now; none if None.

        Raises:
            RuntimeError: if no thread can be started; ``finish`` will not be called.
        """
        with self._lock:
            if self._uses_thread and self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._begun.append((finish, work))
        if not self._uses_thread and leave is not None:
            self._finish(leave)

    @contextmanager
    def beside(self, tensor: torch.Tensor) -> Iterator[None]:
        """In the block, queue work on a tensor where reductions are finished: beside what computes gradients."""
        with self._side.after_current():
            self._side.keep(tensor)
            yield

    def drain(self) -> None:
        """Wait until all is done, or order the current stream after that; raise the first error of a reduction."""
        try:
            thread = self._thread
            if thread is not None:
                thread.join()
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self._finish(0)
            self._close(leave=0)
        finally:
            # Also after an error: whoever uses a bucket next comes after what was queued here.
            self._side.join()
            self._begun.clear()
            self._finished.clear()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that is used here until it is no longer used."""
        self._side.keep(tensor)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._begun:
                    self._thread = None
                    return
            try:
                self._finish_one()
                # The next one needs the memory of the packed messages of those before.
                self._close(leave=2)
            except BaseException as error:  # noqa: BLE001 - any error is raised by drain()
                self._failure = self._failure or error

    def _finish(self, leave: int) -> None:
        if len(self._begun) > leave:
            # What they need was there when they began, see `beside`.
            with self._side.as_current():
                while len(self._begun) > leave:
                    self._finish_one()

    def _finish_one(self) -> None:
        finish, work = self._begun.popleft()
        finish()
        if work is not None:
            self._finished.append(work)

    def _close(self, *, leave: int) -> None:
        while len(self._finished) > leave:
            self._finished.popleft().close()
