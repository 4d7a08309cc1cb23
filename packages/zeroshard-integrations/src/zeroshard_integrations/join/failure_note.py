"""A note in the process group's store: which rank of a Join block failed first, and why.

The other ranks may be inside a collective that this rank will never join, where no message reaches them. When that has
timed out, or the connection is gone, they find the note.
"""

from __future__ import annotations

import json
import weakref
from contextlib import suppress

import torch.distributed as dist

_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class FailureNote:
    """The note of one block. All ranks make one when they enter it; nothing here is a collective.

    Args:
        group: the ranks' process group.
        rank: this rank in it.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        number = _blocks[group] = _blocks.get(group, 0) + 1
        self._group, self._rank, self._key = group, rank, f"zeroshard/join/{number}"

    def leave(self, error: BaseException) -> None:
        """Write down that this rank has failed, unless another one has before."""
        text = json.dumps([self._rank, f"{type(error).__name__}: {error}"])
        # The store may be gone with the rank that keeps it.
        with suppress(Exception):
            self._group.get_group_store().compare_set(self._key, "", text)

    def read(self) -> tuple[int, str] | None:
        """Return which rank failed first, and its error in words; None if nobody has, or it cannot be found out."""
        with suppress(Exception):
            store = self._group.get_group_store()
            if store.check([self._key]):
                rank, text = json.loads(store.get(self._key))
                return int(rank), str(text)
        return None
