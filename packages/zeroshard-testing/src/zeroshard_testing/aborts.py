"""Makes a rank report its state before C++ aborts it, as gloo does if tensors differ: the state explains the abort."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

# Longest time, in seconds, for a process to report: C++ may hold a lock that it needs.
_TIMEOUT = 3

_libc = ctypes.CDLL(None)
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[object] = []


def call_before_abort(speak: Callable[[], object]) -> None:
    """Call a function when SIGABRT is about to end this process, in the thread that raised it.

    Python's own handlers run in the main thread, which then waits in C++. The handler of `faulthandler`, which must be
    enabled after this call, calls the handler that it finds. Processes that a test forks from this one do not report.
    """
    pid = os.getpid()

    def abort(_: int) -> None:
        _libc.signal(signal.SIGABRT, None)
        try:
            if os.getpid() == pid:
                _libc.signal(signal.SIGALRM, ctypes.cast(_libc.abort, ctypes.c_void_p))
                _libc.alarm(_TIMEOUT)
                speak()
        finally:
            os.abort()

    handler = _Handler(abort)
    _libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    _handlers.append(handler)
