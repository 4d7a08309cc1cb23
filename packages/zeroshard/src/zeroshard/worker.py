"""A thread that works while backward computes, and that is gone as soon as it has nothing to do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class Worker:
    """Runs jobs one after another, in the order of :meth:`submit`, in a thread that lives only while there are any.

    So no thread waits for its next job anywhere, and none outlives a backward. After a job has raised, the others are
    still run: each decides itself whether it can do anything. Any thread may call any method.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._runs = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, job: Job) -> None:
        """Run a job behind those submitted before, and return at once."""
        with self._changed:
            self._jobs.append(job)
            if self._runs:
                return
            self._runs = True
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Wait until all jobs have been run.

        Raises:
            BaseException: the first that a job has raised since the last call.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._runs)
            thread, self._thread = self._thread, None
            failure, self._failure = self._failure, None
        if thread is not None:
            thread.join()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._runs = False
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where it can be handled
                if self._failure is None:
                    self._failure = error
            del job
