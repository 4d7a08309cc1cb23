"""Threads that a test has started and left behind. Runs in workers only."""

from __future__ import annotations

import sys
import threading
import time

from zeroshard_testing.stacks import OWN_THREADS, python_stacks
from zeroshard_testing.waits import Waits

# A pool of threads that has just been let go of needs a moment to end, in seconds.
_GRACE = 1.0


class Leftovers:
    """The threads that were there when a test began.

    Args:
        waits: Knows which threads wait for other ranks.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._before = set(threading.enumerate())

    def describe(self) -> tuple[str, str] | None:
        """Return what threads the test has left, in one line, with their stacks; None if there are none.

        A daemon thread may live on, as those of progress bars do, unless it waits for other ranks.
        """
        new = [
            thread
            for thread in threading.enumerate()
            if thread not in self._before and not thread.name.startswith(OWN_THREADS)
        ]
        waiting = self._waits.of_threads()
        deadline = time.monotonic() + _GRACE
        left = []
        for thread in new:
            if not thread.daemon or thread.ident in waiting:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    left.append(thread)
        if not left:
            return None
        names = ", ".join(repr(thread.name) for thread in left)
        frames = sys._current_frames()
        stacks = python_stacks({thread.ident: frames[thread.ident] for thread in left if thread.ident in frames})
        return f"left {'a thread' if len(left) == 1 else 'threads'} running: {names}", stacks
