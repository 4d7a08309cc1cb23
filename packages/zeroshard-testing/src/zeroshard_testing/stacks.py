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
_OWN_FRAME = re.compile(rf'^\s+File ".*({_BELOW_THE_TEST.pattern})', re.MULTILINE)
_NOISE = re.compile(
    r"^Extension modules:"
    r"|[/\\]zeroshard_testing[/\\](process_group\.py\", line \d+ in _reap|reader\.py\", line \d+ in _)"
)
_ABOVE_THE_WAIT = re.compile(r"[/\\]zeroshard_testing[/\\](wait_recorder|groups_begun|collectives)\.py$")


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
    """Leave this package's threads and the frames below the test out of what `faulthandler` wrote."""
    blocks = [block for block in re.split(r"\n\s*\n", text.strip()) if not _NOISE.search(block)]
    return "\n\n".join(_above_worker(block) for block in blocks)


def _above_worker(block: str) -> str:
    own = _OWN_FRAME.search(block)
    above = block if own is None else block[: own.start()]
    return block if above.count("\n") < 2 else above.rstrip()
