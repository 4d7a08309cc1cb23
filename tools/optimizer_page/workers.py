"""Processes that try optimizers, one after another, and that are replaced if a trial does not end."""

from __future__ import annotations

import multiprocessing
import threading

from optimizer_page.trials import serve

LIMIT = 300.0
"""Seconds that a trial may take."""
_own = threading.local()


class Worker:
    """A process that answers questions. If it has to be killed, another one replaces it.

    Args:
        limit: how many seconds an answer may take, including the import of a package.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._start()

    def ask(self, question: object) -> object:
        """Return the answer of :func:`serve`, or the reason, as a string, if there is no answer in time."""
        try:
            self._connection.send(question)
            if self._connection.poll(self.limit):
                return self._connection.recv()
            problem = f"no end within {self.limit:g} s"
        except (EOFError, OSError):
            problem = "its process has ended"
        self.close()
        self._start()
        return problem

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def ask(question: object) -> object:
    """Ask the worker of this thread, see :meth:`Worker.ask`; it ends with this process."""
    if not hasattr(_own, "worker"):
        _own.worker = Worker(LIMIT)
    worker: Worker = _own.worker
    return worker.ask(question)
