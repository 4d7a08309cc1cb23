"""A plugin for pytest that writes what each test on ranks takes of processor time; `emulated.py` loads it.

Each rank appends to a file of its own, ``$ZEROSHARD_TEST_TIMES`` with its process id: seconds of all its threads since
the end of the test before, and the test's name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

_last = time.process_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Time a test on a rank; in pytest's own process, which only waits, there is nothing to time."""
    global _last
    try:
        return (yield)
    finally:
        now = time.process_time()
        if item.config.pluginmanager.has_plugin("zeroshard-rank"):
            with Path(f"{os.environ['ZEROSHARD_TEST_TIMES']}.{os.getpid()}").open("a") as file:
                file.write(f"{now - _last} {item.name}\n")
        _last = now
