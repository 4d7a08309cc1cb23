"""Readable Python stacks: without the frames and threads that every worker has."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from pathlib import Path

OWN_THREADS = "ranks-harness-"
"""How the names of this package's own threads begin."""

OWN_CODE = str(Path(__file__).parent)
"""The folder of this package, in which wrappers of torch's functions are."""

_BELOW_THE_TEST = re.compile(
    r"[/\\]zeroshard_testing[/\\](worker|execution|rank_plugin)\.py|[/\\]_pytest[/\\]|[/\\]pluggy[/\\]"
)
_FRAMES_BELOW = re.compile(rf'^ +File "[^"\n]*({_BELOW_THE_TEST.pattern}).*\n?(^ +File .*\n?)*', re.MULTILINE)
_MODULES = re.compile(r"^Extension modules:.*", re.MULTILINE)
_ABOVE_THE_WAIT = re.compile(r"[/\\]zeroshard_testing[/\\]wait_recorder\.py$")


def python_stacks() -> str:
    """Render the stacks of this process's threads but this package's own, the one that runs the test first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    blocks = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, f"thread {ident}")
        if ident == threading.get_ident() or name.startswith(OWN_THREADS):
            continue
        lines = traceback.format_list(_users_part(traceback.extract_stack(frame)))
        title = "" if ident == main else f"Thread {name!r}:\n"
        blocks.append(title + "".join(lines).rstrip())
    return "\n\n".join(block for block in blocks if block)


def _users_part(summary: traceback.StackSummary) -> list[traceback.FrameSummary]:
    own = [place for place, entry in enumerate(summary) if _BELOW_THE_TEST.search(entry.filename)]
    entries = summary[own[-1] + 1 :] if own else list(summary)
    return [entry for entry in entries if not _ABOVE_THE_WAIT.search(entry.filename)]


def is_below_the_test(path: str) -> bool:
    """Whether a file holds frames below the test: of pytest, or of this package as it calls one."""
    return _BELOW_THE_TEST.search(path) is not None


def is_harness(path: str) -> bool:
    """Whether a file is pytest's or this package's."""
    return path.startswith(OWN_CODE) or is_below_the_test(path)


def readable_stacks(text: str) -> str:
    """Leave the frames below the test out of what `faulthandler` wrote, unless there are no others."""
    whole = _MODULES.sub("", text)
    above = _FRAMES_BELOW.sub("", whole)
    return (above if ' File "' in above else whole).strip()
