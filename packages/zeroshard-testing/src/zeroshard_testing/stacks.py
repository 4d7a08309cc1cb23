"""Python stacks as a reader wants them: without the frames and threads that every worker has."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Mapping
from types import FrameType

OWN_THREADS = "ranks-harness-"
"""How the names of this package's own threads begin."""

_BELOW_THE_TEST = re.compile(
    r"[/\\]zeroshard_testing[/\\](worker|execution|rank_plugin|call_item)\.py|[/\\]_pytest[/\\]|[/\\]pluggy[/\\]"
)
_OWN_FRAME = re.compile(rf'^\s+File ".*({_BELOW_THE_TEST.pattern})', re.MULTILINE)
_OWN_THREAD = re.compile(
    r"[/\\]zeroshard_testing[/\\](process_group\.py\", line \d+ in _reap|reader\.py\", line \d+ in _)"
)
_ABOVE_THE_WAIT = re.compile(r"[/\\]zeroshard_testing[/\\](wait_recorder|collectives)\.py$")


def python_stacks(frames: Mapping[int, FrameType]) -> str:
    """Render the stacks of this process's threads, the one that runs the test first.

    Args:
        frames: Innermost frame of each thread, as from `sys._current_frames`.

    Returns:
        A block for each thread that is not this package's own, most recent call last, with lines of source.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    blocks = []
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main):
        name = threads[ident].name if ident in threads else f"thread {ident}"
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


def readable_stacks(text: str) -> str:
    """Leave out this package's threads and the frames below the test.

    Args:
        text: What `faulthandler` wrote: a block for each thread, most recent call first.

    Returns:
        The same for what is left.
    """
    blocks = [block for block in re.split(r"\n\s*\n", text.strip()) if not _is_noise(block)]
    return "\n\n".join(_above_worker(block) for block in blocks)


def _is_noise(block: str) -> bool:
    return block.startswith("Extension modules:") or _OWN_THREAD.search(block) is not None


def _above_worker(block: str) -> str:
    own = _OWN_FRAME.search(block)
    if own is None or block[: own.start()].count("\n") < 2:
        return block
    return block[: own.start()].rstrip()
