"""Renders Python stacks without the frames and threads that every worker has."""

from __future__ import annotations

import gc
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

OWN_THREADS = "ranks-harness-"
"""The prefix of the names of this package's threads."""

OWN_CODE = str(Path(__file__).parent)
"""The folder of this package, which has wrappers of torch's functions."""

_BELOW_THE_TEST = re.compile(
    r"[/\\]zeroshard_testing[/\\](worker|execution|rank_plugin)\.py|[/\\]_pytest[/\\]|[/\\]pluggy[/\\]"
)
_FRAMES_BELOW = re.compile(rf'^ +File "[^"\n]*({_BELOW_THE_TEST.pattern}).*\n?(^ +File .*\n?)*', re.MULTILINE)
_MODULES = re.compile(r"^Extension modules:.*", re.MULTILINE)
_DUMPED_FRAME = re.compile(r'^ +File "([^"\n]*)", line (\d+) in (.*)$', re.MULTILINE)
_ABOVE_THE_WAIT = re.compile(r"[/\\]zeroshard_testing[/\\]wait_recorder\.py$")


@contextmanager
def frames_of_threads() -> Iterator[Mapping[int, FrameType]]:
    """Yield the innermost frame of each other thread, by `threading.get_ident`.

    Enter it only after every other thread was seen to sleep. In Python 3.11, asking for a frame allocates an object,
    and that may start a collection in this thread. If a destructor then releases the global interpreter lock, as a
    process group's does, other threads run and return from the functions whose frames are being listed, and the process
    crashes or hangs. So there automatic collection is off during the block. Python 3.12 and later do not collect during
    an allocation.
    """
    thresholds = gc.get_threshold()
    if sys.version_info < (3, 12):
        # Not with gc.disable(), which tests use themselves.
        gc.set_threshold(0)
    try:
        frames = sys._current_frames()
        # Its own frame would keep all of them alive, in a cycle through its callers.
        del frames[threading.get_ident()]
        yield frames
    finally:
        if sys.version_info < (3, 12):
            gc.set_threshold(*thresholds)


def python_stacks() -> str:
    """Render the stacks of this process's threads except this package's own, the thread of the test first.

    All other threads must be known to wait, see `frames_of_threads`.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    with frames_of_threads() as frames:
        places = {ident: list(traceback.walk_stack(frame)) for ident, frame in frames.items()}
    blocks = []
    for ident, found in sorted(places.items(), key=lambda item: item[0] != main):
        name = names.get(ident, f"thread {ident}")
        if name.startswith(OWN_THREADS):
            continue
        title = "" if ident == main else f"Thread {name!r}:\n"
        blocks.append(title + _render(traceback.StackSummary.extract(reversed(found))))
    return "\n\n".join(block for block in blocks if block)


def dumped_stack(text: str) -> str:
    """Render the last stack that `faulthandler` wrote, as `python_stacks` does; empty if it wrote no frame."""
    latest = _DUMPED_FRAME.findall(text.rpartition("(most recent call first)")[2])
    return _render([traceback.FrameSummary(path, int(line), name) for path, line, name in reversed(latest)])


def _render(frames: Sequence[traceback.FrameSummary]) -> str:
    """Render the frames of a stack, the latest call last, without frames below the test and of the wait recorder."""
    own = [place for place, entry in enumerate(frames) if _BELOW_THE_TEST.search(entry.filename)]
    entries = frames[own[-1] + 1 :] if own else frames
    shown = [entry for entry in entries if not _ABOVE_THE_WAIT.search(entry.filename)]
    return "".join(traceback.format_list(shown)).rstrip()


def is_below_the_test(path: str) -> bool:
    """Return True for files of pytest, and of this package's code that calls tests, whose frames are below the test."""
    return _BELOW_THE_TEST.search(path) is not None


def is_harness(path: str) -> bool:
    """Return True for files of pytest and of this package."""
    return path.startswith(OWN_CODE) or is_below_the_test(path)


def readable_stacks(text: str) -> str:
    """Remove the frames below the test from a stack of `faulthandler`, unless it has no others."""
    whole = _MODULES.sub("", text)
    above = _FRAMES_BELOW.sub("", whole)
    return (above if ' File "' in above else whole).strip()
