"""Python stacks as a reader wants them: without the frames that every worker has."""

from __future__ import annotations

import re

_OWN_FRAME = re.compile(r'^\s+File ".*[/\\]zeroshard_testing[/\\]worker\.py"', re.MULTILINE)
_OWN_THREAD = re.compile(r'[/\\]zeroshard_testing[/\\]process_group\.py", line \d+ in _reap')


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
