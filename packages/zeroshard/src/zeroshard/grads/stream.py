"""Work beside backward: a thread or a fixed order for reductions, and a stream of its own on an accelerator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

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


Job = Callable[[], None]


class Worker:
    """Runs jobs one after another, in the order of :meth:`submit`, in a thread that lives only while there are jobs.

    So no thread ever waits for a job, and none outlives a backward. After a job has raised, the others are
    still run: each decides itself whether it can do anything. Any thread may call any method.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, job: Job) -> None:
        """Run a job after those submitted before, and return at once.

        Raises:
            RuntimeError: if no thread can be started; the job will not be run.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._jobs.append(job)

    def drain(self) -> None:
        """Wait until all jobs have been run.

        Raises:
            BaseException: the first that a job has raised since the last call.
        """
        with self._changed:
            while self._thread is not None:
                self._changed.wait()
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - any error is raised by drain()
                if self._failure is None:
                    self._failure = error
            del job


class ReductionQueue:
    """Finishes reductions in the order in which they began: in a worker thread, or when :meth:`finish` is called.

    Args:
        rank: of the thread, for its name.
        device: where buckets are.
        uses_thread: whether there is a thread. Else all ranks do the same in the same order, whatever has arrived, and
            on an accelerator everything is queued on a side stream.
    """

    def __init__(self, rank: int, device: torch.device, *, uses_thread: bool) -> None:
        self._uses_thread, self._side = uses_thread, SideStream(device)
        self._worker = Worker(f"zeroshard rank {rank}")
        self._begun: deque[tuple[Job, BucketReduceWork | None]] = deque()
        self._finished: deque[BucketReduceWork] = deque()

    def add(self, finish: Job, work: BucketReduceWork | None) -> None:
        """Take in a reduction that has begun.

        Args:
            finish: called when it is its turn.
            work: closed some time after that, if there is any.
        """
        self._begun.append((finish, work))
        if self._uses_thread:
            self._worker.submit(self._finish_next)

    def beside(self) -> AbstractContextManager[object]:
        """While the block runs, queue work where reductions are finished: beside what computes gradients."""
        return self._side.after_current()

    def finish(self, *, leave: int) -> None:
        """Finish all but the last few; a no-op if a thread does that."""
        if self._uses_thread or len(self._begun) <= leave:
            return
        # What they need was there when they began, see `beside`.
        with self._side.as_current():
            while len(self._begun) > leave:
                self._finish_one()

    def drain(self) -> None:
        """Wait until all is done; on an accelerator, order the current stream after that.

        Raises:
            BaseException: the first that a reduction has raised.
        """
        try:
            self._worker.drain()
            self.finish(leave=0)
            self._close(leave=0)
            self._side.join()
        finally:
            self._begun.clear()
            self._finished.clear()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that is used here until it is no longer used."""
        self._side.keep(tensor)

    def _finish_next(self) -> None:
        """Finish one, and close one from some buckets before: the next one needs the memory of its packed messages."""
        self._finish_one()
        self._close(leave=2)

    def _finish_one(self) -> None:
        finish, work = self._begun.popleft()
        finish()
        if work is not None:
            self._finished.append(work)

    def _close(self, *, leave: int) -> None:
        while len(self._finished) > leave:
            self._finished.popleft().close()
